"""policy_loss against the installed verl's own losses: value, gradients and every metric by its key."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS
from tests.harness import device_of, runnable_backends
from tests.strategies import NAN

pytest.importorskip("verl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensordict import TensorDict
    from verl.trainer.ppo import core_algos
    from verl.utils.metric import Metric
    from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

CASES = [(backend, dtype) for dtype in (torch.float64, torch.float32) for backend in runnable_backends(SUPPORTS, dtype)]
IDS = [f"{backend}-{str(dtype)[6:]}" for backend, dtype in CASES]
COV = {"clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), "kl_cov": ("kl_cov_ratio", "ppo_kl_coef")}
MODES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "dro", "clip_cov", "kl_cov")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KLS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# totals over several ranks, of which this batch is one part
GLOBAL = {"dp_size": 2, "batch_num_tokens": 150, "global_batch_size": 24}


@dataclasses.dataclass
class Batch:
    logprobs: Tensor
    old: Tensor
    ref: Tensor
    is_weights: Tensor
    entropy: Tensor
    mask: Tensor
    advantages: Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{k: v if v.dtype == torch.bool else v.to(dtype) for k, v in values.items()})


def make_batch(kind: str = "ordinary", holes: bool = True) -> Batch:
    """Returns a batch with log-ratios around the clip bounds.

    With kind "beyond", some tokens and one row also have ratios beyond the clamps, on either side. Row 2 has no tokens.
    All values are exact in float32.
    """
    rows, width = 6, 10
    old = -2.5 * torch.rand(rows, width) - 0.7
    logprobs = old + 0.25 * torch.randn(rows, width) + torch.tensor([0.3, -0.35, 0.0, 0.5, -0.3, -0.05])[:, None]
    ref = logprobs + 0.3 * torch.randn(rows, width)
    if kind == "beyond":
        for target, other in ((logprobs, old), (old, logprobs), (ref, logprobs), (logprobs, ref)):
            chosen = torch.rand(rows, width) < 0.08
            target[chosen] = -26.0
            other[chosen] = -0.5
        old[3], logprobs[3] = -14.0 - torch.rand(width), -1 - torch.rand(width)
    mask = torch.arange(width) < torch.tensor([10, 7, 0, 9, 4, 8])[:, None]
    if holes:
        mask &= torch.rand(rows, width) < 0.9
    advantages = torch.randn(rows, width)
    advantages[torch.rand(rows, width) < 0.1] = 0
    weights = (0.5 * torch.randn(rows, width)).exp()
    return Batch(logprobs, old, ref, weights, 2 * torch.rand(rows, width), mask, advantages)


def fields_of(mode: str, aggregation: str, **changes: Any) -> dict[str, Any]:
    fields = {"loss_mode": mode, "loss_agg_mode": aggregation} | changes
    if aggregation == "seq-mean-token-sum-norm":
        fields["loss_scale_factor"] = 7
    if mode == "dro":
        fields["dro_beta"] = 0.3
    if mode == "clip_cov":  # all tokens within the bounds, as verl draws them at random
        fields |= {"clip_cov_ratio": 1.0, "clip_cov_lb": -0.2, "clip_cov_ub": 0.6}
    if mode == "kl_cov":
        fields |= {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}
    if mode.startswith("dppo"):
        fields |= {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04}
    if mode == "cispo" or mode == "geo_mean":
        fields |= {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25}
    return fields


def actor(fields: dict[str, Any], global_info: dict[str, Any] | None = None) -> ActorConfig:
    of_policy = {field.name for field in dataclasses.fields(PolicyLossConfig)}
    own = {name: value for name, value in fields.items() if name not in of_policy}
    policy = {name: value for name, value in fields.items() if name in of_policy}
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=4, policy_loss=PolicyLossConfig(**policy), **own
    )
    config.global_batch_info.update(global_info or {})
    if "loss_scale_factor" in fields:
        config.global_batch_info["loss_scale_factor"] = fields["loss_scale_factor"]
    return config


def magnitudes(batch: Batch, fields: dict[str, Any]) -> Tensor:
    """Sum of the absolute values behind each token's term."""
    d, k = (batch.logprobs - batch.old).abs(), (batch.ref - batch.logprobs).abs()
    logs = 1 + batch.logprobs.abs() + batch.old.abs()
    # other losses limit the ratio, or the weight computed from it, to at most 4
    limits = {"gspo": 10.0, "clip_cov": 26.0, "kl_cov": 26.0}
    ratio = d.clamp(max=limits[fields["loss_mode"]]).exp() if fields["loss_mode"] in limits else 4
    policy = batch.advantages.abs() * ratio * logs + d.square()
    kl = k.clamp(max=20).exp().clamp(max=20) + k.square() if fields.get("use_kl_loss") else torch.zeros_like(k)
    return torch.where(batch.mask, policy * (1 + batch.is_weights) + kl + batch.entropy, 0).double()


class Result:
    def __init__(self, loss: Tensor, logprobs: Tensor, entropy: Tensor, metrics: dict[str, float]) -> None:
        grads = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
        self.loss, self.metrics = loss.detach(), metrics
        self.grads = [torch.zeros_like(x) if g is None else g for x, g in zip((logprobs, entropy), grads, strict=True)]


def of_covariance(
    fields: dict[str, Any],
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    arguments: dict[str, Any],
) -> Result:
    """Clip-Cov and KL-Cov, as docs/variants.md composes them."""
    mode, mask = fields["loss_mode"], arguments["mask"]
    own = {name: value for name, value in fields.items() if name not in COV[mode]} | {"loss_mode": "vanilla"}
    config = dataclasses.replace(gk.LossConfig.verl(**own), dual_clip=None, log_ratio_clamp=None)
    weights = arguments.pop("is_weights", None)
    if mode == "clip_cov":
        bounds = fields["clip_cov_lb"], fields["clip_cov_ub"]
        drawn = gk.variants.clip_cov_weights(
            logprobs, old, advantages, ratio=fields["clip_cov_ratio"], bounds=bounds, mask=mask
        )
        arguments["is_weights"] = drawn if weights is None else drawn * weights
        got = gk.policy_loss(logprobs, old, advantages, config=config, **arguments)
        metrics = got.metrics.verl()
        del metrics["actor/pg_clipfrac_lower"]
        metrics["actor/pg_clipfrac"] = float((mask & (drawn == 0)).sum() / mask.sum())
        return Result(got.loss, logprobs, entropy, metrics)
    config = dataclasses.replace(config, clip_low=None, clip_high=None)
    got = gk.policy_loss(logprobs, old, advantages, is_weights=weights, config=config, **arguments)
    unit = "tokens" if config.aggregation == "token-mean" else "rows"
    count = (arguments.get("normalizer") or {}).get(unit)
    shares = gk.token_shares(mask, aggregation=config.aggregation, count=count, max_length=config.max_length)
    penalty = gk.variants.kl_cov_penalty(
        logprobs,
        old,
        advantages,
        shares,
        ratio=fields["kl_cov_ratio"],
        coef=fields["ppo_kl_coef"],
        is_weights=weights,
        mask=mask,
    )
    metrics = got.metrics.verl()
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        del metrics[name]
    metrics["actor/pg_loss"] += float(penalty)
    metrics["actor/ppo_kl"] = float((logprobs - old).detach()[mask].abs().mean())
    return Result(got.loss + penalty, logprobs, entropy, metrics)


def ours(backend: str, batch: Batch, fields: dict[str, Any], weights: bool = False, **arguments: Any) -> Result:
    """Runs our loss with masked slots filled with NaN."""
    device = device_of(backend)

    def moved(value: Tensor) -> Tensor:
        return torch.where(batch.mask, value, NAN).to(device)

    logprobs, entropy = (moved(x).detach().requires_grad_() for x in (batch.logprobs, batch.entropy))
    arguments |= {"mask": batch.mask.to(device), "entropy": entropy, "backend": backend}
    if fields.get("use_kl_loss"):
        arguments["ref_logprobs"] = moved(batch.ref)
    if weights:
        arguments["is_weights"] = moved(batch.is_weights)
    if fields["loss_mode"] in COV:
        return of_covariance(fields, logprobs, moved(batch.old), moved(batch.advantages), entropy, arguments)
    arguments.setdefault("config", gk.LossConfig.verl(**fields))
    got = gk.policy_loss(logprobs, moved(batch.old), moved(batch.advantages), **arguments)
    return Result(got.loss, logprobs, entropy, got.metrics.verl())


def theirs(batch: Batch, fields: dict[str, Any], weights: bool, global_info: dict[str, Any] | None) -> Result:
    """The registered loss minus the entropy bonus plus the KL loss, each aggregated by verl."""
    config = actor(fields, global_info)
    logprobs, entropy = (x.clone().requires_grad_() for x in (batch.logprobs, batch.entropy))
    pg_loss, metrics = core_algos.get_policy_loss_fn(fields["loss_mode"])(
        old_log_prob=batch.old,
        log_prob=logprobs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=batch.is_weights if weights else None,
    )

    def mean(value: Tensor) -> Tensor:
        return core_algos.agg_loss(value, batch.mask, config.loss_agg_mode, **config.global_batch_info)

    entropy_loss = mean(entropy)
    loss = pg_loss - config.entropy_coeff * entropy_loss
    metrics |= {"actor/pg_loss": pg_loss.item(), "actor/entropy_loss": entropy_loss.item()}
    if config.use_kl_loss:
        kl_loss = mean(core_algos.kl_penalty(logprobs, batch.ref, config.kl_loss_type))
        loss = loss + config.kl_loss_coef * kl_loss
        metrics |= {"kl_loss": kl_loss.item(), "kl_coef": config.kl_loss_coef}
    return Result(loss, logprobs, entropy, metrics)


def assert_parity(got: Result, want: Result, batch: Batch, fields: dict[str, Any]) -> None:
    """Checks agreement within 64 roundings of the undivided sum of terms, which also covers the means."""
    unit = 64 * torch.finfo(want.loss.dtype).eps
    total = float(magnitudes(batch, fields).sum())
    rows = fields["loss_agg_mode"] == "token-sum" or fields["loss_mode"] == "geo_mean"
    bound = total if rows else total / 4
    pairs = [("loss", got.loss, want.loss)]
    pairs += [(name, a, b) for name, a, b in zip(("logprobs", "entropy"), got.grads, want.grads, strict=True)]
    for name, mine, verls in pairs:
        assert mine.dtype == verls.dtype and mine.isfinite().all(), name
        where = batch.mask if mine.dim() else torch.tensor(True)
        error = float(torch.where(where, mine.cpu().double() - verls.double(), 0).abs().max())
        assert error <= unit * bound, f"{name}: error {error:.3g}, allowed {unit * bound:.3g}"
        assert not mine.dim() or not mine.cpu()[~batch.mask].any(), f"gradient of {name} where the mask is 0"
    assert set(got.metrics) == set(want.metrics)
    for key, value in got.metrics.items():
        # verl counts clipped tokens in float32
        rounding = torch.finfo(torch.float32).eps if "clipfrac" in key else unit
        assert value == pytest.approx(want.metrics[key], rel=rounding, abs=rounding * max(1.0, bound)), key


def expected(want: Result, fields: dict[str, Any], global_info: dict[str, Any] | None) -> Result:
    """verl's result without its factor dp_size for token-sum, which here is left to the caller."""
    if fields["loss_agg_mode"] == "token-sum" and global_info and fields["loss_mode"] not in ("sapo", "geo_mean"):
        want.loss, want.grads = want.loss / 2, [g / 2 for g in want.grads]
        want.metrics |= {k: want.metrics[k] / 2 for k in ("actor/pg_loss", "actor/entropy_loss")}
    return want


def normalizer_of(global_info: dict[str, Any] | None) -> dict[str, Any]:
    if global_info is None:
        return {}
    ranks = global_info["dp_size"]
    counts = {"tokens": global_info["batch_num_tokens"] / ranks, "rows": global_info["global_batch_size"] / ranks}
    return {"normalizer": counts}


@pytest.mark.parametrize("kind", ["ordinary", "beyond"])
@pytest.mark.parametrize("global_info", [None, GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_registered_losses(
    backend: str, dtype: torch.dtype, mode: str, aggregation: str, weights: bool, global_info: Any, kind: str
) -> None:
    if global_info and mode == "geo_mean":
        pytest.skip("verl ignores it: test_geo_mean_takes_the_global_number_of_rows")
    batch = make_batch(kind).to(dtype)
    fields = fields_of(mode, aggregation, entropy_coeff=0.0 if mode == "sapo" else 0.01)
    if aggregation == "token-sum" and mode == "sapo":
        global_info = None  # verl multiplies only one of its two aggregations by the number of ranks
    want = expected(theirs(batch, fields, weights, global_info), fields, global_info)
    assert_parity(ours(backend, batch, fields, weights, **normalizer_of(global_info)), want, batch, fields)


@pytest.mark.parametrize("kind", ["ordinary", "beyond"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [*KLS, *(f"{name}+" for name in KLS)])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_kl_losses(backend: str, dtype: torch.dtype, name: str, aggregation: str, kind: str) -> None:
    batch = make_batch(kind).to(dtype)
    fields = fields_of("gpg", aggregation, use_kl_loss=True, kl_loss_type=name, kl_loss_coef=0.5)
    assert_parity(ours(backend, batch, fields), theirs(batch, fields, False, None), batch, fields)


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "dppo_kl", "cispo"])
def test_the_cases_reach_what_they_are_about(mode: str) -> None:
    batch = make_batch()
    metrics = theirs(batch, fields_of(mode, "token-mean"), False, None).metrics
    assert 0.05 < metrics["actor/pg_clipfrac"] < 0.95
    beyond = make_batch("beyond")
    d = (beyond.logprobs - beyond.old)[beyond.mask]
    assert (d > 20).any() and (d < -20).any() and (beyond.logprobs < 0).all() and (beyond.old < 0).all()
    assert ((beyond.ref - beyond.logprobs)[beyond.mask].abs() > 20).any() and (beyond.logprobs - beyond.old)[
        3
    ].min() > 10
    metrics = theirs(beyond, fields_of("vanilla", "token-mean"), False, None).metrics
    assert metrics["actor/pg_clipfrac_lower"] > 0


# verl's complete loss step from the model's output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_ppo_loss(backend: str, dtype: torch.dtype, mode: str) -> None:
    batch = make_batch(holes=False).to(dtype)
    batch.mask[2, 0] = True  # verl's unpadding needs a token in each row
    fields = fields_of(mode, "token-mean", entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="k3+")
    lengths = batch.mask.sum(1)
    logprobs, entropy = (x.clone().requires_grad_() for x in (batch.logprobs, batch.entropy))

    def flat(values: Tensor) -> Tensor:
        """The model's layout: one prompt token precedes each response, and its slot holds the first response value."""
        rows = [torch.cat([row[:length], row.new_zeros(1)]) for row, length in zip(values, lengths, strict=True)]
        return torch.cat(rows)

    ones = torch.ones(len(lengths), 1, dtype=torch.long)
    tokens = int(lengths.sum())
    info = {"dp_size": 1, "batch_num_tokens": 2 * tokens, "global_batch_size": 2 * len(lengths)}
    data = TensorDict(
        {
            "prompts": ones,
            "responses": batch.mask.long(),
            "response_mask": batch.mask,
            "attention_mask": torch.cat([ones, batch.mask.long()], 1),
            "old_log_probs": batch.old,
            "advantages": batch.advantages,
            "ref_log_prob": batch.ref,
            "rollout_is_weights": batch.is_weights,
        },
        batch_size=len(lengths),
    )
    for name, value in info.items():
        data.set_non_tensor(name, value)
    loss, metrics = ppo_loss(actor(fields), {"log_probs": flat(logprobs), "entropy": flat(entropy)}, data)
    numbers = {k: v.aggregate() if isinstance(v, Metric) else v for k, v in metrics.items()}
    want = Result(loss, logprobs, entropy, numbers)
    # verl's geo_mean divides by the rows at hand
    counts = {"tokens": 2 * tokens, "rows": (1 if mode == "geo_mean" else 2) * len(lengths)}
    got = ours(backend, batch, fields, weights=True, normalizer=counts)
    assert_parity(got, want, batch, fields)


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_the_draw_of_clip_cov_is_one_of_verls(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch().to(torch.float64)
    batch.advantages[batch.advantages == 0] = 0.5  # a gradient of 0 marks the drawn tokens
    fields = fields_of("clip_cov", "token-mean")
    some = fields | {"clip_cov_ratio": 0.2}
    plain, every, got = (
        ours(backend, batch, f) for f in (fields | {"clip_cov_lb": 9.0, "clip_cov_ub": 9.5}, fields, some)
    )
    kept, drawn, eligible = ((result.grads[0] != 0).cpu() & batch.mask for result in (plain, got, every))
    drawn, eligible = kept & ~drawn, kept & ~eligible
    assert 0 < drawn.sum() < eligible.sum() and not (drawn & ~eligible).any()
    ours_first = (~drawn[eligible]).int().argsort(stable=True)
    monkeypatch.setattr(torch, "randperm", lambda count: ours_first)
    assert_parity(got, theirs(batch, some, False, None), batch, some)


# Intended differences


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_no_tokens_at_all(backend: str, aggregation: str) -> None:
    """verl divides 0 by 0, except with global counts or sums."""
    batch = make_batch().to(torch.float64)
    batch.mask[:] = False
    fields = fields_of("vanilla", aggregation, use_kl_loss=True)
    want, got = theirs(batch, fields, False, None), ours(backend, batch, fields)
    assert float(got.loss) == 0 and not any(g.any() for g in got.grads)
    assert want.loss.isnan() == (aggregation != "token-sum")
    assert all(value == (0.001 if key == "kl_coef" else 0) for key, value in got.metrics.items())


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_geo_mean_takes_the_global_number_of_rows(backend: str) -> None:
    """verl divides by the rows of the micro-batch, so its loss depends on how a batch is split."""
    batch = make_batch().to(torch.float64)
    fields = fields_of("geo_mean", "seq-mean-token-sum")
    want = theirs(batch, fields, False, GLOBAL)
    got = ours(backend, batch, fields, **normalizer_of(GLOBAL))
    rows = GLOBAL["global_batch_size"] / GLOBAL["dp_size"]
    torch.testing.assert_close(got.loss.cpu() * rows / len(batch.mask), want.loss, rtol=1e-12, atol=0)


def test_constant_length_must_be_given() -> None:
    """verl's default is the padded width, which makes the loss depend on the padding."""
    with pytest.raises(ValueError, match="loss_scale_factor must be given"):
        gk.LossConfig.verl(loss_agg_mode="seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", ["bypass_mode"])
def test_losses_that_are_refused_exist_in_verl(mode: str) -> None:
    assert core_algos.get_policy_loss_fn(mode)
    with pytest.raises(ValueError, match=f"loss_mode '{mode}' is not implemented: "):
        gk.LossConfig.verl(loss_mode=mode)


def test_every_other_loss_of_verl_is_tested_here() -> None:
    verls = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("fused_")}  # ours, by the plug-in
    assert verls == {*MODES, "bypass_mode"}


def test_defaults_are_those_of_the_installed_verl() -> None:
    installed = {f.name: f.default for cls in (ActorConfig, PolicyLossConfig) for f in dataclasses.fields(cls)}
    assert {name: installed[name] for name in VERL_DEFAULTS} == VERL_DEFAULTS
    assert gk.LossConfig.verl() == gk.LossConfig.verl(**VERL_DEFAULTS)
