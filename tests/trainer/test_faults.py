"""Faults that a run must name: damaged files of its folder, unreadable inputs, rewards and embedders that break."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer import cli, embed, recipe
from grpo_trainer.checkpoint import CheckpointError, _read_sealed, _write_sealed
from grpo_trainer.data import read_jsonl
from grpo_trainer.deadline import call_within
from grpo_trainer.embed import Embedder
from grpo_trainer.ray_pool import EmbedderError
from grpo_trainer.recipe import Reward, Similarity
from grpo_trainer.rewards import RewardError, score
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_rewards_edges import rollout
from tests.trainer.test_train import stopped_after

KL = ("rl.algorithm.loss={kl: k3, kl_coef: 0.1}", "checkpoints.every=1", "evaluation.every=0")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_reference_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = small.recipe(tmp_path, *KL)
    stopped_after(monkeypatch, changed, 1, 1)
    flip_a_bit(tmp_path / "reference-1" / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"reference-1: model/model.safetensors is damaged; start again with --f"):
        train(changed, resume=True)


def test_every_bit_of_a_state_counts(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"123")
    content = {"phase": 1, "step": 2}
    _write_sealed(tmp_path, content)
    assert _read_sealed(tmp_path) == content | {"files": _read_sealed(tmp_path)["files"]}
    path = tmp_path / "state.json"
    sealed = path.read_text()
    path.write_text(sealed.replace('"step": 2', '"step": 3'))
    with pytest.raises(CheckpointError, match=r"state.json is damaged; remove this folder to resume from the checkpoi"):
        _read_sealed(tmp_path)
    path.write_text(sealed[:-20])
    with pytest.raises(CheckpointError, match=r"state.json cannot be read .*; remove this folder"):
        _read_sealed(tmp_path)
    older = json.loads(sealed)
    del older["digest"]
    path.write_text(json.dumps(older))
    assert _read_sealed(tmp_path)["step"] == 2
    (tmp_path / "weights").write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"weights is damaged; remove this folder"):
        _read_sealed(tmp_path)


def test_files_that_are_not_text_or_yaml_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, broken = tmp_path / "data.jsonl", tmp_path / "broken.yaml"
    data.write_bytes(b'{"prompt": "p"}\n\xff')
    with pytest.raises(ValueError, match=r"data.jsonl: must be UTF-8, got 0xff at byte 16$"):
        read_jsonl(data)
    broken.write_bytes(b"name: \xff")
    with pytest.raises(ValueError, match=r"broken.yaml: must be UTF-8, got 0xff at byte 6$"):
        recipe.load(broken)
    broken.write_text("# nothing\n")
    with pytest.raises(TypeError, match=r"broken.yaml: must be a mapping of a recipe's keys, got an empty file; grpo"):
        recipe.load(broken)
    broken.write_text("phases: [{rl: {steps: 3}\nname: x")
    assert cli.train([str(broken)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {broken}: must be YAML: ") and error.count("\n") == 1
    assert "unicode string" not in error and "line 2, column" in error


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(3)
    return [1.0] * len(completions)


def test_a_reward_that_hangs_is_an_error_or_skipped() -> None:
    settings = [Reward(name="mine:hangs", timeout=0.05)]
    with pytest.raises(
        RewardError, match=r"reward 'mine:hangs' raised TimeoutError: no result within 0.05 s \(rewards.t"
    ):
        score(settings, [hangs], rollout(["a", "b"]))
    settings = [Reward(name="mine:hangs", timeout=0.05, on_error="skip")]
    assert score(settings, [hangs], rollout(["a", "b"])).skipped == 2
    with pytest.raises(ValueError, match=r"rl.rewards.0.timeout: must be positive, got -1"):
        small.recipe(Path("run"), "rl.rewards=[{name: exact, timeout: -1.0}]")


def ends(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    raise SystemExit("no key for the service")


async def waits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_reward_that_ends_the_process_or_is_async_is_named() -> None:
    with pytest.raises(RewardError, match=r"^reward 'mine:ends' raised SystemExit: no key for the service"):
        score([Reward(name="mine:ends")], [ends], rollout(["a"]))
    assert score([Reward(name="mine:ends", on_error="skip")], [ends], rollout(["a", "b"])).skipped == 2
    with pytest.raises(RewardError, match=r"^reward 'mine:waits' must be a function that is not async, got a corout"):
        score([Reward(name="mine:waits")], [waits], rollout(["a"]))  # type: ignore[list-item]


def test_a_call_in_time_is_passed_on() -> None:
    def fails() -> int:
        raise KeyError("no such thing")

    def thread() -> int:
        return threading.get_ident()

    for limit in (None, 30.0):
        with pytest.raises(KeyError, match="no such thing"):
            call_within(limit, fails, "key")
    assert call_within(None, thread, "key") == threading.get_ident() != call_within(30.0, thread, "key")


def test_an_embedder_that_breaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(texts: Any) -> torch.Tensor:
        raise OSError("the model is gone")

    with pytest.raises(EmbedderError, match=r"embedder 'mine' raised OSError for 1 texts, the first 'a': the model is"):
        Embedder(Similarity(), fails, "mine")(["a"])
    with pytest.raises(EmbedderError, match=r"embedder 'mine' must return \[2, D\] for 2 texts, got \[1, 4\]"):
        Embedder(Similarity(), lambda texts: torch.zeros(1, 4), "mine")(["a", "b"])
    monkeypatch.setattr(embed, "hashed", fails)
    assert cli._run(lambda: print(Embedder(Similarity(), fails, "mine")(["a"]))) == 2
