"""Advantages within groups of similar responses, and the metrics of those groups.

    python examples/similarity_groups.py

The embeddings are word counts, so that nothing is downloaded. With sentence-transformers they would be
`torch.from_numpy(SentenceTransformer(name).encode(texts))`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels as gk

# Two prompts with eight responses each, and whether a response is right.
RESPONSES = [
    ("add the tens then the ones, 57", 1),
    ("add the tens then add the ones, 57", 1),
    ("the tens then the ones, 47", 0),
    ("add tens then the ones, 57", 1),
    ("count up from the larger number, 57", 1),
    ("count up from the number, 56", 0),
    ("count up from the larger one, 58", 0),
    ("i do not know", 0),
    ("split it in halves and double, 84", 1),
    ("split in halves and double it, 84", 1),
    ("halves then double, 82", 0),
    ("split it in two halves, double, 84", 1),
    ("use the table for twelve, 84", 1),
    ("the table of twelve, 84", 1),
    ("use a table for twelve, 72", 0),
    ("from the table for twelve, 84", 1),
]
SIZE = 8


def embed(texts: list[str]) -> Tensor:
    words = sorted({word for text in texts for word in text.split()})
    counts = [[float(text.split().count(word)) for word in words] for text in texts]
    return torch.tensor(counts)


def main() -> Tensor:
    texts = [text for text, _ in RESPONSES]
    rewards = torch.tensor([float(right) for _, right in RESPONSES])
    embeddings = embed(texts)

    groups = gk.similarity_groups(embeddings, SIZE, config="average")
    for name, value in gk.similarity_metrics(groups).items():
        print(f"{name} {value:.3f}")

    # a lone response uses the statistics of its whole prompt, and a small group blends them with its own
    config = gk.AdvantageConfig("grpo", singleton="parent", shrinkage=2.0)
    within = gk.group_advantages(rewards, SIZE, subgroups=groups.labels, config=config).advantages
    plain = gk.group_advantages(rewards, SIZE).advantages
    print("\ngroup  reward  plain  within  response")
    columns = (groups.labels, rewards, plain, within)
    for label, reward, of_prompt, of_group, text in zip(*(c.tolist() for c in columns), texts, strict=True):
        print(f"{label:5d}  {reward:6.0f} {of_prompt:6.2f} {of_group:7.2f}  {text}")

    entropy = gk.diversity.semantic_entropy(groups.labels.view(-1, SIZE), normalize=True)
    print("\nnormalised semantic entropy of each prompt:", entropy.tolist())
    return within


if __name__ == "__main__":
    main()
