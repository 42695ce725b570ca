"""Promises of all ops, for every op and every kernel.

Faults that this is for: sums whose order changes from call to call (atomics, threads); a masked slot that is read, or
whose gradient is not 0; a stride that is taken for 1; an input that is overwritten, or a result that shares its memory;
a row whose neighbours change its result; a denominator or a tail that is wrong once a batch is packed, permuted, padded
or split into micro-batches; a wrong tensor that is taken; a dtype that a kernel lacks, or a half that is rounded twice;
a gradient that is lost without a word, not scaled, handed out twice, or another one where other inputs are frozen; a
batch without rows or tokens; a torch op whose schema, fake or aliasing is wrong; a saved tensor that the backward reads
twice; a graph break.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import grpo_kernels as gk
from grpo_kernels import registry
from tests.harness import INDUCTOR, assert_within_budget, cpu_threads, device_of, runnable_backends
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, Op, Results, assert_same_bits, placed, run
from tests.rounding import Moves
from tests.strategies import laid_out

pytestmark = pytest.mark.pairs  # else few of the cases of Triton would run
NAN, INF = float("nan"), float("inf")
EACH = [(name, backend) for name, op in OPS.items() for backend in runnable_backends(op.supports, op.working)]
KERNELS = [(name, backend) for name, backend in EACH if backend != "reference"]
on_each = pytest.mark.parametrize(("name", "backend"), EACH)
on_kernels = pytest.mark.parametrize(("name", "backend"), KERNELS)


def drawn(name: str) -> tuple[Op, Inputs]:
    torch.manual_seed(0)
    return OPS[name], OPS[name].draw()


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def assert_same(op: Op, results: Results, inputs: Inputs, backend: str) -> None:
    """Compares with the results of these inputs: bit for bit, or within the budget."""
    if op.adds_in_any_order:
        assert_within_budgets(op, results, inputs)
    else:
        assert_same_bits(results, run(op, inputs, backend, op.working))


def assert_within_budgets(op: Op, results: Results, inputs: Inputs) -> None:
    """Compares with float64, of the same inputs."""
    inputs = tree_map(lambda value: value.to(op.working).double() if is_number(value) else value, inputs)
    gold, working = (run(op, inputs, "reference", dtype) for dtype in (torch.float64, op.working))
    moves = Moves(lambda: run(op, inputs, "reference", torch.float64), gold)
    for name, result in results.items():
        if result.is_floating_point():  # also float64 sums have terms of the working dtype
            narrow = result.to(op.working), working[name].to(op.working)
            assert_within_budget(*narrow, gold[name], name, moves=moves)
        else:
            torch.testing.assert_close(result, working[name], rtol=0, atol=0, msg=lambda text, of=name: f"{of}: {text}")


@pytest.fixture
def unordered() -> Iterator[None]:
    """Ends torch's deterministic mode, which conftest.py sets and in which torch chooses slower sums."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


@on_each
def test_results_repeat_bit_for_bit(name: str, backend: str, unordered: None) -> None:
    op, inputs = drawn(name)
    first = run(op, inputs, backend, op.working)
    for _ in range(2):
        assert_same_bits(run(op, inputs, backend, op.working), first)


@on_each
def test_the_default_device_changes_nothing(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    expected = run(op, inputs, backend, op.working)
    with torch.device("meta"):
        assert_same_bits(run(op, inputs, backend, op.working), expected)


def test_the_default_device_changes_no_measurement() -> None:
    """Neither metrics of segments nor the search for NaN among packed log-probs, which only one at the end reaches."""
    tokens, bounds = -torch.rand(2, 6), torch.tensor([0, 4, 5])
    segments = gk.endpoint_segments(tokens, tokens, tokens, values=tokens)
    old = tokens[0].index_fill(0, torch.tensor([5]), NAN)  # of no row
    rows = {"cu_seqlens": bounds, "mask": torch.arange(6) < 5}
    expected = gk.segment_metrics(segments), gk.sampling_correction(old, tokens[1], **rows)
    with torch.device("meta"):
        assert gk.segment_metrics(segments) == expected[0]
        assert torch.equal(gk.sampling_correction(old, tokens[1], **rows).weights, expected[1].weights)


@functools.cache
def threads_change_products() -> bool:
    """Whether torch's own products have other bits with more threads, as MKL's have on some CPUs of AMD."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 6, generator=generator) for rows in (20, 37))
    products = []
    for threads in (1, 2, 5):
        with cpu_threads(threads):
            products.append(left @ right.T)
    return not all(torch.equal(products[0], product) for product in products)


@pytest.mark.parametrize("name", [name for name, backend in EACH if backend == "cpu"])
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    op, inputs = drawn(name)
    with cpu_threads(1):
        expected = run(op, inputs, "cpu", op.working)
    for threads in (2, 5):
        with cpu_threads(threads):
            results = run(op, inputs, "cpu", op.working)
        if op.multiplies and threads_change_products():
            assert_within_budgets(op, results, inputs)
        else:
            assert_same_bits(results, expected)


@pytest.mark.parametrize("filler", [NAN, INF, -3e38], ids=str)
@on_each
def test_ignored_slots_may_hold_anything(name: str, backend: str, filler: float) -> None:
    op, inputs = drawn(name)
    ignored = op.ignored(inputs)
    if not ignored:
        pytest.skip("no slot of this op is ignored")
    expected = run(op, inputs, backend, op.working)
    filled = dict(inputs)
    for key, slots in ignored.items():
        value = inputs[key]
        slots = slots.view(slots.shape + (1,) * (value.dim() - slots.dim()))
        anything = filler if value.is_floating_point() else torch.iinfo(value.dtype).max
        filled[key] = torch.where(slots, torch.full((), anything, dtype=value.dtype), value)
        if key in op.leaves:
            assert slots.any() and not expected[f"d_{key}"][slots.expand_as(value)].any(), f"gradient of {key}"
    assert_same_bits(run(op, filled, backend, op.working), expected)


@pytest.mark.parametrize("layout", ["every_other", "column", "offset"])
@on_each
def test_memory_layouts_change_nothing(name: str, backend: str, layout: str) -> None:
    op, inputs = drawn(name)

    def strided(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(strided, value))
        return laid_out(value, layout) if isinstance(value, Tensor) and value.dim() > 0 else value

    placed = {key: strided(value) for key, value in inputs.items()}
    assert_same(op, run(op, placed, backend, op.working), inputs, backend)


@on_each
def test_inputs_are_left_alone(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
    before = {key: value.clone() for key, value in tensors.items()}
    results = run(op, inputs, backend, torch.float64 if torch.float64 in op.supports[backend] else op.working)
    assert_same_bits(tensors, before)
    memory = {value.untyped_storage().data_ptr() for value in tensors.values() if value.numel()}
    shared = [key for key, value in results.items() if value.untyped_storage().data_ptr() in memory]
    assert not shared


def function_of(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(gk, name.partition(" ")[0])
    if not callable(function) or isinstance(function, type):
        pytest.skip(f"{name} is no function")
    return function


def tensor_arguments(name: str) -> list[str]:
    """Names of the inputs that are arguments of the function itself."""
    function = function_of(name)
    op, inputs = drawn(name)
    with mock.patch.object(gk, function.__name__, wraps=function) as called:
        op.call(inputs, None)
    given = inspect.signature(function).bind(*called.call_args.args, **called.call_args.kwargs).arguments
    return [key for key, value in given.items() if isinstance(value, Tensor) and key in inputs]


def wrong_dtypes(value: Tensor) -> list[torch.dtype]:
    return [torch.complex64, *([torch.bool] if value.is_floating_point() else [])]


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_tensor_is_refused_by_its_name(name: str) -> None:
    """A value that is no tensor, of a dtype that no argument takes, of another shape, or on another device."""
    arguments = tensor_arguments(name)
    op, inputs = drawn(name)
    for key in arguments:
        wrong: list[tuple[type[Exception], str, Any]] = [
            (TypeError, "must be", {}),
            *((TypeError, "must be of dtype", inputs[key].to(dtype)) for dtype in wrong_dtypes(inputs[key])),
            (ValueError, "must", inputs[key][None, None] if inputs[key].numel() > 1 else inputs[key].repeat(2)),
        ]
        if key != arguments[0]:
            wrong.append((ValueError, "must be on cpu .*, got meta", inputs[key].to("meta")))
        for error, rule, value in wrong:
            other = ".*" if key == arguments[0] and error is ValueError else key  # all others differ from the first
            with pytest.raises(error, match=rf"^\w+: {other} {rule}"):
                op.call(inputs | {key: value}, None)


# Arguments that hold tensors, or are overwritten; tests/test_devices.py and the ops' own tests try each of these.
COMPOUND = {"head", "normalizer", "ref_head", "support", "teacher", "weight_grad"}
FUNCTIONS = {name.partition(" ")[0] for name in OPS} - {"LMHead", "diversity", "variants"}


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_every_tensor_argument_is_tried(function: str) -> None:
    parameters = inspect.signature(getattr(gk, function)).parameters.values()
    expected = {p.name for p in parameters if "Tensor" in str(p.annotation) or "Normalizer" in str(p.annotation)}
    tried = {key for name in OPS if name.partition(" ")[0] == function for key in tensor_arguments(name)}
    assert tried == expected - COMPOUND


WITHOUT_GRADIENT = [name for name, op in OPS.items() if not op.leaves]


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_an_input_that_requires_a_gradient_is_refused_or_has_none(name: str) -> None:
    op, inputs = drawn(name)
    for key, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            leaf = {key: value.clone().requires_grad_()}
            with torch.no_grad():
                assert not any(result.requires_grad for result in op.call(inputs | leaf, None).values()), key
            try:
                results = op.call(inputs | leaf, None)
            except ValueError as error:
                assert re.match(rf"\w+: {key} must not require grad.*{key}.detach\(\)", str(error)), error
            else:
                assert not any(result.requires_grad for result in results.values()), key


def without_rows(inputs: Inputs) -> Inputs:
    rows = len(inputs["cu_seqlens"]) - 1 if "cu_seqlens" in inputs else -1
    count = len(next(iter(inputs.values())))  # of rows, or of tokens in packed ones

    def cut(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) not in (count, rows, rows + 1):
            return value
        return value.new_zeros(1) if key == "cu_seqlens" else value[:0]

    return {key: cut(key, value) for key, value in inputs.items()}


def without_tokens(inputs: Inputs) -> Inputs:
    """Rows of a padded batch [B, T] with T = 0; of a packed one, with masked tokens after the last row."""
    if "cu_seqlens" in inputs:
        return inputs | {name: torch.zeros_like(inputs[name]) for name in ("cu_seqlens", "mask")}
    shape = next(iter(inputs.values())).shape[:2]
    return {key: value[:, :0] if getattr(value, "shape", ())[:2] == shape else value for key, value in inputs.items()}


# others have several numbers of rows, or need one
EMPTY = [(name, backend) for name, backend in EACH if not re.search("shared|support|at positions|silhouette", name)]


@pytest.mark.parametrize(("name", "backend"), EMPTY)
def test_no_rows_and_no_tokens(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    whole = run(op, inputs, "reference", op.working)
    is_of_tokens = "mask" in inputs
    for empty in [without_rows, without_tokens][: 1 + is_of_tokens]:
        results = run(op, empty(inputs), backend, op.working)
        assert_same_bits(results, run(op, empty(inputs), "reference", op.working))
        assert results.get("loss", 0) == 0
        for key, value in results.items():
            assert value.dtype == whole[key].dtype and value.dim() == whole[key].dim(), key


OF_FLOAT32 = ("policy_loss", "token_advantages", "sampling_correction", "group_advantages", "endpoint_segments")
NARROW = [(name, backend) for name, backend in EACH if name.startswith(OF_FLOAT32) and "shared" not in name]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "backend"), NARROW)
def test_halves_are_computed_in_float32(name: str, backend: str, half: torch.dtype) -> None:
    """By ops whose kernels take none: results are those of float32, and gradients are rounded once."""
    op, inputs = drawn(name)
    numbers = {key: value for key, value in inputs.items() if getattr(value, "dtype", None) == torch.float64}
    rounded = inputs | {key: value.to(half).double() for key, value in numbers.items()}
    got, want = (run(op, rounded, backend, dtype) for dtype in (half, torch.float32))
    for key, value in want.items():
        if key.startswith("d_"):
            want[key] = value.to(half)
    assert_same_bits(got, want)


REWRITTEN = [(name, backend, rewrite) for name, backend in EACH for rewrite in OPS[name].rewrites]


@pytest.mark.parametrize(("name", "backend", "rewrite"), REWRITTEN)
def test_a_batch_written_in_another_way_has_the_same_results(name: str, backend: str, rewrite: str) -> None:
    op, inputs = drawn(name)
    same = op.rewrites[rewrite](inputs)
    results = same.combine([run(op, part, backend, op.working) for part in same.inputs])
    assert results
    if same.is_exact:
        expected = run(op, inputs, backend, op.working)
        assert_same_bits(results, {key: expected[key] for key in results})
    assert_within_budgets(op, results, inputs)


# Gradients

WITH_GRADIENT = [(name, backend) for name, backend in EACH if OPS[name].leaves]
# On a kernel, a second backward of the losses that compute their gradient with them is an error.
ONCE = ("linear_policy_loss", "linear_distillation_loss")
AGAIN = ("in low memory", "over a support")  # what is computed again, or by several ops


@pytest.mark.parametrize(("name", "backend"), WITH_GRADIENT)
def test_a_gradient_is_scaled_and_handed_out_once_or_as_often_as_asked(name: str, backend: str) -> None:
    """Powers of two scale every term without a rounding."""
    op, inputs = drawn(name)
    expected = run(op, inputs, backend, op.working)
    given = placed(op, inputs, op.working, lambda value: value.to(device_of(backend)))
    loss = op.call(given, backend)["loss"]
    (-2 * loss).backward(retain_graph=True)
    factor = -2.0
    if backend != "reference" and name.startswith(ONCE) and not name.endswith(AGAIN):
        with pytest.raises(RuntimeError, match=rf"^{name.partition(' ')[0]}: backward must run once.*, got a second"):
            loss.backward()
    else:
        loss.backward()
        factor = -1.0
    got = {leaf: given[leaf].grad.cpu() for leaf in op.leaves}
    assert_same_bits(got, {leaf: factor * expected[f"d_{leaf}"] for leaf in op.leaves})


@pytest.mark.parametrize(("name", "backend"), [case for case in WITH_GRADIENT if not case[0].startswith(ONCE)])
def test_a_gradient_belongs_to_the_caller(name: str, backend: str) -> None:
    """Who may change it before another backward."""
    op, inputs = drawn(name)
    expected = run(op, inputs, backend, op.working)
    given = placed(op, inputs, op.working, lambda value: value.to(device_of(backend)))
    loss = op.call(given, backend)["loss"]
    loss.backward(retain_graph=True)
    for leaf in op.leaves:
        given[leaf].grad.zero_()
    loss.backward()
    assert_same_bits({leaf: given[leaf].grad.cpu() for leaf in op.leaves}, {k: expected[f"d_{k}"] for k in op.leaves})


@pytest.mark.parametrize(("name", "backend"), [case for case in WITH_GRADIENT if case in KERNELS])
def test_second_derivatives_are_refused(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    given = placed(op, inputs, op.working, lambda value: value.to(device_of(backend)))
    leaf = given[op.leaves[0]]
    (gradient,) = torch.autograd.grad(op.call(given, backend)["loss"], leaf, create_graph=True)
    rule = rf"^{name.partition(' ')[0]}: a second derivative is not implemented"
    if name.startswith(("linear", "LMHead")):  # of several ops, or computed with the loss
        rule = "a second derivative is not implemented|does not require grad"
    with pytest.raises(RuntimeError, match=rule):
        gradient.square().sum().backward()


@pytest.mark.parametrize(("name", "backend"), WITH_GRADIENT)
def test_a_frozen_input_changes_no_other_gradient(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    for leaves in ((), *((leaf,) for leaf in op.leaves if len(op.leaves) > 1)):
        fewer = dataclasses.replace(op, leaves=leaves)
        assert_within_budgets(fewer, run(fewer, inputs, backend, op.working), inputs)
    with torch.no_grad():
        results = op.call(placed(op, inputs, op.working, lambda value: value.to(device_of(backend))), backend)
    assert not any(value.requires_grad for value in results.values())


TAKES_FLOAT64 = [name for name, op in OPS.items() if any(torch.float64 in dtypes for dtypes in op.supports.values())]
LACKING = [
    (name, backend)
    for name, backend in KERNELS
    if name in TAKES_FLOAT64 and torch.float64 not in OPS[name].supports[backend]
]


@pytest.mark.parametrize(("name", "backend"), LACKING)
def test_a_dtype_that_a_kernel_lacks_is_refused(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    with pytest.raises(RuntimeError, match=rf"^\w+: backend '{backend}' cannot run here.*float64"):
        run(op, inputs, backend, torch.float64)


# torch


class Recorder(TorchDispatchMode):
    """Notes the library's torch ops that are called, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == registry.NAMESPACE:
            self.calls.setdefault(func.name(), (func, tuple(map(copied, args))))
        return func(*args, **kwargs or {})


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(copied, value))
    return value.clone() if isinstance(value, Tensor) else value


@on_kernels
def test_opcheck(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    with Recorder() as recorder:
        run(op, inputs, backend, op.working)
    assert recorder.calls
    # results may be NaN, such as the extremes of nothing
    equal = functools.partial(torch.testing.assert_close, equal_nan=True)
    with mock.patch.object(torch.testing, "assert_close", equal):
        for func, args in recorder.calls.values():
            torch.library.opcheck(func, args)


@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, backend in KERNELS if OPS[name].leaves])
def test_gradient_checkpointing_changes_no_bit(name: str, backend: str) -> None:
    """The backward runs the op again, and looks at each saved tensor once."""
    op, inputs = drawn(name)
    again = dataclasses.replace(op, call=functools.partial(checkpoint, op.call, use_reentrant=False))
    assert_same_bits(run(again, inputs, backend, op.working), run(op, inputs, backend, op.working))


FIRST = {name.partition(" ")[0]: name for name in reversed(OPS)}  # description of each function


def is_compiled_by_default(name: str, backend: str) -> bool:
    """One specification of each function, and all kernels of the CPU.

    Implementations are called in the same Python. Graphs of the others take long, and would show no
    more than a value that the host waits for.
    """
    of_cpu = (name, "cpu") in EACH
    return backend == "cpu" or (backend == "reference" and (name in FIRST.values() or not of_cpu))


COMPILED = [
    pytest.param(name, backend, marks=() if is_compiled_by_default(name, backend) else pytest.mark.full)
    for name, backend in EACH
]


@pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_compiles_into_one_graph(name: str, backend: str) -> None:
    op, inputs = drawn(name)
    torch.compiler.reset()
    compiled = dataclasses.replace(op, call=torch.compile(op.call, fullgraph=True, backend=INDUCTOR))
    assert_same(op, run(compiled, inputs, backend, op.working), inputs, backend)
