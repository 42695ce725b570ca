"""Batches for linear_distillation_loss, and the loss from its definition: a loop over rows of whole distributions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

F64 = torch.float64
ROWS, HIDDEN, COLUMNS, K = 11, 8, 40, 5
KINDS = ("forward_kl", "reverse_kl", "jsd")
TAILS = ("bucket", "ignore", "renormalise")
LEAVES = ("hidden", "weight", "bias")


def batch(rows: int = ROWS, columns: int = COLUMNS, k: int = K, sharpness: float = 1.0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    teacher = torch.randn(rows, columns, generator=random, dtype=F64).mul(2).log_softmax(1)
    logprobs, ids = teacher.topk(k, 1)
    return {
        "hidden": torch.randn(rows, HIDDEN, generator=random, dtype=F64) * sharpness,
        "weight": torch.randn(columns, HIDDEN, generator=random, dtype=F64),
        "bias": torch.randn(columns, generator=random, dtype=F64),
        "teacher_ids": ids,
        "teacher_logprobs": logprobs,
    }


def to(arguments: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Any]:
    """With the student in this dtype. What the teacher says is exact."""

    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if name in LEAVES else value.dtype)

    return {name: moved(name, value) for name, value in arguments.items()}


def run(arguments: dict[str, Any], **options: Any) -> tuple[gk.DistillationLoss, dict[str, Tensor]]:
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES if arguments.get(name) is not None}
    result = gk.linear_distillation_loss(**arguments | leaves, **options)
    result.loss.backward()
    return result, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p - log_q)).sum()


def divergence_of_row(
    log_q: Tensor, ids: list[int], log_p: list[float], kind: str, tail: str, beta: float
) -> tuple[Tensor, Tensor]:
    """Divergence and the student's mass, from the log-probabilities of its whole vocabulary."""
    used = [(i, value) for i, value in zip(ids, log_p, strict=True) if i != -1]
    others = [i for i in range(len(log_q)) if i not in {i for i, _ in used}]
    student = [log_q[i] for i, _ in used]
    teacher = [value for _, value in used]
    mass = sum((value.exp() for value in student), torch.zeros(()))
    if tail == "renormalise":
        student = [value - torch.stack(student).logsumexp(0) for value in student]
        teacher = [value - math.log(sum(map(math.exp, teacher))) for value in teacher]
    if tail == "bucket" and others:
        student.append(log_q[others].logsumexp(0))
        teacher.append(math.log(1 - sum(map(math.exp, teacher))) if used else 0.0)
    if not student:
        return log_q.sum() * 0, mass
    q, p = torch.stack(student), torch.tensor(teacher, dtype=log_q.dtype)
    if kind == "forward_kl":
        return kl(p.exp(), p, q), mass
    if kind == "reverse_kl":
        return kl(q.exp(), q, p), mass
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * kl(p.exp(), p, mixture) + (1 - beta) * kl(q.exp(), q, mixture), mass


def oracle(
    arguments: dict[str, Any], kind: str, tail: str, beta: float = 0.5, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Loss, divergences, masses and gradients; `temperature`, `mask` and `weights` as in the op."""
    leaves = {name: arguments[name].detach().clone().requires_grad_() for name in LEAVES}
    x = scale * (leaves["hidden"] @ leaves["weight"].T + leaves["bias"])
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    temperature = torch.as_tensor(arguments.get("temperature", 1.0), dtype=x.dtype)
    log_q = (x / temperature.reshape(-1, 1)).log_softmax(1)
    ids, log_p = arguments["teacher_ids"].tolist(), arguments["teacher_logprobs"].tolist()
    mask = arguments.get("mask", torch.ones(len(x))) != 0
    shares = arguments.get("weights", mask.double() / mask.sum()) * mask
    counted = [
        divergence_of_row(log_q[row], ids[row], log_p[row], kind, tail, beta)
        if shares[row] != 0
        else (log_q.new_zeros(()), log_q.new_zeros(()))
        for row in range(len(x))
    ]
    divergences, masses = (
        torch.stack([torch.as_tensor(v, dtype=x.dtype) for v in part]) for part in zip(*counted, strict=True)
    )
    loss = (shares.to(x.dtype) * divergences).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), divergences.detach(), masses.detach(), dict(zip(leaves, gradients, strict=True))
