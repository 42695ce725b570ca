"""Runs small recipes in each of the processes that a launcher started: distributed_cases CASES.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_trainer import distributed
from grpo_trainer import train as training

from tests.trainer import small


def fails_in_the_second(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    if distributed.rank() == 1:
        raise ValueError("no reward today")
    return [0.0] * len(completions)


def is_different_in_each(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs between processes and is gathered like any other."""
    return [distributed.rank() + 0.1 * i for i in range(len(completions))]


def main(cases: Path) -> None:
    torch.set_num_threads(1)
    set_up, runs = training.set_up, list[Any]()
    training.set_up = lambda *a: runs.append(set_up(*a)) or runs[-1]  # type: ignore[func-returns-value]
    for case in json.loads(cases.read_text()):
        folder = Path(case["folder"])
        recipe = small.recipe(folder, *case.get("overrides", ()))
        try:
            if case.get("stop") is not None:
                small.stop_before(pytest.MonkeyPatch(), recipe, *case["stop"])
            else:
                training.train(recipe, case.get("resume", False))
            weights = [*runs[-1].policy.parameters()]
            local = [weight.to_local() if distributed.is_sharded(weight) else weight for weight in weights]
            sizes = {"here": sum(part.numel() for part in local), "all": sum(weight.numel() for weight in weights)}
            (folder.parent / f"{folder.name}-parts-{distributed.rank()}").write_text(json.dumps(sizes))
        except Exception as error:
            (folder.parent / f"{folder.name}-error-{distributed.rank()}").write_text(f"{type(error).__name__}: {error}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
