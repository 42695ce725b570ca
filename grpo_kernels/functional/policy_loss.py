"""The policy-gradient loss of GRPO and its relatives, from log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks, dispatch
from grpo_kernels.config import LossConfig
from grpo_kernels.functional.policy_loss_metrics import PolicyLossMetrics
from grpo_kernels.ops import policy_loss as op

_OP = "policy_loss"
_NUMBERS = checks.INTEGERS + checks.FLOATS
_KINDS = ("tokens", "rows", "segments")

Normalizer = float | Tensor | Mapping[str, float | Tensor]


class Inputs(NamedTuple):
    """In the order that the op takes them."""

    logprobs: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    segments: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None
    is_weights: Tensor | None
    entropy: Tensor | None
    entropy_floor: Tensor | None
    weights: Tensor | None


class PolicyLoss(NamedTuple):
    """loss, a scalar to call backward() on, and metrics (nothing is copied to the host until one is read)."""

    loss: Tensor
    metrics: PolicyLossMetrics


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segments: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_floor: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer | None = None,
    config: LossConfig | str = "grpo",
    backend: str | None = None,
) -> PolicyLoss:
    """Loss and its gradient in one pass over the tokens; every published variant is a setting of `config`.

    logprobs           padded [B, T], or packed [M] with cu_seqlens; of the policy, with gradient
    old_logprobs       of the policy that the ratio is to; None: on-policy, the log-probs themselves, detached
    advantages         one per row [B], or one per token
    mask               which tokens take part; None: all. What the others hold, NaN included, changes nothing
    cu_seqlens         int32 or int64 [B + 1], where the rows of packed input begin and end
    segments           integers, ascending from 0 along each row, -1 outside; for ratio="segment"
    ref_logprobs       of the reference policy, for the KL term
    sampling_logprobs  of the sampler, for config.correction and off_policy_threshold; NaN: it could not score the token
    is_weights         factors of the policy term: one per token, [B, 1] or [B]; instead of config.correction
    entropy            per token; for the bonus (with gradient), the metrics and top_entropy_quantile
    entropy_floor      a scalar: what top_entropy_quantile found elsewhere, as among the tokens of all ranks; None: what
                       it finds here
    weights            one per token: the loss is their weighted sum instead of the aggregation's mean
    normalizer         what the aggregation divides by instead of what it would count here: a number or a tensor, or a
                       dict with any of "tokens", "rows", "segments". The global count makes the loss independent of
                       how a batch is split into micro-batches and ranks
    config             a LossConfig, or a TRL loss_type
    backend            "cuda", "triton", "cpu", "reference"; None: the first that can
    """
    settings = LossConfig.of(config)
    given = Inputs(
        logprobs, old_logprobs, advantages, mask, cu_seqlens, segments, ref_logprobs, sampling_logprobs, is_weights,
        entropy, entropy_floor, weights,
    )  # fmt: skip
    return policy_loss_of(_OP, given, normalizer, settings, backend)


def policy_loss_of(
    op_name: str, given: Inputs, normalizer: Normalizer | None, settings: LossConfig, backend: str | None
) -> PolicyLoss:  # fmt: skip
    inputs, normalizers, counts = prepare(op_name, given, normalizer, settings)
    if inputs.entropy_floor is None:
        inputs = inputs._replace(entropy_floor=_entropy_floor(inputs, settings.top_entropy_quantile))
    chosen = dispatch.select(
        op_name, backend, inputs.logprobs.device.type, inputs.logprobs.dtype, op.SUPPORTS, inputs.logprobs.device.index
    )
    loss, metrics = op.apply(chosen, *inputs, normalizers, counts, settings.modes, settings.coefficients)
    by_row = given.advantages.shape != given.logprobs.shape
    return PolicyLoss(loss, PolicyLossMetrics(metrics, settings, by_row, given.entropy is not None))


class Prepared(NamedTuple):
    """What the op is called with: checked, in one dtype and one memory layout."""

    inputs: Inputs
    normalizers: Tensor | None
    counts: list[float]


def prepare(op_name: str, given: Inputs, normalizer: Normalizer | None, settings: LossConfig) -> Prepared:
    inputs = _checked(op_name, given)
    _check_needs(op_name, settings, inputs, normalizer)
    counts, normalizers = _normalizers(op_name, normalizer, settings, inputs.logprobs)
    return Prepared(inputs, normalizers, counts)


def _checked(op_name: str, given: Inputs) -> Inputs:
    """In one dtype and one memory layout; gradient flows to log-probs and entropy only."""
    checks.tensor(op_name, "logprobs", given.logprobs, checks.FLOATS)
    rows = _row_count(op_name, given.logprobs, given.cu_seqlens)
    arguments = _Arguments(op_name, given.logprobs, rows)
    mask = arguments.optional("mask", given.mask, (torch.bool, *_NUMBERS))
    segments = arguments.optional("segments", given.segments, checks.INTEGERS)
    detached = ("old_logprobs", "ref_logprobs", "sampling_logprobs")
    weights = arguments.optional("weights", given.weights, _NUMBERS)
    return given._replace(
        logprobs=arguments.number(given.logprobs),
        advantages=arguments.per_row_or_token("advantages", given.advantages),
        mask=mask if mask is None or mask.dtype == torch.bool else mask != 0,
        cu_seqlens=None if given.cu_seqlens is None else given.cu_seqlens.long().contiguous(),
        segments=None if segments is None else segments.int(),
        is_weights=None if given.is_weights is None else arguments.per_row_or_token("is_weights", given.is_weights),
        entropy=arguments.floats("entropy", given.entropy),
        entropy_floor=arguments.scalar("entropy_floor", given.entropy_floor),
        weights=None if weights is None else arguments.number(weights, detach=True),
        **{name: arguments.floats(name, getattr(given, name), detach=True) for name in detached},
    )


class _Arguments:
    """Brings every argument to the dtype and the memory layout of the log-probs."""

    def __init__(self, op_name: str, logprobs: Tensor, rows: int) -> None:
        self.op_name = op_name
        self.shape, self.rows, self.device = logprobs.shape, rows, logprobs.device
        self.dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32

    def number(self, value: Tensor, detach: bool = False) -> Tensor:
        if detach and value.requires_grad:
            value = value.detach()
        if value.dtype != self.dtype:
            value = value.to(self.dtype)
        return value.contiguous()

    def optional(self, name: str, value: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
        if value is None:
            return None
        checks.tensor(self.op_name, name, value, dtypes)
        checks.same_device(self.op_name, name, value, self.device)
        if value.shape != self.shape:
            raise ValueError(
                f"{self.op_name}: {name} must have the shape of logprobs, {list(self.shape)}, got {list(value.shape)}"
            )
        return value.contiguous()

    def floats(self, name: str, value: Tensor | None, detach: bool = False) -> Tensor | None:
        value = self.optional(name, value, checks.FLOATS)
        return None if value is None else self.number(value, detach)

    def scalar(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        checks.tensor(self.op_name, name, value, checks.FLOATS)
        checks.same_device(self.op_name, name, value, self.device)
        if value.numel() != 1:
            raise ValueError(f"{self.op_name}: {name} must have one element, got shape {list(value.shape)}")
        return self.number(value.reshape(()), detach=True)

    def per_row_or_token(self, name: str, value: Tensor) -> Tensor:
        checks.tensor(self.op_name, name, value, checks.FLOATS)
        checks.same_device(self.op_name, name, value, self.device)
        if value.shape != self.shape:
            if tuple(value.shape) not in ((self.rows,), (self.rows, 1)):
                raise ValueError(
                    f"{self.op_name}: {name} must have one value per row, {[self.rows]}, or per token, "
                    f"{list(self.shape)}, got {list(value.shape)}"
                )
            value = value.reshape(-1)
        return self.number(value, detach=True)


def _row_count(op_name: str, logprobs: Tensor, cu_seqlens: Tensor | None) -> int:
    if cu_seqlens is None:
        if logprobs.dim() != 2:
            raise ValueError(
                f"{op_name}: logprobs must have shape [B, T], or [M] with cu_seqlens, got {list(logprobs.shape)}"
            )
        return logprobs.shape[0]
    if logprobs.dim() != 1:
        raise ValueError(f"{op_name}: logprobs must have shape [M] with cu_seqlens, got {list(logprobs.shape)}")
    checks.tensor(op_name, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    checks.same_device(op_name, "cu_seqlens", cu_seqlens, logprobs.device)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{op_name}: cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}")
    return len(cu_seqlens) - 1


def _check_needs(op_name: str, settings: LossConfig, inputs: Inputs, normalizer: Normalizer | None) -> None:
    def refuse(name: str, rule: str, got: object) -> None:
        raise ValueError(f"{op_name}: {name} must be {rule}, got {got}")

    def described(value: Tensor | None) -> object:
        return None if value is None else f"a tensor of shape {list(value.shape)}"

    by_segment = settings.ratio.startswith("segment")
    if by_segment and inputs.segments is None:
        refuse("segments", f"given for ratio={settings.ratio!r}", None)
    if settings.kl_coef != 0 and inputs.ref_logprobs is None:
        refuse("ref_logprobs", f"given for kl_coef={settings.kl_coef}", None)
    if inputs.ref_logprobs is not None and settings.kl == "none":
        refuse("ref_logprobs", "left out with kl='none'", "a tensor; choose a kl, with kl_coef=0 to measure only")
    if settings.correction != "none" and inputs.sampling_logprobs is None:
        refuse("sampling_logprobs", f"given for correction={settings.correction!r}", None)
    weights = inputs.is_weights
    if settings.correction != "none" and weights is not None:
        refuse("is_weights", f"left out with correction={settings.correction!r}", described(weights))
    by_row = weights is not None and weights.shape != inputs.logprobs.shape
    if by_row and settings.loss == "vespo":
        refuse("is_weights", "one per token for loss='vespo'", described(weights))
    if (settings.entropy_coef != 0 or settings.top_entropy_quantile < 1) and inputs.entropy is None:
        names = f"entropy_coef={settings.entropy_coef}, top_entropy_quantile={settings.top_entropy_quantile}"
        refuse("entropy", f"given for {names}", None)
    if inputs.entropy_floor is not None and settings.top_entropy_quantile >= 1:
        refuse("entropy_floor", "left out with top_entropy_quantile=1, which keeps all tokens", "a tensor")
    if normalizer is None:
        return
    if inputs.weights is not None:
        refuse("normalizer", "left out with weights, which are what the terms are multiplied by", normalizer)
    if settings.aggregation == "token-sum" and not isinstance(normalizer, Mapping):
        refuse("normalizer", "left out with aggregation='token-sum', which divides by nothing", normalizer)


def _normalizers(
    op_name: str, given: Normalizer | None, settings: LossConfig, logprobs: Tensor
) -> tuple[list[float], Tensor | None]:
    """What is known of tokens, rows and segments: as numbers, NaN for what is to be counted, and as a tensor."""
    if given is None:
        return [math.nan] * 3, None
    if not isinstance(given, Mapping):
        kind = "rows" if settings.aggregation.startswith("seq-mean") else "tokens"
        given = {"segments" if kind == "tokens" and settings.ratio.startswith("segment") else kind: given}
    numbers, tensors = [math.nan] * 3, False
    for name, value in given.items():
        if name not in _KINDS:
            raise ValueError(f"{op_name}: normalizer must be for one of {', '.join(_KINDS)}, got {name!r}")
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{op_name}: normalizer must have one element, got shape {list(value.shape)}")
            tensors = True
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{op_name}: normalizer must be a positive number, got {value!r}")
        else:
            numbers[_KINDS.index(name)] = float(value)
    if not tensors:
        return numbers, None
    # a tensor of which nothing is known here; what is counted elsewhere can be 0, and then counts as 1 as in TRL
    unknown = torch.full((), math.nan, dtype=torch.float64, device=logprobs.device)
    columns = [unknown] * 3
    for name, value in given.items():
        if isinstance(value, Tensor):
            count = value.detach().to(unknown).reshape(())
            columns[_KINDS.index(name)] = torch.where(count > 0, count, 1.0)
    return numbers, torch.stack(columns)


def _entropy_floor(inputs: Inputs, quantile: float) -> Tensor | None:
    """The entropy that the kept share of tokens reaches, as torch.quantile has it, which refuses above 2^24 values."""
    entropy = inputs.entropy
    if quantile >= 1 or entropy is None:
        return None
    valid = torch.ones_like(entropy, dtype=torch.bool) if inputs.mask is None else inputs.mask
    if inputs.segments is not None:
        valid = valid & (inputs.segments >= 0)
    if inputs.cu_seqlens is not None:
        valid = valid & (torch.arange(len(entropy), device=entropy.device) < inputs.cu_seqlens[-1])
    ordered = torch.where(valid, entropy.detach(), math.inf).flatten().sort().values
    if ordered.numel() == 0:
        return entropy.new_zeros(())
    # computed like there: the rank in double, then between its two neighbours
    rank = (valid.sum() - 1).clamp(min=0) * torch.full((), 1 - quantile, dtype=torch.float64, device=entropy.device)
    below = ordered[rank.floor().long()]
    above = ordered[rank.ceil().long()]
    return torch.lerp(below, above, (rank - rank.floor()).to(entropy.dtype))
