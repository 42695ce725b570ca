"""The CUDA kernels on the host under AddressSanitizer: no access outside a tensor or a shared array."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.emulation import build

# One process for all cases: starting Python under the sanitizer is what takes time.
CASES = """
import sys, torch, grpo_kernels as gk
from grpo_kernels import capability
torch.ops.load_library(sys.argv[1])
capability.enable_emulated_cuda()
torch.manual_seed(0)
for name in gk.AdvantageConfig.names():
    config = gk.AdvantageConfig(name)
    # 2,100 rows: a segment that a whole block works on
    for rows in (0, 1, 7, 40, 2100) if name in ("gdpo", "grpo_passk") else (7, 40):
        for groups in (7, torch.randint(-3, 4, (rows,)), torch.zeros(rows, dtype=torch.int64)):
            if isinstance(groups, int) and rows % groups:
                continue
            more = {"lengths": torch.randint(0, 9, (rows,))} if config.needs_lengths else {}
            if config.needs_baselines:
                more["baselines"] = torch.randn(rows)
            if rows == 40:
                more["subgroups"] = torch.randint(-1, 3, (rows,))
            rewards = torch.randn(rows, 2) if config.combine == "normalize_then_sum" else torch.randn(rows)
            gk.group_advantages(rewards, groups, config=name, backend="cuda", **more)
for columns, dtype in ((1, torch.float32), (31, torch.bfloat16), (1041, torch.float16), (1041, torch.float32)):
    for shift in (0, 1):  # rows at any address, and to the last byte of their memory
        memory = torch.randn(3 * columns + shift).to(dtype)
        logits = memory[shift:].view(3, columns).requires_grad_()
        targets, cap = torch.tensor([0, -100, columns - 1]), 9.0 if shift else None
        result = gk.token_logprobs(logits, targets, softcap=cap, return_entropy=True, backend="cuda")
        (result.logprobs.sum() + result.entropy.sum()).backward()
gk.token_logprobs(torch.randn(2, 7), torch.tensor([7, -1]), backend="cuda")
for bounds in ([0, 40, 40, 73], [9, 41, 60, 73], [-9, 50, 20, 900], [5]):  # whatever they hold, in bounds
    groups, tokens = torch.arange(len(bounds) - 1) % 2, torch.randn(3, 73)
    for values in (torch.randn(73), None):
        gk.endpoint_segments(
            *tokens, torch.rand(73) < 0.9, values=values, groups=groups, cu_seqlens=torch.tensor(bounds),
            config={"norm": "prompt", "credit": "broadcast"}, backend="cuda",
        )
if len(sys.argv) > 2:  # an op called with a size that its arrays do not have
    order = torch.tensor([0, 1, 2, 2_000])
    starts = torch.tensor([0, 4, 4, 4, 4])
    settings = gk.AdvantageConfig()
    torch.ops.grpo_kernels._group_advantages_cuda(
        torch.randn(4), order, starts, None, None, 0, None, None, None, None, [], settings.modes, settings.coefficients
    )
print("clean")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    compiler = str(build.compiler())
    find = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    libraries = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in find]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(build.ROOT),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-c", CASES, str(build.library(sanitize=True)), *arguments]
    return subprocess.run(command, env=environment, cwd=build.ROOT, capture_output=True, text=True)


pytestmark = pytest.mark.skipif(
    build.compiler() is None or not (build.ROOT / "csrc").exists(), reason="needs a C++ compiler and the sources"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, compute-sanitizer does this on the real kernels")
def test_kernels_stay_inside_their_arrays() -> None:
    done = run()
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]


def test_an_access_outside_is_reported() -> None:
    done = run("planted")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
