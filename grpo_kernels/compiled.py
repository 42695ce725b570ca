"""Loads the compiled kernels.

They are plain libraries, without a module of Python's, so that one build serves every version of Python.
"""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import TypeVar

FOLDER = Path(__file__).parent


class CompiledLibrary:
    """A library of kernels and its C interface, which csrc/common/library.cpp defines.

    Loading it registers the kernels with torch, which must have been imported before.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.grpo_build_facts.restype = ctypes.c_char_p
        library.grpo_poison_allocations.argtypes = [ctypes.c_bool]
        self._library = library

    def build_facts(self) -> dict[str, str]:
        """Compiler, flags and targets."""
        lines = self._library.grpo_build_facts().decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def poison_allocations(self, on: bool) -> None:
        """Fills new host memory with NaN, for tests."""
        self._library.grpo_poison_allocations(on)


class CpuLibrary(CompiledLibrary):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._library.grpo_set_fork_nanoseconds.argtypes = [ctypes.c_double]
        self._library.grpo_set_fork_nanoseconds.restype = ctypes.c_double
        self._library.grpo_forks.restype = ctypes.c_int64

    def set_fork_nanoseconds(self, nanoseconds: float) -> float:
        """Sets the least work that is divided among threads and returns the last setting, for tests."""
        return float(self._library.grpo_set_fork_nanoseconds(nanoseconds))

    def forks(self) -> int:
        """Number of times that work was divided among threads."""
        return int(self._library.grpo_forks())


class CudaLibrary(CompiledLibrary):
    def driver_version(self) -> int:
        """The newest CUDA that the driver supports, 13020 for 13.2; 0 without a driver."""
        return int(self._library.grpo_driver_version())


_Library = TypeVar("_Library", bound=CompiledLibrary)


def load_cpu() -> tuple[CpuLibrary | None, str | None]:
    """The library of the CPU kernels, or the reason why there is none."""
    return _load(CpuLibrary, "cpu")


def load_cuda() -> tuple[CudaLibrary | None, str | None]:
    """The library of the CUDA kernels, or the reason why there is none."""
    return _load(CudaLibrary, "cuda")


def _load(kind: type[_Library], name: str) -> tuple[_Library | None, str | None]:
    path = FOLDER / f"libgrpo_kernels_{name}.so"
    if not path.exists():
        if (other := _hidden_installation()) is not None:
            reason = f"not built in {FOLDER}, which hides the package in {other}; leave this folder"
            if (other / path.name).exists():  # else both have the reference alone
                # one text and place for the CPU's and CUDA's, so that Python shows it once
                warnings.warn(f"grpo_kernels: the kernels are {reason}", stacklevel=1)
            return None, reason
        modes = "cpu or cuda" if name == "cpu" else name
        return None, f"not built; reinstall with GRPO_KERNELS_BUILD={modes}"
    try:
        return kind(path), None
    except (OSError, AttributeError) as error:  # built for another torch or system; from another version of the package
        return None, f"built, but cannot be loaded: {error}"


def _hidden_installation() -> Path | None:
    """Folder of the installed package, if Python found the sources of a checkout in the current folder instead."""
    if __package__ != "grpo_kernels":  # loaded under a name of its own, as the kernels hub does
        return None
    from importlib import metadata  # rarely needed, and slow to import

    # a build leaves metadata in the checkout, which names the checkout itself
    installed = metadata.distributions(name="grpo-kernels")
    folders = (Path(str(one.locate_file("grpo_kernels"))) for one in installed)
    return next((folder for folder in folders if folder.is_dir() and folder.resolve() != FOLDER.resolve()), None)
