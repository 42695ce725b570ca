"""Specialisations of the Triton kernels of token_logprobs that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.token_logprobs import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    runtime = {"columns": "i32", "temperature": "fp64", "numerator": "fp64", "bend": "fp32"}
    runtime |= dict.fromkeys(("inner", "outer_stride", "inner_stride"), "i64")
    rows = {"targets_ptr": "*i64", "normalizer_ptr": "*fp64", "entropy_ptr": "*fp32"}
    forward_rows = rows | {"logprobs_ptr": "*fp32"}
    backward_rows = rows | {"grad_logprobs_ptr": "*fp32", "grad_entropy_ptr": "*fp32"}
    backward_rows |= dict.fromkeys(("gradient_outer_stride", "gradient_inner_stride"), "i64")
    temperatures = {"temperatures_ptr": "*fp32"}
    usual = {"CAPPED": False, "ALIGNED": True}
    small = {"CAPPED": True, "ALIGNED": False, "BLOCK": kernels._SMALL_BLOCK}

    def without(types: dict[str, str], *names: str) -> tuple[dict[str, str], dict[str, None]]:
        return {k: v for k, v in types.items() if k not in names}, dict.fromkeys(names)

    plain_forward, no_entropy = without(forward_rows, "entropy_ptr")
    plain_backward, no_upstream = without(backward_rows, "entropy_ptr", "grad_entropy_ptr")
    nothing = {"temperatures_ptr": None}
    half, single = {"logits_ptr": "*bf16"}, {"logits_ptr": "*fp32"}
    half_gradient, single_gradient = half | {"gradient_ptr": "*bf16"}, single | {"gradient_ptr": "*fp32"}
    rounded = {"gradient_ptr": "*bf16"}
    copied, inplace = {"INPLACE": False}, {"INPLACE": True}

    def case(kernel: Any, types: dict[str, str], constants: dict[str, Any], label: str) -> AotCase:
        is_small = "BLOCK" in constants
        constants = {"BLOCK": kernels._BLOCK_BYTES // (4 if types["logits_ptr"] == "*fp32" else 2)} | constants
        warps = kernels._SMALL_WARPS if is_small else kernels._WARPS
        aligned = tuple(name for name in ("logits_ptr", "gradient_ptr") if name in types and not is_small)
        return AotCase(kernel, types | runtime, constants, warps, label=label, aligned=aligned)

    forward, backward = kernels._forward_kernel, kernels._backward_kernel
    capped, small_label = usual | nothing | {"CAPPED": True}, "small, fp32, per-row temperature"
    return (
        case(forward, half | plain_forward, usual | nothing | no_entropy, "bf16"),
        case(forward, single | plain_forward, usual | nothing | no_entropy, "fp32"),
        case(forward, half | forward_rows, capped, "bf16, softcap, entropy"),
        case(forward, single | forward_rows | temperatures, small, small_label),
        case(backward, half_gradient | plain_backward, usual | nothing | no_upstream | copied, "bf16"),
        case(backward, half_gradient | backward_rows, capped | inplace, "bf16, softcap, entropy, in place"),
        case(backward, single_gradient | backward_rows | temperatures, small | copied, small_label),
        case(backward, single | rounded | plain_backward, usual | nothing | no_upstream | copied, "fp32 to bf16"),
    )


AOT_SIGNATURES = _aot_cases()
