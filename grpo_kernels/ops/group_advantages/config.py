"""AdvantageConfig: how rewards become advantages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from grpo_kernels.checks import choices, config_or_name, finite, unknown
from grpo_kernels.plans import PlannedConfig, planned

# Names, and the codes that kernels know them by: their positions. csrc/group_advantages/statistics.h repeats them.
CENTERS = ("none", "mean", "leave_one_out", "length", "baseline", "runner_up")
CENTER_NONE, CENTER_MEAN, CENTER_LEAVE_ONE_OUT, CENTER_LENGTH, CENTER_BASELINE, CENTER_RUNNER_UP = range(len(CENTERS))
SCALES = ("none", "std", "batch_std", "mean", "leave_one_out_std")
SCALE_NONE, SCALE_STD, SCALE_BATCH_STD, SCALE_MEAN, SCALE_LEAVE_ONE_OUT_STD = range(len(SCALES))
SINGLETONS = ("zero", "raw", "parent")
SINGLETON_ZERO, SINGLETON_RAW, SINGLETON_PARENT = range(len(SINGLETONS))
COMBINES = ("sum_then_normalize", "normalize_then_sum")
SUM_THEN_NORMALIZE, NORMALIZE_THEN_SUM = range(len(COMBINES))
WHITENS = ("none", "rows", "tokens")
WHITEN_NONE, WHITEN_ROWS, WHITEN_TOKENS = range(len(WHITENS))
GAINS = ("none", "nonzero")
GAIN_NONE, GAIN_NONZERO = range(len(GAINS))


@planned
class Plan(NamedTuple):
    """An AdvantageConfig as the kernels read it: codes first, then numbers."""

    center: int
    scale: int
    singleton: int
    combine: int
    whiten: int
    gain: int
    ddof: float
    eps: float
    std_floor: float
    shrinkage: float
    clip: float
    whiten_eps: float


_DEFAULTS: dict[str, Any] = {
    "center": "mean",
    "scale": "std",
    "ddof": 1,
    "eps": 1e-6,
    "std_floor": 0.0,
    "singleton": "zero",
    "shrinkage": 0.0,
    "clip": None,
    "reward_weights": None,
    "combine": "sum_then_normalize",
    "whiten": "none",
    "whiten_eps": 0.0,
    "gain": "none",
}

# Overrides of _DEFAULTS by estimator. Names with a peer's prefix reproduce that peer's function up to rounding,
# except for equal rewards, whose advantages are 0.
# names of losses that are used with the advantages of GRPO
_LOSSES_OF_GRPO = ("dapo", "bnpo", "luspo", "cispo", "sapo", "vespo", "gspo", "gmpo")
# names of advantages of tokens
_OF_TOKENS = {
    **dict.fromkeys(("ppo", "gae"), "gae"),
    **dict.fromkeys(("reinforce++", "reinforce_plus_plus"), "reinforce_plus_plus"),
    "reinforce": "reinforce",
}
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"scale": "none"},
    "rloo": {"center": "leave_one_out", "scale": "none"},
    "opo": {"center": "length", "scale": "none"},
    "maxrl": {"scale": "mean"},
    "gdpo": {"combine": "normalize_then_sum", "whiten": "rows", "whiten_eps": 1e-6},
    "grpo_passk": {"center": "runner_up"},
    "reinforce_plus_plus_baseline": {
        "scale": "none",
        "singleton": "raw",
        "whiten": "tokens",
        "whiten_eps": 1e-8,
    },
    "gpg": {"scale": "none", "gain": "nonzero"},
    "remax": {"center": "baseline", "scale": "none", "singleton": "raw"},
    "spo": {"center": "baseline", "scale": "none", "singleton": "raw", "whiten": "rows", "whiten_eps": 1e-8},
    "batch_std": {"scale": "batch_std"},
    "trl-group": {"eps": 1e-4},
    "trl-batch": {"scale": "batch_std", "eps": 1e-4},
    "trl-none": {"scale": "none"},
    "trl-gdpo": {"eps": 1e-4, "combine": "normalize_then_sum", "whiten": "rows", "whiten_eps": 1e-4},
    "trl-rloo": {"center": "leave_one_out", "scale": "none"},
    "trl-rloo-normalized": {
        "center": "leave_one_out",
        "scale": "none",
        "whiten": "rows",
        "whiten_eps": 1e-4,
    },
    "trl-async": {"ddof": 0, "eps": 1e-8},
    "verl-grpo": {"singleton": "raw"},
    "verl-grpo-vectorized": {"singleton": "raw"},
    "verl-dr-grpo": {"scale": "none", "singleton": "raw"},
    "verl-rloo": {"center": "leave_one_out", "scale": "none", "singleton": "raw"},
    "verl-rloo-vectorized": {"center": "leave_one_out", "scale": "none"},
    "verl-opo": {"center": "length", "scale": "none", "singleton": "raw"},
    "verl-gdpo": {
        "singleton": "raw",
        "combine": "normalize_then_sum",
        "whiten": "tokens",
        "whiten_eps": 1e-8,
    },
    "verl-grpo-passk": {"center": "runner_up"},
    "verl-reinforce-plus-plus-baseline": {
        "scale": "none",
        "singleton": "raw",
        "whiten": "tokens",
        "whiten_eps": 1e-8,
    },
    "verl-gpg": {"scale": "none", "singleton": "raw", "gain": "nonzero"},
    "verl-remax": {"center": "baseline", "scale": "none", "singleton": "raw"},
    "nemo-grpo": {"center": "leave_one_out", "scale": "leave_one_out_std"},
}


@dataclasses.dataclass(frozen=True)
class AdvantageConfig(PlannedConfig):
    """How rewards become advantages. A field left at ``None`` takes the estimator's value.

    `dataclasses.replace` keeps all other fields, so make a new config to change the estimator.

    Args:
        estimator: starting point, one of AdvantageConfig.names()
        center: what is subtracted: "none", "mean", "leave_one_out", "length" (token-weighted mean), "baseline" (one
            value per row) or "runner_up" (pass@k: the best row gets best minus second best, the others 0)
        scale: what is divided by: "none", "std" (of the group), "batch_std", "mean" (of the group) or
            "leave_one_out_std" (of the group's other rows; by nothing where they are equal)
        ddof: 0 or 1, for every standard deviation
        eps, std_floor: the divisor is max(std, std_floor) + eps, and mean + eps with scale="mean"
        singleton: advantage of a group with one scored row: "zero", "raw" (its reward, over 1 + eps if scaled by std)
            or "parent" (statistics of the group that the subgroup belongs to)
        shrinkage: kappa; a subgroup of n rows weighs its own mean and std by n/(n+kappa), those of its group by the
            rest
        clip: advantages are clamped to [-clip, clip]; None means not clamped
        reward_weights: one weight per reward column; None means all 1
        combine: "sum_then_normalize" or "normalize_then_sum" (GDPO)
        whiten: a second normalisation over the batch: "none", "rows" (over std + whiten_eps) or "tokens" (over
            sqrt(var + whiten_eps), each row counted `lengths` times)
        whiten_eps: see `whiten`
        gain: "none" or "nonzero" (GPG: times scored rows / rows with a nonzero reward)
    """

    # The None defaults exist only until __post_init__ has filled them in, hence the ignores.
    estimator: str = "grpo"
    center: str = None  # type: ignore[assignment]
    scale: str = None  # type: ignore[assignment]
    ddof: int = None  # type: ignore[assignment]
    eps: float = None  # type: ignore[assignment]
    std_floor: float = None  # type: ignore[assignment]
    singleton: str = None  # type: ignore[assignment]
    shrinkage: float = None  # type: ignore[assignment]
    clip: float | None = None
    reward_weights: tuple[float, ...] | None = None
    combine: str = None  # type: ignore[assignment]
    whiten: str = None  # type: ignore[assignment]
    whiten_eps: float = None  # type: ignore[assignment]
    gain: str = None  # type: ignore[assignment]

    if TYPE_CHECKING:  # derived: the weights as a list
        weight_list: list[float] = dataclasses.field(init=False)

    _presets: ClassVar[dict[str, AdvantageConfig]] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.estimator, str) or self.estimator not in _ESTIMATORS:
            raise unknown("AdvantageConfig", "estimator", self.estimator, _ESTIMATORS)
        for field, default in (_DEFAULTS | _ESTIMATORS[self.estimator]).items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)
        self._check_values()
        self._check_combinations()
        plan = Plan(
            center=CENTERS.index(self.center),
            scale=SCALES.index(self.scale),
            singleton=SINGLETONS.index(self.singleton),
            combine=COMBINES.index(self.combine),
            whiten=WHITENS.index(self.whiten),
            gain=GAINS.index(self.gain),
            ddof=self.ddof,
            eps=self.eps,
            std_floor=self.std_floor,
            shrinkage=self.shrinkage,
            clip=math.inf if self.clip is None else self.clip,
            whiten_eps=self.whiten_eps,
        )
        self._set_plan(plan)
        object.__setattr__(self, "weight_list", list(self.reward_weights or ()))

    def _check_values(self) -> None:
        choices(self, center=CENTERS, scale=SCALES, singleton=SINGLETONS, combine=COMBINES, whiten=WHITENS, gain=GAINS)
        if self.ddof not in (0, 1) or isinstance(self.ddof, bool):
            raise ValueError(f"AdvantageConfig: ddof must be 0 or 1, got {self.ddof!r}")
        for field in ("eps", "std_floor", "shrinkage", "whiten_eps"):
            finite("AdvantageConfig", field, getattr(self, field), minimum=0.0)
        if self.clip is not None:
            finite("AdvantageConfig", "clip", self.clip, minimum=0.0, open_end=True)
        if self.reward_weights is not None:
            if isinstance(self.reward_weights, str) or not isinstance(self.reward_weights, Sequence):
                got = type(self.reward_weights).__name__
                raise TypeError(f"AdvantageConfig: reward_weights must be a sequence of numbers, got {got}")
            if not self.reward_weights:
                raise ValueError("AdvantageConfig: reward_weights must have one number per reward, got none")
            for weight in self.reward_weights:
                finite("AdvantageConfig", "reward_weights", weight)
            object.__setattr__(self, "reward_weights", tuple(float(w) for w in self.reward_weights))

    def _check_combinations(self) -> None:
        group_centers = ("mean", "leave_one_out", "length")
        if self.shrinkage and not (self.center == "mean" and self.scale in ("none", "std")):
            raise ValueError(
                "AdvantageConfig: shrinkage must be 0 unless center is 'mean' and scale is 'none' or 'std', "
                f"got shrinkage={self.shrinkage!r} with center={self.center!r}, scale={self.scale!r}"
            )
        if self.std_floor and self.scale in ("none", "mean"):
            raise ValueError(
                "AdvantageConfig: std_floor must be 0 unless scale is a standard deviation, "
                f"got std_floor={self.std_floor!r} with scale={self.scale!r}"
            )
        if self.scale == "leave_one_out_std" and (self.center != "leave_one_out" or self.singleton == "parent"):
            raise ValueError(
                "AdvantageConfig: scale must not be 'leave_one_out_std' unless center is 'leave_one_out' and "
                f"singleton is not 'parent', got center={self.center!r}, singleton={self.singleton!r}"
            )
        if self.singleton == "parent" and self.center not in group_centers:
            raise ValueError(
                f"AdvantageConfig: singleton must not be 'parent' unless center is one of {group_centers}, "
                f"got center={self.center!r}"
            )
        if self.center == "runner_up" and self.singleton != "zero":
            raise ValueError(
                "AdvantageConfig: singleton must be 'zero' with center='runner_up', as one row has no runner-up, "
                f"got {self.singleton!r}"
            )
        if self.combine == "normalize_then_sum" and (
            self.center not in ("mean", "leave_one_out") or self.scale == "batch_std" or self.gain != "none"
        ):
            raise ValueError(
                "AdvantageConfig: combine must be 'sum_then_normalize' unless center is 'mean' or 'leave_one_out', "
                "scale is per group and gain is 'none', "
                f"got center={self.center!r}, scale={self.scale!r}, gain={self.gain!r}"
            )
        stages = [f for f in ("whiten", "gain") if getattr(self, f) != "none"]
        stages += ["scale"] if self.scale == "batch_std" else []
        if len(stages) > 1:
            raise ValueError(
                "AdvantageConfig: only one of whiten, gain and scale='batch_std' may act on the batch, got "
                + ", ".join(f"{f}={getattr(self, f)!r}" for f in stages)
            )

    @property
    def needs_lengths(self) -> bool:
        return self.center == "length" or self.whiten == "tokens"

    @property
    def needs_baselines(self) -> bool:
        return self.center == "baseline"

    @property
    def needs_parent(self) -> bool:
        return self.singleton == "parent" or self.shrinkage > 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(_ESTIMATORS)

    @classmethod
    def of(cls, config: AdvantageConfig | str, op: str = "group_advantages") -> AdvantageConfig:
        """Returns a config unchanged, and resolves the name of an estimator; errors name `op`."""
        if isinstance(config, AdvantageConfig):
            return config
        config_or_name(op, "config", config, cls)
        if config not in cls._presets:
            meant = None
            if config.lower() in _LOSSES_OF_GRPO:
                meant = f"{config!r} is a loss, and its advantages are 'grpo'"
            elif (estimator := _OF_TOKENS.get(config.lower())) is not None:
                meant = f"its advantages are of tokens: token_advantages(config={estimator!r})"
            raise unknown(op, "config", config, _ESTIMATORS, meant)
        return cls._presets[config]


AdvantageConfig._presets.update({name: AdvantageConfig(name) for name in _ESTIMATORS})
