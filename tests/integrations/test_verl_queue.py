"""verl's v1 trainer with a real queue: columns that it does not ask for; and thresholds in verl's checkpoints."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

import grpo_kernels as gk
from tests.integrations import tiny_verl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from grpo_kernels.integrations.verl import advantages, checkpoints, patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl.queue import QUEUED

assert tiny_verl
LENGTHS = (3, 5, 2, 4, 4, 1, 6, 3)
UIDS = [*"aaaabbbb"]


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,  # the queue's actors ask for cores of their own; they hardly use them
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=80 * 2**20,
    )
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield transfer_queue
    transfer_queue.close()
    ray.shutdown()
    os.environ.pop("RAY_USAGE_STATS_ENABLED") if before is None else os.environ.update(RAY_USAGE_STATS_ENABLED=before)


@pytest.fixture
def patched() -> Iterator[None]:
    patch_verl(loss=False)
    yield
    unpatch_verl()


def nested(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def compute(batch: Any, estimator: str, **options: Any) -> Any:
    """The trainer's method without a trainer, whose constructor starts a cluster of workers."""
    algorithm = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False, **options}
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}})
    return PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})


def put(partition: str, scores: Tensor, extras: list[dict[str, Any]], outputs: int = 1, **columns: Any) -> Any:
    """Columns that verl's agent loop and actor have stored when advantages are due."""
    random = torch.Generator().manual_seed(0)
    rewards = [torch.cat([torch.zeros(n - 1), score[None]]) for n, score in zip(LENGTHS, scores, strict=True)]
    fields = {
        "uid": NonTensorStack(*UIDS),
        "response_mask": nested([torch.ones(n, dtype=torch.long) for n in LENGTHS]),
        "rm_scores": nested(rewards),
        "old_log_probs": nested([-torch.rand(n, generator=random) for n in LENGTHS]),
        "rollout_log_probs": nested([-torch.rand(n, generator=random) for n in LENGTHS]),
        "extra_fields": NonTensorStack(*({"reward_extra_info": extra} for extra in extras)),
        **columns,
    }
    keys = [f"{uid}_{i // outputs}_{i % outputs}" for i, uid in enumerate(UIDS)]
    return transfer_queue.kv_batch_put(
        keys=keys, partition_id=partition, fields=TensorDict(fields, batch_size=len(UIDS)), tags=[{}] * len(UIDS)
    )


def advantages_in(queue: Any, batch: Any) -> list[Tensor]:
    held = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
    return list(held["advantages"].unbind())


def assert_of_responses(got: list[Tensor], want: Tensor) -> None:
    for values, length, value in zip(got, LENGTHS, want, strict=True):
        torch.testing.assert_close(values, value.expand(length), rtol=1e-6, atol=1e-6)


SCORES = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 1.0])
LABELS = [0, 0, 1, 1, 0, 1, 1, 0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["returned", "column"])
def test_labels_of_similar_responses(queue: Any, patched: None, kind: str) -> None:
    """Returned by the reward function beside the score, or put into the queue by a worker."""
    extras: list[dict[str, Any]] = [{}] * 8
    columns = {}
    if kind == "returned":
        extras = [{"similarity_labels": label} for label in LABELS]
    else:
        columns = {"similarity_labels": torch.tensor(LABELS)}
    batch = put(f"labels-{kind}", SCORES, extras, **columns)
    got = advantages_in(queue, compute(batch, "similarity_group_grpo"))
    ids = torch.tensor([ord(uid) for uid in UIDS])
    want = gk.group_advantages(SCORES, ids, subgroups=torch.tensor(LABELS), config="grpo").advantages
    assert want.abs().sum() > 0
    assert_of_responses(got, want)


@pytest.mark.full
def test_embeddings_of_similar_responses(queue: Any, patched: None) -> None:
    embeddings = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2, 1, 1])] + 0.01
    extras = [{"similarity_embeddings": row} for row in embeddings.tolist()]
    batch = put("embeddings", SCORES, extras)
    got = advantages_in(queue, compute(batch, "similarity_group_grpo"))
    ids = torch.tensor([ord(uid) for uid in UIDS])
    labels = gk.similarity_groups(embeddings, ids).labels
    assert_of_responses(got, gk.group_advantages(SCORES, ids, subgroups=labels, config="grpo").advantages)


def test_several_rewards(queue: Any, patched: None) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 1.0], [0.0, 3.0, 1.0, 2.0, 1.0, 1.0, 5.0, 0.0]]).T
    extras = [{"acc": float(a), "style": float(b)} for a, b in rewards]
    batch = put("rewards", SCORES, extras)
    options = {"gdpo_reward_keys": ["acc", "style"], "gdpo_reward_weights": [1.0, 0.5]}
    got = advantages_in(queue, compute(batch, "fused_gdpo", **options))
    data = tiny_verl.trainer_batch(
        torch.nested.to_padded_tensor(nested([torch.zeros(n) for n in LENGTHS]), 0.0),
        torch.arange(6) < torch.tensor(LENGTHS)[:, None],
        np.array(UIDS, dtype=object),
        acc=rewards[:, 0].numpy().astype(object),
        style=rewards[:, 1].numpy().astype(object),
    )
    from verl.trainer.ppo import ray_trainer

    want = ray_trainer.compute_advantage(data, "fused_gdpo", config=OmegaConf.create(options)).batch["advantages"]
    assert want.abs().sum() > 0
    for values, row, length in zip(got, want, LENGTHS, strict=True):
        torch.testing.assert_close(values, row[:length], rtol=1e-6, atol=1e-6)


def test_what_the_queue_does_not_hold(queue: Any, patched: None) -> None:
    batch = put("absent", SCORES, [{}] * 8)
    with pytest.raises(ValueError, match=r"either 'similarity_labels' or .*, got neither"):
        compute(batch, "similarity_group_grpo")
    with pytest.raises(ValueError, match=r"every one of gdpo_reward_keys, got \['uid'\] without 'acc'"):
        compute(batch, "fused_gdpo", gdpo_reward_keys=["acc"])
    assert QUEUED.get() is None  # the next batch does not find this one


def test_sessions_take_the_columns_of_their_last_output(queue: Any, patched: None) -> None:
    extras = [{"similarity_labels": label} for label in LABELS]
    batch = put("sessions", SCORES, extras, outputs=2)
    got = advantages_in(queue, compute(batch, "similarity_group_grpo"))
    last = torch.tensor([1, 3, 5, 7])
    ids = torch.tensor([ord(uid) for uid in UIDS])[last]
    of_last = gk.group_advantages(SCORES[last], ids, subgroups=torch.tensor(LABELS)[last], config="grpo").advantages
    assert_of_responses(got, of_last.repeat_interleave(2))


def test_segments_reach_the_actor(queue: Any, patched: None) -> None:
    batch = put("segments", SCORES, [{}] * 8)
    updated = compute(batch, "group_ppo", grpo_kernels={"group_max_size": 1})
    assert "segment_ids" in updated.fields  # what the actor is handed
    held = queue.kv_batch_get(keys=updated.keys, partition_id="segments", select_fields=["segment_ids"])["segment_ids"]
    rows = [row.tolist() for row in held.unbind()]
    assert rows == [[*range(length)] for length in LENGTHS]


def test_lengths_of_sessions_reach_the_actor(queue: Any, patched: None) -> None:
    """With the estimators of verl, too; and the correction finds the sessions."""
    batch = put("lengths", SCORES, [{}] * 8, outputs=2)
    updated = compute(batch, "grpo", rollout_correction={"rollout_is": "sequence"})
    names = ["session_tokens", "rows_per_session", "rollout_is_weights"]
    assert set(names) <= set(updated.fields)
    held = queue.kv_batch_get(keys=updated.keys, partition_id="lengths", select_fields=names)
    assert held["session_tokens"].flatten().tolist() == [8, 8, 6, 6, 5, 5, 9, 9]
    assert held["rows_per_session"].flatten().tolist() == [2.0] * 8
    weights = [row[0].item() for row in held["rollout_is_weights"].unbind()]
    assert weights[::2] == weights[1::2] and len(set(weights)) > 1
    plain = compute(put("rows", SCORES, [{}] * 8), "grpo")
    assert not set(names) & set(plain.fields)


# --------------------------------------------------------------------------------------------------- checkpoints


def resuming(folder: Path, step: int, **settings: Any) -> Any:
    """The parts of a trainer that a checkpoint reads."""
    fields = {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None, **settings}
    config = OmegaConf.create({"trainer": fields, "algorithm": {"adv_estimator": "group_ppo"}})
    return SimpleNamespace(config=config, global_steps=step)


@pytest.mark.parametrize("kind", [PPOTrainer, RayPPOTrainer])
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_thresholds_are_saved_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, mode: str) -> None:
    def load(self: Any) -> None:
        self.global_steps = 7

    monkeypatch.setattr(kind, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(kind, "_load_checkpoint", load)
    patch_verl(loss=False)
    try:
        settings = gk.SegmentConfig(gamma=0.9, threshold_lr=0.07)
        threshold = gk.SegmentThreshold(settings)
        threshold.value *= 1.1
        advantages.thresholds[settings] = threshold
        kind._save_checkpoint(resuming(tmp_path, 7))
        assert json.loads((tmp_path / "global_step_7" / checkpoints.FILE).read_text())[0]["config"]["gamma"] == 0.9
        advantages.thresholds.clear()
        path = str(tmp_path / "global_step_7") if mode == "resume_path" else None
        kind._load_checkpoint(resuming(tmp_path, 0, resume_mode=mode, resume_from_path=path))
        assert {config: loaded.value for config, loaded in advantages.thresholds.items()} == {settings: threshold.value}
    finally:
        unpatch_verl()


def test_a_checkpoint_without_thresholds_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    patch_verl(loss=False)
    try:
        PPOTrainer._load_checkpoint(resuming(tmp_path, 0))  # from scratch: nothing to say
        assert not caplog.records
        PPOTrainer._load_checkpoint(resuming(tmp_path, 3))
    finally:
        unpatch_verl()
    assert "global_step_3" in caplog.text and "start from their settings" in caplog.text


def test_unpatch_restores_methods() -> None:
    before = [PPOTrainer._compute_advantage, PPOTrainer._save_checkpoint, RayPPOTrainer._load_checkpoint]
    patch_verl(loss=False)
    during = [PPOTrainer._compute_advantage, PPOTrainer._save_checkpoint, RayPPOTrainer._load_checkpoint]
    unpatch_verl()
    after = [PPOTrainer._compute_advantage, PPOTrainer._save_checkpoint, RayPPOTrainer._load_checkpoint]
    assert after == before and not any(a is b for a, b in zip(before, during, strict=True))
