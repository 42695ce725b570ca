"""Specialisations of the Triton kernel of sampling_correction that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from grpo_kernels.aot import EXACT, AotCase
from grpo_kernels.ops.sampling_correction import triton as kernels
from grpo_kernels.ops.sampling_correction.config import (
    BINARY_KL,
    ESTIMATORS,
    STATISTICS,
    WEIGHT_GEOMETRIC,
    WEIGHT_NONE,
    WEIGHT_TOKEN,
    table_widths,
)


def _aot_case(label: str, weights: int, statistics: tuple[str, ...], more: dict[str, str], masks: int = 0) -> AotCase:
    codes = [STATISTICS.index(name) for name in statistics]
    pointers = {"old_ptr": "*fp32", "sampling_ptr": "*fp32", "mask_ptr": "*i1", "weights_ptr": "*fp32"}
    pointers |= {"kept_ptr": "*i8", "table_ptr": "*fp64"} | more
    numbers = ("low", "high", "low_mark", "bound", *kernels._bounds([], []))
    scalars = dict.fromkeys(("rows", "width", "tokens"), "i64") | dict.fromkeys(numbers, "fp64")
    constants = {
        "cu_seqlens_ptr": None,
        "ceiling_ptr": None,
        "WEIGHTS": weights,
        "MASKS": masks,
        "SLOTS": kernels._slots(codes),
        "COUNT": len(codes),
        "COLUMNS": sum(table_widths(len(codes))),
        "NEEDS_KL": any(code % len(ESTIMATORS) == BINARY_KL for code in codes),
        "BLOCK": kernels.BLOCK,
    }
    present = scalars | pointers
    signature = {name: present[name] for name in kernels.rows_kernel.arg_names if name in present}
    constants = {name: value for name, value in constants.items() if name not in signature}
    return AotCase(kernels.rows_kernel, signature, constants, label=label, options=EXACT)


AOT_SIGNATURES = (
    _aot_case("token weights", WEIGHT_TOKEN, ("token_k1", "seq_mean_k3"), {}),
    _aot_case("rows of packed tokens", WEIGHT_GEOMETRIC, ("seq_max_k1",), {"cu_seqlens_ptr": "*i64"}, masks=1),
    _aot_case("divergences and M2PO", WEIGHT_NONE, ("token_binary_kl", "seq_sum_binary_kl"), {"ceiling_ptr": "*fp32"}),
)
