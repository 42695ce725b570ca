"""tools/gpu_check.py on a machine that is made up: a Python that says it has a GPU and plays the commands."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.emulation import build
from tools import gpu_check

FACTS = {"gpu": "A GPU", "capability": [9, 0], "torch": "2.11.0+cu130", "cuda": "13.0", "python": "3.12.1", "cores": 4,
         "lacks": []}  # fmt: skip
# Its part of the plan is in $PLAN: facts, which modules hang or fail, which pairs of op and backend its tests run.
PYTHON = """
import json, os, pathlib, subprocess, sys, time
plan = json.loads(os.environ["PLAN"])
arguments = sys.argv[1:]
if arguments[0] == "-c":
    if "find_spec" not in arguments[1]:
        sys.exit(0)
    if plan.get("no torch"):
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    print(json.dumps(plan["facts"]))
    sys.exit(0)
module = arguments[1]
print("this is", module, os.environ.get("CMAKE_ARGS"), os.environ.get("TRITON_INTERPRET"))
pathlib.Path(os.environ["OUT"], f"ran_{module}").touch()
if module in plan.get("hang", []):
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(os.environ["OUT"], "child").write_text(str(child.pid))
    time.sleep(1000)
if module == "pytest":
    case = '<testcase><properties><property name="ran_on" value="{}"/></properties>{}</testcase>'
    cases = "".join(case.format(pair, plan.get("inside", "")) for pair in plan["ran"])
    path = next(each.partition("=")[2] for each in arguments if each.startswith("--junit-xml="))
    pathlib.Path(path).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
sys.exit(module in plan.get("fail", []))
"""
SANITIZER = """
import json, os
print("all cases ran")
print(json.loads(os.environ["PLAN"]).get("summary", "========= ERROR SUMMARY: 0 errors"))
"""
ALL = [f"{op}:{backend}" for op in gpu_check.OPS for backend in gpu_check.BACKENDS]


def script(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Machine:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.out, self.folder, self.patch = folder / "out", folder, patch
        patch.setenv("OUT", str(self.out))
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        patch.setattr(gpu_check, "PACKAGE", folder / "package")
        script(folder / "compute-sanitizer", SANITIZER)
        self.python = script(folder / "python", PYTHON)

    def run(self, *arguments: str, **plan: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        """The exit status, and the steps by name."""
        self.patch.setenv("PLAN", json.dumps({"facts": FACTS, "ran": ALL} | plan))
        status = 0
        try:
            gpu_check.main(["--python", str(self.python), *arguments])
        except SystemExit as error:
            assert isinstance(error.code, int), error.code
            status = error.code
        return status, {row["step"]: row for row in self.results()["steps"]}

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "gpu_check.json").read_text())
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_all_parts(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    status, steps = machine.run()
    assert status == 0 and {row["state"] for row in steps.values()} == {"ok"}
    assert list(dict.fromkeys(row["part"] for row in steps.values())) == list(gpu_check.BUDGETS)
    assert set(gpu_check.TOOLS) <= steps.keys() and {"tests 1/2", "tests 2/2", "ops", "step"} <= steps.keys()
    assert machine.results()["machine"] == FACTS
    assert machine.results()["tests"] == dict.fromkeys(sorted(ALL), 2)  # once in each share
    assert "-DGRPO_CUDA_ARCHITECTURES=90-real" in (machine.out / "build_build.log").read_text()
    assert "this is pytest None 0" in (machine.out / "test_tests_1_of_2.log").read_text()
    said = capsys.readouterr().out
    for name in steps:
        assert re.search(rf"^\w+ +{name} +ok", said, re.MULTILINE), name
    assert re.search(r"^silhouette +2 +2$", said, re.MULTILINE)


def test_time_is_under_nine_minutes() -> None:
    assert sum(gpu_check.BUDGETS.values()) <= 530


def test_parts_are_chosen(machine: Machine) -> None:
    (machine.folder / "package" / "grpo_kernels").mkdir(parents=True)
    status, steps = machine.run("--parts", "sanitize")
    assert status == 0 and steps.keys() == set(gpu_check.TOOLS)


def test_without_a_build_there_must_be_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAN", json.dumps({"facts": FACTS}))
    with pytest.raises(SystemExit, match=r"--parts must have build, .* got \['bench'\]"):
        gpu_check.main(["--python", str(machine.python), "--parts", "bench"])


def test_list_runs_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.patch.setenv("PLAN", json.dumps({"facts": FACTS}))
    gpu_check.main(["--python", str(machine.python), "--list"])
    assert not machine.out.exists()
    said = capsys.readouterr().out
    assert "--tool racecheck" in said and "--shard=2/2" in said and "benchmarks.step --steps 4 --device cuda" in said


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"no torch": True}, "--python must have torch"),
        ({"facts": FACTS | {"gpu": None}}, r"needs an NVIDIA GPU, and torch 2\.11\.0\+cu130 sees none"),
        ({"facts": FACTS | {"torch": "2.9.1"}}, r"torch must be 2\.11 or later, got 2\.9\.1"),
    ],
)
def test_refusals(machine: Machine, plan: dict[str, Any], message: str) -> None:
    machine.patch.setenv("PLAN", json.dumps({"facts": FACTS} | plan))
    with pytest.raises(SystemExit, match=message):
        gpu_check.main(["--python", str(machine.python)])
    assert not machine.out.exists()


def test_a_python_that_is_not_there(machine: Machine) -> None:
    with pytest.raises(SystemExit, match=r"--python must be a Python with torch, got '/no/python'"):
        gpu_check.main(["--python", "/no/python"])


def test_a_failed_build_ends_it(machine: Machine) -> None:
    status, steps = machine.run(fail=["pip"])
    assert status == 1 and steps["build"]["why"] == "exit status 1"
    assert steps["all"]["why"] == "not begun, as the build failed"
    assert not (machine.out / "ran_pytest").exists()


def test_a_failed_test_does_not(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    status, steps = machine.run(fail=["pytest"])
    assert status == 1 and steps["tests 1/2"]["state"] == "FAILED"
    assert {steps[name]["state"] for name in (*gpu_check.TOOLS, "ops", "step")} == {"ok"}
    assert "this is pytest" in capsys.readouterr().out  # the end of the log


def test_a_backend_that_no_test_ran_on(machine: Machine) -> None:
    status, steps = machine.run(ran=[pair for pair in ALL if pair != "policy_loss:cuda"])
    row = steps["each op on each"]
    assert status == 1 and row["state"] == "FAILED" and row["why"] == "no test that passed ran policy_loss on cuda"


@pytest.mark.parametrize("inside", ["<failure/>", "<error/>", "<skipped/>"])
def test_only_tests_that_passed_count(machine: Machine, inside: str) -> None:
    status, steps = machine.run("--parts", "build", "test", inside=inside)
    assert status == 1 and "group_advantages on cuda" in steps["each op on each"]["why"]
    assert machine.results()["tests"] == {}


def test_what_was_half_written_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_1.xml").write_text('<testsuites><testcase><properties><property name="ran_on" value="a:cuda"/>')
    assert gpu_check.ran_on(tmp_path) == {}


def test_results_of_an_earlier_run_do_not_count(machine: Machine) -> None:
    assert machine.run()[0] == 0
    assert machine.run(ran=[])[0] == 1


def test_errors_of_the_sanitizer(machine: Machine) -> None:
    status, steps = machine.run(summary="========= ERROR SUMMARY: 3 errors")
    assert status == 1 and {steps[tool]["state"] for tool in gpu_check.TOOLS} == {"FAILED"}


def test_a_missing_sanitizer_is_a_failure_with_a_reason(machine: Machine) -> None:
    (machine.folder / "compute-sanitizer").unlink()
    machine.patch.setenv("CUDA_HOME", str(machine.folder))
    machine.patch.setattr(gpu_check.shutil, "which", lambda name, **_: None)
    status, steps = machine.run()
    assert status == 1 and "no compute-sanitizer" in steps["racecheck"]["why"] and steps["ops"]["state"] == "ok"


def test_packages_that_are_missing_are_said(machine: Machine) -> None:
    status, steps = machine.run(facts=FACTS | {"lacks": ["matplotlib", "transformers", "trl"]})
    assert status == 0 and steps["step"]["state"] == steps["plots"]["state"] == "left out"
    assert steps["step"]["why"] == "no transformers, trl" and steps["plots"]["why"] == "no matplotlib"


def test_what_hangs_is_stopped_with_its_children(machine: Machine) -> None:
    machine.patch.setattr(gpu_check, "BUDGETS", {"build": 2, "test": 1, "sanitize": 1, "bench": 1})
    began = time.monotonic()
    status, steps = machine.run("--parts", "build", "bench", hang=["benchmarks.run"])
    assert status == 1 and time.monotonic() - began < 30
    assert re.fullmatch(r"stopped after \d+ s", steps["ops"]["why"])
    assert steps["scaling"]["why"] == "no time was left for it"
    assert not is_running(int((machine.out / "child").read_text()))


def is_running(process: int) -> bool:
    status = Path("/proc") / str(process) / "status"
    return status.exists() and "State:\tZ" not in status.read_text()


def test_nothing_is_left_when_it_is_terminated(machine: Machine) -> None:
    machine.patch.setenv("PLAN", json.dumps({"facts": FACTS, "ran": ALL, "hang": ["pip"]}))
    command = [sys.executable, str(build.ROOT / "tools" / "gpu_check.py"), "--python", str(machine.python)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as check:
        child, until = machine.out / "child", time.monotonic() + 60
        while not (child.exists() and child.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        check.terminate()
        assert check.stderr is not None and b"gpu-check: terminated" in check.stderr.read()
    assert check.returncode == 1 and not is_running(int(child.read_text()))


def test_ops_are_those_that_choose_a_backend() -> None:
    found = set()
    for path in (build.ROOT / "grpo_kernels" / "functional").glob("*.py"):
        if "dispatch.select(" in path.read_text():
            found |= set(re.findall(r"(?:(?:_OP|name) = |select\(\s*)\"(\w+)\"", path.read_text()))
    assert found == set(gpu_check.OPS)


CHOOSES = """
import pytest, torch
from grpo_kernels import dispatch
SUPPORTS = {"reference": (torch.float32,)}
@pytest.mark.parametrize("backend", ["cpu", "reference", "cuda", "triton"])
def test_of(backend):
    dispatch.select("of_" + backend, None, "cuda", torch.float32, SUPPORTS)
    dispatch.select("elsewhere", None, "cpu", torch.float32, SUPPORTS)
@pytest.mark.grid
@pytest.mark.parametrize("case", range(100))
def test_grid(case):
    dispatch.select("grid", None, "cuda", torch.float32, SUPPORTS)
def test_that_fails():
    dispatch.select("fails", None, "cuda", torch.float32, SUPPORTS)
    assert False
"""


def test_what_the_plugin_tells_of_real_tests(tmp_path: Path) -> None:
    (tmp_path / "test_chooses.py").write_text(CHOOSES)
    for share in (1, 2):
        options = [f"--shard={share}/2", f"--junit-xml={tmp_path / f'test_{share}.xml'}", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-p", "tools.gpu_tests", *options]
        config = ["-c", str(build.ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(build.ROOT)}
        done = subprocess.run([*command, *config, str(tmp_path)], cwd=build.ROOT, env=environment, capture_output=True)
        assert done.returncode in (0, 1), done.stdout.decode()
    found = gpu_check.ran_on(tmp_path)
    in_grid = found.pop("grid:reference")
    assert found == {"of_cuda:reference": 1, "of_triton:reference": 1}
    assert in_grid == 10
