"""Specialisations of the Triton kernels over a support that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.linear_head import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    entries = {"token_ids_ptr": "*i64", "rows_ptr": "*i64"}
    sizes = {"count": "i64", "width": "i32", "hidden_stride": "i64"}

    def product(kernel: Any, types: dict[str, str], constants: dict[str, Any], label: str) -> AotCase:
        return AotCase(kernel, types, constants, label=label)

    def head(dtype: str) -> tuple[AotCase, ...]:
        logits = {"hidden_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "logits_ptr": "*fp32"}
        to_hidden = {"by_logits_ptr": "*fp32", "weight_ptr": f"*{dtype}", "result_ptr": f"*{dtype}"}
        to_hidden |= {"token_ids_ptr": "*i64", "bounds_ptr": "*i64", "width": "i32", "weight_stride": "i64"}
        added = {"by_logits_ptr": "*fp32", "hidden_ptr": f"*{dtype}", "order_ptr": "*i64", "weight_ptr": f"*{dtype}"}
        strides = sizes | {"weight_stride": "i64"}
        return (
            product(kernels._logits_kernel, logits | entries | strides, {"bias_ptr": None}, dtype),
            product(kernels._to_hidden_kernel, to_hidden, {}, dtype),
            product(kernels._add_weight_kernel, added | entries | sizes, {"bias_ptr": None}, dtype),
        )

    return *head("bf16"), *head("fp32")


AOT_SIGNATURES = _aot_cases()
