"""Rehearses gpu_check without a GPU: every part with stand-ins for the kernels, then every kind of interruption.

    python -m tools.gpu_rehearsal --python .venv-floor/bin/python [--seconds 2400]

The emulator replaces CUDA and the interpreter replaces Triton; the build, the processes, the deadlines, the lines of
results and the archive are real. The exit status is 1 if anything differs from what is required on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import gpu_lines
from tools import gpu_check, gpu_summary

# Replaces compute-sanitizer, which needs a GPU, with its output on a machine that refuses it.
SANITIZER = "#!/bin/sh\necho '========= Error: Device not supported. Please refer to the user guide.'\nexit 1\n"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20


class Rehearsal:
    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder, self.wrong = python, folder, list[str]()
        sanitizer = folder / "bin" / "compute-sanitizer"
        sanitizer.parent.mkdir()
        sanitizer.write_text(SANITIZER)
        sanitizer.chmod(sanitizer.stat().st_mode | stat.S_IXUSR)

    def expect(self, what: str, is_so: bool) -> None:
        print(f"{'ok   ' if is_so else 'WRONG'} {what}", flush=True)
        if not is_so:
            self.wrong.append(what)

    def start(self, name: str, seconds: float, *parts: str) -> tuple[subprocess.Popen[bytes], Path]:
        out = self.folder / name
        # without a build, a run resumes from the results it finds and would have nothing left to do
        shutil.rmtree(gpu_check.WORK / "results", ignore_errors=True)
        command = [sys.executable, "-m", "tools.gpu_check", "--rehearsal", "--python", self.python]
        command += ["--seconds", str(seconds), *(["--parts", *parts] if parts else [])]
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        print(f"\n--- {name}: {' '.join(command[2:])}", flush=True)
        environment = os.environ | {"OUT": str(out), "PATH": path}
        return subprocess.Popen(command, cwd=gpu_check.ROOT, env=environment), out

    def check_files(self, out: Path) -> dict[str, bytes]:
        """Checks the files that came back, and returns the contents of the archive."""
        files = list(out.iterdir())
        self.expect(
            f"at most {MOST_FILES} files of {MOST_BYTES} bytes",
            len(files) <= MOST_FILES and all(file.stat().st_size <= MOST_BYTES for file in files),
        )
        with tarfile.open(out / "gpu_check.tar.gz") as archive:
            members = {name: archive.extractfile(name) for name in archive.getnames()}
            contents = {name: file.read() for name, file in members.items() if file is not None}
        self.expect("the page is the one in the archive", (out / "summary.md").read_bytes() == contents["summary.md"])
        return contents


def steps_of(contents: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    return {f"{row['part']} {row['step']}": row for row in json.loads(contents["gpu_check.json"])["steps"]}


def lines_of(contents: dict[str, bytes], part: str) -> dict[str, gpu_lines.Line]:
    text = b"\n".join(data for name, data in contents.items() if name.startswith(part) and name.endswith(".jsonl"))
    return gpu_lines.results([json.loads(line) for line in text.splitlines() if line.strip()])


def whole(rehearsal: Rehearsal, seconds: float) -> None:
    """Runs every part, with enough time for all except the tests, which use all that is left."""
    process, out = rehearsal.start("whole", seconds)
    rehearsal.expect("exit status 0", process.wait() == 0)
    contents = rehearsal.check_files(out)
    steps = steps_of(contents)
    for name, row in steps.items():
        states = {"tests": ("ok", "stopped"), "sanitizer": ("refused",)}.get(row["part"], ("ok",))
        rehearsal.expect(f"{name} is {' or '.join(states)}: {row['state']} {row['why']}", row["state"] in states)
    rehearsal.expect("every part ran", {row["part"] for row in steps.values()} == {*gpu_check.PARTS})
    smoke = {item for item, line in lines_of(contents, "smoke").items() if line["state"] == "passed"}
    wanted = {f"smoke:{op}:{backend}" for op, backend in gpu_summary.PAIRS}
    rehearsal.expect("each op was called on each backend", smoke == wanted)
    values = lines_of(contents, "values")
    rehearsal.expect(f"values of {len(values)} cases", len(values) > 30)
    tests = lines_of(contents, "tests")
    rehearsal.expect(f"{len(tests)} tests", len(tests) > 100)
    for name in ("timings", "peers", "step", "scaling"):
        rehearsal.expect(f"{name}.json", bool(json.loads(contents[f"{name}.json"])))
    command = [sys.executable, "-m", "benchmarks.tables", str(out / "gpu_check.tar.gz")]
    done = subprocess.run(command, cwd=gpu_check.ROOT, capture_output=True, text=True)
    rehearsal.expect("benchmarks.tables reads the archive", done.returncode == 0 and "group_advantages" in done.stdout)
    print((out / "summary.md").read_text())


def cut_off(rehearsal: Rehearsal, part: str, seconds: float) -> None:
    """Checks that a part stopped by its deadline keeps its results."""
    process, out = rehearsal.start(f"cut_{part}", seconds, part)
    status = process.wait()
    contents = rehearsal.check_files(out)
    rows = [row for row in steps_of(contents).values() if "stopped after" in row["why"]]
    rehearsal.expect(f"{part} was stopped", bool(rows))
    rehearsal.expect(
        "a stop fails values, and not tests, which use all available time",
        (part == "values") == any(row["state"] == "FAILED" for row in rows),
    )
    rehearsal.expect("the exit status reports it", part == "tests" or status == 1)
    lines = [line for line in lines_of(contents, part).values() if line["state"] == "passed"]
    rehearsal.expect(f"{len(lines)} results were kept", len(lines) > 0)


def killed(rehearsal: Rehearsal, kind: signal.Signals) -> None:
    """Checks that a signal to gpu_check itself leaves a complete archive of all finished steps."""
    process, out = rehearsal.start(f"killed_{kind.name}", 600, "smoke", "tests")
    until = time.monotonic() + 300
    is_smoke = '"step": "cuda"'
    file = gpu_check.WORK / "results" / "gpu_check.json"
    while time.monotonic() < until and not (file.exists() and is_smoke in file.read_text()):
        time.sleep(0.2)
    time.sleep(1)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(kind)
    process.wait()
    for child in children:  # SIGKILL leaves them running, each in its own process group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    contents = rehearsal.check_files(out)
    rehearsal.expect("the smoke calls are in the archive", "smoke cuda" in steps_of(contents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python that replaces the GPU machine's")
    parser.add_argument(
        "--seconds", type=float, default=2400, help="seconds for the run of all parts; default: %(default)s"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rehearsal = Rehearsal(options.python, Path(name))
        scenes: list[tuple[str, Callable[[], None]]] = [
            ("whole", lambda: whole(rehearsal, options.seconds)),
            ("tests cut off", lambda: cut_off(rehearsal, "tests", 22)),
            ("values cut off", lambda: cut_off(rehearsal, "values", 30)),
            ("terminated", lambda: killed(rehearsal, signal.SIGTERM)),
            ("killed", lambda: killed(rehearsal, signal.SIGKILL)),
        ]
        for scene, play in scenes:
            try:
                play()
            except Exception as error:  # the other scenes still run
                rehearsal.expect(f"{scene}: {type(error).__name__}: {error}", False)
    if rehearsal.wrong:
        raise SystemExit("gpu-rehearsal: " + "; ".join(rehearsal.wrong))
    print("\ngpu-rehearsal: everything as required")


if __name__ == "__main__":
    main()
