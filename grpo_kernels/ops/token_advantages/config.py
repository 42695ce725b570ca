"""TokenAdvantageConfig: how rewards and values of tokens become advantages."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from grpo_kernels.checks import boolean, choices, config_or_name, finite, unknown
from grpo_kernels.plans import PlannedConfig, planned

# Names, and the codes that kernels know them by: their positions. csrc/token_advantages/terms.h repeats them for C++.
WHITENS = ("none", "tokens")
WHITEN_NONE, WHITEN_TOKENS = range(len(WHITENS))


@planned
class Plan(NamedTuple):
    """A TokenAdvantageConfig as the kernels read it: codes first, then numbers."""

    whiten: int
    carry_rewards: int
    gamma: float
    lam: float
    whiten_eps: float


_DEFAULTS: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "whiten": "tokens", "whiten_eps": 1e-8}
# Overrides of _DEFAULTS by estimator.
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {},
    "reinforce_plus_plus": {},
    "reinforce": {"whiten": "none"},
}


@dataclasses.dataclass(frozen=True)
class TokenAdvantageConfig(PlannedConfig):
    """How rewards and values of tokens become advantages. A field left at ``None`` takes the estimator's value.

    `dataclasses.replace` keeps all other fields, so make a new config to change the estimator.

    Args:
        estimator: "gae" compares lambda-returns with a critic's values; "reinforce_plus_plus" and "reinforce" use the
            returns themselves, the latter without whitening
        gamma: discount from one token to the next; with turns, from one turn to the next
        lam: weight of later temporal differences; must be 1 without values
        whiten: "none", or "tokens": (A - mean) / sqrt(var + whiten_eps) over all tokens of the batch
        whiten_eps: see `whiten`
        carry_rewards: a reward at a token that does not count belongs to the last token before it that does, whose
            action led to it; False leaves such rewards out, as verl does
    """

    # The None defaults exist only until __post_init__ has filled them in, hence the ignores.
    estimator: str = "gae"
    gamma: float = None  # type: ignore[assignment]
    lam: float = None  # type: ignore[assignment]
    whiten: str = None  # type: ignore[assignment]
    whiten_eps: float = None  # type: ignore[assignment]
    carry_rewards: bool = True

    _presets: ClassVar[dict[str, TokenAdvantageConfig]] = {}

    def __post_init__(self) -> None:
        where = "TokenAdvantageConfig"
        if not isinstance(self.estimator, str) or self.estimator not in _ESTIMATORS:
            raise unknown(where, "estimator", self.estimator, _ESTIMATORS)
        for field, default in (_DEFAULTS | _ESTIMATORS[self.estimator]).items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)
        choices(self, whiten=WHITENS)
        boolean(where, carry_rewards=self.carry_rewards)
        finite(where, "whiten_eps", self.whiten_eps, minimum=0.0)
        for field in ("gamma", "lam"):
            finite(where, field, getattr(self, field), minimum=0.0)
            if getattr(self, field) > 1:
                raise ValueError(f"{where}: {field} must be in [0, 1], got {getattr(self, field)!r}")
        if not self.needs_values and self.lam != 1:
            raise ValueError(
                f"{where}: lam must be 1 for estimator {self.estimator!r}, which has no values, got {self.lam!r}"
            )
        plan = Plan(
            whiten=WHITENS.index(self.whiten),
            carry_rewards=self.carry_rewards,
            gamma=self.gamma,
            lam=self.lam,
            whiten_eps=self.whiten_eps,
        )
        self._set_plan(plan)

    @property
    def needs_values(self) -> bool:
        return self.estimator == "gae"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(_ESTIMATORS)

    @classmethod
    def of(cls, config: TokenAdvantageConfig | str) -> TokenAdvantageConfig:
        """Returns a config unchanged, and resolves the name of an estimator."""
        if isinstance(config, TokenAdvantageConfig):
            return config
        config_or_name("token_advantages", "config", config, cls)
        if config not in cls._presets:
            raise unknown("token_advantages", "config", config, _ESTIMATORS)
        return cls._presets[config]


TokenAdvantageConfig._presets.update({name: TokenAdvantageConfig(name) for name in _ESTIMATORS})
