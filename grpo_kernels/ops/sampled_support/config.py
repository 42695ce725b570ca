"""The checked form of a support, which all backends share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Entries(NamedTuple):
    """Kept token ids of N rows, one after the other, as int64 tensors.

    A row takes part if its target is not ignored and it keeps more than one id: the only id of a row is certain.

    Attributes:
        token_ids: kept ids [E]
        rows: row of each entry [E]; -1 for entries of rows that take no part
        bounds: entries of row i are bounds[i] to bounds[i + 1] - 1 [N + 1]
        places: target of each row as a place among its entries [N]; IGNORED for ignored rows, -1 if it is not kept
        order: entries by ascending token id, then row; those of rows that take no part are last [E]
    """

    token_ids: Tensor
    rows: Tensor
    bounds: Tensor
    places: Tensor
    order: Tensor
