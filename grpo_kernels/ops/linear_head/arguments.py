"""Checks of the LM head's arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.head import Head, ReferenceHead, Shard
from grpo_kernels.ops.token_logprobs import check_scaling, check_targets


def check_head(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    lora: tuple[Tensor, Tensor, float] | None,
) -> Head:
    """The head with its rows flattened to [N]."""
    hidden, weight, bias = (
        checks.local(op, name, value) for name, value in (("hidden", hidden), ("weight", weight), ("bias", bias))
    )
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    checks.tensor(op, "weight", weight, checks.FLOATS)
    checks.tensor(op, "targets", targets, checks.INTEGERS)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"{op}: hidden must have shape [..., H] with H > 0, got {list(hidden.shape)}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: targets must have the shape of hidden without its last dimension, {list(hidden.shape[:-1])}, "
            f"got {list(targets.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"{op}: weight must have shape [V, {hidden.shape[-1]}] with V > 0, got {list(weight.shape)}")
    if bias is not None:
        checks.tensor(op, "bias", bias, checks.FLOATS)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{op}: bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    hidden, weight, bias = _autocast(hidden, weight, bias)
    for name, value in (("weight", weight), ("bias", bias), ("targets", targets)):
        if value is None:
            continue
        checks.same_device(op, name, value, hidden.device)
        if name != "targets" and value.dtype != hidden.dtype:
            raise TypeError(f"{op}: {name} must be of dtype {hidden.dtype} like hidden, got {value.dtype}")
    lora_a, lora_b, lora_scale = _check_lora(op, lora, hidden, weight)
    scaling = check_scaling(op, temperature, softcap, logit_scale, targets, hidden.dtype)
    row_temperature = scaling.row_temperature
    return Head(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        lora_a,
        lora_b,
        targets.long().reshape(-1).contiguous(),
        None if row_temperature is None else row_temperature.reshape(-1).contiguous(),
        scaling.temperature,
        scaling.softcap,
        scaling.logit_scale,
        lora_scale,
    )


def _check_lora(
    op: str, lora: object, hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, float] | tuple[None, None, float]:
    """A [r, H] and B [V, r] of a low-rank adapter, of hidden's dtype or float32, and its scale."""
    if lora is None:
        return None, None, 1.0
    if not isinstance(lora, (tuple, list)) or len(lora) != 3:
        size = f" of {len(lora)}" if isinstance(lora, (tuple, list)) else ""
        raise TypeError(
            f"{op}: lora must be a tuple of A [r, H], B [V, r] and a scale, got {type(lora).__name__}{size}"
        )
    a, b, scale = (checks.local(op, "lora", value) for value in lora)
    checks.finite(op, "the scale of lora", scale)
    dtypes = (hidden.dtype, torch.promote_types(hidden.dtype, torch.float32))
    for name, value in (("A of lora", a), ("B of lora", b)):
        checks.tensor(op, name, value, dtypes)
        checks.same_device(op, name, value, hidden.device)
    columns, width = weight.shape
    if a.dim() != 2 or a.shape[1] != width or len(a) == 0:
        raise ValueError(f"{op}: A of lora must have shape [r, {width}] with r > 0, got {list(a.shape)}")
    if b.shape != (columns, len(a)):
        raise ValueError(f"{op}: B of lora must have shape {[columns, len(a)]}, got {list(b.shape)}")
    if a.dtype != b.dtype:
        raise TypeError(f"{op}: B of lora must be of dtype {a.dtype} like A, got {b.dtype}")
    return a, b, float(scale)


def check_reference(
    op: str,
    head: Head,
    shape: torch.Size,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
) -> ReferenceHead:
    """The reference model's head for targets of this shape; the policy's own weight and bias if it has none."""
    if ref_hidden is None:
        for name, value in (("ref_weight", ref_weight), ("ref_bias", ref_bias)):
            if value is not None:
                raise ValueError(f"{op}: {name} must be None without ref_hidden, got a tensor")
        return ReferenceHead()
    if ref_weight is None:
        if ref_bias is not None:
            raise ValueError(f"{op}: ref_bias must be None without ref_weight, got a tensor; both come from the policy")
        ref_weight, ref_bias = head.weight.detach(), head.bias
    ref_hidden = checks.local(op, "ref_hidden", ref_hidden)
    ref_weight, ref_bias = checks.local(op, "ref_weight", ref_weight), checks.local(op, "ref_bias", ref_bias)
    checks.tensor(op, "ref_hidden", ref_hidden, checks.FLOATS)
    checks.tensor(op, "ref_weight", ref_weight, checks.FLOATS)
    columns, width = len(head.weight), ref_weight.shape[-1]
    if ref_weight.dim() != 2 or len(ref_weight) != columns:
        raise ValueError(
            f"{op}: ref_weight must have shape [{columns}, H], a row for each of weight, got {list(ref_weight.shape)}"
        )
    if ref_hidden.shape != (*shape, width):
        raise ValueError(
            f"{op}: ref_hidden must have shape {[*shape, width]}, for targets and ref_weight (by default weight), "
            f"got {list(ref_hidden.shape)}"
        )
    if ref_bias is not None:
        checks.tensor(op, "ref_bias", ref_bias, checks.FLOATS)
        if ref_bias.shape != (columns,):
            raise ValueError(f"{op}: ref_bias must have shape {[columns]}, got {list(ref_bias.shape)}")
    ref_hidden, ref_weight, ref_bias = _autocast(ref_hidden, ref_weight, ref_bias)
    for name, value in (("ref_hidden", ref_hidden), ("ref_weight", ref_weight), ("ref_bias", ref_bias)):
        if value is None:
            continue
        checks.same_device(op, name, value, head.hidden.device)
        if value.dtype != head.hidden.dtype:
            raise TypeError(f"{op}: {name} must be of dtype {head.hidden.dtype} like hidden, got {value.dtype}")
    bias = None if ref_bias is None else ref_bias.detach()
    return ReferenceHead(ref_hidden.detach().reshape(-1, width), ref_weight.detach(), bias)


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


def check_shard(op: str, start: int | None, group: Any, head: Head, backend: str) -> Shard | None:
    """This rank's columns, or None if it holds all of them; then targets must be among them."""
    if start is None:
        if group is not None:
            raise ValueError(f"{op}: vocab_start must be given with process_group, got None")
        check_targets(op, head.targets, len(head.weight), backend)
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: vocab_start must be None under torch.compile, got {start}")
    checks.integer(op, "vocab_start", start)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{op}: vocab_start must be None unless torch.distributed is initialised, as the columns are those of one "
            f"of its ranks, got {start!r}"
        )
    return Shard(group, start, len(head.weight))


def check_positions(op: str, positions: object, targets: Tensor) -> Tensor | None:
    """Positions in the flattened targets. Those of a mask are found with one wait for a GPU."""
    if positions is None:
        return None
    positions = checks.tensor(op, "positions", positions, (torch.bool, *checks.INTEGERS))
    checks.same_device(op, "positions", positions, targets.device)
    if positions.dtype == torch.bool:
        if positions.shape != targets.shape:
            raise ValueError(
                f"{op}: positions must, as a mask, have the shape of targets, {list(targets.shape)}, "
                f"got {list(positions.shape)}"
            )
        return positions.reshape(-1).nonzero().squeeze(1)
    if positions.dim() != 1:
        raise ValueError(f"{op}: positions must be a mask or have shape [P], got {list(positions.shape)}")
    if positions.device.type == "cpu" and positions.numel() > 0 and not torch.compiler.is_compiling():
        ordered = positions.long().sort().values
        repeated = int((ordered.diff() == 0).sum())
        if int(ordered[0]) < 0 or int(ordered[-1]) >= targets.numel() or repeated > 0:
            raise ValueError(
                f"{op}: positions must be different places in [0, {targets.numel()}), got values from "
                f"{int(ordered[0])} to {int(ordered[-1])}, {repeated} of them repeated"
            )
    return positions.long()


def check_weight_grad(op: str, weight_grad: Tensor | None, head: Head, is_added: bool, otherwise: str) -> None:
    """A tensor for the gradient of the weight, which is added to it in the forward pass but `otherwise`."""
    if weight_grad is None:
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: weight_grad must be None under torch.compile, got a tensor")
    checks.tensor(op, "weight_grad", weight_grad, tuple({head.wide: 0, head.weight.dtype: 0}))
    checks.same_device(op, "weight_grad", weight_grad, head.hidden.device)
    if weight_grad.shape != head.weight.shape:
        raise ValueError(
            f"{op}: weight_grad must have the shape of weight, {list(head.weight.shape)}, got {list(weight_grad.shape)}"
        )
    if weight_grad.requires_grad or not head.weight.requires_grad:
        got = f"requires_grad={weight_grad.requires_grad} for a weight with requires_grad={head.weight.requires_grad}"
        raise ValueError(f"{op}: weight_grad must be a plain tensor for a weight that requires grad, got {got}")
    if not is_added:
        raise ValueError(f"{op}: weight_grad must be None {otherwise}, got a tensor")


def check_whole(op: str, **arguments: object) -> None:
    """Refuses arguments that divide the work of a head, which computes all rows at once over a support."""
    for name, value in arguments.items():
        if value is not None:
            got = type(value).__name__ if isinstance(value, tuple) else repr(value)  # not all elements of an adapter
            raise ValueError(f"{op}: {name} must be None with support, got {got}; only kept columns are computed")
