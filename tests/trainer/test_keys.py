"""Every key of a recipe changes something: a recipe gives other values, and a key without one fails.

What a run does is compared as a whole: weights, logs, checkpoints, lines on the console, and how often the model was
called.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("peft")

from grpo_trainer import cli, embed, engine, rewards, rollout
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import override, read_yaml, validated
from grpo_trainer.tasks import SYSTEMS
from grpo_trainer.train import train
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from grpo_kernels import backends
from tests.trainer import small

SMALL = (
    "data={task: null, train: <data>, validation: <data>, test: <data>}",
    "sft={steps: 3, batch: 8, micro_batch: 8, optimizer: {lr: 0.01}}",
    "rl={steps: 3, num_iterations: 3, minibatches: 1, micro_batch: 16, optimizer: {lr: 0.01}, rewards: [{name: "
    "'tests.trainer.small:digits'}], rollout: {prompts: 4, num_generations: 4, max_completion_length: 6}}",
    "evaluation={every: 0, samples: 2, embedder: hashed, rewards: [{name: 'tests.trainer.small:length'}]}",
    "checkpoints.every=1",
)
LINES = [
    {
        "prompt": f"what is {i % 3}",
        "question": f"and what is {i}",
        "demonstration": f"so {i} #### {i}" * (1 + i % 2),
        "solution": f"#### {i}{i}",
        "answer": str(i),
    }
    for i in range(9)
]


KEYS = [line.partition(" (")[0].replace("[]", ".0") for line in cli._keys(Recipe) if ", default " in line]
# Another value of each key, as in a recipe; <name> is a file or a folder.
OTHER = """
seed: 1
backend: reference
model:
  {path: <saved>, dtype: bfloat16, mixed_precision: bf16, attention: eager, trust_remote_code: true, four_bit: true}
model.tiny: {architecture: seq2seq, hidden: 48, layers: 2, heads: 4, intermediate: 48, vocabulary: 100}
model.lora: {rank: 3, alpha: 64, dropout: 0.0, targets: [q_proj]}
model.:
  {banned: [7, "4"], reference_model_path: <sibling>, gradient_checkpointing: true, chat_template: true,
  chat_template_options: {tone: calmly}, max_prompt_length: 19}
data:
  {task: strategies, options: {demonstrations: 24, train: 9, test: 4}, limit: 1, prompt: question,
  train: <other>, sft: <other>, validation: <other>, test: <other>, template: "so {prompt}",
  demonstration: solution, demonstration_template: "so {solution}"}
sft: {steps: 2, batch: 4, micro_batch: 4, polychromic: {weight: 0.3, among: batch}, optimizer: &optimizer
  {lr: 0.02, betas: [0.5, 0.6], eps: 0.1, weight_decay: 0.5, warmup: 2, schedule: constant, final: 0.9,
  grad_clip: 1e-4}}
rl: {steps: 1, num_iterations: 2, minibatches: 2, micro_batch: 3, share_prompts: false, dropout: false}
rl.optimizer: *optimizer
rl.rewards.0: &reward {name: tests.trainer.small:equal, weight: 3.0, on_error: skip, timeout: 0.05}
rl.rollout:
  {prompts: 2, num_generations: 3, temperature: 0.3, top_p: 0.3, top_k: 1, keep_support: true, truncated: leave_out,
  max_completion_length: 3, min_completion_length: 6, batch: 4, engine: vllm}
rl.rollout.vllm:
  {dtype: bfloat16, max_model_len: 600, gpu_memory_utilization: 0.5, cache_gib: 2.0, tensor_parallel_size: 2,
  enforce_eager: false, sleep: false}
rl.algorithm:
  {name: dr_grpo, beta: 5.0, epsilon: 0.001, epsilon_high: 0.001, advantage: {std_floor: 1.0}, top_k_ratio: 0.5,
  loss: {aggregation: seq-mean-token-mean}, segments: {group_max_size: 1}, sparse: true, drop_flat: false,
  set_size: 3, correction: {weights: none}}
rl.algorithm.similarity:
  {config: {linkage: single, min_silhouette: 0.9}, sharing: 1.0, within: 0.5, between: 1.0, text: whole,
  unfinished: whole, tail: 4}
rl.algorithm.critic: {separate: true, lr: 0.1, coef: 5.0, clip: 1e-6, warmup: 1}
evaluation:
  {every: 1, prompts: 1, test_prompts: 1, batch: 1, samples: 4, temperature: 0.2, pass_k: [2], solved: -1.0,
  solved_quantile: 1.0, max_completion_length: 3}
evaluation.rewards.0: *reward
logging: {every: 2, progress: true, samples: 1}
checkpoints: {every: 0, keep: 1}
"""
SECTIONS: dict[str, Any] = {
    **dict.fromkeys(("sft", "rl")),
    **{f"{part}.rewards": [{"name": "tests.trainer.small:equal"}] for part in ("rl", "evaluation")},
    "model.lora": {"rank": 2},
    **{key: {"embedder": "hashed"} for key in ("sft.polychromic", "rl.algorithm.similarity")},
    "rl.algorithm.critic": {"lr": 0.1},
}
CLUSTERS = ("rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}",)
CRITIC = ("rl.algorithm={name: group_ppo, critic: {}}",)
TASK = ("data={task: arithmetic, options: {demonstrations: 24, train: 12, validation: 2, test: 3}}",)
LORA = ("model.lora={rank: 2, dropout: 0.5}", "rl.dropout=true")
SAVED = ("model.path=<saved>",)
SLOW = "tests.trainer.test_keys:slow"
# Overrides for both runs, by a key or, with a dot at the end, the beginning of keys; the first one that fits.
GIVEN: dict[str, tuple[str, ...]] = {
    "model.lora.": LORA,
    "model.banned": ("sft=null",),
    **dict.fromkeys(("model.reference_model_path", "model.trust_remote_code", "model.chat_template"), SAVED),
    "model.four_bit": (*SAVED, *LORA),
    "model.chat_template_options": (*SAVED, "model.chat_template=true"),
    **dict.fromkeys(("data.task", "data.options", "model.tiny.vocabulary", "model.max_prompt_length"), TASK),
    "sft.polychromic.": ("sft.polychromic={embedder: hashed}",),
    "rl.dropout": LORA,
    **{f"{part}.rewards.0.on_error": (small.rewarded_by("not_a_number", part=part),) for part in ("rl", "evaluation")},
    **{f"{part}.rewards.0.timeout": (small.rewarded_by(SLOW, part=part),) for part in ("rl", "evaluation")},
    "rl.rollout.keep_support": ("rl.rollout.top_k=3",),
    **dict.fromkeys(("rl.rollout.vllm.", "rl.algorithm.correction"), ("rl.rollout.engine=vllm",)),
    "rl.algorithm.similarity.tail": (*CLUSTERS, "rl.algorithm.similarity.unfinished=tail"),
    "rl.algorithm.similarity.": CLUSTERS,
    "rl.algorithm.critic": ("rl.algorithm.name=group_ppo",),
    **dict.fromkeys(("rl.algorithm.critic.", "rl.algorithm.segments", "rl.algorithm.sparse"), CRITIC),
    "rl.algorithm.drop_flat": (small.rewarded_by("equal"),),
    "rl.algorithm.set_size": ("rl.algorithm={name: polychromic, similarity: {embedder: hashed}}",),
}
# Keys whose effect is tested elsewhere, by file.
ELSEWHERE = {
    "test_cli.py": ("name", "output", "threads", "logging.to", "logging.project"),
    "test_distributed.py": ("distributed",),
    "test_rewards.py": ("rl.rewards.0.options", "evaluation.rewards.0.options"),
    "test_embed.py": (
        *("sft.polychromic.embedder", "evaluation.embedder"),
        *(f"rl.algorithm.similarity.{name}" for name in ("embedder", "batch_size", "workers", "gpus_per_worker")),
    ),
}


def others(values: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Another value of each key."""
    for name, value in values.items():
        path = f"{where}{name}".replace("..", ".")
        yield from [(path, value)] if path in KEYS else others(value, f"{path}.")


def fits(name: str, key: str) -> bool:
    return key == name or (name.endswith(".") and key.startswith(name))


VALUES = dict(others(read_yaml(OTHER, "OTHER")))


def slow(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.5)
    return small.length(prompts, completions)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    template = "{% for message in messages %}said {{ tone }}: {{ message.content }}{% endfor %}"
    made = {name: small.saved_model(folder / name, "seed=5", template=template) for name in ("saved", "sibling")}
    weights = {name: 1.1 * weight for name, weight in load_file(folder / "sibling" / "model.safetensors").items()}
    save_file(weights, folder / "sibling" / "model.safetensors", {"format": "pt"})
    made["data"] = small.write_data(folder / "data.jsonl", LINES)
    return made | {"other": small.write_data(folder / "other.jsonl", LINES[::-2])}


def content_of(files: dict[str, str], *overrides: str) -> str:
    """The JSON of a recipe."""
    values = small.values(Path("unused"))
    for assignment in (*SMALL, *overrides):
        for name, path in files.items():
            assignment = assignment.replace(f"<{name}>", path)
        override(values, assignment)
    content: str = validated(Recipe, values).model_dump_json()
    return content


TEXTS = ("<think> a", "<think> b </think> the answer is 3", "<think> no end of a long thought", "of many words")


@functools.cache
def done_by(content: str, folder: Path) -> Any:
    """All that the run of a recipe does, apart from its times."""
    recipe = Recipe.model_validate_json(content).model_copy(update={"output": str(folder)})
    if recipe.rl is not None and recipe.rl.rollout.engine == "vllm":
        return [
            engine.options(recipe.model, recipe.rl.rollout, on, 4096) for on in ("cpu", "cuda")
        ], recipe.rl.algorithm
    calls, printed, error = Counter[Any](), io.StringIO(), ""

    def counted(owner: Any, name: str, *arguments: str) -> Any:
        real = getattr(owner, name)
        return mock.patch.object(
            owner, name, lambda *a, **k: calls.update([(name, *map(k.get, arguments))]) or real(*a, **k)
        )

    with contextlib.ExitStack() as stack:
        names = ((Policy, "forward"), (Policy, "_run_after_shared_prompts"), (rollout, "_sample"), (backends, "select"))
        for owner, *name in (*names, (AutoConfig, "from_pretrained", "trust_remote_code")):
            stack.enter_context(counted(owner, *name))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            train(recipe)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    logs = [small.timeless(small.lines(folder, path.stem)) for path in sorted(folder.glob("[mse][ea]*s.jsonl"))]
    weights = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    similarity = None if recipe.rl is None else recipe.rl.algorithm.similarity
    embedded = None if similarity is None else embed.load_embedder(similarity)(TEXTS).nan_to_num(9.0).tolist()
    lines = [line.split("  ")[0] for line in printed.getvalue().splitlines()]
    return calls, lines, error.replace(str(folder), ""), logs, weights, embedded


def test_every_key_has_an_entry() -> None:
    elsewhere = [key for names in ELSEWHERE.values() for key in names]
    assert sorted(KEYS) == sorted([*VALUES, *elsewhere]) and len(KEYS) > 120
    assert all((Path(__file__).parent / name).exists() for name in ELSEWHERE)
    assert {name for key in (*KEYS, *SECTIONS) for name in GIVEN if fits(name, key)} == {*GIVEN}


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.full
@pytest.mark.parametrize("key", [*VALUES, *SECTIONS])
def test_every_key_changes_something(key: str, files: dict[str, str], top: Path) -> None:
    given = next((more for name, more in GIVEN.items() if fits(name, key)), ())
    contents = [content_of(files, *given), content_of(files, *given, f"{key}={json.dumps((VALUES | SECTIONS)[key])}")]
    # many keys share a run
    seen = [done_by(content, top / hashlib.sha256(content.encode()).hexdigest()) for content in contents]
    is_different = seen[0] != seen[1]  # outside the assertion, as observations may be long
    assert is_different


def test_options_of_tasks_and_rewards_are_listed() -> None:
    options = "\n".join(cli._all_keys()).split("\n\n")[1:]
    sections = dict(section.partition(":")[::2] for section in options)
    titles = [f"data.options of the task {name}" for name in SYSTEMS]
    assert list(sections) == [*titles, *(f"options of the reward {name}" for name in rewards.BUNDLED)]
    assert "\n  evasive (number in [0, 1], default 0.3): share of" in sections["data.options of the task dialogue"]
    assert sections["options of the reward exact"] == " none"
    assert "\n  path (text, required): folder or hub name" in sections["options of the reward reward_model"]
    assert "\n  scores (pair of numbers, default [1, 10]): lowest" in sections["options of the reward judge"]
    assert "\n  weights.bleu (number in [0, 1], default 0.3" in sections["options of the reward dialogue"]
    diversity = sections["options of the reward diversity"]
    assert "\n  text (answer | whole, default" in diversity and "sharing" not in diversity
