"""The compiled kernels read settings by position, so their names and codes must match the Python configs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments import config as segments
from grpo_kernels.ops.group_advantages import config as advantages
from grpo_kernels.ops.policy_loss import config as loss
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS
from grpo_kernels.ops.similarity_groups import RowStatus
from grpo_kernels.ops.similarity_groups import config as similarity
from grpo_kernels.ops.token_advantages import config as token_advantages
from grpo_kernels.ops.token_logprobs import config as logprobs

ENUMERATIONS: dict[str, dict[str, Sequence[str]]] = {
    "group_advantages": {
        "Center": advantages.CENTERS,
        "Scale": advantages.SCALES,
        "Singleton": advantages.SINGLETONS,
        "Combine": advantages.COMBINES,
        "Whiten": advantages.WHITENS,
        "Gain": advantages.GAINS,
    },
    "policy_loss": {
        "Loss": loss.LOSSES,
        "Ratio": loss.RATIOS,
        "Kl": [name for name in loss.KLS if not name.endswith("+")],  # kl_straight is a separate mode
        "Aggregation": loss.AGGREGATIONS,
    },
    "similarity_groups": {
        "Linkage": similarity.LINKAGES,
        "Collapse": similarity.COLLAPSES,
        "Verdict": [verdict.name for verdict in sorted(gk.Verdict)],
    },
    "endpoint_segments": {
        "SegmentRule": segments.RULES,
        "SegmentProxy": segments.PROXIES,
        "SegmentCredit": segments.CREDITS,
        "SegmentNorm": segments.NORMS,
    },
    "token_advantages": {"TokenWhiten": token_advantages.WHITENS},
}
PLANS: dict[str, type] = {
    "group_advantages": advantages.Plan,
    "policy_loss": loss.Plan,
    "similarity_groups": similarity.Plan,
    "endpoint_segments": segments.Plan,
    "token_advantages": token_advantages.Plan,
}


@pytest.fixture(scope="module")
def codes() -> dict[str, dict[str, Any]]:
    """The names as the kernels were compiled with them, of the module that a build in a checkout has."""
    module = pytest.importorskip("grpo_kernels._codes", reason="no compiled kernels are built")
    return module.kernel_codes()


def enumerator(name: str) -> str:
    """The C++ name of a Python name, e.g. kSeqMeanTokenMean for seq-mean-token-mean."""
    return "k" + "".join(word.capitalize() for word in re.split("[-_]", name))


def test_codes_are_the_positions_of_names(codes: dict[str, dict[str, Any]]) -> None:
    exported = {(op, name) for op, names in codes.items() for name in names if name[0].isupper()}
    compared = {(op, name) for op, names in ENUMERATIONS.items() for name in names}
    assert exported - {("similarity_groups", "RowStatus")} == compared
    for op, name in compared:
        assert codes[op][name].split(", ") == [enumerator(value) for value in ENUMERATIONS[op][name]], name


def test_row_status_has_the_same_bits(codes: dict[str, dict[str, Any]]) -> None:
    bits = dict(part.split(" = ") for part in codes["similarity_groups"]["RowStatus"].split(", "))
    members = RowStatus.__members__.items()  # iteration skips flags of value 0
    assert {name: int(value) for name, value in bits.items()} == {enumerator(n): int(v) for n, v in members}


@pytest.mark.parametrize("op", PLANS)
def test_settings_are_in_the_same_order(codes: dict[str, dict[str, Any]], op: str) -> None:
    modes, coefficients = codes[op]["modes"].split(), codes[op]["coefficients"].split()
    kinds = get_type_hints(PLANS[op])
    assert [*modes, *coefficients] == list(kinds)
    assert modes == [name for name, kind in kinds.items() if kind is int]


def test_metrics_and_limits_are_the_same(codes: dict[str, dict[str, Any]]) -> None:
    assert tuple(codes["policy_loss"]["metrics"].split()) == METRICS
    assert codes["similarity_groups"]["max_rows"] == similarity.MAX_ROWS
    assert codes["token_logprobs"]["ignored_target"] == logprobs.IGNORED
