"""Batches of group_advantages and of gigpo_advantages, and a comparison of a kernel with the float64 reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.registration import SUPPORTS
from tests.harness import assert_within_budget, runnable_backends
from tests.ops.promises import Inputs, Op, Results, Same, groups_apart, groups_of_one_size, in_parts, permuted, run
from tests.rounding import Moves
from tests.strategies import ids

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# the emulated CUDA is 10 to 1000 times slower
FAST = tuple(name for name in BACKENDS if name in ("cpu", "reference") or torch.cuda.is_available())
PRESETS = {name: gk.AdvantageConfig(name) for name in gk.AdvantageConfig.names()}
# estimators whose rows depend on rows of other groups
OF_BATCH = [n for n, c in PRESETS.items() if c.scale == "batch_std" or c.whiten != "none" or c.gain != "none"]


# Rewards of a group, one distribution for each likely mistake: exact ties (binary, grid), a variance lost to an offset
# (offset; far, in float64), results dominated by eps (tiny), squares far from 1 (wide), a rounded mean of equal values
# (equal), a batch of them (constant), equal but for an ulp (nearly), infinite ones.
VALUES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "binary": lambda n, g: torch.randint(0, 2, (n,), generator=g).float(),
    "grid": lambda n, g: torch.randint(-8, 9, (n,), generator=g) / 4,
    "offset": lambda n, g: torch.randn(n, generator=g) + 1000,
    "far": lambda n, g: torch.randint(-8, 9, (n,), generator=g) / 4 + torch.tensor(2.0**30, dtype=F64),
    "tiny": lambda n, g: torch.randn(n, generator=g) * 1e-7,
    "wide": lambda n, g: torch.randn(n, generator=g) * 1e12,
    "equal": lambda n, g: torch.tensor([0.1, 0.35, 0.7, 1000.1])[torch.randint(0, 4, (1,), generator=g)].repeat(n),
    "constant": lambda n, g: torch.full((n,), 0.1),
    "nearly": lambda n, g: torch.where(torch.arange(n) == 1, torch.tensor(0.7).nextafter(torch.tensor(1.0)), 0.7),
    "infinite": lambda n, g: torch.randn(n, generator=g).where(torch.rand(n, generator=g) < 0.9, INF),
}
LABELS = ((-1, 0, 1, 2), (-(2**63), 2**40, 2**40 + 2**32, 2**63 - 1))


@st.composite
def batches(
    draw: st.DrawFn,
    max_rows: int,
    kinds: tuple[str, ...] = tuple(kind for kind in VALUES if kind != "far"),
    columns: tuple[int, ...] = (0, 0, 0, 1, 2, 3),
) -> Inputs:
    """Rewards [N], or [N, R] with several columns, of ragged groups; some batches have no scored row at all."""
    ragged = st.lists(st.integers(1, 3) | st.integers(1, max_rows // 4), min_size=1, max_size=8)
    # the CPU kernel takes four groups of eight at once
    groups = draw((ragged | st.just([8] * 6)).flatmap(ids))[:max_rows]
    n, number = len(groups), draw(st.sampled_from(columns))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rewards = torch.empty(n, max(number, 1), dtype=F64)
    for column in rewards.T:
        kind = draw(st.sampled_from(kinds))
        for name in groups.unique():  # one value per group for "equal"
            column[groups == name] = VALUES[kind](int((groups == name).sum()), generator).double()
    missing = draw(st.sampled_from((0.0, 0.0, 0.2, 0.6, 1.0)))
    rewards[torch.rand(rewards.shape, generator=generator) < missing] = NAN
    labels = torch.tensor(draw(st.sampled_from(LABELS)))
    batch = {
        "rewards": rewards if number else rewards[:, 0],
        "groups": groups,
        "subgroups": labels[torch.randint(0, 4, (n,), generator=generator)],
        "valid": torch.rand(n, generator=generator) >= draw(st.sampled_from((0.0, 0.3, 1.0))),
        "lengths": torch.randint(draw(st.integers(0, 1)), 50, (n,), generator=generator),
        "baselines": torch.randn(n, generator=generator).double(),
    }
    left_out = draw(st.sets(st.sampled_from(("subgroups", "valid"))))
    return {name: value for name, value in batch.items() if name not in left_out}


def has_meaning(settings: dict[str, Any]) -> bool:
    with contextlib.suppress(ValueError):
        return gk.AdvantageConfig(**settings) is not None
    return False


def configs() -> st.SearchStrategy[gk.AdvantageConfig]:
    """Any settings that an AdvantageConfig takes, of one reward or of several with the weight 1."""
    fields = {
        "center": st.sampled_from(("none", "mean", "leave_one_out", "length", "baseline", "runner_up")),
        "scale": st.sampled_from(("none", "std", "batch_std", "mean", "leave_one_out_std")),
        "ddof": st.integers(0, 1),
        "eps": st.sampled_from((0.0, 1e-6, 0.5)),
        "std_floor": st.sampled_from((0.0, 0.0, 0.3)),
        "singleton": st.sampled_from(("zero", "raw", "parent")),
        "shrinkage": st.sampled_from((0.0, 0.0, 3.0)),
        "clip": st.sampled_from((None, None, 0.7)),
        "combine": st.sampled_from(("sum_then_normalize", "normalize_then_sum")),
        "whiten": st.sampled_from(("none", "none", "rows", "tokens")),
        "whiten_eps": st.sampled_from((0.0, 1e-3)),
        "gain": st.sampled_from(("none", "none", "nonzero")),
    }

    return st.fixed_dictionaries(fields).filter(has_meaning).map(lambda settings: gk.AdvantageConfig(**settings))


def takes(inputs: Inputs, config: gk.AdvantageConfig) -> bool:
    """Whether the batch has what the config reads."""
    return "subgroups" in inputs or not config.needs_parent


def call(inputs: Inputs, backend: str | None, config: gk.AdvantageConfig | str = "grpo") -> Results:
    """Results by name; of lengths and baselines only those that the config reads are given."""
    config = gk.AdvantageConfig.of(config)
    left_out = {"lengths": not config.needs_lengths, "baselines": not config.needs_baselines}
    given = {name: value for name, value in inputs.items() if not left_out.get(name)}
    return gk.group_advantages(**given, config=config, backend=backend)._asdict()


def scored(inputs: Inputs) -> Tensor:
    rewards = inputs["rewards"]
    result = ~rewards.isnan().view(len(rewards), -1).all(1)
    if "valid" in inputs:
        result &= inputs["valid"]
    return result & (inputs["subgroups"] >= 0) if "subgroups" in inputs else result


def largest_before_whitening(inputs: Inputs, config: gk.AdvantageConfig, whitened: Results) -> float:
    """The largest number that a second normalisation gets, over its divisor, by which it divides their roundings, too.

    The divisor is tiny where the numbers are nearly equal.
    """
    if config.whiten == "none" or not len(inputs["rewards"]):
        return 0.0
    plain = dataclasses.replace(config, whiten="none", whiten_eps=0.0)
    numbers = run(Op(draw, functools.partial(call, config=plain), SUPPORTS), inputs, "reference", F64)["advantages"]
    live = scored(inputs) & ~whitened["degenerate"] & numbers.isfinite() & whitened["advantages"].isfinite()
    before, after = numbers[live], whitened["advantages"][live]
    if not len(after) or after.max() == after.min():
        return 0.0
    divisor = (before.max() - before.min()) / (after.max() - after.min())
    return float(before.abs().max() / divisor)


def assert_like_reference(
    inputs: Inputs, config: gk.AdvantageConfig | str, backend: str, dtype: torch.dtype = F32
) -> None:
    op = Op(draw, functools.partial(call, config=config), SUPPORTS)
    got, working = (run(op, inputs, name, dtype) for name in (backend, "reference"))
    gold = run(op, inputs, "reference", F64)
    moves = Moves(lambda: run(op, inputs, "reference", F64), gold)
    # clipping lowers the numbers, and not the rounding of those that it keeps
    whole = dataclasses.replace(gk.AdvantageConfig.of(config), clip=None)
    unclipped = run(Op(draw, functools.partial(call, config=whole), SUPPORTS), inputs, "reference", F64)
    largest = unclipped["advantages"].nan_to_num(0, 0, 0).abs().amax() if len(inputs["rewards"]) else 0.0
    largest = max(float(largest), largest_before_whitening(inputs, whole, unclipped))
    for name in ("advantages", "mean", "std"):
        assert got[name].dtype == dtype
        inherited = 4 * torch.finfo(dtype).eps * largest if name == "advantages" else 0.0
        assert_within_budget(got[name], working[name], gold[name], name, inherited, moves=moves)
    assert got["size"].dtype == torch.int32 and torch.equal(got["size"], gold["size"])
    # a sum of two rewards, one of them tiny, is equal to others in float32 alone
    is_certain = working["degenerate"] == gold["degenerate"]
    assert torch.equal(got["degenerate"][is_certain], working["degenerate"][is_certain])
    assert not got["advantages"][got["degenerate"] | ~scored(inputs)].any()


# For test_promises.py


def draw() -> Inputs:
    """Twelve shuffled groups of five rows in two columns; some rows are not scored."""
    rewards = torch.randn(60, 2).double()
    rewards[torch.rand(60, 2) < 0.1] = NAN
    return {
        "rewards": rewards,
        "groups": torch.arange(60)[torch.randperm(60)] // 5,
        "subgroups": torch.randint(-1, 2, (60,)),
        "valid": torch.rand(60) < 0.9,
    }


def draw_column() -> Inputs:
    inputs = draw()
    return {"rewards": inputs["rewards"][:, 0], "groups": inputs["groups"]}


def draw_rollouts() -> Inputs:
    """Twenty rollouts of three rows each, of which not all state the rewards or take part."""
    inputs, source = draw(), torch.arange(60)[torch.randperm(60)] % 20
    inputs = {name: value[source].clone() for name, value in inputs.items()}
    inputs["rewards"][torch.rand(60, 2) < 0.2] = NAN
    return inputs | {"valid": torch.rand(60) < 0.7, "rollouts": 1000 * source - 7}


def draw_steps() -> Inputs:
    return {
        "episode_rewards": torch.randint(0, 3, (60,)).double(),
        "step_returns": torch.randn(60).double(),
        "groups": torch.randint(0, 5, (60,)),
        "states": torch.randint(-1, 4, (60,)),
    }


def draw_episodes() -> Inputs:
    episode = torch.randint(0, 20, (60,))
    rewards, groups = torch.randint(0, 3, (20,)).double()[episode], episode % 5
    return draw_steps() | {"episode_rewards": rewards, "groups": groups, "rollouts": 7 * episode - 3}


def call_steps(inputs: Inputs, backend: str | None) -> Results:
    return {"advantages": gk.gigpo_advantages(**inputs, episode_weight=0.7, step_weight=1.5, backend=backend)}


def ignored(inputs: Inputs) -> dict[str, Tensor]:
    is_out = ~inputs["valid"] | (inputs["subgroups"] < 0)
    return {name: is_out for name in ("rewards", "lengths") if name in inputs}


def narrow(inputs: Inputs) -> Same:
    small = {name: value.to(torch.int8) for name, value in inputs.items() if name in ("groups", "subgroups")}
    return Same([inputs | small], lambda results: results[0])


def scored_rows_alone(inputs: Inputs) -> Same:
    return in_parts(inputs, [scored(inputs).nonzero()[:, 0]], "advantages")


def pairs_as_groups(inputs: Inputs) -> Same:
    pairs, others = inputs["groups"] * 7 + inputs["subgroups"], {**inputs}
    valid = inputs["valid"] & (others.pop("subgroups") >= 0)
    return Same([others | {"groups": pairs, "valid": valid}], lambda results: {"advantages": results[0]["advantages"]})


PARTS = {"singleton": "parent", "shrinkage": 2.0, "combine": "normalize_then_sum", "reward_weights": (1.0, -0.5)}
APART = {"permuted rows": permuted, "one group a call": groups_apart}
IDS = {"permuted rows": permuted, "narrow ids": narrow, "groups of one size": groups_of_one_size}
SCORED = {"scored rows alone": scored_rows_alone}
OPS = {
    "group_advantages": Op(draw_column, call, SUPPORTS, rewrites=IDS | APART),
    "group_advantages of subgroups": Op(
        draw,
        functools.partial(call, config=gk.AdvantageConfig(**PARTS, clip=1.0)),
        SUPPORTS,
        ignored=ignored,
        rewrites=IDS | APART | SCORED,
    ),
    "group_advantages of a batch": Op(
        lambda: draw() | {"lengths": torch.randint(1, 50, (60,))},
        functools.partial(call, config="verl-gdpo"),
        SUPPORTS,
        ignored=ignored,
        rewrites=IDS | SCORED | {"pairs as groups": pairs_as_groups},
    ),
    "group_advantages of rollouts": Op(
        lambda: draw_rollouts() | {"lengths": torch.randint(1, 50, (60,))},
        functools.partial(call, config="verl-gdpo"),
        SUPPORTS,
        ignored=ignored,
        rewrites={"permuted rows": permuted},
    ),
    "group_advantages of baselines": Op(
        lambda: draw_column() | {"baselines": torch.randn(60).double()},
        functools.partial(call, config="remax"),
        SUPPORTS,
        rewrites={"permuted rows": permuted},
    ),
    "gigpo_advantages": Op(draw_steps, call_steps, SUPPORTS, rewrites=APART),
    "gigpo_advantages of episodes": Op(draw_episodes, call_steps, SUPPORTS, rewrites=APART),
}
