"""Sessions of several outputs in verl's loss and rollout correction, against formulas in float64.

The faults to notice: the outputs of a session are counted one by one; a loss depends on how rows are dealt to
micro-batches or ranks; a batch without such sessions, or a mean over tokens, changes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

from omegaconf import OmegaConf

from tests.integrations import tiny_verl
from tests.integrations.test_verl_counting import PAD, WIDTH, data_of
from tests.ops.policy_loss import test_peers_verl as of_losses

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.protocol import DataProto
    from verl.trainer.ppo import ray_trainer, rollout_corr_helper
    from verl.trainer.ppo.v1 import utils as v1
    from verl.utils import tensordict_utils

    from grpo_kernels.integrations.verl import fused_ppo_loss, patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl.queue import QUEUED
    from grpo_kernels.integrations.verl.sessions import COLUMNS, ROWS, TOKENS

# of the six rows of tiny_verl's micro-batches; b_1 has no token in the loss
KEYS = ["a_0_0", "a_1_0", "a_0_1", "b_0_0", "b_1_0", "a_0_2"]
SESSIONS = [[0, 2, 5], [1], [3], [4]]
SPLITS = ([range(6)], [[0, 1, 2], [3, 4, 5]], [[5], [0, 4], [3, 2, 1]])
BY_SEQUENCE = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    patch_verl(loss=False)
    yield
    unpatch_verl()


def columns_of(mask: Tensor, keys: list[str], name: Any = "fused_grpo") -> dict[str, Tensor]:
    """The columns that a batch of these keys gets with its advantages."""
    uids = np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)
    data = tiny_verl.trainer_batch(torch.rand(mask.shape), mask.long(), uids)
    data = v1.compute_advantage_for_multi_trajectories(data, keys, name, config={})
    return {name: data.batch[name] for name in COLUMNS if name in data.batch}


class Batch(NamedTuple):
    logprobs: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor


def batch_of_actor() -> Batch:
    random = torch.Generator().manual_seed(0)
    old, near, far, advantages, entropy = torch.randn(5, 6, 10, generator=random, dtype=torch.float64)
    mask = torch.arange(10) < torch.tensor(tiny_verl.LENGTHS)[:, None]
    mask[4], mask[0, 3:5] = False, False
    logprobs = -old.abs() - 1
    return Batch(logprobs, logprobs + 0.3 * near, logprobs + 0.3 * far, advantages, entropy.abs(), mask)


def accumulated(
    batch: Batch, fields: dict[str, Any], columns: dict[str, Tensor], split: Any = SPLITS[0], ranks: int = 1
) -> tuple[float, Tensor]:
    """The loss and its gradient over micro-batches, each by one of the ranks, whose gradients are averaged."""
    arguments = {
        "old_log_probs": batch.old,
        "advantages": batch.advantages,
        "response_mask": batch.mask,
        "ref_log_prob": batch.ref,
    }
    info = {"dp_size": ranks, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": 6}
    data = tiny_verl.micro_batch(arguments, True, **info)
    for name, column in columns.items():
        data[name] = column
    logprobs = batch.logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in split:
        rows = list(rows)
        output = {"log_probs": logprobs, "entropy": batch.entropy}
        output = {
            name: torch.nested.as_nested_tensor(
                [tiny_verl.model_output(value, True).unbind()[row] for row in rows], layout=torch.jagged
            )
            for name, value in output.items()
        }
        part = tensordict_utils.index_select_tensor_dict(data, rows)
        loss, _ = fused_ppo_loss(of_losses.actor(fields), output, part)
        total = total + loss / ranks
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient


def settings(mode: str, aggregation: str) -> dict[str, Any]:
    fields = of_losses.fields_of(mode, aggregation)
    return fields | {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coeff": 0.01}


def session_gspo(aggregation: str) -> dict[str, Any]:
    return settings("gspo", aggregation) | {"loss_mode": "fused_session_gspo"}


def expected(batch: Batch, aggregation: str, ratio_of_session: bool = False) -> tuple[float, Tensor]:
    """The mean over the four sessions, by a loop."""
    logprobs = batch.logprobs.clone().requires_grad_()
    log_ratio = logprobs - batch.old
    advantage = batch.advantages
    if ratio_of_session:  # its value, with the gradient of each token
        means = torch.zeros(6, dtype=torch.float64)
        for rows in SESSIONS[:3]:
            means[rows] = log_ratio.detach()[rows][batch.mask[rows]].mean()
        log_ratio = means[:, None] + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    term = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    if not ratio_of_session:
        term = torch.where(advantage < 0, torch.min(term, -3 * advantage), term)
    away = batch.ref - logprobs
    term = term + 0.05 * (away.exp() - away - 1) - 0.01 * batch.entropy
    total = torch.zeros((), dtype=torch.float64)
    for rows in SESSIONS:
        tokens = term[rows][batch.mask[rows]]
        if len(tokens):
            divisor = {"seq-mean-token-mean": len(tokens), "seq-mean-token-sum": 1}.get(aggregation, 7)
            total = total + tokens.sum() / divisor / len(SESSIONS)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient


def assert_close(got: tuple[float, Tensor], want: tuple[float, Tensor]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("aggregation", BY_SEQUENCE)
def test_a_session_is_one_sequence_of_the_loss(aggregation: str, ranks: int) -> None:
    batch = batch_of_actor()
    columns = columns_of(batch.mask, KEYS)
    want = expected(batch, aggregation)
    fields = settings("vanilla", aggregation)
    for split in SPLITS:
        assert_close(accumulated(batch, fields, columns, split, ranks), want)
    assert accumulated(batch, fields, {})[0] != pytest.approx(want[0], rel=1e-2)


@pytest.mark.parametrize("mode", ["gspo", "sapo", "cispo", "gpg", "dppo_tv", "dro", "kl_cov"])
def test_parts_of_other_losses_add_up(mode: str) -> None:
    """Sessions of one output weigh as without columns, and others however they are dealt out."""
    batch = batch_of_actor()
    fields = settings(mode, "seq-mean-token-mean")
    columns = columns_of(batch.mask, KEYS)
    whole = accumulated(batch, fields, columns)
    lone = columns_of(batch.mask, [f"{key.replace('_', '')}_0_0" for key in KEYS])
    plain = accumulated(batch, fields, {})
    assert not lone and whole[0] != pytest.approx(plain[0], rel=1e-3)
    if mode != "kl_cov":  # which draws tokens of a micro-batch
        assert_close(accumulated(batch, fields, columns, SPLITS[2], 2), whole)
    lengths = batch.mask.sum(1)
    assert_close(accumulated(batch, fields, {TOKENS: lengths, ROWS: torch.ones(6)}), plain)


def test_the_penalty_of_kl_cov_is_of_sessions() -> None:
    """With all tokens drawn."""
    batch = batch_of_actor()
    fields = settings("kl_cov", "seq-mean-token-mean") | {"kl_cov_ratio": 1.0}
    columns = columns_of(batch.mask, KEYS)
    with_penalty, without = (accumulated(batch, fields | {"ppo_kl_coef": value}, columns)[0] for value in (0.7, 0.0))
    moved = (batch.logprobs - batch.old).abs()
    means = [moved[rows][batch.mask[rows]].mean() for rows in SESSIONS[:3]]
    assert with_penalty - without == pytest.approx(0.7 * float(sum(means)) / 4, rel=1e-9)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_gspo_has_the_ratio_of_a_session_where_asked(aggregation: str) -> None:
    batch = batch_of_actor()
    columns, fields = columns_of(batch.mask, KEYS), session_gspo(aggregation)
    want = expected(batch, aggregation, ratio_of_session=True)
    for split, ranks in ((SPLITS[0], 1), ([[0, 2, 5], [1, 3, 4]], 1), ([[3], [5, 0, 4, 2], [1]], 2)):
        assert_close(accumulated(batch, fields, columns, split, ranks), want)
    assert accumulated(batch, settings("gspo", aggregation), columns)[0] != pytest.approx(want[0], rel=1e-2)
    lone = batch_of_actor()  # without columns, as for sessions of one output
    assert_close(accumulated(lone, fields, {}), accumulated(lone, settings("gspo", aggregation), {}))


def test_a_part_of_a_session_has_no_ratio() -> None:
    batch = batch_of_actor()
    columns, fields = columns_of(batch.mask, KEYS), session_gspo("seq-mean-token-mean")
    for split in SPLITS[1:]:
        with pytest.raises(ValueError, match="all outputs of a session must be in one micro-batch for loss_mode"):
            accumulated(batch, fields, columns, split)


@pytest.mark.parametrize("mode", ["vanilla", "fused_session_gspo"])
def test_padded_rows_weigh_as_nested_ones(mode: str) -> None:
    batch = batch_of_actor()
    columns = columns_of(batch.mask, KEYS)
    arguments = {"old_log_probs": batch.old, "advantages": batch.advantages, "response_mask": batch.mask}
    losses = []
    for nested in (True, False):
        data = tiny_verl.micro_batch(arguments, nested, global_batch_size=6)
        for name, column in columns.items():
            data[name] = column
        output = {"log_probs": tiny_verl.model_output(batch.logprobs, nested)}
        fields = of_losses.fields_of("vanilla", "seq-mean-token-mean") | {"loss_mode": mode}
        config = of_losses.actor(fields)
        losses.append(fused_ppo_loss(config, output, data)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("mode", ["vanilla", "geo_mean"])
def test_means_of_tokens_and_of_one_row_do_not_change(mode: str) -> None:
    batch = batch_of_actor()
    columns = columns_of(batch.mask, KEYS)
    for aggregation in ("token-mean", "token-sum") if mode == "vanilla" else ("seq-mean-token-sum",):
        fields = settings(mode, aggregation)
        assert_close(accumulated(batch, fields, columns), accumulated(batch, fields, {}))


def test_what_sessions_refuse() -> None:
    batch = batch_of_actor()
    columns = columns_of(batch.mask, KEYS)
    message = (
        "loss_agg_mode must be 'seq-mean-token-mean' for loss_mode 'sapo' with sessions .*, got 'seq-mean-token-sum'"
    )
    with pytest.raises(ValueError, match=message):
        accumulated(batch, settings("sapo", "seq-mean-token-sum"), columns)
    data = tiny_verl.micro_batch(
        {"old_log_probs": batch.old, "advantages": batch.advantages, "response_mask": batch.mask}, True
    )
    for name, column in columns.items():
        data[name] = column
    output = {"log_probs": tiny_verl.model_output(batch.logprobs, True)}
    fields = of_losses.fields_of("vanilla", "seq-mean-token-mean")
    with pytest.raises(ValueError, match="global_batch_size must be given with 'session_tokens', got None"):
        fused_ppo_loss(of_losses.actor(fields), output, data)


@pytest.mark.parametrize("name", ["fused_rloo", "grpo", "rloo"])
def test_columns_count_neither_pads_nor_their_sessions(name: str) -> None:
    """Whatever the estimator; padded rows of the layout without nested tensors have them, too."""
    mask = torch.arange(WIDTH) < torch.tensor([3, 0, 1, 0, 2, 4, 0, 0, 0])[:, None]
    keys = [f"a_{session}_{output}" for session in range(3) for output in (0, 1)] + [f"{PAD}_{i}_0" for i in range(3)]
    _, tokens, rows = columns_of(mask, keys, name).values()
    assert tokens.tolist() == [3, 3, 1, 1, 6, 6, 0, 0, 0]
    assert rows.tolist() == [2.0] * 9


# ------------------------------------------------------------------------------------------------ advantages of tokens


class Trajectories:
    """Rows of two sessions, in another order than their outputs, and one that has its own."""

    keys = ("a_0_1", "a_1_0", "a_0_0", "b_0_0", "a_0_2")
    sessions = ((2, 0, 4), (1,), (3,))
    scores = (1.0, -0.5, 1.0, 2.0, 1.0)  # verl copies that of a session's last output to the others
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0]])
    lengths = (2, 4, 4, 4, 3)  # with tokens that do not count, as the last is where it was rejected

    def data(self) -> DataProto:
        random = torch.Generator().manual_seed(0)
        scores = torch.zeros(5, 4)
        scores[range(5), [length - 1 for length in self.lengths]] = torch.tensor(self.scores)
        penalty = 0.1 * torch.rand(5, 4, generator=random) * self.mask
        uids = np.array([key[0] for key in self.keys], dtype=object)
        data = tiny_verl.trainer_batch(scores - penalty, self.mask, uids, token_level_scores=scores)
        data.batch["values"] = torch.rand(5, 4, generator=random)
        return data

    def returns(self, data: DataProto, joined: bool, carries: bool, with_values: bool) -> Tensor:
        """By loops, with gamma 0.9 and lambda 0.8."""
        result = torch.zeros(5, 4, dtype=torch.float64)
        for session in self.sessions if joined else [(row,) for row in range(5)]:
            steps: list[list[Any]] = []
            for row in session:
                for token in range(4):
                    reward = float(data.batch["token_level_rewards"][row, token])
                    if row != session[-1]:
                        reward -= float(data.batch["token_level_scores"][row, token])
                    if self.mask[row, token]:
                        steps.append([row, token, reward, float(data.batch["values"][row, token]) * with_values])
                    elif carries and steps:
                        steps[-1][2] += reward
            following, advantage = 0.0, 0.0
            for row, token, reward, value in reversed(steps):
                advantage = reward + 0.9 * following - value + 0.9 * (0.8 if with_values else 1.0) * advantage
                result[row, token], following = advantage + value, value
        return result


@pytest.mark.parametrize(
    ("name", "carries", "outputs"),
    itertools.product(["gae", "reinforce_plus_plus"], [False, True], ["separate", "joined"]),
)
def test_advantages_of_tokens_across_outputs(name: str, carries: bool, outputs: str) -> None:
    case = Trajectories()
    data = case.data()
    options = {"carry_rewards": carries, "session_outputs": outputs}
    config = OmegaConf.create({"gamma": 0.9, "grpo_kernels": options})
    given = data.batch["token_level_rewards"].clone()
    result = v1.compute_advantage_for_multi_trajectories(data, case.keys, name, gamma=0.9, lam=0.8, config=config)
    want = case.returns(case.data(), outputs == "joined", carries, name == "gae")
    is_in_loss = case.mask.bool()
    torch.testing.assert_close(result.batch["returns"].double()[is_in_loss], want[is_in_loss], rtol=1e-5, atol=1e-6)
    whitened = want - data.batch["values"] if name == "gae" else want
    whitened = (whitened - whitened[is_in_loss].mean()) / (whitened[is_in_loss].var() + 1e-8).sqrt()
    got = result.batch["advantages"].double()[is_in_loss]
    torch.testing.assert_close(got, whitened[is_in_loss].double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(data.batch["token_level_rewards"], given)  # which verl puts back into its queue


def test_options_of_tokens_are_by_default_verls() -> None:
    case = Trajectories()
    results = []
    for patches in (True, False):
        if not patches:
            unpatch_verl()
        data = v1.compute_advantage_for_multi_trajectories(case.data(), case.keys, "gae", 0.9, 0.8, config={})
        results.append(data.batch["returns"][case.mask.bool()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"carry_reward": True}, "gae: keys of algorithm.grpo_kernels must be one of .*'carry_reward'.*carry_rewards"),
        ({"carry_rewards": "yes"}, "gae: algorithm.grpo_kernels.carry_rewards must be true or false, got 'yes'"),
        ({"session_outputs": "join"}, "session_outputs must be one of separate, joined, got 'join'"),
        (
            {"session_outputs": "joined"},
            "session_outputs must be .* where the outputs of sessions have no keys",
        ),
    ],
)
def test_options_of_tokens_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ray_trainer.compute_advantage(Trajectories().data(), "gae", config={"grpo_kernels": options})


# ---------------------------------------------------------------------------------------------------- the correction


def corrected(keys: list[str] | None, old: list[list[float]], **config: Any) -> tuple[DataProto, dict[str, float]]:
    data = data_of([0.0] * len(old), [2] * len(old), ["a"] * len(old))
    data.batch["old_log_probs"] = torch.nn.functional.pad(torch.tensor(old), (0, WIDTH - 2))
    data.batch["rollout_log_probs"] = torch.zeros(len(old), WIDTH)
    token = QUEUED.set(None if keys is None else SimpleNamespace(keys=keys))
    try:
        result: tuple[DataProto, dict[str, float]] = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(
            data, config
        )
        return result
    finally:
        QUEUED.reset(token)


def test_the_correction_weighs_and_rejects_sessions() -> None:
    """Rows whose mean log ratios are 0.8, -0.8 and 0: the first two are one session, whose mean is 0."""
    old = [[0.9, 0.7], [-0.9, -0.7], [0.1, -0.1]]
    config = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0", "rollout_is": "sequence"}
    data, metrics = corrected(["a_0_0", "a_0_1", "a_1_0"], old, **config)
    assert data.batch["response_mask"][:, 0].tolist() == [1, 1, 1]
    torch.testing.assert_close(data.batch["rollout_is_weights"][:, 0], torch.ones(3))
    rows, of_rows = corrected(None, old, **config)
    assert rows.batch["response_mask"][:, 0].tolist() == [0, 0, 1]
    lone, of_lone = corrected(["a_0_0", "a_1_0", "a_2_0"], old, **config)
    assert torch.equal(lone.batch["response_mask"], rows.batch["response_mask"]) and of_lone == of_rows
    assert metrics != of_rows


def test_pads_are_in_no_session_of_the_correction() -> None:
    old = [[0.9, 0.7], [-0.9, -0.7], [0.1, -0.1]]
    config = {"rollout_is": "sequence"}
    keys = ["a_0_0", "a_0_1", "a_1_0"]
    data, metrics = corrected(keys, old, **config)
    more = data_of([0.0] * 5, [2, 2, 2, 0, 0], ["a", "a", "a", PAD, PAD])
    more.batch["old_log_probs"] = torch.nn.functional.pad(torch.tensor([*old, [0, 0], [0, 0]]), (0, WIDTH - 2))
    more.batch["rollout_log_probs"] = torch.zeros(5, WIDTH)
    token = QUEUED.set(SimpleNamespace(keys=[*keys, f"{PAD}_0_0", f"{PAD}_1_0"]))
    try:
        got, of_more = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(more, config)
    finally:
        QUEUED.reset(token)
    assert of_more == metrics
    assert torch.equal(got.batch["rollout_is_weights"][:3], data.batch["rollout_is_weights"])
