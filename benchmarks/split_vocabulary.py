"""Time of linear_policy_loss over a vocabulary split between two processes, against half its columns in one.

python -m benchmarks.split_vocabulary
python -m benchmarks.split_vocabulary --rows 2048 --width 512 --columns 50304 --repeats 20
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import grpo_kernels as gk

BAR = 1.25  # of the time of half the columns


def measure(rank: int, folder: str, rows: int, width: int, columns: int, repeats: int) -> None:
    """Alternates both, one thread each; while one process computes alone, the other waits for it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    hidden = torch.randn(1, rows, width)
    targets = torch.randint(columns // 2, (1, rows))
    old, advantages = torch.full((1, rows), -10.0), torch.randn(1, rows)
    half = torch.randn(columns // 2, width) / width**0.5
    seconds: dict[bool, list[float]] = {False: [], True: []}
    busy: dict[bool, list[float]] = {False: [], True: []}  # processor time of this process, whatever else is running
    for repeat in range(repeats + 1):  # the first one warms up
        for is_split in (False, True):
            leaf = hidden.clone().requires_grad_()
            weight = half.clone().requires_grad_()
            first, group = (rank * len(half), dist.group.WORLD) if is_split else (None, None)
            dist.barrier()
            start, busy_before = time.perf_counter(), time.process_time()
            if is_split or rank == 0:
                head = gk.LMHead(weight, vocab_start=first, process_group=group)
                loss = gk.linear_policy_loss(leaf, head, targets, old, advantages, backend="kernel").loss
                loss.backward()
            dist.barrier()
            if repeat > 0:
                seconds[is_split].append(time.perf_counter() - start)
                busy[is_split].append(time.process_time() - busy_before)
    if rank == 0:
        print(f"N={rows} H={width} V={columns}, float32, minimum of {repeats} alternated repeats")
        for name, times in (("processor time of the first process", busy), ("elapsed time", seconds)):
            alone, split = min(times[False]), min(times[True])
            print(
                f"{name}: {alone * 1e3:.1f} ms alone with half, {split * 1e3:.1f} ms in two, {split / alone:.3f} of it"
            )
        verdict = "met" if split / alone <= BAR else "not met"
        print(f"elapsed time of at most {BAR}: {verdict}; both processes need a core of their own")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="rows; default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="hidden size; default: %(default)s")
    parser.add_argument("--columns", type=int, default=32000, help="vocabulary size; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=12, help="timed calls of each; default: %(default)s")
    options = parser.parse_args(arguments)
    sizes = (options.rows, options.width, options.columns, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (str(Path(folder)), *sizes), nprocs=2)


if __name__ == "__main__":
    main()
