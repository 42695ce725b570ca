"""Edge cases of linear_policy_loss: layouts, chunks, tokens left out, micro-batches, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import registration as op
from grpo_kernels.ops.linear_head.chunks import Products
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.policy_loss.config import METRICS
from tests.harness import device_of, needs_cpu_kernels, runnable_backends

BACKENDS = runnable_backends(op.SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
pytestmark = needs_cpu_kernels
F64, NAN, INF = torch.float64, math.nan, math.inf
ROWS, WIDTH, HIDDEN, VOCABULARY = 4, 7, 5, 31
PER_TOKEN = ("old_logprobs", "ref_logprobs", "segments", "mask", "policy_mask", "targets")
# Configs whose gradient of a token depends on the token alone, on its row, on its segment or on the whole batch.
CONFIGS: dict[str, gk.LossConfig] = {
    "grpo": gk.LossConfig.of("grpo"),
    "dapo": gk.LossConfig.trl(loss_type="dapo", beta=0.05, epsilon_high=0.28),
    "cispo": gk.LossConfig(loss="cispo", kl="k2", kl_coef=0.1, aggregation="seq-mean-token-mean"),
    "entropy": gk.LossConfig(entropy_coef=0.1, dual_clip=3.0, aggregation="seq-mean-token-sum"),
    "sequence": gk.LossConfig(ratio="sequence", kl="k3", kl_coef=0.1),
    "sequence token": gk.LossConfig(ratio="sequence_token", aggregation="seq-mean-token-mean"),
    "segment": gk.LossConfig(ratio="segment"),
    "vespo": gk.LossConfig(loss="vespo"),
    "geo_mean": gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum"),
    "dro": gk.LossConfig(loss="dro", dro_beta=0.3),
    "masked": gk.LossConfig(kl="k3", kl_coef=0.1, aggregation="seq-mean-token-mean"),
}
OF_ROWS = ("sequence", "sequence token", "segment", "vespo", "geo_mean")


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def batch(name: str = "grpo", rows: int = ROWS) -> dict[str, Any]:
    """A padded batch with the arguments that the config reads; rows differ in length, and one target is ignored."""
    lengths = torch.tensor([WIDTH, 3, 5, 1])[torch.arange(rows) % 4]
    arguments: dict[str, Any] = {
        "hidden": noise(rows, WIDTH, HIDDEN),
        "weight": noise(VOCABULARY, HIDDEN),
        "bias": noise(VOCABULARY),
        "targets": torch.randint(VOCABULARY, (rows, WIDTH)),
        "old_logprobs": -3 - noise(rows, WIDTH).abs(),
        "advantages": noise(rows),
        "mask": torch.arange(WIDTH) < lengths[:, None],
    }
    arguments["targets"][0, 2] = -100
    config, old = CONFIGS[name], arguments["old_logprobs"]
    if config.kl != "none":
        arguments["ref_logprobs"] = old + 0.1 * noise(rows, WIDTH)
    if name == "masked":
        arguments |= {"is_weights": noise(rows).abs(), "policy_mask": noise(rows, WIDTH) < 0.3}
    if name == "segment":
        arguments["segments"] = (torch.arange(WIDTH) // 3).repeat(rows, 1)
    return arguments


def leaves_of(given: dict[str, Any], frozen: str = "") -> dict[str, Tensor]:
    names = [name for name in ("hidden", "weight", "bias") if given.get(name) is not None]
    return {name: given[name].detach().clone().requires_grad_(name != frozen) for name in names}


def run(given: dict[str, Any], backend: str = "cpu", scale: float = 1.0, frozen: str = "", **options: Any) -> Any:
    """The loss, the metrics, and the gradients of hidden states, weight and bias."""
    device = device_of(backend)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in (given | options).items()}
    leaves = leaves_of(given, frozen)
    result = gk.linear_policy_loss(**given | leaves, backend=backend)
    (result.loss * scale).backward()
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor} | gradients


def naive(given: dict[str, Any], config: gk.LossConfig, **options: Any) -> Any:
    """policy_loss on the token_logprobs of the full logits."""
    given = given | options
    leaves = leaves_of(given)
    mask = given["targets"] != -100
    if given.get("mask") is not None:
        mask &= given["mask"]
    logits = torch.nn.functional.linear(*leaves.values())
    results = gk.token_logprobs(logits, given["targets"].clamp(min=0), return_entropy=True)
    of_policy = {k: v for k, v in given.items() if k not in ("targets", "mask", "return_entropy", *leaves)}
    has_entropy = config.entropy_coef != 0 or given.get("return_entropy")
    of_policy |= {"mask": mask, "entropy": results.entropy if has_entropy else None, "config": config}
    result = gk.policy_loss(results.logprobs, **of_policy)
    result.loss.backward()
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items()}
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor} | gradients


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].nan_to_num(7e7), value.nan_to_num(7e7)), name


# Parity with the full logits


@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("chunk_size", [None, 8])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CONFIGS)
def test_is_the_policy_loss_of_the_log_probs(
    name: str, memory: str, chunk_size: int | None, compact: bool | None
) -> None:
    arguments, config = batch(name), CONFIGS[name]
    got = run(arguments, config=config, memory=memory, chunk_size=chunk_size, compact=compact)
    assert_close(got, naive(arguments, config))
    assert (
        got["by hidden"].any() and not got["by hidden"][0, 2].any() and not got["by hidden"][~arguments["mask"]].any()
    )


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_metrics_are_those_of_policy_loss_under_every_name(memory: str) -> None:
    arguments = batch("dapo") | {"return_entropy": True}
    leaves = leaves_of(arguments)
    result = gk.linear_logprobs(**leaves, targets=arguments["targets"], return_entropy=True)
    config, names = CONFIGS["dapo"], ("old_logprobs", "advantages", "ref_logprobs")
    mask = arguments["mask"] & (arguments["targets"] != -100)
    others = {name: arguments[name] for name in names}
    expected = gk.policy_loss(result.logprobs, **others, mask=mask, entropy=result.entropy, config=config).metrics
    got = gk.linear_policy_loss(**arguments | leaves, config=config, memory=memory).metrics
    for one, other in ((got.to_dict(), expected.to_dict()), (got.trl(), expected.trl()), (got.verl(), expected.verl())):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-12, nan_ok=True), key
    assert got["entropy_sum"] > 0 and got["tokens"] == mask.sum()


@pytest.mark.parametrize("advantages", ["by row", "by token"])
@pytest.mark.parametrize("old", [True, False])
def test_every_factor_of_a_token(advantages: str, old: bool) -> None:
    arguments = batch() | {
        "is_weights": torch.rand(ROWS, WIDTH, dtype=F64),
        "weights": torch.rand(ROWS, WIDTH, dtype=F64),
    }
    arguments["advantages"] = noise(ROWS, WIDTH) if advantages == "by token" else arguments["advantages"]
    arguments["old_logprobs"] = arguments["old_logprobs"] if old else None
    assert_close(run(arguments, chunk_size=5), naive(arguments, CONFIGS["grpo"]))


# Packed rows and chunk boundaries


def packed(given: dict[str, Any], behind: int = 3) -> tuple[dict[str, Any], Tensor]:
    """The batch without padding, and the mask of the kept tokens; `behind` arbitrary tokens follow the last row."""
    kept = given["mask"]
    result = {name: value for name, value in given.items() if name != "mask"}
    for name in ("hidden", *PER_TOKEN):
        if name in result:
            value = result[name][kept]
            result[name] = torch.cat([value, value[:behind]])
    result["cu_seqlens"] = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    return result, kept


@pytest.mark.parametrize("chunk_size", [None, 3, 7, 8])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_is_padded_without_the_padding(name: str, memory: str, chunk_size: int | None) -> None:
    arguments, config = batch(name), CONFIGS[name]
    without, kept = packed(arguments)
    expected = run(arguments, config=config)
    for compact in (True, False):
        options = {"config": config, "memory": memory, "chunk_size": chunk_size, "compact": compact}
        got = run(without | {"cu_seqlens": without["cu_seqlens"].int()}, **options)
        assert not got["by hidden"][kept.sum() :].any()
        got["by hidden"] = torch.zeros_like(arguments["hidden"]).index_put((kept,), got["by hidden"][: kept.sum()])
        assert_close(got, expected)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 6, 7, 10, 100])
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_that_are_longer_than_a_chunk_are_computed_twice(
    monkeypatch: pytest.MonkeyPatch, name: str, chunk_size: int, is_packed: bool, compact: bool
) -> None:
    arguments, ran, once = batch(name), [], op.apply_loss
    arguments = packed(arguments)[0] if is_packed else arguments
    # the longest row has an ignored target, which compact leaves out
    longest = WIDTH - 1 if compact else WIDTH
    expected = run(arguments, config=CONFIGS[name])
    monkeypatch.setattr(op, "apply_loss", lambda *args: ran.append(1) or once(*args))
    got = run(arguments, config=CONFIGS[name], chunk_size=chunk_size, compact=compact)
    assert bool(ran) == (chunk_size >= longest)
    assert_close(got, expected)


@pytest.mark.parametrize("size", [1, 4, 5, 9, 100])
def test_chunks_are_whole_sequences_and_as_many_as_fit(size: int) -> None:
    ends = [4, 4, 5, 9, 10, 10, 14]  # some of them empty
    if size < 4:
        ends = list(range(8))
    result = [(part.start, part.stop) for part in chunks(ends[-1], size, ends)]
    assert [start for start, _ in result] == [0, *(stop for _, stop in result[:-1])] and result[-1][1] == ends[-1]
    for start, stop in result:
        assert stop in ends and 0 < stop - start <= size
        assert stop == ends[-1] or next(end for end in ends if end > stop) - start > size


# Tokens left out


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of rows of each gradient of logits computed from here on."""
    rows, differentiate = [], Products.differentiate

    def count(self: Products, chunk: Any, *args: Any) -> Tensor:
        rows.append(len(chunk.hidden))
        return differentiate(self, chunk, *args)

    monkeypatch.setattr(Products, "differentiate", count)
    return rows


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("by", ["row", "token"])
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_tokens_without_an_advantage_have_no_gradient_and_cost_none(
    monkeypatch: pytest.MonkeyPatch, memory: str, by: str, compact: bool
) -> None:
    arguments = batch()
    arguments["advantages"] = noise(ROWS, WIDTH) if by == "token" else arguments["advantages"]
    arguments["advantages"][1::2] = 0
    expected = naive(arguments, CONFIGS["grpo"])
    rows = counted(monkeypatch)
    got = run(arguments, memory=memory, compact=compact, chunk_size=9)
    assert not got["by hidden"][1::2].any() and got["by hidden"][0].any()
    assert_close(got, expected)
    # clipped tokens have no gradient either, which leaves the others of the first and the third row
    assert 0 < sum(rows) <= int(arguments["mask"][::2].sum()) - 1


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_a_kl_moves_rows_without_an_advantage(memory: str) -> None:
    arguments = batch("dapo") | {"advantages": torch.zeros(ROWS, dtype=F64)}
    got = run(arguments, config=CONFIGS["dapo"], memory=memory, chunk_size=9)
    assert_close(got, naive(arguments, CONFIGS["dapo"]))
    assert got["by hidden"][1, 0].all()


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_token_takes_part(name: str, memory: str, compact: bool) -> None:
    arguments = batch(name)
    for changes in ({"mask": torch.zeros(ROWS, WIDTH)}, {"targets": torch.full((ROWS, WIDTH), -100)}):
        got = run(arguments | changes, config=CONFIGS[name], memory=memory, compact=compact, chunk_size=9)
        assert got["loss"] == 0
        for what in ("by hidden", "by weight", "by bias"):
            assert not got[what].any() and got[what].shape == arguments[what[3:]].shape


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_no_tokens(memory: str, shape: tuple[int, int]) -> None:
    arguments = batch() | {
        "mask": None,
        "hidden": noise(*shape, HIDDEN),
        "targets": torch.zeros(shape, dtype=torch.int64),
    }
    arguments |= {"old_logprobs": noise(*shape), "advantages": noise(shape[0])}
    for config in (CONFIGS["grpo"], CONFIGS["sequence token"]):
        got = run(arguments, config=config, memory=memory)
        assert got["loss"] == 0 and got["by hidden"].shape == arguments["hidden"].shape and not got["by weight"].any()


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", ["grpo", "sequence"])
def test_no_rows_before_tokens_that_belong_to_none(name: str, compact: bool) -> None:
    """A micro-batch padded to a length can have tokens without rows, as for policy_loss."""
    arguments, _ = packed(batch(name))
    arguments |= {"cu_seqlens": torch.tensor([0]), "advantages": noise(0)}
    expected = naive(arguments, CONFIGS[name])
    assert_close(run(arguments, config=CONFIGS[name], compact=compact, chunk_size=4), expected)


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_masked_tokens_hold_changes_no_bit(name: str, memory: str, compact: bool | None, poison: float) -> None:
    arguments = batch(name)
    options = {"config": CONFIGS[name], "memory": memory, "chunk_size": 9, "compact": compact}
    expected = run(arguments, **options)
    arguments["hidden"][~arguments["mask"]] = poison
    arguments["hidden"][0, 2] = poison  # its target is ignored
    for field in ("old_logprobs", "ref_logprobs"):
        if field in arguments:
            arguments[field][~arguments["mask"]] = poison
    arguments["targets"][~arguments["mask"]] = VOCABULARY + 1
    assert_same(run(arguments, **options), expected)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", ["grpo", "sequence"])
def test_what_is_behind_the_last_packed_row_changes_no_bit(name: str, memory: str) -> None:
    arguments, kept = packed(batch(name))
    options = {"config": CONFIGS[name], "memory": memory, "chunk_size": 9}
    expected = run(arguments, **options)
    arguments["hidden"][kept.sum() :] = NAN
    arguments["targets"][kept.sum() :] = VOCABULARY + 1
    assert_same(run(arguments, **options), expected)


@pytest.mark.parametrize("kind", ["mask", "integers", "unsorted"])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", ["grpo", "sequence", "masked"])
def test_positions_are_a_mask(name: str, memory: str, kind: str) -> None:
    arguments, mask = batch(name), torch.rand(ROWS, WIDTH) < 0.6
    places = mask.flatten().nonzero().squeeze(1)
    positions = {"mask": mask, "integers": places.int(), "unsorted": places[torch.randperm(len(places))]}[kind]
    options = {"config": CONFIGS[name], "memory": memory, "chunk_size": 9}
    expected = run(arguments | {"mask": arguments["mask"] & mask}, **options)
    for compact in (None, False):
        assert_close(run(arguments, positions=positions, compact=compact, **options), expected)


# Gradients


def test_backward_runs_once_with_the_gradient_ready_and_as_often_as_asked_without() -> None:
    arguments = batch()
    for memory in ("fast", "low"):
        leaves = leaves_of(arguments)
        loss = gk.linear_policy_loss(**arguments | leaves, memory=memory).loss
        loss.backward(retain_graph=True)
        first = leaves["weight"].grad.clone()
        if memory == "fast":
            with pytest.raises(RuntimeError, match="linear_policy_loss: backward must run once with memory='fast'"):
                loss.backward()
        else:
            loss.backward()
            torch.testing.assert_close(leaves["weight"].grad, 2 * first, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_the_gradient_of_the_loss_is_passed_on(memory: str) -> None:
    arguments = batch("entropy")
    options = {"config": CONFIGS["entropy"], "memory": memory}
    one, scaled = run(arguments, **options), run(arguments, scale=-2.5, **options)
    for name in ("by hidden", "by weight", "by bias"):
        torch.testing.assert_close(scaled[name], -2.5 * one[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_second_derivatives_are_refused(memory: str) -> None:
    arguments = batch()
    leaves = leaves_of(arguments)
    loss = gk.linear_policy_loss(**arguments | leaves, memory=memory).loss
    (gradient,) = torch.autograd.grad(loss, leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.square().sum().backward()


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_without_grad(memory: str) -> None:
    arguments = batch("dapo")
    expected = run(arguments, config=CONFIGS["dapo"])
    leaves = leaves_of(arguments)
    with torch.no_grad():
        inside = gk.linear_policy_loss(**arguments | leaves, config=CONFIGS["dapo"], memory=memory)
    plain = gk.linear_policy_loss(**arguments, config=CONFIGS["dapo"], memory=memory)
    for result in (inside, plain):
        assert not result.loss.requires_grad
        assert_close(
            {"loss": result.loss, "metrics": result.metrics.tensor}, {k: expected[k] for k in ("loss", "metrics")}
        )


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize(("frozen", "product"), [("weight", "to_weight"), ("hidden", "to_hidden"), ("bias", None)])
def test_nothing_is_computed_for_what_is_frozen(
    monkeypatch: pytest.MonkeyPatch, frozen: str, product: str | None, memory: str
) -> None:
    arguments = batch()
    expected = run(arguments, memory=memory)
    if product is not None:
        monkeypatch.setattr(Products, product, lambda *_, **__: pytest.fail(f"{product} of a frozen {frozen}"))
    got = run(arguments, frozen=frozen, memory=memory)
    del expected[f"by {frozen}"]
    assert_same(got, expected)


class Fresh(torch.autograd.Function):
    """Calls a function again for every backward: gradcheck needs two, and memory="fast" allows one."""

    @staticmethod
    def forward(ctx: Any, function: Any, *leaves: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*leaves)
        return function(*leaves)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        leaves = [leaf.detach().requires_grad_() for leaf in ctx.saved_tensors]
        with torch.enable_grad():
            loss = ctx.function(*leaves)
        return None, *torch.autograd.grad(loss, leaves, upstream)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", ["dapo", "entropy", "sequence", "dro"])
def test_gradcheck(name: str, memory: str) -> None:
    arguments = batch(name, rows=2)
    leaves = leaves_of(arguments)

    def loss(*values: Tensor) -> Tensor:
        changed = dict(zip(leaves, values, strict=True))
        options: dict[str, Any] = {"config": CONFIGS[name], "memory": memory, "chunk_size": 8}
        return gk.linear_policy_loss(**arguments | changed, **options, backend="cpu").loss

    assert torch.autograd.gradcheck(lambda *values: Fresh.apply(loss, *values), list(leaves.values()))


# Micro-batches


def halves(given: dict[str, Any]) -> list[dict[str, Any]]:
    whole = ("weight", "bias", "return_entropy")
    return [{k: v if k in whole else v[part] for k, v in given.items()} for part in (slice(0, 1), slice(1, None))]


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "entropy"])
def test_micro_batches_with_one_normalizer_add_up_to_the_batch(name: str, memory: str) -> None:
    arguments, config = batch(name), CONFIGS[name]
    whole = run(arguments, config=config, memory=memory)
    names = ("tokens", "rows", "segments")
    count = {n: whole["metrics"][METRICS.index(n)] for n in names[:2]}
    if name == "segment":
        segments = arguments["segments"].masked_fill(~arguments["mask"] | (arguments["targets"] == -100), -1)
        count["segments"] = sum(len(row.unique()) - (-1 in row) for row in segments)
    for normalizer in ({k: float(v) for k, v in count.items()}, {k: torch.as_tensor(v) for k, v in count.items()}):
        parts = [run(half, config=config, memory=memory, normalizer=normalizer) for half in halves(arguments)]
        for what in ("loss", "by weight", "by bias"):
            torch.testing.assert_close(parts[0][what] + parts[1][what], whole[what], rtol=1e-10, atol=1e-12, msg=what)
        by_hidden = torch.cat([part["by hidden"] for part in parts])
        torch.testing.assert_close(by_hidden, whole["by hidden"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_a_weight_gradient_that_is_added_up_elsewhere(chunk_size: int | None, compact: bool | None) -> None:
    arguments = batch()
    whole = run(arguments)
    before = noise(VOCABULARY, HIDDEN)
    total, leaves = before.clone(), leaves_of(arguments)
    options = {"normalizer": whole["metrics"][METRICS.index("rows")], "weight_grad": total}
    options |= {"chunk_size": chunk_size, "compact": compact}
    for half in halves(arguments | leaves):
        gk.linear_policy_loss(**half, **options).loss.backward()
    assert leaves["weight"].grad is None
    torch.testing.assert_close(total - before, whole["by weight"], rtol=1e-10, atol=1e-12)
    for name in ("hidden", "bias"):
        torch.testing.assert_close(leaves[name].grad, whole[f"by {name}"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_of_a_half_is_added_up_in_either_dtype(into: torch.dtype) -> None:
    arguments = {k: v.bfloat16() if k in ("hidden", "weight", "bias") else v for k, v in batch().items()}
    expected, total = run(arguments)["by weight"], torch.zeros(VOCABULARY, HIDDEN, dtype=into)
    leaves = leaves_of(arguments)
    gk.linear_policy_loss(**arguments | leaves, weight_grad=total).loss.backward()
    # one chunk: the float32 sum is rounded once, and its factors are rounded to half precision before
    size = float(expected.abs().max())
    torch.testing.assert_close(total, expected.to(into), rtol=2**-7, atol=2**-8 * size)
    assert leaves["weight"].grad is None and total.any()


def test_a_loss_whose_weight_gradient_was_added_must_not_be_scaled() -> None:
    arguments = batch()
    leaves, total = leaves_of(arguments), torch.zeros(VOCABULARY, HIDDEN, dtype=F64)
    loss = gk.linear_policy_loss(**arguments | leaves, weight_grad=total).loss
    with pytest.raises(RuntimeError, match="linear_policy_loss: the loss must be given to backward unscaled"):
        (loss / 2).backward()
