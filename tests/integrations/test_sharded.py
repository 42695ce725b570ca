"""Heads that FSDP2 shards by themselves, gathered for the ops, in two and four processes against one."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import grpo_kernels as gk
from grpo_kernels.integrations.sharded import dtype_of, gathered
from tests.communication import Communication
from tests.harness import quick
from tests.ops.linear_head.heads import EXACT, noise

pytestmark = pytest.mark.skipif("cpu" not in EXACT, reason="needs the CPU kernels")

F64 = torch.float64
HIDDEN, VOCABULARY = 5, 31
KINDS = ("fsdp", "hsdp", "frozen", "bfloat16", "autocast", "world of one")
LEAVES = ("weight", "bias", "a", "b")  # parameters of the head, the last two of its adapter


def head_of(kind: str, size: int) -> nn.Linear:
    """A head that is the same on every rank."""
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, dtype=F64)
    head.register_parameter("a", nn.Parameter(noise(2, HIDDEN)))
    head.register_parameter("b", nn.Parameter(noise(VOCABULARY, 2)))
    head.requires_grad_(kind != "frozen")
    if kind in ("bfloat16", "autocast"):
        head = head.float()
    if kind == "whole":
        return head
    shape = {"hsdp": (2, size // 2), "world of one": (size, 1)}.get(kind, (size,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))
    return fully_shard(head, mesh=mesh["b"] if kind == "world of one" else mesh)


def compute(head: dict[str, Any], hidden: Tensor, rank: int) -> Tensor:
    """A sum to differentiate, over rows that are not the same on every rank."""
    targets = torch.randint(VOCABULARY, hidden.shape[:2], generator=torch.Generator().manual_seed(rank))
    of_op = gk.LMHead(head["weight"], head["bias"], lora=(head["a"], head["b"], 0.5))
    result = gk.linear_logprobs(hidden, of_op, targets, return_entropy=True, chunk_size=4, backend="kernel")
    assert result.entropy is not None
    return (result.logprobs * result.logprobs + result.entropy).sum()


def rows_of(rank: int) -> Tensor:
    torch.manual_seed(4 + rank)
    return noise(4, 7, HIDDEN)


def in_one_process(ranks: range) -> dict[str, Tensor]:
    """The mean of the gradients of these ranks."""
    head = head_of("whole", 1)
    for rank in ranks:
        (compute(dict(head.named_parameters()), rows_of(rank), rank) / len(ranks)).backward()
    return {name: parameter.grad for name, parameter in head.named_parameters()}


def sharded(kind: str, rank: int, size: int, communication: Communication) -> dict[str, Any]:
    """Results of a rank with its own rows and the gathered parameters."""
    head = head_of(kind, size)
    dtype = {"bfloat16": torch.bfloat16, "autocast": torch.float32}.get(kind, F64)
    hidden = rows_of(rank).to(dtype).requires_grad_()
    communication.take()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        of_product = dtype_of(hidden)
        whole = {
            name: gathered(
                "here", value, [nn.Module(), head], torch.device("cpu"), None if name in ("a", "b") else of_product
            )
            for name, value in head.named_parameters()
        }
        total = compute(whole, hidden, rank)
    found: dict[str, Any] = {"dtype": whole["weight"].dtype, "forward": communication.take()}
    total.backward()
    found |= {"backward": communication.take(), "by hidden": hidden.grad}
    if kind != "frozen":
        found["norm"] = nn.utils.clip_grad_norm_(head.parameters(), math.inf).full_tensor()
        assert all(parameter.grad.placements == parameter.placements for parameter in head.parameters())
        found |= {name: parameter.grad.full_tensor() for name, parameter in head.named_parameters()}
    return found


def errors(size: int) -> dict[str, str]:
    names = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "columns"))
    head, twice = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
    twice.weight = nn.Parameter(distribute_tensor(twice.weight, names["columns"], [Shard(0)]))
    fully_shard(twice, mesh=names["data"])
    split = distribute_tensor(head.weight, names["data"], [Shard(0)])
    messages = {}
    for name, value, unit in (("alone", split, head), ("twice", twice.weight, twice)):
        try:
            gathered("here", value, [unit], torch.device("cpu"))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    result: dict[Any, Any] = {"errors": errors(size)}
    with Communication() as communication:
        result |= {kind: sharded(kind, rank, size, communication) for kind in KINDS}
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=quick((2, 4), 2))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """All cases of all ranks from one start of the processes."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "frozen", "world of one"])
def test_gradients_are_the_mean_over_the_ranks(ranks: list[dict[Any, Any]], kind: str) -> None:
    """As those of FSDP2's other parameters, for an optimizer and clip_grad_norm_."""
    for number, got in enumerate(rank[kind] for rank in ranks):
        expected = in_one_process(range(number, number + 1) if kind == "world of one" else range(len(ranks)))
        hidden = rows_of(number).requires_grad_()
        compute(dict(head_of("whole", 1).named_parameters()), hidden, number).backward()
        torch.testing.assert_close(got["by hidden"], hidden.grad, rtol=1e-10, atol=1e-10)
        if kind == "frozen":
            assert not any(name in got for name in LEAVES)
            continue
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name], value, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
            )
        norm = math.hypot(*(float(value.norm()) for value in expected.values()))
        assert float(got["norm"]) == pytest.approx(norm)


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_hidden_states_in_half_precision(ranks: list[dict[Any, Any]], kind: str) -> None:
    """They and the weights are rounded to bfloat16; gradients are summed in the parameter's float32."""
    expected = in_one_process(range(len(ranks)))
    for got in (rank[kind] for rank in ranks):
        assert got["dtype"] == torch.bfloat16
        for name in LEAVES[:2]:
            assert got[name].dtype == torch.float32
            assert float((got[name].double() - expected[name]).norm()) < 0.1 * float(expected[name].norm())


@pytest.mark.parametrize("kind", ["fsdp", "bfloat16", "frozen"])
def test_what_is_communicated(ranks: list[dict[Any, Any]], kind: str) -> None:
    """One gather and one reduce-scatter of each parameter, in the dtype of the product and their own."""
    size = len(ranks)
    columns = -(-VOCABULARY // size)
    there, own = {"bfloat16": (2, 4)}.get(kind, (8, 8))
    product, adapter = [columns * HIDDEN, columns], [-(-2 // size) * HIDDEN, columns * 2]
    sent = [there * part for part in product] + [own * part for part in adapter]
    for rank in ranks:
        assert rank[kind]["forward"] == [("all_gather_into_tensor", part) for part in sent]
        wanted = [("reduce_scatter_tensor", own * size * part) for part in product + adapter]
        assert sorted(rank[kind]["backward"]) == ([] if kind == "frozen" else sorted(wanted))


def test_what_is_refused(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert "here: the LM head must be sharded by FSDP2, got placements" in rank["errors"]["alone"]
        assert "here: the LM head must be sharded by FSDP2 alone, got placements" in rank["errors"]["twice"]


def test_tensors_of_this_rank_are_as_they_are() -> None:
    value = torch.ones(2)
    assert (
        gathered("here", value, [], torch.device("cpu")) is value
        and gathered("here", None, [nn.Module()], torch.device("cpu"), torch.bfloat16) is None
    )
