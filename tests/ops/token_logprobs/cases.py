"""Batches of token_logprobs, and a comparison of a kernel with the float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.token_logprobs.registration import SUPPORTS
from tests.harness import assert_within_budget, device_of, runnable_backends
from tests.ops.promises import Inputs, Op, Results, Same, run
from tests.rounding import Moves

F32, F64 = torch.float32, torch.float64
HALVES = (torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# Triton's interpreter is 10 to 1000 times slower
FAST = ("cpu", "reference") if not torch.cuda.is_available() else tuple(BACKENDS)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 0.25},
    "capped": {"temperature": 1.3, "softcap": 30.0, "logit_scale": 1.5},
}


def rows_of(shape: tuple[int, ...], dtype: torch.dtype = F32, spread: float = 4.0, offset: float = 25.0) -> Inputs:
    """Logits like a model's, that the dtype holds, targets, and upstream gradients, of which some are 0.

    Every third target is the likeliest token.
    """

    def halves(kept: float) -> Tensor:
        return (torch.randn(shape[:-1]) * (torch.rand(shape[:-1]) < kept)).bfloat16().double()

    logits = (torch.randn(shape) * spread + offset).to(dtype).double()
    targets = torch.randint(shape[-1], shape[:-1])
    likeliest = torch.arange(targets.numel()).view(targets.shape) % 3 == 0
    return {
        "logits": logits,
        "targets": torch.where(likeliest, logits.argmax(-1), targets),
        "by_logprobs": halves(0.8),
        "by_entropy": halves(0.8),
    }


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype, max_columns: int) -> tuple[Inputs, dict[str, Any]]:
    """Twelve rows or more, for a budget that is none of luck, with equal and masked logits and every option."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows, columns = draw(st.integers(6, 8)), draw(st.integers(1, max_columns))
    # far from 0 differences of a few columns, or of whole numbers, may be exact in one order of operations alone
    offset = one(0.0, 25.0) if columns > 30 else 0.0
    batch = rows_of((2, rows, columns), dtype, one(1.0, 4.0), offset)
    if offset == 0 and one(False, True):
        batch["logits"] = batch["logits"].round()
    hidden = torch.rand(2, rows, columns) < one(0.0, 0.0, 0.5, 0.9)
    hidden.scatter_(2, batch["targets"][..., None], False)
    batch["logits"] = batch["logits"].masked_fill(hidden, -INF)
    batch["targets"][torch.rand(2, rows) < one(0.0, 0.3)] = -100
    batch.pop(one("none", "none", "by_logprobs", "by_entropy"), None)
    options: dict[str, Any] = {"softcap": one(None, 5.0, 30.0), "logit_scale": one(1.0, 0.25)}
    shape = one(None, (2,), (2, 1), (2, rows), (1, rows))
    if shape is None:
        return batch, options | {"temperature": one(1.0, 0.7, 2)}
    return batch | {"temperature": (torch.rand(shape) + 0.5).bfloat16().double()}, options


def call(inputs: Inputs, backend: str | None, **options: Any) -> Results:
    """Results, and a loss of those that have an upstream gradient."""
    given = {name: value for name, value in inputs.items() if not name.startswith("by_")}
    wants_entropy = "by_entropy" in inputs
    results = gk.token_logprobs(**given, return_entropy=wants_entropy, backend=backend, **options)._asdict()
    present = {name: result for name, result in results.items() if result is not None}
    terms = [(inputs[f"by_{n}"].contiguous() * v).sum() for n, v in present.items() if f"by_{n}" in inputs]
    return {"loss": sum(terms[1:], terms[0])} | present


def op_of(**options: Any) -> Op:
    return Op(draw, functools.partial(call, **options), SUPPORTS, ("logits",))


def assert_like_reference(inputs: Inputs, backend: str, dtype: torch.dtype, **options: Any) -> Results:
    """Values and gradients against float64; in float64 to the rounding of sums in another order."""
    op = op_of(**options)
    got, working = (run(op, inputs, name, dtype) for name in (backend, "reference"))
    gold = run(op, inputs, "reference", F64)
    moves = Moves(lambda: run(op, inputs, "reference", F64), gold)
    for name in gold.keys() - {"loss"}:
        if dtype == F64:
            torch.testing.assert_close(got[name], gold[name], rtol=1e-13, atol=1e-13)
        else:
            inherited = fused_error(inputs, backend, **options) if name == "d_logits" else 0.0
            assert_within_budget(got[name], working[name], gold[name], name, inherited, moves=moves)
    wide = torch.promote_types(dtype, F32)
    assert {name: value.dtype for name, value in got.items()} == dict.fromkeys(gold, wide) | {"d_logits": dtype}
    assert not (got["logprobs"] > 0).any() and not ("entropy" in got and (got["entropy"] < 0).any())
    return got


def fused_error(
    inputs: Inputs, backend: str, temperature: float = 1.0, logit_scale: float = 1.0, softcap: float | None = None
) -> float:
    """Error of the gradient on a GPU where the log-prob is a fused product less the normalizer, a rounded product.

    A token that is certain has a log-prob of half an ulp of float64 there, instead of 0.
    """
    if device_of(backend).type != "cuda":
        return 0.0
    factor = logit_scale / float(torch.as_tensor(inputs.get("temperature", temperature)).min())
    upstream = sum(inputs[name].abs() for name in ("by_logprobs", "by_entropy") if name in inputs)
    largest = inputs["logits"].abs().nan_to_num(posinf=0.0).max()
    return float(torch.finfo(F64).eps * largest * factor**2 * upstream.max())


# For test_promises.py


def draw() -> Inputs:
    batch = rows_of((4, 5, 37))
    batch["targets"][1, 2] = batch["targets"][3, 0] = -100
    return batch | {"temperature": torch.rand(4, 5, dtype=F64) + 0.5}


def ignored(inputs: Inputs) -> dict[str, Tensor]:
    return {"logits": inputs["targets"] == -100}


def written(change: Callable[[str, Tensor], Tensor]) -> Callable[[Inputs], Same]:
    def same(inputs: Inputs) -> Same:
        def back(results: list[Results]) -> Results:
            names = {"logprobs": (4, 5), "entropy": (4, 5), "d_logits": (4, 5, 37)}
            return {name: results[0][name].reshape(shape) for name, shape in names.items()}

        return Same([{name: change(name, value) for name, value in inputs.items()}], back)

    return same


REWRITES = {
    "one dimension": written(lambda name, value: value.flatten(0, 1)),
    "four dimensions": written(lambda name, value: value.view(2, 2, *value.shape[1:])),
    "narrow targets": written(lambda name, value: value.to(torch.int8) if name == "targets" else value),
}
OPS = {"token_logprobs": Op(draw, functools.partial(call, softcap=9.0), SUPPORTS, ("logits",), ignored, REWRITES)}
