"""policy_loss against the installed TRL's own trainers: loss, gradients and every metric by its key.

Faults that this is for: a setting of TRL that is translated into another formula, bound, unit or order of operations; a
metric of another unit or name; a default that is not TRL's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.trl_fields import TRL_DEFAULTS, TRL_LOSS_TYPES
from tests import peers_trl
from tests.harness import examples
from tests.ops.policy_loss import peers
from tests.ops.policy_loss.cases import F64, NAN
from tests.ops.policy_loss.peers import Result, on_backends, on_dtypes
from tests.ops.promises import Inputs

pytest.importorskip("trl")

# Values of each option, the default first. Temperatures are exact in float32, to which TRL rounds them whatever the
# dtype of the log-probs.
GRID: dict[str, list[Any]] = {
    "importance_sampling_level": ["token", "sequence"],
    "beta": [0.0, 0.1],
    "use_bias_correction_kl": [True, False],
    "epsilon": [0.2],
    "epsilon_high": [None, 0.0, 0.28, 1.25],
    "delta": [None, 1.3, 0.7],
    "vllm_importance_sampling_mode": [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_importance_sampling_clip_max": [1.1, None],
    "vllm_importance_sampling_clip_min": [None, 0.9],
    "off_policy_mask_threshold": [None, 0.02, 0.3],
    "top_entropy_quantile": [1.0, 0.3, 0.8],
    "entropy_coef": [0.0, 0.01],
    "sapo_temperature_neg": [1.0625, 1.5],
    "vespo_k_neg": [3.0, 1.5],
    "max_completion_length": [512, 7],
    "shape": ["row", "token"],
    "old": ["given", None],
    "scored": ["all", "some"],
    "empty": [False, True],
}


def options_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {name: values[0] for name, values in GRID.items()} | {"loss_type": kind} | changes


def possible(options: dict[str, Any]) -> bool:
    mode, bounds = str(options["vllm_importance_sampling_mode"]), ("clip_max", "clip_min")
    if options["loss_type"] == "vespo" and mode.startswith("sequence"):
        return False  # both raise an error
    if mode.endswith("truncate") and all(options[f"vllm_importance_sampling_{bound}"] is None for bound in bounds):
        return False  # TRL's clamp fails
    # a cap below 1 clips the ratio 1 of an empty row: see test_rows_without_tokens_are_not_counted_as_clipped
    by_row = options["importance_sampling_level"] == "sequence" and options["shape"] == "row" and options["empty"]
    return not (by_row and (options["loss_type"] == "cispo" or options["delta"] == 0.7))


def make_batch(options: dict[str, Any], dtype: torch.dtype = F64) -> Inputs:
    batch = peers.make_batch(dtype)
    if options["empty"]:
        batch["mask"][2] = False
    if options["scored"] == "some":
        batch["sampling_logprobs"][torch.rand(batch["mask"].shape) < 0.3] = NAN
    if options["shape"] == "token":
        batch["advantages"] = batch["token_advantages"]
    return batch


# settings of GRPOConfig that are arguments of the loss
COMPOSED = {name for name in TRL_DEFAULTS if name.startswith("vllm")}
COMPOSED |= {"use_vllm", "top_entropy_quantile", "off_policy_mask_threshold"}


def trl_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The options as fields of GRPOConfig."""
    fields = {name: value for name, value in options.items() if name in TRL_DEFAULTS}
    if options["vllm_importance_sampling_mode"] is None:
        del fields["vllm_importance_sampling_mode"]
        return fields
    return fields | {"use_vllm": True}


def theirs(batch: Inputs, options: dict[str, Any], gmpo: bool = False) -> tuple[Result, Tensor | None]:
    """TRL's result and its importance weights."""
    fields = trl_fields(options)
    batch = batch | {name: batch[name].clone().requires_grad_() for name in peers.LEAVES}
    inputs = {"advantages": batch["advantages"], "ref_per_token_logps": batch["ref_logprobs"]}
    if options["old"] is not None or "use_vllm" in fields:
        inputs["old_per_token_logps"] = batch["old_logprobs"]
    ratio, measured = None, {}
    if "use_vllm" in fields:
        sampling = batch["sampling_logprobs"]
        ratio, measured = peers_trl.sampler_ratio(batch["old_logprobs"], sampling, batch["mask"], **fields)
        inputs |= {"importance_sampling_ratio": ratio, "sampling_per_token_logps": sampling}
    leaves = batch["logprobs"], batch["entropy"]
    loss, metrics = peers_trl.policy_loss(*leaves, batch["mask"], inputs, gmpo=gmpo, **fields)
    return peers.result_of(loss, batch, metrics | measured), ratio


def ours(backend: str, batch: Inputs, options: dict[str, Any], **changes: Any) -> Result:
    """Our result of TRL's settings, with the arguments that those need which LossConfig.trl refuses."""
    fields, b = trl_fields(options), peers.placed(batch, backend)
    logprobs, entropy, mask = b["logprobs"], b["entropy"], b["mask"]
    has_old = options["old"] is not None or "use_vllm" in fields
    config = gk.LossConfig.trl(**{name: value for name, value in fields.items() if name not in COMPOSED})
    arguments: dict[str, Any] = {"ref_logprobs": b["ref_logprobs"]} if options["beta"] else {}
    measured: dict[str, float] = {}
    if "use_vllm" in fields:
        of_sampler = gk.CorrectionConfig.trl(**{k: v for k, v in fields.items() if k.startswith("vllm")})
        correction = gk.sampling_correction(b["old_logprobs"], b["sampling_logprobs"], config=of_sampler, mask=mask)
        arguments["is_weights"] = correction.weights
        measured = correction.metrics.trl()
    bonus: Tensor | None = None
    if options["top_entropy_quantile"] < 1:
        kept = gk.variants.high_entropy_mask(entropy, mask, options["top_entropy_quantile"])
        arguments["policy_mask"] = kept
        if options["entropy_coef"]:
            bonus = options["entropy_coef"] * torch.where(kept, entropy, 0).sum() / kept.sum().clamp(min=1)
            config = dataclasses.replace(config, entropy_coef=0.0)
    if options["off_policy_mask_threshold"] is not None:
        old = b["old_logprobs"] if has_old else logprobs.detach()
        other = b["sampling_logprobs"] if "use_vllm" in fields else old
        threshold = options["off_policy_mask_threshold"]
        near = gk.variants.off_policy_mask(logprobs, other, b["advantages"], threshold=threshold, mask=mask)
        arguments["policy_mask"] = arguments.get("policy_mask", near) & near
    if options["loss_type"] in ("dapo", "cispo", "vespo"):
        arguments["normalizer"] = mask.sum()
    arguments |= {"mask": mask, "entropy": entropy, "config": config, "backend": backend} | changes
    got = gk.policy_loss(logprobs, b["old_logprobs"] if has_old else None, b["advantages"], **arguments)
    metrics = got.metrics.trl()
    if bonus is None:
        return peers.result_of(got.loss, b, metrics | measured)
    metrics |= {"policy_loss": got.loss.item(), "entropy_coef": options["entropy_coef"]}
    return peers.result_of(got.loss - bonus, b, metrics | measured)


def assert_parity(got: Result, want: Result, batch: Inputs, options: dict[str, Any], subset: bool = False) -> None:
    d, k = batch["logprobs"] - batch["old_logprobs"], (batch["ref_logprobs"] - batch["logprobs"]).abs()
    advantages = batch["advantages"].view(len(d), -1).abs()
    terms = advantages * d.abs().exp() * (1 + batch["logprobs"].abs() + batch["old_logprobs"].abs())
    terms = terms + options["beta"] * (k.exp() + k + 1) * d.abs().exp() + batch["entropy"]
    # exp(k log w - lambda w) inherits the rounding of the many factors of w
    terms = terms * (64 if options["loss_type"] == "vespo" else 1)
    rows, width = d.shape
    divisors = {"dr_grpo": rows * options["max_completion_length"], "luspo": rows}
    # a mean over rows of token means gives tokens of short rows more weight, at most by a factor of the width
    spread = width if options["loss_type"] in ("grpo", "sapo", "luspo") else 1
    share = spread / divisors.get(options["loss_type"], max(int(batch["mask"].sum()), 1))
    peers.assert_parity(got, want, batch["mask"], terms, share, subset)


@pytest.mark.parametrize("kind", TRL_LOSS_TYPES)
@on_dtypes
def test_grpo_trainer(backend: str, dtype: torch.dtype, kind: str) -> None:
    @settings(max_examples=examples(30 if backend in ("cpu", "reference") else 9))
    @given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in GRID.items()}))
    def check(drawn: dict[str, Any]) -> None:
        options = options_of(kind, **drawn)
        assume(possible(options))
        torch.manual_seed(0)
        batch = make_batch(options, dtype)
        want, ratio = theirs(batch, options)
        assert_parity(ours(backend, batch, options), want, batch, options)
        if ratio is not None:  # as an argument
            weights = peers.placed(batch | {"is_weights": ratio}, backend)["is_weights"]
            assert_parity(ours(backend, batch, options, is_weights=weights), want, batch, options, subset=True)

    check()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.4, 0.3)])
@pytest.mark.parametrize("empty", [False, True])
@on_dtypes
def test_gmpo_trainer(
    backend: str, dtype: torch.dtype, empty: bool, low: float, high: float | None, beta: float
) -> None:
    options = options_of("grpo", beta=beta, empty=empty, epsilon=low, epsilon_high=high)
    batch = make_batch(options, dtype)
    want, _ = theirs(batch, options, gmpo=True)
    config = gk.LossConfig(
        loss="geo_mean",
        clip_low=low,
        clip_high=low if high is None else high,
        aggregation="seq-mean-token-sum",
        kl="k3" if beta else "none",
        kl_coef=beta,
        kl_aggregation="seq-mean-token-mean",
        count_empty_rows=True,
    )
    got = ours(backend, batch, options, config=config)
    # A row without tokens has no term here; in TRL its term is the constant -advantage.
    want.loss -= want.loss.new_tensor(-float(batch["advantages"][2]) / len(batch["advantages"]) if empty else 0.0)
    assert_parity(got, want, batch, options)


@on_backends
def test_weight_of_vespo_that_overflows_is_zero(backend: str) -> None:
    options = options_of("vespo", vespo_k_neg=200.0)
    batch = make_batch(options, torch.float32)
    want, got = theirs(batch, options)[0], ours(backend, batch, options)
    gone = batch["mask"] & (want.gradients["logprobs"] == 0) & (batch["advantages"][:, None] < 0)
    assert gone.any() and not got.gradients["logprobs"][gone].any() and got.loss.isfinite()


# Intended differences


@on_backends
def test_rows_without_tokens_are_not_counted_as_clipped(backend: str) -> None:
    """TRL takes the ratio of such a row as 1, so a cap below 1 counts it as clipped."""
    options = options_of("cispo", importance_sampling_level="sequence", empty=True)
    batch = make_batch(options)
    batch["advantages"][2] = 1.0
    want, got = theirs(batch, options)[0], ours(backend, batch, options)
    missing = want.metrics["cispo_clip_ratio"] - got.metrics["cispo_clip_ratio"]
    assert missing == pytest.approx(1 / len(batch["advantages"]))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)


@on_backends
def test_temperatures_are_not_rounded_to_float32(backend: str) -> None:
    """TRL's torch.where of two Python numbers returns float32, which shows in float64 at TRL's default of 1.05."""
    exact, rounded = (options_of("sapo", sapo_temperature_neg=t) for t in (1.05, float(torch.tensor(1.05))))
    batch = make_batch(exact)
    want, _ = theirs(batch, exact)
    torch.testing.assert_close(ours(backend, batch, rounded).loss, want.loss, rtol=1e-13, atol=0)
    assert 1e-10 < abs(float(ours(backend, batch, exact).loss - want.loss)) < 1e-6


@on_backends
def test_padding_is_no_part_of_vespos_weight(backend: str) -> None:
    """TRL also clamps the weight 1 of masked tokens: with bounds that exclude 1, its loss depends on the width."""
    options = options_of("vespo", vllm_importance_sampling_mode="token_truncate")
    options["vllm_importance_sampling_clip_max"] = 0.9
    batch = make_batch(options)
    assert abs(float(theirs(batch, options)[0].loss - ours(backend, batch, options).loss)) > 1e-3
    batch["mask"][:] = True
    assert_parity(ours(backend, batch, options), theirs(batch, options)[0], batch, options)


@pytest.mark.parametrize("kind", TRL_LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@on_dtypes
def test_no_tokens_at_all(backend: str, dtype: torch.dtype, level: str, kind: str) -> None:
    options = options_of(kind, importance_sampling_level=level, beta=0.1, epsilon_high=0.28)
    batch = make_batch(options, dtype)
    batch["mask"][:] = False
    want, got = theirs(batch, options)[0], ours(backend, batch, options)
    assert float(got.loss) == float(want.loss) == 0 and not any(g.any() for g in got.gradients.values())
    for metrics in (got.metrics, want.metrics):
        metrics.pop("cispo_clip_ratio", None)  # see test_rows_without_tokens_are_not_counted_as_clipped
    assert got.metrics == pytest.approx(want.metrics, nan_ok=True)


def test_defaults_are_those_of_the_installed_trl() -> None:
    installed = peers_trl.defaults()
    assert {name: installed[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
    assert gk.LossConfig.trl() == gk.LossConfig.trl(**TRL_DEFAULTS)
