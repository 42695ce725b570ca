"""Errors of linear_distillation_loss name the argument, the rule and the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises
from tests.ops.linear_distillation_loss.batch import COLUMNS, F64, ROWS, K, batch

OP = "linear_distillation_loss: "


def changed(name: str, place: Any, value: float) -> dict[str, Any]:
    tensor = batch()[name]
    tensor[place] = value
    return {name: tensor}


LONG = torch.long
CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "ids of another shape": ({"teacher_ids": torch.zeros(3, K, dtype=LONG)}, "teacher_ids", [f"[3, {K}]"]),
    "no ids": ({"teacher_ids": torch.zeros(ROWS, 0, dtype=LONG)}, "teacher_ids", ["k > 0"]),
    "id too large": (changed("teacher_ids", (3, 1), COLUMNS), "teacher_ids", [f"[0, {COLUMNS})", "row 3"]),
    "id below -1": (changed("teacher_ids", (3, 1), -2), "teacher_ids", ["-2", "row 3"]),
    "id twice": (changed("teacher_ids", (2, slice(0, 2)), 7), "teacher_ids", ["differ", "row 2"]),
    "other shape": ({"teacher_logprobs": torch.zeros(ROWS, 2)}, "teacher_logprobs", [f"[{ROWS}, 2]"]),
    "infinite": (changed("teacher_logprobs", (4, 0), -torch.inf), "teacher_logprobs", ["finite", "row 4"]),
    "more than 1": (changed("teacher_logprobs", (4, 0), 0.1), "teacher_logprobs", ["at most 1", "row 4"]),
    "unknown kind": ({"kind": "forward"}, "kind", ["forward_kl", "'forward'"]),
    "unknown tail": ({"tail": "renormalize"}, "tail", ["did you mean 'renormalise'?"]),
    "beta of a KL divergence": ({"kind": "jsd", "beta": 1.0}, "beta", ["between 0 and 1", "1.0"]),
    "beta without jsd": ({"beta": 0.3}, "beta", ["left out unless kind is 'jsd'", "0.3 with 'forward_kl'"]),
    "a teacher with a gradient": (
        {"teacher_logprobs": batch()["teacher_logprobs"].requires_grad_()},
        "teacher_logprobs",
        ["teacher_logprobs.detach()"],
    ),
    "weights with a gradient": ({"weights": torch.ones(ROWS, requires_grad=True)}, "weights", ["weights.detach()"]),
    "mask of another shape": ({"mask": torch.ones(3)}, "mask", [f"[{ROWS}]", "[3]"]),
    "weights of another shape": ({"weights": torch.ones(3)}, "weights", ["[3]"]),
    "normalizer of 0": ({"normalizer": 0.0}, "normalizer", ["above 0", "0.0"]),
    "normalizer of two": ({"normalizer": torch.ones(2)}, "normalizer", ["one element", "[2]"]),
    "chunks of 0": ({"chunk_size": 0}, "chunk_size", ["at least 1", "0"]),
    "other width": ({"weight": torch.ones(COLUMNS, 3, dtype=F64)}, "weight", ["[40, 3]"]),
    "no gradient": ({"weight_grad": torch.ones(COLUMNS, 8, dtype=F64)}, "weight_grad", ["requires grad"]),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    change, argument, parts = CASES[name]
    assert_raises(ValueError, f"{OP}{argument} must", parts, lambda: gk.linear_distillation_loss(**batch() | change))


def test_ids_are_integers() -> None:
    arguments = batch() | {"teacher_ids": torch.zeros(ROWS, K)}
    call = lambda: gk.linear_distillation_loss(**arguments)  # noqa: E731
    assert_raises(TypeError, f"{OP}teacher_ids must", ["float32"], call)


def test_weight_grad_needs_a_backend_that_adds() -> None:
    arguments = batch()
    arguments["weight"].requires_grad_()
    options: dict[str, Any] = {"weight_grad": torch.zeros_like(arguments["weight"]), "backend": "reference"}
    assert_raises(
        ValueError,
        f"{OP}weight_grad must be None",
        ["reference"],
        lambda: gk.linear_distillation_loss(**arguments, **options),
    )
