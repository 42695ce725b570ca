"""linear_logprobs with other parts of torch: autocast, a second backward, dynamic shapes.

Faults that this is for: an autocast that casts twice, or float64; a saved tensor that the
backward overwrites; a graph that is compiled for one number of tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import INDUCTOR, device_of, runnable_backends
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import F32, F64, KERNELS
from tests.ops.promises import Inputs, run

BATCHES = ("LMHead with all options", "linear_logprobs over a support")


def narrow(inputs: Inputs, dtype: torch.dtype = F32) -> Inputs:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", cases.FAST)
def test_autocast_is_casting_by_hand(backend: str, name: str) -> None:
    inputs = narrow(cases.OPS[name].draw())
    inputs["hidden"] = inputs["hidden"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        inside = cases.call(inputs, backend)
    cast = {key: inputs[key].bfloat16() for key in ("hidden", "weight", "bias")}
    by_hand = cases.call(inputs | cast, backend)
    assert inside["logprobs"].dtype == F32 and torch.equal(inside["logprobs"], by_hand["logprobs"])
    gradients = [torch.autograd.grad(each["loss"], inputs["hidden"])[0] for each in (inside, by_hand)]
    assert gradients[0].dtype == F32 and torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize("name", BATCHES)
def test_autocast_leaves_float64_alone(name: str) -> None:
    op, inputs = cases.OPS[name], cases.OPS[name].draw()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(op, inputs, "reference", F64)
    outside = run(op, inputs, "reference", F64)
    assert inside["logprobs"].dtype == F64 and all(torch.equal(value, outside[key]) for key, value in inside.items())


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", KERNELS)
def test_the_backward_can_run_twice(backend: str, name: str) -> None:
    if backend not in runnable_backends(cases.OPS[name].supports):
        pytest.skip("a support has no kernel of this backend")
    inputs, device = narrow(cases.OPS[name].draw()), device_of(backend)
    inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    leaves = [inputs[key].requires_grad_() for key in ("hidden", "weight", "bias")]
    loss = cases.call(inputs, backend)["loss"]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))


def test_a_graph_for_any_number_of_tokens() -> None:
    torch.compiler.reset()
    head = narrow(cases.draw_head(bias=True))

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        lm_head = gk.LMHead(head["weight"], head["bias"])
        logprobs = gk.linear_logprobs(hidden * 2, lm_head, targets, chunk_size=3).logprobs
        return logprobs.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR, dynamic=True)
    for tokens in (4, 7, 20):
        inputs = narrow(cases.draw_tokens(head, tokens))
        hidden, targets = inputs["hidden"].requires_grad_(), inputs["targets"]
        with torch.compiler.set_stance("default" if tokens == 4 else "fail_on_recompile"):
            got = torch.autograd.grad(compiled(hidden, targets), hidden)
        torch.testing.assert_close(got, torch.autograd.grad(loss(hidden, targets), hidden), rtol=1e-5, atol=1e-5)


def test_a_mask_of_positions_breaks_the_graph_and_keeps_the_results() -> None:
    torch.compiler.reset()
    inputs = narrow(cases.draw(bias=True)) | {"positions": torch.arange(20).view(4, 5) % 3 == 0}
    compiled = torch.compile(lambda given: cases.call(given, None)["logprobs"], backend=INDUCTOR)
    torch.testing.assert_close(compiled(inputs), cases.call(inputs, None)["logprobs"], rtol=1e-6, atol=1e-6)
