"""Sessions of several outputs in verl's loss: each is one sequence, however its rows are dealt out.

The faults to notice: the outputs of a session are counted one by one; a loss depends on how rows are dealt to
micro-batches or ranks; a batch without such sessions, or a mean over tokens, changes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

from tests.integrations import tiny_verl
from tests.integrations.test_verl_loss import actor_batch, columns_of, on_aggregations
from tests.ops.policy_loss import test_peers_verl as of_losses
from tests.ops.promises import Inputs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.utils import tensordict_utils

    from grpo_kernels.integrations.verl import fused_ppo_loss
    from grpo_kernels.integrations.verl.sessions import COLUMNS, ROWS, TOKENS

# of six rows of responses of these columns; the fourth session has no token in the loss
SESSION_IDS = torch.tensor([0, 1, 0, 2, 3, 0])
SPLITS = ([range(6)], [[0, 1, 2], [3, 4, 5]], [[5], [0, 4], [3, 2, 1]])


def batch_of_sessions() -> Inputs:
    batch = actor_batch()
    batch["mask"][4], batch["mask"][0, 3:5] = False, False
    tokens = batch["mask"].sum(1)
    of_session = torch.zeros(4, dtype=torch.long).index_add(0, SESSION_IDS, tokens)[SESSION_IDS]
    return batch | dict(zip(COLUMNS, (SESSION_IDS, of_session, torch.full((6,), 1.5)), strict=True))


def accumulated(
    batch: Inputs, fields: dict[str, Any], split: Any = SPLITS[0], ranks: int = 1, nested: bool = True
) -> tuple[float, Tensor]:
    """The loss and its gradient over micro-batches, each by one of the ranks, whose gradients are averaged."""
    info = {"dp_size": ranks, "batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": 6}
    data = tiny_verl.micro_batch(columns_of(batch), nested, **info)
    for name in COLUMNS:
        if name in batch:
            data[name] = batch[name]
    logprobs = batch["logprobs"].detach().requires_grad_()
    outputs = {"log_probs": logprobs, "entropy": batch["entropy"].detach()}
    total = torch.zeros((), dtype=torch.float64)
    for rows in map(list, split):
        output = {name: tiny_verl.model_output(value, nested) for name, value in outputs.items()}
        if nested:
            output = {
                name: torch.nested.as_nested_tensor([value.unbind()[row] for row in rows], layout=torch.jagged)
                for name, value in output.items()
            }
        part = tensordict_utils.index_select_tensor_dict(data, rows) if nested else data
        total = total + fused_ppo_loss(of_losses.actor(fields), output, part)[0] / ranks
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient


def of_mode(mode: str, aggregation: str, **changes: Any) -> dict[str, Any]:
    own = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coeff": 0.01}
    return of_losses.fields_of(mode, aggregation) | own | changes


def without_columns(batch: Inputs) -> Inputs:
    return {name: value for name, value in batch.items() if name not in COLUMNS}


def assert_close(got: tuple[float, Tensor], want: tuple[float, Tensor]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-12)


BY_SESSION = ("vanilla", "gspo", "sapo", "cispo", "gpg", "dppo_tv", "dro", "kl_cov", "geo_mean")


@on_aggregations
@pytest.mark.parametrize("mode", BY_SESSION)
def test_a_session_is_one_sequence_however_rows_are_dealt(mode: str, aggregation: str) -> None:
    """A mean over sessions differs from that over rows; sessions of one output, and other means, do not."""
    if mode == "sapo" and aggregation != "seq-mean-token-mean":
        pytest.skip("refused")
    batch, fields = batch_of_sessions(), of_mode(mode, aggregation)
    whole, plain = accumulated(batch, fields), accumulated(without_columns(batch), fields)
    if aggregation.startswith("seq-mean") and mode != "geo_mean":
        assert whole[0] != pytest.approx(plain[0], rel=1e-3)
        # the same tokens weigh as those of one row
        shares = batch[ROWS].double() / 6 / (batch[TOKENS].clamp(min=1) if aggregation == "seq-mean-token-mean" else 1)
        shares = shares / (7 if aggregation.endswith("norm") else 1)
        by_entropy = of_mode(mode, aggregation, entropy_coeff=1.01)
        added = whole[0] - accumulated(batch, by_entropy)[0]
        assert added == pytest.approx(float((batch["entropy"] * batch["mask"] * shares[:, None]).sum()), rel=1e-8)
    else:
        assert_close(whole, plain)
    if mode != "kl_cov":  # which draws tokens of a micro-batch
        assert_close(accumulated(batch, fields, SPLITS[1], 1), whole)
        assert_close(accumulated(batch, fields, SPLITS[2], 2), whole)
    assert_close(accumulated(batch, fields, nested=False), whole)
    lone = batch | {TOKENS: batch["mask"].sum(1), ROWS: torch.ones(6)}
    assert_close(accumulated(lone, fields), plain)


def test_the_penalty_of_kl_cov_is_of_sessions() -> None:
    """With all tokens drawn."""
    batch, fields = batch_of_sessions(), of_mode("kl_cov", "seq-mean-token-mean", kl_cov_ratio=1.0)
    with_penalty, without = (accumulated(batch, fields | {"ppo_kl_coef": value})[0] for value in (0.7, 0.0))
    moved = (batch["logprobs"] - batch["old_logprobs"]).detach().abs()
    rows = [session == SESSION_IDS for session in range(3)]
    means = [float(moved[of][batch["mask"][of]].mean()) for of in rows]
    assert with_penalty - without == pytest.approx(0.7 * sum(means) / 4, rel=1e-9)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_gspo_has_the_ratio_of_a_session_where_asked(aggregation: str) -> None:
    batch = batch_of_sessions()
    fields = of_mode("gspo", aggregation, loss_mode="fused_session_gspo")
    log_ratio, mask = (batch["logprobs"] - batch["old_logprobs"]).detach(), batch["mask"]
    means = torch.zeros(6, dtype=torch.float64)
    for session in range(3):
        means[session == SESSION_IDS] = log_ratio[session == SESSION_IDS][mask[session == SESSION_IDS]].mean()
    ratios = batch | {"old_logprobs": batch["logprobs"].detach() - means[:, None]}
    want = accumulated(ratios, of_mode("gspo", aggregation))
    for split, ranks in ((SPLITS[0], 1), ([[0, 2, 5], [1, 3, 4]], 1), ([[3], [5, 0, 4, 2], [1]], 2)):
        assert_close(accumulated(batch, fields, split, ranks), want)
    assert_close(accumulated(batch, fields, nested=False), want)
    assert accumulated(batch, of_mode("gspo", aggregation))[0] != pytest.approx(want[0], rel=1e-3)
    lone = without_columns(batch)  # as for sessions of one output
    assert_close(accumulated(lone, fields), accumulated(lone, of_mode("gspo", aggregation)))
    for split in SPLITS[1:]:
        with pytest.raises(ValueError, match="all outputs of a session must be in one micro-batch for loss_mode"):
            accumulated(batch, fields, split)


def test_what_sessions_refuse() -> None:
    batch = batch_of_sessions()
    message = (
        "loss_agg_mode must be 'seq-mean-token-mean' for loss_mode 'sapo' with sessions .*, got 'seq-mean-token-sum'"
    )
    with pytest.raises(ValueError, match=message):
        accumulated(batch, of_mode("sapo", "seq-mean-token-sum"))
    data = tiny_verl.micro_batch(columns_of(batch) | {name: batch[name] for name in COLUMNS}, False)
    data["segment_ids"] = torch.zeros_like(data["responses"])
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], False)}
    fields = of_losses.fields_of("vanilla", "seq-mean-token-mean") | {"loss_mode": "fused_segment"}
    with pytest.raises(ValueError, match="fused_segment: every session must have one output, got sessions of several"):
        fused_ppo_loss(of_losses.actor(fields), output, data)
    data = tiny_verl.micro_batch(columns_of(batch) | {name: batch[name] for name in COLUMNS}, False)
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], False)}
    with pytest.raises(ValueError, match="global_batch_size must be given with 'session_tokens', got None"):
        fused_ppo_loss(of_losses.actor(of_losses.fields_of("vanilla", "seq-mean-token-mean")), output, data)
