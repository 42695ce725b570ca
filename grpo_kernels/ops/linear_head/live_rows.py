"""Registers the two products of a gradient by logits that leave out rows of zeros.

Rows without a gradient are idle: their advantage is 0, or they are clipped or masked, which usually befalls whole
sequences. The GPU finds them itself, as telling the host would make it wait. Rows are left out in blocks of 64, and a
block is multiplied if any of its rows is live.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import registry

_HALVES = (torch.bfloat16, torch.float16)
SUPPORTS = {"triton": _HALVES}
_TO_HIDDEN_SCHEMA = "(Tensor by_logits, Tensor weight, Tensor is_live, Tensor(a!) out) -> ()"
_TO_WEIGHT_SCHEMA = "(Tensor by_logits, Tensor hidden, Tensor is_live, Tensor(a!) total, bool add) -> ()"


def _fake_to_hidden(by_logits: Tensor, weight: Tensor, is_live: Tensor, out: Tensor) -> None:
    return None


def _fake_to_weight(by_logits: Tensor, hidden: Tensor, is_live: Tensor, total: Tensor, add: bool) -> None:
    return None


_TO_HIDDEN = registry.define(
    "live_rows_to_hidden", _TO_HIDDEN_SCHEMA, SUPPORTS, _fake_to_hidden, folder=__package__, function="to_hidden"
)
_TO_WEIGHT = registry.define(
    "live_rows_to_weight", _TO_WEIGHT_SCHEMA, SUPPORTS, _fake_to_weight, folder=__package__, function="to_weight"
)


def to_hidden(by_logits: Tensor, weight: Tensor, is_live: Tensor, out: Tensor) -> None:
    """Writes ``by_logits @ weight`` to live rows of ``out`` and zeros to the others.

    Idle rows of ``by_logits`` are not read. The product is summed in float32 and rounded once.

    Args:
        by_logits: Gradient by logits [R, V], bfloat16 or float16; its rows may be any number of elements apart.
        weight: Weight of the head [V, H], contiguous, of the same dtype.
        is_live: Which rows have a gradient [R], bool.
        out: Gradient by hidden states [R, H], contiguous, float32 or the dtype of ``by_logits``.
    """
    _check("to_hidden", by_logits, is_live, {"weight": weight}, {"out": out})
    _TO_HIDDEN["triton"](by_logits, weight, is_live, out)


def to_weight(by_logits: Tensor, hidden: Tensor, is_live: Tensor, total: Tensor, add: bool) -> None:
    """Writes ``by_logits.t() @ hidden`` over live rows to ``total``, or adds it.

    Blocks of 64 rows without a live row are not read. Other idle rows must be 0 in ``by_logits`` and finite in
    ``hidden``. The product, and ``total`` if it is added to, are summed in float32 and rounded once.

    Args:
        by_logits: Gradient by logits [R, V], bfloat16 or float16; its rows may be any number of elements apart.
        hidden: Hidden states [R, H], contiguous, of the same dtype.
        is_live: Which rows have a gradient [R], bool.
        total: Gradient by the weight [V, H], contiguous, float32 or the dtype of ``by_logits``.
        add: Add to ``total`` instead of overwriting it.
    """
    _check("to_weight", by_logits, is_live, {"hidden": hidden}, {"total": total})
    _TO_WEIGHT["triton"](by_logits, hidden, is_live, total, add)


def _check(op: str, by_logits: Tensor, is_live: Tensor, factor: dict[str, Tensor], result: dict[str, Tensor]) -> None:
    """Rejects shapes, layouts and dtypes that the kernels would misread."""
    dtype, (rows, columns) = by_logits.dtype, by_logits.shape
    if dtype not in _HALVES or (by_logits.stride(1) != 1 and columns > 1):
        raise ValueError(
            f"{op}: by_logits must be bfloat16 or float16 with contiguous columns, got {dtype} with strides "
            f"{by_logits.stride()}"
        )
    if is_live.dtype != torch.bool or is_live.shape != (rows,) or not is_live.is_contiguous():
        raise ValueError(
            f"{op}: is_live must be contiguous bool [{rows}], got {is_live.dtype} {list(is_live.shape)} with strides "
            f"{is_live.stride()}"
        )
    ((name, values),) = factor.items()
    ((result_name, sums),) = result.items()
    summed, kept = (columns, rows) if op == "to_hidden" else (rows, columns)
    _check_matrix(op, name, values, {dtype}, (summed, None))
    _check_matrix(op, result_name, sums, {dtype, torch.float32}, (kept, values.shape[1]))


def _check_matrix(op: str, name: str, matrix: Tensor, dtypes: set[torch.dtype], shape: tuple[int, int | None]) -> None:
    if matrix.dtype not in dtypes or not matrix.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous and {' or '.join(sorted(map(str, dtypes)))}, got {matrix.dtype} with "
            f"strides {matrix.stride()}"
        )
    sizes = ", ".join("*" if size is None else str(size) for size in shape)
    if matrix.dim() != 2 or any(size not in (None, got) for size, got in zip(shape, matrix.shape, strict=True)):
        raise ValueError(f"{op}: {name} must be [{sizes}], got {list(matrix.shape)}")
