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
from grpo_kernels.ops.policy_loss.losses import LOSSES
from grpo_kernels.ops.policy_loss.trl_fields import TRL_DEFAULTS, TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS
from grpo_kernels.ops.sampling_correction import trl_fields as correction_of_trl
from grpo_kernels.ops.sampling_correction import verl_fields as correction_of_verl
from tests.harness import assert_raises, device_of
from tests.ops.policy_loss.cases import BACKENDS, INF, NAN

ONES, ROWS, FLAT = torch.ones(3, 4), torch.ones(3), torch.ones(4)
METRICS = gk.policy_loss(-ONES, None, ROWS).metrics
KL, NO_KL = gk.LossConfig(kl="k3"), gk.LossConfig()
SUM = gk.LossConfig(aggregation="token-sum")
BY_ROW = gk.LossConfig(aggregation="seq-mean-token-mean")
SEGMENTS = gk.LossConfig(ratio="segment")
GMPO = gk.LossConfig("geo_mean", aggregation="seq-mean-token-sum")
PACKED = {"logprobs": FLAT, "old_logprobs": None}
INDEXED = {"logprobs": FLAT, "old_logprobs": torch.ones(2, 3), "advantages": torch.ones(2)}
# by the name that errors begin with: what is called, with arguments that are right
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "policy_loss": (gk.policy_loss, {"logprobs": -ONES, "old_logprobs": -ONES, "advantages": ROWS}),
    "LossConfig": (gk.LossConfig, {}),
    "LossConfig.trl": (gk.LossConfig.trl, {}),
    "LossConfig.verl": (gk.LossConfig.verl, {}),
    "CorrectionConfig.trl": (gk.CorrectionConfig.trl, {}),
    "PolicyLossMetrics.merged": (METRICS.merged, {}),
}
# (type, message, arguments); " ... " stands for any text
Row = tuple[type[Exception], str, dict[str, Any]]


def floats(name: str) -> list[Row]:
    """Errors of an argument with an entry for each token."""
    rule = f"{name} must have the shape of logprobs, [3, 4], got"
    shapes = ((3,), (4,), (3, 5), (2, 4), (3, 4, 1), (3, 1), (1, 4), ())
    others = {"config": KL} if name == "ref_logprobs" else {}
    rows: list[Row] = [(ValueError, f"{rule} {list(s)}", {name: torch.ones(s).int(), **others}) for s in shapes]
    if name not in ("mask", "policy_mask", "segments", "weights"):
        rows = [(error, text, {name: next(iter(given.values())).float(), **others}) for error, text, given in rows]
        rows += [
            (
                TypeError,
                f"{name} must be of dtype ... got torch.{kind}",
                {name: ONES.to(getattr(torch, kind)), **others},
            )
            for kind in ("int64", "bool", "float8_e4m3fn")
        ]
    return rows


PER_TOKEN = ("old_logprobs", "mask", "segments", "policy_mask", "ref_logprobs", "entropy", "weights")
ARGUMENTS: list[Row] = [row for name in PER_TOKEN for row in floats(name)]
for name in ("advantages", "is_weights"):
    rule = f"{name} must have one value per row, [3], or per token, [3, 4], got"
    for shape in ((4,), (2,), (1, 4), (1, 3), (4, 1), (3, 5), (3, 4, 1), ()):
        ARGUMENTS.append((ValueError, f"{rule} {list(shape)}", {name: torch.ones(shape)}))
    ARGUMENTS.append((TypeError, f"{name} must be of dtype ... got torch.int64", {name: ROWS.long()}))
for name in ("advantages", "is_weights", "weights", "normalizer"):
    value = {"advantages": ROWS, "normalizer": torch.ones(())}.get(name, ONES).clone().requires_grad_()
    ARGUMENTS.append((ValueError, f"{name} must not require grad ... pass {name}.detach()", {name: value}))
for number in (0, -1, -2.5, NAN, INF, True, "3"):
    rule = f"normalizer must be a positive number, got {number!r}"
    ARGUMENTS += [(ValueError, rule, {"normalizer": wrong}) for wrong in (number, {"tokens": 3, "rows": number})]
ARGUMENTS += [
    (TypeError, "logprobs must be of dtype ... got torch.int64", {"logprobs": ONES.long()}),
    *(
        (ValueError, f"logprobs must have shape [B, T], or [M] with ... got {list(s)}", {"logprobs": torch.ones(s)})
        for s in ((), (12,), (3, 4, 1))
    ),
    (TypeError, "segments must be of dtype ... got torch.float32", {"segments": ONES}),
    (TypeError, "segments must be of dtype ... got torch.bool", {"segments": ONES > 0}),
    (TypeError, "weights must be of dtype ... got torch.complex64", {"weights": ONES.to(torch.complex64)}),
    (TypeError, "weights must be a tensor, got list", {"weights": [[1.0] * 4] * 3}),
    (ValueError, "weights must be on cpu ... got meta", {"weights": ONES.to("meta")}),
    (ValueError, "logprobs must have shape [M] with cu_seqlens, got [3, 4]", {"cu_seqlens": torch.tensor([0, 4])}),
    (TypeError, "cu_seqlens must be a tensor, got list", PACKED | {"cu_seqlens": [0, 4]}),
    (TypeError, "cu_seqlens must be of dtype ... torch.float32", PACKED | {"cu_seqlens": torch.tensor([0.0, 4.0])}),
    (TypeError, "cu_seqlens must be of dtype ... torch.int16", PACKED | {"cu_seqlens": torch.tensor([0, 4]).short()}),
    (ValueError, "cu_seqlens must have shape [B + 1], got []", PACKED | {"cu_seqlens": torch.tensor(4)}),
    (ValueError, "cu_seqlens must have shape [B + 1], got [1, 2]", PACKED | {"cu_seqlens": torch.tensor([[0, 4]])}),
    (ValueError, "cu_seqlens must have shape [B + 1], got [0]", PACKED | {"cu_seqlens": torch.zeros(0).long()}),
    (ValueError, "cu_seqlens must be on cpu ... meta", PACKED | {"cu_seqlens": torch.tensor([0, 4], device="meta")}),
    (ValueError, "normalizer must be for one of tokens, rows, segments, got 'token'", {"normalizer": {"token": 3}}),
    (ValueError, "normalizer must have one element, got shape [2]", {"normalizer": torch.ones(2)}),
    (ValueError, "normalizer must be left out with aggregation='token-sum'", {"normalizer": 3, "config": SUM}),
    (ValueError, "normalizer must be left out with weights, ... got 3", {"normalizer": 3, "weights": ONES}),
    (
        ValueError,
        "normalizer must have 'tokens', the unit of aggregation='token-mean'",
        {"normalizer": {"rows": 3}, "config": NO_KL},
    ),
    (ValueError, "normalizer must have 'rows'", {"normalizer": {"tokens": 3}, "config": BY_ROW}),
    (ValueError, "segments must be given for ratio='segment', got None", {"config": SEGMENTS}),
    (ValueError, "segments must be given for ratio='segment_mean'", {"config": gk.LossConfig(ratio="segment_mean")}),
    (
        ValueError,
        "ref_logprobs must be given for kl_coef=0.1, got None",
        {"config": gk.LossConfig(kl="k3", kl_coef=0.1)},
    ),
    (ValueError, "ref_logprobs must be left out with kl='none'", {"ref_logprobs": ONES}),
    (ValueError, "entropy must be given for entropy_coef=0.1, got None", {"config": gk.LossConfig(entropy_coef=0.1)}),
    (ValueError, "is_weights must be one per token for loss='vespo', ... [3]", {"is_weights": ROWS, "config": "vespo"}),
    (
        ValueError,
        "policy_mask must be left out for loss='geo_mean', whose terms are rows",
        {"policy_mask": ONES, "config": GMPO},
    ),
    *(
        (TypeError, f"config must be a LossConfig or a str, got {type(c).__name__}", {"config": c})
        for c in (None, 3, {"loss": "clip"}, gk.LossConfig)
    ),
    # positions that terms share
    (TypeError, "term_index must be of dtype", INDEXED | {"term_index": torch.zeros(2, 3)}),
    (
        ValueError,
        "term_index must be in [0, 4), or -1 for no position, got 4",
        INDEXED | {"term_index": torch.full((2, 3), 4)},
    ),
    (ValueError, "term_index must be in [0, 4), or -1 ... got -2", INDEXED | {"term_index": torch.full((2, 3), -2)}),
    (
        ValueError,
        "old_logprobs must have the shape of term_index, [3, 2]",
        INDEXED | {"term_index": torch.zeros(3, 2).long()},
    ),
    (ValueError, "term_index must have shape [B, T], or [M] with", INDEXED | {"term_index": torch.zeros(6).long()}),
    (
        ValueError,
        "entropy must have the shape of logprobs, [4], got [2, 3]",
        INDEXED | {"term_index": torch.zeros(2, 3).long(), "entropy": torch.ones(2, 3)},
    ),
]
# names of another constructor, or of no loss
WAYS_OUT = {
    "vanilla": "verl's is LossConfig.verl(loss_mode='vanilla')",
    "ppo": "PPO's policy term is LossConfig('clip')",
    "clip": "the policy term is LossConfig('clip')",
    "DAPO": "(did you mean 'dapo'?)",
    "gropo": "(did you mean 'grpo'?)",
    "rloo": "it names advantages; its loss is LossConfig(loss='reinforce', aggregation='seq-mean-token-sum')",
    "GMPO": "GMPO is LossConfig.verl(loss_mode='geo_mean')",
}
ARGUMENTS += [
    (ValueError, f"config must be one of ... got {n!r} ... {out}", {"config": n}) for n, out in WAYS_OUT.items()
]

# Fields that test_configs.py cannot see, as the default is None or holds several numbers, with what they need.
BOUNDED: dict[str, dict[str, Any]] = {
    "clip_low": {},
    "clip_high": {},
    "dual_clip": {},
    "delta": {},
    "ratio_cap": {"loss": "dppo_tv"},
    "dro_beta": {"loss": "dro"},
}
NEEDS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}, "geo_mean": {"aggregation": "token-sum"}}
CONFIG: list[Row] = []
for name, others in BOUNDED.items():
    CONFIG += [(ValueError, f"{name} must be ... got {x!r}", others | {name: x}) for x in (NAN, INF, -INF)]
    CONFIG += [
        (TypeError, f"{name} must be a number, got ", others | {name: x}) for x in ("1e-6", True, [1.0], FLAT[0])
    ]
    least = {"clip_low": -0.5, "clip_high": -0.5, "dual_clip": 1.0}.get(name, 0.0)
    CONFIG.append((ValueError, f"{name} must be ... {least!r}", others | {name: least}))
for name in ("kl_aggregation", "entropy_aggregation"):
    CONFIG += [
        (ValueError, f"{name} must be one of ... local-token-mean", {name: x}) for x in ("means", "", 1, True, ["x"])
    ]
CONFIG += [
    (ValueError, "loss must be one of clip, ... topr, got ['clip']", {"loss": ["clip"]}),
    (ValueError, "aggregation must be one of ... got 'local-token-mean'", {"aggregation": "local-token-mean"}),
    (ValueError, "loss must be the name of a term, got 'grpo', ... LossConfig.of('grpo')", {"loss": "grpo"}),
    (ValueError, "loss must be ... got 'gspo'; verl's is LossConfig.verl(loss_mode='gspo')", {"loss": "gspo"}),
    (TypeError, "keywords must be ... got 'beta'; TRL's is LossConfig.trl(beta=...)", {"beta": 0.04}),
    (
        TypeError,
        "keywords must be ... got 'clip_ratio'; verl's is LossConfig.verl(clip_ratio=...)",
        {"clip_ratio": 0.2},
    ),
    (ValueError, "sapo_temperatures must hold 2 numbers ... (1.0,)", {"loss": "sapo", "sapo_temperatures": (1.0,)}),
    (ValueError, "sapo_temperatures must hold 2 numbers ... 1.0", {"loss": "sapo", "sapo_temperatures": 1.0}),
    (ValueError, "sapo_temperatures must ... above 0 ... 0.0", {"loss": "sapo", "sapo_temperatures": (1.0, 0.0)}),
    (ValueError, "vespo_shape must hold 4 numbers ... (1.0, 2.0)", {"loss": "vespo", "vespo_shape": (1.0, 2.0)}),
    (ValueError, "vespo_shape must ... at least 0 ... -1.0", {"loss": "vespo", "vespo_shape": (1.0, 2.0, 3.0, -1.0)}),
    (ValueError, "kl_clamp must hold 2 numbers ... (20.0,)", {"kl": "k3", "kl_clamp": (20.0,)}),
    (ValueError, "kl_clamp must ... above 0 ... 0.0", {"kl": "k3", "kl_clamp": (0.0, 1.0)}),
    *(
        (ValueError, f"log_ratio_clamp must be ... low < high ... {x!r}", {"log_ratio_clamp": x})
        for x in ((1.0, -1.0), (0.0, NAN), 20.0, ("a", "b"))
    ),
    *((ValueError, f"max_length must be a positive int ... {x!r}", {"max_length": x}) for x in (0, -1, 1.5, True, "9")),
    (ValueError, "max_length must ... token-mean", {"max_length": 9}),
    (ValueError, "max_length must ... None ... seq-mean-token-sum-norm", {"aggregation": "seq-mean-token-sum-norm"}),
    (ValueError, "max_length must ... None", {"kl": "k1", "kl_aggregation": "seq-mean-token-sum-norm"}),
    (ValueError, "max_length must ... None", {"entropy_aggregation": "seq-mean-token-sum-norm"}),
    (ValueError, "kl must ... 'none' ... kl_coef=0.1", {"kl_coef": 0.1}),
    (ValueError, "kl must ... 'none' ... kl_clamp=(1.0, 1.0)", {"kl_clamp": (1.0, 1.0)}),
    (ValueError, "kl must ... 'none' ... kl_unbiased=True", {"kl_unbiased": True}),
    (ValueError, "kl_unbiased must be False ... 'k3+'", {"kl": "k3+", "kl_coef": 1.0, "kl_unbiased": True}),
    (ValueError, "kl_unbiased must be False ... 'segment'", {"kl": "k3", "kl_unbiased": True, "ratio": "segment"}),
    (ValueError, "aggregation must be seq-mean-token-sum or ... token-mean", {"loss": "geo_mean"}),
    (ValueError, "dro_beta must be given ... None", {"loss": "dro"}),
    (ValueError, "clip_low must be given for loss 'dppo_tv' ... None", {"loss": "dppo_tv", "clip_low": None}),
    (ValueError, "clip_high must be given for loss 'dppo_kl' ... None", {"loss": "dppo_kl", "clip_high": None}),
    (ValueError, "clip_high must be at least 0 ... -1.5", {"loss": "cispo", "clip_high": -1.5}),
    *(
        (
            ValueError,
            f"ratio must be one of token ... 'segment' ... {x!r}",
            {"loss": x, "ratio": "segment", **NEEDS.get(x, {})},
        )
        for x in ("vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro")
    ),
]
# fields that only some losses read
OWN: dict[str, tuple[Any, str]] = {
    "delta": (1.5, "clip"),
    "dual_clip": (3.0, "clip"),
    "ratio_cap": (3.0, "dppo_tv dppo_kl topr"),
    "sapo_temperatures": ((1.0, 2.0), "sapo"),
    "dro_beta": (0.1, "dro"),
    "vespo_shape": ((1.0, 1.0, 1.0, 1.0), "vespo"),
    "log_ratio_clamp": ((-1.0, 1.0), "clip cispo sapo dppo_tv dppo_kl ipo icepop topr"),
    "clip_low": (0.3, "clip cispo geo_mean dppo_tv dppo_kl ipo icepop"),
    "clip_high": (0.3, "clip cispo geo_mean dppo_tv dppo_kl ipo icepop"),
}
for name, (value, users) in OWN.items():
    CONFIG += [
        (
            ValueError,
            f"{name} must be left out unless loss is ... {loss!r}",
            NEEDS.get(loss, {}) | {"loss": loss, name: value},
        )
        for loss in LOSSES
        if loss not in users.split()
    ]

CORRECTION = "pass is_weights=gk.sampling_correction( ... CorrectionConfig.trl"
TRL: list[Row] = [
    (ValueError, "field must ... 'loss_typ' (did you mean 'loss_type'?)", {"loss_typ": "grpo"}),
    (ValueError, f"loss_type must be one of {', '.join(TRL_LOSS_TYPES)}, got 'ppo'", {"loss_type": "ppo"}),
    (
        ValueError,
        "importance_sampling_level must be one of token, sequence, got 'r'",
        {"importance_sampling_level": "r"},
    ),
    (ValueError, "use_adaptive_entropy must be False, got True", {"use_adaptive_entropy": True}),
    (ValueError, f"use_vllm must be False ... got True; {CORRECTION}", {"use_vllm": True}),
    (ValueError, "top_entropy_quantile must be 1, got 0.5 ... high_entropy_mask", {"top_entropy_quantile": 0.5}),
    (
        ValueError,
        "off_policy_mask_threshold must be None, got 0.1 ... off_policy_mask",
        {"off_policy_mask_threshold": 0.1},
    ),
    (TypeError, "epsilon must be a number, got str '0.2'", {"epsilon": "0.2"}),
    (TypeError, "sapo_temperature_pos must be a number, got bool True", {"sapo_temperature_pos": True}),
    (TypeError, "use_vllm must be a bool, got int 1", {"use_vllm": 1}),
    (ValueError, "clip_low must be ... got -1; clip_low is made from epsilon", {"epsilon": -1}),
    (ValueError, "clip_high must be ... got nan; clip_high is made from epsilon_high", {"epsilon_high": NAN}),
    (ValueError, "delta must be ... above 0, got -2", {"delta": -2}),
]
INSTEAD = {"bypass_mode": "not implemented", "clip_cov": "clip_cov_weights", "kl_cov": "kl_cov_penalty"}
VERL: list[Row] = [
    (ValueError, "field must ... 'loss_agg' ... loss_agg_mode", {"loss_agg": "token-mean"}),
    (ValueError, "loss_mode must be one of vanilla ... got 'ppo'", {"loss_mode": "ppo"}),
    (ValueError, "loss_agg_mode must be one of token-mean ... 'mean'", {"loss_agg_mode": "mean"}),
    (
        ValueError,
        "kl_loss_type must be ... low_var_kl ... k3+ ... 'full'",
        {"use_kl_loss": True, "kl_loss_type": "full"},
    ),
    (ValueError, "kl_loss_type must be ... low_var_kl ... None", {"use_kl_loss": True, "kl_loss_type": None}),
    *(
        (ValueError, f"loss_mode {mode!r} is not implemented ... {out}", {"loss_mode": mode})
        for mode, out in INSTEAD.items()
    ),
    (ValueError, "loss_scale_factor must be given ... None", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    (TypeError, "clip_ratio must be a number, got str '0.2'", {"clip_ratio": "0.2"}),
    (ValueError, "clip_ratio must be given with clip_ratio_low=None, ... got 0.3 alone", {"clip_ratio": 0.3}),
    (ValueError, "dual_clip must be ... above 1, got 0.5; dual_clip is made from clip_ratio_c", {"clip_ratio_c": 0.5}),
]
CLIP_MAX = {"vllm_importance_sampling_clip_max": -1}
LENGTH = len(METRICS.names)
TABLE: dict[str, list[Row]] = {
    "policy_loss": ARGUMENTS,
    "LossConfig": CONFIG,
    "LossConfig.trl": TRL,
    "LossConfig.verl": VERL,
    "CorrectionConfig.trl": [(ValueError, "weight_max must ... weight_max is made from vllm_imp", CLIP_MAX)],
    "PolicyLossMetrics.merged": [
        (ValueError, f"rows must be a list of metrics ... [K, {LENGTH}], got {got}", {"rows": rows})
        for rows, got in ((METRICS.tensor, f"shape [{LENGTH}]"), ([], "list []"), (torch.ones(2, 3), "shape [2, 3]"))
    ],
}


@pytest.mark.parametrize("where", TABLE)
def test_errors(where: str) -> None:
    function, right = CALLS[where]
    function(**right) if right else None
    for error, rule, changes in TABLE[where]:
        start, *parts = rule.split(" ... ")
        assert_raises(error, f"{where}: {start}", parts, lambda given=right | changes: function(**given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_those_of_every_backend(backend: str) -> None:
    device = device_of(backend)
    tensors = {"logprobs": -ONES, "old_logprobs": -ONES, "advantages": ROWS}
    arguments = {key: value.to(device) for key, value in tensors.items()} | {"mask": ONES[:2].to(device)}
    assert_raises(ValueError, "policy_loss: mask must", (), lambda: gk.policy_loss(**arguments, backend=backend))


# For each term beside the policy's: fields of a config, the argument, the unit that it reads, and by which field.
OTHER_UNITS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"kl": "k3", "kl_coef": 0.1, "kl_aggregation": "seq-mean-token-mean"}, "ref_logprobs", "rows", "kl_aggregation"),
    ({"kl": "k3", "kl_aggregation": "seq-mean-token-mean"}, "ref_logprobs", "rows", "kl_aggregation"),
    ({"entropy_coef": 0.1, "entropy_aggregation": "seq-mean-token-mean"}, "entropy", "rows", "entropy_aggregation"),
    ({"kl": "k3", "ratio": "segment"}, "ref_logprobs", "tokens", "kl_aggregation"),
    ({"ratio": "segment"}, "entropy", "tokens", "entropy_aggregation"),
]


@pytest.mark.parametrize(("fields", "name", "unit", "setting"), OTHER_UNITS, ids=str)
def test_a_normalizer_without_the_unit_of_another_term(
    fields: dict[str, Any], name: str, unit: str, setting: str
) -> None:
    """The missing unit would be counted in this call alone, so that micro-batches would not add up to the batch."""
    config = gk.LossConfig(**fields)
    own = "segments" if config.ratio == "segment" else "tokens"
    given: dict[str, Any] = {"logprobs": -ONES, "old_logprobs": -ONES, "advantages": ROWS, name: ONES, "config": config}
    given |= {"segments": ONES.int() - 1} if config.ratio == "segment" else {}
    missing = f"policy_loss: normalizer must have {unit!r}, the unit of {setting}="
    assert_raises(ValueError, missing, (), lambda: gk.policy_loss(**given, normalizer={own: 3}))
    both = f"policy_loss: normalizer must be a dict with {own!r} for "
    assert_raises(
        ValueError, both, (f"{unit!r} for {setting}=", "got 3"), lambda: gk.policy_loss(**given, normalizer=3)
    )
    assert gk.policy_loss(**given, normalizer={own: 3, unit: 2}).loss.isfinite()


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


# Fields of peers that change something: the base settings and another value. The other fields are refused.
CHANGES: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    "trl": {
        "loss_type": ({}, "grpo"),
        "importance_sampling_level": ({}, "sequence"),
        "epsilon": ({}, 0.3),
        "epsilon_high": ({}, 0.3),
        "delta": ({}, 1.5),
        "beta": ({}, 0.1),
        "use_bias_correction_kl": ({"beta": 0.1}, False),
        "sapo_temperature_pos": ({"loss_type": "sapo"}, 2.0),
        "sapo_temperature_neg": ({"loss_type": "sapo"}, 2.0),
        **{f"vespo_{name}": ({"loss_type": "vespo"}, 1.5) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
        "max_completion_length": ({"loss_type": "dr_grpo"}, 64),
        "entropy_coef": ({}, 0.1),
    },
    "verl": {
        "loss_mode": ({}, "gspo"),
        "loss_agg_mode": ({}, "token-sum"),
        "loss_scale_factor": ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5}, 6),
        "clip_ratio": ({"clip_ratio_low": None}, 0.3),
        "clip_ratio_low": ({}, 0.3),
        "clip_ratio_high": ({}, 0.3),
        "clip_ratio_c": ({}, 4.0),
        "tau_pos": ({"loss_mode": "sapo"}, 2.0),
        "tau_neg": ({"loss_mode": "sapo"}, 2.0),
        "dro_beta": ({"loss_mode": "dro", "dro_beta": 0.1}, 0.2),
        "entropy_coeff": ({}, 0.1),
        "use_kl_loss": ({}, True),
        "kl_loss_coef": ({"use_kl_loss": True}, 0.1),
        "kl_loss_type": ({"use_kl_loss": True}, "k1"),
    },
}


def test_no_field_of_a_peer_is_ignored() -> None:
    refused = {"use_adaptive_entropy", "use_vllm", "top_entropy_quantile", "off_policy_mask_threshold"}
    beside_vllm = {name for name in TRL_DEFAULTS if name.startswith("vllm_")}
    assert set(CHANGES["trl"]) | refused | beside_vllm == set(TRL_DEFAULTS)
    assert set(CHANGES["verl"]) == set(VERL_DEFAULTS)
    for peer, changes in CHANGES.items():
        make = getattr(gk.LossConfig, peer)
        for field, (base, value) in changes.items():
            assert make(**base) != make(**base | {field: value}), field


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
