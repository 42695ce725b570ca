"""A GPU on the host that knows what a real one would wait for, and that captures and replays calls as a CUDA graph.

Tensors claim to be on a GPU, so that Python takes the branches that it takes there, and keep their values on the host.
Every torch op on them and every kernel passes through one place, `Gpu`. CUDA kernels run in the emulator, Triton's in
the interpreter, and torch's own on the CPU. Refused are ops that a GPU could run only by waiting for the host or the
host for it, ops on tensors of several devices, kernels outside of a guard for their device and, while capturing, memory
that neither the capture allocated nor the caller declared as an input. Copies of whole tensors between the host and the
GPU are recorded instead where a test expects them.

What compiled code does between its checks and its launches is not seen; tests/test_graphs.py reads its sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from grpo_kernels import backends

aten = torch.ops.aten
run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
OURS = "grpo_kernels::"

# The shape of their results, or the Python value that they return, depends on data.
DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Their kernels add with atomics, unless torch's deterministic mode chooses others.
UNORDERED = {aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce}
FROM_THE_HOST = {torch.as_tensor, torch.asarray, torch.tensor, Tensor.new_tensor}
CPU = torch.device("cpu")
# Their kernels take a number on the host as a parameter; other ops would copy it.
TAKE_HOST_NUMBERS = {"add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"}

# They launch nothing; nor do views, whose schemas say so, but for this one.
LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or "cuda" not in backends._emulated,
    reason="for the kernels emulated on the host",
)


class Waits(RuntimeError):
    """An op that a GPU cannot run without a wait, and that therefore cannot be captured."""


class GpuTensor(Tensor):
    """A tensor on a GPU that does not exist; `host` has the values."""

    host: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> GpuTensor:
        result: GpuTensor = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",  # to torch's autograd, which has no thread for a GPU that does not exist
        )
        result.host, result.place = host, device
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.place)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]  # it takes no arguments
        return f"GpuTensor({self.host}, device={self.device})"

    def tolist(self) -> Any:
        raise Waits("tolist: copies to the host")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} runs outside of the simulated GPU")


def host_of(tree: Any) -> Any:
    return tree_map_only(GpuTensor, lambda tensor: tensor.host, tree)


def storage_of(host: Tensor) -> int:
    return int(host.untyped_storage()._cdata)


class Factories(TorchFunctionMode):
    """Creates tensors for a GPU on the meta device, which needs no driver; `Gpu` takes them from there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def known(device: torch.device) -> torch.device:
            return torch.device("meta") if device.type == "cuda" else device

        kwargs = kwargs or {}
        if func is torch.autograd.grad:  # torch ends this mode while it runs, but a backward creates tensors, too
            with mock.patch.object(torch.autograd, "_engine_run_backward", self.inside(run_backward)):
                return func(*args, **kwargs)
        if func in FROM_THE_HOST and (func is Tensor.new_tensor or known(kwargs.get("device", CPU)) != CPU):
            raise Waits(f"{func.__name__}: copies from the host")
        return func(*tree_map_only(torch.device, known, args), **tree_map_only(torch.device, known, kwargs))

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


class Step(NamedTuple):
    """A recorded op or kernel, its arguments on the host, and the memory of its results."""

    run: Callable[[], Any]
    results: list[Tensor]


class Gpu(TorchDispatchMode):
    """Runs everything that is called inside it on simulated GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] | None = None
        self.known: dict[int, Tensor] = {}  # memory that a capture may use, by its storage
        self.guarded: list[torch.device] = []
        self.kernels = 0  # launches of Triton's kernels, and calls of compiled ops
        self.of_triton: list[str] = []  # Triton's kernels that were launched
        self.of_torch: list[str] = []  # ops of torch that launch kernels, at least one each
        self.transfers: list[str] | None = None  # devices that tensors were copied to; None refuses such copies

    def put(self, tensor: Tensor, index: int = 0) -> GpuTensor:
        """Copies a host tensor to the GPU, as an input of later captures."""
        return self._wrapped(tensor.detach().clone(), torch.device("cuda", index))

    def _wrapped(self, host: Tensor, device: torch.device) -> GpuTensor:
        self.known[storage_of(host)] = host
        return GpuTensor(host, device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        gpu = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
        target = kwargs.get("device")
        if not gpu and (target is None or target.type != "meta"):
            return func(*args, **kwargs)
        if self.transfers is not None and self.steps is None and is_transfer(func, args, target):
            self.transfers.append("host" if gpu else "GPU")
            copy = host_of(args[0]).clone()
            return copy if gpu else self._wrapped(copy, torch.device("cuda", 0))
        check_waits(func, args, kwargs, tensors, gpu)
        check_devices(func, gpu)
        check_order(func, args, gpu)
        self.check_memory(func, gpu)
        if func.name().startswith(OURS) and (not has_kernel(func, "CPU") or func.name().endswith("_reference")):
            with self, Factories():  # Python that calls other ops
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
        if target is not None:
            kwargs = kwargs | {"device": "cpu"}
        return self.queue(func, args, kwargs, gpu, gpu[0].device if gpu else torch.device("cuda", 0))

    def queue(self, func: Any, args: Any, kwargs: Any, gpu: list[GpuTensor], device: torch.device) -> Any:
        host_args, host_kwargs = host_of((args, kwargs))
        run = host_version(func)
        self.kernels += func.name().startswith(OURS)
        results = run(*host_args, **host_kwargs)
        tensors = [value for value in tree_flatten(results)[0] if isinstance(value, Tensor)]
        if is_launch(func, tensors):
            self.of_torch.append(func.overloadpacket.__name__)
        if self.steps is not None:
            self.steps.append(Step(lambda: run(*host_args, **host_kwargs), tensors))
        of_host = {id(tensor.host): tensor for tensor in gpu}  # an op that overwrites a tensor returns it
        return tree_map_only(
            Tensor, lambda host: of_host[id(host)] if id(host) in of_host else self._wrapped(host, device), results
        )

    def check_memory(self, what: object, gpu: list[GpuTensor]) -> None:
        if self.steps is not None:
            foreign = [tensor.shape for tensor in gpu if storage_of(tensor.host) not in self.known]
            assert not foreign, f"{what} uses memory from outside of the capture, shapes {foreign}"

    def launch(self, call: Callable[..., Any], kernel: Any, args: Any, kwargs: Any) -> None:
        """Runs a kernel of Triton's."""
        gpu = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, GpuTensor)]
        assert gpu, f"{kernel.fn.__name__} has no tensor"
        check_devices(kernel.fn.__name__, gpu)
        self.check_memory(kernel.fn.__name__, gpu)
        device = gpu[0].device
        assert self.guarded and self.guarded[-1] == device, f"{kernel.fn.__name__} has no guard for {device}"
        host_args, host_kwargs = host_of((args, kwargs))
        call(kernel, *host_args, **host_kwargs)
        self.kernels += 1
        self.of_triton.append(kernel.fn.__name__)
        if self.steps is not None:
            self.steps.append(Step(lambda: call(kernel, *host_args, **host_kwargs), []))

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        self.guarded.append(device)
        yield
        self.guarded.pop()

    @contextlib.contextmanager
    def capture(self, inputs: list[GpuTensor]) -> Iterator[list[Step]]:
        """Records everything that the block queues. Only `inputs` and what the block allocates may be used."""
        self.known = {storage_of(tensor.host): tensor.host for tensor in inputs}
        self.steps = steps = []
        try:
            yield steps
        finally:
            self.steps = None


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A simulated GPU on which everything in the block runs."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    gpu, launch = Gpu(), interpreter.GridExecutor.__call__
    monkeypatch.setitem(backends.DEVICES, "cuda", {"cuda"})
    monkeypatch.setattr(torch.cuda, "device", gpu.guard)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda kernel, *args, **kwargs: gpu.launch(launch, kernel, args, kwargs)
    )
    with gpu, Factories():
        yield gpu


def replay(steps: list[Step]) -> None:
    """Runs recorded steps again, in the same memory."""
    for run, results in steps:
        again = [value for value in tree_flatten(run())[0] if isinstance(value, Tensor)]
        for memory, value in zip(results, again, strict=True):
            if memory.data_ptr() != value.data_ptr():
                memory.copy_(value)


def has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def is_launch(func: Any, results: list[Tensor]) -> bool:
    """Whether an op of torch launches kernels: it is neither a view nor an allocation, nor are its results empty."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    is_view = any(not alias.is_write for alias in aliases) or func.overloadpacket.__name__ in LAUNCH_NOTHING
    is_empty = len(results) > 0 and all(result.numel() == 0 for result in results)
    return not (func.name().startswith(OURS) or is_view or is_empty)


def is_transfer(func: Any, args: Any, target: torch.device | None) -> bool:
    """Whether an op copies a tensor between the host and the GPU, whose own have another type here."""
    to_gpu = target is not None and target.type == "meta"
    copies = func.overloadpacket in (aten._to_copy, aten.to)
    return copies and target is not None and isinstance(args[0], GpuTensor) != to_gpu


def check_waits(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], gpu: list[GpuTensor]) -> None:
    name, target = func.overloadpacket.__name__, kwargs.get("device")
    may_wait = name in ("index", "repeat_interleave")  # with some arguments, see below
    if (DATA_DEPENDENT & {*func.tags} and not may_wait) or name == "linalg_cholesky":
        raise Waits(f"{func}: its result depends on data that the host would have to wait for")
    indices = args[1] if name in ("index", "index_put", "index_put_", "_unsafe_index") else ()
    if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise Waits(f"{func}: a mask as an index, whose True values the host would have to count")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        raise Waits(f"{func}: without output_size the host would have to add up the repeats")
    if target is not None and target.type == "cpu":
        raise Waits(f"{func}: copies to the host")
    host = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
    if name in ("copy_", "_to_copy") and host:
        raise Waits(f"{func}: copies between the host and a GPU")
    if gpu and any(tensor.dim() > 0 or name.rstrip("_") not in TAKE_HOST_NUMBERS for tensor in host):
        raise Waits(f"{func}: takes tensors on the host, of shapes {[list(tensor.shape) for tensor in host]}")


def check_order(func: Any, args: Any, gpu: list[GpuTensor]) -> None:
    """An addition of floating-point numbers must not depend on which thread comes first."""
    adds = func.overloadpacket in UNORDERED and not {"amin", "amax"} & {arg for arg in args if isinstance(arg, str)}
    assert not (adds and any(tensor.is_floating_point() for tensor in gpu)), f"{func} adds in an order that varies"


def check_devices(what: object, gpu: list[GpuTensor]) -> None:
    devices = sorted({str(tensor.device) for tensor in gpu})
    if len(devices) > 1:
        raise RuntimeError(f"{what}: expected all tensors to be on the same device, got {', '.join(devices)}")


def host_version(func: Any) -> Callable[..., Any]:
    """The op on host tensors. Products of halves with float32 results exist on GPUs only."""
    if func == aten.mm.dtype_out:
        return lambda a, b, dtype, *, out: out.copy_(a.to(dtype) @ b.to(dtype))
    if func == aten.addmm.dtype_out:
        return lambda total, a, b, dtype, *, out: out.copy_(total + a.to(dtype) @ b.to(dtype))
    return func  # type: ignore[no-any-return]
