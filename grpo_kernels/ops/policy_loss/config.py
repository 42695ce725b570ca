"""LossConfig: the settings of the policy loss. Published losses are values of these fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from grpo_kernels.checks import boolean, choices, config_or_name, finite, of_peer, unknown
from grpo_kernels.ops.policy_loss import peers
from grpo_kernels.plans import PlannedConfig

# Names, and the codes that kernels know them by: their positions. csrc/policy_loss/plan.h repeats them for C++.
LOSSES = (
    *("clip", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro", "ipo", "icepop"),
    *("topr", "clip_cov", "kl_cov"),
)
CLIP, CISPO, SAPO, VESPO, GEO_MEAN, DPPO_TV, DPPO_KL, REINFORCE, DRO, IPO, ICEPOP, TOPR, CLIP_COV, KL_COV = range(
    len(LOSSES)
)
# Losses of whole rows, whose gradient is that of "reinforce" with advantages that sequence_losses.py computes.
GROUP_LOSSES = ("gvpo", "real")
SEQUENCE_LOSSES = (*GROUP_LOSSES, "flowrl")
FLOWRL_CLIPS = ("product", "geometric", "logprob")
RATIOS = ("token", "sequence", "sequence_token", "segment", "segment_mean", "average", "geometric_average")
TOKEN, SEQUENCE, SEQUENCE_TOKEN, SEGMENT, SEGMENT_MEAN, AVERAGE, GEOMETRIC_AVERAGE = range(len(RATIOS))
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
CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
)
CORRECTION_NONE, TOKEN_TRUNCATE, TOKEN_MASK, SEQUENCE_TRUNCATE, SEQUENCE_MASK, GEOMETRIC_TRUNCATE, GEOMETRIC_MASK = (
    range(len(CORRECTIONS))
)

# What a token adds to the loss: the codes of the argument `kinds`, and last that of tokens with a policy term that
# clip_cov or kl_cov selects.
KINDS = ("policy", "cross_entropy", "reference_kl", "counted", "policy_cross_entropy", "selected")
POLICY, CROSS_ENTROPY, REFERENCE_KL, COUNTED, POLICY_CROSS_ENTROPY, SELECTED = range(len(KINDS))

# Measurements of the kernels, in the order of PolicyLossMetrics.tensor.
METRICS = (
    *("loss", "policy_loss", "kl_loss", "entropy_loss"),
    *("rows", "active_rows", "tokens", "terms", "kept_tokens"),
    *("low_clipped", "high_clipped", "clipped", "dual_clipped"),
    *("low_clipped_rows", "high_clipped_rows", "low_clipped_min", "high_clipped_max"),
    *("log_ratio_sum", "kl_sum", "entropy_sum"),
    *("ratio_sum", "ratio_spread_sum", "ratio_min", "ratio_max"),
    *("phi_sum", "phi_rows"),
    *("is_sum", "is_square_sum", "is_min", "is_max", "is_count"),
    *("gap_sum", "gap_max", "gap_count"),
    *("off_policy_tokens", "cross_entropy_loss", "policy_tokens"),
)

# Ratios that each loss is defined for.
_OF_VALUE = tuple(ratio for ratio in RATIOS if ratio != "sequence_token")
_RATIOS_OF = {
    **dict.fromkeys((*LOSSES, *SEQUENCE_LOSSES), ("token",)),
    **dict.fromkeys(("cispo", "sapo", "icepop", "topr"), _OF_VALUE),
    "clip": RATIOS,
    "vespo": ("token", "sequence"),
}
# Losses that read each field; a value other than the default is refused for all others.
_OWN_FIELDS = {
    "delta": ("clip",),
    "dual_clip": ("clip",),
    "ratio_cap": ("dppo_tv", "dppo_kl", "topr", "flowrl"),
    "sapo_temperatures": ("sapo",),
    "vespo_shape": ("vespo",),
    "dro_beta": ("dro",),
    "cov_ratio": ("clip_cov", "kl_cov"),
    "cov_bounds": ("clip_cov",),
    "cov_kl_coef": ("kl_cov",),
    "log_ratio_clamp": ("clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "ipo", "icepop", "topr"),
    "clip_low": ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "ipo", "icepop", "clip_cov", "flowrl"),
    "clip_high": ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "ipo", "icepop", "clip_cov", "flowrl"),
    "gvpo_beta": ("gvpo",),
    "real_tau": ("real",),
    "flowrl_beta": ("flowrl",),
    "flowrl_clip": ("flowrl",),
    "future_kl_half_life": ("clip",),
}


class Plan(NamedTuple):
    """A LossConfig as the kernels read it: codes and flags first, then numbers, with infinity for absent bounds."""

    loss: int
    ratio: int
    kl: int
    kl_straight: int
    kl_unbiased: int
    aggregation: int
    kl_aggregation: int
    entropy_aggregation: int
    count_empty_rows: int
    correction: int
    low: float
    high: float
    dual_clip: float
    cap: float
    sapo_pos: float
    sapo_neg: float
    k_pos: float
    lambda_pos: float
    k_neg: float
    lambda_neg: float
    dro_beta: float
    cov_kl_coef: float
    clamp_low: float
    clamp_high: float
    kl_coef: float
    kl_clamp_in: float
    kl_clamp_out: float
    entropy_coef: float
    cross_entropy_coef: float
    max_length: float
    correction_min: float
    correction_max: float
    off_policy_threshold: float

    @property
    def by_segment(self) -> bool:
        return self.ratio in (SEGMENT, SEGMENT_MEAN)


@dataclasses.dataclass(frozen=True)
class LossConfig(PlannedConfig):
    """The policy loss: sum over terms of weight * term, plus kl_coef * KL, minus entropy_coef * entropy.

    Args:
        loss: "clip", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro", "ipo", "icepop",
            "topr", "clip_cov", "kl_cov", "gvpo", "real" or "flowrl"
        ratio: "token", "sequence" (geometric mean of the row's ratios), "sequence_token" (its value, with the gradient
            of each token's own ratio), "segment" (joint ratio of a sub-sequence), "segment_mean", or the mean of a
            token's ratio and its row's: "average" or "geometric_average"
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; geo_mean clips the log ratio to
            [-clip_low, clip_high], and for dppo these bound the divergence. ipo drops tokens whose probability changed
            by more than these, icepop those whose ratio is outside. None means no bound on that side
        dual_clip: with a negative advantage a term is at most -advantage * dual_clip
        delta: upper bound of the unclipped ratio (two-sided clipping)
        ratio_cap: upper bound of the detached ratio of dppo, of topr where the advantage is not positive (None: 1), and
            of flowrl's weight of a row
        sapo_temperatures: for positive advantages, for the others
        vespo_shape: k and lambda for nonnegative advantages, k and lambda for the others
        dro_beta: weight of the squared log ratio
        cov_ratio: share of the tokens that clip_cov drops, and to whose terms kl_cov adds a penalty; at least one
        cov_bounds: clip_cov chooses among tokens whose covariance is between these
        cov_kl_coef: weight of the absolute log ratio that kl_cov adds
        gvpo_beta: weight of a row's log ratio beside its reward
        real_tau: temperature of the mean log ratio of a row
        flowrl_beta: weight of the reward
        flowrl_clip: what flowrl clips: "product" and "geometric" the weight of a row, which is the product of its
            ratios or their geometric mean; "logprob" the row's mean log-prob, and the weight is the product
        future_kl_half_life: tokens behind which half of the log ratio is left in FIPO's weight of a token, exp(the
            discounted sum of the log ratios from the token on); None means no such weight
        future_kl_clip: bounds of that weight; None means none
        future_kl_cap: tokens with a larger ratio are left out of the sum
        future_kl_safety: tokens of negative advantage with a larger ratio have a weight in [0.8, 1]; None means none
        log_ratio_clamp: (low, high) bounds of the log ratio, which has no gradient beyond them
        kl: "none", "k1", "k2", "k3" or "abs"; a trailing "+" takes the gradient of k2
        kl_coef: weight of the KL term; 0 computes it for the metrics only
        kl_clamp: (input, output); the log ratio to the reference and the estimate are clamped to plus and minus these
        kl_unbiased: multiply the estimate by the ratio, with gradients through both
        entropy_coef: weight of the entropy bonus
        cross_entropy_coef: weight of the cross-entropy of tokens of such a kind, see `kinds` in policy_loss
        cross_entropy_aggregation: None means as `aggregation`, over tokens of all kinds; "token-mean" is the mean over
            the tokens with a cross-entropy
        aggregation: "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum" or
            "seq-mean-token-sum-norm"; of gvpo, real and flowrl that of KL and entropy, as they are means of their own
        kl_aggregation, entropy_aggregation: the same for those terms; None means as `aggregation`. "local-token-mean"
            is the mean over the tokens kept by top_entropy_quantile, whatever the normalizer
        max_length: constant divisor of "seq-mean-token-sum-norm"
        count_empty_rows: whether rows without tokens count in means over rows; geo_mean's terms always do, as in verl
        correction: of the mismatch between sampler and trainer, from sampling_logprobs: "none", "token_truncate",
            "token_mask", "sequence_truncate" or "sequence_mask" (the product of a row's ratios), or
            "geometric_truncate" or "geometric_mask" (their geometric mean)
        correction_min, correction_max: bounds of the correction's ratio; None means no bound
        off_policy_threshold: drop rows with a negative advantage whose mean log ratio of sampler to policy exceeds this
        top_entropy_quantile: restrict the policy term to this share of the tokens, those of highest entropy
    """

    _meant: ClassVar[dict[str, str]] = peers.KEYWORDS
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
    cov_ratio: float = 0.0002
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    cov_kl_coef: float = 1.0
    gvpo_beta: float = 0.1
    real_tau: float = 0.5
    flowrl_beta: float = 15.0
    flowrl_clip: str = "product"
    future_kl_half_life: float | None = None
    future_kl_clip: tuple[float, float] | None = (1.0, 1.2)
    future_kl_cap: float | None = None
    future_kl_safety: float | None = 4.0
    log_ratio_clamp: tuple[float, float] | None = None
    kl: str = "none"
    kl_coef: float = 0.0
    kl_clamp: tuple[float, float] | None = None
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    cross_entropy_coef: float = 1.0
    cross_entropy_aggregation: str | None = None
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

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        self._check_combinations()
        self._set_plan(self._plan(), "low")

    @property
    def couples_tokens(self) -> bool:
        """Whether the gradient of a token depends on other tokens of its sequence."""
        by_loss = self.loss in ("vespo", "geo_mean") or self.ratio != "token"
        return by_loss or self._corrects_rows or self.off_policy_threshold is not None

    @property
    def ranks_tokens(self) -> bool:
        """Whether terms depend on other rows or later tokens of a call, which needs all log-probs and entropies."""
        by_others = self.selects_tokens or self.is_of_sequences or self.future_kl_half_life is not None
        return self.top_entropy_quantile < 1 or by_others

    @property
    def selects_tokens(self) -> bool:
        return self.loss in ("clip_cov", "kl_cov")

    @property
    def is_of_sequences(self) -> bool:
        return self.loss in SEQUENCE_LOSSES

    @property
    def _corrects_rows(self) -> bool:
        return self.correction.startswith(("sequence", "geometric"))

    @classmethod
    def trl(cls, **fields: Any) -> LossConfig:
        """The loss that trl.GRPOConfig describes with these fields; the others have TRL's defaults."""
        return of_peer(cls, "trl", peers.trl_fields, fields)

    @classmethod
    def verl(cls, **fields: Any) -> LossConfig:
        """The loss that verl's ActorConfig and PolicyLossConfig describe with these fields; likewise."""
        return of_peer(cls, "verl", peers.verl_fields, fields)

    @classmethod
    def prime_rl(cls, **fields: Any) -> LossConfig:
        """The loss that prime-rl's IPO and IcePop configs describe with these fields; likewise."""
        return of_peer(cls, "prime_rl", peers.prime_rl_fields, fields)

    @classmethod
    def skyrl(cls, **fields: Any) -> LossConfig:
        """The loss that SkyRL's AlgorithmConfig describes with these fields, whose groups are dicts; likewise."""
        return of_peer(cls, "skyrl", peers.skyrl_fields, fields)

    @classmethod
    def areal(cls, **fields: Any) -> LossConfig:
        """The loss that AReaL's PPOActorConfig describes with these fields; likewise."""
        return of_peer(cls, "areal", peers.areal_fields, fields)

    @classmethod
    def roll(cls, **fields: Any) -> LossConfig:
        """The loss that ROLL's worker and pipeline configs describe with these fields; likewise."""
        return of_peer(cls, "roll", peers.roll_fields, fields)

    @classmethod
    def cosmos(cls, **fields: Any) -> LossConfig:
        """The loss that cosmos-rl's GrpoConfig describes with these fields; likewise."""
        return of_peer(cls, "cosmos", peers.cosmos_fields, fields)

    @classmethod
    def art(cls, **fields: Any) -> LossConfig:
        """The loss that OpenPipe ART's dev.TrainConfig describes with these fields; likewise."""
        return of_peer(cls, "art", peers.art_fields, fields)

    @classmethod
    def swift(cls, **fields: Any) -> LossConfig:
        """The loss that ms-swift's GRPO arguments describe with these fields; likewise."""
        return of_peer(cls, "swift", peers.swift_fields, fields)

    @classmethod
    def of(cls, config: LossConfig | str, op: str = "policy_loss") -> LossConfig:
        """Returns a config unchanged, and resolves the name of a TRL loss_type."""
        if isinstance(config, LossConfig):
            return config
        config_or_name(op, "config", config, cls)
        if config not in _NAMED:
            raise unknown(op, "config", config, _NAMED, peers.elsewhere(config, (*LOSSES, *SEQUENCE_LOSSES)))
        return _NAMED[config]

    def _check_names(self) -> None:
        terms = (*LOSSES, *SEQUENCE_LOSSES)
        if self.loss not in terms and isinstance(self.loss, str) and self.loss in _NAMED:
            raise ValueError(
                f"LossConfig: loss must be the name of a term, got {self.loss!r}, which names a whole config: "
                f"LossConfig.of({self.loss!r})"
            )
        if self.loss not in terms:
            raise unknown("LossConfig", "loss", self.loss, terms, peers.elsewhere(self.loss, terms))
        choices(
            self, ratio=RATIOS, kl=KLS, correction=CORRECTIONS, aggregation=AGGREGATIONS[:-1], flowrl_clip=FLOWRL_CLIPS
        )
        for field in ("kl_aggregation", "entropy_aggregation"):
            if getattr(self, field) is not None:
                choices(self, **{field: AGGREGATIONS})
        if self.cross_entropy_aggregation is not None:
            choices(self, cross_entropy_aggregation=("token-mean",))
        boolean("LossConfig", kl_unbiased=self.kl_unbiased, count_empty_rows=self.count_empty_rows)

    def _check_numbers(self) -> None:
        for field in ("clip_low", "clip_high", "off_policy_threshold", "correction_min", "correction_max"):
            if getattr(self, field) is not None:
                # TRL's cispo has an absolute cap, which may lie below 1
                finite("LossConfig", field, getattr(self, field), None if field == "clip_high" else 0.0)
        future = ("future_kl_half_life", "future_kl_cap", "future_kl_safety")
        for field in ("delta", "ratio_cap", "dro_beta", "gvpo_beta", "real_tau", "flowrl_beta", *future):
            if getattr(self, field) is not None or field in ("gvpo_beta", "real_tau", "flowrl_beta"):
                finite("LossConfig", field, getattr(self, field), 0.0, open_end=True)
        if self.dual_clip is not None:
            finite("LossConfig", "dual_clip", self.dual_clip, 1.0, open_end=True)
        for field in ("kl_coef", "entropy_coef", "cross_entropy_coef", "cov_kl_coef"):
            finite("LossConfig", field, getattr(self, field))
        for field in ("top_entropy_quantile", "cov_ratio"):
            share = getattr(self, field)
            finite("LossConfig", field, share, 0.0, open_end=True)
            if share > 1:
                raise ValueError(f"LossConfig: {field} must be at most 1, got {share!r}")
        self._check_tuple("cov_bounds", 2)
        self._check_tuple("sapo_temperatures", 2, minimum=0.0, open_end=True)
        self._check_tuple("vespo_shape", 4, minimum=0.0)
        if self.kl_clamp is not None:
            self._check_tuple("kl_clamp", 2, minimum=0.0, open_end=True)
        if self.future_kl_clip is not None:
            self._check_tuple("future_kl_clip", 2, minimum=0.0)
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
        self._check_sequences(refuse)
        if self.loss.startswith("dppo") and None in (self.clip_low, self.clip_high):
            refuse("clip_low and clip_high must be numbers for dppo", "clip_low", "clip_high")
        if self.loss == "dro" and self.dro_beta is None:
            refuse("dro_beta must be given for loss 'dro'", "dro_beta")
        if self.clip_high is not None and self.clip_high < (-1.0 if self.loss == "cispo" else 0.0):
            refuse("clip_high must be at least 0", "clip_high")
        if self.kl == "none" and (self.kl_coef != 0 or self.kl_clamp is not None or self.kl_unbiased):
            estimators = ", ".join(name for name in KLS if name != "none")
            refuse(f"kl must be one of {estimators} for the others", "kl", "kl_coef", "kl_clamp", "kl_unbiased")
        biased = self.ratio not in ("token", "sequence") or self.loss == "geo_mean" or self.kl.endswith("+")
        if self.kl_unbiased and biased:
            refuse("kl_unbiased must be False with a straight-through KL, this ratio or loss", "kl", "ratio", "loss")
        aggregations = (self.aggregation, self.kl_aggregation, self.entropy_aggregation)
        if ("seq-mean-token-sum-norm" in aggregations) != (self.max_length is not None):
            refuse("max_length must be given with seq-mean-token-sum-norm, and only then", "max_length", "aggregation")
        if self.correction == "none" and (self.correction_min, self.correction_max) != (None, None):
            refuse("correction must be chosen for its bounds", "correction_min", "correction_max")
        if (self.correction_min or 0.0) > (math.inf if self.correction_max is None else self.correction_max):
            refuse("correction_min must not exceed correction_max", "correction_min", "correction_max")
        if self._corrects_rows and self.loss == "vespo":
            refuse("correction must be by token for vespo, whose ratio is their product", "correction", "loss")
        if self.correction.startswith("token") and self.ratio.startswith("segment"):
            refuse("correction must be by sequence with ratios of segments", "correction", "ratio")
        if self.loss == "geo_mean" and self.aggregation not in ("seq-mean-token-sum", "token-sum"):
            refuse(
                "aggregation must be seq-mean-token-sum or token-sum for geo_mean, with terms of rows", "aggregation"
            )

    def _check_sequences(self, refuse: Callable[..., None]) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        if self.is_of_sequences:
            # these act on tokens, or divide rows by the sign of an advantage that is not theirs
            for field in ("correction", "off_policy_threshold", "top_entropy_quantile"):
                if getattr(self, field) != defaults[field]:
                    refuse(f"{field} must be left out for {', '.join(SEQUENCE_LOSSES)}", field, "loss")
        if self.loss == "flowrl" and self.flowrl_clip == "logprob" and self.clip_low is not None and self.clip_low >= 1:
            refuse("clip_low must be below 1 for flowrl_clip='logprob', which takes log(1 - clip_low)", "clip_low")
        if self.future_kl_half_life is None:
            for field in ("future_kl_clip", "future_kl_cap", "future_kl_safety"):
                if getattr(self, field) != defaults[field]:
                    refuse(f"{field} must be left out without future_kl_half_life", field, "future_kl_half_life")
        elif self.ratio != "token" or self.correction != "none":
            refuse(
                "ratio must be token and correction none with future_kl_half_life; weights of "
                "gk.sampling_correction can be passed as is_weights",
                "ratio",
                "correction",
            )
        elif self.future_kl_clip is not None and self.future_kl_clip[0] > self.future_kl_clip[1]:
            refuse("future_kl_clip must be (low, high) with low <= high", "future_kl_clip")

    def _plan(self) -> Plan:
        def bound(value: float | None, none: float) -> float:
            return none if value is None else float(value)

        of_ratio = self.loss in ("clip", "cispo", "icepop", "clip_cov")
        low, high = bound(self.clip_low, math.inf), bound(self.clip_high, math.inf)
        clamp_low, clamp_high = self.log_ratio_clamp or (-math.inf, math.inf)
        kl_clamp_in, kl_clamp_out = self.kl_clamp or (math.inf, math.inf)
        sapo_pos, sapo_neg = self.sapo_temperatures
        k_pos, lambda_pos, k_neg, lambda_neg = self.vespo_shape
        return Plan(
            loss=REINFORCE if self.is_of_sequences else LOSSES.index(self.loss),
            ratio=RATIOS.index(self.ratio),
            kl=ESTIMATORS.index(self.kl.removesuffix("+")),
            kl_straight=self.kl.endswith("+"),
            kl_unbiased=self.kl_unbiased,
            aggregation=TOKEN_SUM if self.is_of_sequences else AGGREGATIONS.index(self.aggregation),
            kl_aggregation=AGGREGATIONS.index(self.kl_aggregation or self.aggregation),
            entropy_aggregation=AGGREGATIONS.index(self.entropy_aggregation or self.aggregation),
            count_empty_rows=self.count_empty_rows,
            correction=CORRECTIONS.index(self.correction),
            low=1 - low if of_ratio else low,
            high=1 + high if of_ratio else high,
            dual_clip=bound(self.dual_clip, math.inf),
            cap=bound(self.delta if self.loss == "clip" else self.ratio_cap, 1.0 if self.loss == "topr" else math.inf),
            sapo_pos=sapo_pos,
            sapo_neg=sapo_neg,
            k_pos=k_pos,
            lambda_pos=lambda_pos,
            k_neg=k_neg,
            lambda_neg=lambda_neg,
            dro_beta=bound(self.dro_beta, 0.0),
            cov_kl_coef=self.cov_kl_coef,
            clamp_low=clamp_low,
            clamp_high=clamp_high,
            kl_coef=self.kl_coef,
            kl_clamp_in=kl_clamp_in,
            kl_clamp_out=kl_clamp_out,
            entropy_coef=self.entropy_coef,
            cross_entropy_coef=self.cross_entropy_coef,
            max_length=self.max_length or 1,
            correction_min=bound(self.correction_min, -math.inf),
            correction_max=bound(self.correction_max, math.inf),
            off_policy_threshold=bound(self.off_policy_threshold, math.inf),
        )


# Built once, because torch.compile can read a config but not trace its construction.
_NAMED = {name: LossConfig.trl(loss_type=name) for name in peers.TRL_LOSS_TYPES}
