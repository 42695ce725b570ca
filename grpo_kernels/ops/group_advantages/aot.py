"""Specialisations of the Triton kernels of group_advantages that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from grpo_kernels.aot import EXACT, AotCase
from grpo_kernels.ops.group_advantages import triton as kernels
from grpo_kernels.ops.group_advantages.triton.batch import finish_kernel, moments_kernel
from grpo_kernels.ops.group_advantages.triton.groups import groups_kernel, parents_kernel


def _aot_cases() -> tuple[AotCase, ...]:
    doubles = dict.fromkeys(("ddof", "eps", "std_floor", "shrinkage", "clip", "weight"), "fp64")
    pointers = {"values_ptr": "*fp32", "advantages_ptr": "*fp32", "mean_ptr": "*fp32", "std_ptr": "*fp32"}
    pointers |= {"size_ptr": "*i32", "degenerate_ptr": "*i8"}
    sorted_rows = {"order_ptr": "*i64", "starts_ptr": "*i64", "parent_ptr": "*i64", "parents_ptr": "*fp64"}
    nothing = dict.fromkeys(("lengths_ptr", "baselines_ptr"))
    small, wide = {"GROUPS": kernels._TILE // 8, "BLOCK": 8}, {"GROUPS": kernels._SORTED_TILE // 32, "BLOCK": 32}
    kinds = {"SCALE": 0, "WHITEN": 2, "GAIN": 0, "BLOCK": kernels._ROWS_PER_PROGRAM, "MAX_PARTS": kernels._MAX_PARTS}
    shared = {"values_ptr": "*fp32", "advantages_ptr": "*fp32", "parts_ptr": "*fp64", "number": "i32"}
    finish = dict.fromkeys(("ddof", "eps", "std_floor", "whiten_eps", "clip"), "fp64")
    return (
        AotCase(
            groups_kernel,
            pointers | doubles | {"number": "i32", "group_size": "i32"},
            {
                "CENTER": 1,
                "SCALE": 1,
                "SINGLETON": 0,
                "WRITE": 0,
                **small,
                **nothing,
                **dict.fromkeys(sorted_rows),
            },
            label="groups of 8",
            options=EXACT,
        ),
        AotCase(
            groups_kernel,
            pointers | sorted_rows | doubles | {"number": "i32", "group_size": "i32"},
            {"CENTER": 1, "SCALE": 1, "SINGLETON": 2, "WRITE": 0, **wide, **nothing},
            label="subgroups",
            options=EXACT,
        ),
        AotCase(
            parents_kernel,
            {"values_ptr": "*fp32", "order_ptr": "*i64", "starts_ptr": "*i64", "parents_ptr": "*fp64"}
            | {"number": "i32", "ddof": "fp64"},
            {"lengths_ptr": None, "CENTER": 1, **wide},
            options=EXACT,
        ),
        AotCase(
            moments_kernel,
            shared | {"lengths_ptr": "*fp64", "size_ptr": "*i32", "degenerate_ptr": "*i8", "rows_per_part": "i32"},
            {"CENTER": 2, **kinds},
            options=EXACT,
        ),
        AotCase(
            finish_kernel,
            shared | finish | {"std_ptr": "*fp32", "degenerate_ptr": "*i8", "result_ptr": "*fp32", "parts": "i32"},
            kinds,
            options=EXACT,
        ),
    )


AOT_SIGNATURES = _aot_cases()
