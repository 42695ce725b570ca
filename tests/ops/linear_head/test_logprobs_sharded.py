"""The LM head in two processes: a vocabulary that is split between them, and DTensors, against one process.

Faults that this is for: a target, banned id or adapter that is counted from the wrong column; a shard whose part is
lost, or counts twice, in log-sum-exps, entropies or gradients; digits of nearly certain tokens that the shards lose; an
all-reduce too many, or that one rank alone waits in; a DTensor whose other rows are ignored.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from tests.communication import Communication
from tests.harness import assert_within_budget, runnable_backends
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import F32, F64, IGNORED, LEAVES, NAN
from tests.ops.promises import Inputs, Results, run

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in runnable_backends(cases.SUPPORTS),
    reason="needs gloo and the CPU kernels",
)

SHARES = (12, 19)
TOKENS, COLUMNS = 14, sum(SHARES)
SPLIT = ("weight", "bias", "lora_b")
# Log-probs of the likeliest token, up to where float64 has four digits of 1 - p left.
CERTAIN = torch.tensor([1e-3, 1e-6, 1e-9, 1e-12], dtype=F64)
WRONG = (-1, COLUMNS, -99)


def batch(**options: Any) -> Inputs:
    """Targets at both ends of both shards, ignored ones, and tokens without a gradient."""
    torch.manual_seed(4)
    inputs = cases.draw_head(COLUMNS, 5, bias=True, **options)
    inputs |= cases.draw_tokens(inputs, TOKENS, ignored=0.0)
    if "banned" not in inputs:
        inputs["targets"][:4] = torch.tensor([0, 11, 12, 30])
    inputs["targets"][5::4] = IGNORED
    for name in ("by_logprobs", "by_entropy"):
        inputs[name][::5] = 0
    return inputs


def certain(column: int, offset: float) -> Inputs:
    """One id has nearly all of the probability, as given by CERTAIN; the others share the rest equally."""
    rest = CERTAIN.log() - math.log(COLUMNS - 1)
    weight = torch.tensor([[1.0, 0.0]], dtype=F64).repeat(COLUMNS, 1)
    weight[column] = torch.tensor([0.0, 1.0])
    hidden = torch.stack([(rest + offset), torch.full_like(rest, offset)], 1).float().double()
    tokens = {"hidden": hidden, "targets": torch.full((4,), column)}
    return tokens | {"weight": weight, "by_logprobs": torch.ones(4).double(), "by_entropy": torch.ones(4).double()}


def without_columns(columns: slice) -> Inputs:
    """Their logits are -inf by the bias."""
    inputs = batch()
    inputs["bias"][columns] = -math.inf
    inputs["targets"] = torch.where(inputs["targets"] >= columns.start, 3, inputs["targets"])
    return inputs


def with_nan() -> Inputs:
    inputs = batch()
    inputs["hidden"][2, 1] = NAN
    return inputs


# what is measured, with the factors that need no gradient
CASES: dict[str, tuple[Callable[[], Inputs], tuple[str, ...]]] = {
    "plain": (batch, ()),
    "chunks": (lambda: batch() | {"chunk_size": 3}, ()),
    "scaled": (lambda: batch(softcap=6.0, logit_scale=0.8) | {"temperature": 0.7}, ()),
    "adapter": (lambda: batch(adapter=2) | {"chunk_size": 4}, ()),
    "adapter alone": (lambda: batch(adapter=2), ("hidden", "weight", "bias")),
    "banned": (lambda: batch(banned=9, softcap=6.0), ()),
    "a banned shard": (lambda: batch() | {"banned": torch.arange(30, 11, -1), "targets": torch.arange(14) % 12}, ()),
    "temperatures": (lambda: batch() | {"temperature": torch.linspace(0.5, 2, TOKENS).double(), "chunk_size": 4}, ()),
    "positions": (lambda: batch() | {"positions": torch.tensor([7, 0, 3, 12])}, ()),
    "mask": (lambda: batch() | {"positions": torch.arange(TOKENS) % 3 == 0}, ()),
    "all ignored": (lambda: batch() | {"targets": torch.full((TOKENS,), IGNORED)}, ()),
    "no tokens": (lambda: cases.taken(batch(), torch.arange(0)), ()),
    "no entropy": (lambda: {name: value for name, value in batch().items() if name != "by_entropy"}, ()),
    "default group": (lambda: batch() | {"process_group": None}, ()),
    "frozen hidden": (batch, ("hidden",)),
    "frozen weight": (batch, ("weight", "bias")),
    "padded": (lambda: without_columns(slice(COLUMNS - 4, COLUMNS)), ()),
    "a masked shard": (lambda: without_columns(slice(SHARES[0], COLUMNS)), ()),
    "a bad token": (with_nan, ()),
    "certain, here": (lambda: certain(5, 0.0), ()),
    "certain, there": (lambda: certain(20, 0.0), ()),
    "certain, far from 0": (lambda: certain(20, 40.0), ()),
}
RUNS = [(case, "cpu", F64) for case in CASES]
RUNS += [(case, "reference", F64) for case in ("plain", "adapter", "banned", "a masked shard")]
RUNS += [(case, "cpu", F32) for case in ("plain", "scaled", "chunks", "adapter")]
RUNS += [(case, "cpu", F32) for case in CASES if case.startswith("certain")]


def of_rank(inputs: Inputs, rank: int) -> Inputs:
    first = sum(SHARES[:rank])
    split = {name: inputs[name][first : first + SHARES[rank]].clone() for name in SPLIT if name in inputs}
    return {"process_group": dist.group.WORLD} | inputs | split | {"vocab_start": first}


def sharded(case: str, backend: str, dtype: torch.dtype, rank: int) -> Results | dict[str, Any]:
    draw, frozen = CASES[case]
    inputs = of_rank(draw(), rank)
    with Communication() as communication:
        results = run(cases.op_of(inputs, *frozen), inputs, backend, dtype)
    return results | {"sent": communication.take()}


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def wrong_targets(rank: int) -> dict[Any, str]:
    messages = {}
    for target in WRONG:
        inputs = of_rank(batch(), rank)
        inputs["targets"][3] = target
        messages[target] = message_of(lambda given=inputs: cases.call(given, "cpu"))  # type: ignore[misc]
    # both shards begin at 0, so each target lies in both of them or in neither
    messages["overlap"] = message_of(lambda: cases.call(of_rank(batch(), rank) | {"vocab_start": 0}, "cpu"))
    inputs = of_rank(batch() | {"banned": torch.tensor([30, 12])}, rank)
    messages["banned"] = message_of(lambda: cases.call(inputs, "cpu"))
    return messages


# DTensors


def policy_loss(inputs: Inputs, **more: Any) -> Tensor:
    old = torch.zeros(4, 5, dtype=F64)
    head = cases.head_of(inputs)
    loss = gk.linear_policy_loss(
        inputs["hidden"],
        head,
        inputs["targets"],
        old,
        old[:, 0] + 1,
        config=gk.LossConfig(kl="k3", kl_coef=0.1),
        ref_hidden=inputs.get("ref_hidden", inputs["hidden"]),
        **more,
    ).loss
    return loss


def distillation(inputs: Inputs) -> Tensor:
    ids = torch.tensor([7, 30]).expand(4, 5, 2)
    teacher = gk.Teacher(ids, torch.full(ids.shape, -1.0, dtype=F64))
    return gk.linear_distillation_loss(inputs["hidden"], cases.head_of(inputs), teacher).loss


DTENSOR_CALLS: dict[str, Callable[[Inputs], Tensor]] = {
    "logprobs": lambda inputs: cases.call(inputs, "cpu")["loss"],
    "support": lambda inputs: cases.call(inputs, "cpu")["loss"],
    "loss": policy_loss,
    "low memory": lambda inputs: policy_loss(inputs, memory="low"),
    "distillation": distillation,
}


def dtensor_batch(call: str) -> Inputs:
    torch.manual_seed(3)
    if call == "support":
        return cases.OPS["linear_logprobs over a support"].draw()
    return cases.draw(columns=COLUMNS, bias=True, adapter=2) | {"ref_hidden": torch.randn(4, 5, 6).double()}


def differentiated(call: str, inputs: Inputs, leaves: dict[str, Tensor]) -> Results:
    loss = DTENSOR_CALLS[call](inputs)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach()} | {f"d_{name}": by for name, by in zip(leaves, gradients, strict=True)}


def in_one_process(call: str) -> Results:
    inputs = dtensor_batch(call)
    return differentiated(call, inputs, {name: inputs[name].requires_grad_() for name in LEAVES if name in inputs})


def replicated(call: str, mesh: Any) -> Results:
    from torch.distributed.tensor import Replicate, distribute_tensor

    inputs = dtensor_batch(call)
    names = [name for name in (*LEAVES, "ref_hidden") if name in inputs]
    tensors = {name: distribute_tensor(inputs[name], mesh, [Replicate()]) for name in names}
    leaves = {name: tensors[name].requires_grad_() for name in LEAVES if name in tensors}
    with Communication() as communication:
        results = differentiated(call, inputs | tensors, leaves)
    assert communication.take() == [] and not hasattr(results["loss"], "placements")
    return {name: value.to_local() if name != "loss" else value for name, value in results.items()}


def split(call: str, mesh: Any, rank: int) -> Results:
    """A split vocabulary stays split where its local columns are given with their place."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs = dtensor_batch(call)
    places = {name: Shard(0) if name in SPLIT else Replicate() for name in LEAVES}
    leaves = {name: distribute_tensor(inputs[name], mesh, [place]).requires_grad_() for name, place in places.items()}
    where = {"vocab_start": rank * -(-COLUMNS // 2), "process_group": mesh.get_group()}
    results = differentiated(call, inputs | {name: leaf.to_local() for name, leaf in leaves.items()} | where, leaves)
    return {name: value.full_tensor() if name != "loss" else value for name, value in results.items()}


def refused_dtensors(mesh: Any) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs, messages = dtensor_batch("loss"), {}
    for name in (*LEAVES, "ref_hidden", "targets"):
        place = Replicate() if name == "targets" else Shard(0)
        changed = inputs | {name: distribute_tensor(inputs[name], mesh, [place])}
        messages[name] = message_of(lambda given=changed: policy_loss(given))  # type: ignore[misc]
    inputs["weight"].requires_grad_()
    total = distribute_tensor(torch.zeros(COLUMNS, 6, dtype=F64), mesh, [Replicate()])
    return messages | {"weight_grad": message_of(lambda: policy_loss(inputs, weight_grad=total))}


# Processes


def worker(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from grpo_kernels import backends

    backends.name_implementations()
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)
    found: dict[Any, Any] = {key: sharded(*key, rank) for key in RUNS}
    found["wrong"] = wrong_targets(rank)
    mesh = init_device_mesh("cpu", (2,))
    found |= {("whole", call): replicated(call, mesh) for call in DTENSOR_CALLS}
    found |= {("split", call): split(call, mesh, rank) for call in ("logprobs", "loss")}
    torch.save(found | {"refused": refused_dtensors(mesh)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """All cases of both ranks from one start of the processes, which takes longer than the cases."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def joined(found: list[dict[str, Any]]) -> Results:
    """The ranks' results as one process has them; what is whole on all ranks must have the same bits."""
    whole: Results = {}
    for name in found[0].keys() - {"sent"}:
        parts = [each[name] for each in found]
        if name[2:] not in SPLIT:
            torch.testing.assert_close(parts[1], parts[0], rtol=0, atol=0, equal_nan=True)
        whole[name] = torch.cat(parts) if name[2:] in SPLIT else parts[0]
    return whole


@pytest.mark.parametrize(("case", "backend", "dtype"), RUNS, ids=str)
def test_it_is_what_one_process_gets(ranks: list[dict[Any, Any]], case: str, backend: str, dtype: torch.dtype) -> None:
    draw, frozen = CASES[case]
    inputs = {name: value for name, value in draw().items() if name != "process_group"}
    op, got = cases.op_of(inputs, *frozen), joined([rank[case, backend, dtype] for rank in ranks])
    gold, working = (run(op, inputs, "reference", kind) for kind in (F64, dtype))
    assert got.keys() == gold.keys() and (case in ("all ignored", "no tokens") or got["logprobs"].any())
    for name, value in gold.items():
        assert got[name].dtype == dtype
        if dtype == F32:
            assert_within_budget(got[name], working[name], value, name)
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda text: text)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("certain")])
def test_certain_tokens_keep_their_digits(ranks: list[dict[Any, Any]], case: str, dtype: torch.dtype) -> None:
    hidden = CASES[case][0]()["hidden"]
    gold = -torch.log1p((COLUMNS - 1) * (hidden[:, 0] - hidden[:, 1]).exp())  # the gap that rounding leaves
    for rank in ranks:
        got = rank[case, "cpu", dtype]["logprobs"].double()
        torch.testing.assert_close(got, gold, rtol=1e-5 if dtype == F32 else 1e-11, atol=0)
    assert (gold < 0).all() and gold[-1] > -2e-12


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_send(ranks: list[dict[Any, Any]], case: str) -> None:
    """Three numbers a token and rank, and the gradients of what all ranks have."""
    draw, frozen = CASES[case]
    inputs = draw()
    count = len(ranks[0][case, "cpu", F64]["logprobs"]) if case != "mask" else int(inputs["positions"].sum())
    backward = [inputs[name].numel() for name in ("hidden", "lora_a") if name in inputs and name not in frozen]
    if "positions" in inputs and "hidden" not in frozen:
        backward[0] = count * 5
    for rank in ranks:
        sent = rank[case, "cpu", F64]["sent"]
        assert [size for _, size in sent] == [8 * numbers for numbers in (2 * 3 * count, *backward)]
        assert {name for name, _ in sent} == {"allreduce"}


@pytest.mark.parametrize("which", [*WRONG, "overlap"], ids=str)
def test_a_target_that_is_no_column_of_one_rank(ranks: list[dict[Any, Any]], which: int | str) -> None:
    for rank in ranks:
        message = "RuntimeError: linear_logprobs: targets must be columns of exactly one rank each, or -100"
        assert rank["wrong"][which] == message
        assert (
            rank["wrong"]["banned"]
            == "ValueError: linear_logprobs: targets must not be banned by the head, got 12 at [2]"
        )


@pytest.mark.parametrize("call", DTENSOR_CALLS)
def test_whole_dtensors_are_this_ranks_tensors(ranks: list[dict[Any, Any]], call: str) -> None:
    expected = in_one_process(call)
    for rank in ranks:
        assert rank["whole", call].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(rank["whole", call][name], value) and value.any(), name


@pytest.mark.parametrize("call", ["logprobs", "loss"])
def test_a_split_vocabulary_is_given_by_its_local_columns(ranks: list[dict[Any, Any]], call: str) -> None:
    for name, value in in_one_process(call).items():
        for rank in ranks:
            torch.testing.assert_close(rank["split", call][name], value, rtol=1e-10, atol=1e-12)


def test_split_dtensors_are_refused(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        for name, message in rank["refused"].items():
            op = "linear_policy_loss" if "hidden" in name or name in ("targets", "weight_grad") else "LMHead"
            if name in ("targets", "weight_grad"):
                assert message.startswith(f"TypeError: {op}: {name} must be a tensor of this rank, got "), message
                continue
            argument = "lora" if name.startswith("lora") else name
            assert message.startswith(f"ValueError: {op}: {argument} must be whole on every rank, got a "), message
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

    inputs = dtensor_batch("logprobs")
    tensors = {name: distribute_tensor(inputs[name], alone, [Shard(0)]) for name in LEAVES}
    assert torch.equal(DTENSOR_CALLS["logprobs"](inputs | tensors), in_one_process("logprobs")["loss"])
