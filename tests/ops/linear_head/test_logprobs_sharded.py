"""linear_logprobs with its vocabulary sharded over two processes, against one process with the full vocabulary."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import assert_within_budget, runnable_backends

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or "cpu" not in runnable_backends(SUPPORTS),
    reason="needs gloo and the CPU kernels",
)

F64 = torch.float64
SHARES = (12, 19)
ROWS, HIDDEN, VOCABULARY = 14, 5, sum(SHARES)
# Log-probs of the likeliest token, up to where float64 has four digits of 1 - p left.
CERTAIN = torch.tensor([1e-3, 1e-6, 1e-9, 1e-12], dtype=F64)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk_size": 3},
    "scaled": {"temperature": 0.7, "softcap": 6.0, "logit_scale": 0.8},
    "temperatures": {"temperature": torch.linspace(0.5, 2, ROWS, dtype=F64), "chunk_size": 4},
    "positions": {"positions": torch.tensor([7, 0, 3, 12])},
    "mask": {"positions": torch.arange(ROWS) % 3 == 0},
    "all ignored": {},
    "no rows": {},
    "no entropy": {"return_entropy": False},
    "no bias": {},
    "reference": {"backend": "reference"},
    "default group": {"process_group": None},
    "frozen hidden": {},
    "frozen weight": {},
    "without grad": {},
    "padded": {},
    "a masked shard": {},
    "a masked shard, reference": {"backend": "reference"},
    "a bad row": {},
    "certain, here": {},
    "certain, there": {},
    "certain, far from 0": {},
}
OF_FLOAT32 = ("plain", "scaled", "chunks", "certain, here", "certain, there", "certain, far from 0")
WRONG = (-1, VOCABULARY, -99)


def batch(case: str) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)
    arguments = {
        "hidden": torch.randn(ROWS, HIDDEN, generator=random, dtype=F64),
        "weight": 2 * torch.randn(VOCABULARY, HIDDEN, generator=random, dtype=F64),
        "bias": torch.randn(VOCABULARY, generator=random, dtype=F64),
        "targets": torch.randint(VOCABULARY, (ROWS,), generator=random),
    }
    arguments["targets"][:4] = torch.tensor([0, 11, 12, 30])  # the ends of both shards
    arguments["targets"][5::4] = -100
    if case == "all ignored":
        arguments["targets"][:] = -100
    if case == "no rows":
        arguments |= {"hidden": arguments["hidden"][:0], "targets": arguments["targets"][:0]}
    if case == "no bias":
        del arguments["bias"]
    if case == "padded":
        arguments["bias"][-4:] = -torch.inf
        arguments["targets"].clamp_(max=VOCABULARY - 5)
    if case.startswith("a masked shard"):
        arguments["bias"][SHARES[0] :] = -torch.inf
        arguments["targets"].clamp_(max=SHARES[0] - 1)
    if case == "a bad row":
        arguments["hidden"][2, 1] = torch.nan
    if case.startswith("certain"):
        arguments |= certain(5 if case == "certain, here" else 20, 40.0 if case == "certain, far from 0" else 0.0)
    return arguments


def certain(column: int, offset: float) -> dict[str, Tensor]:
    """One token has nearly all of the probability, as given by CERTAIN; the others share the rest equally."""
    rest = CERTAIN.log() - math.log(VOCABULARY - 1)
    weight = torch.zeros(VOCABULARY, 2, dtype=F64)
    weight[:, 0] = 1
    weight[column] = torch.tensor([0.0, 1.0])
    hidden = torch.stack([(rest + offset), torch.full_like(rest, offset)], 1).float().double()
    targets = torch.full((len(CERTAIN),), column)
    return {"hidden": hidden, "weight": weight, "bias": torch.zeros(VOCABULARY, dtype=F64), "targets": targets}


def run(case: str, dtype: torch.dtype, rank: int | None, reductions: list[int] | None = None) -> dict[str, Any]:
    """Results and gradients of a rank's shard (unsharded for None), and the number of reductions each way."""
    arguments = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch(case).items()}
    options = {"return_entropy": True, "backend": "kernel"} | CASES[case]
    options = {k: v.to(dtype) if k == "temperature" and isinstance(v, Tensor) else v for k, v in options.items()}
    first = 0
    if rank is not None:
        first = sum(SHARES[:rank])
        arguments |= {
            k: arguments[k][first : first + SHARES[rank]].clone() for k in ("weight", "bias") if k in arguments
        }
        options = {"vocab_start": first, "process_group": dist.group.WORLD} | options
    else:
        options.pop("process_group", None)
    frozen = ("hidden", "weight", "bias") if case == "without grad" else case.removeprefix("frozen ")
    leaves = {k: v.requires_grad_(v.is_floating_point() and k not in frozen) for k, v in arguments.items()}
    met = [] if reductions is None else reductions
    met.clear()
    logprobs, entropy = gk.linear_logprobs(**leaves, **options)
    result = {"logprobs": logprobs.detach(), "forward": len(met)}
    met.clear()
    random = torch.Generator().manual_seed(6)
    upstream = torch.randn(2, *logprobs.shape, generator=random, dtype=F64).to(dtype)
    upstream[:, ::5] = 0  # rows without a gradient
    total = (logprobs * upstream[0]).sum()
    if entropy is not None:
        result["entropy"] = entropy.detach()
        total = total + (entropy * upstream[1]).sum()
    if case == "a bad row":
        total = total.nan_to_num()  # a NaN total passes no gradient on
    if total.requires_grad:
        total.backward()
    result["backward"] = len(met)
    return result | {f"by {k}": leaf.grad for k, leaf in leaves.items() if leaf.grad is not None}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=len(SHARES), timeout=limit)
    reductions: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        reductions.append(1)
        return all_reduce(*args, **options)

    dist.all_reduce = counted
    result: dict[Any, Any] = {(case, F64): run(case, F64, rank, reductions) for case in CASES}
    result |= {(case, torch.float32): run(case, torch.float32, rank, reductions) for case in OF_FLOAT32}
    for target in WRONG:
        arguments, first = batch("plain"), sum(SHARES[:rank])
        arguments |= {k: arguments[k][first : first + SHARES[rank]] for k in ("weight", "bias")}
        arguments["targets"][3] = target
        try:
            gk.linear_logprobs(**arguments, vocab_start=first, process_group=dist.group.WORLD)
        except RuntimeError as error:
            result["error", target] = str(error)
    # both shards begin at 0, so each target lies in both of them or in neither
    try:
        gk.linear_logprobs(**arguments, vocab_start=0, process_group=dist.group.WORLD)
    except RuntimeError as error:
        result["error", "overlap"] = str(error)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """All cases of both ranks from one start of the processes, which takes longer than the cases."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=len(SHARES))
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(SHARES))]


def joined(found: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Joins the ranks' results as one process has them; replicated tensors must be identical on all ranks."""
    for name in ("logprobs", "entropy", "by hidden"):
        assert all((name in one) == (name in found[0]) for one in found)
        if name in found[0]:
            assert all(torch.equal(one[name].nan_to_num(7e7), found[0][name].nan_to_num(7e7)) for one in found), name
    shards = {name: torch.cat([one[name] for one in found]) for name in ("by weight", "by bias") if name in found[0]}
    return {name: value for name, value in found[0].items() if isinstance(value, Tensor)} | shards


@pytest.mark.parametrize("case", CASES)
def test_float64_is_what_one_process_gets(ranks: list[dict[Any, Any]], case: str) -> None:
    got, gold = joined([rank[case, F64] for rank in ranks]), run(case, F64, None)
    wanted = {name: value for name, value in gold.items() if isinstance(value, Tensor)}
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("case", OF_FLOAT32)
def test_float32_loses_no_more_than_torch_does(ranks: list[dict[Any, Any]], case: str) -> None:
    got = joined([rank[case, torch.float32] for rank in ranks])
    working, gold = run(case, torch.float32, None), run(case, F64, None)
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert_within_budget(value, working[name], gold[name], name)


def test_what_the_cases_are_for(ranks: list[dict[Any, Any]]) -> None:
    """Checks that no case passes by comparing empty or zero results."""
    plain = ranks[0]["plain", F64]
    ignored = batch("plain")["targets"] == -100
    assert not plain["logprobs"][ignored].any() and not plain["entropy"][ignored].any()
    assert not plain["by hidden"][ignored].any() and (plain["logprobs"][~ignored] < 0).all()
    for name in ("by hidden", "by weight", "by bias"):
        assert plain[name].any() and not ranks[0]["all ignored", F64][name].any()
    for case in ("chunks", "scaled", "temperatures"):
        is_same = torch.allclose(ranks[0][case, F64]["logprobs"], plain["logprobs"])
        assert is_same == (case == "chunks")
    assert "by hidden" not in ranks[0]["frozen hidden", F64] and "by weight" not in ranks[0]["frozen weight", F64]
    assert ranks[0]["a bad row", F64]["logprobs"].isnan().nonzero().tolist() == [[2]]


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("certain")])
def test_certain_tokens_keep_their_digits(ranks: list[dict[Any, Any]], case: str, dtype: torch.dtype) -> None:
    arguments = batch(case)
    gap = arguments["hidden"][:, 0] - arguments["hidden"][:, 1]  # the gap that rounding of the inputs leaves
    gold = -torch.log1p((VOCABULARY - 1) * gap.exp())
    for rank in ranks:
        # in float64, the log-sum-exp is as large as the offset
        rtol = 1e-5 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(rank[case, dtype]["logprobs"].double(), gold, rtol=rtol, atol=0)
    assert (gold < 0).all() and gold[-1] > -2e-12


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_meet_once_each_way(ranks: list[dict[Any, Any]], case: str) -> None:
    for rank in ranks:
        assert rank[case, F64]["forward"] == 1
        assert rank[case, F64]["backward"] == (0 if case in ("frozen hidden", "without grad") else 1)


@pytest.mark.parametrize("which", [*WRONG, "overlap"], ids=str)
def test_a_target_that_is_no_column_of_one_rank(ranks: list[dict[Any, Any]], which: int | str) -> None:
    for rank in ranks:
        assert "linear_logprobs: targets must be columns of exactly one rank" in rank["error", which]
