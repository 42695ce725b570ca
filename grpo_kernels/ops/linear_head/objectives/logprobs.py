"""Log-probs and entropies of all tokens, whose gradient is known in the backward alone."""

from __future__ import annotations

from torch import Tensor

from grpo_kernels.ops.linear_head.head import Head, Measurements, Shard, Want
from grpo_kernels.ops.linear_head.products import Chunk, Known, Tokens, Upstream


class Logprobs:
    """With a shard, each rank measures its own columns, and one all-reduce of all tokens combines them."""

    def __init__(self, head: Head, want: Want, shard: Shard | None) -> None:
        self.targets, self.shard = head.targets, shard
        self.measured = Measurements.zeros(head, want, with_normalizer=True)

    def before(self, tokens: Tokens) -> None:
        pass

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> None:
        self.measured.keep(chunk.measured, tokens)

    def results(self) -> dict[str, Tensor]:
        measured = self.measured if self.shard is None else self.shard.combine(self.measured, self.targets)
        return measured._asdict()


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
