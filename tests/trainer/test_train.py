"""Short runs: logs, checkpoints, every algorithm, and failures."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import GradientState
from grpo_trainer.algorithm import ALGORITHMS, WITH_CLUSTERS
from grpo_trainer.checkpoint import CheckpointError
from grpo_trainer.dry_run import dry_run
from grpo_trainer import train as training
from grpo_trainer.optimizer import lr_factor
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Reward
from grpo_trainer.report import write_report
from grpo_trainer.rewards import RewardError, require_columns
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.harness import quick
from tests.trainer import small


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json_of(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def json_of(text: str) -> Any:
    """Reads JSON as parsers do that know no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def timeless(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if not k.startswith(("time", "speed/"))} for entry in entries]


def weights(folder: Path, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = (
        sorted((folder / "checkpoints").iterdir())[-1] if checkpoint is None else folder / "checkpoints" / checkpoint
    )
    return load_file(newest / "model" / "model.safetensors")


def test_runs_write_their_logs(tmp_path: Path) -> None:
    final = train(small.recipe(tmp_path / "run"))
    entries = lines(tmp_path / "run")
    assert [(e["phase"], e["step"]) for e in entries if e["kind"] != "eval"] == [
        *(("sft", step) for step in range(1, 5)),
        *(("rl", step) for step in range(1, 5)),
    ]
    rl = [e for e in entries if e["kind"] == "train" and e["phase"] == "rl"]
    assert final["eval/test_prompts"] == 8 and 0 <= final["eval/test_reward"] <= 1.2
    names = {name for e in rl for name in e}
    for name in (
        "train/total_loss",
        "train/policy_loss",
        "train/kl_mean",
        "train/kl_penalty",
        "train/kl_std",
        "train/ratio_mean",
        "train/ratio_std",
        "train/entropy",
        "train/advantages_mean",
        "train/advantages_std",
        "train/grad_norm",
        "train/lr",
        *(f"rewards/{part}" for part in ("mean", "std", "min", "max", "median", "q25", "q75")),
        "group_stats/num_groups",
        "group_stats/avg_group_size",
        "rollout/truncated",
        "speed/tokens_per_second",
        *(f"time/{part}" for part in ("generate", "model", "advantage", "reward", "step")),
    ):
        assert name in names, name
    evals = [e for e in entries if e["kind"] == "eval"]
    for name in ("avg_reward", "avg_reward_std", "avg_group_reward", "num_groups", "total_responses"):
        assert f"eval/{name}" in evals[0], name
    written = json.loads((tmp_path / "run" / "evaluations" / "validation-1-000004.json").read_text())["prompts"]
    words = [len(line["greedy"].split()) for line in written]
    assert evals[-2]["eval/avg_response_length"] == sum(words) / len(words) > 0
    assert evals[-2]["eval/avg_reward"] == evals[-2]["eval/validation_reward"]
    assert rl[-1]["train/ratio_std"] > 0
    assert rl[0]["train/kl_rollout"] == pytest.approx(0, abs=1e-6)
    assert all(math.isfinite(e["train/total_loss"]) for e in rl)
    assert json.loads((tmp_path / "run" / "recipe.yaml").read_text())["name"] == "small"


def test_the_first_ratio_is_one_and_later_ones_are_not(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, "rl.steps=1", "rl.num_iterations=1", "rl.minibatches=1"))
    first = lines(tmp_path)[-3]
    assert (
        first["kind"] == "train" and e["phase"] == "rl" and abs(first["train/ratio_max"] - 1) < 1e-4 and abs(first["train/ratio_min"] - 1) < 1e-4
    )
    train(small.recipe(tmp_path / "more", "rl.steps=1", "rl.num_iterations=4"))
    later = lines(tmp_path / "more")[-3]
    assert later["train/ratio_max"] > 1.001


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small.recipe(tmp_path / name, f"seed={seed}", "rl.steps=2"))
    assert timeless(lines(tmp_path / "a")) == timeless(lines(tmp_path / "b"))
    assert timeless(lines(tmp_path / "a")) != timeless(lines(tmp_path / "c"))


def stopped_after(monkeypatch: pytest.MonkeyPatch, recipe: Any, phase: int, step: int) -> None:
    """Runs until just before a step."""
    real = PhaseRun._items

    def items(self: PhaseRun, data: Any, at: int) -> Any:
        if (self.number, at) == (phase, step + 1):
            raise KeyboardInterrupt
        return real(self, data, at)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PhaseRun, "_items", items)
        train(recipe)


@pytest.mark.parametrize(
    "algorithm",
    [
        "{name: grpo}",
        "{name: group_ppo}",
        "{name: ppo, critic: {separate: true}}",
        "{name: similarity_group_grpo, similarity: {embedder: hashed}}",
    ],
    ids=["grpo", "group_ppo", "critic", "similarity"],
)
@pytest.mark.parametrize(("phase", "step"), [(0, 2), (1, 0), (1, 2), (1, 3)])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: int, step: int, algorithm: str
) -> None:
    more = (f"rl.algorithm={algorithm}", "checkpoints.every=1")
    train(small.recipe(tmp_path / "whole", *more))
    recipe = small.recipe(tmp_path / "parts", *more)
    stopped_after(monkeypatch, recipe, phase, step)
    train(recipe, resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert timeless(lines(tmp_path / "whole")) == timeless(lines(tmp_path / "parts"))


@pytest.mark.slow
@pytest.mark.parametrize("kills", quick((1, 5), 1))
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """A run killed at several moments and resumed each time ends like an uninterrupted one."""
    more = ["checkpoints.every=1", "rl.steps=6"]
    code = (
        "import sys; from pathlib import Path; from grpo_trainer.train import train; from tests.trainer import small\n"
        "torch = __import__('torch'); torch.set_num_threads(1)\n"
        f"folder = Path({str(tmp_path)!r}) / sys.argv[1]\n"
        f"train(small.recipe(folder, *{more!r}), resume=(folder / 'recipe.json').exists())"
    )
    # in a process of its own, as other tests change settings of torch that affect sums
    subprocess.run([sys.executable, "-c", code, "whole"], check=True, stderr=subprocess.DEVNULL, timeout=120)
    command = [sys.executable, "-c", code, "parts"]
    events = tmp_path / "parts" / "events.jsonl"

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
    process = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120)
    assert process.returncode == 0
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert timeless(lines(tmp_path / "whole")) == timeless(lines(tmp_path / "parts"))


def test_checkpoints_that_are_damaged_or_foreign_are_refused(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path, "rl.steps=1")
    train(recipe)
    with pytest.raises(FileExistsError, match="contains a run already; continue it with --resume"):
        train(recipe)
    other = small.recipe(tmp_path, "rl.steps=1", "rl.optimizer.lr=0.5", "seed=4")
    with pytest.raises(CheckpointError, match=r": rl.optimizer.lr is \S+ there and 0.5 here, seed is 0 "):
        train(other, resume=True)
    train(small.recipe(tmp_path, "rl.steps=1", "logging.every=2"), resume=True)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    path = newest / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model/model.safetensors is damaged"):
        train(recipe, resume=True)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model/model.safetensors is missing"):
        train(recipe, resume=True)


def test_checkpoints_hold_no_pickle_and_only_the_last_are_kept(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, "checkpoints.every=1", "checkpoints.keep=3"))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["1-000002", "1-000003", "1-000004"]
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(tmp_path: Path, name: str) -> None:
    algorithm = {"name": name} | ({"similarity": {"embedder": "hashed"}} if name in WITH_CLUSTERS else {})
    train(small.recipe(tmp_path, "rl.steps=2", f"rl.algorithm={json.dumps(algorithm)}"))
    entries = [e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl"]
    assert all(math.isfinite(e["train/total_loss"]) and e["train/grad_norm"] > 0 for e in entries)


def test_while_a_separate_critic_warms_up_the_policy_stays(tmp_path: Path) -> None:
    critic = "rl.algorithm={name: ppo, critic: {warmup: 2, separate: true}}"
    for steps in (2, 3):
        train(small.recipe(tmp_path / str(steps), critic, f"rl.steps={steps}", "checkpoints.keep=9"))
    before, warm = (weights(tmp_path / "2", f"{place}") for place in ("0-000004", "1-000002"))
    assert all(torch.equal(before[name], warm[name]) for name in before)
    after = weights(tmp_path / "3", "1-000003")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_reward_rises(tmp_path: Path) -> None:
    """A dozen steps improve the reward."""
    more = ["steps=16", "optimizer.lr=5e-3", "rollout.prompts=12", "algorithm.loss={kl: none, kl_coef: 0.0}"]
    train(small.recipe(tmp_path, "evaluation.every=0", *(f"rl.{assignment}" for assignment in more)))
    rewards = [e["rewards/mean"] for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl"]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1


def test_accelerate_state_of_another_trainer_changes_nothing(tmp_path: Path) -> None:
    """A trainer stopped mid-accumulation must not make another one skip steps."""
    state = GradientState()
    runs = []
    for name, is_last, steps in (("alone", True, 1), ("after", False, 4)):

        class Left(Trainer):
            def _run(self, resume: bool, is_last: bool = is_last, steps: int = steps) -> dict[str, float]:
                state.sync_gradients, state.plugin_kwargs = is_last, {"num_steps": steps}
                return super()._run(resume)

        Left(small.recipe(tmp_path / name, "evaluation.every=0")).run()
        runs.append((weights(tmp_path / name), timeless(lines(tmp_path / name))))
    (alone, alone_lines), (after, after_lines) = runs
    assert all(torch.equal(value, after[name]) for name, value in alone.items()) and alone_lines == after_lines


def raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    raise KeyError("no such thing")


def too_few(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.0]


def not_a_number(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [math.nan if i % 2 else 0.1 * i for i in range(len(completions))]


def nothing(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None] * len(completions)


def equal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def needs_a_column(prompts: list[str], completions: list[str], anwser: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


HERE = "tests.trainer.test_train"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises",
            r"reward '.*:raises' raised KeyError: 'no such thing' \(test_train\.py, line \d+; GRPO_TRACEBACK=1 ",
        ),
        ("too_few", r"reward '.*:too_few' must return one value for each of \d+ responses, got 1"),
        ("not_a_number", r"reward '.*:not_a_number' must be a finite number or None, got nan for response 1"),
        ("missing", r"rl.rewards.0.name: cannot load '.*:missing': .* has no 'missing'$"),
        ("notthing", r"rl.rewards.0.name: cannot load .* has no 'notthing'; the nearest is 'nothing'$"),
    ],
)
def test_a_reward_that_fails_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        train(small.recipe(tmp_path, f"rl.rewards=[{{name: '{HERE}:{name}'}}]"))


def test_columns_that_the_data_lacks_are_named_before_anything_is_computed(tmp_path: Path) -> None:
    reward = f"rl.rewards=[{{name: '{HERE}:needs_a_column'%s}}]"
    missing = r"^rl\.rewards\.0: .* needs the column 'anwser'; the nearest is 'answer', all are answer, "
    recipe = small.recipe(tmp_path, reward % "")
    with pytest.raises(ValueError, match=missing):
        set_up(recipe)
    assert any(re.search(missing, problem) for problem in dry_run(recipe)[1])
    set_up(small.recipe(tmp_path, reward % ", on_error: skip"))  # its failures are counted
    own = f"evaluation.rewards=[{{name: '{HERE}:needs_a_column'}}]"
    missing = missing.replace(r"rl", "evaluation")
    with pytest.raises(ValueError, match=missing):
        set_up(small.recipe(tmp_path, own))
    assert any(re.search(missing, problem) for problem in dry_run(small.recipe(tmp_path, own))[1])


def scored_in_part(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    values = small.digits(prompts, completions)
    return [None if i < 4 or i % 4 == 0 or i == 5 else value + i / 7 for i, value in enumerate(values)]


def test_unscored_responses_are_left_out_of_the_spread_and_not_their_prompts(tmp_path: Path) -> None:
    reward = f"rl.rewards=[{{name: '{HERE}:scored_in_part'}}]"
    train(small.recipe(tmp_path, reward, "rl.steps=1", "logging.samples=100"))
    step = next(e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl")
    values = [sample["rewards"][0] for sample in lines(tmp_path, "samples")]
    scored = [[v for v in values[i : i + 4] if v is not None] for i in range(0, 24, 4)]
    assert [len(group) for group in scored] == [0, 2, 3, 3, 3, 3]
    within = statistics.mean(statistics.stdev(group) for group in scored[1:])
    assert step["rewards/group_std"] == pytest.approx(within, rel=1e-5)
    assert step["train/reward_std"] == pytest.approx(statistics.stdev(map(statistics.mean, scored[1:])), rel=1e-5)
    assert step["group_stats/flat_groups"] == 1  # the one without a reward


def test_results_are_json_for_every_parser(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, f"rl.rewards=[{{name: '{HERE}:nothing'}}]", "rl.steps=1"))
    assert {sample["rewards"][0] for sample in lines(tmp_path, "samples")} == {None}
    contents = [json_of(file.read_text()) for file in sorted(tmp_path.rglob("*.json"))]
    evaluations = [content for content in contents if "prompts" in content]
    assert evaluations and {line["reward"] for content in evaluations for line in content["prompts"]} == {None}
    write_report(tmp_path)


def test_failures_are_counted_where_they_may_be_skipped(tmp_path: Path) -> None:
    reward = f"rl.rewards=[{{name: '{HERE}:not_a_number', on_error: skip}}]"
    train(small.recipe(tmp_path, reward, "rl.steps=1"))
    entry = next(e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl")
    assert entry["rewards/skipped"] == 12 and math.isfinite(entry["train/total_loss"])


def test_a_step_without_rewards_and_repeated_prompts_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = "rl.steps=1", "rl.rollout.prompts=50", "logging.progress=true"
    train(small.recipe(tmp_path, f"rl.rewards=[{{name: '{HERE}:nothing'}}]", *changes))
    entry = next(e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl")
    assert entry["rewards/unscored"] == entry["group_stats/num_groups"] * entry["group_stats/avg_group_size"] > 0
    events = [e["event"] for e in lines(tmp_path, "events")]
    assert "no response of a step has a reward" in events and "prompts occur more than once in a step" in events
    shown = capsys.readouterr().err
    assert "step 1: no response has a reward" in shown and re.search(r"rollout.prompts: 50 of \d+ prompts", shown)


def test_a_first_step_without_advantages_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = f"rl.rewards=[{{name: '{HERE}:equal'}}]"
    train(small.recipe(tmp_path, reward, "rl.steps=2", "logging.progress=true"))
    assert all(e["train/skipped"] == 1 for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl")
    text = "no response has an advantage, so the weights stay; mean reward 1"
    assert [line for line in capsys.readouterr().err.splitlines() if text in line] == [f"step 1: {text}"]


def test_columns_that_rewards_get_as_arguments(tmp_path: Path) -> None:
    for name in ("prompts", "completions", "truncated"):
        with pytest.raises(ValueError, match=f"^rewards.0: the data must not have the column '{name}'"):
            require_columns(Reward(name="exact", on_error="skip"), equal, "rewards.0", [{"prompt": "p", name: 1}])


@pytest.mark.parametrize("name", ["nothing", "equal"])
def test_a_batch_without_any_advantage_is_skipped_and_said_so(tmp_path: Path, name: str) -> None:
    train(small.recipe(tmp_path, f"rl.rewards=[{{name: '{HERE}:{name}'}}]", "rl.steps=1"))
    entry = next(e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl")
    assert entry["train/skipped"] == 1 and "train/total_loss" not in entry
    assert any(e["event"].startswith("minibatch skipped") and e["phase"] == 1 for e in lines(tmp_path, "events"))


def test_a_reference_that_is_not_the_policy_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_trainer.policy import Reference

    real = Reference.logprobs
    monkeypatch.setattr(Reference, "logprobs", lambda self, batch: real(self, batch) + 1e-3)
    with pytest.raises(RuntimeError, match="the reference must equal the policy before the first step"):
        train(small.recipe(tmp_path))


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Policy._logprobs
    monkeypatch.setattr(Policy, "_logprobs", lambda self, batch, share=True: real(self, batch, share) * math.nan)
    with pytest.raises(FloatingPointError, match="phase 0: the gradient's norm must be finite, got nan"):
        train(small.recipe(tmp_path))


def test_prompts_that_are_too_long_are_counted(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, "model.max_prompt_length=19", "rl.steps=1"))
    dropped = [e for e in lines(tmp_path, "events") if e["event"] == "prompts left out"]
    assert dropped and all(e["limit"] == 19 and e["count"] > 0 for e in dropped)
    no_line = r"^data: phase 0 \(sft\) has no usable line"
    with pytest.raises(ValueError, match=rf"{no_line}; prompts left out: 64 by model\.max_prompt_length, 1$"):
        train(small.recipe(tmp_path / "none", "model.max_prompt_length=1"))


def test_a_later_phase_without_a_usable_line_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = set_up(small.recipe(tmp_path))
    items = trainer.items
    monkeypatch.setattr(trainer, "items", lambda split: [] if split == "train" else items(split))
    with pytest.raises(ValueError, match=r"^data: phase 1 \(rl\) has no usable line$"):
        trainer.run()
    assert not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path)


def test_demonstrations_are_read_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = set_up(small.recipe(tmp_path))
    monkeypatch.setattr("grpo_trainer.train.encode_demonstration", lambda *_: [0, 10**6])
    with pytest.raises(ValueError, match=r"model\.path: .* of every token of the demonstrations, got token 1000000"):
        trainer.items("sft")
    assert trainer.items("train")


def test_every_epoch_walks_over_all_the_data(tmp_path: Path) -> None:
    trainer = set_up(small.recipe(tmp_path))
    settings = trainer.recipe.rl
    assert settings is not None
    run = RlRun(trainer, 1, settings, 0)
    data = [{"i": i} for i in range(24)]
    seen = [[item["i"] for item in run._items(data, step)] for step in range(1, 9)]
    first, second = ([i for step in part for i in step] for part in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    assert seen[2] == [item["i"] for item in run._items(data, 3)]


def test_learning_rates() -> None:
    from grpo_trainer.recipe import Optimizer

    warm = Optimizer(warmup=3, schedule="linear", final=0.1)
    factors = [lr_factor(warm, step, 13) for step in range(1, 14)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[-1] == pytest.approx(0.19)
    assert all(b < a for a, b in itertools.pairwise(factors[3:]))
    assert {lr_factor(Optimizer(schedule="constant"), step, 9) for step in range(1, 10)} == {1.0}
    cosine = Optimizer(schedule="cosine", final=0.0)
    assert lr_factor(cosine, 1, 10) == 1.0 and lr_factor(cosine, 6, 10) == pytest.approx(0.5)
