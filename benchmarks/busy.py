"""Times calls beside as many busy processes as cores, as data loaders, Ray actors or an inference engine are.

    python -m benchmarks.busy
    python -m benchmarks.busy --seconds 5 --json busy.json

Each call is timed on one thread while nothing else runs, then on torch's own number of threads beside the busy
processes. A slow-down is the mean of the second over the median of the first. An op meets its bar if it slows down at
most three times as much as the torch operators that stay on one thread at this size, at their median.
linear_policy_loss consists of torch's products, which do not, and is compared with these.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import grpo_kernels as gk
from benchmarks.cases import endpoint_segments, linear_policy_loss, policy_loss
from benchmarks.head_peers import Inputs, bare_products
from benchmarks.run import document, write

LIMIT = 3.0
ONE_THREAD = ("torch.mul, 8,192", "torch.sort, 8,192", "torch.cumsum, 8,192")
HEAD = linear_policy_loss.TINY._replace(rows=64)
PRODUCTS, OF_PRODUCTS = "torch.mm, three products of 64 x 64 x 1,024", "linear_policy_loss, 64 x 64 x 1,024"
Call = Callable[[], Any]
# ends by itself if the benchmark is killed
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"


def ours() -> dict[str, Call]:
    device = torch.device("cpu")
    rewards, rows = torch.randn(8192), torch.randn(64, 384)
    tokens = policy_loss.Batch(64, 512, device, 0)
    logits, targets = torch.randn(16, 32_000, requires_grad=True), torch.randint(32_000, (16,))
    upstream = torch.ones(16)
    responses = endpoint_segments.make(16, 1024, device)
    head = Inputs(HEAD, torch.device("cpu"))
    return {
        "group_advantages, 8,192 rewards": lambda: gk.group_advantages(rewards, 8),
        "policy_loss, 64 x 512": lambda: policy_loss.ours(tokens),
        "similarity_groups, 8 x 8 x 384": lambda: gk.similarity_groups(rows, 8),
        "token_logprobs, 16 x 32,000, forward and backward": lambda: torch.autograd.grad(
            gk.token_logprobs(logits, targets).logprobs, logits, upstream
        ),
        "endpoint_segments, 16 x 1,024": lambda: endpoint_segments.ours(responses),
        OF_PRODUCTS: lambda: linear_policy_loss.ours(head),
    }


def of_torch() -> dict[str, Call]:
    """Operators of torch: first those of ONE_THREAD."""
    small, large = torch.randn(8192), torch.randn(64, 2048)
    head = Inputs(HEAD, torch.device("cpu"))
    return {
        "torch.mul, 8,192": lambda: small * 2,
        "torch.sort, 8,192": lambda: small.sort(),
        "torch.cumsum, 8,192": lambda: small.cumsum(0),
        "torch.exp, 64 x 2,048": lambda: large.exp(),
        "torch.log_softmax, 64 x 2,048": lambda: large.log_softmax(1),
        PRODUCTS: lambda: bare_products(head),
    }


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def times_of(call: Call, seconds: float) -> list[float]:
    """Microseconds of each call for so many seconds."""
    for _ in range(3):
        call()
    times, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def measure(calls: dict[str, Call], seconds: float, processes: int) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = {name: statistics.median(times_of(call, seconds / 2)) for name, call in calls.items()}
    finally:
        torch.set_num_threads(threads)
    results = []
    with busy_processes(processes):
        for name, call in calls.items():
            times = sorted(times_of(call, seconds))
            mean, p95 = statistics.fmean(times), times[int(0.95 * (len(times) - 1))]
            results.append(
                {"name": name, "alone_us": alone[name], "mean_us": mean, "p95_us": p95, "slower": mean / alone[name]}
            )
    return results


def limit_of(name: str, results: list[dict[str, Any]]) -> float:
    """The slow-down that an op may have; infinite for an operator of torch."""
    slower = {result["name"]: float(result["slower"]) for result in results}
    if name.startswith("torch."):
        return math.inf
    return LIMIT * (slower[PRODUCTS] if name == OF_PRODUCTS else statistics.median(slower[key] for key in ONE_THREAD))


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| call | alone, one thread | mean | p95 | slower | at most | |", "|---|---|---|---|---|---|---|"]
    for result in results:
        numbers = [f"{result[key]:,.0f} us" for key in ("alone_us", "mean_us", "p95_us")]
        limit = limit_of(result["name"], results)
        bar = (
            ["", ""] if limit == math.inf else [f"{limit:.1f}x", "met" if result["slower"] <= limit else "**not met**"]
        )
        lines.append("| " + " | ".join([result["name"], *numbers, f"{result['slower']:.1f}x", *bar]) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="seconds for each call beside the busy processes; default: %(default)s",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="busy processes; default: one a core")
    parser.add_argument("--json", type=Path, help="the result file")
    options = parser.parse_args(arguments)
    results = measure(of_torch() | ours(), options.seconds, options.processes)
    if options.json:
        write(options.json, document(torch.device("cpu"), [], {}) | {"busy": results})
    print(table(results))


if __name__ == "__main__":
    main()
