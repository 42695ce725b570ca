"""Specialisations of the Triton kernels that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.sampled_support import triton as kernels

# Kernels, and the arguments that they lack.
_KERNELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "logits": (kernels._logits_kernel, ()),
    "by row": (kernels._sums_kernel, ("ids_ptr", "pieces_ptr")),
    "pieces": (kernels._sums_kernel, ("ids_ptr", "pieces_ptr")),
    "by id": (kernels._sums_kernel, ()),
}
_TYPES = {"count": "i64", "width": "i32"}
_TYPES |= dict.fromkeys(("token_ids_ptr", "rows_ptr", "begins_ptr", "ends_ptr", "ids_ptr"), "*i64")
_TYPES |= dict.fromkeys(("logits_ptr", "factors_ptr", "pieces_ptr"), "*fp32")


_UNALIGNED = ("count", "begins_ptr", "ends_ptr")


def _case(name: str, dtype: str, is_aligned: bool) -> AotCase:
    """A kernel for widths that are multiples of 16, as nearly all are, or for any other."""
    kernel, absent = _KERNELS[name]
    own = _TYPES | {"result_ptr": "*fp32" if name == "pieces" else f"*{dtype}"}
    types = {each: own.get(each, f"*{dtype}") for each in kernel.arg_names if each not in absent}
    aligned = tuple(each for each in types if is_aligned and each not in _UNALIGNED)
    label = f"{name} {dtype}" if is_aligned else f"{name} {dtype}, any width"
    return AotCase(kernel, types, dict.fromkeys(absent), label=label, aligned=aligned)


AOT_SIGNATURES = tuple(
    _case(name, dtype, is_aligned) for name in _KERNELS for dtype in ("bf16", "fp32") for is_aligned in (True, False)
)
