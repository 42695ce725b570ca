"""Specialisations of the Triton kernels of similarity_groups that tools/aot_compile.py compiles without a GPU."""

from __future__ import annotations

from typing import Any

from grpo_kernels.aot import EXACT, AotCase
from grpo_kernels.ops.similarity_groups import triton as kernels


def _aot_cases() -> tuple[AotCase, ...]:
    rows = {"order_ptr": "*i64", "offsets_ptr": "*i64"}
    neighbours = dict.fromkeys(rows)
    distances = {"distances_ptr": "*fp32", "places": "i32"}
    of_rows = distances | {"products_ptr": "*fp64", "status_ptr": "*u8"}
    modes = dict.fromkeys(("k_min", "k_max", "collapse", "different"), "i32")
    limits = dict.fromkeys(("min_silhouette", "tie_tolerance", "distance_floor", "different_at"), "fp64")
    parents = {"parents_ptr": "*i32"}
    cuts = distances | parents | modes | limits | {"labels_ptr": "*i32", "groups_ptr": "*i32", "best_k_ptr": "*i32"}
    cuts |= {"silhouette_ptr": "*fp32", "verdict_ptr": "*u8"}
    merges = {"merges_ptr": "*i32", "heights_ptr": "*fp32"}
    scores = distances | {"labels_ptr": "*i64", "score_ptr": "*fp32", "samples_ptr": "*fp32"}

    def products(label: str, types: dict[str, str], constants: dict[str, Any]) -> AotCase:
        types = types | {"products_ptr": "*fp64", "places": "i32", "depth": "i32"}
        tile = {"ACROSS": kernels._ACROSS, "DEPTH": kernels._DEPTH}
        aligned = ("embeddings_ptr", "depth")
        kernel, warps = kernels._products_kernel, kernels._PRODUCT_WARPS
        return AotCase(kernel, types, tile | constants, warps, label=label, aligned=aligned, options=EXACT)

    def of_prompts(kernel: Any, width: int, label: str, types: dict[str, str], constants: dict[str, Any]) -> AotCase:
        warps = kernels._CUT_WARPS if kernel is kernels._cuts_kernel else kernels._TREE_WARPS
        return AotCase(kernel, types, {"WIDTH": width, **constants}, warps[width], label=label, options=EXACT)

    def tree(linkage: str, width: int) -> AotCase:
        number = ("single", "complete", "average", "ward").index(linkage)
        nothing = {"LINKAGE": number, **dict.fromkeys(merges)}
        return of_prompts(kernels._tree_kernel, width, f"{linkage}, {width}", distances | parents, nothing)

    return (
        products("bf16, neighbours", {"embeddings_ptr": "*bf16"}, neighbours),
        products("fp32, ids", rows | {"embeddings_ptr": "*fp32"}, {}),
        AotCase(
            kernels._distances_kernel,
            of_rows | rows | {"valid_ptr": "*u8"},
            {"WIDTH": 64, "ROWS": kernels._DISTANCE_ROWS},
            kernels._DISTANCE_WARPS,
            options=EXACT,
        ),
        tree("single", 16),
        tree("average", 32),
        tree("single", 64),
        tree("complete", 64),
        tree("average", 64),
        tree("ward", 64),
        of_prompts(
            kernels._tree_kernel, 64, "ward, 64, merges", distances | merges, {"LINKAGE": 3, "parents_ptr": None}
        ),
        of_prompts(kernels._cuts_kernel, 16, "16", cuts, neighbours | {"ids_ptr": None}),
        of_prompts(kernels._cuts_kernel, 32, "32", cuts, neighbours | {"ids_ptr": None}),
        of_prompts(kernels._cuts_kernel, 64, "64, ids", cuts | rows | {"ids_ptr": "*i64"}, {}),
        of_prompts(kernels._silhouette_kernel, 64, "64", scores, {}),
    )


AOT_SIGNATURES = _aot_cases()
