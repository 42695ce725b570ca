"""Errors of an invalid support; their messages name the op, the argument, the rule and the value."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.backends import runs_on
from tests.harness import INDUCTOR, assert_raises
from tests.ops.sampled_support.batches import OF_LOSSES, batch

IDS, OFFSETS = torch.tensor([4, 0, 2, 3, 1, 6]), torch.tensor([0, 2, 3, 6])
TARGETS = torch.tensor([0, 2, 6])


def calls_of(changes: dict[str, Any]) -> dict[str, Any]:
    """All three functions on three rows."""
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    changes = {"targets": TARGETS, "support": (IDS, OFFSETS)} | changes
    rows = {k: v for k, v in changes.items() if k != "targets"}
    loss = {"old_logprobs": None, "advantages": torch.ones(1)}
    return {
        "token_logprobs": functools.partial(gk.token_logprobs, hidden @ weight.T, **changes),
        "linear_logprobs": functools.partial(gk.linear_logprobs, hidden, weight, **changes),
        "linear_policy_loss": functools.partial(
            gk.linear_policy_loss, hidden[None], weight, changes["targets"][None], **loss, **rows
        ),
    }


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    for name, call in calls_of(changes).items():
        for backend in (None, *(name for name in OF_LOSSES if runs_on(name, "cpu"))):
            assert_raises(error, f"{name}: {parts[0]}", parts[1:], functools.partial(call, backend=backend))


@pytest.mark.parametrize(
    "value", [IDS, 3, [IDS], (IDS, OFFSETS, IDS), {"token_ids": IDS}], ids=lambda v: type(v).__name__
)
def test_something_that_is_no_pair(value: Any) -> None:
    refused(TypeError, "support must be a pair (token_ids, offsets) of tensors", type(value).__name__, support=value)


@pytest.mark.parametrize(("place", "name"), [(0, "token_ids"), (1, "offsets")])
def test_a_part_that_is_no_tensor_of_integers_here(place: int, name: str) -> None:
    def with_part(value: object) -> tuple[object, ...]:
        return tuple(value if i == place else part for i, part in enumerate((IDS, OFFSETS)))

    part = (IDS, OFFSETS)[place]
    refused(TypeError, f"support.{name} must be a tensor", "list", support=with_part(part.tolist()))
    refused(TypeError, f"support.{name} must be of dtype", "float32", support=with_part(part.float()))
    refused(ValueError, f"support.{name} must be on cpu", "meta", support=with_part(part.to("meta")))
    refused(ValueError, f"support.{name} must have shape [", "[1, ", support=with_part(part[None]))


def test_offsets_of_another_number_of_rows() -> None:
    refused(ValueError, "support.offsets must have shape [4]", "one more than", "[3]", support=(IDS, OFFSETS[:3]))


@pytest.mark.parametrize(
    ("offsets", "value"),
    [
        ([1, 2, 3, 6], "got 1 at 0"),
        ([0, 3, 2, 6], "got 2 at 2"),
        ([0, 2, 3, 7], "got 7 at 3"),
        ([0, 2, 3, 5], "got 5 at"),
    ],
)
def test_offsets_that_do_not_ascend_over_all_ids(offsets: list[int], value: str) -> None:
    refused(
        ValueError,
        "support.offsets must ascend from 0 to the number of token ids, 6",
        value,
        support=(IDS, torch.tensor(offsets)),
    )


@pytest.mark.parametrize("value", [-1, 7])
def test_ids_outside_of_the_vocabulary(value: int) -> None:
    ids = IDS.clone()
    ids[3] = value
    refused(ValueError, "support.token_ids must be in [0, 7)", f"got {value} in row 2", support=(ids, OFFSETS))


def test_an_id_twice_in_a_row() -> None:
    ids = IDS.clone()
    ids[3] = 6
    refused(ValueError, "support.token_ids must differ within a row", "got 6 twice in row 2", support=(ids, OFFSETS))


@pytest.mark.parametrize("target", [1, 7, -1])
def test_a_target_that_was_not_kept(target: int) -> None:
    targets = torch.tensor([0, target, 6])
    refused(ValueError, "targets must be in the support of their row", f"got {target} in row 1", targets=targets)


def test_a_row_that_counts_but_keeps_nothing() -> None:
    support = IDS[:3], torch.tensor([0, 2, 3, 3])
    refused(ValueError, "targets must be in the support of their row", "got 6 in row 2", support=support)
    nothing = IDS[:0], torch.zeros(4, dtype=torch.int64)
    refused(ValueError, "targets must be in the support of their row", "got 0 in row 0", support=nothing)


def test_options_that_divide_the_work() -> None:
    head: dict[str, Any] = batch(3, dtype=torch.float32)
    for name, value in {"chunk_size": 2, "vocab_start": 0}.items():
        with pytest.raises(ValueError, match=f"linear_logprobs: {name} must be None with support, got {value}"):
            gk.linear_logprobs(**head, **{name: value})
    loss = calls_of({})["linear_policy_loss"]
    for name, value in {"chunk_size": 2, "compact": True, "memory": "low"}.items():
        with pytest.raises(ValueError, match=f"linear_policy_loss: {name} must be None with support, got {value!r}"):
            loss(**{name: value})
    with pytest.raises(ValueError, match="token_logprobs: inplace_backward must be False with support, got True"):
        calls_of({})["token_logprobs"](inplace_backward=True)


@pytest.mark.parametrize("name", ["token_logprobs", "linear_logprobs"])
def test_under_compile_an_assertion_fails(name: str) -> None:
    """As on a GPU, where looking at values would wait for it."""
    torch.compiler.reset()
    call = calls_of({})[name]
    compiled = torch.compile(lambda targets: call(targets=targets, support=(IDS, OFFSETS)), backend=INDUCTOR)

    def logprobs(targets: Tensor) -> Tensor:
        result: Tensor = compiled(targets).logprobs
        return result

    assert logprobs(TARGETS).shape == (3,)
    with pytest.raises(RuntimeError, match=f"{name}: targets must be in the support of their row"):
        logprobs(torch.tensor([0, 1, 6]))
