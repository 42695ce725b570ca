"""Registers ops with torch, the same way for every op.

Each backend has a torch op of its own, <op>_<backend>, with one schema and one fake implementation for all. Compiled
backends are therefore called without a Python layer in between, which for a small op costs more than the work, and
the choice of the backend stays plain Python that torch.compile can trace.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from grpo_kernels import backends
from grpo_kernels.backends import Supports, cpu_library  # also imports the compiled implementations

# The name of the package, which differs in a copy loaded from the kernels hub; so does that of its ops.
NAMESPACE = __name__.partition(".")[0]
ops = getattr(torch.ops, NAMESPACE)
HAS_CPU_LIBRARY = cpu_library is not None
_Function = Callable[..., Any]
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    op: str,
    schema: str,
    supports: Supports,
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    folder: str = "",
    function: str = "forward",
    cuda: _Function | None = None,
    implementation: _Function | None = None,
    on_host: tuple[str, ...] = (),
) -> dict[str, Callable[..., Any]]:
    """Defines <op>_<backend> for every implementation in `supports` and returns the callables by its name.

    Args:
        autograd: (setup_context, backward) as torch.library.register_autograd takes them, both called with the name of
            the implementation before their own arguments; None for an op without a gradient.
        folder, function: the package of the op and the function that implements it in its reference.py and triton.
        cuda: what the CUDA implementation does around a compiled op; None if the compiled op is <op>_cuda itself.
        implementation: a function of the name in `supports` and the arguments, for ops built on other ops.
        on_host: implementations that get copies of tensors on a GPU, for an op without a gradient: "cpu", which is
            chosen where the CUDA library is missing, and "reference" if it reads values.
    """
    callables: dict[str, Callable[..., Any]] = {}
    if "cpu" in on_host:
        backends.through_host.add(op)
    for backend in supports:
        name = f"{op}_{backend}"
        # parts of a graph that torch.compile captures must not wait
        waits = (torch.Tag.cudagraph_unsafe,) if backend in on_host else ()
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *waits))
        for key in [device.upper() for device in backends.COPIED] if waits else []:
            _library.impl(name, functools.partial(_through_host, op, backend), key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        if implementation is not None:
            _library.impl(name, functools.partial(implementation, backend), "CompositeExplicitAutograd")
        elif backend in ("reference", "triton"):
            _library.impl(name, _lazy(f"{folder}.{backend}", function, backend), "CompositeExplicitAutograd")
        elif backend == "cuda" and cuda is not None:
            _library.impl(name, cuda, "CompositeExplicitAutograd")
        if autograd is not None:
            setup_context, backward = (functools.partial(part, backend) for part in autograd)
            torch.library.register_autograd(
                f"{NAMESPACE}::{name}", backward, setup_context=_keywords(setup_context), lib=_library
            )
        callables[backend] = overload(op, backend)
        if autograd is not None:
            callables[backend] = _eager(callables[backend], setup_context, backward)
    return callables


def overload(op: str, backend: str) -> Callable[..., Any]:
    """The torch op itself."""
    return cast(Callable[..., Any], getattr(ops, f"{op}_{backend}").default)


def _eager(op: _Function, setup_context: _Function, backward: _Function) -> _Function:
    """Wraps the op in an autograd function, without the 0.2 ms a call that torch's own registration adds.

    torch.compile gets the op itself, whose gradient is registered.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*args)
            setup_context(ctx, args, output)
            ctx.hides_outputs = True  # from users, who get what an op's own Python makes of them
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    # the rest of Function.apply is for torch.func, which takes the other path
    apply = super(torch.autograd.Function, Gradient).apply

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return op(*args)
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            return apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, op: str) -> torch.Tensor:
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.op}: a second derivative is not implemented; use create_graph=False")


def first_derivative(op: str, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that a backward returns. With create_graph=True its own gradient is refused, not left out."""
    is_first = not torch.is_grad_enabled() or torch.compiler.is_compiling()
    if is_first or torch._C._are_functorch_transforms_active():
        return gradient
    return cast(torch.Tensor, _Undifferentiable.apply(gradient.detach().requires_grad_(), op))


def _through_host(op: str, backend: str, *args: Any) -> tuple[torch.Tensor, ...]:
    """Runs the op on the host: copies its tensors there, together, waits for them, and copies the results back."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    device = tensors[0].device
    _refuse_capture(op, backend, device)
    copies = iter(_copied(tensors, torch.device("cpu")))
    results = overload(op, backend)(*(next(copies) if isinstance(value, torch.Tensor) else value for value in args))
    # results of a torch op must not share memory
    return tuple(result.clone() for result in _copied(results, device))


def _copied(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
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


def _refuse_capture(op: str, backend: str, device: torch.device) -> None:
    module = torch.get_device_module(device)
    with module.device(device):
        if not module.is_current_stream_capturing():
            return
    reason = backends.missing("cuda", device.index)
    what = "the reference" if backend == "reference" else "the CPU kernel"
    raise RuntimeError(
        f"{op}: {what} must not be captured, as it waits for the GPU; call it before the capture, or use the CUDA "
        "kernel" + (f", which cannot run here: {reason}" if reason else "")
    )


def define_compiled(schema: str) -> None:
    """Defines an op that only compiled code implements and only our own Python calls."""
    _library.define(schema)


def _keywords(setup_context: Callable[..., Any]) -> Callable[..., Any]:
    """Restores the parameter names, which torch inspects and a partial hides."""

    def named(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)

    return named


def _lazy(module: str, function: str, backend: str) -> Callable[..., Any]:
    """Imports the implementation at the first call, because importing grpo_kernels must not import triton."""
    implementation: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal implementation
        if implementation is None:
            implementation = getattr(importlib.import_module(module), function)
        with device_guard(backend, args):
            return implementation(*args)

    return call


def device_guard(backend: str, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Makes the GPU of the arguments the current device for Triton's launches; compiled ops do so themselves."""
    if backend == "triton":
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        if device.type != "cpu":  # else interpreted
            guard: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
            return guard
    return contextlib.nullcontext()
