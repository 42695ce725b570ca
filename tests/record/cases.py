"""Cases of the record: a method in the words of TRL, verl or another system, or of the formula, and its inputs.

A case names no function or argument of the library; calls.py translates. Inputs are those of inputs.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

Fields = dict[str, Any]


class Case(NamedTuple):
    call: str  # a function of calls.py
    method: Fields  # fields of a system's settings under its name, or options of the call
    inputs: tuple[str, ...] = ()  # optional inputs that are given


# TRL

_TRL_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
_VLLM = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_BOUNDS = {"vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1}
_TRL_OPTIONS: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "plain": ({}, ()),
    "sequence": ({"importance_sampling_level": "sequence"}, ()),
    "kl": ({"beta": 0.04}, ("reference",)),
    "biased kl": ({"beta": 0.04, "use_bias_correction_kl": False}, ("reference",)),
    "entropy": ({"entropy_coef": 0.01}, ("entropy",)),
    "top entropy": ({"top_entropy_quantile": 0.5}, ("entropy",)),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, ("sampler",)),
    "all": (
        {"importance_sampling_level": "sequence", "beta": 0.04, "entropy_coef": 0.01, "top_entropy_quantile": 0.6}
        | {"off_policy_mask_threshold": 0.2},
        ("reference", "entropy"),
    ),
    **{
        mode: ({"use_vllm": True, "vllm_importance_sampling_mode": mode} | _BOUNDS, ("sampler", "reference"))
        for mode in _VLLM
    },
}
_TRL_OWN: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "grpo/delta": ({"delta": 1.5}, ()),
    "dapo/bounds": ({"epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.5}, ()),
    "dapo/gspo": ({"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}, ()),
    "cispo/bounds": ({"epsilon_high": 1.5}, ()),
    "sapo/temperatures": ({"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}, ()),
    "vespo/shape": ({"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5}, ()),
}


def _trl() -> Iterator[tuple[str, Case]]:
    options = {f"{kind}/{option}": value for kind in _TRL_TYPES for option, value in _TRL_OPTIONS.items()} | _TRL_OWN
    for name, (fields, inputs) in options.items():
        kind = name.partition("/")[0]
        if kind == "vespo" and "/sequence_" in name:
            continue  # refused, as in TRL
        fields = {"loss_type": kind, "max_completion_length": 8} | fields
        if "reference" in inputs:
            fields = {"beta": 0.04} | fields
        yield f"trl/{name}", Case("policy_loss", {"trl": fields}, inputs)


# verl

_VERL_MODES: dict[str, Fields] = {
    **{name: {} for name in ("vanilla", "gspo", "sapo", "cispo", "gpg", "geo_mean")},
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04},
    "dppo_kl": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04},
    "dro": {"dro_beta": 0.3},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -0.5, "clip_cov_ub": 0.5},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
}
_VERL_AGGREGATIONS = (
    *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "seq-mean-token-mean",
)


def _verl() -> Iterator[tuple[str, Case]]:
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.04, "entropy_coeff": 0.01}
    for mode, own in _VERL_MODES.items():
        fields = {"loss_mode": mode} | own
        for aggregation in _VERL_AGGREGATIONS:
            scale = {"loss_scale_factor": 8} if aggregation.endswith("norm") else {}
            method = fields | terms | {"loss_agg_mode": aggregation} | scale
            yield f"verl/{mode}/{aggregation}", Case("policy_loss", {"verl": method}, ("reference", "entropy"))
        yield f"verl/{mode}/is_weights", Case("policy_loss", {"verl": fields}, ("importance",))
        yield f"verl/{mode}/row is_weights", Case("policy_loss", {"verl": fields}, ("row importance",))
        yield f"verl/{mode}/per token", Case("policy_loss", {"verl": fields}, ("token advantages", "entropy"))
        if mode not in ("gpg", "dro", "clip_cov", "kl_cov", "geo_mean"):  # the others clamp no log ratio
            yield f"verl/{mode}/far", Case("policy_loss", {"verl": fields}, ("far old",))
    for kl in ("kl", "abs", "mse", "low_var_kl", "k1+", "k3+", "abs+"):
        method = {"loss_mode": "vanilla"} | terms | {"kl_loss_type": kl}
        yield f"verl/vanilla/{kl}", Case("policy_loss", {"verl": method}, ("far reference", "entropy"))
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 2.0}
    for mode in ("vanilla", "gspo", "cispo", "geo_mean"):
        yield f"verl/{mode}/bounds", Case("policy_loss", {"verl": {"loss_mode": mode} | bounds})
    temperatures = {"loss_mode": "sapo", "tau_pos": 2.0, "tau_neg": 3.0}
    yield "verl/sapo/temperatures", Case("policy_loss", {"verl": temperatures})


# other systems, by the formulas of their losses

_PEERS: dict[str, Fields] = {
    "prime_rl/ipo": {"loss": "ipo", "clip_low": 0.05, "clip_high": 0.05},
    "prime_rl/icepop": {"loss": "icepop", "clip_low": 0.19999999999999996, "clip_high": 0.19999999999999996},
    "skyrl/regular": {
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/dual_clip": {
        "dual_clip": 3.0,
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/sapo": {
        "loss": "sapo",
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/gspo": {
        "ratio": "sequence_token",
        "log_ratio_clamp": (-math.inf, 10.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/cispo": {
        "loss": "cispo",
        "clip_low": 0.0,
        "clip_high": 5.0,
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/rollout_is": {
        "loss": "icepop",
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/dppo": {
        "loss": "dppo_tv",
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/importance_sampling": {
        "clip_low": None,
        "clip_high": None,
        "aggregation": "token-sum",
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/clip_cov": {
        "loss": "clip_cov",
        "cov_ratio": 0.2,
        "cov_bounds": (-0.5, 0.5),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/kl_cov": {
        "loss": "kl_cov",
        "cov_ratio": 0.2,
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/sequence_mean": {
        "log_ratio_clamp": (-20.0, 20.0),
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "aggregation": "seq-mean-token-mean",
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "skyrl/norm": {
        "log_ratio_clamp": (-20.0, 20.0),
        "aggregation": "seq-mean-token-sum-norm",
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "max_length": 8,
        "count_empty_rows": True,
    },
    "skyrl/token tis": {
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
        "correction": "token_truncate",
        "correction_max": 1.05,
    },
    "skyrl/sequence tis": {
        "log_ratio_clamp": (-20.0, 20.0),
        "kl_aggregation": "seq-mean-token-mean",
        "entropy_aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
        "correction": "sequence_truncate",
        "correction_max": 1.05,
    },
    "areal/ppo": {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 2.0},
    "areal/sequence": {"ratio": "sequence"},
    "areal/sapo": {"loss": "sapo"},
    "areal/token mask": {"correction": "token_mask", "correction_max": 1.1},
    "areal/row clamp": {"correction": "geometric_truncate", "correction_min": 0.9, "correction_max": 1.1},
    "roll/vanilla": {"loss": "reinforce", "aggregation": "seq-mean-token-mean"},
    "roll/ppo": {"aggregation": "seq-mean-token-mean"},
    "roll/tis": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.0, "aggregation": "seq-mean-token-mean"},
    "roll/topr": {"loss": "topr", "aggregation": "seq-mean-token-mean"},
    "roll/cispo": {"loss": "cispo", "clip_low": 0.1, "clip_high": 0.1, "aggregation": "seq-mean-token-mean"},
    "roll/kimi15": {"loss": "dro", "dro_beta": 0.1, "aggregation": "seq-mean-token-mean"},
    "roll/dual clip": {
        "dual_clip": 1.4,
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (700.0, 10.0),
        "aggregation": "seq-mean-token-mean",
    },
    "cosmos/grpo": {"dual_clip": 3.0, "log_ratio_clamp": (-20.0, 20.0), "count_empty_rows": True},
    "cosmos/dapo": {"dual_clip": 3.0, "log_ratio_clamp": (-20.0, 20.0), "count_empty_rows": True},
    "cosmos/gspo": {"ratio": "sequence", "log_ratio_clamp": (-math.inf, 10.0), "count_empty_rows": True},
    "cosmos/aipo": {
        "clip_low": None,
        "clip_high": 0.19999999999999996,
        "delta": 1.2,
        "log_ratio_clamp": (-20.0, 20.0),
        "count_empty_rows": True,
    },
    "cosmos/kl": {
        "dual_clip": 3.0,
        "log_ratio_clamp": (-20.0, 20.0),
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "kl_unbiased": True,
        "aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "cosmos/cap": {
        "dual_clip": 3.0,
        "log_ratio_clamp": (-20.0, 20.0),
        "count_empty_rows": True,
        "correction": "token_mask",
        "correction_max": 1.1,
        "off_policy_threshold": 0.05,
    },
    "art/token": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "art/token ppo": {},
    "art/sequence": {"loss": "cispo", "ratio": "sequence", "clip_low": 1.0, "clip_high": 4.0},
    "art/sequence ppo": {"ratio": "sequence"},
    "art/average": {"loss": "cispo", "ratio": "average", "clip_low": 1.0, "clip_high": 4.0},
    "art/average ppo": {"ratio": "average"},
    "art/geometric_average": {"loss": "cispo", "ratio": "geometric_average", "clip_low": 1.0, "clip_high": 4.0},
    "art/geometric_average ppo": {"ratio": "geometric_average"},
    "art/truncated": {
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "correction": "token_truncate",
        "correction_max": 1.1,
    },
    "swift/grpo": {
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "swift/bnpo": {"kl": "k3", "kl_coef": 0.04, "kl_clamp": (20.0, 10.0), "count_empty_rows": True},
    "swift/dr_grpo": {
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "aggregation": "seq-mean-token-sum-norm",
        "max_length": 8,
        "count_empty_rows": True,
    },
    "swift/dapo": {"kl": "k3", "kl_coef": 0.04, "kl_clamp": (20.0, 10.0), "count_empty_rows": True},
    "swift/cispo": {
        "loss": "cispo",
        "clip_low": None,
        "clip_high": -0.8,
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "count_empty_rows": True,
    },
    "swift/sapo": {
        "loss": "sapo",
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "aggregation": "seq-mean-token-mean",
        "count_empty_rows": True,
    },
    "swift/real": {"loss": "real", "kl": "k3", "kl_coef": 0.04, "kl_clamp": (20.0, 10.0), "count_empty_rows": True},
    "swift/fipo": {
        "future_kl_half_life": 32.0,
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "count_empty_rows": True,
    },
    "swift/fipo both sides": {
        "delta": 1.5,
        "future_kl_half_life": 2.0,
        "future_kl_clip": (0.8, 1.2),
        "future_kl_cap": 1.5,
        "kl": "k3",
        "kl_coef": 0.04,
        "kl_clamp": (20.0, 10.0),
        "count_empty_rows": True,
    },
}
_SAMPLED = ("token tis", "sequence tis", "token mask", "row clamp", "cap", "truncated")


def _peers() -> Iterator[tuple[str, Case]]:
    for name, fields in _PEERS.items():
        kind = name.partition("/")[2]
        inputs = ("reference",) if fields.get("kl") else ()
        inputs = (*inputs, "sampler") if kind in _SAMPLED else inputs
        inputs = (*inputs, "groups") if kind == "real" else inputs
        yield name, Case("policy_loss", fields, inputs)


# the formulas of the loss, by their own names

_RATIOS = ("token", "sequence", "segment", "segment_mean", "average", "geometric_average")
_RATIOS_OF = {
    "clip": (*_RATIOS, "sequence_token"),
    **dict.fromkeys(("cispo", "sapo", "icepop", "topr"), _RATIOS),
    "vespo": ("token", "sequence"),
    **dict.fromkeys(("reinforce", "dro", "ipo"), ("token",)),
}
_OWN: dict[str, tuple[Fields, tuple[str, ...]]] = {
    **{
        f"{kl}{', unbiased' if unbiased else ''}": (
            {"kl": kl, "kl_coef": 0.3, "kl_unbiased": unbiased},
            ("reference",),
        )
        for kl in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
        for unbiased in (False, True)
        if not (unbiased and kl.endswith("+"))
    },
    "unbiased sequence": ({"ratio": "sequence", "kl": "k3", "kl_coef": 0.3, "kl_unbiased": True}, ("reference",)),
    "clamped kl": ({"kl": "k3", "kl_coef": 0.3, "kl_clamp": (0.2, 0.05)}, ("reference",)),
    "measured kl": ({"kl": "k2"}, ("reference", "entropy")),
    "dual clip": ({"dual_clip": 2.0, "delta": 1.5}, ()),
    "no bounds": ({"clip_low": None, "clip_high": None}, ()),
    "clamped log ratio": ({"log_ratio_clamp": (-0.3, 0.3)}, ()),
    "topr cap": ({"loss": "topr", "ratio_cap": 1.1}, ()),
    "on-policy": ({"kl": "k3", "kl_coef": 0.3}, ("reference", "no old")),
    "per token": ({}, ("token advantages", "importance")),
    "weights": ({"kl": "k3", "kl_coef": 0.3, "entropy_coef": 0.1}, ("shares", "reference", "entropy")),
    "one log-prob for several": ({"entropy_coef": 0.1}, ("index", "entropy")),
    "entropy of the top": (
        {"entropy_coef": 0.1, "entropy_aggregation": "local-token-mean", "top_entropy_quantile": 0.4},
        ("entropy",),
    ),
    "entropy floor": ({"top_entropy_quantile": 0.4}, ("entropy", "floor")),
    "segments, given counts": ({"ratio": "segment"}, ("segments", "counts")),
    "off-policy rows": ({"off_policy_threshold": 0.05}, ()),
    **{
        f"{correction}{' of rows' if ratio == 'sequence' else ''}": (
            {"correction": correction, "correction_min": 0.95, "correction_max": 1.1, "ratio": ratio},
            ("sampler",),
        )
        for level, what in itertools.product(("token", "sequence", "geometric"), ("truncate", "mask"))
        for correction in (f"{level}_{what}",)
        for ratio in ("token", "sequence")
    },
    "future kl": ({"future_kl_half_life": 2.0}, ()),
    "future kl, free": (
        {"future_kl_half_life": 2.0, "future_kl_clip": None, "future_kl_cap": 1.5, "future_kl_safety": None},
        (),
    ),
    "gvpo": ({"loss": "gvpo"}, ("groups", "reference")),
    "real": ({"loss": "real", "kl": "k3", "kl_coef": 0.3}, ("groups", "reference")),
    **{
        f"flowrl {clip}": (
            {"loss": "flowrl", "flowrl_clip": clip, "ratio_cap": 1.5, "flowrl_beta": 2.0},
            ("log_z", "reference", "importance of rows"),
        )
        for clip in ("product", "geometric", "logprob")
    },
}


def _own() -> Iterator[tuple[str, Case]]:
    for loss, ratios in _RATIOS_OF.items():
        for ratio in ratios:
            fields = {"loss": loss, "ratio": ratio} | ({"dro_beta": 0.3} if loss == "dro" else {})
            yield f"loss/{loss}/{ratio}", Case("policy_loss", fields, ("segments",) if "segment" in ratio else ())
    for aggregation in _VERL_AGGREGATIONS:
        norm = {"max_length": 8} if aggregation.endswith("norm") else {}
        fields = {"aggregation": aggregation, "kl": "k3", "kl_coef": 0.3} | norm
        yield f"loss/{aggregation}", Case("policy_loss", fields, ("reference",))
        yield (
            f"loss/{aggregation}, empty rows",
            Case("policy_loss", fields | {"count_empty_rows": True}, ("reference",)),
        )
        yield f"loss/{aggregation}, given counts", Case("policy_loss", fields, ("reference", "counts"))
        by_segment = fields | {"ratio": "segment"}
        yield f"loss/{aggregation}, segments", Case("policy_loss", by_segment, ("segments", "reference"))
    for name, (fields, inputs) in _OWN.items():
        yield f"loss/{name}", Case("policy_loss", fields, inputs)


# from hidden states and logits


def _head() -> Iterator[tuple[str, Case]]:
    losses: dict[str, tuple[Fields, tuple[str, ...]]] = {
        **{f"trl/{kind}": ({"trl": {"loss_type": kind, "max_completion_length": 8}}, ()) for kind in _TRL_TYPES},
        **{f"verl/{mode}": ({"verl": {"loss_mode": mode} | own}, ()) for mode, own in _VERL_MODES.items()},
        "kl and entropy": ({"trl": {"beta": 0.04, "entropy_coef": 0.01}}, ("reference",)),
        "sequence": ({"trl": {"importance_sampling_level": "sequence", "beta": 0.04}}, ("reference",)),
        "top entropy": ({"trl": {"top_entropy_quantile": 0.5}}, ()),
        "segment": ({"ratio": "segment"}, ("segments",)),
        "average": ({"ratio": "average"}, ()),
        "sequence_mask": ({"correction": "sequence_mask", "correction_max": 1.1}, ("sampler",)),
        "off-policy rows": ({"off_policy_threshold": 0.05}, ()),
        "future kl": ({"future_kl_half_life": 2.0}, ()),
        "gvpo": ({"loss": "gvpo"}, ("groups", "reference")),
    }
    for name, (fields, inputs) in losses.items():
        yield f"head/{name}", Case("linear_policy_loss", fields, inputs)
    grpo = {"trl": {"loss_type": "grpo", "beta": 0.04}}
    for name, inputs in {
        "bias": ("bias",),
        "lora": ("lora",),
        "scaling": ("bias", "softcap", "logit_scale", "temperature"),
        "temperatures": ("temperatures",),
        "support": ("support",),
        "positions": ("positions",),
        "is_weights": ("importance",),
        "weights": ("shares",),
        "counts": ("counts",),
        "measured entropy": ("measured entropy",),
        "one row for several": ("index",),
    }.items():
        yield f"head/{name}", Case("linear_policy_loss", grpo, ("reference", *inputs))
    yield "head/reference of the same head", Case("linear_policy_loss", grpo, ("reference hidden",))
    yield "head/reference head", Case("linear_policy_loss", grpo, ("reference hidden", "reference weight", "bias"))
    for kind, tail in itertools.product(("forward_kl", "reverse_kl", "jsd"), ("bucket", "ignore", "renormalise")):
        divergence = {"kind": kind, "tail": tail}
        yield f"distillation/{kind}/{tail}", Case("distillation", divergence, ("bias",))
        if tail == "bucket":
            method = grpo | {"teacher": divergence | {"coef": 0.5}}
            yield f"head/teacher, {kind}", Case("linear_policy_loss", method, ("reference",))
    yield "distillation/weights", Case("distillation", {"kind": "forward_kl", "tail": "bucket"}, ("shares",))
    for name, inputs in {
        "plain": (),
        "scaling": ("softcap", "logit_scale", "temperature"),
        "temperatures": ("temperatures",),
        "support": ("support",),
    }.items():
        yield f"token log-probs/{name}", Case("token_logprobs", {}, inputs)
        yield f"head log-probs/{name}", Case("linear_logprobs", {}, ("bias", *inputs))
    for name in ("lora", "positions", "index"):
        yield f"head log-probs/{name}", Case("linear_logprobs", {}, (name,))
    for kind in ("grpo", "vespo"):
        yield f"logits/{kind}", Case("loss_of_logits", {"trl": {"loss_type": kind, "entropy_coef": 0.01}})


CASES: dict[str, Case] = {}
for _part in (_trl, _verl, _peers, _own, _head):
    CASES |= dict(_part())
