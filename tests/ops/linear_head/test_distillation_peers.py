"""linear_distillation_loss against the installed TRL's and verl's functions.

Faults that this is for: another divergence, direction or tail than theirs, in this or in a new version of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.linear_head import distillation_cases as cases
from tests.ops.linear_head.distillation_cases import F64
from tests.ops.promises import Inputs, run

on_exact = pytest.mark.parametrize("backend", cases.EXACT)


def problem(kind: str, tail: str) -> tuple[Inputs, Tensor, Tensor]:
    """A batch, and the student's log-probs of the teacher's ids, as peers take them, with the leaf they depend on."""
    inputs = cases.draw({"bias"}, (11,), 40, kind=kind, tail=tail) | {"teacher_coef": 1.0}
    leaf = inputs["hidden"].clone().requires_grad_()
    log_q = cases.distribution(inputs | {"hidden": leaf}, torch.ones(11, dtype=torch.bool))
    return inputs, leaf, log_q.gather(1, inputs["teacher_ids"])


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize(("kind", "alpha"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@on_exact
def test_trl(backend: str, kind: str, alpha: float, tail: str) -> None:
    pytest.importorskip("trl")
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    inputs, leaf, student = problem(kind, tail)
    teacher = inputs["teacher_logprobs"]
    if tail == "bucket":
        student, teacher = add_tail_bucket(student), add_tail_bucket(teacher)
    else:
        student, teacher = student.log_softmax(1), teacher.log_softmax(1)
    theirs = compute_divergence(student, teacher, alpha)
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    got = run(cases.op_of(inputs), inputs, backend, F64)
    torch.testing.assert_close(got["divergence"], theirs.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got["d_hidden"], want, rtol=1e-8, atol=1e-11)


@on_exact
def test_verl(backend: str) -> None:
    """Verl's forward KL over the teacher's top k leaves the tail out. It computes in float32."""
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
    inputs, leaf, student = problem("forward_kl", "ignore")
    theirs = losses.kl_divergence(log_q=student, log_p=inputs["teacher_logprobs"])
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    got = run(cases.op_of(inputs), inputs, backend, F64)
    # sums of five terms below 10
    torch.testing.assert_close(got["divergence"].float(), theirs.detach().float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got["d_hidden"].float(), want.float(), rtol=1e-5, atol=1e-6)
