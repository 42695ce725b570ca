"""Batches and configs of policy_loss, and a comparison of a kernel with the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS, KLS
from grpo_kernels.ops.policy_loss.losses import LOSSES
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import assert_within_budget, runnable_backends
from tests.ops.promises import Inputs, Op, Results, Same, changed, end_to_end, run
from tests.rounding import Moves

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
METRICS = gk.PolicyLossMetrics.names
COUNTS = (
    *("rows", "active_rows", "tokens", "terms", "kept_tokens", "is_count"),
    *("low_clipped", "high_clipped", "clipped", "dual_clipped"),
)
SUMS = tuple(name for name in METRICS if name not in COUNTS)
OF_COUNTS, OF_SUMS = ([METRICS.index(name) for name in names] for names in (COUNTS, SUMS))

Pick = Callable[[Sequence[Any]], Any]  # one of several values

# Configs

CLAMP = {"log_ratio_clamp": (None, (-20.0, 20.0), (-0.3, 0.2))}
TRUST_REGION = {"clip_low": (0.05,), "clip_high": (0.04,), "ratio_cap": (None, 1.1, 3.0), **CLAMP}
# by the loss: values of the fields that it reads, on both sides of the ratios and changes of a batch
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "clip": {
        "clip_low": (0.2, None),
        "clip_high": (0.28, None),
        "dual_clip": (None, 1.3, 3.0),
        "delta": (None, 0.9, 1.5),
        **CLAMP,
    },
    "cispo": {"clip_low": (0.1, None), "clip_high": (0.2, -0.1, None), **CLAMP},
    "sapo": {"sapo_temperatures": ((1.0, 1.05), (1.5, 0.5)), **CLAMP},
    "vespo": {"vespo_shape": ((2.0, 3.0, 3.0, 2.0), (1.0, 2.0, 1.5, 0.0))},
    "geo_mean": {"clip_low": (0.2, None), "clip_high": (0.3,)},
    "dppo_tv": TRUST_REGION,
    "dppo_kl": TRUST_REGION,
    "reinforce": {},
    "dro": {"dro_beta": (0.3, 1.0)},
    "ipo": {"clip_low": (0.02, None), "clip_high": (0.03, None), **CLAMP},
    "icepop": {"clip_low": (0.1, None), "clip_high": (0.15, None), **CLAMP},
    "topr": {"ratio_cap": (None, 1.1), **CLAMP},
}
NORM = "seq-mean-token-sum-norm"


KINDS = [(loss, ratio) for loss, row in LOSSES.items() for ratio in row.ratios]


def a_config(pick: Pick, loss: str, ratio: str) -> gk.LossConfig:
    """Any settings that a LossConfig takes with these."""

    def one(*values: Any) -> Any:
        return pick(values)

    fields = {"loss": loss, "ratio": ratio}
    fields |= {name: one(*values) for name, values in FIELDS[loss].items()}
    kl = one(*KLS)
    if kl != "none":
        is_biased = kl.endswith("+") or ratio not in ("token", "sequence") or loss == "geo_mean"
        fields |= {"kl": kl, "kl_coef": one(0.1, 0.1, 0.0), "kl_unbiased": not is_biased and one(False, True)}
        fields["kl_clamp"] = one(None, (20.0, 10.0), (0.2, 0.03))
    fields["aggregation"] = one(*(("seq-mean-token-sum", "token-sum") if loss == "geo_mean" else AGGREGATIONS[:-1]))
    fields |= {f"{term}_aggregation": one(None, one(None, "token-mean", *AGGREGATIONS)) for term in ("kl", "entropy")}
    if NORM in fields.values():
        fields["max_length"] = 7
    fields |= {"entropy_coef": one(0.0, 0.1), "count_empty_rows": one(False, True)}
    return gk.LossConfig(**fields)


# Batches


def padded(
    seed: int, rows: int, width: int, *, size: float = 0.3, gaps: float = 0.3, optional: tuple[str, ...] = ()
) -> Inputs:
    """Random rows of numbers that float32 holds, the second one without tokens; size is that of the log ratios.

    `optional` names the arguments beside log-probs, old log-probs, advantages and the mask.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = functools.partial(torch.randn, generator=generator)
    chance = functools.partial(torch.rand, generator=generator)
    logprobs = -0.7 * noise(rows, width).abs() - 0.05
    mask = chance(rows, width) >= gaps
    if rows > 1:
        mask[1] = False
    segments = (chance(rows, width) < 0.4).cumsum(1)
    every = {
        "logprobs": logprobs,
        "old_logprobs": (logprobs + size * noise(rows, width)).clamp(max=-1e-3),
        "advantages": noise(rows),
        "mask": mask,
        "segments": torch.where(chance(rows, width) < 0.15, -1, segments - segments[:, :1]),
        "ref_logprobs": (logprobs + size * noise(rows, width)).clamp(max=-1e-3),
        "policy_mask": chance(rows, width) < 0.6,
        "entropy": noise(rows, width).abs(),
        "is_weights": 2 * chance(rows, width),
        "weights": chance(rows, width),
        "token_advantages": noise(rows, width),
        "row_weights": 2 * chance(rows, 1),
    }
    names = ("logprobs", "old_logprobs", "advantages", "mask", *optional)
    return {name: every[name].double() if every[name].is_floating_point() else every[name] for name in names}


def packed(inputs: Inputs, lengths: list[int], extra: int = 3) -> Inputs:
    """The first tokens of each row one after the other, with tokens after the last row."""
    shape = inputs["logprobs"].shape

    def joined(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != shape[1]:
            return value
        return end_to_end(value, lengths, extra)

    flat = {name: joined(value) for name, value in inputs.items()}
    if len(flat["logprobs"]) == shape[0]:  # [B] would be those of tokens
        of_rows = [name for name in ("advantages", "is_weights") if name in flat and flat[name].dim() == 1]
        flat |= {name: flat[name].view(-1, 1) for name in of_rows if inputs[name].dim() == 1}
    return flat | {"cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)])}


SIZES = ((3, 5), (4, 17), (5, 33), (2, 600), (17, 2), (1, 1))


def a_batch(pick: Pick, config: gk.LossConfig, sizes: tuple[tuple[int, int], ...] = SIZES) -> Inputs:
    """Every argument that the config takes."""

    def one(*values: Any) -> Any:
        return pick(values)

    size = pick(sizes)
    spread, gaps = one(0.3, 0.3, 3.0), one(0.3, 0.0, 0.9)
    batch = padded(
        pick(range(2**31)), *size, size=spread, gaps=gaps, optional=(*EVERY, "token_advantages", "row_weights")
    )
    of_tokens, of_rows = batch.pop("token_advantages"), batch.pop("row_weights")
    batch["advantages"] = one(batch["advantages"], batch["advantages"][:, None], of_tokens)
    if config.loss != "vespo":
        batch["is_weights"] = one(batch["is_weights"], of_rows, of_rows[:, 0])
    needed = {"ref_logprobs": config.kl != "none"}
    needed |= {"segments": True} if config.ratio.startswith("segment") else {}
    needed |= {"policy_mask": False} if config.loss == "geo_mean" else {}
    shared = (None, config.aggregation, "local-token-mean")  # aggregations that go with weights
    needed |= {} if config.kl_aggregation in shared and config.entropy_aggregation in shared else {"weights": False}
    for name in ("old_logprobs", "mask", "policy_mask", "is_weights", "ref_logprobs", "segments", "weights"):
        usually = name in ("old_logprobs", "mask")
        if not needed.get(name, one(usually, usually, True, False)):
            del batch[name]
    if "weights" not in batch:
        numbers = {"tokens": 17.0, "rows": 3.0, "segments": 5.0}
        tensors = {"tokens": torch.tensor(11.0), "rows": 3.0, "segments": torch.tensor(5)}
        batch |= one({}, {"normalizer": numbers}, {"normalizer": tensors})
    if one(False, False, True):
        lengths = [pick(range(size[1] + 1)) for _ in range(size[0])]
        extra = one(0, 3, size[1]) if "mask" in batch else 0  # tokens after the last row need a mask
        batch = packed(batch, lengths, extra)
        batch["cu_seqlens"] = batch["cu_seqlens"].to(one(torch.int32, torch.int64))
    if "mask" in batch and one(False, False, True):
        batch["mask"] = one(3 * batch["mask"].long(), batch["mask"].bfloat16())
    return batch


EVERY = ("segments", "ref_logprobs", "policy_mask", "entropy", "is_weights", "weights")


@st.composite
def cases(draw: st.DrawFn, loss: str, ratio: str, **options: Any) -> tuple[gk.LossConfig, Inputs]:
    def pick(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    config = a_config(pick, loss, ratio)
    return config, a_batch(pick, config, **options)


# Calls


def call(inputs: Inputs, backend: str | None, config: gk.LossConfig | str = "grpo") -> Results:
    """The loss and its metrics, which are also apart: counts, and sums in the dtype of the loss."""
    loss, metrics = gk.policy_loss(**{"old_logprobs": None} | inputs, config=config, backend=backend)
    return {"loss": loss, "metrics": metrics.tensor, **apart(metrics.tensor, loss.dtype)}


def apart(metrics: Tensor, dtype: torch.dtype) -> Results:
    numbers = metrics.unbind()
    counts, sums = (torch.stack([numbers[place] for place in places]) for places in (OF_COUNTS, OF_SUMS))
    return {"counts": counts.long(), "sums": sums.to(dtype)}


def op_of(config: gk.LossConfig, inputs: Inputs | None = None) -> Op:
    has_bonus = config.entropy_coef != 0 and (inputs is None or "entropy" in inputs)
    leaves = ("logprobs", "entropy") if has_bonus else ("logprobs",)
    return Op(draw, functools.partial(call, config=config), SUPPORTS, leaves)


def rounded(value: Tensor) -> Tensor:
    return value.float().double() if value.is_floating_point() else value


def assert_like_reference(
    inputs: Inputs, config: gk.LossConfig, backend: str, dtype: torch.dtype, sums: bool = False
) -> None:
    """In float64 to the rounding of sums in another order; in float32 within the budget, with `sums` those, too."""
    op = op_of(config, inputs)
    if dtype == F32:  # the same numbers for all
        inputs = {name: rounded(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    got, gold = run(op, inputs, backend, dtype), run(op, inputs, "reference", F64)
    if dtype == F64:
        for name, want in gold.items():
            # an unbiased k3 cancels exponentials of up to e^10
            scale = float(want.abs().nan_to_num(posinf=0).max()) if want.numel() else 0.0
            extreme = float(gold["sums"][SUMS.index("ratio_max")].nan_to_num()) if config.kl_unbiased else 1.0
            extreme += float(gold["sums"][SUMS.index("kl_sum")].abs()) if config.kl_unbiased else 0.0
            unit = 1e-11 * max(scale, 1.0, extreme)
            torch.testing.assert_close(
                got[name], want, rtol=1e-10, atol=unit, equal_nan=True, msg=lambda text, of=name: f"{of}: {text}"
            )
        return
    working, moves = run(op, inputs, "reference", F32), Moves(lambda: run(op, inputs, "reference", F64), gold)
    if not torch.equal(working["counts"], gold["counts"]):
        return  # in float32 a ratio is on the other side of its bound
    torch.testing.assert_close(got["counts"], gold["counts"])
    for leaf in op.leaves:
        assert got[f"d_{leaf}"].dtype == F32
        name = f"d_{leaf}"
        assert_within_budget(got[name], working[name], gold[name], name, moves=moves)
    # a sum can cancel, but its rounding is that of its terms; with advantages of one sign, terms do not cancel
    alike = run(op, inputs | {"advantages": -inputs["advantages"].abs()}, "reference", F64)["sums"]
    size = float(sum(alike[SUMS.index(name)].abs() for name in ("policy_loss", "kl_loss", "entropy_loss")))
    error, budget = (abs(float(one["loss"]) - float(gold["loss"])) for one in (got, working))
    assert error <= 2 * budget + 16 * torch.finfo(F32).eps * size, "loss"
    if sums:
        tokens = max(int(gold["counts"][COUNTS.index("tokens")]), 1)
        error, budget = ((one["sums"] - gold["sums"]).abs().nan_to_num() for one in (got, working))
        assert torch.equal(got["sums"].isnan(), gold["sums"].isnan())
        for name, worst, allowed in zip(SUMS, error.tolist(), (2 * budget + 4e-7 * tokens).tolist(), strict=True):
            assert worst <= allowed, f"{name}: error {worst:.3g}, allowed {allowed:.3g}"


# For test_promises.py


def draw(*optional: str) -> Inputs:
    batch = padded(int(torch.randint(1000, ())), 5, 12, optional=optional)
    names = {"token_advantages": "advantages", "row_weights": "is_weights"}
    return batch | {names[name]: batch.pop(name) for name in names if name in batch}


def ignored(inputs: Inputs) -> dict[str, Tensor]:
    is_out = ~inputs["mask"]
    if "segments" in inputs:
        is_out |= inputs["segments"] < 0
    return {
        name: is_out if value.shape == is_out.shape else is_out.all(1)
        for name, value in inputs.items()
        if value.is_floating_point()
    }


def in_micro_batches(inputs: Inputs, rows: float) -> Same:
    """Two calls with the counts of the whole batch, once as numbers and once as tensors."""
    valid = inputs["mask"] & (inputs["segments"] >= 0) if "segments" in inputs else inputs["mask"]
    ends = 0.0
    if "segments" in inputs:
        ends = float(sum(len(row[ok].unique()) for row, ok in zip(inputs["segments"], valid, strict=True)))
    counts: dict[str, float] = {"tokens": float(valid.sum()), "rows": rows, "segments": max(ends, 1.0)}
    parts = [{name: value[part] for name, value in inputs.items()} for part in (slice(0, 2), slice(2, 5))]
    parts[0]["normalizer"], parts[1]["normalizer"] = counts, {n: torch.tensor(v) for n, v in counts.items()}

    def added(results: list[Results]) -> Results:
        total = gk.PolicyLossMetrics.merge(torch.stack([one["metrics"] for one in results]))
        gradients = {name: torch.cat([one[name] for one in results]) for name in results[0] if name.startswith("d_")}
        loss = results[0]["loss"] + results[1]["loss"]
        return gradients | {"loss": loss} | apart(total, loss.dtype)

    return Same(parts, added)


CONFIGS: dict[str, tuple[gk.LossConfig, tuple[str, ...], float]] = {
    "": (gk.LossConfig(clip_high=0.28, kl="k3", kl_coef=0.1), ("ref_logprobs",), 4),
    "of everything": (
        gk.LossConfig(
            dual_clip=1.3,
            delta=1.5,
            log_ratio_clamp=(-0.4, 0.5),
            kl="k3",
            kl_coef=0.1,
            kl_clamp=(0.4, 0.05),
            kl_unbiased=True,
            entropy_coef=0.1,
            aggregation="seq-mean-token-mean",
            kl_aggregation="seq-mean-token-sum",
            entropy_aggregation="token-mean",
        ),
        ("ref_logprobs", "policy_mask", "entropy", "is_weights"),
        4,
    ),
    "of sequences": (gk.LossConfig(ratio="sequence", aggregation="seq-mean-token-mean"), (), 4),
    "of segments": (
        gk.LossConfig(ratio="segment_mean", kl="k2", kl_coef=0.1, entropy_coef=0.1),
        ("ref_logprobs", "segments", "policy_mask", "entropy", "row_weights"),
        4,
    ),
    "of VESPO": (gk.LossConfig(loss="vespo"), ("is_weights",), 4),
    "of GMPO": (
        gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum"),
        ("is_weights", "token_advantages"),
        5,
    ),
}
OPS = {
    f"policy_loss {name}".strip(): dataclasses.replace(
        op_of(config),
        draw=functools.partial(draw, *optional),
        ignored=ignored,
        rewrites={"micro-batches": functools.partial(in_micro_batches, rows=rows)},
        adds_in_any_order=True,
    )
    for name, (config, optional, rows) in CONFIGS.items()
}


def draw_packed() -> Inputs:
    return packed(draw("weights", "ref_logprobs"), [12, 0, 5, 7, 3])


OPS["policy_loss of packed rows"] = dataclasses.replace(
    op_of(gk.LossConfig(kl="k1", kl_coef=0.1)),
    draw=draw_packed,
    rewrites={"narrow bounds": changed("cu_seqlens", lambda bounds: bounds.int())},
)

# Positions that several terms share


def draw_tree() -> Inputs:
    """Five rows of terms over thirty positions, of which the last three have no term."""
    batch = draw("entropy")
    positions = padded(int(torch.randint(1000, ())), 2, 15, optional=("entropy",))
    index = torch.randint(27, (5, 12))
    del batch["mask"]
    return batch | {
        "logprobs": positions["logprobs"],
        "entropy": positions["entropy"],
        "term_index": torch.where(torch.rand(5, 12) < 0.2, -1, index),
    }


def written_out(inputs: Inputs) -> Same:
    """A log-prob for each term; the gradient of a position is the sum of those of its terms."""
    index = inputs["term_index"]
    has_position = index >= 0
    batch = {name: value for name, value in inputs.items() if name != "term_index"} | {"mask": has_position}
    batch |= {name: inputs[name].reshape(-1)[index.clamp(min=0)] for name in ("logprobs", "entropy")}

    def at_positions(value: Tensor) -> Tensor:
        return value.new_zeros(30).index_add(0, index[has_position], value[has_position]).view(2, 15)

    names = {"loss", "counts", "sums"}
    return Same(
        [batch],
        lambda results: {n: v if n in names else at_positions(v) for n, v in results[0].items() if n != "metrics"},
    )


def of_no_term(inputs: Inputs) -> dict[str, Tensor]:
    terms = inputs["term_index"]
    is_read = torch.zeros(30, dtype=torch.bool).index_fill(0, terms[terms >= 0], True).view(2, 15)
    return {"old_logprobs": terms < 0, **dict.fromkeys(("logprobs", "entropy"), ~is_read)}


OPS["policy_loss of shared positions"] = dataclasses.replace(
    op_of(gk.LossConfig(entropy_coef=0.1, aggregation="seq-mean-token-mean")),
    draw=draw_tree,
    ignored=of_no_term,
    rewrites={
        "written out": written_out,
        "narrow ids": changed("term_index", lambda index: index.to(torch.int8)),
    },
)
