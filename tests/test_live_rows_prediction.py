"""The machine code of the products over live rows, and the prediction of when leaving rows out pays."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tools import live_rows_prediction as prediction
from tools.sass import find_nvdisasm

SIZE = prediction.Size(1648, 151936, 4096)
LOOPS = [prediction.Loop(name, 200, 0, 4, 150, {"tensor": 1024.0}) for name in ("to_hidden", "to_weight")]


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or find_nvdisasm() is None, reason="needs Triton and nvdisasm"
)
def test_hopper_multiplies_from_shared_memory_without_spills() -> None:
    """In a process of its own, because Triton is imported for its interpreter here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.live_rows_prediction"]
    done = subprocess.run(command, cwd=prediction.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [line for line in done.stdout.splitlines() if "_kernel[" in line]
    assert len(kernels) == 2
    for line in kernels:
        assert " 0 local accesses" in line and " 4 of them wgmma" in line and "cycles: tensor 1024" in line, line


def test_time_falls_with_live_rows_down_to_the_launches() -> None:
    times = [sum(prediction.live_seconds(LOOPS, SIZE, live, 0.7)) for live in (1648, 1024, 512, 64, 0)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(6 * prediction.LAUNCH_SECONDS)


def test_slower_loops_need_more_idle_rows() -> None:
    shares = [prediction.break_even(LOOPS, SIZE, share) for share in (1.0, 0.7, 0.5)]
    assert shares == sorted(shares) and 0 <= shares[0] < shares[-1] < 1


def test_a_total_is_read_and_written_once_however_few_rows_are_live() -> None:
    least = 8 * SIZE.columns * SIZE.width / prediction.GPU.copy
    assert prediction.weight_seconds(LOOPS[1], SIZE, 64, 0.7) > least
