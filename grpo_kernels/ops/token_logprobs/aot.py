"""Specialisations of the Triton kernels of token_logprobs that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.token_logprobs import triton as kernels

_OPTIONAL = dict.fromkeys(("temperatures_ptr", "entropy_ptr", "squares_ptr"), "*fp32")


def _aot_cases() -> tuple[AotCase, ...]:
    types = {"columns": "i32", "factor": "fp64", "bend": "fp32"}
    types |= dict.fromkeys(("inner", "outer_stride", "inner_stride"), "i64")
    types |= {"targets_ptr": "*i64", "normalizer_ptr": "*fp64"}
    strides = dict.fromkeys(("gradient_outer_stride", "gradient_inner_stride"), "i64")
    temperatures, entropy = {"temperatures_ptr": "*fp32"}, {"entropy_ptr": "*fp32"}
    optional = ("temperatures_ptr", "bounds_ptr", "entropy_ptr", "grad_entropy_ptr")

    def case(
        kernel: Any, dtype: str, more: dict[str, str], label: str, capped: bool = False, gradient: str = ""
    ) -> AotCase:
        signature = types | {"logits_ptr": dtype} | more
        is_forward, is_short = kernel is kernels._forward_kernel, "bounds_ptr" in more
        if is_forward:
            signature |= {"logprobs_ptr": "*fp32"}
        else:
            signature |= strides | {"gradient_ptr": gradient or dtype, "grad_logprobs_ptr": "*fp32"}
            signature |= {"grad_entropy_ptr": "*fp32"} if "entropy_ptr" in more else {}
        warps = kernels._SHORT_WARPS if is_short else kernels._WARPS
        loads = kernels._LOADS if is_forward else kernels._LOADS_BACKWARD
        constants: dict[str, Any] = {"CAPPED": capped, "LOADS": kernels._SHORT_LOADS if is_short else loads}
        absent = [name for name in optional if name not in signature and not (is_forward and name.startswith("grad"))]
        return AotCase(kernel, signature, constants | {"LANES": 32 * warps} | dict.fromkeys(absent), warps, label=label)

    forward, backward = kernels._forward_kernel, kernels._backward_kernel
    kept = {"bounds_ptr": "*i64"}
    return (
        case(forward, "*bf16", {}, "bf16"),
        case(forward, "*bf16", entropy, "bf16, entropy"),
        case(forward, "*fp32", temperatures, "fp32, per-row temperature"),
        case(forward, "*bf16", {}, "bf16, softcap", capped=True),
        case(forward, "*bf16", entropy, "bf16, softcap, entropy", capped=True),
        case(forward, "*fp32", kept | entropy, "kept"),
        case(
            forward, "*fp32", kept | entropy | temperatures, "kept, softcap, entropy, per-row temperature", capped=True
        ),
        case(backward, "*bf16", {}, "bf16"),
        case(backward, "*bf16", entropy, "bf16, entropy"),
        case(backward, "*fp32", temperatures, "fp32, per-row temperature"),
        case(backward, "*fp32", {}, "fp32 to bf16", gradient="*bf16"),
        case(backward, "*bf16", {}, "bf16, softcap", capped=True),
        case(backward, "*bf16", entropy, "bf16, softcap, entropy", capped=True),
        case(backward, "*fp32", kept | entropy, "kept"),
        case(
            backward, "*fp32", kept | entropy | temperatures, "kept, softcap, entropy, per-row temperature", capped=True
        ),
    )


def _exponentials(label: str, capped: bool = False, **optional: str) -> AotCase:
    names = "logits_ptr", "logprobs_ptr", "row_scale_ptr"
    types = dict.fromkeys(names, "*fp32") | {"targets_ptr": "*i64", "into_ptr": "*bf16", "columns": "i32"}
    types |= {"stride": "i64", "into_stride": "i64", "factor": "fp64", "bend": "fp32"} | optional
    lanes = {"LOADS": kernels._LOADS_EXPONENTIALS, "LANES": 32 * kernels._WARPS}
    absent = {"temperatures_ptr", "entropy_ptr", "squares_ptr"} - optional.keys()
    constants = {"CAPPED": capped} | lanes | dict.fromkeys(absent)
    return AotCase(kernels._exponentials_kernel, types, constants, kernels._WARPS, label=label)


AOT_SIGNATURES = (
    *_aot_cases(),
    _exponentials("fp32 to bf16"),
    _exponentials("entropy", entropy_ptr="*fp32"),
    _exponentials("softcap, entropy, squares, per-row temperature", True, **_OPTIONAL),
)
