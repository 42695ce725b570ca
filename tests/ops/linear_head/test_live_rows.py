"""Products over live rows, against float64 and against the same products of the live blocks alone."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels.ops.linear_head import live_rows

kernels = pytest.importorskip("grpo_kernels.ops.linear_head.triton")

HALVES = (torch.bfloat16, torch.float16)
EDGES = (1, 63, 64, 65, 127, 128, 129, 257)
# Each edge as the number of rows, with others of columns and width.
SHAPES = [(EDGES[i], EDGES[(i + a) % 8], EDGES[(i + b) % 8]) for a, b in ((3, 5), (7, 2)) for i in range(8)]
# The number of terms of a chain never exceeds that of all terms; a GPU may truncate where others round.
UNIT = 2.0**-24 if not torch.cuda.is_available() else 2.0**-23


class Batch(NamedTuple):
    """Idle blocks hold NaN, as does the padding behind the rows of by_logits; other idle rows of it are 0."""

    by_logits: Tensor
    weight: Tensor
    hidden: Tensor
    is_live: Tensor


def some_live(rows: int, pattern: str) -> Tensor:
    block = torch.arange(rows) // kernels.BLOCK_ROWS
    return {
        "all": torch.ones(rows, dtype=torch.bool),
        "none": torch.zeros(rows, dtype=torch.bool),
        "last": torch.arange(rows) == rows - 1,
        "mixed": (torch.rand(rows) < 0.5) & (block % 2 == 0),
        "odd": (torch.rand(rows) < 0.5) & (block % 2 == 1),
    }[pattern]


def is_in_live_block(is_live: Tensor) -> Tensor:
    block = torch.arange(len(is_live), device=is_live.device) // kernels.BLOCK_ROWS
    return torch.isin(block, block[is_live])


def batch(shape: tuple[int, int, int], dtype: torch.dtype, pattern: str, device: torch.device, pad: int = 16) -> Batch:
    rows, columns, width = shape
    is_live = some_live(rows, pattern)
    by_logits = torch.full((rows, -(-columns // pad) * pad), torch.nan)
    by_logits[:, :columns] = torch.where(is_live[:, None], torch.randn(rows, columns), 0)
    hidden = torch.randn(rows, width)
    for values in (by_logits, hidden):
        values[~is_in_live_block(is_live)] = torch.nan
    values = (by_logits, torch.randn(columns, width), hidden)
    padded, weight, hidden = (value.to(device, dtype) for value in values)
    return Batch(padded[:, :columns], weight, hidden, is_live.to(device))


def assert_sums(got: Tensor, left: Tensor, right: Tensor, start: Tensor | float = 0.0) -> None:
    """Checks start + left @ right, summed in float32 in any order, with a last rounding to the dtype of the result."""
    gold = start + left.double() @ right.double()
    size = left.double().abs() @ right.double().abs() + abs(start)
    terms = left.shape[1] + 1
    summed = terms * UNIT / (1 - terms * UNIT) * size
    limits = torch.finfo(got.dtype)
    is_truncated = got.dtype == torch.bfloat16 and not got.is_cuda  # by Triton's interpreter
    last = limits.eps / (1 if is_truncated else 2) * (gold.abs() + summed) + limits.smallest_normal * limits.eps
    error = (got.double() - gold).abs()
    assert got.isfinite().all()
    assert (error <= summed + last).all(), f"off by {(error - summed - last).max():.3g} more than allowed"


def check(made: Batch, out: torch.dtype, add: bool) -> None:
    """Both products."""
    by_logits, weight, hidden, is_live = made
    result = torch.full_like(hidden, torch.nan, dtype=out)
    live_rows.to_hidden(by_logits, weight, is_live, result)
    assert (result[~is_live] == 0).all()
    assert_sums(result[is_live], by_logits[is_live], weight)

    start = torch.randn(weight.shape, device=weight.device).to(out)
    start[:1] = -0.0
    total = start.clone() if add else torch.full_like(start, torch.nan)
    live_rows.to_weight(by_logits, hidden, is_live, total, add)
    assert_sums(total, by_logits[is_live].t(), hidden[is_live], start.double() if add else 0.0)
    if add and not is_live.any():
        assert torch.equal(total.signbit(), start.signbit()) and torch.equal(total, start)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, several parts and groups, and more blocks than are listed at once, in small batches."""
    sizes = {"BLOCK_ROWS": 16, "_M": 32, "_N": 32, "_K": 16, "_ROWS": 8, "_GROUP": 2, "_BLOCKS_AT_ONCE": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(kernels, name, size)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_products_match_float64(shape: tuple[int, int, int], device: torch.device) -> None:
    for number, pattern in enumerate(("all", "mixed")):
        check(batch(shape, HALVES[number], pattern, device), torch.float32, add=number == 1)


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["all", "none", "last", "mixed", "odd"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_of_many_tiles(pattern: str, dtype: torch.dtype, device: torch.device, small_tiles: None) -> None:
    made = batch((81, 90, 70), dtype, pattern, device)
    for out, add in ((torch.float32, True), (dtype, False), (dtype, True)):
        check(made, out, add)


@pytest.mark.parametrize("pattern", ["none", "last"])
def test_blocks_of_the_real_size(pattern: str, device: torch.device) -> None:
    made = batch((193, 130, 40), torch.bfloat16, pattern, device)
    for out, add in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        check(made, out, add)


@pytest.mark.parametrize("pad", [1, 24, 32])
def test_rows_may_be_any_number_of_elements_apart(pad: int, device: torch.device, small_tiles: None) -> None:
    for columns in (40, 43):
        made = batch((70, columns, 20), torch.float16, "mixed", device, pad)
        check(made, torch.float32, add=True)
        # the last row ends where its memory does
        memory = made.by_logits.new_empty((69, made.by_logits.stride(0))).flatten()
        exact = torch.cat([memory, memory.new_empty(columns)]).as_strided(made.by_logits.shape, (len(memory) // 69, 1))
        check(made._replace(by_logits=exact.copy_(made.by_logits)), torch.float32, add=True)


def test_idle_rows_of_a_live_block_are_not_read_by_to_hidden(device: torch.device) -> None:
    by_logits, weight, hidden, is_live = batch((70, 80, 33), torch.bfloat16, "mixed", device)
    by_logits[~is_live] = torch.nan
    out = torch.full_like(hidden, torch.nan)
    live_rows.to_hidden(by_logits, weight, is_live, out)
    assert_sums(out[is_live], by_logits[is_live], weight)
    assert (out[~is_live] == 0).all()


def test_empty_products(device: torch.device) -> None:
    for rows, columns, width in ((0, 5, 3), (4, 0, 3), (4, 5, 0)):
        made = batch((rows, columns, width), torch.float16, "all", device)
        check(made, torch.float32, add=False)
        check(made, torch.float32, add=True)


def products(made: Batch) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(made.hidden), torch.full_like(made.weight, 0.5, dtype=torch.float32)
    live_rows.to_hidden(made.by_logits, made.weight, made.is_live, out)
    live_rows.to_weight(made.by_logits, made.hidden, made.is_live, total, True)
    return out[is_in_live_block(made.is_live)], total


@pytest.mark.parametrize("pattern", ["mixed", "odd", "last"])
def test_bits_do_not_depend_on_idle_blocks(pattern: str, device: torch.device, small_tiles: None) -> None:
    made = batch((130, 50, 40), torch.bfloat16, pattern, device)
    kept = is_in_live_block(made.is_live)
    alone = Batch(made.by_logits[kept], made.weight, made.hidden[kept], made.is_live[kept])
    for of_all, of_live in zip(products(made), products(alone), strict=True):
        assert torch.equal(of_all, of_live)


# The plan


def expected_parts(blocks: int, tiles_n: int, steps: int, sms: int, max_items: int) -> int:
    tiles = -(-blocks * kernels.BLOCK_ROWS // kernels._M) * tiles_n

    def cost(parts: int) -> int:
        writes = tiles * parts // 8 if parts > 1 else 0
        return -(-tiles * parts // sms) * -(-steps // parts) + writes

    allowed = [1, *(n for n in range(2, kernels._MAX_PARTS + 1) if tiles * n <= max_items)]
    return min(allowed, key=cost)


@pytest.mark.parametrize("pattern", ["all", "none", "last", "mixed", "odd"])
def test_the_plan_lists_live_blocks(pattern: str, device: torch.device, small_tiles: None) -> None:
    for rows in (1, 16, 17, 32, 33, 150):
        is_live = some_live(rows, pattern).to(device)
        block = torch.arange(rows, device=device) // kernels.BLOCK_ROWS
        for tiles_n, steps, sms, max_items in ((1, 9, 132, 528), (3, 100, 12, 40), (2, 1, 4, 16)):
            count, parts, *listed = kernels._plan(is_live, tiles_n, steps, sms, max_items).tolist()
            assert listed[:count] == block[is_live].unique().tolist()
            assert parts == expected_parts(count, tiles_n, steps, sms, max_items)


def test_few_live_rows_are_split_among_all_multiprocessors(device: torch.device) -> None:
    """One tile of 128 x 4,096 over a large vocabulary occupies 16 of the 132 of an H100."""
    is_live = torch.arange(1024, device=device) < 100
    count, parts, *_ = kernels._plan(is_live, 16, 151936 // 64, 132, 528).tolist()
    assert (count, parts) == (2, 8)


# On the host


class Recorder(TorchDispatchMode):
    """Names of the ops that the host calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Replaces the kernels, because the interpreter calls torch itself; their last constants by name."""
    launched: dict[str, dict[str, Any]] = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert all(isinstance(size, int) for size in grid)
            return lambda *args, **constants: launched.update({self.name: constants})

    for name in [name for name in vars(kernels) if name.endswith("_kernel")]:
        monkeypatch.setattr(kernels, name, Kernel(name))
    return launched


def test_the_host_calls_no_op_that_waits(without_launches: dict[str, dict[str, Any]]) -> None:
    """Whitelist: memory and zeros. An op that reads a tensor on the host would wait, and cannot be captured."""
    by_logits, weight, hidden, is_live = batch((70, 40, 20), torch.bfloat16, "mixed", torch.device("cpu"))
    out, total = torch.empty_like(hidden), torch.empty_like(weight)
    with Recorder() as called:
        kernels.to_hidden(by_logits, weight, is_live, out)
        kernels.to_weight(by_logits, hidden, is_live, total, False)
        kernels.to_weight(by_logits, hidden, is_live, total, True)
    assert called.names <= {"new_empty", "zero_", "view", "detach", "fill_"}
    assert len(without_launches) == 4


def test_padding_is_read_only_where_there_is_memory(without_launches: dict[str, dict[str, Any]]) -> None:
    """Loads that ignore the last columns are wider, but must end where the memory does."""
    for stride, elements, expected in ((48, 96, True), (48, 95, False), (41, 96, False)):
        by_logits = torch.empty(elements, dtype=torch.float16).as_strided((2, 41), (stride, 1))
        hidden, is_live = torch.empty(2, 8, dtype=torch.float16), torch.ones(2, dtype=torch.bool)
        kernels.to_weight(by_logits, hidden, is_live, torch.empty(41, 8), False)
        assert without_launches["to_weight_kernel"]["IS_PADDED"] == expected


def test_the_recorder_sees_waits() -> None:
    values = torch.arange(3)
    with Recorder() as called:
        values.sum().item()
        values.nonzero()
        values[values > 1]
    assert {"_local_scalar_dense", "nonzero"} <= called.names and called.names - {"new_empty", "zero_", "view"}


def test_ops_are_registered_as_torch_expects(device: torch.device) -> None:
    by_logits, weight, hidden, is_live = batch((70, 40, 20), torch.bfloat16, "all", device)
    out, total = torch.zeros_like(hidden), torch.zeros_like(weight)
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.grpo_kernels
    torch.library.opcheck(ops.live_rows_to_hidden_triton.default, (by_logits, weight, is_live, out), test_utils=checks)
    torch.library.opcheck(
        ops.live_rows_to_weight_triton.default, (by_logits, hidden, is_live, total, True), test_utils=checks
    )


def test_layouts_that_kernels_would_misread_are_refused(device: torch.device) -> None:
    by_logits, weight, hidden, is_live = batch((70, 40, 20), torch.bfloat16, "all", device, pad=1)
    out, total = torch.empty_like(hidden), torch.empty_like(weight)

    def refuse(start: str, *args: Any) -> None:
        call = live_rows.to_weight if len(args) == 5 else live_rows.to_hidden
        with pytest.raises(ValueError, match=re.escape(f"{call.__name__}: {start}")):
            call(*args)

    refuse("by_logits must be bfloat16 or float16", by_logits.float(), weight, is_live, out)
    refuse("by_logits must be", by_logits.t().contiguous().t(), weight, is_live, out)
    refuse("weight must be contiguous and torch.bfloat16, got torch.float16", by_logits, weight.half(), is_live, out)
    refuse("weight must be [40, *], got [41, 20]", by_logits, torch.cat([weight, weight[:1]]), is_live, out)
    refuse("out must be contiguous and torch.bfloat16 or torch.float32", by_logits, weight, is_live, out.half())
    refuse("out must be [70, 20], got [69, 20]", by_logits, weight, is_live, out[1:])
    refuse("hidden must be [70, *], got [69, 20]", by_logits, hidden[1:], is_live, total, False)
    refuse("total must be contiguous", by_logits, hidden, is_live, total.t().contiguous().t(), False)
    refuse("is_live must be contiguous bool [70], got torch.uint8", by_logits, weight, is_live.byte(), out)
    refuse("is_live must be contiguous bool [70], got", by_logits, weight, is_live[1:], out)
