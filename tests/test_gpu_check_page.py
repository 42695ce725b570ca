"""Files and page that tools/gpu_check.py leaves behind, on the mocked machine of test_gpu_check.py."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from benchmarks import tables
from tests.test_gpu_check import Machine, machine
from tools import gpu_summary

__all__ = ["machine"]  # a fixture
pytestmark = pytest.mark.full


def test_the_tables_come_from_the_archive(machine: Machine) -> None:
    machine.run()
    document = machine.folder / "performance.md"
    document.write_text("<!-- measured on cuda -->\noutdated\n<!-- end of cuda -->\n")
    tables.main([str(machine.out / "gpu_check.tar.gz"), "--into", str(document)])
    text = document.read_text()
    assert "A GPU, driver 1, 4 cores" in text and "| cuda | 20 us | 10 us |" in text and "outdated" not in text


def test_it_leaves_two_files(machine: Machine) -> None:
    machine.run()
    assert {path.name for path in machine.out.iterdir() if path.suffix} == {"summary.md", "gpu_check.tar.gz"}
    assert (machine.out / "gpu_check.tar.gz").stat().st_size < 16 * 2**20


def test_a_failed_test_is_on_the_page_with_its_first_lines(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    status, steps = machine.run(fail=["pytest"], state="failed", why="AssertionError: 1 is not 2")
    assert status == 1 and steps["tests 1/2"]["state"] == "FAILED" and steps["step step"]["state"] == "ok"
    assert "AssertionError: 1 is not 2" in machine.page().partition("## What failed")[2]
    assert "this is pytest" in capsys.readouterr().out  # the end of the log


def test_long_logs_lose_their_beginning(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "a.log").write_bytes(os.urandom(2 * gpu_summary.MOST_LOG) + b"the end")
    gpu_summary.bundle(results, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "gpu_check.tar.gz") as archive:
        assert set(archive.getnames()) == {"a.log", "summary.md"}
        file = archive.extractfile("a.log")
        assert file is not None
        text = file.read()
    assert text.startswith(b"[its beginning is left out]") and text.endswith(b"the end")
    assert len(text) < gpu_summary.MOST_LOG + 100
