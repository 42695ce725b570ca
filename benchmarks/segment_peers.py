"""Endpoint segments by a loop over tokens, one tensor element at a time, as existing trainers do."""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels as gk


def by_token_loop(
    rewards: Tensor, logprobs: Tensor, old: Tensor, values: Tensor, mask: Tensor, config: gk.SegmentConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and endpoint mask: token GAE for the cut test, the bounded rule with coherent gradients, no norm."""
    token_advantages, out = torch.zeros_like(rewards), torch.zeros_like(rewards)
    ends = torch.zeros_like(mask)
    gamma, lam, eps, tau = config.gamma, config.lam, config.group_epsilon, config.group_variance_threshold
    for b in range(len(rewards)):
        following, next_value = torch.tensor(0.0), torch.tensor(0.0)
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t].item():
                delta = rewards[b, t] + gamma * next_value - values[b, t]
                following = delta + gamma * lam * following
                next_value = values[b, t]
                token_advantages[b, t] = following
    scale = token_advantages[mask].square().mean().sqrt().clamp(min=eps)
    for b in range(len(rewards)):
        valid = mask[b].sum()
        spans: list[tuple[int, int]] = []
        start, p, q = -1, torch.tensor(0.0), torch.tensor(0.0)
        for t in range(rewards.shape[1]):
            if not mask[b, t].item():
                if start >= 0:
                    spans.append((start, t - 1))
                    start = -1
                continue
            a = token_advantages[b, t] / scale
            w = torch.exp((logprobs[b, t] - old[b, t]).clamp(-20, 20)) * (1 - torch.exp(logprobs[b, t]))
            if start >= 0:
                r_ppo = (p + w * a) ** 2 / valid
                r_grpo = ((q + w) * a) ** 2 / valid
                if (r_grpo > tau * r_ppo + eps / valid).item():
                    spans.append((start, t - 1))
                    start = -1
            if start < 0:
                start, p, q = t, torch.tensor(0.0), torch.tensor(0.0)
            p, q = p + w * a, q + w
            if t - start + 1 == config.group_max_size:
                spans.append((start, t))
                start = -1
        if start >= 0:
            spans.append((start, rewards.shape[1] - 1))
        following, next_value = torch.tensor(0.0), torch.tensor(0.0)
        for first, last in reversed(spans):
            length = last - first + 1
            gained = sum(gamma ** (t - first) * rewards[b, t] for t in range(first, last + 1))
            delta = gained + gamma**length * next_value - values[b, first]
            following = delta + gamma**length * lam * following
            next_value = values[b, first]
            out[b, last], ends[b, last] = following, True
    return out, ends
