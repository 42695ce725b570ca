"""A recipe that runs in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import override, validated


def values(folder: Path) -> dict[str, Any]:
    tiny = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocabulary": 120}
    return {
        "name": "small",
        "output": str(folder),
        "threads": 1,
        "model": {"path": "tiny", "tiny": tiny},
        "data": {
            "task": "arithmetic",
            "options": {"demonstrations": 64, "train": 24, "validation": 8, "test": 8, "boxes": 0.0},
        },
        "sft": {"steps": 4, "batch": 16, "micro_batch": 16, "optimizer": {"lr": 1e-2}},
        "rl": {
            "steps": 4,
            "num_iterations": 2,
            "minibatches": 2,
            "micro_batch": 16,
            "optimizer": {"lr": 1e-3},
            "rollout": {"prompts": 6, "num_generations": 4, "max_completion_length": 12},
            "rewards": [{"name": "tests.trainer.small:digits"}],
        },
        "evaluation": {"every": 2, "batch": 8},
        "logging": {"progress": False},
    }


def recipe(folder: Path, *overrides: str) -> Recipe:
    settings = values(folder)
    for assignment in overrides:
        override(settings, assignment)
    made: Recipe = validated(Recipe, settings)
    return made


def digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that varies even for an untrained model."""
    return [sum(letter.isdigit() for letter in text) / 10 for text in completions]
