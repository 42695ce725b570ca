"""The three ops of the head with the rest of torch: gradients that are added to a tensor, autocast, graphs.

Faults that this is for: a gradient of the reference model; a weight gradient that is written and not added, rounded,
given twice, or touches ids that no token keeps; an autocast that casts twice, or float64; a schema that graphs cannot
use; a graph that is compiled for one number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends, registry
from grpo_kernels.ops.linear_head.loop import RUN
from tests.harness import INDUCTOR, assert_close_to_rounding, device_of, needs_cpu_kernels
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import OPS, problem
from tests.ops.linear_head.heads import BF16, F32, F64, assert_close
from tests.ops.promises import Inputs, Op, Results, assert_same_bits, placed, run

on_ops = pytest.mark.parametrize("name", OPS)


def on_device(op: Op, backend: str, *leaves: str) -> Inputs:
    """With these leaves, in the widest dtype of the backend."""
    dtype, device = F64 if backend == "cpu" else F32, device_of(backend)
    given = placed(op, op.draw(), dtype, lambda value: value.to(device))
    return given | {name: given[name].detach().requires_grad_(name in leaves) for name in op.leaves}


def assert_near(got: Results, reference: Callable[[], Results]) -> None:
    """Compares results in float64 or float32 with the reference in float64."""
    if got["loss" if "loss" in got else "d_weight"].dtype == F64:
        assert_close(got, reference(), rtol=1e-12, atol=1e-14)
    else:
        assert_close_to_rounding(got, reference(), reference, F64)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("backend", heads.EXACT)
def test_the_reference_model_gets_no_gradient(backend: str, memory: str) -> None:
    op = problem("dapo", "bias", "ref_head", memory=memory).op
    given = on_device(op, "cpu", "hidden")
    reference = [given[key].requires_grad_() for key in ("ref_hidden", "ref_weight", "ref_bias")]
    op.call(given, backend)["loss"].backward()
    assert given["hidden"].grad.any() and all(value.grad is None for value in reference)


# A tensor that the gradient of the weight is added to


ADDED = {
    "loss": ("dapo",),
    "shared positions": ("dapo", "shared"),
    "teacher": ("dapo", "teacher"),
    "support": ("dapo", "support"),
    "support and teacher": ("dapo", "support", "teacher"),
    "adapter": ("dapo", "lora"),
    "distillation": ("distillation", "lora"),
    "whole distillation": ("distillation", "lora", "whole"),
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("backend", heads.KERNELS)
def test_the_weight_gradient_is_added_to_a_tensor(backend: str, name: str) -> None:
    """Over two calls, in several chunks."""
    op = problem(*ADDED[name], "bias", rows=2, chunk_size=5).op
    given = on_device(op, backend, *op.leaves)

    def reference() -> Results:
        whole = run(op, op.draw(), "reference", F64)
        return {f"d_{leaf}": 2 * whole[f"d_{leaf}"] for leaf in op.leaves}

    before = 2**-10  # a tenth of a gradient: each of the chunks rounds the sum with it
    into = torch.full_like(given["weight"], before, requires_grad=False)
    for _ in range(2):
        op.call(given | {"weight_grad": into}, backend)["loss"].backward()
    assert given["weight"].grad is None
    got = {f"d_{leaf}": given[leaf].grad.cpu() for leaf in op.leaves if leaf != "weight"}
    got["d_weight"] = into.cpu() - before
    assert_near(got, reference)


@needs_cpu_kernels
@pytest.mark.parametrize("into", [F32, BF16], ids=str)
def test_a_weight_gradient_of_a_half_is_added_up_in_either_dtype(into: torch.dtype) -> None:
    """Over a support, which takes whole rows alone."""
    case = problem("grpo", "bias", "support").rounded(BF16)
    given = placed(case.op, case.inputs, BF16, lambda value: value)
    total = torch.zeros(31, 5, dtype=into)
    case.op.call(given | {"weight_grad": total}, "cpu")["loss"].backward()
    expected = case.run("cpu", BF16)["d_weight"].to(into)
    # one chunk: the float32 sum is rounded once, and its factors are rounded to half precision before
    torch.testing.assert_close(total, expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max()))
    assert given["weight"].grad is None and total.any()


@needs_cpu_kernels
def test_a_loss_whose_weight_gradient_was_added_must_not_be_scaled() -> None:
    op = problem("dapo", "bias").op
    given = on_device(op, "cpu", "weight")
    loss = op.call(given | {"weight_grad": torch.zeros(31, 5, dtype=F64)}, "cpu")["loss"]
    with pytest.raises(RuntimeError, match="linear_policy_loss: the loss must be given to backward unscaled"):
        (loss / 2).backward()


# Autocast


@on_ops
@pytest.mark.parametrize("backend", heads.EXACT)
def test_autocast_is_casting_by_hand(backend: str, name: str) -> None:
    op = OPS[name]
    inputs = heads.cast(op.draw(), F32)
    found = []
    for is_inside in (True, False):
        leaves = {key: inputs[key].clone().requires_grad_() for key in op.leaves}
        given = inputs | leaves
        if not is_inside:
            names = [f"{model}{key}" for model in ("", "ref_", "teacher_") for key in ("hidden", "weight", "bias")]
            given |= {key: given[key].bfloat16() for key in names if key in given}
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            results = op.call(given, backend)
        assert results["loss"].dtype == F32
        found.append(results | dict(zip(leaves, torch.autograd.grad(results["loss"], [*leaves.values()]), strict=True)))
    assert_same_bits(*found)


@on_ops
def test_autocast_leaves_float64_alone(name: str) -> None:
    inputs = OPS[name].draw()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(OPS[name], inputs, "reference", F64)
    assert inside["loss"].dtype == F64
    assert_same_bits(inside, run(OPS[name], inputs, "reference", F64))


# Graphs


def test_a_graph_for_any_number_of_tokens() -> None:
    torch.compiler.reset()
    op = problem("logprobs", "bias", shape=(20,), chunk_size=3).op
    compiled = dataclasses.replace(op, call=torch.compile(op.call, fullgraph=True, backend=INDUCTOR, dynamic=True))
    for count in (4, 7, 20):
        inputs = {name: value[:count] if name in heads.OF_TOKENS else value for name, value in op.draw().items()}
        with torch.compiler.set_stance("default" if count == 4 else "fail_on_recompile"):
            got = run(compiled, inputs, None, F32)
        assert_near(got, functools.partial(run, op, inputs, "reference", F64))


@pytest.mark.gpu
@pytest.mark.skipif("triton" not in heads.KERNELS, reason="needs Triton")
def test_a_graph_without_the_cuda_kernel_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of the loss has a gradient in low memory alone."""
    monkeypatch.setattr(backends, "_emulated", set())
    monkeypatch.setattr(backends, "cuda_error", "not built")
    torch.compiler.reset()
    op = problem("dapo", "bias", rows=2).op
    compiled = dataclasses.replace(op, call=torch.compile(op.call, fullgraph=True, backend=INDUCTOR))
    inputs = op.draw()
    assert_near(run(compiled, inputs, "triton", F32), lambda: run(op, inputs, "reference", F64))
    torch.compiler.reset()


def test_a_mask_of_positions_breaks_the_graph_and_keeps_the_results() -> None:
    torch.compiler.reset()
    op = problem("logprobs", "bias", "positions mask").op
    compiled = dataclasses.replace(op, call=torch.compile(op.call, backend=INDUCTOR))
    assert_near(run(compiled, op.draw(), None, F32), lambda: run(op, op.draw(), "reference", F64))


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_errors_under_compile(backend: str) -> None:
    """A split vocabulary is refused, and a value of a support or of positions fails an assertion, as on a GPU."""
    torch.compiler.reset()
    weight = torch.zeros(7, 5)
    split = torch.compile(lambda: gk.LMHead(weight, vocab_start=3), fullgraph=True, backend=backend)
    with pytest.raises(Exception, match=r"LMHead: vocab_start must be None under torch\.compile, got 3"):
        split()
    support = torch.tensor([4, 0, 2, 3]), torch.tensor([0, 2, 4])

    @torch.compile(backend=backend)
    def logprobs(targets: Tensor) -> Tensor:
        return gk.linear_logprobs(torch.zeros(2, 5), weight, targets, support=support).logprobs

    assert logprobs(torch.tensor([0, 2])).shape == (2,)
    with pytest.raises(RuntimeError, match="linear_logprobs: targets must be in the support of their row"):
        logprobs(torch.tensor([0, 1]))

    @torch.compile(backend=backend)
    def picked(positions: Tensor) -> Tensor:
        return gk.linear_logprobs(torch.zeros(4, 5), weight, torch.zeros(4).long(), positions=positions).logprobs

    assert picked(torch.tensor([3, 0])).shape == (2,)
    for wrong in ([0, 1, 1, 0], [-1, 2], [2, 4]):
        with pytest.raises(RuntimeError, match=r"linear_logprobs: positions must be different places in \[0, 4\)"):
            picked(torch.tensor(wrong))


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["linear_policy_loss", "linear_distillation_loss"])
def test_opcheck_of_the_ops_that_graphs_call(name: str) -> None:
    """Eager calls run the same functions, but not as ops."""
    of, *features = {
        "linear_policy_loss": ("sequence", "gaps", "policy_mask", "is_weights", "return_entropy"),  # no metric is NaN
        "linear_distillation_loss": ("distillation",),
    }[name]
    op = problem(of, "bias", "lora", *features, chunk_size=14).op
    with mock.patch.object(RUN, "_run", wraps=RUN._run) as computed:
        run(op, op.draw(), "cpu", F32)
    flat = RUN.layout.flat(computed.call_args_list[0].args[1])
    flat = [value.detach() if isinstance(value, Tensor) else value for value in flat]
    torch.library.opcheck(registry.overload("linear_head_cpu"), flat)
