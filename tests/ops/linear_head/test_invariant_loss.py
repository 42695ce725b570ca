"""With invariant=True no bit of a loss term or its hidden gradient depends on the rest of the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import assert_raises, device_of, needs_cpu_kernels
from tests.ops.linear_head.test_invariant import BACKENDS, DTYPES, ON_GPU, Batch

LENGTHS = (5, 33, 1, 64, 150, 17)
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"aggregation": "token-mean"},
    "clip and k3": {"kl": "k3", "kl_coef": 0.1, "aggregation": "seq-mean-token-mean"},
    "bonus": {"entropy_coef": 0.01, "aggregation": "seq-mean-token-sum"},
    "cispo": {"loss": "cispo"},
    "gspo": {"ratio": "sequence"},
    "average": {"ratio": "average"},
    "vespo": {"loss": "vespo"},
    "gmpo": {"loss": "geo_mean", "aggregation": "seq-mean-token-sum"},
    "opsm": {"off_policy_threshold": 0.01},
    "corrected": {"correction": "sequence_truncate"},
}
TOKEN_CONFIGS = [name for name in CONFIGS if not gk.LossConfig(**CONFIGS[name]).couples_tokens]
LOSSES = [("cpu", name) for name in CONFIGS] + [(backend, name) for backend in ON_GPU for name in TOKEN_CONFIGS]
LOSSES = [(backend, name) for backend, name in LOSSES if backend in BACKENDS]


class Sequences:
    """Sequences for the loss, each of which gets its gradient by itself."""

    def __init__(self, name: str, backend: str, dtype: str = "float32") -> None:
        self.config, self.backend = gk.LossConfig(**CONFIGS[name]), backend
        self.lengths = LENGTHS if backend == "cpu" else (5, 9, 1)  # interpreted and emulated kernels take long
        total = sum(self.lengths)
        self.batch = Batch((205, 37), total, dtype, backend)
        random, device = torch.Generator().manual_seed(2), device_of(backend)
        head = self.batch.hidden, self.batch.weight, self.batch.targets
        own = gk.linear_logprobs(*head, bias=self.batch.bias, backend=backend).logprobs.cpu()

        def near() -> list[Tensor]:
            noise = torch.randn(total, generator=random, dtype=own.dtype)
            return list((own + 0.2 * noise).to(device).split(self.lengths))

        self.values = {"old_logprobs": near(), "sampling_logprobs": near(), "ref_logprobs": near()}
        if self.config.kl_coef == 0:
            del self.values["ref_logprobs"]
        if self.config.correction == "none":
            del self.values["sampling_logprobs"]
        self.hidden = list(self.batch.hidden.split(self.lengths))
        self.targets = list(self.batch.targets.split(self.lengths))
        self.advantages = torch.randn(len(self.lengths), generator=random, dtype=own.dtype).to(device)

    def run(self, chosen: list[int], width: int = 0, left: int = 0, **options: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """The loss, and the hidden gradient of each sequence: packed, or padded to `width` with `left` masked tokens.

        A negative `left` aligns the ends of the sequences.
        """
        lengths = [self.lengths[i] for i in chosen]
        starts = [(width - length if left < 0 else left) + row * width for row, length in enumerate(lengths)]
        shape: tuple[int, ...] = (len(chosen), width)
        kwargs: dict[str, Any] = {"advantages": self.advantages[chosen]}
        if width == 0:
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            starts, shape = bounds[:-1].tolist(), (sum(lengths),)
            kwargs["cu_seqlens"] = bounds.to(self.batch.hidden.device)
        places = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
        places = places.to(self.batch.hidden.device)

        def laid_out(parts: list[Tensor], fill: float) -> Tensor:
            values = torch.cat([parts[i] for i in chosen])
            memory = values.new_full((math.prod(shape), *values.shape[1:]), fill)
            return memory.index_copy(0, places, values).view(*shape, *values.shape[1:])

        if width > 0:
            is_inside = torch.zeros(math.prod(shape), dtype=torch.bool, device=places.device)
            kwargs["mask"] = is_inside.index_fill(0, places, True).view(shape)
        leaf = laid_out(self.hidden, math.nan).requires_grad_()
        kwargs |= {name: laid_out(parts, math.nan) for name, parts in self.values.items()}
        kwargs |= {"bias": self.batch.bias, "config": self.config, "normalizer": 100.0, "backend": self.backend}
        kwargs |= {"invariant": True, **options}
        loss = gk.linear_policy_loss(leaf, self.batch.weight, laid_out(self.targets, 0), **kwargs).loss
        (loss / 3).backward()  # no power of two, as of gradient accumulation
        assert leaf.grad is not None
        gradients = leaf.grad.reshape(-1, leaf.shape[-1])[places].split(lengths)
        return loss.detach(), dict(zip(chosen, gradients, strict=True))


@pytest.mark.parametrize(("backend", "name"), LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_of_a_sequence_does_not_depend_on_its_batch(backend: str, name: str, dtype: str) -> None:
    if DTYPES[dtype] not in SUPPORTS[backend]:
        pytest.skip(f"{backend} takes no {dtype}")
    sequences = Sequences(name, backend, dtype)
    every = list(range(len(sequences.lengths)))
    _, expected = sequences.run(every)
    longest = max(sequences.lengths)
    ways: dict[str, tuple[list[int], dict[str, Any]]] = {
        **{f"alone, {i}": ([i], {}) for i in every},
        "two": ([2, 0], {}),
        "in reverse": (every[::-1], {}),
        "in chunks": (every, {"chunk_size": 50}),
        "padded": (every, {"width": longest}),
        "padded further": (every, {"width": 2 * longest + 3, "left": 3}),
        "padded on the left": (every, {"width": longest + 1, "left": -1}),
        "not compact": (every, {"width": longest, "compact": False}),
        "compact": (every, {"width": longest, "compact": True}),
    }
    if backend != "cpu":
        ways = {name: ways[name] for name in ("alone, 1", "two", "padded further", "padded on the left", "compact")}
    for way, (chosen, options) in ways.items():
        _, got = sequences.run(chosen, **options)
        for i in chosen:
            assert torch.equal(got[i], expected[i]), (way, i)
    assert sum(bool(gradient.any()) for gradient in expected.values()) >= 2  # the others may be clipped


# Others add nothing where their advantages are 0 and neither KL nor entropy counts, so that the loss is the term.
TERMS = [(backend, name) for backend, name in LOSSES if name not in ("clip and k3", "bonus")]


@pytest.mark.parametrize("name", [name for backend, name in TERMS if backend == "cpu"])
def test_the_loss_term_of_a_sequence_does_not_depend_on_its_batch(name: str) -> None:
    sequences = Sequences(name, "cpu")
    every, advantages = list(range(len(sequences.lengths))), sequences.advantages
    for i in every:
        sequences.advantages = torch.where(torch.arange(len(every)) == i, advantages, 0)
        alone, _ = sequences.run([i])
        for options in ({}, {"width": max(sequences.lengths)}, {"width": 2 * max(sequences.lengths), "left": 5}):
            assert torch.equal(sequences.run(every, **options)[0], alone)


@pytest.mark.parametrize(("backend", "name"), [(b, name) for b, name in TERMS if name in TOKEN_CONFIGS])
def test_the_loss_term_of_a_token_does_not_depend_on_its_batch(backend: str, name: str) -> None:
    """On a GPU the terms of a sequence are added in an order that depends on its place."""
    sequences = Sequences(name, backend)
    every = list(range(len(sequences.lengths)))
    for i, token in ((0, 2), (1, 8)):
        advantages = [torch.zeros(length, device=sequences.advantages.device) for length in sequences.lengths]
        advantages[i][token] = 0.7
        sequences.values["advantages"] = advantages
        alone, _ = sequences.run([i])
        assert float(alone) != 0
        for options in ({}, {"width": 2 * max(sequences.lengths) + 1, "left": 3}):
            assert torch.equal(sequences.run(every, **options)[0], alone)


@needs_cpu_kernels
@pytest.mark.parametrize("reference", [False, True])
def test_a_reference_model_in_the_same_chunks(reference: bool) -> None:
    batch, random = Batch((205, 37), 150, "float32", "cpu"), torch.Generator().manual_seed(3)
    ref_hidden, ref_weight = torch.randn(150, 11, generator=random), torch.randn(205, 11, generator=random)
    config = gk.LossConfig(kl="k3", kl_coef=0.3)

    def run(rows: Tensor) -> Tensor:
        leaf = batch.hidden[rows][None].detach().requires_grad_()
        kwargs: dict[str, Any] = {"ref_hidden": leaf.detach().flip(2)}
        if reference:
            kwargs = {"ref_hidden": ref_hidden[rows][None], "ref_weight": ref_weight}
        advantages = batch.upstream[rows][None]
        loss = gk.linear_policy_loss(
            leaf,
            batch.weight,
            batch.targets[rows][None],
            None,
            advantages,
            **kwargs,
            config=config,
            normalizer=9.0,
            invariant=True,
        ).loss
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad[0]

    whole = run(torch.arange(150))
    for rows in (torch.tensor([7]), torch.tensor([149, 0]), torch.arange(20, 150)):
        assert torch.equal(run(rows), whole[rows])


@pytest.mark.parametrize("backend", ON_GPU)
def test_ratios_of_sequences_are_refused_on_a_gpu(backend: str) -> None:
    sequences = Sequences("clip", backend)
    sequences.config = gk.LossConfig(ratio="sequence")
    rule = f"linear_policy_loss: backend '{backend}' cannot run here: its sums over a sequence"
    assert_raises(RuntimeError, rule, ["(invariant)"], lambda: sequences.run([0]))
