"""Errors of policy_loss, LossConfig, its constructors for peers and its metrics."""

from __future__ import annotations

from typing import Any

import torch

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.ops.error_rows import Call, Errors, Rows, each
from tests.ops.policy_loss.cases import FIELDS, INF, NAN, NORM

ONES, ROWS, FLAT, INDEX = torch.ones(3, 4), torch.ones(3), torch.ones(4), torch.zeros(2, 3, dtype=torch.int64)
METRICS = gk.policy_loss(-ONES, None, ROWS).metrics
CALLS = {
    "policy_loss": Call(gk.policy_loss, {"logprobs": -ONES, "old_logprobs": -ONES, "advantages": ROWS}),
    "LossConfig": Call(gk.LossConfig, {}),
    "LossConfig.trl": Call(gk.LossConfig.trl, {}),
    "LossConfig.verl": Call(gk.LossConfig.verl, {}),
    "PolicyLossMetrics.merged": Call(METRICS.merged, {"rows": [METRICS]}),
}

# Arguments of policy_loss

PACKED = {"logprobs": FLAT, "old_logprobs": None}
INDEXED = {"logprobs": FLAT, "old_logprobs": torch.ones(2, 3), "advantages": torch.ones(2)}
NO_KL, SUM = gk.LossConfig(), gk.LossConfig(aggregation="token-sum")
OF_ROWS = "must have one value per row, [3], or per token, [3, 4], got {}"
ARGUMENTS: Rows = {
    **each("mask", "must have the shape of logprobs, [3, 4], got {}", torch.ones(3, 1), torch.ones(1, 4)),
    **each("advantages", OF_ROWS, FLAT, ROWS[None], FLAT[None]),
    **each("logprobs", "must have shape [B, T], or [M] with ... got {}", torch.ones(12), torch.ones(3, 4, 1)),
    **each("cu_seqlens", "must have shape [B + 1], got {}", INDEX[:1, :2], INDEX[0, :0], **PACKED),
    "logprobs must have shape [M] with cu_seqlens, got [3, 4]": {"cu_seqlens": torch.tensor([0, 4])},
    **{
        f"{name} must not require grad ... pass {name}.detach()": {name: value.clone().requires_grad_()}
        for name, value in {"advantages": ROWS, "weights": ONES, "normalizer": FLAT[0]}.items()
    },
    **each("normalizer", "must be a positive number, got {}", 0, -2.5, NAN, INF, True, "3"),
    "normalizer must be a dict with 'rows' for aggregation='seq-mean-token-mean', got 3": {"normalizer": 3},
    "normalizer must be a dict with 'segments' for aggregation='token-mean', got 3": {
        "normalizer": 3,
        "segments": ONES.int() - 1,
        "config": gk.LossConfig(ratio="segment"),
    },
    "mask must hold 0 and 1 alone, got -inf at [0, 0]; an additive mask? pass mask == 0": {"mask": ONES.log() - INF},
    "mask must hold 0 and 1 alone, got 0.5 at [0, 0]": {"mask": ONES / 2},
    "cu_seqlens must end at the number of tokens, 4, got 3; padding after the last row needs a mask": {
        "logprobs": -FLAT,
        "old_logprobs": -FLAT,
        "advantages": ROWS[:1],
        "cu_seqlens": torch.tensor([0, 3]),
    },
    **{
        f"{name} must be log-probs, ... got none below 0 and 1; ... pass -{name}; ... {name}.log()": {
            name: ONES,
            "config": gk.LossConfig(kl="k3"),
        }
        for name in ("logprobs", "old_logprobs", "ref_logprobs")
    },
    "normalizer must be a positive ... got 0": {"normalizer": {"tokens": 3, "rows": 0}},
    "normalizer must be for one of tokens, rows, segments, got 'token'": {"normalizer": {"token": 3}},
    "normalizer must have one element, got shape [2]": {"normalizer": torch.ones(2)},
    "normalizer must be left out with weights, ... got 3": {"normalizer": 3, "weights": ONES},
    **each("normalizer", "must be left out with aggregation='token-sum'", 3, config=SUM),
    **each("normalizer", "must have 'tokens', the unit of aggregation='token-mean'", {"rows": 3}, config=NO_KL),
    **{
        f"{name}_aggregation must be None or that of the policy term, 'token-mean', with weights, ... 'token-sum'": {
            "weights": ONES,
            argument: -ONES,
            "config": gk.LossConfig(kl="k3", **{f"{name}_aggregation": "token-sum"}),
        }
        for name, argument in (("kl", "ref_logprobs"), ("entropy", "entropy"))
    },
    "segments must be given for ratio='segment_mean'": {"config": gk.LossConfig(ratio="segment_mean")},
    "ref_logprobs must be given for kl_coef=0.1, got None": {"config": gk.LossConfig(kl="k3", kl_coef=0.1)},
    "ref_logprobs must be left out with kl='none'": {"ref_logprobs": ONES},
    "entropy must be given for entropy_coef=0.1, got None": {"config": gk.LossConfig(entropy_coef=0.1)},
    "is_weights must be one per token for loss='vespo', ... [3]": {"is_weights": ROWS, "config": "vespo"},
    "policy_mask must be left out for loss='geo_mean', whose terms are rows": {
        "policy_mask": ONES,
        "config": gk.LossConfig("geo_mean", aggregation="seq-mean-token-sum"),
    },
    **each("term_index", "must be in [0, 4), or -1 ... got 4", INDEX + 4, **INDEXED),
    **each("term_index", "must be in [0, 4), or -1 ... got -2", INDEX - 2, **INDEXED),
    **each("term_index", "must have shape [B, T], or [M] with", torch.zeros(6).long(), **INDEXED),
    "old_logprobs must have the shape of term_index, [3, 2]": INDEXED | {"term_index": INDEX.T},
    **each("entropy", "must have the shape of logprobs, [4], got {}", ONES[:2, :3], **INDEXED, term_index=INDEX),
    # names of another constructor, or of no loss
    **{
        f"config must be one of ... got {name!r} ... {way_out}": {"config": name}
        for name, way_out in {
            "vanilla": "verl's is LossConfig.verl(loss_mode='vanilla')",
            "clip": "the policy term is LossConfig('clip')",
            "GMPO": "GMPO is LossConfig.verl(loss_mode='geo_mean')",
            "gropo": "(did you mean 'grpo'?)",
        }.items()
    },
}
# The unit of a term beside the policy's, and the field that says so. Where a normalizer misses it, it would be counted
# in this call alone, so that micro-batches would not add up to the batch.
for fields, argument, unit, setting in (
    ({"kl": "k3", "kl_aggregation": "seq-mean-token-mean"}, "ref_logprobs", "rows", "kl_aggregation"),
    ({"entropy_coef": 0.1, "entropy_aggregation": "seq-mean-token-mean"}, "entropy", "rows", "entropy_aggregation"),
    ({"ratio": "segment"}, "entropy", "tokens", "entropy_aggregation"),
):
    config = gk.LossConfig(**fields)
    own = "segments" if config.ratio == "segment" else "tokens"
    others = {argument: -ONES, "config": config} | ({"segments": ONES.int() - 1} if own == "segments" else {})
    ARGUMENTS |= each("normalizer", f"must have {unit!r}, the unit of {setting}=", {own: 3}, **others)
    ARGUMENTS |= each("normalizer", f"must be a dict with {own!r} for ... {unit!r} for {setting}= ... 3", 3, **others)

# Fields of LossConfig that test_configs.py cannot see, as the default is None or holds several numbers

NEEDS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}, "geo_mean": {"aggregation": "token-sum"}}
CONFIG: Rows = {
    **each("clip_low", "must be a finite number of at least 0, got {}", -0.5, NAN),
    **each("clip_high", "must be at least 0 ... {}", -0.5),
    **each("clip_high", "must be at least 0 ... {}", -1.5, loss="cispo"),
    **each("dual_clip", "must be a finite number above 1, got {}", 1.0),
    **each("delta", "must be a finite number above 0, got {}", 0.0),
    **each("ratio_cap", "must be a finite number above 0, got {}", 0.0, loss="dppo_tv"),
    **each("dro_beta", "must be a finite number above 0, got {}", 0.0, loss="dro"),
    **each("kl_aggregation", "must be one of ... local-token-mean, got {}", "means", "", 1),
    **each("entropy_aggregation", "must be one of ... local-token-mean", "means"),
    "max_length must ... None": {"kl": "k1", "kl_aggregation": NORM},
    **each("loss", "must be one of clip, ... topr, got {}", ["clip"]),
    **each("loss", "must be the name of a term, got 'grpo', ... LossConfig.of('grpo')", "grpo"),
    **each(
        "loss",
        "must be ... got 'gspo'; verl's is LossConfig.verl(loss_mode='gspo'); TRL's is LossConfig.trl(impor",
        "gspo",
    ),
    **each("aggregation", "must be one of ... got {}", "local-token-mean"),
    **each("aggregation", "must be seq-mean-token-sum or ... {}", "token-mean", loss="geo_mean"),
    **each("sapo_temperatures", "must hold 2 numbers ... {}", (1.0,), 1.0, loss="sapo"),
    **each("sapo_temperatures", "must ... above 0 ... 0.0", (1.0, 0.0), loss="sapo"),
    **each("vespo_shape", "must hold 4 numbers ... {}", (1.0, 2.0), loss="vespo"),
    **each("vespo_shape", "must ... at least 0 ... -1.0", (1.0, 2.0, 3.0, -1.0), loss="vespo"),
    **each("kl_clamp", "must hold 2 numbers ... {}", (20.0,), kl="k3"),
    **each("kl_clamp", "must ... above 0 ... 0.0", (0.0, 1.0), kl="k3"),
    **each("log_ratio_clamp", "must be ... low < high ... {}", (1.0, -1.0), (0.0, NAN), 20.0, ("a", "b")),
    **each("max_length", "must be a positive int ... {}", 0, 1.5, True, "9"),
    **each("max_length", "must ... token-mean", 9),
    "kl must ... 'none' ... kl_coef=0.1": {"kl_coef": 0.1},
    "kl must ... 'none' ... kl_clamp=(1.0, 1.0)": {"kl_clamp": (1.0, 1.0)},
    "kl must ... 'none' ... kl_unbiased=True": {"kl_unbiased": True},
    **each("kl_unbiased", "must be False ... 'k3+'", True, kl="k3+", kl_coef=1.0),
    **each("kl_unbiased", "must be False ... 'segment'", True, kl="k3", ratio="segment"),
    "dro_beta must be given ... None": {"loss": "dro"},
    **each("clip_low", "must be given for loss 'dppo_tv' ... {}", None, loss="dppo_tv"),
    **each("clip_high", "must be given for loss 'dppo_kl' ... {}", None, loss="dppo_kl"),
}
for loss in ("vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro"):
    others = {"loss": loss, **NEEDS.get(loss, {})}
    CONFIG |= each("ratio", f"must be one of token ... 'segment' ... {loss!r}", "segment", **others)
# fields that only other losses read
READ = {name: value for fields in FIELDS.values() for name, values in fields.items() for value in values if value}
for loss, fields in FIELDS.items():
    others = {"loss": loss, **NEEDS.get(loss, {})}
    for name in READ.keys() - fields.keys():
        CONFIG |= each(name, f"must be left out unless loss is ... {loss!r}", READ[name], **others)

# Fields of peers

TRL: Rows = {
    "field must ... 'loss_typ' (did you mean 'loss_type'?)": {"loss_typ": "grpo"},
    **each("loss_type", f"must be one of {', '.join(TRL_LOSS_TYPES)}, got 'ppo'", "ppo"),
    **each("importance_sampling_level", "must be one of token, sequence, got 'r'", "r"),
    **each("use_adaptive_entropy", "must be False, got True", True),
    **each("use_vllm", "must be False ... got True; pass is_weights=gk.sampling_correction( ... Config.trl", True),
    **each("top_entropy_quantile", "must be 1, got 0.5 ... high_entropy_mask", 0.5),
    **each("off_policy_mask_threshold", "must be None, got 0.1 ... off_policy_mask", 0.1),
    **each("delta", "must be ... above 0, got -2", -2),
    "clip_low must be ... got -1; clip_low is made from epsilon": {"epsilon": -1},
    "clip_high must be ... got nan; clip_high is made from epsilon_high": {"epsilon_high": NAN},
}
VERL: Rows = {
    "field must ... 'loss_agg' ... loss_agg_mode": {"loss_agg": "token-mean"},
    **each("loss_mode", "must be one of vanilla ... got {}", "ppo"),
    **each("loss_mode", "{} is not implemented ... not implemented", "bypass_mode"),
    **each("loss_mode", "{} is not implemented ... clip_cov_weights", "clip_cov"),
    **each("loss_mode", "{} is not implemented ... kl_cov_penalty", "kl_cov"),
    **each("loss_agg_mode", "must be one of token-mean ... {}", "mean"),
    **each("kl_loss_type", "must be ... low_var_kl ... k3+ ... {}", "full", None, use_kl_loss=True),
    "loss_scale_factor must be given ... None": {"loss_agg_mode": NORM},
    **each("clip_ratio", "must be given with clip_ratio_low=None, ... got 0.3 alone", 0.3),
    "dual_clip must be ... above 1, got 0.5; dual_clip is made from clip_ratio_c": {"clip_ratio_c": 0.5},
}
MERGED = f"rows must be a list of metrics ... [K, {len(METRICS.names)}], got "
RESULT = gk.sampling_correction(-ONES, -ONES)
SCORED = gk.token_logprobs(torch.zeros(3, 4, 2), INDEX.new_zeros(3, 4))
RESULTS: Rows = {
    "advantages must be a tensor, got GroupAdvantages; pass its .advantages": {
        "advantages": gk.group_advantages(ROWS, 3)
    },
    "is_weights must be a tensor, got SamplingCorrection; pass its .weights": {"is_weights": RESULT},
    "mask must be a tensor, got SamplingCorrection; pass its .mask": {"mask": RESULT},
    **{
        f"{name} must be a tensor, got TokenLogprobs; pass its .logprobs": {name: SCORED}
        for name in ("logprobs", "old_logprobs")
    },
    "segments must be a tensor, got EndpointSegments; pass its .segment_ids": {
        "segments": gk.endpoint_segments(ONES, -ONES, -ONES, values=ONES)
    },
}
ERRORS = [
    Errors("policy_loss", ValueError, ARGUMENTS),
    Errors(
        "policy_loss", TypeError, RESULTS | {"config must be a LossConfig or a str, got NoneType": {"config": None}}
    ),
    Errors("LossConfig", ValueError, CONFIG),
    Errors(
        "LossConfig",
        TypeError,
        {
            "keywords must be ... got 'beta'; TRL's is LossConfig.trl(beta=...)": {"beta": 0.04},
            "keywords must be ... got 'clip_ratio'; verl's is LossConfig.verl(clip_ratio=...)": {"clip_ratio": 0.2},
            **each("clip_low", "must be a number, got ... {}", "1e-6", True),
        },
    ),
    Errors("LossConfig.trl", ValueError, TRL),
    Errors(
        "LossConfig.trl",
        TypeError,
        each("epsilon", "must be a number, got str '0.2'", "0.2")
        | each("sapo_temperature_pos", "must be a number, got bool True", True)
        | each("use_vllm", "must be a bool, got int 1", 1),
    ),
    Errors("LossConfig.verl", ValueError, VERL),
    Errors("LossConfig.verl", TypeError, each("clip_ratio", "must be a number, got str '0.2'", "0.2")),
    Errors(
        "PolicyLossMetrics.merged",
        ValueError,
        {f"{MERGED}shape [2, 3]": {"rows": torch.ones(2, 3)}, f"{MERGED}list []": {"rows": []}},
    ),
]
