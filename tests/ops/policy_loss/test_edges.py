"""Invariances of the policy loss: packing, padding, row order, splitting, and the contents of masked slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS, METRICS
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends
from tests.ops.policy_loss.test_spec import LOSSES, ragged, segments_of

F64 = torch.float64
CASES = [(backend, dtype) for dtype in (F64, torch.float32) for backend in runnable_backends(SUPPORTS, dtype)]
IDS = [f"{backend}-{str(dtype)[6:]}" for backend, dtype in CASES]
WIDEST = [(b, F64 if b in runnable_backends(SUPPORTS, F64) else torch.float32) for b in dict(CASES)]
NAN, INF = float("nan"), float("inf")

# One variant for each way of reading the arguments. "with" names optional arguments.
VARIANTS: dict[str, dict[str, Any]] = {
    **LOSSES,
    **{
        kind: {"kl": kind, "kl_coef": 0.1, "kl_clamp": (20.0, 10.0)}
        for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
    },
    "kl_unbiased": {"kl": "k3", "kl_coef": 0.1, "kl_unbiased": True, "ratio": "sequence"},
    "vespo-is": {"loss": "vespo", "with": ("is_token",)},
    "policy_mask": {"with": ("policy_mask",), "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.1},
    "policy_mask-sequence": {
        "with": ("policy_mask", "is_row"),
        "ratio": "sequence",
        "aggregation": "seq-mean-token-mean",
    },
    "policy_mask-segment": {"with": ("policy_mask",), "ratio": "segment", "entropy_coef": 0.1},
    "local": {"entropy_coef": 0.1, "entropy_aggregation": "local-token-mean"},
    "entropy": {"entropy_coef": 0.1, "kl_aggregation": "seq-mean-token-mean", "kl": "k2", "kl_coef": 0.2},
    "segment-all": {
        "ratio": "segment",
        "kl": "k3",
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "with": ("is_row",),
    },
    "is_token": {"with": ("is_token",)},
    "is_row": {"with": ("is_row",)},
    "geo_mean-is": {"loss": "geo_mean", "aggregation": "seq-mean-token-sum", "with": ("is_token",)},
    "weights": {"with": ("weights",), "kl": "k1", "kl_coef": 0.1},
    "token-advantages": {"with": ("token_advantages",)},
    "on-policy": {"with": ("no_old",)},
    **{f"mean-{name}": {"aggregation": name} for name in AGGREGATIONS[:-1] if not name.endswith("norm")},
    "mean-norm": {"aggregation": "seq-mean-token-sum-norm", "max_length": 9},
    "count_empty_rows": {"aggregation": "seq-mean-token-mean", "count_empty_rows": True},
}


def config_of(name: str, **changes: Any) -> gk.LossConfig:
    return gk.LossConfig(**{k: v for k, v in VARIANTS[name].items() if k != "with"} | changes)


def arguments(name: str, mask: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the variant, with log-ratios on both sides of the clip bounds."""
    config, extra, shape = config_of(name), VARIANTS[name].get("with", ()), mask.shape
    old = -torch.rand(shape) - 0.7
    kwargs: dict[str, Any] = {
        "logprobs": old + 0.25 * torch.randn(shape),
        "old_logprobs": None if "no_old" in extra else old,
        "advantages": torch.randn(shape if "token_advantages" in extra else shape[:1]),
        "mask": mask,
    }
    if config.ratio.startswith("segment"):
        kwargs["segments"] = segments_of(mask)
    if config.kl != "none":
        kwargs["ref_logprobs"] = old + 0.3 * torch.randn(shape)
    if config.entropy_coef:
        kwargs["entropy"] = torch.rand(shape)
    if "weights" in extra:
        kwargs["weights"] = torch.randn(shape)
    if "policy_mask" in extra:
        kwargs["policy_mask"] = torch.rand(shape) < 0.6
    if "is_token" in extra or "is_row" in extra:
        kwargs["is_weights"] = torch.rand(shape if "is_token" in extra else shape[:1]) + 0.5
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}


class Run:
    def __init__(self, backend: str, given: dict[str, Any], config: gk.LossConfig, **options: Any) -> None:
        device = device_of(backend)
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in (given | options).items()}
        leaves = {k: moved[k].detach().clone().requires_grad_() for k in ("logprobs", "entropy") if k in moved}
        result = gk.policy_loss(**moved | leaves, config=config, backend=backend)
        grads = torch.autograd.grad(result.loss, list(leaves.values()), allow_unused=True)
        self.config, self.loss, self.metrics = config, result.loss.detach().cpu(), result.metrics
        self.tensor = result.metrics.tensor.cpu()
        self.grads = {
            k: torch.zeros_like(leaf).cpu() if g is None else g.cpu()
            for (k, leaf), g in zip(leaves.items(), grads, strict=True)
        }

    def assert_same(self, other: Run) -> None:
        """Checks that both runs agree bit for bit."""
        assert torch.equal(self.loss, other.loss) and torch.isfinite(self.loss)
        for name in self.grads:
            assert torch.equal(self.grads[name], other.grads[name]), f"gradient of {name}"
        for name, mine, others in zip(self.metrics.names, self.tensor, other.tensor, strict=True):
            assert mine == others or (mine.isnan() and others.isnan()), name

    def assert_near(self, other: Run, rearranged: Any = lambda gradient: gradient) -> None:
        """Checks that both runs agree up to the rounding of sums in a different order."""
        unit = 64 * torch.finfo(self.loss.dtype).eps
        close = {"rtol": unit, "atol": unit, "equal_nan": True}
        torch.testing.assert_close(self.loss, other.loss, **close)
        for name in self.grads:
            torch.testing.assert_close(self.grads[name], rearranged(other.grads[name]), **close)
        close |= {"rtol": 8 * unit, "atol": 8 * unit * float(other.tensor.nan_to_num().abs().max())}
        torch.testing.assert_close(self.tensor, other.tensor, **close)


def packed(given: dict[str, Any], lengths: Tensor, tail: int = 0) -> dict[str, Any]:
    """Packs the first tokens of each row, followed by `tail` tokens that belong to no row."""
    inside = torch.arange(given["logprobs"].shape[1]) < lengths[:, None]
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    result: dict[str, Any] = {"cu_seqlens": starts}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            filler = NAN if value.is_floating_point() else 1
            value = torch.cat([value[inside], torch.full((tail,), filler, dtype=value.dtype)])
        result[name] = value
    return result


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_packed_equals_padded(backend: str, dtype: torch.dtype, name: str, tail: int) -> None:
    lengths = torch.tensor([9, 3, 0, 7, 1])
    inside = torch.arange(9) < lengths[:, None]
    kwargs = arguments(name, inside & (torch.rand(5, 9) < 0.8), dtype)
    padded, flat = Run(backend, kwargs, config_of(name)), Run(backend, packed(kwargs, lengths, tail), config_of(name))
    flat.assert_near(padded, lambda gradient: torch.cat([gradient[inside], gradient.new_zeros(tail)]))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_packed_values_of_as_many_rows_as_tokens(backend: str, dtype: torch.dtype, name: str) -> None:
    lengths = torch.tensor([2, 0, 1, 2, 0])
    inside = torch.arange(2) < lengths[:, None]
    kwargs = arguments(name, inside, dtype)
    flat = packed(kwargs, lengths)
    for of_rows in ("advantages", "is_weights"):
        if of_rows in kwargs and kwargs[of_rows].dim() == 1:
            flat[of_rows] = kwargs[of_rows][:, None]
    got, want = (Run(backend, given, config_of(name)) for given in (flat, kwargs))
    unit = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.loss, want.loss, rtol=unit, atol=unit)
    for leaf, gradient in want.grads.items():
        torch.testing.assert_close(got.grads[leaf], gradient[inside], rtol=unit, atol=unit)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_width_of_the_padding_changes_nothing(backend: str, dtype: torch.dtype, name: str) -> None:
    kwargs = arguments(name, ragged(), dtype)
    wide = {}
    for key, value in kwargs.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            filler = NAN if value.is_floating_point() else -1 if key == "segments" else 0
            value = torch.cat([value, torch.full((len(value), 5), filler, dtype=value.dtype)], 1)
        wide[key] = value
    want, got = Run(backend, kwargs, config_of(name)), Run(backend, wide, config_of(name))
    got.assert_near(want, lambda gradient: torch.cat([gradient, gradient.new_zeros(len(gradient), 5)], 1))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_order_of_the_rows_changes_nothing(backend: str, dtype: torch.dtype, name: str) -> None:
    kwargs, order = arguments(name, ragged(), dtype), torch.randperm(5)
    shuffled = {key: value[order] if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    want, got = Run(backend, kwargs, config_of(name)), Run(backend, shuffled, config_of(name))
    got.assert_near(want, lambda gradient: gradient[order])


# Without what is defined per micro-batch
SPLIT = [name for name in VARIANTS if name != "local"]


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_micro_batches_add_up_to_the_whole(backend: str, dtype: torch.dtype, name: str, tensors: bool) -> None:
    mask = ragged(6)
    mask[4] = False
    kwargs, config = arguments(name, mask, dtype), config_of(name)
    whole = Run(backend, kwargs, config)
    counts: dict[str, Any] = {
        "tokens": float(whole.metrics["tokens"]),
        "rows": len(mask) if config.count_empty_rows or config.loss == "geo_mean" else mask.any(1).sum().item(),
        "segments": float(whole.metrics["terms"]),
    }
    if tensors:
        counts = {key: torch.tensor(value, device=device_of(backend)) for key, value in counts.items()}
    options = {} if "weights" in kwargs else {"normalizer": counts}
    parts = []
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
        part = {key: value[rows] if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        parts.append(Run(backend, part, config, **options))
    unit = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=unit, atol=unit)
    for key, gradient in whole.grads.items():
        torch.testing.assert_close(torch.cat([part.grads[key] for part in parts]), gradient, rtol=unit, atol=unit)
    result = whole.metrics.merged(torch.stack([part.tensor for part in parts])).tensor
    close = {"rtol": 8 * unit, "atol": 8 * unit * float(whole.tensor.nan_to_num().abs().max()), "equal_nan": True}
    torch.testing.assert_close(result, whole.tensor, **close)


def test_what_is_merged_with_nothing_is_itself() -> None:
    """A micro-batch without tokens has no extremes and leaves those of the others unchanged."""
    rows = torch.arange(2.0 * len(METRICS), dtype=torch.float64).view(2, -1)
    extremes = [i for i, name in enumerate(METRICS) if name.endswith(("_min", "_max"))]
    rows[1] = 0
    rows[1, extremes] = NAN
    assert extremes and gk.PolicyLossMetrics.merge(rows).equal(rows[0])
    assert gk.PolicyLossMetrics.merge(rows[1:])[extremes].isnan().all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_what_stands_in_masked_slots_changes_nothing(backend: str, dtype: torch.dtype, name: str, value: float) -> None:
    mask = ragged()
    mask &= torch.rand(mask.shape) < 0.8
    mask[2] = False
    kwargs, config = arguments(name, mask, dtype), config_of(name)
    used = mask & (kwargs["segments"] >= 0) if "segments" in kwargs else mask

    def planted(names: Any, filler: float) -> dict[str, Any]:
        result = dict(kwargs)
        for key in names:
            part = used if kwargs[key].dim() == 2 else used.any(1)
            result[key] = torch.where(part, kwargs[key], filler)
        return result

    floats = [key for key, tensor in kwargs.items() if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    want = Run(backend, planted(floats, 0.0), config)
    Run(backend, planted(floats, value), config).assert_same(want)
    for key in floats:
        Run(backend, planted([key], value), config).assert_same(want)
    assert not any(gradient[~used].any() for gradient in want.grads.values())
    if "segments" in kwargs:
        odd = kwargs | {"segments": torch.where(mask, kwargs["segments"], torch.tensor(10**6, dtype=torch.int32))}
        Run(backend, odd, config).assert_same(Run(backend, kwargs, config))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("shape", [(4, 6), (0, 6), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), WIDEST)
def test_nothing_but_masked_tokens(
    backend: str, dtype: torch.dtype, name: str, shape: tuple[int, int], layout: str
) -> None:
    kwargs = arguments(name, torch.zeros(shape, dtype=torch.bool), dtype)
    if layout == "packed":
        kwargs = packed(kwargs, torch.full((shape[0],), shape[1]), tail=3)
    run = Run(backend, kwargs, config_of(name))
    assert float(run.loss) == 0 and not any(gradient.any() for gradient in run.grads.values())
    values = run.metrics.to_dict()
    assert values["rows"] == shape[0]
    for key in ("active_rows", "tokens", "terms", "kept_tokens", "loss", "clipped"):
        assert values[key] == 0, key
    for result in (run.metrics.trl(), run.metrics.verl()):
        missing = {key for key, value in result.items() if value != value}
        # as in TRL, the minimum and maximum over no rows are NaN
        assert missing <= {"clip_ratio/low_min", "clip_ratio/high_max"}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_rows_without_tokens_change_nothing_unless_they_are_counted(
    backend: str, dtype: torch.dtype, name: str
) -> None:
    mask = ragged()
    mask[1] = False
    kwargs, config = arguments(name, mask, dtype), config_of(name)
    without = {key: value[mask.any(1)] if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    got, want = Run(backend, kwargs, config), Run(backend, without, config)
    counted = 4 / 5 if config.count_empty_rows or config.loss == "geo_mean" else 1
    unit = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.loss, want.loss * counted, rtol=unit, atol=unit)
    torch.testing.assert_close(
        got.grads["logprobs"][mask.any(1)], want.grads["logprobs"] * counted, rtol=unit, atol=unit
    )


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_same_input_gives_the_same_bits(backend: str, dtype: torch.dtype, name: str) -> None:
    kwargs = arguments(name, ragged(16, 33), dtype)
    first = Run(backend, kwargs, config_of(name))
    first.assert_same(Run(backend, kwargs, config_of(name)))
    strided = {}
    for key, value in kwargs.items():
        if isinstance(value, Tensor) and value.dim() == 2:
            value = torch.stack([value, value], 2).transpose(0, 1)[..., 0].transpose(0, 1)
        strided[key] = value
    first.assert_same(Run(backend, strided, config_of(name)))


@pytest.mark.parametrize("kind", ["tokens", "rows", "segments"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_normalizer_as_number_tensor_or_by_name_is_the_same(backend: str, dtype: torch.dtype, kind: str) -> None:
    name = {"tokens": "clip", "rows": "mean-seq-mean-token-mean", "segments": "segment"}[kind]
    kwargs, config = arguments(name, ragged(), dtype), config_of(name)
    device = device_of(backend)
    for value in (7, 0.25):  # a count per rank can be below 1
        want = Run(backend, kwargs, config, normalizer=value)
        for same in (torch.tensor(value, device=device), {kind: value}, {kind: torch.tensor([value], device=device)}):
            Run(backend, kwargs, config, normalizer=same).assert_same(want)
    # a count of 0 on the device is taken as 1
    nothing = Run(backend, kwargs, config, normalizer=torch.tensor(0, device=device))
    nothing.assert_same(Run(backend, kwargs, config, normalizer=1))


@pytest.mark.parametrize(
    ("name", "half"), [*((name, torch.bfloat16) for name in VARIANTS), ("clip", torch.float16), ("k3", torch.float16)]
)
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS))
def test_half_precision_is_computed_in_float32(backend: str, name: str, half: torch.dtype) -> None:
    kwargs = arguments(name, ragged(), torch.float32)
    rounded = {k: v.to(half) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    wide = {k: v.float() if isinstance(v, Tensor) and v.dtype == half else v for k, v in rounded.items()}
    got, want = Run(backend, rounded, config_of(name)), Run(backend, wide, config_of(name))
    assert got.loss.dtype == torch.float32 and torch.equal(got.loss, want.loss)
    for key, gradient in got.grads.items():
        assert gradient.dtype == half and torch.equal(gradient, want.grads[key].to(half))


@pytest.mark.parametrize("ratio", ["token", "sequence", "segment", "segment_mean"])
@pytest.mark.parametrize("loss", ["clip", "sapo", "cispo"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_ratio_beyond_the_largest_number(backend: str, dtype: torch.dtype, loss: str, ratio: str) -> None:
    """A clipped term stays clipped and a term without advantage stays 0; TRL returns NaN here. That also holds for a
    token that the old policy could not sample at all."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    kwargs: dict[str, Any] = {
        "logprobs": torch.full((2, 3), -0.5),
        "old_logprobs": torch.full((2, 3), -3000.0),
        "advantages": torch.tensor([1.0, 0.0]),
        "mask": mask,
    }
    if ratio.startswith("segment"):
        kwargs["segments"] = torch.zeros(2, 3, dtype=torch.int32)
    kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in kwargs.items()}
    run = Run(backend, kwargs, gk.LossConfig(loss=loss, ratio=ratio, aggregation="seq-mean-token-mean"))
    assert run.loss.isfinite() and not run.grads["logprobs"][1].any()
    first = run.grads["logprobs"][0]
    assert (first < 0).all() if loss == "cispo" else not first.any()
    for advantages in (kwargs["advantages"], -kwargs["advantages"]):
        kwargs["advantages"], kwargs["old_logprobs"] = advantages, torch.full((2, 3), -3000.0, dtype=dtype)
        want = Run(backend, kwargs, run.config)
        kwargs["old_logprobs"][0, 1:] = -INF
        got = Run(backend, kwargs, run.config)
        assert torch.equal(got.loss, want.loss) and torch.equal(got.grads["logprobs"], want.grads["logprobs"])
