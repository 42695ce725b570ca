"""Recipes for GPUs have their published values, and take two steps with small models of the same architectures."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import bundled, load
from grpo_trainer.tiny import train_tokenizer
from grpo_trainer.train import train
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Qwen2Config, Qwen3Config, T5Config

from tests.harness import quick
from tests.trainer.small import lines, steps
from tests.trainer.test_policy import CORPUS

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6}
SMALL = {"intermediate_size": 64, "num_hidden_layers": 2} | HEADS
QWEN2 = functools.partial(Qwen2Config, hidden_size=64, tie_word_embeddings=True, **SMALL)
T5_SIZES = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
# small stand-ins for the published models
CONFIGS: dict[str, Any] = {
    "Qwen/Qwen2.5-0.5B": QWEN2,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2,
    "Qwen/Qwen3-8B": functools.partial(Qwen3Config, hidden_size=64, head_dim=16, tie_word_embeddings=False, **SMALL),
    "google/t5-v1_1-base": functools.partial(
        T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, **T5_SIZES
    ),
}
ON_GPU = [name for name in bundled() if name.endswith("-gpu")]
TEMPLATE = "{% for message in messages %}{{ message.content }} {{ enable_thinking }}{% endfor %}"
LINES = [
    dict.fromkeys(("prompt", "post", "question"), f"{i} + {i}")
    | {"answer": f"{i} + {i} = {2 * i} #### {2 * i}", "answers": ["hi", "hello"], "reply": "yes", "likes": i}
    for i in range(8)
]
# replacements of keys that need a GPU, a server or a download; the sizes of --smoke are for groups
INSTEAD: dict[str, list[str]] = {
    "similarity_group-gpu": [
        "rl.rewards=[{name: gsm8k}]",
        *("rl.rollout.engine=transformers", "rl.rollout.vllm={}", "rl.algorithm.similarity.embedder=hashed"),
        *("rl.algorithm.similarity.workers=0", "rl.algorithm.similarity.gpus_per_worker=0.0"),
    ],
    "group_ppo-gpu": ["rl.rollout.num_generations=1"],
    "group_ppo-paper-gpu": ["rl.rollout.num_generations=1"],
    "reply-polychromic-gpu": ["rl.algorithm.set_size=2"],
}


def stand_in(name: str, folder: Path) -> Recipe:
    """The recipe with small sizes, data and model; everything else is as published."""
    published = load(name)
    is_seq2seq = published.model.path.startswith("google/t5")
    corpus = [*CORPUS, *(line["answer"] for line in LINES), "<extra_id_0>"]
    tokenizer = train_tokenizer(corpus, 200, is_seq2seq)
    tokenizer.chat_template = TEMPLATE
    config = CONFIGS[published.model.path](vocab_size=len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    kind: Any = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    files = [f"data.{part}={folder / 'lines.jsonl'}" for part in ("train", "sft", "validation", "test")]
    used = [file for file in files if getattr(published.data, file.split("=")[0].removeprefix("data.")) is not None]
    model = [f"model.path={folder / 'model'}", "model.attention=sdpa"]
    run = [f"output={folder / 'run'}", "logging.progress=false", "threads=1", "evaluation.embedder=hashed"]
    return load(name, [*model, *used, *run, *INSTEAD.get(name, [])], smoke=True)


# values on which a published document, script or configuration is definite
PUBLISHED = {
    "similarity_group-gpu": """rl.rollout.prompts=256 rl.rollout.num_generations=8
        rl.rollout.max_completion_length=15000 rl.minibatches=2 model.max_prompt_length=1024
        rl.algorithm.similarity.workers=8""",
    "group_ppo-gpu": """rl.rollout.prompts=8 rl.rollout.num_generations=1 rl.algorithm.critic.separate=true
        rl.algorithm.segments.group_variance_threshold=2.0 rl.algorithm.segments.group_max_size=8
        rl.algorithm.segments.adaptive_threshold=false""",
    "group_ppo-paper-gpu": """rl.algorithm.segments.group_variance_threshold=1.0
        rl.algorithm.segments.group_max_size=16 rl.algorithm.segments.adaptive_threshold=true""",
    "gsm8k-gpu": "model.four_bit=true rl.rollout.num_generations=4 rl.optimizer.lr=5e-5",
    "dialogue-gpu": "rl.rollout.num_generations=4 rl.algorithm.beta=0.1",
    "reply-gpu": """model.path=Qwen/Qwen3-8B model.chat_template_options.enable_thinking=false model.lora.rank=16
        model.lora.alpha=16 sft.optimizer.lr=2e-4 rl.optimizer.lr=1e-5 rl.algorithm.advantage.clip=10.0""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name: str) -> None:
    assert load(name, PUBLISHED[name].split()) == load(name)


@pytest.mark.parametrize("name", quick(ON_GPU, "group_ppo-gpu", "reply-gpu"))
def test_two_steps_of_a_small_model(name: str, tmp_path: Path) -> None:
    recipe = stand_in(name, tmp_path)
    if recipe.model.four_bit:
        pytest.importorskip("bitsandbytes")
    train(recipe)
    taken = steps(tmp_path / "run")
    assert [entry["step"] for entry in taken] == [1, 2]
    assert all(math.isfinite(entry["rewards/mean"]) for entry in taken)
    assert all(math.isfinite(entry["train/total_loss"]) for entry in taken if not entry["train/skipped"])
    assert lines(tmp_path / "run", "evaluations")
