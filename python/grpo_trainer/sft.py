"""Demonstrations of supervised fine-tuning: batches, and the weights that give rare demonstrations their share."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer.data import Batch, encode_demonstration, pad, prompt_text
from grpo_trainer.embed import Embedder, embed_all, load_embedder
from grpo_trainer.recipe import Similarity
from grpo_trainer.setup import Run
from grpo_trainer.tasks import Item


def prepare(run: Run) -> None:
    """Weighs the demonstrations of each prompt, if the recipe says so."""
    assert run.recipe.sft is not None
    polychromic = run.recipe.sft.polychromic
    if polychromic is None:
        return
    items = run.items("sft")
    run.embedder = load_embedder(Similarity(embedder=polychromic.embedder, text="whole"))
    if polychromic.among == "batch":
        return
    prompts, texts = [prompt_text(item["prompt"]) for item in items], [item["demonstration"] for item in items]
    limit = gk.SimilarityConfig.max_rows
    for prompt, count in Counter(prompts).most_common(1):
        if count > limit:
            raise ValueError(
                f"sft.polychromic: must have at most {limit} demonstrations of a prompt to compare, got {count} of "
                f"{prompt[:80]!r}"
            )
    for item, weight in zip(items, diversity_weights(prompts, texts, run.embedder, polychromic.weight), strict=True):
        item["sft_weight"] = weight


def batch_of(run: Run, items: list[Item]) -> tuple[Batch, Tensor]:
    """The demonstrations as prompts and responses, and the weight of each."""
    assert run.recipe.sft is not None
    policy, polychromic = run.policy, run.recipe.sft.polychromic
    prompts, prompt_mask = pad([item["prompt_ids"] for item in items], policy.pad_id, left=not policy.is_seq2seq)
    responses = [encode_demonstration(policy.tokenizer, item["demonstration"]) for item in items]
    tokens, mask = pad(responses, policy.pad_id, left=False)
    if polychromic is None:
        weights = [1.0] * len(items)
    elif polychromic.among == "prompt":
        weights = [item["sft_weight"] for item in items]
    else:
        assert run.embedder is not None
        texts = [item["demonstration"] for item in items]
        weights = diversity_weights([""] * len(texts), texts, run.embedder, polychromic.weight)
    batch = Batch(prompts, prompt_mask, tokens, mask, torch.arange(len(items)))
    return batch.to(policy.device), torch.tensor(weights, device=policy.device)


def diversity_weights(prompts: list[str], texts: list[str], embedder: Embedder, weight: float) -> list[float]:
    """Weights of demonstrations with mean 1 per prompt, in which similar demonstrations share their weight.

    With equal prompts the demonstrations of a whole batch are compared, which also takes weight from a reply that
    answers every post and weighs single demonstrations per prompt.

    A demonstration's share is 1 / sum_j S_ij, with S the similarities among the demonstrations of its prompt, so a rare
    solution is learned as well as a common one. A diversity bonus on samples would have no gradient and change nothing.

    Args:
        prompts: prompt of each demonstration.
        texts: the demonstrations.
        embedder: embedder that measures similarity.
        weight: interpolates between equal weights (0) and the shares (1).
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[prompt].append(row)
    embeddings = embed_all(embedder, texts)
    weights = torch.ones(len(texts), dtype=torch.float64)
    for rows in rows_of.values():
        distances = gk.pairwise_cosine(embeddings[rows], len(rows))
        shares = gk.diversity.similarity_weights(distances)[0].double()
        weights[rows] = 1 - weight + weight * shares / shares.mean()
    return weights.tolist()
