"""Options and errors of group_advantages at the sizes of its vector loops and wide accesses.

Faults that this is for: an option that the common path of groups of one size leaves out, such as the
weight of a single reward; a contradiction that the vector loop over rollouts overlooks, or the loop
over what is left. Drawn groups have ids, and so never take the path of groups of one size.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.config import CENTERS, SCALES
from tests.ops.group_advantages import cases
from tests.ops.group_advantages.cases import F64, NAN, assert_like_reference, call, has_meaning
from tests.ops.promises import Inputs

SIZE, GROUPS = 8, 6  # a vector of the CPU, of which four are computed at once; two quads of a GPU
ROWS = SIZE * GROUPS
# settings one at a time
EACH: list[dict[str, Any]] = [
    *({"reward_weights": (3.0,)}, {"reward_weights": (-0.5,)}, {"ddof": 0}, {"eps": 0.5}),
    *({"std_floor": 0.3}, {"clip": 0.7}, {"combine": "normalize_then_sum"}, {"gain": "nonzero"}),
    *({"whiten": "rows", "whiten_eps": 0.5}, {"whiten": "tokens", "whiten_eps": 0.5}),
]
# and beside each other
TOGETHER: dict[str, Any] = {"reward_weights": (3.0,), "ddof": 0, "eps": 0.5, "clip": 0.7}
KINDS = [
    (center, scale)
    for center, scale in itertools.product(CENTERS, SCALES)
    if has_meaning({"center": center, "scale": scale})
]


def batch(columns: int, has_mask: bool) -> Inputs:
    """Rewards of groups of one size, of which one has no learning signal."""
    rewards = torch.randn(ROWS).double() + 0.5
    rewards[SIZE : 2 * SIZE] = 0.75
    more: Inputs = {"lengths": torch.randint(1, 50, (ROWS,)), "baselines": torch.randn(ROWS).double()}
    if has_mask:
        rewards[::11] = NAN
        more["valid"] = torch.rand(ROWS) < 0.8
    return {"rewards": rewards.view(-1, 1) if columns else rewards, "groups": SIZE} | more


@pytest.mark.pairs
@pytest.mark.parametrize(("center", "scale"), KINDS)
@pytest.mark.parametrize("backend", cases.KERNELS)
def test_settings_of_groups_of_one_size(backend: str, center: str, scale: str) -> None:
    kind = {"center": center, "scale": scale}
    changes = [kind | more for more in (*EACH, TOGETHER)]
    for number, settings in enumerate(filter(has_meaning, changes)):
        inputs = batch(number % 2, has_mask=number % 3 == 0)
        assert_like_reference(inputs, gk.AdvantageConfig(**settings), backend)


WRONG = {"rewards": 2.0, "groups": 1, "subgroups": 1, "baselines": 2.0}


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", cases.FAST)
def test_a_sibling_that_contradicts_is_seen_wherever_it_is(backend: str, name: str, dtype: torch.dtype) -> None:
    """Rollouts of two rows, neighbours whose ids ascend, and others."""
    if torch.cuda.is_available():
        pytest.skip("a GPU asserts, which ends its context")
    rows = 22  # vectors of four after the first row, and one left
    zeros = torch.zeros(rows, dtype=torch.int64)
    right = {"rewards": torch.ones(rows, dtype=dtype), "groups": zeros}
    right |= {"baselines": torch.ones(rows, dtype=dtype)} if name == "baselines" else {}
    right |= {"subgroups": zeros} if name == "subgroups" else {}
    config = gk.AdvantageConfig("remax" if name == "baselines" else "grpo")
    for rollouts in (torch.arange(rows) // 2, torch.arange(rows) % (rows // 2)):
        given = right | {"rollouts": rollouts}
        call(given, backend, config)
        for row in range(rows):
            wrong = given[name].clone()
            wrong[row] = WRONG[name]
            with pytest.raises(
                RuntimeError, match=rf"^group_advantages: {name} must be equal in all rows of a rollout"
            ):
                call(given | {name: wrong}, backend, config)
