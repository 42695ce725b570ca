"""Bounds of cu_seqlens: wrong ones are an error in every op and backend, and no row ever lies outside the tokens.

Faults that this is for: an op or a backend that takes bounds unchecked; a rule that lets some wrong bounds through;
rows that a kernel would read outside of the tokens before a failed assertion is noticed; a check that waits for a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.policy_loss.reference import PolicyInputs
from tests.harness import runnable_backends
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, assert_same_bits, drawn, run

TOKENS = 100
RULE = "cu_seqlens must ascend from 0 to at most the number of tokens"
WRONG = {
    "too large": [0, 9000],
    "negative": [-9, 50],
    "descending": [0, 60, 40, 80],
    "not from 0": [7, 50],
    "not from 0, no rows": [5],
    "last too large": [0, 40, 101],
    "extreme": [0, 2**63 - 1, -(2**63), 100],
}
# Functions that another one reads the bounds for.
READERS = {"linear_policy_loss": "policy_loss", "variants": "token_shares"}
EACH = [
    (name, backend)
    for name, op in OPS.items()
    if name.endswith(("packed rows", "packed prompts", "packed segments"))
    for backend in runnable_backends(op.supports, op.working)
]


@pytest.mark.parametrize("wrong", WRONG)
def test_rows_stay_within_the_tokens(wrong: str) -> None:
    bounds = torch.tensor(WRONG[wrong])
    with mock.patch("torch._assert_async") as checked:
        result = packed_bounds("op", bounds, TOKENS)
    assert not checked.call_args.args[0] and checked.call_args.args[1] == f"op: {RULE}"
    assert result[0] == 0 and result[-1] <= TOKENS and (result.diff() >= 0).all() and len(result) == len(bounds)


def with_bounds(name: str, place: int, value: int, device: str = "cpu") -> Inputs:
    """The op's batch, whose bounds have another value at one place."""
    inputs = drawn(OPS[name], 1, lambda tensor: tensor.to(device))
    bounds: Tensor = inputs["cu_seqlens"].clone()
    bounds[place] = value
    return inputs | {"cu_seqlens": bounds}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed assertion on the device ends the process's use of it")
@pytest.mark.parametrize(("name", "backend"), EACH)
def test_wrong_bounds_are_an_error(name: str, backend: str) -> None:
    function = name.partition(" ")[0]
    for place, value in ((-1, 9000), (0, -9), (2, 0), (0, 1)):
        with pytest.raises(RuntimeError, match=f"^{READERS.get(function, function)}: {RULE}"):
            run(OPS[name], with_bounds(name, place, value), backend, OPS[name].working)


@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, backend in EACH if "linear" not in name])
def test_tokens_after_the_last_row_count_nowhere_on_a_gpu(name: str, backend: str) -> None:
    """Nothing looks at values there; on a CPU a mask that has them is an error, so the checks are disabled."""

    def unchecked(*fields: Any) -> PolicyInputs:
        return PolicyInputs(*fields[:-1])

    op, inputs = OPS[name], drawn(OPS[name], 1)
    bounds = inputs["cu_seqlens"].clone()
    bounds[-1] = bounds[-2]
    rest = torch.arange(len(inputs["mask"])) >= bounds[-1]
    results = []
    of_kernel = mock.patch("grpo_kernels.ops.policy_loss.PolicyInputs", unchecked)
    with mock.patch("grpo_kernels.checks.no_token_left_out"), of_kernel:
        for flags in (inputs["mask"] & ~rest, inputs["mask"] | rest):
            results.append(run(op, inputs | {"cu_seqlens": bounds, "mask": flags}, backend, op.working))
    assert rest.any()
    assert_same_bits(*results)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, backend in EACH if backend != "cpu"])
def test_on_a_gpu_the_error_comes_without_a_wait(name: str, backend: str) -> None:
    code = (
        "import torch\n"
        "from grpo_kernels import backends\n"
        "from tests.ops import test_packed_bounds as tests\n"
        "backends.name_implementations()\n"
        f"inputs = tests.with_bounds({name!r}, -1, 9000, 'cuda')\n"
        "try:\n"
        f"    tests.OPS[{name!r}].call(inputs, {backend!r})\n"
        "    torch.cuda.synchronize()\n"
        "except RuntimeError as error:\n"
        "    assert 'device-side assert' in str(error), error\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "refused" in done.stdout and RULE in done.stderr, done.stderr
