"""endpoint_segments against a loop over tokens, against copying its inputs, and over four decades of tokens:
`make bench`, or pytest benchmarks/test_endpoint_segments.py --benchmark-only -s -k ratio for the bars.

Bytes at the least, per token: 17 read (four float32, one bool) and 13 written (two float32, one int32, one bool). A
copy of the inputs moves 34. Each token takes one exp, one expm1 and two walks along the row.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.paired import paired, seconds
from benchmarks.segment_peers import by_token_loop

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, LENGTH = 256, 4096
CONFIG = gk.SegmentConfig(norm="none")
SIZES = [(1, 1024), (4, 4096), (64, 4096), (ROWS, LENGTH), (ROWS, 16384), (128, 131072)]


def responses(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """A reward at the end, a critic that changes its mind now and then, and a policy that has moved a little."""
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.rand(rows, generator=rng)
    now = -torch.rand(rows, length, generator=rng).square()
    old = now + 0.05 * torch.randn(rows, length, generator=rng)
    jumps = torch.randn(rows, length, generator=rng) * (torch.rand(rows, length, generator=rng) < 0.05)
    mask = torch.rand(rows, length, generator=rng) < 0.99
    return {"rewards": rewards, "logprobs": now, "old": old, "values": 0.1 * jumps.cumsum(1), "mask": mask}


def ours(given: dict[str, Tensor], config: gk.SegmentConfig = CONFIG) -> gk.EndpointSegments:
    return gk.endpoint_segments(
        given["rewards"], given["logprobs"], given["old"], given["mask"], values=given["values"], config=config
    )


def test_ratio_of_a_loop_over_tokens(benchmark: Any) -> None:
    given, few = responses(ROWS, LENGTH), responses(2, 1024, seed=1)
    # Where advantages are constant the two sides of the test are equal but for rounding, and only float64 holds that
    # below group_epsilon: the loop agrees in float64, and is timed in float32, as it is written.
    exact = {name: value if name == "mask" else value.double() for name, value in few.items()}
    advantages, ends = by_token_loop(**exact, config=CONFIG)
    result = ours(exact)
    assert torch.equal(result.endpoint_mask, ends)
    torch.testing.assert_close(result.advantages, advantages, rtol=1e-12, atol=1e-12)
    share = float(result.endpoint_mask.sum() / few["mask"].sum())
    found = benchmark.pedantic(
        lambda: paired(lambda: ours(given), lambda: by_token_loop(**few, config=CONFIG), pairs=5), rounds=1
    )
    ratio = found.ratio * given["mask"].numel() / few["mask"].numel()
    print(f"\n{ROWS} x {LENGTH}, {share:.0%} endpoints: ours {found.ours / 1e3:.2f} ms, the loop {ratio:.0f}x, bar 200")
    assert ratio >= 200


@pytest.mark.parametrize("with_critic", [True, False])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_ratio_to_copying_the_inputs(benchmark: Any, norm: str, with_critic: bool) -> None:
    given = {name: value.to(DEVICE) for name, value in responses(ROWS, LENGTH).items()}
    config = gk.SegmentConfig(norm=norm)
    if not with_critic:
        del given["values"]

    def call() -> Any:
        if with_critic:
            return ours(given, config)
        return gk.endpoint_segments(
            given["rewards"], given["logprobs"], given["old"], given["mask"], groups=8, config=config
        )

    found = benchmark.pedantic(lambda: paired(lambda: [t.clone() for t in given.values()], call), rounds=1)
    print(
        f"\nnorm={norm}, critic={with_critic}: {found.theirs / 1e3:.2f} ms, {found.ratio:.2f} times the time of "
        f"copying the inputs, {found.ours / 1e3:.2f} ms, bar 6"
    )
    assert found.ratio <= 6


def test_ratio_is_linear_in_tokens(benchmark: Any) -> None:
    """A fit of log time over log tokens from 1 k to 16 M. Small batches have a fixed cost, which only flattens it."""
    points: list[tuple[float, float]] = []

    def sweep() -> None:
        for rows, length in SIZES:
            given = {name: value.to(DEVICE) for name, value in responses(rows, length).items()}
            ours(given)
            repeats = max(1, int(2e6 / (rows * length)))
            taken = min(seconds(lambda given=given: ours(given), repeats) for _ in range(5))
            points.append((rows * length, taken))
            print(f"\n{rows:4d} x {length:6d}: {taken * 1e6:10.1f} us, {taken * 1e9 / (rows * length):6.2f} ns a token")

    benchmark.pedantic(sweep, rounds=1)
    large = [(math.log(tokens), math.log(taken)) for tokens, taken in points if tokens >= 2**18]
    middle = [sum(column) / len(large) for column in zip(*large, strict=True)]
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in large) / sum((x - middle[0]) ** 2 for x, _ in large)
    print(f"exponent from 256 k tokens on: {slope:.3f}")
    assert slope <= 1.1
    assert points[-1][1] <= 2 * points[0][1] * points[-1][0] / points[0][0]
