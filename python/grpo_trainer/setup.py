"""Setting up a run: what a recipe names is loaded, and errors in any part of it are raised before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import checkpoint, distributed, engine, interruption
from grpo_trainer.algorithm import Plan
from grpo_trainer.calibration import calibrate, check_calibration
from grpo_trainer.data import encode_demonstration
from grpo_trainer.embed import Embedder, require_embedder, resolve
from grpo_trainer.log import Log
from grpo_trainer.policy import Policy, Reference, load_policy, take_policy
from grpo_trainer.pretrained import check_four_bit, check_reference
from grpo_trainer.ray_pool import check_ray
from grpo_trainer.recipe import Recipe, Reward, Rl
from grpo_trainer.rewards import LoadedReward, gaps, load_reward, require_columns
from grpo_trainer.rollout import Rollout, check_cache, roll_out, select_usable
from grpo_trainer.splits import corpus_of, digest, load_splits, no_usable_line, require_lines
from grpo_trainer.tasks import Item, Splits
from grpo_trainer.vocabulary import refuse_banned


@dataclasses.dataclass
class Run:
    """A recipe made ready, and the state of its training."""

    recipe: Recipe
    device: torch.device
    log: Log
    splits: Splits
    rewards: list[LoadedReward]  # of RL, or of evaluations without RL
    evaluation_rewards: list[LoadedReward]
    plan: Any  # the algorithm.Plan of RL; None without RL
    embedders: dict[str, str]  # those that "auto" stands for, by recipe key
    policy: Policy
    given_model: bool  # whether the caller gave the model as an object
    given_reference: Any  # model of the KL term that the caller gave
    notes: list[str]  # what the user should know before the first step
    resumed: checkpoint.State | None = None
    # state of training
    optimizer: torch.optim.Optimizer = dataclasses.field(init=False)
    scaler: torch.amp.GradScaler = dataclasses.field(init=False)  # of the losses, with fp16
    reference: Reference | None = None  # of the KL term
    embedder: Embedder | None = None  # of similarity groups, or of polychromic SFT
    engine: engine.Engine | None = None  # samples in place of the policy
    monitor: Any = None  # a monitor.Monitor of RL
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))  # of a step's parts
    usable: dict[str, list[Item]] = dataclasses.field(default_factory=dict)  # by split
    left_out: dict[str, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))  # by split
    unlogged: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # facts about lines that are left out

    @functools.cached_property
    def data(self) -> str:
        return digest(self.splits)

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are, or will be, sharded over the processes."""
        return self.recipe.distributed == "fsdp2" and distributed.world_size() > 1

    @property
    def rl(self) -> Rl:
        assert self.recipe.rl is not None
        return self.recipe.rl

    @property
    def reward_weights(self) -> Tensor:
        return torch.tensor([reward.settings.weight for reward in self.rewards])

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - start

    def roll_out(self, items: list[Item], generator: torch.Generator) -> Rollout:
        """Samples a group of responses to each prompt, with the policy or with the engine."""
        if self.engine is None:
            return roll_out(self.policy, items, self.rl.rollout, generator)
        interruption.stop_if_asked()
        try:
            return self.engine.roll_out(items, generator)
        except (engine.EngineError, distributed.ProcessError) as error:
            if interruption.signal_number() is None:
                raise
            raise interruption.Stopped from error  # Ctrl-C in a terminal reaches the engine's processes, too

    def items(self, split: str) -> list[Item]:
        """Lines of a split whose prompts fit the model; `log_left_out` logs how many do not."""
        if split in self.usable:
            return self.usable[split]
        lines, data, model = getattr(self.splits, split), self.recipe.data, self.recipe.model
        chat = (model.chat_template, model.chat_template_options)
        fitting = select_usable(self.policy, lines, data.prompt, model.max_prompt_length, *chat)
        usable = [item for item in fitting if self._fits_context(split, item)]
        for of, limit, dropped in (
            ("model.max_prompt_length", model.max_prompt_length, len(lines) - len(fitting)),
            ("the model's context", self.policy.context_length, len(fitting) - len(usable)),
        ):
            if dropped:
                self.unlogged.append({"split": split, "count": dropped, "limit": limit, "of": of})
                self.left_out[split].append(f"{dropped} by {of}, {limit}")
        self.usable[split] = usable
        return usable

    def log_left_out(self) -> None:
        for facts in self.unlogged:
            self.log.event("prompts left out", **facts)
        self.unlogged.clear()

    def _fits_context(self, split: str, item: Item) -> bool:
        """Whether the model can read the prompt together with the longest response."""
        policy, recipe = self.policy, self.recipe
        demonstration = encode_demonstration(policy.tokenizer, item["demonstration"]) if split == "sft" else []
        policy.check_tokens(demonstration, "the demonstrations")
        refuse_banned(policy.banned_ids, policy.tokenizer, demonstration)
        if policy.context_length is None:
            return True
        response = len(demonstration) if split == "sft" else recipe.max_completion_length
        if split == "train" and recipe.rl is not None:
            response = recipe.rl.rollout.max_completion_length
        prompt = len(item["prompt_ids"])
        return (max(prompt, response) if policy.is_seq2seq else prompt + response) <= policy.context_length

    @functools.cached_property
    def solved(self) -> float:
        """Reward from which a response of an evaluation counts as correct."""
        settings = self.recipe.evaluation
        if settings.solved_quantile is None:
            return settings.solved
        validation = self.splits.validation
        return calibrate(settings.solved_quantile, validation, self.recipe.data, self.evaluation_rewards)

    def close(self) -> None:
        self.log.close()
        if self.engine is not None:
            self.engine.close()
        if self.embedder is not None:
            self.embedder.close()


def set_up(recipe: Recipe, model: Any = None, tokenizer: Any = None, reference: Any = None) -> Run:
    """Loads what a recipe names; for parameters see `train.train`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"train: recipe must be a Recipe, as grpo_trainer.recipes.load returns one, got {type(recipe).__name__} "
            f"{recipe!r}"
        )
    if reference is not None and not hasattr(reference, "get_output_embeddings"):
        raise TypeError(f"train: reference must be a model of transformers, got {type(reference).__name__}")
    if recipe.model.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("model.mixed_precision: must be no or bf16 without a GPU, got 'fp16'")
    check_backend(recipe.backend)
    device = distributed.start()
    torch.set_num_threads(distributed.broadcast(recipe.threads or torch.get_num_threads()))
    with distributed.fail_together():
        log = Log(recipe, distributed.is_main_process())
        splits = load_splits(recipe.data, recipe.seed)
        require_lines(recipe, splits)
        plan = check_packages(recipe)
        rewards, evaluation_rewards, notes = load_rewards(recipe, splits)
        torch.manual_seed(recipe.seed_of("weights"))
        policy = _load_policy(recipe, splits, device, model, tokenizer, reference)
        check_policy(recipe, splits, policy)
        embedders = _resolve_embedders(recipe, plan, rewards, evaluation_rewards)
    return Run(
        recipe,
        device,
        log,
        splits,
        rewards,
        evaluation_rewards,
        plan,
        embedders,
        policy,
        given_model=model is not None,
        given_reference=None if reference is model else reference,  # the policy at the start of RL
        notes=notes,
    )


def check_backend(name: str) -> None:
    if name == "kernel" and "ok" not in (known := gk.available_kernels()).values():
        raise ValueError(f"backend: must be auto or reference where no kernel runs ({known}), got 'kernel'")


def check_packages(recipe: Recipe) -> Plan | None:
    """Raises if a package that the recipe needs is missing, or a setting has no effect; returns the plan of RL."""
    sft, rl, evaluation = recipe.sft, recipe.rl, recipe.evaluation
    if recipe.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise ValueError('model.lora: needs the package peft, which is not installed: pip install "grpo-kernels[lora]"')
    if recipe.model.four_bit:
        check_four_bit()
    if sft is not None and sft.polychromic is not None:
        require_embedder("sft.polychromic.embedder", sft.polychromic.embedder)
    if evaluation.samples:
        require_embedder("evaluation.embedder", evaluation.embedder)
    if rl is None:
        return None
    plan = Plan.of(rl)
    if recipe.model.reference_model_path is not None and not plan.needs_reference:
        raise ValueError(
            "model.reference_model_path: must be null without a KL term, which rl.algorithm.beta adds, got "
            f"{recipe.model.reference_model_path!r} with {rl.algorithm.name!r}"
        )
    if rl.rollout.engine == "vllm":
        engine.check_installed("rl.rollout", rl.rollout)
        engine.check_loss("rl", plan.loss, plan.correction)
    if plan.similarity is not None:
        require_embedder("rl.algorithm.similarity.embedder", plan.similarity.embedder)
        if plan.similarity.workers:
            check_ray("rl.algorithm.similarity.workers")
    return plan


def load_rewards(recipe: Recipe, splits: Splits) -> tuple[list[LoadedReward], list[LoadedReward], list[str]]:
    """The rewards of RL and those of evaluations, and what the user should know about them.

    Evaluations have the same rewards throughout, so that they compare. Raises if a reward or the calibration of
    correctness needs a column that the data lacks.
    """
    named, notes = recipe.evaluation.rewards, []
    where = "rl.rewards" if recipe.rl is not None else "evaluation.rewards"
    settings = recipe.rl.rewards if recipe.rl is not None else named
    if not settings:
        settings = [Reward(name=name) for name in splits.rewards]
        if recipe.data.task is None:
            notes.append(f"{where}: none is named, so {' and '.join(splits.rewards)} rewards the responses")
    rewards = [load_reward(reward, f"{where}.{i}") for i, reward in enumerate(settings)]
    used = [(where, rewards, splits.train)] if recipe.rl is not None else []
    evaluation_rewards = rewards
    if named and recipe.rl is not None:
        where = "evaluation.rewards"
        evaluation_rewards = [load_reward(reward, f"{where}.{i}") for i, reward in enumerate(named)]
    used.append((where, evaluation_rewards, splits.test))
    used.append((where, evaluation_rewards, splits.validation))
    for key, loaded, lines in used:
        for i, reward in enumerate(loaded):
            require_columns(reward, f"{key}.{i}", lines)
    quantile, validation = recipe.evaluation.solved_quantile, splits.validation
    if quantile is not None and (validation or splits.test):  # else nothing is evaluated
        check_calibration(quantile, validation, recipe.data, evaluation_rewards)
    if recipe.rl is not None:
        notes += [gap for i, reward in enumerate(rewards) for gap in gaps(reward, f"rl.rewards.{i}", splits.train)]
    return rewards, evaluation_rewards, notes


def _load_policy(
    recipe: Recipe, splits: Splits, device: torch.device, model: Any, tokenizer: Any, reference: Any
) -> Policy:
    settings, backend = recipe.model, None if recipe.backend == "auto" else recipe.backend
    if recipe.distributed == "fsdp2" and distributed.world_size() > 1:
        device = torch.device("cpu")  # weights that will be sharded need not fit on one device
    if reference is not None and settings.reference_model_path is not None:
        raise ValueError(
            f"model.reference_model_path: must be null with a reference object, got {settings.reference_model_path!r}"
        )
    if model is None:
        if tokenizer is not None:
            raise ValueError("train: tokenizer must be given with a model, got a tokenizer alone")
        return load_policy(settings, corpus_of(recipe.data, splits), backend, device)
    if recipe.rl is not None and recipe.rl.rollout.engine != "transformers":
        raise ValueError(
            "rl.rollout.engine: must be transformers with a model object, as others read model.path, got "
            f"{recipe.rl.rollout.engine!r}"
        )
    return take_policy(model, tokenizer, settings, backend, device)


def check_policy(recipe: Recipe, splits: Splits, policy: Policy) -> None:
    """Raises if the recipe asks for more than its model can do."""
    context = policy.context_length
    lengths = {"evaluation.max_completion_length": recipe.evaluation.max_completion_length}
    if recipe.rl is not None:
        lengths["rl.rollout.max_completion_length"] = recipe.rl.rollout.max_completion_length
    for key, length in lengths.items():
        if context is not None and length is not None and length >= context:
            raise ValueError(f"{key}: must be less than the model's context, {context}, got {length}")
    check_reference(recipe.model, policy.tokenizer, policy.lm)
    if recipe.rl is not None or splits.validation or splits.test:
        check_cache(policy)
    if recipe.rl is not None and recipe.rl.rollout.engine == "vllm":
        engine.check_policy("rl.rollout", recipe.rl.rollout, recipe.model, policy)


def _resolve_embedders(
    recipe: Recipe, plan: Plan | None, rewards: list[LoadedReward], evaluation_rewards: list[LoadedReward]
) -> dict[str, str]:
    """Embedders that "auto" stands for with the packages installed here, by recipe key."""
    names = {}
    if recipe.sft is not None and recipe.sft.polychromic is not None:
        names["sft.polychromic.embedder"] = recipe.sft.polychromic.embedder
    if plan is not None and plan.similarity is not None:
        names["rl.algorithm.similarity.embedder"] = plan.similarity.embedder
    if recipe.evaluation.samples:
        names["evaluation.embedder"] = recipe.evaluation.embedder
    own = [] if recipe.rl is None else rewards
    for key, loaded in (("rl.rewards", own), ("evaluation.rewards", evaluation_rewards)):
        names |= {f"{key}.{i}": getattr(reward.function, "embedder", "") for i, reward in enumerate(loaded)}
    return {key: resolve(name) for key, name in names.items() if name == "auto"}


def begin(run: Run, resume: bool, fresh: bool) -> tuple[str, int]:
    """Opens the run's folder, and returns its position: the phase and the number of its steps that are done."""
    recipe, phase, step = run.recipe, "sft" if run.recipe.sft is not None else "rl", 0
    with distributed.fail_together():  # all processes read the folder before the main one writes to it
        if not resume:
            checkpoint.refuse_used_folder(recipe, may_hold_run=fresh)
        elif (state := checkpoint.load_last(recipe)) is not None:
            _restore_environment(run, state)
            run.policy = checkpoint.restore_policy(recipe, state, run.policy)
            run.resumed, phase, step = state, state.phase, state.step
    for name, split, settings in (("sft", "sft", recipe.sft), ("rl", "train", recipe.rl)):
        if settings is not None and not run.items(split):  # before an earlier run is deleted
            raise ValueError(no_usable_line(name, run.left_out[split]))
    with distributed.fail_together():
        _start_logs(run, phase, step)
        if not run.given_model:
            checkpoint.keep_base(recipe, run.policy)
    distribute_weights(run)
    return phase, step


def distribute_weights(run: Run) -> None:
    """Shards the weights if the recipe says so; replicated weights must be identical in all processes."""
    if run.is_sharded:
        distributed.shard(run.policy, run.device)
    distributed.assert_identical("weights at the start", *([] if run.is_sharded else run.policy.parameters()))


def _start_logs(run: Run, phase: str, step: int) -> None:
    log, recipe = run.log, run.recipe
    if not log.is_main:
        return
    if run.resumed is not None:
        checkpoint.remove_old(recipe)
        checkpoint.write_recipe(recipe)
        log.truncate(phase, step)
        log.event("resumed", phase=phase, step=step, threads=run.resumed.threads)
    else:
        checkpoint.start_run(recipe)
    log.open(phase, step)
    if recipe.backend == "auto" and run.device.type == "cpu" and (reason := gk.available_kernels()["cpu"]) != "ok":
        log.line(f"no kernels run on this CPU ({reason}): the reference takes their place, and is slower")
    for note in run.notes:
        log.line(note)
    log.event(
        "started",
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        torch=torch.__version__,
        grpo_kernels=gk.__version__,
        threads=torch.get_num_threads(),
        processes=distributed.world_size(),
        embedders=run.embedders,
        algorithm=None if run.plan is None else run.plan.described(),
    )
    run.log_left_out()


def _restore_environment(run: Run, state: checkpoint.State) -> None:
    """Restores or compares what affects the results and is not in the recipe: lines, threads, "auto" embedders."""
    recipe, folder = run.recipe, checkpoint.folder_of(run.recipe, state.phase, state.step)
    if state.data and run.data != state.data:
        raise checkpoint.CheckpointError(
            f"{folder}: data: must have the lines of the original run, got others; restore them, or train with these "
            "in another output, or from the start with --fresh"
        )
    if recipe.threads is None:
        torch.set_num_threads(state.threads)
    elif torch.get_num_threads() != state.threads:
        raise checkpoint.CheckpointError(
            f"{folder}: threads: must be {state.threads} as in the original run, or unset, as another number changes "
            f"the rounding, got {torch.get_num_threads()}"
        )
    for key, name in run.embedders.items():
        original = state.embedders.get(key, name)
        if original != name:
            raise checkpoint.CheckpointError(
                f"{folder}: {key}: auto must resolve to {original!r} as in the original run, got {name!r} from the "
                "packages that are installed now"
            )
