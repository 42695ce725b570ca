"""tools/gpu_check.py on a mocked machine: a stand-in for Python reports a GPU and simulates the commands.

Faults in view: results lost when the time runs out or a test dies, a failure that does not set the exit status,
steps that outlive the command, an old version found out only after minutes, a second command that measures again what
the first one did.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conftest
from tests.emulation import build
from tests.test_help import parser_of
from tools import gpu_check

MACHINE = {
    "gpu": "A GPU",
    "capability": [9, 0],
    "driver": "1",
    "cores": 4,
    "threads": 2,
    "grpo_kernels": "0.1",
    "commit": "0123456789",
    "kernels": {"cuda": "not built", "cpu": "ok"},
    "packages": {"torch": "2.11.0"},
}
CASE = {
    "op": "sum",
    "name": "of ten",
    "dtype": "float32",
    "floor": {"bytes": 4e6, "flops": 0},
    "ours": {"warm_us": 10.0, "cold_us": 20.0, "is_gapless": True, "of_ceiling": 0.75, "run": 0},
    "providers": {},
    "bars": [],
}
RESULT = {"runs": [{"machine": MACHINE, "device": "cuda", "ceiling": {"copy": 3e12}}], "cases": [CASE]}
# $PLAN controls its behaviour: facts of the machine; modules that hang or fail.
PYTHON = """
import json, os, pathlib, signal, subprocess, sys, time
plan, out = json.loads(os.environ["PLAN"]), pathlib.Path(os.environ["OUT"])
arguments = sys.argv[1:]
if arguments[0] == "-c":
    print(json.dumps(plan["machine"]))
    sys.exit(0)
module = arguments[1] if arguments[0] == "-m" else arguments[0]
print("this is", module, os.environ.get("CMAKE_ARGS"), os.environ["PYTHONPATH"], os.getcwd())
value = lambda name: next((b for a, b in zip(arguments, arguments[1:]) if a == name), None)
if module == "pytest" and value("--save"):
    module = "benchmarks"
    pathlib.Path(value("--save")).write_text(json.dumps(plan["result"]))
    print(plan.get("left", ""))
elif module == "pytest":
    line = {"item": "test_of", "state": plan.get("state", "passed"), "why": plan.get("why", "")}
    pathlib.Path(value("--results")).write_text(json.dumps(line) + "\\n")
if module in plan.get("hang", []):
    child = subprocess.Popen(["sleep", "1000"])
    (out / "child").write_text(str(child.pid))
    time.sleep(1000)
sys.exit(module in plan.get("fail", []))
"""
SANITIZER = """
import json, os, sys
print(json.loads(os.environ["PLAN"]).get("summary", "========= ERROR SUMMARY: 0 errors"), sys.argv)
"""


def script(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Machine:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.out, self.folder, self.patch, self.work = folder / "out", folder, patch, folder / "work"
        self.out.mkdir()
        (folder / "python").mkdir()
        patch.setenv("OUT", str(self.out))
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(build.ROOT))
        patch.setattr(gpu_check, "WORK", self.work)
        patch.setattr(gpu_check, "WHEELS", folder / "wheels")
        script(folder / "compute-sanitizer", SANITIZER)
        patch.setattr(sys, "executable", str(script(folder / "python" / "python", PYTHON)))
        patch.setattr(signal, "signal", lambda *_: None)
        self.prepare()

    def prepare(self, **plan: Any) -> None:
        self.patch.setenv("PLAN", json.dumps({"machine": MACHINE, "result": RESULT} | plan))

    def run(self, *arguments: str, **plan: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        """Runs the tool; returns its exit status and its steps by part and name."""
        self.prepare(**plan)
        status = 0
        try:
            gpu_check.main([*arguments])
        except SystemExit as error:
            assert isinstance(error.code, int), error.code
            status = error.code
        steps = json.loads(self.archive()["gpu_check.json"])["steps"]
        return status, {f"{row['part']} {row['step']}": row for row in steps}

    def archive(self) -> dict[str, str]:
        with tarfile.open(self.out / "gpu_check.tar.gz") as archive:
            files = {name: archive.extractfile(name) for name in archive.getnames()}
            return {name: file.read().decode() for name, file in files.items() if file is not None}

    def page(self) -> str:
        return (self.out / "summary.md").read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_all_parts(machine: Machine) -> None:
    status, steps = machine.run()
    assert status == 0 and {row["state"] for row in steps.values()} == {"ok"}
    assert {row["part"] for row in steps.values()} == {*gpu_check.PARTS}
    assert {f"sanitizer {tool}" for tool in ("memcheck", "racecheck", "synccheck", "initcheck")} < steps.keys()
    files, page = machine.archive(), machine.page()
    assert "-DGRPO_CUDA_ARCHITECTURES=90-real" in files["build_build.log"]
    assert "kernel_substring=grpo_kernels" in files["sanitizer_initcheck.log"]
    assert page.startswith("# GPU check: A GPU\n") and page == files["summary.md"] and "Tests: 1 passed" in page
    assert page.count("| `sum`, of ten | 20 us | 10 us |  |  | 200 GB/s | 75% |  |  |") == 1
    assert "What failed" not in page


def test_the_tools_take_the_options_they_are_given(machine: Machine) -> None:
    checked = set()
    for command in (step.command for part in gpu_check.PARTS for step in gpu_check.steps(part, MACHINE, 100)):
        name, *options = command[command.index("-m") + 1 :] if "-m" in command else [""]
        if name.startswith(("tests.", "benchmarks.")):
            with machine.patch.context() as patch:
                parser = parser_of(importlib.import_module(name).main, patch)
            parser.parse_args(options)
            checked.add(name)
    assert checked == {"tests.kernel_cases", "benchmarks.step"}
    known = pytest.Parser(_ispytest=True)
    conftest.pytest_addoption(known)
    for variants in (None, ["policy_loss", "a.b=1"]):
        (step,) = gpu_check.steps("benchmarks", MACHINE, 100, variants)
        options = known.parse_known_args(step.command[step.command.index("--report-limits") :])
        assert options.resume and options.seconds == 90 and options.device == "cuda"
        assert options.variants == (variants and variants[1])


def test_a_library_that_loads_is_not_built(machine: Machine) -> None:
    machine.run("--parts", "build", machine=MACHINE | {"kernels": {"cuda": "ok"}})
    assert "setup.py" not in machine.archive()["build_build.log"]
    machine.run("--parts", "build")
    assert "this is setup.py" in machine.archive()["build_build.log"]


def test_the_most_valuable_parts_come_first_and_take_the_time_that_there_is(machine: Machine) -> None:
    _, steps = machine.run("--seconds", "4", "--parts", "trainer", "benchmarks", "values", hang=["benchmarks"])
    assert [row["state"] for row in steps.values()] == ["ok", "stopped"] and "trainer trainer" not in steps


def test_a_second_command_continues_the_first(machine: Machine) -> None:
    parts = ("--parts", "values", "benchmarks", "trainer")
    fails, first, second = ["grpo_trainer", "benchmarks"], (), ("--resume",)
    for options, fail, state in ((first, fails, "FAILED"), (second, fails[:1], "stopped")):
        status, steps = machine.run(*parts, *options, left="7 rows are left", fail=fail)
        benchmarks = steps["benchmarks benchmarks"]
        assert status == 1 and (benchmarks["state"], benchmarks["why"]) == (state, "7 rows are left")
    (machine.work / "results" / "values_values.log").unlink()
    status, steps = machine.run(*parts, "--resume")
    assert status == 1 and steps["benchmarks benchmarks"]["state"] == "ok" and steps["values values"]["state"] == "ok"
    assert "values_values.log" not in machine.archive()  # did not run again
    shutil.rmtree(machine.work)
    _, steps = machine.run("--parts", "values", "--resume", str(machine.out / "gpu_check.tar.gz"))
    assert steps["trainer trainer"]["state"] == "FAILED" and "values_values.log" not in machine.archive()


def test_a_rehearsal_needs_no_gpu_and_gives_each_part_the_same_time(machine: Machine) -> None:
    no_gpu = {name: value for name, value in MACHINE.items() if name not in ("gpu", "capability")}
    parts = ("build", "values", "benchmarks", "step")
    _, steps = machine.run("--device", "cpu", "--parts", *parts, "--seconds", "8", machine=no_gpu, hang=["pytest"])
    assert [row["state"] for row in steps.values()] == ["ok", "stopped", "ok", "ok"]
    assert steps["values values"]["seconds"] < 4
    assert machine.page().startswith("# GPU check: a rehearsal without a GPU\n")
    (step,) = gpu_check.steps("benchmarks", no_gpu, 100)
    assert step.command[step.command.index("--device") + 1] == "cpu"


def test_old_packages_and_no_gpu_are_refused_at_once(machine: Machine) -> None:
    machine.prepare(machine={"packages": {"torch": "2.11.0"}})
    with pytest.raises(SystemExit, match=r"needs an NVIDIA GPU, and torch 2\.11\.0 sees none"):
        gpu_check.main([])
    known = importlib.metadata.version
    machine.patch.setattr(importlib.metadata, "version", lambda name: "8.4" if name == "pytest" else known(name))
    with pytest.raises(SystemExit, match=r"gpu-check: build needs pytest>=9, which is 8\.4; values needs pytest>=9"):
        gpu_check.main([])
    assert list(machine.out.iterdir()) == []


def test_a_part_without_its_packages_is_left_out(machine: Machine) -> None:
    machine.patch.setitem(gpu_check.NEEDS, "trainer", ("transformers>=99",))
    status, steps = machine.run("--parts", "trainer", "sanitizer")
    assert status == 0 and steps["trainer trainer"]["state"] == "left out"
    assert steps["trainer trainer"]["why"].startswith("needs transformers>=99, which is ")


def test_failures(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """After a failed build the other parts run, and the page has the first lines of a failed test."""
    status, steps = machine.run(fail=["setup.py", "pytest"], state="failed", why="AssertionError: 1 is not 2")
    assert status == 1 and steps["build build"]["why"] == "exit status 1" and steps["step step"]["state"] == "ok"
    assert "AssertionError: 1 is not 2" in machine.page().partition("## What failed")[2]
    assert "this is pytest" in capsys.readouterr().out  # the end of the log


def test_errors_of_the_sanitizer(machine: Machine) -> None:
    """Those of initcheck are to be read."""
    status, steps = machine.run("--parts", "sanitizer", summary="========= Invalid read of 4 bytes")
    assert status == 1 and steps["sanitizer initcheck"]["state"] == "reports"
    assert {steps[f"sanitizer {tool}"]["state"] for tool in ("memcheck", "racecheck", "synccheck")} == {"FAILED"}


def test_a_hanging_step_is_stopped_with_its_children(machine: Machine) -> None:
    """Tests use the time that there is, and what they wrote stays."""
    _, steps = machine.run("--parts", "tests", "--seconds", "3", hang=["pytest"])
    row = next(row for row in steps.values() if row["why"] == "its time ran out")
    assert row["state"] == "stopped" and not is_running(int((machine.out / "child").read_text()))
    assert "Tests: 1 passed" in machine.page()


def is_running(process: int) -> bool:
    """Whether a process goes on; one that is killed may need a moment to end."""
    status = Path("/proc") / str(process) / "status"
    for _ in range(50):
        with contextlib.suppress(OSError):  # it ended after exists()
            if not status.exists() or "State:\tZ" in status.read_text():
                return False
        time.sleep(0.1)
    return True


TESTS = """
import os, pytest, time
from tests import harness
@pytest.mark.parametrize("backend", ["cpu", "cuda", "triton"])
def test_backend(backend): pass
@pytest.mark.gpu
def test_fails(): assert 1 == 2
@pytest.mark.gpu
def test_dies(): os._exit(134)
@pytest.mark.gpu
def test_hangs(): time.sleep(1000)
@pytest.mark.gpu
def test_breaks_the_gpu():
    harness.device_error = lambda: "an illegal memory access"
@pytest.mark.gpu
def test_next(): pass
"""


@pytest.mark.full
def test_the_command_of_the_tests(tmp_path: Path) -> None:
    """Tests that fail, kill their process, hang or break the GPU cost no result of another one."""
    (tmp_path / "test_gpu.py").write_text(TESTS)
    step = gpu_check.tests("tests", {"cores": 1}, "-p", "tests.conftest", str(tmp_path))
    command = [option.replace("timeout=300", "timeout=15") for option in step.command]
    lines = tmp_path / "lines"
    command[command.index("--results") + 1] = str(lines)
    where = ["-c", str(build.ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(build.ROOT)}
    done = subprocess.run([*command, *where], cwd=build.ROOT, env=environment, capture_output=True, text=True)
    results = gpu_check.lines_of(lines)
    assert done.returncode == 1, done.stdout + done.stderr
    states = {(line["item"].partition("::")[2], line["state"]) for line in results}
    assert states == {
        ("test_backend[cuda]", "passed"),
        ("test_backend[triton]", "passed"),
        ("test_fails", "failed"),
        ("test_dies", "failed"),
        ("test_hangs", "failed"),
        ("test_breaks_the_gpu", "passed"),
        ("test_breaks_the_gpu", "failed"),
        ("test_next", "passed"),
    }
    assert any("assert 1 == 2" in line["why"] for line in results)
    assert any("crashed while running" in line["why"] for line in results)
