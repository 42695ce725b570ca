"""policy_loss against the installed verl's own losses: value, gradients and every metric by its key.

Faults that this is for: a setting of verl that is translated into another formula, bound, unit or count of ranks; a
clamp of log ratios or of a KL that is missing; a metric of another unit or name; a default that is not verl's.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS
from tests.harness import examples
from tests.ops.policy_loss import peers
from tests.ops.policy_loss.cases import F32, F64, NORM
from tests.ops.policy_loss.peers import Result, on_backends, on_dtypes
from tests.ops.promises import Inputs

pytest.importorskip("verl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig

# by verl's name: settings beside its defaults
MODES: dict[str, dict[str, Any]] = {
    **{mode: {} for mode in ("vanilla", "gspo", "sapo", "gpg")},
    **{mode: {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25} for mode in ("cispo", "geo_mean")},
    **{mode: {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02} for mode in ("dppo_tv", "dppo_kl")},
    "dro": {"dro_beta": 0.3},
    # all tokens within the bounds, as verl draws them at random
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": -0.2, "clip_cov_ub": 0.6},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
}
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
VERL_AGGREGATIONS = tuple(name for name in AGGREGATIONS if name != "local-token-mean")
# totals over several ranks, of which this batch is one part
GLOBAL = {"dp_size": 2, "batch_num_tokens": 150, "global_batch_size": 24}


def make_batch(kind: str = "ordinary", dtype: torch.dtype = F64) -> Inputs:
    """Advantages of tokens, some of them 0, and a row without tokens.

    With kind "beyond", some tokens and one row also have ratios beyond the clamps, on either side.
    """
    batch = peers.make_batch(F32)
    logprobs, old, ref = (batch[name] for name in ("logprobs", "old_logprobs", "ref_logprobs"))
    if kind == "beyond":
        for target, other in ((logprobs, old), (old, logprobs), (ref, logprobs), (logprobs, ref)):
            chosen = torch.rand(old.shape) < 0.08
            target[chosen] = -26.0
            other[chosen] = -0.5
        old[3], logprobs[3] = -14.0 - torch.rand(old.shape[1]), -1 - torch.rand(old.shape[1])
    batch["mask"][2] = False
    batch |= {"advantages": batch["token_advantages"]}
    return {name: value if name == "mask" else value.to(dtype) for name, value in batch.items()}


def fields_of(mode: str, aggregation: str, **changes: Any) -> dict[str, Any]:
    fields = {"loss_mode": mode, "loss_agg_mode": aggregation} | MODES[mode] | changes
    return fields | ({"loss_scale_factor": 7} if aggregation == NORM else {})


def actor(fields: dict[str, Any], ranks: dict[str, Any] | None = None) -> ActorConfig:
    of_policy = {field.name for field in dataclasses.fields(PolicyLossConfig)}
    own = {name: value for name, value in fields.items() if name not in of_policy}
    policy = {name: value for name, value in fields.items() if name in of_policy}
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig(**policy), **own
    )
    config.global_batch_info.update(ranks or {})
    if "loss_scale_factor" in fields:
        config.global_batch_info["loss_scale_factor"] = fields["loss_scale_factor"]
    return config


def ours(backend: str, batch: Inputs, fields: dict[str, Any], weights: bool = False, **arguments: Any) -> Result:
    b = peers.placed(batch, backend)
    arguments |= {"mask": b["mask"], "entropy": b["entropy"], "backend": backend}
    arguments |= {"ref_logprobs": b["ref_logprobs"]} if fields.get("use_kl_loss") else {}
    arguments |= {"is_weights": b["is_weights"]} if weights else {}
    config = gk.LossConfig.verl(**fields)
    got = gk.policy_loss(b["logprobs"], b["old_logprobs"], b["advantages"], config=config, **arguments)
    return peers.result_of(got.loss, b, got.metrics.verl())


def theirs(batch: Inputs, fields: dict[str, Any], weights: bool = False, ranks: dict[str, Any] | None = None) -> Result:
    """The registered loss minus the entropy bonus plus the KL loss, each aggregated by verl."""
    config = actor(fields, ranks)
    b = batch | {name: batch[name].clone().requires_grad_() for name in peers.LEAVES}
    pg_loss, metrics = core_algos.get_policy_loss_fn(fields["loss_mode"])(
        old_log_prob=b["old_logprobs"],
        log_prob=b["logprobs"],
        advantages=b["advantages"],
        response_mask=b["mask"],
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=b["is_weights"] if weights else None,
    )

    def mean(value: Tensor) -> Tensor:
        return core_algos.agg_loss(value, b["mask"], config.loss_agg_mode, **config.global_batch_info)

    entropy_loss = mean(b["entropy"])
    loss = pg_loss - config.entropy_coeff * entropy_loss
    metrics |= {"actor/pg_loss": pg_loss.item(), "actor/entropy_loss": entropy_loss.item()}
    if config.use_kl_loss:
        kl_loss = mean(core_algos.kl_penalty(b["logprobs"], b["ref_logprobs"], config.kl_loss_type))
        loss = loss + config.kl_loss_coef * kl_loss
        metrics |= {"kl_loss": kl_loss.item(), "kl_coef": config.kl_loss_coef}
    return peers.result_of(loss, b, metrics)


def divided(result: Result, divisor: int) -> Result:
    """The result without a factor of all terms of its loss."""
    terms = {"actor/pg_loss", "actor/entropy_loss", "kl_loss"} & result.metrics.keys()
    return Result(
        result.loss / divisor,
        {name: gradient / divisor for name, gradient in result.gradients.items()},
        result.metrics | {name: result.metrics[name] / divisor for name in terms},
    )


def normalizer_of(ranks: dict[str, Any] | None) -> dict[str, Any]:
    if ranks is None:
        return {}
    counts = {"tokens": ranks["batch_num_tokens"], "rows": ranks["global_batch_size"]}
    return {"normalizer": {name: count / ranks["dp_size"] for name, count in counts.items()}}


def assert_parity(got: Result, want: Result, batch: Inputs, fields: dict[str, Any]) -> None:
    d, k = ((batch["logprobs"] - batch[name]).abs() for name in ("old_logprobs", "ref_logprobs"))
    # other losses limit the ratio, or the weight computed from it, to at most 4
    limits = {"gspo": 10.0, "clip_cov": 26.0, "kl_cov": 26.0}
    ratio = d.clamp(max=limits[fields["loss_mode"]]).exp() if fields["loss_mode"] in limits else 4
    policy = batch["advantages"].abs() * ratio * (1 + batch["logprobs"].abs() + batch["old_logprobs"].abs())
    kl = k.clamp(max=20).exp().clamp(max=20) + k.square() if fields.get("use_kl_loss") else torch.zeros_like(k)
    terms = (policy + d.square()) * (1 + batch["is_weights"]) + kl + batch["entropy"]
    is_sum = fields["loss_agg_mode"] == "token-sum" or fields["loss_mode"] == "geo_mean"
    peers.assert_parity(got, want, batch["mask"], terms, 1.0 if is_sum else 0.25)


# Values of each option
GRID: dict[str, list[Any]] = {
    "kind": ["ordinary", "beyond"],
    "ranks": [None, GLOBAL],
    "weights": [False, True],
    "aggregation": list(VERL_AGGREGATIONS),
    "kl": [None, *KL_TYPES, *(f"{name}+" for name in KL_TYPES)],
    "entropy_coeff": [0.0, 0.01],
}


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.endswith("cov")])
@on_dtypes
def test_registered_losses(backend: str, dtype: torch.dtype, mode: str) -> None:
    """With an entropy bonus and a KL loss, from counts of this batch or of all ranks."""

    @settings(max_examples=examples(60 if backend in ("cpu", "reference") else 12))
    @given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in GRID.items()}))
    def check(drawn: dict[str, Any]) -> None:
        kl, aggregation, ranks = drawn["kl"], drawn["aggregation"], drawn["ranks"]
        if mode == "geo_mean" or (aggregation == "token-sum" and mode == "sapo"):
            ranks = None  # verl ignores the rows of all ranks, or multiplies one of two aggregations by their number
        torch.manual_seed(0)
        batch = make_batch(drawn["kind"], dtype)
        own = {"use_kl_loss": True, "kl_loss_type": kl, "kl_loss_coef": 0.5} if kl else {}
        entropy = {"entropy_coeff": 0.0 if mode == "sapo" else drawn["entropy_coeff"]}
        fields = fields_of(mode, aggregation, **entropy, **own)
        want = theirs(batch, fields, drawn["weights"], ranks)
        if ranks and aggregation == "token-sum":  # multiplied by the ranks, which gk.policy_loss leaves to its caller
            want = divided(want, ranks["dp_size"])
        got = ours(backend, batch, fields, drawn["weights"], **normalizer_of(ranks))
        assert_parity(got, want, batch, fields)

    check()


# Intended differences


@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
@on_backends
def test_no_tokens_at_all(backend: str, aggregation: str) -> None:
    """verl divides 0 by 0, except with global counts or sums."""
    batch, fields = make_batch(), fields_of("vanilla", aggregation, use_kl_loss=True)
    batch["mask"][:] = False
    want, got = theirs(batch, fields), ours(backend, batch, fields)
    assert float(got.loss) == 0 and not any(g.any() for g in got.gradients.values())
    assert want.loss.isnan() == (aggregation != "token-sum")
    assert all(value == (0.001 if key == "kl_coef" else 0) for key, value in got.metrics.items())


@on_backends
def test_geo_mean_takes_the_global_number_of_rows(backend: str) -> None:
    """verl divides by the rows of the micro-batch, so its loss depends on how a batch is split."""
    batch, fields = make_batch(), fields_of("geo_mean", "seq-mean-token-sum")
    got = ours(backend, batch, fields, **normalizer_of(GLOBAL))
    rows = GLOBAL["global_batch_size"] / GLOBAL["dp_size"]
    want = theirs(batch, fields, ranks=GLOBAL)
    torch.testing.assert_close(got.loss * rows / len(batch["mask"]), want.loss, rtol=1e-12, atol=0)


def test_every_other_loss_of_verl_is_tested_here() -> None:
    verls = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("fused_")}  # ours, by the plug-in
    # the last is refused; tests/integrations compares what composes Clip-Cov and KL-Cov
    assert verls == {*MODES, "bypass_mode"}


def test_defaults_are_those_of_the_installed_verl() -> None:
    installed = {f.name: f.default for cls in (ActorConfig, PolicyLossConfig) for f in dataclasses.fields(cls)}
    assert {name: installed[name] for name in VERL_DEFAULTS} == VERL_DEFAULTS
    assert gk.LossConfig.verl() == gk.LossConfig.verl(**VERL_DEFAULTS)
