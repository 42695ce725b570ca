"""The output processor for Megatron-core without Megatron, by stand-ins for its output layer (tests/megatron has a
GPTModel): sequence and context parallelism by hidden states split by hand, packed rows, and errors.

Faults that this is for: hidden states of another rank's part of the sequence, or a gradient that all ranks add to it;
bounds of packed rows that count over all context-parallel ranks; weights that are no part of a whole.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.integrations.megatron import output_processor
from tests.ops.linear_head.conftest import alone  # noqa: F401

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
F64, ROWS, LENGTH, WIDTH, COLUMNS = torch.float64, 3, 8, 5, 12
CONFIG = SimpleNamespace(context_parallel_size=1)
IN_PARTS = SimpleNamespace(context_parallel_size=2)


def drawn() -> dict[str, Tensor]:
    """Hidden states [S, B, H] and what belongs to the tokens, [B, S]."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64, generator=generator)

    return {
        "hidden": noise(LENGTH, ROWS, WIDTH),
        "weight": noise(COLUMNS, WIDTH),
        "labels": torch.randint(COLUMNS, (ROWS, LENGTH), generator=generator),
        "mask": torch.rand(ROWS, LENGTH, generator=generator) < 0.7,
        "old": -3 - noise(ROWS, LENGTH).abs(),
        "advantages": noise(ROWS),
        "by": noise(ROWS, LENGTH),
    }


def layer(weight: Tensor, **fields: Any) -> SimpleNamespace:
    of_rank = {"weight": weight, "bias": None, "tp_group": None, "output_size": COLUMNS, "sequence_parallel": False}
    return SimpleNamespace(**of_rank | fields)


def call(hidden: Tensor, output_layer: Any, batch: dict[str, Tensor], **changes: Any) -> Any:
    given = {"labels": batch["labels"], "loss_mask": batch["mask"].float(), "config": CONFIG, "output_weight": None}
    return output_processor(hidden_states=hidden, output_layer=output_layer, **given | changes)


def policy_of(batch: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    return {"old_logprobs": batch["old"], "advantages": batch["advantages"], **more}


def sequence_parallel(rank: int, size: int) -> list[Tensor]:
    """Log-probs, entropies, the loss, and the gradients of a rank's part of both factors."""
    batch, share = drawn(), COLUMNS // size
    hidden = batch["hidden"].chunk(size)[rank].clone().requires_grad_()
    weight = batch["weight"][rank * share : (rank + 1) * share].clone().requires_grad_()
    output_layer = layer(weight, sequence_parallel=size > 1, tp_group=dist.group.WORLD)
    result = call(hidden, output_layer, batch, context={"return_entropy": True, "temperature": 0.7})
    loss, _ = call(hidden, output_layer, batch, context=policy_of(batch))
    factors = hidden, weight
    of_logprobs = torch.autograd.grad((result.logprobs * batch["by"]).sum(), factors)
    return [result.logprobs, result.entropy, loss, *of_logprobs, *torch.autograd.grad(loss, factors)]


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    torch.save([value.detach() for value in sequence_parallel(rank, size)], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_sequence_parallel_ranks_have_a_part_of_the_hidden_states(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    *of_all, hidden, weight, by_loss, weight_by_loss = sequence_parallel(0, 1)
    for rank in ranks:
        torch.testing.assert_close(rank[:3], [value.detach() for value in of_all], rtol=1e-10, atol=1e-12)
    for place, whole in enumerate((hidden, weight, by_loss, weight_by_loss), start=3):
        torch.testing.assert_close(torch.cat([rank[place] for rank in ranks]), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_packed", [False, True])
def test_context_parallel_ranks_have_a_part_of_each_sequence(is_packed: bool) -> None:
    """Rank r of two has quarters r and 3 - r; the losses and gradients of the parts add up."""
    batch = drawn()
    whole_hidden, weight = (batch[name].clone().requires_grad_() for name in ("hidden", "weight"))
    context = policy_of(batch)
    whole, _ = call(whole_hidden, layer(weight), batch, context=context)
    shares = gk.token_shares(batch["mask"], aggregation=gk.LossConfig.of("grpo").aggregation)
    quarter = torch.arange(LENGTH) * 4 // LENGTH
    hidden, weight_of_parts = (batch[name].clone().requires_grad_() for name in ("hidden", "weight"))
    losses = []
    for rank in range(2):
        at = ((quarter == rank) | (quarter == 3 - rank)).nonzero()[:, 0]
        part = {name: batch[name][:, at] for name in ("labels", "mask", "old")} | {"weights": shares[:, at]}
        of_rank, more = hidden[at], {}
        if is_packed:
            part = {name: value.reshape(1, -1) for name, value in part.items()}
            of_rank = of_rank.transpose(0, 1).reshape(-1, 1, WIDTH)
            bounds = torch.arange(ROWS + 1, dtype=torch.int32) * LENGTH  # over all ranks
            more["packed_seq_params"] = SimpleNamespace(cu_seqlens_q=bounds - 1, cu_seqlens_q_padded=bounds)
        terms = policy_of(batch, old_logprobs=part["old"], weights=part["weights"])
        loss, _ = call(of_rank, layer(weight_of_parts), part, context=terms, config=IN_PARTS, **more)
        losses.append(loss)
    torch.testing.assert_close(losses[0] + losses[1], whole, rtol=1e-10, atol=1e-12)
    ours = torch.autograd.grad(losses[0] + losses[1], (hidden, weight_of_parts))
    expected = torch.autograd.grad(whole, (whole_hidden, weight))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_scale_softcap_and_bans_are_those_of_the_head() -> None:
    batch = drawn()
    batch["labels"].clamp_(max=9)
    options = {"softcap": 3.0, "banned": torch.tensor([10, 11])}
    scaled = SimpleNamespace(use_mup=True, mup_output_mult=0.5)
    got = call(batch["hidden"], layer(batch["weight"]), batch, context=options, config=scaled).logprobs
    head = gk.LMHead(batch["weight"], logit_scale=0.5, **options)
    want = gk.linear_logprobs(batch["hidden"].transpose(0, 1), head, batch["labels"], positions=batch["mask"]).logprobs
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Quantised(Tensor):
    pass


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "labels must be given, the token after each position, got None": ({"labels": None}, {}),
    "labels must have shape [3, 8] for hidden states [S, B, H] of all": ({"labels": torch.zeros(8, 3).long()}, {}),
    "labels must be of dtype int64": ({"labels": torch.zeros(3, 8)}, {}),
    "loss_mask must have the shape of labels, [3, 8], got [8, 3]": ({"loss_mask": torch.zeros(8, 3)}, {}),
    "output_layer must be a ColumnParallelLinear with a weight, without an adapter": ({}, {"weight": None}),
    "output_layer must be a ColumnParallelLinear with a weight, without": ({}, {"adapter": 1}),
    "the weight of output_layer must be a plain tensor, neither quantised": (
        {},
        {"weight": torch.zeros(COLUMNS, WIDTH).as_subclass(Quantised)},
    ),
    "the weight must have the rows of one rank of output_layer.tp_group, 24 / 1, got 12": ({}, {"output_size": 24}),
    "config.defer_embedding_wgrad_compute must be False": (
        {"config": SimpleNamespace(defer_embedding_wgrad_compute=True)},
        {},
    ),
    "context must leave out 'mask', which the model gives": ({"context": {"mask": 1}}, {}),
    "config must have ratios of tokens with context parallelism, got ratio='sequence'": (
        {"config": IN_PARTS, "context": policy_of(drawn(), config=gk.LossConfig(ratio="sequence"))},
        {},
    ),
    "context must have weights with context parallelism": (
        {"config": IN_PARTS, "context": policy_of(drawn())},
        {},
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("message", WRONG)
def test_errors(message: str) -> None:
    changes, fields = WRONG[message]
    batch = drawn()
    with pytest.raises((TypeError, ValueError)) as error:
        call(batch["hidden"], layer(**{"weight": batch["weight"]} | fields), batch, **changes)
    assert str(error.value).startswith(f"output_processor: {message}")
