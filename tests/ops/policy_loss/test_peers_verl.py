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
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS
from tests.ops.policy_loss import peers
from tests.ops.policy_loss.cases import F32, F64, NORM
from tests.ops.policy_loss.peers import Result, on_backends, on_dtypes
from tests.ops.promises import Inputs

pytest.importorskip("verl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensordict import TensorDict
    from verl.trainer.ppo import core_algos
    from verl.utils.metric import Metric
    from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

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


def of_covariance(fields: dict[str, Any], batch: Inputs, arguments: dict[str, Any]) -> Result:
    """Clip-Cov and KL-Cov, as docs/variants.md composes them."""
    mode, mask = fields["loss_mode"], arguments["mask"]
    own = {name: value for name, value in fields.items() if name not in MODES[mode]} | {"loss_mode": "vanilla"}
    config = dataclasses.replace(gk.LossConfig.verl(**own), dual_clip=None, log_ratio_clamp=None)
    policy = [batch[name] for name in ("logprobs", "old_logprobs", "advantages")]
    weights = arguments.pop("is_weights", None)
    if mode == "clip_cov":
        bounds = fields["clip_cov_lb"], fields["clip_cov_ub"]
        drawn = gk.variants.clip_cov_weights(*policy, ratio=fields["clip_cov_ratio"], bounds=bounds, mask=mask)
        arguments["is_weights"] = drawn if weights is None else drawn * weights
        got = gk.policy_loss(*policy, config=config, **arguments)
        metrics = got.metrics.verl()
        del metrics["actor/pg_clipfrac_lower"]
        metrics["actor/pg_clipfrac"] = float((mask & (drawn == 0)).sum() / mask.sum())
        return peers.result_of(got.loss, batch, metrics)
    config = dataclasses.replace(config, clip_low=None, clip_high=None)
    got = gk.policy_loss(*policy, is_weights=weights, config=config, **arguments)
    unit = "tokens" if config.aggregation == "token-mean" else "rows"
    count = (arguments.get("normalizer") or {}).get(unit)
    shares = gk.token_shares(mask, aggregation=config.aggregation, count=count, max_length=config.max_length)
    own = {"ratio": fields["kl_cov_ratio"], "coef": fields["ppo_kl_coef"], "is_weights": weights, "mask": mask}
    penalty = gk.variants.kl_cov_penalty(*policy, shares, **own)
    metrics = got.metrics.verl()
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        del metrics[name]
    metrics["actor/pg_loss"] += float(penalty.detach())
    metrics["actor/ppo_kl"] = float((batch["logprobs"] - batch["old_logprobs"]).detach()[mask].abs().mean())
    return peers.result_of(got.loss + penalty, batch, metrics)


def ours(backend: str, batch: Inputs, fields: dict[str, Any], weights: bool = False, **arguments: Any) -> Result:
    b = peers.placed(batch, backend)
    arguments |= {"mask": b["mask"], "entropy": b["entropy"], "backend": backend}
    arguments |= {"ref_logprobs": b["ref_logprobs"]} if fields.get("use_kl_loss") else {}
    arguments |= {"is_weights": b["is_weights"]} if weights else {}
    if fields["loss_mode"] in ("clip_cov", "kl_cov"):
        return of_covariance(fields, b, arguments)
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
    result = peers.result_of(loss, b, metrics)
    if fields["loss_agg_mode"] == "token-sum" and ranks and fields["loss_mode"] not in ("sapo", "geo_mean"):
        # verl's factor dp_size, which here is left to the caller
        result.loss, result.gradients = result.loss / 2, {name: g / 2 for name, g in result.gradients.items()}
        metrics |= {name: metrics[name] / 2 for name in ("actor/pg_loss", "actor/entropy_loss")}
    return result


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


@pytest.mark.parametrize("kind", ["ordinary", "beyond"])
@pytest.mark.parametrize("ranks", [None, GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
@on_dtypes
def test_registered_losses(
    backend: str, dtype: torch.dtype, mode: str, aggregation: str, weights: bool, ranks: Any, kind: str
) -> None:
    if ranks and mode == "geo_mean":
        pytest.skip("verl ignores it: test_geo_mean_takes_the_global_number_of_rows")
    if aggregation == "token-sum" and mode == "sapo":
        ranks = None  # verl multiplies only one of its two aggregations by the number of ranks
    batch = make_batch(kind, dtype)
    fields = fields_of(mode, aggregation, entropy_coeff=0.0 if mode == "sapo" else 0.01)
    want = theirs(batch, fields, weights, ranks)
    assert_parity(ours(backend, batch, fields, weights, **normalizer_of(ranks)), want, batch, fields)


@pytest.mark.parametrize("kind", ["ordinary", "beyond"])
@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
@pytest.mark.parametrize("name", [*KL_TYPES, *(f"{name}+" for name in KL_TYPES)])
@on_dtypes
def test_kl_losses(backend: str, dtype: torch.dtype, name: str, aggregation: str, kind: str) -> None:
    batch = make_batch(kind, dtype)
    fields = fields_of("gpg", aggregation, use_kl_loss=True, kl_loss_type=name, kl_loss_coef=0.5)
    assert_parity(ours(backend, batch, fields), theirs(batch, fields), batch, fields)


def test_the_cases_reach_what_they_are_about() -> None:
    batch = make_batch()
    for mode in ("vanilla", "gspo", "dppo_kl", "cispo"):
        assert 0.05 < theirs(batch, fields_of(mode, "token-mean")).metrics["actor/pg_clipfrac"] < 0.95
    beyond = make_batch("beyond")
    d, k = (beyond["logprobs"] - beyond[name] for name in ("old_logprobs", "ref_logprobs"))
    assert d[beyond["mask"]].max() > 20 and d[beyond["mask"]].min() < -20 and d[3].min() > 10
    assert k[beyond["mask"]].abs().max() > 20 and (beyond["logprobs"] < 0).all() and (beyond["old_logprobs"] < 0).all()
    assert theirs(beyond, fields_of("vanilla", "token-mean")).metrics["actor/pg_clipfrac_lower"] > 0


# verl's complete loss step from the model's output


def flat(values: Tensor, lengths: Tensor) -> Tensor:
    """The model's layout: one prompt token precedes each response, and its slot holds the first response value."""
    return torch.cat([torch.cat([row[:n], row.new_zeros(1)]) for row, n in zip(values, lengths, strict=True)])


@pytest.mark.parametrize("mode", MODES)
@on_dtypes
def test_ppo_loss(backend: str, dtype: torch.dtype, mode: str) -> None:
    batch, lengths = make_batch(dtype=dtype), torch.tensor([11, 7, 1, 9, 4, 8])  # verl's unpadding needs a token a row
    batch["mask"] = torch.arange(11) < lengths[:, None]
    tokens, rows = int(lengths.sum()), len(lengths)
    fields = fields_of(mode, "token-mean", entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="k3+")
    b = batch | {name: batch[name].clone().requires_grad_() for name in peers.LEAVES}
    ones = torch.ones(rows, 1, dtype=torch.long)
    data = TensorDict(
        {
            "prompts": ones,
            "responses": b["mask"].long(),
            "response_mask": b["mask"],
            "attention_mask": torch.cat([ones, b["mask"].long()], 1),
            "old_log_probs": b["old_logprobs"],
            "advantages": b["advantages"],
            "ref_log_prob": b["ref_logprobs"],
            "rollout_is_weights": b["is_weights"],
        },
        batch_size=rows,
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": 2 * tokens, "global_batch_size": 2 * rows}.items():
        data.set_non_tensor(name, value)
    output = {"log_probs": flat(b["logprobs"], lengths), "entropy": flat(b["entropy"], lengths)}
    loss, metrics = ppo_loss(actor(fields), output, data)
    want = peers.result_of(loss, b, {k: v.aggregate() if isinstance(v, Metric) else v for k, v in metrics.items()})
    # verl's geo_mean divides by the rows at hand
    counts = {"tokens": 2 * tokens, "rows": (1 if mode == "geo_mean" else 2) * rows}
    assert_parity(ours(backend, batch, fields, weights=True, normalizer=counts), want, batch, fields)


@on_backends
def test_the_draw_of_clip_cov_is_one_of_verls(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    batch["advantages"][batch["advantages"] == 0] = 0.5  # a gradient of 0 marks the drawn tokens
    every = fields_of("clip_cov", "token-mean")
    none, some = every | {"clip_cov_lb": 9.0, "clip_cov_ub": 9.5}, every | {"clip_cov_ratio": 0.2}
    results = [ours(backend, batch, fields) for fields in (none, some, every)]
    kept, *others = ((result.gradients["logprobs"] != 0) & batch["mask"] for result in results)
    drawn, eligible = (kept & ~other for other in others)
    assert 0 < drawn.sum() < eligible.sum() and not (drawn & ~eligible).any()
    ours_first = (~drawn[eligible]).int().argsort(stable=True)
    monkeypatch.setattr(torch, "randperm", lambda count: ours_first)
    assert_parity(results[1], theirs(batch, some), batch, some)


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
    assert verls == {*MODES, "bypass_mode"}  # which is refused


def test_defaults_are_those_of_the_installed_verl() -> None:
    installed = {f.name: f.default for cls in (ActorConfig, PolicyLossConfig) for f in dataclasses.fields(cls)}
    assert {name: installed[name] for name in VERL_DEFAULTS} == VERL_DEFAULTS
    assert gk.LossConfig.verl() == gk.LossConfig.verl(**VERL_DEFAULTS)
