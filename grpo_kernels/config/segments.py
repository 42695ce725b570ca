"""SegmentConfig: how the tokens of a response are cut into segments, and what a segment is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_kernels.config.rules import finite, unknown

RULES = ("bounded", "literal")
PROXIES = ("coherent", "uncorrelated")
CREDITS = ("endpoint", "broadcast")
NORMS = ("none", "batch", "prompt")
# The share of tokens that are endpoints which an adaptive threshold aims at; inside the band nothing changes.
BAND = (0.05, 0.20)


@dataclasses.dataclass(frozen=True)
class SegmentConfig:
    """How the tokens of a response are cut into segments, and what a segment is worth.

    group_variance_threshold  tau: how much more variance a segment's shared advantage may have than its tokens' own
    group_max_size            the most tokens of a segment; 1: every token by itself, plain PPO
    group_epsilon             keeps divisors and comparisons away from 0
    adaptive_threshold        whether SegmentThreshold.update changes tau at all
    threshold_lr, min_threshold, max_threshold
                              by how much at most, and within what
    gamma, lam                of the advantages, of tokens and of segments
    rule                      bounded: a token opens a new segment where the segment's ratio with it would exceed tau |
                              literal: a segment ends with the token at which its length reaches the ratio over tau
    proxy                     coherent: tokens' gradients point the same way | uncorrelated: any way
    credit                    endpoint: a segment's advantage is at its last token | broadcast: at each of its tokens
    norm                      of the segments' advantages: none | batch | prompt (of the rows of a group)
    """

    group_variance_threshold: float = 1.0
    group_max_size: int = 16
    group_epsilon: float = 1e-6
    adaptive_threshold: bool = True
    threshold_lr: float = 0.01
    min_threshold: float = 0.1
    max_threshold: float = 10.0
    gamma: float = 1.0
    lam: float = 1.0
    rule: str = "bounded"
    proxy: str = "coherent"
    credit: str = "endpoint"
    norm: str = "batch"

    # What the kernels read, in the order of csrc/include/grpo_kernels/endpoint_scan.h.
    modes: list[int] = dataclasses.field(init=False, repr=False, compare=False)
    coefficients: list[float] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = "SegmentConfig"
        for field, allowed in (("rule", RULES), ("proxy", PROXIES), ("credit", CREDITS), ("norm", NORMS)):
            if getattr(self, field) not in allowed:
                raise unknown(where, field, getattr(self, field), allowed)
        if not isinstance(self.adaptive_threshold, bool):
            got = f"{type(self.adaptive_threshold).__name__} {self.adaptive_threshold!r}"
            raise TypeError(f"{where}: adaptive_threshold must be a bool, got {got}")
        if isinstance(self.group_max_size, bool) or not isinstance(self.group_max_size, int):
            got = f"{type(self.group_max_size).__name__} {self.group_max_size!r}"
            raise TypeError(f"{where}: group_max_size must be an int, got {got}")
        if self.group_max_size < 1:
            raise ValueError(f"{where}: group_max_size must be at least 1, got {self.group_max_size}")
        for field in ("min_threshold", "group_variance_threshold", "max_threshold", "group_epsilon"):
            finite(where, field, getattr(self, field), minimum=0.0, open_end=True)
        finite(where, "threshold_lr", self.threshold_lr, minimum=0.0)
        for field in ("gamma", "lam"):
            finite(where, field, getattr(self, field), minimum=0.0)
            if getattr(self, field) > 1:
                raise ValueError(f"{where}: {field} must be in [0, 1], got {getattr(self, field)!r}")
        if not self.min_threshold <= self.group_variance_threshold <= self.max_threshold:
            raise ValueError(
                f"{where}: group_variance_threshold must be within min_threshold and max_threshold, "
                f"[{self.min_threshold}, {self.max_threshold}], got {self.group_variance_threshold}"
            )
        modes = [RULES.index(self.rule), PROXIES.index(self.proxy), CREDITS.index(self.credit)]
        object.__setattr__(self, "modes", [*modes, NORMS.index(self.norm), self.group_max_size])
        object.__setattr__(self, "coefficients", [float(self.group_epsilon), float(self.gamma), float(self.lam)])

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)

    @classmethod
    def of(cls, config: SegmentConfig | Mapping[str, Any], where: str) -> SegmentConfig:
        """The config itself, or one of the keys of a trainer's `group_params`; a key that is none is an error."""
        if isinstance(config, SegmentConfig):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"{where}: config must be a SegmentConfig or a mapping, got {type(config).__name__}")
        for key in config:
            if key not in cls.names():
                raise unknown(where, "config's keys", key, cls.names())
        return cls(**config)
