"""Runs small recipes in each of the processes that a launcher started: distributed_cases CASES.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from grpo_trainer import distributed
from grpo_trainer import train as training
from grpo_trainer.policy import Policy

from tests.trainer import small


class Stop(Exception):
    """Raised where a run is to be killed."""


def fails_in_the_second(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    if distributed.rank() == 1:
        raise ValueError("no reward today")
    return [0.0] * len(completions)


def breaks_the_second_model(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Breaks a forward pass, where processes wait for each other and a failure cannot be passed on."""
    if distributed.rank() == 1:

        def broken(self: Policy, *_: Any, **__: Any) -> Any:
            raise RuntimeError("the second model is broken")

        Policy._loss = broken  # type: ignore[method-assign]
    return small.digits(prompts, completions)


def is_different_in_each(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs between processes and is gathered like any other."""
    return [distributed.rank() + 0.1 * i for i in range(len(completions))]


def main(cases: Path) -> None:
    torch.set_num_threads(1)
    real, set_up = training.items_of_step, training.set_up
    runs: list[Any] = []
    training.set_up = lambda *a: runs.append(set_up(*a)) or runs[-1]  # type: ignore[func-returns-value]
    for case in json.loads(cases.read_text()):
        stop = case.get("stop")

        def items(recipe, phase, data, count, step, stop=stop):  # type: ignore[no-untyped-def]
            if stop is not None and [phase, step] == stop:
                raise Stop
            return real(recipe, phase, data, count, step)

        training.items_of_step = items
        folder = Path(case["folder"])
        try:
            training.train(small.recipe(folder, *case.get("overrides", ())), case.get("resume", False))
            here, whole = 0, 0
            for parameter in runs[-1].policy.parameters():
                whole += parameter.numel()
                here += (parameter.to_local() if distributed.is_sharded(parameter) else parameter).numel()  # type: ignore[attr-defined]
            parts = folder.parent / f"{folder.name}-parts-{distributed.rank()}"
            parts.write_text(json.dumps({"here": here, "all": whole}))
        except Stop:
            pass
        except Exception as error:
            (folder.parent / f"{folder.name}-error-{distributed.rank()}").write_text(f"{type(error).__name__}: {error}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
