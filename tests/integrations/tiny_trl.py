"""A model of a few thousand weights, a tokenizer and prompts, for TRL's trainers: nothing is downloaded."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
