"""LossConfig: what the policy loss is made of. Every published loss is a setting of these fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from grpo_kernels.config.rules import finite, unknown

LOSSES = ("clip", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro")
RATIOS = ("token", "sequence", "sequence_token", "segment", "segment_mean")
KLS = ("none", "k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "local-token-mean",
)
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

# What the kernels measure, in the order of PolicyLossMetrics.tensor.
METRICS = (
    "loss",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "rows",
    "active_rows",
    "tokens",
    "terms",
    "kept_tokens",
    "low_clipped",
    "high_clipped",
    "clipped",
    "dual_clipped",
    "low_clipped_rows",
    "high_clipped_rows",
    "low_clipped_min",
    "high_clipped_max",
    "log_ratio_sum",
    "kl_sum",
    "entropy_sum",
    "ratio_sum",
    "ratio_spread_sum",
    "ratio_min",
    "ratio_max",
    "phi_sum",
    "phi_rows",
    "is_sum",
    "is_square_sum",
    "is_min",
    "is_max",
    "is_count",
    "gap_sum",
    "gap_max",
    "gap_count",
    "off_policy_tokens",
)

# For each loss, the ratios it has a meaning with.
_RATIOS_OF = {
    "clip": RATIOS,
    "cispo": ("token", "sequence", "segment", "segment_mean"),
    "sapo": ("token", "sequence", "segment", "segment_mean"),
    "vespo": ("token", "sequence"),
    "geo_mean": ("token",),
    "dppo_tv": ("token",),
    "dppo_kl": ("token",),
    "reinforce": ("token",),
    "dro": ("token",),
}
# For each loss, the fields that it alone (or with others) reads; a value other than the default elsewhere is refused.
_OWN_FIELDS = {
    "delta": ("clip",),
    "dual_clip": ("clip",),
    "ratio_cap": ("dppo_tv", "dppo_kl"),
    "sapo_temperatures": ("sapo",),
    "vespo_shape": ("vespo",),
    "dro_beta": ("dro",),
    "log_ratio_clamp": ("clip", "cispo", "sapo", "dppo_tv", "dppo_kl"),
    "clip_low": ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl"),
    "clip_high": ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl"),
}


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The policy loss: sum over terms of weight * term, plus kl_coef * KL, minus entropy_coef * entropy.

    loss                clip | cispo | sapo | vespo | geo_mean | dppo_tv | dppo_kl | reinforce | dro
    ratio               token | sequence (geometric mean of the row's ratios) | sequence_token (its value, with the
                        gradient of each token's own ratio) | segment (joint ratio of a sub-sequence) | segment_mean
    clip_low, clip_high the ratio is kept in [1 - clip_low, 1 + clip_high]; geo_mean: the log ratio in [-clip_low,
                        clip_high]; dppo: bounds of the divergence; None: no bound on that side
    dual_clip           with negative advantage a term is at most -advantage * dual_clip
    delta               upper bound of the unclipped ratio (two-sided clipping)
    ratio_cap           upper bound of the detached ratio of dppo
    sapo_temperatures   for positive advantages, for the others
    vespo_shape         k and lambda for advantages of at least 0, k and lambda for the others
    dro_beta            weight of the squared log ratio
    log_ratio_clamp     (low, high): the log ratio is limited to this, and has no gradient beyond
    kl                  none | k1 | k2 | k3 | abs; with a + behind it the gradient is that of k2
    kl_coef             its weight; 0: computed for the metrics only
    kl_clamp            (input, output): log ratio to the reference and estimate are limited to plus and minus these
    kl_unbiased         the estimate is multiplied by the ratio, with gradient through both
    entropy_coef        weight of the entropy bonus
    aggregation         token-mean | token-sum | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm
    kl_aggregation, entropy_aggregation
                        the same for those terms; None: as `aggregation`; local-token-mean: over the tokens that
                        top_entropy_quantile keeps, whatever the normalizer
    max_length          the constant that seq-mean-token-sum-norm divides by
    count_empty_rows    whether rows without tokens count in means over rows
    correction          rollout mismatch, from sampling_logprobs: none | token_truncate | token_mask |
                        sequence_truncate | sequence_mask
    correction_min, correction_max
                        bounds of its ratio; None: none
    off_policy_threshold
                        rows of negative advantage are dropped if their mean log ratio of sampler to policy is above
    top_entropy_quantile
                        the policy term acts on this share of the tokens, those of highest entropy
    """

    loss: str = "clip"
    ratio: str = "token"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    ratio_cap: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_shape: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    dro_beta: float | None = None
    log_ratio_clamp: tuple[float, float] | None = None
    kl: str = "none"
    kl_coef: float = 0.0
    kl_clamp: tuple[float, float] | None = None
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    kl_aggregation: str | None = None
    entropy_aggregation: str | None = None
    max_length: int | None = None
    count_empty_rows: bool = False
    correction: str = "none"
    correction_min: float | None = None
    correction_max: float | None = None
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0

    # What the kernels read, in the order of csrc/include/grpo_kernels/policy_plan.h.
    modes: list[int] = dataclasses.field(init=False, repr=False, compare=False)
    coefficients: list[float] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        self._check_combinations()
        object.__setattr__(self, "modes", self._modes())
        object.__setattr__(self, "coefficients", self._coefficients())

    @classmethod
    def trl(cls, **fields: Any) -> LossConfig:
        """From the fields of trl.GRPOConfig by their own names; those left out have TRL's defaults."""
        from grpo_kernels.config.loss_peers import from_trl

        return from_trl(**fields)

    @classmethod
    def verl(cls, **fields: Any) -> LossConfig:
        """From the fields of verl's ActorConfig and PolicyLossConfig by their own names; likewise."""
        from grpo_kernels.config.loss_peers import from_verl

        return from_verl(**fields)

    @classmethod
    def of(cls, config: LossConfig | str, op: str = "policy_loss") -> LossConfig:
        """The config itself, or that of a TRL loss_type."""
        if isinstance(config, LossConfig):
            return config
        if not isinstance(config, str):
            raise TypeError(f"{op}: config must be a LossConfig or a str, got {type(config).__name__}")
        if config not in _NAMED:
            raise unknown(op, "config", config, _NAMED)
        return _NAMED[config]

    def _check_names(self) -> None:
        choices = {"loss": LOSSES, "ratio": RATIOS, "kl": KLS, "correction": CORRECTIONS}
        choices |= {"aggregation": AGGREGATIONS[:-1]}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise unknown("LossConfig", field, getattr(self, field), allowed)
        for field in ("kl_aggregation", "entropy_aggregation"):
            if getattr(self, field) is not None and getattr(self, field) not in AGGREGATIONS:
                raise unknown("LossConfig", field, getattr(self, field), AGGREGATIONS)
        for field in ("kl_unbiased", "count_empty_rows"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"LossConfig: {field} must be a bool, got {getattr(self, field)!r}")

    def _check_numbers(self) -> None:
        for field in ("clip_low", "clip_high", "off_policy_threshold", "correction_min", "correction_max"):
            if getattr(self, field) is not None:
                # TRL's cispo has an absolute cap, which may lie below 1
                finite("LossConfig", field, getattr(self, field), None if field == "clip_high" else 0.0)
        for field in ("delta", "ratio_cap", "dro_beta"):
            if getattr(self, field) is not None:
                finite("LossConfig", field, getattr(self, field), 0.0, open_end=True)
        if self.dual_clip is not None:
            finite("LossConfig", "dual_clip", self.dual_clip, 1.0, open_end=True)
        for field in ("kl_coef", "entropy_coef"):
            finite("LossConfig", field, getattr(self, field))
        finite("LossConfig", "top_entropy_quantile", self.top_entropy_quantile, 0.0, open_end=True)
        if self.top_entropy_quantile > 1:
            raise ValueError(f"LossConfig: top_entropy_quantile must be at most 1, got {self.top_entropy_quantile!r}")
        self._check_tuple("sapo_temperatures", 2, minimum=0.0, open_end=True)
        self._check_tuple("vespo_shape", 4, minimum=0.0)
        if self.kl_clamp is not None:
            self._check_tuple("kl_clamp", 2, minimum=0.0, open_end=True)
        clamp = self.log_ratio_clamp
        if clamp is not None:
            numbers = isinstance(clamp, tuple | list) and all(type(bound) in (int, float) for bound in clamp)
            if not numbers or len(clamp) != 2 or not clamp[0] < clamp[1]:
                raise ValueError(f"LossConfig: log_ratio_clamp must be (low, high) with low < high, got {clamp!r}")
            object.__setattr__(self, "log_ratio_clamp", tuple(float(bound) for bound in clamp))
        if self.max_length is not None and (
            isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 1
        ):
            raise ValueError(f"LossConfig: max_length must be a positive int, got {self.max_length!r}")

    def _check_tuple(self, field: str, length: int, **rule: Any) -> None:
        value = getattr(self, field)
        if not isinstance(value, tuple | list) or len(value) != length:
            raise ValueError(f"LossConfig: {field} must hold {length} numbers, got {value!r}")
        for number in value:
            finite("LossConfig", field, number, **rule)
        object.__setattr__(self, field, tuple(float(number) for number in value))

    def _check_combinations(self) -> None:
        def refuse(rule: str, *fields: str) -> None:
            got = ", ".join(f"{field}={getattr(self, field)!r}" for field in fields)
            raise ValueError(f"LossConfig: {rule}, got {got}")

        if self.ratio not in _RATIOS_OF[self.loss]:
            refuse(f"ratio must be one of {', '.join(_RATIOS_OF[self.loss])} for this loss", "ratio", "loss")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for field, losses in _OWN_FIELDS.items():
            if self.loss not in losses and getattr(self, field) != defaults[field]:
                refuse(f"{field} must be left out unless loss is {' or '.join(losses)}", field, "loss")
        if self.loss.startswith("dppo") and None in (self.clip_low, self.clip_high):
            refuse("clip_low and clip_high must be numbers for dppo", "clip_low", "clip_high")
        if self.loss == "dro" and self.dro_beta is None:
            refuse("dro_beta must be given for loss 'dro'", "dro_beta")
        if self.clip_high is not None and self.clip_high < (-1.0 if self.loss == "cispo" else 0.0):
            refuse("clip_high must be at least 0", "clip_high")
        if self.kl == "none" and (self.kl_coef != 0 or self.kl_clamp is not None or self.kl_unbiased):
            refuse(
                "kl must be chosen for kl_coef, kl_clamp and kl_unbiased", "kl", "kl_coef", "kl_clamp", "kl_unbiased"
            )
        biased = self.ratio not in ("token", "sequence") or self.loss == "geo_mean" or self.kl.endswith("+")
        if self.kl_unbiased and biased:
            refuse("kl_unbiased must be False with a straight-through KL, this ratio or loss", "kl", "ratio", "loss")
        aggregations = (self.aggregation, self.kl_aggregation, self.entropy_aggregation)
        if ("seq-mean-token-sum-norm" in aggregations) != (self.max_length is not None):
            refuse("max_length must be given with seq-mean-token-sum-norm, and only then", "max_length", "aggregation")
        if self.correction == "none" and (self.correction_min, self.correction_max) != (None, None):
            refuse("correction must be chosen for its bounds", "correction_min", "correction_max")
        if self.correction.startswith("sequence") and self.loss == "vespo":
            refuse("correction must be by token for vespo, whose ratio is their product", "correction", "loss")
        if self.correction.startswith("token") and self.ratio.startswith("segment"):
            refuse("correction must be by sequence with ratios of segments", "correction", "ratio")
        if self.loss == "geo_mean" and self.aggregation not in ("seq-mean-token-sum", "token-sum"):
            refuse("aggregation must be seq-mean-token-sum (or token-sum) for geo_mean, whose terms are rows",
                   "aggregation")  # fmt: skip

    def _modes(self) -> list[int]:
        kl = self.kl.removesuffix("+")
        return [
            LOSSES.index(self.loss),
            RATIOS.index(self.ratio),
            KLS.index(kl),
            int(self.kl.endswith("+")),
            int(self.kl_unbiased),
            AGGREGATIONS.index(self.aggregation),
            AGGREGATIONS.index(self.kl_aggregation or self.aggregation),
            AGGREGATIONS.index(self.entropy_aggregation or self.aggregation),
            int(self.count_empty_rows),
            CORRECTIONS.index(self.correction),
        ]

    def _coefficients(self) -> list[float]:
        def bound(value: float | None, none: float) -> float:
            return none if value is None else float(value)

        of_ratio = self.loss in ("clip", "cispo")
        low, high = bound(self.clip_low, math.inf), bound(self.clip_high, math.inf)
        clamp = self.log_ratio_clamp or (-math.inf, math.inf)
        kl_clamp = self.kl_clamp or (math.inf, math.inf)
        return [
            1 - low if of_ratio else low,
            1 + high if of_ratio else high,
            bound(self.dual_clip, math.inf),
            bound(self.delta if self.loss == "clip" else self.ratio_cap, math.inf),
            *self.sapo_temperatures,
            *self.vespo_shape,
            bound(self.dro_beta, 0.0),
            float(clamp[0]),
            float(clamp[1]),
            float(self.kl_coef),
            float(kl_clamp[0]),
            float(kl_clamp[1]),
            float(self.entropy_coef),
            float(self.max_length or 1),
            bound(self.correction_min, -math.inf),
            bound(self.correction_max, math.inf),
            bound(self.off_policy_threshold, math.inf),
        ]


# Made once: torch.compile can read a config, but not follow how one is made.
_NAMED: dict[str, LossConfig] = {}


def name_configs(names: tuple[str, ...]) -> None:
    _NAMED.update({name: LossConfig.trl(loss_type=name) for name in names})
