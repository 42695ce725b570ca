"""Specialisations of the Triton kernels of token_advantages that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.token_advantages import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    types = dict.fromkeys(("rewards_ptr", "values_ptr", "advantages_ptr", "returns_ptr"), "*fp32")
    types |= dict.fromkeys(("moments_ptr", "norm_ptr"), "*fp64")
    types |= {"mask_ptr": "*u8", "turns_ptr": "*i32", "bounds_ptr": "*i64"}
    types |= dict.fromkeys(("rows", "width", "total"), "i64") | dict.fromkeys(("gamma", "lam", "epsilon"), "fp64")
    double: dict[str, Any] = dict.fromkeys(("rewards_ptr", "values_ptr", "advantages_ptr", "returns_ptr"), "*fp64")

    def case(kernel: Any, label: str, constants: dict[str, Any], **other: str) -> AotCase:
        names = [name for name in kernel.arg_names if name not in constants and not name.isupper()]
        signature = {name: {**types, **other}[name] for name in names}
        warps = max(constants["BLOCK"] // kernels._TOKENS_PER_WARP, 1)
        return AotCase(kernel, signature, constants, warps, label=label, options=kernels.EXACT)

    wide, narrow, carries = {"BLOCK": kernels._WIDEST}, {"BLOCK": kernels._NARROWEST}, {"CARRY": True}
    padded, no_values, no_turns = {"bounds_ptr": None}, {"values_ptr": None}, {"turns_ptr": None}
    return (
        case(kernels._walk_kernel, "packed", wide | carries | no_turns),
        case(kernels._walk_kernel, "packed turns", wide | carries),
        case(kernels._walk_kernel, "padded", wide | padded | no_turns | {"CARRY": False, "moments_ptr": None}),
        case(kernels._walk_kernel, "padded, fp64", wide | carries | padded | no_values | no_turns, **double),
        case(kernels._walk_kernel, "narrow", narrow | carries | padded | no_turns),
        case(kernels._norm_kernel, "", {"BLOCK": kernels._ROWS_AT_ONCE}),
        case(kernels._whiten_kernel, "packed", wide),
        case(kernels._whiten_kernel, "padded, fp64", wide | padded, **double),
    )


AOT_SIGNATURES = _aot_cases()
