"""Distillation from a teacher's hidden states: both vocabularies whole, with a product more for its logits."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head import divergence
from grpo_kernels.ops.linear_head.divergence import Distillation
from grpo_kernels.ops.linear_head.head import Head
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
    """Divergence of each row in plain torch, some rows at a time; a row of share 0 has none."""
    rows = max(1, _BLOCK // inputs.student.shape[1])
    if len(inputs.student) <= rows:
        return _block_of_rows(inputs)

    def block(part: slice) -> DivergenceRows:
        tensors = {name: getattr(inputs, name) for name in _OF_ROWS}
        return dataclasses.replace(
            inputs,
            **{name: value if value is None or value.numel() == 0 else value[part] for name, value in tensors.items()},
        )

    return torch.cat([_block_of_rows(block(part)) for part in chunks(len(inputs.student), rows)])


def _block_of_rows(inputs: DivergenceRows) -> Tensor:
    temperature = inputs.row_temperature, inputs.temperature
    own = Scaling(*temperature, inputs.softcap, inputs.logit_scale)
    its = Scaling(*temperature, inputs.teacher_softcap, inputs.teacher_logit_scale)
    counts = (inputs.shares != 0)[:, None]
    # in float64 as long as a row: the differences would lose the digits that the normalizers have
    log_q = own.apply(inputs.student).double() - inputs.student_normalizer[:, None]
    log_p = its.apply(inputs.teacher).double() - inputs.teacher_normalizer[:, None]
    parts = divergence.divergence(log_p, log_q, inputs.kind, inputs.beta)
    if inputs.gradient.numel() > 0:
        slopes = divergence.slopes(log_p, log_q, inputs.kind, inputs.beta)
        by_z = slopes - slopes.sum(1, keepdim=True) * log_q.exp()
        by_logits = torch.where(counts, by_z * own.slope(inputs.student) * inputs.shares[:, None], 0)
        inputs.gradient.copy_(by_logits)
    return torch.where(counts[:, 0], parts.sum(1), 0)


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
    """One kernel reads the logits of both heads and writes the gradient by the student's."""

    def __init__(self, products: Products, teacher: Distillation, its_head: Head) -> None:
        self.products, self.teacher = products, teacher
        self.its = Products(products.backend, its_head.for_targets_of(products.head), len(products.tile))
        self.divergence = torch.zeros_like(teacher.shares)

    def before(self, tokens: Tokens) -> None:
        pass

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> Upstream | None:
        its = self.its.measure(tokens)
        inputs = DivergenceRows(
            chunk.logits.new_empty(0) if upstream is None else upstream.into,
            chunk.logits,
            its.logits,
            chunk.measured.normalizer,
            its.measured.normalizer,
            self.teacher.shares[tokens],
            chunk.row_temperature,
            *self.products.head.scaling,
            *self.its.head.scaling[1:],
            self.teacher.kind,
            self.teacher.beta,
        )
        has_kernel = self.products.backend == "cpu" and chunk.logits.dtype == torch.float32
        self.divergence[tokens] = ROWS("cpu" if has_kernel else "reference", inputs)
        return None if upstream is None else upstream._replace(is_whole=True)

    def results(self) -> dict[str, Tensor]:
        shares, wide = self.teacher.shares, self.products.head.wide
        loss = (shares * self.divergence).sum().to(wide)
        mass = (shares != 0).to(wide)
        return {"loss": loss, "distillation": loss.clone(), "divergence": self.divergence.to(wide), "mass": mass}
