"""Checkpoints: safetensors and JSON, either complete or absent.

A checkpoint is written to a temporary folder, flushed to disk and then renamed, so that a run may be killed at any
moment. Its state.json holds a digest of every file and the recipe it belongs to.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.adapters import BASE, load_adapter, save_without_adapters
from grpo_trainer.loading import load_lm
from grpo_trainer.log import Log
from grpo_trainer.policy import Policy, Reference, adapters_of, make_policy
from grpo_trainer.pretrained import without_bars
from grpo_trainer.recipe import MEMORY_KEYS, Recipe
from grpo_trainer.settings import join, plain

FORMAT = 2
_LISTED = 8  # differences that an error lists
_RESUMED = "resume it with its own values, or train with these in another output, or from the start with --fresh"
_BRANCHED = "a branch must keep the values of the run that it starts from"
_WAY_OUT = "; remove this folder to resume from the checkpoint before it, or start again with --fresh"
# keys that may change when a run is resumed
_MAY_CHANGE = ("output", "threads", "distributed", "logging", "checkpoints", "evaluation", "name")


class CheckpointError(Exception):
    """A checkpoint is damaged, cannot be written, or belongs to another recipe."""


@dataclasses.dataclass(frozen=True)
class State:
    """Position of a run, and what its results depend on beyond the weights and the recipe."""

    folder: Path
    phase: int
    step: int
    threshold: float | None  # of group_ppo's segments
    threads: int
    embedders: dict[str, str]  # resolved names by recipe key


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f".new-{path.name}")
    temporary.write_text(text)
    _flush(temporary)
    temporary.rename(path)


# Runs


def start_run(recipe: Recipe) -> None:
    """Prepares the folder of a new run, and removes models left by a run without a checkpoint."""
    for earlier in (*recipe.folder.glob("reference-*"), *recipe.folder.glob(BASE)):
        shutil.rmtree(earlier)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    write_text(recipe.folder / "recipe.json", to_json(plain(recipe)))


def refuse_used_folder(folder: Path, may_hold_run: bool = False) -> None:
    nearest = next(part for part in [folder, *folder.absolute().parents] if part.exists())
    if not nearest.is_dir():
        raise FileExistsError(f"output: must be a folder, got {str(folder)!r}, where {str(nearest)!r} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"output: must be writable, got {str(folder)!r}, where {str(nearest)!r} is not")
    if not may_hold_run and (folder / "recipe.json").exists():
        raise FileExistsError(
            f"{folder} contains a run already; continue it with --resume (in Python run(resume=True)), remove it with "
            "--fresh, or choose another output"
        )


def branch(source: str | Path, recipe: Recipe) -> None:
    """Starts a run at the end of another one whose phases are this recipe's first ones.

    Resumed from there, the run has the bits of one that trained those phases itself. Logs and evaluations of the other
    run are copied.

    Args:
        source: folder of the finished run.
        recipe: the recipe, equal to the other one except for its name, its output and its further phases.
    """
    refuse_used_folder(recipe.folder)
    source = Path(source)
    stored = _read_json(source / "recipe.json")
    count = len(stored.get("phases", []))
    if not 0 < count < len(recipe.phases):
        raise CheckpointError(
            f"{source}: to branch, the run must have fewer phases than the recipe, {len(recipe.phases)}, and at "
            f"least 1, got {count}"
        )
    _refuse_differences(
        source, _differences(stored.get("evaluation"), plain(recipe)["evaluation"], "evaluation"), _BRANCHED
    )
    if all(phase.rl is None for phase in recipe.phases[:count]):
        for name in ("rewards", "max_new_tokens"):
            if not (value := getattr(recipe.evaluation, name)):
                raise CheckpointError(
                    f"{source}: to branch, evaluation.{name} must be set, as its default follows the RL phase, which "
                    f"the run has not, got {value!r}"
                )
    phase = recipe.phases[count - 1]
    state = load_last(dataclasses.replace(recipe, output=str(source), phases=recipe.phases[:count]), _BRANCHED)
    last = (count - 1, phase.sft.steps if phase.sft is not None else phase.rl.steps if phase.rl is not None else 0)
    if state is None or (state.phase, state.step) != last:
        raise CheckpointError(
            f"{source}: to branch, the run must have the checkpoint after its last step, phase {last[0]}, step "
            f"{last[1]}; finish it with --resume"
        )
    folder = recipe.folder
    final = shutil.ignore_patterns(f"*-{count}-*")  # evaluations after the last phase, which a resumed run repeats
    shutil.copytree(source / "evaluations", folder / "evaluations", ignore=final, dirs_exist_ok=True)
    for file in (*source.glob("*.jsonl"), *source.glob("solved.json")):
        shutil.copy(file, folder / file.name)
    with _atomic_folder(checkpoint_folder(recipe, *last)) as temporary:
        shutil.copytree(state.folder, temporary, dirs_exist_ok=True)
        content = _read_sealed(temporary) | {"recipe": _binding(plain(recipe))}
        _write_sealed(temporary, content)
    write_text(folder / "recipe.json", to_json(plain(recipe)))


def checkpoint_folder(recipe: Recipe, phase: int, step: int) -> Path:
    return recipe.folder / "checkpoints" / f"{phase}-{step:06d}"


def save(recipe: Recipe, policy: Policy, optimizer: torch.optim.Optimizer, state: State, log: Log) -> None:
    """Writes a checkpoint from the main process and removes old ones; all processes must call it."""
    weights = distributed.full_state_dict(policy.lm) if policy.is_sharded else None
    of_critic = None if policy.critic is None else distributed.full_state_dict(policy.critic.lm)
    moments, steps = _moments(optimizer)
    with distributed.fail_together():
        if not distributed.is_main_process():
            return
        from safetensors.torch import save_file

        with _atomic_folder(state.folder) as folder:
            save_policy(policy, folder / "model", weights, of_critic)
            save_file(moments, folder / "optimizer.safetensors")
            content = {
                "format": FORMAT,
                "optimizer_steps": steps,
                "recipe": _binding(plain(recipe)),
                **{name: value for name, value in vars(state).items() if name != "folder"},
            }
            _write_sealed(folder, content)
        log.event("checkpoint", phase=state.phase, step=state.step)
        for old in _checkpoints(recipe)[: -recipe.checkpoints.keep]:
            shutil.rmtree(old)


def load_last(recipe: Recipe, way_out: str = _RESUMED) -> State | None:
    """Reads and verifies the newest checkpoint; None if a run with this recipe has not written one yet.

    Args:
        recipe: the recipe.
        way_out: what the error for a run of another recipe advises.
    """
    folders = _checkpoints(recipe)
    if folders:
        return _read_state(folders[-1], recipe, way_out)
    written = recipe.folder / "recipe.json"
    if written.exists():
        _refuse_other_recipe(recipe.folder, _binding(_read_json(written)), recipe, way_out)
    return None


def last_folder(recipe: Recipe) -> Path | None:
    """Folder of the newest checkpoint."""
    return next(reversed(_checkpoints(recipe)), None)


def restore_policy(recipe: Recipe, state: State, initial: Policy, is_given: bool = False) -> Policy:
    """Loads the policy of a checkpoint.

    Args:
        recipe: the recipe.
        state: the checkpoint.
        initial: the recipe's own policy, which adapters are loaded onto.
        is_given: whether its model was an object of the caller's, so that the recipe does not describe it.
    """
    from safetensors.torch import load_file, load_model

    folder = state.folder / "model"
    if recipe.model.lora is None:
        like = initial.lm if is_given else None
        lm = load_lm(dataclasses.replace(recipe.model, path=str(folder)), initial.device, like)
        policy = make_policy(lm, initial.tokenizer, recipe.model, initial.backend)
    else:
        load_adapter(initial, recipe.model, folder)
        policy = initial
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


def restore_optimizer(state: State, optimizer: torch.optim.Optimizer) -> None:
    from safetensors.torch import load_file

    moments = load_file(state.folder / "optimizer.safetensors")
    steps = json.loads((state.folder / "state.json").read_text())["optimizer_steps"]
    for i, parameter in enumerate(_parameters(optimizer)):
        if f"{i}.exp_avg" not in moments:
            continue
        average = moments[f"{i}.exp_avg"]
        if average.shape != parameter.shape:
            raise CheckpointError(
                f"{state.folder}: moment {i} must be {list(parameter.shape)}, got {list(average.shape)}"
            )
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps[i]), device=parameter.device),
            "exp_avg": distributed.shard_like(average, parameter),
            "exp_avg_sq": distributed.shard_like(moments[f"{i}.exp_avg_sq"], parameter),
        }


def load_reference(recipe: Recipe, policy: Policy, phase: int, lm: Any = None) -> Reference:
    """Reference of a phase: the policy at its start, kept in the run's folder for runs resumed within the phase.

    Args:
        recipe: the recipe, which may name another model.
        policy: the policy.
        phase: the phase.
        lm: another model, of the caller's.
    """
    from safetensors.torch import load_file

    settings = recipe.model
    if settings.reference_model_path is not None or lm is not None:
        return Reference(policy, settings, lm=lm)
    folder = recipe.folder / f"reference-{phase}"
    weights = distributed.full_state_dict(policy.lm) if policy.is_sharded else None
    exists = distributed.broadcast((folder / "state.json").exists())
    with distributed.fail_together():
        if exists and distributed.is_main_process():
            _verify_reference(folder)
        if not exists and distributed.is_main_process():
            with _atomic_folder(folder) as temporary:
                _save_reference(policy, temporary, weights, only_adapters=settings.lora is not None)
                _write_sealed(temporary, {})
    if not exists and weights is None:
        return Reference(policy, settings)
    if settings.lora is None:
        return Reference(policy, dataclasses.replace(settings, reference_model_path=str(folder / "model")))
    return Reference(policy, settings, load_file(folder / "adapters.safetensors"))


def _verify_reference(folder: Path) -> None:
    """Raises if the reference is damaged. It cannot be made again: the weights that it copies are those of the phase's
    start."""
    try:
        _read_sealed(folder)
    except CheckpointError as error:
        reason = str(error).removesuffix(_WAY_OUT)
        raise CheckpointError(f"{reason}; start again with --fresh, or from a copy of the folder") from error


def _save_reference(policy: Policy, folder: Path, weights: dict[str, Tensor] | None, only_adapters: bool) -> None:
    from safetensors.torch import save_file

    if only_adapters:
        adapters = {name: value.contiguous() for name, value in adapters_of(policy).items()}
        save_file(adapters, folder / "adapters.safetensors")
    else:
        with without_bars():
            policy.lm.save_pretrained(folder / "model", state_dict=weights)


# Models


def save_policy(
    policy: Policy,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    of_critic: dict[str, Tensor] | None = None,
) -> None:
    """Saves a model for transformers and peft, with value head and critic beside it.

    Args:
        policy: the policy.
        folder: folder for safetensors, config and tokenizer.
        weights: weights of the language model, where this process holds only part of them.
        of_critic: weights of a separate critic, if there is one.
    """
    from safetensors.torch import save_file

    with without_bars():
        policy.lm.save_pretrained(folder, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)
    head = (policy.critic or policy).value_head
    if head is not None:
        save_file(dict(head.state_dict()), folder / "value_head.safetensors")
    if of_critic is not None:
        save_file({name: value.contiguous() for name, value in of_critic.items()}, folder / "critic.safetensors")


def keep_base(recipe: Recipe, policy: Policy) -> None:
    """Keeps the weights below the adapters if the run has made them, so that peft and grpo-eval find them."""
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
    """Folders of all checkpoints, oldest first."""
    folder = recipe.folder / "checkpoints"
    if not folder.exists():
        return []
    folders = [path for path in folder.glob("*-*") if not path.name.startswith(".")]
    return sorted(folders, key=lambda path: tuple(int(part) for part in path.name.split("-")))


def _read_state(folder: Path, recipe: Recipe, way_out: str) -> State:
    state = _read_sealed(folder)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format must be {FORMAT}, got {state.get('format')!r}")
    _refuse_other_recipe(folder, state["recipe"], recipe, way_out)
    return State(folder, *(state[name] for name in ("phase", "step", "threshold", "threads", "embedders")))


def _write_sealed(folder: Path, content: dict[str, Any]) -> None:
    """Writes state.json with the digests of all files in the folder and of itself."""
    content = content | {"files": _digests(folder)}
    (folder / "state.json").write_text(to_json(content | {"digest": _digest(content)}))


def _read_sealed(folder: Path) -> dict[str, Any]:
    """Reads state.json and verifies the folder; raises CheckpointError on any damage."""
    content = _read_json(folder / "state.json")
    digest = content.pop("digest", None)  # checkpoints of version 0.1.0 have none
    if digest not in (None, _digest(content)):
        raise CheckpointError(f"{folder}: state.json is damaged{_WAY_OUT}")
    digests = _digests(folder)
    for name, digest in content.get("files", {}).items():
        if digests.get(name) != digest:
            raise CheckpointError(f"{folder}: {name} is {'damaged' if name in digests else 'missing'}{_WAY_OUT}")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(content).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        way_out = _WAY_OUT if path.name == "state.json" else ""
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read ({error}){way_out}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.parent}: {path.name} must be an object, got {type(content).__name__}")
    return content


def _refuse_other_recipe(folder: Path, stored: dict[str, Any], recipe: Recipe, way_out: str) -> None:
    _refuse_differences(folder, _differences(stored, _binding(plain(recipe)), ""), way_out)


def _refuse_differences(folder: Path, differences: dict[str, tuple[Any, Any]], way_out: str) -> None:
    if differences:
        listed = [
            f"{path} is {_shortened(theirs)} there and {_shortened(ours)} here"
            for path, (theirs, ours) in sorted(differences.items())
        ]
        more = f", and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        raise CheckpointError(f"{folder}: belongs to another recipe: {', '.join(listed[:_LISTED])}{more}; {way_out}")


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _binding(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of a recipe that determines a run's results."""
    binding = copy.deepcopy({name: value for name, value in recipe.items() if name not in _MAY_CHANGE})
    for phase in binding.get("phases", []):
        settings = ((phase.get("rl") or {}).get("rollout") or {}).get("vllm") or {}
        for name in MEMORY_KEYS:
            settings.pop(name, None)
    return binding


def _differences(a: Any, b: Any, where: str) -> dict[str, tuple[Any, Any]]:
    """The values that differ, by their paths."""
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(name, a.get(name), b.get(name)) for name in a.keys() | b.keys()]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return {} if a == b else {where: (a, b)}
    return {path: values for name, x, y in pairs for path, values in _differences(x, y, join(where, str(name))).items()}


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


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "state.json"
    }


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
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _flush(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors reports a full disk by an error of its own
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
