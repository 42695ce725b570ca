"""The soak of the ops sees what it is there to see: wrong values, crashes, leaks, results that depend on a thread."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import needs_cpu_kernels
from tests.ops.promises import Op
from tools.soak import __main__ as command
from tools.soak import fuzz, fuzz_calls, fuzzing, leaks, threads
from tools.soak.outcome import BEGIN, END, Outcome, PartResult, add, read, write_into

ROOT = Path(__file__).parent.parent


def failures(calls: int = 60) -> list[fuzz.Failure]:
    found = (fuzz.try_seed(seed, "cpu", Counter()) for seed in range(calls))
    return [failure for failure in found if failure is not None]


@needs_cpu_kernels
def test_random_calls_are_as_expected_on_the_cpu() -> None:
    assert failures() == []


@needs_cpu_kernels
@pytest.mark.parametrize("fault", ["value", "integer", "exception"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gk.group_advantages

    def planted(*arguments: Any, backend: str, **more: Any) -> Any:
        result = real(*arguments, backend=backend, **more)
        if backend != "cpu" or len(result.size) == 0:
            return result
        if fault == "exception":
            raise IndexError("out of range")
        if fault == "integer":
            return result._replace(size=result.size + 1)
        return result._replace(advantages=result.advantages + 1e-6)

    monkeypatch.setattr(gk, "group_advantages", planted)
    monkeypatch.setattr(fuzz_calls, "CALLS", {"group_advantages": fuzz_calls.group_advantages})
    found = failures(12)
    word = {"value": "advantages: got", "integer": "size differs", "exception": "raised IndexError"}[fault]
    assert found and any(word in failure.text for failure in found), found


@needs_cpu_kernels
def test_a_silhouette_may_differ_by_the_rounding_of_distances_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gk.similarity_groups

    def planted(*arguments: Any, backend: str, **more: Any) -> Any:
        result = real(*arguments, backend=backend, **more)
        return result._replace(silhouette=result.silhouette + (1e-2 if backend == "cpu" else 0.0))

    # rows so similar that float32 keeps a few digits of their distances
    seeds = (3226, 3689)
    monkeypatch.setattr(fuzz_calls, "CALLS", {"similarity_groups": fuzz_calls.similarity_groups})
    assert [fuzz.try_seed(seed, "cpu", Counter()) for seed in seeds] == [None, None]
    with monkeypatch.context() as patch:
        patch.setattr(fuzz, "NUDGES", 0)
        assert None not in [fuzz.try_seed(seed, "cpu", Counter()) for seed in seeds]
    monkeypatch.setattr(gk, "similarity_groups", planted)
    found = [fuzz.try_seed(seed, "cpu", Counter()) for seed in seeds]
    assert all(failure is not None and "silhouette: got" in failure.text for failure in found), found


def test_a_seed_repeats_its_call() -> None:
    for seed in range(20):
        (_, first, changed), (_, second, again) = fuzz.draw_call(seed), fuzz.draw_call(seed)
        assert (first.op, changed) == (second.op, again) and first.arguments.keys() == second.arguments.keys()
        for name, value in first.arguments.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                other = second.arguments[name]
                assert value.stride() == other.stride() and torch.equal(value.nan_to_num(), other.nan_to_num())


def test_layouts_keep_the_values() -> None:
    strides = set()
    for seed in range(20):
        draw = fuzz_calls.Draw(seed)
        tensor = torch.randn(3, 4)
        view = fuzz_calls.laid_out(draw, tensor)
        assert torch.equal(view, tensor)
        strides.add((view.stride(), view.storage_offset()))
    assert len(strides) == 4


def test_the_report_of_a_crash_has_its_seed() -> None:
    code = (
        "import os, sys; from pathlib import Path; place = sys.argv[sys.argv.index('--progress') + 1]\n"
        "Path(place).write_text('41   '); sys.stderr.write('x.h:3: runtime error: shift exponent 99\\n'); os.abort()"
    )
    result, crash = fuzzing.run_worker([sys.executable, "-c", code], {})
    assert result["next"] == 42 and crash == "x.h:3: runtime error: shift exponent 99"
    with pytest.raises(RuntimeError, match="the fuzz must start, got status 7"):
        fuzzing.run_worker([sys.executable, "-c", "import sys; sys.exit(7)"], {})


@pytest.mark.full
def test_a_leak_is_found() -> None:
    kept: list[Any] = []
    assert "bytes a call" in leaks.leaks(leaks.growth(lambda: kept.append(torch.empty(40)), 2000, 50), 2000)
    assert "Python blocks a call" in leaks.leaks(leaks.growth(lambda: kept.append(object()), 2000, 50), 2000)
    assert leaks.leaks(leaks.growth(lambda: torch.empty(40).sum(), 2000, 50), 2000) == ""


def test_a_result_that_depends_on_other_calls_is_found() -> None:
    count = itertools.count()
    cases = {
        "steady": (Op(dict, lambda inputs, backend: {"result": torch.ones(2)}, {}), {}),
        "counting": (Op(dict, lambda inputs, backend: {"result": torch.tensor(next(count))}, {}), {}),
    }
    outcome = Outcome("threads", "planted", 0, "")
    threads.call_at_once(cases, outcome, 0)
    assert outcome.times == threads.THREADS * threads.ROUNDS * 2
    assert len(outcome.failures) == outcome.times // 2 and "counting" in outcome.failures[0]


# A child of a process whose OpenMP pool has started would wait for its threads forever.
FORK = """
import os, signal, torch
import grpo_kernels as gk
from grpo_kernels.backends import cpu_library
from tests.harness import cpu_threads
rewards = torch.randn(64)
with cpu_threads(2):
    expected = gk.group_advantages(rewards, 8).advantages
    before = cpu_library.forks()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        is_same = torch.equal(gk.group_advantages(rewards, 8).advantages, expected)
        os._exit(0 if is_same and cpu_library.forks() == before > 0 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@needs_cpu_kernels
def test_kernels_run_on_one_thread_in_a_forked_child() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stdout + done.stderr


def test_results_are_stored_and_written_between_the_marks(tmp_path: Path) -> None:
    good, bad = Outcome("leaks", "`one`", 0, "nothing"), Outcome("leaks", "`two`", 0, "nothing", note="3 bytes")
    for _ in range(2):
        good.check(True, "unused")
    bad.check(False, "grew")
    absent = Outcome("leaks", "three", 0, "nothing", not_run="no root")
    result = PartResult("leaks", "python -m tools.soak --parts leaks", "2030-01-02", 61.0, [good, bad, absent])
    assert result.has_failed and not dataclasses.replace(result, outcomes=[good, absent]).has_failed
    add(tmp_path / "results.json", result)
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(document, read(tmp_path / "results.json").values())
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `one` | 2 | nothing | all |" in text and "| `two` | 1 | nothing | **1 not**; 3 bytes |" in text
    assert "| three | 0 | nothing | not run: no root |" in text and "FAILED grew" in bad.text()
    document.write_text("no marks")
    with pytest.raises(ValueError, match=r"page.md: must contain the lines"):
        write_into(document, [])


def test_the_page_has_every_part_and_the_command_repeats_it() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    for part in command.PARTS:
        assert f"### {part}\n" in page, part
    options = command.parse(["--parts", "kills", "--kills", "7", "--seed", "3"])
    again = command.parse(command.command_of("kills", options).split()[3:])
    assert (again.parts, again.kills, again.seed) == (["kills"], 7, 3)
