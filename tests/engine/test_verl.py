"""verl's Ray trainer with rollouts by vLLM on the CPU: the commands of docs/integrations/verl.md, three steps each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_trainer.recipe import Tiny
from grpo_trainer.tiny import make_tiny, train_tokenizer

import grpo_kernels as gk

_missing = [name for name in ("vllm", "verl", "transfer_queue") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"not installed: {', '.join(_missing)}")
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/integrations/verl.md").read_text()
STEPS, PROMPTS, GROUP, LENGTH = 3, 4, 4, 16
# Means over a step's tokens, of terms near 1: a sum of n float32 terms is off by n / 2 ulps at most, times two runs.
# Differences after the updates in between were at most 1.5e-6.
ROUNDING = PROMPTS * GROUP * LENGTH * torch.finfo(torch.float32).eps
SECONDS = 900  # a run takes 1.5 to 3 minutes on two cores

Run = SimpleNamespace  # log; of each step, metrics: a dict, responses: a list of (prompt, response, score)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def block(language: str, *words: str) -> str:
    """The only block of the document with all of these words."""
    matches = [text for text in blocks(language) if all(re.search(rf"\b{word}\b", text) for word in words)]
    assert len(matches) == 1, f"{len(matches)} blocks with {words}"
    return matches[0]


REWARD = block("python", "compute_score")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the document asks for, and the entry point of pyproject.toml."""
    import pandas
    from transformers import LlamaConfig, LlamaForTokenClassification

    folder = tmp_path_factory.mktemp("verl")
    questions = [f"What is {a} plus {b} ?" for a in range(STEPS) for b in range(PROMPTS)]
    tokenizer = train_tokenizer(questions, 64, is_seq2seq=False)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    model = make_tiny(Tiny(hidden=64, layers=2, heads=2, intermediate=128), tokenizer)
    # verl loads a critic from a model without a value head as well, with a random one that differs from run to run
    options = model.config.to_dict() | {"num_labels": 1, "architectures": ["LlamaForTokenClassification"]}
    critic = LlamaForTokenClassification(LlamaConfig(**options))
    for name, parts in {"model": (model, tokenizer), "critic": (critic, tokenizer)}.items():
        for part in parts:
            part.save_pretrained(folder / name)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(questions)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    patches = "from grpo_kernels.integrations.verl import patch_verl\n\npatch_verl()\n"
    (folder / "my_patches.py").write_text("import tests.engine.verl_on_cpu\n" + patches)
    (folder / "loops.yaml").write_text((HERE / "verl_loops.yaml").read_text())
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "verl_plugin" in line)
    info = folder / "grpo_kernels_here-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-kernels-here\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + line.replace('"', "") + "\n")
    return folder


@cache
def train(folder: Path, *words: str, more: str = "") -> Run:
    """Runs the document's command with these words, and returns what it logged."""
    name = re.sub(r"\W+", "-", " ".join([*words, more])).strip("-")
    command = block("bash", "main_ppo", *words).rstrip()
    script = "\n".join(
        [
            "set -e",
            block("bash", "data.train_files"),
            (HERE / "verl_on_cpu.sh").read_text(),
            f"{command} trainer.rollout_data_dir={folder / name} {more}",
        ]
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'python'}",
        "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_PATH": str(folder / f"{name}.jsonl"),
    }
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # Ray's processes end with verl's
            process.wait()
    assert status == 0, log.read_text()[-6000:]
    metrics = [json.loads(line)["data"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert len(metrics) == STEPS
    rows = [responses(folder / name / f"{step}.jsonl") for step in range(1, STEPS + 1)]
    return Run(metrics=metrics, responses=rows, log=log.read_text())


def responses(path: Path) -> list[tuple[str, str, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == PROMPTS * GROUP
    return sorted((row["input"], row["output"], row["score"]) for row in rows)


def assert_same_steps(run: Run, other: Run, *names: str) -> None:
    """Same tokens and rewards, and the same value of each metric but for rounding, in every step."""
    assert run.responses == other.responses
    for ours, theirs in zip(run.metrics, other.metrics, strict=True):
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=ROUNDING, abs=ROUNDING), name


def assert_trained(run: Run) -> None:
    """Updates clip some ratios, change later responses, and reach vLLM before the next step."""
    for step in run.metrics:
        assert all(math.isfinite(value) for value in step.values())
        assert 0 < step["actor/pg_clipfrac"] < 1 and step["actor/grad_norm"] > 0
        assert step["critic/score/min"] < step["critic/score/max"]
        assert step["training/rollout_probs_diff_max"] < ROUNDING


ACTOR = ("actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "critic/score/mean")


def test_fused_grpo_trains_as_verls_grpo(folder: Path) -> None:
    theirs = train(folder, "adv_estimator=grpo")
    ours = train(folder, "adv_estimator=fused_grpo", "loss_mode=fused_vanilla")
    assert_trained(theirs)
    assert_same_steps(ours, theirs, *ACTOR, "critic/advantages/max", "critic/advantages/min")


def test_our_head_trains_as_verls_logits(folder: Path) -> None:
    theirs = train(folder, "adv_estimator=grpo")
    lines = DOCUMENT.splitlines()
    head = " ".join(line for line in lines if re.fullmatch(r" +actor_rollout_ref.model.\w*fused_kernel\S+", line))
    ours = train(folder, "adv_estimator=fused_grpo", "loss_mode=fused_vanilla", more=head)
    assert "Skipping monkey patch" in theirs.log and "Skipping monkey patch" not in ours.log
    assert_same_steps(ours, theirs, *ACTOR, "actor/entropy")


def test_clusters_by_a_reward_functions_embeddings(folder: Path) -> None:
    run = train(folder, "adv_estimator=similarity_group_grpo")
    assert_trained(run)
    assert run.responses[0] == train(folder, "adv_estimator=grpo").responses[0]
    rule: dict[str, Any] = {}
    exec(REWARD, rule)
    for step, rows in zip(run.metrics, run.responses, strict=True):
        rewards = [rule["compute_score"]("digits", text, "") for _, text, _ in rows]
        scores = torch.tensor([score for *_, score in rows])
        assert scores.tolist() == [reward["score"] for reward in rewards]
        prompts = gk.group_ids([prompt for prompt, *_ in rows])
        embeddings = torch.tensor([reward["similarity_embeddings"] for reward in rewards])
        labels = gk.similarity_groups(embeddings, prompts).labels
        want = gk.group_advantages(scores, prompts, subgroups=labels, config="grpo").advantages
        plain = gk.group_advantages(scores, prompts, config="grpo").advantages
        got = [step["critic/advantages/max"], step["critic/advantages/min"]]
        assert got == pytest.approx([want.max().item(), want.min().item()], abs=ROUNDING)
        assert got != pytest.approx([plain.max().item(), plain.min().item()], abs=0.01)


def test_group_ppo_with_its_segments_and_a_critic(folder: Path) -> None:
    run = train(folder, "adv_estimator=group_ppo")
    assert_trained(run)
    assert all(step["critic/grad_norm"] > 0 for step in run.metrics)


def test_group_ppo_with_segments_of_one_token_trains_as_verls_ppo(folder: Path) -> None:
    # verl adds 1e-8 to the variance of advantages; our default of 1e-6, added to a deviation of 0.1, is 1e-5 of it
    one = "+algorithm.grpo_kernels.group_max_size=1 +algorithm.grpo_kernels.group_epsilon=1e-8"
    ppo = "algorithm.adv_estimator=gae actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
    ours = train(folder, "adv_estimator=group_ppo", more=one)
    theirs = train(folder, "adv_estimator=group_ppo", more=ppo)
    critic = ("critic/vf_loss", "critic/grad_norm", "critic/advantages/max", "critic/returns/mean")
    assert_same_steps(ours, theirs, *ACTOR, *critic)
    segments = train(folder, "adv_estimator=group_ppo")
    assert segments.responses[0] == ours.responses[0] and segments.responses[1] != ours.responses[1]
