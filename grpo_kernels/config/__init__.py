"""Settings of the ops: frozen dataclasses that check themselves.

A config says *what* is computed in the words of the papers and of the peers; the integers and floats that the kernels
read are derived from it once, when it is made.
"""

from grpo_kernels.config.advantages import AdvantageConfig
from grpo_kernels.config.loss import LossConfig, name_configs
from grpo_kernels.config.loss_peers import TRL_LOSS_TYPES
from grpo_kernels.config.segments import SegmentConfig
from grpo_kernels.config.similarity import SimilarityConfig

__all__ = ["AdvantageConfig", "LossConfig", "SegmentConfig", "SimilarityConfig"]

name_configs(TRL_LOSS_TYPES)
