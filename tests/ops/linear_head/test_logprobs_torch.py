"""linear_logprobs with other parts of torch: compile, autocast, tied embeddings, checkpoints, LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.linear_head.registration import LOGPROBS
from tests.harness import INDUCTOR, device_of, needs_cpu_kernels
from tests.ops.linear_head.test_logprobs_edges import (
    BACKENDS,
    F64,
    HIDDEN,
    KERNELS,
    VOCABULARY,
    assert_close,
    assert_same,
    batch,
    run,
)


def forward_arguments(backend: str, full: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    arguments = {k: v.to(device_of(backend)) for k, v in batch(5, dtype=dtype).items()}
    arguments["targets"][1] = -100
    leaves = [arguments[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    leaves[2] = leaves[2] if full else None
    temperature = torch.rand(5, device=arguments["hidden"].device) + 0.5 if full else None
    lora = adapter(arguments["weight"]) if full else (None, None)
    head = (*leaves, *lora, arguments["targets"], temperature, 0.7, 9.0 if full else None, 0.5, 0.3)
    return head, full, 3, 3


def adapter(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of rank 2."""
    return torch.randn_like(weight[:2]).requires_grad_(), torch.randn_like(weight[:, :2]).requires_grad_()


@pytest.mark.parametrize(
    ("backend", "full"), [pytest.param("cpu", False, marks=needs_cpu_kernels), *((name, True) for name in KERNELS)]
)
def test_opcheck(backend: str, full: bool) -> None:
    head, *rest = forward_arguments(backend, full, torch.float32)
    torch.library.opcheck(registry.overload("linear_logprobs", backend), (*head, *rest))


EVERYTHING = [True] * 5


@pytest.mark.parametrize(
    ("backend", "needs"),
    [
        *((name, EVERYTHING) for name in KERNELS),
        pytest.param("cpu", [True, False, False, False, True], marks=needs_cpu_kernels),
        pytest.param("cpu", [False, True, False, True, False], marks=needs_cpu_kernels),
    ],
)
def test_opcheck_of_the_backward(backend: str, needs: list[bool]) -> None:
    head, *rest = forward_arguments(backend, True, torch.bfloat16)
    head = tuple(value.detach() if isinstance(value, Tensor) else value for value in head)
    logprobs, entropy, normalizer = LOGPROBS[backend](*head, *rest)
    upstream, saved = (torch.randn_like(logprobs), torch.randn_like(entropy)), (normalizer, entropy, needs, 3, 3)
    op = registry.overload("linear_logprobs_backward", backend)
    torch.library.opcheck(op, (*upstream, *head, *saved))
    torch.library.opcheck(op, (upstream[0], None, *head, *saved))


@pytest.mark.parametrize(("backend", "dynamic"), [(None, True), *((name, False) for name in BACKENDS)])
def test_compiles_into_one_graph(backend: str | None, dynamic: bool) -> None:
    torch.compiler.reset()
    device = device_of(backend or "cuda")

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        options: dict[str, Any] = {"temperature": 0.8, "return_entropy": True, "chunk_size": 3, "backend": backend}
        result = gk.linear_logprobs(hidden * 2, weight, targets, bias=bias, **options)
        return (result.logprobs - 0.1 * result.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR, dynamic=dynamic)
    for rows in (4, 7) if dynamic else (4,):
        arguments = {k: v.to(device) for k, v in batch(rows, dtype=torch.float32).items()}
        results = []
        for function in (loss, compiled):
            leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in arguments.items()}
            value = function(**leaves)
            value.backward()
            results.append({"value": value} | {k: leaf.grad for k, leaf in leaves.items() if leaf.requires_grad})
        assert_close(*results, rtol=1e-6, atol=1e-6)
        assert results[0]["weight"].any()


@pytest.mark.parametrize("kind", ["integers", "mask"])
def test_compiles_with_positions(kind: str) -> None:
    torch.compiler.reset()
    arguments = batch(6, dtype=torch.float32)
    positions = torch.tensor([5, 0, 3]) if kind == "integers" else torch.arange(6) % 2 == 0

    def logprobs(hidden: Tensor, places: Tensor) -> Tensor:
        return gk.linear_logprobs(hidden * 2, arguments["weight"], arguments["targets"], positions=places).logprobs

    # the number of rows that a mask selects depends on data, which breaks the graph
    compiled = torch.compile(logprobs, fullgraph=kind == "integers", backend=INDUCTOR)
    torch.testing.assert_close(compiled(arguments["hidden"], positions), logprobs(arguments["hidden"], positions))


def test_autocast_is_casting_by_hand() -> None:
    arguments = batch(dtype=torch.float32)
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in arguments.items()}
    with torch.autocast("cpu", torch.bfloat16):
        cast = gk.linear_logprobs(**leaves, chunk_size=7)
    by_hand = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in arguments.items()}
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in by_hand.items()}
    expected = gk.linear_logprobs(**halves, chunk_size=7)
    assert cast.logprobs.dtype == torch.float32 and torch.equal(cast.logprobs, expected.logprobs)
    cast.logprobs.sum().backward()
    expected.logprobs.sum().backward()
    for name in ("hidden", "weight", "bias"):
        assert leaves[name].grad.dtype == torch.float32 and torch.equal(leaves[name].grad, by_hand[name].grad), name


@needs_cpu_kernels
def test_autocast_leaves_float64_alone() -> None:
    arguments = batch()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(arguments)
    assert inside["logprobs"].dtype == F64
    assert_same(inside, run(arguments))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_tied_embeddings_get_both_gradients(chunk_size: int | None) -> None:
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, dtype=F64)
    ids = torch.randint(VOCABULARY, (2, 6))

    def gradient(of_naive: bool) -> Tensor:
        embedding.weight.grad = None
        hidden = torch.tanh(embedding(ids)[:, :-1])
        if of_naive:
            rows = (hidden @ embedding.weight.T).log_softmax(-1)
            logprobs = rows.gather(-1, ids[:, 1:, None])[..., 0]
        else:
            logprobs = gk.linear_logprobs(hidden, embedding.weight, ids[:, 1:], chunk_size=chunk_size).logprobs
        logprobs.square().sum().backward()
        return embedding.weight.grad

    torch.testing.assert_close(gradient(False), gradient(True), rtol=1e-11, atol=1e-12)


def test_gradient_checkpointing() -> None:
    arguments = batch()

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        result = gk.linear_logprobs(torch.tanh(hidden), weight, arguments["targets"], return_entropy=True, chunk_size=7)
        return (result.logprobs * result.entropy).sum()

    results = []
    for is_kept in (False, True):
        leaves = [arguments[name].clone().requires_grad_() for name in ("hidden", "weight")]
        value = both(*leaves) if is_kept else checkpoint(both, *leaves, use_reentrant=False)
        value.backward()
        results.append({"value": value.detach(), "hidden": leaves[0].grad, "weight": leaves[1].grad})
    assert_same(*results)


def test_lora_on_the_head() -> None:
    peft = pytest.importorskip("peft")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=F64)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.lm_head(hidden)

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(Model(), config, autocast_adapter_dtype=False).double()
    layer, arguments = model.base_model.model.lm_head, batch()
    result = []
    for is_plain in (False, True):
        model.zero_grad(set_to_none=True)
        if is_plain:
            logprobs = gk.token_logprobs(model(arguments["hidden"]), arguments["targets"]).logprobs
        else:
            weight = layer.base_layer.weight + layer.get_delta_weight("default")
            logprobs = gk.linear_logprobs(arguments["hidden"], weight, arguments["targets"], chunk_size=7).logprobs
        logprobs.square().sum().backward()
        result.append({"logprobs": logprobs} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert len(result[0]) == 3 and all(value.any() for value in result[0].values())
    assert layer.base_layer.weight.grad is None
    assert_close(*result, rtol=1e-9)
