"""Checks the arguments of a policy loss and brings its tensors to one dtype and memory layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import RowGroups
from grpo_kernels.ops.policy_loss.config import (
    CROSS_ENTROPY,
    GROUP_LOSSES,
    KINDS,
    POLICY,
    POLICY_CROSS_ENTROPY,
    SELECTED,
    LossConfig,
)
from grpo_kernels.ops.policy_loss.registration import Policy
from grpo_kernels.ops.token_logprobs.config import IGNORED

_NUMBERS = checks.INTEGERS + checks.FLOATS
_COUNTED = ("tokens", "rows", "segments", "cross_entropy")
# Divisor of the means of each aggregation; sums and local means do not read a normalizer.
_UNITS = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "rows",
    "seq-mean-token-sum": "rows",
    "seq-mean-token-sum-norm": "rows",
}


class RowInputs(NamedTuple):
    """Arguments of the losses of whole rows: their groups, log_z [B] in float64, and the divisor of their mean."""

    groups: RowGroups | None = None
    log_z: Tensor | None = None
    normalizer: float | Tensor | None = None


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
        self.cu_seqlens = cu_seqlens
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
        checks.tensor(self.op, name, value, dtypes)
        checks.same_device(self.op, name, value, self.device)
        if value.shape != self.shape:
            raise ValueError(
                f"{self.op}: {name} must have the shape of {self.name}, {list(self.shape)}, got {list(value.shape)}"
            )
        return value.contiguous()

    def floats(self, name: str, value: Tensor | None, detach: bool = True) -> Tensor | None:
        value = self.per_token(name, value, checks.FLOATS)
        return None if value is None else self.number(value, detach)

    def flags(self, name: str, value: Tensor | None) -> Tensor | None:
        value = self.per_token(name, value, (torch.bool, *_NUMBERS))
        return value if value is None or value.dtype == torch.bool else value != 0

    def scalar(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        checks.tensor(self.op, name, value, checks.FLOATS)
        checks.same_device(self.op, name, value, self.device)
        if value.numel() != 1:
            raise ValueError(f"{self.op}: {name} must have one element, got shape {list(value.shape)}")
        return self.number(value.reshape(()), detach=True)

    def per_row_or_token(self, name: str, value: Tensor, is_of_rows: bool = False) -> Tensor:
        checks.tensor(self.op, name, value, checks.FLOATS)
        checks.same_device(self.op, name, value, self.device)
        if value.shape != self.shape:
            if tuple(value.shape) not in ((self.rows,), (self.rows, 1)):
                raise ValueError(
                    f"{self.op}: {name} must have one value per row, {[self.rows]}, or per token, "
                    f"{list(self.shape)}, got {list(value.shape)}"
                )
            value = value.reshape(-1)
            if self.is_ambiguous and not is_of_rows:
                value = spread_packed(value, cast(Tensor, self.cu_seqlens), self.shape[0])
        checks.constant(self.op, name, value)
        return self.number(value, detach=True)


def check_policy(
    layout: Layout,
    config: LossConfig,
    *,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Tensor | None,
    kinds: Tensor | None,
    ref_logprobs: Tensor | None,
    sampling_logprobs: Tensor | None,
    is_weights: Tensor | None,
    weights: Tensor | None,
    normalizer: Normalizer | None,
) -> Policy:
    """Everything but log-probs and entropies, as the op takes it."""
    segments = layout.per_token("segments", segments, checks.INTEGERS)
    kinds = layout.per_token("kinds", kinds, checks.INTEGERS)
    weights = layout.per_token("weights", weights, _NUMBERS)
    if weights is not None:
        checks.constant(layout.op, "weights", weights)
    counts, normalizers = _normalizers(layout, config, normalizer)
    policy = Policy(
        old_logprobs=layout.floats("old_logprobs", old_logprobs),
        advantages=layout.per_row_or_token("advantages", advantages, config.is_of_sequences),
        mask=layout.flags("mask", mask),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long().contiguous(),
        segments=None if segments is None else segments.int(),
        kinds=None if kinds is None else kinds.to(torch.int8),
        ref_logprobs=layout.floats("ref_logprobs", ref_logprobs),
        sampling_logprobs=layout.floats("sampling_logprobs", sampling_logprobs),
        is_weights=None
        if is_weights is None
        else layout.per_row_or_token("is_weights", is_weights, config.is_of_sequences),
        weights=None if weights is None else layout.number(weights, detach=True),
        normalizers=normalizers,
        counts=counts,
        modes=config.modes,
        coefficients=config.coefficients,
    )
    _check_required(layout, config, policy, normalizer)
    if kinds is not None:
        counted = counted_tokens(policy, kinds)
        _check_kinds(layout, kinds, counted)
        if config.cross_entropy_aggregation is not None:
            policy = policy._replace(normalizers=_with_cross_entropy(policy, counted))
    return policy


def check_rows(
    layout: Layout,
    config: LossConfig,
    policy: Policy,
    *,
    groups: int | Tensor | None,
    log_z: Tensor | None,
    normalizer: Normalizer | None,
) -> RowInputs:
    """The arguments that belong to losses of whole rows, which the others refuse."""
    for name, value, losses in (("groups", groups, GROUP_LOSSES), ("log_z", log_z, ("flowrl",))):
        if (config.loss in losses) != (value is not None):
            rule = f"given for loss={config.loss!r}, got None"
            if value is not None:
                got = "a tensor" if isinstance(value, Tensor) else repr(value)
                rule = f"left out unless loss is {' or '.join(losses)}, got {got} with loss={config.loss!r}"
            raise ValueError(f"{layout.op}: {name} must be {rule}")
    if not config.is_of_sequences:
        return RowInputs()
    if log_z is not None:
        checks.tensor(layout.op, "log_z", log_z, checks.FLOATS)
        checks.same_device(layout.op, "log_z", log_z, layout.device)
        if tuple(log_z.shape) not in ((layout.rows,), (layout.rows, 1)):
            raise ValueError(f"{layout.op}: log_z must have shape {[layout.rows]}, got {list(log_z.shape)}")
        log_z = log_z.reshape(-1).double()
    count = normalizer.get(_unit(config)) if isinstance(normalizer, Mapping) else normalizer
    return RowInputs(
        None if groups is None else RowGroups.of(layout.op, groups, policy.advantages),
        log_z,
        None if count is None else _check_count(layout, count),
    )


def _unit(config: LossConfig) -> str:
    """The unit that the mean of the policy terms is over."""
    if config.is_of_sequences:
        return "groups" if config.loss in GROUP_LOSSES else "rows"
    if config.aggregation == "token-mean" and config.ratio.startswith("segment"):
        return "segments"
    return _UNITS.get(config.aggregation, "tokens")


def check_units(
    layout: Layout, config: LossConfig, policy: Policy, normalizer: Normalizer | None, has_entropy: bool
) -> None:
    """Refuses a normalizer without a unit that is read, which would be counted here alone: micro-batches and ranks
    would then add up to something else than the whole batch."""
    if normalizer is None:
        return
    units = _units_read(config, policy, has_entropy)
    if isinstance(normalizer, Mapping):
        for unit, setting in units.items():
            if unit not in normalizer:
                rule = f"normalizer must have {unit!r}, the unit of {setting}"
                raise ValueError(f"{layout.op}: {rule}, got {normalizer!r}")
    elif units.keys() - {_unit(config)}:
        named = " and ".join(f"{unit!r} for {setting}" for unit, setting in units.items())
        raise ValueError(f"{layout.op}: normalizer must be a dict with {named}, got {normalizer!r}")


def _units_read(config: LossConfig, policy: Policy, has_entropy: bool) -> dict[str, str]:
    """The units whose number divides a term of the loss, each with the first setting that reads it."""
    units: dict[str, str] = {}

    def read(field: str) -> None:
        aggregation = getattr(config, field) or config.aggregation
        if aggregation in _UNITS:
            units.setdefault(_UNITS[aggregation], f"{field}={aggregation!r}")

    if config.is_of_sequences:
        units[_unit(config)] = f"loss={config.loss!r}"
    elif config.aggregation in _UNITS:
        units[_unit(config)] = f"aggregation={config.aggregation!r}"
    if policy.ref_logprobs is not None and config.kl != "none":
        read("kl_aggregation")
    if has_entropy:
        read("entropy_aggregation")
    if policy.kinds is not None and config.cross_entropy_aggregation is not None:
        units["cross_entropy"] = f"cross_entropy_aggregation={config.cross_entropy_aggregation!r}"
    return units


def _with_cross_entropy(policy: Policy, counted: Tensor) -> Tensor:
    """The normalizers with the number of tokens that have a cross-entropy, unless the caller gave it."""
    assert policy.kinds is not None
    is_imitated = (policy.kinds == CROSS_ENTROPY) | (policy.kinds == POLICY_CROSS_ENTROPY)
    here = (counted & is_imitated).sum().double().clamp(min=1)
    known = here.new_full((len(_COUNTED),), math.nan) if policy.normalizers is None else policy.normalizers
    return torch.cat([known[:-1], torch.where(known[-1:].isnan(), here, known[-1:])])


def _check_kinds(layout: Layout, kinds: Tensor, counted: Tensor) -> None:
    """Checks the codes of the tokens that count: at once on the CPU, and by an assertion without a wait on a GPU."""
    is_eager = layout.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_eager and (kinds.numel() == 0 or _are_within(kinds, 0, SELECTED - 1)):
        return  # in one pass over the codes alone, an eighth of the loss itself instead of all of it
    is_wrong = counted & ((kinds < 0) | (kinds >= SELECTED))
    rule = f"{layout.op}: kinds must be 0 to {SELECTED - 1} ({', '.join(KINDS[:SELECTED])})"
    if not is_eager:
        torch._assert_async(~is_wrong.any(), rule)
    elif bool(is_wrong.any()):
        token = int(is_wrong.reshape(-1).int().argmax())
        raise ValueError(f"{rule}, got {int(kinds.reshape(-1)[token])} at token {token}")


def _are_within(values: Tensor, low: int, high: int) -> bool:
    least, largest = values.aminmax()
    return low <= int(least) and int(largest) <= high


def counted_tokens(policy: Policy, like: Tensor) -> Tensor:
    """Tokens that count, whatever their kind."""
    counted = torch.ones_like(like, dtype=torch.bool) if policy.mask is None else policy.mask
    if policy.segments is not None:
        counted = counted & (policy.segments >= 0)
    if policy.cu_seqlens is not None:
        counted = counted & (torch.arange(len(like), device=like.device) < policy.cu_seqlens[-1])
    return counted


def policy_tokens(policy: Policy, like: Tensor) -> Tensor | None:
    """Tokens with a policy term, in rows or behind the last of them; None means all."""
    if policy.segments is None and policy.kinds is None:
        return policy.mask
    counted = counted_tokens(policy, like)
    if policy.kinds is not None:
        counted = counted & ((policy.kinds == POLICY) | (policy.kinds == POLICY_CROSS_ENTROPY))
    return counted.contiguous()


def spread_rows(values: Tensor, policy: Policy, like: Tensor) -> Tensor:
    """One value per token of values that are one per row or token; 0 for tokens behind the last row."""
    if values.shape == like.shape:
        return values
    if policy.cu_seqlens is None:
        return values[:, None].expand(like.shape)
    return spread_packed(values, policy.cu_seqlens, len(like))


def spread_packed(values: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """A value for each token from one for each row; 0 for tokens behind the last row."""
    token = torch.arange(tokens, device=values.device)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(cu_seqlens.dtype), right=True)
    return torch.cat([values, values.new_zeros(1)])[row.clamp(max=len(values))]


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
    if cu_seqlens is not None:
        takes_part = takes_part & (torch.arange(len(targets), device=targets.device) < cu_seqlens[-1])
    if segments is not None:
        checks.tensor(op, "segments", segments, checks.INTEGERS)
        checks.same_device(op, "segments", segments, targets.device)
        if segments.shape == targets.shape:
            takes_part = takes_part & (segments >= 0)
    if mask is not None:
        checks.tensor(op, "mask", mask, (torch.bool, *_NUMBERS))
        checks.same_device(op, "mask", mask, targets.device)
        if mask.shape != targets.shape:
            raise ValueError(f"{op}: mask must have the shape of {name}, {list(targets.shape)}, got {list(mask.shape)}")
        takes_part = takes_part & (mask != 0)
    return takes_part


def check_entropy(
    layout: Layout, config: LossConfig, has_entropy: bool, entropy_floor: Tensor | None = None
) -> Tensor | None:
    """Requires what the entropy terms of the config need; returns the floor as the op takes it."""
    if (config.entropy_coef != 0 or config.top_entropy_quantile < 1) and not has_entropy:
        fields = f"entropy_coef={config.entropy_coef}, top_entropy_quantile={config.top_entropy_quantile}"
        raise ValueError(f"{layout.op}: entropy must be given for {fields}, got None")
    floor = layout.scalar("entropy_floor", entropy_floor)
    if floor is not None and config.top_entropy_quantile >= 1:
        raise ValueError(
            f"{layout.op}: entropy_floor must be left out with top_entropy_quantile=1, which keeps all tokens, "
            "got a tensor"
        )
    return floor


def _check_required(layout: Layout, config: LossConfig, policy: Policy, normalizer: Normalizer | None) -> None:
    def refuse(name: str, rule: str, got: object) -> None:
        raise ValueError(f"{layout.op}: {name} must be {rule}, got {got}")

    if config.ratio.startswith("segment") and policy.segments is None:
        refuse("segments", f"given for ratio={config.ratio!r}", None)
    if policy.kinds is not None and (config.ratio.startswith("segment") or config.loss == "geo_mean"):
        fields = f"ratio={config.ratio!r}, loss={config.loss!r}"
        refuse("kinds", "left out where terms are segments or rows", f"a tensor with {fields}")
    if config.kl_coef != 0 and policy.ref_logprobs is None:
        refuse("ref_logprobs", f"given for kl_coef={config.kl_coef}", None)
    _check_sequences(layout, config, policy, refuse)
    if policy.ref_logprobs is not None:
        check_reads_reference(layout.op, "ref_logprobs", config)
    if config.correction != "none" and policy.sampling_logprobs is None:
        refuse("sampling_logprobs", f"given for correction={config.correction!r}", None)
    weights = policy.is_weights
    shape = None if weights is None else f"a tensor of shape {list(weights.shape)}"
    if config.correction != "none" and weights is not None:
        refuse("is_weights", f"left out with correction={config.correction!r}", shape)
    if weights is not None and weights.shape != layout.shape and config.loss == "vespo":
        refuse("is_weights", "one per token for loss='vespo'", shape)
    if normalizer is None:
        return
    if policy.weights is not None:
        refuse("normalizer", "left out with weights, which are what the terms are multiplied by", normalizer)
    if config.aggregation == "token-sum" and not isinstance(normalizer, Mapping) and not config.is_of_sequences:
        refuse("normalizer", "left out with aggregation='token-sum', which divides by nothing", normalizer)


def check_reads_reference(op: str, name: str, config: LossConfig) -> None:
    """Refuses a reference, given as this argument, that the loss has no use for."""
    if config.kl == "none" and config.loss not in ("gvpo", "flowrl"):
        raise ValueError(
            f"{op}: {name} must be left out with kl='none', got a tensor; choose a kl, with kl_coef=0 to measure only"
        )


def _check_sequences(layout: Layout, config: LossConfig, policy: Policy, refuse: Callable[..., None]) -> None:
    if not config.is_of_sequences:
        return
    loss, weights = f"loss={config.loss!r}", policy.is_weights
    if policy.advantages.shape == layout.shape and not layout.is_ambiguous:
        refuse("advantages", f"one per row, {[layout.rows]}, for {loss}", f"shape {list(layout.shape)}")
    if policy.weights is not None:
        refuse("weights", f"left out for {loss}, which is a mean of its own", "a tensor")
    if policy.kinds is not None and config.cross_entropy_aggregation is None:
        refuse("kinds", f"left out for {loss} unless cross_entropy_aggregation is 'token-mean'", "a tensor")
    if config.loss == "flowrl" and policy.ref_logprobs is None:
        refuse("ref_logprobs", f"given for {loss}", None)
    if weights is not None and (config.loss != "flowrl" or weights.shape != (layout.rows,)):
        rule = "one per row" if config.loss == "flowrl" else "left out"
        refuse("is_weights", f"{rule} for {loss}", f"a tensor of shape {list(weights.shape)}")


def _normalizers(
    layout: Layout, config: LossConfig, normalizer: Normalizer | None
) -> tuple[list[float], Tensor | None]:
    """Counts of tokens, rows and segments: numbers, and a tensor if any count is one; NaN means to be counted."""
    op = layout.op
    if normalizer is None:
        return [math.nan] * (len(_COUNTED) - 1), None
    if not isinstance(normalizer, Mapping):
        normalizer = {_unit(config): normalizer}
    if config.loss in GROUP_LOSSES:  # check_rows reads their own unit
        normalizer = {name: count for name, count in normalizer.items() if name != "groups"}
    numbers: dict[str, float] = dict.fromkeys(_COUNTED, math.nan)
    tensors: dict[str, Tensor] = {}
    for name, value in normalizer.items():
        if name not in _COUNTED:
            hint = checks.nearest(name, _COUNTED)
            raise ValueError(f"{op}: normalizer must be for one of {', '.join(_COUNTED)}, got {name!r}{hint}")
        count = _check_count(layout, value)
        if isinstance(count, Tensor):
            tensors[name] = count
        else:
            numbers[name] = count
    if "cross_entropy" in normalizer and config.cross_entropy_aggregation is None:
        raise ValueError(
            f"{op}: normalizer must be without 'cross_entropy' for cross_entropy_aggregation=None, got {normalizer!r}"
        )
    cross_entropy = numbers.pop("cross_entropy")
    if not math.isnan(cross_entropy):
        tensors["cross_entropy"] = torch.full((), cross_entropy, dtype=torch.float64, device=layout.device)
    if not tensors:
        return list(numbers.values()), None
    unknown = torch.full((), math.nan, dtype=torch.float64, device=layout.device)
    return list(numbers.values()), torch.stack([tensors.get(name, unknown) for name in _COUNTED])


def _check_count(layout: Layout, value: float | Tensor) -> float | Tensor:
    """A divisor, as a float or a float64 scalar on the device."""
    op = layout.op
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{op}: normalizer must have one element, got shape {list(value.shape)}")
        checks.same_device(op, "normalizer", value, layout.device)  # a copy from the host would wait
        checks.constant(op, "normalizer", value)
        count = value.detach().double().reshape(())
        # a count from elsewhere can be 0, which counts as 1, as in TRL
        return torch.where(count > 0, count, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{op}: normalizer must be a positive number, got {value!r}")
    return float(value)


def find_entropy_floor(entropy: Tensor, policy: Policy, quantile: float) -> Tensor:
    """The entropy reached by the top `quantile` of tokens, as torch.quantile, which refuses more than 2^24 values."""
    valid = counted_tokens(policy, entropy)
    if policy.kinds is not None:
        valid = valid & ((policy.kinds == POLICY) | (policy.kinds == POLICY_CROSS_ENTROPY))
    ordered = torch.where(valid, entropy.detach(), math.inf).flatten().sort().values
    if ordered.numel() == 0:
        return entropy.new_zeros(())
    # as torch.quantile does: the rank in float64, then interpolation between its two neighbours
    rank = (valid.sum() - 1).clamp(min=0) * torch.full((), 1 - quantile, dtype=torch.float64, device=entropy.device)
    # an index of no dimensions, also of take, would be a number that torch.compile cannot know
    below, above = ordered.index_select(0, torch.stack((rank.floor(), rank.ceil())).long()).unbind()
    return torch.lerp(below, above, (rank - rank.floor()).to(entropy.dtype))


def needs_entropy_gradient(entropy: Tensor | None, config: LossConfig) -> bool:
    return entropy is not None and entropy.requires_grad and config.entropy_coef != 0
