"""Rows with the token ids that sampling kept, and the definition in dense logits: -inf outside of the support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.sampled_support.registration import IMPLEMENTED, SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(IMPLEMENTED)
OF_LOSSES = runnable_backends(SUPPORTS)  # "cpu": log-probs of the reference, losses of the CPU's kernels
ADDING = [name for name in OF_LOSSES if name != "reference"]  # to weight_grad
FACTORS: dict[str, dict[str, Any]] = {"plain": {}, "scaled": {"temperature": 0.7, "softcap": 9.0, "logit_scale": 0.5}}
HEAD = ("hidden", "weight", "bias")

Batch = dict[str, Any]


def supports_of(targets: Tensor, columns: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """So many ids for each row, in no order, among them the target; none for an ignored row of size 0."""
    kept, offsets = [], [0]
    for target, size in zip(targets.flatten().tolist(), sizes, strict=True):
        ids = torch.randperm(columns)[:size]
        if target >= 0 and target not in ids.tolist():
            ids[size // 2] = target
        kept.append(ids)
        offsets.append(offsets[-1] + size)
    return torch.cat(kept).long(), torch.tensor(offsets)


def batch(rows: int = 12, hidden: int = 6, columns: int = 31, dtype: torch.dtype = F64) -> Batch:
    """Rows that keep 1 to all ids, every fourth only one; two are ignored, one of them keeps none."""
    torch.manual_seed(3)
    targets = torch.randint(columns, (rows,))
    sizes = [1 if row % 4 == 3 else int(torch.randint(2, columns + 1, ())) for row in range(rows)]
    sizes[0], sizes[1] = columns, min(9, columns)  # 9: the last entry of a row alone in its tile
    targets[2:7:4] = -100
    sizes[2] = 0
    return {
        "hidden": torch.randn(rows, hidden, dtype=F64).to(dtype),
        "weight": (2 * torch.randn(columns, hidden, dtype=F64)).to(dtype),
        "bias": torch.randn(columns, dtype=F64).to(dtype),
        "targets": targets,
        "support": supports_of(targets, columns, sizes),
    }


def is_certain(given: Batch) -> Tensor:
    """Rows with one kept id."""
    certain: Tensor = given["support"][1].diff() == 1
    return certain


def to(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(to(part, device, dtype) for part in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def cast(given: Batch, dtype: torch.dtype, device: str = "cpu") -> Batch:
    return {name: to(value, torch.device(device), dtype) for name, value in given.items()}


def upstream_of(shape: torch.Size) -> Tensor:
    """Upstream gradients of log-probs and entropies, both 0 for every third row."""
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(2, shape.numel(), dtype=F64, generator=generator)
    upstream[:, ::3] = 0
    return upstream.view(2, *shape)


def run(given: Batch, backend: str, dtype: torch.dtype = F64, frozen: str = "", **options: Any) -> dict[str, Tensor]:
    """Log-probs, entropies and the gradients of hidden states, weight and bias."""
    arguments = cast(given | options, dtype, str(device_of(backend)))
    leaves = {k: arguments[k].detach().requires_grad_(k != frozen) for k in HEAD if k in arguments}
    logprobs, entropy = gk.linear_logprobs(**arguments | leaves, return_entropy=True, backend=backend)
    by_logprob, by_entropy = upstream_of(logprobs.shape).to(logprobs)
    (logprobs * by_logprob + entropy * by_entropy).sum().backward()
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach()} | gradients


def kept_mask(given: Batch, rows: int, columns: int) -> Tensor:
    token_ids, offsets = given["support"]
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        mask[row, token_ids[offsets[row] : offsets[row + 1]]] = True
    return mask


def softmax_of(logits: Tensor, given: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the definition, with torch's softmax of masked logits, in any float dtype."""
    temperature, softcap = given.get("temperature", 1.0), given.get("softcap")
    z = logits * given.get("logit_scale", 1.0)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    counts = given["targets"].flatten() >= 0
    mask = kept_mask(given, *logits.shape)
    rows = z[counts].masked_fill(~mask[counts], -torch.inf).log_softmax(-1)
    chosen = rows.gather(1, given["targets"].flatten()[counts, None])[:, 0]
    finite = rows.masked_fill(~mask[counts], 0)
    entropies = -(rows.exp() * finite).sum(-1)
    zeros = torch.zeros(len(counts), dtype=logits.dtype)
    return zeros.masked_scatter(counts, chosen), zeros.masked_scatter(counts, entropies)


def oracle(given: Batch, dtype: torch.dtype = F64, **options: Any) -> dict[str, Tensor]:
    """Results and gradients from dense logits, in float64 or as torch would compute them in a narrower dtype."""
    arguments = cast(given | options, dtype)
    leaves = [arguments[name].clone().requires_grad_() for name in HEAD]
    hidden, weight, bias = (leaf.to(torch.promote_types(dtype, torch.float32)) for leaf in leaves)
    logprobs, entropy = softmax_of(hidden @ weight.T + bias, arguments)
    by_logprob, by_entropy = upstream_of(logprobs.shape).to(logprobs)
    gradients = torch.autograd.grad((logprobs * by_logprob + entropy * by_entropy).sum(), leaves)
    results = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    return results | {f"by {name}": gradient for name, gradient in zip(HEAD, gradients, strict=True)}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10, atol: float = 1e-12) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name].cpu(), value.cpu(), rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )
