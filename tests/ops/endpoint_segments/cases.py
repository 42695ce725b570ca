"""Batches of endpoint_segments: one strategy, the promises, and the comparison with the float64 reference."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments.registration import SUPPORTS
from tests.harness import assert_within_budget
from tests.ops import promises
from tests.ops.promises import Inputs, Op, Results, Same
from tests.rounding import Moves

F64, LONG = torch.float64, np.longdouble
Numbers = NDArray[np.longdouble]
NAN, INF = float("nan"), float("inf")
TOKENS = ("rewards", "logprobs", "old_logprobs", "mask", "values")
ABSENT = {"advantages": 0, "returns": 0, "endpoint_mask": False, "segment_ids": -1}  # where no token counts
SETTINGS: dict[str, tuple[Any, ...]] = {
    "rule": ("bounded", "literal"),
    "proxy": ("coherent", "uncorrelated"),
    "credit": ("endpoint", "broadcast"),
    "norm": ("none", "batch", "prompt"),
    "gamma": (1.0, 0.97, 0.5, 0.0),
    "lam": (1.0, 0.9, 0.0),
    "group_max_size": (16, 3, 2, 1, 40, 1000),
    "group_variance_threshold": (1.0, 0.5, 1.7, 6.0, 1e-3, 1e6),
    "group_epsilon": (1e-6, 0.1),
}
REWARDS = ("normal", "terminal", "sparse", "equal", "drift", "none")


def config_of(**fields: Any) -> gk.SegmentConfig:
    """A config whose tau may be any number, by default without a norm."""
    return gk.SegmentConfig(**{"norm": "none", "adaptive_threshold": False} | fields)


def batch_of(
    seed: int,
    rows: int,
    width: int,
    rewards: str = "normal",
    gaps: float = 0.1,
    empty: float = 0.1,
    critic: bool = True,
    drift: float = 0.3,
    prompts: int = 3,
) -> Inputs:
    """A padded batch of ragged rows.

    Args:
        gaps: share of tokens that are masked inside rows
        empty: share of rows without tokens; others are often as wide as the batch
        drift: size of log ratios; a few go beyond 20 if it is above 1, and some tokens are certain
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=F64)

    lengths = torch.where(uniform(rows) < 0.4, width, (uniform(rows) * (width + 1)).long())
    lengths = torch.where(uniform(rows) < empty, 0, lengths)
    mask = (torch.arange(width) < lengths[:, None]) & (uniform(rows, width) >= gaps)
    place = torch.arange(width)
    is_last = mask & (place == (mask * place).amax(1, keepdim=True)) if width else mask
    logprobs = torch.log(uniform(rows, width) * 0.98 + 0.01)
    log_ratio = drift * normal(rows, width) * torch.where(uniform(rows, width) < 0.05, 10, 1)
    if drift > 1:
        logprobs = torch.where(uniform(rows, width) < 0.1, 0.0, logprobs)
    batch = {
        "rewards": {
            "normal": normal(rows, width),
            "terminal": is_last * (uniform(rows, 1) < 0.5),
            "sparse": normal(rows, width) * (uniform(rows, width) < 0.1),
            "equal": torch.full((rows, width), 0.1),
            "drift": normal(rows, width).cumsum(1) * 0.03,
            "none": torch.zeros(rows, width),
        }[rewards].to(F64),
        "logprobs": logprobs,
        "old_logprobs": logprobs - log_ratio,
        "mask": mask,
        "groups": torch.tensor([-(2**40), 7, 2**62, 8, -1])[torch.randint(prompts, (rows,), generator=generator)],
    }
    return batch | ({"values": 0.5 * normal(rows, width)} if critic else {})


def calls(rows: int = 8, width: int = 70) -> st.SearchStrategy[tuple[Inputs, gk.SegmentConfig]]:
    """Padded batches and configs, from a seed: hypothesis repeats much of examples that consist of many draws."""

    def made(seed: int) -> tuple[Inputs, gk.SegmentConfig]:
        choose = random.Random(seed)
        batch = batch_of(
            seed,
            min(choose.choice((3, 5, 8, 3, 5, 8, 1, 2)), rows),
            min(choose.choice((70, 40, 20, 33, 12, 50, 2, 1)), width),
            choose.choice(REWARDS),
            choose.choice((0.0, 0.02, 0.2, 0.7)),
            choose.choice((0.0, 0.2)),
            choose.random() < 0.5,
            choose.choice((0.3, 0.0, 3.0)),
            choose.randint(1, 5),
        )
        return batch, config_of(**{name: choose.choice(values) for name, values in SETTINGS.items()})

    return st.integers(0, 2**32).map(made)


def of_tokens(batch: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Applies the same change to all tensors of tokens."""
    return {name: change(value) if name in TOKENS else value for name, value in batch.items()}


def to(batch: Inputs, dtype: torch.dtype) -> Inputs:
    return of_tokens(batch, lambda x: x if x.dtype == torch.bool else x.to(dtype))


def packed(batch: Inputs, extra: int = 3) -> tuple[Inputs, Tensor]:
    """Each row up to its last valid token or one later, then tokens of no row; and the slots that were kept."""
    mask = batch["mask"]
    width = mask.shape[1]
    last = (mask * torch.arange(1, width + 1)).sort().values[:, -1:].sum(1)
    lengths = (last + torch.arange(len(mask)) % 2).clamp(max=width)
    kept = torch.arange(width) < lengths[:, None]
    result = of_tokens(batch, lambda x: pad(x[kept], (0, extra), value=0 if x.dtype == torch.bool else NAN))
    return result | {"cu_seqlens": pad(lengths.cumsum(0), (1, 0))}, kept


def unpacked(results: Results, kept: Tensor) -> Results:
    """Results of packed tokens in the padded layout, after a check of the tokens of no row."""
    padded = dict(results)
    for name, absent in ABSENT.items():
        own, rest = results[name].tensor_split([int(kept.sum())])
        assert (rest == absent).all(), name
        padded[name] = own.new_full(kept.shape, absent)
        padded[name][kept] = own
    return padded


def call(inputs: Inputs, config: gk.SegmentConfig, backend: str | None, **options: Any) -> Results:
    """The results by name, of arguments among which `groups` is left out where nothing reads it."""
    given = dict(inputs)
    if "values" in given and config.norm != "prompt":
        given.pop("groups", None)
    result = gk.endpoint_segments(**given, config=config, backend=backend, **options)
    return {name: getattr(result, name) for name in gk.EndpointSegments._fields}


def run(inputs: Inputs, config: gk.SegmentConfig, backend: str, dtype: torch.dtype = F64) -> Results:
    """Results on the host, of numbers in this dtype on the backend's device."""
    return promises.run(Op(dict, lambda given, name: call(given, config, name), SUPPORTS), inputs, backend, dtype)


# Formulas, with windows in place of recurrences


def powers(factor: float, places: Numbers) -> Numbers:
    """factor^(j - i) where place j is not before place i, else 0."""
    ahead = places[None] - places[:, None]
    powers = LONG(factor) ** np.arange(ahead.max(initial=0) + 1)
    return np.where(ahead >= 0, powers[ahead], 0)


def segment_advantages(r: Numbers, v: Numbers, lengths: list[int], config: gk.SegmentConfig) -> Numbers:
    """GAE of consecutive segments of so many tokens."""
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    starts, following = ends - sizes, np.append(v, 0.0)[ends]
    gained = [r[a:b] @ config.gamma ** np.arange(b - a) for a, b in zip(starts, ends, strict=True)]
    delta = gained + config.gamma**sizes * following - v[starts]
    result: Numbers = (powers(config.lam, np.arange(len(ends))) * powers(config.gamma, starts)) @ delta
    return result


def first_length(w: Numbers, a: Numbers, config: gk.SegmentConfig) -> int:
    """Length of the first segment of consecutive tokens."""
    n, tau, eps = np.arange(1, len(a) + 1), config.group_variance_threshold, config.group_epsilon
    if config.proxy == "coherent":
        own, shared = np.cumsum(w * a) ** 2, (np.cumsum(w) * a) ** 2
    else:
        own, shared = np.cumsum((w * a) ** 2), np.cumsum(w**2) * a**2
    is_bounded = config.rule == "bounded"
    ends = shared > tau * own + eps if is_bounded else n * tau * (own + eps) >= shared
    found = np.flatnonzero(ends[1:])
    length = len(a) if len(found) == 0 else int(found[0]) + (1 if is_bounded else 2)
    return min(length, config.group_max_size)


def expected(batch: Inputs, config: gk.SegmentConfig) -> Results:
    """Results for a padded batch."""
    r, now, old = (batch[name].double().numpy().astype(LONG) for name in ("rewards", "logprobs", "old_logprobs"))
    mask = batch["mask"].numpy()
    groups = batch["groups"].tolist()
    rows = [np.flatnonzero(row) for row in mask]
    if "values" in batch:
        v = batch["values"].double().numpy().astype(LONG)
    else:
        gained = [r[b, t] @ config.gamma ** np.arange(len(t)) for b, t in enumerate(rows)]
        of_prompt = [[gained[c] for c, t in enumerate(rows) if len(t) and groups[c] == name] for name in groups]
        v = np.array([[np.mean(values) if values else 0.0] for values in of_prompt]).reshape(-1, 1) + 0 * r
    dense, worth, ids = 0 * r, 0 * r, np.full(r.shape, -1, np.int32)
    ends, counts, pools = np.zeros(r.shape, bool), np.zeros(len(rows), np.int32), np.full(r.shape, -1)
    for b, t in enumerate(rows):
        dense[b, t] = segment_advantages(r[b, t], v[b, t], [1] * len(t), config)
    scale = max(np.sqrt(np.mean(dense[mask] ** 2)) if mask.any() else 0.0, config.group_epsilon)
    for b, t in enumerate(rows):
        weights = np.exp(np.clip(now[b] - old[b], -20, 20)) * (1 - np.exp(now[b]))
        segments: list[Any] = []
        for run_ in np.split(t, np.flatnonzero(np.diff(t) > 1) + 1):
            rest = run_
            while len(rest):
                length = first_length(weights[rest], dense[b, rest] / scale, config)
                segments.append(rest[:length])
                rest = rest[length:]
        counts[b] = len(segments)
        advantages = segment_advantages(r[b, t], v[b, t], list(map(len, segments)), config)
        for number, segment in enumerate(segments):
            ids[b, segment], ends[b, segment[-1]] = number, True
            worth[b, segment] = advantages[number]
        pools[b, t] = groups.index(groups[b]) if config.norm == "prompt" else 0
    for pool in set(pools[ends].tolist()) if config.norm != "none" else ():
        own = worth[ends & (pools == pool)]
        differ = len(own) > 1 and own.min() < own.max()
        factor = 1 / (own.std(ddof=1) + config.group_epsilon) if differ else 0.0
        worth[pools == pool] = (worth[pools == pool] - own.mean()) * factor
    advantages = np.where(ids >= 0 if config.credit == "broadcast" else ends, worth, 0.0)
    returns = np.where(mask, dense + v, 0.0)
    named = {"advantages": advantages.astype(float), "returns": returns.astype(float), "endpoint_mask": ends}
    named |= {"segment_ids": ids, "num_segments": counts, "threshold": np.array(config.group_variance_threshold)}
    return {name: torch.from_numpy(values) for name, values in named.items()}


# Comparison


def is_tie(inputs: Inputs, config: gk.SegmentConfig, margin: float) -> bool:
    """Whether the rounding of sums or weights by this share could move a cut."""

    def ids(factor: float) -> Tensor:
        tau, epsilon = config.group_variance_threshold * factor, config.group_epsilon * factor
        moved = dataclasses.replace(config, group_variance_threshold=tau, group_epsilon=epsilon)
        return run(inputs, moved, "reference")["segment_ids"]

    return not torch.equal(ids(1 - margin), ids(1 + margin))


def compare(batch: Inputs, config: gk.SegmentConfig, backend: str, dtype: torch.dtype, is_packed: bool = False) -> bool:
    """Compares a kernel with the formulas and the reference on a padded batch; False if a cut is too close to tell."""
    batch = to(to(batch, dtype), F64)
    if is_tie(batch, config, 1e-9 if dtype == F64 else 1e-5):
        return False
    gold, working = expected(batch, config), run(batch, config, "reference", dtype)
    if is_packed:
        inputs, kept = packed(batch)
        results = unpacked(run(inputs, config, backend, dtype), kept)
    else:
        results = run(batch, config, backend, dtype)
    moves = Moves(lambda: run(batch, config, "reference", F64), gold)
    for name, result in results.items():
        if result.is_floating_point():
            assert_within_budget(result, working[name], gold[name], name, moves=moves)
        else:
            torch.testing.assert_close(result, gold[name], rtol=0, atol=0, msg=lambda text, of=name: f"{of}: {text}")
    return True


# Promises


def permuted(inputs: Inputs) -> Same:
    order = torch.randperm(len(inputs["mask"]))
    back = order.argsort()
    return Same(
        [{name: value[order] for name, value in inputs.items()}],
        lambda parts: {name: value[back] for name, value in parts[0].items() if name != "threshold"},
    )


def with_padding(inputs: Inputs) -> Same:
    """Padding on both sides of each row, and two rows of nothing else."""
    wide = of_tokens(inputs, lambda x: pad(x, (3, 4, 0, 2), value=0 if x.dtype == torch.bool else NAN))
    wide |= {name: torch.cat((ids, ids[:2])) for name, ids in inputs.items() if name == "groups"}

    def without(parts: list[Results]) -> Results:
        return {
            name: value[:-2, 3:-4] if name in ABSENT else value[:-2] if value.dim() else value
            for name, value in parts[0].items()
        }

    return Same([wide], without)


def with_other_ids(inputs: Inputs) -> Same:
    """Prompts named by other integers, in one byte, and int32 bounds."""
    ids = inputs["groups"].unique(return_inverse=True)[1].neg().to(torch.int8)
    return Same([inputs | {"groups": ids, "cu_seqlens": inputs["cu_seqlens"].int()}], lambda parts: parts[0])


def ignored(inputs: Inputs) -> dict[str, Tensor]:
    slots = ~inputs["mask"]
    if "cu_seqlens" in inputs:
        slots = slots | (torch.arange(len(slots)) >= inputs["cu_seqlens"][-1])
    return {name: slots for name in TOKENS if name in inputs and name != "mask"}


def described(config: gk.SegmentConfig, critic: bool, is_packed: bool = False) -> Op:
    def draw() -> Inputs:
        batch = batch_of(int(torch.randint(1000, ())), 6, 12, gaps=0.15, critic=critic)
        if critic:
            batch.pop("groups")  # nothing reads it
        if not is_packed:
            return batch
        batch, kept = packed(batch)
        room = kept.numel() - int(kept.sum())  # all seeds have batches of one shape
        return of_tokens(batch, lambda x: pad(x, (0, room), value=0 if x.dtype == torch.bool else NAN))

    def in_packed_rows(inputs: Inputs) -> Same:
        batch, kept = packed(inputs)
        return Same([batch], lambda parts: unpacked(parts[0], kept))

    of_padded = {"rows in another order": permuted, "packed rows": in_packed_rows, "padding": with_padding}
    rewrites = {"other ids": with_other_ids} if is_packed else of_padded
    return Op(draw, lambda given, backend: call(given, config, backend), SUPPORTS, (), ignored, rewrites)


BY_BATCH = config_of(norm="batch", gamma=0.97, lam=0.9, group_variance_threshold=1.5)
BY_PROMPT = config_of(norm="prompt", credit="broadcast", rule="literal", group_variance_threshold=0.4, gamma=0.9)
OPS = {
    "endpoint_segments of a batch": described(BY_BATCH, critic=True),
    "endpoint_segments of prompts": described(BY_PROMPT, critic=False),
    "endpoint_segments of packed prompts": described(BY_PROMPT, critic=False, is_packed=True),
}
