"""Every key of a recipe changes something: a table gives another value, and a key without an entry fails.

What a run does is compared as a whole: weights, logs, checkpoints, lines on the console, and how often the model was
called. Keys whose effect needs a GPU, a package or another process are compared in what is set up.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from grpo_trainer import embed, engine, rollout
from grpo_trainer import train as training
from grpo_trainer.checkpoint import save_policy
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import override, section_in, validated
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from grpo_kernels import backends
from tests.trainer import small

HERE = "tests.trainer.test_keys"
SMALL = (
    "data.options={demonstrations: 24, train: 12, validation: 2, test: 2, boxes: 0.0}",
    "sft={steps: 1, batch: 8, micro_batch: 8, optimizer: {lr: 0.01}}",
    "rl={steps: 2, num_iterations: 1, minibatches: 1, micro_batch: 16, optimizer: {lr: 0.01}, rewards: [{name: "
    "'tests.trainer.small:digits'}], rollout: {prompts: 4, num_generations: 4, max_completion_length: 6}}",
    "evaluation.every=0",
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
CLUSTERS = ("rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}",)
CRITIC = ("rl.algorithm={name: group_ppo, critic: {}}",)
FILES = ("data={task: null, train: '<data>', test: '<data>'}",)
LORA = ("model.lora={rank: 2, dropout: 0.5}", "rl.dropout=true")
SAVED = ("model.path=<saved>",)
SAMPLED = ("evaluation={every: 0, samples: 2, embedder: hashed}",)
GRADED = (f"evaluation.rewards=[{{name: '{HERE}:lengths'}}]",)
VLLM = ("rl.rollout.engine=vllm",)
BROKEN = f"rewards=[{{name: '{HERE}:not_a_number'}}]"
SLOW = f"rewards=[{{name: '{HERE}:slow'}}]"
OPTIMIZER: dict[str, Any] = {
    "lr": 0.02,
    "betas": [0.5, 0.6],
    "eps": 0.1,
    "weight_decay": 0.5,
    "warmup": 2,
    "schedule": "constant",
    "final": 0.9,
    "grad_clip": 1e-4,
}
TWO = ("sft.steps=3", "rl.steps=3")  # a schedule needs several steps

# Another value, and the overrides for both runs. <name> is a file or a folder.
RUNS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "seed": (1, ()),
    "backend": ("reference", ()),
    "model.mixed_precision": ("bf16", ()),
    "model.lora.alpha": (64, LORA),
    "model.lora.dropout": (0.0, LORA),
    "model.banned": ([7, "4"], ("sft=null",)),
    "model.reference_model_path": ("<sibling>", SAVED),
    "data.demonstration": ("solution", FILES),
    "sft": (None, ()),
    "rl": (None, ()),
    **{f"sft.optimizer.{name}": (value, TWO) for name, value in OPTIMIZER.items()},
    **{f"rl.optimizer.{name}": (value, TWO) for name, value in OPTIMIZER.items()},
    "sft.steps": (2, ()),
    "sft.batch": (4, ()),
    "sft.micro_batch": (4, ()),
    "sft.polychromic": ({"embedder": "hashed"}, FILES),
    "sft.polychromic.weight": (0.3, (*FILES, "sft.polychromic={embedder: hashed}")),
    "sft.polychromic.among": ("batch", (*FILES, "sft.polychromic={embedder: hashed}")),
    "rl.steps": (1, ()),
    "rl.num_iterations": (2, ()),
    "rl.minibatches": (2, ()),
    "rl.micro_batch": (3, ()),
    "rl.share_prompts": (False, ()),
    "rl.dropout": (False, LORA),
    "rl.rewards": ([{"name": f"{HERE}:lengths"}], ()),
    "rl.rewards.0.name": (f"{HERE}:lengths", ()),
    "rl.rewards.0.weight": (3.0, ()),
    "rl.rewards.0.on_error": ("skip", (f"rl.{BROKEN}",)),
    "rl.rewards.0.timeout": (0.05, (f"rl.{SLOW}",)),
    "rl.rollout.prompts": (2, ()),
    "rl.rollout.num_generations": (3, ()),
    "rl.rollout.temperature": (0.3, ()),
    "rl.rollout.top_p": (0.3, ()),
    "rl.rollout.top_k": (1, ()),
    "rl.rollout.keep_support": (True, ("rl.rollout.top_k=3",)),
    "rl.rollout.max_completion_length": (3, ()),
    "rl.rollout.min_completion_length": (6, ()),
    "rl.rollout.batch": (4, ()),
    "rl.rollout.truncated": ("leave_out", ()),
    "rl.algorithm.name": ("dr_grpo", ()),
    "rl.algorithm.beta": (5.0, ()),
    "rl.algorithm.epsilon": (0.001, ("rl.num_iterations=4",)),
    "rl.algorithm.epsilon_high": (0.001, ("rl.num_iterations=4",)),
    "rl.algorithm.advantage": ({"std_floor": 1.0}, ()),
    "rl.algorithm.loss": ({"aggregation": "seq-mean-token-mean"}, ()),
    "rl.algorithm.similarity": ({"embedder": "hashed"}, ()),
    "rl.algorithm.similarity.config": ({"linkage": "single", "min_silhouette": 0.9}, CLUSTERS),
    "rl.algorithm.similarity.sharing": (1.0, CLUSTERS),
    "rl.algorithm.similarity.within": (0.5, CLUSTERS),
    "rl.algorithm.similarity.between": (1.0, CLUSTERS),
    "rl.algorithm.segments": ({"group_max_size": 1}, CRITIC),
    "rl.algorithm.sparse": (True, CRITIC),
    "rl.algorithm.critic": ({"lr": 0.1}, ("rl.algorithm.name=group_ppo",)),
    "rl.algorithm.critic.separate": (True, CRITIC),
    "rl.algorithm.critic.lr": (0.1, CRITIC),
    "rl.algorithm.critic.coef": (5.0, CRITIC),
    "rl.algorithm.critic.clip": (1e-6, (*CRITIC, "rl.num_iterations=2")),
    "rl.algorithm.critic.warmup": (1, CRITIC),
    "rl.algorithm.top_k_ratio": (0.5, ()),
    "rl.algorithm.drop_flat": (False, (f"rl.rewards=[{{name: '{HERE}:equal'}}]",)),
    "rl.algorithm.set_size": (3, ("rl.algorithm={name: polychromic, similarity: {embedder: hashed}}",)),
    "evaluation.every": (1, ()),
    "evaluation.prompts": (1, ()),
    "evaluation.test_prompts": (1, ()),
    "evaluation.batch": (1, ()),
    "evaluation.samples": (4, SAMPLED),
    "evaluation.temperature": (0.2, SAMPLED),
    "evaluation.pass_k": ([2], SAMPLED),
    "evaluation.solved": (-1.0, ()),
    "evaluation.solved_quantile": (1.0, (*FILES, "data.validation=<data>", *GRADED)),
    "evaluation.max_completion_length": (3, ()),
    "evaluation.rewards": ([{"name": f"{HERE}:lengths"}], ()),
    "evaluation.rewards.0.name": (f"{HERE}:equal", GRADED),
    "evaluation.rewards.0.weight": (3.0, GRADED),
    "evaluation.rewards.0.on_error": ("skip", (f"evaluation.{BROKEN}",)),
    "evaluation.rewards.0.timeout": (0.05, (f"evaluation.{SLOW}",)),
    "logging.every": (2, ()),
    "logging.progress": (True, ()),
    "logging.summary": (1, ("logging.progress=true", *CRITIC)),
    "logging.watch": (1, ("logging.to=[tensorboard]",)),
    "logging.samples": (1, ()),
    "checkpoints.every": (1, ()),
    "checkpoints.keep": (1, ("checkpoints.every=1",)),
}
# The same for keys that are compared in what is set up.
SET_UP: dict[str, tuple[Any, tuple[str, ...]]] = {
    "model.path": ("<saved>", ()),
    "model.tiny.architecture": ("seq2seq", ()),
    "model.tiny.hidden": (48, ()),
    "model.tiny.layers": (2, ()),
    "model.tiny.heads": (4, ()),
    "model.tiny.intermediate": (48, ()),
    "model.tiny.vocabulary": (100, ()),
    "model.dtype": ("bfloat16", ()),
    "model.attention": ("eager", ()),
    "model.trust_remote_code": (True, SAVED),
    "model.lora": ({"rank": 2}, ()),
    "model.lora.rank": (3, LORA),
    "model.lora.targets": (["q_proj"], LORA),
    "model.four_bit": (True, (*SAVED, *LORA)),
    "model.gradient_checkpointing": (True, ()),
    "model.chat_template": (True, SAVED),
    "model.chat_template_options": ({"tone": "calmly"}, (*SAVED, "model.chat_template=true")),
    "model.max_prompt_length": (19, ()),
    "data.task": ("strategies", ("data.options={test: 4}",)),
    "data.options": ({"test": 4}, ()),
    **{f"data.{name}": ("<other>", FILES) for name in ("train", "sft", "validation", "test")},
    "data.prompt": ("question", FILES),
    "data.template": ("so {prompt}", FILES),
    "data.demonstration_template": ("so {solution}", FILES),
    "data.limit": (1, FILES),
    "rl.rollout.engine": ("vllm", ()),  # an error: vLLM is not installed, or has no code for heads of size 16
    "rl.rollout.vllm.dtype": ("bfloat16", VLLM),
    "rl.rollout.vllm.max_model_len": (600, VLLM),
    "rl.rollout.vllm.gpu_memory_utilization": (0.5, VLLM),
    "rl.rollout.vllm.cache_gib": (2.0, VLLM),
    "rl.rollout.vllm.tensor_parallel_size": (2, VLLM),
    "rl.rollout.vllm.enforce_eager": (False, VLLM),
    "rl.rollout.vllm.sleep": (False, VLLM),
    "rl.algorithm.correction": ({"weights": "none"}, VLLM),
    "rl.algorithm.similarity.text": ("whole", CLUSTERS),
    "rl.algorithm.similarity.unfinished": ("whole", CLUSTERS),
    "rl.algorithm.similarity.tail": (4, (*CLUSTERS, "rl.algorithm.similarity.unfinished=tail")),
}
# Keys whose effect is tested elsewhere, by file.
ELSEWHERE = {
    "test_cli.py": ("name", "output", "threads"),
    "test_distributed.py": ("distributed",),
    "test_trackers.py": ("logging.to", "logging.project"),
    "test_report.py": ("evaluation.tracked",),
    "test_gsm8k_reward.py": ("rl.rewards.0.options", "evaluation.rewards.0.options"),
    "test_embed.py": (
        *("sft.polychromic.embedder", "evaluation.embedder"),
        *(f"rl.algorithm.similarity.{name}" for name in ("embedder", "batch_size", "workers", "gpus_per_worker")),
    ),
}


def keys(kind: Any = Recipe, where: str = "") -> Iterator[str]:
    """Keys with a value, and optional sections."""
    for name, field in kind.model_fields.items():
        nested, path = section_in(field.annotation), f"{where}{name}"
        if nested is None or field.default is None or isinstance(field.default, list):
            yield path
        if nested is not None:
            yield from keys(nested, f"{path}.0." if isinstance(field.default, list) else f"{path}.")


def not_a_number(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("nan") if i == 0 else 0.1 * i for i in range(len(completions))]


def equal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def lengths(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.5 + len(text) for text in completions]


def slow(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.5)
    return lengths(prompts, completions)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    policy = set_up(small.recipe(folder / "run", "seed=5")).policy
    policy.tokenizer.chat_template = "{% for message in messages %}said {{ tone }}: {{ message.content }}{% endfor %}"
    save_policy(policy, folder / "saved")
    with torch.no_grad():
        for weight in policy.lm.parameters():
            weight.mul_(1.1)
    save_policy(policy, folder / "sibling")
    for name, lines in (("data", LINES), ("other", LINES[::-2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    suffixes = {"saved": "", "sibling": "", "data": ".jsonl", "other": ".jsonl"}
    return {name: f"{folder / name}{suffix}" for name, suffix in suffixes.items()}


def recipe_of(folder: Path, files: dict[str, str], *overrides: str) -> Recipe:
    values = small.values(folder)
    for assignment in (*SMALL, *overrides):
        for name, path in files.items():
            assignment = assignment.replace(f"<{name}>", path)
        if assignment.startswith("data={"):
            values["data"] = {}
        override(values, assignment)
    recipe: Recipe = validated(Recipe, values)
    return recipe


def done_by(recipe: Recipe) -> Any:
    """All that a run does, apart from its times."""
    calls, printed, error = Counter[str](), io.StringIO(), ""

    def counted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *a, **k: calls.update([name]) or real(*a, **k))

    with contextlib.ExitStack() as stack:
        for owner, name in (
            *((Policy, "forward"), (Policy, "_run_after_shared_prompts"), (rollout, "_sample")),
            *((training, "weights_and_gradients"), (backends, "select")),
        ):
            stack.enter_context(counted(owner, name))
        stack.enter_context(mock.patch("os.fsync"))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            train(recipe)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    names = ("metrics", "samples", "evaluations")
    logs = [
        small.timeless(small.lines(recipe.folder, name)) for name in names if (recipe.folder / f"{name}.jsonl").exists()
    ]
    checkpoints = {
        str(path.relative_to(recipe.folder)): path.read_bytes() for path in recipe.folder.rglob("*.safetensors")
    }
    lines = [line.split("  ")[0] for line in printed.getvalue().splitlines()]
    return calls, lines, error.replace(str(recipe.folder), ""), logs, checkpoints


TEXTS = ("<think> a", "<think> b </think> the answer is 3", "<think> no end of a long thought", "of many words")


def prepared_by(recipe: Recipe) -> Any:
    """Everything a run sets up: the model, its inputs, the engine's options, the embedded texts; or its error."""
    try:
        run = set_up(recipe)
    except (ValueError, RuntimeError) as error:
        if recipe.rl is None or recipe.rl.rollout.engine == "transformers":
            return str(error)
        options = [engine.options(recipe.model, recipe.rl.rollout, device, 4096) for device in ("cpu", "cuda")]
        return str(error), options, recipe.rl.algorithm.correction
    weights = [(name, str(w.dtype), tuple(w.shape), w.requires_grad) for name, w in run.policy.lm.named_parameters()]
    config = run.policy.inner.config
    items = {split: [item["prompt_ids"] for item in run.items(split)] for split in ("train", "validation", "test")}
    demonstrations = [item["demonstration"] for item in run.items("sft")]
    model = (weights, config._attn_implementation, config.num_attention_heads, run.policy.lm.is_gradient_checkpointing)
    embedded = None
    if run.plan is not None and run.plan.similarity is not None:
        embedded = embed.load_embedder(run.plan.similarity)(TEXTS).nan_to_num(9.0).tolist()
    return model, len(run.policy.tokenizer), items, demonstrations, embedded, config.name_or_path


def test_every_key_has_an_entry() -> None:
    assert sorted(keys()) == sorted([*RUNS, *SET_UP, *(key for names in ELSEWHERE.values() for key in names)])
    assert all((Path(__file__).parent / name).exists() for name in ELSEWHERE)


@pytest.fixture(scope="module")
def looked_at() -> dict[str, Any]:
    """Observations by recipe, as many keys share one."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize("key", [*RUNS, *SET_UP])
def test_every_key_changes_something(
    key: str, files: dict[str, str], looked_at: dict[str, Any], tmp_path: Path
) -> None:
    look = done_by if key in RUNS else prepared_by
    value, given = (RUNS | SET_UP)[key]
    asked: list[Any] = []
    observations = []
    for number, more in enumerate(((), (f"{key}={json.dumps(value)}",))):
        recipe = recipe_of(tmp_path / str(number), files, *given, *more)
        same = f"{look.__name__} {recipe.model_copy(update={'output': ''}).model_dump_json()}"
        if same not in looked_at:
            with mock.patch("transformers.AutoConfig.from_pretrained", noting(asked)):
                looked_at[same] = look(recipe), asked.copy()
        observations.append(looked_at[same])
    is_different = observations[0] != observations[1]  # outside the assertion, as observations may be long
    assert is_different


def noting(asked: list[Any]) -> Any:
    from transformers import AutoConfig

    real = AutoConfig.from_pretrained

    def from_pretrained(*a: Any, **k: Any) -> Any:
        asked.append(k.get("trust_remote_code"))
        return real(*a, **k)

    return from_pretrained
