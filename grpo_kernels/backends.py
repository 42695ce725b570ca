"""Selects the implementation of a call, and says why another one cannot run it.

`backend="kernel"` takes the first kernel that can run the call, or is refused with the reasons; None falls back to the
reference. Everything that runs per call is plain Python, so that torch.compile can trace it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from types import TracebackType

import torch

from grpo_kernels.checks import dtype_names, nearest
from grpo_kernels.compiled import CudaLibrary, load_cpu, load_cuda

# In the order in which they are tried; on CPU tensors from "cpu" on.
IMPLEMENTATIONS = ("cuda", "triton", "cpu", "reference")
# Values of `backend=`; name_implementations adds the kernels' names.
_choices: tuple[str, ...] = ("kernel", "reference")

# Device types of each implementation; None means any.
DEVICES: dict[str, set[str] | None] = {
    "cuda": {"cuda"},
    "triton": {"cuda", "xpu"},
    "cpu": {"cpu"},
    "reference": None,
}
# Ops whose CPU kernels also take tensors on GPUs of these types, in copies; registry.define adds them.
through_host: set[str] = set()
COPIED = ("cuda", "xpu")

Supports = Mapping[str, tuple[torch.dtype, ...]]  # dtypes by implementation

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

# Implementations whose kernels the tests compiled for the host.
_emulated: set[str] = set()


# Loading a library registers its kernels; without it their ops are defined but not implemented.
cpu_library, cpu_error = load_cpu()
cuda_library: CudaLibrary | None = None
cuda_error: str | None = "this torch is not a CUDA build"
if torch.version.cuda:
    cuda_library, cuda_error = load_cuda()


def build_facts() -> dict[str, dict[str, str]]:
    """Compiler, flags and targets of each compiled library."""
    libraries = {"cpu": cpu_library, "cuda": cuda_library}
    return {name: library.build_facts() for name, library in libraries.items() if library is not None}


def _checked(name: str | None, where: str) -> str | None:
    if name is not None and name not in _choices:
        raise ValueError(f"{where} must be one of {', '.join(_choices)}, got {name!r}{nearest(name, _choices)}")
    return name


# A plain global and not a ContextVar, so that torch.compile can trace its use and guard on it.
_forced: str | None = _checked(os.environ.get("GRPO_KERNELS_BACKEND") or None, "GRPO_KERNELS_BACKEND")


def select(
    op: str,
    requested: str | None,
    device_type: str,
    dtype: torch.dtype,
    supports: Supports,
    device_index: int | None = None,
) -> str:
    """Name of the implementation that runs this call of `op`."""
    choice = _forced if requested is None else requested
    if choice is None and device_type == "cpu" and dtype in supports.get("cpu", ()) and missing("cpu") is None:
        return "cpu"  # at once, as the rest takes a seventh of the time of a small call
    candidates = IMPLEMENTATIONS[2:] if device_type == "cpu" else IMPLEMENTATIONS
    _checked(choice, f"{op}: backend")
    tried: tuple[str, ...] = candidates if choice is None else (choice,)
    if choice == "kernel":
        tried = candidates[:-1]
    reasons: list[tuple[str, str]] = []
    for name in tried:
        reason = refusal(name, device_type, dtype, supports, device_index, op)
        if reason is None:
            return name
        reasons.append((name, reason))
    if choice is None:
        raise RuntimeError(f"{op}: no backend takes {dtype} tensors on {device_type}")
    why = ", ".join(f"{name} ({reason})" for name, reason in reasons) if choice == "kernel" else reasons[0][1]
    others = [name for name in candidates if refusal(name, device_type, dtype, supports, device_index, op) is None]
    setting = "backend=" if requested else "GRPO_KERNELS_BACKEND or use_backend, which chose it, with "
    other = "kernel" if others != ["reference"] else "reference"
    way_out = f"; use {setting}{other!r} or leave it out" if others else ""
    raise RuntimeError(f"{op}: backend {choice!r} cannot run here: {why}{way_out}")


def check_choice(op: str, requested: str | None) -> None:
    """Checks the backend of an op that is plain torch on every device, which is its kernel, too."""
    _checked(requested, f"{op}: backend")


def refusal(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    supports: Supports,
    device_index: int | None = None,
    op: str = "",
) -> str | None:
    """Reason why the implementation cannot take such tensors, or None. `op` is for those whose CPU kernels take copies.

    Interpreted Triton also runs on the CPU, but only when requested by name.
    """
    if name not in supports:
        return "it is not implemented for this op"
    is_copied = name == "cpu" and op in through_host and device_type in COPIED
    if not (is_copied or runs_on(name, device_type)):
        return f"it does not run on {device_type} tensors"
    if dtype not in supports[name]:
        return f"it takes {dtype_names(supports[name])}, not {dtype_names((dtype,))}"
    return missing(name, device_index)


def runs_on(name: str, device_type: str) -> bool:
    """Whether the implementation takes tensors of this device type."""
    devices = DEVICES[name]
    interpreted = name == "triton" and device_type == "cpu" and interpreting()
    return devices is None or device_type in devices or interpreted


def missing(name: str, device_index: int | None = None) -> str | None:
    """Reason why the implementation cannot run in this process on this GPU (default: the current one), or None."""
    if name in _emulated:
        return None
    if name == "cuda":
        if cuda_error is not None:
            return cuda_error
        if device_index is None:  # no tensor names a device
            if not torch.cuda.is_available():
                return "no CUDA device"
            device_index = torch.cuda.current_device()
        return cuda_refusal(device_index)
    if name == "triton":
        if not _TRITON_INSTALLED:
            return "triton is not installed"
        if interpreting() or torch.cuda.is_available() or torch.xpu.is_available():
            return None
        return "no GPU"
    return cpu_error if name == "cpu" else None


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on CPU tensors. Triton reads this variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cuda_refusal(device_index: int) -> str | None:
    """Reason why this GPU or its driver cannot run the CUDA kernels as built, or None."""
    return _cuda_refusal(device_index)


# Marks the result as constant for torch.compile, like torch.compiler.assume_constant_result, whose import takes a
# second. An eager call costs a cache lookup.
cuda_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _cuda_refusal(device_index: int) -> str | None:
    assert cuda_library is not None
    facts, driver = cuda_library.build_facts(), cuda_library.driver_version()
    if driver // 1000 < int(facts["cuda"].partition(".")[0]):
        newest = f"{driver // 1000}.{driver % 1000 // 10}"
        return f"the kernels were built with CUDA {facts['cuda']}, the driver runs CUDA {newest} and older; update it"
    architectures = facts["cuda_architectures"]
    major, minor = torch.cuda.get_device_capability(device_index)
    if runs_machine_code(architectures, major, minor):
        return None
    built_for = ", ".join(f"sm_{number}" for number in re.findall(r"\d+[af]?", architectures))
    here = f"sm_{major}{minor}"
    rebuild = f"CMAKE_ARGS=-DGRPO_CUDA_ARCHITECTURES={major}{minor}"
    return f"the CUDA kernels are built for {built_for}, not for {here} of cuda:{device_index}; rebuild with {rebuild}"


def runs_machine_code(architectures: str, major: int, minor: int) -> bool:
    """Whether a GPU of compute capability `major`.`minor` runs code built for CMake's list of CUDA architectures.

    Machine code runs on its own minor version and later ones of the same major version, PTX on everything later.
    "80-real" is machine code, "80-virtual" PTX, "80" both. Code for "90a" runs on 9.0 alone, code for "100f" on 10.x.
    """
    for entry in architectures.split(";"):
        match = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", entry)
        if match is None:  # "native" and similar: the GPU was at hand when the kernels were built
            return True
        built, feature, kind = (int(match[1]), int(match[2])), match[3], match[4]
        same_major = built[0] == major and (built[1] == minor if feature == "a" else built[1] <= minor)
        if (kind != "virtual" or feature) and same_major:
            return True
        if kind != "real" and not feature and built <= (major, minor):
            return True
    return False


def available_kernels(device_index: int | None = None) -> dict[str, str]:
    """Maps "cuda", "triton" and "cpu" to "ok" or to the reason why they cannot run, on this GPU or the current one."""
    return {name: missing(name, device_index) or "ok" for name in IMPLEMENTATIONS[:-1]}


class use_backend:
    """Runs every call that names no backend on this one, until the end of the block if there is one.

    A call that it cannot run is refused; ops that are plain torch on every device run as ever. As a statement,
    `gk.use_backend("kernel")` holds for the whole process, as the environment variable
    `GRPO_KERNELS_BACKEND` does; `with gk.use_backend("kernel"):` for a block.
    """

    def __init__(self, name: str) -> None:
        global _forced
        self._name = _checked(name, "use_backend: name")
        self._before, _forced = _forced, self._name

    def __enter__(self) -> None:
        global _forced
        _forced = self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._before


def name_implementations() -> None:
    """Lets `backend` also be the name of a kernel. For tests, benchmarks and tools, which compare them."""
    global _choices
    _choices = ("kernel", *IMPLEMENTATIONS)
