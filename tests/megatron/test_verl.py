"""verl's Megatron engine: its fused forward of packed rows with our output processor, in place of its own.

Faults that this is for: a name of verl's that is replaced where nothing reads it; squares that are unpacked otherwise
than entropies; a flag that the engine still refuses; a patch that stays.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.test_gpt_model import LENGTH, VOCABULARY, model_of, stub

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl")
LENGTHS = (8, 5, 3)


def engine_of(transformer_impl: Any, model: Any) -> Any:
    """The engine with what its forward step reads."""
    transformer_impl.get_device_id = lambda: "cpu"
    engine = transformer_impl.MegatronEngineWithLMHead.__new__(transformer_impl.MegatronEngineWithLMHead)
    engine.engine_config = SimpleNamespace(
        use_fused_kernels=True, pad_to_length_bucket=None, pad_to_length=False, use_remove_padding=True,
        dynamic_context_parallel=False, router_replay=SimpleNamespace(mode="disabled"),
    )  # fmt: skip
    engine.enable_routing_replay, engine.tf_config = False, model.config
    tokenizer = SimpleNamespace(pad_token_id=0)
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        tokenizer=tokenizer,
        mtp=SimpleNamespace(enable=False),
    )
    return engine


def worker(rank: int, size: int, folder: str) -> None:
    stub(rank, size, folder)
    warnings.simplefilter("ignore")
    from verl.models.mcore import model_forward_fused, registry
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.megatron import transformer_impl

    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

    theirs = model_forward_fused.fused_output_processor
    patch_verl(grpo=False, loss=False, correction=False)
    model = model_of(size, False)
    model_forward_fused.patch_fused_forward(model)
    # local attention takes no packed rows: each token attends to itself alone
    whole = model.forward

    def forward(input_ids: Any, position_ids: Any, attention_mask: Any, packed_seq_params: Any, **given: Any) -> Any:
        places = torch.zeros_like(input_ids)
        mask = torch.eye(input_ids.shape[1])[None, None] == 0
        hook = given.pop("output_processor")

        def with_packed(**options: Any) -> Any:
            return hook(**options | {"packed_seq_params": packed_seq_params})

        return whole(input_ids, places, mask, output_processor=with_packed, **given)

    model.forward = forward
    torch.manual_seed(4)
    rows = [torch.randint(1, VOCABULARY, (length,)) for length in LENGTHS]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    flags = {"use_fused_kernels": True, "calculate_entropy": True, "calculate_sum_pi_squared": True}
    data = {"input_ids": ids, "temperature": torch.full((3,), 0.5), "loss_mask": torch.ones(3, LENGTH)}
    batch = tu.get_tensordict(data, flags)
    engine = engine_of(transformer_impl, model)
    output, _ = engine.forward_step(iter([batch]), model, None, lambda *a, **k: None)
    log_q, expected = [], {}
    for row in rows:
        logits = model_logits(whole, row)
        parts = [torch.empty_like(logits) for _ in range(size)]
        dist.all_gather(parts, logits.contiguous())
        log_q.append((torch.cat(parts, -1) / 0.5).log_softmax(-1))
    expected["sum_pi_squared"] = [each.exp().square().sum(-1) for each in log_q]
    expected["entropy"] = [-(each.exp() * each).sum(-1) for each in log_q]
    shifted = [each[:-1].gather(1, row[1:, None])[:, 0] for each, row in zip(log_q, rows, strict=True)]
    found = {name: list(output[name].unbind()) for name in ("log_probs", *expected)}
    found["log_probs"] = [each[:-1] for each in found["log_probs"]]
    unpatch_verl()
    assert model_forward_fused.fused_output_processor is theirs is not None
    assert registry.fused_forward_model_engine is model_forward_fused.fused_forward_model_engine
    torch.save((found, expected | {"log_probs": shifted}), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def model_logits(forward: Any, row: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        ids = row[None]
        logits: torch.Tensor = forward(ids, torch.zeros_like(ids), torch.eye(len(row))[None, None] == 0)[0]
    return logits


@pytest.mark.parametrize("size", [1, 2])
def test_verl_gets_log_probs_entropies_and_squares(size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (size, str(tmp_path)), nprocs=size)
    for rank in range(size):
        found, expected = torch.load(tmp_path / f"{rank}.pt")
        for name, rows in expected.items():
            torch.testing.assert_close(
                found[name], rows, rtol=1e-9, atol=1e-11, msg=lambda text, of=name: f"{of} {text}"
            )
