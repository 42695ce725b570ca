"""tools/gpu_check.py on a mocked machine: a stand-in for Python reports a GPU and simulates the commands."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_lines
from grpo_kernels import registry
from tests.emulation import build
from tests.test_help import parser_of
from tools import gpu_check, gpu_summary

FACTS = {
    "gpu": "A GPU",
    "capability": [9, 0],
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "python": "3.12.1",
    "cores": 4,
    "lacks": [],
}
# $PLAN controls its behaviour: facts; modules that hang, fail or die once; the ops under test and their outcomes.
PYTHON = """
import json, os, pathlib, signal, subprocess, sys, time
plan, out = json.loads(os.environ["PLAN"]), pathlib.Path(os.environ["OUT"])
arguments = sys.argv[1:]
if arguments[0] == "-c":
    if "find_spec" not in arguments[1]:
        sys.exit(0)
    if plan.get("no torch"):
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    print(json.dumps(plan["facts"]))
    sys.exit(0)
module = arguments[1]
print("this is", module, os.environ.get("CMAKE_ARGS"), os.environ.get("TRITON_INTERPRET"), os.getcwd())
value = lambda name: next((b for a, b in zip(arguments, arguments[1:]) if a == name), None)
if module == "pip":
    pathlib.Path(value("--target"), "grpo_kernels").mkdir(parents=True, exist_ok=True)
results = value("--results") or next((a.partition("=")[2] for a in arguments if a.startswith("--results=")), None)
def write(item, state="passed", **more):
    with open(results, "a") as file:
        file.write(json.dumps({"item": item, "state": state} | more) + "\\n")
if module == "tools.kernel_cases" and results:
    for op in plan["smoke"]:
        write(f"{'smoke' if '--smoke' in arguments else 'values'}:{op}:{value('--backend')}")
if module == "pytest":
    for pair in plan["ran"]:
        write(f"tests/{pair}{results}", plan.get("state", "passed"), ran_on=[pair], why=plan.get("why", ""))
if module in plan.get("dies", []):
    try:  # of the processes that run together, one
        first = bool((out / f"died_{module}").touch(exist_ok=False) or True)
    except FileExistsError:
        first = False
    write("the deadly one" if first else "the next", "begun" if first else "passed")
    if first:
        os.kill(os.getpid(), signal.SIGSEGV)
if module == "benchmarks.timings":
    pathlib.Path(value("--json")).write_text(json.dumps(plan["timings"]))
if module in plan.get("hang", []):
    child = subprocess.Popen(["sleep", "1000"])
    (out / "child").write_text(str(child.pid))
    time.sleep(1000)
sys.exit(module in plan.get("fail", []))
"""
SANITIZER = """
import json, os
print("all cases ran")
print(json.loads(os.environ["PLAN"]).get("summary", "========= ERROR SUMMARY: 0 errors"))
raise SystemExit(json.loads(os.environ["PLAN"]).get("sanitizer status", 0))
"""
ALL = [f"{op}:{backend}" for op, backend in gpu_summary.PAIRS]
TIMED = {
    "op": "sum",
    "name": "of ten",
    "dtype": "float32",
    "backend": "cuda",
    "bytes": 4e6,
    "flops": 0,
    "floor_us": 1.0,
    "warm_us": 10.0,
    "cold_us": 20.0,
    "graph_us": 9.0,
    "copy_us": 15.0,
    "launches": 3,
    "synchronisations": 1,
    "is_gapless": True,
}
TIMINGS = {
    "machine": {"gpu": "A GPU", "driver": "1", "cores": 4, "threads": 2, "grpo_kernels": "0.1", "packages": {}},
    "device": "cuda",
    "ceiling": {"copy": 3e12},
    "cases": [],
    "timings": [TIMED, TIMED | {"backend": "triton", "missing": "it takes less"}],
}


def script(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Machine:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.out, self.folder, self.patch = folder / "out", folder, patch
        self.out.mkdir()
        patch.setenv("OUT", str(self.out))
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        patch.setattr(gpu_check, "WORK", folder / "work")
        patch.setattr(gpu_check, "WHEELS", folder / "wheels")
        script(folder / "compute-sanitizer", SANITIZER)
        self.python = script(folder / "python", PYTHON)

    def prepare(self, **plan: Any) -> None:
        facts = {"facts": FACTS, "ran": ALL, "smoke": list(gpu_summary.OPS), "timings": TIMINGS}
        self.patch.setenv("PLAN", json.dumps(facts | plan))

    def run(self, *arguments: str, **plan: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        """Runs the tool; returns its exit status and its steps by part and name."""
        self.prepare(**plan)
        status = 0
        try:
            gpu_check.main(["--python", str(self.python), *arguments])
        except SystemExit as error:
            assert isinstance(error.code, int), error.code
            status = error.code
        return status, {f"{row['part']} {row['step']}": row for row in self.content("gpu_check.json")["steps"]}

    def archive(self) -> dict[str, str]:
        with tarfile.open(self.out / "gpu_check.tar.gz") as archive:
            files = {name: archive.extractfile(name) for name in archive.getnames()}
            return {name: file.read().decode() for name, file in files.items() if file is not None}

    def content(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.archive()[name])
        return content

    def page(self) -> str:
        return (self.out / "summary.md").read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_all_parts(machine: Machine) -> None:
    status, steps = machine.run()
    assert status == 0 and {row["state"] for row in steps.values()} == {"ok"}
    assert {row["part"] for row in steps.values()} == {*gpu_check.PARTS}
    names = {*(f"sanitizer {tool}" for tool in gpu_check.TOOLS), "tests 1/2", "tests 2/2", "smoke triton", "smoke cuda"}
    assert names <= steps.keys()
    assert machine.content("gpu_check.json")["machine"] == FACTS
    logs = machine.archive()
    assert "-DGRPO_CUDA_ARCHITECTURES=90-real" in logs["build_build.log"]
    assert f"this is pytest None 0 {machine.folder / 'work' / 'package'}" in logs["tests_1_2.log"]
    # Triton's cases run while the package is being built, so they import it from the checkout
    assert f"this is tools.kernel_cases None 0 {build.ROOT}" in logs["smoke_triton.log"]


def test_the_page(machine: Machine) -> None:
    machine.run()
    page = machine.page()
    assert page.startswith("# GPU check: A GPU\n") and page == machine.archive()["summary.md"]
    assert "| build | build | ok |" in page and "| silhouette | 3 |  |" in page  # once in each share and once in smoke
    assert "| sum, of ten, float32 | cuda | 20 us | 10 us | 9 us | 4.0 | 75% | 3 | 1 |" in page
    assert "it takes less" in page and "What failed" not in page


def test_time_is_under_nine_minutes(machine: Machine) -> None:
    machine.prepare()
    plan = gpu_check.Plan(str(machine.python), FACTS, machine.out, None)
    stages = gpu_check.stages_of(plan, list(gpu_check.PARTS), 530)
    assert sum(seconds for seconds, _, _ in stages) == pytest.approx(530)
    chosen = gpu_check.stages_of(plan, ["timings", "step"], 300)
    assert [steps[0].part for _, _, steps in chosen] == ["timings", "step"]
    assert sum(seconds for seconds, _, _ in chosen) == pytest.approx(300)  # the chosen parts share all of the time


@pytest.mark.full
def test_the_most_valuable_comes_first(machine: Machine) -> None:
    order = [row["part"] for row in machine.run()[1].values()]
    firsts = list(dict.fromkeys(order))
    assert firsts.index("timings") < firsts.index("peers") < firsts.index("sanitizer") < firsts.index("step")
    assert max(i for i, part in enumerate(order) if part in ("build", "smoke", "values")) < order.index("timings")


def test_nothing_runs_beside_timings() -> None:
    assert all(len(stage.parts) == 1 for stage in gpu_check.STAGES if gpu_check.ALONE & {*stage.parts})


@pytest.mark.full
def test_left_over_time_goes_to_the_next_part(machine: Machine) -> None:
    """The peers' share is a sixth of the time, but they get all that the timings leave."""
    machine.patch.setattr(gpu_check, "STAGES", (gpu_check.Stage(("timings",), 10), gpu_check.Stage(("peers",), 2)))
    (machine.folder / "work" / "package" / "grpo_kernels").mkdir(parents=True)
    status, steps = machine.run("--parts", "timings", "peers", "--seconds", "6", hang=["benchmarks.run"])
    assert status == 0 and steps["peers peers"]["state"] == "stopped"
    assert 4 < steps["peers peers"]["seconds"] <= 7


def test_parts_are_chosen(machine: Machine) -> None:
    (machine.folder / "work" / "package" / "grpo_kernels").mkdir(parents=True)
    status, steps = machine.run("--parts", "sanitizer")
    assert status == 0 and steps.keys() == {f"sanitizer {tool}" for tool in gpu_check.TOOLS}


def test_parts_without_the_build_need_an_existing_one(machine: Machine) -> None:
    machine.prepare()
    with pytest.raises(SystemExit, match=r"--parts must have build, .* got \['step'\]"):
        gpu_check.main(["--python", str(machine.python), "--parts", "step"])


def test_list_runs_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.prepare()
    gpu_check.main(["--python", str(machine.python), "--list"])
    assert list(machine.out.iterdir()) == []
    output = capsys.readouterr().out
    assert "--tool racecheck" in output and "--shard=2/2" in output
    assert "benchmarks.step --device cuda --steps 4" in output


def test_the_tools_take_the_options_they_are_given(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.prepare()
    plan = gpu_check.Plan(str(machine.python), FACTS, machine.out, None)
    checked = set()
    for _, _, steps in gpu_check.stages_of(plan, list(gpu_check.PARTS), 530):
        for command in (step.command for step in steps if "-m" in step.command):
            name, *options = command[command.index("-m") + 1 :]
            if name.startswith(("tools.", "benchmarks.")):
                with monkeypatch.context() as patch:
                    parser = parser_of(importlib.import_module(name).main, patch)
                parser.parse_args(options)
                checked.add(name)
    assert checked == {"tools.kernel_cases", *(f"benchmarks.{name}" for name in ("timings", "run", "step", "scaling"))}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"no torch": True}, "--python must have torch"),
        ({"facts": FACTS | {"gpu": None}}, r"needs an NVIDIA GPU, and torch 2\.11\.0\+cu130 sees none"),
        ({"facts": FACTS | {"torch": "2.9.1"}}, r"torch must be 2\.11 or later, got 2\.9\.1"),
    ],
)
def test_refusals(machine: Machine, plan: dict[str, Any], message: str) -> None:
    machine.prepare(**plan)
    with pytest.raises(SystemExit, match=message):
        gpu_check.main(["--python", str(machine.python)])
    assert list(machine.out.iterdir()) == []


def test_a_missing_python(machine: Machine) -> None:
    with pytest.raises(SystemExit, match=r"--python must be a Python with torch, got '/no/python'"):
        gpu_check.main(["--python", "/no/python"])


@pytest.mark.full
def test_after_a_failed_build_the_other_parts_run(machine: Machine) -> None:
    status, steps = machine.run(fail=["pip"])
    assert status == 1 and steps["build build"]["why"] == "exit status 1"
    assert steps["values triton"]["state"] == steps["timings timings"]["state"] == "ok"


def test_an_op_without_a_passed_test_fails(machine: Machine) -> None:
    without = [pair for pair in ALL if not pair.startswith("policy_loss:")]
    status, steps = machine.run(ran=without, smoke=[op for op in gpu_summary.OPS if op != "policy_loss"])
    row = steps["tests each op on each"]
    assert status == 1 and row["why"] == "nothing that passed ran policy_loss on cuda"


@pytest.mark.parametrize("state", ["failed", "skipped", "crashed", "hung", "begun"])
def test_only_what_passed_counts(machine: Machine, state: str) -> None:
    status, steps = machine.run("--parts", "build", "tests", state=state)
    assert status == 1 and "group_advantages on cuda" in steps["tests each op on each"]["why"]


def test_results_of_an_earlier_run_do_not_count(machine: Machine) -> None:
    assert machine.run()[0] == 0
    assert machine.run(ran=[], smoke=[])[0] == 1


def test_a_process_that_dies_is_restarted(machine: Machine) -> None:
    status, steps = machine.run(dies=["tools.kernel_cases"])
    row = next(row for name, row in steps.items() if "started 2 times" in row["why"])
    assert row["part"] in ("smoke", "values") and status == 0
    text = "".join(text for name, text in machine.archive().items() if name.endswith(".jsonl"))
    assert text.count("the deadly one") == 1 and "the next" in text


def test_a_process_that_always_dies_is_given_up(machine: Machine) -> None:
    script(
        machine.python, PYTHON.replace('if module == "tools.kernel_cases"', "if module == 'pytest': sys.exit(3)\nif 0")
    )
    status, steps = machine.run("--parts", "build", "tests")
    assert status == 1 and steps["tests 1/2"]["why"] == "exit status 3"


@pytest.mark.full
def test_errors_of_the_sanitizer(machine: Machine) -> None:
    status, steps = machine.run(summary="========= ERROR SUMMARY: 3 errors")
    assert status == 1 and {steps[f"sanitizer {tool}"]["state"] for tool in gpu_check.TOOLS} == {"FAILED"}


@pytest.mark.full
def test_a_refused_sanitizer_is_no_failure(machine: Machine) -> None:
    status, steps = machine.run(
        summary="========= Error: Device not supported. See the manual", **{"sanitizer status": 1}
    )
    row = steps["sanitizer racecheck"]
    assert status == 0 and row["state"] == "refused" and row["why"] == "Device not supported. See the manual"


@pytest.mark.full
def test_a_missing_sanitizer_is_left_out_with_a_reason(machine: Machine) -> None:
    (machine.folder / "compute-sanitizer").unlink()
    machine.patch.setenv("CUDA_HOME", str(machine.folder))
    machine.patch.setattr(gpu_check.shutil, "which", lambda name, **_: None)
    status, steps = machine.run()
    row = steps["sanitizer racecheck"]
    assert status == 0 and row["state"] == "left out" and "no compute-sanitizer" in row["why"]


def test_the_sanitizer_looks_at_our_kernels(machine: Machine) -> None:
    plan = gpu_check.Plan(str(machine.python), FACTS, machine.out, None)
    for step in plan.sanitizer():
        assert ("kernel_substring=grpo_kernels" in step.command) == (step.name != "initcheck")


def test_parity_tests_do_not_run_on_the_gpu(machine: Machine) -> None:
    plan = gpu_check.Plan(str(machine.python), FACTS, machine.out, None)
    files = [argument for argument in plan.tests()[0].command if argument.endswith(".py")]
    assert len(files) > 20 and not any("parity" in file or "peers" in file for file in files)


@pytest.mark.full
def test_missing_packages_are_reported(machine: Machine) -> None:
    status, steps = machine.run(facts=FACTS | {"lacks": ["matplotlib", "transformers", "trl"]})
    assert status == 0 and steps["step step"]["state"] == steps["trainer default recipe"]["state"] == "left out"
    assert steps["step step"]["why"] == "no transformers, trl"


def test_wheels_are_installed(machine: Machine) -> None:
    (machine.folder / "wheels").mkdir()
    (machine.folder / "wheels" / "a-1-py3-none-any.whl").touch()
    machine.run("--parts", "build")
    assert (machine.folder / "work" / "site" / "grpo_kernels").exists()  # written by the mocked pip


@pytest.mark.full
def test_a_hanging_part_is_stopped_with_its_children_and_keeps_its_results(machine: Machine) -> None:
    machine.patch.setattr(gpu_check, "STAGES", (gpu_check.Stage(("build",), 3), gpu_check.Stage(("tests",), 2)))
    began = time.monotonic()
    status, steps = machine.run("--parts", "build", "tests", "--seconds", "6", hang=["pytest"])
    assert status == 0 and time.monotonic() - began < 30  # the tests use all available time
    assert re.fullmatch(r"stopped after \d+ s", steps["tests 1/2"]["why"])
    assert "| silhouette | 2 | 2 |" in machine.page()
    assert not is_running(int((machine.out / "child").read_text()))


@pytest.mark.full
def test_stopped_values_are_a_failure(machine: Machine) -> None:
    (machine.folder / "work" / "package" / "grpo_kernels").mkdir(parents=True)
    status, steps = machine.run("--parts", "values", "--seconds", "2", hang=["tools.kernel_cases"])
    assert status == 1 and steps["values triton"]["state"] == "FAILED"


def is_running(process: int) -> bool:
    status = Path("/proc") / str(process) / "status"
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.full
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_the_archive_survives_a_signal(machine: Machine, kind: signal.Signals) -> None:
    machine.prepare(hang=["benchmarks.timings"])
    code = "import sys; from pathlib import Path; from tools import gpu_check; gpu_check.WORK = Path(sys.argv.pop()); "
    code += (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit('gpu-check: terminated')); gpu_check.main()"
    )
    command = [sys.executable, "-c", code, "--python", str(machine.python), str(machine.folder / "work")]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(build.ROOT)}, stdout=subprocess.PIPE) as check:
        child, until = machine.out / "child", time.monotonic() + 60
        while not (child.exists() and child.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        check.send_signal(kind)
    assert check.returncode != 0
    steps = machine.content("gpu_check.json")["steps"]
    assert {row["part"] for row in steps} == {"build", "smoke", "values"} and "| build | build | ok |" in machine.page()
    if kind == signal.SIGTERM:
        assert machine.content("timings.json") == TIMINGS  # results of the interrupted step
        assert not is_running(int(child.read_text()))
    else:  # a killed process cannot stop its children
        os.killpg(os.getpgid(int(child.read_text())), signal.SIGKILL)


def test_ops_are_those_that_choose_a_backend() -> None:
    ops = set()
    for path in (build.ROOT / "grpo_kernels" / "ops").rglob("*.py"):
        if "backends.select(" in path.read_text():
            ops |= set(re.findall(r"(?:(?:_OP|name) = |select\(\s*)\"(\w+)\"", path.read_text()))
    assert ops == set(gpu_summary.OPS)
    pairs = {(op, backend) for op in ops for backend in gpu_summary.BACKENDS}
    assert {pair for pair in pairs if hasattr(registry.ops, "_".join(pair))} == set(gpu_summary.PAIRS)


CHOOSES = """
import pytest, torch
from grpo_kernels import backends
SUPPORTS = {"reference": (torch.float32,)}
@pytest.mark.parametrize("backend", ["cpu", "reference", "cuda", "triton"])
def test_of(backend):
    backends.select("of_" + backend, None, "cuda", torch.float32, SUPPORTS)
    backends.select("elsewhere", None, "cpu", torch.float32, SUPPORTS)
def test_that_fails():
    backends.select("fails", None, "cuda", torch.float32, SUPPORTS)
    assert False
"""


def run_plugin(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "pytest", "-p", "tools.gpu_tests", "-p", "no:cacheprovider", *options]
    command += ["-c", str(build.ROOT / "pyproject.toml"), "--rootdir", str(folder), f"--results={folder / 'lines'}"]
    environment = os.environ | {"PYTHONPATH": str(build.ROOT)}
    done = subprocess.run([*command, str(folder)], cwd=build.ROOT, env=environment, capture_output=True)
    return done.returncode, gpu_lines.results(gpu_lines.read(folder / "lines"))


@pytest.mark.full
def test_the_plugin_records_tests(tmp_path: Path) -> None:
    (tmp_path / "test_chooses.py").write_text(CHOOSES)
    for share in (1, 2):
        status, lines = run_plugin(tmp_path, f"--shard={share}/2")
    assert status == 1
    assert gpu_summary.ran_on(lines) == {"of_cuda:reference": 1, "of_triton:reference": 1}
    failed = next(line for item, line in lines.items() if "that_fails" in item)
    assert failed["state"] == "failed" and re.search(r"assert False \(test_chooses.py:\d+\)", failed["why"])


DIES = """
import os, pytest
@pytest.mark.parametrize("case", range(4))
def test_of(case):
    if case == 2:
        os._exit(134)
"""


@pytest.mark.full
def test_the_plugin_resumes_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(DIES)
    status, lines = run_plugin(tmp_path)
    assert status == 134 and sorted(line["state"] for line in lines.values()) == ["begun", "passed", "passed"]
    status, lines = run_plugin(tmp_path)
    assert status == 1 and sorted(line["state"] for line in lines.values()) == ["crashed", "passed", "passed", "passed"]
    before = (tmp_path / "lines").read_text().split()
    assert run_plugin(tmp_path)[0] == 1 and (tmp_path / "lines").read_text().split() == before


STUCK = """
from benchmarks import gpu_lines
from grpo_kernels import registry
ERRORS = ["", "an illegal memory access"]
gpu_lines.device_error = lambda: ERRORS.pop(0)
def test_one(): pass
def test_two(): pass
def test_three(): pass
"""


@pytest.mark.full
def test_the_plugin_ends_a_process_whose_gpu_has_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_stuck.py").write_text(STUCK)
    status, lines = run_plugin(tmp_path)
    assert status == gpu_lines.START_AGAIN
    assert [line["state"] for line in lines.values()] == ["passed", "failed"]
    assert "an illegal memory access" in list(lines.values())[1]["why"]
