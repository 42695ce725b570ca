"""Specialisations of the Triton kernels that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from grpo_kernels.aot import AotCase
from grpo_kernels.ops.sampled_support import triton as kernels

_SIZES = ("width", "stride", "hidden_stride", "weight_stride")


def _cases(dtype: str, is_aligned: bool) -> tuple[AotCase, ...]:
    """The kernels for hidden states of a width that is a multiple of 16, as nearly all are, or of another width."""
    head = {"hidden_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "token_ids_ptr": "*i64", "rows_ptr": "*i64"}
    head |= {"logits_ptr": "*fp32", "count": "i64", "width": "i32", "hidden_stride": "i64", "weight_stride": "i64"}
    sums = {"factors_ptr": "*fp32", "matrix_ptr": f"*{dtype}", "rows_ptr": "*i64"}
    sums |= {"begins_ptr": "*i64", "ends_ptr": "*i64", "width": "i32", "stride": "i64"}
    result, pieces = {"result_ptr": f"*{dtype}"}, {"result_ptr": "*fp32"}
    by_id = {"ids_ptr": "*i64", "pieces_ptr": "*fp32"}
    within_bounds = dict.fromkeys(by_id)

    def case(kernel: object, types: dict[str, str], constants: dict[str, None], name: str) -> AotCase:
        aligned = [key for key in types if key.endswith("_ptr") and key not in ("begins_ptr", "ends_ptr")]
        aligned += [key for key in types if key in _SIZES]
        label = f"{name} {dtype}" if is_aligned else f"{name} {dtype}, any width"
        return AotCase(kernel, types, constants, label=label, aligned=tuple(aligned) if is_aligned else ())

    return (
        case(kernels._logits_kernel, head, {"bias_ptr": None}, "logits"),
        case(kernels._sums_kernel, sums | result, within_bounds, "within bounds"),
        case(kernels._sums_kernel, sums | pieces, within_bounds, "pieces"),
        case(kernels._sums_kernel, sums | result | by_id, {}, "by id"),
    )


AOT_SIGNATURES = tuple(
    case for dtype in ("bf16", "fp32") for is_aligned in (True, False) for case in _cases(dtype, is_aligned)
)
