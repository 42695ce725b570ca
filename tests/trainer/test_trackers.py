"""Trackers: every metric arrives with its step, missing packages are reported, resumed runs continue."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer.log import Log
from grpo_trainer.trackers import Histogram, Tensorboard
from grpo_trainer.train import Trainer, train

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after

SHORT = ("sft.steps=2", "rl.steps=2", "rl.rollout.prompts=2", "checkpoints.every=1")


class Fake(types.ModuleType):
    """Stand-in for the parts of wandb and trackio that are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.media: list[tuple[int, dict[str, Any]]] = []  # tables and histograms
        self.finished = 0
        self.Table = self.Histogram = lambda **kwargs: kwargs

    def init(self, **kwargs: Any) -> None:
        self.begun.append(kwargs)

    def log(self, values: dict[str, Any], step: int) -> None:
        is_media = any(isinstance(value, dict) for value in values.values())
        (self.media if is_media else self.logged).append((step, values))

    def seen(self, name: str) -> list[tuple[int, Any]]:
        return [(step, values[name]) for step, values in self.media if name in values]

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    modules = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, fake in modules.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return modules


def expected(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Metrics from metrics.jsonl, with steps counted over both phases of two steps each."""
    logged = []
    for line in lines(folder):
        values = {k: v for k, v in line.items() if k not in ("phase", "number", "step", "time") and not math.isnan(v)}
        logged.append((2 * line["number"] + line["step"], values))
    return logged


def test_every_metric_arrives_with_its_step(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    train(small.recipe(tmp_path, *SHORT, "logging.to=[wandb, trackio]", "logging.project=mine"))
    for fake in fakes.values():
        assert fake.logged == expected(tmp_path) and fake.finished == 1
        steps = [step for step, _ in fake.logged]
        assert steps == sorted(steps) and steps[-1] == 4
        (begun,) = fake.begun
        assert begun["project"] == "mine" and begun["name"].startswith("small") and begun["config"]["seed"] == 0


def test_samples_arrive_as_tables_and_distributions_as_histograms(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    train(small.recipe(tmp_path, *SHORT, "logging.to=[wandb, trackio]", "logging.samples=3", "logging.watch=2"))
    samples = lines(tmp_path, "samples")
    for name, fake in fakes.items():
        tables = fake.seen("samples")
        assert [step for step, _ in tables] == [3, 4]
        table = tables[1][1]
        columns = list(table["dataframe"].columns) if name == "trackio" else table["columns"]
        rows = table["dataframe"].values.tolist() if name == "trackio" else table["data"]
        assert columns == ["prompt", "response", "rewards", "advantage"] and len(rows) == 3
        assert [row[1] for row in rows] == [sample["response"] for sample in samples[-3:]]
        assert [json.loads(row[2]) for row in rows] == [sample["rewards"] for sample in samples[-3:]]
        for kind in ("rewards", "response_lengths", "advantages"):
            assert [step for step, _ in fake.seen(f"histograms/{kind}")] == [3, 4]
        (counts, edges) = fake.seen("histograms/rewards")[0][1]["np_histogram"]
        first = next(line for line in lines(tmp_path) if line["phase"] == "rl")
        assert sum(counts) == 2 * 4 and len(edges) == len(counts) + 1
        assert edges[0] == pytest.approx(first["rewards/min"]) and edges[-1] == pytest.approx(first["rewards/max"])
        watched = {key: step for step, values in fake.media for key in values if key.startswith("gradients/")}
        assert {key.replace("gradients", "weights") for key in watched} == {
            key for _, values in fake.media for key in values if key.startswith("weights/")
        }
        assert "gradients/lm.model.layers.0.mlp.up_proj.weight" in watched and set(watched.values()) == {4}
        assert [step for step, _ in fake.media] == sorted(step for step, _ in fake.media)


def test_histograms_count_finite_values() -> None:
    values = torch.tensor([[0.0, 1.0, math.nan], [1.0, 4.0, math.inf]])
    of = Histogram.of(values)
    assert of is not None and sum(of.counts) == 4 and (of.edges[0], of.edges[-1]) == (0.0, 4.0)
    assert (of.counts[0], of.counts[16], of.counts[-1]) == (1, 2, 1) and (of.total, of.squares) == (6.0, 18.0)
    constant = Histogram.of(torch.full((3,), 2.0))
    assert constant is not None and sum(constant.counts) == 3 and (constant.edges[0], constant.edges[-1]) == (1.5, 2.5)
    assert Histogram.of(torch.tensor([math.nan])) is None is Histogram.of(torch.zeros(0))


def test_watching_sees_the_gradient_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: dict[str, Fake]
) -> None:
    """Plain gradient descent with a rate of 1 moves the weights by the gradients that are watched."""
    seen: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(Log, "histograms", lambda self, phase, step, values: seen.append(dict(values)))

    def descend(self: torch.optim.AdamW, closure: Any = None) -> None:
        with torch.no_grad():
            for weight in (weight for group in self.param_groups for weight in group["params"]):
                weight.sub_(weight.grad)

    monkeypatch.setattr(torch.optim.AdamW, "step", descend)
    recipe = small.recipe(tmp_path, "sft.steps=3", "rl.steps=1", "logging.watch=1", "logging.to=[wandb]")
    train(recipe)
    first, second = seen[:2]
    names = [name.removeprefix("weights/") for name in first if name.startswith("weights/")]
    for name in names:
        moved = first[f"weights/{name}"] - first[f"gradients/{name}"]
        assert torch.equal(moved, second[f"weights/{name}"]), name
    assert names and any(bool(first[f"gradients/{name}"].any()) for name in names)


def test_watching_without_a_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^logging\.watch: requires a tracker in logging\.to, got 1"):
        small.recipe(tmp_path, "logging.watch=1")


def test_a_tracker_that_refuses_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def init(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    refused = r"^logging\.to: wandb refuses the run: No API key configured\. Use `wandb login` to log in\.$"
    with pytest.raises(ValueError, match=refused):
        train(small.recipe(tmp_path, *SHORT, "logging.to=[wandb]"))


@pytest.mark.full
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    summary, finish = {}, wandb.finish

    def finishing() -> None:
        names = wandb.run.summary.keys()
        summary.update({name: wandb.run.summary.get(name) for name in names})
        finish()

    monkeypatch.setattr(wandb, "finish", finishing)
    train(small.recipe(tmp_path / "run", *SHORT, "logging.to=[wandb]", "logging.watch=1"))
    assert sum(summary["histograms/rewards"]["values"]) == 8
    steps = [line for line in lines(tmp_path / "run") if line["phase"] == "rl"]
    assert summary["rewards/mean"] == steps[-2]["rewards/mean"]  # wandb takes in a step when the next one begins
    assert summary["gradients/lm.model.layers.0.mlp.up_proj.weight"]["_type"] == "histogram"
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    samples = lines(tmp_path / "run", "samples")
    assert sorted(row[1] for table in tables for row in table["data"]) == sorted(line["response"] for line in samples)


def test_undefined_values_are_left_out(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    log = Log(small.recipe(tmp_path, "logging.to=[wandb]"))
    log.metrics("rl", 1, 3, {"a": math.nan, "b": 0.0, "c": math.inf})
    assert fakes["wandb"].logged == [(7, {"b": 0.0, "c": math.inf})]
    logged = lines(tmp_path)[0]
    assert (logged["a"], logged["b"], logged["c"]) == (None, 0.0, None)


def test_a_resumed_run_continues_in_the_tracker(
    tmp_path: Path, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small.recipe(tmp_path, *SHORT, "logging.to=[wandb, trackio]")
    stopped_after(monkeypatch, recipe, 1, 1)
    with pytest.raises(FileExistsError):
        train(recipe)  # refused before a tracker is opened
    assert [fake.finished for fake in fakes.values()] == [1, 1]
    train(recipe, resume=True)
    first, second = fakes["wandb"].begun
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    first, second = fakes["trackio"].begun
    assert first["name"] == second["name"]
    train(small.recipe(tmp_path / "other", *SHORT, "logging.to=[wandb]"))
    assert fakes["wandb"].begun[-1]["id"] != fakes["wandb"].begun[0]["id"]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_missing_packages_are_reported_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError, match=rf"^logging.to: '{name}' needs the package {name}, .*: pip install {name}$"):
        Trainer(small.recipe(tmp_path, f"logging.to=[{name}]"))
    assert not list(tmp_path.iterdir())


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(small.recipe(tmp_path, "logging.to=[tensorboard]"))
    log.open()
    log.metrics("sft", 0, 4, {"train/loss": 2.0})
    log.metrics("rl", 1, 1, {"train/loss": 0.5, "train/kl_mean": math.nan})
    log.samples(1, 1, [{"prompt": "1 | 2", "response": "a\nb", "rewards": [0.5], "advantage": 0.25}])
    log.histograms(1, 1, {"histograms/rewards": torch.tensor([0.0, 1.0, 1.0])})
    (tracker,) = log.trackers
    log.close()
    assert isinstance(tracker, Tensorboard) and tracker.writer.file_writer is None  # pending values are flushed
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == "| 1 \\| 2 | a<br>b | [0.5] | 0.25 |"
    (histogram,) = events.Histograms("histograms/rewards")
    assert histogram.step == 5 and histogram.histogram_value.num == 3 and histogram.histogram_value.sum == 2
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.0), (5, 0.5)]
