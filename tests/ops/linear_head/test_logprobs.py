"""linear_logprobs, with and without a support: the reference against the definition, and the kernels against it.

Faults that this is for: a bias or an adapter outside of logit_scale; a softcap before it, or after the temperature; a
banned id with a logit of 0, or of the softcap; an entropy over ids that are banned or not kept; a temperature of the
wrong token; a tail of a chunk, block or vector; logits that are rounded to half precision; a token without a gradient
that is left out wrongly, or computed; a product for a factor that needs no gradient, or of the weight's size for an
adapter; sums by token id that stop early; digits of nearly certain tokens that get lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import grpo_kernels as gk
from tests.harness import device_of, examples, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head import cases, heads
from tests.ops.linear_head.cases import assert_as_reference, draw
from tests.ops.linear_head.heads import BACKENDS, BF16, EXACT, F32, F64, KERNELS, LEAVES, NAN, OVER_SUPPORT
from tests.ops.promises import Inputs, Results, run

# without shrinking, which takes minutes in Triton's interpreter
PHASES = (Phase.explicit, Phase.generate)
FROZEN = st.sets(st.sampled_from(LEAVES), max_size=4)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
on_backends = pytest.mark.parametrize("backend", BACKENDS)
over_support = pytest.mark.parametrize("backend", OVER_SUPPORT)


@pytest.mark.parametrize("backend", EXACT)
def test_any_head_and_tokens_give_the_definition(backend: str) -> None:
    @settings(max_examples=examples(300))
    @given(cases.batches(), FROZEN)
    def check(inputs: Inputs, frozen: set[str]) -> None:
        op, expected = cases.op_of(inputs, *frozen), cases.defined(inputs)
        assume(op.leaves)
        got = run(op, inputs, backend, F64)
        heads.assert_close(got, {name: expected[name] for name in got}, rtol=1e-10, atol=1e-12)

    check()


def test_log_probs_in_numbers() -> None:
    """The example of the page on supports: the logits are [3, 2, 1, 0] and [0, 1, 5, 1]."""
    hidden, weight = torch.eye(2), torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 5.0, 1.0]]).T
    targets, support = torch.tensor([1, 2]), (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))

    def logprobs(head: gk.LMHead | Tensor, **options: object) -> list[float]:
        got = gk.linear_logprobs(hidden, head, targets, backend="reference", **options)  # type: ignore[arg-type]
        return [round(number, 4) for number in got.logprobs.tolist()]

    assert logprobs(weight) == [-1.4402, -0.0425]
    assert logprobs(weight, support=support) == [-1.3133, 0.0]  # log sigmoid(-1), and a certain token
    # without ids 0 and 3: log sigmoid(1) and log sigmoid(4)
    assert logprobs(gk.LMHead(weight, banned=torch.tensor([3, 0]))) == [-0.3133, -0.0181]
    assert logprobs(gk.LMHead(weight, logit_scale=0.5), temperature=0.5) == [-1.4402, -0.0425]


# Kernels


def of_dtypes(supports: dict[str, Any]) -> list[tuple[str, torch.dtype]]:
    """Kernels with each dtype; halves on a GPU round the gradient by the logits, see test_halves.py."""
    return [
        (name, dtype)
        for name in runnable_backends(supports)
        for dtype in supports[name]
        if name != "reference"
        and dtype != F64
        and (dtype not in (BF16, torch.float16) or name == "cpu" or supports is heads.OF_SUPPORT)
    ]


def check_any(backend: str, dtype: torch.dtype, support: bool) -> None:
    def check(inputs: Inputs, frozen: set[str]) -> None:
        assume(cases.op_of(inputs, *frozen).leaves)
        assert_as_reference(inputs, backend, dtype, *frozen)

    is_fast = backend in EXACT
    batches = cases.batches(*((24, 40) if is_fast else (8, 20)), support=support, is_tiny=False)
    settings(max_examples=examples(90 if is_fast else 15), phases=PHASES)(given(batches, FROZEN)(check))()


@pytest.mark.pairs
@pytest.mark.parametrize(("backend", "dtype"), of_dtypes(heads.SUPPORTS), ids=str)
def test_any_head_and_tokens(backend: str, dtype: torch.dtype) -> None:
    check_any(backend, dtype, support=False)


@pytest.mark.pairs
@pytest.mark.parametrize(("backend", "dtype"), of_dtypes(heads.OF_SUPPORT), ids=str)
def test_any_support(backend: str, dtype: torch.dtype) -> None:
    check_any(backend, dtype, support=True)


# Sizes


@on_backends
def test_certain_tokens_are_exact_zeros(backend: str) -> None:
    """Log-probs of one id, where there is no other or all others are banned, and those of ignored tokens."""
    plain, of_four = draw((5,)), draw((5,), "lora", columns=4)
    for inputs in (
        draw((5,), "bias", columns=1),
        of_four | {"banned": torch.arange(3), "targets": torch.full((5,), 3)},
        plain | {"targets": torch.full((5,), heads.IGNORED)},
        plain | {"positions": torch.zeros(0).long()},
    ):
        assert not any(value.any() for value in run(cases.op_of(inputs), inputs, backend, F32).values())


@pytest.mark.parametrize(("tokens", "columns", "width"), [(3, 7, 300), (5, 300, 257), (5, 33, 256)], ids=str)
@over_support
def test_sizes_of_a_support(backend: str, tokens: int, columns: int, width: int) -> None:
    """Around the blocks of hidden states, ids and columns."""
    inputs = draw((tokens,), "bias", "ignored", columns=columns, width=width)
    inputs |= heads.draw_support(inputs, columns, [(columns, 8, 9, 1)[i % 4] for i in range(tokens)])
    for dtype in (F32, BF16):
        assert_as_reference(inputs, backend, dtype)


@pytest.mark.parametrize("chunk_size", [None, 257])
@needs_cpu_kernels
def test_a_vocabulary_of_a_model(chunk_size: int | None) -> None:
    """In chunks of the default size, of which the last is not whole."""
    inputs = draw((300,), "bias", "ignored", columns=1203, width=32) | {"chunk_size": chunk_size}
    inputs["weight"] /= 4
    for dtype in (F32, BF16):
        assert_as_reference(inputs, "cpu", dtype)


# Values


@on_kernels
def test_nearly_certain_tokens_keep_their_digits(backend: str) -> None:
    rest = torch.tensor([1e-3, 1e-6, 1e-9, 1e-12]).double().log()
    weight = torch.eye(5).double()
    hidden = torch.zeros(8, 5).double()
    hidden[:, 2] = -torch.cat([rest, rest])
    hidden[4:] += 40
    targets, device = torch.full((8,), 2), device_of(backend)
    narrow = hidden.float()
    got = gk.linear_logprobs(
        narrow.to(device), weight.float().to(device), targets.to(device), return_entropy=True, backend=backend
    )
    gap = narrow.double()[:, 2] - narrow.double()[:, 0]
    others = 4 * torch.exp(-gap)
    torch.testing.assert_close(got.logprobs.cpu().double(), -torch.log1p(others), rtol=1e-5, atol=0)
    assert got.entropy is not None
    entropy = torch.log1p(others) + others * gap / (1 + others)
    torch.testing.assert_close(got.entropy.cpu().double(), entropy, rtol=1e-5, atol=0)


@pytest.mark.parametrize("number", [NAN, float("inf")])
@on_backends
def test_a_token_that_a_later_mask_leaves_out_may_hold_anything(backend: str, number: float) -> None:
    device = device_of(backend)
    hidden, weight, mask = torch.randn(3, 5, 8), torch.randn(20, 8), torch.ones(3, 5, dtype=torch.bool)
    hidden[1, 3], mask[1, 3] = number, False
    targets, mask = torch.randint(20, (3, 5), device=device), mask.to(device)
    leaves = [hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()]
    result = gk.linear_logprobs(*leaves, targets, return_entropy=True, backend=backend)
    for values in (result.logprobs, result.entropy):
        outside = torch.autograd.grad(torch.where(mask, values, 0).sum(), leaves, retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in outside)
    inside = torch.autograd.grad(result.logprobs.sum(), leaves)
    assert not any(gradient.isfinite().all() for gradient in inside)


@on_backends
def test_a_nan_or_a_wrong_target_on_a_gpu_stays_in_its_token(backend: str) -> None:
    """On a CPU a target that is no column is an error."""
    for target in (0, -1, 37)[: 1 if backend in EXACT else None]:
        inputs = draw((9,), "bias")
        inputs["targets"][4] = target
        if target == 0:
            inputs["hidden"][4, 1] = NAN
        got = run(cases.op_of(inputs, "weight", "bias"), inputs, backend, F32)
        for name in ("logprobs", "entropy", "d_hidden"):
            assert got[name][4].isnan().all() and got[name][torch.arange(9) != 4].isfinite().all(), name


# Gradients


def multiplications(call: Callable[[], Results]) -> int:
    """Products of two numbers in all matrix products, as torch's profiler sees their shapes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        call()
    total = 0
    for event in seen.events():
        if event.name in ("aten::mm", "aten::addmm_"):
            (m, k), (_, n) = event.input_shapes[1:3] if event.name == "aten::addmm_" else event.input_shapes[:2]
            total += m * k * n
    return total


TOKENS, COLUMNS, WIDTH, RANK = 24, 512, 256, 2


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("frozen", "live", "products"),
    [((), TOKENS, 4), (("weight",), TOKENS, 3), (("hidden",), TOKENS, 3), ((), TOKENS // 3, 2), (("weight",), 0, 1)],
    ids=str,
)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_products_of_the_page_and_no_others(
    frozen: tuple[str, ...], live: int, products: int, has_adapter: bool
) -> None:
    """One forward; backward one for the logits, hidden states and weight each, of the tokens with a gradient."""
    features = ("lora",) if has_adapter else ()
    inputs = draw((TOKENS,), *features, columns=COLUMNS, width=WIDTH) | {"chunk_size": 10}
    inputs |= {name: inputs[name] * (torch.arange(TOKENS) < live) for name in ("by_logprobs", "by_entropy")}
    counted = multiplications(lambda: run(cases.op_of(inputs, *frozen), inputs, "cpu", F32))
    whole = TOKENS * COLUMNS * WIDTH
    # an adapter's factors each way, for logits twice, hidden states, A and B: far less than a product B A
    of_adapter = RANK * has_adapter * TOKENS * (COLUMNS + WIDTH)
    assert products * whole <= counted <= products * whole + 5 * of_adapter
    assert 5 * of_adapter < COLUMNS * RANK * WIDTH


@pytest.mark.parametrize("backend", KERNELS)
def test_the_caller_may_overwrite_log_probs(backend: str) -> None:
    hidden, weight = torch.randn(6, 5), torch.randn(9, 5, requires_grad=True)
    targets, mask = torch.arange(6), torch.tensor([True, False, False, True, False, False])

    def gradient(in_place: bool) -> Tensor:
        logprobs = gk.linear_logprobs(hidden, weight, targets, backend=backend).logprobs
        masked = logprobs.masked_fill_(mask, 0) if in_place else logprobs.masked_fill(mask, 0)
        return torch.autograd.grad(masked.sum(), weight)[0]

    assert torch.equal(gradient(True), gradient(False))
