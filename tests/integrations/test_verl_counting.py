"""Counting in verl's batches.

The faults to notice: the reward of a response without a token in the loss is part of the statistics of the others; a
session whose last output has no token in the loss loses its advantage; rows that verl's v1 trainer appends to make a
batch divisible count as responses.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

import grpo_kernels as gk
from tests.integrations import tiny_verl
from tests.integrations.test_verl_correction import CONFIGS
from tests.ops.policy_loss import test_peers_verl as of_losses
from tests.ops.sampling_correction.cases import make_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1 import utils as v1

    from grpo_kernels.integrations.verl import advantages, patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl.advantages import PRESETS

WIDTH = 6
REWARDS = [100.0, 3.0, 1.0, 2.5, 7.0, -4.0, 5.0]
LENGTHS = [0, 4, 2, 6, 0, 3, 1]  # of the tokens in the loss
UIDS = [*"aaabbbb"]
EMBEDDINGS = torch.tensor([[1.0, 0.1], [1, 0], [0.6, 0.8], [0, 1], [0.7, 0.7], [0.1, 1], [1, 0]])
PAD = f"pad{0x5EED:032x}"
# one uid for all of a batch's pads
PADS = {"rewards": [0.0] * 3, "lengths": [0] * 3, "uids": [PAD] * 3}


@pytest.fixture
def patched() -> Iterator[None]:
    patch_verl(loss=False)
    yield
    unpatch_verl()


def data_of(rewards: Any, lengths: Any, uids: Any, **columns: Any) -> DataProto:
    """A trainer's batch with the reward at the last token of each response, whether or not it is in the loss."""
    tokens = torch.zeros(len(uids), WIDTH)
    tokens[:, -1] = torch.as_tensor(rewards, dtype=torch.float32)
    mask = (torch.arange(WIDTH) < torch.as_tensor(lengths)[:, None]).long()
    return tiny_verl.trainer_batch(tokens, mask, np.array(uids, dtype=object), **columns)


def columns_of(name: str, rows: Any = slice(None)) -> dict[str, Any]:
    """Further columns that an estimator reads."""
    if name == "similarity_group_grpo":
        return {"similarity_embeddings": EMBEDDINGS[rows].numpy()}
    if name == "fused_gdpo":
        return {"first": np.array(REWARDS)[rows], "second": np.array(REWARDS)[::-1][rows]}
    if name == "group_ppo":
        random = torch.Generator().manual_seed(0)
        return {"old_log_probs": -torch.rand(len(UIDS), WIDTH, generator=random)[rows]}
    return {}


def advantages_of(name: str, data: DataProto, **options: Any) -> Tensor:
    """Advantages of the tokens."""
    config: dict[str, Any] = {"gdpo_reward_keys": ["first", "second"]} if name == "fused_gdpo" else {}
    config |= {"grpo_kernels": options} if options else {}
    result: Tensor = ray_trainer.compute_advantage(data, name, config=config).batch["advantages"]
    return result


def test_a_baseline_is_of_responses_in_the_loss() -> None:
    data = data_of([100, 3, 1], [0, 2, 2], ["a"] * 3)
    assert advantages_of("fused_rloo", data)[:, 0].tolist() == [0, 2, -2]


@pytest.mark.parametrize("name", [*PRESETS, "group_ppo"])
def test_masked_responses_do_not_vote(patched: None, name: str) -> None:
    """The others' advantages are those of a batch without them."""
    got = advantages_of(name, data_of(REWARDS, LENGTHS, UIDS, **columns_of(name)))
    rows = [row for row, length in enumerate(LENGTHS) if length]
    rest = [np.array(values)[rows].tolist() for values in (REWARDS, LENGTHS, UIDS)]
    want = advantages_of(name, data_of(*rest, **columns_of(name, rows)))
    assert want.any() and torch.equal(got[rows], want)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("fused_gdpo", "similarity_group_grpo")])
def test_masked_responses_vote_as_in_verl_where_asked(name: str) -> None:
    own = {"fused_dr_grpo": "grpo"}.get(name, name.removeprefix("fused_"))
    data = [data_of(REWARDS, LENGTHS, UIDS) for _ in range(3)]
    want = ray_trainer.compute_advantage(data[0], own, norm_adv_by_std_in_grpo=name == "fused_grpo", config={})
    got = advantages_of(name, data[1], masked_rows="vote")
    torch.testing.assert_close(got, want.batch["advantages"], rtol=1e-5, atol=1e-5)
    # a response of no length weighs nothing in opo's baseline
    assert name == "fused_opo" or not torch.allclose(got, advantages_of(name, data[2]), rtol=1e-2)


def test_names_of_verls_own_keep_its_numbers(patched: None) -> None:
    got = advantages_of("grpo", data_of(REWARDS, LENGTHS, UIDS))
    unpatch_verl()
    want = advantages_of("grpo", data_of(REWARDS, LENGTHS, UIDS))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_rejected_responses_do_not_vote(patched: None) -> None:
    data = data_of([100, 3, 1], [2, 2, 2], ["a"] * 3)
    data.batch["old_log_probs"] = torch.zeros(3, WIDTH)
    data.batch["rollout_log_probs"] = torch.tensor([[3.0], [0.0], [0.0]]).expand(3, WIDTH).clone()
    config = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    data, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(data, config)
    assert advantages_of("fused_rloo", data)[:, 0].tolist() == [0, 2, -2]


def test_other_choices_are_refused(patched: None) -> None:
    choice = r"fused_grpo: algorithm\.grpo_kernels\.masked_rows must be one of leave_out, vote, got 'votes' \(did you "
    with pytest.raises(ValueError, match=choice):
        advantages_of("fused_grpo", data_of(REWARDS, LENGTHS, UIDS), masked_rows="votes")
    with pytest.raises(ValueError, match=r"'mask_rows' \(did you mean 'masked_rows'\?\)"):
        advantages_of("fused_grpo", data_of(REWARDS, LENGTHS, UIDS), mask_rows="vote")
    with pytest.raises(ValueError, match=r"group_ppo: keys of algorithm\.grpo_kernels .*, got 'masked_rows'"):
        advantages_of("group_ppo", data_of(REWARDS, LENGTHS, UIDS, **columns_of("group_ppo")), masked_rows="vote")


# ------------------------------------------------------------------------------------------------------- sessions

# Four sessions of two outputs; the last output of the first two has no token in the loss.
KEYS = [f"a_{session}_{output}" for session in range(4) for output in (0, 1)]
OF_LAST = torch.tensor([1.0, 1.0, 0.0, -1.0])
TOKENS = [3, 0, 1, 0, 2, 4, 5, 1]


def of_sessions(name: str, data: DataProto, keys: list[str], **options: Any) -> Tensor:
    config = {"grpo_kernels": options} if options else {}
    result: Tensor = v1.compute_advantage_for_multi_trajectories(data, keys, name, config=config).batch["advantages"]
    return result


def sessions(lengths: list[int], rewards: Tensor = OF_LAST) -> DataProto:
    """Rewards are those of the last outputs; the others have one that must not count."""
    both = torch.stack([torch.full_like(rewards, 50.0), rewards], 1).flatten()
    return data_of(both, lengths, ["a"] * len(both))


@pytest.mark.parametrize("name", ["fused_grpo", "fused_rloo", "fused_gpg"])
def test_a_session_keeps_its_advantage_if_its_last_output_is_masked(patched: None, name: str) -> None:
    got = of_sessions(name, sessions(TOKENS), KEYS)
    want = gk.group_advantages(OF_LAST, 4, config=PRESETS[name]).advantages.repeat_interleave(2)
    mask = torch.arange(WIDTH) < torch.tensor(TOKENS)[:, None]
    assert torch.equal(got, want[:, None] * mask)


def test_a_session_without_tokens_does_not_vote(patched: None) -> None:
    rewards = torch.tensor([100.0, 3.0, 1.0])
    got = of_sessions("fused_rloo", sessions([0, 0, 1, 0, 2, 2], rewards), KEYS[:6])
    assert got[:, 0].tolist() == [0, 0, 2, 0, -2, -2]
    got = of_sessions("fused_rloo", sessions([0, 0, 1, 0, 2, 2], rewards), KEYS[:6], masked_rows="vote")
    assert got[:, 0].tolist() == [0, 0, -47.5, 0, -50.5, -50.5]


def test_the_length_of_a_session_is_that_of_all_its_outputs(patched: None) -> None:
    got = of_sessions("fused_opo", sessions(TOKENS), KEYS)
    lengths = torch.tensor(TOKENS).view(4, 2).sum(1)
    want = OF_LAST - (lengths * OF_LAST).sum() / lengths.sum()
    torch.testing.assert_close(got[::2, 0], want, rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- pads


def padded(rewards: list[float], lengths: list[int], uids: list[str], **columns: Any) -> DataProto:
    return data_of(rewards + PADS["rewards"], lengths + PADS["lengths"], uids + PADS["uids"], **columns)


def test_pads_have_the_uid_that_verl_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo import padding_utils

    stored: dict[str, Any] = {}
    sample = {"uid": "a", "responses": torch.ones(2), "response_mask": torch.ones(2)}
    queue = type("Queue", (), {"kv_batch_get": lambda **_: [sample], "kv_batch_put": stored.update})
    monkeypatch.setattr(padding_utils, "tq", queue)
    monkeypatch.setattr(padding_utils, "list_of_dict_to_tensordict", lambda rows: rows)
    batch = padding_utils.KVBatchMeta(keys=["a_0_0"], tags=[{}], partition_id="train")
    upsample_batch_to_divisible_size(batch, 3, 1)
    uids = np.array(["a", *(row["uid"] for row in stored["fields"])], dtype=object)
    counts = torch.tensor([0, *(int(row["response_mask"].sum()) for row in stored["fields"])])
    assert advantages.is_pad(uids, counts).tolist() == [False, True, True]


@pytest.mark.parametrize("choice", ["leave_out", "vote"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("fused_gdpo", "similarity_group_grpo")])
def test_pads_are_no_responses(name: str, choice: str) -> None:
    want = advantages_of(name, data_of(REWARDS, LENGTHS, UIDS), masked_rows=choice)
    got = advantages_of(name, padded(REWARDS, LENGTHS, UIDS), masked_rows=choice)
    assert torch.equal(got[:7], want) and not got[7:].any()


def test_pads_do_not_raise_the_advantages_of_gpg(patched: None) -> None:
    data = padded([6.0, 0.0, 0.0], [2, 2, 2], ["a"] * 3)
    keys = ["a_0_0", "a_1_0", "a_2_0", *(f"{PAD}_{i}_0" for i in range(3))]
    # three responses, of which one has a reward
    assert of_sessions("fused_gpg", data, keys)[:, 0].tolist() == [12, -6, -6, 0, 0, 0]


def test_pads_beside_sessions_of_several_outputs(patched: None) -> None:
    keys = KEYS + [f"{PAD}_{i}_0" for i in range(3)]
    both = torch.stack([torch.full((4,), 50.0), OF_LAST], 1).flatten().tolist()
    for choice in ("leave_out", "vote"):
        got = of_sessions("fused_gpg", padded(both, TOKENS, ["a"] * 8), keys, masked_rows=choice)
        assert torch.equal(got[:8], of_sessions("fused_gpg", sessions(TOKENS), KEYS)) and not got[8:].any()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pads_are_in_no_metric_of_the_correction(patched: None, config: Any) -> None:
    batch = make_batch(2)
    tensors = {
        "old_log_probs": batch.old.float(),
        "rollout_log_probs": batch.sampling.float(),
        "response_mask": batch.mask.long(),
    }
    count = len(batch.mask)
    results = []
    for pads in (0, 3):
        rows = {name: torch.cat([value, value.new_zeros(pads, value.shape[1])]) for name, value in tensors.items()}
        uids = np.array(["a"] * count + [PAD] * pads, dtype=object)
        data = DataProto.from_dict(tensors=rows, non_tensors={"uid": uids})
        results.append(rollout_corr_helper.compute_rollout_correction_and_add_to_batch(data, config))
    (want, their_metrics), (got, metrics) = results
    assert metrics == their_metrics
    for name, value in want.batch.items():
        assert torch.equal(got.batch[name][:count], value) and not got.batch[name][count:].any(), name


@pytest.mark.parametrize("aggregation", of_losses.VERL_AGGREGATIONS)
@pytest.mark.parametrize("mode", [mode for mode in of_losses.MODES if mode != "geo_mean"])
def test_pads_are_no_rows_of_a_loss(mode: str, aggregation: str) -> None:
    """Without a global count, which includes them; geo_mean then counts all rows, as verl's does."""
    batch = of_losses.make_batch()
    config = of_losses.actor(of_losses.fields_of(mode, aggregation))
    values = []
    for pads in (0, 2):
        rows = [
            torch.cat([value, value.new_zeros(pads, value.shape[1])])
            for value in (batch[key] for key in ("old_logprobs", "logprobs", "advantages", "mask"))
        ]
        rows[1].requires_grad_()
        loss, metrics = core_algos.get_policy_loss_fn(f"fused_{mode}")(*rows, aggregation, config)
        (gradient,) = torch.autograd.grad(loss, rows[1])
        values.append((loss.detach(), gradient[: len(batch["mask"])], metrics))
    torch.testing.assert_close(values[1][:2], values[0][:2], rtol=1e-12, atol=1e-15)
    assert values[1][2] == pytest.approx(values[0][2], rel=1e-12)
