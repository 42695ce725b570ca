"""The reinforcement phase: sample, score, assign credit, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import checkpoint, distributed, interruption
from grpo_trainer.algorithm import Credit, Plan, assign_credit, minibatch_counts, rows_in_loss, total_rewards
from grpo_trainer.data import Batch, prompt_text
from grpo_trainer.embed import Embedder, embed_all, load_embedder
from grpo_trainer.engine import Engine, EngineError
from grpo_trainer.metrics import (
    counter_metrics,
    loss_metrics,
    rollout_metrics,
    sampling_metrics,
    segments_line,
    similarity_warnings,
)
from grpo_trainer.phases.base import PhaseRun, sum_losses
from grpo_trainer.policy import Reference, evaluating, set_training
from grpo_trainer.recipe import Critic, Reward, Rl
from grpo_trainer.report.projection import map_line
from grpo_trainer.rewards import RewardFunction, component_means, score, sum_counters
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.tasks.base import Item


class RlRun(PhaseRun):
    kind, split = "rl", "train"
    settings: Rl
    plan: Plan
    reference: Reference | None = None
    embedder: Embedder | None = None
    engine: Engine | None = None  # samples in place of the policy
    rewards: list[Reward]
    functions: list[RewardFunction]

    @property
    def items_per_step(self) -> int:
        return self.settings.rollout.prompts

    @property
    def evaluates_every(self) -> int:
        return self.trainer.recipe.evaluation.every

    @property
    def critic_lr(self) -> float:
        return (self.settings.algorithm.critic or Critic()).lr

    def set_up(self) -> None:
        trainer, rl = self.trainer, self.settings
        self.warned: set[str] = set()
        self.plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
        self.rewards, self.functions = trainer.rewards_of(self.number)
        self._note_repetition()
        self.unsummarised: list[dict[str, float]] = []
        trainer.policy.temperature = rl.rollout.temperature
        if self.plan.segments is not None and not trainer.policy.has_values:
            separate = (rl.algorithm.critic or Critic()).separate
            trainer.policy.add_critic() if separate else trainer.policy.add_value_head()
        if self.plan.needs_reference:
            self.reference = checkpoint.load_reference(trainer.recipe, trainer.policy, self.number, trainer.reference)
        self.embedder = None if self.plan.similarity is None else load_embedder(self.plan.similarity)
        if rl.rollout.engine == "vllm":
            self.engine = Engine(trainer.policy, trainer.recipe.model, rl, f"phases.{self.number}.rl.rollout")
        if self.start and self.plan.threshold is not None:
            assert trainer.resumed is not None
            self.plan.threshold.load_state_dict({"value": trainer.resumed.threshold})

    def _note_repetition(self) -> None:
        wanted, there = self.items_per_step, len(self.trainer.items(self.split))
        if wanted > there:
            self.trainer.log.event("prompts occur more than once in a step", phase=self.number, prompts=there)
            key = f"phases.{self.number}.rl.rollout.prompts"
            self.trainer.log.line(f"{key}: {wanted} of {there} prompts, so that some occur twice in a step")

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        trainer, policy, settings = self.trainer, self.trainer.policy, self.settings.rollout
        policy.temperature = settings.temperature
        generator = torch.Generator(policy.device).manual_seed(trainer.seed_of("sampling", self.number, step))
        with self.timed("generate"):
            rollout = self._roll_out(items, generator)
        with self.timed("reward"):
            rewards, skipped, components = score(self.rewards, self.functions, rollout)
            rewards = rewards.to(policy.device, torch.float32)
            weights = self._reward_weights().to(policy.device)
        with self.timed("embed"):
            embeddings = None if self.embedder is None else self._embed(self.embedder, rollout).to(policy.device)
        with self.timed("model"):
            mask = rollout.batch.mask
            if settings.truncated == "leave_out":
                mask = mask & ~rollout.truncated[:, None]
            correction = self._correct(rollout, mask)
            mask = mask if correction is None else correction.mask
            reference = self._reference_logprobs(rollout, step)
            values = self._values(rollout) if self.plan.segments is not None else None
        with self.timed("advantage"):
            counted = None if mask is rollout.batch.mask else mask
            credit = assign_credit(self.plan, rollout, rewards, weights, embeddings, values, counted)
            threshold = None if self.plan.threshold is None else self.plan.threshold.value
            segments = [] if credit.segments is None else [credit.segments]
            distributed.assert_identical(f"advantages of step {step}", credit.advantages, *segments, threshold)
            if correction is not None and self.plan.correction.weights != "none":
                credit.is_weights = correction.weights
            totals = total_rewards(rewards, weights)
            metrics = rollout_metrics(rollout, totals, rewards, self.rewards, credit, reference)
            if trainer.seconds["generate"] > 0:  # a benchmark times the parts by a clock of its own
                metrics["speed/tokens_per_second"] = float(rollout.lengths.sum()) / trainer.seconds["generate"]
            if correction is not None:
                metrics |= sampling_metrics(correction.metrics)
            metrics["rewards/skipped"] = float(skipped)
            means = component_means(self.rewards, components)
            metrics |= {f"rewards/components/{name}": value for name, value in means.items()}
            metrics |= counter_metrics(self.rewards, sum_counters(self.functions))
            if self.embedder is not None and self.embedder.pool is not None:
                metrics["embedder/restarts"] = float(self.embedder.pool.restarts)
        metrics |= self._update(rollout, credit, reference, values, step)
        self._log_samples(step, rollout, rewards, credit)
        self._log_histograms(step, rollout, totals, credit)
        self._warn(step, metrics)
        self._summarise(step, metrics)
        return metrics

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        """Logs each kind of unhealthy similarity groups once, and that a step has no rewards or no advantages."""
        with distributed.fail_together():
            mean = metrics["rewards/mean"]
            if math.isnan(mean) and "unscored" not in self.warned:
                self.warned.add("unscored")
                self.trainer.log.event("no response of a step has a reward", phase=self.number, step=step)
                self.trainer.log.line(f"step {step}: no response has a reward, so nothing is learned")
            elif metrics["train/skipped"] and not math.isnan(mean) and "skipped" not in self.warned:
                self.warned.add("skipped")
                text = f"step {step}: no response has an advantage, so the weights stay; mean reward {mean:g}"
                self.trainer.log.line(text)
            for kind, text in similarity_warnings(metrics).items():
                if kind not in self.warned:
                    self.warned.add(kind)
                    event = "similarity groups outside the healthy range"
                    self.trainer.log.event(event, phase=self.number, step=step, of=kind, text=text)

    def _log_samples(self, step: int, rollout: Rollout, rewards: Tensor, credit: Credit) -> None:
        with distributed.fail_together():
            samples = [
                {
                    "prompt": rollout.items[i // rollout.group_size]["prompt"],
                    "response": rollout.texts[i],
                    "rewards": rewards[i].tolist(),
                    "advantage": float(credit.advantages[i].sum()),
                }
                for i in range(min(len(rollout.texts), self.trainer.recipe.logging.samples))
            ]
            self.trainer.log.samples(self.number, step, samples)

    def _summarise(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a line about the token groups of the steps since the last one."""
        every = self.trainer.recipe.logging.summary
        if not every or "group/total_tokens" not in metrics:  # only group_ppo groups tokens
            return
        self.unsummarised.append(metrics)
        if step % every == 0 or step == self.settings.steps:
            first = step - len(self.unsummarised) + 1
            self.trainer.log.line(f"steps {first} to {step}: {segments_line(self.unsummarised)}")
            self.unsummarised.clear()

    def _log_histograms(self, step: int, rollout: Rollout, totals: Tensor, credit: Credit) -> None:
        if step % self.trainer.recipe.logging.every:
            return
        advantages = credit.advantages
        if advantages.dim() == 2:  # of tokens
            advantages = advantages[rollout.batch.mask if credit.mask is None else credit.mask]
        values = {"rewards": totals, "response_lengths": rollout.lengths, "advantages": advantages}
        with distributed.fail_together():
            self.trainer.log.histograms(self.number, step, {f"histograms/{name}": of for name, of in values.items()})

    def on_evaluation(self, step: int) -> None:
        """Logs a map of the responses to the first training prompt, sampled with the same random numbers each time."""
        if self.embedder is None or self.plan.similarity is None:
            return
        trainer = self.trainer
        generator = torch.Generator(trainer.policy.device).manual_seed(trainer.seed_of("map", self.number))
        rollout = self._roll_out(trainer.items("train")[:1], generator)
        rewards = score(self.rewards, self.functions, rollout).values
        embeddings = self._embed(self.embedder, rollout)
        clusters = gk.similarity_groups(embeddings, rollout.group_size, config=self.plan.clustering)
        totals = total_rewards(rewards, self._reward_weights())
        prompt = prompt_text(rollout.items[0]["prompt"])
        line = map_line(step, prompt, rollout.texts, embeddings, clusters.labels, totals)
        with distributed.fail_together():
            trainer.log.map(self.number, line)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if self.embedder is not None:
            self.embedder.close()

    def _reward_weights(self) -> Tensor:
        return torch.tensor([reward.weight for reward in self.rewards])

    def _embed(self, embedder: Embedder, rollout: Rollout) -> Tensor:
        return embed_all(embedder, rollout.texts, rollout.group_size)

    def _roll_out(self, items: list[Item], generator: torch.Generator) -> Rollout:
        if self.engine is not None:
            interruption.stop_if_asked()
            try:
                return self.engine.roll_out(items, generator)
            except (EngineError, distributed.ProcessError) as error:
                if interruption.signal_number() is None:
                    raise
                raise interruption.Stopped from error  # Ctrl-C in a terminal reaches the engine's processes, too
        return roll_out(self.trainer.policy, items, self.settings.rollout, generator)

    @torch.no_grad()
    def _correct(self, rollout: Rollout, mask: Tensor) -> gk.SamplingCorrection | None:
        """Scores the tokens of another engine again, and weighs the mismatch of those in the mask.

        None where the policy itself sampled.
        """
        if self.engine is None:
            return None
        with evaluating(self.trainer.policy):
            scored = self._by_token(rollout, lambda part: self.trainer.policy("logprobs", part))
        by_engine, rollout.logprobs = rollout.logprobs, scored
        return gk.sampling_correction(scored, by_engine, mask=mask, config=self.plan.correction)

    def _by_token(self, rollout: Rollout, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Values [N, T] of the response tokens, computed by micro-batch."""
        values = torch.zeros_like(rollout.logprobs)
        all_rows = torch.arange(len(values), device=values.device)
        for rows, counts in self.micro_batches(all_rows, self.settings.micro_batch):
            part = compute(rollout.batch.rows(rows))
            if counts:
                values[rows, : part.shape[1]] = part
        return distributed.all_reduce_sum(values)

    def _reference_logprobs(self, rollout: Rollout, step: int) -> Tensor | None:
        reference = self.reference
        if reference is None:
            return None
        is_own = self.trainer.reference is None and self.trainer.recipe.model.reference_model_path is None
        must_be_policy = step == 1 and is_own

        def compute(part: Batch) -> Tensor:
            logprobs = reference.logprobs(part)
            if must_be_policy:
                self._assert_is_policy(logprobs, part)
            return logprobs

        return self._by_token(rollout, compute)

    @torch.no_grad()
    def _assert_is_policy(self, reference: Tensor, part: Batch) -> None:
        with evaluating(self.trainer.policy):
            difference = float((self.trainer.policy("logprobs", part) - reference).abs().max())
        if difference != 0:
            raise RuntimeError(
                f"the reference must equal the policy before the first step, got log-probs that differ by {difference}"
            )

    @torch.no_grad()
    def _values(self, rollout: Rollout) -> Tensor:
        with evaluating(self.trainer.policy):
            values = self._by_token(rollout, lambda part: self.trainer.policy("values", part))
        return torch.where(rollout.batch.mask, values, 0)

    def _update(
        self, rollout: Rollout, credit: Credit, reference: Tensor | None, values: Tensor | None, step: int
    ) -> dict[str, float]:
        rl, device = self.settings, rollout.logprobs.device
        policy = self.trainer.policy
        set_training(policy, rl.dropout)
        metric_tensors, norms, losses = [], [], []
        generator = torch.Generator().manual_seed(self.trainer.seed_of("minibatches", self.number, step))
        has_signal = rows_in_loss(self.plan, credit, rollout.batch.mask, rollout.group_size)
        copies = torch.arange(rollout.group_size)
        for _ in range(rl.epochs):
            order = torch.randperm(len(rollout.items), generator=generator)
            for prompts in order.tensor_split(rl.minibatches):
                rows = (prompts.sort().values[:, None] * rollout.group_size + copies).flatten().to(device)
                rows = rows[has_signal[rows]]
                if len(rows) == 0:
                    event = "minibatch skipped: no response has an advantage"
                    self.trainer.log.event(event, phase=self.number, step=step)
                    continue
                with self.timed("model"):
                    metric_tensor, loss = self._minibatch(rollout, credit, reference, values, rows, step)
                    norms.append(self.optimizer_step())
                if self.engine is not None:
                    self.engine.is_current = False
                metric_tensors.append(metric_tensor)
                losses.append(loss)
        policy.eval()
        if not metric_tensors:
            return {"train/skipped": 1.0}
        metrics = loss_metrics(metric_tensors, losses, norms, self.plan)
        return metrics | {"train/skipped": 0.0, "train/lr": self.optimizer.param_groups[0]["lr"]}

    def _minibatch(
        self,
        rollout: Rollout,
        credit: Credit,
        reference: Tensor | None,
        values: Tensor | None,
        rows: Tensor,
        step: int,
    ) -> tuple[Tensor, float]:
        """Accumulates the gradient of one optimizer step; micro-batches divide by the counts of the whole minibatch."""
        mask = credit.in_loss(rollout.batch.mask)
        normalizer = minibatch_counts(mask[rows], None if credit.segments is None else credit.segments[rows])
        critic = self.plan.settings.critic or Critic()
        is_warmup = values is not None and step <= critic.warmup
        metric_tensors, losses = [], []
        micro_batches = self.micro_batches(rows, self.settings.micro_batch)
        for micro_rows, counts in micro_batches:
            part = rollout.batch.rows(micro_rows)
            width = slice(part.tokens.shape[1])
            is_per_row = credit.advantages.dim() == 1
            kwargs: dict[str, Any] = {}
            if credit.segments is not None:
                kwargs["segments"] = credit.segments[micro_rows, width]
            if credit.is_weights is not None:
                kwargs["is_weights"] = credit.is_weights[micro_rows, width]
            if reference is not None:
                kwargs["ref_logprobs"] = reference[micro_rows, width]
            loss, predicted = self.model(
                "loss",
                part,
                share=self.settings.share_prompts and not self.trainer.recipe.model.gradient_checkpointing,
                config=self.plan.loss,
                old_logprobs=rollout.logprobs[micro_rows, width],
                advantages=credit.advantages[micro_rows] if is_per_row else credit.advantages[micro_rows, width],
                mask=mask[micro_rows, width],
                normalizer=normalizer,
                return_entropy=True,
                values="none" if values is None else "head" if is_warmup else "all",
                **kwargs,
            )
            objective = loss.loss
            if values is not None and predicted is not None and credit.returns is not None:
                error = _value_error(predicted, values[micro_rows, width], credit.returns[micro_rows, width], critic)
                critic_loss = (error * part.mask).sum() / float(rollout.batch.mask[rows].sum())
                objective = critic_loss if is_warmup else objective + critic.coef * critic_loss
            self.backward(objective, counts)
            if counts:
                metric_tensors.append(loss.metrics.tensor)
                losses.append(objective.detach())
        merged = gk.PolicyLossMetrics.merge(micro_batches.all_gather(metric_tensors))
        return merged, sum_losses(micro_batches.all_gather(losses))


def _value_error(predicted: Tensor, old: Tensor, returns: Tensor, critic: Critic) -> Tensor:
    """Half the squared error of the values, clipped like PPO's if the critic has a clip range."""
    error = (predicted - returns).square() / 2
    if critic.clip is None:
        return error
    clipped = old + (predicted - old).clamp(-critic.clip, critic.clip)
    return torch.maximum(error, (clipped - returns).square() / 2)
