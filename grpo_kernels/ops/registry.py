"""Registration of an op with torch, the same for every op.

Each backend has a torch op of its own, <op>_<backend>, all with one schema and one fake. So the compiled backends are
called without a Python layer in between, which for a small op costs more than the work, and choosing a backend stays
plain Python that torch.compile can trace.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from grpo_kernels import _native  # noqa: F401  registers the compiled implementations
from grpo_kernels.dispatch import Supports

NAMESPACE = "grpo_kernels"
_Function = Callable[..., Any]
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Where the Python implementation of a backend lives; "cpu" is compiled only.
_FOLDERS = {"reference": "reference", "triton": "triton", "cuda": "native"}


def define(
    op: str,
    schema: str,
    supports: Supports,
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    implementation: str | _Function | None = None,
) -> dict[str, Callable[..., Any]]:
    """Defines <op>_<backend> for every backend in `supports`; returns the callables by backend name.

    `autograd` is (setup_context, backward) as torch.library.register_autograd takes them; both are called with the
    backend's name put in front of their arguments. None: not differentiable. `implementation` is "module.function" in
    each backend's folder, "<op>.forward" if left out; or a function of the backend's name and the arguments.
    """
    callables: dict[str, Callable[..., Any]] = {}
    for backend in supports:
        name = f"{op}_{backend}"
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        if callable(implementation):
            _library.impl(name, functools.partial(implementation, backend), "CompositeExplicitAutograd")
        elif backend in _FOLDERS:
            module, function = (implementation or f"{op}.forward").split(".")
            _library.impl(name, _lazy(module, function, backend), "CompositeExplicitAutograd")
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
    """The op as torch knows it."""
    found: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), f"{op}_{backend}").default
    return found


def _eager(op: _Function, setup_context: _Function, backward: _Function) -> _Function:
    """The op with its gradient, without what torch's own registration adds: 0.2 ms a call, more than many a kernel.

    torch.compile looks at the registration, and gets the op itself.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    # what Function.apply does besides is for torch.func, which does not come here
    apply = super(torch.autograd.Function, Gradient).apply

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return op(*args)
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            return apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


def define_compiled(schema: str) -> None:
    """Defines an op that only compiled code implements and only a backend calls."""
    _library.define(schema)


def _keywords(setup_context: Callable[..., Any]) -> Callable[..., Any]:
    """torch looks at the names of the parameters, which a partial hides from it."""

    def named(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)

    return named


def _lazy(module: str, function: str, backend: str) -> Callable[..., Any]:
    """The backend's function, imported at the first call: importing grpo_kernels must not import triton."""
    found: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(f"{NAMESPACE}.{_FOLDERS[backend]}.{module}"), function)
        with device_guard(backend, args):
            return found(*args)

    return call


def device_guard(backend: str, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Makes the GPU of the arguments the current one, where Triton launches; compiled ops do so themselves."""
    if backend == "triton":
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        if device.type != "cpu":  # interpreted
            guard: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
            return guard
    return contextlib.nullcontext()
