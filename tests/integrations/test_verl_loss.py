"""Our losses compared with verl's: each alone, and within ppo_loss.

The faults to notice: a setting, count of ranks or metric of verl's that is read in another way; a value of another
token in padded or nested batches; a wait for the device.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

import grpo_kernels as gk
from grpo_kernels import checks
from tests.harness import examples
from tests.integrations import tiny_verl
from tests.ops.policy_loss import peers
from tests.ops.policy_loss import test_peers_verl as of_losses
from tests.ops.promises import Inputs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.ppo import core_algos
    from verl.utils.metric import Metric
    from verl.utils.py_functional import append_to_dict
    from verl.workers.utils import losses

    from grpo_kernels.integrations.verl import fused_ppo_loss, patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl import loss as _verl_loss


INFO = {"dp_size": 2, "batch_num_tokens": 150, "global_batch_size": 24}
few = settings(max_examples=examples(12))
LAYOUTS = pytest.mark.parametrize("nested", [False, True], ids=["padded", "nested"])
on_aggregations = pytest.mark.parametrize("aggregation", of_losses.VERL_AGGREGATIONS)


# -------------------------------------------------------------------------------------------------------- losses


@on_aggregations
@pytest.mark.parametrize("mode", of_losses.MODES)
@few
@given(st.booleans(), st.booleans(), st.sampled_from(["ordinary", "beyond"]), st.booleans())
def test_registered_losses(
    mode: str, aggregation: str, weights: bool, has_info: bool, kind: str, has_length: bool
) -> None:
    """geo_mean counts the rows of all ranks, which verl ignores: it averages over the micro-batch."""
    info = of_losses.GLOBAL if has_info and mode != "geo_mean" else None
    batch = of_losses.make_batch(kind)
    fields = of_losses.fields_of(mode, aggregation)
    if not has_length:  # then it is the padded width
        fields.pop("loss_scale_factor", None)
    ours = fields | {"loss_mode": f"fused_{mode}"}
    want = of_losses.theirs(batch, fields, weights, info)
    of_losses.assert_parity(of_losses.theirs(batch, ours, weights, info), want, batch, fields)
    if mode == "geo_mean" and aggregation == "seq-mean-token-sum":
        got = of_losses.theirs(batch, ours, weights, of_losses.GLOBAL)
        torch.testing.assert_close(got.loss * (24 / 2) / len(batch["mask"]), want.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_with_the_count_of_another_unit(aggregation: str) -> None:
    batch = of_losses.make_batch()
    fields = of_losses.fields_of("vanilla", aggregation)
    other = {"dp_size": 1, ("batch_num_tokens" if aggregation.startswith("seq") else "global_batch_size"): 150}
    want = of_losses.theirs(batch, fields, False, other)
    got = of_losses.theirs(batch, fields | {"loss_mode": "fused_vanilla"}, False, other)
    of_losses.assert_parity(got, want, batch, fields)


@on_aggregations
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


# ------------------------------------------------------------------------------------------------------ ppo_loss


def actor_batch(dtype: torch.dtype = torch.float64) -> Inputs:
    """The rows of the losses' batch as tiny_verl lays them out, with leaves that require a gradient."""
    width = max(tiny_verl.LENGTHS)
    batch = of_losses.make_batch(dtype=dtype)
    batch = {name: value[:, :width].contiguous() for name, value in batch.items() if value.dim() == 2}
    batch["mask"] &= torch.arange(width) < torch.tensor(tiny_verl.LENGTHS)[:, None]
    return batch | {name: batch[name].requires_grad_() for name in peers.LEAVES}


def columns_of(batch: Inputs) -> dict[str, Tensor]:
    names = {"old_log_probs": "old_logprobs", "advantages": "advantages", "response_mask": "mask"}
    return {name: batch[own] for name, own in names.items()} | {"ref_log_prob": batch["ref_logprobs"]}


def of_actor(
    function: Any,
    batch: Inputs,
    fields: dict[str, Any],
    nested: bool,
    *,
    weights: bool = False,
    with_entropy: bool = True,
    info: dict[str, Any] | None = None,
    columns: dict[str, Tensor] | None = None,
) -> tuple[peers.Result, dict[str, Any]]:
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], nested)}
    if with_entropy:
        output["entropy"] = tiny_verl.model_output(batch["entropy"], nested)
    arguments = columns_of(batch) | (columns or {})
    if weights:
        arguments["rollout_is_weights"] = batch["is_weights"]
    config = of_losses.actor(fields)
    loss, metrics = function(config, output, tiny_verl.micro_batch(arguments, nested, **(info or {})))
    numbers = {key: value.aggregate() if isinstance(value, Metric) else value for key, value in metrics.items()}
    return peers.result_of(loss, batch, numbers), metrics


def assert_like_verls(fields: dict[str, Any], nested: bool, prefix: str, **options: Any) -> None:
    batch = actor_batch()
    want, theirs = of_actor(losses.ppo_loss, batch, fields, nested, **options)
    of_ours = fields | {"loss_mode": prefix + fields["loss_mode"]}
    got, ours = of_actor(fused_ppo_loss, batch, of_ours, nested, **options)
    of_losses.assert_parity(got, want, batch, fields)
    for key, metric in theirs.items():
        assert isinstance(ours[key], Metric) == isinstance(metric, Metric), key
        assert getattr(ours[key], "aggregation", None) == getattr(metric, "aggregation", None), key
    gathered: dict[str, Any] = {}
    append_to_dict(gathered, ours)  # as verl's engine does
    append_to_dict(gathered, ours)
    assert all(len(value.values) == 2 and type(value) is Metric for key, value in gathered.items() if key != "kl_coef")


KLS = (None, *of_losses.KL_TYPES, "k1+", "abs+", "mse+", "low_var_kl+", "k3+")


@LAYOUTS
@pytest.mark.parametrize("mode", of_losses.MODES)
@few
@given(
    st.sampled_from(of_losses.VERL_AGGREGATIONS),
    st.sampled_from(["", "fused_"]),
    st.sampled_from(KLS),
    st.sampled_from([{}, INFO]),
    st.sampled_from([None, 0.0, 0.3]),
    st.booleans(),
    st.booleans(),
)
# terms that have their own mean, or that of another one, on two ranks
@example("token-sum", "", "k1", INFO, 0.3, False, True)
@example("seq-mean-token-mean", "fused_", "low_var_kl", INFO, 0.3, True, True)
def test_ppo_loss(
    mode: str,
    nested: bool,
    aggregation: str,
    prefix: str,
    kl: str | None,
    info: dict[str, Any],
    entropy: float | None,
    weights: bool,
    has_length: bool,
) -> None:
    fields = of_losses.fields_of(mode, "token-mean" if mode == "geo_mean" else aggregation)
    fields |= {} if entropy is None else {"entropy_coeff": entropy}
    fields |= {} if kl is None else {"use_kl_loss": True, "kl_loss_type": kl, "kl_loss_coef": 0.5}
    if not has_length:
        fields.pop("loss_scale_factor", None)
    info = {} if mode == "geo_mean" else info
    assert_like_verls(fields, nested, prefix, weights=weights, with_entropy=entropy is not None, info=info)


def test_padded_columns_of_nested_responses() -> None:
    """Mixed layouts, as when a trainer adds a column: nested model output with padded columns, or the reverse."""
    batch = actor_batch()
    fields = of_losses.fields_of("vanilla", "token-mean", use_kl_loss=True)
    want, _ = of_actor(fused_ppo_loss, batch, fields, nested=True)
    for nested in (True, False):
        data = tiny_verl.micro_batch({}, nested, dp_size=1, batch_num_tokens=None, global_batch_size=None)
        other = tiny_verl.micro_batch(columns_of(batch), not nested)
        for name in ("old_log_probs", "advantages", "response_mask", "ref_log_prob"):
            data[name] = other[name]
        output = {
            "log_probs": tiny_verl.model_output(batch["logprobs"], nested),
            "entropy": tiny_verl.model_output(batch["entropy"], nested),
        }
        loss, metrics = fused_ppo_loss(of_losses.actor(fields), output, data)
        numbers = {key: value.aggregate() if isinstance(value, Metric) else value for key, value in metrics.items()}
        of_losses.assert_parity(peers.result_of(loss, batch, numbers), want, batch, fields)


@LAYOUTS
def test_segments(nested: bool) -> None:
    batch = actor_batch()
    ids = torch.where(batch["mask"], torch.arange(10) // 3, -1)
    fields = of_losses.fields_of("vanilla", "seq-mean-token-sum", use_kl_loss=True)
    ours = fields | {"loss_mode": "fused_segment"}
    got, _ = of_actor(fused_ppo_loss, batch, ours, nested, columns={"segment_ids": ids})
    of_rows, of_tokens = torch.linspace(0.5, 1.5, len(ids))[:, None].expand(ids.shape), 1 + ids / 10
    columns = {"segment_ids": ids, "rollout_is_weights": of_rows * batch["mask"]}
    weighted, _ = of_actor(fused_ppo_loss, batch, ours, nested, columns=columns)
    with pytest.raises(
        ValueError, match=r"rollout_is_weights must be those of sequences for loss_mode 'fused_segment'"
    ):
        of_actor(fused_ppo_loss, batch, ours, nested, columns=columns | {"rollout_is_weights": of_tokens})
    config = dataclasses.replace(gk.LossConfig.verl(**fields), ratio="segment")
    names = ("mask", "ref_logprobs", "entropy")
    policy = [batch[name] for name in ("logprobs", "old_logprobs", "advantages")]
    own = gk.policy_loss(*policy, **{name: batch[name] for name in names}, config=config, segments=ids)
    want = peers.result_of(own.loss, batch, own.metrics.verl())
    of_losses.assert_parity(got, want, batch, fields)
    own = gk.policy_loss(
        *policy, **{name: batch[name] for name in names}, config=config, segments=ids, is_weights=of_rows.double()
    )
    of_losses.assert_parity(weighted, peers.result_of(own.loss, batch, own.metrics.verl()), batch, fields)


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations that would synchronize with a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name.startswith(("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@LAYOUTS
def test_nothing_waits_until_a_metric_is_read(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of_cpus = ((_verl_loss, "_expect"), (checks, "log_probs"), (checks, "no_token_left_out"))
    for module, name in of_cpus:  # look at values on a CPU alone
        monkeypatch.setattr(module, name, lambda *_: None)
    batch = actor_batch(torch.float32)
    fields = of_losses.fields_of("vanilla", "token-mean", entropy_coeff=0.01, use_kl_loss=True)
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], nested)}
    output["entropy"] = tiny_verl.model_output(batch["entropy"].detach(), nested)
    data = tiny_verl.micro_batch(columns_of(batch), nested, **INFO)
    fused_ppo_loss(of_losses.actor(fields), output, data)  # warms up cached look-ups
    counts = []
    for function in (fused_ppo_loss, losses.ppo_loss):
        with Waits() as waits:
            function(of_losses.actor(fields), output, data)
        counts.append(len(waits.found))
    assert counts[0] == 0 and counts[1] > 5


@LAYOUTS
def test_a_mini_batch_without_a_token_has_no_loss(nested: bool) -> None:
    """verl's own is NaN there."""
    batch = actor_batch(torch.float32)
    batch["mask"] = torch.zeros_like(batch["mask"])
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], nested)}
    data = tiny_verl.micro_batch(columns_of(batch), nested, **INFO | {"batch_num_tokens": 0})
    loss, _ = fused_ppo_loss(of_losses.actor(of_losses.fields_of("vanilla", "token-mean")), output, data)
    assert loss == 0


def test_the_width_of_packed_responses_that_verl_knows() -> None:
    batch = actor_batch()
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], True)}
    fields = of_losses.fields_of("vanilla", "seq-mean-token-sum-norm") | {"loss_scale_factor": None}
    sums = [
        fused_ppo_loss(of_losses.actor(fields), output, tiny_verl.micro_batch(columns_of(batch), True, **INFO, **known))
        for known in ({}, {"max_response_len": 2 * max(tiny_verl.LENGTHS)})
    ]
    torch.testing.assert_close(sums[0][0], 2 * sums[1][0])


def test_metrics_go_to_other_processes_as_numbers() -> None:
    """Metrics are sent without their tensor, as the trainer's process may lack its device."""
    batch = actor_batch(torch.float32)
    columns = {name: value for name, value in columns_of(batch).items() if name != "ref_log_prob"}
    output = {"log_probs": tiny_verl.model_output(batch["logprobs"], True)}
    _, metrics = fused_ppo_loss(
        of_losses.actor(of_losses.fields_of("vanilla", "token-mean")), output, tiny_verl.micro_batch(columns, True)
    )
    assert metrics
    for metric in metrics.values():
        sent = pickle.dumps(metric)
        arrived = pickle.loads(sent)
        assert b"Tensor" not in sent and type(arrived).__name__ == "Metric"
        assert arrived.aggregation == metric.aggregation and arrived.aggregate() == metric.aggregate()


@LAYOUTS
def test_loss_can_be_added_to(nested: bool) -> None:
    """verl's distillation adds to the loss in place."""
    logprobs = torch.rand(6, 10).log().requires_grad_()
    columns = dict.fromkeys(("old_log_probs", "advantages"), logprobs.detach()) | {"response_mask": torch.ones(6, 10)}
    output = {"log_probs": tiny_verl.model_output(logprobs, nested)}
    config = of_losses.actor(of_losses.fields_of("vanilla", "token-mean"))
    loss, _ = fused_ppo_loss(config, output, tiny_verl.micro_batch(columns, nested))
    loss += logprobs.sum() * 2
    loss.backward()
    assert (logprobs.grad > 1).all()


def test_other_losses_go_to_verl(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_verl(grpo=False)
    request.addfinalizer(unpatch_verl)
    batch = actor_batch(torch.float32)
    theirs = _verl_loss.originals["ppo_loss"]
    assert theirs.__module__ == "verl.workers.utils.losses"
    fields = of_losses.fields_of("vanilla", "token-mean") | {"loss_mode": "bypass_mode"}
    _verl_loss._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got, _ = of_actor(losses.ppo_loss, batch, fields, nested=True)
    want, _ = of_actor(theirs, batch, fields, nested=True)
    assert torch.equal(got.loss, want.loss) and all(
        torch.equal(got.gradients[name], want.gradients[name]) for name in peers.LEAVES
    )
    assert [record.getMessage() for record in caplog.records if "fused_ppo_loss" in record.getMessage()] == [
        "fused_ppo_loss: loss_mode 'bypass_mode' is not one of ours, verl's own ppo_loss computes it"
    ]
    # a user's own loss under one of verl's names
    monkeypatch.setitem(
        core_algos.POLICY_LOSS_REGISTRY,
        "gpg",
        lambda **given: (given["log_prob"].sum() * 0 + 42.0, {"actor/mine": 1.0}),
    )
    got, metrics = of_actor(losses.ppo_loss, batch, of_losses.fields_of("gpg", "token-mean"), nested=True)
    assert float(got.loss) == 42 and "actor/mine" in metrics


def test_what_losses_refuse() -> None:
    batch = actor_batch()
    arguments = [batch[name] for name in ("old_logprobs", "logprobs", "advantages", "mask")]
    fields = of_losses.fields_of("vanilla", "token-mean")
    two = of_losses.actor(fields, {"dp_size": 2})
    for name, options, error, message in (
        ("fused_vanilla", ("token-mean", two), ValueError, "batch_num_tokens must be given for dp_size=2"),
        ("fused_vanilla", ("seq-mean-token-sum", two), ValueError, "global_batch_size must be given for dp_size=2"),
        ("fused_gpg", (), ValueError, "fused_gpg: config must be given"),
        ("fused_segment", ("token-mean", two), RuntimeError, "fused_segment: verl gives a registered loss no segments"),
    ):
        with pytest.raises(error, match=message):
            core_algos.get_policy_loss_fn(name)(*arguments, *options)
    cases: list[tuple[type[Exception], str, dict[str, Any], dict[str, Any]]] = [
        (ValueError, "entropy must be", {"entropy_coeff": 0.1}, {"with_entropy": False}),
        (KeyError, "data must hold 'segment_ids'", {"loss_mode": "fused_segment", "loss_agg_mode": "token-sum"}, {}),
        (ValueError, "must not be 'token-mean', a mean over segments", {"loss_mode": "fused_segment"}, {"info": INFO}),
        (ValueError, "kl_loss_type must be one of .*, got 'full'", {"use_kl_loss": True, "kl_loss_type": "full"}, {}),
        (ValueError, "batch_num_tokens must be given for dp_size=2", {}, {"info": {"dp_size": 2}}),
    ]
    for error, message, changes, options in cases:
        with pytest.raises(error, match=message):
            of_actor(fused_ppo_loss, batch, fields | changes, True, **options)
    columns = {name: value for name, value in columns_of(batch).items() if name != "ref_log_prob"}
    for nested in (True, False):
        output = {"log_probs": tiny_verl.model_output(batch["logprobs"], nested)}
        config = of_losses.actor(fields | {"use_kl_loss": True})
        with pytest.raises(KeyError, match="data must hold 'ref_log_prob'"):
            fused_ppo_loss(config, output, tiny_verl.micro_batch(columns, nested))
        short = {"log_probs": tiny_verl.model_output(batch["logprobs"], False)[:-1]}
        with pytest.raises(ValueError, match="a value for every token of prompts and responses, got 50"):
            fused_ppo_loss(of_losses.actor(fields), short, tiny_verl.micro_batch(columns, nested))
