"""Distillation from a teacher's hidden states: both vocabularies whole, with a product more for its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head import divergence
from grpo_kernels.ops.linear_head.divergence import FORWARD_KL, Distillation
from grpo_kernels.ops.linear_head.head import Head, Shard
from grpo_kernels.ops.linear_head.products import Chunk, Products, Tokens, Upstream
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.token_logprobs.reference import Scaling


@op_inputs
class DivergenceRows:
    """Logits [N, V] of student and teacher, what scales them, and the share of each row in the loss, [N] in float64.

    The gradient by the student's logits is written to `gradient`, which may be these logits; not where that is empty.
    """

    gradient: Tensor
    student: Tensor
    teacher: Tensor
    student_normalizer: Tensor
    teacher_normalizer: Tensor
    shares: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    kind: int
    beta: float


_OF_ROWS = [field.name for field in dataclasses.fields(DivergenceRows)][:7]  # the tensors
_BLOCK = 2**23  # logits that plain torch takes at a time: 64 MiB in float64


def _divergence_rows(inputs: DivergenceRows) -> Tensor:
    """Divergence of each row in plain torch; a row of share 0 has none."""
    return _in_blocks(_block_of_rows, inputs)


def _in_blocks(of_block: Callable[..., Tensor], inputs: DivergenceRows, *more: Tensor) -> Tensor:
    """A number of each row, some rows at a time."""
    rows = max(1, _BLOCK // inputs.student.shape[1])
    if len(inputs.student) <= rows:
        return of_block(inputs, *more)

    def block(part: slice) -> DivergenceRows:
        tensors = {name: getattr(inputs, name) for name in _OF_ROWS}
        return dataclasses.replace(
            inputs,
            **{name: value if value is None or value.numel() == 0 else value[part] for name, value in tensors.items()},
        )

    parts = chunks(len(inputs.student), rows)
    return torch.cat([of_block(block(part), *(values[part] for values in more)) for part in parts])


def _log_probabilities(inputs: DivergenceRows) -> tuple[Tensor, Tensor, Scaling]:
    """The teacher's and the student's, and the scaling of the student's logits."""
    temperature = inputs.row_temperature, inputs.temperature
    own = Scaling(*temperature, inputs.softcap, inputs.logit_scale)
    its = Scaling(*temperature, inputs.teacher_softcap, inputs.teacher_logit_scale)
    # in float64 as long as a row: the differences would lose the digits that the normalizers have
    log_q = own.apply(inputs.student).double() - inputs.student_normalizer[:, None]
    log_p = its.apply(inputs.teacher).double() - inputs.teacher_normalizer[:, None]
    return log_p, log_q, own


def _block_of_rows(inputs: DivergenceRows, totals: Tensor | None = None) -> Tensor:
    """`totals` are those of `_totals` over all ranks, where a row has columns on others."""
    log_p, log_q, own = _log_probabilities(inputs)
    counts = (inputs.shares != 0)[:, None]
    parts = divergence.divergence(log_p, log_q, inputs.kind, inputs.beta)
    if inputs.gradient.numel() > 0:
        slopes = divergence.slopes(log_p, log_q, inputs.kind, inputs.beta)
        total = slopes.sum(1, keepdim=True) if totals is None else totals[:, None]
        by_z = slopes - total * log_q.exp()
        by_logits = torch.where(counts, by_z * own.slope(inputs.student) * inputs.shares[:, None], 0)
        inputs.gradient.copy_(by_logits)
    return torch.where(counts[:, 0], parts.sum(1), 0)


def _totals(inputs: DivergenceRows) -> Tensor:
    """Sums of the slopes of each row."""
    log_p, log_q, _ = _log_probabilities(inputs)
    return divergence.slopes(log_p, log_q, inputs.kind, inputs.beta).sum(1)


ROWS = registry.TorchOp(
    "divergence_rows",
    DivergenceRows,
    "Tensor",
    {"cpu": (torch.float32,), "reference": (torch.float32, torch.float64)},
    lambda inputs: torch.empty_like(inputs.shares),
    reference=_divergence_rows,
    mutated=("gradient",),
)


class WholeTeacherObjective:
    """One kernel reads the logits of both heads and writes the gradient by the student's; of a shard, plain torch."""

    def __init__(self, products: Products, teacher: Distillation, its_head: Head, shard: Shard | None) -> None:
        self.products, self.teacher, self.shard = products, teacher, shard
        its_head = its_head if shard is None else shard.part(its_head)
        size, has_padding = len(products.tile), products.logit_columns > products.columns
        self.its = Products(products.backend, its_head.for_targets_of(products.head), size, has_padding)
        self.divergence = torch.zeros_like(teacher.shares)

    def before(self, tokens: Tokens) -> None:
        pass

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> Upstream | None:
        its = self.its.measure(tokens)
        own_normalizer, its_normalizer = chunk.measured.normalizer, its.measured.normalizer
        if self.shard is not None:
            parts, _ = self.shard.of_all_ranks([own_normalizer, its_normalizer])
            own_normalizer, its_normalizer = (part.logsumexp(0) for part in parts)
        inputs = DivergenceRows(
            chunk.logits.new_empty(0) if upstream is None else upstream.into,
            chunk.logits,
            its.logits,
            own_normalizer,
            its_normalizer,
            self.teacher.shares[tokens],
            chunk.row_temperature,
            *self.products.head.scaling,
            *self.its.head.scaling[1:],
            self.teacher.kind,
            self.teacher.beta,
        )
        self.divergence[tokens] = self._rows(inputs)
        return None if upstream is None else upstream._replace(is_whole=True)

    def _rows(self, inputs: DivergenceRows) -> Tensor:
        """The divergence of this rank's columns."""
        if self.shard is None:
            has_kernel = self.products.backend == "cpu" and inputs.student.dtype == torch.float32
            values: Tensor = ROWS("cpu" if has_kernel else "reference", inputs)
            return values
        if inputs.gradient.numel() == 0:
            return _in_blocks(_block_of_rows, inputs)
        totals = torch.full_like(inputs.shares, -1)  # of minus the teacher's probabilities
        if self.teacher.kind != FORWARD_KL:
            (parts,), _ = self.shard.of_all_ranks([_in_blocks(_totals, inputs)])
            totals = parts.sum(0)
        return _in_blocks(_block_of_rows, inputs, totals)

    def results(self) -> dict[str, Tensor]:
        shares, wide, values = self.teacher.shares, self.products.head.wide, self.divergence
        if self.shard is not None:
            (parts,), _ = self.shard.of_all_ranks([values])
            values = parts.sum(0)
        loss = (shares * values).sum().to(wide)
        mass = (shares != 0).to(wide)
        return {"loss": loss, "distillation": loss.clone(), "divergence": values.to(wide), "mass": mass}
