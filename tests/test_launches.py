"""Launches of every op with a kernel for GPUs, counted without one: a change that launches more edits the table.

Each call runs on the GPU of tests/simulated_gpu.py, CUDA kernels in the emulator and Triton's in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import emulation
from tests.ops.all_cases import OPS
from tests.ops.promises import drawn
from tests.simulated_gpu import Gpu, running, without_gpu

Put = Callable[[Tensor], Tensor]


class Call(NamedTuple):
    """A call with its arguments on the GPU, and those by which its result, a loss, is differentiated."""

    run: Callable[[], Any]
    leaves: tuple[Tensor, ...] = ()


Make = Callable[[Put], Call]


def leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def described(name: str) -> Make:
    """A small batch of the description of an op."""

    def make(put: Put) -> Call:
        op = OPS[name]
        inputs = drawn(op, 1, put)
        leaves = tuple(inputs[leaf] for leaf in op.leaves)
        return Call(lambda: op.call(inputs, None).get("loss"), leaves)

    return make


# Cases that are no description's


def loss(config: gk.LossConfig, *names: str) -> Make:
    """The loss of padded rows with these tensors, too."""

    def make(put: Put) -> Call:
        shapes = {"advantages": (4,), "normalizer": ()}
        every = ("logprobs", "old_logprobs", "advantages", *names)
        arguments = {name: put(-torch.rand(shapes.get(name, (4, 300)))) for name in every}
        arguments["logprobs"], mask = leaf(arguments["logprobs"]), put(torch.rand(4, 300) < 0.9)
        return Call(lambda: gk.policy_loss(**arguments, mask=mask, config=config).loss, (arguments["logprobs"],))

    return make


def advantages(rows: int, config: str = "grpo") -> Make:
    def make(put: Put) -> Call:
        rewards = put(torch.randn(rows))
        return Call(lambda: gk.group_advantages(rewards, 8, config=config))

    return make


def unsorted_advantages(put: Put) -> Call:
    rewards, groups = put(torch.randn(256)), put(torch.randint(0, 32, (256,)))
    return Call(lambda: gk.group_advantages(rewards, groups))


def rollout_advantages(put: Put) -> Call:
    row = torch.arange(256)
    rewards, rollouts, groups = put(torch.randn(64)[row // 4]), put(row // 4), put(row // 32)
    return Call(lambda: gk.group_advantages(rewards, groups, rollouts=rollouts))


def token_advantages(rows: int, width: int) -> Make:
    def make(put: Put) -> Call:
        rewards, values = put(torch.randn(rows, width)), put(torch.randn(rows, width))
        return Call(lambda: gk.token_advantages(rewards, values))

    return make


def segments(put: Put) -> Call:
    rewards, logprobs, old, values = (put(-torch.rand(6, 70)) for _ in range(4))
    return Call(lambda: gk.endpoint_segments(rewards, logprobs, old, values=values))


def similarity(size: int) -> Make:
    def make(put: Put) -> Call:
        embeddings = put(torch.randn(4 * size, 16))
        return Call(lambda: gk.similarity_groups(embeddings, size))

    return make


def correction(config: gk.CorrectionConfig) -> Make:
    def make(put: Put) -> Call:
        old, sampling, mask = put(-torch.rand(4, 300)), put(-torch.rand(4, 300)), put(torch.rand(4, 300) < 0.9)
        return Call(lambda: gk.sampling_correction(old, sampling, mask=mask, config=config))

    return make


def head(chunks: int, of_loss: bool, dtype: torch.dtype = torch.float32) -> Make:
    """A head over 16 tokens for each chunk."""

    def make(put: Put) -> Call:
        shape = 2, 8 * chunks
        hidden, weight = (leaf(put(torch.randn(*size, 16).to(dtype))) for size in (shape, (70,)))
        targets, old, of_rows = put(torch.randint(0, 70, shape)), put(-torch.rand(shape)), put(torch.randn(2))

        def run() -> Tensor:
            if of_loss:
                return gk.linear_policy_loss(hidden, weight, targets, old, of_rows, chunk_size=16).loss
            return gk.linear_logprobs(hidden, weight, targets, chunk_size=16).logprobs.sum()

        return Call(run, (hidden, weight))

    return make


class Row(NamedTuple):
    """Launches of a call, and of the backward of its loss.

    Attributes:
        make: the case
        ours: kernels of ours
        torch: calls of torch, each of which launches one kernel or more; those of a description make its loss, too
        ours_backward, torch_backward: the same of the backward
    """

    make: Make
    ours: int
    torch: int
    ours_backward: int = 0
    torch_backward: int = 0


TABLE = {
    "policy_loss of clip": Row(loss(gk.LossConfig()), 3, 0, 0, 1),
    "policy_loss of clip and k3": Row(loss(gk.LossConfig.trl(beta=0.04), "ref_logprobs"), 3, 0, 0, 1),
    "policy_loss of a micro-batch": Row(loss(gk.LossConfig.trl(), "is_weights", "normalizer"), 2, 1, 0, 1),
    "policy_loss of packed rows": Row(described("policy_loss of packed rows"), 2, 11, 0, 1),
    "group_advantages of 8,192 rows": Row(advantages(8192), 1, 0),
    "group_advantages of a batch of 8,192": Row(advantages(8192, "batch_std"), 2, 0),
    "group_advantages of unsorted ids": Row(unsorted_advantages, 1, 8),
    "group_advantages of rollouts of four": Row(rollout_advantages, 1, 68),
    "gigpo_advantages": Row(described("gigpo_advantages"), 2, 34),
    "token_advantages of short rows": Row(token_advantages(4, 300), 3, 1),
    "token_advantages of long rows": Row(token_advantages(2, 20_000), 3, 1),
    "endpoint_segments with a critic": Row(segments, 5, 2),
    "endpoint_segments without a critic": Row(described("endpoint_segments of prompts"), 7, 9),
    "similarity_groups of 8": Row(similarity(8), 2, 0),
    "similarity_groups of 64": Row(similarity(64), 2, 0),
    "similarity_groups of ids": Row(described("similarity_groups of ids"), 2, 19),
    "similarity_advantages": Row(described("similarity_advantages by length"), 3, 44),
    "pairwise_cosine": Row(described("pairwise_cosine of ids"), 1, 19),
    "cluster_distances": Row(described("cluster_distances"), 1, 9),
    "agglomerate": Row(described("agglomerate"), 1, 0),
    "silhouette": Row(described("silhouette"), 1, 0),
    "sampling_correction of TRL": Row(correction(gk.CorrectionConfig.trl()), 0, 147),
    "sampling_correction of verl": Row(correction(gk.CorrectionConfig.verl()), 0, 146),
    "token_logprobs": Row(described("token_logprobs"), 1, 5, 1, 2),
    "linear_logprobs of one chunk": Row(head(1, of_loss=False), 1, 6, 1, 10),
    "linear_logprobs of two chunks": Row(head(2, of_loss=False), 2, 9, 2, 14),
    "linear_logprobs over a support": Row(described("linear_logprobs over a support"), 2, 60, 4, 18),
    "LMHead": Row(described("LMHead with all options"), 3, 49, 3, 69),
    "linear_policy_loss of one chunk": Row(head(1, of_loss=True), 5, 12, 0, 2),
    "linear_policy_loss of two chunks": Row(head(2, of_loss=True), 10, 17, 0, 2),
    "linear_policy_loss of bfloat16": Row(head(1, True, torch.bfloat16), 4, 20, 0, 2),
    "linear_policy_loss of bfloat16 in two chunks": Row(head(2, True, torch.bfloat16), 8, 32, 0, 2),
    "linear_distillation_loss": Row(described("linear_distillation_loss"), 3, 149, 0, 5),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with running(monkeypatch) as gpu:
        yield gpu


def assert_launches(gpu: Gpu, run: Callable[[], Any], ours: int, of_torch: int) -> Any:
    """The result of a call that launches this."""
    results: list[Any] = []
    gpu.of_triton.clear()
    gpu.of_torch.clear()
    compiled = emulation.launches(lambda: results.append(run()))
    assert compiled + len(gpu.of_triton) == ours, f"{compiled} of CUDA, and of Triton {gpu.of_triton}"
    assert len(gpu.of_torch) == of_torch, f"of torch {gpu.of_torch}"
    return results[0]


@without_gpu
@pytest.mark.parametrize("name", TABLE)
def test_launches(gpu: Gpu, name: str) -> None:
    row = TABLE[name]
    call = row.make(gpu.put)
    result = assert_launches(gpu, call.run, row.ours, row.torch)
    if call.leaves:
        upstream = gpu.put(torch.ones(()))

        def backward() -> object:
            return torch.autograd.grad(result, call.leaves, upstream)

        assert_launches(gpu, backward, row.ours_backward, row.torch_backward)


def test_every_function_with_a_kernel_is_in_the_table() -> None:
    functions = {name.partition(" ")[0] for name, op in OPS.items() if {"cuda", "triton"} & op.supports.keys()}
    assert functions == {name.partition(" ")[0] for name in TABLE} - {"sampling_correction"}
