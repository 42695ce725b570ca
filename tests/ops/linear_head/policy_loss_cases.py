"""Batches of linear_policy_loss, and its definition: policy_loss of the log-probs of the whole logits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.harness import logprob_error, reach
from tests.ops.linear_head import distillation_cases as distillation
from tests.ops.linear_head import heads
from tests.ops.linear_head.distillation_cases import TEACHERS
from tests.ops.linear_head.heads import (
    F32,
    F64,
    HEADS,
    NAN,
    OF_TERMS,
    OF_TOKENS,
    SUPPORTS,
    leaves_of,
    noise,
)
from tests.ops.promises import Inputs, Op, Results, Same, evaluated, placed, run

# Configs whose gradient of a token depends on the token alone, on its row, on its segment or on the whole batch.
CONFIGS: dict[str, gk.LossConfig] = {
    "grpo": gk.LossConfig.of("grpo"),
    "dapo": gk.LossConfig.trl(loss_type="dapo", beta=0.05, epsilon_high=0.28),
    "cispo": gk.LossConfig(loss="cispo", kl="k2", kl_coef=0.1, aggregation="seq-mean-token-mean"),
    "entropy": gk.LossConfig(entropy_coef=0.1, dual_clip=3.0, aggregation="seq-mean-token-sum", count_empty_rows=True),
    "local entropy": gk.LossConfig(entropy_coef=-0.1, entropy_aggregation="local-token-mean"),
    "sequence": gk.LossConfig(ratio="sequence", kl="k3", kl_coef=0.1),
    "sequence alone": gk.LossConfig(ratio="sequence"),
    "sequence token": gk.LossConfig(ratio="sequence_token", aggregation="seq-mean-token-mean"),
    "segment": gk.LossConfig(ratio="segment"),
    "vespo": gk.LossConfig(loss="vespo"),
    "geo_mean": gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum"),
    "dro": gk.LossConfig(loss="dro", dro_beta=0.3),
    "measured KL": gk.LossConfig(loss="reinforce", kl="k1", aggregation="token-sum"),
}
# Features that `problem` gives a batch, beside those of the head and of the teacher.
FORMS = ("ignored", "packed", "shared", "gaps", "positions", "positions mask", "support", "teacher", "return_entropy")
TERMS = ("on policy", "by token", "zeros", "policy_mask", "weights", "normalizer", "is_weights", "is_weights by row")
REFERENCES = ("ref_hidden", "ref_weight", "ref_head")
FEATURES = (*HEADS, *FORMS, *TERMS, *REFERENCES, *TEACHERS[:-2])
COUNTS = {"tokens": 9.0, "rows": 3.0, "segments": 5.0}


class Problem(NamedTuple):
    inputs: Inputs
    config: gk.LossConfig

    @property
    def op(self) -> Op:
        call_ = functools.partial(call, config=self.config)
        return Op(lambda: self.inputs, call_, SUPPORTS, leaves_of(self.inputs))

    def run(self, backend: str, dtype: torch.dtype = F64, **changes: Any) -> Results:
        return run(self.op, self.inputs | changes, backend, dtype)

    def rounded(self, dtype: torch.dtype) -> Problem:
        return Problem(heads.rounded(self.inputs, dtype), self.config)

    def defined(self, offsets: Tensor | float = 0.0) -> Results:
        """The definition with its gradients, on the host; the offsets are added to the log-probs."""
        op = dataclasses.replace(self.op, call=lambda inputs, _: by_definition(inputs, self.config, offsets))
        return evaluated(op, placed(op, self.inputs, F64, lambda value: value), None)


def problem(config: str, *features: str, rows: int = 4, width: int = 7, columns: int = 31, **options: Any) -> Problem:
    """A random batch with those of the features that go together."""
    wanted, settings = set(features), CONFIGS[config]
    if "shared" in wanted:
        wanted -= {"positions", "positions mask"}
    if "support" in wanted:
        wanted -= {"lora"}
        options = {name: value for name, value in options.items() if name not in ("memory", "compact", "chunk_size")}
    if settings.aggregation == "token-sum":
        wanted -= {"weights"}
    shape = (rows * width // 2 + 1,) if "shared" in wanted else (rows, width)
    inputs = heads.draw_head(shape, *wanted, columns=columns)
    inputs |= draw_terms(settings, rows, width, wanted)
    if settings.kl != "none":
        inputs |= draw_reference(inputs, wanted)
    if "teacher" in wanted:
        if "normalizer" in wanted:
            wanted.add("teacher normalizer")
        inputs |= distillation.draw_teacher(inputs, *wanted)
    if "shared" in wanted:
        inputs["term_index"] = torch.randint(-1, shape[0] - 1, (rows, width))  # the last one is no term's
    for name in ("old_logprobs", "ref_logprobs"):
        if inputs.get(name) is not None:
            moved = logprobs_of(inputs) + 0.3 * noise(rows, width)  # ratios around their bounds
            inputs[name] = moved.clamp(max=-1e-3)
    if "packed" in wanted:
        inputs = packed(inputs)
    inputs |= draw_places(inputs, wanted)
    return Problem(inputs | options, settings)


def logprobs_of(inputs: Inputs) -> Tensor:
    """Log-probs of the policy for each term; any number where it has none."""
    targets, index = inputs["targets"], inputs.get("term_index")
    log_q = heads.distribution(inputs, torch.ones_like(targets, dtype=torch.bool))
    logprobs = log_q.gather(1, targets.clamp(min=0).view(-1, 1))[:, 0].clamp(min=-50)
    return logprobs.view(targets.shape) if index is None else logprobs[index.clamp(min=0)]


def draw_terms(config: gk.LossConfig, rows: int, width: int, wanted: set[str]) -> Inputs:
    shape = rows, width
    mask = torch.arange(width) < torch.randint(width + 1, (rows, 1))
    mask[:1] = True
    inputs: Inputs = {"mask": mask & (torch.rand(shape) < 0.7) if "gaps" in wanted else mask}
    inputs["old_logprobs"] = None if "on policy" in wanted else -3 - noise(*shape).abs()
    inputs["advantages"] = noise(*shape) if "by token" in wanted else noise(rows)
    if "zeros" in wanted:
        inputs["advantages"] = torch.where(torch.rand(inputs["advantages"].shape) < 0.5, 0, inputs["advantages"])
    if "policy_mask" in wanted and config.loss != "geo_mean":
        inputs["policy_mask"] = torch.rand(shape) < 0.6
    if "is_weights by row" in wanted and config.loss != "vespo":
        inputs["is_weights"] = 0.1 + torch.rand(rows, dtype=F64)
    elif "is_weights" in wanted:
        inputs["is_weights"] = 0.1 + torch.rand(shape, dtype=F64)
    if "weights" in wanted:
        inputs["weights"] = torch.rand(shape, dtype=F64)
    elif "normalizer" in wanted:
        inputs["normalizer"] = COUNTS
    if config.ratio == "segment":
        inputs["segments"] = torch.where(torch.arange(width) % 4 == 3, -1, torch.arange(width) // 3).repeat(rows, 1)
    return inputs | ({"return_entropy": True} if "return_entropy" in wanted else {})


def draw_reference(inputs: Inputs, wanted: set[str]) -> Inputs:
    tokens, columns, width = inputs["targets"].shape, *inputs["weight"].shape
    if "ref_head" in wanted:
        others = {"ref_weight": noise(columns, 3), "ref_bias": noise(columns), "ref_logit_scale": 0.9}
        if "support" not in wanted:
            others |= {"ref_lora_a": noise(2, 3), "ref_lora_b": noise(columns, 2)}
        return {"ref_hidden": noise(*tokens, 3)} | others
    if "ref_weight" in wanted:
        return {"ref_hidden": noise(*tokens, 3), "ref_weight": noise(columns, 3)}
    if "ref_hidden" in wanted:
        return {"ref_hidden": noise(*tokens, width)}
    return {"ref_logprobs": -3 - noise(*inputs["mask"].shape).abs()}


def draw_places(inputs: Inputs, wanted: set[str]) -> Inputs:
    """Arguments that read the tokens in their flat order."""
    targets = inputs["targets"].reshape(-1)
    places: Inputs = {}
    if "positions" in wanted:
        places["positions"] = torch.randperm(len(targets))[: len(targets) * 2 // 3].int()
    elif "positions mask" in wanted:
        places["positions"] = torch.rand(inputs["targets"].shape) < 0.6
    if "support" in wanted:
        places |= heads.draw_support(inputs, 9)
    return places


def packed(inputs: Inputs, behind: int = 2) -> Inputs:
    """The rows one after the other without their padding, and tokens after the last row."""
    mask, result = inputs["mask"], dict(inputs)
    inside = mask.flip(1).cummax(1).values.flip(1)
    names = OF_TERMS if "term_index" in inputs else (*OF_TERMS, *OF_TOKENS)
    for name in (*names, "term_index"):
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.shape[:2] == mask.shape and value.dim() > 1:
            last = value[:1, :behind].flatten(0, 1)
            result[name] = torch.cat([value[inside], torch.zeros_like(last) if name == "mask" else last])
    result["cu_seqlens"] = torch.nn.functional.pad(inside.sum(1).cumsum(0), (1, 0)).int()
    return result


def takes_part(inputs: Inputs) -> Tensor:
    """Terms of the loss, from the arguments that leave some out."""
    targets = inputs["targets"]
    counts, index = targets != -100, inputs.get("term_index")
    if index is not None:
        counts = (index >= 0) & counts.view(-1)[index]
    if (at := inputs.get("positions")) is not None:
        chosen = at if at.dtype == torch.bool else torch.zeros(targets.numel()).index_fill(0, at.long(), 1) > 0
        counts = counts & chosen.view(counts.shape)
    if "mask" in inputs:
        counts = counts & (inputs["mask"] != 0)
    if "segments" in inputs:
        counts = counts & (inputs["segments"] >= 0)
    if "cu_seqlens" in inputs:
        counts = counts & (torch.arange(len(counts)) < inputs["cu_seqlens"][-1])
    return counts


def tokens_read(inputs: Inputs) -> Tensor:
    """Tokens of the head that a term of the loss reads."""
    counts = takes_part(inputs)
    if "term_index" not in inputs:
        return counts
    read = torch.zeros(inputs["targets"].shape, dtype=torch.bool)
    read.view(-1)[inputs["term_index"][counts]] = True
    return read


def unread(inputs: Inputs) -> dict[str, Tensor]:
    """Slots that nothing may depend on."""
    is_out, is_unread = ~takes_part(inputs), ~tokens_read(inputs)
    places = dict.fromkeys(("old_logprobs", "advantages", "ref_logprobs", "is_weights", "weights"), is_out)
    names = ("hidden", "temperature", "ref_hidden", "teacher_logprobs", "teacher_ids", "teacher_weights")
    places |= dict.fromkeys(names, is_unread) | {"targets": is_unread & (inputs["targets"] != -100)}
    values = {name: inputs.get(name) for name in places}
    has_slots = {n: isinstance(v, Tensor) and v.shape[: places[n].dim()] == places[n].shape for n, v in values.items()}
    return {name: slots for name, slots in places.items() if has_slots[name]}


def with_garbage(case: Problem) -> Problem:
    """Tokens and terms that do not count hold no numbers."""
    filled = dict(case.inputs)
    for name, slots in unread(case.inputs).items():
        value = filled[name]
        slots = slots.view(slots.shape + (1,) * (value.dim() - slots.dim()))
        filled[name] = torch.where(slots, NAN if value.is_floating_point() else 10**6, value)
    return case._replace(inputs=filled)


@st.composite
def problems(draw: st.DrawFn, name: str) -> Problem:
    torch.manual_seed(draw(st.integers(0, 1000)))
    options = {
        "memory": draw(st.sampled_from(("fast", "fast", "low"))),
        "compact": draw(st.sampled_from((None, False))),
    }
    options["chunk_size"] = draw(st.sampled_from((None, 1, 3, 8, 100)))
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    wanted = draw(st.sets(st.sampled_from(FEATURES), max_size=10))
    columns = draw(st.sampled_from((5, 31, 67)))
    return with_garbage(problem(name, *wanted, rows=rows, width=width, columns=columns, **options))


# The definition


def by_definition(inputs: Inputs, config: gk.LossConfig, offsets: Tensor | float = 0.0) -> Results:
    """The offsets are added to the log-probs, as the errors of a kernel."""
    read = tokens_read(inputs)
    targets = torch.where(read, inputs["targets"], 0).reshape(-1, 1)

    def by_term(values: Tensor) -> Tensor:
        index = inputs.get("term_index")
        return values.view(read.shape) if index is None else values[index.clamp(min=0)]

    log_q = heads.distribution(inputs, read)
    logprobs = log_q.gather(1, targets)[:, 0]
    entropy = heads.entropy_of(log_q)
    names = ("old_logprobs", "advantages", "policy_mask", "segments", "is_weights", "weights", "normalizer")
    others = {name: inputs[name] for name in (*names, "cu_seqlens", "ref_logprobs") if name in inputs}
    if "ref_hidden" in inputs:
        with torch.no_grad():
            of_reference = heads.distribution(inputs, read, "ref_").gather(1, targets)[:, 0]
        others["ref_logprobs"] = by_term(of_reference)
    has_entropy = config.entropy_coef != 0 or "return_entropy" in inputs
    others |= {"mask": takes_part(inputs), "entropy": by_term(entropy) if has_entropy else None, "config": config}
    loss, metrics = gk.policy_loss(by_term(logprobs + offsets), **others, backend="reference")
    results = {"loss": loss + 0 * logprobs.clamp(min=-1e30).sum(), "metrics": metrics.tensor}
    if any(name.startswith("teacher_") for name in inputs):
        part, divergence, mass = distillation.divergences(inputs, read).values()
        results |= {"divergence": divergence, "mass": mass, "part": part.detach(), "loss": results["loss"] + part}
    return results


def call(inputs: Inputs, backend: str | None, config: gk.LossConfig | str = "grpo") -> Results:
    heads_ = {"ref_head": heads.head_of(inputs, "ref_")}
    arguments = heads.arguments_of(inputs) | heads_ | {"teacher": distillation.teacher_of(inputs), "config": config}
    loss, metrics = gk.linear_policy_loss(**arguments, backend=backend)
    results = {"loss": loss, "metrics": metrics.tensor.to(loss.dtype)}  # whose errors those of the sums are
    if (part := metrics.distillation) is not None:
        assert not any(value.requires_grad for value in part)
        results |= {"divergence": part.divergence, "mass": part.mass, "part": part.loss}
    return results


def inherited_errors(case: Problem, backend: str) -> dict[str, float]:
    """Errors of results on a GPU from those of the kernel's log-probs; those of divergences are not known."""
    leaves = case.op.leaves

    def logprobs(dtype: torch.dtype) -> Tensor:
        inputs = heads.cast(case.inputs, dtype)
        read = tokens_read(inputs)
        return heads.distribution(inputs, read).gather(1, torch.where(read, inputs["targets"], 0).view(-1, 1))

    def moved(offsets: Tensor) -> Results:
        results = case.defined(offsets[:, 0])
        return {name: results[name] for name in ("loss", *(f"d_{leaf}" for leaf in leaves))}

    error = logprob_error(backend, logprobs(F32), logprobs(F64), case.inputs.get("softcap", 0.0))
    return reach(moved, torch.Size((case.inputs["targets"].numel(), 1)), error)


# For test_promises.py


def in_micro_batches(inputs: Inputs) -> Same:
    """Rows apart, divided by what all have; metrics are those of a call."""
    counts = takes_part(inputs)
    numbers = {"tokens": counts.sum().double(), "rows": counts.any(1).sum().double()}
    others: Inputs = {"normalizer": numbers}
    if "teacher_ids" in inputs:
        others["teacher_normalizer"] = numbers["tokens"]
    return heads.in_micro_batches(inputs, of_rows=True, **others)


def described(config: str, *features: str, is_whole: bool = False, **options: Any) -> Op:
    """In micro-batches, unless something counts in the whole batch; by default on the CPU, as interpreters are slow."""
    names = options.pop("names", ("cpu",))

    def draw() -> Inputs:
        return problem(config, "bias", "gaps", "is_weights", *features, rows=5, width=12, **options).inputs

    op, supports = Problem(draw(), CONFIGS[config]).op, {name: SUPPORTS[name] for name in names}
    rewrites = {} if is_whole else {"micro-batches": in_micro_batches}
    return dataclasses.replace(
        op, draw=draw, supports=supports, ignored=unread, rewrites=rewrites, adds_in_any_order=True, multiplies=True
    )


OPS = {
    "linear_policy_loss": described(
        "dapo", "ignored", "by token", "zeros", "policy_mask", "temperatures", names=tuple(SUPPORTS)
    ),
    "linear_policy_loss of sequences": described("sequence", "lora", "scaled", "ref_head", chunk_size=24),
    "linear_policy_loss in low memory": described("entropy", "lora", "ignored", "banned", memory="low", is_whole=True),
    "linear_policy_loss with a teacher": described(
        "entropy", "zeros", "teacher", names=("cpu", "triton"), is_whole=True
    ),
    "linear_policy_loss of shared positions": described("grpo", "lora", "shared", "return_entropy", is_whole=True),
    "linear_policy_loss of packed segments": described("segment", "packed", "weights", "positions mask", is_whole=True),
    "linear_policy_loss over a support": described("dapo", "ignored", "support", "ref_weight", is_whole=True),
}
