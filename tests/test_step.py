"""benchmarks/step.py: three trainers take the same steps, and the phases of a step add up to its time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from benchmarks import step

WHO = ["grpo_trainer", "TRL's GRPOTrainer", "FusedGRPOTrainer"]
MODEL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SMALL = step.Size("small", MODEL, "float32", prompts=4, group=4, prompt_tokens=5, new_tokens=6, micro_batch=8)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU TRL and accelerate take it")


@pytest.mark.full
def test_every_phase_of_every_trainer_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step.SIZES, "cpu", SMALL)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()
    step.main(["--steps", "3", "--device", "cpu", "--json", str(tmp_path / "step.json")])
    torch.set_num_threads(threads)
    document = json.loads((tmp_path / "step.json").read_text())
    assert document["device"] == "cpu" and document["steps"] == 2 and document["model"]["model"] == MODEL
    assert [(row["who"], row["phase"]) for row in document["rows"]] == [(w, p) for w in WHO for p in step.PHASES]
    assert [(total["who"], total["tokens_a_step"]) for total in document["totals"]] == [(w, 4 * 4 * 6) for w in WHO]
    for row in document["rows"] + document["totals"]:
        assert 0 < row["seconds_low"] <= row["seconds_median"] <= row["seconds_high"], row
    for each in document["totals"]:  # the median of two steps is their mean
        parts = sum(row["seconds_median"] for row in document["rows"] if row["who"] == each["who"])
        assert parts == pytest.approx(each["seconds_median"], rel=0.02, abs=2e-3)
    lines = step.table(document).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [*step.PHASES, "total"]


def test_a_phase_within_another_counts_once() -> None:
    clock = step.Clock("cpu")
    clock.read()
    with clock.phase("generation"):
        time.sleep(0.02)
        with clock.phase("log-probs"):
            time.sleep(0.05)
    seconds = clock.read()
    assert seconds["log-probs"] >= 0.05 and 0.02 <= seconds["generation"] < 0.05
    assert clock.read()["generation"] == 0


def test_unequal_numbers_of_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(tokens: int) -> Any:
        nothing = {"step": lambda: None, "close": lambda: None}
        return SimpleNamespace(clock=step.Clock("cpu"), tokens=tokens, **nothing)

    monkeypatch.setattr(step, "runners", lambda *_: {"one": runner(2 * 96), "other": runner(2 * 96 - 1)})
    with pytest.raises(RuntimeError, match=re.escape("all must sample 192 tokens, got {'one': 192, 'other': 191}")):
        step.measure(SMALL, "cpu", 2)


def test_an_error_in_a_thread_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOTrainer

    def fails(**_: Any) -> Iterator[float]:
        raise ArithmeticError("this reward")

    monkeypatch.setattr(step, "reward", fails)
    step.write_model(SMALL, tmp_path)
    runner = step.Theirs(SMALL, tmp_path, "cpu", GRPOTrainer, 2)
    with pytest.raises(ArithmeticError, match="this reward"):
        runner.step()
    runner.close()
    assert not runner.thread.is_alive()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--steps", "1"], "--steps must be 2 or more.* got 1"), (["--device", "cuda"], "--device cuda needs a GPU")],
)
def test_options_that_cannot_be_honoured(options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        step.main(options)
