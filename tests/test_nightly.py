"""The nightly run continues after a failure, reports every part, and fails if any part failed."""

from __future__ import annotations

import pytest

from tools import nightly


def table(text: str) -> dict[str, str]:
    lines = text.partition("part ")[2].splitlines()[1:]
    return {line.split()[0]: line.split(maxsplit=1)[1].rpartition(" ")[0].strip() for line in lines}


def test_a_failure_stops_nothing_and_shows(capfd: pytest.CaptureFixture[str]) -> None:
    parts = {"good": "echo of the first part", "bad": "exit 3", "missing": "/does/not/exist", "last": "sleep 1.1"}
    assert nightly.nightly(parts) == 1
    output = capfd.readouterr().out
    assert "of the first part" in output
    assert table(output) == {"good": "ok", "bad": "failed (3)", "missing": "failed (127)", "last": "ok"}
    assert output.splitlines()[-1].split()[-1] == "1"  # seconds


def test_all_good_is_a_success(capfd: pytest.CaptureFixture[str]) -> None:
    assert nightly.nightly({"one": "true", "two": "true"}) == 0
    assert table(capfd.readouterr().out) == {"one": "ok", "two": "ok"}


def test_an_interrupted_run_reports_what_ran(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_part(command: str) -> tuple[str, float]:
        if command == "second":
            raise KeyboardInterrupt
        return "ok", 2.0

    monkeypatch.setattr(nightly, "run_part", run_part)
    with pytest.raises(KeyboardInterrupt):
        nightly.nightly({"one": "first", "two": "second", "three": "third"})
    assert table(capfd.readouterr().out) == {"one": "ok", "two": "not run", "three": "not run"}


def test_parts_run_in_order_and_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert nightly.main(["--list"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == list(nightly.PARTS)
    assert {"test-floor", "test-engine", "test-all", "results"} <= set(nightly.PARTS)
    assert nightly.main(["--list", "--parts", "results", "test-floor"]) == 0
    assert capsys.readouterr().out == "test-floor: make test-floor\nresults: make results\n"
