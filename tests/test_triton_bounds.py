"""Interpreted Triton kernels never access memory outside a tensor, whatever targets, ids and offsets hold, and their
hints of alignment are true, which a GPU would answer with an error."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from tests import kernel_cases
from tests.harness import quick

WATCHED = ("outside_token_advantages", "outside_logprobs", "logprobs", "outside_kept")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes loads and stores outside of a kernel's tensors, or not where it says, raise an error."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    place, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    tensors: list[torch.Tensor] = []

    def placed(self: Any, args: Any, kwargs: Any) -> Any:
        result = place(self, args, kwargs)
        tensors[:] = [value for value in (*result[0], *result[1].values()) if isinstance(value, torch.Tensor)]
        return result

    def check(pointers: Any, mask: Any) -> None:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        first = numpy.broadcast_to(pointers.data, numpy.shape(mask.data))[mask.data.astype(bool)].astype(numpy.int64)
        inside = numpy.zeros(first.shape, dtype=bool)
        for tensor in tensors:
            begin = tensor.data_ptr()
            inside |= (first >= begin) & (first + size <= begin + tensor.nbytes)
        assert inside.all(), "an access outside the tensors"
        if divisors := pointers.attr.get("tt.divisibility"):  # of the first pointer of each piece of 16 bytes
            pieces = numpy.asarray(pointers.data)[..., :: 16 // size]
            read = numpy.broadcast_to(mask.data, pointers.data.shape)[..., :: 16 // size].astype(bool)
            assert not (pieces[read] % divisors[-1]).any(), "a hint of alignment that is not true"

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", placed)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)


@pytest.mark.parametrize("name", quick(WATCHED, "outside_logprobs", "logprobs"))
def test_kernels_stay_inside_their_arrays(name: str, watched: None) -> None:
    list(kernel_cases.CASES[name].run("triton", lambda tensor: tensor))
