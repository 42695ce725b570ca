"""The supervised phase: maximises the log-probability of demonstrations."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer.data import Batch, encode_demonstration, pad, prompt_text
from grpo_trainer.embed import Embedder, embed_all, load_embedder
from grpo_trainer.phases.base import PhaseRun, sum_losses
from grpo_trainer.recipe import Sft, Similarity
from grpo_trainer.tasks.base import Item


class SftRun(PhaseRun):
    kind, split = "sft", "sft"
    settings: Sft
    embedder: Embedder  # of polychromic

    @property
    def items_per_step(self) -> int:
        return self.settings.batch

    def set_up(self) -> None:
        polychromic = self.settings.polychromic
        if polychromic is None:
            return
        items = self.trainer.items("sft")
        self.embedder = load_embedder(Similarity(embedder=polychromic.embedder, text="whole", cache=len(items)))
        if polychromic.among == "batch":
            return
        prompts, texts = [prompt_text(item["prompt"]) for item in items], [item["demonstration"] for item in items]
        limit = gk.SimilarityConfig.max_rows
        for prompt, count in Counter(prompts).most_common(1):
            if count > limit:
                raise ValueError(
                    f"phases.{self.number}.sft.polychromic: must have at most {limit} demonstrations of a prompt to "
                    f"compare, got {count} of {prompt[:80]!r}"
                )
        weights = diversity_weights(prompts, texts, self.embedder, polychromic.weight)
        for item, weight in zip(items, weights, strict=True):
            item["sft_weight"] = weight

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        policy = self.trainer.policy
        with self.timed("model"):
            prompt_ids = [item["prompt_ids"] for item in items]
            prompts, prompt_mask = pad(prompt_ids, policy.pad_id, left=not policy.is_seq2seq)
            ids = [encode_demonstration(policy.tokenizer, item["demonstration"]) for item in items]
            tokens, mask = pad(ids, policy.pad_id, left=False)
            batch = Batch(prompts, prompt_mask, tokens, mask, torch.arange(len(items))).to(policy.device)
            weights = self._weights(items).to(policy.device)
            normalizer = float((weights[:, None] * batch.mask).sum())
            policy.train()
            policy.temperature, losses = 1.0, []
            rows = torch.arange(len(items), device=policy.device)
            micro_batches = self.micro_batches(rows, self.settings.micro_batch)
            for micro_rows, counts in micro_batches:
                part = batch.rows(micro_rows)
                logprobs = self.model("logprobs", part, share=False) * part.mask
                loss = -(weights[micro_rows, None] * logprobs).sum() / normalizer
                self.backward(loss, counts)
                if counts:
                    losses.append(loss.detach())
            norm = self.optimizer_step()
        loss_sum, lr = sum_losses(micro_batches.all_gather(losses)), self.optimizer.param_groups[0]["lr"]
        metrics = {"train/loss": loss_sum, "train/grad_norm": norm, "train/lr": lr}
        if self.trainer.seconds["model"] > 0:  # a benchmark times the parts by a clock of its own
            metrics["speed/tokens_per_second"] = float(mask.sum()) / self.trainer.seconds["model"]
        return metrics

    def _weights(self, items: list[Item]) -> Tensor:
        polychromic = self.settings.polychromic
        if polychromic is None:
            return torch.ones(len(items))
        if polychromic.among == "batch":
            texts = [item["demonstration"] for item in items]
            return torch.tensor(diversity_weights([""] * len(texts), texts, self.embedder, polychromic.weight))
        return torch.tensor([item["sft_weight"] for item in items])


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
