"""benchmarks/step.py: the trainers take the same steps, and the phases of a step add up to its time.

Faults in view: a command that is stopped and has printed nothing; trainers with unequal work.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("trl")
pytest.importorskip("datasets")

from benchmarks import step

WHO = [*step.RUNNERS]
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
    monkeypatch.setitem(step.SIZES, "tiny", SMALL)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()
    step.main(["--steps", "3", "--device", "cpu", "--json", str(tmp_path / "step.json")])
    torch.set_num_threads(threads)
    document = json.loads((tmp_path / "step.json").read_text())
    assert document["device"] == "cpu" and document["steps"] == 2 and document["model"]["model"] == MODEL
    assert [(row["who"], row["phase"]) for row in document["rows"]] == [(w, p) for w in WHO for p in step.PHASES]
    assert [total["who"] for total in document["totals"]] == WHO
    for row in document["rows"] + document["totals"]:
        assert 0 < row["seconds_low"] <= row["seconds_median"] <= row["seconds_high"], row
    for each in document["totals"]:  # the median of two steps is their mean
        parts = sum(row["seconds_median"] for row in document["rows"] if row["who"] == each["who"])
        assert parts == pytest.approx(each["seconds_median"], rel=0.02, abs=2e-3)
    lines = step.table(document).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2 : 3 + len(step.PHASES)]] == [*step.PHASES, "total"]


def test_real_lengths_and_flat_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in all trainers, of which one computes fewer tokens."""
    monkeypatch.setitem(step.SIZES, "tiny", dataclasses.replace(SMALL, is_given=True))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    options = ["--lengths", "real", "--flat", "0.5", "--beta", "0", "--new-tokens", "30", "--micro-batches", "4"]
    threads = torch.get_num_threads()
    step.main(["--steps", "2", "--device", "cpu", "--json", str(tmp_path / "step.json"), *options])
    torch.set_num_threads(threads)
    document = json.loads((tmp_path / "step.json").read_text())
    tokens = {total["who"]: total["model_tokens"] for total in document["totals"]}
    assert [*tokens] == [*step.DEALT]
    assert tokens[step.DEALT[0]] == tokens[step.DEALT[1]] > 2 * tokens[step.DEALT[2]]
    assert document["totals"][0]["gain_median"] == 1 and document["model"]["micro_batch"] == 4


def test_responses_end_like_those_of_a_reasoning_run() -> None:
    size = dataclasses.replace(SMALL, prompts=200, group=8, new_tokens=300, lengths="real")
    responses = step.ended(size, [[5] * 300] * 1600, 1)
    assert all((len(ids) < 300) == (ids[-1] == 1) and 1 not in ids[:-1] for ids in responses)
    lengths = torch.tensor([float(len(ids)) for ids in responses])
    assert 85 < lengths.median() < 115 and 0.05 < (lengths == 300).double().mean() < 0.15
    assert 0.5 < lengths.log().view(200, 8).std(1).median() < 0.75  # 0.7, but for those that the limit cuts


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


def runner_of(monkeypatch: pytest.MonkeyPatch, **tokens: int) -> None:
    """Runners by name that sample so many tokens a step."""

    class Runner:
        def __init__(self, of_step: int) -> None:
            self.clock, self.tokens, self.model_tokens, self.of_step = step.Clock("cpu"), 0, 0, of_step

        def step(self) -> None:
            with self.clock.phase("forward and backward"):
                self.tokens += self.of_step

        def close(self) -> None:
            pass

    makers = {name: lambda *_, of_step=of_step: Runner(of_step) for name, of_step in tokens.items()}
    monkeypatch.setattr(step, "RUNNERS", makers)
    monkeypatch.setattr(step, "write_model", lambda *_: None)


def test_each_step_is_printed_and_saved_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second runner breaks in the third step: all before is on the screen and in the file."""
    runner_of(monkeypatch, one=96, other=96)
    monkeypatch.setitem(step.SIZES, "tiny", SMALL)
    timed, taken = step.timed, list[int]()

    def breaks(*arguments: Any) -> dict[str, float]:
        taken.append(1)
        if len(taken) == 6:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(step, "timed", breaks)
    with pytest.raises(KeyboardInterrupt):
        step.main(["--device", "cpu", "--steps", "3", "--json", str(tmp_path / "step.json")])
    printed = re.findall(r"(\w+), step (\d): [\d.,]+ ms", capsys.readouterr().out)
    assert printed == [("one", "0"), ("other", "0"), ("one", "1"), ("other", "1"), ("one", "2")]
    document = json.loads((tmp_path / "step.json").read_text())
    assert document["steps"] == 2 and [total["who"] for total in document["totals"]] == ["one", "other"]
    assert step.table(document).count("\n") == 11


def test_unequal_numbers_of_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runner_of(monkeypatch, one=96, other=95)
    with pytest.raises(RuntimeError, match="step: other must sample 96 tokens, got 95"):
        step.measure(SMALL, "cpu", 2)


def test_an_error_in_a_thread_comes_out_and_given_responses_are_not_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(completions: list[str], **_: Any) -> Iterator[float]:
        raise ArithmeticError(len(completions[0].split()))

    monkeypatch.setattr(step, "reward", fails)
    monkeypatch.setattr(transformers.GenerationMixin, "generate", None)
    step.write_model(SMALL, tmp_path, "cpu")
    size = dataclasses.replace(SMALL, is_given=True)
    runner = step.Theirs(size, tmp_path, "cpu", 2, "trl:GRPOTrainer")
    with pytest.raises(ArithmeticError, match="6"):
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
