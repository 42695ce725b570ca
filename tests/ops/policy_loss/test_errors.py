"""Errors of policy_loss, LossConfig, its constructors for peers and its metrics; no setting is silently ignored.

Faults that this is for: a wrong argument or setting that is taken, or fails with another type, without its value or the
way out; a field of a peer that changes nothing. What test_promises.py checks of every tensor is not here, nor what
test_configs.py checks of every field.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.trl_fields import TRL_DEFAULTS, TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS
from grpo_kernels.ops.sampling_correction import trl_fields as correction_of_trl
from grpo_kernels.ops.sampling_correction import verl_fields as correction_of_verl
from tests.harness import assert_raises
from tests.ops.policy_loss.cases import FIELDS, INF, NAN, NORM

ONES, ROWS, FLAT, INDEX = torch.ones(3, 4), torch.ones(3), torch.ones(4), torch.zeros(2, 3, dtype=torch.int64)
METRICS = gk.policy_loss(-ONES, None, ROWS).metrics
# by the name that errors begin with: what is called, with arguments that are right
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "policy_loss": (gk.policy_loss, {"logprobs": -ONES, "old_logprobs": -ONES, "advantages": ROWS}),
    "LossConfig": (gk.LossConfig, {}),
    "LossConfig.trl": (gk.LossConfig.trl, {}),
    "LossConfig.verl": (gk.LossConfig.verl, {}),
    "CorrectionConfig.trl": (gk.CorrectionConfig.trl, {}),
    "PolicyLossMetrics.merged": (METRICS.merged, {}),
}
Row = tuple[str, dict[str, Any]]  # the message, in which " ... " stands for any text, and arguments


def each(name: str, rule: str, *values: Any, **others: Any) -> list[Row]:
    """One error for each value of an argument; `{}` in the rule stands for the value as errors show it."""

    def shown(value: Any) -> str:
        return str(list(value.shape)) if isinstance(value, torch.Tensor) else repr(value)

    return [(f"{name} {rule.replace('{}', shown(value))}", others | {name: value}) for value in values]


def dtypes(name: str, *kinds: torch.dtype, value: torch.Tensor = ONES, **others: Any) -> list[Row]:
    return [(f"{name} must be of dtype ... got {kind}", others | {name: value.to(kind)}) for kind in kinds]


def shapes(
    name: str, rule: str, *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, **others: Any
) -> list[Row]:
    return each(name, rule, *(torch.ones(size, dtype=dtype) for size in sizes), **others)


# Arguments of policy_loss

PACKED = {"logprobs": FLAT, "old_logprobs": None}
INDEXED = {"logprobs": FLAT, "old_logprobs": torch.ones(2, 3), "advantages": torch.ones(2)}
KL, NO_KL, SUM = gk.LossConfig(kl="k3"), gk.LossConfig(), gk.LossConfig(aggregation="token-sum")
BY_ROW = gk.LossConfig(aggregation="seq-mean-token-mean")
NUMBERS = {"old_logprobs": {}, "entropy": {}, "ref_logprobs": {"config": KL}}  # one a token, with what they need
OF_ANY_DTYPE = ("mask", "segments", "policy_mask", "weights")
NOT_OF_TOKENS = ((3,), (4,), (3, 5), (2, 4), (3, 4, 1), (3, 1), (1, 4), ())
NOT_OF_ROWS = ((4,), (2,), (1, 4), (1, 3), (4, 1), (3, 5), (3, 4, 1), ())
OF_TOKENS = "must have the shape of logprobs, [3, 4], got {}"
OF_ROWS = "must have one value per row, [3], or per token, [3, 4], got {}"
NO_COUNTS = (0, -1, -2.5, NAN, INF, True, "3")
ARGUMENT_TYPES = [
    *dtypes("logprobs", torch.int64),
    *(
        row
        for name, needed in NUMBERS.items()
        for row in dtypes(name, torch.int64, torch.bool, torch.float8_e4m3fn, **needed)
    ),
    *dtypes("advantages", torch.int64),
    *dtypes("is_weights", torch.int64),
    *dtypes("segments", torch.float32, torch.bool),
    *dtypes("cu_seqlens", torch.float32, torch.int16, value=FLAT[:2], **PACKED),
    ("term_index must be of dtype", INDEXED | {"term_index": torch.zeros(2, 3)}),
    *(
        (f"config must be a LossConfig or a str, got {type(c).__name__}", {"config": c})
        for c in (None, 3, {"loss": "clip"}, gk.LossConfig)
    ),
]
ARGUMENTS = [
    *(row for name, needed in NUMBERS.items() for row in shapes(name, OF_TOKENS, *NOT_OF_TOKENS, **needed)),
    *(row for name in OF_ANY_DTYPE for row in shapes(name, OF_TOKENS, *NOT_OF_TOKENS, dtype=torch.int32)),
    *shapes("advantages", OF_ROWS, *NOT_OF_ROWS),
    *shapes("is_weights", OF_ROWS, *NOT_OF_ROWS),
    *shapes("logprobs", "must have shape [B, T], or [M] with ... got {}", (), (12,), (3, 4, 1)),
    *shapes("cu_seqlens", "must have shape [B + 1], got {}", (), (1, 2), (0,), dtype=torch.int64, **PACKED),
    ("logprobs must have shape [M] with cu_seqlens, got [3, 4]", {"cu_seqlens": torch.tensor([0, 4])}),
    *(
        (f"{name} must not require grad ... pass {name}.detach()", {name: value.clone().requires_grad_()})
        for name, value in {"advantages": ROWS, "is_weights": ONES, "weights": ONES, "normalizer": FLAT[0]}.items()
    ),
    *each("normalizer", "must be a positive number, got {}", *NO_COUNTS),
    *(
        (f"normalizer must be a positive number, got {n!r}", {"normalizer": {"tokens": 3, "rows": n}})
        for n in NO_COUNTS
    ),
    ("normalizer must be for one of tokens, rows, segments, got 'token'", {"normalizer": {"token": 3}}),
    ("normalizer must have one element, got shape [2]", {"normalizer": torch.ones(2)}),
    ("normalizer must be left out with weights, ... got 3", {"normalizer": 3, "weights": ONES}),
    *each("normalizer", "must be left out with aggregation='token-sum'", 3, config=SUM),
    *each("normalizer", "must have 'tokens', the unit of aggregation='token-mean'", {"rows": 3}, config=NO_KL),
    *each("normalizer", "must have 'rows'", {"tokens": 3}, config=BY_ROW),
    ("segments must be given for ratio='segment'", {"config": gk.LossConfig(ratio="segment")}),
    ("segments must be given for ratio='segment_mean'", {"config": gk.LossConfig(ratio="segment_mean")}),
    ("ref_logprobs must be given for kl_coef=0.1, got None", {"config": gk.LossConfig(kl="k3", kl_coef=0.1)}),
    ("ref_logprobs must be left out with kl='none'", {"ref_logprobs": ONES}),
    ("entropy must be given for entropy_coef=0.1, got None", {"config": gk.LossConfig(entropy_coef=0.1)}),
    ("is_weights must be one per token for loss='vespo', ... [3]", {"is_weights": ROWS, "config": "vespo"}),
    (
        "policy_mask must be left out for loss='geo_mean', whose terms are rows",
        {"policy_mask": ONES, "config": gk.LossConfig("geo_mean", aggregation="seq-mean-token-sum")},
    ),
    # positions that terms share
    *each("term_index", "must be in [0, 4), or -1 ... got 4", torch.full((2, 3), 4), **INDEXED),
    *each("term_index", "must be in [0, 4), or -1 ... got -2", torch.full((2, 3), -2), **INDEXED),
    *shapes("term_index", "must have shape [B, T], or [M] with", (6,), dtype=torch.int64, **INDEXED),
    ("old_logprobs must have the shape of term_index, [3, 2]", INDEXED | {"term_index": torch.zeros(3, 2).long()}),
    *shapes("entropy", "must have the shape of logprobs, [4], got {}", (2, 3), **INDEXED, term_index=INDEX),
    # names of another constructor, or of no loss
    *(
        (f"config must be one of ... got {name!r} ... {way_out}", {"config": name})
        for name, way_out in {
            "vanilla": "verl's is LossConfig.verl(loss_mode='vanilla')",
            "ppo": "PPO's policy term is LossConfig('clip')",
            "clip": "the policy term is LossConfig('clip')",
            "DAPO": "(did you mean 'dapo'?)",
            "gropo": "(did you mean 'grpo'?)",
            "rloo": "it names advantages; its loss is LossConfig(loss='reinforce', aggregation='seq-mean-token-sum')",
            "GMPO": "GMPO is LossConfig.verl(loss_mode='geo_mean')",
        }.items()
    ),
]
# The unit of a term beside the policy's, and the field that says so. Where a normalizer misses it, it would be counted
# in this call alone, so that micro-batches would not add up to the batch.
for fields, name, unit, setting in (
    ({"kl": "k3", "kl_coef": 0.1, "kl_aggregation": "seq-mean-token-mean"}, "ref_logprobs", "rows", "kl_aggregation"),
    ({"kl": "k3", "kl_aggregation": "seq-mean-token-mean"}, "ref_logprobs", "rows", "kl_aggregation"),
    ({"entropy_coef": 0.1, "entropy_aggregation": "seq-mean-token-mean"}, "entropy", "rows", "entropy_aggregation"),
    ({"kl": "k3", "ratio": "segment"}, "ref_logprobs", "tokens", "kl_aggregation"),
    ({"ratio": "segment"}, "entropy", "tokens", "entropy_aggregation"),
):
    config = gk.LossConfig(**fields)
    own = "segments" if config.ratio == "segment" else "tokens"
    others = {name: ONES, "config": config} | ({"segments": ONES.int() - 1} if own == "segments" else {})
    ARGUMENTS += each("normalizer", f"must have {unit!r}, the unit of {setting}=", {own: 3}, **others)
    ARGUMENTS += each(
        "normalizer", f"must be a dict with {own!r} for ... {unit!r} for {setting}= ... got 3", 3, **others
    )

# Fields of LossConfig that test_configs.py cannot see, as the default is None or holds several numbers

NEEDS = {"dro": {"dro_beta": 0.1}, "geo_mean": {"aggregation": "token-sum"}}
CONFIG_TYPES: list[Row] = [
    ("keywords must be ... got 'beta'; TRL's is LossConfig.trl(beta=...)", {"beta": 0.04}),
    ("keywords must be ... got 'clip_ratio'; verl's is LossConfig.verl(clip_ratio=...)", {"clip_ratio": 0.2}),
]
CONFIG: list[Row] = []
for name, too_small, others in (
    ("clip_low", -0.5, {}),
    ("clip_high", -0.5, {}),
    ("dual_clip", 1.0, {}),
    ("delta", 0.0, {}),
    ("ratio_cap", 0.0, {"loss": "dppo_tv"}),
    ("dro_beta", 0.0, {"loss": "dro"}),
):
    CONFIG += each(name, "must be ... {}", NAN, INF, -INF, too_small, **others)
    CONFIG_TYPES += each(name, "must be a number, got ", "1e-6", True, [1.0], FLAT[0], **others)
for name in ("kl_aggregation", "entropy_aggregation"):
    CONFIG += each(name, "must be one of ... local-token-mean", "means", "", 1, True, ["x"])
    CONFIG.append(("max_length must ... None", {"kl": "k1", name: NORM}))
CONFIG += [
    *each("loss", "must be one of clip, ... topr, got {}", ["clip"]),
    *each("loss", "must be the name of a term, got 'grpo', ... LossConfig.of('grpo')", "grpo"),
    *each("loss", "must be ... got 'gspo'; verl's is LossConfig.verl(loss_mode='gspo')", "gspo"),
    *each("aggregation", "must be one of ... got {}", "local-token-mean"),
    *each("aggregation", "must be seq-mean-token-sum or ... {}", "token-mean", loss="geo_mean"),
    *each("sapo_temperatures", "must hold 2 numbers ... {}", (1.0,), 1.0, loss="sapo"),
    *each("sapo_temperatures", "must ... above 0 ... 0.0", (1.0, 0.0), loss="sapo"),
    *each("vespo_shape", "must hold 4 numbers ... {}", (1.0, 2.0), loss="vespo"),
    *each("vespo_shape", "must ... at least 0 ... -1.0", (1.0, 2.0, 3.0, -1.0), loss="vespo"),
    *each("kl_clamp", "must hold 2 numbers ... {}", (20.0,), kl="k3"),
    *each("kl_clamp", "must ... above 0 ... 0.0", (0.0, 1.0), kl="k3"),
    *each("log_ratio_clamp", "must be ... low < high ... {}", (1.0, -1.0), (0.0, NAN), 20.0, ("a", "b")),
    *each("max_length", "must be a positive int ... {}", 0, -1, 1.5, True, "9"),
    *each("max_length", "must ... token-mean", 9),
    ("max_length must ... None ... seq-mean-token-sum-norm", {"aggregation": NORM}),
    ("kl must ... 'none' ... kl_coef=0.1", {"kl_coef": 0.1}),
    ("kl must ... 'none' ... kl_clamp=(1.0, 1.0)", {"kl_clamp": (1.0, 1.0)}),
    ("kl must ... 'none' ... kl_unbiased=True", {"kl_unbiased": True}),
    *each("kl_unbiased", "must be False ... 'k3+'", True, kl="k3+", kl_coef=1.0),
    *each("kl_unbiased", "must be False ... 'segment'", True, kl="k3", ratio="segment"),
    ("dro_beta must be given ... None", {"loss": "dro"}),
    *each("clip_low", "must be given for loss 'dppo_tv' ... {}", None, loss="dppo_tv"),
    *each("clip_high", "must be given for loss 'dppo_kl' ... {}", None, loss="dppo_kl"),
    *each("clip_high", "must be at least 0 ... {}", -1.5, loss="cispo"),
]
for loss in ("vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro"):
    others = {"loss": loss, **NEEDS.get(loss, {})}
    CONFIG += each("ratio", f"must be one of token ... 'segment' ... {loss!r}", "segment", **others)
# fields that only other losses read
READ = {name: value for fields in FIELDS.values() for name, values in fields.items() for value in values if value}
for loss, fields in FIELDS.items():
    others = {"loss": loss, **NEEDS.get(loss, {})}
    for name in READ.keys() - fields.keys():
        CONFIG += each(name, f"must be left out unless loss is ... {loss!r}", READ[name], **others)

# Fields of peers

CORRECTION = "pass is_weights=gk.sampling_correction( ... CorrectionConfig.trl"
TRL_TYPES = [
    *each("epsilon", "must be a number, got str '0.2'", "0.2"),
    *each("sapo_temperature_pos", "must be a number, got bool True", True),
    *each("use_vllm", "must be a bool, got int 1", 1),
]
TRL = [
    ("field must ... 'loss_typ' (did you mean 'loss_type'?)", {"loss_typ": "grpo"}),
    *each("loss_type", f"must be one of {', '.join(TRL_LOSS_TYPES)}, got 'ppo'", "ppo"),
    *each("importance_sampling_level", "must be one of token, sequence, got 'r'", "r"),
    *each("use_adaptive_entropy", "must be False, got True", True),
    *each("use_vllm", f"must be False ... got True; {CORRECTION}", True),
    *each("top_entropy_quantile", "must be 1, got 0.5 ... high_entropy_mask", 0.5),
    *each("off_policy_mask_threshold", "must be None, got 0.1 ... off_policy_mask", 0.1),
    *each("delta", "must be ... above 0, got -2", -2),
    ("clip_low must be ... got -1; clip_low is made from epsilon", {"epsilon": -1}),
    ("clip_high must be ... got nan; clip_high is made from epsilon_high", {"epsilon_high": NAN}),
]
VERL_TYPES = each("clip_ratio", "must be a number, got str '0.2'", "0.2")
VERL = [
    ("field must ... 'loss_agg' ... loss_agg_mode", {"loss_agg": "token-mean"}),
    *each("loss_mode", "must be one of vanilla ... got {}", "ppo"),
    *each("loss_mode", "{} is not implemented ... not implemented", "bypass_mode"),
    *each("loss_mode", "{} is not implemented ... clip_cov_weights", "clip_cov"),
    *each("loss_mode", "{} is not implemented ... kl_cov_penalty", "kl_cov"),
    *each("loss_agg_mode", "must be one of token-mean ... {}", "mean"),
    *each("kl_loss_type", "must be ... low_var_kl ... k3+ ... {}", "full", use_kl_loss=True),
    *each("kl_loss_type", "must be ... low_var_kl ... {}", None, use_kl_loss=True),
    ("loss_scale_factor must be given ... None", {"loss_agg_mode": NORM}),
    *each("clip_ratio", "must be given with clip_ratio_low=None, ... got 0.3 alone", 0.3),
    ("dual_clip must be ... above 1, got 0.5; dual_clip is made from clip_ratio_c", {"clip_ratio_c": 0.5}),
]
CLIP_MAX = {"vllm_importance_sampling_clip_max": -1}
MERGED = [
    *each(
        "rows",
        f"must be a list of metrics ... [K, {len(METRICS.names)}], got shape {{}}",
        METRICS.tensor,
        torch.ones(2, 3),
    ),
    *each("rows", "must be a list of metrics ... got list []", []),
]
TABLE: list[tuple[str, type[Exception], list[Row]]] = [
    ("policy_loss", TypeError, ARGUMENT_TYPES),
    ("policy_loss", ValueError, ARGUMENTS),
    ("LossConfig", TypeError, CONFIG_TYPES),
    ("LossConfig", ValueError, CONFIG),
    ("LossConfig.trl", TypeError, TRL_TYPES),
    ("LossConfig.trl", ValueError, TRL),
    ("LossConfig.verl", TypeError, VERL_TYPES),
    ("LossConfig.verl", ValueError, VERL),
    ("CorrectionConfig.trl", ValueError, [("weight_max must ... weight_max is made from vllm_imp", CLIP_MAX)]),
    ("PolicyLossMetrics.merged", ValueError, MERGED),
]


@pytest.mark.parametrize(
    ("where", "error", "rows"), TABLE, ids=[f"{where}, {error.__name__}" for where, error, _ in TABLE]
)
def test_errors(where: str, error: type[Exception], rows: list[Row]) -> None:
    function, right = CALLS[where]
    function(**right) if right else None
    for rule, changes in rows:
        start, *parts = rule.split(" ... ")
        assert_raises(error, f"{where}: {start}", parts, lambda given=right | changes: function(**given))


VALUES: tuple[object, ...] = (-1, 0, 3.5, NAN, "x", None, True, [], {}, object())
CONSTRUCTORS: dict[Callable[..., object], dict[str, Any]] = {
    gk.LossConfig.trl: TRL_DEFAULTS,
    gk.LossConfig.verl: VERL_DEFAULTS,
    gk.CorrectionConfig.trl: correction_of_trl.TRL_DEFAULTS,
    gk.CorrectionConfig.verl: correction_of_verl.VERL_DEFAULTS,
}


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda made: made.__qualname__)
def test_errors_of_any_value_name_the_config(constructor: Callable[..., object]) -> None:
    defaults, refused = CONSTRUCTORS[constructor], 0
    for field, default in defaults.items():
        groups = [{name: value} for name in default for value in VALUES] if isinstance(default, dict) else []
        for value in (*VALUES, *groups):
            try:
                constructor(**{field: value})
            except (TypeError, ValueError) as error:
                refused += 1
                assert re.match(r"(Loss|Correction)Config", str(error)), (field, value, error)
    assert refused > len(defaults)


# By constructor: settings beside which a field is read, and values of which one differs from each default
BASES: dict[Callable[..., object], list[dict[str, Any]]] = {
    gk.LossConfig.trl: [{}, {"beta": 0.1}, *({"loss_type": kind} for kind in ("sapo", "vespo", "dr_grpo"))],
    gk.LossConfig.verl: [
        *({}, {"loss_mode": "sapo"}, {"loss_mode": "dro", "dro_beta": 0.1}),
        *({"use_kl_loss": True}, {"clip_ratio_low": None}, {"loss_agg_mode": NORM, "loss_scale_factor": 5}),
    ],
}
OTHERS = (0.3, 1.5, 64, False, True, "grpo", "sequence", "gspo", "token-sum", "k1")


def made(constructor: Callable[..., object], fields: dict[str, Any]) -> object:
    """The config, or None if the fields are refused."""
    try:
        return constructor(**fields)
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("constructor", BASES, ids=lambda made: made.__qualname__)
def test_no_field_of_a_peer_is_ignored(constructor: Callable[..., object]) -> None:
    refused = {"use_adaptive_entropy", "use_vllm", "top_entropy_quantile", "off_policy_mask_threshold"}
    for field in CONSTRUCTORS[constructor].keys() - refused:
        pairs = [
            (made(constructor, base), made(constructor, base | {field: value}))
            for base in BASES[constructor]
            for value in OTHERS
        ]
        is_read = any(changed not in (None, config) for config, changed in pairs)
        assert is_read != field.startswith("vllm_"), field  # those are read beside use_vllm


def test_configs_that_are_the_same() -> None:
    for name in TRL_LOSS_TYPES:
        assert gk.LossConfig.of(name) == gk.LossConfig.trl(loss_type=name)
    both = gk.LossConfig.verl(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None)
    assert (both.clip_low, both.clip_high) == (0.3, 0.3)
    assert gk.LossConfig.verl(clip_ratio=0.2) == gk.LossConfig.verl()
    config = gk.LossConfig(loss="sapo", sapo_temperatures=[1, 2])  # type: ignore[arg-type]
    assert config == gk.LossConfig(loss="sapo", sapo_temperatures=(1.0, 2.0)) != gk.LossConfig(loss="sapo")
    assert hash(config) == hash(gk.LossConfig(loss="sapo", sapo_temperatures=(1.0, 2.0)))
    clamped = gk.LossConfig(log_ratio_clamp=[-20, 20])  # type: ignore[arg-type]
    assert hash(clamped) == hash(gk.LossConfig(log_ratio_clamp=(-20.0, 20.0)))
    assert dataclasses.replace(config, kl="k1").sapo_temperatures == (1.0, 2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kl = "k1"  # type: ignore[misc]


def test_metrics_by_name() -> None:
    with pytest.raises(KeyError, match=r"PolicyLossMetrics: 'kls' is none of .*kl_sum"):
        METRICS["kls"]
    assert "policy_loss" in repr(METRICS)
    both = METRICS.merged([METRICS, METRICS]).tensor
    torch.testing.assert_close(both, METRICS.merged(torch.stack([METRICS.tensor] * 2)).tensor, equal_nan=True)


def test_advantages_may_require_grad_where_none_is_recorded() -> None:
    with torch.no_grad():
        assert gk.policy_loss(-ONES, None, ROWS.clone().requires_grad_()).loss.isfinite()
