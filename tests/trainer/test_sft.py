"""Supervised fine-tuning: the weights of demonstrations, and the loss that they enter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer import sft
from grpo_trainer import train as training
from grpo_trainer.embed import load_embedder
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Optimizer, Similarity
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small


def test_rare_demonstrations_of_a_prompt_count_for_more() -> None:
    prompts = ["p", "q", "p", "p", "p", "q"]
    texts = ["same words here", "alone", "same words here", "quite another", "same words here", "two"]
    embedder = load_embedder(Similarity(embedder="hashed", text="whole"))
    computed = sft.diversity_weights(prompts, texts, embedder, 1.0)
    assert computed[0] == computed[2] == computed[4] < 1 < computed[3]
    assert sum(computed[i] for i in (0, 2, 3, 4)) == pytest.approx(4) and computed[1] == computed[5] == pytest.approx(1)
    # three copies and one at similarity s: 1 / (3 + s) each, and 1 / (1 + 3 s)
    vectors = torch.nn.functional.normalize(embedder(texts).double(), dim=1)
    s = float(vectors[0] @ vectors[3])
    copy, other = 1 / (3 + s), 1 / max(1 + 3 * s, 1)
    assert computed[3] == pytest.approx(4 * other / (3 * copy + other), rel=1e-5)
    half = sft.diversity_weights(prompts, texts, embedder, 0.5)
    assert half == pytest.approx([(1 + weight) / 2 for weight in computed])
    assert sft.diversity_weights(prompts, texts, embedder, 0.0) == [1.0] * 6


def test_demonstrations_of_a_batch_are_compared_whatever_their_prompts(tmp_path: Path) -> None:
    """With one demonstration per prompt, comparing those of a prompt changes nothing, those of a batch do."""
    data = [{"prompt": f"p{i}", "demonstration": "same words" if i % 4 else f"other {i} of {i * i}"} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in data))
    computed = {}
    for kind in ("null", "{embedder: hashed}", "{embedder: hashed, among: batch}"):
        files = f"data={{task: null, train: {tmp_path / 'data.jsonl'}}}"
        run = set_up(small.recipe(tmp_path, files, f"sft.polychromic={kind}"))
        sft.prepare(run)
        computed[kind] = sft.batch_of(run, run.items("sft"))[1]
    plain, of_prompt, of_batch = computed.values()
    assert torch.equal(plain, of_prompt)
    same = torch.tensor([i % 4 != 0 for i in range(16)])
    assert of_batch.mean() == pytest.approx(1) and of_batch[same].max() < 1 < of_batch[~same].min()


def test_weights_of_demonstrations_enter_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the weighted mean of the tokens' negative log-probs, irrespective of micro-batches."""
    run = set_up(small.recipe(tmp_path, "sft.polychromic={embedder: hashed}", "sft.micro_batch=5"))
    training.make_optimizer(run, Optimizer(), 0.0, 0)
    items = [item | {"sft_weight": 0.5 + i % 3} for i, item in enumerate(run.items("sft")[:16])]
    sums, lengths, real = list[float](), list[int](), Policy._logprobs

    def noted(self: Policy, batch: Any, share: bool = True) -> torch.Tensor:
        logprobs = real(self, batch, share)
        sums.extend((logprobs * batch.mask).sum(1).tolist())
        lengths.extend(batch.mask.sum(1).tolist())
        return logprobs

    monkeypatch.setattr(Policy, "_logprobs", noted)
    loss = training.sft_step(run, items, 1)["train/loss"]
    own = [item["sft_weight"] for item in items]
    total = sum(weight * length for weight, length in zip(own, lengths, strict=True))
    assert loss == pytest.approx(-sum(w * s for w, s in zip(own, sums, strict=True)) / total, rel=1e-5)


def test_too_many_demonstrations_of_a_prompt_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "demonstration": "b"}\n' * 257)
    more = (f"data={{task: null, train: '{tmp_path / 'data.jsonl'}'}}", "sft.polychromic={embedder: hashed}")
    with pytest.raises(ValueError, match=r"^sft.polychromic: must have at most 256 .* got 257 of 'a'$"):
        train(small.recipe(tmp_path / "run", *more))
