"""A short demonstration of the ops that exist, on a task that fits in a table: `python -m grpo_trainer`.

The policy holds one softmax over ACTIONS answers for each prompt. Every step samples GROUP answers a prompt, scores
them, turns the rewards of each group into advantages, and takes a policy-gradient step on the exact log-probabilities.
"""

from __future__ import annotations

import time

import torch

import grpo_kernels as gk

PROMPTS, ACTIONS, GROUP, STEPS, LEARNING_RATE = 64, 32, 8, 150, 4.0


def accuracy(logits: torch.Tensor, answers: torch.Tensor) -> float:
    """The probability of the right answer, averaged over the prompts."""
    return float(logits.softmax(1).gather(1, answers[:, None]).mean())


def train(estimator: str, seed: int) -> tuple[float, float]:
    """Accuracy before and after."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(ACTIONS, (PROMPTS,), generator=generator)
    logits = torch.randn(PROMPTS, ACTIONS, generator=generator).requires_grad_()
    before = accuracy(logits.detach(), answers)
    for _ in range(STEPS):
        logprobs = logits.log_softmax(1)
        sampled = torch.multinomial(logprobs.detach().exp(), GROUP, replacement=True, generator=generator)
        rewards = (sampled == answers[:, None]).float()
        result = gk.group_advantages(rewards.flatten(), GROUP, config=estimator)
        loss = -(result.advantages.view(PROMPTS, GROUP) * logprobs.gather(1, sampled)).mean(1).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= LEARNING_RATE * gradient
    return before, accuracy(logits.detach(), answers)


def main() -> None:
    print("The full trainer is not here yet; this trains a tabular policy with group_advantages.")
    print(f"backends: {gk.available_backends()}")
    print(f"{PROMPTS} prompts x {GROUP} samples, {ACTIONS} possible answers, {STEPS} steps, mean of 3 seeds")
    print(f"{'estimator':<12}{'before':>8}{'after':>8}{'seconds':>9}")
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl"):
        start = time.perf_counter()
        results = torch.tensor([train(estimator, seed) for seed in range(3)])
        before, after = results.mean(0).tolist()
        print(f"{estimator:<12}{before:>8.3f}{after:>8.3f}{time.perf_counter() - start:>9.1f}")
        if after < 2 * before:
            raise SystemExit(f"{estimator} did not learn: {before:.3f} -> {after:.3f}")
    print("every estimator raised the probability of the right answer")


if __name__ == "__main__":
    main()
