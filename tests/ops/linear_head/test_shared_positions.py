"""Terms that share positions: the loss over a tree of samples is that over the samples written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.logprobs_op import SUPPORTS
from tests.harness import assert_raises, device_of, needs_cpu_kernels, runnable_backends

F64 = torch.float64
HIDDEN, VOCABULARY = 5, 13
# Four samples of one prompt. The first two share four tokens, the last three share two, and two end early.
SAMPLES = ((0, 1, 2, 3, 4), (0, 1, 2, 3, 5, 6), (0, 1, 7), (0, 1, 8, 9))
POSITIONS = 11  # the last one belongs to no sample
LENGTHS = torch.tensor([len(sample) for sample in SAMPLES])
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"aggregation": "token-mean"},
    "rows": {"aggregation": "seq-mean-token-mean", "entropy_coef": 0.1},
    "sequence": {"ratio": "sequence"},
}
CONFIG = gk.LossConfig()
# all positions in a chunk, chunks shorter than a sample, and longer ones
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"chunk_size": 3},
    {"chunk_size": 3, "compact": False},
    {"chunk_size": 7},
    {"chunk_size": 7, "compact": False},
    {"memory": "low", "chunk_size": 4},
)


def draw(packed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of the positions, and those of the terms with their index."""
    random = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=F64)

    positions = {
        "hidden": noise(POSITIONS, HIDDEN),
        "head": noise(VOCABULARY, HIDDEN),
        "targets": torch.randint(VOCABULARY, (POSITIONS,), generator=random),
    }
    width = int(LENGTHS.max())
    index = torch.full((len(SAMPLES), width), -1)
    for row, sample in enumerate(SAMPLES):
        index[row, : len(sample)] = torch.tensor(sample)
    terms: dict[str, Any] = {
        "term_index": index,
        "old_logprobs": -noise(len(SAMPLES), width).abs() - 1,
        "advantages": torch.tensor([0.7, -1.2, 0.0, 0.4], dtype=F64),
        "mask": torch.rand(len(SAMPLES), width, generator=random) > 0.2,
    }
    if packed:
        is_token = index >= 0
        terms = {name: value[is_token] if value.dim() == 2 else value for name, value in terms.items()}
        terms["cu_seqlens"] = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0))
    return positions, terms


def written_out(positions: dict[str, Any], terms: dict[str, Any], config: gk.LossConfig) -> dict[str, Tensor]:
    """Loss, metrics and gradients with a row of hidden states for every term."""
    leaves = {name: positions[name].clone().requires_grad_() for name in ("hidden", "head")}
    index = terms["term_index"].clamp(min=0)
    targets = torch.where(terms["term_index"] >= 0, positions["targets"][index], -100)
    others = {name: value for name, value in terms.items() if name != "term_index"}
    hidden = leaves["hidden"][index]
    result = gk.linear_policy_loss(hidden, leaves["head"], targets, **others, config=config, backend="reference")
    return finished(result, leaves)


def finished(result: gk.PolicyLoss, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    result.loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor} | gradients


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name].cpu(), value.to(got[name].dtype), rtol=1e-9, atol=1e-11, equal_nan=True, msg=name
        )


@needs_cpu_kernels
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_linear_policy_loss(name: str, packed: bool) -> None:
    positions, terms = draw(packed)
    config = gk.LossConfig(**CONFIGS[name])
    want = written_out(positions, terms, config)
    assert want["hidden"].any() and not want["hidden"][10].any()
    for backend in ("cpu", "reference"):
        for options in OPTIONS:
            leaves = {name: positions[name].clone().requires_grad_() for name in ("hidden", "head")}
            arguments: dict[str, Any] = {"targets": positions["targets"], **terms, **options}
            result = gk.linear_policy_loss(**leaves, **arguments, config=config, backend=backend)
            assert_close(finished(result, leaves), want)


@pytest.mark.parametrize("name", ["clip", "rows"])
@pytest.mark.parametrize("backend", [name for name in runnable_backends(SUPPORTS) if name == "triton"])
def test_linear_policy_loss_in_float32_on_triton(backend: str, name: str) -> None:
    positions, terms = draw(True)
    config = gk.LossConfig(**CONFIGS[name])
    want = written_out(positions, terms, config)
    device = device_of(backend)

    def moved(value: Tensor) -> Tensor:
        return value.to(device, torch.float32) if value.is_floating_point() else value.to(device)

    leaves = {name: moved(positions[name]).detach().requires_grad_() for name in ("hidden", "head")}
    arguments: dict[str, Any] = {"targets": moved(positions["targets"]), "chunk_size": 4}
    arguments |= {name: moved(value) for name, value in terms.items()}
    got = finished(gk.linear_policy_loss(**leaves, **arguments, config=config, backend=backend), leaves)
    for what in ("loss", "hidden", "head"):
        torch.testing.assert_close(got[what].cpu(), want[what].float(), rtol=1e-5, atol=1e-6, msg=what)


@needs_cpu_kernels
def test_positions_without_a_term_are_neither_read_nor_computed() -> None:
    positions, terms = draw(True)
    want = written_out(positions, terms, CONFIG)
    positions["hidden"][10] = torch.nan
    for options in ({}, {"compact": False}, {"compact": False, "chunk_size": 4}, {"memory": "low"}):
        leaves = {name: positions[name].clone().requires_grad_() for name in ("hidden", "head")}
        arguments: dict[str, Any] = {"targets": positions["targets"], **terms, **options}
        assert_close(finished(gk.linear_policy_loss(**leaves, **arguments, config=CONFIG), leaves), want)


@needs_cpu_kernels
def test_a_reference_head_and_a_support_are_those_of_the_positions() -> None:
    positions, terms = draw(False)
    config = gk.LossConfig(kl="k3", kl_coef=0.1)
    index = terms["term_index"].clamp(min=0)
    ref_hidden = positions["hidden"] * 0.9
    scored = gk.linear_logprobs(ref_hidden, positions["head"], positions["targets"]).logprobs
    want = written_out(positions, terms | {"ref_logprobs": scored[index]}, config)
    for memory in ("fast", "low"):
        leaves = {name: positions[name].clone().requires_grad_() for name in ("hidden", "head")}
        arguments: dict[str, Any] = {"targets": positions["targets"], **terms, "memory": memory, "chunk_size": 4}
        result = gk.linear_policy_loss(**leaves, **arguments, ref_hidden=ref_hidden, config=config)
        assert_close(finished(result, leaves), want)
    everything = torch.arange(VOCABULARY).repeat(POSITIONS), torch.arange(POSITIONS + 1) * VOCABULARY
    want = written_out(positions, terms, CONFIG)
    leaves = {name: positions[name].clone().requires_grad_() for name in ("hidden", "head")}
    result = gk.linear_policy_loss(**leaves, targets=positions["targets"], **terms, support=everything, config=CONFIG)
    assert_close(finished(result, leaves), want)


def test_trees_of_trl() -> None:
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row, random = packing.TreeRow(), torch.Generator().manual_seed(1)
    samples = []
    for tokens, advantage in (([3, 1, 4, 1, 5], 1.0), ([3, 1, 4, 1, 6, 2], -0.5), ([3, 1, 7], 0.25)):
        sample = {
            "input_ids": torch.tensor(tokens),
            "completion_mask": torch.tensor([0] + [1] * (len(tokens) - 1)),
            "old_log_probs": -torch.rand(len(tokens), generator=random),
            "advantage": advantage,
            "group_id": 0,
        }
        row.add(sample)
        samples.append(sample)
    fields = row.pack()
    scores = torch.randn(VOCABULARY, VOCABULARY, generator=random, dtype=F64)  # a model that sees the last token alone
    hidden, targets = torch.eye(VOCABULARY, dtype=F64)[fields["input_ids"]], fields["shift_labels"]
    lengths = fields["segment_id"].bincount()
    tree = {
        "term_index": fields["token_index"],
        "old_logprobs": fields["old_log_probs"].double(),
        "advantages": fields["advantages"].double(),
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
    }
    assert len(fields["token_index"]) == 11 > (targets != -100).sum()
    weight = scores.clone().requires_grad_()
    shared = gk.linear_policy_loss(hidden, weight, targets, **tree).loss
    shared.backward()
    plain = scores.clone().requires_grad_()
    inputs = torch.cat([sample["input_ids"][:-1] for sample in samples])
    logprobs = plain.T[inputs].log_softmax(-1).gather(1, torch.cat([s["input_ids"][1:] for s in samples])[:, None])
    others = {name: value for name, value in tree.items() if name != "term_index"}
    expected = gk.policy_loss(logprobs.squeeze(1), **others).loss
    expected.backward()
    torch.testing.assert_close(shared, expected)
    torch.testing.assert_close(weight.grad, plain.grad)


def test_positions_and_an_index_of_terms_are_refused() -> None:
    hidden, weight, targets = torch.randn(4, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.arange(4)
    terms: tuple[Any, ...] = targets, torch.ones(2, 3), torch.ones(2)
    options = {"term_index": torch.zeros(2, 3).long(), "positions": torch.arange(2)}
    message = "linear_policy_loss: positions must be None with term_index"
    assert_raises(ValueError, message, (), lambda: gk.linear_policy_loss(hidden, weight, *terms, **options))
