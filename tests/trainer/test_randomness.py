"""Random numbers of several processes: dropout masks that differ, and all else as in one process.

Faults that this is for: processes whose different rows have the same dropout masks; data, samples,
minibatches or evaluations that depend on the process; prompts of an engine that share their seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from grpo_trainer import distributed, evaluate, response_map
from grpo_trainer import train as training
from grpo_trainer.engine import Engine
from grpo_trainer.recipe import Rollout as Sampling

from tests.trainer import small

RANKS = 3
CLUSTERS = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}"


class Stop(Exception):
    pass


def of_ranks(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Any]) -> list[Any]:
    """The draws of each process, of which none waits for another."""
    drawn = []
    for rank in range(RANKS):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        drawn.append(draw())
    return drawn


@pytest.mark.parametrize("phase", ["sft", "rl"])
def test_dropout_is_drawn_anew_by_each_process_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    run = small.ready(small.recipe(tmp_path))
    monkeypatch.setattr(training, "save", mock.Mock())
    monkeypatch.setattr(training, "evaluate_and_log", mock.Mock())
    monkeypatch.setattr(run, "log", mock.MagicMock())
    settings: Any = run.recipe.sft if phase == "sft" else run.rl

    def draw() -> list[tuple[Any, list[float]]]:
        drawn = []

        def take_step(run: Any, items: Any, step: int) -> dict[str, float]:
            drawn.append((items, torch.rand(5).tolist()))
            return {}

        training.take_steps(run, phase, settings, 0, take_step)
        return drawn

    first, *others = of_ranks(monkeypatch, draw)
    assert all([items for items, _ in other] == [items for items, _ in first] for other in others)
    numbers = {tuple(numbers) for drawn in (first, *others) for _, numbers in drawn}
    assert len(numbers) == RANKS * settings.steps


def test_samples_and_minibatches_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small.ready(small.recipe(tmp_path, CLUSTERS))
    draws: dict[str, list[int]] = {}

    def note(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, generator: torch.Generator | None = None, **options: Any) -> Any:
            given = [value for value in (*arguments, generator) if isinstance(value, torch.Generator)]
            draws[name] = [value.initial_seed() for value in given]
            raise Stop

        return call

    def draw() -> dict[str, list[int]]:
        draws.clear()
        monkeypatch.setattr(run, "roll_out", note("samples"))
        with pytest.raises(Stop):
            training.rl_step(run, run.items("train")[:2], 1)
        monkeypatch.setattr(run, "roll_out", note("map"))
        with pytest.raises(Stop):
            response_map.response_map(run)
        monkeypatch.setattr(evaluate, "evaluate", note("evaluation"))
        with pytest.raises(Stop):
            evaluate.evaluate_split(run, "validation")
        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(training, "rows_in_loss", mock.Mock())
            patch.setattr(torch, "randperm", note("minibatches"))
            rollout: Any = SimpleNamespace(items=[1], group_size=1, logprobs=torch.ones(1, 1), batch=mock.Mock())
            training.update(run, rollout, mock.Mock(), None, None, 1)
        return dict(draws)

    first, *others = of_ranks(monkeypatch, draw)
    assert all(other == first for other in others)
    seeds = [seed for drawn in first.values() for seed in drawn]
    assert len(seeds) == len({*seeds}) == 4


def test_an_engine_samples_each_prompt_as_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeds(first: int, count: int, seed: int = 7) -> list[int]:
        engine = object.__new__(Engine)
        engine.policy = mock.MagicMock()
        engine.has_adapters, engine.llm = False, mock.MagicMock()
        engine._vllm = SimpleNamespace(SamplingParams=lambda **options: options["seed"])
        engine._generate([[1]] * count, first, seed, Sampling())
        ((_, drawn), _) = engine.llm.generate.call_args
        return list(drawn)

    whole = seeds(0, 5)
    assert [seed for first, count in ((0, 2), (2, 2), (4, 1)) for seed in seeds(first, count)] == whole
    assert len({*whole, *seeds(0, 5, 8)}) == 10
