"""Differentiates a model whose head is a unit of FSDP2 by itself, as verl shards it, in each of two processes.

python -m torch.distributed.run --nproc-per-node=2 fsdp_verl.py FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PhiConfig, PhiForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.models.transformers import monkey_patch

    import grpo_kernels.integrations.verl  # noqa: F401  registers the name

V = 61


def model() -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    return PhiForCausalLM(PhiConfig(**sizes, eos_token_id=1, initializer_range=0.3, attn_implementation="eager"))


def loss(module: Any, rank: int) -> torch.Tensor:
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(rank))
    output = module(input_ids=ids, return_dict=True, temperature=0.8)
    return output.log_probs.sum() + 0.3 * output.entropy.sum()


def sharded(backend: str) -> Any:
    module = model()
    monkey_patch.patch_forward_with_backends(module, use_fused_kernels=True, fused_kernels_backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*module.model.layers, module.model.embed_tokens, module.lm_head, module):
        fully_shard(unit, mesh=mesh)
    return module


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    try:
        loss(sharded("torch"), dist.get_rank())
    except RuntimeError as error:
        result["theirs"] = str(error)
    module = sharded("grpo_kernels")
    loss(module, dist.get_rank()).backward()
    result["ours"] = {name: weight.grad.full_tensor() for name, weight in module.named_parameters()}
    torch.save(result, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
