"""The output processor in a GPTModel of Megatron-core on the CPU, against the model's own loss and logits.

Faults that this is for: arguments that Megatron passes otherwise; columns of another rank; a gradient of the hidden
states that is reduced twice or not at all; a shared weight that loses one of its gradients; positions that the mask
leaves out.

Two things of Megatron need a GPU and are stubbed: the current device, and the fork of its random states, which no
dropout reads here.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.integrations.megatron import output_processor

VOCABULARY, LENGTH = 32, 8
SEQUENCE = gk.LossConfig(ratio="sequence")
EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_logprobs.py"


def model_of(size: int, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    fused = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **dict.fromkeys(fused, False),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=tied,
    )
    return model.double()


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))


def compared(size: int, tied: bool) -> dict[str, tuple[Any, Any]]:
    """The values that ours and Megatron's own path have by a name."""
    model = model_of(size, tied)
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (3, LENGTH))
    labels, places = ids.roll(-1, 1), torch.arange(LENGTH).expand_as(ids)
    mask, loss_mask = torch.ones(1, 1, LENGTH, LENGTH).tril() == 0, torch.rand(ids.shape) < 0.7
    inputs = ids, places, mask
    given = {"labels": labels, "loss_mask": loss_mask.float(), "output_processor": output_processor}
    ours = model(*inputs, **given, output_processor_context={"return_entropy": True, "return_sum_pi_squared": True})
    part = model(*inputs)
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.detach().contiguous())
    parts[dist.get_rank()] = part  # the model reduces the gradients of the ranks' parts
    log_q = torch.cat(parts, -1).log_softmax(-1)
    theirs = log_q.gather(-1, labels[..., None])[..., 0] * loss_mask
    found: dict[str, Any] = {
        "logprobs": (ours.logprobs, theirs),
        "entropy": (ours.entropy, -(log_q.exp() * log_q).sum(-1) * loss_mask),
        "squares": (ours.sum_pi_squared, log_q.exp().square().sum(-1) * loss_mask),
    }
    by = torch.randn(ids.shape, dtype=torch.float64)
    found["gradients"] = tuple(gradients_of(model, (value * by).sum()) for value in (ours.logprobs, theirs))
    old, advantages = theirs.detach() + 0.3 * by, torch.randn(3, dtype=torch.float64)
    context = {"old_logprobs": old, "advantages": advantages, "config": SEQUENCE}
    loss, metrics = model(*inputs, **given, output_processor_context=context)
    expected, _ = gk.policy_loss(theirs, old, advantages, mask=loss_mask, config=SEQUENCE)
    found["loss"] = loss, expected
    found["gradients of the loss"] = gradients_of(model, loss), gradients_of(model, expected)
    found["log-probs of the loss"] = metrics.logprobs, ours.logprobs
    return found


def example() -> float:
    spec = importlib.util.spec_from_file_location("megatron_logprobs", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entropy: float = module.main()
    return entropy


def stub(rank: int, size: int, folder: str) -> None:
    """Starts the ranks, and replaces what needs a GPU."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: torch.manual_seed(seed)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def worker(rank: int, size: int, folder: str) -> None:
    stub(rank, size, folder)
    found: dict[Any, Any] = {tied: compared(size, tied) for tied in (False, True)}
    torch.save(found | {"example": example()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_is_what_megatron_computes(size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (size, str(tmp_path)), nprocs=size)
    for rank in range(size):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert 5 < found["example"] < 7  # ln(512) = 6.2, less the last position's
        for tied in (False, True):
            for name, (ours, theirs) in found[tied].items():
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, of=name, tied=tied: f"{of}, {tied}: {text}"
                )
