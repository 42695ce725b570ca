"""similarity_groups in Triton: products of rows tile by tile, then one program per prompt for its tree and its cuts.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from collections import namedtuple
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.aot import EXACT
from grpo_kernels.ops.similarity_groups import config
from grpo_kernels.ops.similarity_groups.triton.tree import (
    WARD,
    add_sizes,
    items_in_use,
    join,
    load_items,
    merge_all,
    ordered_sum,
    silhouettes,
)

ONE = tl.constexpr(config.ONE)
CLUSTERED = tl.constexpr(int(config.Verdict.CLUSTERED))
ALL_SAME = tl.constexpr(int(config.Verdict.ALL_SAME))
ALL_DIFFERENT = tl.constexpr(int(config.Verdict.ALL_DIFFERENT))
SMALL = tl.constexpr(int(config.Verdict.SMALL))
EMPTY = tl.constexpr(int(config.Verdict.EMPTY))
UNCLEAR = tl.constexpr(int(config.Verdict.UNCLEAR))
MASKED = tl.constexpr(int(config.RowStatus.MASKED))
NOT_FINITE = tl.constexpr(int(config.RowStatus.NOT_FINITE))
ZERO_VECTOR = tl.constexpr(int(config.RowStatus.ZERO_VECTOR))
_LARGEST, _LEAST = tl.constexpr(3.4028234663852886e38), tl.constexpr(1e-30)  # of squared norms

# The fields of a plan by which a prompt's number of groups is chosen.
Choice = namedtuple("Choice", "k_min k_max collapse different min_silhouette tie_tolerance distance_floor different_at")

# The same tile of products for prompts of every size, so that all sum in the same order.
ROWS_AT_ONCE = tl.constexpr(4)
_ACROSS, _DEPTH, _PRODUCT_WARPS = 16, 64, 4
_DISTANCE_ROWS, _DISTANCE_WARPS = 8, 4
_NARROWEST = 16
# By the width of a tile: as few as spill nothing.
_TREE_WARPS, _CUT_WARPS = {16: 1, 32: 4, 64: 8}, {16: 2, 32: 4, 64: 16}
# Nothing is compiled anew for another number of rows or groups; for one of columns only as its alignment changes.
_RUNTIME = ["places", "k_min", "k_max", "collapse", "different"]


@triton.jit
def _first_row(offsets_ptr, prompt, places):
    """First row of a prompt, and its number of rows."""
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + prompt)
        # never more than there is room for
        return first, tl.minimum(tl.load(offsets_ptr + prompt + 1) - first, places)
    return prompt * places, tl.zeros([], tl.int64) + places


@triton.jit
def _rows(order_ptr, first, place, is_row):
    if order_ptr is not None:
        return tl.load(order_ptr + first + place, mask=is_row, other=0)
    return first + place


@triton.jit
def _row_start(order_ptr, first, place, count, depth):
    """Start of a row. Past the last row it is that of the last, whose values are not used."""
    place = tl.minimum(place, count - 1)
    return _rows(order_ptr, first, place, place < count) * depth


@triton.jit
def _add_products(embeddings_ptr, row_start, columns, d, depth, sums):
    row = tl.load(embeddings_ptr + row_start + d, mask=d < depth, other=0.0).to(tl.float32)
    # that equal rows have equal products must not hang on what the compiler fuses
    return tl.fma(columns, tl.broadcast_to(row[None, :], columns.shape), sums)


@triton.jit
def _store_products(products_ptr, sums, row, column, count, places):
    product = tl.sum(sums.to(tl.float64), axis=1)
    is_wanted = (row <= column) & (column < count)
    tl.store(products_ptr + row * places + column, product, mask=is_wanted)
    tl.store(products_ptr + column * places + row, product, mask=is_wanted & (row < column))


@triton.jit(do_not_specialize=_RUNTIME)
def _products_kernel(
    embeddings_ptr,
    order_ptr,
    offsets_ptr,
    products_ptr,
    places: "i32",
    depth: "i32",
    ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """products[P, K, K] of rows with each other. An element's sums are the same whatever its place in the tile."""
    prompt = tl.program_id(0).to(tl.int64)
    first, count = _first_row(offsets_ptr, prompt, places)
    tiles = tl.cdiv(places, ACROSS)
    row, left = tl.program_id(1) // tiles * ROWS_AT_ONCE, tl.program_id(1) % tiles * ACROSS
    # tiles below the diagonal are mirrors
    if (left + ACROSS > row) & (row < count) & (left < count):
        column = left + tl.arange(0, ACROSS)
        starts = _rows(order_ptr, first, column, column < count) * depth
        start_0 = _row_start(order_ptr, first, row, count, depth)
        start_1 = _row_start(order_ptr, first, row + 1, count, depth)
        start_2 = _row_start(order_ptr, first, row + 2, count, depth)
        start_3 = _row_start(order_ptr, first, row + 3, count, depth)
        sums_0 = tl.zeros([ACROSS, DEPTH], tl.float32)
        sums_1 = tl.zeros([ACROSS, DEPTH], tl.float32)
        sums_2 = tl.zeros([ACROSS, DEPTH], tl.float32)
        sums_3 = tl.zeros([ACROSS, DEPTH], tl.float32)
        for begin in range(0, depth, DEPTH):
            d = begin + tl.arange(0, DEPTH)
            inside = (column < count)[:, None] & (d < depth)[None, :]
            columns = tl.load(embeddings_ptr + starts[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
            sums_0 = _add_products(embeddings_ptr, start_0, columns, d, depth, sums_0)
            sums_1 = _add_products(embeddings_ptr, start_1, columns, d, depth, sums_1)
            sums_2 = _add_products(embeddings_ptr, start_2, columns, d, depth, sums_2)
            sums_3 = _add_products(embeddings_ptr, start_3, columns, d, depth, sums_3)
        products_ptr += prompt * places * places
        _store_products(products_ptr, sums_0, row, column, count, places)
        _store_products(products_ptr, sums_1, row + 1, column, count, places)
        _store_products(products_ptr, sums_2, row + 2, column, count, places)
        _store_products(products_ptr, sums_3, row + 3, column, count, places)


@triton.jit(do_not_specialize=_RUNTIME)
def _distances_kernel(
    products_ptr,
    valid_ptr,
    order_ptr,
    offsets_ptr,
    distances_ptr,
    status_ptr,
    places: "i32",
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    prompt = tl.program_id(0).to(tl.int64)
    first, count = _first_row(offsets_ptr, prompt, places)
    place, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    products_ptr += prompt * places * places
    row_norm = tl.load(products_ptr + place * (places + 1), mask=place < count, other=float("inf"))
    column_norm = tl.load(products_ptr + column * (places + 1), mask=column < count, other=float("inf"))
    row = _rows(order_ptr, first, place, place < count)
    row_present, column_present = row_norm <= _LARGEST, column_norm <= _LARGEST
    status = tl.where(row_present, tl.where(row_norm < _LEAST, ZERO_VECTOR, 0), NOT_FINITE)
    if valid_ptr is not None:
        others = _rows(order_ptr, first, column, column < count)
        row_valid = tl.load(valid_ptr + row, mask=place < count, other=0) != 0
        status = tl.where(row_valid, status, MASKED)
        row_present = row_present & row_valid
        column_present = column_present & (tl.load(valid_ptr + others, mask=column < count, other=0) != 0)
    tl.store(status_ptr + row, status.to(tl.uint8), mask=place < count)

    i, j = place[:, None], column[None, :]
    present = row_present[:, None] & column_present[None, :]
    product = tl.load(products_ptr + i * places + j, mask=present, other=0.0)
    is_zero = (row_norm < _LEAST)[:, None] | (column_norm < _LEAST)[None, :]
    measurable = present & (is_zero == 0)
    norms = tl.where(measurable, row_norm[:, None] * column_norm[None, :], 1.0)
    distance = 1 - product / tl.sqrt(norms)
    distance = tl.where(distance < 0, 0.0, tl.where(distance > 2, 2.0, distance))
    distance = tl.where(i == j, 0.0, tl.where(is_zero, 1.0, distance))
    distance = tl.where(present, distance, float("inf")).to(tl.float32)
    tl.store(distances_ptr + prompt * places * places + i * places + j, distance, mask=(i < places) & (j < places))


@triton.jit
def _choose(scores, count, lowest, highest, choice, WIDTH: tl.constexpr):
    """Number of groups, k with the best silhouette, that silhouette, verdict."""
    k = tl.arange(0, WIDTH)
    is_tried = (k >= choice.k_min) & (k <= choice.k_max) & (k < count)
    best = tl.max(tl.where(is_tried, scores, -1.0), axis=0)
    best_k = tl.min(tl.where(is_tried & (scores >= best - choice.tie_tolerance), k, WIDTH), axis=0)
    best_k = tl.where(best_k == WIDTH, 1, best_k)
    silhouette = tl.sum(tl.where(is_tried & (k == best_k), scores, 0.0), axis=0)
    is_different = lowest > choice.different_at
    becomes = tl.where(is_different, choice.different, choice.collapse)
    groups = tl.where(becomes == ONE, 1, count)
    verdict = tl.where(is_different, ALL_DIFFERENT, UNCLEAR)
    is_clustered = (best_k > 1) & (silhouette >= choice.min_silhouette)
    groups = tl.where(is_clustered, best_k, groups)
    verdict = tl.where(is_clustered, CLUSTERED, verdict)
    is_same = highest <= choice.distance_floor
    groups = tl.where(is_same, 1, groups)
    verdict = tl.where(is_same, ALL_SAME, verdict)
    is_small = count < 3
    groups = tl.where(is_small, tl.minimum(count, 1), groups)
    best_k = tl.where(is_small, groups, best_k)
    verdict = tl.where(is_small, tl.where(count > 0, SMALL, EMPTY), verdict)
    return groups, best_k, tl.where(is_small, 0.0, silhouette), verdict


@triton.jit
def _label(parent, merged_at, merges, count, DOUBLINGS: tl.constexpr, WIDTH: tl.constexpr):
    """Labels of the items after a number of merges, in order of first appearance: clusters go by their first item."""
    item = tl.arange(0, WIDTH)
    root = tl.where(merged_at < merges, parent, item)
    for _ in tl.static_range(DOUBLINGS):
        root = tl.gather(root, root, 0)
    is_root = (root == item) & (item < count)
    return tl.gather(tl.cumsum(is_root.to(tl.int32), axis=0) - 1, root, 0)


@triton.jit(do_not_specialize=_RUNTIME)
def _tree_kernel(
    distances_ptr, parents_ptr, merges_ptr, heights_ptr, places: "i32", LINKAGE: tl.constexpr, WIDTH: tl.constexpr
):
    """merges[P, K - 1, 2] and heights[P, K - 1]; or for _cuts_kernel parents[P, 2, WIDTH], see merge_all."""
    prompt = tl.program_id(0).to(tl.int64)
    distances_ptr += prompt * places * places
    count, place_of, _ = items_in_use(distances_ptr, None, prompt, places, WIDTH)
    distances, is_pair = load_items(distances_ptr, place_of, places, count, WIDTH)
    parent, merged_at, heights = merge_all(distances, is_pair, count, LINKAGE, WIDTH)
    item = tl.arange(0, WIDTH)
    if parents_ptr is not None:
        parents_ptr += prompt * (2 * WIDTH) + item
        tl.store(parents_ptr, parent)
        tl.store(parents_ptr + WIDTH, merged_at)
    if merges_ptr is not None:
        if LINKAGE == WARD:
            heights = tl.sqrt(heights)
        merges_ptr += prompt * (places - 1) * 2
        heights_ptr += prompt * (places - 1)
        is_merged = merged_at < WIDTH
        tl.store(merges_ptr + 2 * merged_at, tl.gather(place_of, parent, 0), mask=is_merged)
        tl.store(merges_ptr + 2 * merged_at + 1, place_of, mask=is_merged)
        tl.store(heights_ptr + merged_at, heights.to(tl.float32), mask=is_merged)
        is_none = (item >= tl.maximum(count - 1, 0)) & (item < places - 1)
        nothing = tl.zeros([WIDTH], tl.int32) - 1
        tl.store(merges_ptr + 2 * item, nothing, mask=is_none)
        tl.store(merges_ptr + 2 * item + 1, nothing, mask=is_none)
        tl.store(heights_ptr + item, tl.full([WIDTH], float("inf"), tl.float32), mask=is_none)


@triton.jit(do_not_specialize=_RUNTIME)
def _cuts_kernel(
    distances_ptr,
    parents_ptr,
    order_ptr,
    offsets_ptr,
    labels_ptr,
    ids_ptr,
    groups_ptr,
    silhouette_ptr,
    best_k_ptr,
    verdict_ptr,
    places: "i32",
    k_min: "i32",
    k_max: "i32",
    collapse: "i32",
    different: "i32",
    min_silhouette: "fp64",
    tie_tolerance: "fp64",
    distance_floor: "fp64",
    different_at: "fp64",
    WIDTH: tl.constexpr,
):
    prompt = tl.program_id(0).to(tl.int64)
    distances_ptr += prompt * places * places
    count, place_of, is_used = items_in_use(distances_ptr, None, prompt, places, WIDTH)
    sums, is_pair = load_items(distances_ptr, place_of, places, count, WIDTH)
    lowest = tl.min(tl.where(is_pair, sums, float("inf")))
    highest = tl.max(sums)
    item = tl.arange(0, WIDTH)
    parents_ptr += prompt * (2 * WIDTH) + item
    parent, merged_at = tl.load(parents_ptr), tl.load(parents_ptr + WIDTH)

    size = tl.where(item < count, 1.0, 0.0).to(tl.float64)
    mates = tl.zeros([WIDTH], tl.float64)
    scores = tl.zeros([WIDTH], tl.float64)
    own = item
    for k in range(count - 1, k_min - 1, -1):
        is_high = merged_at == count - 1 - k
        low = tl.sum(tl.where(is_high, parent, 0), axis=0)
        high = tl.sum(tl.where(is_high, item, 0), axis=0)
        size, joint = add_sizes(size, low, high, WIDTH)
        sums, own, mates = join(sums, own, mates, joint, low, high, WIDTH)
        if k <= k_max:
            score = ordered_sum(silhouettes(sums, own, mates, size, WIDTH), WIDTH) / count
            scores = tl.where(item == k, score, scores)

    choice = Choice(k_min, k_max, collapse, different, min_silhouette, tie_tolerance, distance_floor, different_at)
    groups, best_k, silhouette, verdict = _choose(scores, count, lowest, highest, choice, WIDTH)
    tl.store(groups_ptr + prompt, groups)
    tl.store(best_k_ptr + prompt, best_k)
    tl.store(silhouette_ptr + prompt, silhouette.to(tl.float32))
    tl.store(verdict_ptr + prompt, verdict.to(tl.uint8))

    label = _label(parent, merged_at, count - groups, count, WIDTH.bit_length() - 1, WIDTH)
    first, rows = _first_row(offsets_ptr, prompt, places)
    left_out = (is_used == 0) & (item < rows)
    row, other_row = _rows(order_ptr, first, place_of, item < count), _rows(order_ptr, first, item, left_out)
    nothing = tl.zeros([WIDTH], tl.int32) - 1
    tl.store(labels_ptr + row, label, mask=item < count)
    tl.store(labels_ptr + other_row, nothing, mask=left_out)
    if ids_ptr is not None:
        tl.store(ids_ptr + row, label + first, mask=item < count)
        tl.store(ids_ptr + other_row, nothing.to(tl.int64), mask=left_out)


@triton.jit(do_not_specialize=_RUNTIME)
def _silhouette_kernel(distances_ptr, labels_ptr, score_ptr, samples_ptr, places: "i32", WIDTH: tl.constexpr):
    prompt = tl.program_id(0).to(tl.int64)
    distances_ptr += prompt * places * places
    count, place_of, is_used = items_in_use(distances_ptr, labels_ptr, prompt, places, WIDTH)
    sums, _ = load_items(distances_ptr, place_of, places, count, WIDTH)
    item = tl.arange(0, WIDTH)
    label = tl.load(labels_ptr + prompt * places + place_of, mask=item < count, other=-1)
    lower, higher = item[:, None], item[None, :]
    alike = (label[:, None] == label[None, :]) & (lower < higher)
    first = tl.min(tl.where(alike, lower, higher), axis=0)
    size = tl.where(item < count, 1.0, 0.0).to(tl.float64)
    mates = tl.zeros([WIDTH], tl.float64)
    own = item
    for i in range(0, count):
        low = tl.sum(tl.where(item == i, first, 0), axis=0)
        high = tl.where(low < i, i, -1)
        size, joint = add_sizes(size, low, high, WIDTH)
        sums, own, mates = join(sums, own, mates, joint, low, high, WIDTH)

    sample = tl.full([WIDTH], float("nan"), tl.float64)
    score = tl.full([], float("nan"), tl.float64)
    if tl.sum((size > 0).to(tl.int32), axis=0) >= 2:
        sample = silhouettes(sums, own, mates, size, WIDTH)
        score = ordered_sum(sample, WIDTH) / count
    tl.store(score_ptr + prompt, score.to(tl.float32))
    samples_ptr += prompt * places
    tl.store(samples_ptr + place_of, sample.to(tl.float32), mask=item < count)
    tl.store(samples_ptr + item, tl.full([WIDTH], float("nan"), tl.float32), mask=(is_used == 0) & (item < places))


def forward(
    embeddings: Tensor,
    order: Optional[Tensor],
    offsets: Optional[Tensor],
    num_groups: int,
    size: int,
    valid: Optional[Tensor],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, ...]:
    distances, status = pairwise_cosine(embeddings, order, offsets, num_groups, size, valid)
    labels = status.new_empty(status.shape, dtype=torch.int32)
    ids = status.new_empty(status.shape, dtype=torch.int64)
    of_prompts = _cluster(distances, order, offsets, labels, ids, modes, coefficients)
    return labels, ids, *of_prompts, status


def pairwise_cosine(
    embeddings: Tensor,
    order: Optional[Tensor],
    offsets: Optional[Tensor],
    num_groups: int,
    size: int,
    valid: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    depth = embeddings.shape[1]
    distances = embeddings.new_empty((num_groups, size, size), dtype=torch.float32)
    status = embeddings.new_empty(len(embeddings), dtype=torch.uint8)
    if distances.numel() == 0:
        return distances, status
    products = torch.empty_like(distances, dtype=torch.float64)
    tiles = triton.cdiv(size, ROWS_AT_ONCE.value) * triton.cdiv(size, _ACROSS)
    _products_kernel[(num_groups, tiles)](
        embeddings,
        order,
        offsets,
        products,
        size,
        depth,
        ACROSS=_ACROSS,
        DEPTH=_DEPTH,
        num_warps=_PRODUCT_WARPS,
        **EXACT,
    )
    _distances_kernel[(num_groups, triton.cdiv(size, _DISTANCE_ROWS))](
        products,
        None if valid is None else valid.view(torch.uint8),
        order,
        offsets,
        distances,
        status,
        size,
        ROWS=_DISTANCE_ROWS,
        WIDTH=_width(size),
        num_warps=_DISTANCE_WARPS,
        **EXACT,
    )
    return distances, status


def cluster_distances(distances: Tensor, modes: list[int], coefficients: list[float]) -> tuple[Tensor, ...]:
    labels = distances.new_empty(distances.shape[:2], dtype=torch.int32)
    return labels, *_cluster(distances, None, None, labels, None, modes, coefficients)


def agglomerate(distances: Tensor, linkage: int) -> tuple[Tensor, Tensor]:
    prompts, size = distances.shape[:2]
    merges = distances.new_empty((prompts, max(size - 1, 0), 2), dtype=torch.int32)
    heights = distances.new_empty((prompts, max(size - 1, 0)))
    if heights.numel() > 0:
        _tree_kernel[(prompts,)](distances, None, merges, heights, size, LINKAGE=linkage, **_options(size, _TREE_WARPS))
    return merges, heights


def silhouette(distances: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    prompts, size = distances.shape[:2]
    scores, samples = distances.new_empty(prompts), distances.new_empty(prompts, size)
    if prompts > 0:
        _silhouette_kernel[(prompts,)](distances, labels, scores, samples, size, **_options(size, _TREE_WARPS))
    return scores, samples


def _cluster(
    distances: Tensor,
    order: Optional[Tensor],
    offsets: Optional[Tensor],
    labels: Tensor,
    ids: Optional[Tensor],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    prompts, size = distances.shape[:2]
    plan = config.Plan(*modes, *coefficients)
    parents = distances.new_empty((prompts, 2, _width(size)), dtype=torch.int32)
    groups, best_k = (distances.new_empty(prompts, dtype=torch.int32) for _ in range(2))
    silhouettes, verdict = distances.new_empty(prompts), distances.new_empty(prompts, dtype=torch.uint8)
    if prompts > 0:
        _tree_kernel[(prompts,)](
            distances, parents, None, None, size, LINKAGE=plan.linkage, **_options(size, _TREE_WARPS)
        )
        _cuts_kernel[(prompts,)](
            distances,
            parents,
            order,
            offsets,
            labels,
            ids,
            groups,
            silhouettes,
            best_k,
            verdict,
            size,
            plan.k_min,
            plan.k_max,
            plan.collapse,
            plan.different,
            plan.min_silhouette,
            plan.tie_tolerance,
            plan.distance_floor,
            plan.different_at,
            **_options(size, _CUT_WARPS),
        )
    return groups, silhouettes, best_k, verdict


def _width(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), _NARROWEST)


def _options(size: int, warps: dict[int, int]) -> dict[str, Any]:
    width = _width(size)
    return {"WIDTH": width, "num_warps": warps[width], **EXACT}
