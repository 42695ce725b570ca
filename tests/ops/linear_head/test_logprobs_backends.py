"""The kernels of linear_logprobs, with and without a support, against the float64 reference.

Faults that this is for: a tail of a chunk, block or vector; logits that are rounded to half precision; a token without
a gradient that is left out wrongly, or computed; a product for a factor that needs no gradient, or of the weight's size
for an adapter; sums by token id that stop early; digits of nearly certain tokens that get lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import support_reference
from tests.harness import assert_within_budget, device_of, examples, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import BACKENDS, F32, F64, FAST, KERNELS, NAN, assert_as_reference
from tests.ops.promises import Inputs, Results, run

# without shrinking, which takes minutes in Triton's interpreter
PHASES = (Phase.explicit, Phase.generate)
HALVES = (torch.bfloat16, torch.float16)
OVER_SUPPORT = runnable_backends(cases.OF_SUPPORT)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
on_backends = pytest.mark.parametrize("backend", BACKENDS)
over_support = pytest.mark.parametrize("backend", OVER_SUPPORT)


def of_dtypes(supports: dict[str, Any]) -> list[tuple[str, torch.dtype]]:
    """Kernels with each dtype; halves on a GPU round the gradient by the logits, see test_halves.py."""
    return [
        (name, dtype)
        for name in runnable_backends(supports)
        for dtype in supports[name]
        if name != "reference"
        and dtype != F64
        and (dtype not in HALVES or name == "cpu" or supports is cases.OF_SUPPORT)
    ]


FROZEN = st.sets(st.sampled_from(cases.LEAVES), max_size=4)


@settings(max_examples=examples(300))
@given(cases.batches(support=False), FROZEN)
@needs_cpu_kernels
def test_any_head_and_tokens_in_float64(inputs: Inputs, frozen: set[str]) -> None:
    op = cases.op_of(inputs, *frozen)
    assume(op.leaves)
    got, expected = (run(op, inputs, backend, F64) for backend in ("cpu", "reference"))
    cases.assert_equal_in_float64(got, expected)


def check_any(backend: str, dtype: torch.dtype, support: bool) -> None:
    def check(inputs: Inputs, frozen: set[str]) -> None:
        assume(cases.op_of(inputs, *frozen).leaves)
        assert_as_reference(inputs, backend, dtype, *frozen)

    is_fast = backend in FAST
    batches = cases.batches(*((24, 40) if is_fast else (8, 20)), support=support, is_tiny=False)
    settings(max_examples=examples(90 if is_fast else 15), phases=PHASES)(given(batches, FROZEN)(check))()


@pytest.mark.pairs
@pytest.mark.parametrize(("backend", "dtype"), of_dtypes(cases.SUPPORTS), ids=str)
def test_any_head_and_tokens(backend: str, dtype: torch.dtype) -> None:
    check_any(backend, dtype, support=False)


@pytest.mark.pairs
@pytest.mark.parametrize(("backend", "dtype"), of_dtypes(cases.OF_SUPPORT), ids=str)
def test_any_support(backend: str, dtype: torch.dtype) -> None:
    check_any(backend, dtype, support=True)


# Sizes


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@on_backends
def test_no_tokens(backend: str, shape: tuple[int, ...]) -> None:
    head = cases.draw_head(bias=True, adapter=2, banned=3)
    empty = cases.draw_tokens(head, *shape)
    plain = {name: value for name, value in (head | empty).items() if name not in ("lora_a", "lora_b")}
    nothing = {"token_ids": torch.zeros(0).int(), "offsets": torch.zeros(1).int()}
    for inputs in (head | empty, plain | nothing, head | empty | {"positions": torch.zeros(shape).bool()}):
        if "offsets" not in inputs or backend in OVER_SUPPORT:
            got = run(cases.op_of(inputs), inputs, backend, F32)
            assert got["logprobs"].shape == got["entropy"].shape == shape
            assert not any(value.any() for value in got.values())


@on_backends
def test_certain_tokens_are_exact_zeros(backend: str) -> None:
    """Log-probs of one id, where there is no other or all others are banned, and those of ignored tokens."""
    alone = cases.draw_head(1, bias=True)
    banned = cases.draw_head(4, banned=3, adapter=2)
    plain = cases.draw_head()
    for inputs in (
        alone | cases.draw_tokens(alone, 5),
        banned | cases.draw_tokens(banned, 5),
        plain | cases.draw_tokens(plain, 5, ignored=1.0),
        plain | cases.draw_tokens(plain, 5) | {"positions": torch.zeros(0).long()},
    ):
        assert not any(value.any() for value in run(cases.op_of(inputs), inputs, backend, F32).values())


@pytest.mark.parametrize(("tokens", "columns", "width"), [(3, 7, 300), (17, 300, 257), (2, 33, 256)], ids=str)
@over_support
def test_sizes_of_a_support(backend: str, tokens: int, columns: int, width: int) -> None:
    """Around the blocks of hidden states, ids and columns."""
    head = cases.draw_head(columns, width, bias=True)
    inputs = head | cases.draw_tokens(head, tokens)
    inputs |= cases.draw_support(inputs, columns, [(columns, 8, 9, 1)[i % 4] for i in range(tokens)])
    for dtype in (F32, torch.bfloat16):
        assert_as_reference(inputs, backend, dtype)


@over_support
def test_many_tokens_that_keep_the_same_ids(backend: str) -> None:
    """As frequent ones do: a sum by id takes several steps."""
    head = cases.draw_head(3, bias=True)
    inputs = head | cases.draw_tokens(head, 40)
    inputs |= cases.draw_support(inputs, 3, [3] * 40)
    assert_as_reference(inputs, backend, F32)


@pytest.mark.parametrize("chunk_size", [None, 257])
@needs_cpu_kernels
def test_a_vocabulary_of_a_model(chunk_size: int | None) -> None:
    """In chunks of the default size, of which the last is not whole; log-probs are exact to the fifth digit."""
    head = cases.draw_head(1203, 32, bias=True)
    head["weight"] /= 4
    inputs = head | cases.draw_tokens(head, 600) | {"chunk_size": chunk_size}
    for dtype in (F32, torch.bfloat16):
        got = assert_as_reference(inputs, "cpu", dtype)
        gold = run(cases.op_of(inputs), cases.rounded(inputs, dtype), "reference", F64)["logprobs"]
        torch.testing.assert_close(got["logprobs"].double(), gold, rtol=0, atol=1e-5)


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


@on_backends
def test_a_nan_stays_in_its_token(backend: str) -> None:
    inputs = cases.draw_head(bias=True)
    inputs |= cases.draw_tokens(inputs, 9, ignored=0.0)
    inputs["hidden"][4, 1] = NAN
    got = run(cases.op_of(inputs, "weight", "bias"), inputs, backend, F32)
    for name in ("logprobs", "entropy", "d_hidden"):
        assert got[name][4].isnan().all() and got[name][torch.arange(9) != 4].isfinite().all(), name


@pytest.mark.parametrize("backend", [name for name in KERNELS if name not in FAST])
def test_a_target_that_is_no_column_gives_nan_where_it_cannot_be_an_error(backend: str) -> None:
    inputs = cases.draw_head()
    inputs |= cases.draw_tokens(inputs, 3, ignored=0.0)
    for target in (-1, 37):
        inputs["targets"][1] = target
        got = run(cases.op_of(inputs), inputs, backend, F32)
        for name in ("logprobs", "entropy", "d_hidden"):
            assert got[name][1].isnan().all() and got[name][[0, 2]].isfinite().all(), name


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


TOKENS, COLUMNS, WIDTH, RANK = 24, 512, 256, 4


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("frozen", "live", "products"),
    [((), TOKENS, 4), (("weight",), TOKENS, 3), (("hidden",), TOKENS, 3), ((), TOKENS // 3, 2), (("weight",), 0, 1)],
    ids=str,
)
@pytest.mark.parametrize("adapter", [0, RANK])
def test_the_products_of_the_page_and_no_others(
    frozen: tuple[str, ...], live: int, products: int, adapter: int
) -> None:
    """One forward; backward one for the logits, hidden states and weight each, of the tokens with a gradient."""
    inputs = cases.draw_head(COLUMNS, WIDTH, adapter=adapter)
    inputs |= cases.draw_tokens(inputs, TOKENS, ignored=0.0) | {"chunk_size": 10}
    inputs |= {name: inputs[name] * (torch.arange(TOKENS) < live) for name in ("by_logprobs", "by_entropy")}
    counted = multiplications(lambda: run(cases.op_of(inputs, *frozen), inputs, "cpu", F32))
    whole = TOKENS * COLUMNS * WIDTH
    # an adapter's factors each way, for logits twice, hidden states, A and B: far less than a product B A
    of_adapter = adapter * TOKENS * (COLUMNS + WIDTH)
    assert products * whole <= counted <= products * whole + 5 * of_adapter
    assert 5 * of_adapter < COLUMNS * RANK * WIDTH


# A support


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_gathered_chunks_and_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over tokens and ids whose entries are in several chunks."""
    head = cases.draw_head(40, 21, bias=True)
    inputs = head | cases.draw_tokens(head, 20)
    inputs |= cases.draw_support(inputs, 30)
    expected, threads = run(cases.op_of(inputs), inputs, "reference", dtype), torch.get_num_threads()
    for numbers, count in ((21, 1), (5 * 21, 2), (support_reference._GATHERED, 3)):
        monkeypatch.setattr(support_reference, "_GATHERED", numbers)
        torch.set_num_threads(count)
        got = run(cases.op_of(inputs), inputs, "reference", dtype)
        torch.set_num_threads(threads)
        assert all(torch.equal(got[name], expected[name]) for name in expected), numbers


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F64], ids=str)
def test_the_sums_of_a_gpu_are_those_of_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    head = cases.draw_head(40, 21, bias=True)
    inputs = cases.rounded(head | cases.draw_tokens(head, 60), dtype)
    inputs |= cases.draw_support(inputs, 40)
    working, gold = (run(cases.op_of(inputs), inputs, "reference", kind) for kind in (dtype, F64))
    monkeypatch.setattr(support_reference, "_on_cpu", lambda tensor: False)
    got = run(cases.op_of(inputs), inputs, "reference", dtype)
    for name, value in gold.items():
        assert_within_budget(got[name], working[name], value, name)
