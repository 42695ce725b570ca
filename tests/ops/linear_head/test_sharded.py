"""The LM head in two and four processes: a vocabulary that is split between them, and DTensors, against one process.

Faults that this is for: a target, banned id, entropy or adapter that is counted from the wrong column; a shard whose
part is lost, or counts twice, in log-sum-exps, losses or gradients; ranks that get different bits; digits of nearly
certain tokens that the shards lose; an all-reduce too many, or that one rank alone waits in; chunks that differ between
ranks; a DTensor whose other rows are ignored.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.ops.linear_head.head import Shard
from grpo_kernels.ops.linear_head.sizes import tokens_per_chunk
from tests.communication import Communication
from tests.harness import assert_within_budget, cpu_threads, quick
from tests.ops.linear_head import cases
from tests.ops.linear_head import distillation_cases as distillation
from tests.ops.linear_head.heads import EXACT, F32, F64, IGNORED, LEAVES, NAN, assert_close
from tests.ops.linear_head.policy_loss_cases import problem, takes_part
from tests.ops.promises import Inputs, Op, Results, run
from tests.rounding import Moves

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in EXACT,
    reason="needs gloo and the CPU kernels",
)
# Columns of each rank, by the number of ranks.
SHARES = {2: (12, 19), 4: (1, 5, 21, 4)}
TOKENS, COLUMNS = 14, 31
SPLIT = ("weight", "bias", "lora_b", "ref_weight", "ref_bias", "ref_lora_b")
# Log-probs of the likeliest token, up to where float64 has four digits of 1 - p left.
CERTAIN = torch.tensor([1e-3, 1e-6, 1e-9, 1e-12], dtype=F64)


def of_logprobs(*features: str, frozen: tuple[str, ...] = (), **changes: Any) -> Op:
    """Targets at both ends of both shards, ignored ones, and tokens without a gradient."""
    torch.manual_seed(4)
    inputs = cases.draw((TOKENS,), "bias", *features, columns=COLUMNS, width=5)
    if "banned" not in features:
        inputs["targets"][:4] = torch.tensor([0, 11, 12, 30])
    inputs["targets"][5::4] = IGNORED
    for name in ("by_logprobs", "by_entropy"):
        inputs[name][::5] = 0
    inputs = {name: value for name, value in (inputs | changes).items() if name != "by_entropy" or value is not None}
    return cases.op_of(inputs, *frozen)


def of_loss(config: str, *features: str, **options: Any) -> Op:
    torch.manual_seed(3)
    return problem(config, *features, **options).op


def certain(column: int, offset: float) -> Op:
    """One id has nearly all of the probability, as given by CERTAIN; the others share the rest equally."""
    rest = CERTAIN.log() - math.log(COLUMNS - 1)
    weight = torch.tensor([[1.0, 0.0]], dtype=F64).repeat(COLUMNS, 1)
    weight[column] = torch.tensor([0.0, 1.0])
    hidden = torch.stack([(rest + offset), torch.full_like(rest, offset)], 1).float().double()
    inputs = {"hidden": hidden, "targets": torch.full((4,), column), "weight": weight}
    inputs |= {"by_logprobs": torch.ones(4).double(), "by_entropy": torch.ones(4).double()}
    return cases.op_of(inputs)


def without_columns(first: int) -> Op:
    """The logits of the last columns are -inf by the bias."""
    op = of_logprobs()
    inputs = op.draw()
    inputs["bias"][first:] = -math.inf
    inputs["targets"] = torch.where(inputs["targets"] >= first, 3, inputs["targets"])
    return op


def with_nan() -> Op:
    op = of_logprobs()
    op.draw()["hidden"][2, 1] = NAN
    return op


EVERYTHING = ("bias", "gaps", "ignored", "lora", "scaled", "banned", "policy_mask")
CASES: dict[str, Callable[[], Op]] = {
    "plain": of_logprobs,
    "chunks": functools.partial(of_logprobs, chunk_size=3),
    "scaled": functools.partial(of_logprobs, "scaled"),
    "adapter": functools.partial(of_logprobs, "lora", chunk_size=4),
    "adapter alone": functools.partial(of_logprobs, "lora", frozen=("hidden", "weight", "bias")),
    "banned": functools.partial(of_logprobs, "banned", "scaled"),
    "a banned shard": functools.partial(of_logprobs, banned=torch.arange(30, 11, -1), targets=torch.arange(14) % 12),
    "temperatures": functools.partial(of_logprobs, "temperatures", chunk_size=4),
    "positions": functools.partial(of_logprobs, positions=torch.tensor([7, 0, 3, 12])),
    "mask": functools.partial(of_logprobs, positions=torch.arange(TOKENS) % 3 == 0),
    "all ignored": functools.partial(of_logprobs, targets=torch.full((TOKENS,), IGNORED)),
    "no tokens": functools.partial(of_logprobs, positions=torch.zeros(0).long()),
    "no entropy": functools.partial(of_logprobs, by_entropy=None),
    "default group": functools.partial(of_logprobs, process_group=None),
    "frozen hidden": functools.partial(of_logprobs, frozen=("hidden",)),
    "frozen weight": functools.partial(of_logprobs, frozen=("weight", "bias")),
    "padded": functools.partial(without_columns, COLUMNS - 4),
    "a masked shard": functools.partial(without_columns, SHARES[2][0]),
    "a bad token": with_nan,
    "certain, here": functools.partial(certain, 5, 0.0),
    "certain, there": functools.partial(certain, 20, 0.0),
    "certain, far from 0": functools.partial(certain, 20, 40.0),
}
LOSSES: dict[str, Callable[[], Op]] = {
    "loss in chunks": functools.partial(of_loss, "dapo", "bias", "gaps", chunk_size=4),
    "loss in its own chunks": functools.partial(of_loss, "dapo", "bias", "packed"),
    "loss of all tokens": functools.partial(of_loss, "dapo", "bias", chunk_size=4, compact=False),
    "loss with entropy": functools.partial(of_loss, "entropy", "temperatures", "positions", chunk_size=5),
    "loss with everything": functools.partial(of_loss, "sequence", *EVERYTHING, chunk_size=14),
    "loss in low memory": functools.partial(of_loss, "dapo", *EVERYTHING, chunk_size=4, memory="low"),
    "rows longer than a chunk": functools.partial(of_loss, "sequence", "shared", chunk_size=4),
    "reference head": functools.partial(of_loss, "dapo", "ref_head", "bias", chunk_size=4),
    "reference head in low memory": functools.partial(
        of_loss, "dapo", "ref_hidden", "lora", chunk_size=4, memory="low"
    ),
}
NOTHING = ("all ignored", "no tokens")
ALL = CASES | LOSSES
RUNS = [(case, "cpu", F64) for case in ALL]
RUNS += [(case, "reference", F64) for case in ("plain", "adapter", "banned", "a masked shard", "loss with everything")]
RUNS += [(case, "cpu", F32) for case in CASES if case in ("plain", "scaled", "chunks", "adapter") or "certain" in case]


# A rank


def of_rank(inputs: Inputs, rank: int) -> Inputs:
    shares = SHARES[dist.get_world_size()]
    first = sum(shares[:rank])
    split = {name: inputs[name][first : first + shares[rank]].clone() for name in SPLIT if name in inputs}
    where = {"process_group": dist.group.WORLD, "vocab_start": first}
    if "ref_bias" in inputs:
        where |= {f"ref_{name}": value for name, value in where.items()}
    return where | inputs | split


def sharded(case: str, backend: str, dtype: torch.dtype, rank: int) -> dict[str, Any]:
    op = ALL[case]()
    with Communication() as communication:
        results = run(op, of_rank(op.draw(), rank), backend, dtype)
    return results | {"sent": communication.take()}


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def wrong_targets(rank: int) -> dict[str, str]:
    def message(op: Op, **changes: Any) -> str:
        given = of_rank(op.draw(), rank)
        for target in changes.pop("targets", ()):
            given["targets"][given["targets"] == 12] = target
        return message_of(lambda: run(op, given | changes, "cpu", F64))

    # with "overlap" all shards begin at 0, so each target lies in all of them or in none
    return {str(target): message(of_logprobs(), targets=[target]) for target in (-1, COLUMNS, -99)} | {
        "overlap": message(of_logprobs(), vocab_start=0),
        "banned": message(of_logprobs(), banned=torch.tensor([30, 12])),
        "loss": message(of_loss("grpo"), vocab_start=0),
    }


def added_weight_gradient(rank: int) -> Tensor:
    op = ALL["loss in chunks"]()
    inputs = of_rank(op.draw(), rank)
    inputs["weight"].requires_grad_()
    inputs["weight_grad"] = torch.zeros_like(inputs["weight"])
    op.call(inputs, "cpu")["loss"].backward()
    return inputs["weight_grad"]


def chunk_sizes(rank: int) -> list[int]:
    """The last rank has ever more columns, the others as many as before."""
    size = dist.get_world_size()
    parts = [Shard("", None, rank, 10**5 * (n if rank == size - 1 else rank + 1)) for n in (size, 2 * size)]
    return [part.tokens_per_chunk(4096, torch.empty(0)) for part in parts]


# DTensors


WHOLE: dict[str, Callable[[], Op]] = {
    "logprobs": functools.partial(of_logprobs, "lora"),
    "support": lambda: cases.op_of(cases.drawn("bias", "scaled", "support")),
    "loss": functools.partial(of_loss, "dapo", "bias", "lora", "ref_hidden"),
    "low memory": functools.partial(of_loss, "dapo", "bias", "lora", "ref_hidden", memory="low"),
    "distillation": lambda: distillation.op_of(distillation.draw("bias", "lora")),
}


def differentiated(op: Op, inputs: Inputs, leaves: dict[str, Tensor]) -> Results:
    loss = op.call(inputs, "cpu")["loss"]
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach()} | {f"d_{name}": by for name, by in zip(leaves, gradients, strict=True)}


def in_one_process(call: str) -> Results:
    torch.manual_seed(3)
    op = WHOLE[call]()
    inputs = op.draw()
    return differentiated(op, inputs, {name: inputs[name].requires_grad_() for name in op.leaves})


def as_dtensors(call: str, mesh: Any) -> Results:
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.manual_seed(3)
    op = WHOLE[call]()
    inputs = op.draw()
    names = [name for name in (*op.leaves, "ref_hidden") if name in inputs]
    given: Inputs = {name: distribute_tensor(inputs[name], mesh, [Replicate()]) for name in names}
    leaves = {name: given[name].requires_grad_() for name in op.leaves}
    with Communication() as communication:
        results = differentiated(op, inputs | given, leaves)
    assert communication.take() == [] and not hasattr(results["loss"], "placements")
    return {name: value.to_local() if name != "loss" else value for name, value in results.items()}


def refused_dtensors(mesh: Any) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    op = WHOLE["loss"]()
    inputs = op.draw()
    messages = {}
    for name in (*LEAVES, "ref_hidden", "targets"):
        place = Replicate() if name == "targets" else Shard(0)
        changed = inputs | {name: distribute_tensor(inputs[name], mesh, [place])}
        messages[name] = message_of(lambda given=changed: op.call(given, "cpu"))  # type: ignore[misc]
    inputs["weight"].requires_grad_()
    total = distribute_tensor(torch.zeros(COLUMNS, 5, dtype=F64), mesh, [Replicate()])
    return messages | {"weight_grad": message_of(lambda: op.call(inputs | {"weight_grad": total}, "cpu"))}


# Processes


def worker(rank: int, size: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from grpo_kernels import backends

    backends.name_implementations()
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    found: dict[Any, Any] = {key: sharded(*key, rank) for key in RUNS}
    found |= {"wrong": wrong_targets(rank), "weight_grad": added_weight_gradient(rank), "sizes": chunk_sizes(rank)}
    mesh = init_device_mesh("cpu", (size,))
    found |= {("whole", call): as_dtensors(call, mesh) for call in WHOLE}
    torch.save(found | {"refused": refused_dtensors(mesh)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=quick(SHARES, 2))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """All cases of all ranks from one start of the processes, which takes longer than the cases."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def joined(found: list[dict[str, Any]]) -> Results:
    """The ranks' results as one process has them; what is whole on all ranks must have the same bits."""
    whole: Results = {}
    for name in found[0].keys() - {"sent"}:
        parts = [each[name] for each in found]
        whole[name] = torch.cat(parts) if name[2:] in SPLIT else parts[0]
        for part in [] if name[2:] in SPLIT else parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
    return whole


@pytest.mark.parametrize(("case", "backend", "dtype"), RUNS, ids=str)
def test_it_is_what_one_process_gets(ranks: list[dict[Any, Any]], case: str, backend: str, dtype: torch.dtype) -> None:
    op = ALL[case]()
    inputs = op.draw()
    got = joined([rank[case, backend, dtype] for rank in ranks])
    gold, working = (run(op, inputs, "reference", kind) for kind in (F64, dtype))
    moves = Moves(lambda: run(op, inputs, "reference", F64), gold)
    for name, value in gold.items():
        assert value.any() or case in NOTHING or name == "loss", name
        if dtype == F32:
            assert got[name].dtype == dtype
            assert_within_budget(got[name], working[name], value, name, moves=moves)
    if dtype == F64:
        assert_close(got, gold, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("certain")])
def test_certain_tokens_keep_their_digits(ranks: list[dict[Any, Any]], case: str, dtype: torch.dtype) -> None:
    hidden = CASES[case]().draw()["hidden"]
    gold = -torch.log1p((COLUMNS - 1) * (hidden[:, 0] - hidden[:, 1]).exp())  # the gap that rounding leaves
    for rank in ranks:
        got = rank[case, "cpu", dtype]["logprobs"].double()
        torch.testing.assert_close(got, gold, rtol=1e-5 if dtype == F32 else 1e-11, atol=0)
    assert (gold < 0).all() and gold[-1] > -2e-12


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_send(ranks: list[dict[Any, Any]], case: str) -> None:
    """Two numbers a token and rank, a third for the entropy, and the gradients of what all ranks have."""
    op = CASES[case]()
    inputs = op.draw()
    count = len(ranks[0][case, "cpu", F64]["logprobs"]) if case != "mask" else int(inputs["positions"].sum())
    backward = [inputs[name].numel() for name in ("hidden", "lora_a") if name in op.leaves]
    if "positions" in inputs:
        backward[0] = count * 5
    each = 2 if case == "no entropy" else 3
    for rank in ranks:
        sent = rank[case, "cpu", F64]["sent"]
        assert [size for _, size in sent] == [8 * numbers for numbers in (each * len(ranks) * count, *backward)]
        assert {name for name, _ in sent} == {"allreduce"}


def test_what_the_ranks_of_a_loss_send(ranks: list[dict[Any, Any]]) -> None:
    """As much, in one all-reduce per chunk."""

    def sent(case: str) -> list[int]:
        return [size for _, size in ranks[0][case, "cpu", F64]["sent"]]

    inputs, size = LOSSES["loss in chunks"]().draw(), len(ranks)
    counts = takes_part(inputs)
    *chunks, of_hidden = sent("loss in chunks")
    assert sum(chunks) == 8 * 2 * size * int(counts.sum())
    assert len(chunks) == -(-int(counts.sum()) // 4) and of_hidden == inputs["hidden"].nbytes
    assert sum(sent("loss of all tokens")[:-1]) == 8 * 2 * size * counts.numel()
    # of both heads forward, and backward those of the hidden states and of A
    assert len(sent("reference head in low memory")) == 4


def test_the_weight_gradient_is_added_to_a_tensor(ranks: list[dict[Any, Any]]) -> None:
    op = ALL["loss in chunks"]()
    want = run(op, op.draw(), "cpu", F64)["d_weight"]
    torch.testing.assert_close(torch.cat([rank["weight_grad"] for rank in ranks]), want, rtol=1e-9, atol=1e-11)


def test_chunks_are_those_of_the_largest_part(ranks: list[dict[Any, Any]]) -> None:
    """Otherwise the ranks would wait for each other in different all-reduces."""
    by_columns = [tokens_per_chunk(4096, 10**5 * n, "cpu", torch.float32) for n in (1, len(ranks), 2 * len(ranks))]
    assert [rank["sizes"] for rank in ranks] == [by_columns[1:]] * len(ranks)
    assert len(set(by_columns)) == 3


def test_a_target_that_is_no_column_of_one_rank(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        for which, message in rank["wrong"].items():
            op = "linear_policy_loss" if which == "loss" else "linear_logprobs"
            wanted = f"RuntimeError: {op}: targets must be columns of exactly one rank each, or -100"
            if which == "banned":
                wanted = "ValueError: linear_logprobs: targets must not be banned by the head, got 12 at [2]"
            assert message == wanted, which


@pytest.mark.parametrize("call", WHOLE)
def test_whole_dtensors_are_this_ranks_tensors(ranks: list[dict[Any, Any]], call: str) -> None:
    with cpu_threads(1):  # as the ranks have, with which products have other bits on some CPUs
        expected = in_one_process(call)
    for rank in ranks:
        assert rank["whole", call].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(rank["whole", call][name], value) and value.any(), name


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


def test_every_placement_is_whole_on_one_rank(alone: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    op = WHOLE["logprobs"]()
    inputs = op.draw()
    tensors = {name: distribute_tensor(inputs[name], alone, [Shard(0)]) for name in LEAVES}
    assert torch.equal(op.call(inputs | tensors, "cpu")["loss"], in_one_process("logprobs")["loss"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("features", "rule"), [("teacher", "with teacher, whose ids"), ("support", "with support")])
def test_a_split_head_and_a_teacher_or_a_support(features: str, rule: str) -> None:
    """The ids may be columns of any rank."""
    op = of_loss("grpo", features)
    inputs = op.draw()
    with pytest.raises(ValueError, match=f"^linear_policy_loss: head.vocab_start must be None {rule}"):
        op.call(inputs | {"vocab_start": 0}, "cpu")
