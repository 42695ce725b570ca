"""group_advantages against the installed peers and plain torch: `make bench`, or
pytest benchmarks/test_group_advantages.py --benchmark-only -s for the table alone, -k ratio for the bars.

Bytes at the least, per reward: 4 read, 17 written (three float32, one int32, one bool); ids add 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.paired import paired, seconds
from tests import peers

Case = Callable[[], Any]
ROWS, GROUP = 8192, 8


def rewards_of(rows: int) -> Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(0))


def shuffled_ids(rows: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1)) // GROUP


def contiguous_providers(rows: int = ROWS) -> dict[str, Case]:
    """The same advantages from the same rewards, in each system's own form of input."""
    rewards = rewards_of(rows)
    per_function, token_rewards, mask = rewards[:, None], rewards[:, None], torch.ones(rows, 1)
    index = np.arange(rows) // GROUP
    return {
        "ours": lambda: gk.group_advantages(rewards, GROUP),
        "trl": lambda: peers.trl_grpo(per_function, GROUP),
        "verl-grpo": lambda: peers.verl("grpo")(token_rewards, mask, index)[0],
        "verl-grpo-vectorized": lambda: peers.verl("grpo_vectorized")(token_rewards, mask, index)[0],
    }


def two_pass(rewards: Tensor, number: Tensor, groups: int) -> Tensor:
    """Plain torch with index_add, for ids that are already 0 .. groups - 1."""
    count = torch.zeros(groups).index_add_(0, number, torch.ones_like(rewards))
    mean = torch.zeros(groups).index_add_(0, number, rewards) / count
    distance = rewards - mean[number]
    std = (torch.zeros(groups).index_add_(0, number, distance * distance) / (count - 1)).sqrt()
    return distance / (std[number] + 1e-6)


def unique_then_index_add(rewards: Tensor, ids: Tensor) -> Tensor:
    found, number = torch.unique(ids, return_inverse=True)
    return two_pass(rewards, number, len(found))


def sort_then_segment_reduce(rewards: Tensor, ids: Tensor) -> Tensor:
    ids, order = ids.sort(stable=True)
    sizes = torch.unique_consecutive(ids, return_counts=True)[1]
    sorted_rewards = rewards[order]
    mean = torch.segment_reduce(sorted_rewards, "mean", lengths=sizes, unsafe=True)
    distance = sorted_rewards - mean.repeat_interleave(sizes)
    variance = torch.segment_reduce(distance * distance, "sum", lengths=sizes, unsafe=True) / (sizes - 1)
    advantages = torch.empty_like(rewards)
    advantages[order] = distance / (variance.sqrt() + 1e-6).repeat_interleave(sizes)
    return advantages


def shuffled_providers(rows: int = 65536) -> dict[str, Case]:
    rewards, ids = rewards_of(rows), shuffled_ids(rows)
    return {
        "ours": lambda: gk.group_advantages(rewards, ids),
        "torch, unique + index_add": lambda: unique_then_index_add(rewards, ids),
        "torch, sort + segment_reduce": lambda: sort_then_segment_reduce(rewards, ids),
        "torch, index_add, ids known dense": lambda: two_pass(rewards, ids, rows // GROUP),
    }


def assert_agree(providers: dict[str, Case]) -> None:
    """Nobody is timed who computes something else; eps differs between them, hence not tighter."""
    gold = providers["ours"]().advantages
    for name, call in providers.items():
        result = call()
        result = getattr(result, "advantages", result).reshape(-1)
        # |A| grows like 1 / (std + eps): two eps at most 1e-4 apart, over the smallest std of 8 normal draws
        torch.testing.assert_close(result, gold, rtol=2e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", contiguous_providers())
def test_groups_of_8(benchmark: Any, name: str) -> None:
    providers = contiguous_providers()
    assert_agree(providers)
    benchmark.group = f"{ROWS} rewards in groups of {GROUP}"
    benchmark.extra_info["bytes"] = 21 * ROWS
    benchmark(providers[name])


@pytest.mark.parametrize("name", shuffled_providers())
def test_unsorted_ids(benchmark: Any, name: str) -> None:
    providers = shuffled_providers()
    assert_agree(providers)
    benchmark.group = "65536 rewards, unsorted ids"
    benchmark.extra_info["bytes"] = 29 * 65536
    benchmark(providers[name])


# The bars of the project; "ids known dense" is given what the others have to find out, and is reported without one.
BARS = {"verl-grpo": 300, "trl": 5, "verl-grpo-vectorized": 5}
ID_BARS = {
    "torch, unique + index_add": 3,
    "torch, sort + segment_reduce": 3,
    "torch, index_add, ids known dense": None,
}


@pytest.mark.parametrize("theirs", [*BARS, *ID_BARS])
def test_ratio(benchmark: Any, theirs: str) -> None:
    providers = contiguous_providers() if theirs in BARS else shuffled_providers()
    assert_agree(providers)
    result = benchmark.pedantic(lambda: paired(providers["ours"], providers[theirs]), rounds=1)
    bar = (BARS | ID_BARS)[theirs]
    print(f"\n{theirs:36} {result}" + (f", bar {bar}" if bar else ""))
    benchmark.extra_info.update(result._asdict())
    assert bar is None or result.ratio >= bar


def test_small_call(benchmark: Any) -> None:
    rewards = rewards_of(64)
    call = lambda: gk.group_advantages(rewards, GROUP)  # noqa: E731
    benchmark(call)
    best = min(seconds(call, 2000) for _ in range(10)) * 1e6
    print(f"\none call at N = 64: {best:.1f} us, bar 25")
    assert best <= 25


@pytest.mark.parametrize("kind", ["int groups", "unsorted ids"])
def test_time_grows_linearly(benchmark: Any, kind: str) -> None:
    sizes = [2**e for e in range(6, 25, 3)]
    table = {}
    for rows in sizes:
        rewards = rewards_of(rows)
        groups = GROUP if kind == "int groups" else shuffled_ids(rows)
        call = lambda r=rewards, g=groups: gk.group_advantages(r, g)  # noqa: E731
        repeats = max(1, min(1000, 2**20 // rows))
        call()
        table[rows] = min(seconds(call, repeats) for _ in range(3))
    for rows, time in table.items():
        print(f"\n{kind}: {rows:>9} rewards {time * 1e6:12.1f} us {time / rows * 1e9:8.2f} ns each", end="")
    # over the sizes where the fixed cost of a call no longer counts
    large = [(rows, time) for rows, time in table.items() if rows >= 2**15]
    exponent = math.log(large[-1][1] / large[0][1]) / math.log(large[-1][0] / large[0][0])
    print(f"\n{kind}: time grows like N^{exponent:.2f} from {large[0][0]} rewards on")
    benchmark.extra_info["exponent"] = exponent
    benchmark.pedantic(lambda: None, rounds=1)
    # caches end between 2^15 and 2^24 rewards; a quadratic or N log^2 N step would show far above this
    assert exponent < 1.25
