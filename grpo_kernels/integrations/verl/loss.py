"""verl's policy losses under our names, and its ppo_loss as one pass over the tokens."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils.metric import AggregationType, Metric

import grpo_kernels as gk
from grpo_kernels.integrations.verl.advantages import SEGMENTS
from grpo_kernels.integrations.verl.sessions import IDS, ROWS, TOKENS
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS

VERLS = ("vanilla", "gspo", "sapo", "cispo", "gpg", "dppo_tv", "dppo_kl", "geo_mean", "dro", "clip_cov", "kl_cov")
# fields of a loss that verl keeps beside its mode, with their defaults
OF_MODE: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": None},
    "clip_cov": {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
}
# metrics that verl does not have of a mode
_WITHOUT = {
    "clip_cov": ("actor/pg_clipfrac_lower",),
    "kl_cov": ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
}
# losses of ours -> verl's whose fields they have; they need more than verl gives a registered loss
OURS = {"segment": "vanilla", "session_gspo": "gspo"}
LOSSES = {f"fused_{mode}": mode for mode in (*VERLS, *OURS)}
PPOLoss = Callable[..., tuple[Tensor, dict[str, Any]]]

# verl's own ppo_loss while fused_ppo_loss replaces it
originals: dict[str, PPOLoss] = {}
_log = logging.getLogger("grpo_kernels.integrations.verl")


def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The function registered with verl under this name."""
    mode = LOSSES[name]

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        if config is None:
            raise ValueError(f"{name}: config must be given, verl's ActorConfig, got None")
        if mode in OURS:
            raise RuntimeError(
                f"{name}: verl gives a registered loss no segments and no sessions; train with fused_ppo_loss, as "
                "after grpo_kernels.integrations.verl.patch_verl()"
            )
        terms = _Terms(config, mode, loss_agg_mode, config.global_batch_info, response_mask.shape[-1], False)
        loss, measured = terms.loss(
            log_prob, old_log_prob, advantages, mask=response_mask, is_weights=rollout_is_weights
        )
        metrics = measured.verl()
        del metrics["actor/pg_loss"]  # verl adds it
        return terms.scaled(loss), metrics

    loss.__name__ = loss.__qualname__ = name
    return loss


def fused_ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """Replaces verl.workers.utils.losses.ppo_loss: same arguments, loss, gradients and metrics, in one pass.

    Nothing waits for the device. A loss_mode that is neither ours nor verl's own function is left to verl's ppo_loss.
    """
    mode = _mode(config.policy_loss.get("loss_mode", "vanilla"))
    if mode is None:
        from verl.workers.utils import losses

        theirs = originals.get("ppo_loss", cast(PPOLoss, losses.ppo_loss))
        return theirs(config, model_output, data, dp_group)
    layout = _Layout(data)
    config.global_batch_info.update(
        {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")},
        loss_scale_factor=config.loss_scale_factor,
    )
    aggregation = config.loss_agg_mode
    terms = _Terms(config, mode, aggregation, config.global_batch_info, layout.width, True)
    entropy = model_output.get("entropy", None)
    kwargs: dict[str, Any] = {"entropy": None if entropy is None else layout.of_model(entropy)}
    keys = {"is_weights": "rollout_is_weights"} if "rollout_is_weights" in data else {}
    keys |= {"ref_logprobs": "ref_log_prob"} if config.use_kl_loss else {}
    keys |= {"segments": SEGMENTS} if mode == "segment" else {}
    for argument, key in keys.items():
        if key not in data:
            raise KeyError(f"fused_ppo_loss: data must hold {key!r} for this config, got {sorted(data.keys())}")
        kwargs[argument] = layout.of_data(data[key], -1 if argument == "segments" else 0)
    mask = layout.of_data(data["response_mask"]).bool()
    if TOKENS in data and mode == "segment" and terms.counts_sessions:
        raise ValueError(
            "fused_segment: every session must have one output, got sessions of several, whose shares count tokens and "
            "not segments"
        )
    if TOKENS in data and terms.counts_sessions:
        kwargs["weights"] = mask * terms.session_weights(data)[layout.rows]
    if mode == "segment" and "is_weights" in kwargs:
        _expect(
            layout.are_equal_in_rows(kwargs["is_weights"], mask),
            "rollout_is_weights must be those of sequences for loss_mode 'fused_segment', whose terms read the weight "
            "of one token alone, got others; set algorithm.rollout_correction.rollout_is to 'sequence'",
        )
    logprobs, old = layout.of_model(model_output["log_probs"]), layout.of_data(data["old_log_probs"])
    if mode == "session_gspo":
        old = _with_ratios_of_sessions(logprobs.detach(), old, mask, data, layout)
    loss, metrics = terms.loss(
        logprobs,
        old,
        layout.of_data(data["advantages"]),
        mask=mask,
        cu_seqlens=layout.cu_seqlens,
        **kwargs,
    )
    return terms.scaled(loss), _measured(metrics, terms, config, entropy is not None)


def _with_ratios_of_sessions(logprobs: Tensor, old: Tensor, mask: Tensor, data: Any, layout: _Layout) -> Tensor:
    """Old log-probs from which each token's log ratio is the mean over its session, as gspo's is over its row.

    verl deals the outputs of a session to mini-batches, ranks and micro-batches. A mean over some of them would be
    another ratio, so that all have to be here.
    """
    count = len(layout.lengths)
    ids = data[IDS].reshape(-1) if IDS in data else torch.arange(count, device=old.device)
    if IDS in data:
        tokens = torch.zeros(count, dtype=torch.int64, device=old.device)
        tokens = tokens.index_add(0, layout.rows.expand(mask.shape).flatten(), mask.flatten().long())
        here = torch.where(ids[:, None] == ids, tokens, 0).sum(1)
        _expect(
            (here == data[TOKENS].reshape(-1)).all(),
            "all outputs of a session must be in one micro-batch for loss_mode 'fused_session_gspo', got a part of "
            "them; give one rank whole mini-batches, or choose 'fused_gspo' with ratios of outputs",
        )
    of_sessions = gk.rollout_logprobs(logprobs, old, ids, mask=mask, cu_seqlens=layout.cu_seqlens)
    return torch.where(mask, logprobs - (of_sessions - old), old)


def _mode(name: str) -> str | None:
    """verl's name of the loss, or None if it is not one that we compute."""
    if name in LOSSES:
        return LOSSES[name]
    registered = core_algos.POLICY_LOSS_REGISTRY.get(name)
    if name in VERLS and getattr(registered, "__module__", None) == core_algos.__name__:
        return name
    _warn_once(f"fused_ppo_loss: loss_mode {name!r} is not one of ours, verl's own ppo_loss computes it")
    return None


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


class _Terms:
    """The divisors and factors of verl's agg_loss, as a LossConfig, a normalizer and a scale."""

    def __init__(
        self, config: Any, mode: str, aggregation: str, info: Any, width: Callable[[], int] | int, whole: bool
    ):
        ranks = info.get("dp_size", 1)
        fields = {name: config.get(name, default) for name, default in VERL_DEFAULTS.items()}
        self.own = {name: config.policy_loss.get(name, default) for name, default in OF_MODE.get(mode, {}).items()}
        self.mode, self.aggregation = mode, aggregation
        of_verl = "vanilla" if mode in ("clip_cov", "kl_cov") else OURS.get(mode, mode)
        fields |= {"loss_mode": of_verl, "loss_agg_mode": aggregation}
        fields |= self.own if mode == "dro" else {}
        if aggregation == "seq-mean-token-sum-norm":
            length = info.get("loss_scale_factor", None)
            fields["loss_scale_factor"] = (width() if callable(width) else width) if length is None else length
        if not whole:  # verl adds these terms
            fields |= {"use_kl_loss": False, "entropy_coeff": 0}
        self.config = _loss_config(tuple(fields.items()), mode, ranks)
        summed = aggregation == "token-sum"
        # gradients are averaged over ranks, so a sum is multiplied by their number
        self.scale = ranks if summed and self.config.aggregation == "token-sum" else 1
        self.other_scale = ranks if summed and self.scale == 1 else 1
        self.normalizer = self._normalizer(info, ranks)
        self.rows = (self.normalizer or {}).get("rows")

    def loss(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, gk.PolicyLossMetrics | _VariantMetrics]:
        """The loss before its scale. Clip-Cov and KL-Cov compose it from variants."""
        rows: dict[str, Any] = {"mask": mask, "cu_seqlens": kwargs.get("cu_seqlens")}
        of_sessions = kwargs.get("weights")
        options: dict[str, Any] = {"normalizer": self.normalizer, "config": self.config}
        if of_sessions is not None:
            options["normalizer"] = None  # they have divided
        if self.mode == "clip_cov":
            weights = gk.variants.clip_cov_weights(
                logprobs,
                old,
                advantages,
                ratio=self.own["clip_cov_ratio"],
                bounds=(self.own["clip_cov_lb"], self.own["clip_cov_ub"]),
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
                **rows,
            )
            given = kwargs.pop("is_weights", None)
            result = gk.policy_loss(
                logprobs,
                old,
                advantages,
                mask=mask,
                is_weights=weights if given is None else weights * given,
                **kwargs,
                **options,
            )
            drawn = {"actor/pg_clipfrac": ((weights == 0) & (mask != 0)).sum()}
            return result.loss, _VariantMetrics(result.metrics, self.mode, drawn)
        result = gk.policy_loss(logprobs, old, advantages, mask=mask, **kwargs, **options)
        if self.mode != "kl_cov":
            return result.loss, result.metrics
        penalty = gk.variants.kl_cov_penalty(
            logprobs,
            old,
            advantages,
            self._shares(**rows) if of_sessions is None else of_sessions,
            ratio=self.own["kl_cov_ratio"],
            coef=self.own["ppo_kl_coef"],
            is_weights=kwargs.get("is_weights"),
            **rows,
        )
        moved = {"actor/ppo_kl": torch.where(mask != 0, (logprobs - old).detach().abs(), 0).sum()}
        return result.loss + penalty, _VariantMetrics(result.metrics, self.mode, moved, penalty.detach())

    @property
    def counts_sessions(self) -> bool:
        """Whether the outputs of a session are one sequence. A ratio of geo_mean is that of one row."""
        return self.aggregation.startswith("seq-mean") and self.mode != "geo_mean"

    def session_weights(self, data: Any) -> Tensor:
        """Weight of a token in each row [B], from the columns of sessions."""
        count, means = self.rows, {self.config.aggregation, self.aggregation}
        if count is None:
            raise ValueError(f"fused losses: global_batch_size must be given with {TOKENS!r}, got None")
        if len(means) > 1:
            raise ValueError(
                f"fused losses: loss_agg_mode must be {self.config.aggregation!r} for loss_mode {self.mode!r} with "
                f"sessions of several outputs, got {self.aggregation!r}"
            )
        share: Tensor = data[ROWS].reshape(-1).double() / count
        if self.aggregation == "seq-mean-token-mean":
            share = share / data[TOKENS].reshape(-1).clamp(min=1)
        return share if self.config.max_length is None else share / self.config.max_length

    def _shares(self, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        unit = {"token-mean": "tokens", "token-sum": "none"}.get(self.config.aggregation, "rows")
        return gk.token_shares(
            mask,
            cu_seqlens=cu_seqlens,
            aggregation=self.config.aggregation,
            count=(self.normalizer or {}).get(unit),
            max_length=self.config.max_length,
        )

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale == 1 else loss * self.scale

    def _normalizer(self, info: Any, ranks: int) -> dict[str, Any] | None:
        """This rank's share of the global counts."""
        counts = {"tokens": info.get("batch_num_tokens", None), "rows": info.get("global_batch_size", None)}
        config = self.config
        kinds = {name for name in (config.aggregation, config.kl_aggregation, config.entropy_aggregation) if name}
        for kind, key, prefix in (("tokens", "batch_num_tokens", "token-mean"), ("rows", "global_batch_size", "seq")):
            if not any(name.startswith(prefix) for name in kinds):
                del counts[kind]
            elif ranks > 1 and counts[kind] is None:
                raise ValueError(f"fused losses: {key} must be given for dp_size={ranks} with {sorted(kinds)}")
        if config.ratio == "segment" and config.aggregation == "token-mean" and counts.get("tokens") is not None:
            raise ValueError(
                "fused_segment: loss_agg_mode must not be 'token-mean', a mean over segments, as verl counts the "
                "tokens of all ranks but not their segments; choose one of the seq-mean modes"
            )
        # a mini-batch without a token has a loss of 0
        return {kind: _at_least_one(count) / ranks for kind, count in counts.items() if count is not None} or None


def _at_least_one(count: Any) -> Any:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


@functools.lru_cache(maxsize=64)
def _loss_config(fields: tuple[tuple[str, Any], ...], mode: str, ranks: int) -> gk.LossConfig:
    config = gk.LossConfig.verl(**dict(fields))
    if mode in OURS:
        config = dataclasses.replace(config, ratio="segment" if mode == "segment" else "token")
    if mode in ("clip_cov", "kl_cov"):
        config = dataclasses.replace(config, dual_clip=None, log_ratio_clamp=None)
    if mode == "kl_cov":
        config = dataclasses.replace(config, clip_low=None, clip_high=None)
    if dict(fields)["loss_agg_mode"] == "token-sum" and config.aggregation != "token-sum":
        # this loss has its own aggregation, which the number of ranks does not scale
        config = dataclasses.replace(config, kl_coef=config.kl_coef * ranks, entropy_coef=config.entropy_coef * ranks)
    return config


class _Layout:
    """Response tokens, packed, or padded if verl pads the prompts."""

    def __init__(self, data: Any) -> None:
        prompts, responses = data["prompts"], data["responses"]
        self._data, self._responses, self.packed = data, responses, prompts.is_nested
        device = responses.device
        if self.packed:
            offsets = responses.offsets()
            before, self.lengths = prompts.offsets().diff(), offsets.diff()
            count = responses.values().shape[0]
            numbers = torch.arange(len(self.lengths), device=device)
            self.rows = numbers.repeat_interleave(self.lengths, output_size=count)
            self.places = torch.arange(count, device=device) - offsets[self.rows]
            self.cu_seqlens: Tensor | None = offsets
            self.total: Tensor | int = prompts.values().shape[0] + count
        else:
            seen = data["attention_mask"]
            before, self.lengths = seen[:, : prompts.shape[1]].sum(1), seen[:, prompts.shape[1] :].sum(1)
            self.rows = torch.arange(len(seen), device=device)[:, None]
            self.places = torch.arange(responses.shape[1], device=device)
            self.cu_seqlens = None
            self.total = (before + self.lengths).sum()
        # the model's output at a position predicts the next token
        firsts = (before + self.lengths).cumsum(0) - self.lengths - 1
        self._at = firsts[self.rows] + self.places
        _expect((before > 0).all(), "every prompt must have a token")

    def of_model(self, output: Tensor) -> Tensor:
        """The model's output at the response tokens."""
        values = output.values() if output.is_nested else output
        message = f"the model's output must have a value for every token of prompts and responses, got {len(values)}"
        if isinstance(self.total, int):
            if self.total != len(values):
                raise ValueError(f"fused_ppo_loss: {message}, expected {self.total}")
        else:
            _expect(self.total == len(values), message)
        selected = values.index_select(0, self._at.clamp(0, len(values) - 1).flatten()).view(self._at.shape)
        return selected if self.packed else torch.where(self.places < self.lengths[:, None], selected, 0)

    def of_data(self, value: Tensor, fill: float = 0) -> Tensor:
        if not self.packed:
            shape = (len(self.lengths), len(self.places))
            return value.to_padded_tensor(fill, output_size=shape) if value.is_nested else value
        return value.values() if value.is_nested else value[self.rows, self.places]

    def are_equal_in_rows(self, values: Tensor, mask: Tensor) -> Tensor:
        """Whether the tokens of a row that are in the mask have one value."""
        rows, values, mask = self.rows.expand(mask.shape).flatten(), values.flatten(), mask.flatten()
        extremes = []
        for absent, reduce in ((-math.inf, "amax"), (math.inf, "amin")):
            start = torch.full((len(self.lengths),), absent, dtype=values.dtype, device=values.device)
            extremes.append(start.scatter_reduce(0, rows, torch.where(mask, values, absent), reduce))
        return (extremes[0] <= extremes[1]).all()

    def width(self) -> int:
        """Padded width of the responses, verl's divisor unless it is given a constant."""
        if not self.packed:
            return len(self.places)
        known = "max_response_len" in self._data  # not a tensor, so that get() would wrap it
        return int(self._data["max_response_len"] if known else self.lengths.max())


def _expect(holds: Tensor, message: str) -> None:
    """Raises at once on the CPU, asynchronously elsewhere."""
    if holds.device.type != "cpu":
        torch._assert_async(holds, f"fused_ppo_loss: {message}")
    elif not holds:
        raise ValueError(f"fused_ppo_loss: {message}")


def _measured(
    metrics: gk.PolicyLossMetrics | _VariantMetrics, terms: _Terms, config: Any, has_entropy: bool
) -> dict[str, Any]:
    info = config.global_batch_info
    is_share = info["dp_size"] > 1 or any(
        info[k] is not None for k in ("batch_num_tokens", "global_batch_size", "loss_scale_factor")
    )
    of_share = AggregationType.SUM if is_share else AggregationType.MEAN
    factors = {"actor/pg_loss": terms.scale}
    factors |= dict.fromkeys(("actor/entropy_loss", "kl_loss"), terms.scale * terms.other_scale)
    result: dict[str, Any] = {}
    for key in _metric_names(terms.config, has_entropy, _WITHOUT.get(terms.mode, ())):
        kind = of_share if key in factors else AggregationType.MEAN
        result[key] = _DeferredMetric(kind, metrics, key, factors.get(key, 1))
    return result | ({"kl_coef": config.kl_loss_coef} if config.use_kl_loss else {})


@functools.lru_cache(maxsize=64)
def _metric_names(config: gk.LossConfig, has_entropy: bool, without: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the metrics, without reading any from the device."""
    metrics = gk.PolicyLossMetrics(torch.zeros(len(gk.PolicyLossMetrics.names)), config, False, has_entropy)
    return tuple(key for key in metrics.verl() if key not in ("kl_coef", *without))


class _VariantMetrics:
    """verl's metrics of Clip-Cov and KL-Cov: some are sums over the tokens, and the loss has a further term."""

    def __init__(
        self, metrics: gk.PolicyLossMetrics, mode: str, sums: dict[str, Tensor], added: Tensor | None = None
    ) -> None:
        self._metrics, self._mode, self._sums, self._added = metrics, mode, sums, added

    def verl(self) -> dict[str, float]:
        result = {key: value for key, value in self._metrics.verl().items() if key not in _WITHOUT[self._mode]}
        tokens = max(self._metrics.to_dict()["tokens"], 1)
        result |= {name: float(total) / tokens for name, total in self._sums.items()}
        if self._added is not None:
            result["actor/pg_loss"] += float(self._added)
        return result


class _DeferredMetric(Metric):  # type: ignore[misc]
    """A Metric that is copied to the host when read, together with all others of the call."""

    def __init__(self, aggregation: AggregationType, metrics: Any, key: str, factor: float) -> None:
        self.aggregation, self._metrics, self._key, self._factor = aggregation, metrics, key, factor
        self._values: list[float] | None = None

    @property
    def values(self) -> list[float]:
        if self._values is None:
            self._values = [self._metrics.verl()[self._key] * self._factor]
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a number, because the trainer's process may lack the device."""
        return Metric, (self.aggregation,), {"values": self.values}
