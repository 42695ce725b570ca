"""LossConfig: the settings of the policy loss. Published losses are values of these fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from grpo_kernels.checks import boolean, choices, config_or_name, finite, of_peer, peer_fields, unknown
from grpo_kernels.ops.policy_loss.losses import COEFFICIENTS, LOSSES, RATIOS, Plan
from grpo_kernels.ops.policy_loss.trl_fields import TRL_DEFAULTS, TRL_LOSS_TYPES, trl_fields
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS, VERL_LOSSES, verl_fields
from grpo_kernels.plans import PlannedConfig

# Names, and the codes that kernels know them by: their positions. csrc/policy_loss/plan.h repeats them for C++.
ESTIMATORS = ("none", "k1", "k2", "k3", "abs")
KL_NONE, K1, K2, K3, KL_ABS = range(len(ESTIMATORS))
KLS = (*ESTIMATORS, "k1+", "k3+", "abs+")  # "+": with the gradient of k2
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "local-token-mean",
)
TOKEN_MEAN, TOKEN_SUM, ROW_TOKEN_MEAN, ROW_TOKEN_SUM, ROW_TOKEN_NORM, LOCAL_TOKEN_MEAN = range(len(AGGREGATIONS))
# Keywords of peers that LossConfig does not take, and what is meant by them.
_KEYWORDS = {
    name: f"{peer}'s is LossConfig.{constructor}({name}=...)"
    for peer, constructor, names in (("verl", "verl", VERL_DEFAULTS), ("TRL", "trl", TRL_DEFAULTS))
    for name in names
} | {
    **dict.fromkeys(("top_entropy_quantile", "entropy_floor"), "it is policy_mask=gk.variants.high_entropy_mask(...)"),
    **dict.fromkeys(
        ("off_policy_mask_threshold", "off_policy_threshold"), "it is policy_mask=gk.variants.off_policy_mask(...)"
    ),
    **dict.fromkeys(
        ("correction", "vllm_importance_sampling_mode"), "it is is_weights=gk.sampling_correction(...).weights"
    ),
}
_PAPERS = {
    "ppo": "PPO's policy term is LossConfig('clip')",
    "gmpo": "GMPO is LossConfig.verl(loss_mode='geo_mean')",
    **dict.fromkeys(("clip_cov", "kl_cov"), "it composes: see gk.variants"),
    "fipo": "its weights are gk.variants.future_kl_weights",
    "opsm": "its mask is gk.variants.off_policy_mask",
    **{name: f"it is gk.variants.{name}_loss" for name in ("gvpo", "real", "flowrl")},
    **dict.fromkeys(
        ("rloo", "remax", "opo"),
        "it names advantages; its loss is LossConfig(loss='reinforce', aggregation='seq-mean-token-sum')",
    ),
    **dict.fromkeys(
        ("maxrl", "gdpo", "grpo_passk", "gae", "reinforce_plus_plus", "reinforce++"),
        "it names advantages; its loss is LossConfig()",
    ),
}


@dataclasses.dataclass(frozen=True)
class LossConfig(PlannedConfig):
    """The policy loss: sum over terms of weight * term, plus kl_coef * KL, minus entropy_coef * entropy.

    Args:
        loss: "clip", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro", "ipo", "icepop"
            or "topr"
        ratio: "token", "sequence" (geometric mean of the row's ratios), "sequence_token" (its value, with the gradient
            of each token's own ratio), "segment" (joint ratio of a sub-sequence) or "segment_mean"
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; geo_mean clips the log ratio to
            [-clip_low, clip_high], and for dppo these bound the divergence. ipo drops tokens whose probability changed
            by more than these, icepop those whose ratio is outside. None means no bound on that side
        dual_clip: with a negative advantage a term is at most -advantage * dual_clip
        delta: upper bound of the unclipped ratio (two-sided clipping)
        ratio_cap: upper bound of the detached ratio of dppo, and of topr where the advantage is not positive (None: 1)
        sapo_temperatures: for positive advantages, for the others
        vespo_shape: k and lambda for nonnegative advantages, k and lambda for the others
        dro_beta: weight of the squared log ratio
        log_ratio_clamp: (low, high) bounds of the log ratio, which has no gradient beyond them
        kl: "none", "k1", "k2", "k3" or "abs"; a trailing "+" takes the gradient of k2
        kl_coef: weight of the KL term; 0 computes it for the metrics only
        kl_clamp: (input, output); the log ratio to the reference and the estimate are clamped to plus and minus these
        kl_unbiased: multiply the estimate by the ratio, with gradients through both
        entropy_coef: weight of the entropy bonus
        aggregation: "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum" or
            "seq-mean-token-sum-norm"
        kl_aggregation, entropy_aggregation: the same for those terms; None means as `aggregation`. "local-token-mean"
            is the mean over the tokens of this call, whatever the normalizer
        max_length: constant divisor of "seq-mean-token-sum-norm"
        count_empty_rows: whether rows without tokens count in means over rows; geo_mean's terms always do, as in verl
    """

    _meant: ClassVar[dict[str, str]] = _KEYWORDS
    loss: str = "clip"
    ratio: str = "token"
    clip_low: float | None = COEFFICIENTS["clip_low"].default
    clip_high: float | None = COEFFICIENTS["clip_high"].default
    dual_clip: float | None = COEFFICIENTS["dual_clip"].default
    delta: float | None = COEFFICIENTS["delta"].default
    ratio_cap: float | None = COEFFICIENTS["ratio_cap"].default
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_shape: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)
    dro_beta: float | None = COEFFICIENTS["dro_beta"].default
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

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        self._check_combinations()
        self._set_plan(self._plan())

    @property
    def couples_tokens(self) -> bool:
        """Whether the gradient of a token depends on other tokens of its sequence."""
        return LOSSES[self.loss].couples_tokens or self.ratio != "token"

    @property
    def has_other_terms(self) -> bool:
        """Whether a token without an advantage has a gradient."""
        return self.kl_coef != 0 or self.entropy_coef != 0 or LOSSES[self.loss].has_other_terms

    @classmethod
    @peer_fields(TRL_DEFAULTS)
    def trl(cls, **fields: Any) -> LossConfig:
        """The loss that trl.GRPOConfig describes with these fields; the others have TRL's defaults."""
        return of_peer(cls, "trl", trl_fields, fields)

    @classmethod
    @peer_fields(VERL_DEFAULTS)
    def verl(cls, **fields: Any) -> LossConfig:
        """The loss that verl's ActorConfig and PolicyLossConfig describe with these fields; likewise."""
        return of_peer(cls, "verl", verl_fields, fields)

    @classmethod
    def of(cls, config: LossConfig | str, op: str = "policy_loss") -> LossConfig:
        """Returns a config unchanged, and resolves the name of a TRL loss_type."""
        if isinstance(config, LossConfig):
            return config
        config_or_name(op, "config", config, cls)
        if config not in _NAMED:
            raise unknown(op, "config", config, _NAMED, _elsewhere(config))
        return _NAMED[config]

    def _check_names(self) -> None:
        names = tuple(LOSSES)
        if self.loss not in names and isinstance(self.loss, str) and self.loss in _NAMED:
            raise ValueError(
                f"LossConfig: loss must be the name of a term, got {self.loss!r}, which names a whole config: "
                f"LossConfig.of({self.loss!r})"
            )
        if self.loss not in names:
            raise unknown("LossConfig", "loss", self.loss, names, _elsewhere(self.loss))
        choices(self, ratio=RATIOS, kl=KLS, aggregation=AGGREGATIONS[:-1])
        for field in ("kl_aggregation", "entropy_aggregation"):
            if getattr(self, field) is not None:
                choices(self, **{field: AGGREGATIONS})
        boolean("LossConfig", kl_unbiased=self.kl_unbiased, count_empty_rows=self.count_empty_rows)

    def _check_numbers(self) -> None:
        for field, number in COEFFICIENTS.items():
            if getattr(self, field) is not None:
                finite("LossConfig", field, getattr(self, field), number.minimum, number.open_end)
        for field in ("kl_coef", "entropy_coef"):
            finite("LossConfig", field, getattr(self, field))
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

        row = LOSSES[self.loss]
        if self.ratio not in row.ratios:
            refuse(f"ratio must be one of {', '.join(row.ratios)} for this loss", "ratio", "loss")
        for field in dataclasses.fields(self):
            readers = [name for name, other in LOSSES.items() if field.name in other.reads]
            if readers and self.loss not in readers and getattr(self, field.name) != field.default:
                refuse(f"{field.name} must be left out unless loss is {' or '.join(readers)}", field.name, "loss")
        for name in row.needs:
            if getattr(self, name) is None:
                refuse(f"{name} must be given for loss {self.loss!r}", name)
        if self.clip_high is not None and self.clip_high < (-1.0 if self.loss == "cispo" else 0.0):
            refuse("clip_high must be at least 0", "clip_high")
        if self.kl == "none" and (self.kl_coef != 0 or self.kl_clamp is not None or self.kl_unbiased):
            estimators = ", ".join(name for name in KLS if name != "none")
            rule = f"kl must be one of {estimators} with kl_coef, kl_clamp or kl_unbiased"
            refuse(rule, "kl", "kl_coef", "kl_clamp", "kl_unbiased")
        biased = self.ratio not in ("token", "sequence") or row.is_of_rows or self.kl.endswith("+")
        if self.kl_unbiased and biased:
            refuse("kl_unbiased must be False with a straight-through KL, this ratio or loss", "kl", "ratio", "loss")
        aggregations = (self.aggregation, self.kl_aggregation, self.entropy_aggregation)
        if ("seq-mean-token-sum-norm" in aggregations) != (self.max_length is not None):
            refuse("max_length must be given with seq-mean-token-sum-norm, and only then", "max_length", "aggregation")
        if row.is_of_rows and self.aggregation not in ("seq-mean-token-sum", "token-sum"):
            refuse(
                "aggregation must be seq-mean-token-sum or token-sum for geo_mean, with terms of rows", "aggregation"
            )

    def _plan(self) -> Plan:
        def bound(value: float | None, none: float) -> float:
            return none if value is None else float(value)

        row = LOSSES[self.loss]
        low, high = bound(self.clip_low, math.inf), bound(self.clip_high, math.inf)
        clamp_low, clamp_high = self.log_ratio_clamp or (-math.inf, math.inf)
        kl_clamp_in, kl_clamp_out = self.kl_clamp or (math.inf, math.inf)
        sapo_pos, sapo_neg = self.sapo_temperatures
        k_pos, lambda_pos, k_neg, lambda_neg = self.vespo_shape
        return Plan(
            loss=tuple(LOSSES).index(self.loss),
            ratio=RATIOS.index(self.ratio),
            kl=ESTIMATORS.index(self.kl.removesuffix("+")),
            kl_straight=self.kl.endswith("+"),
            kl_unbiased=self.kl_unbiased,
            aggregation=AGGREGATIONS.index(self.aggregation),
            kl_aggregation=AGGREGATIONS.index(self.kl_aggregation or self.aggregation),
            entropy_aggregation=AGGREGATIONS.index(self.entropy_aggregation or self.aggregation),
            count_empty_rows=self.count_empty_rows,
            low=1 - low if row.clips_ratio else low,
            high=1 + high if row.clips_ratio else high,
            dual_clip=bound(self.dual_clip, math.inf),
            cap=bound(getattr(self, row.cap), row.no_cap),
            sapo_pos=sapo_pos,
            sapo_neg=sapo_neg,
            k_pos=k_pos,
            lambda_pos=lambda_pos,
            k_neg=k_neg,
            lambda_neg=lambda_neg,
            dro_beta=bound(self.dro_beta, 0.0),
            clamp_low=clamp_low,
            clamp_high=clamp_high,
            kl_coef=self.kl_coef,
            kl_clamp_in=kl_clamp_in,
            kl_clamp_out=kl_clamp_out,
            entropy_coef=self.entropy_coef,
            max_length=self.max_length or 1,
        )


def _elsewhere(name: object) -> str | None:
    """The meaning of a name that is no loss_type of TRL, for the end of an error."""
    if not isinstance(name, str):
        return None
    if name in VERL_LOSSES:
        trl = "; TRL's is LossConfig.trl(importance_sampling_level='sequence')" if name == "gspo" else ""
        return f"verl's is LossConfig.verl(loss_mode={name!r}){trl}"
    if name in LOSSES:
        return f"the policy term is LossConfig({name!r})"
    return _PAPERS.get(name.lower())


# Built once, because torch.compile can read a config but not trace its construction.
_NAMED = {name: LossConfig.trl(loss_type=name) for name in TRL_LOSS_TYPES}
