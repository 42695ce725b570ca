"""policy_loss in Triton: counts and ratios of rows, totals, one pass over the tokens, sums in a fixed order.

A row is cut into parts from its own start, so that neither padding nor packing changes how anything is added. Settings
that choose a formula are compiled in, numbers are arguments. The grids come from shapes alone: nothing is copied to the
host.
"""

from typing import Any, Optional

import torch
import triton
from torch import Tensor

from grpo_kernels.segments import packed_bounds
from grpo_kernels.triton import _policy_rows as of_rows
from grpo_kernels.triton import _policy_sums as sums
from grpo_kernels.triton import _policy_tokens as of_tokens
from grpo_kernels.triton._aot import AotCase
from grpo_kernels.triton._policy_terms import CISPO, GEO_MEAN, SEGMENT, SEGMENT_MEAN, SEQUENCE

_PART = 1024  # tokens of a row that one program takes
_BLOCK = 1024
_ROW_BLOCK = 256  # rows
_TILE = 64  # tokens that are compared with each other, to find their segments
_ROWS_PER_BLOCK = 4
_MAX_BLOCKS = 1024
_BLOCKS = 32

# What the kernels take of a plan, by the names of their arguments: settings, and numbers.
_MODES = ("LOSS", "RATIO", "KL", "STRAIGHT", "UNBIASED", "AGGREGATION", "KL_AGGREGATION", "ENTROPY_AGGREGATION",
          "COUNT_EMPTY_ROWS", "CORRECTION")  # fmt: skip
_NUMBERS = ("low", "high", "dual_clip", "cap", "tau_positive", "tau_other", "k_positive", "rate_positive", "k_other",
            "rate_other", "dro_beta", "clamp_low", "clamp_high", "kl_coef", "kl_bound", "kl_top", "entropy_coef",
            "max_length", "correction_min", "correction_max", "threshold")  # fmt: skip


def _launch(kernel: Any, programs: int, *given: dict[str, Any], **more: Any) -> None:
    """Starts a kernel on those of the arguments that it has."""
    if programs > 0:
        known = {name: value for arguments in (*given, more) for name, value in arguments.items()}
        kernel[(programs,)](
            **{name: known[name] for name in kernel.arg_names}, num_warps=_warps(kernel, known["RATIO"])
        )


def _warps(kernel: Any, ratio: int) -> int:
    """What has much to keep for each token gets few of them per thread, or it would have to spill."""
    if kernel is of_tokens.tokens_kernel:
        return 8
    if kernel is of_rows.rows_kernel and _is_of_segments(ratio):
        return 16
    return 2 if kernel is sums.gather_kernel else 4


def forward(
    logprobs: Tensor,
    old_logprobs: Optional[Tensor],
    advantages: Tensor,
    mask: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    segments: Optional[Tensor],
    ref_logprobs: Optional[Tensor],
    sampling_logprobs: Optional[Tensor],
    is_weights: Optional[Tensor],
    entropy: Optional[Tensor],
    entropy_floor: Optional[Tensor],
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
        "IS_BY_ROW": is_weights is not None and is_weights.shape != logprobs.shape,
        "PART": _PART,
        "BLOCK": _BLOCK,
        "ROW_BLOCK": _ROW_BLOCK,
        "TILE": _TILE,
    }
    given = {
        "logprobs_ptr": logprobs,
        "old_ptr": old_logprobs,
        "advantages_ptr": advantages,
        "mask_ptr": mask,
        "cu_seqlens_ptr": cu_seqlens,
        "segments_ptr": segments,
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
        # packed rows and what lies behind them have that many parts at most, see first_part
        "chunks": triton.cdiv(width, _PART),
        "parts": rows * triton.cdiv(width, _PART) if cu_seqlens is None else triton.cdiv(tokens, _PART) + rows,
        "steps": rows.bit_length(),
    }
    given |= dict(zip(("known_tokens", "known_rows", "known_segments"), counts, strict=True))
    return _run(logprobs, plan, given, needs_entropy_gradient)


def _is_of_segments(ratio: int) -> bool:
    return ratio in (SEGMENT.value, SEGMENT_MEAN.value)


def _plan(modes: list[int], coefficients: list[float]) -> dict[str, Any]:
    plan = dict(zip(_MODES, modes, strict=True)) | dict(zip(_NUMBERS, coefficients, strict=True))
    for rate in ("rate_positive", "rate_other"):
        plan[rate] = max(plan[rate], 1e-4)
    return plan | {"OFF_POLICY": plan["threshold"] < float("inf")}


def _run(
    logprobs: Tensor, plan: dict[str, Any], given: dict[str, Any], needs_entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, tokens, parts = given["rows"], given["tokens"], given["parts"]
    by_segment = _is_of_segments(plan["RATIO"])
    through_row = plan["RATIO"] == SEQUENCE.value or plan["LOSS"] == GEO_MEAN.value
    blocks = min(triton.cdiv(rows, _ROWS_PER_BLOCK), _MAX_BLOCKS)

    def new(*shape: int, dtype: torch.dtype = torch.float64, when: bool = True) -> Optional[Tensor]:
        return logprobs.new_empty(shape, dtype=dtype) if when else None

    loss, gradient = new(dtype=logprobs.dtype), new(tokens, dtype=logprobs.dtype)
    by_entropy = new(tokens if needs_entropy_gradient else 0, dtype=logprobs.dtype)
    metrics, totals = new(sums.METRICS.value), new(sums.TOTALS)
    made = {
        "stats_ptr": new(of_rows.STATS, rows),
        "totals_ptr": totals,
        # of segments, at their row's start plus their number
        "joint_ptr": new(tokens, when=by_segment),
        "score_ptr": new(tokens, when=by_segment and plan["LOSS"] == CISPO.value),
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
    of_row = plan["CORRECTION"] in (3, 4) or plan["IS_BY_ROW"]
    shape = {"rows_per_block": triton.cdiv(rows, max(blocks, 1)), "blocks": blocks, "HAS_ROW_IS": of_row}
    shape |= {"ROWS": _ROWS_PER_BLOCK, "BLOCKS": _BLOCKS}

    _launch(of_rows.rows_kernel, rows, plan, given, made)
    _launch(sums.totals_kernel, 1, plan, given, made)
    if by_segment:
        torch._assert_async(
            totals[sums.T_WRONG_SEGMENTS.value] == 0, "policy_loss: segments must ascend from 0 along each row"
        )
    _launch(of_tokens.tokens_kernel, parts, plan, given, made)
    _launch(sums.gather_kernel, blocks, plan, given, made, shape)
    if by_segment or through_row:
        _launch(of_tokens.through_kernel, parts, plan, given, made)
    _launch(sums.finish_kernel, 1, plan, given, made, shape)
    return loss, metrics, gradient, by_entropy


def _aot_cases() -> tuple[AotCase, ...]:
    """TRL's default with a KL term; GSPO with the weights of sequences; segments of packed rows; GMPO; VESPO."""
    pointers = {
        "logprobs_ptr": "*fp32",
        "old_ptr": "*fp32",
        "advantages_ptr": "*fp32",
        "mask_ptr": "*i1",
        "stats_ptr": "*fp64",
        "totals_ptr": "*fp64",
        "records_ptr": "*fp64",
        "blocks_ptr": "*fp64",
        "metrics_ptr": "*fp64",
        "gradient_ptr": "*fp32",
        "loss_ptr": "*fp32",
    }
    packed = {"cu_seqlens_ptr": "*i64"}
    slots = {"joint_ptr": "*fp64", "size_ptr": "*fp64", "last_ptr": "*i32"}
    slots |= {"slot_gradient_ptr": "*fp32", "segments_ptr": "*i32"}
    variants: dict[str, tuple[dict[str, int], dict[str, str]]] = {
        "clip": ({"KL": 3, "KL_AGGREGATION": 0}, {"ref_ptr": "*fp32"}),
        "packed": ({"KL": 3}, {"ref_ptr": "*fp32", "entropy_ptr": "*fp32", "by_entropy_ptr": "*fp32"} | packed),
        "sequence": (
            {"RATIO": 1, "CORRECTION": 3, "AGGREGATION": 2, "HAS_ROW_IS": 1},
            {"sampling_ptr": "*fp32", "through_ptr": "*fp64"},
        ),
        "segment": ({"RATIO": 3}, packed | slots),
        "segment of scores": ({"LOSS": 1, "RATIO": 4}, slots | {"score_ptr": "*fp64"}),
        "geo_mean": ({"LOSS": 4, "AGGREGATION": 3}, {"through_ptr": "*fp64"}),
        "vespo": ({"LOSS": 3, "CORRECTION": 1, "OFF_POLICY": 1}, {"sampling_ptr": "*fp32"}),
    }
    shapes = {
        "PART": _PART,
        "BLOCK": _BLOCK,
        "ROW_BLOCK": _ROW_BLOCK,
        "TILE": _TILE,
        "ROWS": _ROWS_PER_BLOCK,
        "BLOCKS": _BLOCKS,
    }
    others = ("OFF_POLICY", "ADVANTAGE_BY_ROW", "IS_BY_ROW", "HAS_ROW_IS")
    settings = dict.fromkeys((*_MODES, *others), 0) | {"ADVANTAGE_BY_ROW": 1} | shapes
    numbers = ("known_tokens", "known_rows", "known_segments", *_NUMBERS)
    scalars = dict.fromkeys(numbers, "fp64") | {"steps": "i32"}
    scalars |= dict.fromkeys(("rows", "width", "tokens", "chunks", "parts", "rows_per_block", "blocks"), "i64")
    kernels = (of_rows.rows_kernel, sums.totals_kernel, of_tokens.tokens_kernel, sums.gather_kernel)

    def case(kernel: Any, label: str) -> AotCase:
        modes, more = variants[label]
        present = scalars | pointers | more
        signature = {name: present[name] for name in kernel.arg_names if name in present}
        constant = {name: (settings | modes).get(name) for name in kernel.arg_names if name not in signature}
        warps = _warps(kernel, modes.get("RATIO", 0))
        return AotCase(kernel, signature, constant, warps, label=label)

    cases = [case(kernel, label) for label in variants for kernel in kernels]
    cases += [case(of_tokens.through_kernel, label) for label in ("sequence", "segment", "geo_mean")]
    return (*cases, case(sums.finish_kernel, "clip"))


AOT_SIGNATURES = _aot_cases()
