"""Properties of the CUDA kernels alone: the number of launches per call, and the same bits under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import METRICS
from tests import emulation
from tests.emulation import launches
from tests.harness import assert_within_budget

pytestmark = emulation.only

CONFIGS = {
    "token": gk.LossConfig.trl(loss_type="dapo", beta=0.1),
    "sequence": gk.LossConfig.trl(loss_type="grpo", importance_sampling_level="sequence", beta=0.1),
    "segment": gk.LossConfig(ratio="segment", kl="k3", kl_coef=0.1),
    "geo_mean": gk.LossConfig.verl(loss_mode="geo_mean", use_kl_loss=True),
    "vespo": gk.LossConfig.trl(loss_type="vespo", beta=0.1),
}
ALL_KNOWN = {"tokens": 40.0, "rows": 5.0, "segments": 9.0}


def batch(rows: int = 5, width: int = 70) -> dict[str, Any]:
    torch.manual_seed(0)
    lp = -torch.rand(rows, width)
    return {
        "logprobs": lp,
        "old_logprobs": lp + 0.1 * torch.randn_like(lp),
        "advantages": torch.randn(rows),
        "ref_logprobs": lp + 0.1 * torch.randn_like(lp),
        "mask": torch.rand(rows, width) > 0.3,
        "segments": torch.arange(width).div(7, rounding_mode="floor").expand(rows, width),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_known_counts_leave_one_launch_and_a_reduction(name: str) -> None:
    options = {"config": CONFIGS[name], "normalizer": ALL_KNOWN, "backend": "cuda"}
    assert launches(lambda: gk.policy_loss(**batch(), **options)) == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_counting_takes_one_launch_more(name: str) -> None:
    assert launches(lambda: gk.policy_loss(**batch(), config=CONFIGS[name], backend="cuda")) == 3


@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
def test_segments_that_do_not_ascend_are_refused(ratio: str) -> None:
    config = gk.LossConfig(ratio=ratio)
    arguments = batch() | {"ref_logprobs": None}
    gk.policy_loss(**arguments, config=config, backend="cuda")
    for wrong in (torch.arange(70).flip(0), torch.arange(70) // 7 + 64):  # one descends, one reaches the row's length
        segments = arguments["segments"].clone()
        segments[3] = wrong
        with pytest.raises(RuntimeError, match="policy_loss: segments must ascend from 0 along each row"):
            gk.policy_loss(**arguments | {"segments": segments}, config=config, backend="cuda")
    # ids at masked tokens are ignored
    segments = torch.where(arguments["mask"], arguments["segments"], 1000)
    result = gk.policy_loss(**arguments | {"segments": segments}, config=config, backend="cuda")
    assert torch.equal(result.loss, gk.policy_loss(**arguments, config=config, backend="cuda").loss)


def test_many_rows_are_reduced_in_the_same_launch() -> None:
    call = lambda: gk.policy_loss(**batch(1100, 2), config=CONFIGS["token"], normalizer=7.0, backend="cuda")  # noqa: E731
    assert launches(call) == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    results = []
    for seed in range(4):
        emulation.set_schedule(seed)
        arguments = batch()
        leaf = arguments.pop("logprobs").detach().requires_grad_()
        result = gk.policy_loss(leaf, **arguments, config=CONFIGS[name], backend="cuda")
        results.append((torch.autograd.grad(result.loss, leaf)[0], result.metrics.tensor.nan_to_num(-1)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


# The common losses without other settings have kernels of their own, which take four tokens at a time: by name, the
# settings and whether advantages are those of rows. With a k3 KL each is compiled again.
BARE: dict[str, tuple[dict[str, Any], bool]] = {
    "clip": ({"dual_clip": 3.0}, False),
    "cispo": ({"loss": "cispo", "clip_low": 0.2, "clip_high": 0.3}, False),
    "gspo": ({"ratio": "sequence", "clip_low": 0.01, "clip_high": 0.02}, True),
}


def quads(width: int, rows: int, mask: str, by_row: bool, offset: int) -> dict[str, Tensor]:
    """A float64 batch of float32 numbers whose arrays begin `offset` items behind an aligned address."""
    torch.manual_seed(width)

    def shifted(values: Tensor) -> Tensor:
        storage = torch.empty(offset + values.numel(), dtype=values.dtype)
        return storage[offset:].view(values.shape).copy_(values)

    logprobs = -torch.rand(rows, width)
    valid = torch.rand(rows, width) > 0.4
    if mask == "padding":
        valid = torch.arange(width) < torch.randint(width + 1, (rows, 1))
    arguments = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.3 * torch.randn(rows, width),
        "advantages": torch.randn(rows) if by_row else torch.randn(rows, width),
        "ref_logprobs": logprobs + 0.2 * torch.randn(rows, width),
    }
    # tokens that are not valid may hold anything
    arguments = {
        k: v.masked_fill(~valid, float("nan")) if v.dim() == 2 and mask != "none" else v for k, v in arguments.items()
    }
    if mask != "none":
        arguments["mask"] = valid
    return {k: shifted(v) for k, v in arguments.items()}


def assert_same_loss(config: gk.LossConfig, arguments: dict[str, Tensor]) -> None:
    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, float]]:
        own = {k: v.to(dtype) if v.is_floating_point() else v for k, v in arguments.items()}
        leaf = own.pop("logprobs").detach().requires_grad_()
        result = gk.policy_loss(leaf, **own, config=config, backend=backend)
        return torch.autograd.grad(result.loss, leaf)[0], result.metrics.to_dict()

    (gold, expected), (working, budget), (got, metrics) = (
        run("reference", torch.float64),
        run("reference", torch.float32),
        run("cuda", torch.float32),
    )
    assert_within_budget(got, working, gold, "gradient")
    size = max(expected["tokens"], 1) * 4  # the largest ratio is below e^1.4
    for name in METRICS:
        rounding = 0.0 if name in ("tokens", "terms", "kept_tokens", "rows", "active_rows") else 1e-7 * size
        # a ratio at a bound may fall on either side of it
        rounding = 1.0 if "clipped" in name else rounding
        near = abs(metrics[name] - expected[name]) <= 2 * abs(budget[name] - expected[name]) + rounding
        assert near or (metrics[name] != metrics[name] and expected[name] != expected[name]), name


@pytest.mark.parametrize("mask", ["none", "holes", "padding"])
@pytest.mark.parametrize("width", [1, 3, 4, 5, 31, 64, 127, 1023, 1024, 1025, 2052])
@pytest.mark.parametrize("name", BARE)
def test_four_tokens_at_a_time(name: str, width: int, mask: str) -> None:
    settings, needs_row_advantages = BARE[name]
    for offset in (0, 1):
        for has_kl in (True, False):
            config = gk.LossConfig(**settings, **({"kl": "k3", "kl_coef": 0.1} if has_kl else {}))
            arguments = quads(width, 3, mask, needs_row_advantages or has_kl, offset)
            if not has_kl:
                arguments.pop("ref_logprobs")
            assert_same_loss(config, arguments)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("name", BARE)
def test_four_tokens_at_a_time_of_packed_rows(name: str, mask: str) -> None:
    settings, needs_row_advantages = BARE[name]
    lengths = [5, 0, 1, 1030, 2, 3, 4, 300, 0]
    arguments = quads(sum(lengths) + 3, 1, mask, False, 0)  # three tokens belong to no row
    flat = {k: v.view(-1) for k, v in arguments.items()}
    if needs_row_advantages:
        flat["advantages"] = torch.randn(len(lengths), dtype=torch.float64).float().double()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        config = gk.LossConfig(**settings, kl="k3", kl_coef=0.1, aggregation=aggregation)
        assert_same_loss(config, flat | {"cu_seqlens": bounds})
