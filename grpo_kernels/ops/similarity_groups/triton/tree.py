"""Trees and silhouettes of one prompt's responses, as a tile of float64 in registers.

The arithmetic is that of reference.py to the bit, so that ties have one answer on every backend. A row of a tile is
read as a sum (or a minimum) over the tile with all other rows set to 0 (or infinity). Two rows at once are read as
their sum, each rounded before: the order of a sum of two does not matter, but a product must not be fused into it,
which callers ensure with `aot.EXACT`.
"""

import triton
import triton.language as tl

from grpo_kernels.ops.similarity_groups import config

SINGLE = tl.constexpr(config.SINGLE)
COMPLETE = tl.constexpr(config.COMPLETE)
AVERAGE = tl.constexpr(config.AVERAGE)
WARD = tl.constexpr(config.WARD)


@triton.jit
def items_in_use(distances_ptr, labels_ptr, prompt, places, WIDTH: tl.constexpr):
    """Number of places in use, those places in ascending order, and a mask of them."""
    place = tl.arange(0, WIDTH)
    inside = place < places
    diagonal = tl.load(distances_ptr + place * (places + 1), mask=inside, other=float("inf"))
    is_used = tl.abs(diagonal) < float("inf")
    if labels_ptr is not None:
        is_used = is_used & (tl.load(labels_ptr + prompt * places + place, mask=inside, other=-1) >= 0)
    item = tl.where(is_used, tl.cumsum(is_used.to(tl.int32), axis=0) - 1, -1)
    place_of = tl.sum(tl.where(item[:, None] == place[None, :], place[:, None], 0), axis=0)
    return tl.sum(is_used.to(tl.int32), axis=0), place_of, is_used


@triton.jit
def load_items(distances_ptr, place_of, places, count, WIDTH: tl.constexpr):
    """Distances between the items, 0 outside; and which are those of two different items."""
    item = tl.arange(0, WIDTH)
    row, column = item[:, None], item[None, :]
    inside = (row < count) & (column < count)
    address = distances_ptr + place_of[:, None] * places + place_of[None, :]
    return tl.load(address, mask=inside, other=0.0).to(tl.float64), inside & (row != column)


@triton.jit
def nearest_pair(linked, WIDTH: tl.constexpr):
    """The smallest (distance, lower item, higher item)."""
    item = tl.arange(0, WIDTH)
    place = item[:, None] * WIDTH + item[None, :]
    height = tl.min(linked)
    # The tile is symmetric: the first place is above the diagonal. The last is for distances that are no numbers.
    pair = tl.min(tl.where(linked == height, place, WIDTH * WIDTH - 1))
    return height, pair // WIDTH, pair % WIDTH


@triton.jit
def add_sizes(size, low, high, WIDTH: tl.constexpr):
    """The sizes after the merge, and that of the joint cluster. A `high` of -1 is empty."""
    item = tl.arange(0, WIDTH)
    joint = tl.sum(tl.where((item == low) | (item == high), size, 0.0), axis=0)
    return tl.where(item == low, joint, tl.where(item == high, 0.0, size)), joint


@triton.jit
def link(linked, size, joint, height, low, high, LINKAGE: tl.constexpr, WIDTH: tl.constexpr):
    """The distances after the merge (Lance and Williams); `size` is that before it."""
    item = tl.arange(0, WIDTH)
    both = (item == low) | (item == high)
    if LINKAGE == SINGLE:
        row = tl.min(tl.where(both[:, None], linked, float("inf")), axis=0)
    elif LINKAGE == COMPLETE:
        row = tl.max(tl.where(both[:, None], linked, float("-inf")), axis=0)
    else:
        weight = tl.where(both, size, 1.0)[:, None]  # 0 times infinity is no number
        if LINKAGE == WARD:
            weight = weight + size[None, :]
        row = tl.sum(tl.where(both[:, None], weight * linked, 0.0), axis=0)
        row = (row - size * height) / (joint + size) if LINKAGE == WARD else row / joint
    row = tl.where(both, float("inf"), row)
    linked = tl.where((item == low)[None, :], row[:, None], linked)
    linked = tl.where((item == low)[:, None], row[None, :], linked)
    gone = item == high
    return tl.where(gone[:, None] | gone[None, :], float("inf"), linked)


@triton.jit
def merge_all(distances, is_pair, count, LINKAGE: tl.constexpr, WIDTH: tl.constexpr):
    """For each item the one it is merged into, the number of that merge (WIDTH for never), and its height."""
    linked = tl.where(is_pair, distances * 2 if LINKAGE == WARD else distances, float("inf"))
    item = tl.arange(0, WIDTH)
    size = tl.where(item < count, 1.0, 0.0).to(tl.float64)
    parent = item
    merged_at = tl.zeros([WIDTH], tl.int32) + WIDTH
    heights = tl.full([WIDTH], float("inf"), tl.float64)
    top = tl.zeros([], tl.float64)
    for merge in range(0, count - 1):
        height, low, high = nearest_pair(linked, WIDTH)
        sizes, joint = add_sizes(size, low, high, WIDTH)
        linked = link(linked, size, joint, height, low, high, LINKAGE, WIDTH)
        size = sizes
        parent = tl.where(item == high, low, parent)
        merged_at = tl.where(item == high, merge, merged_at)
        top = tl.maximum(top, height)  # rounding may put an equal one below
        heights = tl.where(item == high, top, heights)
    return parent, merged_at, heights


@triton.jit
def join(sums, own, mates, joint, low, high, WIDTH: tl.constexpr):
    """sums[c, i] is the distance of item i to all of cluster c, own[i] its cluster, mates[i] the others in that."""
    item = tl.arange(0, WIDTH)
    both = (item == low) | (item == high)
    row = tl.sum(tl.where(both[:, None], sums, 0.0), axis=0)
    sums = tl.where((item == low)[:, None], row[None, :], sums)
    own = tl.where(own == high, low, own)
    return sums, own, tl.where(own == low, joint - 1, mates)


@triton.jit
def silhouettes(sums, own, mates, size, WIDTH: tl.constexpr):
    """Silhouette of every item, 0 for absent ones. Requires at least two clusters."""
    is_own = tl.arange(0, WIDTH)[:, None] == own[None, :]
    is_live = size > 0
    inverse = 1 / tl.where(is_live, size, 1.0)
    means = tl.where(is_own | (is_live == 0)[:, None], float("inf"), sums * inverse[:, None])
    nearest = tl.min(means, axis=0)
    is_alone = mates == 0
    within = tl.sum(tl.where(is_own, sums, 0.0), axis=0) / tl.where(is_alone, 1.0, mates)
    top = tl.maximum(within, nearest)
    is_zero = is_alone | (top == 0)
    return tl.where(is_zero, 0.0, (nearest - within) / tl.where(is_zero, 1.0, top))


@triton.jit
def ordered_sum(values, WIDTH: tl.constexpr):
    """By halves: the order in which every backend adds silhouettes."""
    for _ in tl.static_range(WIDTH.bit_length() - 2):
        values = tl.sum(tl.reshape(values, [2, values.shape[0] // 2]), axis=0)
    return tl.sum(values, axis=0)
