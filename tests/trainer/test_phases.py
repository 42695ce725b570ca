"""Sequences of phases: starting points, checks before the first phase, and which weights each one trains."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from grpo_trainer.adapters import settings_of_base
from grpo_trainer.algorithm import minibatch_counts
from grpo_trainer.data import prompt_text
from grpo_trainer.dry_run import dry_run
from grpo_trainer.embed import load_embedder
from grpo_trainer.sft import diversity_weights
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Model, Recipe, Similarity
from grpo_trainer.report.adapters import read_adapter
from grpo_trainer.recipes import validated
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after, timeless

SHORT = ("sft.steps=2", "rl.steps=3", "evaluation.every=0")
LORA = (*SHORT, "model.lora={rank: 2, dropout: 0.1}")


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").iterdir())[-1] / "model"


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_adapters_that_were_trained_before_are_the_reference(tmp_path: Path, architecture: str) -> None:
    """Disabled adapters would be the model before the supervised phase, and KL would not start at 0."""
    train(small.recipe(tmp_path, *LORA, f"model.tiny.architecture={architecture}"))
    first, *_, last = [e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl"]
    # rounding differs between sampling token by token and scoring at once
    assert abs(first["train/kl_rollout"]) < 1e-9 < 1e-6 < last["train/kl_rollout"]


def test_a_resumed_run_with_adapters_keeps_its_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(small.recipe(tmp_path / "whole", *LORA, "checkpoints.every=1"))
    parts = small.recipe(tmp_path / "parts", *LORA, "checkpoints.every=1")
    stopped_after(monkeypatch, parts, 1, 2)
    train(parts, resume=True)
    whole = (newest(tmp_path / "whole") / "adapter_model.safetensors").read_bytes()
    assert (newest(tmp_path / "parts") / "adapter_model.safetensors").read_bytes() == whole
    assert timeless(lines(tmp_path / "parts")) == timeless(lines(tmp_path / "whole"))


def test_samples_and_maps_are_written_once_by_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = (*SHORT, "checkpoints.every=2", "evaluation.every=1", "rl.algorithm.similarity={embedder: hashed}")
    train(small.recipe(tmp_path / "whole", *more))
    parts = small.recipe(tmp_path / "parts", *more)
    stopped_after(monkeypatch, parts, 1, 2)
    with (tmp_path / "parts" / "samples.jsonl").open("a") as file:
        file.write('{"number": 1, "st')  # killed while writing
    train(parts, resume=True)
    for name in ("samples", "maps"):
        assert lines(tmp_path / "parts", name) == lines(tmp_path / "whole", name)


def test_adapters_are_evaluated_on_the_recipes_own_model(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path, *LORA, "model.max_prompt_length=19")
    final = train(recipe)
    events = lines(tmp_path, "events")
    result = evaluate_model(recipe, str(newest(tmp_path)), "test")
    assert result.metrics["reward"] == final["eval/test_reward"]
    assert result.lines == json.loads((tmp_path / "evaluations" / "test-rl-4.json").read_text())["prompts"]
    assert any(event["event"] == "prompts left out" for event in events)
    assert lines(tmp_path, "events") == events  # an evaluation is not logged with the run


def test_adapters_are_evaluated_on_the_model_they_were_trained_on(tmp_path: Path) -> None:
    """On another one they load without an error, as all models of a shape have the same names of weights."""
    import peft
    from transformers import AutoModelForCausalLM

    recipe = small.recipe(tmp_path / "run", *LORA)
    final = train(recipe)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    loaded = peft.PeftModel.from_pretrained(own, newest(tmp_path / "run"))
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "run" / "base")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    folder = newest(tmp_path / "moved")
    other_seed = recipe.model_copy(update=dict(seed=recipe.seed + 1)
    assert evaluate_model(other_seed, str(folder), "test").metrics["reward"] == final["eval/test_reward"]
    named = recipe.model_copy(update=dict(model=recipe.model.model_copy(update=dict(path=str(tmp_path / "moved" / "base")))
    config = json.loads((folder / "adapter_config.json").read_text())
    for path, base, message in (
        (named.model.path, "other/model", "must be 'other/model', .* were trained on, got .*; if that is a copy"),
        ("tiny", "other/model", "must be the model that .* were trained on, 'other/model', got 'tiny', whose weights"),
        ("tiny", None, "must be the model that .* were trained on, which they do not name, got 'tiny'"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        if base is None:
            shutil.rmtree(tmp_path / "moved" / "base")
        with pytest.raises(ValueError, match=f"^model.path: {message}"):
            evaluate_model(recipe if path == "tiny" else named, str(folder), "test")


def test_adapters_of_the_head_are_resumed_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft adds the head's own weight to the file."""
    head = "model.lora={rank: 2, targets: [q_proj, lm_head]}"
    parts, whole = (small.recipe(tmp_path / name, *LORA, head, "checkpoints.every=1") for name in ("parts", "whole"))
    final = train(whole)
    stopped_after(monkeypatch, parts, 1, 2)
    assert train(parts, resume=True) == final
    result = evaluate_model(whole, str(newest(whole.folder)), "test")
    assert result.metrics["reward"] == final["eval/test_reward"]
    assert any(name.endswith("lm_head") for name in read_adapter(newest(whole.folder)))
    name = "base_model.model.lm_head.base_layer.weight"
    weights = load_file(newest(whole.folder) / "adapter_model.safetensors")
    save_file(weights | {name: weights[name] + 1}, newest(whole.folder) / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"unexpected \['{name}'\]$"):
        evaluate_model(whole, str(newest(whole.folder)), "test")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("[q_proj, vproj]", r"got \['q_proj', 'vproj'\]; the nearest is 'v_proj'$"),
        ("[q_proj, embed_tokens]", r"got \['q_proj', 'embed_tokens'\]; 'embed_tokens' is an embedding$"),
    ],
)
def test_each_target_of_adapters_is_a_layer(tmp_path: Path, targets: str, message: str) -> None:
    """peft adapts the others without a word."""
    recipe = small.recipe(tmp_path / "run", f"model.lora={{rank: 2, targets: {targets}}}")
    with pytest.raises(ValueError, match=rf"^model\.lora\.targets: must be names of layers, such as .*{message}"):
        train(recipe)
    assert any(problem.startswith("model.lora.targets: ") for problem in dry_run(recipe)[1])


def test_a_run_that_would_begin_with_adapters_is_refused(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, *LORA))
    path = f"model.path={newest(tmp_path)}"
    with pytest.raises(ValueError, match=r"^model\.path: must be a model, got the adapters in .*merge_and_unload"):
        train(small.recipe(tmp_path / "next", path))


@pytest.mark.parametrize(
    ("base", "path", "is_same"),
    [
        ("models/a", "/data/models/a", True),
        ("models/b", "/data/models/a", False),
        ("org/name", "/cache/models--org--name/snapshots/12", True),
        ("org/other", "/cache/models--org--name/snapshots/12", False),
        ("/usr/bin", "/bin/../lib", False),
        ("/models", "/models/a.gguf", True),
        ("org/name", "org/name", True),
        ("org/name", "name", True),
    ],
)
def test_names_of_one_model(
    base: str, path: str, is_same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_trainer.pretrained.source", lambda _: {"pretrained_model_name_or_path": "/models"})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    if is_same:
        assert settings_of_base(Model(path=path), tmp_path).path == path
    else:
        with pytest.raises(ValueError, match=r"^model\.path: must be "):
            settings_of_base(Model(path=path), tmp_path)


def test_each_phase_learns_from_its_own_rewards(tmp_path: Path) -> None:
    values = small.values(tmp_path)
    values["phases"] = [
        {"rl": values["phases"][1]["rl"] | {"steps": 1, "rewards": [{"name": name}]}}
        for name in ("tests.trainer.small:digits", "tests.trainer.test_train:equal")
    ]
    train(validated(Recipe, values))
    first, second = (e for e in lines(tmp_path) if e["kind"] == "train" and e["phase"] == "rl")
    assert first["rewards/std"] > 0 and second["rewards/std"] == 0 and second["rewards/mean"] == 1


@pytest.mark.parametrize(
    ("override_", "message"),
    [
        (
            "rl.algorithm.name=grppo",
            r"^rl.algorithm.name: must .* 'grppo'; the nearest is 'grpo'$",
        ),
        (
            "rl.rollout.num_generations=1",
            r"^rl.rollout.num_generations: must be at least 2 for grpo, which compares .*, got 1$",
        ),
        (
            "model.lora={rank: 2, targets: [q_prj]}",
            r"^model.lora.targets: must be names of layers, such as .*, got \['q_prj'\]; the nearest is 'q_proj'$",
        ),
        ("rl.rewards=[{name: gsm8k, options: {correct: -1}}]", r"^rl.rewards.0.options: gsm8k"),
        (
            "rl.rewards=[{name: gsm8k, options: {correct: a}}]",
            r"^rl.rewards.0.options.correct: must be float, got str 'a'$",
        ),
        ("rl.algorithm.name=gpro", r"'gpro'; the nearest is 'grpo'$"),
        ("rl.algorithm.loss={clip: 1}", r"^rl.algorithm.loss.clip: no such key"),
        ("model.mixed_precision=fp16", r"^model.mixed_precision: fp16 needs a GPU, and there is none"),
        ("model.attention=flash_attention_2", r"^model.attention: 'flash_attention_2' cannot be used here: "),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="two of them are right with a GPU")
def test_errors_in_later_phases_are_raised_before_the_first(tmp_path: Path, override_: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        set_up(small.recipe(tmp_path, override_))


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
def test_a_critic_warms_up_alone(tmp_path: Path, architecture: str) -> None:
    critic = "rl.algorithm={name: group_ppo, critic: {warmup: 1, lr: 0.1}}"
    trainer = set_up(small.recipe(tmp_path, critic, f"model.tiny.architecture={architecture}"))
    settings = trainer.recipe.rl
    assert settings is not None
    run = RlRun(trainer, 1, settings, 0)
    changed = []
    for step in (1, 2):
        before = {name: value.clone() for name, value in trainer.policy.named_parameters()}
        run._set_lr(step)
        run.step(trainer.items("train")[:6], step)
        now = dict(trainer.policy.named_parameters())
        changed.append({name.startswith("value_head") for name in now if not torch.equal(now[name], before[name])})
    assert changed == [{True}, {True, False}]


def test_checkpointing_is_on_in_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small.recipe(tmp_path, *SHORT, "model.gradient_checkpointing=true", "checkpoints.every=1")
    stopped_after(monkeypatch, recipe, 1, 1)
    trainer = set_up(recipe)
    trainer.run(resume=True)
    assert trainer.policy.lm.is_gradient_checkpointing


def test_checkpointing_does_not_turn_dropout_on(tmp_path: Path) -> None:
    """The weights are the same bit for bit."""
    more = ("model.tiny.architecture=seq2seq", "rl.share_prompts=false", *SHORT)
    runs = []
    for name, checkpointing in (("with", "true"), ("without", "false")):
        recipe = small.recipe(tmp_path / name, *more, f"model.gradient_checkpointing={checkpointing}")
        trainer = set_up(recipe)
        for module in trainer.policy.lm.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        settings = recipe.rl
        assert settings is not None
        run = RlRun(trainer, 1, settings, 0)
        run._set_lr(1)
        run.step(trainer.items("train")[:6], 1)
        runs.append(trainer.policy.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[1])


def test_segments_that_a_mask_empties_do_not_count() -> None:
    ids = torch.tensor([[0, 0, -1, -1, 2, 3], [-1, -1, -1, -1, -1, -1], [-1, 5, 5, 6, -1, 6]])
    assert minibatch_counts(ids >= 0, ids) == {"tokens": 8, "rows": 3, "segments": 3 + 0 + 2}


def test_rare_demonstrations_of_a_prompt_count_for_more(tmp_path: Path) -> None:
    prompts = ["p", "q", "p", "p", "p", "q"]
    texts = ["same words here", "alone", "same words here", "quite another", "same words here", "two"]
    embedder = load_embedder(Similarity(embedder="hashed", text="whole"))
    computed = diversity_weights(prompts, texts, embedder, 1.0)
    assert computed[0] == computed[2] == computed[4] < 1 < computed[3]
    assert sum(computed[i] for i in (0, 2, 3, 4)) == pytest.approx(4) and computed[1] == computed[5] == pytest.approx(1)
    # three copies and one at similarity s: 1 / (3 + s) each, and 1 / (1 + 3 s)
    vectors = torch.nn.functional.normalize(embedder(texts).double(), dim=1)
    s = float(vectors[0] @ vectors[3])
    copy, other = 1 / (3 + s), 1 / max(1 + 3 * s, 1)
    assert computed[3] == pytest.approx(4 * other / (3 * copy + other), rel=1e-5)
    half = diversity_weights(prompts, texts, embedder, 0.5)
    assert half == pytest.approx([(1 + weight) / 2 for weight in computed])
    assert diversity_weights(prompts, texts, embedder, 0.0) == [1.0] * 6


def test_demonstrations_of_a_batch_are_compared_whatever_their_prompts(tmp_path: Path) -> None:
    """With one demonstration per prompt, comparing those of a prompt changes nothing, those of a batch do."""
    lines = [
        {"prompt": f"p{i}", "demonstration": "same words" if i % 4 else f"other {i} of {i * i}"} for i in range(16)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    computed = {}
    for name, polychromic in (
        ("plain", "null"),
        ("prompt", "{embedder: hashed}"),
        ("batch", "{embedder: hashed, among: batch}"),
    ):
        recipe = small.recipe(
            tmp_path / name,
            f"data={{task: null, train: {tmp_path / 'data.jsonl'}}}",
            f"sft.polychromic={polychromic}",
        )
        trainer = set_up(recipe)
        assert recipe.sft is not None
        run = SftRun(trainer, 0, recipe.sft, 0)
        computed[name] = (run._weights(trainer.items("sft")), run.step(trainer.items("sft"), 1)["train/loss"])
    assert torch.equal(computed["plain"][0], computed["prompt"][0]) and computed["plain"][1] == computed["prompt"][1]
    weights, loss = computed["batch"]
    same = torch.tensor([i % 4 != 0 for i in range(16)])
    assert weights.mean() == pytest.approx(1) and weights[same].max() < 1 < weights[~same].min()
    assert loss != computed["plain"][1]
    with pytest.raises(ValueError, match=r"^sft.batch: must be in \[2, 256\] with polychromic.among: batch"):
        small.recipe(tmp_path, "sft.batch=257", "sft.polychromic={among: batch}")


def test_weights_of_demonstrations_have_a_gradient(tmp_path: Path) -> None:
    """The step is that of the weighted mean of the tokens' log-probs, irrespective of micro-batches."""
    recipe = small.recipe(tmp_path, "sft.polychromic={embedder: hashed}", "sft.micro_batch=5")
    trainer = set_up(recipe)
    assert recipe.sft is not None
    run = SftRun(trainer, 0, recipe.sft, 0)
    items = [item | {"sft_weight": 0.5 + i % 3} for i, item in enumerate(trainer.items("sft")[:16])]
    losses: list[torch.Tensor] = []
    real = Policy._logprobs

    def noted(self: Policy, batch: Any, share: bool = True) -> torch.Tensor:
        logprobs = real(self, batch, share)
        losses.extend((logprobs[i] * batch.mask[i]).sum() for i in range(len(batch.tokens)))
        losses_lengths.extend(batch.mask.sum(1).tolist())
        return logprobs

    losses_lengths: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "_logprobs", noted)
        logprobs = run.step(items, 1)
    weights = [item["sft_weight"] for item in items]
    total = sum(w * length for w, length in zip(weights, losses_lengths, strict=True))
    expected = -sum(w * float(loss.detach()) for w, loss in zip(weights, losses, strict=True)) / total
    assert logprobs["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_texts_of_prompts() -> None:
    assert prompt_text("a") == "a"
    assert prompt_text([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == "a\nb"


def test_token_groups_are_summarised_every_few_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small.recipe(
        tmp_path / "run",
        "rl.steps=5",
        "rl.algorithm.name=group_ppo",
        "logging.progress=true",
        "logging.summary=2",
        "evaluation.every=0",
    )
    train(recipe)
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("steps ")]
    assert [line.split(":")[0] for line in printed] == ["steps 1 to 2", "steps 3 to 4", "steps 5 to 5"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = [line for line in steps if line["kind"] == "train" and e["phase"] == "rl"][:2]
    tokens, endpoints, rows = (
        sum(line[f"group/total_{name}"] for line in first) for name in ("tokens", "endpoints", "sequences")
    )
    assert printed[0] == (
        f"steps 1 to 2: {tokens / endpoints:.2f} tokens per segment, {endpoints / rows:.1f} segments per response, "
        f"{100 - 100 * endpoints / tokens:.1f} % fewer terms than tokens, "
        f"threshold {first[1]['group/threshold']:.3f}, reward {sum(line['rewards/mean'] for line in first) / 2:.3f}"
    )
    assert tokens > endpoints > rows == 2 * 6 * 4
