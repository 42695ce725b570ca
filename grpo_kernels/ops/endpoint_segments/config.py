"""SegmentConfig: how responses are cut into segments and how segments get their advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_kernels.checks import boolean, choices, finite, integer, unknown
from grpo_kernels.plans import PlannedConfig, planned

# Names, and the codes that kernels know them by: their positions. csrc/endpoint_segments/scan.h repeats them for C++.
RULES = ("bounded", "literal")
BOUNDED, LITERAL = range(len(RULES))
PROXIES = ("coherent", "uncorrelated")
COHERENT, UNCORRELATED = range(len(PROXIES))
CREDITS = ("endpoint", "broadcast")
ENDPOINT, BROADCAST = range(len(CREDITS))
NORMS = ("none", "batch", "prompt")
NORM_NONE, NORM_BATCH, NORM_PROMPT = range(len(NORMS))
# The share of tokens that are endpoints which an adaptive threshold aims at; inside the band nothing changes.
BAND = (0.05, 0.20)


@planned
class Plan(NamedTuple):
    """A SegmentConfig as the kernels read it: codes and the longest segment, then numbers."""

    rule: int
    proxy: int
    credit: int
    norm: int
    max_size: int
    group_epsilon: float
    gamma: float
    lam: float


@dataclasses.dataclass(frozen=True)
class SegmentConfig(PlannedConfig):
    """How responses are cut into segments, and how segments get their advantages.

    Args:
        group_variance_threshold: tau, the limit on the variance that a shared advantage adds to that of the tokens' own
        group_max_size: longest segment in tokens; 1 makes every token a segment, which is plain PPO
        group_epsilon: keeps divisors and comparisons away from 0
        adaptive_threshold: whether SegmentThreshold.update changes tau
        threshold_lr: largest relative change of tau in one update
        min_threshold, max_threshold: bounds of a tau that adapts; a fixed one may be any positive number
        gamma, lam: of the advantages, both of tokens and of segments
        rule: "bounded" starts a new segment where including the token would make the segment's ratio exceed tau;
            "literal" ends a segment at the token where its length reaches the ratio over tau
        proxy: "coherent" assumes that the gradients of the tokens point the same way, "uncorrelated" any way
        credit: "endpoint" puts a segment's advantage at its last token, "broadcast" at each of its tokens
        norm: normalisation of the segments' advantages: "none", "batch" or "prompt" (over the rows of a group)
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

    def __post_init__(self) -> None:
        where = "SegmentConfig"
        choices(self, rule=RULES, proxy=PROXIES, credit=CREDITS, norm=NORMS)
        boolean(where, adaptive_threshold=self.adaptive_threshold)
        if integer(where, "group_max_size", self.group_max_size) < 1:
            raise ValueError(f"{where}: group_max_size must be at least 1, got {self.group_max_size}")
        for field in ("min_threshold", "group_variance_threshold", "max_threshold", "group_epsilon"):
            finite(where, field, getattr(self, field), minimum=0.0, open_end=True)
        finite(where, "threshold_lr", self.threshold_lr, minimum=0.0)
        for field in ("gamma", "lam"):
            finite(where, field, getattr(self, field), minimum=0.0)
            if getattr(self, field) > 1:
                raise ValueError(f"{where}: {field} must be in [0, 1], got {getattr(self, field)!r}")
        check_threshold(self, where, "group_variance_threshold", self.group_variance_threshold)
        plan = Plan(
            rule=RULES.index(self.rule),
            proxy=PROXIES.index(self.proxy),
            credit=CREDITS.index(self.credit),
            norm=NORMS.index(self.norm),
            max_size=self.group_max_size,
            group_epsilon=self.group_epsilon,
            gamma=self.gamma,
            lam=self.lam,
        )
        self._set_plan(plan)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)

    @classmethod
    def of(cls, config: SegmentConfig | Mapping[str, Any], where: str) -> SegmentConfig:
        """Returns a config unchanged, and builds one from a trainer's `group_params`; unknown keys are errors."""
        if isinstance(config, SegmentConfig):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"{where}: config must be a SegmentConfig or a mapping, got {type(config).__name__}")
        for key in config:
            if key not in cls.names():
                raise unknown(where, "config's keys", key, cls.names())
        return cls(**config)


def check_threshold(config: SegmentConfig, where: str, field: str, value: float) -> None:
    """Raises unless a tau is within the bounds if it adapts, and positive if it is fixed."""
    if not config.adaptive_threshold:
        finite(where, field, value, minimum=0.0, open_end=True)
    elif not config.min_threshold <= value <= config.max_threshold:
        raise ValueError(
            f"{where}: {field} must be within min_threshold and max_threshold, "
            f"[{config.min_threshold}, {config.max_threshold}], got {value!r}; adaptive_threshold=False has no bounds"
        )
