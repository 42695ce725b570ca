"""Which products the ops compute, of how many tokens, and in how much memory.

Faults that this is for: a product of tokens that do not count, or have no gradient; one for a factor that is frozen, or
where no backward can ask for it; a fourth product, where three suffice; logits of more than a chunk; a second tile;
one of the weight's size for an adapter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import needs_cpu_kernels
from tests.ops.linear_head.cases import Problem, problem
from tests.ops.linear_head.heads import F64, assert_close
from tests.ops.linear_head.terms import takes_part

pytestmark = needs_cpu_kernels
COLUMNS, WIDTH = 31, 5  # of the head
both_memories = pytest.mark.parametrize("memory", ["fast", "low"])


class Products(TorchDispatchMode):
    """Notes the tokens of every product, and every storage of at least `least` elements."""

    def __init__(self, least: int = 2**62) -> None:
        super().__init__()
        self.least = least
        self.logits: list[int] = []
        self.by_hidden: list[int] = []
        self.by_weight: list[int] = []
        self.storages: dict[int, Tensor] = {}  # kept, so that no other has the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = [value for value in args if isinstance(value, Tensor)][-2:]
            of_shape = {(WIDTH, COLUMNS): self.logits, (COLUMNS, WIDTH): self.by_hidden}
            if len(a) == COLUMNS and b.shape[1] == WIDTH:
                self.by_weight.append(len(b))
            elif b.shape in of_shape:
                of_shape[b.shape].append(len(a))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() >= self.least * 8:
                self.storages.setdefault(value.untyped_storage().data_ptr(), value)
        return result


def products(case: Problem, least: int = 2**62, **changes: Any) -> Products:
    with Products(least) as counts:
        case.run("cpu", **changes)
    return counts


def without_advantage(*features: str, by_token: bool = False, **options: Any) -> Problem:
    """Half of the rows have none; old log-probs are so low that no token with one is clipped."""
    case = problem("grpo", "gaps", "ignored", *features, **options)
    inputs, shape = case.inputs, case.inputs["mask"].shape
    inputs["mask"][1:3] = True
    inputs["advantages"] = -torch.ones(shape if by_token else shape[:1], dtype=F64)
    inputs["advantages"][1::2] = 0
    inputs["old_logprobs"][:] = -20.0
    return case


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("live", [28, 9, 0])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)], ids=str)
def test_log_probs_take_one_product_forward_and_three_backward(
    frozen: tuple[str, ...], live: int, has_adapter: bool
) -> None:
    """Backward one for the logits, hidden states and weight each, of the tokens with a gradient."""
    case = problem("logprobs", "bias", *(("lora",) if has_adapter else ()), chunk_size=10)._replace(frozen=frozen)
    counts = (torch.arange(28) < live).view(4, 7)
    found = products(case.but(**{name: case.inputs[name] * counts for name in ("by_logprobs", "by_entropy")}))
    assert sum(found.logits) == 28 + live
    assert sum(found.by_hidden) == live * ("hidden" not in frozen)
    assert sum(found.by_weight) == live * ("weight" not in frozen)


@pytest.mark.parametrize("by_token", [False, True])
@both_memories
def test_tokens_that_do_not_count_or_have_no_gradient_are_left_out(memory: str, by_token: bool) -> None:
    case = without_advantage(by_token=by_token, memory=memory)
    counts = takes_part(case.inputs)
    count, live = int(counts.sum()), int(counts[::2].sum())
    found = products(case, chunk_size=9)
    assert sum(found.logits) == count + (live if memory == "low" else 0)
    assert sum(found.by_hidden) == sum(found.by_weight) == live < count < counts.numel()
    found = products(case, chunk_size=9, compact=False)
    assert sum(found.by_hidden) == sum(found.by_weight) <= counts.numel() - counts[1::2].numel() + 7
    assert sum(found.logits) == counts.numel() + (sum(found.by_hidden) if memory == "low" else 0)


def test_clipped_tokens_are_left_out_of_two_products() -> None:
    case = without_advantage("temperatures")
    case.inputs["advantages"][:] = 1.0
    case.inputs["old_logprobs"][:2] = -50.0  # ratios above the bound
    case.inputs["old_logprobs"][2:] = 0.0
    found, counts = products(case, chunk_size=100), takes_part(case.inputs)
    assert found.logits == [int(counts.sum())] and found.by_hidden == found.by_weight == [int(counts[2:].sum())]
    assert_close(case.run("cpu", chunk_size=100), case.defined())


def test_taught_tokens_are_not_left_out() -> None:
    """Tokens with neither an advantage nor a teacher are in one product only; all losses share the products."""
    case = without_advantage("teacher", memory="fast")
    mask = torch.zeros(case.inputs["mask"].shape)
    mask[1, :3] = 1
    counts = takes_part(case.inputs)
    taught = counts[::2].sum() + (counts[1] & (mask[1] > 0)).sum()
    found = products(case, chunk_size=100, teacher_mask=mask)
    assert found.logits == [int(counts.sum() - taught), int(taught)] and found.by_hidden == [int(taught)]
    assert products(case, chunk_size=8, compact=False).logits == [8, 8, 8, 4]


@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("chunk_size", [1, 6, 7, 10, 100])
@pytest.mark.parametrize("form", ["gaps", "packed"])
@pytest.mark.parametrize("name", ["sequence", "sequence token", "segment", "vespo", "geo_mean"])
def test_only_rows_that_are_longer_than_a_chunk_are_computed_twice(
    name: str, form: str, chunk_size: int, compact: bool | None
) -> None:
    case = problem(name, form)
    counts, bounds = takes_part(case.inputs), case.inputs.get("cu_seqlens")
    computed = counts if compact is None else torch.ones_like(counts)
    rows = torch.arange(4)[:, None].expand(4, 7)
    if bounds is not None:  # tokens after the last row count as part of it
        rows = torch.searchsorted(bounds[1:-1].contiguous(), torch.arange(len(counts)), right=True)
    found, longest = products(case, chunk_size=chunk_size, compact=compact), torch.bincount(rows[computed]).max()
    is_fast = chunk_size >= min(longest, computed.sum())
    assert sum(found.logits) == computed.sum() + (0 if is_fast else sum(found.by_hidden))
    assert max(found.logits) <= chunk_size


@both_memories
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_nothing_is_computed_for_what_is_frozen_or_without_gradients(frozen: str, memory: str) -> None:
    case = problem("grpo", "bias", "teacher", memory=memory)
    found = products(case._replace(frozen=(frozen,)))
    assert bool(found.by_hidden) == (frozen != "hidden") and bool(found.by_weight) == (frozen != "weight")
    with torch.no_grad(), Products() as found:
        case.op.call(case.inputs, "cpu")
    assert found.logits and not found.by_hidden and not found.by_weight


@pytest.mark.pairs
@both_memories
@pytest.mark.parametrize("features", [(), ("ref_hidden",), ("teacher",), ("gaps", "packed"), ("lora",)], ids=str)
def test_one_chunk_of_logits_is_in_memory(features: tuple[str, ...], memory: str) -> None:
    """One tile, which both heads share where the gradient is computed with the loss."""
    case = problem("dapo", *features, rows=60, memory=memory)
    chunk = 80  # of 420 tokens; its logits are more than any tensor of all tokens, or of the weight's size
    found = products(case, least=chunk * COLUMNS, chunk_size=chunk)
    sizes = [value.untyped_storage().nbytes() // 8 for value in found.storages.values()]
    sizes = [size for size in sizes if size != case.inputs["hidden"].numel()]
    tiles = [size for size in sizes if size >= chunk * COLUMNS]
    assert tiles and max(tiles) <= (chunk + 1) * (COLUMNS + 16)
    if memory == "fast":
        assert len(tiles) == 1
