"""With invariant=True no bit of a row's log-prob or hidden gradient depends on the other rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import invariance
from grpo_kernels.ops.linear_head import chunks, invariant
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import assert_raises, cpu_threads, device_of, needs_cpu_kernels, runnable_backends

BACKENDS = [name for name in runnable_backends(SUPPORTS) if name != "reference"]
ON_GPU = [name for name in BACKENDS if name != "cpu"]
SHAPES = [(1000, 64), (999, 63), (7, 5), (31, 1024), (1, 3), (130, 1)]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
CASES = [
    pytest.param(backend, dtype, shape, id=f"{backend}-{dtype}-{shape[0]}x{shape[1]}")
    for backend in BACKENDS
    for dtype in DTYPES
    for shape in (SHAPES if backend == "cpu" else [(96, 48), (99, 35)])
    if DTYPES[dtype] in SUPPORTS[backend]
]
cases = pytest.mark.parametrize(("backend", "dtype", "shape"), CASES)

Results = tuple[Tensor, ...]


class Batch:
    """Rows of a head with everything that may differ between rows."""

    def __init__(self, shape: tuple[int, int], rows: int, dtype: str, backend: str, seed: int = 0) -> None:
        self.backend, random = backend, torch.Generator().manual_seed(seed)
        device, kind = device_of(backend), DTYPES[dtype]
        columns, width = shape
        self.hidden = torch.randn(rows, width, generator=random).to(device, kind)
        self.weight = torch.randn(columns, width, generator=random).to(device, kind)
        self.bias = torch.randn(columns, generator=random).to(device, kind)
        self.targets = torch.randint(columns, (rows,), generator=random).to(device)
        wide = torch.promote_types(kind, torch.float32)
        self.temperature = (torch.rand(rows, generator=random) + 0.5).to(device, wide)
        self.upstream = torch.randn(rows, generator=random).to(device, wide)

    def logprobs(self, rows: Tensor, hidden: Tensor | None = None, **options: Any) -> Results:
        """Log-probs, entropies and hidden gradients of these rows, computed together."""
        leaf = (self.hidden[rows] if hidden is None else hidden).detach().requires_grad_()
        kwargs: dict[str, Any] = {"bias": self.bias, "softcap": 30.0, "invariant": True, **options}
        kwargs |= {"return_entropy": True, "temperature": self.temperature[rows], "backend": self.backend}
        logprobs, entropy = gk.linear_logprobs(leaf, self.weight, self.targets[rows], **kwargs)
        assert entropy is not None
        ((logprobs + 0.1 * entropy) * self.upstream[rows]).sum().backward()
        assert leaf.grad is not None
        return logprobs.detach(), entropy.detach(), leaf.grad


def are_equal(results: Results, others: Results) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


def picked(results: Results, rows: Tensor) -> Results:
    return tuple(result[rows] for result in results)


@cases
def test_a_row_has_the_same_bits_alone_and_among_others(
    backend: str, dtype: str, shape: tuple[int, int], record_property: Callable[[str, object], None]
) -> None:
    total = 1000 if backend == "cpu" else 20
    batch, everything = Batch(shape, total, dtype, backend), torch.arange(total)
    whole, by_default = batch.logprobs(everything), batch.logprobs(everything, invariant=False)
    differing = 0
    for count in (1, 2, 17, 131) if backend == "cpu" else (1, 3):
        for first in (0, 1, total - count):
            rows = everything[first : first + count]
            assert are_equal(batch.logprobs(rows), picked(whole, rows)), (count, first)
            differing += not are_equal(batch.logprobs(rows, invariant=False), picked(by_default, rows))
    record_property("subsets with other bits by default", differing)  # 6 to 12 of 12 with MKL on AVX-512, in float64


@cases
def test_results_are_those_of_the_default_up_to_rounding(backend: str, dtype: str, shape: tuple[int, int]) -> None:
    total, kind = 150 if backend == "cpu" else 20, DTYPES[dtype]
    batch, rows = Batch(shape, total, dtype, backend), torch.arange(total)
    rounding = math.sqrt(max(shape)) * torch.finfo(torch.promote_types(kind, torch.float32)).eps
    for got, expected in zip(batch.logprobs(rows), batch.logprobs(rows, invariant=False), strict=True):
        last = torch.finfo(expected.dtype).eps  # of a rounding to half
        largest = float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=last, atol=16 * rounding * max(largest, 1))


@needs_cpu_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2003, 129), (4096, 256)], ids=str)
def test_every_place_gives_a_row_the_same_bits(shape: tuple[int, int], dtype: str, threads: int) -> None:
    batch = Batch(shape, 1, dtype, "cpu")
    with cpu_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("error")  # a block size is left
        alone = batch.logprobs(torch.zeros(1).long())
        for count in (16, 500):
            together = batch.logprobs(torch.zeros(count).long())
            assert all(torch.equal(all_, one.expand_as(all_)) for all_, one in zip(together, alone, strict=True))


@needs_cpu_kernels
@settings(max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]), threads=st.sampled_from([1, 2]))
def test_any_rows_in_any_order(data: st.DataObject, dtype: str, threads: int) -> None:
    batch = Batch((205, 37), 300, dtype, "cpu")
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 299), min_size=1, max_size=280, unique=True)))
    options: dict[str, Any] = {"chunk_size": data.draw(st.sampled_from([None, 1, 7, 64, 129, 500]))}
    with cpu_threads(threads):
        whole = batch.logprobs(torch.arange(300))
        assert are_equal(batch.logprobs(rows, **options), picked(whole, rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_rows_may_hold_anything(backend: str) -> None:
    batch, rows = Batch((99, 35), 20, "float32", backend), torch.arange(20)
    before = batch.logprobs(rows)
    changed = torch.arange(20) % 3 == 0
    batch.hidden[changed] = torch.inf
    batch.hidden[0] = torch.nan
    batch.upstream[changed] = 1e30
    assert are_equal(picked(batch.logprobs(rows), rows[~changed]), picked(before, rows[~changed]))


def layouts(hidden: Tensor) -> Iterator[tuple[str, Tensor]]:
    rows, width = hidden.shape
    yield "transposed", hidden.t().contiguous().t()
    wider = hidden.new_full((rows, 2 * width + 1), math.nan)
    wider[:, 1::2] = hidden
    yield "strided", wider[:, 1::2]
    shifted = hidden.new_empty(rows * width + 1)[1:].view(rows, width)
    yield "misaligned", shifted.copy_(hidden)
    yield "expanded", hidden[:1].expand(rows, width)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_hidden_states_does_not_matter(backend: str) -> None:
    batch, rows = Batch((99, 35), 10, "float32", backend), torch.arange(10)
    expected = batch.logprobs(rows)
    for name, hidden in layouts(batch.hidden):
        got, among = batch.logprobs(rows, hidden), rows[:1] if name == "expanded" else rows
        assert are_equal(picked(got, among), picked(expected, among)), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_mask", [False, True])
def test_positions_leave_rows_as_they_are(backend: str, as_mask: bool) -> None:
    batch, every = Batch((99, 35), 20, "float32", backend), torch.arange(20)
    rows = torch.tensor([3, 11, 12, 19])
    whole = batch.logprobs(every)
    leaf = batch.hidden.clone().requires_grad_()
    positions = torch.zeros(20, dtype=torch.bool, device=leaf.device).index_fill(0, rows.to(leaf.device), True)
    kwargs: dict[str, Any] = {"bias": batch.bias, "softcap": 30.0, "temperature": batch.temperature, "backend": backend}
    kwargs |= {"positions": positions if as_mask else rows.to(leaf.device), "return_entropy": True, "invariant": True}
    logprobs, entropy = gk.linear_logprobs(leaf, batch.weight, batch.targets, **kwargs)
    assert entropy is not None
    if as_mask:
        logprobs, entropy = logprobs[rows], entropy[rows]
    ((logprobs + 0.1 * entropy) * batch.upstream[rows]).sum().backward()
    assert leaf.grad is not None
    assert are_equal((logprobs, entropy, leaf.grad[rows]), picked(whole, rows))


@needs_cpu_kernels
@pytest.mark.parametrize("count", [1, 2, 17, 200])
def test_rows_over_a_support(count: int) -> None:
    batch, random = Batch((99, 35), 300, "float32", "cpu"), torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 40, (300,), generator=random)
    kept = [
        torch.cat([target[None], (target + 1 + torch.randperm(98, generator=random)[:size]) % 99])
        for target, size in zip(batch.targets, sizes, strict=True)
    ]

    def run(rows: Tensor) -> Results:
        ids = [kept[int(row)] for row in rows]
        bounds = torch.tensor([0, *(len(each) for each in ids)]).cumsum(0)
        return batch.logprobs(rows, support=(torch.cat(ids), bounds))

    rows = torch.arange(299, 299 - count, -1)
    assert are_equal(run(rows), picked(run(torch.arange(300)), rows))


# On a GPU, by construction


@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_launches_do_not_depend_on_the_number_of_rows(
    backend: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[Any, ...]] = set()
    options: set[tuple[Any, ...]] = set()
    multiply = chunks.multiply

    def recorded(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        shapes.add(tuple((x.dtype, x.shape, x.stride(), x.data_ptr() % 64) for x in (a, b, out)))
        multiply(a, b, out, add)

    monkeypatch.setattr(chunks, "multiply", recorded)
    monkeypatch.setattr(invariant, "_GPU_MOST", 16)
    monkeypatch.setattr(invariant, "_tried", {})
    if backend == "triton":
        kernels = pytest.importorskip("grpo_kernels.ops.token_logprobs.triton")
        launch_options = kernels._launch_options

        def recorded_options(logits: Tensor, *scaling: Any) -> Any:
            arguments, constants = launch_options(logits, *scaling)
            columns, _, outer_stride, inner_stride, *others = arguments
            options.add((columns, inner_stride, *others, *constants.items()))
            assert outer_stride % 16 == 0
            return arguments, constants

        monkeypatch.setattr(kernels, "_launch_options", recorded_options)
    seen = []
    for rows in (1, 2, 19, 33):
        shapes.clear()
        options.clear()
        batch = Batch((99, 35), rows, dtype, backend)
        batch.logprobs(torch.arange(rows))
        seen.append((frozenset(shapes), frozenset(options)))
    assert len(set(seen)) == 1 and len(seen[0][0]) == 2
    assert {each[0][1][0] for each in seen[0][0]} == {16}


@pytest.mark.parametrize(
    ("columns", "rows"), [(1, 1024), (151_936, 1024), (2**18, 1024), (2**18 + 1, 512), (2**21, 128), (2**24, 128)]
)
def test_rows_of_a_block_on_a_gpu(columns: int, rows: int) -> None:
    assert invariant.sizes_of_blocks(columns, on_cpu=False) == (rows,)
    assert invariant.whole_blocks(rows + 1, columns, on_cpu=False) == 2 * rows
    sizes = {invariant.rows_within(count, columns, on_cpu=False) for count in (1, rows, 2 * rows - 1)}
    assert sizes == {rows} and invariant.rows_within(2 * rows, columns, on_cpu=False) == 2 * rows


# Products that depend on places


def blocks_of(multiply: invariant.Multiply, monkeypatch: pytest.MonkeyPatch) -> invariant.Blocks:
    monkeypatch.setattr(invariant, "_tried", {})
    weight = torch.randn(33, 20, generator=torch.Generator().manual_seed(0))
    tile = invariant.aligned(weight, 256, 33, torch.float32)
    return invariant.Blocks(multiply, weight, tile, torch.float32, on_cpu=True)


@pytest.mark.parametrize("direction", ["logits", "hidden"])
def test_sizes_that_treat_places_differently_are_not_used(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"logits": 33, "hidden": 20}[direction]

    def last_rows_of_64_differ(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)
        if out.shape == (64, columns):
            out[-1, 0] = torch.nextafter(out[-1, 0], out.new_tensor(torch.inf))

    def sizes_of_32_differ(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)
        if out.shape == (32, columns):
            out.copy_(torch.nextafter(out, out.new_tensor(torch.inf)))

    assert blocks_of(torch_mm, monkeypatch).sizes == (256, 128, 64, 32, 16)
    assert blocks_of(last_rows_of_64_differ, monkeypatch).sizes == (256, 128, 32, 16)
    blocks = blocks_of(sizes_of_32_differ, monkeypatch)
    assert blocks.sizes == (256, 128, 64, 16)
    assert [*blocks.parts(273)] == [(0, 256, 256), (256, 17, 64)]


def torch_mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def test_rows_are_multiplied_one_by_one_where_no_size_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def places_differ(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)
        out[1:] = torch.nextafter(out[1:], out.new_tensor(torch.inf))

    with pytest.warns(RuntimeWarning, match=r"equal rows have different bits in products .* \[33, 20\]"):
        blocks = blocks_of(places_differ, monkeypatch)
    assert blocks.sizes == (1,)
    hidden = torch.randn(3, 20)
    logits = invariant.aligned(hidden, 128, 33, torch.float32)
    blocks.to_logits(hidden, logits)
    assert torch.equal(logits[:3], torch.cat([row[None] @ blocks.weight.t() for row in hidden]))


def test_a_weight_of_zeros_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product with it has the same bits, which tells nothing about its next values."""
    monkeypatch.setattr(invariant, "_tried", {})
    weight = torch.zeros(33, 20)
    tile = invariant.aligned(weight, 256, 33, torch.float32)
    invariant.Blocks(torch_mm, weight, tile, torch.float32, on_cpu=True)
    assert not invariant._tried
    weight.normal_()
    invariant.Blocks(torch_mm, weight, tile, torch.float32, on_cpu=True)
    assert [*invariant._tried.values()] == [(256, 128, 64, 32, 16)]


def test_trying_a_shape_leaves_the_random_numbers_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    blocks_of(torch_mm, monkeypatch)
    assert torch.equal(torch.rand(3), expected)


# The option of the process, and refusals


def test_the_option_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_enabled", False)
    assert not invariance._enabled
    with gk.use_invariant():
        assert invariance.resolve("op", None) is True and invariance.resolve("op", False) is False
        with gk.use_invariant(False):
            assert invariance.resolve("op", None) is False and invariance.resolve("op", True) is True
        assert invariance.resolve("op", None) is True
    assert invariance.resolve("op", None) is False
    gk.use_invariant()
    assert invariance.resolve("op", None) is True
    gk.use_invariant(False)
    assert invariance.resolve("op", None) is False


@needs_cpu_kernels
def test_calls_follow_the_option_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = chunks.Products.__init__

    def recorded(self: chunks.Products, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        seen.append(self.invariant)

    monkeypatch.setattr(chunks.Products, "__init__", recorded)
    batch = Batch((9, 5), 4, "float32", "cpu")
    leaf = batch.hidden[None].detach().requires_grad_()
    for value in (True, False):
        with gk.use_invariant(value):
            gk.linear_logprobs(batch.hidden, batch.weight, batch.targets)
            for memory in ("fast", "low"):
                arguments = (leaf, batch.weight, batch.targets[None], None, torch.ones(1))
                gk.linear_policy_loss(*arguments, memory=memory).loss.backward()
    assert seen == [True] * 4 + [False] * 4


def test_what_cannot_be_invariant_is_refused() -> None:
    hidden, weight, targets = torch.randn(1, 4, 5), torch.randn(9, 5), torch.zeros(1, 4, dtype=torch.long)
    loss = (hidden, weight, targets, None, torch.ones(1))
    reference: dict[str, Any] = {"backend": "reference", "invariant": True}
    rule = "linear_logprobs: backend 'reference' cannot run here"
    assert_raises(RuntimeError, rule, ["number"], lambda: gk.linear_logprobs(hidden, weight, targets, **reference))
    rule = "linear_policy_loss: backend 'reference' cannot run here"
    assert_raises(RuntimeError, rule, ["number"], lambda: gk.linear_policy_loss(*loss, **reference))
    split: dict[str, Any] = {"vocab_start": 0, "invariant": True}
    rule = "invariant must be False with vocab_start, got True"
    with pytest.raises(ValueError, match=f"linear_logprobs: {rule}"):
        gk.linear_logprobs(hidden, weight, targets, **split)
    with pytest.raises(ValueError, match=f"linear_policy_loss: {rule}"):
        gk.linear_policy_loss(*loss, **split)
    pair = torch.randn(2, 5), torch.randn(9, 2), 1.0
    for name, value in (("lora", pair), ("term_index", torch.arange(4)[None])):
        with pytest.raises(ValueError, match=f"linear_logprobs: invariant must be False with {name}, got True"):
            gk.linear_logprobs(hidden, weight, targets, invariant=True, **{name: value})  # type: ignore[arg-type]
    for config in ({"loss": "gvpo"}, {"top_entropy_quantile": 0.5}, {"loss": "clip_cov"}, {"future_kl_half_life": 3.0}):
        with pytest.raises(ValueError, match="linear_policy_loss: invariant must be False where terms depend on other"):
            gk.linear_policy_loss(*loss, config=gk.LossConfig(**config), invariant=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="linear_logprobs: invariant must be True or False, got int 1"):
        gk.linear_logprobs(hidden, weight, targets, invariant=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use_invariant: enabled must be True or False, got str 'on'"):
        gk.use_invariant("on")  # type: ignore[arg-type]
    ids = torch.zeros(1, 4, 1, dtype=torch.long)
    with gk.use_invariant(), pytest.raises(RuntimeError, match="linear_distillation_loss: use_invariant must be off"):
        gk.linear_distillation_loss(hidden, weight, ids, -torch.ones(1, 4, 1))


def test_no_backend_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_kernels.backends.cpu_error", "not built")
    rule = "linear_logprobs: no backend takes torch.float32 tensors on cpu; reference: its products"
    arguments = torch.randn(4, 5), torch.randn(9, 5), torch.zeros(4, dtype=torch.long)
    assert_raises(RuntimeError, rule, [], lambda: gk.linear_logprobs(*arguments, invariant=True))
