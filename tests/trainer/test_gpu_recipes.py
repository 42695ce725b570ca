"""Recipes for GPUs take two steps with small models of the same architectures, on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from grpo_trainer.recipe import Recipe, load
from grpo_trainer.settings import plain
from grpo_trainer.tiny import train_tokenizer
from grpo_trainer.train import train
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.harness import quick
from tests.trainer.published_models import CONFIGS
from tests.trainer.test_dry_run import ON_GPU
from tests.trainer.test_policy import CORPUS

SMALL: dict[str, dict[str, int]] = {
    "qwen2": {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2},
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "t5": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
}
TEMPLATE = "{% for message in messages %}{{ message.content }} {{ enable_thinking }}{% endfor %}"
LINES = [
    {"prompt": f"{i} + {i}", "answer": f"{i} + {i} = {2 * i} #### {2 * i}", "answers": ["hi", "hello"], "reply": "yes"}
    | {"post": f"{i} + {i}", "likes": i, "question": f"{i} + {i}"}
    for i in range(8)
]
# Replacements of keys that need a GPU, a server, a download or many rows.
INSTEAD: dict[str, list[str]] = {
    "similarity_group-gpu": [
        "rl.rewards=[{name: gsm8k}]",
        "rl.rollout.engine=transformers",
        "rl.rollout.vllm={}",
        "rl.algorithm.similarity.embedder=hashed",
        "rl.algorithm.similarity.workers=0",
        "rl.algorithm.similarity.gpus_per_worker=0.0",
    ],
    # sizes of --smoke are for groups
    "group_ppo-gpu": ["rl.rollout.num_generations=1"],
    "group_ppo-paper-gpu": ["rl.rollout.num_generations=1"],
    "reply-polychromic-gpu": ["rl.algorithm.set_size=2"],
}


def stand_in(name: str, folder: Path) -> Recipe:
    """The recipe with small sizes, data and model; everything else is as published."""
    published = load(name)
    config = CONFIGS[published.model.path]()
    is_seq2seq = bool(config.is_encoder_decoder)
    corpus = [*CORPUS, *(line["answer"] for line in LINES), "<extra_id_0>"]
    tokenizer = train_tokenizer(corpus, 200, is_seq2seq)
    tokenizer.chat_template = TEMPLATE
    config = CONFIGS[published.model.path](**SMALL[config.model_type], vocab_size=len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    kind: Any = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    files = [f"data.{part}={folder / 'lines.jsonl'}" for part in ("train", "sft", "validation", "test")]
    used = [file for file in files if getattr(published.data, file.split("=")[0].removeprefix("data.")) is not None]
    model = [f"model.path={folder / 'model'}"]
    if published.model.attention == "flash_attention_2":
        model.append("model.attention=sdpa")
    samples = ["evaluation.embedder=hashed"] if published.evaluation.samples else []
    run = [f"output={folder / 'run'}", "logging.progress=false", "threads=1"]
    return load(name, [*model, *used, *samples, *run, *INSTEAD.get(name, [])], smoke=True)


# Values on which a published document, script or configuration is definite.
PUBLISHED: dict[str, dict[str, Any]] = {
    "similarity_group-gpu": {
        "rl.rollout.prompts": 256,
        "rl.rollout.num_generations": 8,
        "rl.rollout.max_completion_length": 15000,
        "rl.minibatches": 2,
        "rl.algorithm.similarity.workers": 8,
        "model.max_prompt_length": 1024,
    },
    "group_ppo-gpu": {
        "rl.rollout.prompts": 8,
        "rl.rollout.num_generations": 1,
        "rl.algorithm.critic.separate": True,
        "rl.algorithm.segments.group_variance_threshold": 2.0,
        "rl.algorithm.segments.group_max_size": 8,
        "rl.algorithm.segments.adaptive_threshold": False,
    },
    "group_ppo-paper-gpu": {
        "rl.algorithm.segments.group_variance_threshold": 1.0,
        "rl.algorithm.segments.group_max_size": 16,
        "rl.algorithm.segments.adaptive_threshold": True,
    },
    "gsm8k-gpu": {"model.four_bit": True, "rl.rollout.num_generations": 4, "rl.optimizer.lr": 5e-5},
    "dialogue-gpu": {"rl.rollout.num_generations": 4, "rl.algorithm.beta": 0.1},
    "reply-gpu": {
        "model.path": "Qwen/Qwen3-8B",
        "model.chat_template_options.enable_thinking": False,
        "model.lora.rank": 16,
        "model.lora.alpha": 16,
        "sft.optimizer.lr": 2e-4,
        "rl.optimizer.lr": 1e-5,
        "rl.algorithm.advantage.clip": 10.0,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name: str) -> None:
    def value(path: str) -> Any:
        found: Any = plain(load(name))
        for part in path.split("."):
            found = found[int(part) if part.isdigit() else part]
        return found

    assert {path: value(path) for path in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", quick(ON_GPU, "group_ppo-gpu", "reply-gpu"))
def test_two_steps_of_a_small_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = stand_in(name, tmp_path)
    if recipe.model.four_bit:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("os.fsync", lambda handle: None)
    train(recipe)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if entry["phase"] == "rl"]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert all(math.isfinite(entry["rewards/mean"]) for entry in steps)
    updates = [entry for entry in steps if not entry["train/skipped"]]
    assert all(math.isfinite(entry["train/total_loss"]) for entry in updates)
    assert any(entry["phase"] == "eval" for entry in entries)
