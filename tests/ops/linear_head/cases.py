"""Heads, and batches of linear_logprobs with and without a support."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import logprobs_op, support_op
from tests.harness import assert_within_budget, runnable_backends
from tests.ops.promises import Inputs, Op, Results, Same, run

F32, F64 = torch.float32, torch.float64
NAN, INF, IGNORED = float("nan"), float("inf"), -100
SUPPORTS, OF_SUPPORT = logprobs_op.SUPPORTS, support_op.SUPPORTS
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
FAST = tuple(name for name in BACKENDS if name in ("cpu", "reference"))

LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b")
OPTIONS = ("bias", "softcap", "logit_scale", "banned", "vocab_start", "process_group")
OF_TOKENS = ("hidden", "targets", "temperature", "by_logprobs", "by_entropy", "positions")


def draw_head(
    columns: int = 37,
    width: int = 6,
    *,
    bias: bool = False,
    adapter: int = 0,
    banned: int = 0,
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> Inputs:
    """Tensors for head_of by name, in float64, with an adapter of this rank and this number of banned ids."""
    inputs: Inputs = {"weight": 2 * torch.randn(columns, width).double()}
    if bias:
        inputs["bias"] = torch.randn(columns).double()
    if adapter:
        inputs["lora_a"] = torch.randn(adapter, width).double()
        inputs["lora_b"] = torch.randn(columns, adapter).double()
        inputs["lora_scale"] = 0.7
    if banned:
        inputs["banned"] = torch.randperm(columns)[:banned]
    given = {"softcap": softcap, "logit_scale": logit_scale}
    return inputs | {name: value for name, value in given.items() if value is not None}


def head_of(inputs: Inputs) -> gk.LMHead | Tensor:
    """The head of these inputs; of one without options the weight alone. With "is_wide" an adapter is in float32."""
    options = {name: inputs[name] for name in OPTIONS if name in inputs}
    if "lora_a" in inputs:
        a, b = inputs["lora_a"], inputs["lora_b"]
        wide = torch.promote_types(inputs["weight"].dtype, F32) if "is_wide" in inputs else a.dtype
        options["lora"] = a.to(wide), b.to(wide), inputs["lora_scale"]
    return gk.LMHead(inputs["weight"], **options) if options else inputs["weight"]


def allowed_by(head: Inputs) -> Tensor:
    """Ids that are not banned."""
    allowed = torch.ones(len(head["weight"]), dtype=torch.bool)
    if "banned" in head:
        allowed[head["banned"]] = False
    return allowed.nonzero()[:, 0]


def draw_tokens(head: Inputs, *shape: int, ignored: float = 0.2) -> Inputs:
    """Hidden states, targets that the head does not ban, some of them ignored, and upstream gradients."""
    ids = allowed_by(head)
    targets = ids[torch.randint(len(ids), shape)]
    targets[torch.rand(shape) < ignored] = IGNORED
    return {
        "hidden": torch.randn(*shape, head["weight"].shape[1]).double(),
        "targets": targets,
        "by_logprobs": torch.randn(shape).double(),
        "by_entropy": torch.randn(shape).double(),
    }


def draw_support(inputs: Inputs, most: int, sizes: list[int] | None = None) -> Inputs:
    """1 to `most` ids in any order for each token, with its target; ignored tokens may keep none."""
    allowed, kept = allowed_by(inputs), []
    for place, target in enumerate(inputs["targets"].flatten().tolist()):
        least = 0 if target == IGNORED else 1
        size = int(torch.randint(least, min(most, len(allowed)) + 1, ())) if sizes is None else sizes[place]
        ids = allowed[torch.randperm(len(allowed))[:size]]
        if target != IGNORED and target not in ids.tolist():
            ids[size // 2] = target
        kept.append(ids)
    return {"token_ids": torch.cat([torch.zeros(0).long(), *kept]), "offsets": offsets_of(kept)}


def offsets_of(kept: list[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, kept)]).cumsum(0)


def kept_by(inputs: Inputs) -> list[Tensor]:
    """The ids of each token."""
    return list(inputs["token_ids"].long().tensor_split(inputs["offsets"][1:-1].long()))[: len(inputs["offsets"]) - 1]


@st.composite
def batches(
    draw: st.DrawFn, max_tokens: int = 24, max_columns: int = 40, support: bool | None = None, is_tiny: bool = True
) -> Inputs:
    """Tokens in 0 to 3 dimensions under a head with any options, some of them without a gradient.

    In float32 a result of few numbers may happen to be exact, so that it gives other orders of sums no budget: batches
    that are not tiny have at least 8 tokens and 16 columns.
    """
    torch.manual_seed(draw(st.integers(0, 1000)))
    support = draw(st.booleans()) if support is None else support
    columns = draw(st.integers(1 if is_tiny else 16, max_columns))
    options = {
        "bias": draw(st.booleans()),
        "adapter": 0 if support else draw(st.sampled_from((0, 0, 1, 3))),
        "banned": draw(st.sampled_from((0, 0, 1, columns // 2))) if columns > 1 else 0,
        "softcap": draw(st.sampled_from((None, None, 9.0, 3.0))),
        "logit_scale": draw(st.sampled_from((None, None, 0.5, 2.0))),
    }
    inputs = draw_head(columns, draw(st.integers(1 if is_tiny else 4, 9)), **options)
    count = draw(st.integers(1 if is_tiny else 8, max_tokens))
    shapes = ((count,), (2, -(-count // 2)), (-(-count // 3), 3), (2, 1, -(-count // 2)), () if is_tiny else (count, 1))
    shape = draw(st.sampled_from(shapes))
    inputs |= draw_tokens(inputs, *shape, ignored=draw(st.sampled_from((0.0, 0.2, 1.0))))
    inputs["targets"] = inputs["targets"].to(draw(st.sampled_from((torch.int64, torch.int32, torch.int16))))
    inputs["hidden"] *= draw(st.sampled_from((1, 1, 1e-3) if "softcap" in inputs else (1, 5, 1e-3)))
    if "lora_a" in inputs and draw(st.booleans()):
        inputs["is_wide"] = True
    if draw(st.booleans()):
        of_tokens = shape if draw(st.booleans()) else shape[:1]
        inputs["temperature"] = draw(st.sampled_from((0.7, torch.rand(of_tokens).double() + 0.5)))
    if draw(st.booleans()):
        inputs |= {name: (torch.rand(shape) < 0.6) * inputs[name] for name in ("by_logprobs", "by_entropy")}
    inputs.pop(draw(st.sampled_from(("none", "by_logprobs", "by_entropy"))), None)
    if support:
        kinds, kept = (
            (torch.int64, torch.int32, torch.int16),
            draw_support(inputs, draw(st.sampled_from((1, 3, columns)))),
        )
        kept = {name: value.to(draw(st.sampled_from(kinds))) for name, value in kept.items()}
        return inputs | places(draw, shape) | kept
    return inputs | places(draw, shape) | {"chunk_size": draw(st.sampled_from((None, 1, 3, 8, 100)))}


def places(draw: st.DrawFn, shape: tuple[int, ...]) -> Inputs:
    """Positions: none, a mask, or ids in any order."""
    mask = torch.rand(shape) < 0.6
    ids = mask.flatten().nonzero()[:, 0]
    ids = ids[torch.randperm(len(ids))]
    positions = draw(st.sampled_from((None, mask, ids, ids.int())))
    return {} if positions is None else {"positions": positions}


def call(inputs: Inputs, backend: str | None) -> Results:
    """Log-probs, entropies if their upstream gradient is given, and the loss of both upstream gradients."""
    positions = inputs.get("positions")
    logprobs, entropy = gk.linear_logprobs(
        inputs["hidden"],
        head_of(inputs),
        inputs["targets"],
        temperature=inputs.get("temperature", 1.0),
        positions=positions,
        support=(inputs["token_ids"], inputs["offsets"]) if "offsets" in inputs else None,
        return_entropy="by_entropy" in inputs,
        chunk_size=inputs.get("chunk_size"),
        backend=backend,
    )

    def summed(result: Tensor, upstream: Tensor) -> Tensor:
        if isinstance(positions, Tensor) and positions.dtype != torch.bool:
            upstream = upstream.flatten()[positions]
        return (result * upstream.contiguous()).sum()

    results = {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}
    terms = [summed(result, inputs[f"by_{name}"]) for name, result in results.items() if f"by_{name}" in inputs]
    return {"loss": sum(terms[1:], terms[0]), **results}


def op_of(inputs: Inputs, *frozen: str) -> Op:
    leaves = tuple(name for name in LEAVES if name in inputs and name not in frozen)
    return Op(lambda: inputs, call, OF_SUPPORT if "offsets" in inputs else SUPPORTS, leaves)


def rounded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Numbers that this dtype has, too, in float64."""

    def of(value: object) -> object:
        is_float = isinstance(value, Tensor) and value.dtype == F64
        return value.to(dtype).double() if is_float else value

    return {name: of(value) for name, value in inputs.items()}


def in_another_order(inputs: Inputs, op: Op, dtype: torch.dtype, order: Tensor) -> Results:
    """The reference's results where its products add up the width in another order."""
    wide = ("hidden", "weight", "lora_a")
    moved = {name: inputs[name][..., order] for name in wide if name in inputs}
    results = run(op, inputs | moved, "reference", dtype)
    return {name: value[..., order.argsort()] if name[2:] in wide else value for name, value in results.items()}


def assert_as_reference(inputs: Inputs, backend: str, dtype: torch.dtype, *frozen: str) -> Results:
    """Compares with the float64 reference.

    A kernel may add a product in another order than the reference does, so that in the working dtype the worst of three
    orders counts.
    """
    inputs, width = rounded(inputs, dtype), inputs["weight"].shape[1]
    op = op_of(inputs, *frozen)
    got, gold = run(op, inputs, backend, dtype), run(op, inputs, "reference", F64)
    orders = [torch.arange(width), torch.arange(width).flip(0), torch.arange(width).roll(width // 2)]
    runs = [in_another_order(inputs, op, dtype, order) for order in orders]
    assert got.keys() == gold.keys()
    for name, value in gold.items():
        if name == "loss" or value.numel() == 0:
            continue  # a sum of the others
        working = max((each[name] for each in runs), key=lambda result, of=value: float((result - of).abs().max()))
        assert got[name].dtype == working.dtype
        assert_within_budget(got[name], working, value, name)
    return got


def assert_equal_in_float64(got: Results, expected: Results) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        size = float(value.abs().sum())
        torch.testing.assert_close(
            got[name], value, rtol=1e-10, atol=1e-12 * (1 + size), msg=lambda text, of=name: f"{of}: {text}"
        )


# For test_promises.py


def draw(tokens: Callable[[Inputs], Inputs] = lambda head: {}, **options: object) -> Inputs:
    """20 tokens in 4 rows, each with a temperature; `tokens` are further inputs."""
    head = draw_head(**options)  # type: ignore[arg-type]
    inputs = head | draw_tokens(head, 4, 5)
    inputs["targets"][1, 2] = IGNORED
    inputs["temperature"] = torch.rand(4, 5).double() + 0.5
    return inputs | tokens(inputs)


def taken(inputs: Inputs, places: Tensor) -> Inputs:
    """The batch of only these tokens, in one row."""

    def of(name: str) -> Tensor:
        value: Tensor = inputs[name]
        return value.flatten(0, -2 if name == "hidden" else -1)[places]

    tokens = {name: of(name) for name in OF_TOKENS if name in inputs}
    if "offsets" in inputs:
        kept = kept_by(inputs)
        kept = [kept[place] for place in places.tolist()]
        tokens |= {"token_ids": torch.cat(kept), "offsets": offsets_of(kept)}
    return inputs | tokens


def in_calls(inputs: Inputs, parts: list[Tensor]) -> Same:
    """A call for each of these parts of the tokens."""
    shape, places = inputs["targets"].shape, torch.cat(parts)

    def joined(results: list[Results]) -> Results:
        def of(name: str) -> Tensor:
            values = [result[name] for result in results]
            if name not in ("logprobs", "entropy", "d_hidden"):
                return torch.stack(values).sum(0)
            whole = torch.cat(values)
            return whole.index_copy(0, places, whole).view(*shape, *whole.shape[1:])

        return {name: of(name) for name in results[0] if name != "loss"}  # a sum of the others, in another order

    return Same([taken(inputs, part) for part in parts], joined)


def permuted(inputs: Inputs) -> Same:
    return in_calls(inputs, [torch.randperm(20)])


def in_micro_batches(inputs: Inputs) -> Same:
    return in_calls(inputs, list(torch.arange(20).split(5)))


def with_changes(inputs: Inputs, is_exact: bool = False, **changes: object) -> Same:
    return Same([inputs | changes], lambda results: results[0], is_exact)


def in_chunks(inputs: Inputs) -> Same:
    return with_changes(inputs, chunk_size=3)


def of_a_mask(inputs: Inputs) -> Same:
    banned = torch.zeros(len(inputs["weight"]), dtype=torch.bool).index_fill(0, inputs["banned"], True)
    return with_changes(inputs, is_exact=True, banned=banned)


def merged(inputs: Inputs) -> Same:
    """The adapter added to the weight."""
    weight = inputs["weight"] + inputs["lora_scale"] * inputs["lora_b"] @ inputs["lora_a"]

    def without_adapter(results: list[Results]) -> Results:
        return {name: value for name, value in results[0].items() if "lora" not in name}

    still = {name: 0 * inputs[name] for name in ("lora_a", "lora_b")}
    return Same([inputs | {"weight": weight} | still], without_adapter)


def other_order(inputs: Inputs) -> Same:
    """The ids of each token in ascending order."""
    kept = [ids.sort().values for ids in kept_by(inputs)]
    return with_changes(inputs, token_ids=torch.cat(kept))


def mask_of(inputs: Inputs) -> Same:
    mask = torch.zeros(20, dtype=torch.bool).index_fill(0, inputs["positions"], True).view(4, 5)

    def at_positions(results: list[Results]) -> Results:
        return {
            name: v.flatten()[inputs["positions"]] if v.shape == mask.shape else v for name, v in results[0].items()
        }

    return Same([inputs | {"positions": mask}], at_positions)


def unread(inputs: Inputs) -> dict[str, Tensor]:
    """Ignored tokens and those at other positions; with a support those that keep one id, and ids that none keeps."""
    is_unread = inputs["targets"] == IGNORED
    if "offsets" in inputs:
        is_unread = is_unread | (inputs["offsets"].diff() == 1).view(is_unread.shape)
        is_unkept = torch.ones(len(inputs["weight"]), dtype=torch.bool).index_fill(0, inputs["token_ids"], False)
        return {"hidden": is_unread, "weight": is_unkept, "bias": is_unkept}
    if "positions" not in inputs:
        return {"hidden": is_unread}
    others = torch.ones(20, dtype=torch.bool).index_fill(0, inputs["positions"], False).view(4, 5)
    return {"hidden": is_unread | others, "targets": others}


TOKENS = {"permuted tokens": permuted, "micro-batches": in_micro_batches}
EVERYTHING = {"bias": True, "adapter": 2, "banned": 5, "softcap": 9.0, "logit_scale": 0.5}
OPS = {
    "linear_logprobs": Op(
        draw, call, SUPPORTS, ("hidden", "weight"), unread, {**TOKENS, "chunks": in_chunks}, adds_in_any_order=True
    ),
    "LMHead with all options": Op(
        functools.partial(draw, lambda head: {"chunk_size": 8}, **EVERYTHING),
        call,
        SUPPORTS,
        LEAVES,
        unread,
        {**TOKENS, "chunks": in_chunks, "banned ids as a mask": of_a_mask, "a merged adapter": merged},
        adds_in_any_order=True,
    ),
    "linear_logprobs at positions": Op(
        functools.partial(draw, lambda head: {"positions": torch.tensor([17, 3, 4, 11, 0, 6, 19])}, bias=True),
        call,
        SUPPORTS,
        LEAVES[:3],
        unread,
        {"a mask": mask_of},
        adds_in_any_order=True,
    ),
    "linear_logprobs over a support": Op(
        functools.partial(draw, functools.partial(draw_support, most=9), columns=101, bias=True, softcap=9.0),
        call,
        OF_SUPPORT,
        LEAVES[:3],
        unread,
        {**TOKENS, "another order of ids": other_order},
    ),
}
