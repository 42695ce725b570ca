"""policy_loss against the installed peers, compiled torch and two exponentials: `make bench`, or
pytest benchmarks/test_policy_loss.py --benchmark-only -s for the table alone, -k ratio for the bars.

Bytes at the least, per token: 4 each for log-probs, old and reference, 1 for the mask, 4 written: 17; the peers move
560 to 860. 256 rows of 2,048 tokens, PPO clip + k3 + all metrics, forward and backward.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.paired import paired
from tests import peers_trl

Case = Callable[[], Any]
ROWS, WIDTH = 256, 2048
BETA = 0.04
OURS = gk.LossConfig.trl(loss_type="dapo", beta=BETA, use_bias_correction_kl=False)


class Batch:
    """Log-probs as after a step or two, every token valid."""

    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = lambda: torch.randn(rows, WIDTH, generator=generator)  # noqa: E731
        self.logprobs = (0.5 * noise() - 1).clamp(max=-1e-3).requires_grad_()
        self.old = self.logprobs.detach() + 0.1 * noise()
        self.ref = self.logprobs.detach() + 0.1 * noise()
        self.advantages = torch.randn(rows, generator=generator)
        self.mask = torch.ones(rows, WIDTH, dtype=torch.bool)
        self.sparse = torch.rand(rows, WIDTH, generator=generator) < 1 / 16

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logprobs)[0]


def ours(b: Batch, mask: Tensor | None = None, config: gk.LossConfig = OURS) -> Tensor:
    mask = b.mask if mask is None else mask
    result = gk.policy_loss(b.logprobs, b.old, b.advantages, mask=mask, ref_logprobs=b.ref, config=config)
    return b.gradient(result.loss)


def packed(b: Batch, mask: Tensor) -> Case:
    """The same tokens without their padding."""
    sizes = mask.sum(1)
    cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    lp, old, ref = (t.detach()[mask] for t in (b.logprobs, b.old, b.ref))
    lp.requires_grad_()

    def call() -> Tensor:
        result = gk.policy_loss(lp, old, b.advantages, cu_seqlens=cu_seqlens, ref_logprobs=ref, config=OURS)
        return torch.autograd.grad(result.loss, lp)[0]

    return call


def trl(b: Batch) -> Tensor:
    inputs = {"advantages": b.advantages, "old_per_token_logps": b.old, "ref_per_token_logps": b.ref}
    options = {"loss_type": "dapo", "beta": BETA, "use_bias_correction_kl": False}
    return b.gradient(peers_trl.policy_loss(b.logprobs, -b.logprobs.detach(), b.mask, inputs, **options)[0])


def plain(lp: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """What TRL computes, as one function without host synchronisation, for torch.compile."""
    ratio, weight, distance = (lp - old).exp(), mask.float(), ref - lp
    term = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    kl = distance.exp() - distance - 1
    count = weight.sum().clamp(min=1)
    loss = ((term + BETA * kl) * weight).sum() / count
    low = (ratio < 0.8) & (advantages < 0)[:, None]
    high = (ratio > 1.2) & (advantages > 0)[:, None]
    per_row = weight.sum(1)
    fractions = [(flag * weight).sum(1) / per_row for flag in (low, high)]
    metrics = [(value * weight).sum() / count for value in (kl, -lp, low, high, low | high)]
    return loss, torch.stack([*metrics, fractions[0].min(), fractions[1].max()]).detach()


_compiled = torch.compile(plain)


def compiled(b: Batch) -> Tensor:
    return b.gradient(_compiled(b.logprobs, b.old, b.ref, b.advantages, b.mask)[0])


@functools.cache
def verl_actor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.workers.config import FSDPActorConfig
    return FSDPActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=4)


def verl(b: Batch) -> Tensor:
    from verl.trainer.ppo import core_algos

    advantages = b.advantages[:, None].expand_as(b.old)
    vanilla = core_algos.get_policy_loss_fn("vanilla")
    loss, _ = vanilla(b.old, b.logprobs, advantages, b.mask, "token-mean", verl_actor())
    kl = core_algos.kl_penalty(b.logprobs, b.ref, "low_var_kl")
    return b.gradient(loss + BETA * core_algos.agg_loss(kl, b.mask, "token-mean"))


def two_exponentials(b: Batch) -> Tensor:
    return torch.exp(torch.exp(b.old))


PEERS = {"trl": trl, "torch.compile": compiled, "verl": verl}
BARS = {"trl": 15, "torch.compile": 3, "verl": 10}


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


@pytest.mark.parametrize("name", ["ours", *PEERS])
def test_clip_and_k3(benchmark: Any, batch: Batch, name: str) -> None:
    benchmark.group = f"{ROWS} x {WIDTH} tokens, clip + k3 + metrics, forward + backward"
    benchmark.extra_info["bytes"] = 17 * ROWS * WIDTH
    benchmark({"ours": ours, **PEERS}[name], batch)


@pytest.mark.parametrize("theirs", BARS)
def test_ratio(benchmark: Any, batch: Batch, theirs: str) -> None:
    call = PEERS[theirs]
    config = OURS
    if theirs == "verl":
        options = {"use_kl_loss": True, "kl_loss_coef": BETA, "kl_loss_type": "low_var_kl"}
        config = gk.LossConfig.verl(loss_mode="vanilla", **options)
    # nobody is timed who computes something else; float32 gradients of 1e-6, against the largest of them
    gold = ours(batch, config=config)
    torch.testing.assert_close(call(batch), gold, rtol=1e-4, atol=1e-5 * float(gold.abs().max()))
    result = benchmark.pedantic(lambda: paired(lambda: ours(batch, config=config), lambda: call(batch)), rounds=1)
    print(f"\n{theirs:20} {result}, bar {BARS[theirs]}")
    benchmark.extra_info.update(result._asdict())
    assert result.ratio >= BARS[theirs]


def test_ratio_to_two_exponentials(benchmark: Any, batch: Batch) -> None:
    result = benchmark.pedantic(lambda: paired(lambda: two_exponentials(batch), lambda: ours(batch)), rounds=1)
    print(f"\nours / two torch.exp   {result}, at most 3")
    assert result.ratio <= 3


def test_ratio_at_half_padding(benchmark: Any, batch: Batch) -> None:
    half = torch.zeros_like(batch.mask)
    half[:, : WIDTH // 2] = True
    dense = lambda: ours(batch)  # noqa: E731
    for name, call in {"packed": packed(batch, half), "padded": lambda: ours(batch, half)}.items():
        result = paired(call, dense)
        print(f"\nhalf the tokens, {name}: {result} of the time of all, where 2 would be in proportion")
        if name == "packed":
            assert result.ratio >= 1.6
    benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("rows", [ROWS, 8 * ROWS])
def test_ratio_at_sparse_endpoints(benchmark: Any, rows: int) -> None:
    """Endpoints as a head that computes only them gives them; and for comparison, as a mask on dense arrays.

    At the smaller size 0.15 ms of Python and autograd, which every call takes, are more than the endpoints' work.
    """
    batch = Batch(rows)
    dense = lambda: ours(batch)  # noqa: E731
    for name, call in {"packed": packed(batch, batch.sparse), "masked": lambda: ours(batch, batch.sparse)}.items():
        result = paired(call, dense)
        print(f"\none token in 16 of {rows} x {WIDTH}, {name}: {result}" + (", bar 8" if name == "packed" else ""))
        if name == "packed" and rows > ROWS:
            assert result.ratio >= 8
    benchmark.pedantic(lambda: None, rounds=1)
