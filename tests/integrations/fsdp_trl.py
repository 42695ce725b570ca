"""Trains and differentiates models that FSDP2 shards, in each of two processes.

python -m torch.distributed.run --nproc-per-node=2 fsdp_trl.py FOLDER [gradients] [training]
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaForCausalLM
from trl import GRPOConfig
from trl.trainer import utils

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
from tests.communication import Communication
from tests.integrations import tiny_trl

# Units that FSDP2 shards: the head with all that is not a layer, with the last norm (as accelerate does), or by itself.
KINDS = ("replicated", "root", "tail", "head")
OUTPUTS = {"ours": ("log_probs", "entropy"), "theirs": ("log_probs", "entropy", "is_top1")}
NAMES = ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight")


def model(kind: str) -> LlamaForCausalLM:
    lm = LlamaForCausalLM.from_pretrained(tiny_trl.model())
    if kind == "replicated":
        return lm
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind == "tail":
        fully_shard([lm.model.norm, lm.lm_head], mesh=mesh, reshard_after_forward=False)
    if kind == "head":
        fully_shard(lm.lm_head, mesh=mesh)
    return fully_shard(lm, mesh=mesh)


def rows(rank: int, has_labels: bool = True) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, len(tiny_trl.WORDS), (3, 9), generator=random)
    labels = torch.where(torch.rand(3, 9, generator=random) < 0.3, -100, ids)
    return {"input_ids": ids, "labels": labels if has_labels else torch.full_like(ids, -100)}


def loss(lm: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = lm(**batch, fused_lm_head=True)
    return (output.log_probs + 0.3 * output.entropy).sum()


def differentiated(kind: str, outputs: str, has_labels: bool) -> dict[str, Any]:
    """Gradients, and what the pass communicates; the second process may have no labels."""
    lm = model(kind)
    utils.add_fused_lm_head(lm, outputs=OUTPUTS[outputs])  # as the trainers do, after the patch
    rank = dist.get_rank()
    with Communication() as communication:
        total = loss(lm, rows(rank, has_labels or rank == 0))
        forward = communication.take()
        total.backward()
    gradients = {name: value.grad.full_tensor() for name, value in lm.named_parameters() if name in NAMES}
    return {"forward": forward, "backward": communication.take(), "gradients": gradients}


def trained(kind: str) -> list[dict[str, Any]]:
    """The log of a few steps."""
    trainer = FusedGRPOTrainer(
        model(kind),
        [tiny_trl.many_a, tiny_trl.few_b],
        args=GRPOConfig(
            **tiny_trl.settings(Path(tempfile.mkdtemp()), num_generations=8, max_steps=4, beta=0.0, logging_steps=1)
        ),
        train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
    )
    trainer.train()
    return [
        {name: entry[name] for name in ("loss", "grad_norm", "entropy")} for entry in trainer.state.log_history[:-1]
    ]


def main() -> None:
    torch.set_num_threads(1)
    accelerate.PartialState(cpu=True)
    patch_trl()
    # accelerate itself shards on a GPU only, and would wrap the model in DistributedDataParallel here
    prepare = accelerate.Accelerator.prepare_model
    accelerate.Accelerator.prepare_model = lambda self, lm, *rest, **options: (
        lm if isinstance(lm, FSDPModule) else prepare(self, lm, *rest, **options)
    )
    results: dict[Any, Any] = {}
    if "gradients" in sys.argv:
        for kind, outputs, has_labels in itertools.product(KINDS[1:], OUTPUTS, (True, False)):
            results[kind, outputs, has_labels] = differentiated(kind, outputs, has_labels)
    if "training" in sys.argv:
        results |= {kind: trained(kind) for kind in KINDS}
    gc.collect()  # as in two_trl.py
    torch.save(results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
