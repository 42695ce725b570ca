"""Errors before the first step and during a run, and counts of everything that is left out.

Faults they are there for: a failure that is not named, or changes a result without a word; a line, a response or a
reward that is left out and not counted.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from grpo_trainer.policy import Policy, Reference
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import LoadedReward, RewardError, require_columns
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.small import lines, steps

HERE = "tests.trainer.test_failures"


def rewarded_by(name: str, more: str = "") -> str:
    return f"rl.rewards=[{{name: '{HERE}:{name}'{more}}}]"


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


def scored_in_part(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    values = small.digits(prompts, completions)
    return [None if i < 4 or i % 4 == 0 or i == 5 else value + i / 7 for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises",
            r"reward '.*:raises' raised KeyError: 'no such thing' \(test_failures\.py, line \d+; GRPO_TRACEBACK=1 ",
        ),
        ("too_few", r"reward '.*:too_few' must return one value for each of \d+ responses, got 1"),
        ("not_a_number", r"reward '.*:not_a_number' must be a finite number or None, got nan for response 1"),
        ("missing", r"rl.rewards.0.name: cannot load '.*:missing': .* has no 'missing'$"),
        ("notthing", r"rl.rewards.0.name: cannot load .* has no 'notthing'; the nearest is 'nothing'$"),
    ],
)
def test_a_reward_that_fails_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        train(small.recipe(tmp_path, rewarded_by(name)))


def test_columns_that_the_data_lacks_are_named_before_anything_is_computed(tmp_path: Path) -> None:
    missing = r" needs the column 'anwser'; the nearest is 'answer', all are answer, "
    with pytest.raises(ValueError, match=rf"^rl\.rewards\.0: .*{missing}"):
        set_up(small.recipe(tmp_path, rewarded_by("needs_a_column")))
    set_up(small.recipe(tmp_path, rewarded_by("needs_a_column", ", on_error: skip")))  # its failures are counted
    with pytest.raises(ValueError, match=rf"^evaluation\.rewards\.0: .*{missing}"):
        set_up(small.recipe(tmp_path, rewarded_by("needs_a_column").replace("rl.", "evaluation.")))
    for name in ("prompts", "completions", "truncated"):
        reward = LoadedReward(Reward(name="exact", on_error="skip"), equal)
        with pytest.raises(ValueError, match=f"^rewards.0: the data must not have the column '{name}'"):
            require_columns(reward, "rewards.0", [{"prompt": "p", name: 1}])


def test_unscored_responses_are_left_out_of_the_spread_and_not_their_prompts(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, rewarded_by("scored_in_part"), "rl.steps=1", "logging.samples=100"))
    (step,) = steps(tmp_path)
    values = [sample["rewards"][0] for sample in lines(tmp_path, "samples")]
    scored = [[v for v in values[i : i + 4] if v is not None] for i in range(0, 24, 4)]
    assert [len(group) for group in scored] == [0, 2, 3, 3, 3, 3]
    within = statistics.mean(statistics.stdev(group) for group in scored[1:])
    assert step["rewards/group_std"] == pytest.approx(within, rel=1e-5)
    assert step["train/reward_std"] == pytest.approx(statistics.stdev(map(statistics.mean, scored[1:])), rel=1e-5)
    assert step["group_stats/flat_groups"] == 1  # the one without a reward


def test_failures_are_counted_where_they_may_be_skipped(tmp_path: Path) -> None:
    samples = "evaluation={samples: 2, embedder: hashed}"
    train(small.recipe(tmp_path, rewarded_by("not_a_number", ", on_error: skip"), "rl.steps=1", samples))
    (step,) = steps(tmp_path)
    assert lines(tmp_path, "evaluations")[-1]["metrics"]["skipped"] == 8 / 2 + 2 * 8 / 2  # greedy and sampled
    assert step["rewards/skipped"] == 12 and math.isfinite(step["train/total_loss"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "step 1: no response has a reward, so nothing is learned"),
        ("equal", "step 1: no response has an advantage, so the weights stay; mean reward 1"),
    ],
)
def test_a_step_that_teaches_nothing_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    train(small.recipe(tmp_path, rewarded_by(name), "rl.steps=2", "rl.rollout.prompts=50", "logging.progress=true"))
    taken, printed = steps(tmp_path), capsys.readouterr().err
    assert all(step["train/skipped"] == 1 and "train/total_loss" not in step for step in taken)
    assert [line for line in printed.splitlines() if line.startswith("step ")] == [said]
    assert re.search(r"rl.rollout.prompts: 50 of \d+ prompts, so that some occur twice", printed)
    events = [event["event"] for event in lines(tmp_path, "events")]
    assert "minibatch skipped: no response has an advantage" in events
    assert events.count("no response of a step has a reward") == (name == "nothing")
    if name == "nothing":
        assert taken[0]["rewards/unscored"] == 50 * 4 and taken[0]["rewards/mean"] is None
        assert {line["reward"] for e in lines(tmp_path, "evaluations") for line in e["prompts"]} == {None}


def test_a_reference_that_is_not_the_policy_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reference.logprobs
    monkeypatch.setattr(Reference, "logprobs", lambda self, batch: real(self, batch) + 1e-3)
    with pytest.raises(RuntimeError, match="the reference must equal the policy before the first step"):
        train(small.recipe(tmp_path))


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Policy._logprobs
    monkeypatch.setattr(Policy, "_logprobs", lambda self, batch, share=True: real(self, batch, share) * math.nan)
    with pytest.raises(FloatingPointError, match="step 1: the gradient's norm must be finite, got nan"):
        train(small.recipe(tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.algorithm.name=grppo", r"^rl.algorithm.name: must .* 'grppo'; the nearest is 'grpo'$"),
        ("rl.rollout.num_generations=1", r"^rl.rollout.num_generations: must be at least 2, .*, got 1 with 'grpo'$"),
        (
            "model.lora={rank: 2, targets: [q_prj]}",
            r"^model.lora.targets: must be names of linear layers, .* is 'q_proj'$",
        ),
        (
            "model.lora={rank: 2, targets: [q_proj, embed_tokens]}",
            r"^model.lora.targets: must be names of linear layers, such as",
        ),
        (
            "rl.rewards=[{name: gsm8k, options: {correct: -1.0}}]",
            r"^rl.rewards.0.options.correct: must be .* got -1.0$",
        ),
        ("rl.rewards=[{name: gsm8k, options: {correct: a}}]", r"^rl.rewards.0.options.correct: must be .*, got 'a'$"),
        ("rl.rewards=[{name: gsm8k, options: {corect: 1.0}}]", r"^rl.rewards.0.options.corect: no such key; the neare"),
        ("rl.algorithm.loss={clip: 1}", r"^rl.algorithm.loss.clip: no such key"),
        ("model.mixed_precision=fp16", r"^model.mixed_precision: must be no or bf16 without a GPU, got 'fp16'$"),
        ("model.attention=flash_attention_2", r"^model.attention: 'flash_attention_2' cannot be used here: "),
        ("model.max_prompt_length=1", r"^data: sft has no usable line; prompts left out: 64 by model\.max_prompt_leng"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="two of them are right with a GPU")
def test_errors_are_raised_before_the_first_step(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        train(small.recipe(tmp_path, override))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_launch_with_a_plugin_of_accelerate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"^accelerate: processes must be launched without one of its .* got FSDP$"):
        train(small.recipe(tmp_path))


CONTEXT = 24


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with learned position embeddings and none beyond CONTEXT."""
    from grpo_trainer.tiny import train_tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = train_tokenizer(["digits 0123456789"], 60, False)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_beyond_the_models_context_are_dropped_and_counted(tmp_path: Path, gpt2: Path) -> None:
    file = tmp_path / "data.jsonl"
    # one token per digit, one for the start, and one for the end of demonstrations
    texts = [("1" * prompt, "2" * response) for prompt in (3, 10, 12) for response in (2, 12, 14)]
    file.write_text("".join(json.dumps({"prompt": p, "demonstration": d, "answer": "2"}) + "\n" for p, d in texts))
    data = f"data={{task: null, train: '{file}', test: '{file}'}}"
    model = f"model={{path: '{gpt2}', max_prompt_length: 100}}"
    recipe = small.recipe(tmp_path / "run", model, data, "sft.steps=1", "rl.steps=1", "rl.rollout.prompts=2")
    run = set_up(recipe)
    kept = [(len(item["prompt"]), len(item["demonstration"])) for item in run.items("sft")]
    assert kept == [(3, 2), (3, 12), (3, 14), (10, 2), (10, 12), (12, 2)]
    assert {len(item["prompt"]) for item in run.items("train")} == {3, 10}
    longer = "evaluation.max_completion_length=20"
    evaluated = set_up(small.recipe(tmp_path, model, data, longer, "rl.rollout.max_completion_length=12"))
    assert {len(item["prompt"]) for item in evaluated.items("test")} == {3}
    train(recipe)
    dropped = [e for e in lines(tmp_path / "run", "events") if e["event"] == "prompts left out"]
    assert {e["split"]: e["count"] for e in dropped} == {"sft": 3, "train": 3, "test": 3}
    assert {(e["limit"], e["of"]) for e in dropped} == {(CONTEXT, "the model's context")}
    with pytest.raises(ValueError, match=r"^rl.rollout.max_completion_length: must be less than .* 24, got 24$"):
        set_up(small.recipe(tmp_path, f"model.path={gpt2}", "rl.rollout.max_completion_length=24"))


def test_tokens_without_an_embedding_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = set_up(small.recipe(tmp_path))
    monkeypatch.setattr("grpo_trainer.setup.encode_demonstration", lambda *_: [0, 10**6])
    with pytest.raises(ValueError, match=r"model\.path: .* of every token of the demonstrations, got token 1000000"):
        run.items("sft")
