"""The terms of a policy loss in the head's tests: configs, what the terms hold, and which tokens anything reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.linear_head import heads, teachers
from tests.ops.linear_head.heads import F64, HEADS, IGNORED, NAN, OF_TERMS, OF_TOKENS, noise
from tests.ops.linear_head.teachers import TEACHERS
from tests.ops.promises import Inputs

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


def draw(config: gk.LossConfig, wanted: set[str], rows: int, width: int, columns: int, **teacher: Any) -> Inputs:
    """A random batch with those of the features that go together."""
    if "shared" in wanted:
        wanted -= {"positions", "positions mask"}
    if "support" in wanted:
        wanted -= {"lora"}
    if config.aggregation == "token-sum":
        wanted -= {"weights"}
    shape = (rows * width // 2 + 1,) if "shared" in wanted else (rows, width)
    inputs = heads.draw_head(shape, *wanted, columns=columns)
    inputs |= draw_terms(config, rows, width, wanted)
    if config.kl != "none":
        inputs |= draw_reference(inputs, wanted)
    if "teacher" in wanted:
        if wanted & {"normalizer", "weights"}:
            wanted.add("teacher normalizer")
        inputs |= teachers.draw_teacher(inputs, *wanted, **teacher)
    if "shared" in wanted:
        inputs["term_index"] = torch.randint(-1, shape[0] - 1, (rows, width))  # the last one is no term's
    for name in ("old_logprobs", "ref_logprobs"):
        if inputs.get(name) is not None:
            moved = logprobs_of(inputs) + 0.3 * noise(rows, width)  # ratios around their bounds
            inputs[name] = moved.clamp(max=-1e-3)
    if "packed" in wanted:
        inputs = packed(inputs)
    return inputs | draw_places(inputs, wanted)


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
    if not wanted & {*REFERENCES}:
        return {"ref_logprobs": -3 - noise(*inputs["mask"].shape).abs()}
    lora = () if "support" in wanted else ("lora",)
    others = heads.draw_other("ref_", inputs, "scaled", *lora)
    if "ref_head" in wanted:
        return others
    if "ref_weight" in wanted:
        return {name: others[name] for name in ("ref_hidden", "ref_weight")}
    return {"ref_hidden": noise(*inputs["hidden"].shape)}


def draw_places(inputs: Inputs, wanted: set[str], sizes: list[int] | None = None) -> Inputs:
    """Arguments that read the tokens in their flat order."""
    targets = inputs["targets"].reshape(-1)
    places: Inputs = {}
    if "positions" in wanted:
        places["positions"] = torch.randperm(len(targets))[: len(targets) * 2 // 3].int()
    elif "positions mask" in wanted:
        places["positions"] = torch.rand(inputs["targets"].shape) < 0.6
    if "support" in wanted:
        places |= heads.draw_support(inputs, 9, sizes)
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
    counts, index = torch.ones(inputs["hidden"].shape[:-1], dtype=torch.bool), inputs.get("term_index")
    if "targets" in inputs:
        counts = inputs["targets"] != IGNORED
    elif "teacher_mask" in inputs:
        counts = inputs["teacher_mask"] != 0
    if index is not None:
        counts = (index >= 0) & counts.view(-1)[index]
    if (at := inputs.get("positions")) is not None:
        chosen = at if at.dtype == torch.bool else torch.zeros(counts.numel()).index_fill(0, at.long(), 1) > 0
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
    return read.index_fill(0, inputs["term_index"][counts], True)


def unread(inputs: Inputs) -> dict[str, Tensor]:
    """Slots that nothing may depend on."""
    is_out, is_unread = ~takes_part(inputs), ~tokens_read(inputs)
    places = dict.fromkeys(("old_logprobs", "advantages", "ref_logprobs", "is_weights", "weights"), is_out)
    names = ("hidden", "temperature", "ref_hidden", "teacher_hidden")
    places |= dict.fromkeys((*names, "teacher_logprobs", "teacher_ids", "teacher_weights"), is_unread)
    if "targets" in inputs:
        places["targets"] = is_unread & (inputs["targets"] != IGNORED)
    values = {name: inputs.get(name) for name in places}
    has_slots = {n: isinstance(v, Tensor) and v.shape[: places[n].dim()] == places[n].shape for n, v in values.items()}
    return {name: slots for name, slots in places.items() if has_slots[name]}


def with_garbage(inputs: Inputs) -> Inputs:
    """Tokens and terms that do not count hold no numbers, and ids that there are not."""
    filled = dict(inputs)
    for name, slots in unread(inputs).items():
        value = filled[name]
        slots = slots.view(slots.shape + (1,) * (value.dim() - slots.dim()))
        junk = NAN if value.is_floating_point() else min(10**6, torch.iinfo(value.dtype).max)
        filled[name] = torch.where(slots, torch.tensor(junk, dtype=value.dtype), value)
    return filled
