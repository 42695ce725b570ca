"""Settings that wait for the GPU, as documented, and therefore cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

Put = Callable[[Tensor], Tensor]  # moves a tensor to the GPU
GROUPS = torch.arange(6) // 2


def of_linear_logprobs(put: Put) -> Any:
    positions = put(torch.rand(4, 4) < 0.5)
    return gk.linear_logprobs(*tokens(put), positions=positions, backend="kernel")


def of_linear_loss(put: Put, **options: Any) -> Any:
    arguments = {name: put(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    return gk.linear_policy_loss(*tokens(put), None, put(torch.randn(4)), backend="kernel", **arguments)


def tokens(put: Put) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = put(torch.randn(4, 4, 16)).requires_grad_(), put(torch.randn(32, 16))
    return hidden, weight, put(torch.randint(32, (4, 4)))


def of_packed_sequences(put: Put) -> Any:
    hidden, weight, targets = (put(value) for value in (torch.randn(16, 16), torch.randn(32, 16), torch.arange(16)))
    return gk.linear_policy_loss(
        hidden.requires_grad_(),
        weight,
        targets,
        None,
        put(torch.randn(3)),
        cu_seqlens=put(torch.tensor([0, 4, 8, 16])),
        config=gk.LossConfig(ratio="sequence"),
        chunk_size=8,
        backend="kernel",
    )


def metrics(put: Put) -> dict[str, float]:
    return gk.policy_loss(put(torch.randn(4, 4)), None, put(torch.randn(4)), backend="kernel").metrics.to_dict()


WAITING: dict[str, Callable[[Put], Any]] = {
    "linear_logprobs at a mask": of_linear_logprobs,
    "linear_policy_loss at a mask": lambda put: of_linear_loss(put, positions=torch.rand(4, 4) < 0.5),
    "linear_policy_loss without excluded tokens": lambda put: of_linear_loss(
        put, mask=torch.rand(4, 4) < 0.5, compact=True
    ),
    "linear_policy_loss of packed sequences in chunks": of_packed_sequences,
    "similarity_groups of uncounted ids": lambda put: gk.similarity_groups(
        put(torch.randn(6, 3)), put(GROUPS), backend="kernel"
    ),
    "pairwise_cosine of uncounted ids": lambda put: gk.pairwise_cosine(
        put(torch.randn(6, 3)), put(GROUPS), num_groups=3, backend="kernel"
    ),
    "reading metrics": metrics,
}
