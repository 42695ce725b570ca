"""Reports of --dry-run: memory against that of real runs, problems against what is missing."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from grpo_trainer import cli, memory
from grpo_trainer.dry_run import dry_run
from grpo_trainer.policy import Policy, cache_name, load_policy
from grpo_trainer.recipe import Lora, Model, Recipe, Tiny, load
from grpo_trainer.settings import plain
from grpo_trainer.tiny import make_tiny
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from transformers import AutoConfig, DynamicCache

from tests.trainer import small
from tests.trainer.published_models import CONFIGS, qwen2_half_billion, qwen3_8_billion
from tests.trainer.test_policy import CORPUS

ON_GPU = sorted(path.stem for path in Path("recipes").glob("*-gpu.yaml"))


def pair(settings: Model) -> tuple[Policy, memory.Skeleton]:
    """A model with weights, and the one without."""
    policy = load_policy(settings, CORPUS, None)
    tiny, tokenizer = settings.tiny, policy.tokenizer
    return policy, memory.make_skeleton(settings, lambda attention: make_tiny(tiny, tokenizer, attention))


CAUSAL = Model(tiny=Tiny(hidden=32, layers=3, heads=2, intermediate=48, vocabulary=120), attention="eager")
SEQ2SEQ = dataclasses.replace(CAUSAL, tiny=dataclasses.replace(CAUSAL.tiny, architecture="seq2seq"))
ADAPTERS = dataclasses.replace(CAUSAL, lora=Lora(rank=4))


@pytest.mark.parametrize("settings", [CAUSAL, SEQ2SEQ, ADAPTERS], ids=["causal", "seq2seq", "adapters"])
def test_a_skeleton_has_the_weights_and_saves_the_activations_of_the_model(settings: Model) -> None:
    policy, skeleton = pair(settings)
    assert all(weight.is_meta for weight in skeleton.lm.parameters())
    weights = list(policy.lm.parameters())
    assert skeleton.count == sum(weight.numel() for weight in weights)
    assert skeleton.trained_bytes() == sum(weight.nbytes for weight in weights if weight.requires_grad)
    assert skeleton.weight_bytes() == sum(weight.nbytes for weight in weights)
    real = memory.Skeleton(policy.lm, settings)
    for length in (16, 32, 48):
        assert memory.saved_bytes(skeleton, length) == memory.saved_bytes(real, length) > 0


def test_activations_are_extrapolated_exactly() -> None:
    _policy, skeleton = pair(CAUSAL)
    linear, quadratic = skeleton.saved_per_token
    for length in (48, 200):
        assert linear * length + quadratic * length**2 == pytest.approx(memory.saved_bytes(skeleton, length), rel=2e-3)


@pytest.mark.parametrize("overrides", [[], ["model.lora={rank: 4}"]], ids=["all weights", "adapters"])
def test_gradients_and_optimizer_states_are_those_of_a_run(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small.recipe(tmp_path / "run", "rl.steps=1", "evaluation.every=0", *overrides)
    seen: dict[str, int] = {}
    step = torch.optim.AdamW.step

    def counting(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        seen["gradients"] = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
        seen["AdamW"] = sum(
            value.nbytes for state in self.state.values() for value in state.values() if value.dim() > 0
        )
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    trainer = set_up(recipe)
    trainer.run()
    estimate = memory.estimate(recipe, memory.Skeleton(trainer.policy.lm, recipe.model))[1]
    assert seen == {name: estimate.held[name] for name in ("gradients", "AdamW")}
    assert ("reference model" in estimate.held) == (not overrides)  # adapters are copied alone


@pytest.mark.parametrize("name", ["group_ppo-gpu", "similarity_group-gpu"])
def test_keys_and_values_are_those_of_a_cache(name: str) -> None:
    recipe = load(name)
    short = CONFIGS[recipe.model.path](num_hidden_layers=2)
    skeleton = memory.load_skeleton(recipe.model.model_copy(update=dict(dtype="bfloat16", mixed_precision="no"), short)
    cache, ids = DynamicCache(), torch.zeros(3, 7, dtype=torch.int64, device="meta")
    mask = torch.ones(3, 1, 7, 7, dtype=torch.bool, device="meta")
    named = {cache_name(skeleton.lm): cache}
    skeleton.lm.base_model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=True, **named)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 3 * 7 * memory._cache_bytes(skeleton.settings, skeleton)


def test_published_sizes() -> None:
    """The counts of weights that the model cards name: 0.49 and 8.2 billion."""
    assert memory.load_skeleton(Model(), qwen2_half_billion()).count == 494_032_768
    assert memory.load_skeleton(Model(), qwen3_8_billion()).count == 8_190_735_360


def test_processes_share_rows_and_with_fsdp2_weights() -> None:
    sizes = "rollout={prompts: 128, group_size: 4, max_new_tokens: 1024}", "minibatches=4", "micro_batch=16"
    recipe = load("group_ppo-gpu", [f"rl.{size}" for size in sizes])
    skeleton = memory.load_skeleton(recipe.model, qwen2_half_billion())
    alone, replicated = (memory.estimate(recipe, skeleton, processes)[0] for processes in (1, 8))
    sharded = memory.estimate(recipe.model_copy(update=dict(distributed="fsdp2"), skeleton, 8)[0]
    assert replicated.held == alone.held == {name: 8 * size for name, size in sharded.held.items()}
    assert replicated.sampling == sharded.sampling == {name: size / 8 for name, size in alone.sampling.items()}
    assert alone.update == replicated.update  # a micro-batch of 16 is a process's share of a minibatch
    assert replicated.total > sharded.total


def test_the_total_is_that_of_the_larger_part() -> None:
    estimate = memory.Estimate(0, "rl", {"weights": 3.0}, {"keys and values": 5.0}, {"activations": 2.0}, 7.0)
    assert estimate.total == 8.0


def test_checkpointed_layers_save_their_inputs() -> None:
    tokens, (policy, skeleton) = 64, pair(CAUSAL)
    plain, _ = memory._update(CAUSAL, skeleton, tokens, 0, 32, tokens)
    checkpointing = dataclasses.replace(CAUSAL, gradient_checkpointing=True)
    saved, _ = memory._update(checkpointing, skeleton, tokens, 0, 32, tokens)
    inputs = tokens * policy.lm.config.hidden_size * 4 * 3
    assert saved["activations"] == pytest.approx(plain["activations"] / 3 + inputs)


def published(name: str, folder: Path) -> Recipe:
    """A -gpu recipe whose model is a folder with nothing but the published configuration."""
    model = load(name).model.path
    CONFIGS[model]().save_pretrained(folder)
    return load(name, [f"model.path={folder}", f"output={folder / 'run'}"])


@pytest.mark.full
@pytest.mark.parametrize("name", ON_GPU)
def test_recipes_of_published_systems_are_estimated_at_their_size(name: str, tmp_path: Path) -> None:
    recipe = published(name, tmp_path)
    printed, problems = dry_run(recipe)
    text = "\n".join(printed)
    assert "million weights" in text and text.count("memory per device") == len(recipe.phases)
    sizes = [float(line.split()[-2].replace(",", "")) for line in printed if line.endswith(("GiB", "MiB"))]
    assert len(sizes) > 5 and all(math.isfinite(size) and size >= 0 for size in sizes)
    assert not any("cannot be examined" in problem for problem in problems)
    for key in ("train", "validation"):
        path = getattr(recipe.data, key)
        assert f"data.{key}: must be an existing file, got {path!r}" in problems
    assert not (tmp_path / "run").exists()


def test_each_missing_thing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n")
    AutoConfig.for_model("qwen2", num_hidden_layers=1).save_pretrained(tmp_path)
    recipe = load(
        "gsm8k-gpu",
        [
            f"model.path={tmp_path}",
            "model.attention=flash_attention_2",
            f"data.train={tmp_path / 'train.jsonl'}",
            "data.test=null",
            "rl.rewards=[{name: 'no_such_module:reward'}]",
            "rl.algorithm.loss.clip_hihg=0.2",
            "logging.to=[trackio]",
        ],
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    monkeypatch.setitem(sys.modules, "trackio", None)
    _printed, problems = dry_run(recipe)
    starts = [problem.split(":")[0] for problem in problems]
    assert starts == [
        "data.validation",
        "model.lora",
        "model.attention",
        "model.four_bit",
        "model.attention",
        "logging.to",
        "rl.algorithm.loss.clip_hihg",
        "rl.rewards.0.name",
    ]


@pytest.mark.parametrize("key", ["evaluation.max_completion_length", "rl.rollout.max_completion_length"])
def test_responses_as_long_as_the_context_are_refused(tmp_path: Path, key: str) -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=32, max_position_embeddings=64)
    config.save_pretrained(tmp_path / "model")
    recipe = small.recipe(tmp_path / "run", f"model.path={tmp_path / 'model'}", f"{key}=64")
    refused = f"{key}: must be less than the model's context, 64, got 64"
    assert dry_run(recipe)[1] == [refused]
    (tmp_path / "model" / "weights").touch()
    is_refused, has_no_tokenizer = dry_run(recipe)[1]
    assert is_refused == refused and has_no_tokenizer.startswith("model.path: ")


def test_data_of_another_form_is_named(tmp_path: Path) -> None:
    def problems(*lines: dict[str, Any], **data: str) -> str:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        given = {"task": None, "train": str(tmp_path / "train.jsonl")} | (data or {"demonstration": "answer"})
        return "\n".join(dry_run(small.recipe(tmp_path / "run", f"data={json.dumps(given)}"))[1])

    chat = [{"role": "user", "content": "hi"}]
    wrong = [{"role": "user", "contents": "hi"}]
    said = problems({"prompt": chat, "answer": "a"}, {"prompt": wrong, "answer": "a"})
    assert "data.prompt: must have 'content' in every message, got {'role': 'user', 'contents': 'hi'}" in said
    assert "the nearest is 'contents', all are contents, role (example 2 of" in said
    said = problems({"prompt": 3, "answer": "a"})
    assert "data.prompt: must be a text, or a list of messages, got 3 (example 1 of" in said
    said = problems({"prompt": "a", "gold": None}, demonstration_template="{gold}")
    assert "data.demonstration_template: must have columns that are not null on some line, got gold" in said
    assert "data.train: must be an existing file, got the folder" in problems({"prompt": "a"}, train=str(tmp_path))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps(small.values(tmp_path / "run")))
    assert cli.train([str(recipe), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "4 supervised steps" in printed and "phase 1 (rl)" in printed and not (tmp_path / "run").exists()
    assert cli.train([str(recipe), "--dry-run", "data={task: null, train: /no/such.jsonl}"]) == 2
    error = capsys.readouterr().err
    assert "this run cannot start:" in error and "data.train: must be an existing file, got '/no/such.jsonl'" in error
    assert "model.path" not in error  # the vocabulary of a tiny model comes from the data
    (tmp_path / "talk.jsonl").write_text('{"prompt": "Hi", "answr": "Hello"}\n')
    near = f"; the nearest is {str(tmp_path / 'talk.jsonl')!r}\n"
    assert cli.train([str(recipe), "--dry-run", f"data={{task: null, train: {tmp_path / 'talks.jsonl'}}}"]) == 2
    assert capsys.readouterr().err.endswith(near)
    talk = f"data={{task: null, train: {tmp_path / 'talk.jsonl'}, demonstration: answer}}"
    for option in (["--dry-run"], []):
        assert cli.train([str(recipe), talk, *option]) == 2
        column = (
            "data.demonstration: must be a column of some line, got 'answer'; the nearest is 'answr', all are answr, "
        )
        assert column in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(plain(load(recipe))))
    for options, status in ((["--resume"], 0), (["--fresh"], 0), ([], 2)):
        assert cli.train([str(recipe), "--dry-run", *options]) == status
    assert "contains a run already" in capsys.readouterr().err
    assert cli.train([str(recipe), "--dry-run", "--fresh", f"output={recipe}"]) == 2
    assert "output: must be a folder, got" in capsys.readouterr().err
    assert cli.train([str(recipe), "--dry-run", "--processes", "0"]) == 2
    assert "--processes: must be positive, got 0" in capsys.readouterr().err


number = 1


def if_answered(prompts: list[str], completions: list[str], answer: list[int | None], **_: Any) -> list[float | None]:
    return [value and float(value % 2) for value in answer]


class OfLength:
    """A reward with a state, of which a recipe must name an instance."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) == self.length) for text in completions]


def without_columns(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output={file}"], r"^output: must be a folder, got '.*', where '.*' is a file$"),
        (["output={file}/run"], r"^output: must be a folder, got "),
        (
            ["rl.rewards=[{{name: 'tests.trainer.test_dry_run:number'}}]"],
            r"^rl\.rewards\.0\.name: must name a function, got '.*:number', int$",
        ),
        (
            ["rl.rewards=[{{name: 'tests.trainer.test_dry_run:without_columns'}}]"],
            r"^rl\.rewards\.0: .* must take prompts, completions and the columns .* argument 'answer'$",
        ),
        (
            ["rl.rewards=[{{name: 'tests.trainer.test_dry_run:OfLength'}}]"],
            r"^rl\.rewards\.0\.name: must .*, got '.*', type; name an instance of the class$",
        ),
        (
            ["evaluation.samples=2", "evaluation.embedder=./none"],
            r"^evaluation\.embedder: no such model './none': there is no 'none'$",
        ),
        (
            ["rl.algorithm.similarity={{embedder: '{folder}'}}"],
            r"^rl\.algorithm\.similarity\.embedder: must be a model, got the folder '.*' without modules\.",
        ),
        (
            ["model.max_prompt_length=2"],
            r"^data: phase 0 \(sft\) has no usable line; prompts left out: \d+ by model\.max_prompt_length, 2$",
        ),
        (
            [
                "phases=[{{sft: {{steps: 1}}}}]",
                "data={{task: null, train: '{lines}', demonstration: d, test: '{lines}'}}",
            ],
            r"^evaluation\.rewards\.0: 'exact' needs the column 'answer'; .*; set evaluation\.rewards for others$",
        ),
        (
            ["model.chat_template=true"],
            r"^model\.chat_template: true needs a tokenizer with a chat template, and that of model\.path has none$",
        ),
    ],
)
def test_runs_that_cannot_work_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt": "1 + 1", "d": "2"}) + "\n")
    places = {"file": file, "folder": tmp_path, "lines": lines}
    recipe = small.recipe(tmp_path / "run", *(text.format(**places) for text in overrides))
    _printed, problems = dry_run(recipe)
    assert len(problems) == 1 and re.search(message, problems[0]), problems
    with pytest.raises((TypeError, ValueError, OSError), match=message):
        train(recipe)


def test_the_reward_of_files_without_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": str(i), "d": "2"}) + "\n" for i in range(8)))
    data = f"data={{task: null, train: '{path}', demonstration: d, test: '{path}'}}"
    recipe = small.recipe(tmp_path / "run", data, "rl.rewards=[]", "rl.steps=1")
    recipe = recipe.model_copy(update=dict(logging=recipe.logging.model_copy(update=dict(progress=True))
    note = "rl.rewards: none is named, so exact rewards the responses"
    assert note in dry_run(recipe)[0]
    capsys.readouterr()
    train(recipe)
    assert note in capsys.readouterr().err.splitlines()


def test_lines_without_a_column_that_a_reward_takes_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": i or None, "d": "2"}) + "\n" for i in range(8)))
    data = f"data={{task: null, train: '{path}', demonstration: d, test: '{path}'}}"
    rewards = [f"rl.rewards=[{{name: '{__name__}:if_answered'}}]", "rl.steps=1"]
    recipe = small.recipe(tmp_path / "run", data, *rewards, "logging.progress=true")
    gap = f"rl.rewards.0: '{__name__}:if_answered' gets None for 'answer', which 1 of 8 lines lack"
    assert gap in dry_run(recipe)[0]
    capsys.readouterr()
    train(recipe)
    assert capsys.readouterr().err.splitlines().count(gap) == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small.recipe(tmp_path / "run" / "here")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    expected = f"output: must be writable, got {str(recipe.folder)!r}, where {str(tmp_path)!r} is not"
    assert dry_run(recipe)[1] == [expected]
    with pytest.raises(PermissionError, match=re.escape(expected)):
        train(recipe)


def test_too_little_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small.recipe(tmp_path / "run")
    assert dry_run(recipe)[1] == []
    monkeypatch.setattr("grpo_trainer.dry_run._available", lambda: (1000.0, "machine"))
    assert [problem.split(":")[0] for problem in dry_run(recipe)[1]] == ["memory"]
