"""Another value for every key of a recipe, and the effect on its consumer that must change with it."""

from __future__ import annotations

import json
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from grpo_trainer import cli, distributed, embed, engine
from grpo_trainer.algorithm import Plan
from grpo_trainer.log import Log
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Recipe, Similarity
from grpo_trainer.report.evaluations import examples_section
from grpo_trainer.report.run_folder import RunFolder
from grpo_trainer.rewards import load_reward
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer.key_runs import Case, Run, Seen


def weights(run: Run) -> Any:
    return run.weights()


def metric(name: str, kind: str = "rl") -> Seen:
    def seen(run: Run) -> list[float]:
        assert not run.error, run.error
        values = [line[name] for line in run.lines(kind) if name in line]
        assert values, f"{name} was not logged"
        return values

    return seen


def metrics_are(prefix: str) -> Seen:
    return lambda run: sorted({name for line in run.lines("eval") for name in line if name.startswith(prefix)})


def calls(name: str) -> Seen:
    return lambda run: (run.error, run.calls[name])


def policy(seen: Callable[[Policy], Any]) -> Seen:
    return lambda recipe: seen(set_up(recipe).policy)


def in_config(name: str) -> Seen:
    return policy(lambda policy: getattr(policy.inner.config, name))


def threads(recipe: Recipe) -> int:
    before = torch.get_num_threads()
    try:
        cli._set_threads(recipe.threads)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def asked_of_transformers(recipe: Recipe) -> list[Any]:
    import transformers

    asked: list[Any] = []

    def spy(kind: Any) -> Any:
        real = kind.from_pretrained

        def noted(*a: Any, **k: Any) -> Any:
            asked.append(k.get("trust_remote_code"))
            return real(*a, **k)

        return mock.patch.object(kind, "from_pretrained", noted)

    with spy(transformers.AutoTokenizer), spy(transformers.AutoConfig), spy(transformers.AutoModelForCausalLM):
        set_up(recipe)
    assert len(asked) >= 3 and len(set(asked)) == 1
    return asked


def construction_error(recipe: Recipe) -> str:
    try:
        set_up(recipe)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def splits(recipe: Recipe) -> Any:
    trainer = set_up(recipe)
    names = ("sft", "train", "validation", "test")
    return {name: [item["prompt_ids"] for item in trainer.items(name)] for name in names}


def similarity_of(recipe: Recipe) -> Similarity:
    rl = recipe.rl
    assert rl is not None and rl.algorithm.similarity is not None
    return rl.algorithm.similarity


def plan_of(recipe: Recipe) -> Plan:
    rl = recipe.rl
    assert rl is not None
    return Plan.of(rl.algorithm, rl.rollout.max_completion_length)


def engine_options(recipe: Recipe) -> list[dict[str, Any]]:
    """Arguments of an engine on the CPU and of one on a GPU."""
    rl = recipe.rl
    assert rl is not None
    return [engine.options(recipe.model, rl.rollout, device, 4096) for device in ("cpu", "cuda")]


RESPONSES = ("<think> a", "<think> b </think> the answer is 3", "<think> no end of a long thought", "of many words")


def embedded(recipe: Recipe) -> list[list[float]]:
    return [row.nan_to_num(9.0).tolist() for row in embed.load_embedder(similarity_of(recipe))(RESPONSES)]


def times_embedded(recipe: Recipe) -> int:
    embedder = embed.load_embedder(similarity_of(recipe))
    for _ in range(2):
        embedder(["one", "two", "three"])
    return embedder.misses


def batch_of_embedder(recipe: Recipe) -> Any:
    with mock.patch.object(embed, "sentence_encoder", lambda name, batch_tokens: mock.Mock(tokens=batch_tokens)):
        return embed.load_embedder(similarity_of(recipe)).encode.tokens  # type: ignore[attr-defined]


def type_of_embedder(recipe: Recipe) -> str:
    return type(embed.load_embedder(similarity_of(recipe)).encode).__name__


def asked_of_ray(recipe: Recipe) -> Any:
    pool = embed.load_embedder(similarity_of(recipe)).pool
    assert pool is not None
    return pool.resources


def embedder_name(name_of: Callable[[Recipe], str]) -> Seen:
    def seen(recipe: Recipe) -> str:
        with mock.patch.object(embed, "sentence_encoder", lambda *_: embed.hashed):
            return embed.load_embedder(Similarity(embedder=name_of(recipe))).name

    return seen


def clustering(recipe: Recipe) -> Any:
    return plan_of(recipe).clustering


def reward_of_evaluation(recipe: Recipe) -> Any:
    function = set_up(recipe).evaluation_rewards[1][0]
    return function(prompts=["?"], completions=["#### 3"], answer=["3"])


def reward_of_right(recipe: Recipe) -> Any:
    rl = recipe.rl
    assert rl is not None
    return load_reward(rl.rewards[0])(prompts=["?"], completions=["#### 3"], answer=["3"])


def tracked(run: Run) -> str:
    return examples_section(RunFolder.read(run.recipe.folder))


def fake_wandb(recipe: Recipe) -> list[Any]:
    asked: list[Any] = []
    module = types.ModuleType("wandb")
    module.init = lambda **kwargs: asked.append(kwargs["project"])  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"wandb": module}):
        log = Log(recipe)
        log.open()
    return [*asked, [type(tracker).__name__ for tracker in log.trackers]]


def dtypes(policy: Policy) -> list[str]:
    return sorted({str(weight.dtype) for weight in policy.lm.parameters()})


def samples_of_evaluation(run: Run) -> list[Any]:
    content = json.loads((run.recipe.folder / "evaluations" / "test-0-000000.json").read_text())
    return [line["samples"] for line in content["prompts"]]


def folders(run: Run) -> list[str]:
    return sorted(path.name for path in (run.recipe.folder / "checkpoints").iterdir())


def shared_out(recipe: Recipe) -> list[str]:
    """Modules whose weights would be sharded over two processes."""
    trainer = set_up(recipe)
    trainer.is_sharded = trainer.shards(2)
    with (
        mock.patch("torch.distributed.fsdp.fully_shard") as fully_shard,
        mock.patch("torch.distributed.device_mesh.init_device_mesh"),
        mock.patch.object(distributed, "world_size", lambda: 2),
        mock.patch.object(distributed, "assert_identical"),
    ):
        trainer.distribute_weights()
    return [type(call.args[0]).__name__ for call in fully_shard.call_args_list]


def recomputed_layers(recipe: Recipe) -> int:
    """Number of forward passes of a layer, one more if activations are recomputed."""
    trainer = set_up(recipe)
    passes = Counter[bool]()
    layer = trainer.policy.inner.base_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: passes.update([torch.is_grad_enabled()]))
    trainer.run()
    return passes[True]


def not_a_number(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("nan") if i == 0 else 0.1 * i for i in range(len(completions))]


def equal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def lengths(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.5 + len(text) for text in completions]


def slow(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.5)
    return lengths(prompts, completions)


HERE = "tests.trainer.key_cases"
GRADED = (f"evaluation.rewards=[{{{{name: '{HERE}:lengths'}}}}]",)
FILES = ("data={{task: null, train: '{data}', test: '{data}'}}",)
SAVED = ("model.path={saved}",)
LORA = ("model.lora={{rank: 2, dropout: 0.5}}",)
RL, SFT, ROLLOUT, ALGORITHM = "phases[].rl.", "phases[].sft.", "phases[].rl.rollout.", "phases[].rl.algorithm."
CLUSTERS = ("rl.algorithm={{name: similarity_group_grpo, similarity: {{embedder: hashed}}}}",)
VLLM = "rl.rollout.engine=vllm"
SEGMENTS = ("rl.algorithm={{name: group_ppo}}",)
CRITIC = ("rl.algorithm={{name: group_ppo, critic: {{}}}}",)
SAMPLED = ("evaluation={{every: 0, samples: 2, embedder: hashed}}",)
ALONE = ("phases=[{{sft: {{steps: 2, batch: 8, micro_batch: 8, optimizer: {{lr: 0.01}}}}}}]",)


def made(value: Any, seen: Seen, *overrides: str) -> Case:
    return Case(value, seen, overrides, runs=False)


def ran(value: Any, seen: Seen, *overrides: str) -> Case:
    return Case(value, seen, overrides)


def of_optimizer(at: str, *overrides: str) -> dict[str, Case]:
    values: dict[str, Any] = {
        "lr": 0.02,
        "betas": [0.5, 0.6],
        "eps": 0.1,
        "weight_decay": 0.5,
        "warmup": 2,
        "schedule": "constant",
        "final": 0.9,
        "grad_clip": 1e-4,
    }
    return {f"{at}optimizer.{name}": ran(value, weights, *overrides) for name, value in values.items()}


CASES: dict[str, Case] = {
    "name": made("other", lambda recipe: recipe.folder, "output=runs/{{name}}"),
    "seed": ran(1, weights),
    "output": made("elsewhere", lambda recipe: recipe.folder),
    "threads": made(2, threads, "threads=1"),
    "backend": ran("reference", lambda run: {name for name in run.calls if name.startswith("backend")}),
    "distributed": made("fsdp2", shared_out),
    "model.path": made("{saved}", policy(lambda policy: policy.lm.config.name_or_path)),
    "model.tiny.architecture": made("seq2seq", policy(lambda policy: policy.is_seq2seq)),
    "model.tiny.hidden": made(48, in_config("hidden_size")),
    "model.tiny.layers": made(2, in_config("num_hidden_layers")),
    "model.tiny.heads": made(4, in_config("num_attention_heads")),
    "model.tiny.intermediate": made(48, in_config("intermediate_size")),
    "model.tiny.vocabulary": made(100, policy(lambda policy: len(policy.tokenizer))),
    "model.dtype": made("bfloat16", policy(lambda policy: next(policy.lm.parameters()).dtype)),
    "model.mixed_precision": ran("bf16", weights),
    "model.attention": made("eager", in_config("_attn_implementation")),
    "model.trust_remote_code": made(True, asked_of_transformers, *SAVED),
    "model.lora": made({"rank": 2}, policy(lambda policy: hasattr(policy.lm, "peft_config"))),
    "model.lora.rank": made(3, policy(lambda policy: sum(p.numel() for p in policy.parameters())), *LORA),
    "model.lora.alpha": ran(64, weights, *LORA),
    "model.lora.dropout": ran(0.0, weights, *LORA, *ALONE),
    "model.lora.targets": made(
        ["q_proj"], policy(lambda policy: [n for n, p in policy.named_parameters() if p.requires_grad]), *LORA
    ),
    "model.four_bit": made(True, policy(dtypes), *SAVED, *LORA),
    "model.gradient_checkpointing": made(True, recomputed_layers, "rl.share_prompts=false"),
    "model.chat_template": made(True, splits, *SAVED),
    "model.chat_template_options": made({"tone": "calmly"}, splits, *SAVED, "model.chat_template=true"),
    "model.banned": ran([7, "4"], weights),
    "model.max_prompt_length": made(19, splits),
    "model.reference_model_path": ran("{sibling}", metric("train/kl_rollout"), *SAVED),
    "data.task": made("strategies", splits, "data.options={{test: 4}}"),
    "data.options": made({"test": 4}, splits),
    "data.train": made("{other}", splits, *FILES),
    "data.sft": made("{other}", splits, *FILES),
    "data.validation": made("{other}", splits, *FILES),
    "data.test": made("{other}", splits, *FILES),
    "data.prompt": made("question", splits, *FILES),
    "data.template": made("so {prompt}", splits, *FILES),
    "data.demonstration_template": made("so {solution}", splits, *FILES),
    "data.demonstration": ran("solution", weights, *FILES, *ALONE),
    "data.limit": made(1, splits, *FILES),
    "phases[].sft": ran(None, weights),  # see CHANGES
    "phases[].rl": ran(None, weights, *ALONE),
    **of_optimizer(SFT, *ALONE),
    **of_optimizer(RL),
    SFT + "steps": ran(1, lambda run: len(run.lines("sft")), *ALONE),
    SFT + "batch": ran(4, weights, *ALONE),
    SFT + "micro_batch": ran(4, calls("forward"), *ALONE),
    SFT + "polychromic": ran({"embedder": "hashed"}, weights, *FILES, *ALONE),
    SFT + "polychromic.weight": ran(0.3, weights, *FILES, *ALONE, "sft.polychromic={{embedder: hashed}}"),
    SFT + "polychromic.among": ran("batch", weights, *FILES, *ALONE, "sft.polychromic={{embedder: hashed}}"),
    SFT + "polychromic.embedder": made(
        "minilm",
        embedder_name(lambda recipe: recipe.sft.polychromic.embedder),  # type: ignore[union-attr]
        *ALONE,
        "sft.polychromic={{embedder: hashed}}",
    ),
    RL + "steps": ran(1, lambda run: len(run.lines("rl"))),
    RL + "epochs": ran(2, metric("train/optimizer_steps")),
    RL + "minibatches": ran(2, metric("train/optimizer_steps")),
    RL + "micro_batch": ran(3, calls("forward")),
    RL + "share_prompts": ran(False, calls("_run_after_shared_prompts")),
    RL + "dropout": ran(True, weights, *LORA),
    RL + "rewards": ran([{"name": f"{HERE}:not_a_number", "on_error": "skip"}], metric("rewards/max")),
    RL + "rewards[].name": ran(f"{HERE}:equal", metric("rewards/max")),
    RL + "rewards[].weight": ran(3.0, metric("rewards/max")),
    RL + "rewards[].options": made({"format": 0.5}, reward_of_right, "rl.rewards=[{{name: gsm8k}}]"),
    RL + "rewards[].on_error": ran(
        "skip", lambda run: run.error, f"rl.rewards=[{{{{name: '{HERE}:not_a_number'}}}}]"
    ),
    RL + "rewards[].timeout": ran(0.05, lambda run: run.error, f"rl.rewards=[{{{{name: '{HERE}:slow'}}}}]"),
    ROLLOUT + "prompts": ran(2, metric("group_stats/num_groups")),
    ROLLOUT + "group_size": ran(3, metric("group_stats/avg_group_size")),
    ROLLOUT + "temperature": ran(0.3, weights),
    ROLLOUT + "top_p": ran(0.3, lambda run: run.lines(file="samples")),
    ROLLOUT + "top_k": ran(1, lambda run: run.lines(file="samples")),
    ROLLOUT + "keep_support": ran(True, weights, "rl.rollout.top_k=3"),
    ROLLOUT + "max_new_tokens": ran(3, metric("rollout/length_max")),
    ROLLOUT + "min_new_tokens": ran(6, metric("rollout/length_mean")),
    ROLLOUT + "batch": ran(4, calls("_sample")),
    ROLLOUT + "truncated": ran("leave_out", metric("train/nonzero_advantages")),
    # an error of the engine: it is not installed, or has no code for heads of size 16
    ROLLOUT + "engine": made("vllm", construction_error),
    ROLLOUT + "vllm.dtype": made("bfloat16", engine_options, VLLM),
    ROLLOUT + "vllm.max_model_len": made(600, engine_options, VLLM),
    ROLLOUT + "vllm.gpu_memory_utilization": made(0.5, engine_options, VLLM),
    ROLLOUT + "vllm.cache_gib": made(2.0, engine_options, VLLM),
    ROLLOUT + "vllm.tensor_parallel_size": made(2, engine_options, VLLM),
    ROLLOUT + "vllm.enforce_eager": made(False, engine_options, VLLM),
    ROLLOUT + "vllm.sleep": made(False, engine_options, VLLM),
    ALGORITHM + "name": ran("dr_grpo", metric("train/advantages_std")),
    ALGORITHM + "advantage": ran({"std_floor": 1.0}, metric("train/advantages_std")),
    ALGORITHM + "loss": ran({"kl_coef": 5.0}, metric("train/kl_penalty")),
    ALGORITHM + "similarity": ran({"embedder": "hashed"}, lambda run: "similarity_groups/" in str(run.lines())),
    ALGORITHM + "similarity.embedder": made("minilm", embedder_name(lambda r: similarity_of(r).embedder), *CLUSTERS),
    ALGORITHM + "similarity.text": made("whole", embedded, *CLUSTERS),
    ALGORITHM + "similarity.unfinished": made("whole", embedded, *CLUSTERS),
    ALGORITHM + "similarity.tail": made(4, embedded, *CLUSTERS, "rl.algorithm.similarity.unfinished=tail"),
    ALGORITHM + "similarity.cache": made(1, times_embedded, *CLUSTERS),
    ALGORITHM + "similarity.batch_tokens": made(
        64, batch_of_embedder, *CLUSTERS, "rl.algorithm.similarity.embedder=minilm"
    ),
    ALGORITHM + "similarity.workers": made(2, type_of_embedder, *CLUSTERS),
    ALGORITHM + "similarity.gpus_per_worker": made(
        0.5, asked_of_ray, *CLUSTERS, "rl.algorithm.similarity.workers=2"
    ),
    ALGORITHM + "similarity.config": ran(
        {"linkage": "single", "min_silhouette": 0.9}, metric("similarity_groups/avg_groups_per_prompt"), *CLUSTERS
    ),
    ALGORITHM + "similarity.sharing": ran(1.0, weights, *CLUSTERS),
    ALGORITHM + "similarity.within": ran(0.5, metric("train/advantages_std"), *CLUSTERS),
    ALGORITHM + "similarity.between": ran(1.0, metric("train/advantages_std"), *CLUSTERS),
    ALGORITHM + "segments": ran({"group_max_size": 1}, metric("train/advantages_std"), *SEGMENTS),
    ALGORITHM + "sparse": ran(True, metric("train/tokens"), *SEGMENTS),
    ALGORITHM + "critic": ran({"lr": 0.1}, weights, *SEGMENTS),
    ALGORITHM + "critic.separate": ran(True, weights, *CRITIC),
    ALGORITHM + "critic.lr": ran(0.1, weights, *CRITIC),
    ALGORITHM + "critic.coef": ran(5.0, metric("train/total_loss"), *CRITIC),
    ALGORITHM + "critic.clip": ran(1e-6, weights, *CRITIC, "rl.num_iterations=2"),
    ALGORITHM + "critic.warmup": ran(1, weights, *CRITIC),
    ALGORITHM + "top_k_ratio": ran(0.5, metric("train/tokens")),
    ALGORITHM + "drop_flat": ran(False, metric("train/skipped"), f"rl.rewards=[{{{{name: '{HERE}:equal'}}}}]"),
    ALGORITHM + "set_size": ran(
        3,
        metric("train/advantages_std"),
        "rl.algorithm={{name: polychromic, similarity: {{embedder: hashed}}}}",
    ),
    ALGORITHM + "correction": made({"weights": "none"}, lambda recipe: plan_of(recipe).correction, VLLM),
    "evaluation.every": ran(1, lambda run: len(run.lines("eval")), "data.options.validation=1"),
    "evaluation.prompts": ran(
        1, metric("eval/validation_prompts", "eval"), "data.options.validation=2", "evaluation.every=1"
    ),
    "evaluation.test_prompts": ran(1, metric("eval/test_prompts", "eval")),
    "evaluation.batch": ran(1, calls("_sample")),
    "evaluation.samples": ran(4, metrics_are("eval/test_pass"), *SAMPLED),
    "evaluation.temperature": ran(0.2, samples_of_evaluation, *SAMPLED),
    "evaluation.pass_k": ran([2], metrics_are("eval/test_pass"), *SAMPLED),
    "evaluation.embedder": made("minilm", embedder_name(lambda recipe: recipe.evaluation.embedder), *SAMPLED),
    "evaluation.solved": ran(-1.0, metric("eval/test_exact", "eval")),
    "evaluation.solved_quantile": ran(
        1.0,
        metric("eval/test_exact", "eval"),
        *FILES,
        "data.validation={data}",
        f"evaluation.rewards=[{{{{name: '{HERE}:lengths'}}}}]",
    ),
    "evaluation.max_completion_length": ran(3, metric("eval/test_length", "eval")),
    "evaluation.rewards": ran([{"name": f"{HERE}:lengths"}], metric("eval/test_reward", "eval")),
    "evaluation.rewards[].name": ran(f"{HERE}:equal", metric("eval/test_reward", "eval"), *GRADED),
    "evaluation.rewards[].weight": ran(3.0, metric("eval/test_reward", "eval"), *GRADED),
    "evaluation.rewards[].options": made({"format": 0.5}, reward_of_evaluation, "evaluation.rewards=[{{name: gsm8k}}]"),
    "evaluation.rewards[].on_error": ran(
        "skip", lambda run: run.error, f"evaluation.rewards=[{{{{name: '{HERE}:not_a_number'}}}}]"
    ),
    "evaluation.rewards[].timeout": ran(
        0.05, lambda run: run.error, f"evaluation.rewards=[{{{{name: '{HERE}:slow'}}}}]"
    ),
    "evaluation.tracked": ran(1, tracked),
    "logging.to": made(["wandb"], fake_wandb),
    "logging.project": made("mine", fake_wandb, "logging.to=[wandb]"),
    "logging.every": ran(2, lambda run: len(run.lines("rl"))),
    "logging.progress": ran(True, lambda run: "rl 0 2/2" in run.printed),
    "logging.summary": ran(
        1,
        lambda run: run.printed.count("tokens per segment"),
        "logging.progress=true",
        "rl.algorithm={{name: group_ppo}}",
    ),
    "logging.watch": ran(1, calls("_weights_and_gradients"), "logging.to=[tensorboard]"),
    "logging.samples": ran(1, lambda run: len(run.lines(file="samples"))),
    "checkpoints.every": ran(1, folders),
    "checkpoints.keep": ran(1, folders, "checkpoints.every=1"),
}

# Overrides for keys whose other value needs more than an assignment.
CHANGES = {
    "phases[].sft": ("phases=[{{sft: {{steps: 1, batch: 8}}}}]",),
    "phases[].rl": ("phases=[{{rl: {{steps: 1, rollout: {{prompts: 4, group_size: 2}}}}}}]",),
}
