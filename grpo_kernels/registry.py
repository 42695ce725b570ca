"""Registers torch ops whose arguments are the fields of a dataclass, the same way for every op.

An op has one name, and torch chooses its kernel by the device of the tensors. The ops exist so that torch.compile takes
a kernel as a whole. They have no gradient of their own: an autograd function calls the op in its forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import backends
from grpo_kernels.backends import Supports as Supports  # also loads the compiled kernels
from grpo_kernels.backends import cpu_library

# The name of the package, which differs in a copy loaded from the kernels hub; so does that of its ops.
NAMESPACE = __name__.partition(".")[0]
ops = getattr(torch.ops, NAMESPACE)
HAS_CPU_LIBRARY = cpu_library is not None
# Whether the CPU has matrix units that multiply bfloat16 and add in float32.
HAS_HALF_PRODUCTS = cpu_library is not None and cpu_library.build_facts()["half_products_here"] != "none"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_GPUS = tuple(device.upper() for device in backends.COPIED)
_Function = Callable[..., Any]

all_ops: dict[str, TorchOp | ComposedOp] = {}  # by name

# Arguments

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    bool: "bool",
    int: "int",
    float: "float",
    list[bool]: "bool[]",
    list[int]: "int[]",
    list[float]: "float[]",
}


class Layout:
    """The fields of a dataclass as the flat arguments of a torch op.

    A field that is a dataclass itself stands for its fields, whose names it precedes. If it may be None, all of them
    may, and it is there if any is.
    """

    def __init__(self, kind: type, optional: bool = False) -> None:
        self.kind, self.optional = kind, optional
        self.fields: list[tuple[str, str | Layout]] = []
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint, may_be_none = _without_none(hints[field.name])
            if dataclasses.is_dataclass(hint):
                self.fields.append((field.name, Layout(cast(type, hint), may_be_none or optional)))
            else:
                question = "?" if may_be_none or optional else ""
                self.fields.append((field.name, _SCHEMA_TYPES[hint] + question))
        parts = [kind for _, kind in self.fields if isinstance(kind, Layout)]
        self.size = len(self._paths())
        self._may_lack_parts: bool = any(part.optional or part._may_lack_parts for part in parts)
        self._read = operator.attrgetter(*self._paths())

    def schema(self, mutated: Sequence[str] = (), prefix: str = "") -> str:
        parts = []
        for name, kind in self.fields:
            if isinstance(kind, Layout):
                parts.append(kind.schema((), f"{prefix}{name}_"))
            elif name in mutated:
                parts.append(f"Tensor({chr(97 + mutated.index(name))}!){kind.removeprefix('Tensor')} {name}")
            else:
                parts.append(f"{kind} {prefix}{name}")
        return ", ".join(parts)

    def _paths(self) -> list[str]:
        """The fields as attributes of an object all of whose parts are there."""
        paths = []
        for name, kind in self.fields:
            paths += [f"{name}.{path}" for path in kind._paths()] if isinstance(kind, Layout) else [name]
        return paths

    def flat(self, inputs: Any) -> Sequence[Any]:
        if self._may_lack_parts or torch.compiler.is_compiling():
            return self._flat(inputs)
        values: Sequence[Any] = self._read(inputs)  # faster, but not traceable
        return values

    def _flat(self, inputs: Any) -> list[Any]:
        if inputs is None:
            return [None] * self.size
        values: list[Any] = []
        for name, kind in self.fields:
            value = getattr(inputs, name)
            if isinstance(kind, Layout):
                values += kind._flat(value)
            else:
                values.append(value)
        return values

    def build(self, values: Iterator[Any]) -> Any:
        if self.optional:
            own = [next(values) for _ in range(self.size)]
            if all(value is None for value in own):
                return None
            values = iter(own)
        fields = [kind.build(values) if isinstance(kind, Layout) else next(values) for _, kind in self.fields]
        return self.kind(*fields)


def save(ctx: Any, layout: Layout, inputs: Any, *others: Tensor | None) -> None:
    """Saves the inputs of a forward pass, and other tensors, for its backward."""
    values = layout.flat(inputs)
    ctx.save_for_backward(*others, *(value if isinstance(value, Tensor) else None for value in values))
    ctx.settings = [None if isinstance(value, Tensor) else value for value in values]


def saved(ctx: Any, layout: Layout) -> tuple[Any, list[Tensor | None]]:
    """The inputs, without a gradient, and the other tensors."""
    tensors = ctx.saved_tensors  # once: torch.utils.checkpoint allows no second look
    count = len(tensors) - len(ctx.settings)
    values = (
        setting if tensor is None else tensor.detach()
        for tensor, setting in zip(tensors[count:], ctx.settings, strict=True)
    )
    return layout.build(values), list(tensors[:count])


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type of a field, and whether the field may be None."""
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    others = [arm for arm in arms if arm is not type(None)]
    return others[0], len(others) < len(arms)


# Ops


class TorchOp:
    """A torch op, and its implementations.

    Calling it with the name of an implementation and the inputs returns the op's results. The reference is called as it
    is, or as an op of its own, <name>_reference, where torch.compile cannot trace it.

    Args:
        name: name of the op; its CPU kernel is compiled
        inputs: dataclass of the arguments
        results: schema of the results
        supports: dtypes by implementation
        fake: function of the inputs, which gives results without values
        cuda: function of the op's flat arguments that a GPU runs
        triton: such a function, or the name of one in triton.py
        reference: function of the inputs
        opaque_reference: whether torch.compile must take the reference as a whole, because it reads values
        on_host: implementations that also take tensors on a GPU, in copies, for an op without a gradient: "cpu", where
            the CUDA library is missing, and "reference" if it waits for every value
        mutated: names of the tensors that the op overwrites
        folder: package of the op, for triton.py
    """

    def __init__(
        self,
        name: str,
        inputs: type,
        results: str,
        supports: Supports,
        fake: Callable[[Any], Any],
        *,
        cuda: _Function | None = None,
        triton: str | _Function | None = None,
        reference: Callable[[Any], Any] | None = None,
        opaque_reference: bool = False,
        on_host: tuple[str, ...] = (),
        mutated: tuple[str, ...] = (),
        folder: str = "",
    ) -> None:
        self.name, self.supports = name, supports
        self.layout = Layout(inputs)
        self._schema = f"({self.layout.schema(mutated)}) -> {results}"
        self._fake, self._reference = fake, reference
        self._on_gpu = {} if cuda is None else {"cuda": cuda}
        if triton is not None:
            self._on_gpu["triton"] = lazy(triton, folder) if isinstance(triton, str) else triton
        self._calls: dict[str, _Function] = {}
        self._on_host: _Function | None = None
        self._stand_ins: set[str] = set()
        kernel = self._define(name)
        for implementation in supports:
            if implementation != "reference":
                self._calls[implementation] = kernel
        for implementation, run in self._on_gpu.items():
            if implementation == "triton" and backends.interpreting():
                self.stand_in(implementation)
            else:
                for device in _GPUS:
                    _library.impl(name, run, device)
        if opaque_reference:
            self._calls["reference"] = self._define(f"{name}_reference", waits="reference" in on_host)
            self._register_copied("reference", self._call_reference, on_host)
        if "cpu" in on_host:
            backends.through_host.add(name)
            self._on_host = self._define(f"{name}_on_host", waits=True)
            self._register_copied("on_host", kernel, on_host)
        all_ops[name] = self

    def __call__(self, implementation: str, inputs: Any) -> Any:
        call = self._calls.get(implementation)
        if call is None:
            assert self._reference is not None
            return self._reference(inputs)
        arguments = self.layout.flat(inputs)
        if implementation == "cpu" and self._on_host is not None and not arguments[0].is_cpu:
            call = self._on_host
        return call(*arguments)

    def runs(self, implementation: str, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the implementation takes such tensors here."""
        return backends.refusal(implementation, device.type, dtype, self.supports, device.index) is None

    def stand_in(self, implementation: str) -> None:
        """Makes a GPU's kernel an op of its own, for tensors on any device."""
        if implementation in self._on_gpu and implementation not in self._stand_ins:
            self._stand_ins.add(implementation)
            name = f"{self.name}_{implementation}"
            self._calls[implementation] = self._define(name)
            _library.impl(name, self._on_gpu[implementation], "CompositeExplicitAutograd")

    def _define(self, name: str, waits: bool = False) -> _Function:
        # parts of a graph that torch.compile captures must not wait
        more = (torch.Tag.cudagraph_unsafe,) if waits else ()
        _library.define(name + self._schema, tags=(torch.Tag.pt2_compliant_tag, *more))
        torch.library.register_fake(
            f"{NAMESPACE}::{name}", lambda *values: self._fake(self.layout.build(iter(values))), lib=_library
        )
        return overload(name)

    def _register_copied(self, suffix: str, run: _Function, on_host: tuple[str, ...]) -> None:
        """Registers <name>_<suffix>, on GPUs with copies if it must run on the host."""
        name = f"{self.name}_{suffix}"
        if suffix == "reference" and "reference" not in on_host:
            _library.impl(name, run, "CompositeExplicitAutograd")
            return
        if suffix == "reference":
            _library.impl(name, run, "CPU")
        for device in _GPUS:
            _library.impl(name, functools.partial(_through_host, self.name, suffix, run), device)

    def _call_reference(self, *values: Any) -> Any:
        assert self._reference is not None
        return self._reference(self.layout.build(iter(values)))


class ComposedOp:
    """An op that calls other ops. torch.compile takes it as a whole; others call its function as it is.

    Args:
        run: function of the name of an implementation and the inputs
        others: as in TorchOp
    """

    def __init__(
        self,
        name: str,
        inputs: type,
        results: str,
        supports: Supports,
        fake: Callable[[Any], Any],
        run: Callable[..., Any],
    ) -> None:
        self.layout, self.supports, self._run = Layout(inputs), supports, run
        all_ops[name] = self
        self._calls: dict[str, _Function] = {}
        for implementation in supports:
            op = f"{name}_{implementation}"
            _library.define(f"{op}({self.layout.schema()}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
            named = functools.partial(run, implementation)
            _library.impl(op, functools.partial(self._of_flat, named), "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{op}", functools.partial(self._of_flat, fake), lib=_library)
            self._calls[implementation] = overload(op)

    def __call__(self, implementation: str, inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._calls[implementation](*self.layout.flat(inputs))
        return self._run(implementation, inputs)

    def _of_flat(self, function: Callable[[Any], Any], *values: Any) -> Any:
        return function(self.layout.build(iter(values)))


def enable_emulated_cuda() -> None:
    """Lets the CUDA kernels take CPU tensors on request. For tests that compiled the kernels for the host."""
    backends.DEVICES["cuda"] = {"cpu"}
    backends._emulated.add("cuda")
    for op in all_ops.values():
        if isinstance(op, TorchOp):
            op.stand_in("cuda")


def overload(name: str) -> _Function:
    """The torch op itself."""
    return cast(_Function, getattr(ops, name).default)


def define_compiled(schema: str, fake: _Function | None = None) -> None:
    """Defines an op that only compiled code implements and only our own Python calls.

    One that Python also calls outside of another op has results without values, by `fake`.
    """
    _library.define(schema, tags=() if fake is None else (torch.Tag.pt2_compliant_tag,))
    if fake is not None:
        torch.library.register_fake(f"{NAMESPACE}::{schema.partition('(')[0]}", fake, lib=_library)


def lazy(function: str, folder: str) -> _Function:
    """Imports triton.py at the first call, because importing grpo_kernels must not import triton."""
    implementation: _Function | None = None

    def call(*args: Any) -> Any:
        nonlocal implementation
        if implementation is None:
            implementation = getattr(importlib.import_module(f"{folder}.triton"), function)
        with device_guard(args):
            return implementation(*args)

    return call


def device_guard(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Makes the GPU of the arguments the current device for Triton's launches; compiled ops do so themselves."""
    device = next(value.device for value in args if isinstance(value, Tensor))
    if device.type == "cpu":  # interpreted
        return contextlib.nullcontext()
    guard: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return guard


# Gradients


def upstream(gradient: Tensor | None) -> Tensor | None:
    """An upstream gradient as kernels read it."""
    return None if gradient is None else gradient.detach().contiguous()


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, op: str) -> Tensor:
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.op}: a second derivative is not implemented; use create_graph=False")


def first_derivative(op: str, gradient: Tensor) -> Tensor:
    """A gradient that a backward returns. With create_graph=True its own gradient is refused, not left out."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradient
    return cast(Tensor, _Undifferentiable.apply(gradient.detach().requires_grad_(), op))


# Copies


def _through_host(op: str, suffix: str, run: _Function, *args: Any) -> tuple[Tensor, ...]:
    """Runs the op on the host: copies its tensors there, together, waits for them, and copies the results back."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    device = tensors[0].device
    _refuse_capture(op, suffix, device)
    copies = iter(_copied(tensors, torch.device("cpu")))
    results = run(*(next(copies) if isinstance(value, Tensor) else value for value in args))
    # results of a torch op must not share memory
    return tuple(result.clone() for result in _copied(results, device))


def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors as one array of bytes, in which the widest elements come first, so that all are aligned."""
    by_width = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    # a contiguous tensor with one element may have any stride, which a view in another dtype refuses
    flat = [tensors[index].contiguous().as_strided((tensors[index].numel(),), (1,)) for index in by_width]
    data = torch.cat([values.view(torch.uint8) for values in flat]).to(device)
    pieces = data.split([values.nbytes for values in flat])
    copies = {
        index: piece.view(tensors[index].dtype).view(tensors[index].shape)
        for index, piece in zip(by_width, pieces, strict=True)
    }
    return [copies[index] for index in range(len(tensors))]


def _refuse_capture(op: str, suffix: str, device: torch.device) -> None:
    module = torch.get_device_module(device)
    with module.device(device):
        if not module.is_current_stream_capturing():
            return
    reason = backends.missing("cuda", device.index)
    what = "the reference" if suffix == "reference" else "the CPU kernel"
    raise RuntimeError(
        f"{op}: {what} must not be captured, as it waits for the GPU; call it before the capture, or use the CUDA "
        "kernel" + (f", which cannot run here: {reason}" if reason else "")
    )
