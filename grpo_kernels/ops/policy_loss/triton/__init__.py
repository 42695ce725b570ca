"""policy_loss in Triton: counts and ratios of rows, totals, one pass over the tokens, sums in a fixed order.

Rows are cut into parts from their own start, so that neither padding nor packing changes the order of a sum. Settings
that select a formula are compiled in, numbers are arguments. Grids follow from shapes alone, so nothing is copied to
the host.
"""

from typing import Any, Optional

import torch
import triton
from torch import Tensor

from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.policy_loss.config import (
    AVERAGE,
    CISPO,
    GEO_MEAN,
    GEOMETRIC_AVERAGE,
    SEGMENT,
    SEGMENT_MEAN,
    SEQUENCE,
    SEQUENCE_TRUNCATE,
    TOPR,
    Plan,
)
from grpo_kernels.ops.policy_loss.triton import ratio_gradients
from grpo_kernels.ops.policy_loss.triton import rows as of_rows
from grpo_kernels.ops.policy_loss.triton import sums as sums
from grpo_kernels.ops.policy_loss.triton import tokens as of_tokens
from grpo_kernels.ops.policy_loss.triton.scale import scale_gradient as scale_gradient

_PART = 1024  # tokens of a row that one program takes
_BLOCK = 1024
_ROW_BLOCK = 256  # rows
_TILE = 64  # tokens that are compared with each other, to find their segments
_ROWS_PER_BLOCK = 4
_MAX_BLOCKS = 1024
_BLOCKS = 32

# Kernel arguments from the plan: its modes, compiled in and therefore in capitals, and its numbers.
_FIRST_NUMBER = Plan._fields.index("low")
_MODES = tuple(name.upper() for name in Plan._fields[:_FIRST_NUMBER])
_NUMBERS = Plan._fields[_FIRST_NUMBER:]


def _launch(kernel: Any, programs: int, *arguments: dict[str, Any]) -> None:
    """Launches a kernel with the arguments that it has."""
    if programs > 0:
        known = {name: value for group in arguments for name, value in group.items()}
        kernel[(programs,)](
            **{name: known[name] for name in kernel.arg_names}, num_warps=_warps(kernel, known["RATIO"])
        )


def _warps(kernel: Any, ratio: int) -> int:
    """More warps for kernels with much state per token, which would spill with many tokens per thread."""
    if kernel is of_tokens.tokens_kernel:
        return 8
    if kernel is of_rows.rows_kernel and _is_of_segments(ratio):
        return 16
    return 2 if kernel is sums.gather_kernel else 4


def forward(
    logprobs: Tensor,
    entropy: Optional[Tensor],
    entropy_floor: Optional[Tensor],
    old_logprobs: Optional[Tensor],
    advantages: Tensor,
    mask: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    segments: Optional[Tensor],
    kinds: Optional[Tensor],
    ref_logprobs: Optional[Tensor],
    sampling_logprobs: Optional[Tensor],
    is_weights: Optional[Tensor],
    weights: Optional[Tensor],
    normalizers: Optional[Tensor],
    counts: list[float],
    modes: list[int],
    coefficients: list[float],
    needs_entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = logprobs.numel()
    rows, width = logprobs.shape if cu_seqlens is None else (cu_seqlens.numel() - 1, 0)
    if cu_seqlens is not None:
        cu_seqlens = packed_bounds("policy_loss", cu_seqlens, tokens)
    plan = _plan(modes, coefficients)
    plan |= {
        "ADVANTAGE_BY_ROW": advantages.shape != logprobs.shape,
        "IS_WEIGHTS_BY_ROW": is_weights is not None and is_weights.shape != logprobs.shape,
        "PART": _PART,
        "BLOCK": _BLOCK,
        "ROW_BLOCK": _ROW_BLOCK,
        "TILE": _TILE,
    }
    inputs = {
        "logprobs_ptr": logprobs,
        "old_ptr": old_logprobs,
        "advantages_ptr": advantages,
        "mask_ptr": mask,
        "cu_seqlens_ptr": cu_seqlens,
        "segments_ptr": segments,
        "kinds_ptr": kinds,
        "ref_ptr": ref_logprobs,
        "sampling_ptr": sampling_logprobs,
        "is_weights_ptr": is_weights,
        "entropy_ptr": entropy,
        "floor_ptr": entropy_floor,
        "weights_ptr": weights,
        "normalizers_ptr": normalizers,
        "rows": rows,
        "width": width,
        "tokens": tokens,
        # upper bound of the parts of packed rows and the tokens behind them, see first_part
        "chunks": triton.cdiv(width, _PART),
        "parts": rows * triton.cdiv(width, _PART) if cu_seqlens is None else triton.cdiv(tokens, _PART) + rows,
        "steps": rows.bit_length(),
    }
    inputs |= dict(zip(("known_tokens", "known_rows", "known_segments"), counts, strict=True))
    return _run(logprobs, plan, inputs, needs_entropy_gradient)


def _is_of_segments(ratio: int) -> bool:
    return ratio in (SEGMENT, SEGMENT_MEAN)


def _plan(modes: list[int], coefficients: list[float]) -> dict[str, Any]:
    plan = dict(zip(_MODES, modes, strict=True)) | dict(zip(_NUMBERS, coefficients, strict=True))
    for rate in ("lambda_pos", "lambda_neg"):
        plan[rate] = max(plan[rate], 1e-4)
    return plan | {"OFF_POLICY": plan["off_policy_threshold"] < float("inf")}


def _run(
    logprobs: Tensor, plan: dict[str, Any], inputs: dict[str, Any], needs_entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, tokens, parts = inputs["rows"], inputs["tokens"], inputs["parts"]
    by_segment = _is_of_segments(plan["RATIO"])
    through_row = plan["RATIO"] in (SEQUENCE, AVERAGE, GEOMETRIC_AVERAGE) or plan["LOSS"] == GEO_MEAN
    blocks = min(triton.cdiv(rows, _ROWS_PER_BLOCK), _MAX_BLOCKS)

    def new(*shape: int, dtype: torch.dtype = torch.float64, when: bool = True) -> Optional[Tensor]:
        return logprobs.new_empty(shape, dtype=dtype) if when else None

    loss, gradient = new(dtype=logprobs.dtype), new(tokens, dtype=logprobs.dtype)
    by_entropy = new(tokens if needs_entropy_gradient else 0, dtype=logprobs.dtype)
    metrics, totals = new(sums.METRICS.value), new(sums.TOTALS)
    outputs = {
        "stats_ptr": new(of_rows.STATS, rows),
        "totals_ptr": totals,
        # per segment, at the start of its row plus its number
        "joint_ptr": new(tokens, when=by_segment),
        "score_ptr": new(tokens, when=by_segment and plan["LOSS"] in (CISPO, TOPR)),
        "size_ptr": new(tokens, when=by_segment),
        "last_ptr": new(tokens, dtype=torch.int32, when=by_segment),
        "slot_gradient_ptr": new(tokens, dtype=logprobs.dtype, when=by_segment),
        "records_ptr": new(parts, sums.RECORD.value),
        "through_ptr": new(rows, when=through_row),
        "blocks_ptr": new(blocks, sums.RECORD.value),
        "gradient_ptr": gradient,
        "by_entropy_ptr": by_entropy if needs_entropy_gradient else None,
        "metrics_ptr": metrics,
        "loss_ptr": loss,
    }
    of_row = plan["CORRECTION"] >= SEQUENCE_TRUNCATE or plan["IS_WEIGHTS_BY_ROW"]
    shape = {"rows_per_block": triton.cdiv(rows, max(blocks, 1)), "blocks": blocks, "HAS_ROW_WEIGHT": of_row}
    shape |= {"ROWS": _ROWS_PER_BLOCK, "BLOCKS": _BLOCKS}

    _launch(of_rows.rows_kernel, rows, plan, inputs, outputs)
    _launch(sums.totals_kernel, 1, plan, inputs, outputs)
    if by_segment:
        torch._assert_async(
            totals[sums.T_WRONG_SEGMENTS.value] == 0, "policy_loss: segments must ascend from 0 along each row"
        )
    _launch(of_tokens.tokens_kernel, parts, plan, inputs, outputs)
    _launch(sums.gather_kernel, blocks, plan, inputs, outputs, shape)
    if by_segment or through_row:
        _launch(ratio_gradients.ratio_gradients_kernel, parts, plan, inputs, outputs)
    _launch(sums.finish_kernel, 1, plan, inputs, outputs, shape)
    return loss, metrics, gradient, by_entropy
