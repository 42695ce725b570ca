"""The LM head with DTensors, in two processes: whole ones are taken as they are, split ones are refused."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.communication import Communication
from tests.harness import runnable_backends
from tests.ops.linear_head import test_policy_loss_edges as edges

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in runnable_backends(SUPPORTS),
    reason="needs gloo and the CPU kernels",
)

F64, SIZE = torch.float64, 2
CONFIG = edges.CONFIGS["dapo"]
CALLS = ("logprobs", "loss", "low memory", "reference head", "support", "distillation")
LEAVES = ("hidden", "weight", "bias", "a", "b")
NAMES = (*LEAVES, "ref_hidden", "ref_weight")  # arguments that may be DTensors


def batch(call: str) -> dict[str, Any]:
    torch.manual_seed(3)
    arguments = edges.batch("dapo")
    if call != "support":
        arguments |= {"a": edges.noise(2, edges.HIDDEN), "b": edges.noise(edges.VOCABULARY, 2)}
    if call == "reference head":
        del arguments["ref_logprobs"]
        arguments["ref_hidden"] = edges.noise(*arguments["targets"].shape, 3)
        arguments["ref_weight"] = edges.noise(edges.VOCABULARY, 3)
    return arguments


def compute(call: str, arguments: dict[str, Any], **options: Any) -> Tensor:
    if "a" in arguments:
        arguments = arguments | {"lora": (arguments["a"], arguments["b"], 0.5)}
    arguments = {name: value for name, value in arguments.items() if name not in ("a", "b")} | options
    head = {name: arguments[name] for name in ("hidden", "weight", "bias", "lora") if name in arguments} | options
    targets = arguments["targets"]
    if call == "logprobs":
        logprobs, entropy = gk.linear_logprobs(**head, targets=targets, return_entropy=True, chunk_size=4)
        assert entropy is not None
        return (logprobs * logprobs + entropy).sum()
    if call == "distillation":
        ids = torch.stack([targets.clamp(0, 29), torch.full_like(targets, 30)], -1)
        teacher = {"teacher_ids": ids, "teacher_logprobs": torch.full(ids.shape, -1.0, dtype=F64)}
        return gk.linear_distillation_loss(**head, **teacher, chunk_size=4).loss
    if call == "support":
        kept = targets.clamp(min=0).flatten()
        ids = torch.stack([kept, (kept + 7) % edges.VOCABULARY], 1).flatten()
        arguments["support"] = ids, torch.arange(len(kept) + 1) * 2
    elif call == "low memory":
        arguments["memory"] = "low"
    return gk.linear_policy_loss(**arguments, config=CONFIG).loss


def differentiated(call: str, arguments: dict[str, Any], leaves: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    result = compute(call, arguments, **options)
    result.backward()
    return {"result": result.detach()} | {f"by {name}": leaf.grad for name, leaf in leaves.items()}


def in_one_process(call: str) -> dict[str, Any]:
    arguments = batch(call)
    leaves = {name: arguments[name].requires_grad_() for name in LEAVES if name in arguments}
    return differentiated(call, arguments, leaves)


def replicated(call: str, mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    arguments = batch(call)
    tensors = {name: distribute_tensor(arguments[name], mesh, [Replicate()]) for name in NAMES if name in arguments}
    leaves = {name: tensors[name].requires_grad_() for name in LEAVES if name in tensors}
    with Communication() as communication:
        result = differentiated(call, arguments | tensors, leaves)
    assert communication.take() == [] and not hasattr(result["result"], "placements")
    return {name: value.to_local() if name != "result" else value for name, value in result.items()}


def split(call: str, mesh: Any, rank: int) -> dict[str, Any]:
    """A split vocabulary stays split where its local columns are given with their place."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    arguments = batch(call)
    places = {name: Shard(0) if name in ("weight", "bias", "b", "ref_weight") else Replicate() for name in NAMES}
    tensors = {name: distribute_tensor(arguments[name], mesh, [places[name]]) for name in NAMES if name in arguments}
    leaves = {name: tensors[name].requires_grad_() for name in LEAVES if name in tensors}
    local = arguments | {name: value.to_local() for name, value in tensors.items()}
    where = {"vocab_start": rank * -(-edges.VOCABULARY // SIZE), "process_group": mesh.get_group()}
    result = differentiated(call, local, leaves, **where)
    return {name: value.full_tensor() if name != "result" else value for name, value in result.items()}


def errors(mesh: Any) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    arguments, messages = batch("reference head"), {}
    for name in (*NAMES, "targets", "weight_grad"):
        value = torch.zeros_like(arguments["weight"]) if name == "weight_grad" else arguments[name]
        place = Replicate() if name in ("targets", "weight_grad") else Shard(0)
        weight = arguments["weight"].clone().requires_grad_()
        try:
            compute("loss", arguments | {"weight": weight, name: distribute_tensor(value, mesh, [place])})
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def worker(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE, timeout=limit)
    mesh = init_device_mesh("cpu", (SIZE,))
    result: dict[Any, Any] = {("replicated", call): replicated(call, mesh) for call in CALLS}
    result |= {("split", call): split(call, mesh, rank) for call in CALLS[:4]}
    torch.save(result | {"errors": errors(mesh)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=SIZE)
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


@pytest.mark.parametrize("call", CALLS)
def test_whole_ones_are_this_ranks_tensors(ranks: list[dict[Any, Any]], call: str) -> None:
    expected = in_one_process(call)
    for rank in ranks:
        assert rank["replicated", call].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(rank["replicated", call][name], value) and value.any(), name


@pytest.mark.parametrize("call", CALLS[:4])
def test_a_split_vocabulary_is_given_by_its_local_columns(ranks: list[dict[Any, Any]], call: str) -> None:
    expected = in_one_process(call)
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank["split", call][name], value, rtol=1e-10, atol=1e-12)


def test_split_ones_are_refused(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert rank["errors"].keys() == {*NAMES, "targets", "weight_grad"}
        for name, message in rank["errors"].items():
            if name in ("targets", "weight_grad"):
                assert message.startswith(f"TypeError: linear_policy_loss: {name} must be a tensor of this rank, got ")
                continue
            argument = "lora" if name in ("a", "b") else name
            assert message.startswith(f"ValueError: linear_policy_loss: {argument} must be whole on every rank, got a")
            assert f"{argument}.full_tensor(grad_placements=[Partial()]) gathers it" in message


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_every_placement_is_whole_on_one_rank(alone: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    arguments = batch("loss")
    tensors = {name: distribute_tensor(arguments[name], alone, [Shard(0)]) for name in LEAVES}
    assert torch.equal(compute("loss", arguments | tensors), in_one_process("loss")["result"])
