"""Batches for the tests of endpoint_segments, and helpers that run the op on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments.registration import SUPPORTS
from tests.harness import device_of, runnable_backends
from tests.ops.endpoint_segments.oracle import Gold, expected

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# The emulated CUDA is 10 to 1000 times slower.
FAST = ("cpu", "reference") if not torch.cuda.is_available() else tuple(BACKENDS)
# A cut test closer to a tie than this can go either way, depending on the summation order.
TIE = 1e-9

RULES, PROXIES = ("bounded", "literal"), ("coherent", "uncorrelated")
CREDITS, NORMS = ("endpoint", "broadcast"), ("none", "batch", "prompt")
REWARDS = ("terminal", "normal", "sparse", "equal", "none")
GARBAGE = torch.tensor([NAN, INF, -INF, 1e30], dtype=F64)


def config_of(**fields: Any) -> gk.SegmentConfig:
    """A config without normalization by default, so that rows are independent."""
    defaults: dict[str, Any] = {"norm": "none", "min_threshold": 1e-9, "max_threshold": 1e9}
    return gk.SegmentConfig(**defaults | fields)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch in float64 on the CPU: token tensors are [B, T], or [M] with cu_seqlens; groups are ids [B]."""

    rewards: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor
    values: Tensor | None
    groups: Tensor
    cu_seqlens: Tensor | None = None

    def map(self, change: Any) -> Batch:
        """Applies the same change to every per-token tensor."""
        names = ("rewards", "logprobs", "old_logprobs", "mask", "values")
        values = {name: getattr(self, name) for name in names}
        fields: dict[str, Any] = {name: None if value is None else change(value) for name, value in values.items()}
        return dataclasses.replace(self, **fields)

    def rows(self, order: Tensor) -> Batch:
        return dataclasses.replace(self.map(lambda x: x[order]), groups=self.groups[order])

    def to(self, dtype: torch.dtype) -> Batch:
        return self.map(lambda x: x if x.dtype == torch.bool else x.to(dtype))

    def with_garbage(self) -> Batch:
        """Fills masked positions with values that the op must not read."""
        count = self.rewards.numel()

        def change(x: Tensor) -> Tensor:
            garbage = GARBAGE.repeat(count // len(GARBAGE) + 1)[:count].view(x.shape).to(x.dtype)
            return x if x.dtype == torch.bool else torch.where(self.mask, x, garbage)

        return self.map(change)

    def packed(self, behind: int = 0) -> Batch:
        """Packs the rows: each is cut at its last valid token or one later; `behind` tokens follow the last row."""
        width = self.mask.shape[1]
        last = (self.mask * torch.arange(1, width + 1)).amax(1) if width else torch.zeros(len(self.mask))
        lengths = torch.minimum(last + torch.arange(len(last)) % 2, torch.tensor(width)).long()
        kept = torch.arange(width) < lengths[:, None]
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

        def change(x: Tensor) -> Tensor:
            filler = True if x.dtype == torch.bool else NAN
            return torch.nn.functional.pad(x[kept], (0, behind), value=filler)

        return dataclasses.replace(self.map(change), cu_seqlens=ends)

    def arguments(self, config: gk.SegmentConfig) -> dict[str, Any]:
        """The keyword arguments that this config takes."""
        options: dict[str, Any] = {"mask": self.mask, "cu_seqlens": self.cu_seqlens, "values": self.values}
        if self.values is None or config.norm == "prompt":
            options["groups"] = self.groups
        return options

    def run(self, config: gk.SegmentConfig, backend: str | None, **changes: Any) -> gk.EndpointSegments:
        device = device_of(backend or "cuda")
        options = self.arguments(config) | changes
        options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
        tokens = (self.rewards.to(device), self.logprobs.to(device), self.old_logprobs.to(device))
        return gk.endpoint_segments(*tokens, config=config, backend=backend, **options)

    def gold(self, config: gk.SegmentConfig, tau: float | None = None) -> Gold:
        tokens = (self.rewards, self.logprobs, self.old_logprobs)
        return expected(*tokens, config=config, tau=tau, **self.arguments(config))


def batch_of(
    seed: int,
    rows: int,
    width: int,
    *,
    rewards: str = "normal",
    gaps: float = 0.1,
    empty: float = 0.1,
    values: bool = True,
    on_policy: bool = False,
    wild: bool = False,
    prompts: int = 3,
) -> Batch:
    """Returns a batch of ragged rows.

    `gaps` is the share of tokens masked inside rows, `empty` the share of rows without tokens. With `wild`, some tokens
    weigh 1e8 times as much as their neighbours, which brings cut tests close to ties at tau 1.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=F64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random, dtype=F64)

    lengths = (uniform(rows) * (width + 1)).long()
    lengths = torch.where(uniform(rows) < 0.3, width, lengths)
    lengths = torch.where(uniform(rows) < empty, 0, lengths)
    mask = (torch.arange(width) < lengths[:, None]) & (uniform(rows, width) >= gaps)
    last = (mask * torch.arange(1, width + 1)).argmax(1) if width else None
    token_rewards = torch.zeros(rows, width, dtype=F64)
    if rewards == "terminal" and last is not None:
        token_rewards[torch.arange(rows), last] = (uniform(rows) < 0.5).double()
    elif rewards == "sparse":
        token_rewards = normal(rows, width) * (uniform(rows, width) < 0.1)
    elif rewards == "equal":
        token_rewards = torch.full((rows, width), 0.1, dtype=F64)
    elif rewards == "normal":
        token_rewards = normal(rows, width)
    logprobs = torch.log(uniform(rows, width) * 0.98 + 0.01)
    drift = 0.0 if on_policy else 0.3 * normal(rows, width)
    if wild:
        drift = drift + 30 * (uniform(rows, width) < 0.02) * normal(rows, width)
    ids = torch.tensor([-(2**40), 7, 2**62, 8, -1])[torch.randint(0, prompts, (rows,), generator=random)]
    critic = 0.5 * normal(rows, width) if values else None
    return Batch(token_rewards, logprobs, (logprobs - drift).clamp(max=0), mask, critic, ids)


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 8, max_width: int = 70) -> Batch:
    """Random batches, most of them with enough tokens for every setting to matter."""
    return batch_of(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from([rows for rows in (3, 5, 8, 1, 2, 0) if rows <= max_rows])),
        draw(st.sampled_from([width for width in (70, 40, 20, 33, 12, 50, 2, 1, 0) if width <= max_width])),
        rewards=draw(st.sampled_from(REWARDS)),
        gaps=draw(st.sampled_from((0.0, 0.02, 0.2, 0.7))),
        empty=draw(st.sampled_from((0.0, 0.2))),
        values=draw(st.booleans()),
        on_policy=draw(st.booleans()),
        wild=draw(st.integers(0, 9)) == 0,
        prompts=draw(st.integers(1, 5)),
    )


def _labelled(what: str) -> Callable[[str], str]:
    return lambda text: f"{what}: {text}"


def assert_gold(got: gk.EndpointSegments, gold: Gold, what: str = "") -> None:
    """Checks floats up to the last digits of their dtype, and everything else exactly."""
    for name in ("segment_ids", "endpoint_mask", "num_segments"):
        one, other = getattr(got, name).cpu(), getattr(gold, name)
        assert one.dtype == other.dtype and torch.equal(one, other), (
            f"{what} {name}: {one.tolist()} instead of {other.tolist()}"
        )
    for name in ("advantages", "returns"):
        one, other = getattr(got, name).cpu(), getattr(gold, name)
        assert one.shape == other.shape
        rtol = 1e-9 if one.dtype == F64 else 2.4e-7
        atol = 1e-9 * (1 + float(other.abs().max())) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol, msg=_labelled(f"{what} {name}"))
        assert not one[gold.segment_ids < 0].any()


def assert_same(got: gk.EndpointSegments, wanted: gk.EndpointSegments, what: str = "") -> None:
    for name in got._fields:
        one, other = getattr(got, name), getattr(wanted, name)
        assert one.dtype == other.dtype and torch.equal(one, other), (
            f"{what} {name}: {one.tolist()} instead of {other.tolist()}"
        )


def lengths_of(ids: Tensor) -> list[int]:
    """Number of tokens in each segment of one row."""
    return torch.bincount(ids[ids >= 0].cpu()).tolist()


def plan(advantages: Any, *, weights: Any = 0.5, mask: Any = None) -> Batch:
    """A batch whose tokens have these advantages at lam 0 and these weights in the cut test."""
    wanted = torch.as_tensor(advantages, dtype=F64)
    wanted = wanted if wanted.dim() == 2 else wanted[None]
    counted = torch.ones_like(wanted, dtype=torch.bool) if mask is None else torch.as_tensor(mask).view(wanted.shape)
    logprobs = torch.log1p(-torch.as_tensor(weights, dtype=F64)).expand_as(wanted).clone()
    ids = torch.zeros(len(wanted), dtype=torch.int64)
    return Batch(wanted, logprobs, logprobs, counted, torch.zeros_like(wanted), ids)


rules = pytest.mark.parametrize("rule", RULES)
proxies = pytest.mark.parametrize("proxy", PROXIES)
on_backends = pytest.mark.parametrize("backend", BACKENDS)


def width_for(backend: str, width: int) -> int:
    return width if backend in FAST else min(width, 24)


def cuts_of(batch: Batch, backend: str, **fields: Any) -> list[list[int]]:
    """The segment lengths of each row; by default a token's advantage depends on its own reward only."""
    ids = batch.run(config_of(**{"lam": 0.0} | fields), backend).segment_ids
    return [lengths_of(row) for row in ids]
