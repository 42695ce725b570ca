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
from tests.integrations.tiny_verl import computed, trainer_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from grpo_kernels.integrations.verl import advantages, checkpoints, patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl.queue import QUEUED

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


@pytest.fixture(autouse=True)
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


SCORES = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 1.0])
NOTHING: list[dict[str, Any]] = [{}] * 8
EMBEDDINGS = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2, 1, 1])] + 0.01
IDS = torch.tensor([ord(uid) for uid in UIDS])


def held(batch: Any, *names: str) -> list[list[Tensor]]:
    """Columns of the batch in the queue, row by row."""
    of = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*names])
    return [list(of[name].unbind()) for name in names]


def assert_of_responses(batch: Any, want: Tensor) -> None:
    assert want.abs().sum() > 0
    for values, length, value in zip(held(batch, "advantages")[0], LENGTHS, want, strict=True):
        assert torch.equal(values, value.expand(length))


@pytest.mark.parametrize("kind", ["returned", "texts", "column", "embeddings", "sessions"])
def test_columns_of_similar_responses(queue: Any, kind: str) -> None:
    """Returned by the reward function beside the score, or put into the queue by a worker."""
    columns, rows = {}, torch.arange(8)
    labels = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0])
    if kind == "sessions":  # the labels of the last output count
        rows, labels = torch.tensor([1, 3, 5, 7]), torch.tensor([1, 0, 2, 0, 0, 1, 3, 1])
    extras: list[dict[str, Any]] = [{"similarity_labels": label} for label in labels.tolist()]
    if kind == "texts":
        extras = [{"similarity_group_labels": f"{uid}_{label}"} for uid, label in zip(UIDS, labels, strict=True)]
    if kind == "column":
        extras, columns = NOTHING, {"similarity_labels": labels}
    if kind == "embeddings":
        extras = [{"similarity_embeddings": row} for row in EMBEDDINGS.tolist()]
        labels = gk.similarity_groups(EMBEDDINGS, IDS).labels
    batch = put(f"labels-{kind}", SCORES, extras, outputs=8 // len(rows), **columns)
    want = gk.group_advantages(SCORES[rows], IDS[rows], subgroups=labels[rows], config="grpo").advantages
    assert_of_responses(compute(batch, "similarity_group_grpo"), want.repeat_interleave(8 // len(rows)))


def test_several_rewards(queue: Any) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 1.0], [0.0, 3.0, 1.0, 2.0, 1.0, 1.0, 5.0, 0.0]])
    batch = put("rewards", SCORES, [{"acc": float(a), "style": float(b)} for a, b in rewards.T])
    options = {"gdpo_reward_keys": ["acc", "style"], "gdpo_reward_weights": [1.0, 0.5]}
    got = compute(batch, "fused_gdpo", **options)
    columns = {name: values.numpy().astype(object) for name, values in zip(("acc", "style"), rewards, strict=True)}
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    data = trainer_batch(torch.zeros(8, 6), mask.long(), np.array(UIDS, dtype=object), **columns)
    assert_of_responses(got, computed("fused_gdpo", data, OmegaConf.create(options))["advantages"][:, 0])


def test_what_the_queue_does_not_hold(queue: Any) -> None:
    batch = put("absent", SCORES, NOTHING)
    with pytest.raises(ValueError, match=r"either 'similarity_labels' or .*, got neither"):
        compute(batch, "similarity_group_grpo")
    with pytest.raises(ValueError, match=r"every one of gdpo_reward_keys, got \['uid'\] without 'acc'"):
        compute(batch, "fused_gdpo", gdpo_reward_keys=["acc"])
    assert QUEUED.get() is None  # the next batch does not find this one


def test_segments_and_lengths_of_sessions_reach_the_actor(queue: Any) -> None:
    """The lengths with the estimators of verl, too; and the correction finds the sessions."""
    updated = compute(put("segments", SCORES, NOTHING), "group_ppo", grpo_kernels={"group_max_size": 1})
    assert "segment_ids" in updated.fields  # what the actor is handed
    assert [row.tolist() for row in held(updated, "segment_ids")[0]] == [[*range(length)] for length in LENGTHS]
    batch = put("lengths", SCORES, NOTHING, outputs=2)
    updated = compute(batch, "grpo", rollout_correction={"rollout_is": "sequence"})
    names = ["session_tokens", "rows_per_session", "rollout_is_weights"]
    assert set(names) <= set(updated.fields)
    tokens, rows, weights = held(updated, *names)
    assert [int(row) for row in tokens] == [8, 8, 6, 6, 5, 5, 9, 9]
    assert [float(row) for row in rows] == [2.0] * 8
    firsts = [row[0].item() for row in weights]
    assert firsts[::2] == firsts[1::2] and len(set(firsts)) > 1
    assert not set(names) & set(compute(put("rows", SCORES, NOTHING), "grpo").fields)


# --------------------------------------------------------------------------------------------------- checkpoints


def resuming(folder: Path, step: int, **settings: Any) -> Any:
    """The parts of a trainer that a checkpoint reads."""
    fields = {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None, **settings}
    config = OmegaConf.create({"trainer": fields, "algorithm": {"adv_estimator": "group_ppo"}})
    return SimpleNamespace(config=config, global_steps=step)


@pytest.mark.parametrize("kind", [PPOTrainer, RayPPOTrainer])
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_thresholds_are_saved_and_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, mode: str
) -> None:
    def load(self: Any) -> None:
        self.global_steps = self.config.trainer.get("loads", 7)

    unpatch_verl()
    monkeypatch.setattr(kind, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(kind, "_load_checkpoint", load)
    methods = [(PPOTrainer, "_compute_advantage"), (kind, "_save_checkpoint"), (kind, "_load_checkpoint")]
    before = [getattr(of, name) for of, name in methods]
    patch_verl(loss=False)
    settings = gk.SegmentConfig(gamma=0.9, threshold_lr=0.07)
    threshold = gk.SegmentThreshold(settings)
    threshold.value *= 1.1
    advantages.thresholds[settings] = threshold
    kind._save_checkpoint(resuming(tmp_path / "saved", 7))
    folder = tmp_path / "saved" / "global_step_7"
    assert json.loads((folder / checkpoints.FILE).read_text())[0]["config"]["gamma"] == 0.9
    advantages.thresholds.clear()
    path = {"resume_from_path": str(folder)} if mode == "resume_path" else {}
    kind._load_checkpoint(resuming(tmp_path / ("other" if path else "saved"), 0, resume_mode=mode, **path))
    assert {config: loaded.value for config, loaded in advantages.thresholds.items()} == {settings: threshold.value}
    kind._load_checkpoint(resuming(tmp_path, 0, loads=0))  # from scratch: nothing to say
    assert not caplog.records
    kind._load_checkpoint(resuming(tmp_path, 0, loads=3))
    assert "global_step_3" in caplog.text and "start from their settings" in caplog.text
    during = [getattr(of, name) for of, name in methods]
    unpatch_verl()
    assert [getattr(of, name) for of, name in methods] == before
    assert not any(ours is theirs for ours, theirs in zip(during, before, strict=True))
