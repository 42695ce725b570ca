"""TRL: its GRPOTrainer with our advantages and loss, and our log-probs in all of its trainers.

trainer = FusedGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)  # instead of GRPOTrainer
patch_trl()  # before any trainer is created
"""

from grpo_kernels.integrations import needs

with needs("trl"):
    from grpo_kernels.integrations.trl.patch import patch_trl, unpatch_trl
    from grpo_kernels.integrations.trl.trainer import FusedGRPOTrainer

__all__ = ["FusedGRPOTrainer", "patch_trl", "unpatch_trl"]
