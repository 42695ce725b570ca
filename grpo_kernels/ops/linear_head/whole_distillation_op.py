"""Registers the distillation from a teacher's hidden states with torch: both vocabularies whole, a chunk at a time.

The chunk loop is that of linear_policy_loss with a product more, for the teacher's logits. One kernel reads the logits
of both and overwrites the student's with their gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head import divergence as _reference
from grpo_kernels.ops.linear_head.chunks import Gradients, Products
from grpo_kernels.ops.linear_head.distillation_op import Chunking
from grpo_kernels.ops.linear_head.divergence import WholeTeacher
from grpo_kernels.ops.linear_head.head import FACTORS, Head
from grpo_kernels.ops.linear_head.logprobs_op import KERNELS, fake_gradients
from grpo_kernels.ops.linear_head.precomputed import PrecomputedGradient, RecomputedGradient, may_precompute
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.reference import LogitRows, Measured, Scaling


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
    parts = _reference.divergence(log_p, log_q, inputs.kind, inputs.beta)
    if inputs.gradient.numel() > 0:
        slopes = _reference.slopes(log_p, log_q, inputs.kind, inputs.beta)
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


@op_inputs
class WholeDistillation:
    """Arguments of linear_distillation_loss, and which factors of the student's head need a gradient."""

    head: Head
    teacher: WholeTeacher
    chunking: Chunking
    needs: list[bool]


class _Rows:
    """Both heads' logits of a chunk at a time."""

    def __init__(self, backend: str, head: Head, teacher: WholeTeacher, size: int) -> None:
        self.backend, self.head, self.teacher = backend, head, teacher
        self.own, self.its = (Products(backend, each, size) for each in (head, teacher.head))

    def measure(self, tokens: slice | Tensor, into: Tensor | None, wants_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Divergences of tokens, their hidden states, and the gradient by the logits, empty if none is wanted."""
        hidden, student = self.own.logits(tokens)
        _, teacher = self.its.logits(tokens)
        row_temperature = None if self.head.row_temperature is None else self.head.row_temperature[tokens]
        targets = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)

        def normalizer(logits: Tensor, head: Head) -> Tensor:
            temperature = None if row_temperature is None else row_temperature[None]
            rows = LogitRows(logits[None], targets, temperature, *head.scaling)
            return cast(Tensor, token_logprobs.FORWARD(self.backend, Measured(rows, False))[2][0])

        gradient = student.new_empty(0)
        if wants_grad:
            gradient = student if into is None else into
        inputs = DivergenceRows(
            gradient,
            student,
            teacher,
            normalizer(student, self.head),
            normalizer(teacher, self.teacher.head),
            self.teacher.shares[tokens],
            row_temperature,
            *self.head.scaling,
            *self.teacher.head.scaling[1:],
            self.teacher.kind,
            self.teacher.beta,
        )
        kernel = self.backend if self.backend == "cpu" and student.dtype == torch.float32 else "reference"
        return ROWS(kernel, inputs), hidden, gradient


def forward(backend: str, inputs: WholeDistillation, into: Tensor | None = None) -> tuple[Tensor, ...]:
    """The loss, the divergence of every token, and the gradients of the head's factors."""
    head, teacher, chunking, needs = inputs.head, inputs.teacher, inputs.chunking, inputs.needs
    selected, size = chunking.tokens, chunking.chunk_tokens
    total = len(head.hidden) if selected is None else len(selected)
    if selected is None:
        is_ignored = teacher.shares == 0
        head = head.without(is_ignored)
        teacher = dataclasses.replace(teacher, head=teacher.head.without(is_ignored))
    rows = _Rows(backend, head, teacher, min(size, total))
    gradients = None
    if any(needs):
        sparse = selected is not None
        gradients = Gradients(rows.own, needs, total, chunking.product_tokens, into, sparse)
    values = head.hidden.new_zeros(len(head.hidden), dtype=torch.float64)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(total, size):
            tokens = part if selected is None else selected[part]
            if gradients is None:
                values[tokens], *_ = rows.measure(tokens, None, False)
                continue
            place = gradients.place(part.stop - part.start)
            values[tokens], hidden, by_logits = rows.measure(tokens, place, True)
            gradients.add_by_logits(by_logits, hidden, tokens)
        loss = (teacher.shares * values).sum().to(head.wide)
        results = fake_gradients(head, [False] * len(FACTORS)) if gradients is None else gradients.finish()
    return loss, values.to(head.wide), *results


def _fake(inputs: WholeDistillation) -> tuple[Tensor, ...]:
    head = inputs.head
    of_token = head.hidden.new_empty(len(head.hidden), dtype=head.wide)
    return of_token.new_empty(()), of_token, *fake_gradients(head, inputs.needs)


LOSS = registry.ComposedOp(
    "linear_distillation_loss_whole",
    WholeDistillation,
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    KERNELS,
    _fake,
    forward,
)


def apply(
    backend: str, head: Head, teacher: WholeTeacher, chunk_size: int | None, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss, which has a gradient by the head's factors, and the divergence of every token."""
    if backend == "reference":
        return _reference.forward_whole(head, teacher)
    chunking, rest = Chunking.of(teacher.shares, head, chunk_size), head.without_factors()

    def compute(
        factors: tuple[Tensor | None, ...], needs: list[bool], upstream: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        own = teacher if upstream is None else dataclasses.replace(teacher, shares=teacher.shares * upstream)
        inputs = WholeDistillation(rest.with_factors(*factors), own, chunking, needs)
        if torch.compiler.is_compiling():
            return cast(tuple[Tensor, ...], LOSS(backend, inputs))
        return forward(backend, inputs, into)

    if not (torch.is_grad_enabled() and any(head.needs_grad)):
        return cast(tuple[Tensor, Tensor], compute(head.factors, [False] * len(FACTORS))[:2])
    if not may_precompute(head.hidden):
        return cast(tuple[Tensor, Tensor], RecomputedGradient.apply(*head.factors, compute))  # type: ignore[no-untyped-call]
    arguments: tuple[Any, ...] = ("linear_distillation_loss", ("", ""), backend, compute, into is not None)
    results = PrecomputedGradient.apply(*head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], results)
