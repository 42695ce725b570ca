"""Four Python threads call every op at once on the same inputs; each result has the bits of a single thread's."""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from tests import graph_cases
from tests.graph_inputs import Case, Inputs
from tests.harness import cpu_threads
from tools.soak.outcome import Outcome

THREADS, ROUNDS = 4, 25
BACKEND = "kernel"
WITHOUT_PRODUCTS = (
    *("group_advantages", "gigpo_advantages", "token_logprobs", "policy_loss"),
    *("endpoint_segments", "token_advantages"),
)


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    cases = runnable(options.seed)
    for count in (1, 2):
        outcome = Outcome(
            "threads",
            f"{len(cases)} calls of all ops, forward and backward, in {THREADS} threads at once, {count} OpenMP each",
            0,
            "the bits of a single thread",
        )
        with cpu_threads(count):
            call_at_once(cases, outcome, options.seed)
        yield outcome


def runnable(seed: int, without_products: bool = False) -> dict[str, tuple[Case, Inputs]]:
    """The cases that the CPU kernels run, with their inputs; a few run on GPU backends only.

    Args:
        seed: of the inputs.
        without_products: leave out ops that need ops of torch which it divides: products of hidden states and of
            embeddings, and those of sampling_correction.
    """
    cases = {}
    for name, case in graph_cases.CASES.items():
        if without_products and not name.startswith(WITHOUT_PRODUCTS):
            continue
        torch.manual_seed(seed)
        inputs = case.draw()
        try:
            case.call(inputs, BACKEND)
        except (RuntimeError, ValueError) as error:
            if not any(text in str(error) for text in ("cannot run here", "on a GPU")):
                raise
            continue
        cases[name] = case, inputs
    return cases


def call_at_once(cases: dict[str, tuple[Case, Inputs]], outcome: Outcome, seed: int) -> None:
    """Every thread calls all cases in an order of its own, again and again."""
    expected = {name: case.call(inputs, BACKEND) for name, (case, inputs) in cases.items()}
    ready = threading.Barrier(THREADS)
    wrong: list[list[str]] = [[] for _ in range(THREADS)]

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        ready.wait()
        for _ in range(ROUNDS):
            names = list(cases)
            chance.shuffle(names)
            for name in names:
                case, inputs = cases[name]
                try:
                    is_same = equal(case.call(inputs, BACKEND), expected[name])
                    problem = "" if is_same else "other bits"
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    wrong[number].append(f"{name} in thread {number}: {problem}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.times += THREADS * ROUNDS * len(cases)
    outcome.failures += [problem for problems in wrong for problem in problems]


def equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all tensors have the same bits; NaN equals NaN."""
    return len(got) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))
        for a, b in zip(got, expected, strict=True)
    )
