"""TRL's GRPO trainer with the fused loss, and advantages within groups of similar answers.

    python examples/trl_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 100

Offline, `--model` takes a folder; that of `make train` is runs/arithmetic-0/checkpoints/rl-80/model. Only the class
and its arguments `similarity`, `advantages` and `embedder` differ from plain TRL. It needs
`pip install --no-build-isolation ".[trl]"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer

TOPICS = ["the sea", "a clock", "two trains", "an empty room", "the first snow", "a borrowed book", "rain", "a bridge"]


def short_and_plain(completions: Sequence[str], **columns: object) -> list[float]:
    """Reward for about ten words without repetition."""
    words = [text.split() for text in completions]
    return [len(set(text)) / max(len(text), 1) - abs(len(text) - 10) / 10 for text in words]


def embed(texts: Sequence[str]) -> Tensor:
    """Count letter pairs; with sentence-transformers: torch.from_numpy(model.encode(texts))."""
    vectors = torch.zeros(len(texts), 1024)
    for vector, text in zip(vectors, texts, strict=True):
        for first, second in pairwise(text):
            vector[(31 * ord(first) + ord(second)) % 1024] += 1
    return vectors + 1e-3


def main() -> FusedGRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="name or folder; default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="steps of GRPO; default: %(default)s")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt; default: %(default)s")
    parser.add_argument("--length", type=int, default=48, help="longest completion in tokens; default: %(default)s")
    parser.add_argument("--out", default="runs/trl", help="folder for checkpoints; default: %(default)s")
    options = parser.parse_args()
    settings = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        num_generations=options.group,
        max_completion_length=options.length,
        per_device_train_batch_size=options.group,
        loss_type="dapo",
        epsilon_high=0.28,
        beta=0.02,
        logging_steps=1,
        report_to=[],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = FusedGRPOTrainer(
        options.model,
        short_and_plain,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": f"Write one sentence about {topic}."} for topic in TOPICS]),
        similarity=gk.SimilarityConfig(),
        # small groups blend in the statistics of their prompt
        advantages=gk.AdvantageConfig("grpo", singleton="parent", shrinkage=2.0),
        embedder=embed,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
