"""The LM head in two and four processes: a vocabulary that is split between them, and DTensors, against one process.

Faults that this is for: a target, banned id, entropy or adapter that is counted from the wrong column; a shard whose
part is lost, or counts twice, in log-sum-exps, losses or gradients; ranks that get different bits; digits of nearly
certain tokens that the shards lose; an all-reduce too many, or that one rank alone waits in; chunks that differ between
ranks; a DTensor whose other rows are ignored.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.head import Shard
from grpo_kernels.ops.linear_head.sizes import tokens_per_chunk
from tests.communication import Communication
from tests.harness import assert_within_budget, cpu_threads, quick
from tests.ops.linear_head.cases import Problem, certain, digits_of, problem
from tests.ops.linear_head.heads import BF16, EXACT, F32, F64, IGNORED, KERNELS, LEAVES, NAN, assert_close
from tests.ops.linear_head.terms import takes_part
from tests.ops.promises import Inputs, Results, assert_same_bits, evaluated, run
from tests.rounding import Moves

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in EXACT,
    reason="needs gloo and the CPU kernels",
)
# Columns of each rank, by the number of ranks.
SHARES = {2: (12, 19), 4: (1, 5, 21, 4)}
TOKENS, COLUMNS = 14, 31
OWNED = "must be columns of exactly one rank each"
OF_COLUMNS = ("weight", "bias", "lora_b")
SPLIT = tuple(prefix + name for prefix in ("", "ref_", "teacher_") for name in OF_COLUMNS)


# Each with its features and options; of log-probs with changes of the batch.
EVERYTHING = "bias, gaps, ignored, lora, scaled, banned, policy_mask"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("logprobs, bias", {}),
    "chunks": ("logprobs, bias, temperatures", {"chunk_size": 3}),
    "adapter": ("logprobs, bias, lora", {"chunk_size": 4}),
    "adapter alone": ("logprobs, lora", {}),
    "banned": ("logprobs, bias, banned, scaled", {}),
    "a banned shard": ("logprobs", {"banned": torch.arange(30, 11, -1), "targets": torch.arange(14) % 12}),
    "positions": ("logprobs, bias", {"positions": torch.tensor([7, 0, 3, 12])}),
    "no tokens": ("logprobs, bias", {"positions": torch.zeros(0).long()}),
    "no entropy": ("logprobs, no entropy", {}),
    "default group": ("logprobs", {"process_group": None}),
    "a masked shard": ("logprobs", {"bias": torch.arange(31).double().masked_fill(torch.arange(31) >= 12, -math.inf)}),
    "a bad token": ("logprobs, bias", {}),
    "certain, here": ("certain", {"column": 5, "offset": 0.0}),
    "certain, there": ("certain", {"column": 20, "offset": 0.0}),
    "certain, far from 0": ("certain", {"column": 20, "offset": 40.0}),
}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss in chunks": ("dapo, bias, gaps", {"chunk_size": 4}),
    "loss in its own chunks": ("dapo, bias, packed", {}),
    "loss of all tokens": ("dapo, bias", {"chunk_size": 4, "compact": False}),
    "loss with entropy": ("entropy, temperatures, positions", {"chunk_size": 5}),
    "loss with everything": (f"sequence, {EVERYTHING}", {"chunk_size": 14}),
    "loss in low memory": (f"dapo, {EVERYTHING}", {"chunk_size": 4, "memory": "low"}),
    "loss with squares": ("sequence, banned, return_entropy", {"chunk_size": 14, "return_sum_pi_squared": True}),
    "reference head": ("dapo, ref_hidden, bias, banned", {"chunk_size": 4}),
    "reference head in low memory": ("dapo, ref_head, lora", {"chunk_size": 4, "memory": "low"}),
}
# Those of a teacher or of a support, whose ids are columns of any rank.
OF_IDS: dict[str, tuple[str, dict[str, Any]]] = {
    "teacher": ("distillation, bias, lora, scaled, banned, gaps, unused slots", {"chunk_size": 4}),
    "teacher in its own chunks": ("distillation, temperatures, teacher weights", {"teacher": {"tail": "ignore"}}),
    "teacher of all ids": ("distillation, bias", {"teacher": {"k": 31, "kind": "reverse_kl", "tail": "renormalise"}}),
    "teacher beside a loss": (f"sequence, {EVERYTHING}, teacher, unused slots", {"chunk_size": 14}),
    "teacher beside entropy": (
        "entropy, teacher, teacher mask, ignored, bias, temperatures",
        {"chunk_size": 5, "return_sum_pi_squared": True, "teacher": {"kind": "forward_kl"}},
    ),
    "teacher in low memory": (f"dapo, {EVERYTHING}, ref_head, teacher", {"chunk_size": 4, "memory": "low"}),
    "whole teacher": ("distillation, whole, bias, lora, scaled, banned, gaps", {"chunk_size": 4}),
    "whole teacher, forward": ("distillation, whole, bias, temperatures", {"teacher": {"kind": "forward_kl"}}),
    "whole teacher, reverse": ("distillation, whole, lora", {"chunk_size": 4, "teacher": {"kind": "reverse_kl"}}),
    "support": ("logprobs, ignored, bias, scaled, temperatures, banned, support", {}),
    "support at positions": ("logprobs, support, positions, zeros", {}),
    "support of a loss": (f"sequence, {EVERYTHING}, support, ref_hidden, teacher, return_entropy", {}),
}
# On every rank whole, as DTensors.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "whole log-probs": ("logprobs, lora", {}),
    "whole support": ("logprobs, bias, scaled, support", {}),
    "whole loss": ("dapo, bias, lora, ref_hidden", {}),
    "whole distillation": ("distillation, bias, lora", {}),
}
RUNS = [(case, "cpu", F64) for case in (*CASES, *LOSSES, *OF_IDS)]
RUNS += [(case, "reference", F64) for case in ("adapter", "banned", "a masked shard", "loss with everything")]
RUNS += [(case, "reference", F64) for case in ("teacher", "whole teacher", "support of a loss")]
RUNS += [(case, "cpu", F32) for case in CASES if case in ("plain", "chunks", "adapter") or "certain" in case]
RUNS += [(case, "cpu", F32) for case in ("teacher", "teacher beside a loss", "whole teacher", "support")]
RUNS += [(case, "triton", BF16) for case in ("loss of all tokens", "teacher", "support") if "triton" in KERNELS]


def drawn(case: str, **changes: Any) -> Problem:
    """Log-probs have targets at both ends of both shards, ignored ones, and tokens without a gradient."""
    torch.manual_seed(3)
    words, options = (CASES | LOSSES | OF_IDS | WHOLE)[case]
    of, *features = words.split(", ")
    if of == "certain":
        return certain(**options)
    if of != "logprobs" or case in OF_IDS or case in WHOLE:
        return problem(of, *features, **options).but(**changes)
    drawn = problem(of, *features, shape=(TOKENS,))
    if "banned" not in features:
        drawn.inputs["targets"][:4] = torch.tensor([0, 11, 12, 30])
    if case == "a masked shard":
        drawn.inputs["targets"] %= SHARES[2][0]
    if case == "a bad token":
        drawn.inputs["hidden"][2, 1] = NAN
    drawn.inputs["targets"][5::4] = IGNORED
    drawn.inputs["by_logprobs"][::5] = 0
    frozen = ("hidden", "weight") if case == "adapter alone" else ()
    return drawn.but(**options | changes)._replace(frozen=frozen)


# A rank


def of_rank(inputs: Inputs, rank: int) -> Inputs:
    shares = SHARES[dist.get_world_size()]
    first = sum(shares[:rank])
    split = {name: inputs[name][first : first + shares[rank]].clone() for name in SPLIT if name in inputs}
    where = {"process_group": dist.group.WORLD, "vocab_start": first}
    others = [prefix for prefix in ("ref_", "teacher_") if f"{prefix}bias" in inputs]
    of_others = {prefix + name: value for prefix in others for name, value in where.items()}
    return where | of_others | inputs | split


def sharded(case: str, backend: str, dtype: torch.dtype, rank: int) -> dict[str, Any]:
    whole = drawn(case)
    with Communication() as communication:
        results = run(whole.op, of_rank(whole.inputs, rank), backend, dtype)
    return results | {"sent": communication.take()}


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def wrong_targets(rank: int) -> dict[str, str]:
    def message(case: Problem, target: int = 12, **changes: Any) -> str:
        given = of_rank(case.inputs, rank) | changes
        if target != 12:
            given["targets"][given["targets"] == 12] = target
        return message_of(lambda: run(case.op, given, "cpu", F64))

    def taught(id: int) -> dict[str, Tensor]:
        ids = drawn("teacher").inputs["teacher_ids"].clone()
        ids[ids == 12] = id
        return {"teacher_ids": ids}

    def kept(id: int) -> dict[str, Any]:
        ids, offsets = drawn("support").inputs["support"]
        return {"support": (torch.where(ids == 12, id, ids), offsets)}

    beside = drawn("teacher beside entropy")
    # with "overlap" all shards begin at 0, so each target lies in all of them or in none
    return {str(target): message(drawn("plain"), target) for target in (-1, COLUMNS, -99)} | {
        "overlap": message(drawn("plain"), vocab_start=0),
        "banned": message(drawn("plain"), banned=torch.tensor([30, 12])),
        "loss": message(drawn("loss of all tokens"), vocab_start=0),
        "teacher's target": message(beside, targets=beside.inputs["targets"].index_fill(0, torch.tensor(0), -1)),
        "teacher": message(drawn("teacher"), **taught(COLUMNS)),
        "no id": message(drawn("teacher"), **taught(-2)),
        "support": message(drawn("support"), **kept(COLUMNS)),
    }


def squares(rank: int | None, of: str = "banned") -> Tensor:
    """Sums of squared probabilities, of one process or of the ranks."""
    case = drawn(of)
    inputs = case.inputs if rank is None else of_rank(case.inputs, rank)
    arguments = {name: inputs[name] for name in ("hidden", "targets", "support") if name in inputs}
    more = {name: inputs[name] for name in ("vocab_start", "process_group") if name in inputs}
    head = gk.LMHead(inputs["weight"], inputs.get("bias"), banned=inputs["banned"], **more)
    result = gk.linear_logprobs(**arguments, head=head, return_sum_pi_squared=True, backend="cpu")
    assert result.sum_pi_squared is not None
    return result.sum_pi_squared


def added_weight_gradient(rank: int) -> Tensor:
    case = drawn("loss in chunks")
    inputs = of_rank(case.inputs, rank)
    inputs["weight"].requires_grad_()
    inputs["weight_grad"] = torch.zeros_like(inputs["weight"])
    case.op.call(inputs, "cpu")["loss"].backward()
    return inputs["weight_grad"]


def chunk_sizes(rank: int) -> list[int]:
    """The last rank has ever more columns, the others as many as before."""
    size = dist.get_world_size()
    parts = [Shard("", None, rank, 10**5 * (n if rank == size - 1 else rank + 1)) for n in (size, 2 * size)]
    return [part.tokens_per_chunk(4096, torch.empty(0)) for part in parts]


# DTensors


def as_dtensors(call: str, mesh: Any, place: Any) -> Results:
    from torch.distributed.tensor import distribute_tensor

    case = drawn(call)
    names = [name for name in (*case.op.leaves, "ref_hidden") if name in case.inputs]
    given: Inputs = {name: distribute_tensor(case.inputs[name], mesh, [place]) for name in names}
    for name in case.op.leaves:
        given[name].requires_grad_()
    with Communication() as communication:
        results = evaluated(case.op, case.inputs | given, "cpu")
    assert communication.take() == []
    return {name: value.to_local() if name.startswith("d_") else value for name, value in results.items()}


def refused_dtensors(mesh: Any) -> dict[str, str]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    case = drawn("whole loss")
    inputs = case.inputs | {"weight_grad": torch.zeros(COLUMNS, 5, dtype=F64)}
    messages = {}
    for name in (*LEAVES, "ref_hidden", "targets", "weight_grad"):
        place = Replicate() if name in ("targets", "weight_grad") else Shard(0)
        changed = case.inputs | {name: distribute_tensor(inputs[name], mesh, [place])}
        messages[name] = message_of(lambda given=changed: case.op.call(given, "cpu"))  # type: ignore[misc]
    return messages


# Processes


def worker(rank: int, size: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate

    from grpo_kernels import backends

    backends.name_implementations()
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    found: dict[Any, Any] = {key: sharded(*key, rank) for key in RUNS}
    found |= {"wrong": wrong_targets(rank), "weight_grad": added_weight_gradient(rank), "sizes": chunk_sizes(rank)}
    found["squares"] = [squares(rank, of) for of in ("banned", "support")]
    mesh = init_device_mesh("cpu", (size,))
    found |= {call: as_dtensors(call, mesh, Replicate()) for call in WHOLE}
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
    whole, got = drawn(case), joined([rank[case, backend, dtype] for rank in ranks])
    gold, working = (whole.run("reference", kind) for kind in (F64, dtype))
    assert case == "no tokens" or all(value.any() for name, value in gold.items() if name != "loss")
    if dtype == F64:
        assert_close(got, gold, rtol=1e-10, atol=1e-12)
        return
    moves = Moves(lambda: whole.run("reference"), gold)
    for name, value in gold.items():
        assert got[name].dtype == working[name].dtype
        assert_within_budget(got[name], working[name], value, name, moves=moves)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("certain")])
def test_certain_tokens_keep_their_digits(ranks: list[dict[Any, Any]], case: str, dtype: torch.dtype) -> None:
    gold = digits_of(drawn(case))["logprobs"]
    for rank in ranks:
        got = rank[case, "cpu", dtype]["logprobs"].double()
        torch.testing.assert_close(got, gold, rtol=1e-5 if dtype == F32 else 1e-11, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_send(ranks: list[dict[Any, Any]], case: str) -> None:
    """Two numbers a token and rank, a third for the entropy, and the gradients of what all ranks have."""
    whole, count = drawn(case), len(ranks[0][case, "cpu", F64]["logprobs"])
    backward = {"hidden": count * whole.inputs["hidden"].shape[-1], "lora_a": 10}
    backward = [size for name, size in backward.items() if name in whole.op.leaves]
    each = 3 if "by_entropy" in whole.inputs else 2
    for rank in ranks:
        sent = rank[case, "cpu", F64]["sent"]
        assert [size for _, size in sent] == [8 * numbers for numbers in (each * len(ranks) * count, *backward)]
        assert {name for name, _ in sent} == {"allreduce"}


def test_what_the_ranks_of_a_loss_send(ranks: list[dict[Any, Any]]) -> None:
    """As much, in one all-reduce per chunk."""

    def sent(case: str) -> list[int]:
        return [size for _, size in ranks[0][case, "cpu", F64]["sent"]]

    inputs, size = drawn("loss in chunks").inputs, len(ranks)
    counts = takes_part(inputs)
    *chunks, of_hidden = sent("loss in chunks")
    assert sum(chunks) == 8 * 2 * size * int(counts.sum())
    assert len(chunks) == -(-int(counts.sum()) // 4) and of_hidden == inputs["hidden"].nbytes
    assert sum(sent("loss of all tokens")[:-1]) == 8 * 2 * size * counts.numel()
    # of both heads forward, and backward those of the hidden states and of A
    assert len(sent("reference head in low memory")) == 4


@pytest.mark.parametrize(
    ("case", "of_chunk", "others"),
    [
        ("teacher", 1, 2),  # of the hidden states and of A
        ("teacher beside a loss", 1, 2),
        ("whole teacher", 2, 3),  # once more for all divergences
        ("whole teacher, reverse", 2, 3),
        ("whole teacher, forward", 1, 3),  # once more for the largest part
    ],
)
def test_what_the_ranks_of_a_teacher_send(ranks: list[dict[Any, Any]], case: str, of_chunk: int, others: int) -> None:
    """At most one all-reduce per chunk, but where the gradient of a row waits for sums over all of it."""
    inputs = drawn(case).inputs
    size = inputs.get("chunk_size", inputs["hidden"][..., 0].numel())
    chunks = -(-int(takes_part(inputs).sum()) // size)
    assert len(ranks[0][case, "cpu", F64]["sent"]) == chunks * of_chunk + others


def test_what_the_ranks_of_a_support_send(ranks: list[dict[Any, Any]]) -> None:
    """Log-prob, log-sum-exp, entropy and count of ids of each token and rank, and the gradient of the hidden states."""
    inputs = drawn("support").inputs
    forward, backward = (size for _, size in ranks[0]["support", "cpu", F64]["sent"])
    assert forward == 8 * 4 * len(ranks) * inputs["targets"].numel() and backward == inputs["hidden"].nbytes


def test_the_weight_gradient_is_added_to_a_tensor(ranks: list[dict[Any, Any]]) -> None:
    want = drawn("loss in chunks").run("cpu")["d_weight"]
    torch.testing.assert_close(torch.cat([rank["weight_grad"] for rank in ranks]), want, rtol=1e-9, atol=1e-11)


def test_sums_of_squares_are_those_of_all_columns(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        for got, of in zip(rank["squares"], ("banned", "support"), strict=True):
            torch.testing.assert_close(got, squares(None, of), rtol=1e-11, atol=0)


def test_chunks_are_those_of_the_largest_part(ranks: list[dict[Any, Any]]) -> None:
    """Otherwise the ranks would wait for each other in different all-reduces."""
    by_columns = [tokens_per_chunk(4096, 10**5 * n, "cpu", torch.float32) for n in (1, len(ranks), 2 * len(ranks))]
    assert [rank["sizes"] for rank in ranks] == [by_columns[1:]] * len(ranks)
    assert len(set(by_columns)) == 3


OF_WRONG_IDS = {
    "banned": "ValueError: linear_logprobs: targets must not be banned by the head, got 12 at [2]",
    "teacher's target": f"RuntimeError: linear_policy_loss: teacher.ids and targets {OWNED}",
    "teacher": f"RuntimeError: linear_distillation_loss: teacher.ids and targets {OWNED}",
    "no id": "ValueError: linear_distillation_loss: teacher.ids must be at least 0, or -1, got -2 at [2, 2, 0]",
    "support": f"RuntimeError: linear_logprobs: support.token_ids {OWNED}",
}


def test_a_target_that_is_no_column_of_one_rank(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        for which, message in rank["wrong"].items():
            op = "linear_policy_loss" if which == "loss" else "linear_logprobs"
            wanted = f"RuntimeError: {op}: targets must be columns of exactly one rank each, or -100"
            assert message == OF_WRONG_IDS.get(which, wanted), which


@pytest.mark.parametrize("call", WHOLE)
def test_whole_dtensors_are_this_ranks_tensors(ranks: list[dict[Any, Any]], call: str) -> None:
    with cpu_threads(1):  # as the ranks have, with which products have other bits on some CPUs
        expected = drawn(call).run("cpu")
    for rank in ranks:
        assert_same_bits(rank[call], expected)


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
    from torch.distributed.tensor import Shard

    assert_same_bits(as_dtensors("whole log-probs", alone, Shard(0)), drawn("whole log-probs").run("cpu"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", OF_IDS)
def test_a_single_rank_has_all_columns(case: str) -> None:
    whole = drawn(case)
    others = {f"{prefix}vocab_start": 0 for prefix in ("ref_", "teacher_") if f"{prefix}bias" in whole.inputs}
    got = whole.run("cpu", vocab_start=0, **others)
    assert_close(got, whole.run("reference"), rtol=1e-10, atol=1e-12)
