"""How many tokens the LM head computes at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

HALVES = (torch.float16, torch.bfloat16)

# Products on a GPU. The tile is that of cuBLAS for large products in half precision on an H100, which computes 230
# flops in the time of a byte.
TILE_TOKENS, TILE_COLUMNS, _FLOPS_PER_BYTE = 128, 256, 230
_PRODUCT_MEMORY = 2**31  # bytes for the logits of a chunk and gradients by logits


def tokens_per_chunk(tokens: int, vocabulary: int, device_type: str, dtype: torch.dtype) -> int:
    """A third of the tokens if there are many, as long as their logits are not too large.

    A chunk reads the weight twice, and reads and writes its gradient: 16 bytes an element for 6 flops a token. From 256
    tokens on, arithmetic dominates; a few hundred more make the products another few percent faster. The naive
    computation peaks at three or more times the logits of all tokens, so a third of them is a ninth of its memory.
    Beyond 192 MiB of logits (1 GiB on a GPU) larger chunks gain nothing. In half precision the gradient has memory and
    products of its own (tokens_per_product), so that 512 MiB suffice.
    """
    if device_type == "cpu":
        limit = max(64, 3 * 2**24 // vocabulary)
    else:
        limit = (2**27 if dtype in HALVES else 2**28) // vocabulary
        limit = max(TILE_TOKENS, limit // TILE_TOKENS * TILE_TOKENS)
    count = max(-(-tokens // limit), min(3, -(-tokens // 256)), 1)
    return in_blocks(-(-tokens // count), device_type)


def in_blocks(tokens: int, device_type: str) -> int:
    """At least as many tokens, in whole blocks of the products: a GPU computes the last tile as long as a full one."""
    block = 16 if device_type == "cpu" else TILE_TOKENS
    return max(1, -(-tokens // block) * block)


def tokens_per_product(
    tokens: int, chunk_tokens: int, shape: tuple[int, ...], needs_weight: bool, processors: int | None
) -> int:
    """Tokens whose gradient by the logits is kept in half precision until two products read it.

    One product over all tokens writes the gradient of the weight once, in its own dtype. Several must accumulate in
    float32, each reading and writing 4 bytes an element of the weight. So one is chosen if the gradients by the logits
    take no more memory than that accumulator and 2 GiB. Otherwise it is the size within 2 GiB that costs least:
    tiles of the product for the hidden states should fill all multiprocessors in every wave. On a CPU they may take no
    more than the accumulator, and otherwise a product is one of a chunk.

    Args:
        shape: of the weight, [V, H]
        processors: multiprocessors of the device; None for a CPU
    """
    if not needs_weight:
        return min(tokens, chunk_tokens)
    columns, width = shape
    accumulator = 4 * columns * width
    if processors is None:
        return tokens if 2 * tokens * columns <= accumulator else min(tokens, chunk_tokens)
    if 2 * tokens * columns <= accumulator + _PRODUCT_MEMORY - 4 * chunk_tokens * columns:
        return tokens
    most = max(1, (_PRODUCT_MEMORY - 4 * chunk_tokens * columns) // (2 * columns * TILE_TOKENS))
    tiles = -(-width // TILE_COLUMNS)

    def flops(size: int) -> int:
        """Flops of the product for the hidden states in whole waves, and those that the accumulation displaces."""
        count = -(-tokens // size)
        waves = count * -(-(size // TILE_TOKENS * tiles) // processors)
        wave = processors * TILE_TOKENS * TILE_COLUMNS * 2 * columns
        return waves * wave + (2 * count - 1) * accumulator * _FLOPS_PER_BYTE

    sizes = [blocks * TILE_TOKENS for blocks in range(1, most + 1)]
    return min(sizes, key=flops)


def chunks(tokens: int, size: int, ends: list[int] | None = None) -> Iterator[slice]:
    """Slices of at most `size` tokens; with the `ends` of sequences, of as many whole sequences as fit."""
    first = 0
    if ends is None:
        while first < tokens:
            yield slice(first, min(first + size, tokens))
            first += size
        return
    last = 0
    for end in ends:
        if end - first > size and last > first:
            yield slice(first, last)
            first = last
        last = end
    if last > first:
        yield slice(first, last)
