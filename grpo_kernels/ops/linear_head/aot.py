"""Specialisations of the Triton kernels that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.linear_head import triton as kernels


def _terms(kind: str, tail: str, count: int = 64, num_warps: int = 1) -> AotCase:
    names = ("scaled", "ids", "teacher_logprobs", "shares", "values", "mass", "by_rest", "by_id")
    types = {"others_ptr": "*fp32"} | {f"{name}_ptr": "*fp64" for name in names} | {"ids_ptr": "*i64"}
    types |= {"beta": "fp64", "count": "i32", "stride": "i64"}
    constants = {"KIND": kind, "TAIL": tail, "LEAST_REST": 2.0**-24, "COUNT": count}
    label = f"terms of {count} {kind} {tail}"
    return AotCase(kernels._terms_kernel, types, constants, num_warps=num_warps, label=label)


AOT_SIGNATURES = (
    *(
        _terms(*of)
        for of in (("forward_kl", "bucket"), ("reverse_kl", "ignore"), ("jsd", "bucket"), ("jsd", "renormalise"))
    ),
    _terms("jsd", "bucket", count=1024, num_warps=8),
)
