"""Reinforcement steps: sample, score, credit, update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.functional.policy_loss_metrics import merged
from grpo_trainer import checkpoint, processes
from grpo_trainer.algorithm import Credit, Plan, credit, total
from grpo_trainer.embed import Embedder, embedded, load_embedder
from grpo_trainer.figures import loss_metrics, rollout_metrics
from grpo_trainer.maps import map_line
from grpo_trainer.model import Reference, evaluating, prompt_text, set_training
from grpo_trainer.phase import PhaseRun, summed
from grpo_trainer.recipe import Critic, Reward, Rl
from grpo_trainer.rewards import RewardFunction, score
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.tasks.base import Item


class RlRun(PhaseRun):
    kind, split = "rl", "train"
    settings: Rl
    plan: Plan
    reference: Reference | None = None
    embedder: Embedder | None = None
    rewards: list[Reward]
    functions: list[RewardFunction]

    @property
    def items_a_step(self) -> int:
        return self.settings.rollout.prompts

    @property
    def evaluates_every(self) -> int:
        return self.t.recipe.evaluation.every

    @property
    def critic_lr(self) -> float:
        return (self.settings.algorithm.critic or Critic()).lr

    def set_up(self) -> None:
        t, rl = self.t, self.settings
        self.plan = Plan.of(rl.algorithm, rl.rollout.max_new_tokens)
        self.rewards, self.functions = t.rewards_of(self.number)
        t.policy.temperature = rl.rollout.temperature
        if self.plan.segments is not None and not t.policy.has_values:
            separate = (rl.algorithm.critic or Critic()).separate
            t.policy.add_critic() if separate else t.policy.add_value_head()
        if self.plan.needs_reference:
            self.reference = checkpoint.reference(t, self.number)
        self.embedder = None if self.plan.similarity is None else load_embedder(self.plan.similarity)
        if self.start and self.plan.threshold is not None:
            self.plan.threshold.load_state_dict({"value": t.resumed.threshold})

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        t, policy, settings = self.t, self.t.policy, self.settings.rollout
        policy.temperature = settings.temperature
        generator = torch.Generator(policy.device).manual_seed(t.seed_of("sampling", self.number, step))
        with self.timed("generate"):
            rollout = self._roll_out(items, generator)
        with self.timed("reward"):
            rewards, skipped = score(self.rewards, self.functions, rollout)
            rewards = rewards.to(policy.device, torch.float32)
            weights = torch.tensor([each.weight for each in self.rewards], device=policy.device)
        with self.timed("embed"):
            embeddings = None if self.embedder is None else self._embedded(self.embedder, rollout).to(policy.device)
        with self.timed("model"):
            reference = self._reference_logprobs(rollout, step)
            values = self._values(rollout) if self.plan.segments is not None else None
        with self.timed("advantage"):
            found = credit(self.plan, rollout, rewards, weights, embeddings, values)
            tau = None if self.plan.threshold is None else self.plan.threshold.value
            segments = [] if found.segments is None else [found.segments]
            processes.agree(f"advantages of step {step}", found.advantages, *segments, tau)
            if settings.mask_truncated:
                mask = rollout.batch.mask if found.mask is None else found.mask
                found.mask = mask & ~rollout.truncated[:, None]
            metrics = rollout_metrics(rollout, total(rewards, weights), rewards, self.rewards, found, reference)
            metrics["rewards/skipped"] = float(skipped)
            if self.embedder is not None and self.embedder.pool is not None:
                metrics["embedder/restarts"] = float(self.embedder.pool.restarts)
        metrics |= self._update(rollout, found, reference, values, step)
        with processes.together():
            t.log.samples(self.number, step, [
                {"prompt": rollout.items[i // settings.group_size]["prompt"], "response": rollout.texts[i],
                 "rewards": rewards[i].tolist(), "advantage": float(found.advantages[i].sum())}
                for i in range(min(len(rollout.texts), t.recipe.logging.samples))
            ])  # fmt: skip
        return metrics

    def on_evaluation(self, step: int) -> None:
        """A map of the responses to one prompt, the same each time: where they lie among each other."""
        if self.embedder is None or self.plan.similarity is None:
            return
        t = self.t
        generator = torch.Generator(t.policy.device).manual_seed(t.seed_of("map", self.number))
        some = self._roll_out(t.items("train")[:1], generator)
        rewards, _ = score(self.rewards, self.functions, some)
        embeddings = self._embedded(self.embedder, some)
        clusters = gk.similarity_groups(embeddings, some.group_size, config=self.plan.clustering)
        worth = total(rewards, torch.tensor([each.weight for each in self.rewards]))
        line = map_line(step, prompt_text(some.items[0]["prompt"]), some.texts, embeddings, clusters.labels, worth)
        with processes.together():
            t.log.map(self.number, line)

    def close(self) -> None:
        if self.embedder is not None:
            self.embedder.close()

    def _embedded(self, embedder: Embedder, rollout: Rollout) -> Tensor:
        return embedded(embedder, rollout.texts, rollout.group_size)

    def _roll_out(self, items: list[Item], generator: torch.Generator) -> Rollout:
        settings = self.settings.rollout
        return roll_out(
            self.t.policy, items, settings.group_size, max_new_tokens=settings.max_new_tokens, generator=generator,
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
            min_new_tokens=settings.min_new_tokens, batch=settings.batch,
        )  # fmt: skip

    def _reference_logprobs(self, rollout: Rollout, step: int) -> Tensor | None:
        if self.reference is None:
            return None
        found = torch.zeros_like(rollout.logprobs)
        rows = torch.arange(len(found), device=found.device)
        for some, counts in self.pieces(rows, self.settings.micro_batch):
            part = rollout.batch.rows(some)
            of_part = self.reference.logprobs(part)
            if counts:
                found[some, : of_part.shape[1]] = of_part
            if step == 1 and self.t.recipe.model.reference_model_path is None:
                with evaluating(self.t.policy), torch.no_grad():
                    apart = float((self.t.policy("logprobs", part) - of_part).abs().max())
                if apart != 0:
                    raise RuntimeError(
                        f"the reference must be the policy before the first step, got log-probs {apart} apart"
                    )
        return processes.total(found)

    @torch.no_grad()
    def _values(self, rollout: Rollout) -> Tensor:
        found = torch.zeros_like(rollout.logprobs)
        with evaluating(self.t.policy):
            for some, counts in self.pieces(torch.arange(len(found), device=found.device), self.settings.micro_batch):
                of_part = self.t.policy("values", rollout.batch.rows(some))
                if counts:
                    found[some, : of_part.shape[1]] = of_part
        return torch.where(rollout.batch.mask, processes.total(found), 0)

    def _update(
        self, rollout: Rollout, found: Credit, reference: Tensor | None, values: Tensor | None, step: int
    ) -> dict[str, float]:
        rl, device = self.settings, rollout.logprobs.device
        policy = self.t.policy
        set_training(policy, rl.dropout)
        sums, norms, losses = [], [], []
        shuffled = torch.Generator().manual_seed(self.t.seed_of("minibatches", self.number, step))
        for _ in range(rl.epochs):
            prompts = torch.randperm(len(rollout.items), generator=shuffled)
            for some in prompts.tensor_split(rl.minibatches):
                rows = (
                    (some.sort().values[:, None] * rollout.group_size + torch.arange(rollout.group_size))
                    .flatten()
                    .to(device)
                )
                rows = rows[self._matters(rollout, found)[rows]]
                if len(rows) == 0:
                    self.t.log.event("minibatch skipped: no response has an advantage", step=step)
                    continue
                with self.timed("model"):
                    metrics, loss = self._minibatch(rollout, found, reference, values, rows, step)
                    norms.append(self.optimizer_step())
                sums.append(metrics)
                losses.append(loss)
        policy.eval()
        if not sums:
            return {"train/skipped": 1.0}
        return loss_metrics(sums, losses, norms, self.plan) | {
            "train/skipped": 0.0, "train/lr": self.optimizer.param_groups[0]["lr"],
        }  # fmt: skip

    def _matters(self, rollout: Rollout, found: Credit) -> Tensor:
        """Responses that the loss is taken over: without an advantage there is nothing to learn but to stay."""
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
        mask = rollout.batch.mask if found.mask is None else found.mask & rollout.batch.mask
        counts = {"tokens": float(mask[rows].sum()), "rows": float(len(rows))}
        if found.segments is not None:
            of_rows = torch.where(mask[rows], found.segments[rows], -1)
            counts["segments"] = float((of_rows.amax(1) + 1).sum())
        critic = self.plan.settings.critic or Critic()
        is_warm_up = values is not None and step <= critic.warmup
        fitted = "none" if values is None else "head" if is_warm_up else "all"
        sums, losses = [], []
        pieces = self.pieces(rows, self.settings.micro_batch)
        for some, is_counted in pieces:
            part = rollout.batch.rows(some)
            cut = slice(part.tokens.shape[1])
            advantages = found.advantages[some] if found.advantages.dim() == 1 else found.advantages[some, cut]
            given: dict[str, Any] = {"segments": found.segments[some, cut]} if found.segments is not None else {}
            if reference is not None:
                given["ref_logprobs"] = reference[some, cut]
            loss, guessed = self.model(
                "loss", part, share=self._shares(), config=self.plan.loss, old_logprobs=rollout.logprobs[some, cut],
                advantages=advantages, mask=mask[some, cut], normalizer=counts, return_entropy=True,
                values=fitted, **given,
            )  # fmt: skip
            objective = loss.loss
            if values is not None and guessed is not None and found.returns is not None:
                error = _value_error(guessed, values[some, cut], found.returns[some, cut], critic)
                of_critic = (error * part.mask).sum() / float(rollout.batch.mask[rows].sum())
                objective = of_critic if is_warm_up else objective + critic.coef * of_critic
            self.backward(objective, is_counted)
            if is_counted:
                sums.append(loss.metrics.tensor)
                losses.append(objective.detach())
        return merged(pieces.whole(sums)), summed(pieces.whole(losses))

    def _shares(self) -> bool:
        return self.settings.share_prompts and not self.t.recipe.model.gradient_checkpointing


def _value_error(guessed: Tensor, before: Tensor, returns: Tensor, critic: Critic) -> Tensor:
    error = (guessed - returns).square() / 2
    if critic.clip is None:
        return error
    limited = before + (guessed - before).clamp(-critic.clip, critic.clip)
    return torch.maximum(error, (limited - returns).square() / 2)
