"""GRPO in a plain PyTorch loop: sample, score, normalise within the prompt, and one fused loss from hidden states.

    python examples/plain_loop.py --steps 60

A small recurrent model learns to count upwards from the token that it is given. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import grpo_kernels as gk

VOCABULARY, LENGTH, PROMPTS, GROUP = 12, 8, 16, 8


class Model(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(VOCABULARY, size), nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden state after each token: the loss takes it from there, and no logits are ever stored."""
        hidden: Tensor = self.core(self.embed(tokens))[0]
        return hidden


@torch.no_grad()
def sample(model: Model, first: Tensor) -> Tensor:
    tokens = first[:, None]
    for _ in range(LENGTH):
        probabilities = model.head(model(tokens)[:, -1]).softmax(-1)
        tokens = torch.cat([tokens, probabilities.multinomial(1)], 1)
    return tokens


def reward(tokens: Tensor) -> Tensor:
    """The share of tokens that follow the one before them."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float().mean(1)


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    config = gk.LossConfig(clip_high=0.28)  # or a name that TRL has: "dapo", "dr_grpo", ...
    found = 0.0
    for step in range(given.steps):
        tokens = sample(model, torch.randint(VOCABULARY, (PROMPTS,)).repeat_interleave(GROUP))
        rewards = reward(tokens)
        advantages = gk.group_advantages(rewards, GROUP).advantages
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.no_grad():  # of the policy that sampled, for the ratio
            old = gk.linear_logprobs(model(inputs), model.head.weight, targets).logprobs
        for _ in range(2):
            loss, metrics = gk.linear_policy_loss(
                model(inputs), model.head.weight, targets, old, advantages, config=config
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = rewards.mean().item()
        if step % 10 == 0 or step == given.steps - 1:
            clipped = metrics.trl()["clip_ratio/region_mean"]  # the device is waited for here, and only here
            print(f"step {step:3d}  reward {found:.3f}  clipped {clipped:.3f}")
    return found


if __name__ == "__main__":
    main()
