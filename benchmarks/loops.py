"""The hot path of the five earlier systems: full logits, scikit-learn prompt by prompt, loops in Python."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.segment_peers import by_token_loop
from benchmarks.similarity_peers import by_scikit_learn
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS


@contextlib.contextmanager
def instead_of_kernels() -> Iterator[None]:
    """Replaces the functions that the trainer calls in `grpo_kernels`. Without shrinkage, floor and weights of
    advantages the results are the same, except for the critic's targets and the metrics of the loss."""
    with contextlib.ExitStack() as stack:
        for function in (
            group_advantages,
            similarity_groups,
            endpoint_segments,
            token_logprobs,
            linear_logprobs,
            linear_policy_loss,
            similarity_metrics,
            segment_metrics,
        ):
            stack.enter_context(patch.object(gk, function.__name__, function))
        stack.enter_context(patch.object(gk.SegmentThreshold, "update", lambda *_: None))
        yield


def group_advantages(
    rewards: Tensor, size: int, *, subgroups: Tensor | None = None, config: gk.AdvantageConfig, **_: Any
) -> SimpleNamespace:
    """Group statistics from a dictionary of lists; a lone row gets 0."""
    totals = rewards.sum(1) if rewards.dim() == 2 else rewards
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i in range(len(totals)):
        members[(i // size, -1 if subgroups is None else int(subgroups[i].item()))].append(i)
    advantages = torch.zeros_like(totals)
    for rows in members.values():
        of_group = torch.stack([totals[i] for i in rows])
        mean = of_group.mean()
        deviation = of_group.std() if len(rows) > 1 else torch.tensor(1.0)
        for i in rows:
            advantages[i] = (totals[i] - mean) / (deviation + 1e-6) if len(rows) > 1 else 0.0
    return SimpleNamespace(advantages=advantages)


def similarity_groups(embeddings: Tensor, size: int, **_: Any) -> SimpleNamespace:
    labels = torch.cat([torch.as_tensor(cut.labels) for cut in by_scikit_learn(embeddings, size)])
    prompts = torch.arange(len(labels)) // size
    return SimpleNamespace(labels=labels, group_ids=prompts * size + labels)


def endpoint_segments(
    rewards: Tensor, logprobs: Tensor, old: Tensor, mask: Tensor, *, values: Tensor, config: gk.SegmentConfig, **_: Any
) -> SimpleNamespace:
    advantages, ends = by_token_loop(rewards, logprobs, old, values, mask, config)
    ids = torch.where(mask, ends.long().cumsum(1) - ends.long(), -1)
    return SimpleNamespace(advantages=advantages, endpoint_mask=ends, segment_ids=ids, returns=advantages + values)


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, **_: Any) -> SimpleNamespace:
    chosen = (logits.float() / temperature).log_softmax(-1)
    return SimpleNamespace(logprobs=chosen.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1) * (targets >= 0))


def linear_logprobs(hidden: Tensor, head: gk.LMHead, targets: Tensor, **kwargs: Any) -> SimpleNamespace:
    return token_logprobs(torch.nn.functional.linear(hidden, head.weight, head.bias), targets, **kwargs)


def linear_policy_loss(
    hidden: Tensor,
    head: gk.LMHead,
    tokens: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor,
    config: gk.LossConfig,
    ref_logprobs: Tensor | None = None,
    normalizer: dict[str, float],
    **_: Any,
) -> SimpleNamespace:
    """PPO with clipped token ratios and a k3 KL, by autograd; the logged entropy has its own softmax."""
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float() / temperature
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    probabilities = logits.softmax(-1)
    entropy = torch.logsumexp(logits, -1) - (probabilities * logits).sum(-1)
    ratio = (logprobs - old).exp()
    row_advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    clipped = ratio.clamp(1 - (config.clip_low or 0), 1 + (config.clip_high or 0))
    loss = -torch.minimum(ratio * row_advantages, clipped * row_advantages)
    if ref_logprobs is not None:
        distance = ref_logprobs - logprobs
        loss = loss + config.kl_coef * (distance.exp() - distance - 1)
    metrics = torch.zeros(len(METRICS), dtype=torch.float64)
    metrics[METRICS.index("tokens")] = mask.sum()
    metrics[METRICS.index("entropy_sum")] = entropy[mask].sum().item()
    return SimpleNamespace(loss=(loss * mask).sum() / normalizer["tokens"], metrics=SimpleNamespace(tensor=metrics))


def similarity_metrics(_: Any) -> dict[str, float]:
    return {}


def segment_metrics(*_: Any) -> dict[str, float]:
    return {}
