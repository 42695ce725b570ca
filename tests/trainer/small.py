"""A recipe that runs in a second, and what tests read of its runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_trainer import train as training
from grpo_trainer.checkpoint import save_policy
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import override, validated
from grpo_trainer.setup import Run, set_up
from grpo_trainer.train import prepare_rl


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


def ready(recipe: Recipe) -> Run:
    """A run before its first step of RL."""
    run = set_up(recipe)
    prepare_rl(run, 0)
    return run


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json_of(line) for line in (folder / f"{name}.jsonl").read_text().rstrip("\n").split("\n")]


def steps(folder: Path, phase: str = "rl") -> list[dict[str, Any]]:
    """The metrics of training steps."""
    return [line for line in lines(folder) if line["kind"] == "train" and line["phase"] == phase]


def json_of(text: str) -> Any:
    """Reads JSON as parsers do that know no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def timeless(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if not k.startswith(("time", "speed/"))} for entry in entries]


def newest(folder: Path) -> Path:
    """The model of the last checkpoint of RL, or else of SFT."""
    folders = [path for path in (folder / "checkpoints").iterdir() if not path.name.startswith(".")]
    return max(folders, key=lambda path: (path.name.startswith("rl"), int(path.name.partition("-")[2]))) / "model"


def weights(folder: Path, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    """The policy's weights, of the last checkpoint unless it is named."""
    from safetensors.torch import load_file

    model = newest(folder) if checkpoint is None else folder / "checkpoints" / checkpoint / "model"
    return load_file(model / "model.safetensors")


def assert_equal_runs(one: Path, other: Path) -> None:
    """Logs and weights of two runs are equal, bit for bit."""
    for path in newest(one).glob("*.safetensors"):
        assert (newest(other) / path.name).read_bytes() == path.read_bytes()
    for name in ("metrics", "samples", "evaluations"):
        if (one / f"{name}.jsonl").exists():
            assert timeless(lines(one, name)) == timeless(lines(other, name))


def stop_before(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, phase: str, step: int, **options: Any) -> None:
    """Trains until just before a step."""
    real = training.items_of_step

    def items(recipe: Recipe, of: str, data: Any, count: int, at: int) -> Any:
        if (of, at) == (phase, step):
            raise KeyboardInterrupt
        return real(recipe, of, data, count, at)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "items_of_step", items)
        training.train(recipe, **options)


def saved_model(folder: Path, *overrides: str, template: str | None = None) -> str:
    """Saves the untrained model of a small recipe."""
    policy = set_up(recipe(folder.parent / "unused", *overrides)).policy
    policy.tokenizer.chat_template = template
    save_policy(policy, folder)
    return str(folder)


WIDE = ("model.tiny.hidden=64", "model.tiny.intermediate=128")  # blocks of a 4-bit scale have 64 weights


def write_data(path: Path, entries: list[Any]) -> str:
    """Writes a JSONL file."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in entries), encoding="utf-8")
    return str(path)


def ending(policy: Policy, by: float) -> None:
    """Adds `by` to the logit of the end at every token."""

    def more(_module: Any, _inputs: Any, output: Any) -> Any:
        output.logits[..., policy.eos_id] += by
        return output

    policy.lm.register_forward_hook(more)


# Rewards


def rewarded_by(name: str, more: str = "", part: str = "rl") -> str:
    """The assignment of a reward of this module, or of another one that is named."""
    return f"{part}.rewards=[{{name: '{name if ':' in name else f'{__name__}:{name}'}'{more}}}]"


def digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that varies even for an untrained model."""
    return [sum(letter.isdigit() for letter in text) / 10 for text in completions]


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.5 + len(text) / 10 for text in completions]


def equal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def nothing(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None] * len(completions)


def not_a_number(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [math.nan if i % 2 else 0.1 * i for i in range(len(completions))]


def needs_a_column(prompts: list[str], completions: list[str], anwser: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)
