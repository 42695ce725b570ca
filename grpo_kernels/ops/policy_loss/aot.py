"""Specialisations of the Triton kernels of policy_loss that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.policy_loss import triton as kernels
from grpo_kernels.ops.policy_loss.config import (
    CISPO,
    GEO_MEAN,
    K3,
    KL_COV,
    ROW_TOKEN_MEAN,
    ROW_TOKEN_SUM,
    SEGMENT,
    SEGMENT_MEAN,
    SEQUENCE,
    SEQUENCE_TRUNCATE,
    TOKEN_TRUNCATE,
    VESPO,
)
from grpo_kernels.ops.policy_loss.triton import ratio_gradients, scale
from grpo_kernels.ops.policy_loss.triton import rows as of_rows
from grpo_kernels.ops.policy_loss.triton import sums as sums
from grpo_kernels.ops.policy_loss.triton import tokens as of_tokens

_POINTERS = {
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
_SHAPES = {
    "PART": kernels._PART,
    "BLOCK": kernels._BLOCK,
    "ROW_BLOCK": kernels._ROW_BLOCK,
    "TILE": kernels._TILE,
    "ROWS": kernels._ROWS_PER_BLOCK,
    "BLOCKS": kernels._BLOCKS,
}


def case_of(kernel: Any, label: str, modes: dict[str, int], pointers: dict[str, str]) -> AotCase:
    """A kernel for padded rows with a mask and an advantage per row, unless the modes and pointers say otherwise."""
    others = ("OFF_POLICY", "ADVANTAGE_BY_ROW", "IS_WEIGHTS_BY_ROW", "HAS_ROW_WEIGHT")
    settings = dict.fromkeys((*kernels._MODES, *others), 0) | {"ADVANTAGE_BY_ROW": 1} | _SHAPES | modes
    numbers = ("known_tokens", "known_rows", "known_segments", *kernels._NUMBERS)
    present = dict.fromkeys(numbers, "fp64") | {"steps": "i32"}
    present |= dict.fromkeys(("rows", "width", "tokens", "chunks", "parts", "rows_per_block", "blocks"), "i64")
    present |= _POINTERS | pointers
    signature = {name: present[name] for name in kernel.arg_names if name in present}
    constant = {name: settings.get(name) for name in kernel.arg_names if name not in signature}
    return AotCase(kernel, signature, constant, kernels._warps(kernel, modes.get("RATIO", 0)), label=label)


def _aot_cases() -> tuple[AotCase, ...]:
    """TRL's default with a KL term; GSPO with the weights of sequences; segments of packed rows; GMPO; VESPO."""
    packed = {"cu_seqlens_ptr": "*i64"}
    slots = {"joint_ptr": "*fp64", "size_ptr": "*fp64", "last_ptr": "*i32"}
    slots |= {"slot_gradient_ptr": "*fp32", "segments_ptr": "*i32"}
    variants: dict[str, tuple[dict[str, int], dict[str, str]]] = {
        "clip": ({"KL": K3}, {"ref_ptr": "*fp32"}),
        "kinds": ({"KL": K3}, {"ref_ptr": "*fp32", "kinds_ptr": "*i8"}),
        "kl_cov": ({"LOSS": KL_COV}, {"kinds_ptr": "*i8"}),
        "packed": ({"KL": K3}, {"ref_ptr": "*fp32", "entropy_ptr": "*fp32", "by_entropy_ptr": "*fp32"} | packed),
        "sequence": (
            {"RATIO": SEQUENCE, "CORRECTION": SEQUENCE_TRUNCATE, "AGGREGATION": ROW_TOKEN_MEAN, "HAS_ROW_WEIGHT": 1},
            {"sampling_ptr": "*fp32", "through_ptr": "*fp64"},
        ),
        "segment": ({"RATIO": SEGMENT}, packed | slots),
        "segment of scores": ({"LOSS": CISPO, "RATIO": SEGMENT_MEAN}, slots | {"score_ptr": "*fp64"}),
        "geo_mean": ({"LOSS": GEO_MEAN, "AGGREGATION": ROW_TOKEN_SUM}, {"through_ptr": "*fp64"}),
        "vespo": ({"LOSS": VESPO, "CORRECTION": TOKEN_TRUNCATE, "OFF_POLICY": 1}, {"sampling_ptr": "*fp32"}),
    }
    common = (of_rows.rows_kernel, sums.totals_kernel, of_tokens.tokens_kernel, sums.gather_kernel)

    def case(kernel: Any, label: str) -> AotCase:
        return case_of(kernel, label, *variants[label])

    cases = [case(kernel, label) for label in variants for kernel in common]
    cases += [case(ratio_gradients.ratio_gradients_kernel, label) for label in ("sequence", "segment", "geo_mean")]
    scale_signature = {"gradient_ptr": "*bf16", "upstream_ptr": "*fp32", "count": "i64"}
    of_scale = AotCase(scale.scale_kernel, scale_signature, {"BLOCK": scale.BLOCK}, label="upstream gradient")
    return (*cases, case(sums.finish_kernel, "clip"), of_scale)


AOT_SIGNATURES = _aot_cases()
