"""Specialisations of the Triton kernels of linear_head that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.linear_head import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    tile = {"M": kernels._M, "N": kernels._N}
    block, group = {"BLOCK": kernels.BLOCK_ROWS}, {"GROUP": kernels._GROUP}
    list_blocks = block | {"M": kernels._M, "MAX_PARTS": kernels._MAX_PARTS, "AT_ONCE": kernels._BLOCKS_AT_ONCE}
    compiled = {"IS_INTERPRETED": False}
    hidden = tile | compiled | block | group | {"K": kernels._K, "REST": kernels._REST}
    weight = tile | compiled | {"K": kernels.BLOCK_ROWS}
    rows, live = {"rows": "i32"}, {"is_live_ptr": "*u8", "plan_ptr": "*i32"}
    sizes = rows | {"columns": "i32", "width": "i32", "by_logits_stride": "i32"}
    plan = live | rows | dict.fromkeys(("tiles_n", "steps", "sms", "max_items"), "i32")

    def to_hidden(half: str) -> dict[str, str]:
        return {"by_logits_ptr": half, "weight_ptr": half, "partial_ptr": "*fp32"} | live | sizes

    def to_weight(half: str, total: str) -> dict[str, str]:
        return {"by_logits_ptr": half, "hidden_ptr": half, "plan_ptr": "*i32", "total_ptr": total} | sizes

    def case(
        kernel: Any, types: dict[str, str], constants: dict[str, Any], label: str = "", warps: int = kernels._WARPS
    ) -> AotCase:
        unaligned = {*plan} - {"plan_ptr"} | ({"columns"} if label.endswith("ragged") else set())
        aligned = tuple(name for name in types if name not in unaligned)
        return AotCase(kernel, types, constants, warps, label=label, aligned=aligned)

    def slow(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> AotCase:
        reason = "Rows that do not start at multiples of 16 bytes are loaded two bytes at a time, which is slow anyway."
        return AotCase(kernel, types, constants, kernels._WARPS, label="bf16, unaligned", spills_ok=reason)

    parts = {"partial_ptr": "*fp32", "out_ptr": "*bf16", "width": "i32"} | live | rows
    whole, ragged = {"HAS_REST": False}, {"HAS_REST": True}
    store, add = {"ADD": False}, {"ADD": True}
    padded, exact = {"IS_PADDED": True}, {"IS_PADDED": False}
    return (
        case(kernels.plan_kernel, plan, list_blocks, warps=4),
        case(kernels.to_hidden_kernel, to_hidden("*bf16"), hidden | whole, "bf16"),
        case(kernels.to_hidden_kernel, to_hidden("*fp16"), hidden | ragged, "fp16, ragged"),
        slow(kernels.to_hidden_kernel, to_hidden("*bf16"), hidden | ragged),
        case(kernels.sum_parts_kernel, parts, tile | block | group | {"ROWS": kernels._ROWS}, warps=4),
        case(kernels.to_weight_kernel, to_weight("*bf16", "*fp32"), weight | add | padded, "bf16, add"),
        case(kernels.to_weight_kernel, to_weight("*bf16", "*bf16"), weight | add | padded, "bf16 to bf16, add"),
        case(kernels.to_weight_kernel, to_weight("*fp16", "*fp32"), weight | store | exact, "fp16"),
        case(kernels.to_weight_kernel, to_weight("*bf16", "*fp32"), weight | add | padded, "bf16, add, ragged"),
        slow(kernels.to_weight_kernel, to_weight("*bf16", "*fp32"), weight | add | exact),
    )


AOT_SIGNATURES = _aot_cases()
