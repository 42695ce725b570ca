"""Stand-ins for the steps of TRL 1.16's way to vLLM that need a CUDA device. Each names the failure without it.

TRL's trainer calls `stand_in()`. A server loads the worker's part with `--worker-extension-cls
tests.engine.trl_on_cpu.WorkerExtension`. Everything else is TRL's and vLLM's own code: prompts, sampling, log-probs,
the HTTP requests of a hand-over, and vLLM's reloading of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine


def stand_in(dtype: str) -> None:
    """Replaces the trainer's part, and gives a colocated engine's weights their type."""
    from trl.generation import vllm_client, vllm_generation

    VLLMGeneration = vllm_generation.VLLMGeneration
    sync_served = VLLMGeneration.sync_weights
    init_communicator = vllm_client.VLLMClient.init_communicator

    # TRL leaves the type to vLLM, which makes a float32 model bfloat16. Then weights that differ by one rounding to
    # float32 may differ by 0.4 % in the engine, and two trainings that agree up to rounding soon sample other tokens.
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype)

    # TRL loads each parameter with the model's load_weights. vLLM's linear layers have packed their weights for the CPU
    # by then: AttributeError: 'Parameter' object has no attribute 'weight_loader'. vLLM's own reload_weights unpacks
    # them first. It may read a tensor after the iterator has ended, when TRL has unmerged its adapters: so copies.
    def sync_weights(self: Any) -> None:
        if self.mode == "server":
            return sync_served(self)
        weights = [(name, weight.clone()) for name, weight in self._iter_named_params()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync_weights
    # NotImplementedError: Weight synchronization runs on vLLM's NCCL weight-transfer engine, which needs a CUDA device.
    # The device is only checked, because a device without an index is not set.
    vllm_client.VLLMClient.init_communicator = lambda self, device=0: init_communicator(self, device="cuda")
    vllm_client.open_trainer_endpoint = lambda init_info: _Communicator(init_info, rank=0)
    vllm_client.packed_nccl_broadcast_producer = _send


class WorkerExtension:
    """Base class that vLLM adds to its worker. Importing its module replaces the worker's part."""


class _Communicator:
    """Group of trainer and workers over a TCP store, in place of PyNcclCommunicator, which needs a device and NCCL."""

    def __init__(self, init_info: Any, rank: int) -> None:
        fields = init_info if isinstance(init_info, dict) else vars(init_info)
        self.group = StatelessProcessGroup.create(
            host=fields["master_address"], port=fields["master_port"], rank=rank, world_size=fields["world_size"]
        )


def _send(iterator: Iterator[tuple[str, Tensor]], group: _Communicator, src: int, **_: Any) -> None:
    """Broadcasts tensors one by one. The packed broadcast creates CUDA streams."""
    for _name, tensor in iterator:
        group.group.broadcast(tensor.detach().clone(), src)  # a view would be pickled with its whole storage


def _receive(
    iterator: Iterator[tuple[str, tuple[list[int], torch.dtype]]],
    group: _Communicator,
    src: int,
    post_unpack_func: Callable[[Iterable[tuple[str, Tensor]]], Any],
    **_: Any,
) -> None:
    for name, (shape, dtype) in iterator:
        tensor = group.group.broadcast(torch.empty(0), src)
        assert list(tensor.shape) == list(shape) and tensor.dtype == dtype, name
        post_unpack_func([(name, tensor)])


def _update_weights(self: nccl_engine.NCCLWeightTransferEngine, update_info: dict[str, Any]) -> None:
    """Receives weights without torch.accelerator.synchronize(), which fails without an accelerator."""
    self.receive_weights(self.parse_update_info(update_info))


nccl_engine.worker_init_process_group = lambda init_info, parallel_config: _Communicator(
    init_info, parallel_config.rank + init_info.rank_offset
)
nccl_engine.packed_nccl_broadcast_consumer = _receive
nccl_engine.NCCLWeightTransferEngine.update_weights = _update_weights
