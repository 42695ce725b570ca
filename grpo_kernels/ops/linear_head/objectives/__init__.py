"""Losses in the chunk loop, one in a file: what they read of logits, and the gradient by them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from grpo_kernels.ops.linear_head.products import Chunk, Tokens, Upstream


class Objective(Protocol):
    """A loss in the chunk loop."""

    def before(self, tokens: Tokens) -> Tensor | None:
        """Does what comes before the logits of a chunk. Returns ids to keep apart from the rest, negative for none."""

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> Upstream | None:
        """Takes what was measured of a chunk; fills in the gradient by it, if there is to be one."""

    def results(self) -> dict[str, Tensor]:
        """After the last chunk, what was computed, by the names of Call.results."""
