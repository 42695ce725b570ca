"""verl's policy losses by their names, and its ppo_loss as one pass over the tokens."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils.metric import AggregationType, Metric

import grpo_kernels as gk
from grpo_kernels.config.loss_peers import VERL_DEFAULTS
from grpo_kernels.functional.policy_loss_metrics import PolicyLossMetrics
from grpo_kernels.integrations._verl_advantages import SEGMENTS

VERLS = ("vanilla", "gspo", "sapo", "cispo", "gpg", "dppo_tv", "dppo_kl", "geo_mean", "dro")
LOSSES = {f"fused_{mode}": mode for mode in (*VERLS, "segment")}
PPOLoss = Callable[..., tuple[Tensor, dict[str, Any]]]

# verl's own ppo_loss, while fused_ppo_loss is in its place.
own: dict[str, PPOLoss] = {}
_log = logging.getLogger("grpo_kernels.integrations.verl")


def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """What is registered under this name."""
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
        if mode == "segment":
            raise RuntimeError(
                f"{name}: verl gives a registered loss no segments; train with fused_ppo_loss, as after "
                "grpo_kernels.integrations.verl.patch_verl()"
            )
        found = _Terms(config, mode, loss_agg_mode, config.global_batch_info, response_mask.shape[-1], False)
        result = gk.policy_loss(
            log_prob, old_log_prob, advantages, mask=response_mask, is_weights=rollout_is_weights,
            normalizer=found.normalizer, config=found.config,
        )  # fmt: skip
        metrics = result.metrics.verl()
        del metrics["actor/pg_loss"]  # verl adds it itself
        return found.scaled(result.loss), metrics

    loss.__name__ = loss.__qualname__ = name
    return loss


def fused_ppo_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """verl.workers.utils.losses.ppo_loss: the same arguments, loss, gradients and metrics, in one pass without waiting.

    A loss_mode that is neither one of ours nor verl's own function for one of them goes to verl's ppo_loss.
    """
    mode = _mode(config.policy_loss.get("loss_mode", "vanilla"))
    if mode is None:
        from verl.workers.utils import losses

        theirs = own.get("ppo_loss", cast(PPOLoss, losses.ppo_loss))
        return theirs(config, model_output, data, dp_group)
    layout = _Layout(data)
    config.global_batch_info.update(
        {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")},
        loss_scale_factor=config.loss_scale_factor,
    )
    aggregation = config.loss_agg_mode
    terms = _Terms(config, mode, aggregation, config.global_batch_info, layout.width, True)
    entropy = model_output.get("entropy", None)
    given: dict[str, Any] = {"entropy": None if entropy is None else layout.of_model(entropy)}
    wanted = {"is_weights": "rollout_is_weights"} if "rollout_is_weights" in data else {}
    wanted |= {"ref_logprobs": "ref_log_prob"} if config.use_kl_loss else {}
    wanted |= {"segments": SEGMENTS} if mode == "segment" else {}
    for argument, key in wanted.items():
        if key not in data:
            raise KeyError(f"fused_ppo_loss: data must hold {key!r} for this config, got {sorted(data.keys())}")
        given[argument] = layout.of_data(data[key], -1 if argument == "segments" else 0)
    result = gk.policy_loss(
        layout.of_model(model_output["log_probs"]), layout.of_data(data["old_log_probs"]),
        layout.of_data(data["advantages"]), mask=layout.of_data(data["response_mask"]).bool(),
        cu_seqlens=layout.cu_seqlens, normalizer=terms.normalizer, config=terms.config, **given,
    )  # fmt: skip
    return terms.scaled(result.loss), _measured(result.metrics, terms, config, entropy is not None)


def _mode(name: str) -> str | None:
    """verl's name for the loss; None: one that is not ours to compute."""
    if name in LOSSES:
        return LOSSES[name]
    registered = core_algos.POLICY_LOSS_REGISTRY.get(name)
    if name in VERLS and getattr(registered, "__module__", None) == core_algos.__name__:
        return name
    _say_once(f"fused_ppo_loss: loss_mode {name!r} is not one of ours, verl's own ppo_loss computes it")
    return None


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


class _Terms:
    """What verl's agg_loss divides and multiplies by, as a LossConfig, a normalizer and a factor."""

    def __init__(
        self, config: Any, mode: str, aggregation: str, info: Any, width: Callable[[], int] | int, whole: bool
    ):
        ranks = info.get("dp_size", 1)
        fields = {name: config.get(name, default) for name, default in VERL_DEFAULTS.items()}
        fields |= {"loss_mode": "vanilla" if mode == "segment" else mode, "loss_agg_mode": aggregation}
        fields["dro_beta"] = config.policy_loss.get("dro_beta", None) if mode == "dro" else None
        if aggregation == "seq-mean-token-sum-norm":
            length = info.get("loss_scale_factor", None)
            fields["loss_scale_factor"] = (width() if callable(width) else width) if length is None else length
        if not whole:  # verl adds these terms itself
            fields |= {"use_kl_loss": False, "entropy_coeff": 0}
        self.config = _made(tuple(fields.items()), mode == "segment", ranks)
        summed = aggregation == "token-sum"
        # gradients are averaged over the ranks, so that a sum takes as many
        self.scale = ranks if summed and self.config.aggregation == "token-sum" else 1
        self.other_scale = ranks if summed and self.scale == 1 else 1
        self.normalizer = self._normalizer(info, ranks)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale == 1 else loss * self.scale

    def _normalizer(self, info: Any, ranks: int) -> dict[str, Any] | None:
        """This rank's share of the global counts."""
        counts = {"tokens": info.get("batch_num_tokens", None), "rows": info.get("global_batch_size", None)}
        config = self.config
        kinds = {each for each in (config.aggregation, config.kl_aggregation, config.entropy_aggregation) if each}
        for kind, key, prefix in (("tokens", "batch_num_tokens", "token-mean"), ("rows", "global_batch_size", "seq")):
            if ranks > 1 and counts[kind] is None and any(each.startswith(prefix) for each in kinds):
                raise ValueError(f"fused losses: {key} must be given for dp_size={ranks} with {sorted(kinds)}")
        if self.config.ratio == "segment" and self.config.aggregation == "token-mean" and counts["tokens"] is not None:
            raise ValueError(
                "fused_segment: loss_agg_mode must not be 'token-mean', a mean over segments, as verl counts the "
                "tokens of all ranks but not their segments; choose one of the seq-mean modes"
            )
        return {kind: count / ranks for kind, count in counts.items() if count is not None} or None


@functools.lru_cache(maxsize=64)
def _made(fields: tuple[tuple[str, Any], ...], by_segment: bool, ranks: int) -> gk.LossConfig:
    config = gk.LossConfig.verl(**dict(fields))
    if by_segment:
        config = dataclasses.replace(config, ratio="segment")
    if dict(fields)["loss_agg_mode"] == "token-sum" and config.aggregation != "token-sum":
        # the loss has an aggregation of its own, which the ranks' number is no factor of
        config = dataclasses.replace(
            config, kl_coef=config.kl_coef * ranks, entropy_coef=config.entropy_coef * ranks
        )  # fmt: skip
    return config


class _Layout:
    """The responses' tokens one after another, or padded if verl has the prompts padded."""

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
        # what is at a token's place was computed for the one behind it
        firsts = (before + self.lengths).cumsum(0) - self.lengths - 1
        self._at = firsts[self.rows] + self.places
        _expect((before > 0).all(), "every prompt must have a token")

    def of_model(self, output: Tensor) -> Tensor:
        """The part of what the model gives that is about the responses."""
        values = output.values() if output.is_nested else output
        message = f"the model's output must have a value for every token of prompts and responses, got {len(values)}"
        if isinstance(self.total, int):
            if self.total != len(values):
                raise ValueError(f"fused_ppo_loss: {message}, expected {self.total}")
        else:
            _expect(self.total == len(values), message)
        found = values.index_select(0, self._at.clamp(0, len(values) - 1).flatten()).view(self._at.shape)
        return found if self.packed else torch.where(self.places < self.lengths[:, None], found, 0)

    def of_data(self, value: Tensor, fill: float = 0) -> Tensor:
        if not self.packed:
            shape = (len(self.lengths), len(self.places))
            return value.to_padded_tensor(fill, output_size=shape) if value.is_nested else value
        return value.values() if value.is_nested else value[self.rows, self.places]

    def width(self) -> int:
        """Of the padded responses, which is what verl divides by if it is given no constant."""
        if not self.packed:
            return len(self.places)
        known = self._data.get("max_response_len", None)
        return int(self.lengths.max()) if known is None else int(known)


def _expect(holds: Tensor, message: str) -> None:
    """Waits on the CPU only, where there is nothing to wait for."""
    if holds.device.type != "cpu":
        torch._assert_async(holds, f"fused_ppo_loss: {message}")
    elif not holds:
        raise ValueError(f"fused_ppo_loss: {message}")


def _measured(metrics: PolicyLossMetrics, terms: _Terms, config: Any, has_entropy: bool) -> dict[str, Any]:
    info = config.global_batch_info
    is_share = info["dp_size"] > 1 or any(info[k] is not None for k in ("batch_num_tokens", "global_batch_size",
                                                                        "loss_scale_factor"))  # fmt: skip
    of_share = AggregationType.SUM if is_share else AggregationType.MEAN
    factors = {"actor/pg_loss": terms.scale}
    factors |= dict.fromkeys(("actor/entropy_loss", "kl_loss"), terms.scale * terms.other_scale)
    result: dict[str, Any] = {}
    for key in _figures(terms.config, has_entropy):
        kind = of_share if key in factors else AggregationType.MEAN
        result[key] = _Later(kind, metrics, key, factors.get(key, 1))
    return result | ({"kl_coef": config.kl_loss_coef} if config.use_kl_loss else {})


@functools.lru_cache(maxsize=64)
def _figures(config: gk.LossConfig, has_entropy: bool) -> tuple[str, ...]:
    """Which there are, for which those of the device need not be known."""
    some = PolicyLossMetrics(torch.zeros(len(PolicyLossMetrics.names)), config, False, has_entropy)
    return tuple(key for key in some.verl() if key != "kl_coef")


class _Later(Metric):  # type: ignore[misc]
    """A Metric whose value comes to the host when it is read, with all others of the call at once."""

    def __init__(self, aggregation: AggregationType, metrics: Any, key: str, factor: float) -> None:
        self.aggregation, self._metrics, self._key, self._factor = aggregation, metrics, key, factor
        self._values: list[float] | None = None

    @property
    def values(self) -> list[float]:
        if self._values is None:
            self._values = [self._metrics.verl()[self._key] * self._factor]
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes as a number: the trainer's may have no such device."""
        return Metric, (self.aggregation,), {"values": self.values}
