"""The fused estimators and losses in verl's configuration, applied to one batch by verl's trainer and actor.

    pip install --no-build-isolation ".[verl]" && python examples/verl_grpo.py  # on the CPU, without servers

To train, pass the same overrides to `python -m verl.trainer.main_ppo`, with your data, model and rewards. Advantages
within clusters need the whole batch, so patch_verl must be called in verl's own process: put that line into a module,
and name the module in VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_module
from torch import Tensor
from verl.trainer.ppo import ray_trainer
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils import losses

from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

OVERRIDES = [
    "algorithm.adv_estimator=similarity_group_grpo",
    "+algorithm.grpo_kernels.shrinkage=2",  # small clusters blend in the statistics of their prompt
    "actor_rollout_ref.actor.policy_loss.loss_mode=fused_vanilla",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
]
PROMPTS, GROUP, LENGTH = 4, 8, 12


def random_batch(seed: int) -> verl.DataProto:
    """A batch as a rollout and a reward function leave it. Extra results of the reward function become columns."""
    torch.manual_seed(seed)
    rows = PROMPTS * GROUP
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (rows, 1))).long()
    rewards = torch.zeros(rows, LENGTH).scatter_(1, mask.sum(1, keepdim=True) - 1, torch.rand(rows, 1).round())
    old = -torch.rand(rows, LENGTH)
    tensors = {"token_level_rewards": rewards, "response_mask": mask, "old_log_probs": old, "ref_log_prob": old - 0.1}
    columns = {
        "uid": np.array([f"prompt {i // GROUP}" for i in range(rows)], dtype=object),
        "similarity_embeddings": np.array(list(torch.randn(rows, 16).numpy()), dtype=object),
    }
    return verl.DataProto.from_dict(tensors=tensors, non_tensors=columns)


def loss_of(batch: verl.DataProto, logprobs: Tensor, config: object) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of verl's actor, for prompts of one token and padded responses."""
    prompts, mask = torch.ones(len(logprobs), 1, dtype=torch.long), batch.batch["response_mask"]
    names = ("response_mask", "old_log_probs", "ref_log_prob", "advantages")
    tensors = {name: batch.batch[name] for name in names}
    tensors |= {"prompts": prompts, "responses": mask, "attention_mask": torch.cat([prompts, mask], 1)}
    counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    packed = torch.cat([logprobs, logprobs[:, :1]], 1)[torch.cat([prompts, mask], 1).bool()]
    output = {"log_probs": packed, "entropy": packed.detach().neg()}
    loss, metrics = losses.ppo_loss(config, output, tensordict_utils.get_tensordict(tensors, counts))
    return loss, {name: float(getattr(m, "aggregate", lambda m=m: m)()) for name, m in metrics.items()}


def main() -> dict[str, float]:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=OVERRIDES)
    patch_verl()
    try:
        batch = ray_trainer.compute_advantage(random_batch(0), config.algorithm.adv_estimator, config=config.algorithm)
        logprobs = (batch.batch["old_log_probs"] + 0.1 * torch.randn(PROMPTS * GROUP, LENGTH)).requires_grad_()
        loss, metrics = loss_of(batch, logprobs, omega_conf_to_dataclass(config.actor_rollout_ref.actor))
    finally:
        unpatch_verl()
    loss.backward()
    print("\n".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return metrics


if __name__ == "__main__":
    main()
