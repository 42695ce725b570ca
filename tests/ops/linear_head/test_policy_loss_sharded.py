"""linear_policy_loss with its vocabulary split over two and four processes, against the whole head in one.

Faults that this is for: a normalizer, target, banned id or entropy of one rank alone; ranks that get different bits;
hidden states, or A of an adapter, whose gradient is a part; chunks that differ between ranks, which then wait for each
other; bytes that are communicated for nothing.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_kernels.ops.linear_head.head import Shard
from grpo_kernels.ops.linear_head.sizes import tokens_per_chunk
from tests.communication import Communication
from tests.harness import quick
from tests.ops.linear_head.distillation_cases import EXACT, assert_close
from tests.ops.linear_head.policy_loss_cases import Problem, problem, takes_part
from tests.ops.promises import Inputs, Results

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in EXACT,
    reason="needs gloo and the CPU kernels",
)
# Columns of each rank, by the number of ranks.
SHARES = {2: (28, 3), 4: (1, 5, 21, 4)}
SPLIT = ("weight", "bias", "lora_b", "ref_weight", "ref_bias", "ref_lora_b")
EVERYTHING = ("bias", "gaps", "ignored", "lora", "scaled", "banned", "policy_mask")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "chunks": ("dapo", ("bias", "gaps"), {"chunk_size": 4}),
    "its own chunks": ("dapo", ("bias", "packed"), {}),
    "all tokens": ("dapo", ("bias",), {"chunk_size": 4, "compact": False}),
    "entropy": ("entropy", ("temperatures", "positions"), {"chunk_size": 5}),
    "everything": ("sequence", EVERYTHING, {"chunk_size": 14}),
    "low memory": ("dapo", EVERYTHING, {"chunk_size": 4, "memory": "low"}),
    "rows longer than a chunk": ("sequence", ("shared",), {"chunk_size": 4}),
    "reference backend": ("dapo", EVERYTHING, {"backend": "reference"}),
    "reference head": ("dapo", ("ref_head", "bias"), {"chunk_size": 4}),
    "reference head in low memory": ("dapo", ("ref_hidden", "lora"), {"chunk_size": 4, "memory": "low"}),
}


def drawn(case: str) -> tuple[Problem, str]:
    torch.manual_seed(3)
    name, features, options = CASES[case]
    options = dict(options)
    backend = options.pop("backend", "kernel")
    return problem(name, *features, **options), backend


def part(inputs: Inputs, first: int, last: int) -> Inputs:
    own = {name: inputs[name][first:last].clone() for name in SPLIT if name in inputs}
    split = {"vocab_start": first, "process_group": dist.group.WORLD}
    if "ref_bias" in inputs:
        split |= {f"ref_{name}": value for name, value in split.items()}
    return inputs | own | split


def on_rank(case: str, first: int, last: int) -> Results:
    (whole, config), backend = drawn(case)
    own = Problem(part(whole, first, last), config)
    with Communication() as sent:
        results = own.run(backend)
    return results | {"bytes": torch.tensor([size for _, size in sent.calls])}


def added_weight_gradient(first: int, last: int) -> torch.Tensor:
    (whole, config), _ = drawn("chunks")
    inputs = part(whole, first, last)
    inputs["weight"].requires_grad_()
    inputs["weight_grad"] = torch.zeros_like(inputs["weight"])
    Problem(inputs, config).op.call(inputs, "kernel")["loss"].backward()
    return inputs["weight_grad"]


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    first = sum(SHARES[size][:rank])
    last = first + SHARES[size][rank]
    result: dict[str, Any] = {case: on_rank(case, first, last) for case in CASES}
    result["weight_grad"] = added_weight_gradient(first, last)
    # the last rank has ever more columns, the others as many as before
    for largest in (size, 2 * size):
        columns = 10**5 * (largest if rank == size - 1 else rank + 1)
        tokens = Shard(None, rank, columns).tokens_per_chunk(4096, torch.empty(0))
        result.setdefault("tokens of a chunk", []).append(tokens)
    (whole, config), _ = drawn("chunks")
    inputs = part(whole, first, last)
    inputs["targets"][takes_part(inputs)] = 31
    try:
        Problem(inputs, config).run("kernel")
    except RuntimeError as error:
        result["error"] = str(error)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=quick(SHARES, 2))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All cases of all ranks from one start of the processes."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (size, str(folder)), nprocs=size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    found, (whole, backend) = [rank[case] for rank in ranks], drawn(case)
    want, got = whole.run(backend), {}
    for name, value in want.items():
        parts = [one[name] for one in found]
        if name.removeprefix("d_") in SPLIT:
            got[name] = torch.cat(parts)
        else:
            got[name] = parts[0]
            assert all(torch.equal(one.nan_to_num(7e7), parts[0].nan_to_num(7e7)) for one in parts), name
        assert value.any(), name
    assert_close(got, want)


def test_the_weight_gradient_is_added_to_a_tensor(ranks: list[dict[str, Any]]) -> None:
    want = drawn("chunks")[0].run("cpu")["d_weight"]
    torch.testing.assert_close(torch.cat([rank["weight_grad"] for rank in ranks]), want, rtol=1e-9, atol=1e-11)


def test_bytes_that_are_communicated(ranks: list[dict[str, Any]]) -> None:
    """Three float64 a token and rank in one all-reduce per chunk, and the gradient of the hidden states."""
    (inputs, _), _ = drawn("chunks")
    counts, size = takes_part(inputs), len(ranks)
    *chunks, of_hidden = ranks[0]["chunks"]["bytes"].tolist()
    assert sum(chunks) == 8 * 3 * size * int(counts.sum())
    assert len(chunks) == -(-int(counts.sum()) // 4) and of_hidden == inputs["hidden"].nbytes
    assert sum(ranks[0]["all tokens"]["bytes"].tolist()[:-1]) == 8 * 3 * size * counts.numel()
    # of both heads forward, and backward those of the hidden states and of A
    assert len(ranks[0]["reference head in low memory"]["bytes"]) == 4


def test_chunks_are_those_of_the_largest_part(ranks: list[dict[str, Any]]) -> None:
    """Otherwise the ranks would wait for each other in different all-reduces."""
    by_columns = [tokens_per_chunk(4096, 10**5 * n, "cpu", torch.float32) for n in (1, len(ranks), 2 * len(ranks))]
    assert [rank["tokens of a chunk"] for rank in ranks] == [by_columns[1:]] * len(ranks)
    assert len(set(by_columns)) == 3


def test_a_target_that_is_no_column(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["error"] == "linear_policy_loss: targets must be columns of exactly one rank each, or -100"


def test_a_split_head_and_a_teacher_or_a_support(tmp_path: Path) -> None:
    """The ids may be columns of any rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for features, rule in (("teacher", "with teacher, whose ids"), ("support", "with support, got 0")):
            inputs, config = problem("grpo", features)
            with pytest.raises(ValueError, match=f"^linear_policy_loss: head.vocab_start must be None {rule}"):
                Problem(inputs | {"vocab_start": 0}, config).run("cpu")
    finally:
        dist.destroy_process_group()
