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

import grpo_kernels as gk
from tests.communication import Communication
from tests.harness import quick
from tests.ops.linear_head.heads import EXACT, noise
from tests.ops.linear_head.policy_loss_cases import CONFIGS, problem

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in EXACT,
    reason="needs gloo and the CPU kernels",
)

F64 = torch.float64
CONFIG = CONFIGS["dapo"]
HIDDEN, VOCABULARY = 5, 31
KINDS = ("fsdp", "hsdp", "frozen", "bfloat16", "autocast", "world of one")
CALLS = ("logprobs", "loss", "low memory", "lora")
LEAVES = ("weight", "bias", "a", "b")  # parameters of the head, the last two of its adapter


def batch(call: str, rank: int) -> dict[str, Any]:
    """A head that is the same on every rank, and rows that are not."""
    torch.manual_seed(3)
    arguments = problem("dapo", "bias").inputs
    weights = {"weight": arguments["weight"], "bias": arguments["bias"]}
    torch.manual_seed(4 + rank)
    arguments = problem("dapo", "bias", "gaps", "ignored").inputs | weights
    arguments["old_logprobs"] = -3 - noise(4, 7).abs()  # ratios that no rounding moves across a bound
    if call == "lora":
        torch.manual_seed(6)
        arguments |= {"a": noise(2, HIDDEN), "b": 0.1 * noise(VOCABULARY, 2)}  # ratios stay near their bounds
    return arguments


def compute(call: str, arguments: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Results, and the sum to differentiate."""
    arguments = dict(arguments)
    lora = (arguments.pop("a"), arguments.pop("b"), 0.5) if "a" in arguments else None
    arguments["head"] = gk.LMHead(arguments.pop("weight"), arguments.pop("bias"), lora=lora)
    if call == "logprobs":
        head = {name: arguments[name] for name in ("hidden", "head", "targets")}
        logprobs, entropy = gk.linear_logprobs(**head, return_entropy=True, chunk_size=4, backend="kernel")
        assert entropy is not None
        return {"logprobs": logprobs, "entropy": entropy}, (logprobs * logprobs + entropy).sum()
    memory = "low" if call == "low memory" else "fast"
    result = gk.linear_policy_loss(**arguments, config=CONFIG, memory=memory, chunk_size=4, backend="kernel")
    return {"loss": result.loss, "metrics": result.metrics.tensor}, result.loss


def in_one_process(call: str, ranks: range) -> dict[str, Any]:
    """Results with the rows of each of these ranks, and the mean of their gradients."""
    by_rank: list[dict[str, Any]] = []
    for rank in ranks:
        arguments = batch(call, rank)
        leaves = {name: arguments[name].requires_grad_() for name in ("hidden", *LEAVES) if name in arguments}
        results, total = compute(call, arguments)
        total.backward()
        by_rank.append(
            {name: value.detach() for name, value in results.items()}
            | {f"by {name}": leaf.grad for name, leaf in leaves.items()}
        )
    means = [f"by {name}" for name in LEAVES if f"by {name}" in by_rank[0]]
    return {
        name: sum(one[name] for one in by_rank) / len(ranks) if name in means else [one[name] for one in by_rank]
        for name in by_rank[0]
    }


def head_of(kind: str, arguments: dict[str, Any], size: int) -> nn.Linear:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    head = nn.Linear(HIDDEN, VOCABULARY, dtype=F64)
    head.weight.data, head.bias.data = arguments["weight"].clone(), arguments["bias"].clone()
    for name in LEAVES[2:]:
        if name in arguments:
            head.register_parameter(name, nn.Parameter(arguments[name].clone()))
    head.requires_grad_(kind != "frozen")
    if kind in ("bfloat16", "autocast"):
        head = head.float()
    shape = {"hsdp": (2, size // 2), "world of one": (size, 1)}.get(kind, (size,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))
    return fully_shard(head, mesh=mesh["b"] if kind == "world of one" else mesh)


def sharded(kind: str, call: str, rank: int, size: int, communication: Communication) -> dict[str, Any]:
    """Results of a rank with its own rows and the gathered parameters."""
    from grpo_kernels.integrations.sharded import dtype_of, gathered

    arguments = batch(call, rank)
    head = head_of(kind, arguments, size)
    dtype = {"bfloat16": torch.bfloat16, "autocast": torch.float32}.get(kind, F64)
    hidden = arguments["hidden"].to(dtype, copy=True).requires_grad_()
    communication.take()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        of_product = dtype_of(hidden)
        whole = {
            name: gathered("here", value, [nn.Module(), head], None if name in ("a", "b") else of_product)
            for name, value in head.named_parameters()
        }
        results, total = compute(call, arguments | {"hidden": hidden} | whole)
    found: dict[str, Any] = {name: value.detach() for name, value in results.items()}
    found |= {"dtype": whole["weight"].dtype, "forward": communication.take()}
    total.backward()
    found |= {"backward": communication.take(), "by hidden": hidden.grad}
    if kind == "frozen":
        assert head.weight.grad is None
        return found
    found["norm"] = nn.utils.clip_grad_norm_(head.parameters(), math.inf).full_tensor()
    assert all(parameter.grad.placements == parameter.placements for parameter in head.parameters())
    found |= {f"by {name}": parameter.grad.full_tensor() for name, parameter in head.named_parameters()}
    before = head.weight.full_tensor().clone()
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    return found | {"step": before - head.weight.full_tensor()}


def errors(size: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from grpo_kernels.integrations.sharded import gathered

    names = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "columns"))
    head, twice = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
    twice.weight = nn.Parameter(distribute_tensor(twice.weight, names["columns"], [Shard(0)]))
    fully_shard(twice, mesh=names["data"])
    split = distribute_tensor(head.weight, names["data"], [Shard(0)])
    messages = {}
    for name, value, unit in (("alone", split, head), ("twice", twice.weight, twice)):
        try:
            gathered("here", value, [unit])
        except ValueError as error:
            messages[name] = str(error)
    return messages


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    result: dict[Any, Any] = {"errors": errors(size)}
    with Communication() as communication:
        for kind in KINDS:
            for call in CALLS:
                result[kind, call] = sharded(kind, call, rank, size, communication)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=quick((2, 4), 2))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """All cases of all ranks from one start of the processes."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bfloat16", "autocast")])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_the_mean_over_the_ranks(ranks: list[dict[Any, Any]], kind: str, call: str) -> None:
    """As those of FSDP2's other parameters, for an optimizer and clip_grad_norm_."""
    for number, rank in enumerate(ranks):
        of_rank = range(number, number + 1) if kind == "world of one" else range(len(ranks))
        expected, got = in_one_process(call, of_rank), rank[kind, call]
        for name, value in expected.items():
            if kind == "frozen" and name in map("by {}".format, LEAVES):
                assert name not in got
                continue
            value = value[number - of_rank.start] if isinstance(value, list) else value
            torch.testing.assert_close(
                got[name], value, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
            )
        if kind != "frozen":
            norm = math.hypot(*(float(expected[f"by {name}"].norm()) for name in LEAVES if f"by {name}" in expected))
            assert float(got["norm"]) == pytest.approx(norm)
            torch.testing.assert_close(got["step"], expected["by weight"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize("call", CALLS)
def test_hidden_states_in_half_precision(ranks: list[dict[Any, Any]], kind: str, call: str) -> None:
    """They and the weights are rounded to bfloat16; gradients are summed in the parameter's float32."""
    expected = in_one_process(call, range(len(ranks)))
    for rank in ranks:
        got = rank[kind, call]
        assert got["dtype"] == torch.bfloat16
        for name in ("by weight", "by bias"):
            assert got[name].dtype == torch.float32
            assert float((got[name].double() - expected[name]).norm()) < 0.1 * float(expected[name].norm())


@pytest.mark.parametrize("kind", ["fsdp", "bfloat16", "frozen"])
@pytest.mark.parametrize("call", CALLS[:3])
def test_what_is_communicated(ranks: list[dict[Any, Any]], kind: str, call: str) -> None:
    """One gather and one reduce-scatter of weight and bias each, in the dtype of the hidden states and their own."""
    size = len(ranks)
    columns = -(-VOCABULARY // size)
    there, back = {"bfloat16": (2, 4)}.get(kind, (8, 8))
    parts = [columns * HIDDEN, columns]
    for rank in ranks:
        assert rank[kind, call]["forward"] == [("all_gather_into_tensor", there * part) for part in parts]
        backward = sorted(rank[kind, call]["backward"], reverse=True)
        wanted = [("reduce_scatter_tensor", back * size * part) for part in parts]
        assert backward == ([] if kind == "frozen" else wanted)


def test_what_is_refused(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert "here: the LM head must be sharded by FSDP2, got placements" in rank["errors"]["alone"]
        assert "here: the LM head must be sharded by FSDP2 alone, got placements" in rank["errors"]["twice"]


def test_tensors_of_this_rank_are_as_they_are() -> None:
    from grpo_kernels.integrations.sharded import gathered

    value = torch.ones(2)
    assert gathered("here", value, []) is value and gathered("here", None, [nn.Module()], torch.bfloat16) is None
