"""Memory layouts of tensors, and ids of rows, for the tests of several ops."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")
LAYOUTS = ("contiguous", "every_other", "column", "offset")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of the tensor in one of LAYOUTS.

    The memory between its elements holds NaN, or 1 for integers.
    """
    if layout == "contiguous":
        return tensor.contiguous()
    filler = NAN if tensor.is_floating_point() else 1
    if layout == "every_other":
        holder = tensor.new_full((2 * tensor.shape[0], *tensor.shape[1:]), filler)
        holder[::2] = tensor
        return holder[::2]
    if layout == "offset":
        return tensor.new_full((tensor.numel() + 1,), filler)[1:].view(tensor.shape).copy_(tensor)
    view = tensor.new_full((*reversed(tensor.shape), 3), filler)[..., 1].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


@st.composite
def ids(draw: st.DrawFn, sizes: list[int]) -> Tensor:
    """One int64 id per row, contiguous or shuffled: counting from 0, sparse, negative, or anywhere in int64."""
    count = len(sizes)
    any_id = st.integers(-(2**63), 2**63 - 1)
    names = draw(
        st.just(list(range(count)))
        | st.just([7 - 1000 * i for i in range(count)])
        | st.just([(i - 2) << 32 for i in range(count)])  # equal in their low 32 bits
        | st.lists(any_id, min_size=count, max_size=count, unique=True)
    )
    rows = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    return torch.tensor(draw(st.permutations(rows)) if draw(st.booleans()) else rows, dtype=torch.int64)
