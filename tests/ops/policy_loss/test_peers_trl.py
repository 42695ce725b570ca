"""policy_loss against the installed TRL's own trainers: loss, gradients and every metric by its key."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from grpo_kernels.ops.policy_loss.trl_fields import TRL_DEFAULTS, TRL_LOSS_TYPES
from tests import peers_trl
from tests.harness import device_of, runnable_backends
from tests.strategies import NAN

pytest.importorskip("trl")

CASES = [(backend, dtype) for dtype in (torch.float64, torch.float32) for backend in runnable_backends(SUPPORTS, dtype)]
IDS = [f"{backend}-{str(dtype)[6:]}" for backend, dtype in CASES]

# Values of each option; the first one is the default of the combinations. Temperatures are exact in float32, to which
# TRL rounds them whatever the dtype of the log-probs.
GRID: dict[str, list[Any]] = {
    "loss_type": list(TRL_LOSS_TYPES),
    "importance_sampling_level": ["token", "sequence"],
    "beta": [0.0, 0.1],
    "use_bias_correction_kl": [True, False],
    "epsilon_high": [None, 0.28, 1.25],
    "delta": [None, 1.3, 0.7],
    "vllm_importance_sampling_mode": [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_importance_sampling_clip_max": [1.1, None],
    "vllm_importance_sampling_clip_min": [None, 0.9],
    "off_policy_mask_threshold": [None, 0.02, 0.3],
    "top_entropy_quantile": [1.0, 0.3, 0.8],
    "entropy_coef": [0.0, 0.01],
    "shape": ["row", "token"],
    "old": ["given", None],
    "sapo_temperature_neg": [1.0625, 1.5],
    "vespo_k_neg": [3.0, 1.5],
    "max_completion_length": [512, 7],
    "scored": ["all", "some"],
    "empty": [False, True],
}


def combinations() -> list[dict[str, Any]]:
    """Every loss with each non-default value alone, and with many at once."""
    picked = []
    for kind in TRL_LOSS_TYPES:
        base = {name: values[0] for name, values in GRID.items()} | {"loss_type": kind}
        picked += [base | {name: value} for name, values in GRID.items() for value in values if name != "loss_type"]
        narrow = base | {"scored": "some", "vllm_importance_sampling_clip_min": 0.9}
        picked += [narrow | {"vllm_importance_sampling_mode": mode} for mode in GRID["vllm_importance_sampling_mode"]]
        picked.append(base | {"beta": 0.1, "use_bias_correction_kl": False})
    draw = random.Random(0)
    picked += [{name: draw.choice(values) for name, values in GRID.items()} for _ in range(150)]
    unique = {repr(options): options for options in picked if possible(options)}
    return list(unique.values())


def possible(options: dict[str, Any]) -> bool:
    if options["loss_type"] == "vespo" and str(options["vllm_importance_sampling_mode"]).startswith("sequence"):
        return False  # both raise an error
    mode, bounds = str(options["vllm_importance_sampling_mode"]), ("clip_max", "clip_min")
    if mode.endswith("truncate") and all(options[f"vllm_importance_sampling_{bound}"] is None for bound in bounds):
        return False  # TRL's clamp fails
    # a cap below 1 clips the ratio 1 of an empty row: see test_rows_without_tokens_are_not_counted_as_clipped
    by_row = options["importance_sampling_level"] == "sequence" and options["shape"] == "row" and options["empty"]
    capped = options["loss_type"] == "cispo" or options["delta"] == 0.7
    return not (by_row and capped)


def named(options: dict[str, Any]) -> str:
    changed = [f"{name}={value}" for name, value in options.items() if value != GRID[name][0]]
    return ",".join(changed) or "defaults"


@dataclasses.dataclass
class Batch:
    """Log-probs on both sides of the clip bounds, ragged rows with holes, all exact in float32."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    sampling: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{k: v if v.dtype == torch.bool else v.to(dtype) for k, v in values.items()})


def make_batch(shape: str = "row", scored: str = "all", empty: bool = False) -> Batch:
    rows, width = 6, 11
    old = -3 * torch.rand(rows, width) - 0.7
    logprobs = old + 0.25 * torch.randn(rows, width) + torch.tensor([0.3, -0.35, 0.05, 0.35, -0.3, -0.05])[:, None]
    mask = torch.arange(width) < torch.randint(4, width + 1, (rows, 1))
    mask &= torch.rand(rows, width) < 0.9
    mask[0] = True
    if empty:
        mask[2] = False
    sampling = old + 0.1 * torch.randn(rows, width)
    if scored == "some":
        sampling[torch.rand(rows, width) < 0.3] = NAN
    advantages = torch.randn(rows, width) if shape == "token" else torch.tensor([1.5, -0.7, -1.0, 0.0, -1.2, 0.6])
    entropy = 2 * torch.rand(rows, width)
    ref = logprobs + 0.3 * torch.randn(rows, width)
    return Batch(logprobs, old, ref, sampling, entropy, mask, advantages)


def trl_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The options as fields of GRPOConfig."""
    fields = {name: value for name, value in options.items() if name in TRL_DEFAULTS}
    if options.get("vllm_importance_sampling_mode") is None:
        fields.pop("vllm_importance_sampling_mode", None)
        return fields
    return fields | {"use_vllm": True}


def magnitudes(batch: Batch, options: dict[str, Any]) -> Tensor:
    """Sum of the absolute values behind each token's term, times the factor that amplifies their rounding."""
    d, k = batch.logprobs - batch.old, (batch.ref - batch.logprobs).abs()
    advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
    terms = advantages.abs() * d.abs().exp() * (1 + batch.logprobs.abs() + batch.old.abs())
    terms = terms + options["beta"] * (k.exp() + k + 1) * d.abs().exp() + batch.entropy
    # exp(k log w - lambda w) inherits the rounding of the many factors of w
    return torch.where(batch.mask, terms, 0) * (64 if options["loss_type"] == "vespo" else 1)


class Result:
    def __init__(self, loss: Tensor, logprobs: Tensor, entropy: Tensor, metrics: dict[str, float]) -> None:
        inputs = (logprobs, entropy)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        self.loss, self.metrics = loss.detach(), metrics
        self.grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def theirs(batch: Batch, options: dict[str, Any], gmpo: bool = False) -> tuple[Result, Tensor | None]:
    fields = trl_fields(options)
    logprobs, entropy = (x.clone().requires_grad_() for x in (batch.logprobs, batch.entropy))
    inputs = {"advantages": batch.advantages, "ref_per_token_logps": batch.ref}
    if options["old"] is not None or "use_vllm" in fields:
        inputs["old_per_token_logps"] = batch.old
    ratio, measured = None, {}
    if "use_vllm" in fields:
        ratio, measured = peers_trl.sampler_ratio(batch.old, batch.sampling, batch.mask, **fields)
        inputs |= {"importance_sampling_ratio": ratio, "sampling_per_token_logps": batch.sampling}
    loss, metrics = peers_trl.policy_loss(logprobs, entropy, batch.mask, inputs, gmpo=gmpo, **fields)
    return Result(loss, logprobs, entropy, metrics | measured), ratio


# settings of GRPOConfig that are arguments of the loss
COMPOSED = {name for name in TRL_DEFAULTS if name.startswith("vllm")}
COMPOSED |= {"use_vllm", "top_entropy_quantile", "off_policy_mask_threshold"}


def ours(backend: str, batch: Batch, options: dict[str, Any], ratio: Tensor | None = None, **changes: Any) -> Result:
    """Runs our loss with masked slots filled with NaN."""
    device = device_of(backend)

    def moved(value: Tensor) -> Tensor:
        value = value.to(device)
        return torch.where(batch.mask.to(device), value, NAN) if value.shape == batch.mask.shape else value

    logprobs, entropy = (moved(x).detach().requires_grad_() for x in (batch.logprobs, batch.entropy))
    fields = trl_fields(options)
    own = {name: value for name, value in fields.items() if name not in COMPOSED}
    arguments: dict[str, Any] = {"config": gk.LossConfig.trl(**own)}
    rows = {"mask": batch.mask.to(device)}
    if options["beta"]:
        arguments["ref_logprobs"] = moved(batch.ref)
    measured: dict[str, float] = {}
    if "use_vllm" in fields:
        of_sampler = {name: value for name, value in fields.items() if name.startswith("vllm")}
        config = gk.CorrectionConfig.trl(**of_sampler)
        correction = gk.sampling_correction(moved(batch.old), moved(batch.sampling), config=config, **rows)
        arguments["is_weights"] = correction.weights
        measured = correction.metrics.to_dict("trl")
    if ratio is not None:
        arguments["is_weights"] = moved(ratio)
    bonus: Tensor | None = None
    if options["top_entropy_quantile"] < 1:
        kept = gk.variants.high_entropy_mask(entropy, rows["mask"], options["top_entropy_quantile"])
        arguments["policy_mask"] = kept
        bonus = options["entropy_coef"] * torch.where(kept, entropy, 0).sum() / kept.sum().clamp(min=1)
        arguments["config"] = dataclasses.replace(arguments["config"], entropy_coef=0.0)
    if options["off_policy_mask_threshold"] is not None:
        old = moved(batch.old) if options["old"] is not None or "use_vllm" in fields else logprobs.detach()
        near = gk.variants.off_policy_mask(
            logprobs,
            moved(batch.sampling) if "use_vllm" in fields else old,
            moved(batch.advantages),
            threshold=options["off_policy_mask_threshold"],
            **rows,
        )
        arguments["policy_mask"] = arguments.get("policy_mask", near) & near
    if options["loss_type"] in ("dapo", "cispo", "vespo"):
        arguments["normalizer"] = batch.mask.sum().to(device)
    has_old = options["old"] is not None or "use_vllm" in fields
    old = moved(batch.old) if has_old else None
    got = gk.policy_loss(
        logprobs,
        old,
        moved(batch.advantages),
        **rows,
        entropy=entropy,
        backend=backend,
        **arguments | changes,
    )
    metrics = got.metrics.trl()
    if bonus is not None and options["entropy_coef"] != 0:
        metrics |= {"policy_loss": got.loss.item(), "entropy_coef": options["entropy_coef"]}
    loss = got.loss if bonus is None or options["entropy_coef"] == 0 else got.loss - bonus
    return Result(loss, logprobs, entropy, metrics | measured)


def assert_close(got: Tensor, want: Tensor, allowed: float, what: str) -> None:
    got = got.cpu()
    assert got.dtype == want.dtype and got.isfinite().all(), f"{what}: {got}"
    error = float((got.double() - want.double()).abs().max())
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g} (got {got}, TRL {want})"


def assert_parity(got: Result, want: Result, batch: Batch, options: dict[str, Any], subset: bool = False) -> None:
    """Checks agreement within 64 roundings of the sum of terms, each a few operations in a different order."""
    unit = 64 * torch.finfo(want.loss.dtype).eps
    terms = magnitudes(batch, options).double()
    count = max(int(batch.mask.sum()), 1)
    divisor = {"dr_grpo": len(terms) * options["max_completion_length"], "luspo": len(terms)}.get(
        options["loss_type"], count
    )
    # a mean over rows of token means gives tokens of short rows more weight, at most by a factor of the width
    spread = terms.shape[1] if options["loss_type"] in ("grpo", "sapo", "luspo") else 1
    assert_close(got.loss, want.loss, unit * spread * float(terms.sum()) / divisor, "loss")
    for name, ours_, trl_ in zip(("logprobs", "entropy"), got.grads, want.grads, strict=True):
        allowed = unit * spread * terms.shape[1] * float(terms.max()) / divisor
        assert_close(torch.where(batch.mask, ours_.cpu(), 0), torch.where(batch.mask, trl_, 0), allowed, name)
        assert not ours_.cpu()[~batch.mask].any(), f"gradient of {name} where the mask is 0"
    if not subset:
        assert set(got.metrics) == set(want.metrics)
    for key, value in got.metrics.items():
        # TRL counts clipped tokens in float32
        rounding = torch.finfo(torch.float32).eps if "clip_ratio" in key else unit * max(1.0, float(terms.max()))
        assert value == pytest.approx(want.metrics[key], rel=rounding, abs=rounding), key


@pytest.mark.parametrize("options", combinations(), ids=named)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_grpo_trainer(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    batch = make_batch(options["shape"], options["scored"], options["empty"]).to(dtype)
    want, ratio = theirs(batch, options)
    assert_parity(ours(backend, batch, options), want, batch, options)
    if ratio is not None:
        assert_parity(ours(backend, batch, options, ratio=ratio), want, batch, options, subset=True)


def test_the_cases_reach_what_they_are_about() -> None:
    batch = make_batch()
    d = (batch.logprobs - batch.old)[batch.mask].exp()
    rows = (torch.where(batch.mask, batch.logprobs - batch.old, 0).sum(1) / batch.mask.sum(1)).exp()
    for ratio in (d, rows):
        assert (ratio < 0.8).any() and (ratio > 1.2).any() and ((ratio > 0.8) & (ratio < 1.2)).any()
    distances = -torch.where(batch.mask, batch.logprobs - batch.old, 0).sum(1) / batch.mask.sum(1)
    of_worse = (distances[batch.advantages < 0] > 0.3).tolist()
    assert any(of_worse) and not all(of_worse)
    options = {name: values[0] for name, values in GRID.items()} | {"loss_type": "grpo"}
    for mode in GRID["vllm_importance_sampling_mode"][1:]:
        _, weights = theirs(batch, options | {"vllm_importance_sampling_mode": mode})
        assert weights is not None and weights.unique().numel() > 1
    assert len({options["loss_type"] for options in combinations()}) == 8 and len(combinations()) > 300


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.4, 0.3)])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_gmpo_trainer(
    backend: str, dtype: torch.dtype, empty: bool, low: float, high: float | None, beta: float
) -> None:
    batch = make_batch(empty=empty).to(dtype)
    options = {name: values[0] for name, values in GRID.items()}
    options |= {"loss_type": "grpo", "beta": beta}
    want, _ = theirs(batch, options | {"epsilon": low, "epsilon_high": high}, gmpo=True)
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
    want.loss -= want.loss.new_tensor(-float(batch.advantages[2]) / len(batch.advantages) if empty else 0.0)
    assert_parity(got, want, batch, options)


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS))
def test_weight_of_vespo_that_overflows_is_zero(backend: str) -> None:
    options = {name: values[0] for name, values in GRID.items()} | {"loss_type": "vespo", "vespo_k_neg": 200.0}
    batch = make_batch()
    want, _ = theirs(batch, options)
    got = ours(backend, batch, options)
    gone = batch.mask & (want.grads[0] == 0) & (batch.advantages[:, None] < 0)
    assert gone.any() and not got.grads[0].cpu()[gone].any() and got.loss.isfinite()


# Intended differences


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_rows_without_tokens_are_not_counted_as_clipped(backend: str) -> None:
    """TRL takes the ratio of such a row as 1, so a cap below 1 counts it as clipped."""
    options = {name: values[0] for name, values in GRID.items()}
    options |= {"loss_type": "cispo", "importance_sampling_level": "sequence", "empty": True}
    batch = make_batch(empty=True).to(torch.float64)
    batch.advantages[2] = 1.0
    want, _ = theirs(batch, options)
    got = ours(backend, batch, options)
    rows = len(batch.advantages)
    assert want.metrics["cispo_clip_ratio"] - got.metrics["cispo_clip_ratio"] == pytest.approx(1 / rows)
    torch.testing.assert_close(got.loss.cpu(), want.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_temperatures_are_not_rounded_to_float32(backend: str) -> None:
    """TRL's torch.where of two Python numbers returns float32, which shows in float64 at TRL's default of 1.05."""
    options = {name: values[0] for name, values in GRID.items()} | {"loss_type": "sapo"}
    batch = make_batch().to(torch.float64)
    rounded = float(torch.tensor(1.05))
    want, _ = theirs(batch, options | {"sapo_temperature_neg": 1.05})
    got = ours(backend, batch, options | {"sapo_temperature_neg": rounded})
    exact = ours(backend, batch, options | {"sapo_temperature_neg": 1.05})
    torch.testing.assert_close(got.loss.cpu(), want.loss, rtol=1e-13, atol=0)
    assert 1e-10 < abs(float(exact.loss - want.loss)) < 1e-6


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_padding_is_no_part_of_vespos_weight(backend: str) -> None:
    """TRL also clamps the weight 1 of masked tokens: with bounds that exclude 1, its loss depends on the width."""
    options = {name: values[0] for name, values in GRID.items()}
    options |= {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
    options["vllm_importance_sampling_clip_max"] = 0.9
    batch = make_batch().to(torch.float64)
    assert abs(float(theirs(batch, options)[0].loss - ours(backend, batch, options).loss)) > 1e-3
    batch.mask[:] = True
    want, _ = theirs(batch, options)
    assert_parity(ours(backend, batch, options), want, batch, options)


@pytest.mark.parametrize("kind", TRL_LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_no_tokens_at_all(backend: str, dtype: torch.dtype, level: str, kind: str) -> None:
    options = {name: values[0] for name, values in GRID.items()}
    options |= {"loss_type": kind, "importance_sampling_level": level, "beta": 0.1, "epsilon_high": 0.28}
    batch = make_batch().to(dtype)
    batch.mask[:] = False
    want, _ = theirs(batch, options)
    got = ours(backend, batch, options)
    assert float(got.loss) == float(want.loss) == 0 and not any(g.any() for g in got.grads)
    assert set(got.metrics) == set(want.metrics)
    for key, value in got.metrics.items():
        if key != "cispo_clip_ratio":  # see test_rows_without_tokens_are_not_counted_as_clipped
            assert value == pytest.approx(want.metrics[key], nan_ok=True), key


def test_defaults_are_those_of_the_installed_trl() -> None:
    installed = peers_trl.defaults()
    assert {name: installed[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
    assert gk.LossConfig.trl() == gk.LossConfig.trl(**TRL_DEFAULTS)
