"""Runs that sample with vLLM: recipes, resumed and killed runs, several processes, and errors before the first step."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from grpo_trainer import cli, distributed, engine
from grpo_trainer.engine import EngineError
from grpo_trainer.recipe import Recipe, Rollout, Vllm
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.small import lines, newest, steps, stop_before, timeless, weights
from tests.trainer.test_distributed import launched

ROLLOUT = "rl.rollout"
HEADS = "model.tiny.heads=1"  # of size 32, the smallest that vLLM has code for
VLLM = (f"{ROLLOUT}.engine=vllm", HEADS, "evaluation.every=0")
SHORT = (*VLLM, "sft.steps=2", "rl.steps=2")


RECIPES = ("arithmetic", "similarity_group", "group_ppo", "gsm8k", "dialogue", "reply", "reply-polychromic")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_take_two_steps(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With top_p of p, the engine's probabilities are those of the trainer divided by at least p."""
    overrides = [f"output={tmp_path / 'run'}", "threads=1", f"{ROLLOUT}.engine=vllm"]
    assert cli.main(["train", name, "--smoke", *overrides]) == 0
    kept = {"reply": 0.9, "reply-polychromic": 0.9}.get(name, 1.0)
    entries = steps(tmp_path / "run")
    assert [entry["step"] for entry in entries] == [1, 2]
    for entry in entries:
        assert entry["sampling/gap_max"] < 1e-4 - math.log(kept) and entry["sampling/truncated"] == 0
        assert kept**2 - 1e-6 < entry["sampling/effective_sample_size"] < 1 + 1e-6 and entry["sampling/rejected"] == 0
        assert (entry["sampling/gap_max"] > 1e-3) is (kept < 1) and entry["speed/tokens_per_second"] > 0
    printed = capfd.readouterr()
    assert "tokens/s" in printed.err and "report.html" in printed.out


def test_a_coarser_engine_is_weighed_and_rejected(tmp_path: Path) -> None:
    """A bfloat16 engine for a float32 policy: half a unit in the last place is 2^-9 of each weight and activation."""
    coarse = (*SHORT, f"{ROLLOUT}.vllm.dtype=bfloat16", "rl.steps=1")
    rejecting = "rl.algorithm.correction={weights: token, weight_max: 1.0, rejections: [[token_k1, -0.001, 0.001]]}"
    runs = {}
    for name, more in {
        "weighed": (),
        "bare": ("rl.algorithm.correction={weights: none}",),
        "cut": (rejecting,),
    }.items():
        train(small.recipe(tmp_path / name, *coarse, *more))
        (runs[name],) = steps(tmp_path / name)
    weighed, bare, cut = runs["weighed"], runs["bare"], runs["cut"]
    assert 1e-4 < weighed["sampling/gap_mean"] < weighed["sampling/gap_max"] < 0.1
    assert 0.99 < weighed["sampling/effective_sample_size"] < 1 and weighed["sampling/truncated"] == 0
    assert cut["sampling/truncated"] == pytest.approx(0.5, abs=0.25), "about half of the ratios exceed 1"
    assert 0 < cut["sampling/rejected"] < 1
    same = ("sampling/gap_mean", "rewards/mean", "rollout/length_mean")
    assert all(weighed[name] == bare[name] == cut[name] for name in same), "equal samples"
    assert len({run["train/policy_loss"] for run in runs.values()}) == 3, "weights and masks reach the loss"
    assert cut["train/tokens"] < weighed["train/tokens"] == bare["train/tokens"]


def test_the_correction_is_that_of_the_trainers_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as likely tokens: with log-probs of the engine that are too high by log 2, weights are a half."""
    real = engine._response

    def shifted(completion: Any) -> Any:
        tokens, logprobs = real(completion)
        return tokens, [value + 0.6931471805599453 for value in logprobs]

    plain = (*SHORT, "rl.steps=1", "rl.num_iterations=1", "rl.minibatches=1")
    plain += ("rl.algorithm={name: rloo, loss: {loss: reinforce}}",)
    train(small.recipe(tmp_path / "as_it_is", *plain))
    monkeypatch.setattr(engine, "_response", shifted)
    train(small.recipe(tmp_path / "shifted", *plain))
    (before,), (after,) = steps(tmp_path / "as_it_is"), steps(tmp_path / "shifted")
    assert after["sampling/gap_mean"] == pytest.approx(0.6931472, abs=1e-5)
    assert after["train/policy_loss"] == pytest.approx(before["train/policy_loss"] / 2, rel=1e-4)
    assert after["train/ratio_mean"] == pytest.approx(1, abs=1e-6), "ratios are those of the trainer's own log-probs"


@pytest.mark.parametrize(
    "more",
    [(), ("rl.algorithm={name: group_ppo}",), ("model.lora={rank: 4}",)],
    ids=["grpo", "group_ppo", "adapters"],
)
def test_a_stopped_run_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    more = (*VLLM, *more, "checkpoints.every=1", "rl.steps=3")
    train(small.recipe(tmp_path / "whole", *more))
    recipe = small.recipe(tmp_path / "parts", *more)
    stop_before(monkeypatch, recipe, "rl", 2)
    train(recipe, resume=True)
    assert timeless(lines(tmp_path / "whole")) == timeless(lines(tmp_path / "parts"))
    assert timeless(lines(tmp_path / "whole", "samples")) == timeless(lines(tmp_path / "parts", "samples"))
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def assert_same_files(whole: Path, parts: Path) -> None:
    last = [newest(folder).parent for folder in (whole, parts)]
    names = sorted(path.relative_to(last[0]) for path in last[0].rglob("*.safetensors"))
    assert names and all((last[0] / name).read_bytes() == (last[1] / name).read_bytes() for name in names)


CODE = """
import sys
from pathlib import Path

import torch
from grpo_trainer.train import train
from tests.trainer import small

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    train(small.recipe(folder, *sys.argv[2:]), resume=(folder / "recipe.yaml").exists())
"""


@contextmanager
def started(script: Path, folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, which ends with the context."""
    script.write_text(CODE)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), *overrides],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()  # vLLM's workers end with it
        process.communicate()


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int, limit: float = 400.0) -> None:
    end = time.monotonic() + limit
    while not (folder / "metrics.jsonl").exists() or len(steps(folder)) < count:
        assert process.poll() is None and time.monotonic() < end, process.stderr and process.stderr.read()[-2000:]
        time.sleep(0.02)


def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """The engine lives in the trainer's process and is killed with it."""
    more = (*VLLM, "checkpoints.every=1", "rl.steps=12")
    script = tmp_path / "run.py"
    with started(script, tmp_path / "parts", *more) as killed:
        wait_for_steps(killed, tmp_path / "parts", 2)
    assert killed.returncode == -signal.SIGKILL and len(steps(tmp_path / "parts")) < 12
    for name in ("parts", "whole"):
        with started(script, tmp_path / name, *more) as process:
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors[-2000:]
    assert timeless(lines(tmp_path / "whole")) == timeless(lines(tmp_path / "parts"))
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def test_a_killed_worker_is_an_error_within_a_minute_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    """With tensor parallelism parts of the engine are processes of their own."""
    more = (*VLLM, f"{ROLLOUT}.vllm.tensor_parallel_size=2", "model.tiny={hidden: 64, heads: 2, layers: 1}")
    more += ("checkpoints.every=1", "rl.steps=200")
    folder = tmp_path / "run"
    with started(tmp_path / "run.py", folder, *more) as process:
        wait_for_steps(process, folder, 2)
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "VLLM" in child.name()]
        assert len(workers) == 2, [child.name() for child in children]
        done = len(steps(folder))
        workers[0].kill()
        start = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - start < 60 and process.returncode not in (0, None)
    assert "EngineError: rl.rollout.engine: vLLM failed while " in errors and "--resume continues" in errors
    assert not any(worker.is_running() for worker in workers)
    assert 2 <= done <= len(steps(folder)) < 200
    saved = newest(folder).parent
    assert json.loads((saved / "state.json").read_text())["step"] == len(steps(folder))


def test_two_processes_sample_as_one(tmp_path: Path) -> None:
    """Each has an engine and half of the prompts. The odd number of prompts is shared unevenly."""
    more = (
        *SHORT,
        f"{ROLLOUT}={{prompts: 3, num_generations: 4, max_completion_length: 12, engine: vllm}}",
        "data.options.test=2",
    )
    one = "rl.minibatches=1"
    cases = {
        "grpo": (*more, one),
        "sharded": (*more, one, "distributed=fsdp2"),
        "single": (*SHORT, one, f"{ROLLOUT}.prompts=1"),
    }
    planned = [{"folder": str(tmp_path / "two" / name), "overrides": overrides} for name, overrides in cases.items()]
    (tmp_path / "two").mkdir()
    (tmp_path / "cases.json").write_text(json.dumps(planned))
    done = launched("-m", "tests.trainer.distributed_cases", str(tmp_path / "cases.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.read_text() for path in (tmp_path / "two").glob("*-error-*")] == []
    for name, overrides in cases.items():
        train(small.recipe(tmp_path / "one" / name, *overrides))
        one_run, two_run = tmp_path / "one" / name, tmp_path / "two" / name
        for a, b in zip(lines(one_run, "samples"), lines(two_run, "samples"), strict=True):
            assert (a["prompt"], a["response"], a["rewards"]) == (b["prompt"], b["response"], b["rewards"])
        for a, b in zip(steps(one_run), steps(two_run), strict=True):
            assert a["rewards/mean"] == b["rewards/mean"] and a["rollout/length_mean"] == b["rollout/length_mean"]
            assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
            assert b["sampling/gap_max"] < 1e-4
        ours, theirs = weights(one_run), weights(two_run)
        assert all(torch.allclose(ours[key], theirs[key], rtol=1e-4, atol=2e-5) for key in ours)


ERRORS = {
    "model.tiny.architecture: must be causal": ("model.tiny.architecture=seq2seq",),
    "model.tiny.heads: heads must have one of the sizes 32, .*, got 2 heads of size 16": ("model.tiny.heads=2",),
    "keep_support: must be false with engine: vllm": (f"{ROLLOUT}.keep_support=true", f"{ROLLOUT}.top_k=4"),
    r"temperature: must be in \[0.01, 2\] with engine: vllm.*got 0.005": (f"{ROLLOUT}.temperature=0.005",),
    r"temperature: must be in \[0.01, 2\] with engine: vllm.*got 2.5": (f"{ROLLOUT}.temperature=2.5",),
    "vllm.max_model_len: must be at least model.max_prompt_length .* 524": (f"{ROLLOUT}.vllm.max_model_len=60",),
    "vllm.max_model_len: must not exceed the model's context, 4096, got 5000": (f"{ROLLOUT}.vllm.max_model_len=5000",),
    "vllm.gpu_memory_utilization: must be less than or equal to 1": (f"{ROLLOUT}.vllm.gpu_memory_utilization=1.5",),
    "model.lora.rank: must be at most 512": ("model.lora={rank: 600}",),
    "algorithm.correction: CorrectionConfig: weights must be": ("rl.algorithm.correction={weights: tokens}",),
    "correction: weights must be 'sequence', 'geometric' or 'none' with ratio: segment": (
        "rl.algorithm={name: group_ppo, correction: {weights: token}}",
    ),
    "correction: weights must be .* with ratio: segment_mean": (
        "rl.algorithm={name: group_ppo, correction: {weights: token}, loss: {ratio: segment_mean}}",
    ),
    "algorithm.loss.correction: no such key": ("rl.algorithm.loss={correction: token_truncate}",),
    "rollout.vllm: must be left out with engine: transformers": (f"{ROLLOUT}={{vllm: {{sleep: false}}}}",),
    "correction: must be left out without an engine": (
        f"{ROLLOUT}.engine=transformers",
        "rl.algorithm.correction={weights: none}",
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_does_not_go_together_is_an_error_at_the_start(tmp_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_up(small.recipe(tmp_path, *SHORT, *ERRORS[message]))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "rl.rollout.engine: vllm must be installed, and is not; pip install"),
        (
            "0.30.4",
            "rl.rollout.engine: vllm must be of a tested version, at least 0.31 and below 0.32, got 0.30.4",
        ),
        ("0.32.0", "tested version, .* got 0.32.0; install vllm 0.31.0"),
        ("1.2rc1", "tested version"),
    ],
)
def test_a_missing_or_untested_vllm_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    monkeypatch.setattr(engine, "_installed_version", lambda: version)
    with pytest.raises(EngineError, match=message):
        set_up(small.recipe(tmp_path, *SHORT))


def test_tensor_parallelism_with_several_processes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    sampling = Rollout(engine="vllm", vllm=Vllm(tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"rollout.vllm.tensor_parallel_size: must be 1 with several .* got 2 with 2"):
        engine.check_installed("rollout", sampling)


def saved_model(folder: Path, lm: Any) -> str:
    tokenizer = set_up(small.recipe(folder / "tokenizer", HEADS)).policy.tokenizer
    lm.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return f"model={{path: '{folder / 'model'}', max_prompt_length: 40}}"


def test_too_many_banned_tokens_are_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_BANNED", 1)
    recipe = small.recipe(tmp_path, *SHORT, "model.banned=['<pad>', '<start>']")
    message = "model.banned: must have at most 1 tokens with rollout.engine: vllm, got 2; ban fewer, or use"
    with pytest.raises(ValueError, match=message):
        set_up(recipe)


def test_banned_tokens_are_scored_as_the_engine_scored_them(tmp_path: Path) -> None:
    """The gap of log-probs stays that of rounding, with most of the probability on banned tokens."""
    banned = f"model.banned={[*'ABCDEFGHabcdefghiklmnoprstuvwy']}"
    recipe = small.recipe(tmp_path, *SHORT, banned)
    train(recipe)
    taken = steps(recipe.folder)
    assert len(taken) > 1 and max(line["sampling/gap_max"] for line in taken) < 1e-4


def test_models_that_vllm_cannot_load_are_an_error_at_the_start(tmp_path: Path) -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel, T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=120, d_model=32, d_ff=32, num_layers=1, num_heads=1))
    ctrl = CTRLLMHeadModel(CTRLConfig(vocab_size=120, n_embd=32, dff=32, n_layer=1, n_head=1, n_positions=64))
    for lm, message in (
        (t5, "model.path: must be a decoder-only model"),
        (ctrl, "architecture CTRLLMHeadModel; choose"),
    ):
        model = saved_model(tmp_path, lm)
        with pytest.raises(ValueError, match=message):
            set_up(small.recipe(tmp_path / "run", *SHORT, model))


def test_an_engine_that_cannot_start_names_the_key(tmp_path: Path) -> None:
    recipe: Recipe = small.recipe(tmp_path, *SHORT, f"{ROLLOUT}.vllm.cache_gib=1e-6")
    with pytest.raises(EngineError, match=r"rl.rollout.engine: vLLM failed while starting \(ValueError: "):
        train(recipe)
    assert steps(tmp_path) == []
