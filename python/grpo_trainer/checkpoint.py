"""Checkpoints: safetensors and JSON in a folder that is either complete or absent.

A checkpoint is written to a temporary folder, flushed to disk and then renamed, so that a run may be killed at any
moment. Its state.json holds the recipe that it belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.adapters import BASE, load_adapter, save_without_adapters
from grpo_trainer.algorithm import WITH_CRITIC
from grpo_trainer.log import PHASES, Log, to_json
from grpo_trainer.policy import Policy, Reference, adapters_of, set_adapters
from grpo_trainer.pretrained import load_lm, without_bars
from grpo_trainer.recipe import MEMORY_KEYS, Critic, Recipe
from grpo_trainer.recipes import flat

# what a run writes into its folder, in which a user may have other files; the recipe, which marks a run, goes last
_WRITTEN = (
    *("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "events.jsonl", "report.html"),
    *("checkpoints", BASE, "tensorboard", "tracker-id", "recipe.yaml"),
)
_BEFORE = "remove it to resume from the checkpoint before it, or start again with --fresh"
_LISTED = 8  # differences that an error lists
# what may change when a run is resumed
MAY_CHANGE = (
    *("name", "output", "threads", "distributed", "logging", "checkpoints"),
    *(f"evaluation.{key}" for key in ("every", "prompts", "test_prompts", "batch", "pass_k")),
    *(f"rl.rollout.vllm.{key}" for key in MEMORY_KEYS),
)


class CheckpointError(Exception):
    """A checkpoint is damaged, cannot be written, or belongs to another recipe."""


@dataclasses.dataclass(frozen=True)
class State:
    """Position of a run, and what its results depend on beyond the weights and the recipe."""

    phase: str
    step: int
    threshold: float | None  # of group_ppo's segments
    scaler: dict[str, float]  # of the losses with fp16, else empty
    threads: int
    embedders: dict[str, str]  # those that "auto" stood for, by recipe key
    data: str = ""  # digest of the lines; unknown for version 0.1


# Runs


def start_run(recipe: Recipe) -> None:
    """Prepares the folder of a new run, from which an earlier one is removed; other files stay."""
    for path in [recipe.folder / name for name in _WRITTEN] if is_used(recipe) else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    write_recipe(recipe)


def write_recipe(recipe: Recipe) -> None:
    import yaml

    text = yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)
    (recipe.folder / "recipe.yaml").write_text(text, encoding="utf-8")


def is_used(recipe: Recipe) -> bool:
    return (recipe.folder / "recipe.yaml").exists()


def found_run(recipe: Recipe) -> str | None:
    """Why a new run cannot use the folder, if it holds one."""
    if not is_used(recipe):
        return None
    return (
        f"output: must be a folder without a run, got {str(recipe.folder)!r}; continue the run in it with --resume (in "
        "Python resume=True), remove it with --fresh, or write to another with output=..."
    )


def refuse_used_folder(recipe: Recipe, may_hold_run: bool = False) -> None:
    folder = recipe.folder
    nearest = next(part for part in [folder, *folder.absolute().parents] if part.exists())
    if not nearest.is_dir():
        raise FileExistsError(f"output: must be a folder, got {str(folder)!r}, where {str(nearest)!r} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"output: must be writable, got {str(folder)!r}, where {str(nearest)!r} is not")
    if not may_hold_run and (problem := found_run(recipe)):
        raise FileExistsError(problem)


def last_folder(recipe: Recipe) -> Path | None:
    """Folder of the newest checkpoint."""
    return next(reversed(_checkpoints(recipe)), None)


def final_folder(recipe: Recipe) -> Path | None:
    """Folder of the checkpoint after the last step; None for a recipe that does not train."""
    settings = recipe.rl or recipe.sft
    phase = "sft" if recipe.rl is None else "rl"
    return None if settings is None else folder_of(recipe, phase, settings.steps)


def load_last(recipe: Recipe) -> State | None:
    """Reads the newest checkpoint; None if a run with this recipe has not written one yet."""
    folder = last_folder(recipe)
    if folder is None:
        return None
    content = _read_state(folder)
    _refuse_other_recipe(folder, content["recipe"], recipe)
    return State(**{field.name: content[field.name] for field in dataclasses.fields(State) if field.name in content})


def folder_of(recipe: Recipe, phase: str, step: int) -> Path:
    return recipe.folder / "checkpoints" / f"{phase}-{step}"


def save(recipe: Recipe, policy: Policy, optimizer: torch.optim.Optimizer, state: State, log: Log) -> None:
    """Writes a checkpoint from the main process and removes old ones; all processes must call it."""
    weights = distributed.full_state_dict(policy.lm) if policy.is_sharded else None
    critic = None if policy.critic is None else distributed.full_state_dict(policy.critic.lm)
    moments, steps = _moments(optimizer)
    with distributed.fail_together():
        if not distributed.is_main_process():
            return
        from safetensors.torch import save_file

        with _atomic_folder(folder_of(recipe, state.phase, state.step)) as folder:
            save_policy(policy, folder / "model", weights, critic)
            save_file(moments, folder / "optimizer.safetensors")
            content = dataclasses.asdict(state) | {"optimizer_steps": steps, "recipe": _binding(recipe)}
            (folder / "state.json").write_text(to_json(content, indent=1) + "\n")
        log.event("checkpoint", phase=state.phase, step=state.step)
        remove_old(recipe)


def remove_old(recipe: Recipe) -> None:
    """Removes all but the newest checkpoints, and what an interrupted removal has left."""
    for half in (recipe.folder / "checkpoints").glob(".old-*"):
        shutil.rmtree(half)
    for old in _checkpoints(recipe)[: -recipe.checkpoints.keep]:
        if old != folder_of(recipe, "rl", 0):  # the reference of the KL term
            _remove(old)


def restore_policy(recipe: Recipe, state: State, initial: Policy) -> Policy:
    """Loads the weights of a checkpoint into the model of the `initial` policy, which may be the caller's."""
    from safetensors.torch import load_file, load_model

    folder = folder_of(recipe, state.phase, state.step) / "model"
    policy = initial
    with _explaining_damage(folder):
        if recipe.model.lora is None:
            stored = load_lm(recipe.model.model_copy(update={"path": str(folder)}), initial.device, initial.lm)
            initial.lm.load_state_dict(stored.state_dict())
        else:
            load_adapter(initial, recipe.model, folder)
        if state.phase == "rl" and recipe.rl is not None and recipe.rl.algorithm.name in WITH_CRITIC:
            critic = recipe.rl.algorithm.critic or Critic()
            policy.add_critic() if critic.separate else policy.add_value_head()
            if policy.critic is not None:
                load_model(policy.critic.lm, str(folder / "critic.safetensors"))
            head = (policy.critic or policy).value_head
            assert head is not None
            head.load_state_dict(load_file(folder / "value_head.safetensors"))
    return policy


def restore_optimizer(recipe: Recipe, state: State, optimizer: torch.optim.Optimizer) -> None:
    from safetensors.torch import load_file

    folder = folder_of(recipe, state.phase, state.step)
    with _explaining_damage(folder):
        moments, steps = load_file(folder / "optimizer.safetensors"), _read_state(folder)["optimizer_steps"]
    for i, parameter in enumerate(_parameters(optimizer)):
        if f"{i}.exp_avg" not in moments:
            continue
        average = moments[f"{i}.exp_avg"]
        if average.shape != parameter.shape:
            raise CheckpointError(f"{folder}: moment {i} must be {list(parameter.shape)}, got {list(average.shape)}")
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps[i]), device=parameter.device),
            "exp_avg": distributed.shard_like(average, parameter),
            "exp_avg_sq": distributed.shard_like(moments[f"{i}.exp_avg_sq"], parameter),
        }


def load_reference(recipe: Recipe, policy: Policy, step: int, lm: Any = None) -> Reference:
    """Reference of the KL term: another model (the caller's `lm`, or that of the recipe), or the policy at the start
    of RL, which is the checkpoint rl-0. `step` is the number of steps that are done."""
    settings = recipe.model
    if settings.reference_model_path is not None or lm is not None:
        return Reference(policy, settings, lm=lm)
    folder, way_out = (
        folder_of(recipe, "rl", 0) / "model",
        "start again with --fresh, as it is the reference of the KL term",
    )
    if settings.lora is None and (step or policy.is_sharded):
        with _explaining_damage(folder, way_out):
            own = settings.model_copy(update={"reference_model_path": str(folder)})
            return Reference(policy, own, like=policy.lm)
    if not step:
        return Reference(policy, settings)
    current = {name: value.clone() for name, value in adapters_of(policy).items()}
    with _explaining_damage(folder, way_out):
        load_adapter(policy, settings, folder)
    reference = Reference(policy, settings)
    set_adapters(policy, current)
    return reference


# Models


def save_policy(
    policy: Policy, folder: Path, weights: dict[str, Tensor] | None = None, critic: dict[str, Tensor] | None = None
) -> None:
    """Saves a model for transformers and peft, with value head and critic beside it.

    `weights` are those of the language model where this process holds only part of them.
    """
    from safetensors.torch import save_file

    with without_bars():
        policy.lm.save_pretrained(folder, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)
    head = (policy.critic or policy).value_head
    if head is not None:
        save_file(dict(head.state_dict()), folder / "value_head.safetensors")
    if critic is not None:
        save_file({name: value.contiguous() for name, value in critic.items()}, folder / "critic.safetensors")


def keep_base(recipe: Recipe, policy: Policy) -> None:
    """Keeps the weights below the adapters if the run has made them, so that peft and grpo eval find them."""
    if recipe.model.path != "tiny" or recipe.model.lora is None:
        return
    folder = recipe.folder / BASE
    policy.lm.peft_config["default"].base_model_name_or_path = str(folder.absolute())
    if distributed.is_main_process() and not folder.exists():
        with _atomic_folder(folder) as temporary:
            save_without_adapters(policy.inner, temporary)
            policy.tokenizer.save_pretrained(temporary)


# Files


def _checkpoints(recipe: Recipe) -> list[Path]:
    """Folders of all checkpoints, oldest first; those with other names are the user's."""
    names = [(path.name.partition("-"), path) for path in (recipe.folder / "checkpoints").glob("*-*")]
    known = [(PHASES.index(of), int(n), path) for (of, _, n), path in names if of in PHASES and n.isdecimal()]
    return [path for _, _, path in sorted(known)]


def _read_state(folder: Path) -> dict[str, Any]:
    with _explaining_damage(folder):
        content: dict[str, Any] = json.loads((folder / "state.json").read_text())
        needed = [field.name for field in dataclasses.fields(State) if field.default is dataclasses.MISSING]
        missing = next((name for name in ("optimizer_steps", "recipe", *needed) if name not in content), None)
        if missing is not None:
            raise KeyError(missing)
        return content


@contextlib.contextmanager
def _explaining_damage(folder: Path, way_out: str = _BEFORE) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, KeyError, ValueError, TypeError, SafetensorError) as error:
        if str(error).startswith("model.lora"):  # other adapters than the recipe's
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"{folder}: must be a whole checkpoint, got {text}; {way_out}") from error


def _binding(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe that determine a run's results, by their paths."""
    free = tuple(f"{key}." for key in MAY_CHANGE)
    return {path: value for path, value in flat(recipe.model_dump()).items() if not f"{path}.".startswith(free)}


def _refuse_other_recipe(folder: Path, stored: Mapping[str, Any], recipe: Recipe) -> None:
    own = json.loads(to_json(_binding(recipe)))
    if not any(path.startswith("evaluation.") for path in stored):  # by version 0.1, where all of it was free
        own = {path: value for path, value in own.items() if not path.startswith("evaluation.")}
    paths = [path for path in sorted({*stored, *own}) if stored.get(path) != own.get(path)]
    if paths:
        values = [(path, stored.get(path), own.get(path)) for path in paths[:_LISTED]]
        listed = [f"{path} is {theirs!r:.80} there and {ours!r:.80} here" for path, theirs, ours in values]
        more = f", and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
        raise CheckpointError(
            f"{folder}: belongs to another recipe: {', '.join(listed)}{more}; resume it with its own values, or train "
            "with these in another output, or from the start with --fresh"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moments(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[float]]:
    """AdamW's moments by parameter index, and the step count of each parameter."""
    moments, steps = {}, []
    for i, parameter in enumerate(_parameters(optimizer)):
        state = optimizer.state.get(parameter, {})
        steps.append(float(state.get("step", 0)))
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                moments[f"{i}.{name}"] = distributed.full_tensor(state[name]).contiguous()
    return moments, steps


@contextlib.contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` once its contents are on disk, and removed on failure."""
    from safetensors import SafetensorError

    temporary = folder.parent / f".new-{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        if folder.exists():
            _remove(folder)
        temporary.rename(folder)
        _flush(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors reports a full disk by an error of its own, and tokenizers by a bare Exception
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error
        raise


def _remove(folder: Path) -> None:
    """Removes a checkpoint, which has another name before its first file is gone."""
    half = folder.rename(folder.parent / f".old-{folder.name}")
    shutil.rmtree(half)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
