"""group_advantages against the installed peers and plain torch.

Lower bound on bytes per reward: 4 read, 17 written (three float32, one int32, one bool); ids add 8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Floor, Provider, Same, Sweep
from tests import peers

OP, GROUP = "group_advantages", 8


class Inputs(NamedTuple):
    rewards: Tensor
    ids: Tensor  # shuffled
    index: np.ndarray  # sorted, as in verl
    mask: Tensor


def make(rows: int, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    rewards = torch.randn(rows, generator=generator, device=device)
    ids = torch.randperm(rows, generator=generator, device=device) // GROUP
    return Inputs(rewards, ids, np.arange(rows) // GROUP, torch.ones(rows, 1, device=device))


def ours(i: Inputs) -> Tensor:
    return gk.group_advantages(i.rewards, GROUP).advantages


def ours_of_batch(i: Inputs) -> Tensor:
    return gk.group_advantages(i.rewards, GROUP, config="batch_std").advantages


def ours_by_ids(i: Inputs) -> Tensor:
    return gk.group_advantages(i.rewards, i.ids).advantages


class Rollouts(NamedTuple):
    """Rows of rollouts, four each, of which eight are a group; neighbours, as agents write them."""

    rewards: Tensor
    rollouts: Tensor
    groups: Tensor


def make_rollouts(rows: int, device: torch.device, seed: int = 0) -> Rollouts:
    generator = torch.Generator(device).manual_seed(seed)
    rollouts = torch.arange(rows, device=device) // 4
    rewards = torch.randn(rows // 4, generator=generator, device=device)[rollouts]
    return Rollouts(rewards, rollouts, rollouts // GROUP)


def ours_of_rollouts(i: Rollouts) -> Tensor:
    return gk.group_advantages(i.rewards, i.groups, rollouts=i.rollouts).advantages


def ours_of_rows(i: Rollouts) -> Tensor:
    return gk.group_advantages(i.rewards, i.groups).advantages


def first_rows(i: Rollouts) -> Tensor:
    unique, number = torch.unique(i.rollouts, return_inverse=True)
    rows = torch.arange(len(number), device=number.device)
    first = torch.full_like(unique, len(number)).scatter_reduce(0, number, rows, "amin")
    return gk.group_advantages(i.rewards[first], i.groups[first]).advantages[number]


def trl(i: Inputs) -> Tensor:
    return peers.trl_grpo(i.rewards[:, None], GROUP)


def verl(i: Inputs) -> Tensor:
    return peers.verl("grpo")(i.rewards[:, None], i.mask, i.index)[0].reshape(-1)


def verl_vectorized(i: Inputs) -> Tensor:
    return peers.verl("grpo_vectorized")(i.rewards[:, None], i.mask, i.index)[0].reshape(-1)


def eager(i: Inputs) -> Tensor:
    groups = i.rewards.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1)


def two_pass(rewards: Tensor, number: Tensor, groups: int) -> Tensor:
    """Plain torch with index_add, for ids that are already 0 .. groups - 1."""
    zeros = rewards.new_zeros(groups)
    count = zeros.index_add(0, number, torch.ones_like(rewards))
    mean = zeros.index_add(0, number, rewards) / count
    distance = rewards - mean[number]
    std = (zeros.index_add(0, number, distance * distance) / (count - 1)).sqrt()
    return distance / (std[number] + 1e-6)


def known_dense(i: Inputs) -> Tensor:
    return two_pass(i.rewards, i.ids, len(i.rewards) // GROUP)


def unique_then_index_add(i: Inputs) -> Tensor:
    unique, number = torch.unique(i.ids, return_inverse=True)
    return two_pass(i.rewards, number, len(unique))


def sort_then_group_reduce(i: Inputs) -> Tensor:
    ids, order = i.ids.sort(stable=True)
    sizes = torch.unique_consecutive(ids, return_counts=True)[1]
    sorted_rewards = i.rewards[order]
    mean = torch.segment_reduce(sorted_rewards, "mean", lengths=sizes, unsafe=True)
    distance = sorted_rewards - mean.repeat_interleave(sizes)
    variance = torch.segment_reduce(distance * distance, "sum", lengths=sizes, unsafe=True) / (sizes - 1)
    advantages = torch.empty_like(i.rewards)
    advantages[order] = distance / (variance.sqrt() + 1e-6).repeat_interleave(sizes)
    return advantages


# |A| grows like 1 / (std + eps): two eps at most 1e-4 apart, over the smallest std of 8 normal draws
SAME = Same(rtol=2e-3, atol=1e-5)
CASES = [
    Case(
        OP,
        "groups of 8",
        "8,192 rewards: 1,024 prompts, 8 responses each",
        Floor(bytes=21 * 8192),
        lambda device, seed: make(8192, device, seed),
        ours,
        same=SAME,
        quick=("verl-grpo-vectorized", "trl"),
        providers=(
            Provider("trl", trl, package="trl"),
            Provider("verl-grpo-vectorized", verl_vectorized, package="verl"),
            Provider("verl-grpo", verl, package="verl", devices=("cpu",)),  # a loop over rewards
            Provider("torch, mean and std", eager),
            Provider("torch.compile", torch.compile(eager)),
        ),
        bars=(
            Bar("ratio at least", 300, "verl-grpo"),
            Bar("ratio at least", 5, "trl"),
            Bar("ratio at least", 5, "verl-grpo-vectorized"),
            Bar("ratio at least", 1, "torch.compile"),
        ),
    ),
    Case(
        OP,
        "rollouts of four rows",
        "1,024 rows: 256 rollouts, 8 of each prompt",
        Floor(bytes=37 * 1024),
        lambda device, seed: make_rollouts(1024, device, seed),
        ours_of_rollouts,
        same=SAME,
        providers=(
            Provider("ours, rows as rollouts", ours_of_rows, agrees=False),
            Provider("ours, of first rows by torch", first_rows),
        ),
        bars=(
            Bar("cost at most", 1.5, "ours, rows as rollouts"),
            Bar("ratio at least", 1, "ours, of first rows by torch"),
        ),
    ),
    # a CPU is timed on what fills its caches, a GPU on the largest batch that users have
    *(
        Case(
            OP,
            "unsorted ids",
            f"{rows:,} rewards in groups of 8, shuffled",
            Floor(bytes=29 * rows),
            lambda device, seed, rows=rows: make(rows, device, seed),
            ours_by_ids,
            same=SAME,
            devices=(kind,),
            quick=("torch, sort + segment_reduce",),
            providers=(
                Provider("torch, unique + index_add", unique_then_index_add),
                Provider("torch, sort + segment_reduce", sort_then_group_reduce),
                # receives dense ids that the others must compute
                Provider("torch, index_add, ids known dense", known_dense),
            ),
            bars=(
                Bar("ratio at least", 3, "torch, unique + index_add"),
                Bar("ratio at least", 3, "torch, sort + segment_reduce"),
                Bar("ratio at least", 1, "torch, index_add, ids known dense"),
            ),
        )
        for kind, rows in (("cpu", 65536), ("cuda", 8192))
    ),
    Case(
        OP,
        "one small call",
        "64 rewards: 8 prompts, 8 responses each",
        Floor(bytes=21 * 64),
        lambda device, seed: make(64, device, seed),
        ours,
        devices=("cpu",),
        bars=(Bar("microseconds at most", 25),),
    ),
    Case(
        OP,
        "with a step over the batch",
        "8,192 rewards in groups of 8",
        Floor(bytes=21 * 8192),
        lambda device, seed: make(8192, device, seed),
        ours_of_batch,
        devices=("cuda",),
    ),
]

# Caches end between 2^15 and 2^24 rewards; a quadratic or N log^2 N step would show far above 1.25.
SWEEPS = [
    Sweep(
        OP,
        name,
        "rewards",
        tuple(2**e for e in range(6, 25, 3)),
        lambda device, size: make(size, device),
        call,
        Floor(bytes=bytes_of_one),
        (Bar("exponent below", 1.25),),
        fit_from=2**15,
    )
    for name, call, bytes_of_one in (("groups of 8", ours, 21), ("unsorted ids", ours_by_ids, 29))
]
