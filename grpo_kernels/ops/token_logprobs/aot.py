"""Specialisations of the Triton kernels of token_logprobs that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.token_logprobs import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    runtime = {"columns": "i32", "temperature": "fp64", "numerator": "fp64", "bend": "fp32"}
    runtime |= dict.fromkeys(("inner", "outer_stride", "inner_stride"), "i64")
    rows = {"targets_ptr": "*i64", "normalizer_ptr": "*fp64", "entropy_ptr": "*fp32"}
    forward_rows = rows | {"logprobs_ptr": "*fp32"}
    backward_rows = rows | {"grad_logprobs_ptr": "*fp32", "grad_entropy_ptr": "*fp32"}
    temperatures = {"temperatures_ptr": "*fp32"}
    usual = {"CAPPED": False, "ALIGNED": True, "BLOCK": kernels._BLOCK}
    small = {"CAPPED": True, "ALIGNED": False, "BLOCK": kernels._SMALL_BLOCK}

    def without(types: dict[str, str], *names: str) -> tuple[dict[str, str], dict[str, None]]:
        return {k: v for k, v in types.items() if k not in names}, dict.fromkeys(names)

    plain_forward, no_entropy = without(forward_rows, "entropy_ptr")
    plain_backward, no_upstream = without(backward_rows, "entropy_ptr", "grad_entropy_ptr")
    nothing = {"temperatures_ptr": None}
    half, single = {"logits_ptr": "*bf16"}, {"logits_ptr": "*fp32"}
    half_gradient, single_gradient = half | {"gradient_ptr": "*bf16"}, single | {"gradient_ptr": "*fp32"}
    aligned = ("logits_ptr",)
    both = ("logits_ptr", "gradient_ptr")
    copied, inplace = {"INPLACE": False}, {"INPLACE": True}
    return (
        AotCase(
            kernels._forward_kernel,
            half | plain_forward | runtime,
            usual | nothing | no_entropy,
            kernels._WARPS,
            label="bf16",
            aligned=aligned,
        ),
        AotCase(
            kernels._forward_kernel,
            half | forward_rows | runtime,
            usual | nothing | {"CAPPED": True},
            kernels._WARPS,
            label="bf16, softcap, entropy",
            aligned=aligned,
        ),
        AotCase(
            kernels._forward_kernel,
            single | forward_rows | temperatures | runtime,
            small,
            kernels._SMALL_WARPS,
            label="small, fp32, per-row temperature",
        ),
        AotCase(
            kernels._backward_kernel,
            half_gradient | plain_backward | runtime,
            usual | nothing | no_upstream | copied,
            kernels._WARPS,
            label="bf16",
            aligned=both,
        ),
        AotCase(
            kernels._backward_kernel,
            half_gradient | backward_rows | runtime,
            usual | nothing | inplace | {"CAPPED": True},
            kernels._WARPS,
            label="bf16, softcap, entropy, in place",
            aligned=both,
        ),
        AotCase(
            kernels._backward_kernel,
            single_gradient | backward_rows | temperatures | runtime,
            small | copied,
            kernels._SMALL_WARPS,
            label="small, fp32, per-row temperature",
        ),
    )


AOT_SIGNATURES = _aot_cases()
