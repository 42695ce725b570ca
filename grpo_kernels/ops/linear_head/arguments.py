"""Checks of the LM head's arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.head import NO_COLUMN, Head, LMHead, Shard, head_of
from grpo_kernels.ops.token_logprobs.arguments import check_scaling, check_targets

FLAGS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
TOKENS = "hidden without its last dimension"


def check_head(op: str, hidden: Any, lm_head: LMHead, targets: Tensor, temperature: float | Tensor) -> Head:
    """The head with its tokens flattened to [N]."""
    hidden = checks.tensor(op, "hidden", checks.local(op, "hidden", hidden), checks.FLOATS)
    width = lm_head.weight.shape[1]
    if hidden.dim() == 0 or hidden.shape[-1] != width:
        raise ValueError(f"{op}: hidden must have shape [..., {width}] for this head, got {list(hidden.shape)}")
    checks.shaped(op, "targets", targets, checks.INTEGERS, hidden.device, hidden.shape[:-1], TOKENS)
    hidden, weight, bias = _of_one_dtype(op, "hidden", "head", hidden, lm_head)
    scaling = check_scaling(op, temperature, None, 1.0, targets, hidden.dtype)
    row_temperature = scaling.row_temperature
    return head_of(
        lm_head,
        hidden.reshape(-1, width),
        weight,
        bias,
        targets=targets.long().reshape(-1).contiguous(),
        row_temperature=None if row_temperature is None else row_temperature.reshape(-1).contiguous(),
        temperature=scaling.temperature,
    )


def _of_one_dtype(op: str, name: str, of: str, hidden: Tensor, lm_head: LMHead) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias, cast to autocast's dtype as by a linear layer; otherwise they must agree."""
    hidden, weight, bias = _autocast(hidden, lm_head.weight, lm_head.bias)
    checks.same_device(op, of, weight, hidden.device)
    if weight.dtype != hidden.dtype:
        raise TypeError(f"{op}: {of} must be of dtype {hidden.dtype} like {name}, got {weight.dtype}")
    return hidden, weight, bias


def check_reference(
    op: str, head: Head, shape: torch.Size, ref_hidden: Any, ref_head: LMHead | Tensor | None, own: LMHead
) -> Head | None:
    """The reference model's head for targets of this shape. Its options are the policy's unless it is an LMHead."""
    if ref_hidden is None:
        if ref_head is not None:
            raise ValueError(f"{op}: ref_head must be None without ref_hidden, got {type(ref_head).__name__}")
        return None
    if ref_head is None:
        lm_head = dataclasses.replace(own, lora=None)
    elif isinstance(ref_head, Tensor):
        lm_head = dataclasses.replace(own, weight=ref_head, bias=None, lora=None)
    else:
        lm_head = LMHead.of(op, "ref_head", ref_head)
    if not has_same_columns(lm_head, own):
        want, got = columns_text(own), columns_text(lm_head)
        raise ValueError(f"{op}: ref_head must have the columns of head, {want}, got {got}")
    return check_other_head(op, ("ref_hidden", "ref_head"), head, shape, ref_hidden, lm_head)


def has_same_columns(head: LMHead, other: LMHead) -> bool:
    return len(head.weight) == len(other.weight) and head.vocab_start == other.vocab_start


def columns_text(head: LMHead) -> str:
    start = "" if head.vocab_start is None else f" from {head.vocab_start}"
    return f"{len(head.weight)}{start}"


def check_other_head(
    op: str, names: tuple[str, str], head: Head, shape: torch.Size, hidden: Any, lm_head: LMHead
) -> Head:
    """Another model's head for the tokens of `head`, of this shape. Its hidden states and factors get no gradient.

    Args:
        names: of the arguments that gave its hidden states and the head
    """
    name, name_of_head = names
    hidden = checks.tensor(op, name, checks.local(op, name, hidden), checks.FLOATS)
    checks.same_device(op, name, hidden, head.hidden.device)
    width = lm_head.weight.shape[1]
    if hidden.shape != (*shape, width):
        default = " (by default head)" if name_of_head == "ref_head" else ""
        raise ValueError(
            f"{op}: {name} must have shape {[*shape, width]}, for targets and {name_of_head}{default}, "
            f"got {list(hidden.shape)}"
        )
    hidden, weight, bias = _of_one_dtype(op, name, name_of_head, hidden, lm_head)
    if weight.dtype != head.hidden.dtype:
        raise TypeError(f"{op}: {name} must be of dtype {head.hidden.dtype} like hidden, got {weight.dtype}")
    other = head_of(
        lm_head,
        hidden.reshape(-1, width),
        weight,
        bias,
        targets=head.targets,
        row_temperature=head.row_temperature,
        temperature=head.temperature,
    )
    return other.with_factors(*(None if factor is None else factor.detach() for factor in other.factors))


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts everything to autocast's dtype, as a linear layer does."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_chunk_size(op: str, chunk_size: object) -> int | None:
    if chunk_size is None:
        return None
    size = checks.integer(op, "chunk_size", chunk_size, "a number of rows")
    if size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, got {size}")
    return size


def check_shard(op: str, lm_head: LMHead, head: Head, backend: str) -> Shard | None:
    """This rank's columns, or None if it holds all of them; then targets must be among them."""
    shard = shard_of(op, lm_head)
    if shard is None:
        check_targets(op, head.targets, len(head.weight), backend)
    return shard


def shard_of(op: str, lm_head: LMHead) -> Shard | None:
    if lm_head.vocab_start is None:
        return None
    return Shard(op, lm_head.process_group, lm_head.vocab_start, len(lm_head.weight))


def ids_of(lm_head: LMHead) -> tuple[int, str]:
    """How many ids there are, of which a rank of a split vocabulary knows no end, and the rule for one."""
    if lm_head.vocab_start is not None:
        return NO_COLUMN, "be at least 0"
    columns = len(lm_head.weight)
    return columns, f"be in [0, {columns})"


def check_banned(op: str, head: Head) -> None:
    """Refuses banned targets of tokens that take part."""
    if head.banned is not None:
        is_wrong = is_banned(head.targets, head.banned)
        checks.values(op, "targets", "not be banned by the head", is_wrong, head.targets)


def is_banned(ids: Tensor, banned: Tensor) -> Tensor:
    """Whether each id is one of the ascending banned ones."""
    place = torch.searchsorted(banned, ids).clamp(max=len(banned) - 1)
    return banned[place] == ids


def check_positions(op: str, positions: object, targets: Tensor) -> Tensor | None:
    """Positions in the flattened targets. Those of a mask are found with one wait for a GPU."""
    if positions is None:
        return None
    positions = checks.tensor(op, "positions", positions, (torch.bool, *checks.INTEGERS))
    checks.same_device(op, "positions", positions, targets.device)
    if positions.dtype == torch.bool:
        checks.shaped(op, "positions", positions, (torch.bool,), targets.device, targets.shape, "targets as a mask")
        return positions.reshape(-1).nonzero().squeeze(1)
    if positions.dim() != 1:
        raise ValueError(f"{op}: positions must be a mask or have shape [P], got {list(positions.shape)}")
    if positions.numel() == 0:
        return positions.long()
    ordered = positions.long().sort().values
    rule = f"{op}: positions must be different places in [0, {targets.numel()})"
    if positions.device.type != "cpu" or torch.compiler.is_compiling():
        differ = (ordered.diff() > 0).all()
        torch._assert_async(differ & (ordered[0] >= 0) & (ordered[-1] < targets.numel()), rule)
    else:
        repeated = int((ordered.diff() == 0).sum())
        if int(ordered[0]) < 0 or int(ordered[-1]) >= targets.numel() or repeated > 0:
            raise ValueError(
                f"{rule}, got values from {int(ordered[0])} to {int(ordered[-1])}, {repeated} of them repeated"
            )
    return positions.long()


def check_weight_grad(op: str, weight_grad: Tensor | None, head: Head, is_added: bool, otherwise: str) -> None:
    """A tensor for the gradient of the weight, which is added to it in the forward pass but `otherwise`."""
    if weight_grad is None:
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: weight_grad must be None under torch.compile, got a tensor")
    dtypes = tuple({head.wide: 0, head.weight.dtype: 0})
    checks.shaped(op, "weight_grad", weight_grad, dtypes, head.hidden.device, head.weight.shape, "the weight")
    if weight_grad.requires_grad or not head.weight.requires_grad:
        got = f"requires_grad={weight_grad.requires_grad} for a weight with requires_grad={head.weight.requires_grad}"
        raise ValueError(f"{op}: weight_grad must be a plain tensor for a weight that requires grad, got {got}")
    if not is_added:
        raise ValueError(f"{op}: weight_grad must be None {otherwise}, got a tensor")
