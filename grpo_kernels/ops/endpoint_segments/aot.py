"""Specialisations of the Triton kernels of endpoint_segments that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import EXACT, AotCase
from grpo_kernels.ops.endpoint_segments import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    rows = {"rows": "i64", "width": "i64"}
    packed, padded = {"bounds_ptr": "*i64"}, {"bounds_ptr": None}
    critic, no_critic = {"baselines_ptr": None}, {"values_ptr": None}
    inputs = dict.fromkeys(("rewards_ptr", "logprobs_ptr", "old_ptr"), "*fp32")
    factors = {"gamma": "fp64", "lam": "fp64"}
    doubles = (
        "row_returns_ptr",
        "baselines_ptr",
        "advantages_ptr",
        "sums_ptr",
        "scale_ptr",
        "threshold_ptr",
        "credits_ptr",
        "moments_ptr",
        "norms_ptr",
    )
    types = rows | inputs | factors | packed | dict.fromkeys(doubles, "*fp64")
    types |= {"values_ptr": "*fp32", "mask_ptr": "*u8", "returns_ptr": "*fp32", "ids_ptr": "*i32", "ends_ptr": "*i8"}
    types |= {"numbers_ptr": "*i32", "order_ptr": "*i64", "starts_ptr": "*i64", "epsilon": "fp64"}
    types |= {"most": "i32", "total": "i64"}

    def case(kernel: Any, label: str, warps: int, constants: dict[str, Any], **other: str) -> AotCase:
        names = [name for name in kernel.arg_names if name not in constants and not name.isupper()]
        signature = {name: {**types, **other}[name] for name in names}
        return AotCase(kernel, signature, constants, warps, label=label, options=EXACT)

    wide, narrow = {"BLOCK": kernels._TILE}, {"BLOCK": kernels._GROUP_ROWS}
    one_group = {"BLOCK": kernels._ROWS_AT_ONCE, "order_ptr": None, "starts_ptr": None}
    fp64 = dict.fromkeys((*inputs, "values_ptr", "returns_ptr"), "*fp64")
    return (
        case(kernels._returns_kernel, "packed", kernels._TILE_WARPS, wide),
        case(kernels._returns_kernel, "padded, fp64", kernels._TILE_WARPS, wide | padded, **fp64),
        case(kernels._baselines_kernel, "", 1, narrow),
        case(kernels._tokens_kernel, "packed, critic", kernels._TILE_WARPS, wide | critic),
        case(kernels._tokens_kernel, "padded, fp64", kernels._TILE_WARPS, wide | padded | no_critic, **fp64),
        case(kernels._tokens_kernel, "narrow", 1, {"BLOCK": kernels._NARROWEST} | padded | critic),
        case(kernels._scale_kernel, "", 4, {"BLOCK": kernels._ROWS_AT_ONCE}),
        *(
            case(kernels._cuts_kernel, f"{rule}, {proxy}", 1, {"RULE": rule, "PROXY": proxy, "WINDOW": kernels._WINDOW})
            for rule in range(2)
            for proxy in range(2)
        ),
        case(
            kernels._cuts_kernel, "padded, fp64", 1, {"RULE": 1, "PROXY": 0, "WINDOW": kernels._WINDOW} | padded, **fp64
        ),
        case(kernels._credits_kernel, "packed, critic", kernels._TILE_WARPS, wide | critic),
        case(kernels._credits_kernel, "padded, fp64", kernels._TILE_WARPS, wide | padded | no_critic, **fp64),
        case(kernels._moments_kernel, "batch", 4, one_group),
        case(kernels._moments_kernel, "prompt", 1, narrow),
        case(kernels._results_kernel, "endpoint", 4, {"CREDIT": 0, "BLOCK": kernels._TILE}, advantages_ptr="*fp32"),
        case(
            kernels._results_kernel,
            "broadcast, as they are",
            4,
            {"CREDIT": 1, "BLOCK": kernels._TILE, "norms_ptr": None} | padded,
            advantages_ptr="*fp64",
            returns_ptr="*fp64",
        ),
    )


AOT_SIGNATURES = _aot_cases()
