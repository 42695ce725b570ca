"""Errors of linear_policy_loss, linear_distillation_loss and of a Teacher.

Faults that this is for: a wrong argument that is taken, or fails with another type, without its value or the way out.
What test_promises.py checks of every tensor is not here.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises
from tests.ops.linear_head.distillation_cases import EXACT
from tests.ops.linear_head.policy_loss_cases import CONFIGS

TOKENS, INTS = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
HIDDEN, WEIGHT = torch.zeros(2, 3, 5, requires_grad=True), torch.zeros(7, 5, requires_grad=True)
POLICY = {"hidden": HIDDEN, "head": WEIGHT, "targets": INTS, "old_logprobs": TOKENS, "advantages": torch.ones(2)}
IDS, LOGPROBS = torch.tensor([0, 3]).expand(2, 3, 2), torch.full((2, 3, 2), -1.0)
ADAPTED = gk.LMHead(WEIGHT, lora=(torch.zeros(1, 5), torch.zeros(7, 1), 1.0))
SUPPORT = {"support": (INTS.flatten(), torch.arange(7))}
KL, SEQUENCE = {"config": CONFIGS["dapo"]}, {"config": CONFIGS["sequence token"]}
TALL, WIDE, DOUBLE = torch.zeros(7, 5), torch.zeros(5, 7), KL | {"ref_hidden": HIDDEN.double()}
REF, GRAD, LOW = KL | {"ref_hidden": HIDDEN}, {"weight_grad": TALL}, {"memory": "low"}


def taught(**fields: Any) -> dict[str, Any]:
    return {"teacher": gk.Teacher(**{"ids": IDS, "logprobs": LOGPROBS} | fields)}


def said(logprob: float) -> dict[str, Any]:
    """A teacher that gives the second id of token 4 this log-prob."""
    return taught(logprobs=at(LOGPROBS, (1, 1, 1), logprob))


def at(tensor: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    return tensor.clone().index_put(tuple(map(torch.tensor, place)), torch.tensor(value, dtype=tensor.dtype))


def banning(*ids: int) -> dict[str, Any]:
    return {"head": gk.LMHead(WEIGHT, banned=torch.tensor(ids))}


CALLS = {
    "linear_policy_loss": functools.partial(gk.linear_policy_loss, **POLICY),
    "linear_distillation_loss": functools.partial(gk.linear_distillation_loss, hidden=HIDDEN, head=WEIGHT, **taught()),
}
Row = tuple[type[Exception], str, dict[str, Any]]  # " ... " stands for any text
OF_TEACHER: list[Row] = [
    (TypeError, "teacher must be a Teacher, got Tensor", {"teacher": TOKENS}),
    (TypeError, "teacher.ids must be of dtype ... float32", taught(ids=LOGPROBS)),
    (ValueError, "teacher.ids must have shape [2, 3, k] with k > 0, ... got [3, 2]", taught(ids=IDS[0])),
    (ValueError, "teacher.ids must have ... got [2, 3, 0]", taught(ids=IDS[..., :0])),
    (ValueError, "teacher.ids must be on cpu like the first argument, got meta", taught(ids=IDS.to("meta"))),
    (ValueError, "teacher.ids must be in [0, 7), or -1, got [0, 7] of token 4", taught(ids=at(IDS, (1, 1, 1), 7))),
    (ValueError, "teacher.ids must be in [0, 7), or -1, got [-2, 3] of token 1", taught(ids=at(IDS, (0, 1, 0), -2))),
    (ValueError, "teacher.ids must differ from each other ... [3, 3] of token 0", taught(ids=at(IDS, (0, 0, 0), 3))),
    (ValueError, "teacher.ids must not be banned ... [0, 3] of token 0", banning(3, 4)),
    (ValueError, "teacher.logprobs must have the shape of teacher.ids, [2, 3, 2], got", taught(logprobs=LOGPROBS[0])),
    (TypeError, "teacher.logprobs must be a tensor, got list", taught(logprobs=[1.0])),
    (ValueError, "teacher.logprobs must be on cpu like ... meta", taught(logprobs=LOGPROBS.to("meta"))),
    (ValueError, "teacher.logprobs must be finite ... -inf] of token 4", said(-torch.inf)),
    (ValueError, "teacher.logprobs must be of probabilities that add up to at most 1, ... token 4", said(0.1)),
    (ValueError, "teacher.logprobs must ... .detach()", taught(logprobs=LOGPROBS.clone().requires_grad_())),
    (ValueError, "teacher.kind must be one of forward_kl, ... got 'forward'", taught(kind="forward")),
    (ValueError, "teacher.tail must be one of ... did you mean 'renormalise'?", taught(tail="renormalize")),
    (ValueError, "teacher.beta must be between 0 and 1, got 1.0", taught(kind="jsd", beta=1.0)),
    (ValueError, "teacher.beta must be between 0 and 1, got 0.0", taught(kind="jsd", beta=0.0)),
    (ValueError, "teacher.beta must be left out unless ... got 0.3 with 'forward_kl'", taught(beta=0.3)),
    (ValueError, "teacher.coef must be ... nan", taught(coef=torch.nan)),
    (ValueError, "teacher.mask must have the shape of ... [2, 3], got [3]", taught(mask=TOKENS[0])),
    (ValueError, "teacher.weights must have the shape of ... got [3]", taught(weights=TOKENS[0])),
    (ValueError, "teacher.weights must ... .detach()", taught(weights=torch.ones(2, 3, requires_grad=True))),
    (ValueError, "teacher.normalizer must be ... above 0, got 0.0", taught(normalizer=0.0)),
    (ValueError, "teacher.normalizer must have one element, got shape [2]", taught(normalizer=torch.ones(2))),
    (ValueError, "chunk_size must be at least 1, got 0", {"chunk_size": 0}),
    (TypeError, "chunk_size must be a number of rows, got float 2.0", {"chunk_size": 2.0}),
    (TypeError, "head must be an LMHead or its weight, a tensor, got list", {"head": [1.0]}),
    (TypeError, "head must be of dtype torch.float32 like hidden, got torch.bfloat16", {"head": WEIGHT.bfloat16()}),
    (ValueError, "temperature must be ... -1.0", {"temperature": -1.0}),
    (TypeError, "weight_grad must be a tensor, got list", {"weight_grad": [1.0]}),
    (TypeError, "weight_grad must be of dtype float32, got torch.float64", {"weight_grad": TALL.double()}),
    (ValueError, "weight_grad must have the shape of the weight, [7, 5], got [5, 7]", {"weight_grad": TALL.T}),
    (ValueError, "weight_grad must be on cpu like ... got meta", {"weight_grad": TALL.to("meta")}),
    (ValueError, "weight_grad must be a plain tensor ... requires_grad=True for", {"weight_grad": WEIGHT}),
    (ValueError, "weight_grad must be a plain tensor ... with requires_grad=False", GRAD | {"head": TALL}),
    (ValueError, "weight_grad must be None ... reference backend", GRAD | {"backend": "reference"}),
]
TABLE: dict[str, list[Row]] = {
    "linear_policy_loss": [
        (ValueError, "hidden must have shape [B, T, H], or ... [3, 5]", {"hidden": HIDDEN[0], "targets": INTS[0]}),
        (ValueError, "hidden must have ... [M, H] with cu_seqlens, got [2, 3, 5]", {"cu_seqlens": INTS[0]}),
        (ValueError, "hidden must have shape [..., 6] for this head, got [2, 3, 5]", {"head": torch.zeros(7, 6)}),
        (ValueError, "targets must have the shape of hidden ... [2, 3], got [3, 2]", {"targets": INTS.T}),
        (ValueError, "targets must not be banned by the head, got 0 at [0]", banning(0)),
        (RuntimeError, "targets must be in [0, 7) or -100, got 7 in row 4", {"targets": at(INTS, (1, 1), 7)}),
        (RuntimeError, "targets must be in [0, 7) or -100, got -1 in row 4", {"targets": at(INTS, (1, 1), -1)}),
        (RuntimeError, "targets must be in [0, 7) ... got 7", {"targets": at(INTS, (1, 1), 7), "memory": "low"}),
        (ValueError, "mask must have the shape of targets, [2, 3], got [3, 2]", {"mask": TOKENS.T}),
        (ValueError, "memory must be 'fast' or 'low', got None", {"memory": None}),
        (ValueError, "memory must be 'fast' or 'low', got 'slow'", {"memory": "slow"}),
        (ValueError, "compact must be True, False or None, got 'device'", {"compact": "device"}),
        (TypeError, "return_entropy must be a bool, got ... 'x'", {"return_entropy": "x"}),
        (ValueError, "positions must be different places in [0, 6) ... from 6 to 6", {"positions": INTS[0, :1] + 6}),
        (ValueError, "positions must be different places ... 2 of them repeated", {"positions": INTS[0]}),
        (ValueError, "positions must, as a mask, have the shape ... [2, 3], got [3]", {"positions": INTS[0] == 0}),
        (ValueError, "positions must be None with term_index", {"positions": INTS[0, :1], "term_index": INTS}),
        (ValueError, "term_index must be in [0, 6), or -1 for no position, got 6", {"term_index": INTS + 6}),
        (ValueError, "ref_logprobs must be given for kl_coef=0.05, got None", KL),
        (ValueError, "ref_logprobs must be None with ref_hidden", REF | {"ref_logprobs": TOKENS}),
        (ValueError, "ref_hidden must be left out with kl='none', got a tensor; choose a kl", {"ref_hidden": HIDDEN}),
        (ValueError, "ref_hidden must have shape [2, 3, 5], for ... got [3, 5]", KL | {"ref_hidden": HIDDEN[0]}),
        (TypeError, "ref_hidden must be of dtype torch.float32 like hidden", DOUBLE | {"ref_head": WEIGHT.double()}),
        (TypeError, "ref_head must be of dtype torch.float64 like ref_hidden, got torch.float32", DOUBLE),
        (ValueError, "ref_head must have the columns of head, 7 ... got 6", REF | {"ref_head": WEIGHT[:6]}),
        (TypeError, "ref_head must be an LMHead or its weight, a tensor, got list", REF | {"ref_head": [1.0]}),
        (ValueError, "ref_head must be on cpu like the first argument, got meta", REF | {"ref_head": TALL.to("meta")}),
        (ValueError, "ref_head must be None without ref_hidden, got Tensor", KL | {"ref_head": WEIGHT}),
        (ValueError, "segments must be given for ratio='segment', got None", {"config": CONFIGS["segment"]}),
        (ValueError, "normalizer must be a positive number, got 0", {"normalizer": 0}),
        (ValueError, "normalizer must have 'tokens', the ... got {'rows': 2.0}", REF | {"normalizer": {"rows": 2.0}}),
        (ValueError, "teacher.normalizer must be given with ... got None; or", taught() | {"normalizer": 7.0}),
        (TypeError, "config must be a LossConfig or a str, got dict", {"config": {}}),
        (ValueError, "weight_grad must be None where memory='low' runs", GRAD | LOW),
        (ValueError, "weight_grad must be None where memory='low' runs", SEQUENCE | GRAD | {"chunk_size": 2}),
        (ValueError, "weight_grad must be contiguous with support, got strides", SUPPORT | {"weight_grad": WIDE.T}),
        (ValueError, "memory must be None with support, got 'low'", SUPPORT | {"memory": "low"}),
        (ValueError, "compact must be None with support, got False", SUPPORT | {"compact": False}),
        (ValueError, "chunk_size must be None with support, got 2", SUPPORT | {"chunk_size": 2}),
        (ValueError, "head.lora must be None with support, got tuple", SUPPORT | {"head": ADAPTED}),
        (ValueError, "ref_head.lora must be None with support", SUPPORT | REF | {"ref_head": ADAPTED}),
        (TypeError, "support must be a pair (token_ids, offsets) of tensors, got Tensor", {"support": INTS}),
    ],
    "linear_distillation_loss": [
        (ValueError, "hidden must have shape [..., 6] for this head, got [2, 3, 5]", {"head": torch.zeros(7, 6)}),
        (ValueError, "mask must have the shape of hidden ... [2, 3], got [3]", {"mask": TOKENS[0]}),
        (ValueError, "mask must be on cpu like the first argument, got meta", {"mask": TOKENS.to("meta")}),
    ],
}
ROWS = [(op, *row) for op, rows in TABLE.items() for row in [*OF_TEACHER, *rows]]


@pytest.mark.pairs
@pytest.mark.parametrize(("op", "error", "rule", "changes"), ROWS, ids=str)
def test_errors(op: str, error: type[Exception], rule: str, changes: dict[str, Any]) -> None:
    start, *parts = rule.split(" ... ")
    teacher = taught() if "banned" in start else {}
    for backend in EXACT if "backend" not in rule and "weight_grad" not in rule else [changes.get("backend")]:
        call = functools.partial(CALLS[op], **teacher | changes | {"backend": backend})
        assert_raises(error, f"{op}: {start}", parts, call)
