"""Errors of LMHead, of the three ops of the head and of a Teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import cpu_library
from tests.ops.error_rows import Call, Errors, Rows, each
from tests.ops.linear_head.heads import INF, NAN
from tests.ops.linear_head.terms import CONFIGS

HIDDEN, WEIGHT = torch.zeros(2, 3, 5, requires_grad=True), torch.zeros(7, 5, requires_grad=True)
TARGETS, INTS, TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
BIAS, A, B = torch.zeros(7), torch.zeros(2, 5), torch.zeros(7, 2)
TAUGHT, LOGPROBS = torch.tensor([0, 3]).expand(2, 3, 2), torch.full((2, 3, 2), -1.0)
LINEAR, HALF = torch.nn.Linear(5, 7), torch.bfloat16
ADAPTED = gk.LMHead(WEIGHT, lora=(A, B, 1.0))
SPLIT = {"vocab_start": 0, "process_group": object()}
SUPPORT = {"support": (INTS.flatten(), torch.arange(7)), "targets": INTS}
KL, SEQUENCE = {"config": CONFIGS["dapo"]}, {"config": CONFIGS["sequence token"]}
TALL, WIDE, DOUBLE = torch.zeros(7, 5), torch.zeros(5, 7), KL | {"ref_hidden": HIDDEN.double()}
REF, GRAD, LOW = KL | {"ref_hidden": HIDDEN}, {"weight_grad": TALL}, {"memory": "low"}
IN_FLOAT16 = GRAD | {"hidden": HIDDEN.detach().half(), "head": WEIGHT.detach().half().requires_grad_()}
WHOLE = {"hidden": HIDDEN.detach(), "head": WEIGHT.detach()}


def of_ids(*ids: int, **more: Any) -> dict[str, Any]:
    return {"banned": torch.tensor(ids)} | more


def banning(*ids: int) -> dict[str, Any]:
    return {"head": gk.LMHead(WEIGHT, banned=torch.tensor(ids))}


def taught(**fields: Any) -> dict[str, Any]:
    return {"teacher": gk.Teacher(**{"ids": TAUGHT, "logprobs": LOGPROBS} | fields)}


def whole(**fields: Any) -> dict[str, Any]:
    return {"teacher": gk.Teacher(**WHOLE | fields)}


def said(logprob: float) -> dict[str, Any]:
    """A teacher that gives the second id of token 4 this log-prob."""
    return taught(logprobs=at(LOGPROBS, (1, 1, 1), logprob))


def at(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    return tensor.clone().index_put(tuple(map(torch.tensor, place)), torch.tensor(value, dtype=tensor.dtype))


HEAD = {"hidden": HIDDEN, "head": WEIGHT}
POLICY = HEAD | {"targets": TARGETS, "old_logprobs": TOKENS, "advantages": torch.ones(2)}
CALLS = {
    "LMHead": Call(gk.LMHead, {"weight": WEIGHT}),
    "linear_logprobs": Call(gk.linear_logprobs, HEAD | {"targets": TARGETS}),
    "linear_policy_loss": Call(gk.linear_policy_loss, POLICY),
    "linear_distillation_loss": Call(gk.linear_distillation_loss, HEAD | taught()),
}
OF_TOKENS = ("linear_logprobs", "linear_policy_loss")
OF_TEACHERS = ("linear_policy_loss", "linear_distillation_loss")
OF_ALL = (*OF_TOKENS, "linear_distillation_loss")
OF_TARGETS: Rows = {
    "targets must not be banned by the head, got 4 at [4]": banning(6, 4),
    "positions must be a mask or have shape [P], got [2, 3]": {"positions": TARGETS},
    "positions must be different places in [0, 6), got values from 0 to 6": {"positions": torch.tensor([0, 6])},
    "positions must be different places in [0, 6), got values from -1 to 2": {"positions": torch.tensor([2, -1])},
    "positions must have the shape of targets as a mask, [2, 3], got [6]": {"positions": TOKENS.flatten().bool()},
    "positions must be ... 1 to 4, 1 of them repeated": {"positions": torch.tensor([4, 1, 4])},
    "chunk_size must be None with support, got 2; only kept columns": SUPPORT | {"chunk_size": 2},
    "head.lora must be None with support, got tuple": SUPPORT | {"head": ADAPTED},
}
OF_TEACHER: Rows = {
    "teacher.ids must have shape [2, 3, k] with k > 0, ... got [3, 2]": taught(ids=TAUGHT[0]),
    "teacher.ids must have ... got [2, 3, 0]": taught(ids=TAUGHT[..., :0]),
    "teacher.ids must be in [0, 7), or -1, got 7 at [1, 1, 1]": taught(ids=at(TAUGHT, (1, 1, 1), 7)),
    "teacher.ids must be in [0, 7), or -1, got -2 at [0, 1, 0]": taught(ids=at(TAUGHT, (0, 1, 0), -2)),
    "teacher.ids must differ from each other ... got 3 at [0, 0]": taught(ids=at(TAUGHT, (0, 0, 0), 3)),
    "teacher.ids must not be banned ... got 6 at [1, 1, 1]": banning(6) | taught(ids=at(TAUGHT, (1, 1, 1), 6)),
    "teacher.logprobs must be finite ... got -inf at [1, 1, 1]": said(-torch.inf),
    "teacher.logprobs must be of probabilities that add up to at most 1, ... at [1, 1]": said(0.1),
    "teacher.logprobs must ... .detach()": taught(logprobs=LOGPROBS.clone().requires_grad_()),
    "teacher.head must be None without teacher.hidden, got Tensor; give": taught(head=WEIGHT),
    "teacher.kind must be one of forward_kl, ... got 'forward'": taught(kind="forward"),
    "teacher.tail must be one of ... did you mean 'renormalise'?": taught(tail="renormalize"),
    "teacher.beta must be between 0 and 1, got 1.0": taught(kind="jsd", beta=1.0),
    "teacher.beta must be between 0 and 1, got 0.0": taught(kind="jsd", beta=0.0),
    "teacher.coef must be ... nan": taught(coef=torch.nan),
    "teacher.beta must be left out unless ... got 0.3 with 'forward_kl'": taught(beta=0.3),
    "teacher.weights must ... .detach()": taught(weights=torch.ones(2, 3, requires_grad=True)),
    "teacher.normalizer must be ... above 0, got 0.0": taught(normalizer=0.0),
    "teacher.normalizer must have one element, got shape [2]": taught(normalizer=torch.ones(2)),
    "weight_grad must be a plain tensor ... requires_grad=True for": {"weight_grad": WEIGHT},
    "weight_grad must be a plain tensor ... with requires_grad=False": GRAD | {"head": TALL},
    "weight_grad must be None ... reference backend": GRAD | {"backend": "reference"},
    "weight_grad must be None ... float16": IN_FLOAT16,
}
OF_POLICY: Rows = {
    "hidden must have shape [B, T, H], or ... [3, 5]": {"hidden": HIDDEN[0], "targets": INTS[0]},
    "hidden must have ... [M, H] with cu_seqlens, got [2, 3, 5]": {"cu_seqlens": INTS[0]},
    "memory must be 'fast' or 'low', got None": {"memory": None},
    "compact must be True, False or None, got 'device'": {"compact": "device"},
    "positions must be None with term_index": {"positions": INTS[0, :1], "term_index": INTS},
    "term_index must be in [0, 6), or -1 for no position, got 6": {"term_index": INTS + 6},
    "ref_logprobs must be given for kl_coef=0.05, got None": KL,
    "ref_logprobs must be None with ref_hidden": REF | {"ref_logprobs": TOKENS},
    "ref_hidden must be left out with kl='none', got a tensor; choose a kl": {"ref_hidden": HIDDEN},
    "ref_head must have the columns of head, 7, got 6": REF | {"ref_head": WEIGHT[:6]},
    "ref_head must be None without ref_hidden, got Tensor": KL | {"ref_head": WEIGHT},
    "normalizer must have 'tokens', the ... got {'rows': 2.0}": REF | {"normalizer": {"rows": 2.0}},
    "teacher.normalizer must be given with normalizer, ... got None; or": taught() | {"normalizer": {"rows": 7.0}},
    "teacher.normalizer must be given with weights, ... got None; or": taught() | {"weights": TOKENS},
    "teacher must have ids and log-probs, got hidden states; linear_distillation_loss": whole(),
    "weight_grad must be None where memory='low' runs": GRAD | LOW,
    "weight_grad must be None where memory='low' ... got a tensor": SEQUENCE | GRAD | {"chunk_size": 2},
    "memory must be None with support, got 'low'": SUPPORT | LOW,
    "compact must be None with support, got False": SUPPORT | {"compact": False},
    "ref_head.lora must be None with support": SUPPORT | REF | {"ref_head": ADAPTED},
}
if cpu_library is not None:  # the reference adds to no weight_grad
    OF_POLICY["weight_grad must be contiguous with support, got strides"] = SUPPORT | {"weight_grad": WIDE.T}
OF_DISTILLATION: Rows = {
    "teacher.head must be given with teacher.hidden, ... got None": whole(head=None),
    "teacher.ids must be None beside teacher.hidden": whole(ids=TAUGHT),
    "teacher.tail must be left out beside teacher.hidden": whole(tail="ignore"),
    "teacher.head must have the columns of the student's, 7, got 6": whole(head=WEIGHT[:6]),
    "teacher.hidden must have shape [2, 3, 5]": whole(hidden=HIDDEN[0]),
}
ERRORS = [
    Errors(
        "LMHead",
        TypeError,
        {
            "weight must be a tensor, got Linear; use its .weight": {"weight": LINEAR},
            "bias must be of dtype float32, got torch.float64": {"bias": BIAS.double()},
            "lora must be a tuple of A [r, H], B [V, r] and a scale, got tuple of 2": {"lora": (A, B)},
            "the scale of lora must be a number, got str '1'": {"lora": (A, B, "1")},
            "B of lora must be of dtype bfloat16, got torch.float32": {
                "weight": WEIGHT.to(HALF),
                "lora": (A.to(HALF), B, 1.0),
            },
            "softcap must be a number, got str '9'": {"softcap": "9"},
            "banned must be of dtype bool or int64 or int32, got torch.uint8": {"banned": BIAS.byte()},
            "banned must be ids with vocab_start ... got a mask": {"banned": BIAS.bool(), **SPLIT},
            "vocab_start must be an int, got float 1.0": SPLIT | {"vocab_start": 1.0},
        },
    ),
    Errors(
        "LMHead",
        ValueError,
        {
            **each("weight", "must have shape [V, H] with V, H > 0, got {}", BIAS, TALL[:0], TALL[None]),
            **each("softcap", "must be a finite number above 0, got {}", 0.0, INF),
            **each("logit_scale", "must be a finite number above 0, got {}", -1.0, NAN),
            "A of lora must have shape [r, 5] with r > 0, got [5, 2]": {"lora": (A.T, B, 1.0)},
            "A of lora must have shape [r, 5] with r > 0, got [0, 5]": {"lora": (A[:0], B[:, :0], 1.0)},
            "banned must be ids [K] or a mask [V], got shape [7, 1]": {"banned": torch.zeros(7, 1).long()},
            "banned must be in [0, 7), got 7 at [1]": of_ids(7, 2),
            "banned must be in [0, 7), got -1 at [0]": of_ids(2, -1),
            "banned must leave one of 7 ids, got 7 at": {"banned": torch.ones(7).bool()},
            "banned must leave one of 7 ids, got 7": of_ids(0, 6, 1, 5, 2, 4, 3, 3),
            "banned must be ids of at least 0, got -2 at [0]": of_ids(9, -2, **SPLIT),
            "vocab_start must be given with process_group, got None": {"process_group": object()},
            "vocab_start must be None unless torch.distributed is initialised ... got 3": {"vocab_start": 3},
            "vocab_start must be at least 0, got -1": SPLIT | {"vocab_start": -1},
        },
    ),
    Errors(
        OF_ALL,
        TypeError,
        {
            "head must be an LMHead or its weight, a tensor, got list": {"head": [1.0]},
            "chunk_size must be a number of rows, got float 2.0": {"chunk_size": 2.0},
            "head must be ... got Linear; gk.LMHead(module.weight, module.bias) is one": {"head": LINEAR},
            "head must be of dtype torch.float32 like hidden, got torch.bfloat16": {"head": WEIGHT.to(HALF)},
        },
    ),
    Errors(
        OF_ALL,
        ValueError,
        {
            "head must be on cpu like the first argument, got meta": {"head": WEIGHT.to("meta")},
            "hidden must have shape [..., 6] for this head, got [2, 3, 5]": {"head": torch.zeros(7, 6)},
            "chunk_size must be at least 1, got 0": {"chunk_size": 0},
            "temperature must be positive and finite, got 0.0": {"temperature": 0.0},
        },
    ),
    Errors(OF_TOKENS, ValueError, OF_TARGETS),
    Errors(OF_TOKENS, TypeError, {"return_entropy must be a bool, got str 'x'": {"return_entropy": "x"}}),
    Errors(OF_TOKENS, TypeError, {"return_sum_pi_squared must be a bool, got int 1": {"return_sum_pi_squared": 1}}),
    Errors(
        OF_TOKENS,
        RuntimeError,
        {f"targets must be in [0, 7) or -100, got {n} in row 5": {"targets": at(TARGETS, (1, 2), n)} for n in (-1, 7)},
    ),
    Errors(
        OF_TEACHERS,
        TypeError,
        {
            "teacher must be a Teacher, got Tensor": {"teacher": TOKENS},
            "weight_grad must be of dtype float32, got torch.float64": {"weight_grad": TALL.double()},
        },
    ),
    Errors(OF_TEACHERS, ValueError, OF_TEACHER),
    Errors("linear_policy_loss", ValueError, OF_POLICY),
    Errors(
        "linear_policy_loss",
        TypeError,
        {
            "ref_hidden must be of dtype torch.float32 like hidden": DOUBLE | {"ref_head": WEIGHT.double()},
            "ref_head must be of dtype torch.float64 like ref_hidden, got torch.float32": DOUBLE,
        },
    ),
    Errors("linear_policy_loss", RuntimeError, {"targets must be in [0, 7) ... got 7": {"targets": INTS + 7, **LOW}}),
    Errors("linear_distillation_loss", ValueError, OF_DISTILLATION),
]
