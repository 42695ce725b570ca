"""The parts of a benchmark: inputs, our call, the peers' calls, the lower bound on the work, and the bars."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

# Inputs on a device, by seed. A GPU is timed with several inputs in rotation, so that its caches do not help.
Make = Callable[[torch.device, int], Any]
Call = Callable[[Any], Any]
DEVICES = ("cpu", "cuda")

_divisor = 1  # of the sizes of the cases


def rehearse(divisor: int = 32) -> None:
    """Divides the sizes of all cases, so that a CPU can rehearse a GPU's. To be called before they are imported."""
    global _divisor
    _divisor = divisor


def sized(size: int) -> int:
    """A size of a case; in a rehearsal a smaller one, a multiple of 8."""
    return size if _divisor == 1 else max(8, size // _divisor // 8 * 8)


@dataclass(frozen=True)
class Floor:
    """Lower bound on the bytes moved and the flops."""

    bytes: float = 0
    flops: float = 0

    def seconds(self, ceiling: dict[str, float], dtype: str) -> float:
        """Time of the bytes at the speed of a copy or of the flops at the speed of a product, whichever is longer.

        A dtype whose products were not measured counts at the speed of bfloat16's.
        """
        speed = ceiling.get(dtype) or ceiling["bfloat16"]
        return max(self.bytes / ceiling["copy"], self.flops / speed)


@dataclass(frozen=True)
class Provider:
    """A call timed beside ours: a peer, whose results must match, or a yardstick, which computes something else."""

    name: str
    call: Call
    package: str = ""  # must be installed
    devices: tuple[str, ...] = DEVICES
    agrees: bool = True
    ours: Call | None = None  # our call with this peer's conventions, if they differ from the case's
    few: Make | None = None  # smaller inputs for a provider that would take minutes on ours
    share: float = 1.0  # of the case's work that the smaller inputs hold

    def missing(self, device: str) -> str:
        """Reason why the provider cannot run here, or ""."""
        if device not in self.devices:
            return f"not made for the device {device}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


# A ratio is a provider's time over ours and a cost its inverse; microseconds are the best of ten times, or a GPU's
# events; memory is the peak beside the returned tensors; growth is the time of a unit at the last size over the first.
KINDS = (
    "ratio at least",
    "ratio at most",
    "cost at most",
    "microseconds at most",
    "memory below",
    "exponent below",
    "growth at most",
)


@dataclass(frozen=True)
class Bar:
    kind: str
    limit: float
    of: str = ""  # a provider, or for memory an array of the case

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Bar: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")

    def held(self, value: float) -> bool:
        if self.kind.endswith("at least"):
            return value >= self.limit
        return value < self.limit if self.kind.endswith("below") else value <= self.limit


@dataclass(frozen=True)
class Same:
    """Raises AssertionError unless |got - gold| <= rtol * |gold| + atol + of_largest * max |gold|."""

    rtol: float = 0.0
    atol: float = 0.0
    of_largest: float = 0.0

    def __call__(self, got: Any, gold: Any) -> None:
        pairs = zip(got, gold, strict=True) if isinstance(gold, tuple) else [(got, gold)]
        for one, other in pairs:
            atol = self.atol + self.of_largest * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=self.rtol, atol=atol)


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    shape: str  # in words, with the model or the batch that it comes from
    floor: Floor
    inputs: Make
    ours: Call
    providers: tuple[Provider, ...] = ()
    bars: tuple[Bar, ...] = ()
    same: Callable[[Any, Any], None] = field(default_factory=Same)
    checked: Make | None = None  # smaller inputs for the comparison of results
    dtype: str = "float32"
    devices: tuple[str, ...] = DEVICES
    pairs: int = 15  # of alternating times, ours and a provider's
    arrays: dict[str, Callable[[Any], int]] = field(default_factory=dict)  # bytes, for bars on memory
    returned: Callable[[Any], int] = lambda _: 0  # bytes of the results, which memory figures exclude
    quick: tuple[str, ...] = ()  # providers whose ratio is steady even on a busy machine
    one_thread: bool = False  # compare the shortest processor times on one thread, on the CPU alone

    def provider(self, name: str) -> Provider:
        return next(provider for provider in self.providers if provider.name == name)


@dataclass(frozen=True)
class Sweep:
    """One call over at least four decades of size."""

    op: str
    name: str
    unit: str
    sizes: tuple[int, ...]
    inputs: Callable[[torch.device, int], Any]  # by size
    ours: Call
    floor: Floor  # per unit
    bars: tuple[Bar, ...] = ()
    fit_from: int = 0  # smallest size in the fit; below it the fixed cost of a call dominates


# Rows of a batch by its number of tokens, from one short row to batches that fill memory.
ROWS_OF = {2**10: 1, 2**14: 4, 2**18: 64, 2**20: 256, 2**22: 256, 2**24: 128}


def sweep_of_tokens(
    op: str, name: str, make: Callable[[int, int, torch.device], Any], ours: Call, bytes_of_one: float
) -> Sweep:
    """Time over tokens, by `make(rows, width, device)`, with bars on its growth."""
    return Sweep(
        op,
        name,
        "tokens",
        tuple(ROWS_OF),
        lambda device, size: make(ROWS_OF[size], size // ROWS_OF[size], device),
        ours,
        Floor(bytes=bytes_of_one),
        (Bar("exponent below", 1.1), Bar("growth at most", 2)),
        fit_from=2**18,
    )


def with_variants(case: Case, switch: str) -> Case:
    """The case with our call as its providers, once with each value of a private switch.

    Args:
        case: any case.
        switch: "MODULE.NAME=VALUE,...", a name that the kernels read at every call, and Python literals.
    """
    path, _, values = switch.partition("=")
    module, _, name = path.rpartition(".")
    owner = importlib.import_module(module)

    def switched(value: Any) -> Call:
        def call(inputs: Any) -> Any:
            with mock.patch.object(owner, name, value):
                return case.ours(inputs)

        return call

    literals = ast.literal_eval(f"[{values}]")
    return replace(case, providers=tuple(Provider(f"{name}={value!r}", switched(value)) for value in literals), bars=())
