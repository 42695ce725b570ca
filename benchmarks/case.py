"""What a benchmark is made of: inputs, our call, the others', the least work there is, and the bars."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# Inputs of a device by a seed: a GPU's caches are kept from helping by several inputs in turn.
Make = Callable[[torch.device, int], Any]
Call = Callable[[Any], Any]
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Floor:
    """What no way around moves or multiplies."""

    bytes: float = 0
    flops: float = 0

    def seconds(self, ceiling: dict[str, float], dtype: str) -> float:
        """At the measured bandwidth of a copy and the measured speed of a product, whichever takes longer."""
        return max(self.bytes / ceiling["copy"], self.flops / ceiling[dtype] if self.flops else 0.0)


@dataclass(frozen=True)
class Provider:
    """What is timed beside ours: a peer, which must agree, or a yardstick, which computes something else."""

    name: str
    call: Call
    package: str = ""  # that has to be installed
    devices: tuple[str, ...] = DEVICES
    agrees: bool = True
    ours: Call | None = None  # ours with this peer's conventions, where they are not the case's
    few: Make | None = None  # its own inputs, where ours would take it minutes
    share: float = 1.0  # of the case's work that is in them
    lacks: Callable[[], str] = lambda: ""  # of what is installed, why it cannot run, or nothing

    def missing(self, device: torch.device) -> str:
        """Why it cannot run here, or nothing."""
        if device.type not in self.devices:
            return f"not made for the device {device.type}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return self.lacks()


# How a bar's value is found, where ratio is a provider's time over ours and memory the peak beside what is returned.
KINDS = {
    "ratio at least": "ratio to {of}",
    "ratio at most": "ratio to {of}",
    "cost at most": "times the time of {of}",
    "microseconds at most": "microseconds, the best of ten times, or on a GPU by its events",
    "memory below": "times the memory of {of}",
    "exponent below": "power of the size that the time grows with",
    "growth at most": "times the time per unit of the exponent's smallest size, at the last",
}


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

    def __str__(self) -> str:
        return f"{KINDS[self.kind].format(of=self.of)}, {self.kind.split(' ', 1)[1]} {self.limit:g}"


@dataclass(frozen=True)
class Same:
    """Equal within rtol of each number plus atol plus of_largest of the largest number; else AssertionError."""

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
    shape: str  # after the model or the batch that it comes from
    floor: Floor
    inputs: Make
    ours: Call
    providers: tuple[Provider, ...] = ()
    bars: tuple[Bar, ...] = ()
    same: Callable[[Any, Any], None] = field(default_factory=Same)
    checked: Make | None = None  # inputs to compare results on, where those of the case would take too long
    dtype: str = "float32"
    devices: tuple[str, ...] = DEVICES
    pairs: int = 15  # of a time of ours and one of a provider
    target: float = 0.02  # seconds that one side of a pair runs for, at least one call
    arrays: dict[str, Callable[[Any], int]] = field(default_factory=dict)  # bytes, for bars on memory
    returned: Callable[[Any], int] = lambda _: 0  # bytes of what is returned, which bars on memory leave out
    quick: tuple[str, ...] = ()  # providers whose ratio is steady even where others use the machine

    def provider(self, name: str) -> Provider:
        return next(provider for provider in self.providers if provider.name == name)


@dataclass(frozen=True)
class Sweep:
    """One call over four decades of size and more."""

    op: str
    name: str
    unit: str
    sizes: tuple[int, ...]
    inputs: Callable[[torch.device, int], Any]  # of a size
    ours: Call
    floor: Floor  # of one unit
    bars: tuple[Bar, ...] = ()
    fit_from: int = 0  # the exponent's smallest size: below it the fixed cost of a call counts
    batch: int = 2**20  # units a sample takes, at least one call
