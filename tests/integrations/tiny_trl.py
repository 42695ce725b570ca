"""A model of a few thousand weights, a tokenizer and prompts, for TRL's trainers: nothing is downloaded."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from grpo_kernels.integrations.trl import FusedGRPOTrainer

WORDS = ["<pad>", "<end>", "<unknown>", *"abcdefghijklmnop"]


@functools.cache
def tokenizer() -> Any:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", padding_side="left"
    )


@functools.cache
def model(hidden_size: int = 16) -> str:
    """Path of the saved model; TRL loads the reference policy from the policy's path."""
    torch.manual_seed(0)
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.3,
            max_position_embeddings=64,
        )
    )
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    lm.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def prompts() -> Dataset:
    letters = WORDS[3:]
    return Dataset.from_list([{"prompt": " ".join(letters[i % 13 : i % 13 + 1 + i % 3])} for i in range(24)])


def many_a(completions: list[str], **_: Any) -> list[float]:
    # multiples of 1/8, so that TRL's mean of equal rewards is exact, too: VESPO uses the sign of the difference
    return [text.split().count("a") + len(text.split()) / 8 for text in completions]


def few_b(completions: list[str], **_: Any) -> list[float | None]:
    return [None if "c" in text else -float(text.split().count("b")) for text in completions]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """GRPOConfig arguments: two optimizer steps of two micro-batches per generation, with a reference policy."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 7,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "beta": 0.04,
        "logging_steps": 1,
        "seed": 3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    } | changes


def trainer(
    folder: Path, kind: type = FusedGRPOTrainer, changes: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A trainer of this model, with two rewards, `changes` of the settings, and further arguments of the trainer."""
    arguments = {
        "model": model(),
        "reward_funcs": [many_a, few_b],
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
    }
    args = GRPOConfig(**settings(folder, **{"max_steps": 4} | dict(changes or {})))
    return kind(args=args, **arguments | options)


def letters(texts: Sequence[str]) -> Tensor:
    """An embedder: the letter counts of each text."""
    return torch.tensor([[float(text.count(letter)) for letter in "abcdefghijklmnop"] for text in texts]) + 0.01


def micro_batch(trainer: Any, by_row: bool = False) -> dict[str, Tensor]:
    """A micro-batch of a generation with tool tokens, where the sampler has no log-prob for one token."""
    torch.manual_seed(5)
    rows, before, width = 4, 3, 6
    ids = torch.randint(3, len(WORDS), (rows, before + width))
    mask = (torch.arange(width) < torch.tensor([6, 4, 0, 5])[:, None]).long()
    tool_mask = torch.ones_like(mask)
    tool_mask[0, 2:4] = 0
    inputs = {
        "prompt_ids": ids[:, :before],
        "prompt_mask": torch.ones(rows, before, dtype=torch.long),
        "completion_ids": ids[:, before:],
        "completion_mask": mask,
        "tool_mask": tool_mask,
        "num_items_in_batch": (mask * tool_mask).sum() * 4,
        "advantages": torch.tensor([0.7, -1.1, 0.4, 0.0]),
    }
    with torch.no_grad():
        logprobs, _, _ = trainer._forward(trainer.model, inputs)
    near = [logprobs + 0.3 * torch.randn_like(logprobs) for _ in range(3)]
    near[2][1] += 0.8  # this row is off-policy by the sampler's log-probs, but not by those of the old policy
    ratio = torch.where((mask * tool_mask).bool(), (near[0] - near[2]).exp(), 1.0)
    inputs |= {"old_per_token_logps": near[0], "ref_per_token_logps": near[1], "sampling_per_token_logps": near[2]}
    inputs["sampling_per_token_logps"][1, 2] = float("nan")
    inputs["importance_sampling_ratio"] = ratio.mean(1, keepdim=True) if by_row else ratio
    return inputs
