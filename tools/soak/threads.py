"""Four Python threads call every op at once on the same inputs; each result has the bits of a single thread's."""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Iterator

import torch

from tests.harness import cpu_threads
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, Op, Results, drawn, evaluated
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


def runnable(seed: int, without_products: bool = False) -> dict[str, tuple[Op, Inputs]]:
    """The cases that the CPU kernels run, with their inputs; a few run on GPU backends only.

    Args:
        seed: of the inputs.
        without_products: leave out ops that need ops of torch which it divides: products of hidden states and of
            embeddings, and those of sampling_correction.
    """
    cases = {}
    for name, op in OPS.items():
        if without_products and not name.startswith(WITHOUT_PRODUCTS):
            continue
        inputs = drawn(op, seed)
        try:
            evaluated(op, inputs, BACKEND)
        except (RuntimeError, ValueError) as error:
            if not any(text in str(error) for text in ("cannot run here", "on a GPU")):
                raise
            continue
        cases[name] = op, inputs
    return cases


def call_at_once(cases: dict[str, tuple[Op, Inputs]], outcome: Outcome, seed: int) -> None:
    """Every thread calls all cases in an order of its own, again and again."""
    expected = {name: evaluated(op, inputs, BACKEND) for name, (op, inputs) in cases.items()}
    ready = threading.Barrier(THREADS)
    wrong: list[list[str]] = [[] for _ in range(THREADS)]

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        ready.wait()
        for _ in range(ROUNDS):
            names = list(cases)
            chance.shuffle(names)
            for name in names:
                try:
                    is_same = equal(evaluated(*cases[name], BACKEND), expected[name])
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


def equal(results: Results, expected: Results) -> bool:
    """Whether all tensors have the same bits; NaN equals NaN."""
    return results.keys() == expected.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))
        for a, b in ((results[name], expected[name]) for name in expected)
    )
