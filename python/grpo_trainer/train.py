"""The loop: phases of supervised and of reinforcement steps.

Everything random in a step follows from the seed and the step's number: data order, sampling, dropout. So a run that
goes on from a checkpoint is the run that was never stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.config.loss import METRICS
from grpo_trainer import checkpoint, tasks
from grpo_trainer.algorithm import Credit, Plan, credit, total
from grpo_trainer.data import read_jsonl
from grpo_trainer.embed import load_embedder
from grpo_trainer.evaluate import Result, evaluate
from grpo_trainer.log import Log
from grpo_trainer.model import Batch, Policy, Reference, evaluating, load_policy, pad
from grpo_trainer.recipe import Data, Optimizer, Phase, Recipe, Reward, Rl, Sft
from grpo_trainer.rewards import load_reward, score
from grpo_trainer.rollout import Rollout, roll_out, usable
from grpo_trainer.settings import plain
from grpo_trainer.tasks.base import Item, Splits


def splits_of(data: Data, seed: int) -> Splits:
    """From the bundled task, or from files."""
    if data.task is not None:
        found = tasks.make(data.task, seed, data.options)
    else:
        train, sft, validation, test = (
            [] if path is None else read_jsonl(path) for path in (data.train, data.sft, data.validation, data.test)
        )
        shown = sft or [line for line in train if data.demonstration in line]
        found = Splits(shown, train, validation, test)
    cut = slice(data.limit)
    return dataclasses.replace(
        found, sft=found.sft[cut], train=found.train[cut], validation=found.validation[cut], test=found.test[cut]
    )


class Trainer:
    def __init__(self, recipe: Recipe) -> None:
        from accelerate import Accelerator

        self.recipe = recipe
        self.accelerator = Accelerator(mixed_precision=recipe.model.mixed_precision)
        torch.manual_seed(self.seed_of("weights"))
        self.backend = None if recipe.backend == "auto" else recipe.backend
        self.log = Log(recipe.logging, recipe.folder, recipe.name, plain(recipe), self.accelerator.is_main_process)
        self.splits = splits_of(recipe.data, recipe.seed)
        rewards = [phase.rl.rewards for phase in recipe.phases if phase.rl is not None and phase.rl.rewards]
        self.rewards = rewards[0] if rewards else [Reward(name=name) for name in self.splits.rewards]
        self.functions = [load_reward(each) for each in self.rewards]
        self.policy = load_policy(recipe.model, self._corpus(), self.backend)
        self.seconds: dict[str, float] = defaultdict(float)
        self._usable: dict[str, list[Item]] = {}

    def run(self, resume: bool = False) -> dict[str, float]:
        """All phases from the start, or from the last checkpoint; the last evaluation's figures."""
        start_phase, start_step = 0, 0
        if resume:
            start_phase, start_step = self._resume()
        else:
            checkpoint.refuse_used(self.recipe.folder)
            self.recipe.folder.mkdir(parents=True, exist_ok=True)
            (self.recipe.folder / "recipe.json").write_text(checkpoint.to_json(plain(self.recipe)))
        for number, phase in enumerate(self.recipe.phases):
            if number < start_phase:
                continue
            PhaseRun(self, number, phase, start_step if number == start_phase else 0).run()
        return self.evaluate("test", len(self.recipe.phases), 0)

    def seed_of(self, *what: object) -> int:
        text = " ".join(str(each) for each in (self.recipe.seed, *what))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def items(self, split: str) -> list[Item]:
        """The usable lines of a split."""
        if split in self._usable:
            return self._usable[split]
        lines, data, model = getattr(self.splits, split), self.recipe.data, self.recipe.model
        found = usable(self.policy, lines, data.prompt, model.max_prompt_tokens, model.chat_template)
        if len(found) < len(lines):
            left_out = len(lines) - len(found)
            self.log.event("prompts left out", split=split, count=left_out, limit=model.max_prompt_tokens)
        self._usable[split] = found
        return found

    def evaluation_of(self, split: str) -> Result | None:
        items = self.items(split)[: self.recipe.evaluation.prompts]
        if not items:
            return None
        generator = torch.Generator(self.policy.device).manual_seed(self.seed_of("evaluation", split))
        return evaluate(
            self.policy, items, self.recipe.evaluation, self.rewards, self.functions, self.max_new_tokens, generator
        )

    def evaluate(self, split: str, phase: int, step: int) -> dict[str, float]:
        """Figures of the policy as it is, logged; nothing if the split is empty."""
        result = self.evaluation_of(split)
        if result is None:
            return {}
        metrics = {f"eval/{split}_{name}": value for name, value in result.metrics.items()}
        self.log.metrics("eval", phase, step, metrics)
        if self.accelerator.is_main_process:
            path = self.recipe.folder / "evaluations" / f"{split}-{phase}-{step:06d}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(checkpoint.to_json(result.to_json()))
        return metrics

    @property
    def max_new_tokens(self) -> int:
        of_rl = [phase.rl.rollout.max_new_tokens for phase in self.recipe.phases if phase.rl is not None]
        return of_rl[0] if of_rl else 64

    def _corpus(self) -> list[str]:
        data = self.recipe.data
        texts = [str(item[data.prompt]) for item in self.splits.sft + self.splits.train]
        return texts + [str(item[data.demonstration]) for item in self.splits.sft]

    def _resume(self) -> tuple[int, int]:
        state = checkpoint.last(self.recipe)
        if state is None:
            self.log.cut(0, 0)
            return 0, 0
        self.policy = checkpoint.load_policy(self.recipe, state, self.policy)
        self.resumed = state
        self.log.cut(state.phase, state.step)
        self.log.event("resumed", phase=state.phase, step=state.step)
        return state.phase, state.step


class PhaseRun:
    """One phase: its optimizer, its steps, its evaluations and checkpoints."""

    def __init__(self, trainer: Trainer, number: int, phase: Phase, start: int) -> None:
        self.t, self.number, self.start = trainer, number, start
        self.sft, self.rl = phase.sft, phase.rl
        settings = phase.sft or phase.rl
        assert settings is not None
        self.settings: Sft | Rl = settings
        policy = trainer.policy
        self.plan: Plan | None = None
        self.reference: Reference | None = None
        if self.rl is not None:
            self._set_up_rl(self.rl)
        groups = _parameter_groups(policy, settings.optimizer, self.rl)
        self.optimizer = torch.optim.AdamW(
            groups, betas=tuple(settings.optimizer.betas), eps=settings.optimizer.eps, fused=True
        )  # type: ignore[arg-type]
        if start:
            checkpoint.load_optimizer(trainer.resumed, self.optimizer)
        policy.to(trainer.accelerator.device)
        self.model, self.optimizer = trainer.accelerator.prepare(policy, self.optimizer)

    @property
    def title(self) -> str:
        return "sft" if self.sft is not None else "rl"

    def run(self) -> None:
        t = self.t
        data = t.items("sft" if self.sft is not None else "train")
        if not data:
            raise ValueError(f"data: phase {self.number} ({self.title}) has no usable line")
        self._evaluate_if_due(self.start)
        for step in range(self.start + 1, self.settings.steps + 1):
            torch.manual_seed(t.seed_of("step", self.number, step))
            self._set_lr(step)
            t.seconds.clear()
            began = time.perf_counter()
            items = self._items(data, step)
            metrics = self._sft_step(items) if self.sft is not None else self._rl_step(items, step)
            spent = time.perf_counter() - began
            metrics |= {"time/step": spent} | {f"time/{name}": seconds for name, seconds in t.seconds.items()}
            t.log.metrics(self.title, self.number, step, metrics)
            shown = {name: metrics[key] for name, key in SHOWN if key in metrics}
            t.log.progress(f"{self.title} {self.number}", step, self.settings.steps, shown)
            saves = t.recipe.checkpoints.every
            if (saves and step % saves == 0) or step == self.settings.steps:
                checkpoint.save(t, self.number, step, self.optimizer, self.plan)
            self._evaluate_if_due(step)
        t.log.close()

    def _evaluate_if_due(self, step: int) -> None:
        every = self.t.recipe.evaluation.every if self.rl is not None else 0
        if step in (0, self.settings.steps) or (every and step % every == 0):
            self.t.evaluate("validation", self.number, step)

    def _items(self, data: list[Item], step: int) -> list[Item]:
        """The step's share of the data: every epoch walks over all of it, in an order of its own."""
        count = self.sft.batch if self.sft is not None else self.rl.rollout.prompts  # type: ignore[union-attr]
        return [
            data[self._order(len(data), at // len(data))[at % len(data)]]
            for at in range((step - 1) * count, step * count)
        ]

    def _order(self, count: int, epoch: int) -> list[int]:
        if getattr(self, "_known_order", (None, None))[0] != (count, epoch):
            order = list(range(count))
            random.Random(self.t.seed_of("order", self.number, epoch)).shuffle(order)
            self._known_order = ((count, epoch), order)
        return self._known_order[1]

    def _set_lr(self, step: int) -> None:
        factor = lr_factor(self.settings.optimizer, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * factor

    # -- supervised ------------------------------------------------------------------------------------------------

    def _sft_step(self, items: list[Item]) -> dict[str, float]:
        assert self.sft is not None
        policy, demonstration = self.t.policy, self.t.recipe.data.demonstration
        with self._timed("model"):
            prompts, prompt_mask = pad([item["prompt_ids"] for item in items], policy.pad, left=not policy.is_seq2seq)
            ids = [
                [*policy.tokenizer(str(item[demonstration]), add_special_tokens=False)["input_ids"], policy.end]
                for item in items
            ]
            tokens, mask = pad(ids, policy.pad, left=False)
            batch = Batch(prompts, prompt_mask, tokens, mask, torch.arange(len(items))).to(policy.device)
            count = float(mask.sum())
            policy.train()
            policy.temperature, loss_sum = 1.0, 0.0
            for rows in torch.arange(len(items), device=policy.device).split(self.sft.micro_batch):
                part = batch.rows(rows)
                loss = -(self.model("logprobs", part, share=False) * part.mask).sum() / count
                self.t.accelerator.backward(loss)
                loss_sum += float(loss.detach())
            norm = self._optimizer_step()
        return {"train/loss": loss_sum, "train/grad_norm": norm, "train/lr": self.optimizer.param_groups[0]["lr"]}

    # -- reinforcement ---------------------------------------------------------------------------------------------

    def _set_up_rl(self, rl: Rl) -> None:
        t = self.t
        self.plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
        t.policy.temperature = rl.rollout.temperature
        if self.plan.segments is not None and t.policy.value_head is None:
            t.policy.add_value_head()
        if self.plan.needs_reference:
            self.reference = checkpoint.reference(t, self.number)
        self.embedder = None if self.plan.similarity is None else load_embedder(self.plan.similarity)
        if self.start and self.plan.threshold is not None:
            self.plan.threshold.load_state_dict({"value": t.resumed.threshold})

    def _rl_step(self, items: list[Item], step: int) -> dict[str, float]:
        assert self.rl is not None and self.plan is not None
        t, policy, settings = self.t, self.t.policy, self.rl.rollout
        policy.temperature = settings.temperature
        generator = torch.Generator(policy.device).manual_seed(t.seed_of("sampling", self.number, step))
        with self._timed("generate"):
            rollout = roll_out(
                policy, items, settings.group_size, max_new_tokens=settings.max_new_tokens, generator=generator,
                temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
                min_new_tokens=settings.min_new_tokens, batch=settings.batch,
            )  # fmt: skip
        with self._timed("reward"):
            rewards, skipped = score(t.rewards, t.functions, rollout)
            rewards = rewards.to(policy.device, torch.float32)
            weights = torch.tensor([each.weight for each in t.rewards], device=policy.device)
        with self._timed("embed"):
            embeddings = None if self.embedder is None else self.embedder(rollout.texts).to(policy.device)
        with self._timed("model"):
            reference = self._reference_logprobs(rollout, step)
            values = self._values(rollout) if self.plan.segments is not None else None
        with self._timed("advantage"):
            found = credit(self.plan, rollout, rewards, weights, embeddings, values)
            if settings.mask_truncated:
                mask = rollout.batch.mask if found.mask is None else found.mask
                found.mask = mask & ~rollout.truncated[:, None]
            metrics = rollout_metrics(rollout, total(rewards, weights), rewards, t.rewards, found, reference)
            metrics["rewards/skipped"] = float(skipped)
        metrics |= self._update(rollout, found, reference, values, step)
        t.log.samples(step, [
            {"prompt": rollout.items[i // settings.group_size]["prompt"], "response": rollout.texts[i],
             "rewards": rewards[i].tolist(), "advantage": float(found.advantages[i].sum())}
            for i in range(min(len(rollout.texts), t.recipe.logging.samples))
        ])  # fmt: skip
        return metrics

    def _micro_batches(self, rows: Tensor) -> Iterator[Tensor]:
        assert self.rl is not None
        yield from rows.split(self.rl.micro_batch)

    def _reference_logprobs(self, rollout: Rollout, step: int) -> Tensor | None:
        if self.reference is None:
            return None
        found = torch.zeros_like(rollout.logprobs)
        rows = torch.arange(len(found), device=found.device)
        for some in self._micro_batches(rows):
            part = rollout.batch.rows(some)
            of_part = self.reference.logprobs(part)
            found[some, : of_part.shape[1]] = of_part
            if step == 1 and self.t.recipe.model.reference_model_path is None:
                with evaluating(self.t.policy), torch.no_grad():
                    apart = float((self.t.policy("logprobs", part) - of_part).abs().max())
                if apart != 0:
                    raise RuntimeError(
                        f"the reference must be the policy before the first step, got log-probs {apart} apart"
                    )
        return found

    @torch.no_grad()
    def _values(self, rollout: Rollout) -> Tensor:
        found = torch.zeros_like(rollout.logprobs)
        with evaluating(self.t.policy):
            for some in self._micro_batches(torch.arange(len(found), device=found.device)):
                of_part = self.t.policy("values", rollout.batch.rows(some))
                found[some, : of_part.shape[1]] = of_part
        return torch.where(rollout.batch.mask, found, 0)

    def _update(
        self, rollout: Rollout, found: Credit, reference: Tensor | None, values: Tensor | None, step: int
    ) -> dict[str, float]:
        assert self.rl is not None and self.plan is not None
        rl, device = self.rl, rollout.logprobs.device
        policy = self.t.policy
        policy.train(rl.dropout)
        sums, norms, losses = [], [], []
        shuffled = torch.Generator().manual_seed(self.t.seed_of("minibatches", self.number, step))
        for _ in range(rl.epochs):
            prompts = torch.randperm(len(rollout.items), generator=shuffled)
            for some in prompts.chunk(rl.minibatches):
                rows = (
                    (some.sort().values[:, None] * rollout.group_size + torch.arange(rollout.group_size))
                    .flatten()
                    .to(device)
                )
                rows = rows[self._matters(rollout, found)[rows]]
                if len(rows) == 0:
                    self.t.log.event("minibatch skipped: no response has an advantage", step=step)
                    continue
                with self._timed("model"):
                    metrics, loss = self._minibatch(rollout, found, reference, values, rows, step)
                    norms.append(self._optimizer_step())
                sums.append(metrics)
                losses.append(loss)
        policy.eval()
        if not sums:
            return {"train/skipped": 1.0}
        return _loss_metrics(sums, losses, norms, self.plan) | {
            "train/skipped": 0.0, "train/lr": self.optimizer.param_groups[0]["lr"],
        }  # fmt: skip

    def _matters(self, rollout: Rollout, found: Credit) -> Tensor:
        """Responses that the loss is taken over: without an advantage there is nothing to learn but to stay."""
        assert self.plan is not None
        mask = rollout.batch.mask if found.mask is None else found.mask & rollout.batch.mask
        some = mask.any(1)
        if self.plan.settings.drop_flat and self.plan.segments is None:
            advantages = found.advantages if found.advantages.dim() == 1 else found.advantages.abs().sum(1)
            some = some & (advantages.view(-1, rollout.group_size) != 0).any(1).repeat_interleave(rollout.group_size)
        return some

    def _minibatch(
        self, rollout: Rollout, found: Credit, reference: Tensor | None, values: Tensor | None, rows: Tensor, step: int
    ) -> tuple[Tensor, float]:
        """Gradients of one optimizer step, over micro-batches that divide by the counts of the whole."""
        assert self.rl is not None and self.plan is not None
        mask = rollout.batch.mask if found.mask is None else found.mask & rollout.batch.mask
        counts = {"tokens": float(mask[rows].sum()), "rows": float(len(rows))}
        if found.segments is not None:
            of_rows = torch.where(mask[rows], found.segments[rows], -1)
            counts["segments"] = float((of_rows.amax(1) + 1).sum())
        critic = self.plan.settings.critic
        sums, loss_sum = [], 0.0
        for some in self._micro_batches(rows):
            part = rollout.batch.rows(some)
            cut = slice(part.tokens.shape[1])
            advantages = found.advantages[some] if found.advantages.dim() == 1 else found.advantages[some, cut]
            given: dict[str, Any] = {"segments": found.segments[some, cut]} if found.segments is not None else {}
            if reference is not None:
                given["ref_logprobs"] = reference[some, cut]
            loss, guessed = self.model(
                "loss", part, share=self._shares(), config=self.plan.loss, old_logprobs=rollout.logprobs[some, cut],
                advantages=advantages, mask=mask[some, cut], normalizer=counts, return_entropy=True,
                with_values=values is not None, **given,
            )  # fmt: skip
            objective = loss.loss
            if values is not None and guessed is not None and found.returns is not None:
                error = _value_error(guessed, values[some, cut], found.returns[some, cut], critic)
                of_critic = (error * part.mask).sum() / float(rollout.batch.mask[rows].sum())
                warm = critic is not None and step <= critic.warmup
                objective = of_critic if warm else objective + (0.5 if critic is None else critic.coef) * of_critic
            self.t.accelerator.backward(objective)
            sums.append(loss.metrics.tensor)
            loss_sum += float(objective.detach())
        return _merged(sums), loss_sum

    def _shares(self) -> bool:
        assert self.rl is not None
        return self.rl.share_prompts and not self.t.recipe.model.gradient_checkpointing

    def _optimizer_step(self) -> float:
        """The norm of the gradient before it was clipped. A gradient that is not finite ends the run."""
        most = self.settings.optimizer.grad_clip
        norm = float(self.t.accelerator.clip_grad_norm_(self.model.parameters(), most if most > 0 else math.inf))
        if not math.isfinite(norm):
            raise FloatingPointError(f"phase {self.number}: the gradient's norm must be finite, got {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.t.seconds[what] += time.perf_counter() - began


SHOWN = (("loss", "train/loss"), ("reward", "rewards/mean"), ("KL", "train/kl_mean"))


def lr_factor(settings: Optimizer, step: int, steps: int) -> float:
    """Of the full learning rate, at a step counted from 1."""
    if step <= settings.warmup:
        return step / (settings.warmup + 1)
    done = (step - settings.warmup - 1) / max(steps - settings.warmup, 1)
    if settings.schedule == "constant":
        return 1.0
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.final + (1 - settings.final) * left


def _parameter_groups(policy: Policy, settings: Optimizer, rl: Rl | None) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and the value head has a learning rate of its own."""
    groups: dict[str, list[Tensor]] = {"matrices": [], "vectors": [], "critic": []}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "critic" if name.startswith("value_head") else "matrices" if parameter.dim() > 1 else "vectors"
        groups[kind].append(parameter)
    critic = rl.algorithm.critic if rl is not None else None
    lr = {"matrices": settings.lr, "vectors": settings.lr, "critic": critic.lr if critic is not None else 1e-3}
    decay = {"matrices": settings.weight_decay, "vectors": 0.0, "critic": 0.0}
    return [
        {"params": some, "lr": lr[kind], "full_lr": lr[kind], "weight_decay": decay[kind]}
        for kind, some in groups.items()
        if some
    ]


def _value_error(guessed: Tensor, before: Tensor, returns: Tensor, critic: Any) -> Tensor:
    error = (guessed - returns).square() / 2
    if critic is None or critic.clip is None:
        return error
    limited = before + (guessed - before).clamp(-critic.clip, critic.clip)
    return torch.maximum(error, (limited - returns).square() / 2)


def _merged(tensors: list[Tensor]) -> Tensor:
    """Sums of sums, least of leasts, most of mosts."""
    stacked = torch.stack(tensors)
    merged = stacked.sum(0)
    for i, name in enumerate(METRICS):
        if name.endswith("_min"):
            merged[i] = stacked[:, i].amin()
        elif name.endswith("_max"):
            merged[i] = stacked[:, i].amax()
    return merged


def _loss_metrics(sums: list[Tensor], losses: list[float], norms: list[float], plan: Plan) -> dict[str, float]:
    m = dict(zip(METRICS, _merged(sums).tolist(), strict=True))
    tokens, terms, count = max(m["tokens"], 1), max(m["terms"], 1), len(sums)
    found = {
        "train/total_loss": sum(losses) / count,
        "train/policy_loss": m["policy_loss"] / count,
        "train/entropy": m["entropy_sum"] / tokens,
        "train/ratio_mean": m["ratio_sum"] / terms,
        "train/ratio_min": m["ratio_min"],
        "train/ratio_max": m["ratio_max"],
        "train/clip_low": m["low_clipped"] / terms,
        "train/clip_high": m["high_clipped"] / terms,
        "train/grad_norm": sum(norms) / count,
        "train/optimizer_steps": float(count),
        "train/tokens": m["tokens"] / count,
    }
    if plan.loss.kl != "none":
        found |= {"train/kl_mean": m["kl_sum"] / tokens, "train/kl_penalty": plan.loss.kl_coef * m["kl_loss"] / count}
    return found


def rollout_metrics(
    rollout: Rollout, totals: Tensor, rewards: Tensor, settings: list[Reward], found: Credit, reference: Tensor | None
) -> dict[str, float]:
    """Of rewards, groups, lengths and advantages. What has no value is NaN."""
    given = totals[~totals.isnan()].double()
    quarters = (
        given.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=given.device))
        if len(given)
        else None
    )
    of_group = totals.view(-1, rollout.group_size)
    per_row = found.advantages if found.advantages.dim() == 1 else found.advantages.sum(1)
    nan = math.nan
    metrics = {
        "rewards/mean": float(given.mean()) if len(given) else nan,
        "rewards/std": float(given.std()) if len(given) > 1 else nan,
        "rewards/min": float(given.min()) if len(given) else nan,
        "rewards/max": float(given.max()) if len(given) else nan,
        "rewards/q25": float(quarters[0]) if quarters is not None else nan,
        "rewards/median": float(quarters[1]) if quarters is not None else nan,
        "rewards/q75": float(quarters[2]) if quarters is not None else nan,
        "rewards/group_std": float(of_group.std(1).nanmean()) if rollout.group_size > 1 else nan,
        "group_stats/num_groups": float(len(rollout.items)),
        "group_stats/avg_group_size": float(rollout.group_size),
        "group_stats/flat_groups": float((of_group.amax(1) == of_group.amin(1)).sum()),
        "train/advantages_mean": float(per_row.double().mean()),
        "train/advantages_std": float(per_row.double().std()) if len(per_row) > 1 else nan,
        "train/nonzero_advantages": float((per_row != 0).double().mean()),
        "rollout/length_mean": float(rollout.lengths.double().mean()),
        "rollout/length_max": float(rollout.lengths.max()),
        "rollout/truncated": float(rollout.truncated.double().mean()),
    }
    for i, setting in enumerate(settings if len(settings) > 1 else []):
        metrics[f"rewards/{setting.name}"] = float(rewards[:, i].nanmean())
    if reference is not None:
        apart = (rollout.logprobs - reference)[rollout.batch.mask].double()
        estimate = torch.expm1(-apart) + apart  # k3, of the policy that sampled
        metrics |= {"train/kl_rollout": float(estimate.mean()), "train/kl_std": float(estimate.std())}
    return metrics | found.metrics


def train(recipe: Recipe, resume: bool = False) -> dict[str, float]:
    return Trainer(recipe).run(resume)


def evaluate_model(recipe: Recipe, path: str, split: str) -> Result:
    """Another model on a split of the recipe's data."""
    other = dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, path=path, lora=None),
        logging=dataclasses.replace(recipe.logging, to=[]),
    )  # fmt: skip
    result = Trainer(other).evaluation_of(split)
    if result is None:
        raise ValueError(f"data: the split {split!r} has no usable line")
    return result
