"""linear_logprobs against the installed peers, forward and backward.

Floor: 2 N H V flops forward, and 6 N H V backward: the logits again, and two products for the gradients. Keeping the
logits would save their second product.

"verl's actor" is a step of verl's actor from hidden states to gradients, as its engine makes it: log-probs and the
entropy of every token, with a temperature and an entropy bonus.
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Provider
from benchmarks.head_peers import COMMON, ON_CPU, OTHERS, QWEN_SMALL, SMALL, TINY, Inputs, Shape, case, peers, sweep

OP = "linear_logprobs"


def ours(i: Inputs, **options: bool) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets, **options).logprobs.mean())


def ours_with_entropy(i: Inputs) -> tuple[Tensor, ...]:
    return ours(i, return_entropy=True)


def both_passes(shape: Shape) -> Case:
    providers = tuple(p for p in peers(ours_with_entropy) if p.name in ("naive autograd", "trl", "verl"))
    return case(OP, shape, "", ours, shape.floor(4), providers=providers, pairs=3)


def logprobs_alone(i: Inputs) -> Tensor:
    """The pass of a reference or of old log-probs."""
    with torch.no_grad():
        return gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs


def forward(shape: Shape) -> Case:
    providers = tuple(Provider(name, call, package) for name, call, package in FORWARDS) if shape in COMMON else ()
    options = {"providers": providers, "pairs": 3, "returned": lambda _: 0}
    return case(OP, shape, ", forward", logprobs_alone, shape.floor(1), **options)


@torch.no_grad()
def naive_alone(i: Inputs) -> Tensor:
    return (i.hidden @ i.weight.T).float().log_softmax(-1).gather(1, i.targets[:, None])[:, 0]


@torch.no_grad()
def trl_alone(i: Inputs) -> Tensor:
    """TRL's trainer without a fused head: logits, then the log-probs of the chosen tokens."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(i.hidden @ i.weight.T, i.targets).float()


@torch.no_grad()
def verl_alone(i: Inputs) -> Tensor:
    from verl.utils.torch_functional import logprobs_from_logits

    return logprobs_from_logits(i.hidden @ i.weight.T, i.targets, inplace_backward=False).float()


FORWARDS = (("torch, log_softmax", naive_alone, ""), ("trl", trl_alone, "trl"), ("verl", verl_alone, "verl"))
TEMPERATURE, BONUS = 0.9, 0.01


def bonus_loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return -logprobs.mean() - BONUS * entropy.float().mean()


def ours_in_verl(i: Inputs) -> tuple[Tensor, ...]:
    """The call behind impl_backend: grpo_kernels."""
    options = {"temperature": TEMPERATURE, "return_entropy": True}
    logprobs, entropy, _ = gk.linear_logprobs(i.hidden, i.weight, i.targets, **options)
    return i.gradients(bonus_loss(logprobs, entropy))


def verl_fused(i: Inputs) -> tuple[Tensor, ...]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return i.gradients(bonus_loss(*FusedLinearForPPO()(i.hidden, i.weight, i.targets, TEMPERATURE)))


def verl_logits(i: Inputs) -> tuple[Tensor, ...]:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    logits = (i.hidden @ i.weight.T) / TEMPERATURE
    logprobs = logprobs_from_logits(logits=logits, labels=i.targets, inplace_backward=False)
    return i.gradients(bonus_loss(logprobs, entropy_from_logits(logits)))


def verl_case(shape: Shape) -> Case:
    providers = (
        Provider("verl, fused", verl_fused, package="verl"),
        Provider("verl, logits", verl_logits, package="verl"),
    )
    options = {"providers": providers, "bars": tuple(Bar("memory below", 0.3, provider.name) for provider in providers)}
    return case(OP, shape, ", verl's actor", ours_in_verl, shape.floor(4), pairs=3, **options)


CASES = [both_passes(shape) for shape in (*ON_CPU, *COMMON)]
CASES += [forward(shape) for shape in (*COMMON, *OTHERS)] + [verl_case(shape) for shape in (SMALL, QWEN_SMALL)]
SWEEPS = [sweep(OP, ours, TINY.floor(4))]
