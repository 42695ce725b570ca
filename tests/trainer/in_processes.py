"""Small recipes one after the other, in each of the processes that a launcher started: in_processes CASES.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from grpo_trainer import processes
from grpo_trainer.model import Policy
from grpo_trainer.phase import PhaseRun
from grpo_trainer.train import Trainer

from tests.trainer import small


class Stop(Exception):
    """Where a run is to be killed."""


def fails_in_the_second(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    if processes.rank() == 1:
        raise ValueError("no reward today")
    return [0.0] * len(completions)


def breaks_the_second_model(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Where processes wait for each other, and not where what fails in one can be told to the others."""
    if processes.rank() == 1:

        def broken(self: Policy, *_: Any, **__: Any) -> Any:
            raise RuntimeError("the second model is broken")

        Policy._loss = broken  # type: ignore[method-assign]
    return small.digits(prompts, completions)


def is_different_in_each(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that is its own, as of a judge with a mood, and gathered like any other."""
    return [processes.rank() + 0.1 * i for i in range(len(completions))]


def main(cases: Path) -> None:
    torch.set_num_threads(1)
    real = PhaseRun._items
    for case in json.loads(cases.read_text()):
        stop = case.get("stop")

        def items(self, data, step, stop=stop):  # type: ignore[no-untyped-def]
            if stop is not None and [self.number, step] == stop:
                raise Stop
            return real(self, data, step)

        PhaseRun._items = items  # type: ignore[method-assign]
        folder = Path(case["folder"])
        try:
            trainer = Trainer(small.recipe(folder, *case.get("overrides", ())))
            trainer.run(case.get("resume", False))
            here, whole = 0, 0
            for each in trainer.policy.parameters():
                whole += each.numel()
                here += (each.to_local() if processes.is_sharded(each) else each).numel()  # type: ignore[attr-defined]
            parts = folder.parent / f"{folder.name}-parts-{processes.rank()}"
            parts.write_text(json.dumps({"here": here, "all": whole}))
        except Stop:
            pass
        except Exception as error:
            (folder.parent / f"{folder.name}-error-{processes.rank()}").write_text(f"{type(error).__name__}: {error}")
    processes.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
