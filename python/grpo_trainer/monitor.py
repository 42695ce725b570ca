"""Samples, histograms and warnings of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.algorithm import Credit
from grpo_trainer.log import Log
from grpo_trainer.metrics import similarity_warnings
from grpo_trainer.rollout import Rollout


class Monitor:
    """Looks at the steps of RL and writes what a person should see; each kind of warning once."""

    def __init__(self, log: Log) -> None:
        self.log, self.settings = log, log.settings
        self.warned: set[str] = set()

    def see(
        self,
        step: int,
        rollout: Rollout,  # N responses
        rewards: Tensor,  # [N, R]
        totals: Tensor,  # [N] their weighted sums
        credit: Credit,
        metrics: Mapping[str, float],
    ) -> None:
        """Writes samples, histograms and warnings of a step."""
        with distributed.fail_together():
            self._warn(step, metrics)
            self.log.samples("rl", step, self._samples(rollout, rewards, credit))
            if step % self.settings.every == 0:
                advantages = credit.advantages
                if advantages.dim() == 2:  # of tokens or segments
                    in_loss = credit.in_loss(rollout.batch.mask)
                    advantages = advantages[in_loss if credit.endpoints is None else credit.endpoints]
                values = {"rewards": totals, "response_lengths": rollout.lengths, "advantages": advantages}
                self.log.histograms("rl", step, {f"histograms/{name}": of for name, of in values.items()})

    def _samples(self, rollout: Rollout, rewards: Tensor, credit: Credit) -> list[dict[str, Any]]:
        advantages = credit.measured()
        return [
            {
                "prompt": rollout.items[i // rollout.group_size]["prompt"],
                "response": rollout.texts[i],
                "rewards": rewards[i].tolist(),
                "advantage": float(advantages[i].sum()),
            }
            for i in range(min(len(rollout.texts), self.settings.samples))
        ]

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        mean = metrics["rewards/mean"]
        if math.isnan(mean) and "unscored" not in self.warned:
            self.warned.add("unscored")
            self.log.event("no response of a step has a reward", phase="rl", step=step)
            self.log.line(f"step {step}: no response has a reward, so nothing is learned")
        elif metrics["train/skipped"] and not math.isnan(mean) and "skipped" not in self.warned:
            self.warned.add("skipped")
            self.log.line(f"step {step}: no response has an advantage, so the weights stay; mean reward {mean:g}")
        for kind, text in similarity_warnings(metrics).items():
            if kind not in self.warned:
                self.warned.add(kind)
                event = "similarity groups outside the healthy range"
                self.log.event(event, phase="rl", step=step, of=kind, text=text)
