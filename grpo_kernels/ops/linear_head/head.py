"""Arguments of the LM head: the policy's, the reference model's, and a part of the vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.ops.linear_head.sizes import rows_per_chunk
from grpo_kernels.ops.token_logprobs.config import IGNORED

_NOT_HERE = 1.0  # marks a target of another rank; a log-prob is at most 0


class Head(NamedTuple):
    """Arguments of the LM head: hidden [N, H], weight [V, H], bias [V], targets and row_temperature [N].

    An adapter A = lora_a [r, H], B = lora_b [V, r] adds lora_scale (x A^T) B^T to the logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    targets: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float
    lora_scale: float

    @property
    def wide(self) -> torch.dtype:
        """dtype of logits, log-probs and accumulated gradients."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def scaling(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.logit_scale

    @property
    def numbers(self) -> tuple[float, float | None, float, float]:
        """The fields behind the tensors."""
        return *self.scaling, self.lora_scale

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The fields with a gradient, which come first."""
        return self.hidden, self.weight, self.bias, self.lora_a, self.lora_b

    @property
    def lora(self) -> tuple[Tensor, Tensor, float] | None:
        return None if self.lora_a is None or self.lora_b is None else (self.lora_a, self.lora_b, self.lora_scale)

    @property
    def needs_grad(self) -> list[bool]:
        return [value is not None and value.requires_grad for value in self.factors]

    def without(self, is_ignored: Tensor) -> Head:
        """Sets hidden states of ignored rows to 0, because NaN there times a gradient of 0 would be NaN."""
        return self._replace(hidden=torch.where(is_ignored[:, None], 0, self.hidden))

    def of(self, reference: ReferenceHead) -> Head:
        """The same head of the reference model, which has no adapter."""
        assert reference.hidden is not None and reference.weight is not None
        without = self._replace(lora_a=None, lora_b=None)
        return without._replace(hidden=reference.hidden, weight=reference.weight, bias=reference.bias)


class ReferenceHead(NamedTuple):
    """The head of the reference model, [N, H'], [V, H'] and [V], or nothing. The rest is as in the policy's head."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class Shard(NamedTuple):
    """The columns `start`, `start` + 1, ... of the vocabulary, `columns` many, that this rank of a group holds."""

    group: Any
    start: int
    columns: int

    def local(self, targets: Tensor) -> Tensor:
        """Targets as columns here; that of another rank is the padding column behind the last."""
        column = targets - self.start
        is_here = (column >= 0) & (column < self.columns)
        return torch.where(targets == IGNORED, IGNORED, torch.where(is_here, column, self.columns))

    def rows_per_chunk(self, rows: int, like: Tensor) -> int:
        """By the largest part of any rank, as all must take part in the same all-reduces.

        It costs an all-reduce, and a wait, in every call: a rank that remembered the answer for its own part would skip
        the one that another rank, whose part has changed, still waits in.
        """
        largest = torch.tensor(self.columns, device=like.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return rows_per_chunk(rows, int(largest), like.device.type, like.dtype)

    def combine(self, op: str, results: tuple[Tensor, Tensor, Tensor], local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and log-sum-exps over the columns of all ranks, in one all-reduce.

        The reduced tensor has a slot per rank, so that all ranks get the same bits.
        """
        logprobs, entropy, normalizer = results
        is_ignored = local == IGNORED
        is_here = ~is_ignored & (local < self.columns)
        slots = normalizer.new_zeros(dist.get_world_size(self.group), 3, len(normalizer))
        slot = slots[dist.get_rank(self.group)]
        slot[0], slot[1], slot[2] = normalizer, torch.where(is_here, logprobs, _NOT_HERE), entropy
        dist.all_reduce(slots, group=self.group)
        normalizers, candidates, entropies = slots.unbind(1)
        is_owner = candidates != _NOT_HERE
        owners = is_owner.sum(0)
        if logprobs.device.type == "cpu" and not bool(((owners == 1) | is_ignored).all()):
            raise RuntimeError(f"{op}: targets must be columns of exactly one rank each, or -100")
        total = normalizers.logsumexp(0)
        of_owner = torch.where(is_owner, normalizers, 0).sum(0)
        # not the difference of two large numbers: exact where the target is nearly certain
        others = torch.where(is_owner, 0, torch.exp(normalizers - of_owner)).sum(0)
        of_target = torch.where(is_owner, candidates, 0).sum(0) - torch.log1p(others)
        of_target = torch.where(owners == 1, of_target, torch.nan)
        share = torch.exp(normalizers - total)
        of_row = torch.where(share == 0, 0, share * (entropies + (total - normalizers))).sum(0)

        def finish(value: Tensor) -> Tensor:
            return torch.where(is_ignored, 0, value).to(logprobs.dtype)

        return finish(of_target), finish(of_row), torch.where(is_ignored, 0, total)

    def complete(self, gradients: tuple[Tensor, ...], needs: list[bool]) -> None:
        """Adds up the gradients of factors that are whole on every rank, of which each rank has a part.

        All ranks must agree on which of them need a gradient, or they would wait for each other.
        """
        by_hidden, _, _, by_lora_a, _ = gradients
        needs_hidden, _, _, needs_lora_a, _ = needs
        if needs_hidden:
            dist.all_reduce(by_hidden, group=self.group)
        if needs_lora_a:
            dist.all_reduce(by_lora_a, group=self.group)


FACTORS = 5  # fields of the head with a gradient
HEAD_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor targets, "
    "Tensor? row_temperature, float temperature, float? softcap, float logit_scale, float lora_scale"
)


REFERENCE_SCHEMA = "Tensor? ref_hidden, Tensor? ref_weight, Tensor? ref_bias"
