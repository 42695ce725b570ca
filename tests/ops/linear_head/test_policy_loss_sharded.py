"""linear_policy_loss with its vocabulary split over two and four processes, against the whole logits in one."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.head import Shard
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from grpo_kernels.ops.linear_head.sizes import rows_per_chunk
from tests.harness import assert_raises, quick, runnable_backends
from tests.ops.linear_head import test_policy_loss_edges as edges

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in runnable_backends(SUPPORTS),
    reason="needs gloo and the CPU kernels",
)

F64 = torch.float64
# Columns of each rank, by the number of ranks; together they are the vocabulary of the batch.
SHARES = {2: (edges.VOCABULARY - 3, 3), 4: (1, 5, edges.VOCABULARY - 10, 4)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("dapo", {"chunk_size": 4}),
    "its own chunks": ("dapo", {}),
    "all rows": ("dapo", {"chunk_size": 4, "compact": False}),
    "entropy": ("dapo", {"chunk_size": 5, "return_entropy": True}),
    "scaled": ("dapo", {"chunk_size": 4, "temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3}),
    "sequences": ("sequence", {"chunk_size": 2 * edges.WIDTH}),
    "masked": ("masked", {"chunk_size": 4}),
    "low memory": ("dapo", {"chunk_size": 4, "memory": "low"}),
    "reference backend": ("dapo", {"backend": "reference"}),
    "reference head": ("reference head", {"chunk_size": 4}),
    "weight_grad": ("dapo", {"chunk_size": 4}),
    "adapter": ("dapo", {"chunk_size": 4}),
    "adapter, low memory": ("dapo", {"chunk_size": 4, "memory": "low"}),
}


def config_of(name: str) -> gk.LossConfig:
    return edges.CONFIGS["dapo" if name == "reference head" else name]


def batch(case: str) -> dict[str, Any]:
    torch.manual_seed(3)
    name, options = CASES[case]
    arguments = edges.batch("dapo" if name == "reference head" else name)
    if name == "reference head":
        del arguments["ref_logprobs"]
        arguments["ref_hidden"] = torch.randn(*arguments["targets"].shape, 3, dtype=F64)
        arguments["ref_weight"] = torch.randn(edges.VOCABULARY, 3, dtype=F64)
    if "adapter" in case:
        arguments["lora_a"] = torch.randn(2, edges.HIDDEN, dtype=F64)
        arguments["lora_b"] = torch.randn(edges.VOCABULARY, 2, dtype=F64)
    return arguments | {key: value for key, value in options.items() if key in ("temperature", "softcap")}


def run(case: str, shard: tuple[int, int] | None, counts: list[int]) -> dict[str, Any]:
    """Loss, metrics and gradients of a rank with these columns, or of the whole vocabulary."""
    arguments, (name, options) = batch(case), CASES[case]
    options = {"backend": "kernel"} | options
    if shard is not None:
        first, last = shard
        own = {key: arguments.get(key) for key in ("weight", "bias", "ref_weight", "lora_b")}
        own = {key: value[first:last].clone() for key, value in own.items() if value is not None}
        arguments |= own
        options |= {"vocab_start": first, "process_group": dist.group.WORLD}
    adapter = {key: arguments.pop(key).requires_grad_() for key in ("lora_a", "lora_b") if key in arguments}
    if adapter:
        options["lora"] = (adapter["lora_a"], adapter["lora_b"], 0.7)
    leaves = edges.leaves_of(arguments)
    into = torch.zeros_like(leaves["weight"]) if case == "weight_grad" else None
    counts.clear()
    result = gk.linear_policy_loss(**arguments | leaves | options, config=config_of(name), weight_grad=into)
    result.loss.backward()
    gradients = {f"by {key}": leaf.grad for key, leaf in (leaves | adapter).items() if leaf.grad is not None}
    if into is not None:
        gradients["by weight"] = into
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor, "bytes": list(counts)} | gradients


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    counts: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        counts.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted
    first = sum(SHARES[size][:rank])
    shard = first, first + SHARES[size][rank]
    result: dict[str, Any] = {case: run(case, shard, counts) for case in CASES}
    # the last rank has ever more columns, the others as many as before
    for largest in (size, 2 * size):
        columns = 10**5 * (largest if rank == size - 1 else rank + 1)
        rows = Shard(None, rank, columns).rows_per_chunk(4096, torch.empty(0))
        result.setdefault("rows of a chunk", []).append(rows)
    arguments = batch("chunks")
    arguments |= {key: arguments[key][slice(*shard)] for key in ("weight", "bias")}
    arguments["targets"][0, 0] = edges.VOCABULARY
    try:
        gk.linear_policy_loss(**arguments | edges.leaves_of(arguments), vocab_start=first, config=config_of("dapo"))
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
def test_what_one_process_gets(ranks: list[dict[str, Any]], case: str) -> None:
    found = [rank[case] for rank in ranks]
    for name in ("loss", "metrics", "by hidden"):
        assert all(torch.equal(one[name].nan_to_num(7e7), found[0][name].nan_to_num(7e7)) for one in found), name
    got = {name: found[0][name] for name in ("loss", "metrics", "by hidden")}
    got |= {name: torch.cat([one[name] for one in found]) for name in ("by weight", "by bias")}
    if "adapter" in case:
        assert all(torch.equal(one["by lora_a"], found[0]["by lora_a"]) for one in found)
        got["by lora_a"] = found[0]["by lora_a"]
        got["by lora_b"] = torch.cat([one["by lora_b"] for one in found])
    want = run(case, None, [])
    del want["bytes"]
    assert all(want[name].any() for name in want)
    edges.assert_close(got, want)


@pytest.mark.parametrize("case", ["chunks", "low memory"])
def test_that_is_what_whole_logits_give(case: str) -> None:
    got, expected = run(case, None, []), edges.naive(batch(case), config_of(CASES[case][0]))
    del got["bytes"]
    edges.assert_close(got, expected)


def test_bytes_that_are_communicated(ranks: list[dict[str, Any]]) -> None:
    """Three float64 a row and rank in one all-reduce per chunk, and the gradient of the hidden states."""
    arguments = batch("chunks")
    takes_part = arguments["mask"] & (arguments["targets"] != -100)
    rows, size = int(takes_part.sum()), len(ranks)
    *chunks, of_hidden = ranks[0]["chunks"]["bytes"]
    assert sum(chunks) == 8 * 3 * size * rows
    assert len(chunks) == -(-rows // 4) and of_hidden == arguments["hidden"].nbytes
    *chunks, _ = ranks[0]["all rows"]["bytes"]
    assert sum(chunks) == 8 * 3 * size * takes_part.numel()
    # forward and backward once each
    assert len(ranks[0]["low memory"]["bytes"]) == 2


def test_chunks_are_those_of_the_largest_part(ranks: list[dict[str, Any]]) -> None:
    """Otherwise the ranks would wait for each other in different all-reduces."""
    by_columns = [rows_per_chunk(4096, 10**5 * n, "cpu", torch.float32) for n in (1, len(ranks), 2 * len(ranks))]
    assert [rank["rows of a chunk"] for rank in ranks] == [by_columns[1:]] * len(ranks)
    assert len(set(by_columns)) == 3


def test_a_target_that_is_no_column(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["error"] == "linear_policy_loss: targets must be columns of exactly one rank each, or -100"


def test_errors() -> None:
    arguments = edges.batch()
    call = lambda **more: gk.linear_policy_loss(**arguments, **more)  # noqa: E731
    start = "linear_policy_loss: vocab_start must be"
    assert_raises(ValueError, f"{start} given with process_group", ["None"], lambda: call(process_group=object()))
    assert_raises(TypeError, f"{start} an int", ["'0'"], lambda: call(vocab_start="0"))
    offsets = torch.arange(arguments["targets"].numel() + 1)
    support = arguments["targets"].clamp(min=0).flatten(), offsets
    assert_raises(ValueError, f"{start} None with support", ["3"], lambda: call(vocab_start=3, support=support))
