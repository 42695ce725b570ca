"""Translates the loss settings of other systems into the fields of LossConfig.

A field that the peer ignores for a loss (TRL's `epsilon` with "sapo") is ignored here, too; one that cannot be honoured
is refused.
"""

from collections.abc import Sequence

from grpo_kernels.ops.policy_loss.peers.areal import areal_fields as areal_fields
from grpo_kernels.ops.policy_loss.peers.art import ART_LEVELS as ART_LEVELS
from grpo_kernels.ops.policy_loss.peers.art import art_fields as art_fields
from grpo_kernels.ops.policy_loss.peers.cosmos import COSMOS_VARIANTS as COSMOS_VARIANTS
from grpo_kernels.ops.policy_loss.peers.cosmos import cosmos_fields as cosmos_fields
from grpo_kernels.ops.policy_loss.peers.prime_rl import PRIME_RL_DEFAULTS as PRIME_RL_DEFAULTS
from grpo_kernels.ops.policy_loss.peers.prime_rl import prime_rl_fields as prime_rl_fields
from grpo_kernels.ops.policy_loss.peers.roll import ROLL_VARIANTS as ROLL_VARIANTS
from grpo_kernels.ops.policy_loss.peers.roll import roll_fields as roll_fields
from grpo_kernels.ops.policy_loss.peers.skyrl import SKYRL_LOSSES as SKYRL_LOSSES
from grpo_kernels.ops.policy_loss.peers.skyrl import SKYRL_REFUSED as SKYRL_REFUSED
from grpo_kernels.ops.policy_loss.peers.skyrl import skyrl_fields as skyrl_fields
from grpo_kernels.ops.policy_loss.peers.swift import SWIFT_LOSS_TYPES as SWIFT_LOSS_TYPES
from grpo_kernels.ops.policy_loss.peers.swift import swift_fields as swift_fields
from grpo_kernels.ops.policy_loss.peers.trl import TRL_DEFAULTS as TRL_DEFAULTS
from grpo_kernels.ops.policy_loss.peers.trl import TRL_LOSS_TYPES as TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.peers.trl import trl_fields as trl_fields
from grpo_kernels.ops.policy_loss.peers.verl import VERL_DEFAULTS as VERL_DEFAULTS
from grpo_kernels.ops.policy_loss.peers.verl import VERL_LOSSES as VERL_LOSSES
from grpo_kernels.ops.policy_loss.peers.verl import VERL_REFUSED as VERL_REFUSED
from grpo_kernels.ops.policy_loss.peers.verl import verl_fields as verl_fields

# Keywords of peers that LossConfig does not take, and what is meant by them.
KEYWORDS = {
    name: f"{peer}'s is LossConfig.{constructor}({name}=...)"
    for peer, constructor, names in (("verl", "verl", VERL_DEFAULTS), ("TRL", "trl", TRL_DEFAULTS))
    for name in names
}
_PAPERS = {
    "ppo": "PPO's policy term is LossConfig('clip')",
    "gmpo": "GMPO is LossConfig.verl(loss_mode='geo_mean')",
    **dict.fromkeys(
        ("rloo", "remax", "opo"),
        "it names advantages; its loss is LossConfig(loss='reinforce', aggregation='seq-mean-token-sum')",
    ),
    **dict.fromkeys(
        ("maxrl", "gdpo", "grpo_passk", "gae", "reinforce_plus_plus", "reinforce++"),
        "it names advantages; its loss is LossConfig()",
    ),
}


def elsewhere(name: object, terms: Sequence[str]) -> str | None:
    """The meaning of a name that is no loss_type of TRL, for the end of an error."""
    if not isinstance(name, str):
        return None
    if name in VERL_LOSSES:
        return f"verl's is LossConfig.verl(loss_mode={name!r})"
    if name in terms:
        return f"the policy term is LossConfig({name!r})"
    return _PAPERS.get(name.lower())
