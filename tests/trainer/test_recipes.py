"""Every bundled recipe that needs no download, at a size of seconds, through the command that a user types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from grpo_trainer import cli
from grpo_trainer.recipe import bundled

LOCAL = [name for name in bundled() if not name.endswith("-gpu")]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_smoke(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train([name, "--smoke", f"output={tmp_path / 'run'}", "logging.progress=false", "threads=1"]) == 0
    printed = capsys.readouterr().out
    assert "eval/test_reward" in printed and "report.html" in printed
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries if e["phase"] == "rl"] == [1, 2]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
