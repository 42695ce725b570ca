"""What a run can go on from: safetensors and JSON, complete or not there at all.

A checkpoint is written beside its place, flushed to the disk, and then renamed, so that a run may be killed at any
moment. Its state.json has a digest of every file and the recipe that it belongs to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_trainer import model, processes
from grpo_trainer.recipe import Recipe
from grpo_trainer.settings import plain

if TYPE_CHECKING:
    from grpo_trainer.algorithm import Plan
    from grpo_trainer.model import Policy, Reference
    from grpo_trainer.train import Trainer

FORMAT = 2
# What may change between a run and the one that goes on from it.
_FREE = ("output", "threads", "distributed", "logging", "checkpoints", "evaluation", "name")


class CheckpointError(Exception):
    """A checkpoint is damaged, or of another run."""


@dataclasses.dataclass(frozen=True)
class State:
    folder: Path
    phase: int
    step: int
    threshold: float | None
    threads: int
    embedders: dict[str, str]


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def write_text(path: Path, text: str) -> None:
    """All of it or nothing."""
    new = path.with_name(f".new-{path.name}")
    new.write_text(text)
    _flush(new)
    new.rename(path)


def begin(recipe: Recipe) -> None:
    """A run from nothing; of one that was killed before its first checkpoint no reference is taken over."""
    for left in recipe.folder.glob("reference-*"):
        shutil.rmtree(left)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    write_text(recipe.folder / "recipe.json", to_json(plain(recipe)))


def refuse_used(folder: Path) -> None:
    if (folder / "recipe.json").exists():
        raise FileExistsError(
            f"{folder} has a run already; go on from it with --resume, remove it with --fresh, or name another output"
        )


def save(trainer: Trainer, phase: int, step: int, optimizer: torch.optim.Optimizer, plan: Plan | None) -> None:
    """By the first process; of weights that are shared out the others hand in their parts."""
    whole = processes.full_weights(trainer.policy.lm) if trainer.policy.is_sharded else None
    moments, steps = _moments(optimizer)
    with processes.together():
        if trainer.accelerator.is_main_process:
            _write(trainer, phase, step, plan, whole, moments, steps)


def _write(
    trainer: Trainer, phase: int, step: int, plan: Plan | None, whole: dict[str, torch.Tensor] | None,
    moments: dict[str, torch.Tensor], steps: list[float],
) -> None:  # fmt: skip
    from safetensors.torch import save_file

    place = _folder(trainer.recipe) / f"{phase}-{step:06d}"
    with _atomic(place) as new:
        model.save_policy(trainer.policy, new / "model", whole)
        save_file(moments, new / "optimizer.safetensors")
        threshold = plan.threshold.value if plan is not None and plan.threshold is not None else None
        state = {
            "format": FORMAT, "phase": phase, "step": step, "threshold": threshold, "optimizer_steps": steps,
            "threads": torch.get_num_threads(), "embedders": trainer.embedders,
            "recipe": _binding(plain(trainer.recipe)), "files": _digests(new),
        }  # fmt: skip
        (new / "state.json").write_text(to_json(state))
    trainer.log.event("checkpoint", phase=phase, step=step)
    for old in _all(trainer.recipe)[: -trainer.recipe.checkpoints.keep]:
        shutil.rmtree(old)


def last(recipe: Recipe) -> State | None:
    """The newest checkpoint, checked; None where there is none, but for what was begun with the same recipe."""
    found = _all(recipe)
    if found:
        return _read(found[-1], recipe)
    begun = recipe.folder / "recipe.json"
    if begun.exists():
        _refuse_other(recipe.folder, _binding(_json(begun)), recipe)
    return None


def load_policy(recipe: Recipe, state: State, begun: Policy) -> Policy:
    """The policy of a checkpoint; `begun` is the recipe's own, whose weights adapters go on top of."""
    from safetensors.torch import load_file, load_model

    folder = state.folder / "model"
    if recipe.model.lora is None:
        lm = model.load_lm(dataclasses.replace(recipe.model, path=str(folder)), begun.device)
        policy = model.policy_with(lm, begun.tokenizer, recipe.model, begun.backend)
    else:
        model.load_adapter(begun, recipe.model, folder)
        policy = begun
    if (folder / "critic.safetensors").exists():
        policy.add_critic()
        assert policy.critic is not None
        load_model(policy.critic.lm, str(folder / "critic.safetensors"))
    elif (folder / "value_head.safetensors").exists():
        policy.add_value_head()
    head = (policy.critic or policy).value_head
    if head is not None:
        head.load_state_dict(load_file(folder / "value_head.safetensors"))
    return policy


def load_optimizer(state: State, optimizer: torch.optim.Optimizer) -> None:
    from safetensors.torch import load_file

    stored = load_file(state.folder / "optimizer.safetensors")
    steps = json.loads((state.folder / "state.json").read_text())["optimizer_steps"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for i, parameter in enumerate(parameters):
        if f"{i}.exp_avg" not in stored:
            continue
        average = stored[f"{i}.exp_avg"]
        if average.shape != parameter.shape:
            raise CheckpointError(
                f"{state.folder}: moment {i} must be {list(parameter.shape)}, got {list(average.shape)}"
            )
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps[i]), device=parameter.device),
            "exp_avg": processes.part_like(average, parameter),
            "exp_avg_sq": processes.part_like(stored[f"{i}.exp_avg_sq"], parameter),
        }


def reference(trainer: Trainer, phase: int) -> Reference:
    """The policy where a phase begins; kept in the run's folder for those that go on from the middle of the phase."""
    from safetensors.torch import load_file

    recipe, policy = trainer.recipe, trainer.policy
    settings = recipe.model
    if settings.reference_model_path is not None:
        return model.Reference(policy, settings)
    place = recipe.folder / f"reference-{phase}"
    whole = processes.full_weights(policy.lm) if policy.is_sharded else None
    is_there = processes.first((place / "state.json").exists())
    with processes.together():
        if not is_there and trainer.accelerator.is_main_process:
            with _atomic(place) as new:
                _save_reference(policy, new, whole, only_adapters=settings.lora is not None)
                (new / "state.json").write_text(to_json({"files": _digests(new)}))
    if not is_there and whole is None:
        return model.Reference(policy, settings)
    if settings.lora is None:
        return model.Reference(policy, dataclasses.replace(settings, reference_model_path=str(place / "model")))
    return model.Reference(policy, settings, load_file(place / "adapters.safetensors"))


def _save_reference(policy: Policy, folder: Path, whole: dict[str, torch.Tensor] | None, only_adapters: bool) -> None:
    from safetensors.torch import save_file

    if only_adapters:
        save_file({name: value.contiguous() for name, value in model.adapters_of(policy).items()},
                  folder / "adapters.safetensors")  # fmt: skip
    else:
        policy.lm.save_pretrained(folder / "model", state_dict=whole)


def _folder(recipe: Recipe) -> Path:
    return recipe.folder / "checkpoints"


def _all(recipe: Recipe) -> list[Path]:
    folder = _folder(recipe)
    return sorted(
        (path for path in folder.glob("*-*") if not path.name.startswith(".")),
        key=lambda path: tuple(int(part) for part in path.name.split("-")),
    ) if folder.exists() else []  # fmt: skip


def _read(folder: Path, recipe: Recipe) -> State:
    state = _json(folder / "state.json")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format must be {FORMAT}, got {state.get('format')!r}")
    found = _digests(folder)
    for name, digest in state["files"].items():
        if found.get(name) != digest:
            raise CheckpointError(f"{folder}: {name} is {'damaged' if name in found else 'missing'}")
    _refuse_other(folder, state["recipe"], recipe)
    return State(folder, *(state[name] for name in ("phase", "step", "threshold", "threads", "embedders")))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.parent}: {path.name} must be an object, got {type(found).__name__}")
    return found


def _refuse_other(folder: Path, begun: dict[str, Any], recipe: Recipe) -> None:
    differing = sorted(_differences(begun, _binding(plain(recipe)), ""))
    if differing:
        raise CheckpointError(f"{folder}: is of another recipe, which differs in {', '.join(differing)}")


def _binding(recipe: dict[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run."""
    return {name: value for name, value in recipe.items() if name not in _FREE}


def _differences(a: Any, b: Any, where: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            path for name in a.keys() | b.keys() for path in _differences(a.get(name), b.get(name), f"{where}.{name}")
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [path for i, (x, y) in enumerate(zip(a, b, strict=True)) for path in _differences(x, y, f"{where}.{i}")]
    return [] if a == b else [where.lstrip(".")]


def _moments(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[float]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found, steps = {}, []
    for i, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        steps.append(float(state.get("step", 0)))
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                found[f"{i}.{name}"] = processes.full(state[name]).contiguous()
    return found, steps


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "state.json"
    }


class _atomic:
    """A folder to write to, which takes its name only when everything in it is on the disk."""

    def __init__(self, place: Path) -> None:
        self.place, self.new = place, place.parent / f".new-{place.name}"

    def __enter__(self) -> Path:
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(parents=True)
        return self.new

    def __exit__(self, kind: Any, error: Any, *_: Any) -> None:
        from safetensors import SafetensorError

        if kind is not None:
            shutil.rmtree(self.new, ignore_errors=True)
            # safetensors says so in an error of its own where the disk is full
            if issubclass(kind, OSError | SafetensorError):
                raise CheckpointError(f"{self.place}: cannot be written: {error}") from error
            return
        try:
            for path in [*self.new.rglob("*"), self.new]:
                _flush(path)
            shutil.rmtree(self.place, ignore_errors=True)
            self.new.rename(self.place)
            _flush(self.place.parent)
        except OSError as why:
            shutil.rmtree(self.new, ignore_errors=True)
            raise CheckpointError(f"{self.place}: cannot be written: {why}") from why


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
