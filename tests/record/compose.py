"""Losses of the record that compose: settings that gk.variants and gk.sampling_correction turn into arguments."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.record import inputs
from tests.record.cases import Case, Fields

# Settings of TRL and verl, and of the formulas, that compose a loss from gk.variants and gk.sampling_correction.
_TRL_COMPOSED = {
    "top_entropy_quantile": "top_entropy_quantile",
    "off_policy_mask_threshold": "off_policy_threshold",
    "vllm_importance_sampling_mode": "correction",
    "vllm_importance_sampling_clip_min": "correction_min",
    "vllm_importance_sampling_clip_max": "correction_max",
    "use_vllm": None,
}
_VERL_COV = {"clip_cov_ratio": "cov_ratio", "kl_cov_ratio": "cov_ratio", "ppo_kl_coef": "cov_kl_coef"}
_COMPOSED = ("top_entropy_quantile", "off_policy_threshold", "correction", "correction_min", "correction_max")
_COMPOSED += ("cov_ratio", "cov_bounds", "cov_kl_coef", "gvpo_beta", "real_tau", "flowrl_beta", "flowrl_clip")
_COMPOSED += ("future_kl_half_life", "future_kl_clip", "future_kl_cap", "future_kl_safety")
_ROW_LOSSES = ("gvpo", "real", "flowrl")


def split(method: Fields) -> tuple[gk.LossConfig, Fields]:
    """The config of the core, and the settings that compose."""
    if "trl" in method:
        fields = {name: value for name, value in method["trl"].items() if name not in _TRL_COMPOSED}
        composed = {_TRL_COMPOSED[name]: value for name, value in method["trl"].items() if name in _TRL_COMPOSED}
        return gk.LossConfig.trl(**fields), {name: value for name, value in composed.items() if name is not None}
    if "verl" in method:
        fields = dict(method["verl"])
        mode = fields.get("loss_mode")
        if mode not in ("clip_cov", "kl_cov"):
            return gk.LossConfig.verl(**fields), {}
        composed = {"loss": mode} | {_VERL_COV[name]: fields.pop(name) for name in [*fields] if name in _VERL_COV}
        if mode == "clip_cov":
            composed["cov_bounds"] = (fields.pop("clip_cov_lb"), fields.pop("clip_cov_ub"))
        config = gk.LossConfig.verl(**fields | {"loss_mode": "vanilla"})
        bounds = {"clip_low": None, "clip_high": None} if mode == "kl_cov" else {}
        return dataclasses.replace(config, dual_clip=None, log_ratio_clamp=None, **bounds), composed
    composed = {name: value for name, value in method.items() if name in _COMPOSED}
    fields = {name: value for name, value in method.items() if name not in _COMPOSED}
    if fields.get("loss") in (*_ROW_LOSSES, "clip_cov", "kl_cov"):
        composed["loss"] = fields.pop("loss")
    if composed.get("loss") == "kl_cov":
        fields |= {"clip_low": None, "clip_high": None}
    if fields.get("ratio") in ("average", "geometric_average"):
        composed["ratio"] = fields.pop("ratio")
    if composed.get("loss") == "flowrl":
        composed["ratio_cap"] = fields.pop("ratio_cap")
    return gk.LossConfig(**fields), composed


def old_and_advantages(case: Case, batch: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
    old = batch["far old"] if "far old" in case.inputs else batch["old"]
    advantages = batch["token advantages"] if "token advantages" in case.inputs else batch["advantages"]
    return None if "no old" in case.inputs else old, advantages


class _Composed(NamedTuple):
    """A loss whose metrics are not those of one call."""

    loss: Tensor
    metrics: None = None


def _weights_of_sampler(composed: Fields, batch: dict[str, Tensor], rows: Fields) -> Tensor:
    """Of tokens, or one a row."""
    level, _, outside = composed["correction"].partition("_")
    config = gk.CorrectionConfig(
        weights=level,
        weight_min=composed.get("correction_min"),
        weight_max=composed.get("correction_max"),
        outside=outside,
        log_ratio_bound=None,
    )
    weights = gk.sampling_correction(batch["old"], batch["sampler"], config=config, **rows).weights
    if level == "token" or weights.shape[-1] == 1:
        return weights
    bounds = rows["cu_seqlens"]
    if bounds is None:
        return weights.amax(1, keepdim=True)
    spans = [weights[first:last] for first, last in itertools.pairwise(bounds.tolist())]
    return torch.stack([span.amax() if len(span) else span.sum() for span in spans])


def loss(
    lp: Tensor, case: Case, batch: dict[str, Tensor], arguments: Fields, config: gk.LossConfig, composed: Fields
) -> Any:
    """The loss of log-probs with what composes it."""
    old, advantages = old_and_advantages(case, batch)
    rows = {"mask": arguments["mask"], "cu_seqlens": arguments["cu_seqlens"]}
    of, entropy, bonus = gk.variants, arguments.get("entropy"), 0.0
    if "correction" in composed:
        arguments["is_weights"] = _weights_of_sampler(composed, batch, rows)
    if composed.get("top_entropy_quantile", 1) < 1:
        floor = torch.tensor(0.75, dtype=lp.dtype) if "floor" in case.inputs else None
        kept = of.high_entropy_mask(
            entropy, rows["mask"], composed["top_entropy_quantile"], floor=floor, cu_seqlens=rows["cu_seqlens"]
        )
        arguments["policy_mask"] = kept
        if config.entropy_coef != 0:  # TRL's mean is over the kept tokens
            bonus = config.entropy_coef * torch.where(kept, entropy, 0).sum() / kept.sum().clamp(min=1)
            config = dataclasses.replace(config, entropy_coef=0.0)
    if composed.get("off_policy_threshold") is not None:
        sampler = batch["sampler"] if "sampler" in case.inputs else old
        near = of.off_policy_mask(lp, sampler, advantages, threshold=composed["off_policy_threshold"], **rows)
        arguments["policy_mask"] = arguments.get("policy_mask", near) & near
    future = {name.removeprefix("future_kl_"): value for name, value in composed.items() if name.startswith("future")}
    kind = composed.get("loss")
    if future:
        arguments["is_weights"] = of.future_kl_weights(lp, old, advantages, **future, **rows)
    if kind == "clip_cov":
        drawn = of.clip_cov_weights(
            lp, old, advantages, ratio=composed["cov_ratio"], bounds=composed["cov_bounds"], **rows
        )
        given = arguments.get("is_weights")
        if given is not None and rows["cu_seqlens"] is not None and given.shape != drawn.shape:
            given = given.reshape(-1).repeat_interleave(rows["cu_seqlens"].diff())
        arguments["is_weights"] = drawn if given is None else drawn * given
    if kind in _ROW_LOSSES:
        return _Composed(_row_loss(lp, old, advantages, batch, arguments, config, composed, rows))
    if "ratio" in composed:
        mixed = getattr(of, f"{composed['ratio']}_logprobs")(lp, old, **rows)
        if config.loss in ("cispo", "topr"):  # a score function, whose log-prob is the token's own
            ratio = torch.where(rows["mask"], mixed.detach() - old, 0).exp()
            limit = (
                ratio.clamp(1 - config.clip_low, 1 + config.clip_high) if config.loss == "cispo" else ratio.clamp(max=1)
            )
            of_token = advantages if advantages.shape == lp.shape else _spread(advantages, rows["cu_seqlens"], lp)
            arguments["is_weights"] = limit if config.loss == "cispo" else torch.where(of_token > 0, 1, limit)
            config = gk.LossConfig(loss="reinforce", aggregation=config.aggregation)
        else:
            lp = mixed
    result = gk.policy_loss(lp, old, advantages, config=config, **arguments)
    total = result.loss if isinstance(bonus, float) else result.loss - bonus
    if kind == "kl_cov":
        total = total + _penalty(lp, old, advantages, arguments, config, composed, rows)
    if kind is not None or future or "ratio" in composed or total is not result.loss:
        return _Composed(total)
    return result


def _penalty(
    lp: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    arguments: Fields,
    config: gk.LossConfig,
    composed: Fields,
    rows: Fields,
) -> Tensor:
    shares = arguments.get("weights")
    if shares is None:
        shares = gk.token_shares(**rows, aggregation=config.aggregation, max_length=config.max_length)
    return gk.variants.kl_cov_penalty(
        lp,
        old,
        advantages,
        shares,
        ratio=composed["cov_ratio"],
        coef=composed.get("cov_kl_coef", 1.0),
        is_weights=arguments.get("is_weights"),
        **rows,
    )


def _spread(values: Tensor, bounds: Tensor | None, like: Tensor) -> Tensor:
    return values[:, None].expand(like.shape) if bounds is None else values.repeat_interleave(bounds.diff())


def _row_loss(
    lp: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    batch: dict[str, Tensor],
    arguments: Fields,
    config: gk.LossConfig,
    composed: Fields,
    rows: Fields,
) -> Tensor:
    """The objective of rows, and the KL beside it."""
    of, reference = gk.variants, arguments.get("ref_logprobs")
    if composed["loss"] == "gvpo":
        return of.gvpo_loss(lp, old if reference is None else reference, advantages, inputs.GROUPS, **rows)
    if composed["loss"] == "flowrl":
        return of.flowrl_loss(
            lp,
            old,
            reference,
            advantages,
            batch["log_z"],
            beta=composed["flowrl_beta"],
            clip=composed["flowrl_clip"],
            ratio_cap=composed["ratio_cap"],
            is_weights=arguments["is_weights"],
            **rows,
        )
    count = len(inputs.GROUPS.unique()) if config.count_empty_rows else None
    objective = of.real_loss(lp, old, advantages, inputs.GROUPS, tau=composed.get("real_tau", 0.5), count=count, **rows)
    return objective + gk.policy_loss(lp, old, 0 * advantages, config=config, **arguments).loss
