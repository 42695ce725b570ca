"""The LM head with weights that are DTensors, in two and four processes, against the whole weight in one."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.communication import Communication
from tests.harness import assert_raises, quick, runnable_backends
from tests.ops.linear_head import test_policy_loss_edges as edges

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in runnable_backends(SUPPORTS),
    reason="needs gloo and the CPU kernels",
)

F64 = torch.float64
FEW = 5  # columns, of which the last of four ranks has none
CONFIG = edges.CONFIGS["dapo"]
# Placements of weight and bias on a mesh of one dimension, and on one of two ranks by two.
PLACES: dict[str, tuple[str, str]] = {
    "split": ("S0", "S0"),
    "by width": ("S1", "R"),
    "replicated": ("R", "R"),
    "split, and a whole bias": ("S0", "R"),
    "split in two, twice": ("R S0", "R S0"),
    "split both ways": ("S0 S1", "S0 R"),
    "split twice": ("S0 S0", "S0 S0"),
}
CALLS = (
    "logprobs",
    "loss",
    "low memory",
    "reference head",
    "weight_grad",
    "support",
    "teacher",
    "distillation",
    "lora",
)
OWN_CALLS = ("logprobs", "loss", "low memory", "lora")
LEAVES = ("weight", "bias", "a", "b")  # parameters of the head, the last two of its adapter
FORMS = ("hidden", "process_group")
CASES = [
    *((place, call, "hidden") for place in PLACES for call in CALLS),
    *((place, call, "process_group") for place in PLACES if " " not in PLACES[place][0] for call in CALLS[:3]),
    ("few columns", "logprobs", "hidden"),
    ("few columns", "loss", "hidden"),
]
# Ways in which FSDP2 shards the head of a model whose ranks have rows of their own.
MANAGED = ("fsdp", "hsdp", "summed", "frozen", "bfloat16", "world of one")


def case_name(case: tuple[str, str, str]) -> str:
    return " ".join(case)


def is_of(case: tuple[str, str, str], size: int) -> bool:
    """Meshes of two dimensions need four processes."""
    place, call, _ = case
    if call == "weight_grad" and is_gathered(place, size):
        return False
    return size == 4 or place == "few columns" or " " not in PLACES[place][0]


def is_gathered(place: str, size: int) -> bool:
    if place == "few columns":
        return size == 4
    return place in ("by width", "split both ways", "split twice")


def batch(place: str, call: str, rank: int = 0) -> dict[str, Any]:
    """Whole arguments; hidden states and what belongs to the rows differ between ranks that have rows of their own."""
    torch.manual_seed(3)
    arguments = edges.batch("dapo")
    weights = {"weight": arguments["weight"], "bias": arguments["bias"]}
    torch.manual_seed(4 + rank)
    arguments = edges.batch("dapo") | weights
    if place == "few columns":
        arguments |= {name: value[:FEW] for name, value in weights.items()}
        targets = arguments["targets"]
        arguments["targets"] = torch.where(targets < 0, targets, targets % FEW)
    if call == "lora":
        torch.manual_seed(6)
        arguments |= {"a": edges.noise(2, edges.HIDDEN), "b": edges.noise(edges.VOCABULARY, 2)}
    if call == "reference head":
        del arguments["ref_logprobs"]
        arguments["ref_hidden"] = edges.noise(*arguments["targets"].shape, 3)
        torch.manual_seed(5)
        arguments["ref_weight"] = edges.noise(edges.VOCABULARY, 3)
    return arguments


def taught(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Two ids that a teacher gives for each token, and their log-probs."""
    ids = torch.stack([targets.clamp(0, 29), torch.full_like(targets, 30)], -1)
    return ids, torch.full(ids.shape, -1.0, dtype=F64)


def compute(call: str, arguments: dict[str, Any], communication: Communication | None = None) -> dict[str, Any]:
    """Results, and what is communicated each way. The gradients are those of the leaves given."""
    options = {name: arguments[name] for name in ("process_group",) if name in arguments}
    head = {name: arguments[name] for name in ("hidden", "weight", "targets", "bias")}
    results: dict[str, Any]
    if "a" in arguments:
        arguments = arguments | {"lora": (arguments["a"], arguments["b"], 0.5)}
        arguments = {name: value for name, value in arguments.items() if name not in ("a", "b")}
    if communication is not None:
        communication.take()
    if call == "logprobs":
        logprobs, entropy = gk.linear_logprobs(**head, return_entropy=True, chunk_size=4, backend="cpu", **options)
        results, total = {"logprobs": logprobs, "entropy": entropy}, (logprobs * logprobs + entropy).sum()
    elif call == "distillation":
        del head["targets"]
        ids, logprobs = taught(arguments["targets"])
        loss, divergence, _ = gk.linear_distillation_loss(
            **head, teacher_ids=ids, teacher_logprobs=logprobs, chunk_size=4
        )
        results, total = {"loss": loss, "divergence": divergence}, loss
    else:
        options |= {"memory": "low"} if call == "low memory" else {}
        if call == "support":
            targets = arguments["targets"].clamp(min=0).flatten()
            others = (targets + 7) % edges.VOCABULARY
            options["support"] = torch.stack([targets, others], 1).flatten(), torch.arange(len(targets) + 1) * 2
        else:
            options["chunk_size"] = 4
        if call == "teacher":
            options["teacher"] = gk.Teacher(*taught(arguments["targets"]), coef=0.5)
        result = gk.linear_policy_loss(**arguments | options, config=CONFIG, backend="cpu")
        results, total = {"loss": result.loss, "metrics": result.metrics.tensor}, result.loss
    results = {name: value.detach() for name, value in results.items()}
    if communication is not None:
        results["forward"] = communication.take()
    if total.requires_grad:
        total.backward()
    if communication is not None:
        results["backward"] = communication.take()
    return results


def in_one_process(place: str, call: str, ranks: range = range(1), divisor: float = 1.0) -> dict[str, Any]:
    """Results and gradients of one process with the whole weight, and with the rows of all these ranks."""
    by_rank: list[dict[str, Any]] = []
    for rank in ranks:
        arguments = batch(place, call, rank)
        leaves = edges.leaves_of(arguments)
        leaves |= {name: arguments[name].clone().requires_grad_() for name in ("a", "b") if name in arguments}
        into = torch.zeros_like(leaves["weight"]) if call == "weight_grad" else None
        results = compute(call, arguments | leaves | ({} if into is None else {"weight_grad": into}))
        results |= {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        by_rank.append(results | ({} if into is None else {"by weight": into}))
    sums = {
        name: sum(one[name] for one in by_rank) / divisor for name in map("by {}".format, LEAVES) if name in by_rank[0]
    }
    return {name: [one[name] for one in by_rank] for name in by_rank[0] if name not in sums} | sums


def distributed(place: str, call: str, form: str, size: int, communication: Communication) -> dict[str, Any]:
    """Results of a rank, with the gradients of the DTensors as whole tensors, and their placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    arguments = batch(place, call)
    shard = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
    placements = [[shard[name] for name in names.split()] for names in PLACES.get(place, ("S0", "S0"))]
    mesh = init_device_mesh("cpu", (size,) if len(placements[0]) == 1 else (2, size // 2))
    leaves = {
        name: distribute_tensor(arguments[name].clone(), mesh, of_name).requires_grad_()
        for name, of_name in zip(("weight", "bias"), placements, strict=True)
    }
    if call == "lora":
        leaves["a"] = distribute_tensor(arguments["a"].clone(), mesh, [Replicate()] * mesh.ndim).requires_grad_()
        leaves["b"] = distribute_tensor(arguments["b"].clone(), mesh, placements[1]).requires_grad_()
    hidden = leaves["hidden"] = arguments["hidden"].clone().requires_grad_()
    options: dict[str, Any] = {}
    if form == "hidden":
        options["hidden"] = DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim)
    else:
        options["process_group"] = dist.group.WORLD
    if call == "weight_grad":
        options["weight_grad"] = distribute_tensor(torch.zeros_like(arguments["weight"]), mesh, placements[0])
    if call == "reference head":
        options["ref_weight"] = distribute_tensor(arguments["ref_weight"], mesh, placements[0])
    results = compute(call, arguments | leaves | options, communication)
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    if call == "weight_grad":
        gradients["by weight"] = options["weight_grad"]
    results["places"] = [
        gradients[f"by {name}"].placements == leaves[name].placements for name in LEAVES if name in leaves
    ]
    for name, gradient in gradients.items():
        results[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return results


def managed(kind: str, call: str, rank: int, size: int, communication: Communication) -> dict[str, Any]:
    """Results of a rank with rows of its own and FSDP2's sharded parameters, as they are outside a forward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    arguments = batch("", call, rank)
    head = nn.Linear(edges.HIDDEN, edges.VOCABULARY, dtype=F64)
    head.weight.data, head.bias.data = arguments["weight"].clone(), arguments["bias"].clone()
    for name in LEAVES[2:]:
        if name in arguments:
            head.register_parameter(name, nn.Parameter(arguments[name].clone()))
    head.requires_grad_(kind != "frozen")
    if kind == "bfloat16":
        head = head.float()
    shape = {"hsdp": (2, size // 2), "world of one": (size, 1)}.get(kind, (size,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))
    fully_shard(head, mesh=mesh["b"] if kind == "world of one" else mesh)
    if kind == "summed":
        head.set_gradient_divide_factor(1.0)
        head.set_force_sum_reduction_for_comms(True)
    dtype = torch.bfloat16 if kind == "bfloat16" else F64
    hidden = arguments["hidden"].to(dtype, copy=True).requires_grad_()
    results = compute(call, arguments | {"hidden": hidden} | dict(head.named_parameters()), communication)
    results["by hidden"] = hidden.grad
    if kind != "frozen":
        results["norm"] = nn.utils.clip_grad_norm_(head.parameters(), math.inf).full_tensor()
        assert all(parameter.grad.placements == parameter.placements for parameter in head.parameters())
        results |= {f"by {name}": parameter.grad.full_tensor() for name, parameter in head.named_parameters()}
        before = head.weight.full_tensor().clone()
        torch.optim.SGD(head.parameters(), lr=1.0).step()
        results["step"] = before - head.weight.full_tensor()
    return results


def errors(rank: int, size: int) -> dict[str, str]:
    """Messages of what is refused in every process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    arguments = batch("", "logprobs")
    mesh, other = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    split = {name: distribute_tensor(arguments[name], mesh, [Shard(0)]).requires_grad_() for name in ("weight", "bias")}
    same = DTensor.from_local(arguments["hidden"], mesh, [Replicate()])
    head = nn.Linear(edges.HIDDEN, edges.VOCABULARY, bias=False, dtype=F64)
    fully_shard(head, mesh=mesh)
    inner = nn.Linear(edges.HIDDEN, edges.VOCABULARY, bias=False, dtype=F64)
    names = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "columns"))
    inner.weight = nn.Parameter(distribute_tensor(inner.weight, names["columns"], [Shard(0)]))
    fully_shard(inner, mesh=names["data"])
    alone = [dist.new_group([one]) for one in range(size)][rank]
    into = torch.zeros_like(arguments["weight"])
    tries: dict[str, dict[str, Any]] = {
        "plain hidden": split,
        "rows split": split | {"hidden": DTensor.from_local(arguments["hidden"], mesh, [Shard(0)])},
        "another mesh": split | {"hidden": DTensor.from_local(arguments["hidden"], other, [Replicate(), Replicate()])},
        "another group": split | {"process_group": alone},
        "vocab_start": split | {"hidden": same, "vocab_start": 0},
        "plain bias": split | {"hidden": same, "bias": arguments["bias"]},
        "plain weight": {"bias": split["bias"]},
        "partial": {"hidden": same, "weight": DTensor.from_local(arguments["weight"], mesh, [Partial()]), "bias": None},
        "targets": split | {"hidden": same, "targets": distribute_tensor(arguments["targets"], mesh, [Replicate()])},
        "managed group": {"weight": head.weight, "bias": None, "process_group": dist.group.WORLD},
        "managed bias": split | {"weight": head.weight},
        "managed split": {"weight": inner.weight, "bias": None},
        "managed weight_grad": {"weight": head.weight, "bias": None, "weight_grad": into},
        "placed weight_grad": split | {"hidden": same, "weight_grad": distribute_tensor(into, mesh, [Replicate()])},
        "plain reference": split
        | {"hidden": same, "ref_hidden": arguments["hidden"], "ref_weight": arguments["weight"], "ref_logprobs": None},
    }
    messages = {}
    for name, changes in tries.items():
        try:
            gk.linear_policy_loss(**arguments | changes, config=CONFIG)
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    result: dict[Any, Any] = {"errors": errors(rank, size)}
    with Communication() as communication:
        for case in CASES:
            if is_of(case, size):
                result[case] = distributed(*case, size, communication)
        for kind in MANAGED:
            for call in OWN_CALLS:
                result[kind, call] = managed(kind, call, rank, size, communication)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=quick((2, 4), 2))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """All cases of all ranks from one start of the processes."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def assert_close(got: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype = F64) -> None:
    names = [name for name in expected if name in got]
    assert len(names) >= 3
    tolerance = 1e-10 if dtype == F64 else 8 * torch.finfo(dtype).eps
    for name in names:
        torch.testing.assert_close(
            got[name].to(F64),
            expected[name].to(F64),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_ranks_with_the_same_rows(ranks: list[dict[Any, Any]], case: tuple[str, str, str]) -> None:
    if not is_of(case, len(ranks)):
        assert case not in ranks[0]
        return
    place, call, _ = case
    expected = in_one_process(place, call)
    expected = {name: value[0] if isinstance(value, list) else value for name, value in expected.items()}
    assert expected["by weight"].any() and expected["by hidden"].any()
    for rank in ranks:
        assert_close(rank[case], expected)
        assert {name for name in expected if name.startswith("by ")} <= rank[case].keys() and all(rank[case]["places"])


def names_of(calls: list[tuple[str, int]]) -> list[str]:
    return [name for name, _ in calls]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", ["logprobs", "loss"])
def test_what_ranks_with_the_same_rows_communicate(ranks: list[dict[Any, Any]], place: str, call: str) -> None:
    """A split vocabulary exchanges statistics; what is gathered is gathered once, whatever the number of chunks."""
    case, size = (place, call, "hidden"), len(ranks)
    if not is_of(case, size):
        return
    arguments = batch(place, call)
    takes_part = int((arguments["mask"] & (arguments["targets"] != -100)).sum())
    rows = arguments["targets"].numel() if call == "logprobs" else takes_part
    width = 2 if place == "split in two, twice" else size
    of_hidden = arguments["hidden"].nbytes
    forward, backward = (ranks[0][case][way] for way in ("forward", "backward"))
    if place == "replicated":
        assert forward == [] and backward == []
    elif is_gathered(place, size):
        count = {"by width": 1, "split both ways": 3, "split twice": 4}[place]  # one per split dimension and tensor
        assert names_of(forward) == ["all_gather_into_tensor"] * count
        if place == "by width":
            assert forward[0][1] == 8 * edges.VOCABULARY * -(-edges.HIDDEN // size)
        assert backward == []  # every rank has the whole gradient and keeps its part
    else:
        chunks = [nbytes for name, nbytes in forward if name == "allreduce"]
        if call == "loss":  # the gradient is computed in the forward pass
            assert chunks.pop() == of_hidden and len(chunks) == -(-rows // 4)
        assert sum(chunks) == 8 * 3 * width * rows
        of_bias = [call for call in [*forward, *backward] if call[0] != "allreduce"]
        assert names_of(of_bias) == (["all_gather_into_tensor"] if place == "split, and a whole bias" else [])
        assert [call for call in backward if call[0] == "allreduce"] == (
            [("allreduce", of_hidden)] if call == "logprobs" else []
        )


def divisor_of(kind: str, size: int) -> float:
    return 1.0 if kind in ("summed", "world of one") else float(size)


@pytest.mark.parametrize("kind", MANAGED)
@pytest.mark.parametrize("call", OWN_CALLS)
def test_ranks_with_rows_of_their_own(ranks: list[dict[Any, Any]], kind: str, call: str) -> None:
    """The gradient is the mean over the ranks, as FSDP2's is, or the sum where it was told so."""
    size = len(ranks)
    dtype = torch.bfloat16 if kind == "bfloat16" else F64
    for number, rank in enumerate(ranks):
        of_rank = range(number, number + 1) if kind == "world of one" else range(size)
        expected = in_one_process("", call, of_rank, divisor_of(kind, size))
        own = number - of_rank.start
        expected = {name: value[own] if isinstance(value, list) else value for name, value in expected.items()}
        got = rank[kind, call]
        assert kind == "frozen" or {name for name in expected if name.startswith("by ")} <= got.keys()
        if kind == "frozen":
            assert "by weight" not in got
        elif kind == "bfloat16":
            # hidden states and weights are rounded to bfloat16, gradients are summed in the parameter's float32
            assert got["by weight"].dtype == torch.float32
            assert_near(got["by weight"], expected["by weight"], 0.1)
            assert_near(got["by bias"], expected["by bias"], 0.1)
            continue
        assert_close(got, expected, dtype)
        if kind != "frozen":
            norm = math.hypot(*(float(expected[f"by {name}"].norm()) for name in LEAVES if f"by {name}" in expected))
            assert float(got["norm"]) == pytest.approx(norm)
            torch.testing.assert_close(got["step"], expected["by weight"], rtol=1e-9, atol=1e-9)


def assert_near(got: Tensor, expected: Tensor, share: float) -> None:
    assert float((got.double() - expected).norm()) < share * float(expected.norm())


@pytest.mark.parametrize("kind", ["fsdp", "bfloat16", "frozen"])
@pytest.mark.parametrize("call", ["logprobs", "loss", "low memory"])
def test_what_ranks_with_rows_of_their_own_communicate(ranks: list[dict[Any, Any]], kind: str, call: str) -> None:
    """One gather and one reduce-scatter of weight and bias each, in the dtype of the hidden states and their own."""
    size = len(ranks)
    columns = -(-edges.VOCABULARY // size)
    there, back = {"bfloat16": (2, 4)}.get(kind, (8, 8))
    parts = [columns * edges.HIDDEN, columns]
    for rank in ranks:
        assert rank[kind, call]["forward"] == [("all_gather_into_tensor", there * part) for part in parts]
        backward = sorted(rank[kind, call]["backward"], reverse=True)
        wanted = [("reduce_scatter_tensor", back * size * part) for part in parts]
        assert backward == ([] if kind == "frozen" else wanted)


def test_what_is_refused(ranks: list[dict[Any, Any]]) -> None:
    starts = {
        "plain hidden": "ValueError: linear_policy_loss: hidden must be a DTensor for a weight with placements",
        "rows split": "ValueError: linear_policy_loss: hidden must be replicated on its mesh, got placements",
        "another mesh": "ValueError: linear_policy_loss: hidden must be on the mesh of weight",
        "another group": "ValueError: linear_policy_loss: process_group must have the ranks of the mesh of weight",
        "vocab_start": "ValueError: linear_policy_loss: vocab_start must be None with a DTensor as weight",
        "plain bias": "TypeError: linear_policy_loss: bias must be a DTensor like weight, got Tensor",
        "plain weight": "TypeError: linear_policy_loss: bias must be a tensor of this rank, got DTensor",
        "partial": "ValueError: linear_policy_loss: weight must not be Partial on its mesh",
        "targets": "TypeError: linear_policy_loss: targets must be a tensor of this rank, got DTensor",
        "managed group": "ValueError: linear_policy_loss: process_group must be None for a sharded parameter of FSDP2",
        "managed bias": "ValueError: linear_policy_loss: bias must be sharded by FSDP2 like weight",
        "managed split": "ValueError: linear_policy_loss: weight must be unsharded where FSDP2 shards a DTensor",
        "managed weight_grad": "ValueError: linear_policy_loss: weight_grad must be None for a weight that is gathered",
        "placed weight_grad": "ValueError: linear_policy_loss: weight_grad must have the placements of weight",
        "plain reference": "ValueError: linear_policy_loss: ref_weight must be a DTensor on the mesh of weight",
    }
    for rank in ranks:
        assert rank["errors"].keys() == starts.keys()
        for name, start in starts.items():
            assert rank["errors"][name].startswith(start), (name, rank["errors"][name])


@pytest.fixture
def alone() -> Any:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_nothing_is_ambiguous_on_one_rank(alone: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    arguments = batch("", "loss")
    weights = {
        name: distribute_tensor(arguments[name], alone, [Shard(0)]).requires_grad_() for name in ("weight", "bias")
    }
    hidden = arguments["hidden"].requires_grad_()
    got = compute("loss", arguments | weights)
    expected = {
        name: value[0] if isinstance(value, list) else value for name, value in in_one_process("", "loss").items()
    }
    got |= {"by hidden": hidden.grad} | {f"by {name}": value.grad.full_tensor() for name, value in weights.items()}
    assert_close(got, expected)


@pytest.mark.parametrize("compute_loss", [gk.linear_logprobs, gk.linear_policy_loss, gk.linear_distillation_loss])
def test_compiled_code_takes_none(
    alone: Any, compute_loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    arguments = batch("", "loss")
    weight = distribute_tensor(arguments["weight"], alone, [Shard(0)])
    others = {
        gk.linear_logprobs: (arguments["targets"],),
        gk.linear_policy_loss: (arguments["targets"], arguments["old_logprobs"], arguments["advantages"]),
        gk.linear_distillation_loss: (arguments["targets"][..., None], arguments["old_logprobs"][..., None]),
    }[compute_loss]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    name = compute_loss.__name__
    assert_raises(
        TypeError,
        f"{name}: weight must be a tensor of this rank",
        ["DTensor"],
        lambda: compute_loss(arguments["hidden"], weight, *others),
    )
