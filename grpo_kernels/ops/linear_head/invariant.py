"""Matrix products of a few fixed shapes, in which a row's bits depend on neither its place nor the other rows.

A BLAS chooses its kernels and the order of its sums by the shapes, and may treat the last rows of a product in another
way than the first. So rows are multiplied in blocks of fixed sizes, with rows of zeros behind the last, from memory in
which every row is aligned alike: MKL computes rows of float64 at odd multiples of 8 bytes with other bits. No BLAS
promises anything about places. Therefore each new shape is tried once in a process: a block of equal rows must have
equal results, and blocks of other sizes the same ones, bit by bit. Sizes that fail are not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # items that rows of a matrix are padded to: 64 bytes of float32
# On the CPU the largest is 2 % slower than products of a third of 1024 rows, and half of it 6 %; the others keep small
# batches cheap.
_CPU_SIZES = (256, 128, 64, 32, 16)
_GPU_LOGITS, _GPU_MOST, _GPU_LEAST = 2**28, 1024, 128
_ONE_BY_ONE = (1,)  # always invariant, as no row has another place
_SAMPLES = 256  # results compared per size and direction: by chance two orders of a sum may round alike

Multiply = Callable[[Tensor, Tensor, Tensor], None]  # writes a @ b to its last argument

_tried: dict[tuple[Any, ...], tuple[int, ...]] = {}


def sizes_of_blocks(columns: int, on_cpu: bool) -> tuple[int, ...]:
    """Rows of a block, descending, from the shape of the weight alone; each divides the one before it.

    On a GPU there is one size, up to 1024 rows so that the product for the hidden states has enough tiles for all
    multiprocessors, and fewer where their logits would take more than 1 GiB.
    """
    if on_cpu:
        return _CPU_SIZES
    rows = _GPU_MOST
    while rows > _GPU_LEAST and rows * columns > _GPU_LOGITS:
        rows //= 2
    return (rows,)


def whole_blocks(rows: int, columns: int, on_cpu: bool) -> int:
    """`rows`, rounded up to whole blocks of the largest size."""
    largest = sizes_of_blocks(columns, on_cpu)[0]
    return -(-rows // largest) * largest


def rows_within(rows: int, columns: int, on_cpu: bool) -> int:
    """`rows` of a chunk, rounded down to whole blocks of the largest size, so that no memory holds rows of zeros."""
    largest = sizes_of_blocks(columns, on_cpu)[0]
    return max(largest, rows // largest * largest)


class Blocks:
    """Blocks of rows for products with a weight.

    Args:
        multiply: computes a product
        weight: [V, H], as it is multiplied
        tile: memory for logits, of whole blocks, which is overwritten
        by_logits_dtype: dtype of the gradients by logits
        on_cpu: the products are those of the CPU backend
    """

    def __init__(
        self, multiply: Multiply, weight: Tensor, tile: Tensor, by_logits_dtype: torch.dtype, on_cpu: bool
    ) -> None:
        self.multiply, self.weight = multiply, weight
        columns, width = weight.shape
        self.sizes = sizes_of_blocks(columns, on_cpu)
        self.memory = aligned(weight, self.sizes[0], width, weight.dtype)
        if len(tile) > 0:
            self.sizes = self._tried_sizes(tile[:, :columns], by_logits_dtype)

    def parts(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """First row of each block, its rows, and its size, which may be larger."""
        largest = self.sizes[0]
        for first in range(0, rows, largest):
            count = min(largest, rows - first)
            yield first, count, min(size for size in self.sizes if size >= count)

    def to_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Writes `hidden` @ weight.T to the first rows of `logits`, and anything to the others."""
        for first, count, size in self.parts(len(hidden)):
            padded = self.memory[:size]
            padded[:count].copy_(hidden[first : first + count])
            padded[count:].zero_()
            self.multiply(padded, self.weight.t(), logits[first : first + size])

    def to_hidden(self, by_logits: Tensor, result_dtype: torch.dtype) -> Tensor:
        """`by_logits` @ weight. Rows behind its last, in the memory that it is a part of, are read as well."""
        rows, columns = by_logits.shape
        largest = self.sizes[0]
        whole = -(-rows // largest) * largest
        result = aligned(self.weight, whole, self.weight.shape[1], result_dtype)
        # whatever they hold, it does not reach the rows of the result that are kept
        padded = by_logits.as_strided((whole, columns), by_logits.stride())
        for first, _, size in self.parts(rows):
            self.multiply(padded[first : first + size], self.weight, result[first : first + size])
        return result[:rows]

    def _tried_sizes(self, tile: Tensor, by_logits_dtype: torch.dtype) -> tuple[int, ...]:
        weight = self.weight
        place = (weight.device, weight.shape, weight.stride(), weight.dtype, weight.data_ptr() % 64)
        setting = (torch.get_num_threads(), torch.get_float32_matmul_precision())
        key = (*place, tile.stride(), tile.dtype, by_logits_dtype, self.sizes, *setting)
        if key in _tried:
            return _tried[key]
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"linear head: invariant must be tried before a CUDA graph is captured, got new shape "
                f"{list(weight.shape)}; run once outside of the capture"
            )
        sizes, is_telling = self._try(tile, by_logits_dtype)
        if is_telling:
            _tried[key] = sizes
        return sizes

    def _try(self, tile: Tensor, by_logits_dtype: torch.dtype) -> tuple[tuple[int, ...], bool]:
        """Sizes that gave equal rows the same bits, and whether the results could have shown a difference."""
        weight = self.weight
        columns, width = weight.shape
        generator = torch.Generator().manual_seed(0)  # the global one is the caller's
        sizes, is_telling = self.sizes, True
        for _ in range(-(-_SAMPLES // min(columns, width, _SAMPLES))):
            row = torch.randn(width, generator=generator).to(weight.device, weight.dtype)
            expected: list[Tensor] = []
            for size in sizes:
                self.memory[:size] = row
                logits = tile[:size]
                self.multiply(self.memory[:size], weight.t(), logits)
                by_logits = logits
                if logits.dtype != by_logits_dtype:
                    by_logits = aligned(weight, size, columns, by_logits_dtype).copy_(logits)
                result = aligned(weight, size, width, torch.promote_types(by_logits_dtype, torch.float32))
                self.multiply(by_logits, weight, result)
                results = logits, result
                if not expected and all(_are_equal(rows, rows[0]) for rows in results):
                    expected = [rows[0].clone() for rows in results]
                    is_telling &= all(bool((rows[0] - rows[0] == 0).all() and rows[0].any()) for rows in results)
                    continue
                if not expected or not all(map(_are_equal, results, expected)):
                    sizes = tuple(other for other in sizes if other != size)
        if not sizes:
            warnings.warn(
                f"linear head: equal rows have different bits in products with a weight of shape {list(weight.shape)} "
                f"and {weight.dtype} on {weight.device}; with invariant=True rows are multiplied one by one",
                RuntimeWarning,
                stacklevel=2,
            )
        return sizes or _ONE_BY_ONE, is_telling


def aligned(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for [rows, columns], in which all rows are aligned alike."""
    stride = -(-columns // ALIGNMENT) * ALIGNMENT
    return like.new_empty((rows, stride), dtype=dtype)[:, :columns]


def _are_equal(rows: Tensor, row: Tensor) -> bool:
    """Whether all rows have these bits; unlike ==, NaN is equal to itself, and 0 is not -0."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return bool((rows.view(bits) == row.view(bits)).all())
