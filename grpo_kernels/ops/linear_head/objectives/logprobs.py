"""Log-probs and entropies of all tokens, whose gradient is known in the backward alone."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import Head, Shard
from grpo_kernels.ops.linear_head.products import Chunk, Known, Tokens, Upstream


class Logprobs:
    """With a shard, each rank measures its own columns, and one all-reduce of all tokens combines them."""

    def __init__(self, head: Head, want_entropy: bool, shard: Shard | None) -> None:
        self.targets, self.want_entropy, self.shard = head.targets, want_entropy, shard
        self.logprobs = head.hidden.new_empty(len(head.hidden), dtype=head.wide)
        self.entropy = self.logprobs.new_empty(len(self.logprobs) if want_entropy or shard is not None else 0)
        self.normalizer = torch.empty_like(self.logprobs, dtype=torch.float64)

    def before(self, tokens: Tokens) -> None:
        pass

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> None:
        self.logprobs[tokens], self.normalizer[tokens] = chunk.logprobs, chunk.normalizer
        if len(self.entropy) > 0:
            self.entropy[tokens] = chunk.entropy

    def results(self) -> dict[str, Tensor]:
        measured = self.logprobs, self.entropy, self.normalizer
        if self.shard is not None:
            measured = self.shard.combine(measured, self.targets)
        logprobs, entropy, normalizer = measured
        of_entropy = {"entropy": entropy} if self.want_entropy else {}
        return {"logprobs": logprobs, "normalizer": normalizer, **of_entropy}


class LogprobsGradient:
    """Multiplies the gradients that came from elsewhere by those of log-probs and entropies."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def before(self, tokens: Tokens) -> None:
        pass

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> Upstream | None:
        assert upstream is not None
        by_logprobs, by_entropy = self.known.by_logprobs, self.known.by_entropy
        return upstream._replace(
            by_logprob=None if by_logprobs is None else by_logprobs[tokens],
            by_entropy=None if by_entropy is None else by_entropy[tokens],
        )

    def results(self) -> dict[str, Tensor]:
        return {}
