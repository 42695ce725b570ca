"""A run: its data, its policy, and its phases in order."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import grpo_kernels as gk
from grpo_trainer import calibration, checkpoint, distributed, engine, strict_json
from grpo_trainer.adapters import load_adapter, settings_of_base
from grpo_trainer.algorithm import Plan
from grpo_trainer.checkpoint import CheckpointError
from grpo_trainer.data import encode_demonstration
from grpo_trainer.embed import Embedder, load_embedder, require_embedder, resolve
from grpo_trainer.evaluate import Result, evaluate
from grpo_trainer.log import Log
from grpo_trainer.phases.rl import RlRun
from grpo_trainer.phases.sft import SftRun
from grpo_trainer.policy import Policy, load_policy, take_policy
from grpo_trainer.ray_pool import check_ray
from grpo_trainer.recipe import Recipe, Reward, Rl, Similarity, Vllm
from grpo_trainer.recipe_checks import check_lengths, used_embedders
from grpo_trainer.references import check_reference
from grpo_trainer.rewards import RewardFunction, gaps, load_reward, require_columns
from grpo_trainer.rollout import select_usable
from grpo_trainer.splits import corpus_of, load_splits, no_usable_line, require_lines
from grpo_trainer.tasks.base import Item, Splits
from grpo_trainer.vocabulary import refuse_banned


def plan_of(phase: int, rl: Rl) -> Plan:
    """The plan of a phase; errors name its keys."""
    try:
        plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
    except (TypeError, ValueError) as error:
        where = f"phases.{phase}.rl."
        raise type(error)(where + str(error).replace("\n  ", f"\n  {where}")) from error
    if plan.compares_responses and rl.rollout.group_size == 1:
        raise ValueError(
            f"phases.{phase}.rl.rollout.group_size: must be at least 2 for {rl.algorithm.name}, which compares the "
            "responses of a prompt, got 1"
        )
    return plan


def default_rewards(recipe: Recipe, splits: Splits) -> Iterator[str]:
    """Yields a sentence for each RL phase on files whose rewards the recipe leaves out."""
    for number, phase in enumerate(recipe.phases):
        if phase.rl is not None and not phase.rl.rewards and recipe.data.task is None:
            yield f"phases.{number}.rl.rewards: none is named, so {' and '.join(splits.rewards)} rewards the responses"


def rewards_or_default(rewards: list[Reward], splits: Splits) -> list[Reward]:
    """The rewards that a recipe names, or else the task's."""
    return rewards or [Reward(name=name) for name in splits.rewards]


class Trainer:
    """Prepares a run and trains it with `run`. The constructor raises on errors in any phase of the recipe.

    Args:
        recipe: the recipe.
        model: a loaded model of transformers that is trained in place of `model.path`; a resumed run needs it again.
        tokenizer: its tokenizer.
        reference: a model that the KL term is measured from, of the same vocabulary; None: as in the recipe.
    """

    def __init__(self, recipe: Recipe, model: Any = None, tokenizer: Any = None, reference: Any = None) -> None:
        from accelerate import Accelerator

        if not isinstance(recipe, Recipe):
            raise TypeError(
                "Trainer: recipe must be a Recipe, as grpo_trainer.recipe.load returns one, got "
                f"{type(recipe).__name__} {recipe!r}"
            )
        if reference is not None and not hasattr(reference, "get_output_embeddings"):
            raise TypeError(f"Trainer: reference must be a model of transformers, got {type(reference).__name__}")
        if recipe.model.mixed_precision == "fp16" and not torch.cuda.is_available():
            raise ValueError("model.mixed_precision: fp16 needs a GPU, and there is none")
        self.recipe = recipe
        # the policy applies autocast itself; only the loss scaling of fp16 is accelerate's
        self.accelerator = Accelerator(
            mixed_precision="fp16" if recipe.model.mixed_precision == "fp16" else "no",
            # by itself accelerate treats each of several CPU processes as the only one
            cpu=True if distributed.is_launched() and not torch.cuda.is_available() else None,
        )
        _check_launch(self.accelerator)
        if distributed.world_size() > 1:
            torch.set_num_threads(distributed.broadcast(torch.get_num_threads()))
        self.is_sharded = self.shards(distributed.world_size())
        check_backend(recipe.backend)
        self.backend = None if recipe.backend == "auto" else recipe.backend
        self.resumed: checkpoint.State | None = None
        with distributed.fail_together():
            torch.manual_seed(self.seed_of("weights"))
            self.log = Log(recipe, self.accelerator.is_main_process)
            self.splits = load_splits(recipe.data, recipe.seed)
            require_lines(recipe, self.splits)
            self._check_phases()
            self.policy = self._make_policy(model, tokenizer, reference)
            self._check_policy()
        self.is_given, self.reference = model is not None, reference
        self.seconds: dict[str, float] = defaultdict(float)  # spent in the parts of the current step
        self._usable: dict[str, list[Item]] = {}
        self.left_out: dict[str, list[str]] = defaultdict(list)  # by split, for errors

    def _make_policy(self, model: Any, tokenizer: Any, reference: Any) -> Policy:
        settings = self.recipe.model
        if reference is not None and settings.reference_model_path is not None:
            raise ValueError(
                "model.reference_model_path: must be null with a reference object, got "
                f"{settings.reference_model_path!r}"
            )
        if model is None:
            if tokenizer is not None:
                raise ValueError("Trainer: tokenizer needs a model object, got model=None")
            corpus = corpus_of(self.recipe.data, self.splits)
            return load_policy(settings, corpus, self.backend, self.loading_device)
        for number, phase in enumerate(self.recipe.phases):
            if phase.rl is not None and phase.rl.rollout.engine != "transformers":
                key = f"phases.{number}.rl.rollout.engine"
                raise ValueError(f"{key}: must be transformers with a model object, as others read model.path")
        return take_policy(model, tokenizer, settings, self.backend, self.loading_device)

    def shards(self, processes: int) -> bool:
        """Whether weights are sharded over this number of processes."""
        return self.recipe.distributed == "fsdp2" and processes > 1

    @property
    def loading_device(self) -> torch.device:
        """The CPU for weights that will be sharded, as they need not fit on one device."""
        return torch.device("cpu") if self.is_sharded else self.accelerator.device

    def distribute_weights(self) -> None:
        """Shards the weights if the recipe says so; replicated weights must be identical in all processes."""
        if self.is_sharded:
            distributed.shard(self.policy, self.accelerator.device)
        distributed.assert_identical("weights at the start", *([] if self.is_sharded else self.policy.parameters()))

    def _check_phases(self) -> None:
        """Raises on errors in any phase before the first one starts."""
        rl_phases = {number: phase.rl for number, phase in enumerate(self.recipe.phases) if phase.rl is not None}
        for key, name in used_embedders(self.recipe):
            require_embedder(key, name)
        for number, rl in rl_phases.items():
            plan = plan_of(number, rl)
            if rl.rollout.engine == "vllm":
                engine.check_installed(f"phases.{number}.rl.rollout", rl.rollout)
                engine.check_loss(f"phases.{number}.rl", plan.loss, plan.correction)
            if plan.similarity is not None:
                load_embedder(plan.similarity)
                if plan.similarity.workers:
                    check_ray(f"phases.{number}.rl.algorithm.similarity.workers")
        if self.recipe.evaluation.samples:
            load_embedder(Similarity(embedder=self.recipe.evaluation.embedder))
        self._rewards = {n: self._load_rewards(rl.rewards, f"phases.{n}.rl") for n, rl in rl_phases.items()}
        # the same rewards in every evaluation, so that evaluations compare
        named = self.recipe.evaluation.rewards
        own = [] if named or not rl_phases else [next(iter(self._rewards.values()))]
        self.evaluation_rewards = own[0] if own else self._load_rewards(named, "evaluation")
        self._check_columns()
        self.embedders = self._resolve_embedders(rl_phases)

    def _check_columns(self) -> None:
        """Raises if a reward needs a column that the data lacks."""
        has_own = bool(self.recipe.evaluation.rewards) or not self._rewards
        key = "evaluation" if has_own else f"phases.{min(self._rewards)}.rl"
        evaluated = self.splits.validation if self.recipe.evaluation.every else []
        for where, rewards, lines in (
            *((f"phases.{number}.rl", rewards, self.splits.train) for number, rewards in self._rewards.items()),
            (key, self.evaluation_rewards, self.splits.test),
            (key, self.evaluation_rewards, evaluated),
        ):
            for i, (settings, function) in enumerate(zip(*rewards, strict=True)):
                require_columns(settings, function, f"{where}.rewards.{i}", lines)
        self._gaps = [
            gap
            for number, rewards in self._rewards.items()
            for i, pair in enumerate(zip(*rewards, strict=True))
            for gap in gaps(*pair, f"phases.{number}.rl.rewards.{i}", self.splits.train)
        ]

    def _resolve_embedders(self, rl_phases: dict[int, Rl]) -> dict[str, str]:
        """Embedders by recipe key; "auto" depends on the installed packages."""
        names = {}
        for number, phase in enumerate(self.recipe.phases):
            if phase.sft is not None and phase.sft.polychromic is not None:
                names[f"phases.{number}.sft.polychromic.embedder"] = phase.sft.polychromic.embedder
        for number, rl in rl_phases.items():
            plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
            if plan.similarity is not None:
                names[f"phases.{number}.rl.algorithm.similarity.embedder"] = plan.similarity.embedder
        if self.recipe.evaluation.samples:
            names["evaluation.embedder"] = self.recipe.evaluation.embedder
        functions_by_key = {f"phases.{number}.rl.rewards": pair[1] for number, pair in self._rewards.items()}
        if self.recipe.evaluation.rewards:
            functions_by_key["evaluation.rewards"] = self.evaluation_rewards[1]
        for key, functions in (functions_by_key or {"rewards": self.evaluation_rewards[1]}).items():
            for i, function in enumerate(functions):
                embedder = getattr(function, "embedder", None)
                if isinstance(embedder, Embedder):
                    names[f"{key}.{i}"] = embedder.name
        return {key: resolve(name) for key, name in names.items()}

    def _check_policy(self) -> None:
        check_lengths(self.recipe, self.policy.context_length)
        check_reference(self.recipe.model, self.policy.tokenizer, self.policy.lm)
        for number, phase in enumerate(self.recipe.phases):
            if phase.rl is not None and phase.rl.rollout.engine == "vllm":
                key = f"phases.{number}.rl.rollout"
                engine.check_policy(key, phase.rl.rollout, self.recipe.model, self.policy)

    def _load_rewards(self, rewards: list[Reward], where: str) -> tuple[list[Reward], list[RewardFunction]]:
        settings = rewards_or_default(rewards, self.splits)
        return settings, [load_reward(reward, f"{where}.rewards.{i}") for i, reward in enumerate(settings)]

    def rewards_of(self, phase: int) -> tuple[list[Reward], list[RewardFunction]]:
        """Rewards of an RL phase; the task's if the phase names none."""
        return self._rewards[phase]

    def run(self, resume: bool = False) -> dict[str, float]:
        """Runs all phases.

        Args:
            resume: continue from the last checkpoint.

        Returns:
            Metrics of the final evaluation.
        """
        try:
            with contextlib.nullcontext() if self.backend is None else gk.use_backend(self.backend):
                return self._run(resume)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            # writing to a full disk raises an error without a file name
            raise OSError(error.errno, error.strerror, str(self.recipe.folder)) from error
        finally:
            self.log.close()

    def _run(self, resume: bool) -> dict[str, float]:
        start_phase, start_step = 0, 0
        with distributed.fail_together():  # all processes read the folder before the main one writes to it
            if resume:
                start_phase, start_step = self._resume()
            else:
                checkpoint.refuse_used_folder(self.recipe.folder)
        with distributed.fail_together():
            self._start_logs(start_phase, start_step, resume)
            if not self.is_given:
                checkpoint.keep_base(self.recipe, self.policy)
        self._require_usable_lines(start_phase)
        self._store_calibration()
        self.distribute_weights()
        for number, phase in enumerate(self.recipe.phases):
            if number < start_phase:
                continue
            start = start_step if number == start_phase else 0
            is_first_rl = phase.rl is not None and all(earlier.rl is None for earlier in self.recipe.phases[:number])
            if is_first_rl and start == 0:
                self.evaluate("test", number, 0)  # compared with the final evaluation
            if phase.sft is not None:
                SftRun(self, number, phase.sft, start).run()
            if phase.rl is not None:
                with contextlib.closing(RlRun(self, number, phase.rl, start)) as run:
                    run.run()
        return self.evaluate("test", len(self.recipe.phases), 0)

    def _start_logs(self, phase: int, step: int, resume: bool) -> None:
        if not self.log.is_main:
            return
        if resume:
            self.log.truncate(phase, step)
        if self.resumed is not None:
            self.log.event("resumed", phase=phase, step=step, threads=self.resumed.threads)
        else:
            checkpoint.start_run(self.recipe)
        self.log.open()
        versions = {"torch": torch.__version__, "grpo_kernels": gk.__version__, "threads": torch.get_num_threads()}
        date = datetime.datetime.now().isoformat(timespec="seconds")
        is_free = self.backend is None and self.policy.device.type == "cpu"
        if is_free and (reason := gk.available_kernels()["cpu"]) != "ok":
            self.log.line(f"no kernels run on this CPU ({reason}): the reference takes their place, and is slower")
        for note in (*default_rewards(self.recipe, self.splits), *self._gaps):
            self.log.line(note)
        facts = {"processes": distributed.world_size(), "embedders": self.embedders, "algorithms": self._algorithms()}
        self.log.event("started", date=date, **versions, **facts)

    def _algorithms(self) -> dict[str, str]:
        phases = enumerate(self.recipe.phases)
        return {f"phase {number}": plan_of(number, phase.rl).described() for number, phase in phases if phase.rl}

    def seed_of(self, *parts: object) -> int:
        """Seed for one purpose, derived from the recipe's seed."""
        text = " ".join(str(part) for part in (self.recipe.seed, *parts))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def items(self, split: str) -> list[Item]:
        """Lines of a split whose prompts fit the model; how many were dropped is logged."""
        if split in self._usable:
            return self._usable[split]
        lines, data, model = getattr(self.splits, split), self.recipe.data, self.recipe.model
        chat = (model.chat_template, model.chat_template_options)
        usable = select_usable(self.policy, lines, data.prompt, model.max_prompt_tokens, *chat)
        fitting = [item for item in usable if self._fits_context(split, item)]
        for of, limit, dropped in (
            ("model.max_prompt_tokens", model.max_prompt_tokens, len(lines) - len(usable)),
            ("the model's context", self.policy.context_length, len(usable) - len(fitting)),
        ):
            if dropped:
                self.log.event("prompts left out", split=split, count=dropped, limit=limit, of=of)
                self.left_out[split].append(f"{dropped} by {of}, {limit}")
        self._usable[split] = fitting
        return fitting

    def _require_usable_lines(self, start_phase: int) -> None:
        """Raises before the first step if no line of some phase fits the model."""
        for number, phase in list(enumerate(self.recipe.phases))[start_phase:]:
            run = SftRun if phase.sft is not None else RlRun
            if not self.items(run.split):
                raise ValueError(no_usable_line(f"phase {number} ({run.kind})", self.left_out[run.split]))

    def _fits_context(self, split: str, item: Item) -> bool:
        """Whether the model can read the prompt together with the longest response."""
        policy = self.policy
        demonstration = encode_demonstration(policy.tokenizer, item["demonstration"]) if split == "sft" else []
        policy.check_tokens(demonstration, "the demonstrations")
        refuse_banned(policy.banned_ids, policy.tokenizer, demonstration)
        if policy.context_length is None:
            return True
        response = len(demonstration) if split == "sft" else max(self._max_new_tokens)
        prompt = len(item["prompt_ids"])
        return (max(prompt, response) if policy.is_seq2seq else prompt + response) <= policy.context_length

    @functools.cached_property
    def calibration(self) -> calibration.Calibration | None:
        """Correctness by the rewards of demonstrations, if the recipe says so."""
        quantile, recipe = self.recipe.evaluation.solved_quantile, self.recipe
        if quantile is None:
            return None
        return calibration.calibrate(quantile, self.splits.validation, recipe.data, *self.evaluation_rewards)

    def _store_calibration(self) -> None:
        """Keeps the threshold in the run's folder, from which a resumed run reads it."""
        quantile = self.recipe.evaluation.solved_quantile
        if quantile is not None:
            self.calibration = calibration.stored_or(self.recipe.folder, quantile, lambda: self.calibration)

    def evaluate_split(self, split: str) -> Result | None:
        """Evaluates the policy as it is; None if the split is empty."""
        settings, calibrated = self.recipe.evaluation, self.calibration
        items = self.items(split)[: settings.test_prompts if split == "test" else settings.prompts]
        if not items:
            return None
        if calibrated is not None:
            settings = dataclasses.replace(settings, solved=calibrated.threshold)
        generator = torch.Generator(self.policy.device).manual_seed(self.seed_of("evaluation", split))
        result = evaluate(self.policy, items, settings, *self.evaluation_rewards, self.max_new_tokens, generator)
        return dataclasses.replace(result, solved=None if calibrated is None else calibrated.threshold)

    def evaluate(self, split: str, phase: int, step: int) -> dict[str, float]:
        """Evaluates a split, logs the metrics and writes the responses; returns {} if the split is empty."""
        result = self.evaluate_split(split)
        if result is None:
            return {}
        metrics = {f"eval/{split}_{name}": value for name, value in result.metrics.items()}
        if split == "validation":
            metrics |= {f"eval/{name}": value for name, value in result.group_metrics.items()}
        with distributed.fail_together():
            self.log.metrics("eval", phase, step, metrics)
            if self.accelerator.is_main_process:
                path = self.recipe.folder / "evaluations" / f"{split}-{phase}-{step:06d}.json"
                path.parent.mkdir(exist_ok=True)
                text = strict_json.to_text(result.to_json(), indent=1, sort_keys=True)
                checkpoint.write_text(path, text + "\n")
        return metrics

    @property
    def max_new_tokens(self) -> int:
        """Longest response in evaluations."""
        return self._max_new_tokens[0]

    @property
    def _max_new_tokens(self) -> list[int]:
        """Longest responses: in evaluations first, then in the RL phases."""
        phases = [phase.rl.rollout.max_new_tokens for phase in self.recipe.phases if phase.rl is not None]
        return [self.recipe.evaluation.max_new_tokens or (phases or [64])[0], *phases]

    def _resume(self) -> tuple[int, int]:
        state = checkpoint.load_last(self.recipe)
        if state is None:
            return 0, 0
        self._restore_environment(state)
        self.policy = checkpoint.restore_policy(self.recipe, state, self.policy, self.is_given)
        self.resumed = state
        return state.phase, state.step

    def _restore_environment(self, state: checkpoint.State) -> None:
        """Restores what affects the results but need not be in the recipe: threads, and embedders named "auto"."""
        if self.recipe.threads is None:
            torch.set_num_threads(state.threads)
        elif torch.get_num_threads() != state.threads:
            raise CheckpointError(
                f"{state.folder}: threads: must be {state.threads} as in the original run, or unset, as another number "
                f"changes the rounding, got {torch.get_num_threads()}"
            )
        for key, name in self.embedders.items():
            original = state.embedders.get(key, name)
            is_explicit = key == "evaluation.embedder" and self.recipe.evaluation.embedder != "auto"
            if original != name and not is_explicit:
                raise CheckpointError(
                    f"{state.folder}: {key}: auto must resolve to {original!r} as in the original run, got {name!r} "
                    "from the packages that are installed now"
                )


def _check_launch(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            "accelerate: processes must be launched without one of its plugins, as `distributed` decides whether "
            f"weights are sharded, got {kind}"
        )


def train(recipe: Recipe, resume: bool = False) -> dict[str, float]:
    """Trains a recipe and returns the metrics of the final evaluation."""
    return Trainer(recipe).run(resume)


def check_backend(name: str) -> None:
    if name == "kernel" and "ok" not in (known := gk.available_kernels()).values():
        raise ValueError(f"backend: kernel cannot run here: {known}")


def _without_engines(recipe: Recipe) -> Recipe:
    """The recipe for an evaluation, which samples with the policy whatever the engine."""
    phases = []
    for phase in recipe.phases:
        if phase.rl is not None and phase.rl.rollout.engine != "transformers":
            rollout = dataclasses.replace(phase.rl.rollout, engine="transformers", vllm=Vllm())
            algorithm = dataclasses.replace(phase.rl.algorithm, correction={})
            phase = dataclasses.replace(phase, rl=dataclasses.replace(phase.rl, rollout=rollout, algorithm=algorithm))
        phases.append(phase)
    return dataclasses.replace(recipe, phases=phases)


def evaluate_model(recipe: Recipe, path: str, split: str) -> Result:
    """Evaluates another model, or adapters, on a split of the recipe's data.

    Args:
        recipe: data, rewards and sampling.
        path: folder or hub name of a model, or folder of adapters that the recipe's model was trained with.
        split: "train", "validation" or "test".
    """
    is_adapter = (Path(path) / "adapter_config.json").exists()
    if is_adapter:
        model = settings_of_base(recipe.model, Path(path))
    elif recipe.model.four_bit:  # the precision that adapters are trained and evaluated in; new adapters add zero
        model = dataclasses.replace(recipe.model, path=path)
    else:
        model = dataclasses.replace(recipe.model, path=path, lora=None)
    model = dataclasses.replace(model, reference_model_path=None)  # of the KL term, which is not evaluated
    logging = dataclasses.replace(recipe.logging, to=[])
    trainer = Trainer(dataclasses.replace(_without_engines(recipe), model=model, logging=logging))
    trainer.log.is_main = False  # keeps the evaluation out of the run's logs
    if is_adapter:
        load_adapter(trainer.policy, recipe.model, Path(path))
    trainer.distribute_weights()
    result = trainer.evaluate_split(split)
    if result is None:
        raise ValueError(no_usable_line(f"the split {split!r}", trainer.left_out[split]))
    return result
