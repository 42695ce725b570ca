"""policy_loss with one option or optional argument at a time, beside inputs of which kernels take four or more at once.

Faults that this is for: an option that the fast kernels of plain inputs do not read, or with which a
batch should not take them. Drawn batches have several optional arguments, and so seldom take them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS, KLS
from tests.ops.policy_loss import cases
from tests.ops.policy_loss.cases import F32, F64, KERNELS, NORM, assert_like_reference

SHAPE = (8, 150)  # vectors, quads and a tail
BASES: dict[str, dict[str, Any]] = {
    "clip": {"clip_low": 0.1, "clip_high": 0.25},
    "cispo": {"loss": "cispo", "clip_low": 0.1, "clip_high": 0.25},
    "gspo": {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.05},
}
KL = {"kl": "k3", "kl_coef": 0.1}
OF_ALL: list[dict[str, Any]] = [
    *({}, {"clip_low": None}, {"clip_high": None}, {"log_ratio_clamp": (-0.3, 0.2)}),
    *({"kl": kl, "kl_coef": 0.1} for kl in KLS if kl != "none"),
    *(KL | {"kl_coef": 0.0}, KL | {"kl_clamp": (0.2, 0.03)}, KL | {"kl_unbiased": True}, {"entropy_coef": 0.1}),
    *({"aggregation": name, "max_length": 7 if name == NORM else None} for name in AGGREGATIONS[:-1]),
    *({"aggregation": "seq-mean-token-mean", "count_empty_rows": True}, KL | {"kl_aggregation": "seq-mean-token-sum"}),
]
OF_CLIP: list[dict[str, Any]] = [{"dual_clip": 1.3}, {"delta": 1.1}, {"delta": 0.9, "dual_clip": 1.3}]
ARGUMENTS = ("policy_mask", "entropy", "is_weights", "row_weights", "weights", "normalizer", "on policy", "no mask")


def check(
    base: str, backend: str, dtype: torch.dtype, by_token: bool, option: dict[str, Any], argument: str = ""
) -> None:
    config = gk.LossConfig(**BASES[base] | option)
    optional = [argument] if argument in cases.EVERY or argument == "row_weights" else []
    optional += ["ref_logprobs"] if config.kl != "none" else []
    optional += ["entropy"] if config.entropy_coef != 0 and "entropy" not in optional else []
    batch = cases.padded(5, *SHAPE, optional=(*optional, "token_advantages"))
    of_tokens = batch.pop("token_advantages")
    batch |= {"advantages": of_tokens} if by_token else {}
    if argument == "row_weights":
        batch["is_weights"] = batch.pop("row_weights")
    if argument == "normalizer":
        batch["normalizer"] = {"tokens": 17.0, "rows": 3.0, "segments": 5.0}
    left_out = {"on policy": "old_logprobs", "no mask": "mask"}.get(argument)
    assert_like_reference({name: value for name, value in batch.items() if name != left_out}, config, backend, dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_one_option_at_a_time(backend: str, dtype: torch.dtype, base: str) -> None:
    """With advantages of rows and of tokens in turn; a ratio of rows has kernels for those of rows alone."""
    if backend == "cuda" and dtype == F64:
        pytest.skip("takes one token at a time")
    options = [(option, "") for option in OF_ALL + (OF_CLIP if base != "cispo" else [])]
    for number, (option, argument) in enumerate([*options, *(({}, name) for name in ARGUMENTS)]):
        check(base, backend, dtype, base != "gspo" and number % 2 > 0, option, argument)
