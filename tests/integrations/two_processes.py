"""Trains with TRL, and differentiates heads that FSDP2 shards, in each of two processes.

python -m torch.distributed.run --nproc-per-node=2 two_processes.py FOLDER
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaForCausalLM
from trl import GRPOTrainer
from trl.trainer import utils

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
from tests.communication import Communication
from tests.integrations import test_trl_rollouts, tiny_models, tiny_trl
from tests.integrations.test_trl import SGD, figures

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.models.transformers import monkey_patch

    import grpo_kernels.integrations.verl

ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "max_steps": 6, "num_generations": 8}
QUANTILE = ENTROPY | {"top_entropy_quantile": 0.5}  # which the fused head refuses here
# Two of a prompt's completions, often equal: processes leave out different numbers of rows. A micro-batch has one row.
PLAIN = {"max_steps": 6, "num_generations": 2, "beta": 0.0, "loss_type": "grpo", "per_device_train_batch_size": 1}
TRAINED: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "theirs": (GRPOTrainer, QUANTILE, {}),
    "ours": (FusedGRPOTrainer, QUANTILE, {}),
    "logprobs": (FusedGRPOTrainer, ENTROPY, {}),
    "fused": (FusedGRPOTrainer, ENTROPY, {"head": "fused"}),
    "plain": (GRPOTrainer, PLAIN, {}),
    "by length": (FusedGRPOTrainer, PLAIN, {"batching": "by_length", "masked_rows": "vote", "head": "fused"}),
}
# Units that FSDP2 shards: the head with all that is not a layer, with the last norm (as accelerate does), or by itself.
SHARDS = ("replicated", "root", "tail", "head")
OUTPUTS = {"ours": ("log_probs", "entropy"), "theirs": ("log_probs", "entropy", "is_top1")}
NAMES = ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight")


def logs(kind: type, changes: dict[str, Any], **options: Any) -> list[dict[str, float]]:
    trainer = tiny_trl.trainer(Path(tempfile.mkdtemp()), kind, SGD | changes, **options)
    trainer.train()
    return figures(trainer)


def of_rollouts(per_device: int) -> list[list[dict[str, Any]]]:
    """The logs of two steps of each kind of loss; the last leaves flat groups out."""
    result = []
    for loss_type, flat_groups in (("grpo", "keep"), ("dapo", "keep"), ("dr_grpo", "leave_out")):
        changes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": 4, "max_steps": 2}
        changes |= {"loss_type": loss_type, "entropy_coef": 0.1}
        options = {"flat_groups": flat_groups, "entropy_mean": "batch"}
        trainer = test_trl_rollouts.trainer_of(Path(tempfile.mkdtemp()), changes=changes, **options)
        trainer.train()
        kept = ("loss", "grad_norm")  # the others are means over micro-batches, as TRL's
        result.append([{name: entry[name] for name in kept} for entry in trainer.state.log_history[:-1]])
    return result


def of_segments(per_device: int) -> list[dict[str, float]]:
    """The logs of two steps with segments; half of the completions have no reward, and no part in the loss.

    The longest completions of the two processes differ.
    """
    changes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": 4, "max_steps": 2}
    segments = gk.SegmentConfig(group_max_size=3)
    lengths = [min(length, 7 if row < 8 else 5) for row, length in enumerate(test_trl_rollouts.LENGTHS)]
    folder = Path(tempfile.mkdtemp())
    trainer = test_trl_rollouts.trainer_of(folder, None, changes, segments=segments, lengths=lengths)
    trainer.train()
    logs = trainer.state.log_history[:-1]
    return [{k: entry[k] for k in entry if k in ("loss", "grad_norm") or k.startswith("group/")} for entry in logs]


def shard(*units: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in units:
        fully_shard(unit, mesh=mesh)


def model(kind: str) -> LlamaForCausalLM:
    lm = LlamaForCausalLM.from_pretrained(tiny_trl.model())
    if kind != "replicated":
        units = {"root": [], "tail": [[lm.model.norm, lm.lm_head]], "head": [lm.lm_head]}[kind]
        shard(*lm.model.layers, *units, lm)
    return lm


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


def ids_of(rank: int) -> torch.Tensor:
    return torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(rank))


def of_verl(lm: Any, rank: int) -> torch.Tensor:
    output = lm(input_ids=ids_of(rank), return_dict=True, temperature=0.8)
    return output.log_probs.sum() + 0.3 * output.entropy.sum()


def verls(backend: str) -> Any:
    lm = tiny_models.model("phi")
    monkey_patch.patch_forward_with_backends(lm, use_fused_kernels=True, fused_kernels_backend=backend)
    shard(*lm.model.layers, lm.model.embed_tokens, lm.lm_head, lm)  # as verl does
    return lm


def main() -> None:
    torch.set_num_threads(1)
    accelerate.PartialState(cpu=True)
    results: dict[Any, Any] = {name: logs(kind, changes, **more) for name, (kind, changes, more) in TRAINED.items()}
    results["rollouts"], results["segments"] = of_rollouts(2), of_segments(2)
    # accelerate itself shards on a GPU only, and would wrap the model in DistributedDataParallel here
    prepare = accelerate.Accelerator.prepare_model
    accelerate.Accelerator.prepare_model = lambda self, lm, *rest, **options: (
        lm if isinstance(lm, FSDPModule) else prepare(self, lm, *rest, **options)
    )
    changes = {"num_generations": 8, "beta": 0.0}
    for kind in SHARDS:
        options = {"model": model(kind), "reward_funcs": [tiny_trl.many_a], "head": "fused"}
        results["fused", kind] = logs(FusedGRPOTrainer, changes, **options)
    patch_trl()
    for kind, outputs, has_labels in itertools.product(SHARDS[1:], OUTPUTS, (True, False)):
        results[kind, outputs, has_labels] = differentiated(kind, outputs, has_labels)
    for kind in SHARDS:
        results[kind] = logs(FusedGRPOTrainer, changes, model=model(kind), reward_funcs=[tiny_trl.many_a])
    try:
        of_verl(verls("torch"), dist.get_rank())
    except RuntimeError as error:
        results["verl's error"] = str(error)
    lm = verls("grpo_kernels")
    of_verl(lm, dist.get_rank()).backward()
    results["verl"] = {name: weight.grad.full_tensor() for name, weight in lm.named_parameters()}
    # The trainers' DistributedDataParallel must be freed before the process group: if a reducer is the last owner of
    # the group, torch joins gloo's threads with the GIL held, and a thread that still has to free a tensor deadlocks.
    gc.collect()
    torch.save(results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
