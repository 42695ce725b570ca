"""Training, from top to bottom: the loop, a step of reinforcement learning, its update, and a supervised step.

All randomness of a step (data order, sampling, dropout) follows from the seed and the step's number, so a run resumed
from a checkpoint repeats the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import checkpoint, distributed, interruption, sft
from grpo_trainer.algorithm import Credit, assign_credit, minibatch_counts, rows_in_loss, total_rewards
from grpo_trainer.data import Batch
from grpo_trainer.embed import embed_all, load_embedder
from grpo_trainer.engine import Engine
from grpo_trainer.evaluate import evaluate_and_log
from grpo_trainer.metrics import counter_metrics, loss_metrics, rollout_metrics, sampling_metrics
from grpo_trainer.monitor import Monitor
from grpo_trainer.optimizer import make_optimizer, set_lr
from grpo_trainer.policy import evaluating, set_training
from grpo_trainer.recipe import Critic, Optimizer, Recipe, Rl, Sft
from grpo_trainer.rewards import component_means, score
from grpo_trainer.rollout import Rollout
from grpo_trainer.setup import Run, begin, set_up
from grpo_trainer.tasks import Item

TakeStep = Callable[[Run, list[Item], int], dict[str, float]]


def train(
    recipe: Recipe,
    resume: bool = False,
    fresh: bool = False,
    *,
    model: Any = None,
    tokenizer: Any = None,
    reference: Any = None,
) -> dict[str, float]:
    """Trains a recipe: supervised fine-tuning, then reinforcement learning, as far as it has them.

    Args:
        recipe: the recipe.
        resume: continue from the last checkpoint in the recipe's folder.
        fresh: delete an earlier run in the recipe's folder.
        model: a loaded model of transformers that is trained in place of `model.path`; a resumed run needs it again.
        tokenizer: its tokenizer.
        reference: a model that the KL term is measured from, of the same vocabulary; None: as in the recipe.

    Returns:
        Metrics of the final evaluation.
    """
    if resume and fresh:
        raise ValueError("train: resume and fresh must not both be True, as fresh deletes the run to resume")
    run = set_up(recipe, model, tokenizer, reference)
    backend = contextlib.nullcontext() if recipe.backend == "auto" else gk.use_backend(recipe.backend)
    with contextlib.closing(run), backend:
        phase, step = begin(run, resume, fresh)
        if recipe.sft is not None and phase == "sft":
            fine_tune(run, recipe.sft, step)
        if recipe.rl is not None:
            reinforce(run, recipe.rl, step if phase == "rl" else 0)
            return evaluate_and_log(run, "test", "rl", recipe.rl.steps)
        return evaluate_and_log(run, "test", "sft", 0 if recipe.sft is None else recipe.sft.steps)


def take_steps(run: Run, phase: str, settings: Sft | Rl, start: int, take_step: TakeStep) -> None:
    """Takes all steps after `start`, with logs, checkpoints and evaluations."""
    recipe, data = run.recipe, run.items("train" if isinstance(settings, Rl) else "sft")
    per_step = settings.rollout.prompts if isinstance(settings, Rl) else settings.batch
    done = saved = start

    def evaluate_if_due(step: int) -> None:
        if step in (0, settings.steps) or (isinstance(settings, Rl) and is_due(step, recipe.evaluation.every)):
            evaluate_and_log(run, "validation", phase, step)

    try:
        evaluate_if_due(start)
        for step in range(start + 1, settings.steps + 1):
            # processes hold different rows and need different dropout masks
            torch.manual_seed(recipe.seed_of("step", phase, step, *[distributed.rank()] * (distributed.rank() > 0)))
            set_lr(run.optimizer, settings.optimizer, step, settings.steps)
            run.seconds.clear()
            began = time.perf_counter()
            metrics = take_step(run, items_of_step(recipe, phase, data, per_step, step), step)
            metrics["time/step"] = time.perf_counter() - began
            metrics |= {f"time/{name}": seconds for name, seconds in run.seconds.items()}
            with distributed.fail_together():
                run.log.metrics(phase, step, metrics)
                run.log.progress(phase, step, settings.steps, metrics)
            done = step
            if step == settings.steps or is_due(step, recipe.checkpoints.every):
                save(run, phase, step)
                saved = step
            interruption.stop_if_asked()
            evaluate_if_due(step)
    except interruption.Stopped:
        if done > saved:
            save(run, phase, done)
        raise
    finally:
        run.log.close_progress()


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def items_of_step(recipe: Recipe, phase: str, data: list[Item], count: int, step: int) -> list[Item]:
    """Data of a step: each epoch visits every item once, in a new order."""
    items, order, last_epoch = [], list(range(len(data))), -1
    for i in range((step - 1) * count, step * count):
        epoch = i // len(data)
        if epoch != last_epoch:
            order, last_epoch = list(range(len(data))), epoch
            random.Random(recipe.seed_of("order", phase, epoch)).shuffle(order)
        items.append(data[order[i % len(data)]])
    return items


def save(run: Run, phase: str, step: int) -> None:
    threshold = None if run.plan is None or run.plan.threshold is None else run.plan.threshold.value
    scaler = run.scaler.state_dict()
    state = checkpoint.State(phase, step, threshold, scaler, torch.get_num_threads(), run.embedders, run.data)
    checkpoint.save(run.recipe, run.policy, run.optimizer, state, run.log)


# Reinforcement learning


def reinforce(run: Run, rl: Rl, start: int) -> None:
    """Takes the steps of reinforcement learning after `start`."""
    if start == 0:
        evaluate_and_log(run, "test", "rl", 0)  # compared with the final evaluation
    prepare_rl(run, start)
    if rl.rollout.prompts > (available := len(run.items("train"))):
        run.log.event("prompts occur more than once in a step", prompts=available)
        run.log.line(
            f"rl.rollout.prompts: {rl.rollout.prompts} of {available} prompts, so that some occur twice in a step"
        )
    take_steps(run, "rl", rl, start, rl_step)


def prepare_rl(run: Run, start: int) -> None:
    """Loads what the steps after `start` need: critic, optimizer, reference, embedder, engine."""
    rl, plan, policy, critic = run.rl, run.plan, run.policy, run.rl.algorithm.critic or Critic()
    policy.temperature = rl.rollout.temperature
    if plan.segments is not None and not policy.has_values:
        policy.add_critic() if critic.separate else policy.add_value_head()
    if plan.threshold is not None and start:
        assert run.resumed is not None
        plan.threshold.load_state_dict({"value": run.resumed.threshold})
    make_optimizer(run, rl.optimizer, critic.lr, start)
    if plan.needs_reference:
        if start == 0 and run.given_reference is None and run.recipe.model.reference_model_path is None:
            save(run, "rl", 0)  # the reference of a resumed run
        run.reference = checkpoint.load_reference(run.recipe, policy, start, run.given_reference)
    run.embedder = None if plan.similarity is None else load_embedder(plan.similarity)
    if rl.rollout.engine == "vllm":
        run.engine = Engine(policy, run.recipe.model, rl, "rl.rollout")
    run.monitor = Monitor(run.log)


def rl_step(run: Run, items: list[Item], step: int) -> dict[str, float]:
    """One step of GRPO: sample groups of responses, reward them, compare them, and update the policy."""
    rl, plan, policy = run.rl, run.plan, run.policy
    # 1. Roll out: a group of responses to each prompt.
    with run.timed("generate"):
        generator = torch.Generator(policy.device).manual_seed(run.recipe.seed_of("sampling", step))
        rollout = run.roll_out(items, generator)
    # 2. Reward: [N, R], NaN where a reward has no opinion.
    with run.timed("reward"):
        scores = score(run.rewards, rollout)
        rewards, weights = scores.values.to(policy.device, torch.float32), run.reward_weights.to(policy.device)
    # 3. Embed: similar responses to a prompt will form a group.
    with run.timed("embed"):
        embeddings = None
        if run.embedder is not None:
            embeddings = embed_all(run.embedder, rollout.texts, rollout.group_size).to(policy.device)
    # 4. Score: the tokens' log-probs by the policy and the reference, and the critic's values.
    with run.timed("model"):
        counted = rollout.batch.mask
        if rl.rollout.truncated == "leave_out":
            counted = counted & ~rollout.truncated[:, None]
        correction = correct_sampling(run, rollout, counted)
        counted = counted if correction is None else correction.mask
        reference = reference_logprobs(run, rollout, step)
        values = critic_values(run, rollout) if plan.segments is not None else None
    # 5. Credit: rewards become advantages within groups.
    with run.timed("advantage"):
        left_in = None if counted is rollout.batch.mask else counted
        credit = assign_credit(plan, rollout, rewards, weights, embeddings, values, left_in)
        threshold = None if plan.threshold is None else plan.threshold.value
        segments = [] if credit.segments is None else [credit.segments]
        distributed.assert_identical(f"advantages of step {step}", credit.advantages, *segments, threshold)
        if correction is not None and plan.correction.weights != "none":
            credit.is_weights = correction.weights
    # 6. Update: minibatches of prompts, an optimizer step for each.
    learned = update(run, rollout, credit, reference, values, step)
    # 7. Log.
    totals = total_rewards(rewards, weights)
    metrics = rollout_metrics(rollout, totals, rewards, run.rewards, credit, reference) | learned
    metrics["rewards/skipped"] = float(scores.skipped)
    means = component_means(run.rewards, scores.components)
    metrics |= {f"rewards/components/{name}": value for name, value in means.items()} | counter_metrics(run.rewards)
    if correction is not None:
        metrics |= sampling_metrics(correction.metrics)
    if run.embedder is not None and run.embedder.pool is not None:
        metrics["embedder/restarts"] = float(run.embedder.pool.restarts)
    if run.seconds["generate"] > 0:  # a benchmark times the parts by a clock of its own
        metrics["speed/tokens_per_second"] = float(rollout.lengths.sum()) / run.seconds["generate"]
    run.monitor.see(step, rollout, rewards, totals, credit, metrics)
    return metrics


@torch.no_grad()
def correct_sampling(run: Run, rollout: Rollout, counted: Tensor) -> gk.SamplingCorrection | None:
    """Scores tokens again if another engine has sampled them, whose mismatch it weighs, or the policy in halves.

    Logits of halves are rounded in sampling and not in the update, whose ratios would not start at 1.
    """
    if run.engine is None and not run.policy.computes_in_half:
        return None
    with evaluating(run.policy):
        scored = by_token(run, rollout, lambda part: run.policy("logprobs", part, share=shares_prompts(run)))
    by_engine, rollout.logprobs = rollout.logprobs, scored
    if run.engine is None:
        return None
    return gk.sampling_correction(scored, by_engine, mask=counted, config=run.plan.correction)


def shares_prompts(run: Run) -> bool:
    """Whether the update computes each prompt once for all its responses; in halves the other way rounds otherwise."""
    return run.rl.share_prompts and not run.recipe.model.gradient_checkpointing


def reference_logprobs(run: Run, rollout: Rollout, step: int) -> Tensor | None:
    """Log-probs [N, T] by the reference of the KL term, which must be the policy itself in the first step."""
    reference = run.reference
    if reference is None:
        return None
    is_own = run.given_reference is None and run.recipe.model.reference_model_path is None
    result = by_token(run, rollout, reference.logprobs)
    if step == 1 and is_own:
        with evaluating(run.policy), torch.no_grad():
            own = by_token(run, rollout, lambda part: run.policy("logprobs", part))
        if not torch.equal(own, result):
            difference = float((own - result).abs().max())
            raise RuntimeError(
                f"the reference must equal the policy before the first step, got log-probs that differ by {difference}"
            )
    return result


@torch.no_grad()
def critic_values(run: Run, rollout: Rollout) -> Tensor:
    with evaluating(run.policy):
        values = by_token(run, rollout, lambda part: run.policy("values", part))
    return torch.where(rollout.batch.mask, values, 0)


def by_token(run: Run, rollout: Rollout, compute: Callable[[Batch], Tensor]) -> Tensor:
    """Values [N, T] of the response tokens, computed by micro-batch."""
    values = torch.zeros_like(rollout.logprobs)
    for rows, counts in micro_batches(run, rollout.batch, None, run.rl.micro_batch):
        part = compute(rollout.batch.rows(rows))
        if counts:
            values[rows, : part.shape[1]] = part
    return distributed.all_reduce_sum(values)


def update(
    run: Run,
    rollout: Rollout,
    credit: Credit,
    reference: Tensor | None,
    values: Tensor | None,
    step: int,
) -> dict[str, float]:
    """Passes over the rollout in minibatches of prompts, with an optimizer step for each; returns its metrics."""
    rl, metric_tensors, norms, losses = run.rl, [], [], []
    generator = torch.Generator().manual_seed(run.recipe.seed_of("minibatches", step))
    has_signal = rows_in_loss(run.plan, credit, rollout.batch.mask, rollout.group_size)
    copies, device = torch.arange(rollout.group_size), rollout.logprobs.device
    set_training(run.policy, rl.dropout)
    for _ in range(rl.num_iterations):
        order = torch.randperm(len(rollout.items), generator=generator)
        for prompts in order.tensor_split(rl.minibatches):
            rows = (prompts.sort().values[:, None] * rollout.group_size + copies).flatten().to(device)
            rows = rows[has_signal[rows]]
            if len(rows) == 0:
                run.log.event("minibatch skipped: no response has an advantage", phase="rl", step=step)
                continue
            with run.timed("model"):
                metric_tensor, loss = accumulate(run, rollout, credit, reference, values, rows, step)
                norms.append(optimizer_step(run, rl.optimizer, step))
            if run.engine is not None:
                run.engine.is_current = False
            metric_tensors.append(metric_tensor)
            losses.append(loss)
    run.policy.eval()
    if not metric_tensors:
        return {"train/skipped": 1.0}
    metrics = loss_metrics(metric_tensors, losses, norms, run.plan)
    return metrics | {"train/skipped": 0.0, "train/lr": run.optimizer.param_groups[0]["lr"]}


def accumulate(
    run: Run,
    rollout: Rollout,
    credit: Credit,
    reference: Tensor | None,
    values: Tensor | None,
    rows: Tensor,
    step: int,
) -> tuple[Tensor, float]:
    """Accumulates the gradient of one optimizer step; micro-batches divide by the counts of the whole minibatch."""
    rl, mask = run.rl, credit.in_loss(rollout.batch.mask)
    normalizer = minibatch_counts(mask[rows], None if credit.segments is None else credit.segments[rows])
    critic = rl.algorithm.critic or Critic()
    is_warmup = values is not None and step <= critic.warmup
    metric_tensors, losses = [], []
    parts = micro_batches(run, rollout.batch, rows, rl.micro_batch)
    for micro_rows, counts in parts:
        part = rollout.batch.rows(micro_rows)
        width = slice(part.tokens.shape[1])

        def cut(tensor: Tensor | None, rows: Tensor = micro_rows, width: slice = width) -> Tensor | None:
            return tensor if tensor is None else tensor[rows] if tensor.dim() == 1 else tensor[rows, width]

        loss, predicted = run.policy(
            "loss",
            part,
            share=shares_prompts(run),
            config=run.plan.loss,
            old_logprobs=cut(rollout.logprobs),
            advantages=cut(credit.advantages),
            mask=cut(mask),
            segments=cut(credit.segments),
            is_weights=cut(credit.is_weights),
            ref_logprobs=cut(reference),
            normalizer=normalizer,
            return_entropy=True,
            values="none" if values is None else "head" if is_warmup else "all",
        )
        objective = loss.loss
        if values is not None and predicted is not None and credit.returns is not None:
            error = value_error(predicted, values[micro_rows, width], credit.returns[micro_rows, width], critic)
            critic_loss = (error * part.mask).sum() / float(rollout.batch.mask[rows].sum())
            objective = critic_loss if is_warmup else objective + critic.coef * critic_loss
        backward(run, objective, counts)
        if counts:
            metric_tensors.append(loss.metrics.tensor)
            losses.append(objective.detach())
    merged = gk.PolicyLossMetrics.merge(parts.all_gather(metric_tensors))
    return merged, math.fsum(parts.all_gather(losses).tolist())


def value_error(predicted: Tensor, old: Tensor, returns: Tensor, critic: Critic) -> Tensor:
    """Half the squared error of the values, clipped like PPO's if the critic has a clip range."""
    error = (predicted - returns).square() / 2
    if critic.clip is None:
        return error
    clipped = old + (predicted - old).clamp(-critic.clip, critic.clip)
    return torch.maximum(error, (clipped - returns).square() / 2)


# Supervised fine-tuning


def fine_tune(run: Run, settings: Sft, start: int) -> None:
    """Takes the steps of supervised fine-tuning after `start`."""
    sft.prepare(run)
    run.policy.temperature = 1.0
    make_optimizer(run, settings.optimizer, 0.0, start)
    take_steps(run, "sft", settings, start, sft_step)


def sft_step(run: Run, items: list[Item], step: int) -> dict[str, float]:
    """One step that raises the log-probs of demonstrations."""
    settings = run.recipe.sft
    assert settings is not None
    with run.timed("model"):
        batch, weights = sft.batch_of(run, items)
        normalizer = float((weights[:, None] * batch.mask).sum())
        run.policy.train()
        losses = []
        parts = micro_batches(run, batch, None, settings.micro_batch, share=False)
        for rows, counts in parts:
            part = batch.rows(rows)
            logprobs = run.policy("logprobs", part, share=False) * part.mask
            loss = -(weights[rows, None] * logprobs).sum() / normalizer
            backward(run, loss, counts)
            if counts:
                losses.append(loss.detach())
        norm = optimizer_step(run, settings.optimizer, step)
    total = math.fsum(parts.all_gather(losses).tolist())
    metrics = {"train/loss": total, "train/grad_norm": norm, "train/lr": run.optimizer.param_groups[0]["lr"]}
    if run.seconds["model"] > 0:  # a benchmark times the parts by a clock of its own
        metrics["speed/tokens_per_second"] = float(batch.mask.sum()) / run.seconds["model"]
    return metrics


# Optimizer


def micro_batches(
    run: Run, batch: Batch, rows: Tensor | None, size: int, share: bool | None = None
) -> distributed.MicroBatches:
    """Micro-batches of at most `size` rows on average: by length, or neighbours if that computes fewer tokens.

    Neighbours answer the same prompts, each of which is computed once in a micro-batch.
    """
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device) if rows is None else rows
    share = shares_prompts(run) if share is None else share
    lengths, prompt_of = batch.lengths[rows].cpu(), batch.prompt_of[rows].tolist()
    neighbours = torch.arange(len(rows)).split(distributed.MicroBatches.size(len(rows), size))
    dealt = [torch.tensor(part) for part in gk.deal_by_length(lengths, len(neighbours))]

    def tokens(part: Tensor) -> int:
        """Tokens that the model computes, with the padding."""
        prompt, response = lengths[part].amax(0).tolist()
        prompts = len({prompt_of[row] for row in part.tolist()}) if share else len(part)
        return prompts * int(prompt) + len(part) * int(response)

    parts = min((neighbours, dealt), key=lambda parts: sum(map(tokens, parts)))
    return distributed.MicroBatches([rows[part] for part in parts], equal_count=run.policy.is_sharded)


def backward(run: Run, loss: Tensor, counts: bool) -> None:
    """Accumulates gradients; with `counts` False, the pass only serves processes that wait for it."""
    run.scaler.scale(loss if counts else loss * 0).backward()


def optimizer_step(run: Run, settings: Optimizer, step: int) -> float:
    """Updates the weights and returns the gradient norm before clipping; a non-finite gradient ends the run."""
    max_norm, parameters = settings.grad_clip or math.inf, list(run.policy.parameters())
    distributed.all_reduce_gradients(parameters)
    run.scaler.unscale_(run.optimizer)
    if run.policy.is_sharded:
        norm = distributed.clip_sharded_grad_norm(parameters, max_norm)
    else:
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    distributed.assert_identical("the gradient's norm", norm)
    # fp16 gradients are expected to overflow now and then: the scaler skips the step and lowers the loss scale
    if not math.isfinite(norm):
        if not run.scaler.is_enabled():
            raise FloatingPointError(
                f"step {step}: the gradient's norm must be finite, got {norm}; lower the learning rate, or set "
                "model.dtype to bfloat16 or float32"
            )
        run.log.event("optimizer step skipped: the gradient overflowed", step=step)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return norm if math.isfinite(norm) else math.nan
