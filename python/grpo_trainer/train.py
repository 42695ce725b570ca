"""A run: its data, its policy, its phases one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import grpo_kernels as gk
from grpo_trainer import checkpoint, processes, tasks
from grpo_trainer.algorithm import Plan
from grpo_trainer.data import read_jsonl
from grpo_trainer.embed import Embedder, load_embedder, resolved
from grpo_trainer.evaluate import Result, evaluate
from grpo_trainer.log import Log
from grpo_trainer.model import encode_demonstration, load_adapter, load_policy, prompt_text
from grpo_trainer.recipe import Data, Recipe, Reward, Rl, Similarity
from grpo_trainer.rewards import RewardFunction, load_reward
from grpo_trainer.rl import RlRun
from grpo_trainer.rollout import usable
from grpo_trainer.sft import SftRun
from grpo_trainer.similarity import check_ray
from grpo_trainer.tasks.base import Item, Splits


def splits_of(data: Data, seed: int) -> Splits:
    """From the bundled task, or from files."""
    if data.task is not None:
        found = tasks.make(data.task, seed, data.options)
    else:
        columns = {"data.prompt": data.prompt}
        train, validation, test = (
            [] if path is None else read_jsonl(path, columns) for path in (data.train, data.validation, data.test)
        )
        if data.sft is None:
            shown = [line for line in train if data.demonstration in line]
        else:
            shown = read_jsonl(data.sft, columns | {"data.demonstration": data.demonstration})
        found = Splits(shown, train, validation, test)
    cut = slice(data.limit)
    return dataclasses.replace(found, sft=found.sft[cut], train=found.train[cut])


class Trainer:
    def __init__(self, recipe: Recipe) -> None:
        from accelerate import Accelerator

        if recipe.model.mixed_precision == "fp16" and not torch.cuda.is_available():
            raise ValueError("model.mixed_precision: fp16 needs a GPU, and there is none")
        self.recipe = recipe
        # the policy autocasts by itself; what scales losses for fp16 is accelerate's
        self.accelerator = Accelerator(
            mixed_precision="fp16" if recipe.model.mixed_precision == "fp16" else "no",
            # without being told, accelerate takes each of several on the CPU for the only one
            cpu=True if processes.were_launched() and not torch.cuda.is_available() else None,
        )
        _check_launch(self.accelerator)
        if processes.world() > 1:
            torch.set_num_threads(processes.first(torch.get_num_threads()))
        self.is_sharded = self.shards(processes.world())
        self.backend = None if recipe.backend == "auto" else recipe.backend
        with processes.together():
            torch.manual_seed(self.seed_of("weights"))
            self.log = Log(recipe, self.accelerator.is_main_process)
            self.splits = splits_of(recipe.data, recipe.seed)
            self._check_phases()
            self.policy = load_policy(recipe.model, self._corpus(), self.backend, self.load_on)
            self._check_context()
        self.seconds: dict[str, float] = defaultdict(float)
        self._usable: dict[str, list[Item]] = {}

    def shards(self, count: int) -> bool:
        """Whether weights are shared out over so many processes; one has all of them."""
        return self.recipe.distributed == "fsdp2" and count > 1

    @property
    def load_on(self) -> torch.device:
        """What is to be shared out need not fit on one device."""
        return torch.device("cpu") if self.is_sharded else self.accelerator.device

    def share_out(self) -> None:
        """The weights, among processes that each have a part; others must have the same."""
        if self.is_sharded:
            processes.shard(self.policy, self.accelerator.device)
        processes.agree("weights at the start", *([] if self.is_sharded else self.policy.parameters()))

    def _check_phases(self) -> None:
        """What is wrong with a later phase is said before the first."""
        of_rl = {number: phase.rl for number, phase in enumerate(self.recipe.phases) if phase.rl is not None}
        for number, rl in of_rl.items():
            try:
                plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
            except (TypeError, ValueError) as error:
                raise type(error)(f"phases.{number}.rl.{error}") from error
            if plan.similarity is not None:
                load_embedder(plan.similarity)
                if plan.similarity.workers:
                    check_ray(f"phases.{number}.rl.algorithm.similarity.workers")
        if self.recipe.evaluation.samples:
            load_embedder(Similarity(embedder=self.recipe.evaluation.embedder))
        self._rewards = {number: self._loaded(rl.rewards) for number, rl in of_rl.items()}
        # one scale from the first evaluation to the last
        self.evaluated_by = next(iter(self._rewards.values())) if of_rl else self._loaded([])
        self.embedders = self._embedders(of_rl)

    def _embedders(self, of_rl: dict[int, Rl]) -> dict[str, str]:
        """By the keys that name them, as "auto" is another where another package is there."""
        names = {}
        for number, phase in enumerate(self.recipe.phases):
            if phase.sft is not None and phase.sft.polychromic is not None:
                names[f"phases.{number}.sft.polychromic.embedder"] = phase.sft.polychromic.embedder
        for number, rl in of_rl.items():
            plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
            if plan.similarity is not None:
                names[f"phases.{number}.rl.algorithm.similarity.embedder"] = plan.similarity.embedder
        if self.recipe.evaluation.samples:
            names["evaluation.embedder"] = self.recipe.evaluation.embedder
        graders = {f"phases.{number}.rl.rewards": some for number, (_, some) in self._rewards.items()}
        for key, functions in (graders or {"rewards": self.evaluated_by[1]}).items():
            for i, function in enumerate(functions):
                embedder = getattr(function, "embedder", None)
                if isinstance(embedder, Embedder):
                    names[f"{key}.{i}"] = embedder.name
        return {key: resolved(name) for key, name in names.items()}

    def _check_context(self) -> None:
        most = self.policy.context
        for number, phase in enumerate(self.recipe.phases):
            if phase.rl is not None and most is not None and phase.rl.rollout.max_new_tokens >= most:
                raise ValueError(
                    f"phases.{number}.rl.rollout.max_new_tokens: must be less than the model's context, {most}, got "
                    f"{phase.rl.rollout.max_new_tokens}"
                )

    def _loaded(self, rewards: list[Reward]) -> tuple[list[Reward], list[RewardFunction]]:
        chosen = rewards or [Reward(name=name) for name in self.splits.rewards]
        return chosen, [load_reward(each) for each in chosen]

    def rewards_of(self, phase: int) -> tuple[list[Reward], list[RewardFunction]]:
        """That an RL phase learns from; those of the task, if it names none."""
        return self._rewards[phase]

    def run(self, resume: bool = False) -> dict[str, float]:
        """All phases from the start, or from the last checkpoint; the last evaluation's figures."""
        try:
            with contextlib.nullcontext() if self.backend is None else gk.use_backend(self.backend):
                return self._run(resume)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            # of a disk that is full the system says no more than that
            raise OSError(error.errno, error.strerror, str(self.recipe.folder)) from error
        finally:
            self.log.close()

    def _run(self, resume: bool) -> dict[str, float]:
        start_phase, start_step = 0, 0
        with processes.together():  # before the first writes what the others are reading
            if resume:
                start_phase, start_step = self._resume()
            else:
                checkpoint.refuse_used(self.recipe.folder)
        with processes.together():
            self._begin(start_phase, start_step, resume)
        self.share_out()
        for number, phase in enumerate(self.recipe.phases):
            if number < start_phase:
                continue
            start = start_step if number == start_phase else 0
            if phase.rl is not None and start == 0 and all(each.rl is None for each in self.recipe.phases[:number]):
                self.evaluate("test", number, 0)  # what reinforcement is compared with in the end
            if phase.sft is not None:
                SftRun(self, number, phase.sft, start).run()
            if phase.rl is not None:
                with contextlib.closing(RlRun(self, number, phase.rl, start)) as run:
                    run.run()
        return self.evaluate("test", len(self.recipe.phases), 0)

    def _begin(self, phase: int, step: int, resume: bool) -> None:
        """In the run's folder."""
        if not self.log.is_main:
            return
        if resume:
            self.log.cut(phase, step)
        if phase or step:
            self.log.event("resumed", phase=phase, step=step, threads=self.resumed.threads)
        else:
            checkpoint.begin(self.recipe)
        self.log.open()
        about = {"torch": torch.__version__, "grpo_kernels": gk.__version__, "threads": torch.get_num_threads()}
        date = datetime.datetime.now().isoformat(timespec="seconds")
        self.log.event("started", date=date, **about, processes=processes.world(), embedders=self.embedders)

    def seed_of(self, *what: object) -> int:
        text = " ".join(str(each) for each in (self.recipe.seed, *what))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def items(self, split: str) -> list[Item]:
        """The usable lines of a split."""
        if split in self._usable:
            return self._usable[split]
        lines, data, model = getattr(self.splits, split), self.recipe.data, self.recipe.model
        found = usable(self.policy, lines, data.prompt, model.max_prompt_tokens, model.chat_template)
        fitting = [item for item in found if self._fits(split, item)]
        for of, limit, left_out in (
            ("model.max_prompt_tokens", model.max_prompt_tokens, len(lines) - len(found)),
            ("the model's context", self.policy.context, len(found) - len(fitting)),
        ):
            if left_out:
                self.log.event("prompts left out", split=split, count=left_out, limit=limit, of=of)
        self._usable[split] = fitting
        return fitting

    def _fits(self, split: str, item: Item) -> bool:
        """Whether the model can read the prompt and the longest response to it."""
        policy = self.policy
        if policy.context is None:
            return True
        if split == "sft":
            response = len(encode_demonstration(policy, str(item[self.recipe.data.demonstration])))
        else:
            response = max(self._most_new_tokens)
        prompt = len(item["prompt_ids"])
        return (max(prompt, response) if policy.is_seq2seq else prompt + response) <= policy.context

    def evaluation_of(self, split: str) -> Result | None:
        settings = self.recipe.evaluation
        items = self.items(split)[: settings.test_prompts if split == "test" else settings.prompts]
        if not items:
            return None
        generator = torch.Generator(self.policy.device).manual_seed(self.seed_of("evaluation", split))
        return evaluate(self.policy, items, settings, *self.evaluated_by, self.max_new_tokens, generator)

    def evaluate(self, split: str, phase: int, step: int) -> dict[str, float]:
        """Figures of the policy as it is, logged; nothing if the split is empty."""
        result = self.evaluation_of(split)
        if result is None:
            return {}
        metrics = {f"eval/{split}_{name}": value for name, value in result.metrics.items()}
        if split == "validation":
            metrics |= {f"eval/{name}": value for name, value in result.of_groups.items()}
        with processes.together():
            self.log.metrics("eval", phase, step, metrics)
            if self.accelerator.is_main_process:
                path = self.recipe.folder / "evaluations" / f"{split}-{phase}-{step:06d}.json"
                path.parent.mkdir(exist_ok=True)
                checkpoint.write_text(path, checkpoint.to_json(result.to_json()))
        return metrics

    @property
    def max_new_tokens(self) -> int:
        """Of evaluations."""
        return self._most_new_tokens[0]

    @property
    def _most_new_tokens(self) -> list[int]:
        of_rl = [phase.rl.rollout.max_new_tokens for phase in self.recipe.phases if phase.rl is not None]
        return of_rl or [64]

    def _corpus(self) -> list[str]:
        data = self.recipe.data
        texts = [prompt_text(item[data.prompt]) for item in self.splits.sft + self.splits.train]
        return texts + [str(item[data.demonstration]) for item in self.splits.sft]

    def _resume(self) -> tuple[int, int]:
        state = checkpoint.last(self.recipe)
        if state is None:
            return 0, 0
        self._keep(state)
        self.policy = checkpoint.load_policy(self.recipe, state, self.policy)
        self.resumed = state
        return state.phase, state.step

    def _keep(self, state: checkpoint.State) -> None:
        """What no key of the recipe says, and what a run's bits depend on all the same."""
        if self.recipe.threads is None:
            torch.set_num_threads(state.threads)
        elif torch.get_num_threads() != state.threads:
            raise checkpoint.CheckpointError(
                f"{state.folder}: threads: must be what it was, {state.threads}, or left out, as another number gives "
                f"other bits, got {torch.get_num_threads()}"
            )
        for key, name in self.embedders.items():
            was = state.embedders.get(key, name)
            is_chosen = key == "evaluation.embedder" and self.recipe.evaluation.embedder != "auto"
            if was != name and not is_chosen:
                raise checkpoint.CheckpointError(
                    f"{state.folder}: {key}: auto must be what it was, {was!r}, got {name!r}, by the packages that are "
                    "installed"
                )


def _check_launch(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            "accelerate: processes must be launched without a plugin of its own, as `distributed` says whether weights "
            f"are sharded, got {kind}"
        )


def train(recipe: Recipe, resume: bool = False) -> dict[str, float]:
    return Trainer(recipe).run(resume)


def evaluate_model(recipe: Recipe, path: str, split: str) -> Result:
    """Another model on a split of the recipe's data."""
    is_adapter = (Path(path) / "adapter_config.json").exists()
    model = recipe.model if is_adapter else dataclasses.replace(recipe.model, path=path, lora=None, four_bit=False)
    trainer = Trainer(dataclasses.replace(recipe, model=model, logging=dataclasses.replace(recipe.logging, to=[])))
    trainer.log.is_main = False  # an evaluation is not an event of the run
    if is_adapter:
        load_adapter(trainer.policy, recipe.model, Path(path))
    trainer.share_out()
    result = trainer.evaluation_of(split)
    if result is None:
        raise ValueError(f"data: the split {split!r} has no usable line")
    return result
