"""Checks the arguments of a policy loss and brings its tensors to one dtype and memory layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.losses import LOSSES
from grpo_kernels.ops.policy_loss.reference import Policy
from grpo_kernels.ops.token_logprobs.config import IGNORED

_NUMBERS = checks.INTEGERS + checks.FLOATS
_FLAGS = (torch.bool, *_NUMBERS)
_COUNTED = ("tokens", "rows", "segments")
# Divisor of the means of each aggregation; sums and local means do not read a normalizer.
_UNITS = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "rows",
    "seq-mean-token-sum": "rows",
    "seq-mean-token-sum-norm": "rows",
}


Normalizer = float | Tensor | Mapping[str, float | Tensor]


class Layout:
    """Shape, number of rows, dtype and device of the log-probs, which the other tensors have to match."""

    def __init__(
        self,
        op: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        cu_seqlens: Tensor | None,
        name: str = "logprobs",
    ) -> None:
        self.op, self.shape, self.device, self.name = op, shape, device, name
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.rows = self._count_rows(cu_seqlens)
        # a value for each row then has the shape of one for each token
        self.is_ambiguous = self.shape == (self.rows,)

    @classmethod
    def of(cls, op: str, logprobs: Tensor, cu_seqlens: Tensor | None, name: str = "logprobs") -> Layout:
        checks.tensor(op, name, logprobs, checks.FLOATS)
        return cls(op, logprobs.shape, logprobs.dtype, logprobs.device, cu_seqlens, name)

    def _count_rows(self, cu_seqlens: Tensor | None) -> int:
        op, shape = self.op, list(self.shape)
        if cu_seqlens is None:
            if len(shape) != 2:
                raise ValueError(f"{op}: {self.name} must have shape [B, T], or [M] with cu_seqlens, got {shape}")
            return shape[0]
        if len(shape) != 1:
            raise ValueError(f"{op}: {self.name} must have shape [M] with cu_seqlens, got {shape}")
        checks.tensor(op, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
        checks.same_device(op, "cu_seqlens", cu_seqlens, self.device)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
            raise ValueError(f"{op}: cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}")
        return len(cu_seqlens) - 1

    def number(self, value: Tensor, detach: bool = False) -> Tensor:
        """`value` in the dtype of the log-probs, contiguous."""
        if detach and value.requires_grad:
            value = value.detach()
        if value.dtype != self.dtype:
            value = value.to(self.dtype)
        return value.contiguous()

    def per_token(self, name: str, value: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
        if value is None:
            return None
        return checks.shaped(self.op, name, value, dtypes, self.device, self.shape, self.name).contiguous()

    def floats(self, name: str, value: Tensor | None, detach: bool = True) -> Tensor | None:
        value = self.per_token(name, value, checks.FLOATS)
        return None if value is None else self.number(value, detach)

    def flags(self, name: str, value: Tensor | None) -> Tensor | None:
        value = self.per_token(name, value, _FLAGS)
        if value is None:
            return None
        if value.dtype != torch.bool:
            return checks.flags(self.op, name, value)
        # autograd saves masks, but none from inference mode, in which rollouts are often scored
        return value.clone() if not torch.compiler.is_compiling() and value.is_inference() else value

    def scalar(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        checks.tensor(self.op, name, value, checks.FLOATS)
        checks.same_device(self.op, name, value, self.device)
        if value.numel() != 1:
            raise ValueError(f"{self.op}: {name} must have one element, got shape {list(value.shape)}")
        return self.number(value.reshape(()), detach=True)

    def ids(self, name: str, value: Tensor | None) -> Tensor | None:
        """Places in a row, as int32; larger ones stay too large, which kernels refuse, negative ones negative."""
        value = self.per_token(name, value, checks.INTEGERS)
        if value is None:
            return None
        return (value.clamp(-1, 2**31 - 1) if value.dtype == torch.int64 else value).int()

    def constants(self, name: str, value: Tensor | None) -> Tensor | None:
        value = self.per_token(name, value, _NUMBERS)
        if value is None:
            return None
        checks.constant(self.op, name, value)
        return self.number(value, detach=True)

    def per_row_or_token(self, name: str, value: Tensor) -> Tensor:
        checks.tensor(self.op, name, value, checks.FLOATS)
        checks.same_device(self.op, name, value, self.device)
        if value.shape != self.shape:
            is_column = value.shape == (self.rows, 1)
            if not is_column and value.shape != (self.rows,):
                raise ValueError(
                    f"{self.op}: {name} must have one value per row, {[self.rows]}, or per token, "
                    f"{list(self.shape)}, got {list(value.shape)}"
                )
            if is_column and not self.is_ambiguous:
                value = value.reshape(-1)
        checks.constant(self.op, name, value)
        return self.number(value, detach=True)


# Checks of a tensor, by what its field of Policy says that it holds.
_CHECKS: dict[str, Callable[[Layout, str, Any], Any]] = {
    "numbers": Layout.floats,
    "flags": Layout.flags,
    "ids": Layout.ids,
    "constants": Layout.constants,
    "of rows or tokens": Layout.per_row_or_token,
}
_CHECKED = {
    name: (_CHECKS[hint.__metadata__[0]], type(None) in get_args(hint.__origin__))
    for name, hint in get_type_hints(Policy, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def check_policy(
    layout: Layout,
    config: LossConfig,
    *,
    cu_seqlens: Tensor | None,
    normalizer: Normalizer | None,
    with_values: bool = True,
    **tensors: Tensor | None,
) -> Policy:
    """Everything but log-probs and entropies, as the op takes it; each tensor as its field of Policy says."""
    checked: dict[str, Any] = {
        name: None if tensors[name] is None and may_be_none else check(layout, name, tensors[name])
        for name, (check, may_be_none) in _CHECKED.items()
    }
    counts, normalizers = _normalizers(layout, config, normalizer)
    policy = Policy(
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long().contiguous(),
        normalizers=normalizers,
        counts=counts,
        settings=config.settings,
        **checked,
    )
    _check_required(layout, config, policy, normalizer)
    if with_values:
        check_values(layout, policy)
    return policy


def check_values(layout: Layout, policy: Policy, logprobs: Tensor | None = None) -> None:
    """Refuses on the CPU tokens of no row and what cannot be log-probs, as the CPU kernel does with checks_values."""
    if policy.cu_seqlens is not None and checks.is_readable(policy.cu_seqlens):
        valid = policy.mask
        if policy.segments is not None:
            is_inside = policy.segments >= 0
            valid = is_inside if valid is None else valid & is_inside
        checks.no_token_left_out(layout.op, policy.cu_seqlens, layout.shape[0], valid)
    named = {"old_logprobs": policy.old_logprobs, "ref_logprobs": policy.ref_logprobs, "logprobs": logprobs}
    for name, value in named.items():
        if value is not None:
            checks.log_probs(layout.op, name, value, policy.mask)


def _unit(config: LossConfig) -> str:
    """The unit that the mean of the policy terms is over."""
    if config.aggregation == "token-mean" and config.ratio.startswith("segment"):
        return "segments"
    return _UNITS.get(config.aggregation, "tokens")


def check_units(
    layout: Layout, config: LossConfig, policy: Policy, normalizer: Normalizer | None, has_entropy: bool
) -> None:
    """Refuses a normalizer without a unit that is read, which would be counted here alone: micro-batches and ranks
    would then add up to something else than the whole batch. With `weights` nothing is counted: all terms have them."""
    if policy.weights is not None:
        for field in _aggregations_read(policy, config, has_entropy):
            value = getattr(config, field)
            if value not in (None, config.aggregation, "local-token-mean"):
                rule = f"{field} must be None or that of the policy term, {config.aggregation!r}, with weights"
                raise ValueError(f"{layout.op}: {rule}, which all terms have, got {value!r}")
    if normalizer is None:
        return
    units = _units_read(config, policy, has_entropy)
    if isinstance(normalizer, Mapping):
        for unit, setting in units.items():
            if unit not in normalizer:
                rule = f"normalizer must have {unit!r}, the unit of {setting}"
                raise ValueError(f"{layout.op}: {rule}, got {normalizer!r}")
    elif units.keys() != {"tokens"}:  # a number alone is one of tokens
        named = " and ".join(f"{unit!r} for {setting}" for unit, setting in units.items())
        raise ValueError(f"{layout.op}: normalizer must be a dict with {named}, got {normalizer!r}")


def _units_read(config: LossConfig, policy: Policy, has_entropy: bool) -> dict[str, str]:
    """The units whose number divides a term of the loss, each with the first setting that reads it."""
    units: dict[str, str] = {}
    if config.aggregation in _UNITS:
        units[_unit(config)] = f"aggregation={config.aggregation!r}"
    for field in _aggregations_read(policy, config, has_entropy):
        aggregation = getattr(config, field) or config.aggregation
        if aggregation in _UNITS:
            units.setdefault(_UNITS[aggregation], f"{field}={aggregation!r}")
    return units


def _aggregations_read(policy: Policy, config: LossConfig, has_entropy: bool) -> list[str]:
    """The fields that aggregate a term beside the policy's."""
    has_kl = policy.ref_logprobs is not None and config.kl != "none"
    return ["kl_aggregation"] * has_kl + ["entropy_aggregation"] * has_entropy


def participants(
    op: str,
    targets: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Tensor | None,
    name: str = "targets",
) -> Tensor:
    """Tokens that every argument lets take part. `cu_seqlens` was checked by the layout."""
    takes_part = targets != IGNORED
    if segments is not None:
        checks.tensor(op, "segments", segments, checks.INTEGERS)
        checks.same_device(op, "segments", segments, targets.device)
        if segments.shape == targets.shape:
            takes_part = takes_part & (segments >= 0)
    if mask is not None:
        checks.shaped(op, "mask", mask, _FLAGS, targets.device, targets.shape, name)
        takes_part = takes_part & checks.flags(op, "mask", mask)
    if cu_seqlens is not None:
        checks.no_token_left_out(op, cu_seqlens, len(targets), takes_part)
        takes_part = takes_part & (torch.arange(len(targets), device=targets.device) < cu_seqlens[-1])
    return takes_part


def check_entropy(layout: Layout, config: LossConfig, has_entropy: bool) -> None:
    """Requires the entropy that the config's bonus needs."""
    if config.entropy_coef != 0 and not has_entropy:
        raise ValueError(f"{layout.op}: entropy must be given for entropy_coef={config.entropy_coef}, got None")


def _check_required(layout: Layout, config: LossConfig, policy: Policy, normalizer: Normalizer | None) -> None:
    def refuse(name: str, rule: str, got: object) -> None:
        raise ValueError(f"{layout.op}: {name} must be {rule}, got {got}")

    if config.ratio.startswith("segment") and policy.segments is None:
        refuse("segments", f"given for ratio={config.ratio!r}", None)
    if policy.policy_mask is not None and LOSSES[config.loss].is_of_rows:
        refuse("policy_mask", f"left out for loss={config.loss!r}, whose terms are rows", "a tensor")
    if config.kl_coef != 0 and policy.ref_logprobs is None:
        refuse("ref_logprobs", f"given for kl_coef={config.kl_coef}", None)
    if policy.ref_logprobs is not None:
        check_reads_reference(layout.op, "ref_logprobs", config)
    weights = policy.is_weights
    if weights is not None and weights.shape != layout.shape and config.loss == "vespo":
        refuse("is_weights", "one per token for loss='vespo'", f"a tensor of shape {list(weights.shape)}")
    if normalizer is None:
        return
    if policy.weights is not None:
        refuse("normalizer", "left out with weights, which are what the terms are multiplied by", normalizer)
    if config.aggregation == "token-sum" and not isinstance(normalizer, Mapping):
        refuse("normalizer", "left out with aggregation='token-sum', which divides by nothing", normalizer)


def check_reads_reference(op: str, name: str, config: LossConfig) -> None:
    """Refuses a reference, given as this argument, that the loss has no use for."""
    if config.kl == "none":
        raise ValueError(
            f"{op}: {name} must be left out with kl='none', got a tensor; choose a kl, with kl_coef=0 to measure only"
        )


def _normalizers(
    layout: Layout, config: LossConfig, normalizer: Normalizer | None
) -> tuple[list[float], Tensor | None]:
    """Counts of tokens, rows and segments, and a tensor of those that are inf; NaN means to be counted."""
    op = layout.op
    if normalizer is None:
        return [math.nan] * len(_COUNTED), None
    if not isinstance(normalizer, Mapping):
        normalizer = {_unit(config): normalizer}
    counts: dict[str, float | Tensor] = dict.fromkeys(_COUNTED, math.nan)
    for name, value in normalizer.items():
        if name not in _COUNTED:
            hint = checks.nearest(name, _COUNTED)
            raise ValueError(f"{op}: normalizer must be for one of {', '.join(_COUNTED)}, got {name!r}{hint}")
        counts[name] = _check_count(layout, value)
    tensors = [count for count in counts.values() if isinstance(count, Tensor)]
    numbers = [math.inf if isinstance(count, Tensor) else count for count in counts.values()]
    return numbers, torch.cat(tensors) if len(tensors) > 1 else next(iter(tensors), None)


def _check_count(layout: Layout, value: float | Tensor) -> float | Tensor:
    """A divisor, as a float or a float64 [1] on the device."""
    op = layout.op
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{op}: normalizer must have one element, got shape {list(value.shape)}")
        checks.same_device(op, "normalizer", value, layout.device)  # a copy from the host would wait
        checks.constant(op, "normalizer", value)
        return value.detach().double().reshape(1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{op}: normalizer must be a positive number, got {value!r}")
    return float(value)


def needs_entropy_gradient(entropy: Tensor | None, config: LossConfig) -> bool:
    return entropy is not None and entropy.requires_grad and config.entropy_coef != 0
