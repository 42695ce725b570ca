"""Batches of token_advantages and of optimal_token_baseline, and the definition step by step, in extended precision."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.token_advantages.registration import SUPPORTS
from tests.harness import assert_within_budget, runnable_backends
from tests.ops.promises import Inputs, Op, Results, changed, end_to_end, groups_apart, groups_of_one_size, permuted, run
from tests.rounding import Moves

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
FAST = tuple(name for name in BACKENDS if name in ("cpu", "reference"))


def is_padding(mask: Tensor) -> Tensor:
    return mask.flip(1).cumsum(1).flip(1) == 0


def padded(seed: int, rows: int, width: int, *, gaps: float = 0.2, turns: str = "none") -> Inputs:
    """Random rows with gaps in the mask, and zeros as padding; of several the first is whole, the second empty."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=draw) >= gaps
    mask &= torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=draw)
    if rows > 1:
        mask[0], mask[1] = True, False
    batch = {name: torch.randn(rows, width, generator=draw) for name in ("rewards", "values")}
    batch["rewards"] *= is_padding(mask).logical_not()
    batch = {name: value.double() for name, value in batch.items()} | {"mask": mask}  # float32 holds them, too
    numbers = (torch.rand(rows, width, generator=draw) < 0.2).cumsum(1) * 2
    skipped = torch.rand(rows, width, generator=draw) < 0.1
    if turns == "none":
        return batch
    return batch | {"turns": 0 * numbers if turns == "one" else torch.where(skipped, -1, numbers)}


def with_garbage(inputs: Inputs) -> Inputs:
    """NaN and wrong turns in slots that do not count; rewards in gaps stay, those of padding are no numbers."""
    junk, is_odd = ~inputs["mask"], torch.arange(inputs["mask"].shape[1]) % 2 == 1
    rewards = torch.where(is_padding(inputs["mask"]), torch.where(is_odd, INF, NAN).double(), inputs["rewards"])
    batch = inputs | {"rewards": rewards, "values": torch.where(junk, NAN, inputs["values"])}
    return batch | ({"turns": torch.where(junk, 7, inputs["turns"])} if "turns" in inputs else {})


def packed(inputs: Inputs, extra: int = 3) -> Inputs:
    """The same rows one after the other, the padding of each cut off, with tokens after the last row."""
    lengths = (inputs["mask"] * torch.arange(1, inputs["mask"].shape[1] + 1)).amax(1).tolist()
    flat = {name: end_to_end(value, lengths, extra) for name, value in inputs.items()}
    return flat | {"cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)])}


@st.composite
def batches(draw: st.DrawFn, max_rows: int, max_width: int) -> Inputs:
    size = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    turns, gaps = draw(st.sampled_from(("none", "some", "one"))), draw(st.sampled_from((0.0, 0.3, 0.9, 1.0)))
    batch = with_garbage(padded(draw(st.integers(0, 1000)), *size, gaps=gaps, turns=turns))
    wrong = draw(st.sampled_from((None, None, None, NAN, INF)))
    if wrong is not None:
        batch["rewards"][draw(st.integers(0, size[0] - 1)), draw(st.integers(0, size[1] - 1))] = wrong
    if draw(st.booleans()):
        batch = packed(batch)
        batch["cu_seqlens"] = batch["cu_seqlens"].to(draw(st.sampled_from((torch.int32, torch.int64))))
    if gaps == 0.0 and "cu_seqlens" not in batch and draw(st.booleans()):
        del batch["mask"]
        batch["values"] = batch["values"].nan_to_num()  # those of padding count now
    return batch


def configs() -> st.SearchStrategy[gk.TokenAdvantageConfig]:
    discounts = st.sampled_from(((1.0, 1.0), (0.97, 0.9), (0.9, 1.0), (1.0, 0.8), (1.0, 0.0), (0.0, 1.0)))

    def made(name: str, discount: tuple[float, float], carry: bool, **more: Any) -> gk.TokenAdvantageConfig:
        lam = discount[1] if name == "gae" else None
        return gk.TokenAdvantageConfig(name, gamma=discount[0], lam=lam, carry_rewards=carry, **more)

    whitening = {"whiten": st.sampled_from(("none", "tokens")), "whiten_eps": st.sampled_from((1e-8, 0.1))}
    return st.builds(made, st.sampled_from(gk.TokenAdvantageConfig.names()), discounts, st.booleans(), **whitening)


# The definition


def rows_of(inputs: Inputs) -> list[range]:
    if "cu_seqlens" in inputs:
        return [range(*bounds) for bounds in itertools.pairwise(inputs["cu_seqlens"].tolist())]
    rows, width = inputs["rewards"].shape
    return [range(row * width, (row + 1) * width) for row in range(rows)]


def steps_of(inputs: Inputs, row: range) -> list[list[int]]:
    """Tokens of the steps of a row: its turns, or each token that counts."""
    mask = inputs.get("mask", torch.ones_like(inputs["rewards"])).flatten().tolist()
    if "turns" not in inputs:
        return [[t] for t in row if mask[t]]
    turns = inputs["turns"].flatten().tolist()
    return [[*turn] for _, turn in itertools.groupby((t for t in row if mask[t] and turns[t] >= 0), turns.__getitem__)]


def carry(rewards: Any, row: range, counts: set[int]) -> None:
    """Moves rewards of tokens that do not count to the last token before them that does, if they are numbers."""
    last = None
    for t in row:
        if t in counts:
            last = t
        elif last is not None and np.isfinite(rewards[t]):
            rewards[last] += rewards[t]


@np.errstate(invalid="ignore")  # infinite rewards
def by_definition(inputs: Inputs, config: gk.TokenAdvantageConfig, dtype: torch.dtype = F64) -> Results:
    """Advantages and returns by the temporal differences of steps; whitened as rounded to the dtype."""
    rewards = inputs["rewards"].numpy().flatten().astype(np.longdouble)
    values = inputs["values"].numpy().flatten().astype(np.longdouble) if config.needs_values else np.zeros_like(rewards)
    advantages, returns, is_scored = (np.zeros(len(rewards), kind) for kind in (np.longdouble, np.longdouble, bool))
    gamma, lam = np.longdouble(config.gamma), np.longdouble(config.lam)
    for row in rows_of(inputs):
        steps = steps_of(inputs, row)
        counts = {t for step in steps for t in step}
        if config.carry_rewards:
            carry(rewards, row, counts)
        scored = not any(np.isnan(rewards[t]) for t in counts)
        advantage = next_value = np.longdouble(0)
        for step in reversed(steps):
            value = values[step[0]]
            difference = sum(rewards[t] for t in step) + gamma * next_value - value
            advantage = difference + gamma * lam * advantage if scored else np.longdouble(0)
            next_value = value
            advantages[step], returns[step], is_scored[step] = advantage, advantage + value, scored
    rounded = advantages.astype(np.float32 if dtype == F32 else np.float64).astype(np.longdouble)[is_scored]
    if config.whiten == "tokens" and len(rounded):
        centered, differ = rounded - rounded.mean(), len(rounded) > 1 and not (rounded == rounded[0]).all()
        # not 0 for an infinite one, which shows
        advantages[is_scored] = centered / np.sqrt(rounded.var(ddof=1) + config.whiten_eps) if differ else 0 * centered
    shape = inputs["rewards"].shape
    both = {"advantages": advantages, "returns": returns}
    return {name: torch.tensor(value.astype(np.float64)).view(shape) for name, value in both.items()}


def call(inputs: Inputs, backend: str | None, config: gk.TokenAdvantageConfig | str = "gae") -> Results:
    """Results by name; values are given only if the config reads them."""
    config = gk.TokenAdvantageConfig.of(config)
    given = {name: value for name, value in inputs.items() if name != "values" or config.needs_values}
    return gk.token_advantages(**given, config=config, backend=backend)._asdict()


def op_of(config: gk.TokenAdvantageConfig | str) -> Op:
    return Op(draw, functools.partial(call, config=config), SUPPORTS)


def assert_by_definition(
    inputs: Inputs, config: gk.TokenAdvantageConfig | str, backend: str, dtype: torch.dtype
) -> None:
    config = gk.TokenAdvantageConfig.of(config)
    gold = by_definition(inputs, config, dtype)
    got, working = (run(op_of(config), inputs, name, dtype) for name in (backend, "reference"))
    moves = Moves(lambda: run(op_of(config), inputs, "reference", F64), gold)
    for name, value in gold.items():
        assert got[name].dtype == dtype
        assert_within_budget(got[name], working[name], value, name, moves=moves)


# For test_promises.py


def draw() -> Inputs:
    return padded(int(torch.randint(1000, ())), 5, 12)


def draw_packed() -> Inputs:
    """All seeds have batches of one shape, so that the last row and the tokens after it differ in length."""
    batch = packed(draw())
    room = 63 - len(batch["rewards"])
    filled = {
        name: torch.cat((value, value.new_full((room,), value.dtype != torch.bool))) for name, value in batch.items()
    }
    return filled | {"cu_seqlens": batch["cu_seqlens"]}


# The optimal token baseline


def draw_probabilities(places: str = "rank") -> Inputs:
    p = (-0.1 - 3 * torch.rand(6, 12)).double().exp()  # not 1, where the energy is 0
    mask = torch.arange(12) < torch.randint(1, 13, (6, 1))
    return {
        "rewards": torch.randn(6, 12).double(),
        "old_logprobs": p.log(),
        "sum_pi_squared": p**2 + (1 - p) ** 2 * torch.rand(6, 12),
        "groups": torch.tensor([0, 1, 0, 1, 1, 0]),
        "mask": mask & (torch.rand(6, 12) > 0.3) if places == "rank" else mask,
        "is_weights": 0.5 + torch.rand(6, 12).double(),
    }


def call_baseline(inputs: Inputs, backend: str | None, places: str = "position") -> Results:
    return gk.optimal_token_baseline(**inputs, places=places)._asdict()


PROBABILITIES = ("rewards", "old_logprobs", "sum_pi_squared", "is_weights")
WALK = gk.TokenAdvantageConfig(gamma=0.9, lam=0.8)
TURNS = gk.TokenAdvantageConfig(gamma=0.9, lam=0.8, whiten="none", carry_rewards=False)
PROMPTS = {"permuted rows": permuted, "one prompt a call": groups_apart, "prompts of one size": groups_of_one_size}
OPS = {
    "token_advantages": dataclasses.replace(
        op_of(WALK),
        ignored=lambda inputs: {"values": ~inputs["mask"]},
        rewrites={"a mask of numbers": changed("mask", lambda mask: mask.int() * 3)},
    ),
    "token_advantages of turns": dataclasses.replace(
        op_of(TURNS),
        draw=lambda: padded(int(torch.randint(1000, ())), 5, 12, turns="some"),
        ignored=lambda inputs: dict.fromkeys(("rewards", "values", "turns"), ~inputs["mask"]),
        rewrites={"narrow turns": changed("turns", lambda turns: turns.to(torch.int8))},
    ),
}
OPS["token_advantages of packed rows"] = dataclasses.replace(
    op_of(WALK), draw=draw_packed, ignored=lambda inputs: {"values": ~inputs["mask"]}
)
OPS["token_advantages of rollouts"] = dataclasses.replace(
    op_of(TURNS),
    draw=lambda: (
        padded(int(torch.randint(1000, ())), 5, 12, turns="some") | {"rollouts": torch.tensor([3, -1, 3, 3, -1])}
    ),
    ignored=lambda inputs: dict.fromkeys(("rewards", "values", "turns"), ~inputs["mask"]),
)
for name in ("position", "rank"):
    OPS[f"optimal_token_baseline by {name}"] = Op(
        functools.partial(draw_probabilities, name),
        functools.partial(call_baseline, places=name),
        {"reference": (F32, F64)},
        ignored=lambda inputs: dict.fromkeys(PROBABILITIES, ~inputs["mask"]),
        rewrites=PROMPTS,
    )
