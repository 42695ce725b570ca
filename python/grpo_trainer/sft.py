"""Supervised steps: the log-probability of demonstrations."""

from __future__ import annotations

import torch

from grpo_trainer.model import Batch, pad
from grpo_trainer.phase import PhaseRun
from grpo_trainer.recipe import Sft
from grpo_trainer.tasks.base import Item


class SftRun(PhaseRun):
    kind, split = "sft", "sft"
    settings: Sft

    @property
    def items_a_step(self) -> int:
        return self.settings.batch

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        policy, demonstration = self.t.policy, self.t.recipe.data.demonstration
        with self.timed("model"):
            prompts, prompt_mask = pad([item["prompt_ids"] for item in items], policy.pad, left=not policy.is_seq2seq)
            ids = [
                [*policy.tokenizer(str(item[demonstration]), add_special_tokens=False)["input_ids"], policy.end]
                for item in items
            ]
            tokens, mask = pad(ids, policy.pad, left=False)
            batch = Batch(prompts, prompt_mask, tokens, mask, torch.arange(len(items))).to(policy.device)
            count = float(mask.sum())
            policy.train()
            policy.temperature, loss_sum = 1.0, 0.0
            for rows in torch.arange(len(items), device=policy.device).split(self.settings.micro_batch):
                part = batch.rows(rows)
                loss = -(self.model("logprobs", part, share=False) * part.mask).sum() / count
                self.t.accelerator.backward(loss)
                loss_sum += float(loss.detach())
            norm = self.optimizer_step()
        return {"train/loss": loss_sum, "train/grad_norm": norm, "train/lr": self.optimizer.param_groups[0]["lr"]}
