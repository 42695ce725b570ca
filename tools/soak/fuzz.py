"""Random calls on one backend, compared with the reference in float64; random invalid calls must raise, not crash.

    python -m tools.soak.fuzz --backend cpu --seconds 60 --seed 3
    python -m tools.soak.fuzz --backend cpu --replay 3000017

Two of three calls are valid. Their results and gradients may be off by twice the error of the reference in the same
dtype, plus what rounding can cost; integers must be equal. The others have one argument changed at random, and
must return or raise ValueError, TypeError or RuntimeError.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends, registry
from tools.soak import fuzz_calls
from tools.soak.fuzz_calls import Call, Draw, is_float

CLEAN = (ValueError, TypeError, RuntimeError)
# Roundings of a term, such as the loss of a token with its ratio, bounds, KL and gradient, and in a sum for each term.
OF_A_TERM, OF_A_SUM = 16, 4
NUDGES = 16  # draws of inputs that were rounded otherwise
SEEDS = 1_000_000  # cases of one seed


def poison() -> None:
    """Fills new memory with NaN, in torch and in the compiled ops."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for library in (backends.cpu_library, backends.cuda_library):
        if library is not None:
            library.poison_allocations(True)


def draw_call(seed: int) -> tuple[Draw, Call, str]:
    """The call of a seed, and the change that may make it invalid, if any."""
    draw = Draw(seed)
    call = fuzz_calls.CALLS[draw.choose.choice(sorted(fuzz_calls.CALLS))](draw)
    changed = fuzz_calls.changed(draw, call) if draw.maybe(1 / 3) else ""
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            call.arguments[name] = fuzz_calls.laid_out(draw, value)
    return draw, call, changed


def compute(call: Call, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Results and gradients by name.

    Args:
        call: the call.
        backend: its backend.
        dtype: dtype that floating-point tensors are converted to, if any.
    """
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        if is_float(value) and value.dim() and dtype is not None:
            arguments[name] = value.to(dtype)
    leaves = {}
    for name in call.leaves:
        if is_float(arguments.get(name)):
            arguments[name] = leaves[name] = arguments[name].detach().requires_grad_()
    results = tensors(getattr(gk, call.op)(**fuzz_calls.assembled(arguments), backend=backend))
    total = sum((spread(value) for value in results.values() if value.requires_grad), torch.zeros(()))
    if leaves and isinstance(total, Tensor) and total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        results |= {f"gradient of {name}": of for name, of in zip(leaves, gradients, strict=True) if of is not None}
    return {name: value.detach() for name, value in results.items()}


def tensors(result: Any, name: str = "result") -> dict[str, Tensor]:
    """The tensors of a result by name."""
    if isinstance(result, Tensor):
        return {name: result}
    if hasattr(result, "_fields"):
        parts = zip(result._fields, result, strict=True)
        return {key: value for field, part in parts for key, value in tensors(part, field).items()}
    return {name: result.tensor} if hasattr(result, "tensor") else {}


def spread(value: Tensor) -> Tensor:
    """A sum with other weights for each element, so that each gets a gradient of its own."""
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64).reshape(value.shape)
    return (value.double() * weights).sum()


class Budget(NamedTuple):
    """Error that rounding alone may cost, in units of the largest value, which counts as at least `scale`."""

    floor: float
    scale: float


def budget_of(call: Call) -> Budget:
    """The budget of a call beside the reference's own error, as the reference may round a small draw to no error.

    A sum of n terms errs by a multiple of n u, its terms by another. Kernels sum in float32, or in float64 where all
    tensors are; a narrower dtype rounds inputs of a product and the result once more.
    """
    numbers = [value for value in call.arguments.values() if is_float(value) and value.numel()]
    if not numbers:
        return Budget(0.0, 1.0)
    longest = max(max(value.shape, default=1) for value in numbers)
    coarsest = max(torch.finfo(value.dtype).eps / 2 for value in numbers)
    summing = min(coarsest, torch.finfo(torch.float32).eps / 2)
    largest = max(float(value.nan_to_num(0, 0, 0).abs().max()) for value in numbers)
    roundings = OF_A_TERM + OF_A_SUM * longest
    return Budget(roundings * summing + (2 * coarsest if coarsest > summing else 0.0), max(1.0, largest))


def disagreement(got: dict[str, Tensor], working: dict[str, Tensor], gold: dict[str, Tensor], budget: Budget) -> str:
    """The first result that is wrong; empty if all are right."""
    if got.keys() != gold.keys():
        return f"results {sorted(got)} instead of {sorted(gold)}"
    for name, value in got.items():
        if value.shape != gold[name].shape:
            return f"{name} has shape {list(value.shape)} instead of {list(gold[name].shape)}"
        if not value.is_floating_point():
            if not torch.equal(value, working[name]):
                return f"{name} differs from the reference's"
        elif wrong := excess(value, working[name], gold[name].double(), budget):
            return f"{name}: {wrong}"
    return ""


def excess(got: Tensor, working: Tensor, gold: Tensor, budget: Budget) -> str:
    if got.numel() == 0:
        return ""
    finite = gold.isfinite() & working.isfinite()
    # what overflows in the working dtype may overflow in a kernel, too
    same = (got.double() == gold) | (got.isnan() & gold.isnan()) | ~working.isfinite() | got.isnan() & working.isnan()
    if not bool(same[~finite].all()):
        return "not finite elsewhere than the reference"
    if not bool(finite.any()):
        return ""
    error, own = (got.double() - gold)[finite].abs(), (working.double() - gold)[finite].abs()
    allowed = 2 * float(own.max()) + budget.floor * max(budget.scale, float(gold[finite].abs().max()))
    if float(error.nan_to_num(nan=torch.inf).max()) <= allowed:
        return ""
    worst = int(error.nan_to_num(nan=torch.inf).argmax())
    return f"got {got[finite][worst]:.9g}, gold {gold[finite][worst]:.9g}, allowed {allowed:.3g}"


class Failure(NamedTuple):
    seed: int
    changed: str  # what was changed in the call, if anything
    text: str


def try_seed(seed: int, backend: str, counts: Counter[str]) -> Failure | None:
    """Runs the call of a seed and returns what went wrong."""
    _, call, changed = draw_call(seed)
    counts["changed" if changed else "valid"] += 1
    counts[f"op {call.op}"] += 1
    try:
        got = compute(call, backend)
    except CLEAN as error:
        counts["refused"] += 1
        text = f"{call.op} raised {type(error).__name__}: {str(error)[:300]}"
        if changed and not any(name in str(error) for name in gk.__all__):
            counts[f"unnamed: {text[:150]}"] += 1
        return None if changed or is_refused_too(call, error) else Failure(seed, changed, text)
    except Exception as error:
        return Failure(seed, changed, f"{call.op} raised {type(error).__name__}: {str(error)[:300]}")
    if changed:
        return None
    wide = {name: value.double() if is_float(value) else value for name, value in call.arguments.items()}
    working = compute(call, "reference")
    gold = working if call.op in OF_DISTANCES else compute(Call(call.op, wide, call.leaves), "reference")
    budget = budget_of(call)
    wrong = disagreement(got, working, gold, budget)
    if wrong and got.keys() == gold.keys() and (call.op not in OF_DISTANCES or "embeddings" in call.arguments):
        wrong = disagreement(got, nudged(call, working, gold), gold, budget)
    return Failure(seed, changed, f"{call.op}: {wrong}") if wrong else None


# Ops that cluster decide between numbers, equal in every backend; in float64 they may decide otherwise.
OF_DISTANCES = (
    "similarity_groups", "similarity_advantages", "agglomerate", "cluster_distances", "silhouette", "pairwise_cosine",
)  # fmt: skip


def nudged(call: Call, working: dict[str, Tensor], gold: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results for inputs that were rounded otherwise: of these and the reference's, those that are farthest off.

    Some results are quotients of differences that keep few digits: advantages of rewards that cancel, or silhouettes of
    nearly parallel rows, whose distances are nudged, as they are 1 - cosine.
    """
    farthest = dict(working)
    for _ in range(NUDGES):
        if "embeddings" in call.arguments:
            found = nudged_clusters(call)
        else:
            moved = {name: nudge(value) if is_float(value) else value for name, value in call.arguments.items()}
            found = compute(Call(call.op, moved, call.leaves), "reference")
        whole = [name for name, value in found.items() if name in working and not value.is_floating_point()]
        if all(torch.equal(found[name], working[name]) for name in whole):
            for name in found.keys() & farthest.keys() - set(whole):
                is_farther = (found[name] - gold[name]).abs() > (farthest[name] - gold[name]).abs()
                farthest[name] = torch.where(is_farther, found[name].double(), farthest[name].double())
    return farthest


def nudge(value: Tensor) -> Tensor:
    unit = OF_A_TERM * torch.finfo(value.dtype).eps / 2
    return value.double() * (1 + unit * (2 * torch.rand(value.shape, dtype=torch.float64) - 1))


def nudged_clusters(call: Call) -> dict[str, Tensor]:
    """Silhouettes, and the numbers of clusters that they are for."""
    arguments = call.arguments
    like = {name: arguments[name] for name in ("embeddings", "groups", "valid") if name in arguments}
    distances = gk.pairwise_cosine(**like, backend="reference")
    unit = OF_A_SUM * arguments["embeddings"].shape[1] * torch.finfo(torch.float32).eps / 2
    noise = unit * (2 * torch.rand_like(distances) - 1).triu(1)
    distances = (distances + noise + noise.mT).clamp(min=0)
    found = gk.cluster_distances(distances, config=arguments.get("config", "average"), backend="reference")
    return {"silhouette": found.silhouette, "best_k": found.best_k}


def is_refused_too(call: Call, error: Exception) -> bool:
    """Whether the reference refuses the call, too, or the backend says that it lacks the dtype or setting."""
    if "cannot run here" in str(error):
        return True
    try:
        compute(call, "reference")
    except CLEAN:
        return True
    return False


def fuzz(backend: str, seconds: float, first: int, progress: Path | None = None) -> dict[str, Any]:
    """Tries seeds from `first` on, for this long. The file holds the seed that is being tried, for after a crash."""
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    seed, end = first, time.monotonic() + seconds
    file = None if progress is None else os.open(progress, os.O_WRONLY | os.O_CREAT)
    while time.monotonic() < end and len(failures) < 50:
        if file is not None:
            os.pwrite(file, f"{seed:<20}".encode(), 0)
        if failure := try_seed(seed, backend, counts):
            failures.append(failure)
        seed += 1
    return {"calls": seed - first, "next": seed, "failures": failures, "counts": dict(counts)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "triton", "cuda", "reference"), required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help=f"cases count from SEED * {SEEDS}")
    parser.add_argument("--first", type=int, help="the first case, instead of --seed")
    parser.add_argument("--replay", type=int, help="run this case alone, and show its traceback")
    parser.add_argument("--emulated", help="library of the CUDA kernels that runs on the host")
    parser.add_argument("--progress", type=Path)
    parser.add_argument("--result", type=Path, help="JSON file for the counts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    backends.name_implementations()
    if options.emulated:
        torch.ops.load_library(options.emulated)
        registry.enable_emulated_cuda()
    poison()
    if options.replay is not None:
        return replay(options.replay, options.backend)
    first = options.seed * SEEDS if options.first is None else options.first
    result = fuzz(options.backend, options.seconds, first, options.progress)
    print(json.dumps(result, indent=1))
    if options.result is not None:
        options.result.write_text(json.dumps(result))
    return int(bool(result["failures"]))


def replay(seed: int, backend: str) -> int:
    _, call, changed = draw_call(seed)
    for name, value in call.arguments.items():
        shown = f"{value.dtype} {list(value.shape)} {value.stride()}" if isinstance(value, Tensor) else repr(value)
        print(f"  {name}: {shown}")
    print(f"{call.op}, changed: {changed or 'nothing'}")
    try:
        compute(call, backend)
    except Exception:
        traceback.print_exc()
    failure = try_seed(seed, backend, Counter())
    print("as expected" if failure is None else failure.text)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
