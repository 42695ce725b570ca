"""Log-probs of chosen tokens from logits, and the entropy of every row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.sampled_support import check_support
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.token_logprobs import registration as op
from grpo_kernels.ops.token_logprobs.config import IGNORED

_OP = "token_logprobs"


class TokenLogprobs(NamedTuple):
    """One entry per target, in float32, or float64 for float64 logits.

    Attributes:
        logprobs: log-prob of the target, never above 0
        entropy: entropy of the row's distribution in nats, never below 0; None unless requested
    """

    logprobs: Tensor
    entropy: Tensor | None


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    support: tuple[Tensor, Tensor] | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> TokenLogprobs:
    """Computes log softmax(softcap(logit_scale * logits) / temperature) at the targets without storing the softmax.

    A logit of -inf is a masked token, with probability 0 whatever the softcap. NaN and +inf make their own row NaN and
    no other. Nothing waits for the GPU: an invalid target is an error on the CPU and gives NaN on a GPU, and so does an
    element of a temperature tensor that is not positive and finite. Only logits have a gradient, and only a first one.

    Args:
        logits: [..., V]; bfloat16, float16, float32, float64 on the CPU; copied unless columns are contiguous
        targets: integers [...]; -100 gives log-prob and entropy 0 and no gradient, and the row is not read
        temperature: positive number, or a tensor with one per target ([...]) or per first dimension ([B], [B, 1])
        softcap: positive number; logits become softcap * tanh(x / softcap). None leaves them unchanged
        logit_scale: positive number
        support: token ids that sampling kept, as integers (token_ids [E], offsets [N + 1]): row i of the N flattened
            targets keeps token_ids[offsets[i]:offsets[i + 1]]. The distribution is that over these ids alone, and the
            gradient of other logits is 0. A target that is not kept is an error, on a GPU when the stream reaches it
        return_entropy: also return the differentiable entropy of every row
        inplace_backward: the backward overwrites the logits with their gradient, which saves their size in memory.
            Nothing else may read them, backward runs once, and torch.compile is not supported
        backend: "kernel" or "reference"; None means the kernel where there is one
    """
    check_logits(_OP, logits, targets)
    scaling = check_scaling(_OP, temperature, softcap, logit_scale, targets, logits.dtype)
    checks.boolean(_OP, return_entropy=return_entropy, inplace_backward=inplace_backward)
    if support is not None:
        return _over_support(logits, targets, scaling, support, return_entropy, inplace_backward, backend)
    if inplace_backward:
        check_overwritable(_OP, "inplace_backward", logits)
    chosen = backends.select(_OP, backend, logits.device.type, logits.dtype, op.SUPPORTS, logits.device.index)
    logprobs, entropy, _ = op.FORWARD[chosen](*rows_of(logits, targets, scaling), return_entropy, inplace_backward)
    return TokenLogprobs(logprobs.view(targets.shape), entropy.view(targets.shape) if return_entropy else None)


def _over_support(
    logits: Tensor,
    targets: Tensor,
    scaling: Scaling,
    support: tuple[Tensor, Tensor],
    return_entropy: bool,
    inplace_backward: bool,
    backend: str | None,
) -> TokenLogprobs:
    if inplace_backward:
        raise ValueError(f"{_OP}: inplace_backward must be False with support, got True")
    entries = check_support(_OP, support, targets.long(), logits.shape[-1])
    supports, device = sampled_support.SUPPORTS, logits.device
    chosen = backends.select(_OP, backend, device.type, logits.dtype, supports, device.index)
    rows = rows_of(logits, targets, scaling)
    logprobs, entropy = sampled_support.apply_logits(chosen, rows, entries, return_entropy)
    return TokenLogprobs(logprobs.view(targets.shape), entropy.view(targets.shape) if return_entropy else None)


def check_logits(op_name: str, logits: Tensor, targets: Tensor) -> None:
    checks.tensor(op_name, "logits", logits, checks.FLOATS)
    checks.tensor(op_name, "targets", targets, checks.INTEGERS)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{op_name}: logits must have shape [..., V] with V > 0, got {list(logits.shape)}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op_name}: targets must have shape {list(logits.shape[:-1])}, one for each row of the logits, "
            f"got {list(targets.shape)}"
        )
    checks.same_device(op_name, "targets", targets, logits.device)


def check_targets(op_name: str, targets: Tensor, columns: int, backend: str) -> None:
    """Checks target values on the CPU, where looking at data costs no wait. A GPU's kernels give NaN for such a row."""
    if targets.device.type != "cpu" or backend not in ("cpu", "reference") or torch.compiler.is_compiling():
        return
    is_wrong = ((targets < 0) | (targets >= columns)) & (targets != IGNORED)
    if bool(is_wrong.any()):
        row = int(is_wrong.int().argmax())
        raise RuntimeError(
            f"{op_name}: targets must be in [0, {columns}) or {IGNORED}, got {int(targets.reshape(-1)[row])} "
            f"in row {row}"
        )


def rows_of(logits: Tensor, targets: Tensor, scaling: Scaling) -> op.Rows:
    """Views logits [..., V], or a slice such as logits[:, :-1], as [A, B, V] with contiguous columns."""
    rows = logits
    if logits.dim() < 3:
        rows = logits[None] if logits.dim() == 2 else logits[None, None]
    rows = rows if rows.dim() == 3 else rows.flatten(0, -3)
    if rows.stride(-1) != 1 and rows.shape[-1] != 1:
        # contiguous() returns a tensor without elements as it is, whatever its strides
        rows = rows.clone(memory_format=torch.contiguous_format)
    shape = rows.shape[:2]
    row_temperature = scaling.row_temperature
    return op.Rows(
        rows,
        targets.long().reshape(shape).contiguous(),
        None if row_temperature is None else row_temperature.reshape(shape).contiguous(),
        *scaling[1:],
    )


class Scaling(NamedTuple):
    """The map from logits to the softmax's argument: softcap(logit_scale * x) / temperature."""

    row_temperature: Tensor | None  # in the shape of the targets; None means the number
    temperature: float
    softcap: float | None
    logit_scale: float


def check_scaling(
    op_name: str,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    targets: Tensor,
    dtype: torch.dtype,
) -> Scaling:
    row_temperature, number = None, 1.0
    if isinstance(temperature, Tensor):
        row_temperature = _row_temperature(op_name, temperature, targets, dtype)
    else:
        number = _positive(op_name, "temperature", temperature)
    cap = None if softcap is None else _positive(op_name, "softcap", softcap)
    return Scaling(row_temperature, number, cap, _positive(op_name, "logit_scale", logit_scale))


def _row_temperature(op_name: str, temperature: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    checks.tensor(op_name, "temperature", temperature, checks.FLOATS)
    checks.same_device(op_name, "temperature", temperature, targets.device)
    checks.constant(op_name, "temperature", temperature)
    shape = targets.shape
    full = temperature
    if full.dim() == 1 and full.shape == shape[:1]:
        full = full.reshape(-1, *(1 for _ in shape[1:]))
    fits = full.dim() == len(shape) and all(a in (1, b) for a, b in zip(full.shape, shape, strict=True))
    if not fits:
        raise ValueError(
            f"{op_name}: temperature must have the shape of the targets, {list(shape)}, or one element for each of the "
            f"first dimension, got {list(temperature.shape)}"
        )
    return full.to(torch.promote_types(dtype, torch.float32)).expand(shape)


def _positive(op_name: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op_name}: {name} must be a number, got {type(value).__name__} {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{op_name}: {name} must be positive and finite, got {value}")
    return float(value)


def check_overwritable(op_name: str, argument: str, logits: Tensor) -> None:
    """Refuses logits that cannot be overwritten with their gradient, which `argument` asks for."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op_name}: {argument} must be False under torch.compile, got True; "
            "a compiled graph cannot know that its input is overwritten"
        )
    if logits.requires_grad and logits.is_leaf:
        raise ValueError(
            f"{op_name}: {argument} must be False for logits that are a leaf, got True; "
            "their values would be lost and their gradient would share their memory"
        )
    if logits.numel() == 0:
        return
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(logits.stride(), logits.shape, strict=True) if n > 1):
        if stride < extent:
            raise ValueError(
                f"{op_name}: logits must not overlap themselves in memory with {argument}=True, "
                f"got strides {list(logits.stride())}"
            )
        extent = stride * (size - 1) + extent
