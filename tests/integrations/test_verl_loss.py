"""Our losses compared with verl's: each alone, within ppo_loss, and in the training of a model."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

import grpo_kernels as gk
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


@pytest.fixture
def patched() -> Iterator[None]:
    patch_verl(grpo=False)
    yield
    unpatch_verl()


# -------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", ["ordinary", "beyond"])
@pytest.mark.parametrize("info", [None, of_losses.GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("aggregation", of_losses.VERL_AGGREGATIONS)
@pytest.mark.parametrize("mode", of_losses.MODES)
def test_registered_losses(mode: str, aggregation: str, weights: bool, info: Any, kind: str) -> None:
    if info and mode == "geo_mean":
        pytest.skip("verl ignores it: test_geo_mean_counts_the_rows_of_all_ranks")
    batch = of_losses.make_batch(kind)
    fields = of_losses.fields_of(mode, aggregation)
    ours = fields | {"loss_mode": f"fused_{mode}"}
    want = of_losses.theirs(batch, fields, weights, info)
    of_losses.assert_parity(of_losses.theirs(batch, ours, weights, info), want, batch, fields)


def test_geo_mean_counts_the_rows_of_all_ranks() -> None:
    """verl averages over the micro-batch and then accumulates the gradients; ours divides by the global count."""
    batch = of_losses.make_batch()
    fields = of_losses.fields_of("geo_mean", "seq-mean-token-sum")
    want = of_losses.theirs(batch, fields, False, of_losses.GLOBAL)
    got = of_losses.theirs(batch, fields | {"loss_mode": "fused_geo_mean"}, False, of_losses.GLOBAL)
    torch.testing.assert_close(got.loss * (24 / 2) / len(batch["mask"]), want.loss, rtol=1e-12, atol=0)


def test_constant_length_is_the_padded_width() -> None:
    batch = of_losses.make_batch()
    fields = of_losses.fields_of("vanilla", "seq-mean-token-sum-norm")
    del fields["loss_scale_factor"]
    want = of_losses.theirs(batch, fields, False, None)
    of_losses.assert_parity(
        of_losses.theirs(batch, fields | {"loss_mode": "fused_vanilla"}, False, None), want, batch, fields
    )


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_with_the_count_of_another_unit(aggregation: str) -> None:
    batch = of_losses.make_batch()
    fields = of_losses.fields_of("vanilla", aggregation)
    other = {"dp_size": 1, ("batch_num_tokens" if aggregation.startswith("seq") else "global_batch_size"): 150}
    want = of_losses.theirs(batch, fields, False, other)
    got = of_losses.theirs(batch, fields | {"loss_mode": "fused_vanilla"}, False, other)
    of_losses.assert_parity(got, want, batch, fields)


def test_what_losses_refuse() -> None:
    batch = of_losses.make_batch()
    config = of_losses.actor(of_losses.fields_of("vanilla", "token-mean"), {"dp_size": 2})
    arguments = [batch[name] for name in ("old_logprobs", "logprobs", "advantages", "mask")]
    with pytest.raises(ValueError, match="batch_num_tokens must be given for dp_size=2"):
        core_algos.get_policy_loss_fn("fused_vanilla")(*arguments, "token-mean", config)
    with pytest.raises(ValueError, match="global_batch_size must be given for dp_size=2"):
        core_algos.get_policy_loss_fn("fused_vanilla")(*arguments, "seq-mean-token-sum", config)
    with pytest.raises(ValueError, match="fused_gpg: config must be given"):
        core_algos.get_policy_loss_fn("fused_gpg")(*arguments)
    with pytest.raises(RuntimeError, match="fused_segment: verl gives a registered loss no segments"):
        core_algos.get_policy_loss_fn("fused_segment")(*arguments, "token-mean", config)


# ------------------------------------------------------------------------------------------------------ ppo_loss

INFO = {"dp_size": 2, "batch_num_tokens": 150, "global_batch_size": 24}


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


def assert_like_verls(fields: dict[str, Any], nested: bool, **options: Any) -> None:
    batch = actor_batch()
    want, theirs = of_actor(losses.ppo_loss, batch, fields, nested, **options)
    got, ours = of_actor(fused_ppo_loss, batch, fields, nested, **options)
    of_losses.assert_parity(got, want, batch, fields)
    for key, metric in theirs.items():
        assert isinstance(ours[key], Metric) == isinstance(metric, Metric), key
        assert getattr(ours[key], "aggregation", None) == getattr(metric, "aggregation", None), key
    gathered: dict[str, Any] = {}
    append_to_dict(gathered, ours)  # as verl's engine does
    append_to_dict(gathered, ours)
    assert all(len(value.values) == 2 and type(value) is Metric for key, value in gathered.items() if key != "kl_coef")


LAYOUTS = pytest.mark.parametrize("nested", [False, True], ids=["padded", "nested"])


@LAYOUTS
@pytest.mark.parametrize("prefix", ["", "fused_"])
@pytest.mark.parametrize("mode", of_losses.MODES)
def test_ppo_loss(mode: str, prefix: str, nested: bool) -> None:
    fields = of_losses.fields_of(mode, "token-mean", entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="k3+")
    batch = actor_batch()
    info = None if mode == "geo_mean" else INFO
    want, _ = of_actor(losses.ppo_loss, batch, fields, nested, weights=True, info=info)
    got, _ = of_actor(fused_ppo_loss, batch, fields | {"loss_mode": prefix + mode}, nested, weights=True, info=info)
    of_losses.assert_parity(got, want, batch, fields)


@pytest.mark.pairs
@LAYOUTS
@pytest.mark.parametrize("info", [{}, INFO], ids=["local", "global"])
@pytest.mark.parametrize("aggregation", of_losses.VERL_AGGREGATIONS)
def test_ppo_loss_aggregations(aggregation: str, info: dict[str, Any], nested: bool) -> None:
    for mode in ("vanilla", "sapo"):  # which has an aggregation of its own
        fields = of_losses.fields_of(mode, aggregation, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.5)
        assert_like_verls(fields, nested, info=info)
        fields.pop("loss_scale_factor", None)
        assert_like_verls(fields, nested, info=info)


@LAYOUTS
@pytest.mark.parametrize("name", [*of_losses.KL_TYPES, "k1+", "abs+", "mse+", "low_var_kl+"])
def test_ppo_loss_kls(name: str, nested: bool) -> None:
    fields = of_losses.fields_of("gpg", "token-mean", use_kl_loss=True, kl_loss_type=name, kl_loss_coef=0.5)
    assert_like_verls(fields, nested, with_entropy=False)


@LAYOUTS
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_ppo_loss_terms(with_entropy: bool, weights: bool, nested: bool) -> None:
    fields = of_losses.fields_of("vanilla", "token-mean")
    assert_like_verls(fields, nested, with_entropy=with_entropy, weights=weights)


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
    config = dataclasses.replace(gk.LossConfig.verl(**fields), ratio="segment")
    names = ("mask", "ref_logprobs", "entropy")
    policy = [batch[name] for name in ("logprobs", "old_logprobs", "advantages")]
    own = gk.policy_loss(*policy, **{name: batch[name] for name in names}, config=config, segments=ids)
    want = peers.result_of(own.loss, batch, own.metrics.verl())
    of_losses.assert_parity(got, want, batch, fields)


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
    monkeypatch.setattr(_verl_loss, "_expect", lambda holds, message: None)  # synchronizes on the CPU only
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
    patched: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_ppo_loss_refuses() -> None:
    batch = actor_batch()
    fields = of_losses.fields_of("vanilla", "token-mean")
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
    config = of_losses.actor(fields | {"use_kl_loss": True})
    columns = {name: value for name, value in columns_of(batch).items() if name != "ref_log_prob"}
    for nested in (True, False):
        output = {"log_probs": tiny_verl.model_output(batch["logprobs"], nested)}
        with pytest.raises(KeyError, match="data must hold 'ref_log_prob'"):
            fused_ppo_loss(config, output, tiny_verl.micro_batch(columns, nested))
        short = {"log_probs": tiny_verl.model_output(batch["logprobs"], False)[:-1]}
        with pytest.raises(ValueError, match="a value for every token of prompts and responses, got 50"):
            fused_ppo_loss(of_losses.actor(fields), short, tiny_verl.micro_batch(columns, nested))


# ------------------------------------------------------------------------------------------------------ training


class TinyModel(torch.nn.Module):
    """Maps tokens to the log-prob of the next token and the entropy at every position."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = torch.nn.Parameter(torch.randn(13, 8, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(8, 13, generator=generator, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logps = torch.log_softmax(self.table[tokens.values()] @ self.head, -1)
        following = tokens.values().roll(-1)
        result = {"log_probs": logps.gather(1, following[:, None])[:, 0], "entropy": -(logps.exp() * logps).sum(-1)}
        return {name: torch.nested.nested_tensor_from_jagged(x, tokens.offsets()) for name, x in result.items()}


STEPS, RATE = 4, 0.05


def trained(function: Any, fields: dict[str, Any]) -> TinyModel:
    """Trains as verl's engine does, in steps of two micro-batches of random sequences."""
    model, reference = TinyModel(), TinyModel()
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        halves = [torch.randint(13, (6, 13)) for _ in range(2)]
        rows = [tiny_verl.micro_batch({"response_mask": torch.rand(6, 10) < 0.8}, True) for _ in halves]
        # the two micro-batches form one mini-batch
        info = {
            "dp_size": 1,
            "batch_num_tokens": int(sum(r["response_mask"].values().sum() for r in rows)),
            "global_batch_size": 12,
        }
        for tokens, data in zip(halves, rows, strict=True):
            lengths = data["prompts"].offsets().diff() + data["responses"].offsets().diff()
            ids = torch.nested.as_nested_tensor(
                [t[:n] for t, n in zip(tokens, lengths, strict=True)], layout=torch.jagged
            )
            with torch.no_grad():
                sampled = reference(ids)["log_probs"]
            for name in ("old_log_probs", "ref_log_prob"):
                data[name] = tiny_verl.response_part(sampled)
            rewards = torch.tensor([float((row == 3).sum()) + 0.1 * step for row in tokens], dtype=torch.float64)
            arguments = gk.group_advantages(rewards, 3).advantages[:, None].expand(6, 10)
            data["advantages"] = tiny_verl.as_nested(arguments)
            for name, value in info.items():
                data.set_non_tensor(name, value)
            loss, _ = function(of_losses.actor(fields), model(ids), data)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_training_ends_where_verls_does(aggregation: str) -> None:
    fields = of_losses.fields_of("vanilla", aggregation, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    theirs, ours = trained(losses.ppo_loss, fields), trained(fused_ppo_loss, fields)
    start = TinyModel()
    for name, value in theirs.state_dict().items():
        moved = float((value - start.state_dict()[name]).abs().max())
        # every step adds the rounding of a sum over about 100 tokens to weights of up to 4
        assert moved > 0.01
        error = float((ours.state_dict()[name] - value).abs().max())
        assert error <= STEPS * 100 * torch.finfo(torch.float64).eps * 4, name
