"""Errors of LMHead, linear_logprobs and a support.

Faults that this is for: a wrong argument that is taken, or fails with another type, without its value or the way out.
What test_promises.py checks of every tensor is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import INDUCTOR, assert_raises, device_of
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import BACKENDS, FAST, INF, NAN

HIDDEN, WEIGHT, TARGETS = torch.randn(2, 3, 4), torch.randn(7, 4), torch.tensor([[0, 1, 2], [3, 4, 5]])
BIAS, A, B = torch.zeros(7), torch.zeros(2, 4), torch.zeros(7, 2)
IDS, OFFSETS, OF_IDS = torch.tensor([4, 0, 2, 3, 1, 6]), torch.tensor([0, 2, 3, 6]), torch.tensor([0, 2, 6])
LINEAR, HALF = torch.nn.Linear(4, 7), torch.bfloat16
SPLIT = {"vocab_start": 0, "process_group": object()}


def of_ids(*ids: int, **more: Any) -> dict[str, Any]:
    return {"banned": torch.tensor(ids)} | more


def with_id(value: int) -> dict[str, Any]:
    return {"support": (IDS.index_fill(0, torch.tensor(3), value), OFFSETS)}


def with_offsets(*values: int, count: int = 6) -> dict[str, Any]:
    return {"support": (IDS[:count], torch.tensor(values))}


def with_target(value: int) -> dict[str, Any]:
    return {"targets": torch.where(TARGETS == 5, value, TARGETS)}


# what is called, with arguments that are right; errors begin with the first word
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "LMHead": (gk.LMHead, {"weight": WEIGHT}),
    "linear_logprobs": (gk.linear_logprobs, {"hidden": HIDDEN, "head": WEIGHT, "targets": TARGETS}),
    "linear_logprobs over a support": (
        gk.linear_logprobs,
        {"hidden": HIDDEN[0], "head": WEIGHT, "targets": OF_IDS, "support": (IDS, OFFSETS)},
    ),
}
Rows = dict[str, dict[str, Any]]  # arguments by message, in which " ... " stands for any text
OF_HEADS: dict[type[Exception], Rows] = {
    TypeError: {
        "weight must be a tensor, got Linear; use its .weight": {"weight": LINEAR},
        "weight must be of dtype float32 ... got torch.int64": {"weight": WEIGHT.long()},
        "bias must be of dtype torch.float32 like weight, got torch.float64": {"bias": BIAS.double()},
        "lora must be a tuple of A [r, H], B [V, r] and a scale, got tuple of 2": {"lora": (A, B)},
        "lora must be a tuple of A [r, H], B [V, r] and a scale, got Tensor": {"lora": A},
        "the scale of lora must be a number, got str '1'": {"lora": (A, B, "1")},
        "A of lora must be a tensor, got list": {"lora": ([1.0], B, 1.0)},
        "A of lora must be of dtype float32, got torch.float64": {"lora": (A.double(), B.double(), 1.0)},
        "B of lora must be of dtype torch.bfloat16 like A": {"weight": WEIGHT.to(HALF), "lora": (A.to(HALF), B, 1.0)},
        "softcap must be a number, got str '9'": {"softcap": "9"},
        "banned must be of dtype ... got torch.float32": {"banned": BIAS},
        "banned must be ids with vocab_start, which count over all ranks, got a mask": {"banned": BIAS.bool(), **SPLIT},
        "vocab_start must be an int, got float 1.0": SPLIT | {"vocab_start": 1.0},
    },
    ValueError: {
        "bias must have shape [7], got [6]": {"bias": BIAS[:6]},
        "the scale of lora must be a finite number, got inf": {"lora": (A, B, INF)},
        "B of lora must be on cpu like the first argument, got meta": {"lora": (A, B.to("meta"), 1.0)},
        "A of lora must have shape [r, 4] with r > 0, got [4, 2]": {"lora": (A.T, B, 1.0)},
        "A of lora must have shape [r, 4] with r > 0, got [0, 4]": {"lora": (A[:0], B[:, :0], 1.0)},
        "B of lora must have shape [7, 2], got [6, 2]": {"lora": (A, B[:6], 1.0)},
        "banned must be ids [K] or a mask [V], got shape [7, 1]": {"banned": torch.zeros(7, 1).long()},
        "banned must, as a mask, have shape [7], got [6]": {"banned": torch.zeros(6).bool()},
        "banned must be in [0, 7), got 7 at [1]": of_ids(7, 2),
        "banned must be in [0, 7), got -1 at [0]": of_ids(2, -1),
        "banned must leave one of 7 ids, got 7 at": {"banned": torch.ones(7).bool()},
        "banned must leave one of 7 ids, got 7": of_ids(0, 6, 1, 5, 2, 4, 3, 3),
        "banned must be ids of at least 0, got -2 at [0]": of_ids(9, -2, **SPLIT),
        "vocab_start must be given with process_group, got None": {"process_group": object()},
        "vocab_start must be None unless torch.distributed is initialised ... got 3": {"vocab_start": 3},
        "vocab_start must be at least 0, got -1": SPLIT | {"vocab_start": -1},
    },
}
OF_HEADS[ValueError] |= {
    f"weight must have shape [V, H] with V, H > 0, got {list(shape)}": {"weight": torch.zeros(shape)}
    for shape in ((4,), (0, 4), (7, 0), (1, 7, 4))
}
OF_HEADS[ValueError] |= {
    f"{name} must be a finite number above 0, got {value}": {name: value}
    for name in ("softcap", "logit_scale")
    for value in (0.0, -1.0, NAN, INF)
}
OF_LOGPROBS: dict[type[Exception], Rows] = {
    TypeError: {
        "hidden must be a tensor, got list; torch.as_tensor": {"hidden": [1.0]},
        "hidden must be of dtype float32 ... got torch.float8": {"hidden": HIDDEN.to(torch.float8_e4m3fn)},
        "head must be an LMHead or its weight, a tensor, got list": {"head": [1.0]},
        "head must be ... got Linear; gk.LMHead(module.weight, module.bias) is one": {"head": LINEAR},
        "head must be of dtype torch.float32 like hidden, got torch.bfloat16": {"head": WEIGHT.to(HALF)},
        "targets must be of dtype ... got torch.float32": {"targets": TARGETS.float()},
        "temperature must be a number, got bool True": {"temperature": True},
        "chunk_size must be a number of rows, got float 2.0": {"chunk_size": 2.0},
        "chunk_size must be a number of rows, got bool True": {"chunk_size": True},
        "return_entropy must be a bool, got str 'x'": {"return_entropy": "x"},
        "positions must be of dtype ... got torch.float32": {"positions": torch.zeros(2)},
    },
    ValueError: {
        "head must be on cpu like the first argument, got meta": {"head": WEIGHT.to("meta")},
        "hidden must have shape [..., 5] for this head, got [2, 3, 4]": {"head": torch.zeros(7, 5)},
        "hidden must have shape [..., 4] for this head, got []": {"hidden": torch.tensor(1.0)},
        "targets must not be banned by the head, got 4 at [4]": {"head": gk.LMHead(WEIGHT, **of_ids(6, 4))},
        "temperature must have the shape of the targets, [2, 3] ... got [3]": {"temperature": torch.ones(3)},
        "temperature must not require grad": {"temperature": torch.ones(2, requires_grad=True)},
        "chunk_size must be at least 1, got 0": {"chunk_size": 0},
        "positions must be a mask or have shape [P], got [2, 3]": {"positions": TARGETS},
        "positions must be different places in [0, 6), got values from 0 to 6": {"positions": torch.tensor([0, 6])},
        "positions must be different places in [0, 6), got values from -1 to 2": {"positions": torch.tensor([2, -1])},
        "positions must be ... 1 to 4, 1 of them repeated": {"positions": torch.tensor([4, 1, 4])},
        "backend must be": {"backend": "fast"},
    },
    RuntimeError: {
        f"targets must be in [0, 7) or -100, got {target} in row 5": with_target(target)
        for target in (-1, -99, 7, 2**40)
    },
}
OF_LOGPROBS[ValueError] |= {
    f"temperature must be positive and finite, got {value}": {"temperature": value} for value in (0.0, -1.0, NAN, INF)
}
for shape in ((6,), (3, 2), (2, 3, 1), ()):
    OF_LOGPROBS[ValueError] |= {
        f"targets must have the shape of hidden ... [2, 3], got {list(shape)}": {"targets": torch.zeros(shape).long()},
        f"positions must, as a mask, have the shape ... got {list(shape)}": {"positions": torch.ones(shape).bool()},
    }
OF_SUPPORTS: dict[type[Exception], Rows] = {
    TypeError: {
        "support must be a pair (token_ids, offsets) of tensors, got Tensor": {"support": IDS},
        "support must be a pair (token_ids, offsets) of tensors, got int": {"support": 3},
        "support must be a pair (token_ids, offsets) of tensors, got list of 1": {"support": [IDS]},
        "support must be a pair ... got tuple of 3": {"support": (IDS, OFFSETS, IDS)},
        "support.token_ids must be a tensor, got list": {"support": (IDS.tolist(), OFFSETS)},
        "support.offsets must be of dtype ... got torch.float32": {"support": (IDS, OFFSETS.float())},
    },
    ValueError: {
        "support.token_ids must be on cpu ... got meta": {"support": (IDS.to("meta"), OFFSETS)},
        "support.offsets must be on cpu ... got meta": {"support": (IDS, OFFSETS.to("meta"))},
        "support.token_ids must have shape [E], got [1, 6]": {"support": (IDS[None], OFFSETS)},
        "support.offsets must have shape [4], one more than ... got [3]": {"support": (IDS, OFFSETS[:3])},
        "support.offsets must ascend from 0 to the number of token ids, 6, got 1 at 0": with_offsets(1, 2, 3, 6),
        "support.offsets must ascend from 0 to the number of token ids, 6, got 2 at 2": with_offsets(0, 3, 2, 6),
        "support.offsets must ascend from 0 to the number of token ids, 6, got 7 at 3": with_offsets(0, 2, 3, 7),
        "support.offsets must ascend from 0 to the number of token ids, 6, got 5 at 3": with_offsets(0, 2, 3, 5),
        "support.token_ids must be in [0, 7), got -1 in row 2": with_id(-1),
        "support.token_ids must be in [0, 7), got 7 in row 2": with_id(7),
        "support.token_ids must differ within a row, got 6 twice in row 2": with_id(6),
        "targets must be in the support of their row, got 6 in row 2": with_offsets(0, 2, 3, 3, count=3),
        "targets must be in the support of their row, got 0 in row 0": with_offsets(0, 0, 0, 0, count=0),
        "support.token_ids must not be banned by the head, got 3 at [3]": {"head": gk.LMHead(WEIGHT, **of_ids(3))},
        "chunk_size must be None with support, got 2; only kept columns": {"chunk_size": 2},
        "head.lora must be None with support, got tuple": {"head": gk.LMHead(WEIGHT, lora=(A, B, 1.0))},
    },
}
OF_SUPPORTS[ValueError] |= {
    f"targets must be in the support of their row, got {target} in row 1": {"targets": torch.tensor([0, target, 6])}
    for target in (1, 7, -1)
}
TABLE = [
    (where, error, rule, changes)
    for where, errors in zip(CALLS, (OF_HEADS, OF_LOGPROBS, OF_SUPPORTS), strict=True)
    for error, rows in errors.items()
    for rule, changes in rows.items()
]


@pytest.mark.parametrize(
    ("where", "error", "rule", "changes"), TABLE, ids=[f"{where}: {rule}" for where, _, rule, _ in TABLE]
)
def test_errors(where: str, error: type[Exception], rule: str, changes: dict[str, Any]) -> None:
    function, right = CALLS[where]
    start, *parts = rule.split(" ... ")
    assert_raises(error, f"{where.partition(' ')[0]}: {start}", parts, lambda: function(**right | changes))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in FAST])
def test_float64_on_a_gpu_backend(backend: str) -> None:
    hidden, weight = (value.double().to(device_of(backend)) for value in (HIDDEN, WEIGHT))
    with pytest.raises(RuntimeError, match=f"linear_logprobs: backend '{backend}' cannot run here.*float64"):
        gk.linear_logprobs(hidden, weight, TARGETS.to(hidden.device), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend: str) -> None:
    for name in ("linear_logprobs", "linear_logprobs over a support"):
        op, inputs = cases.OPS[name], cases.OPS[name].draw()
        if backend not in op.supports or (backend == "reference" and "support" not in name):
            continue
        device = device_of(backend)
        moved = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
        given = inputs | {n: v.to(device) for n, v in moved.items()}
        given["hidden"].requires_grad_()
        (gradient,) = torch.autograd.grad(op.call(given, backend)["loss"], given["hidden"], create_graph=True)
        with pytest.raises(RuntimeError, match="a second derivative"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_under_compile(backend: str) -> None:
    """A split vocabulary is refused, and a value of a support fails an assertion, as on a GPU."""
    torch.compiler.reset()
    split = torch.compile(lambda: gk.LMHead(WEIGHT, vocab_start=3), fullgraph=True, backend=backend)
    with pytest.raises(Exception, match=r"LMHead: vocab_start must be None under torch\.compile, got 3"):
        split()

    @torch.compile(backend=backend)
    def logprobs(targets: torch.Tensor) -> torch.Tensor:
        return gk.linear_logprobs(HIDDEN[0], WEIGHT, targets, support=(IDS, OFFSETS)).logprobs

    assert logprobs(OF_IDS).shape == (3,)
    with pytest.raises(RuntimeError, match="linear_logprobs: targets must be in the support of their row"):
        logprobs(torch.tensor([0, 1, 6]))
