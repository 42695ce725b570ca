"""The code of docs/integrations/trl.md: a loss of your own, trained for two steps with each head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM
from trl import GRPOConfig

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer
from tests.integrations import tiny_trl

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "trl.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")


@pytest.mark.parametrize("head", ["logprobs", "fused"])
def test_clip_cov_of_the_page(tmp_path: Path, head: str) -> None:
    section = PAGE.read_text().split("### A loss of your own\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = AutoModelForCausalLM.from_pretrained(tiny_trl.model())
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    scope: dict[str, Any] = {
        "model": model,
        "reward": tiny_trl.many_a,
        "args": GRPOConfig(**tiny_trl.settings(tmp_path, max_steps=2, epsilon=0.1, epsilon_high=0.3)),
        "dataset": tiny_trl.prompts(),
        "tokenizer": tiny_trl.tokenizer(),
        "head": head,
    }
    exec(code.replace("loss=clip_cov", "loss=clip_cov, processing_class=tokenizer, head=head"), scope)
    assert isinstance(scope["trainer"], FusedGRPOTrainer)
    with mock.patch.object(gk.variants, "clip_cov_weights", wraps=gk.variants.clip_cov_weights) as weights:
        scope["trainer"].train()
    bounds = [(call.kwargs["clip_low"], call.kwargs["clip_high"]) for call in weights.mock_calls]
    assert bounds == [(0.1, 0.3)] * 4  # two steps of two micro-batches
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert after.isfinite().all() and not torch.equal(before, after)
