"""verl: our advantage estimators and policy losses by name, and replacements of verl's own functions.

    algorithm.adv_estimator=fused_rloo                        # by name: verl finds them without an import
    actor_rollout_ref.actor.policy_loss.loss_mode=fused_gspo
    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=grpo_kernels

    patch_verl()                    # 'grpo', 'gdpo', 'gae', 'reinforce_plus_plus', ppo_loss and fused heads
    worker.set_loss_fn(partial(fused_ppo_loss, config=actor_config))     # only the loss of an existing worker

Estimators: fused_grpo, fused_dr_grpo, fused_rloo, fused_opo, fused_grpo_passk, fused_reinforce_plus_plus_baseline,
fused_gpg; after patch_verl also fused_gdpo, similarity_group_grpo and group_ppo. Losses: fused_vanilla, fused_gspo,
fused_sapo, fused_cispo, fused_gpg, fused_dppo_tv, fused_dppo_kl, fused_geo_mean, fused_dro, fused_clip_cov,
fused_kl_cov; with fused_ppo_loss also fused_segment and fused_session_gspo. Importing this package registers them.

Our estimators leave responses without a token in the loss out of the statistics of their group, and with
+algorithm.grpo_kernels.masked_rows=vote count them as verl does. After patch_verl, verl's own gae and
reinforce_plus_plus have the options carry_rewards and session_outputs there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_kernels.integrations import needs

with needs("verl"):
    import verl
    from verl.trainer.ppo import core_algos

    from grpo_kernels.integrations.verl.advantages import ESTIMATORS, estimator
    from grpo_kernels.integrations.verl.head import register as register_head
    from grpo_kernels.integrations.verl.loss import LOSSES, fused_ppo_loss, policy_loss
    from grpo_kernels.integrations.verl.patch import patch_verl, unpatch_verl

__all__ = ["fused_ppo_loss", "patch_verl", "unpatch_verl"]

_NEEDED = (0, 9, 1)


def _refuse_other_verl(version: str) -> None:
    """Refuses a version that this integration was not written for."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < _NEEDED:
        raise ImportError(
            f"grpo_kernels.integrations.verl: needs verl {'.'.join(map(str, _NEEDED))} or later, got {version}"
        )


def _refuse_taken(kind: str, registry: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        taken = registry.get(name)
        if taken is not None:
            raise ValueError(
                f"grpo_kernels.integrations.verl: the {kind} {name!r} must not be registered yet, got {taken} of "
                f"{getattr(taken, '__module__', 'an unknown module')}"
            )


_refuse_other_verl(verl.__version__)
_refuse_taken("advantage estimator", core_algos.ADV_ESTIMATOR_REGISTRY, ESTIMATORS)
_refuse_taken("policy loss", core_algos.POLICY_LOSS_REGISTRY, LOSSES)
for _name in ESTIMATORS:
    core_algos.register_adv_est(_name)(estimator(_name))
for _name in LOSSES:
    core_algos.register_policy_loss(_name)(policy_loss(_name))
register_head()
