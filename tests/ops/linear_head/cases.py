"""Batches of linear_logprobs with and without a support, and its definition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_within_budget
from tests.ops.linear_head import heads
from tests.ops.linear_head.heads import F64, IGNORED, OF_SUPPORT, SUPPORTS, leaves_of
from tests.ops.promises import Inputs, Op, Results, Same, run
from tests.rounding import Moves

NAMES = ("logprobs", "entropy")


def draw(shape: tuple[int, ...], *features: str, columns: int = 37, width: int = 6) -> Inputs:
    """A head and tokens with upstream gradients; larger logits than those of the losses."""
    inputs = heads.draw_head(shape, *features, columns=columns, width=width)
    inputs["weight"] *= 2
    return inputs | {f"by_{name}": heads.noise(*shape) for name in NAMES}


@st.composite
def batches(
    draw_: st.DrawFn, max_tokens: int = 24, max_columns: int = 40, support: bool | None = None, is_tiny: bool = True
) -> Inputs:
    """Tokens in 0 to 3 dimensions under a head with any options, some of them without a gradient.

    In float32 a result of few numbers may happen to be exact, so that it gives other orders of sums no budget: batches
    that are not tiny have at least 8 tokens and 16 columns.
    """
    torch.manual_seed(draw_(st.integers(0, 1000)))
    support = draw_(st.booleans()) if support is None else support
    least_tokens, least_columns, least_width = (1, 1, 1) if is_tiny else (8, 16, 4)
    count, columns = draw_(st.integers(least_tokens, max_tokens)), draw_(st.integers(least_columns, max_columns))
    shapes = ((count,), (2, -(-count // 2)), (-(-count // 3), 3), (2, 1, -(-count // 2)), () if is_tiny else (count, 1))
    shape = draw_(st.sampled_from(shapes))
    features = draw_(st.sets(st.sampled_from((*heads.HEADS, "ignored")))) - ({"lora"} if support else set())
    inputs = draw(shape, *features, columns=columns, width=draw_(st.integers(least_width, 9)))
    if "scaled" in features:
        others = {
            "softcap": (None, 3.0),
            "logit_scale": (0.5, 2.0),
            "temperature": (0.7, torch.rand(shape[:1]).double() + 0.5),
        }
        inputs |= {name: draw_(st.sampled_from(values)) for name, values in others.items()}
        inputs = {name: value for name, value in inputs.items() if value is not None}
    if draw_(st.integers(0, 9)) == 0:
        inputs["targets"][...] = IGNORED
    inputs["targets"] = inputs["targets"].to(draw_(st.sampled_from((torch.int64, torch.int32, torch.int16))))
    # A backward may add up logits in another order than the forward did: float32 leaves few digits of what a nearly
    # certain token lacks to 1.
    inputs["hidden"] *= draw_(st.sampled_from((1, 5, 1e-3) if is_tiny and "scaled" not in features else (1, 1e-3)))
    if draw_(st.booleans()):
        inputs["is_wide"] = True
    if draw_(st.booleans()):
        inputs |= {name: (torch.rand(shape) < 0.6) * inputs[name] for name in ("by_logprobs", "by_entropy")}
    inputs.pop(draw_(st.sampled_from(("none", "by_logprobs", "by_entropy"))), None)
    mask = torch.rand(shape) < 0.6
    ids = mask.flatten().nonzero()[:, 0]
    ids = ids[torch.randperm(len(ids))]
    inputs["positions"] = draw_(st.sampled_from((None, mask, ids, ids.int())))
    if not support:
        return inputs | {"chunk_size": draw_(st.sampled_from((None, 1, 3, 8, 100)))}
    kept = heads.draw_support(inputs, draw_(st.sampled_from((1, 3, columns))))["support"]
    kinds = st.sampled_from((torch.int64, torch.int32, torch.int16))
    return inputs | {"support": tuple(value.to(draw_(kinds)) for value in kept)}


def call(inputs: Inputs, backend: str | None) -> Results:
    """Log-probs, entropies if their upstream gradient is given, and the loss of both upstream gradients."""
    arguments = heads.arguments_of(inputs)
    upstream = {name: arguments.pop(f"by_{name}", None) for name in NAMES}
    results = gk.linear_logprobs(**arguments, return_entropy=upstream["entropy"] is not None, backend=backend)
    return with_loss(results._asdict(), upstream, inputs)


def with_loss(results: dict[str, Tensor | None], upstream: dict[str, Tensor | None], inputs: Inputs) -> Results:
    positions = inputs.get("positions")
    present = {name: result for name, result in results.items() if result is not None}
    terms = []
    for name, result in present.items():
        if (by := upstream[name]) is not None:
            is_picked = positions is not None and positions.dtype != torch.bool
            terms.append((result * (by.flatten()[positions] if is_picked else by.contiguous())).sum())
    return {"loss": sum(terms[1:], terms[0])} | present


def by_definition(inputs: Inputs) -> Results:
    """From whole logits."""
    targets, positions = inputs["targets"].long(), inputs.get("positions")
    counts = targets != IGNORED
    log_q = heads.distribution(inputs, counts)
    results = torch.stack([log_q.gather(1, targets.clamp(min=0).view(-1, 1))[:, 0], heads.entropy_of(log_q)])
    results = torch.where(counts.view(-1), results, 0).view(2, *targets.shape)
    if positions is not None and positions.dtype == torch.bool:
        results = torch.where(positions, results, 0)
    elif positions is not None:
        results = results.reshape(2, -1)[:, positions]
    upstream = {name: inputs.get(f"by_{name}") for name in NAMES}
    found: dict[str, Tensor | None] = dict(zip(NAMES, results, strict=True))
    if upstream["entropy"] is None:
        found["entropy"] = None
    return with_loss(found, upstream, inputs)


def op_of(inputs: Inputs, *frozen: str) -> Op:
    return Op(lambda: inputs, call, OF_SUPPORT if "support" in inputs else SUPPORTS, leaves_of(inputs, *frozen))


def defined(inputs: Inputs) -> Results:
    """The definition with its gradients."""
    return run(dataclasses.replace(op_of(inputs), call=lambda given, _: by_definition(given)), inputs, "reference", F64)


def assert_as_reference(inputs: Inputs, backend: str, dtype: torch.dtype, *frozen: str) -> Results:
    """Compares with the float64 reference."""
    inputs = heads.rounded(inputs, dtype)
    op = op_of(inputs, *frozen)
    got, working = (run(op, inputs, name, dtype) for name in (backend, "reference"))
    gold = run(op, inputs, "reference", F64)
    moves = Moves(lambda: run(op, inputs, "reference", F64), gold)
    assert got.keys() == gold.keys()
    for name in gold.keys() - {"loss"}:  # a sum of the others
        assert got[name].dtype == working[name].dtype
        assert_within_budget(got[name], working[name], gold[name], name, moves=moves)
    return got


# For test_promises.py


def of_a_mask(inputs: Inputs) -> Same:
    banned = torch.zeros(len(inputs["weight"]), dtype=torch.bool).index_fill(0, inputs["banned"], True)
    return Same([inputs | {"banned": banned}], lambda results: results[0], is_exact=True)


def unread(inputs: Inputs) -> dict[str, Tensor]:
    """Ignored tokens and those at other positions; with a support those that keep one id, and ids that none keeps."""
    is_unread = inputs["targets"] == IGNORED
    if "support" in inputs:
        ids, offsets = inputs["support"]
        is_unkept = torch.ones(len(inputs["weight"]), dtype=torch.bool).index_fill(0, ids, False)
        return {
            "hidden": is_unread | (offsets.diff() == 1).view(is_unread.shape),
            "weight": is_unkept,
            "bias": is_unkept,
        }
    if "positions" not in inputs:
        return {"hidden": is_unread}
    others = torch.ones(20, dtype=torch.bool).index_fill(0, inputs["positions"], False).view(4, 5)
    return {"hidden": is_unread | others, "targets": others}


def drawn(*features: str, columns: int = 37, width: int = 6, **others: object) -> Inputs:
    """20 tokens in 4 rows, some of them ignored, each with a temperature."""
    inputs = draw((4, 5), "ignored", "temperatures", *features, columns=columns, width=width) | others
    if "support" not in features:
        return inputs
    sizes = [place % 9 + 1 for place in range(20)]  # of every draw, as graphs are replayed with other values alone
    return inputs | heads.draw_support(inputs, 9, sizes)


def described(rewrites: dict[str, Callable[[Inputs], Same]], *features: str, **others: Any) -> Op:
    op = op_of(drawn(*features, **others))
    draw_again = functools.partial(drawn, *features, **others)
    is_any_order = op.supports is SUPPORTS
    changes: dict[str, Any] = {"rewrites": rewrites, "adds_in_any_order": is_any_order, "multiplies": True}
    return dataclasses.replace(op, draw=draw_again, ignored=unread, **changes)


TOKENS = {"micro-batches": heads.in_micro_batches}
OPTIONS = TOKENS | {"banned ids as a mask": of_a_mask}
EVERYTHING = ("bias", "lora", "scaled", "banned")
AT = torch.tensor([17, 3, 4, 11, 0, 6, 19])
OPS = {
    "linear_logprobs": described(TOKENS),
    "LMHead with all options": described(OPTIONS, *EVERYTHING, chunk_size=8),
    "linear_logprobs at positions": described({}, "bias", positions=AT),
    "linear_logprobs over a support": described(TOKENS, "bias", "scaled", "support", columns=101),
}
