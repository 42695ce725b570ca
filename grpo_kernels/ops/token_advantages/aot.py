"""Specialisations of the Triton kernels of token_advantages that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.token_advantages import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    types = dict.fromkeys(("rewards_ptr", "values_ptr", "advantages_ptr", "returns_ptr"), "*fp32")
    types |= dict.fromkeys(("chunks_ptr", "moments_ptr", "norm_ptr"), "*fp64")
    types |= dict.fromkeys(("mask_ptr", "roles_ptr"), "*u8") | {"turns_ptr": "*i32", "bounds_ptr": "*i64"}
    types |= dict.fromkeys(("rows", "width", "total", "records", "chunks"), "i64")
    types |= dict.fromkeys(("gamma", "lam", "epsilon"), "fp64")
    double: dict[str, Any] = dict.fromkeys(("rewards_ptr", "values_ptr", "advantages_ptr", "returns_ptr"), "*fp64")

    def case(
        kernel: Any, label: str, constants: dict[str, Any], warps: int = kernels._TILE_WARPS, **other: str
    ) -> AotCase:
        names = [name for name in kernel.arg_names if name not in constants and not name.isupper()]
        signature = {name: {**types, **other}[name] for name in names}
        return AotCase(kernel, signature, constants, warps, label=label, options=kernels.EXACT)

    wide, narrow = {"BLOCK": kernels._TILE}, {"BLOCK": kernels._NARROWEST}
    carries = {"CARRY": True}
    chunked = wide | {"CHUNKS": kernels._MAX_CHUNKS}
    padded, no_values, whole = {"bounds_ptr": None}, {"values_ptr": None}, {"chunks_ptr": None}
    return (
        case(kernels._roles_kernel, "packed", wide),
        case(kernels._roles_kernel, "narrow", narrow | padded, 1),
        case(kernels._maps_kernel, "packed", wide | carries),
        case(kernels._maps_kernel, "padded, fp64", wide | carries | padded | no_values, **double),
        case(kernels._walk_kernel, "packed", chunked | carries | whole),
        case(kernels._walk_kernel, "chunks", chunked | carries | padded),
        case(kernels._walk_kernel, "padded, fp64", chunked | carries | padded | no_values, **double),
        case(kernels._walk_kernel, "narrow", narrow | carries | {"CHUNKS": kernels._MAX_CHUNKS} | padded | whole, 1),
        case(kernels._turns_kernel, "packed", wide),
        case(kernels._turns_kernel, "padded, fp64", wide | padded, **double),
        case(kernels._norm_kernel, "", {"BLOCK": kernels._RECORDS_AT_ONCE}),
        case(kernels._whiten_kernel, "packed", chunked),
        case(kernels._whiten_kernel, "padded, fp64", chunked | padded, **double),
    )


AOT_SIGNATURES = _aot_cases()
