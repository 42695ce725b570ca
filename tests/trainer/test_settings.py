"""Recipes are checked key by key, and every key is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpo_trainer.algorithm import Plan
from grpo_trainer.keys import explain
from grpo_trainer.recipe import Algorithm, Recipe, Rl, bundled, load
from grpo_trainer.recipes import validated, fields_of, override, plain, read_yaml
from grpo_trainer.train import plan_of

from tests.trainer import small


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sead": 1}, r"^sead: no such key; the nearest is 'seed', all are backend, checkpoints, data"),
        ({"model": {"paht": "x"}}, r"^model.paht: no such key; the nearest is 'path'"),
        ({"phases": [{"rl": {"rollout": {"tempratur": 1}}}]}, r"^rl.rollout.tempratur: .* 'temperature'"),
        ({"seed": "one"}, r"^seed: must be int, got str 'one'"),
        ({"seed": True}, r"^seed: must be int, got bool True"),
        ({"model": {"dtype": "float23"}}, r"^model.dtype: must be one of .*, got 'float23'; the nearest is 'float32'$"),
        ({"phases": {}}, r"^phases: must be list of Phase, got dict"),
        ({"phases": [{}]}, r"^phases.0: must have either sft or rl, got \[\]$"),
        ({"phases": [{"sft": {}}, {"sft": {}, "rl": {}}]}, r"^phases.1: must have either .*, got \['sft', 'rl'\]$"),
        ({"model": 3}, r"^model: must be a mapping, got int 3$"),
        (
            {"model": {"lora": True}},
            r"^model.lora: must be a mapping, got bool True; \{\} leaves its keys at their defaul",
        ),
        ({"data": {"options": None}}, r"^data.options: must be a mapping, got NoneType None; \{\} leaves its keys at"),
        ({"data": {"task": None}}, r"^data.train: must be given without a task, got None"),
        ({"model": {"four_bit": True}}, r"^model.four_bit: requires lora, such as .*, got True"),
        ({"phases": [{"sft": {"steps": 0}}]}, r"^sft.steps: must be positive, got 0"),
        (
            {"phases": [{"rl": {"rollout": {"top_p": 1.5}}}]},
            r"^rl.rollout.top_p: must be in \(0, 1\], got 1.5",
        ),
        ({"output": "runs/{nmae}"}, r"^output: may contain .* and nothing else, got 'runs/\{nmae\}'"),
        ({"data": {"train": "mine.jsonl"}}, r"^data.train: requires task: null, which is 'arithmetic', got 'mine.js"),
        ({"data": {"limit": 0}}, r"^data.limit: must be positive, got 0"),
        ({"checkpoints": {"keep": 0}}, r"^checkpoints.keep: must be positive, got 0"),
        ({"logging": {"every": 0}}, r"^logging.every: must be positive, got 0"),
        ({"model": {"tiny": {"heads": 3}}}, r"^model.tiny.heads: must divide hidden, 128, got 3"),
        (
            {"phases": [{"rl": {"rollout": {"vllm": {"sleep": False, "cache_gib": 2}}}}]},
            r"^rl.rollout.vllm: requires rollout.engine: vllm, got \{'cache_gib': 2.0, 'sleep': False\}$",
        ),
        ({"model": {"four_bit": True, "lora": {}}}, r"^model.four_bit: cannot be combined with path: tiny.*, got True"),
        ({"model": {"dtype": "bfloat16", "mixed_precision": "bf16"}}, r"^model.mixed_precision: requires dtype: float"),
        (
            {"phases": [{"sft": {"optimizer": {"betas": [0.9]}}}]},
            r"^sft.optimizer.betas: must be two numbers ",
        ),
        ({"phases": [{"rl": {"rollout": {"batch": 0}}}]}, r"^rl.rollout.batch: must be positive, got 0"),
        (
            {"phases": [{"rl": {"rollout": {"mask_truncated": True}}}]},
            r"^rl.rollout.mask_truncated: no such key; the nearest is 'truncated', all are batch, ",
        ),
        (
            {"phases": [{"rl": {"rollout": {"truncated": "leave-out"}}}]},
            r"^rl.rollout.truncated: must be one of 'vote', 'leave_out', got 'leave-out'; the nearest is ",
        ),
        (
            {"phases": [{"rl": {"rollout": {"min_new_tokens": 40}}}]},
            r"^rl.rollout.min_completion_length: must not exceed max_new_tokens, got 40",
        ),
        (
            {"phases": [{"rl": {"minibatches": 65}}]},
            r"^rl.minibatches: must be in \[1, .*\], got 65",
        ),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        validated(Recipe, values)


def test_numbers_are_read_as_people_write_them() -> None:
    recipe = validated(Recipe, read_yaml("phases: [{sft: {optimizer: {lr: 1e-5, weight_decay: 0}}}]", "recipe"))
    assert recipe.sft is not None
    optimizer = recipe.sft.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-5, 0.0) and isinstance(optimizer.weight_decay, float)


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^x: must be YAML: the key 'a' must be there once in line 2, column 1"):
        read_yaml("a: 1\na: 2", "x")
    assert read_yaml("[{a: 1}, {a: 2}]", "x") == [{"a": 1}, {"a": 2}]


def test_a_base_is_a_file_or_a_bundled_recipe_but_not_the_file_itself(tmp_path: Path) -> None:
    own, other = tmp_path / "own.yaml", tmp_path / "other.yaml"
    own.write_text("base: arithmetic\nseed: 7")
    assert load(own).seed == 7 and load(own).phases == load("arithmetic").phases
    own.write_text("base: other.yaml")
    other.write_text("base: own.yaml")
    with pytest.raises(ValueError, match=r"^base: must not lead back to a file .*, got '.*own\.yaml'"):
        load(own)
    own.write_text("base: arithmetic\nphases: [rl: {steps: 3}]")
    with pytest.raises(ValueError, match=r"^phases\.0: must be sft as in the base, .* got \['rl'\]; sft: null in it"):
        load(own)
    own.write_text("base: arithmetic\nphases: [{sft: null, rl: {steps: 3}}]")
    assert [phase.rl.steps for phase in load(own).phases if phase.rl] == [3, load("arithmetic").phases[1].rl.steps]
    with pytest.raises(ValueError, match=r"^base: must be in a recipe's file, .* got 'base=own.yaml'"):
        load("arithmetic", ["base=own.yaml"])


def test_yaml_makes_numbers_but_no_objects() -> None:
    assert read_yaml("[1e-5, -2E+3, 1.5e2, 1e5x, .5e1, 0.1, 7]", "x") == [1e-5, -2000.0, 150.0, "1e5x", 5.0, 0.1, 7]
    with pytest.raises(ValueError, match=r"^x: must be YAML: .*python/object"):
        read_yaml("!!python/object/apply:os.getcwd []", "x")


def test_overrides() -> None:
    values: dict[str, Any] = {"phases": [{"sft": {}}, {"rl": {"steps": 3}}]}
    for assignment in ("rl.steps=10", "model.tiny.hidden=64", "name=a b", "model.lora={rank: 4}"):
        override(values, assignment)
    recipe = validated(Recipe, values)
    assert recipe.rl is not None and recipe.rl.steps == 10
    assert recipe.model.tiny.hidden == 64 and recipe.name == "a b"
    assert recipe.model.lora is not None and recipe.model.lora.rank == 4
    override(values, "model.lora=null")  # removes a mapping, as null in a recipe with a base does
    assert validated(Recipe, values).model == validated(Recipe, {"model": {"tiny": {"hidden": 64}}}).model
    override(values, "model.tiny=null")
    assert validated(Recipe, values).model.tiny == Recipe().model.tiny
    for bad, message in (
        ("seed", "key=value"),
        ("phases.2.rl=1", "index below 2"),
        ("name.x=1", "goes through 'name'"),
    ):
        with pytest.raises(ValueError, match=f"override: .*{message}"):
            override(values, bad)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": {"clip_hihg": 0.3}}, r"algorithm.loss.clip_hihg: no such key; the nearest is 'clip_high'"),
        ({"advantage": {"std_flor": 0.3}}, r"algorithm.advantage.std_flor: no such key; the nearest is 'std_floor'"),
        ({"similarity": {"config": {"linkag": "x"}}}, r"algorithm.similarity.config.linkag: .* nearest is 'linkage'"),
        ({"loss": {"loss": "gvpo"}}, r"algorithm.loss: LossConfig: loss must be .* got 'gvpo'"),
        ({"loss": {"ratio": "segment"}}, r"algorithm.loss.ratio: must not be of segments, .* 'segment' with 'grpo'$"),
        ({"advantage": {"estimator": "remax"}}, r"algorithm.advantage.estimator: must not need baselines, .* 'remax'"),
        ({"advantage": {"center": "baseline"}}, r"algorithm.advantage.center: must not need baselines, .* 'baseline'"),
        ({"advantage": {"shrinkage": 2.0}}, r"algorithm.advantage.shrinkage: applies within clusters: .* got 2.0"),
        ({"advantage": {"singleton": "parent"}}, r"algorithm.advantage.singleton: applies within clusters: .* 'paren"),
        ({"loss": {"clip_high": "much"}}, r"algorithm.loss: LossConfig: clip_high must be .*'much'"),
        ({"advantage": {"reward_weights": [1.0]}}, r"algorithm.advantage.reward_weights: is set by the weight of each"),
        (
            {"name": "polychromic", "advantage": {"clip": 1.0}},
            r"algorithm.advantage: applies to algorithms other than",
        ),
        ({"name": "polychromic", "similarity": {"sharing": 1.0}}, r"algorithm.similarity.sharing: applies to algor"),
        (
            {"name": "ppo", "drop_flat": False},
            r"algorithm.drop_flat: applies to .* without a critic, got False",
        ),
    ],
)
def test_unused_settings_of_an_algorithm_are_named(algorithm: dict[str, Any], message: str) -> None:
    recipe = validated(Recipe, {"phases": [{"rl": {"algorithm": algorithm}}]})
    assert recipe.rl is not None
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        Plan.of(recipe.rl.algorithm, 8)


def test_a_recipe_survives_being_written_down(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path)
    assert validated(Recipe, plain(recipe)) == recipe


def test_a_base_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 3\nphases: [{sft: {steps: 5}}, {rl: {steps: 7}}]\n")
    (tmp_path / "own.yaml").write_text("base: base.yaml\nname: own\nphases: [{sft: {steps: 1}}]\n")
    recipe = load(tmp_path / "own.yaml", ["rl.num_iterations=3"])
    sft, rl = recipe.sft, recipe.rl
    assert sft is not None and rl is not None
    assert (recipe.seed, recipe.name, sft.steps, rl.steps, rl.num_iterations) == (3, "own", 1, 7, 3)
    alone = load(tmp_path / "own.yaml", ["sft=null", "rl.num_iterations=3"])
    assert [phase.rl for phase in alone.phases] == [rl]
    with pytest.raises(FileNotFoundError, match=r"recipe: no file 'arithmatic'; the nearest is 'arithmetic', and"):
        load("arithmatic")


def test_every_key_is_explained() -> None:
    lines = list(explain(Recipe))
    assert len(lines) > 80
    assert all(line.split(": ", 1)[1].strip() for line in lines)
    assert any(line.startswith("phases[].rl.rollout.temperature (float, default 1.0): ") for line in lines)


def test_defaults_are_of_their_types() -> None:
    def check(kind: type) -> None:
        for field in fields_of(kind).values():
            if isinstance(field.default, list | dict) or field.default is None:
                continue
            if hasattr(field.default, "__dataclass_fields__"):
                check(type(field.default))

    check(Recipe)
    assert validated(Recipe, {}) == Recipe()


@pytest.mark.parametrize("name", bundled())
def test_bundled_recipes_are_valid(name: str) -> None:
    for smoke in (False, True):
        recipe = load(name, smoke=smoke)
        assert recipe.phases or name == "reply-base"
        for phase in recipe.phases:
            if phase.rl is not None:
                Plan.of(phase.rl.algorithm, phase.rl.rollout.max_completion_length)


def test_all_problems_are_named_at_once() -> None:
    wrong = {"sead": 1, "thread": 2, "model": {"paht": "x"}, "phases": [{"rl": {"stps": 1}}, {"sft": {"steps": "a"}}]}
    with pytest.raises(ValueError, match="no such key") as error:
        validated(Recipe, wrong)
    keys = [line.strip().partition(":")[0] for line in str(error.value).splitlines()]
    assert keys == ["sead", "thread", "model.paht", "rl.stps", "sft.steps"]
    with pytest.raises(ValueError, match="top_p") as error:
        load("arithmetic", ["rl.rollout.temperature=-1", "rl.rollout.top_p=1.5", "threads=0"])
    assert len(str(error.value).splitlines()) == 3
    with pytest.raises(
        ValueError, match=r"(?s)^phases.3.rl.algorithm.advantage.std_flor.*\n  phases.3.rl.algorithm.loss.x: "
    ):
        plan_of(3, Rl(algorithm=Algorithm(advantage={"std_flor": 1}, loss={"x": 1})))


def test_what_an_algorithm_sets() -> None:
    plan = Plan.of(Algorithm(name="gspo", advantage={"clip": 2.0}, loss={"clip_high": 0.5}), 8)
    assert plan.described() == (
        "advantages: clip=2.0; loss: ratio=sequence, clip_low=0.0003, clip_high=0.5, aggregation=seq-mean-token-mean"
    )
    for name in ("rloo", "grpo"):
        plan = Plan.of(Algorithm(name=name, loss={"kl": "none"}), 8)
        assert plan.described().endswith("; loss: the defaults") and not plan.needs_reference
    with pytest.raises(ValueError, match=r"kl must be one of k1, .* for the others, got kl=.none., kl_coef=0\.1"):
        Plan.of(Algorithm(name="grpo", loss={"kl": "none", "kl_coef": 0.1}), 8)
