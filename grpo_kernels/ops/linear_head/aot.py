"""Specialisations of the Triton kernels over a support that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.linear_head import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    tile = {"ENTRIES": kernels._ENTRIES, "BLOCK": kernels._BLOCK}
    entries = {"token_ids_ptr": "*i64", "rows_ptr": "*i64"}
    sizes = {"count": "i64", "width": "i32", "hidden_stride": "i64"}
    rows = {"logits_ptr": "*fp32", "places_ptr": "*i64", "bounds_ptr": "*i64", "normalizer_ptr": "*fp64"}
    rows |= {"temperature": "fp64", "numerator": "fp64", "bend": "fp32"}
    gradients = {"gradient_ptr": "*fp32", "grad_logprobs_ptr": "*fp32"}
    plain = {"temperatures_ptr": None, "entropy_ptr": None, "CAPPED": False, "BLOCK": kernels._ROW_BLOCK}
    capped = {"CAPPED": True, "BLOCK": kernels._ROW_BLOCK}
    both = {"temperatures_ptr": "*fp32", "entropy_ptr": "*fp32"}

    def product(kernel: Any, types: dict[str, str], constants: dict[str, Any], label: str) -> AotCase:
        return AotCase(kernel, types, tile | constants, kernels._WARPS, label=label)

    def row(kernel: Any, types: dict[str, str], constants: dict[str, Any], label: str) -> AotCase:
        return AotCase(kernel, rows | types, constants, kernels._ROW_WARPS, label=label)

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

    logprobs, backward = kernels._logprobs_kernel, kernels._logprobs_backward_kernel
    return (
        *head("bf16"),
        *head("fp32"),
        row(logprobs, {"logprobs_ptr": "*fp32"}, plain, "plain"),
        row(logprobs, {"logprobs_ptr": "*fp32"} | both, capped, "softcap, entropy, per-row temperature"),
        row(backward, gradients, plain | {"grad_entropy_ptr": None}, "plain"),
        row(
            backward,
            gradients | both | {"grad_entropy_ptr": "*fp32"},
            capped,
            "softcap, entropy, per-row temperature",
        ),
    )


AOT_SIGNATURES = _aot_cases()
