"""Limits: prompts that do not fit are dropped and counted, settings that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer.tiny import train_tokenizer
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines

CONTEXT = 24


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with learned position embeddings and none beyond CONTEXT."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = train_tokenizer(["digits 0123456789"], 60, False)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_beyond_the_models_context_are_dropped(tmp_path: Path, gpt2: Path) -> None:
    file = tmp_path / "data.jsonl"
    # one token per digit, one for the start, and one for the end of demonstrations
    texts = [("1" * prompt, "2" * response) for prompt in (3, 10, 12) for response in (2, 12, 14)]
    file.write_text("".join(json.dumps({"prompt": p, "demonstration": d, "answer": "2"}) + "\n" for p, d in texts))
    data = f"data={{task: null, train: '{file}', test: '{file}'}}"
    recipe = small.recipe(
        tmp_path / "run",
        f"model={{path: '{gpt2}', max_prompt_length: 100}}",
        data,
        "sft.steps=1",
        "rl.steps=1",
        "rl.rollout.prompts=2",
    )
    trainer = set_up(recipe)
    trainer.run()
    kept = [(len(item["prompt"]), len(item["demonstration"])) for item in trainer.items("sft")]
    assert kept == [(3, 2), (3, 12), (3, 14), (10, 2), (10, 12), (12, 2)]
    assert {len(item["prompt"]) for item in trainer.items("train")} == {3, 10}
    dropped = [e for e in lines(tmp_path / "run", "events") if e["event"] == "prompts left out"]
    assert {e["split"]: e["count"] for e in dropped} == {"sft": 3, "train": 3, "test": 3}
    assert {(e["limit"], e["of"]) for e in dropped} == {(CONTEXT, "the model's context")}


def test_responses_that_leave_no_room_for_a_prompt_are_refused(tmp_path: Path, gpt2: Path) -> None:
    with pytest.raises(ValueError, match=r"^rl.rollout.max_completion_length: must be less than .* 24, got 24$"):
        set_up(small.recipe(tmp_path, f"model.path={gpt2}", "rl.rollout.max_completion_length=24"))


def test_a_launch_with_a_plugin_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.distributed_type", "FSDP")
    with pytest.raises(ValueError, match=r"^accelerate: processes must be launched without one of its .* got FSDP$"):
        set_up(small.recipe(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.lora", "{rank: 2}", r"model.lora: cannot be combined with distributed: fsdp2, got \{'rank': 2\}$"),
        (
            "model.mixed_precision",
            "fp16",
            r"model.mixed_precision: cannot be combined with distributed: .*, got 'fp16'",
        ),
    ],
)
def test_settings_that_cannot_be_sharded_are_refused(tmp_path: Path, key: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small.recipe(tmp_path, "distributed=fsdp2", f"{key}={value}")


def test_too_many_demonstrations_of_a_prompt_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "demonstration": "b"}\n' * 257)
    more = (f"data={{task: null, train: '{file}'}}", "sft.polychromic={embedder: hashed}")
    with pytest.raises(ValueError, match=r"^sft.polychromic: must have at most 256 .* got 257 of 'a'$"):
        train(small.recipe(tmp_path / "run", *more))
