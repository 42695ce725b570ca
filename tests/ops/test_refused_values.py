"""Values that the kernels of the CPU refuse, at every place of a row longer than a vector.

Faults that this is for: a check of a vector loop that leaves out a lane, or of the loop over what is
left; a masked slot that is looked at. The tables of errors have one row of a few values each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import needs_cpu_kernels

ROWS, WIDTH = 2, 37  # vectors of sixteen, eight and four, and a token
SHAPE = (ROWS, WIDTH)
INF, NAN = float("inf"), float("nan")


class Refused(NamedTuple):
    """A call, its arguments, the one that is wrong and how, and the rule that the error names."""

    call: Callable[..., Any]
    given: dict[str, Any]
    name: str
    wrong: float
    rule: str
    unless: str = "mask"  # where a place may hold anything


def numbers(*names: str) -> dict[str, Tensor]:
    return {name: torch.full(SHAPE, -0.5) for name in names}


LENGTHS = {"rewards": torch.arange(float(WIDTH)), "groups": WIDTH, "lengths": torch.ones(WIDTH), "config": "opo"}
SEGMENTS = numbers("logprobs", "old_logprobs") | {
    "advantages": torch.ones(ROWS),
    "config": gk.LossConfig(ratio="segment"),
}
SEGMENTS["segments"] = torch.arange(WIDTH).repeat(ROWS, 1) // 3
CUTS = numbers("rewards", "logprobs", "old_logprobs", "values")
FINITE = "must be finite where the mask is True"
CASES = {
    "lengths": Refused(gk.group_advantages, LENGTHS, "lengths", -1.0, "must be finite and not negative", "valid"),
    "infinite lengths": Refused(gk.group_advantages, LENGTHS, "lengths", INF, "must be finite and", "valid"),
    "segments": Refused(gk.policy_loss, SEGMENTS, "segments", WIDTH, "must ascend from 0 along each row"),
    "targets": Refused(
        gk.token_logprobs,
        {"logits": torch.zeros(*SHAPE, 5), "targets": torch.zeros(SHAPE, dtype=torch.int64)},
        *("targets", 5, r"must be in \[0, 5\)", ""),
    ),
    **{
        f"segments by {name}": Refused(gk.endpoint_segments, CUTS, name, wrong, FINITE)
        for name, wrong in (("rewards", NAN), ("values", INF), ("logprobs", -INF), ("old_logprobs", NAN))
    },
}


@needs_cpu_kernels
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_wrong_value_is_refused_wherever_it_is(backend: str, name: str) -> None:
    case = CASES[name]
    case.call(**case.given, backend=backend)
    right = case.given[case.name]
    for place in range(right.numel()):
        wrong = right.clone()
        wrong.view(-1)[place] = case.wrong
        with pytest.raises(RuntimeError, match=rf"^{case.call.__name__}: .*{case.rule}"):
            case.call(**case.given | {case.name: wrong}, backend=backend)
        if case.unless:
            counts = torch.ones(right.shape, dtype=torch.bool)
            counts.view(-1)[place] = False
            case.call(**case.given | {case.name: wrong, case.unless: counts}, backend=backend)
