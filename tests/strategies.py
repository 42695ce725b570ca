"""Hypothesis strategies shared by the tests of several ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from grpo_kernels import AdvantageConfig

NAN = float("nan")

# Distributions of rewards, one for each likely mistake: exact ties (binary, grid), a variance lost to an offset,
# results dominated by eps (tiny), squares far from 1 (wide), a rounded mean of equal values (equal).
VALUES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "binary": lambda n, g: torch.randint(0, 2, (n,), generator=g).float(),
    "grid": lambda n, g: torch.randint(-8, 9, (n,), generator=g) / 4,
    "offset": lambda n, g: torch.randn(n, generator=g) + 1000,
    "tiny": lambda n, g: torch.randn(n, generator=g) * 1e-7,
    "wide": lambda n, g: torch.randn(n, generator=g) * 1e12,
    "equal": lambda n, g: torch.tensor([0.1, 0.35, 0.7, 1000.1])[torch.randint(0, 4, (1,), generator=g)].repeat(n),
}

# Memory layouts of a tensor. The memory between its elements holds NaN, or 1 for integers.
LAYOUTS = ("contiguous", "every_other", "column")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Arguments of group_advantages on the CPU, including those that only some estimators read."""

    rewards: Tensor
    groups: Tensor
    subgroups: Tensor
    valid: Tensor
    lengths: Tensor
    baselines: Tensor

    def options(self, config: AdvantageConfig, device: torch.device, subgroups: bool = False) -> dict[str, Tensor]:
        """Keyword arguments that the config accepts."""
        wanted = {"valid": True, "lengths": config.needs_lengths, "baselines": config.needs_baselines}
        wanted["subgroups"] = subgroups or config.needs_parent
        return {name: getattr(self, name).to(device) for name, use in wanted.items() if use}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of the tensor in the given memory layout."""
    if layout == "contiguous":
        return tensor.contiguous()
    filler = NAN if tensor.is_floating_point() else 1
    if layout == "every_other":
        holder = tensor.new_full((2 * tensor.shape[0], *tensor.shape[1:]), filler)
        holder[::2] = tensor
        return holder[::2]
    view = tensor.new_full((*reversed(tensor.shape), 3), filler)[..., 1].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


@st.composite
def group_sizes(draw: st.DrawFn, max_rows: int) -> list[int]:
    """Ragged sizes with a sum of 1 to max_rows; singletons are common."""
    sizes = draw(st.lists(st.integers(1, max(1, max_rows // 3)) | st.integers(1, 3), min_size=1, max_size=8))
    kept = []
    for size in sizes:
        if sum(kept) + size <= max_rows:
            kept.append(size)
    return kept or [1]


@st.composite
def ids(draw: st.DrawFn, sizes: list[int]) -> Tensor:
    """One int64 id per row, contiguous or shuffled: counting from 0, sparse, negative, or anywhere in int64."""
    count = len(sizes)
    any_id = st.integers(-(2**63), 2**63 - 1)
    names = draw(
        st.just(list(range(count)))
        | st.just([7 - 1000 * i for i in range(count)])
        | st.just([(i - 2) << 32 for i in range(count)])  # equal in their low 32 bits
        | st.lists(any_id, min_size=count, max_size=count, unique=True)
    )
    rows = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    return torch.tensor(draw(st.permutations(rows)) if draw(st.booleans()) else rows, dtype=torch.int64)


@st.composite
def batches(
    draw: st.DrawFn,
    max_rows: int = 100,
    columns: int = 1,
    dtype: torch.dtype = torch.float32,
    kinds: tuple[str, ...] = tuple(VALUES),
) -> Batch:
    """Rewards of ragged groups with all optional arguments; some batches have no scored row at all."""
    sizes = draw(group_sizes(max_rows))
    groups = draw(ids(sizes))
    n = len(groups)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rewards = torch.empty(n, columns)
    for column in range(columns):
        kind = draw(st.sampled_from(kinds))
        for name in groups.unique():  # one value per group for "equal"
            own = groups == name
            rewards[own, column] = VALUES[kind](int(own.sum()), generator)
    missing = draw(st.sampled_from((0.0, 0.0, 0.2, 0.6, 1.0)))
    rewards[torch.rand(rewards.shape, generator=generator) < missing] = NAN
    invalid = draw(st.sampled_from((0.0, 0.0, 0.3, 1.0)))
    fields = {
        "rewards": rewards.to(dtype) if columns > 1 else rewards[:, 0].to(dtype),
        "groups": groups,
        "subgroups": torch.randint(-1, 3, (n,), generator=generator),
        "valid": torch.rand(n, generator=generator) >= invalid,
        "lengths": torch.randint(1, 50, (n,), generator=generator),
        "baselines": torch.randn(n, generator=generator).to(dtype),
    }
    layout = draw(st.sampled_from(LAYOUTS))
    return Batch(**{name: laid_out(value, layout) for name, value in fields.items()})
