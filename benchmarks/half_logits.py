"""Errors of log-probs from a bfloat16 head: logits rounded to bfloat16 against float32 logits of the same inputs.

    python -m benchmarks.half_logits [--rows 64] [--hidden 896] [--vocabulary 151936]

The inputs are hidden states and weights in bfloat16, like those of a trained model: logits with a standard deviation of
3, and a bonus for each target, so that log-probs lie between about 0 and -20. Exact values are computed in float64 from
the same inputs. `ratio` is the importance ratio that the error alone makes of 1, farthest from it, and the share of
tokens whose ratio it moves by more than 1%.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk

STANDARD_DEVIATION = 3.0
ROWS_OF_GOLD = 16


class Inputs(NamedTuple):
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [N]


class Errors(NamedTuple):
    largest: float
    mean: float
    ratio: float
    moved: float


def inputs(rows: int, hidden: int, vocabulary: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, hidden, generator=generator).bfloat16()
    states = torch.randn(rows, hidden, generator=generator) * (STANDARD_DEVIATION / hidden**0.5)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    # a multiple of the target's weight raises its logit, by 0 to 30
    bonus = torch.linspace(0, 30, rows)[:, None] / hidden
    return Inputs((states + bonus * weight[targets]).bfloat16(), weight, targets)


def exact(i: Inputs) -> Tensor:
    parts = []
    for hidden, targets in zip(i.hidden.split(ROWS_OF_GOLD), i.targets.split(ROWS_OF_GOLD), strict=True):
        logits = hidden.double() @ i.weight.double().T
        parts.append(logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1))
    return torch.cat(parts)


def rounded_logits(i: Inputs) -> Tensor:
    """As a model's own forward and a float32 log_softmax."""
    return (i.hidden @ i.weight.T).float().log_softmax(-1).gather(1, i.targets[:, None])[:, 0]


def verl_fused(i: Inputs) -> Tensor:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    result: Tensor = FusedLinearForPPO()(i.hidden, i.weight, i.targets)[0]
    return result


def trl_chunked(i: Inputs) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    result: Tensor = ChunkedLogProbFunction.apply(i.hidden, i.weight, None, i.targets, 1.0, 4096, None, 1.0, ())[0]
    return result


def ours(i: Inputs) -> Tensor:
    return gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs


WAYS: dict[str, tuple[str, Callable[[Inputs], Tensor]]] = {
    "bfloat16 logits, float32 log_softmax": ("", rounded_logits),
    "verl, fused": ("verl", verl_fused),
    "trl, chunked": ("trl", trl_chunked),
    "grpo_kernels": ("", ours),
}


def measured(i: Inputs) -> Iterator[tuple[str, Errors]]:
    gold = exact(i)
    for name, (package, compute) in WAYS.items():
        if package and importlib.util.find_spec(package) is None:
            continue
        with torch.no_grad():
            errors = compute(i).double() - gold
        ratios = errors.exp()
        farthest = ratios[(ratios - 1).abs().argmax()]
        moved = ((ratios - 1).abs() > 0.01).double().mean()
        yield name, Errors(float(errors.abs().max()), float(errors.abs().mean()), float(farthest), float(moved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows; default: %(default)s")
    parser.add_argument("--hidden", type=int, default=896, help="hidden size; default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="vocabulary size; default: %(default)s")
    options = parser.parse_args()
    print(f"{'':38} {'largest error':>14} {'mean error':>12} {'ratio':>10} {'moved by 1%':>12}")
    for name, e in measured(inputs(options.rows, options.hidden, options.vocabulary)):
        print(f"{name:38} {e.largest:14.2g} {e.mean:12.2g} {e.ratio:10.6f} {e.moved:12.0%}")


if __name__ == "__main__":
    main()
