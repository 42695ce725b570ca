"""Supervised steps: the log-probability of demonstrations."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.config.similarity import MOST_ROWS
from grpo_trainer.embed import Embedder, embedded, load_embedder
from grpo_trainer.model import Batch, encode_demonstration, pad, prompt_text
from grpo_trainer.phase import PhaseRun, summed
from grpo_trainer.recipe import Sft, Similarity
from grpo_trainer.tasks.base import Item


class SftRun(PhaseRun):
    kind, split = "sft", "sft"
    settings: Sft

    @property
    def items_a_step(self) -> int:
        return self.settings.batch

    def set_up(self) -> None:
        polychromic = self.settings.polychromic
        if polychromic is None:
            return
        column, items = self.t.recipe.data.demonstration, self.t.items("sft")
        prompts, texts = [prompt_text(item["prompt"]) for item in items], [str(item[column]) for item in items]
        for prompt, count in Counter(prompts).most_common(1):
            if count > MOST_ROWS:
                raise ValueError(
                    f"phases.{self.number}.sft.polychromic: must have at most {MOST_ROWS} demonstrations of a prompt "
                    f"to compare, got {count} of {prompt[:80]!r}"
                )
        embedder = load_embedder(Similarity(embedder=polychromic.embedder, text="whole", cache=len(texts)))
        found = diversity_weights(prompts, texts, embedder, polychromic.weight)
        for item, weight in zip(items, found, strict=True):
            item["sft_weight"] = weight

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        policy, demonstration = self.t.policy, self.t.recipe.data.demonstration
        with self.timed("model"):
            prompts, prompt_mask = pad([item["prompt_ids"] for item in items], policy.pad, left=not policy.is_seq2seq)
            ids = [encode_demonstration(policy, str(item[demonstration])) for item in items]
            tokens, mask = pad(ids, policy.pad, left=False)
            batch = Batch(prompts, prompt_mask, tokens, mask, torch.arange(len(items))).to(policy.device)
            weights = self._weights(items).to(policy.device)
            count = float((weights[:, None] * batch.mask).sum())
            policy.train()
            policy.temperature, losses = 1.0, []
            pieces = self.pieces(torch.arange(len(items), device=policy.device), self.settings.micro_batch)
            for rows, counts in pieces:
                part = batch.rows(rows)
                logprobs = self.model("logprobs", part, share=False) * part.mask
                loss = -(weights[rows, None] * logprobs).sum() / count
                self.backward(loss, counts)
                if counts:
                    losses.append(loss.detach())
            norm = self.optimizer_step()
        loss_sum, lr = summed(pieces.whole(losses)), self.optimizer.param_groups[0]["lr"]
        return {"train/loss": loss_sum, "train/grad_norm": norm, "train/lr": lr}

    def _weights(self, items: list[Item]) -> Tensor:
        if self.settings.polychromic is None:
            return torch.ones(len(items))
        return torch.tensor([item["sft_weight"] for item in items])


def diversity_weights(prompts: list[str], texts: list[str], embedder: Embedder, weight: float) -> list[float]:
    """Of each demonstration, 1 in the mean over those of its prompt, its set.

    Of demonstrations that are alike each counts for less, 1 / sum_j S_ij, so that a way of answering is learned for
    being there and not for being common. A term for the diversity of samples, which have no gradient, would not change
    what is learned.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[prompt].append(row)
    embeddings = embedded(embedder, texts)
    found = torch.ones(len(texts), dtype=torch.float64)
    for rows in rows_of.values():
        distances = gk.pairwise_cosine(embeddings[rows], len(rows))
        rare = gk.diversity.similarity_weights(distances)[0].double()
        found[rows] = 1 - weight + weight * rare / rare.mean()
    return found.tolist()
