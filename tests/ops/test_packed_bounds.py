"""Bounds of cu_seqlens: invalid ones are an error in every op and backend, and no row ever lies outside the tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.endpoint_segments import registration as endpoint_segments
from grpo_kernels.ops.policy_loss import registration as policy_loss
from grpo_kernels.ops.token_advantages import registration as token_advantages
from tests.harness import device_of, runnable_backends

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


def policy(cu_seqlens: Tensor, backend: str, config: gk.LossConfig | None = None) -> Tensor:
    logprobs = -torch.rand(TOKENS, device=cu_seqlens.device)
    config = config or gk.LossConfig()
    by_segment = config.ratio == "segment"
    ids = torch.zeros(TOKENS, dtype=torch.int32, device=cu_seqlens.device) if by_segment else None
    options = {"cu_seqlens": cu_seqlens, "segments": ids, "config": config, "backend": backend}
    return gk.policy_loss(logprobs, None, torch.ones_like(logprobs), **options).loss  # type: ignore[arg-type]


def linear_policy(cu_seqlens: Tensor, backend: str) -> Tensor:
    device = cu_seqlens.device
    hidden, weight = torch.randn(TOKENS, 8, device=device), torch.randn(11, 8, device=device)
    targets, advantages = torch.zeros(TOKENS, dtype=torch.int64, device=device), torch.ones(TOKENS, device=device)
    return gk.linear_policy_loss(hidden, weight, targets, None, advantages, cu_seqlens=cu_seqlens, backend=backend).loss


def cut(cu_seqlens: Tensor, backend: str) -> Tensor:
    tokens = [-torch.rand(TOKENS, device=cu_seqlens.device) for _ in range(4)]
    return gk.endpoint_segments(*tokens[:3], values=tokens[3], cu_seqlens=cu_seqlens, backend=backend).advantages


def estimate(cu_seqlens: Tensor, backend: str) -> Tensor:
    tokens = torch.rand(2, TOKENS, device=cu_seqlens.device)
    return gk.token_advantages(*tokens, cu_seqlens=cu_seqlens, backend=backend).advantages


def measure(cu_seqlens: Tensor, backend: str) -> Tensor:
    rows, device = len(cu_seqlens) - 1, cu_seqlens.device
    ids = torch.zeros(TOKENS, dtype=torch.int32, device=device)
    numbers = torch.ones(rows, dtype=torch.int32, device=device)
    result = gk.EndpointSegments(
        torch.zeros(TOKENS, device=device),
        torch.zeros(TOKENS, device=device),
        ids == 0,
        ids,
        numbers,
        torch.ones((), dtype=torch.float64, device=device),
    )
    return torch.tensor(list(gk.segment_metrics(result, cu_seqlens=cu_seqlens).values()))


Call = Callable[[Tensor, str], Tensor]
CALLS: dict[str, tuple[Call, list[str]]] = {
    "policy_loss": (policy, runnable_backends(policy_loss.SUPPORTS)),
    "linear_policy_loss": (linear_policy, runnable_backends(policy_loss.SUPPORTS)),
    "endpoint_segments": (cut, runnable_backends(endpoint_segments.SUPPORTS)),
    "token_advantages": (estimate, runnable_backends(token_advantages.SUPPORTS)),
    "segment_metrics": (measure, ["reference"]),
}
EACH = [(op, backend) for op, (_, names) in CALLS.items() for backend in names]
on_device = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a failed assertion on the device ends the process's use of it"
)


@on_device
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("op", "backend"), EACH)
def test_wrong_bounds_are_an_error(op: str, backend: str, wrong: str, dtype: torch.dtype) -> None:
    if wrong == "extreme" and dtype == torch.int32:
        pytest.skip("int32 cannot hold them")
    # linear_policy_loss is built on policy_loss, which reads the bounds
    named = op.removeprefix("linear_")
    with pytest.raises(RuntimeError, match=f"{named}: {RULE}"):
        CALLS[op][0](torch.tensor(WRONG[wrong], device=device_of(backend)).to(dtype), backend)


@pytest.mark.parametrize("right", [[0], [0, 0], [0, 100], [0, 40, 40, 90]], ids=str)
@pytest.mark.parametrize(("op", "backend"), EACH)
def test_right_bounds_are_taken(op: str, backend: str, right: list[int]) -> None:
    result = CALLS[op][0](torch.tensor(right, device=device_of(backend)), backend)
    assert op == "segment_metrics" or result.isfinite().all()


@pytest.mark.parametrize(("op", "backend"), EACH)
def test_bounds_in_strided_memory(op: str, backend: str) -> None:
    strided = torch.tensor([0, 7, 100, 9], device=device_of(backend))[::2]
    assert torch.equal(strided.cpu(), torch.tensor([0, 100])) and not strided.is_contiguous()
    CALLS[op][0](strided, backend)


@pytest.mark.parametrize("wrong", WRONG)
def test_rows_stay_within_the_tokens(wrong: str) -> None:
    """Kernels that run before a failed assertion is noticed still read within the tokens."""
    bounds = torch.tensor(WRONG[wrong])
    with mock.patch("torch._assert_async") as checked:
        result = packed_bounds("op", bounds, TOKENS)
    assert not checked.call_args.args[0]
    assert result[0] == 0 and result[-1] <= TOKENS and (result.diff() >= 0).all() and len(result) == len(bounds)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("op", "backend"), [(op, name) for op, name in EACH if name != "cpu"])
def test_on_a_gpu_the_error_comes_without_a_wait(op: str, backend: str) -> None:
    code = (
        "import torch\n"
        "from grpo_kernels import backends\n"
        "from tests.ops import test_packed_bounds as tests\n"
        "backends.name_implementations()\n"
        "bounds = torch.tensor([0, 9000], device='cuda')\n"
        f"call = tests.CALLS[{op!r}][0]\n"
        "try:\n"
        f"    call(bounds, {backend!r})\n"
        "    torch.cuda.synchronize()\n"
        "except RuntimeError as error:\n"
        "    assert 'device-side assert' in str(error), error\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "refused" in done.stdout and RULE in done.stderr, done.stderr
