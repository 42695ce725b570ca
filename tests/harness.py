"""Helpers shared by the tests of all ops: runnable backends and error budgets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import IMPLEMENTATIONS, Supports, cpu_library, refusal
from tests.rounding import Moves, numbers_of

# what torch.compile calls with Inductor, all but its code generation, which takes long
INDUCTOR = "aot_eager_decomp_partition"

needs_cpu_kernels = pytest.mark.skipif(cpu_library is None, reason="the CPU kernels are not built")


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Divides all work of the CPU kernels among `count` threads, also work that is too short for that otherwise."""
    assert cpu_library is not None
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    least = cpu_library.set_fork_nanoseconds(0)
    try:
        yield
    finally:
        cpu_library.set_fork_nanoseconds(least)
        torch.set_num_threads(before)


def runnable_backends(supports: Supports, dtype: torch.dtype = torch.float32) -> list[str]:
    """Backends to test on this machine; without a GPU, Triton is interpreted and CUDA emulated."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = [name for name in IMPLEMENTATIONS if refusal(name, device, dtype, supports) is None]
    if device == "cuda" and refusal("cpu", "cpu", dtype, supports) is None:
        result.append("cpu")
    return result


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu")


def device_error() -> str:
    """The sticky error of this process's GPU, or "". Synchronises."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception as error:  # torch.AcceleratorError and its predecessors
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def assert_raises(error: type[Exception], start: str, parts: Iterable[str], call: Callable[[], object]) -> None:
    """Checks that the call raises exactly this type, with a message that begins with `start` and contains each part."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert caught.type is error and message.startswith(start), message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


# Largest relative error of a GPU's ex2.approx (PTX ISA), with which our CUDA kernels and Triton's take exponentials of
# logits. On the host exponentials are exact to the last digit.
EXP2_ERROR = 2.0**-22


def logprob_error(backend: str, working: Tensor, gold: Tensor, softcap: float = 0.0) -> float:
    """How far a kernel's log-probs may be from float64 on a GPU; 0 on the host, where budgets alone suffice.

    Twice the error of the reference in the working dtype, as for any result, and EXP2_ERROR: with every exponential off
    by this share of itself, so is their sum, and its logarithm by as much. A softcap takes a quotient of two sums with
    an exponential, (1 - d) / (1 + d): it is off by once and a half that, of the cap, in the target's logit and in the
    normalizer.
    """
    if device_of(backend).type != "cuda":
        return 0.0
    return 2 * float((working.double() - gold).abs().max()) + EXP2_ERROR * (1 + 3 * softcap)


def reach(call: Callable[[Tensor], dict[str, Tensor]], shape: torch.Size, error: float) -> dict[str, float]:
    """How far each result moves, to first order, where each log-prob is off by at most `error`; empty if by nothing.

    Args:
        call: results in float64, by name, from offsets of the log-probs. Differences of calls, unlike a gradient, see
            weights that are detached.
        shape: of the log-probs.
        error: of each of them.
    """
    offsets = torch.zeros(shape, dtype=torch.float64)
    if error == 0:
        return {}
    whole = call(offsets)
    moves = {name: torch.zeros_like(result) for name, result in whole.items()}
    for token in range(offsets.numel()):
        offsets.view(-1)[token] = error
        for name, result in call(offsets).items():
            moves[name] += (result - whole[name]).abs()
        offsets.view(-1)[token] = 0
    return {name: float(move.max()) for name, move in moves.items()}


def assert_within_budget(
    got: Tensor,
    working: Tensor,
    gold: Tensor,
    what: str = "result",
    inherited: float = 0.0,
    factor: float = 2.0,
    moves: Moves | None = None,
) -> None:
    """Checks that an error is at most `factor` times that of the reference in its dtype, plus a few ulps.

    The reference's error may be small by luck. With `moves`, it counts as at least what rounding to float32 at random
    moves the result `what` of the float64 reference by; float64 has no use for that. Non-finite values must match
    everywhere. `inherited` is the error that the result may have from that of its inputs.
    """
    got, working, gold = got.detach().cpu(), working.detach().cpu(), gold.detach().cpu().double()
    assert got.shape == gold.shape, f"{what}: shape {list(got.shape)} instead of {list(gold.shape)}"
    if got.numel() == 0:
        return
    finite = gold.isfinite()
    torch.testing.assert_close(
        got[~finite].double(), gold[~finite], rtol=0, atol=0, equal_nan=True, msg=f"{what}: non-finite"
    )
    error = (got.double() - gold)[finite].abs()
    assert error.isfinite().all(), f"{what}: not finite where the gold is"
    if error.numel() == 0:
        return
    budget = float((working.double() - gold)[finite].abs().max())
    floor = 4 * torch.finfo(got.dtype).eps * float(gold[finite].abs().max()) + inherited
    if moves is not None and got.dtype != torch.float64 and float(error.max()) > factor * budget + floor:
        budget = max(budget, moves[what])
    allowed = factor * budget + floor
    worst = int(error.argmax())
    assert float(error.max()) <= allowed, (
        f"{what}: error {float(error.max()):.3g} at {worst} (got {got[finite].flatten()[worst]:.9g}, gold "
        f"{gold[finite].flatten()[worst]:.9g}), allowed {allowed:.3g}"
    )


def assert_close_to_rounding(
    got: Any,
    want: Any,
    call: Callable[[], Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compares two computations in float32, of numbers and tensors in any dicts and tuples.

    Each of them may err by twice what random rounding moves a result by. Besides, four ulps of the
    largest element are allowed.

    Args:
        got: results of one computation.
        want: results of the other one.
        call: computes `want` again, with torch's own operations.
        dtype: in which `call` computes: float32, or float64 if `want` is exact.
    """
    mine, theirs, moves = numbers_of(got), numbers_of(want), Moves(call, want, dtype)
    assert mine.keys() == theirs.keys(), f"{[*mine]} instead of {[*theirs]}"
    for name, value in theirs.items():
        is_half = value.dtype in (torch.bfloat16, torch.float16)
        narrow = mine[name].to(value.dtype if is_half else torch.float32)
        factor = 2.0 if dtype == torch.float64 else 4.0
        assert_within_budget(narrow, value, value, name, factor=factor, moves=moves)


def examples(count: int) -> int:
    """Examples that a test of random inputs draws; without --all a third of them."""
    import hypothesis  # the environment of the engine's tests has none

    return max(1, count * hypothesis.settings.default.max_examples // 60)


def quick(values: Iterable[Any], *wanted: Any) -> list[Any]:
    """Values of a parameter, of which without --all only the wanted ones run."""
    return [value if value in wanted else pytest.param(value, marks=pytest.mark.full) for value in values]
