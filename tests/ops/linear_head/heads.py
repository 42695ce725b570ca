"""The LM head of the tests: what a head and its tokens hold, the definition from whole logits, and rewritten batches.

What linear_logprobs, linear_distillation_loss and linear_policy_loss add is in the files of their cases.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import loop
from grpo_kernels.ops.sampled_support import registration as sampled_support
from tests.harness import runnable_backends
from tests.ops.promises import Inputs, Results

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAN, INF, IGNORED = math.nan, math.inf, -100
SUPPORTS, OF_SUPPORT = loop.SUPPORTS, sampled_support.SUPPORTS
BACKENDS, OVER_SUPPORT = runnable_backends(SUPPORTS), runnable_backends(OF_SUPPORT)
KERNELS = [name for name in BACKENDS if name != "reference"]
EXACT = [name for name in runnable_backends(SUPPORTS, F64) if name in ("cpu", "reference")]
LORA_SCALE = 0.7
# Fields of a head, under which names inputs have them; those of the reference model's head begin with "ref_".
FIELDS = ("weight", "bias", "lora_a", "lora_b", "softcap", "logit_scale", "banned", "vocab_start", "process_group")
LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b")
# Features that `draw_head` gives a head.
HEADS = ("bias", "lora", "scaled", "temperatures", "banned")
# Inputs with a slot for each token, or each term of the loss; they are the same without term_index.
OF_TOKENS = (
    *("hidden", "targets", "temperature", "by_logprobs", "by_entropy", "ref_hidden"),
    *("teacher_ids", "teacher_logprobs", "teacher_mask", "teacher_weights", "teacher_hidden"),
)
OF_TERMS = ("old_logprobs", "advantages", "mask", "policy_mask", "segments", "ref_logprobs", "is_weights", "weights")
OF_TOKEN = ("logprobs", "entropy", "d_hidden", "divergence", "mass")  # results


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def draw_head(shape: tuple[int, ...], *features: str, columns: int = 31, width: int = 5) -> Inputs:
    """Hidden states and targets of this shape, and a head with these features."""
    inputs: Inputs = {"hidden": noise(*shape, width), "weight": noise(columns, width)}
    allowed = torch.randperm(columns)
    if "bias" in features:
        inputs["bias"] = noise(columns)
    if "lora" in features:
        inputs |= {"lora_a": noise(2, width), "lora_b": 0.3 * noise(columns, 2)}
    if "scaled" in features:
        inputs |= {"softcap": 5.0, "logit_scale": 1.3, "temperature": 0.7}
    if "steep" in features:
        inputs["hidden"] *= 5
    if "temperatures" in features:
        inputs["temperature"] = torch.rand(shape, dtype=F64) + 0.5
    if "banned" in features:
        inputs["banned"], allowed = allowed[: columns // 4], allowed[columns // 4 :]
    inputs["targets"] = allowed[torch.randint(len(allowed), shape)]
    if "ignored" in features:
        inputs["targets"].view(-1)[2::5] = IGNORED
    return inputs


def draw_other(prefix: str, head: Inputs, *features: str) -> Inputs:
    """Hidden states of another width for the tokens of `head`, and a head with a bias and these features."""
    other = draw_head(head["hidden"].shape[:-1], "bias", *features, columns=len(head["weight"]), width=3)
    del other["targets"]
    other.pop("temperature", None)
    if "scaled" in features:
        other |= {"softcap": 20.0, "logit_scale": 0.75}
    return {prefix + name: value for name, value in other.items()}


def allowed_by(inputs: Inputs) -> Tensor:
    """Ids that the head does not ban."""
    allowed = torch.ones(len(inputs["weight"]), dtype=torch.bool)
    if "banned" in inputs:
        allowed[inputs["banned"]] = False
    return allowed.nonzero()[:, 0]


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
    return {"support": support_of(kept)}


def support_of(kept: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The support whose tokens keep these ids."""
    return torch.cat([torch.zeros(0).long(), *kept]), torch.tensor([0, *map(len, kept)]).cumsum(0)


def kept_by(inputs: Inputs) -> list[Tensor]:
    """The ids that each token keeps."""
    ids, offsets = inputs["support"]
    return list(ids.long().tensor_split(offsets[1:-1].long()))[: len(offsets) - 1]


def rounded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same numbers as the dtype holds them, in float64."""
    return {name: value.double() if is_float(inputs[name]) else value for name, value in cast(inputs, dtype).items()}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs with numbers of this dtype."""
    return {name: value.to(dtype) if is_float(value) else value for name, value in inputs.items()}


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == F64


# The definition


def fields_of(inputs: Inputs, prefix: str) -> Inputs:
    """Fields of the policy's head, or of the reference model's by the rules of ref_head."""
    fields = {name: inputs[name] for name in FIELDS if name in inputs}
    others = {name: inputs[prefix + name] for name in FIELDS if prefix + name in inputs}
    if not prefix or len(others) > 1:
        return others
    lost = ("lora_a", "lora_b", "bias") if others else ("lora_a", "lora_b")
    return {name: value for name, value in fields.items() if name not in lost} | others


def distribution(inputs: Inputs, counts: Tensor, prefix: str = "") -> Tensor:
    """Log-probabilities [N, V] of all columns, from the whole logits; those of tokens that do not count are numbers."""
    head, hidden = fields_of(inputs, prefix), inputs[prefix + "hidden"]
    hidden = torch.where(counts[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    x = hidden @ head["weight"].T
    if "lora_a" in head:
        x = x + LORA_SCALE * (hidden @ head["lora_a"].T @ head["lora_b"].T)
    x = (x + head.get("bias", 0)) * head.get("logit_scale", 1.0)
    if "softcap" in head:
        x = head["softcap"] * torch.tanh(x / head["softcap"])
    temperature = inputs.get("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = temperature[(..., *[None] * (counts.dim() - temperature.dim()))].expand_as(counts)
        temperature = torch.where(counts, temperature, 1).reshape(-1, 1)
    x = x / temperature
    if "banned" in head:
        x = x.index_fill(1, head["banned"], -INF)
    if "support" in inputs:
        kept = torch.zeros(x.shape, dtype=torch.bool)
        for row, ids in enumerate(kept_by(inputs)):
            kept[row, ids] = True
        x = torch.where(kept | ~counts.reshape(-1, 1), x, -INF)
    return x.log_softmax(1)


def entropy_of(log_q: Tensor) -> Tensor:
    return -(log_q.exp() * torch.where(log_q == -INF, 0, log_q)).sum(1)


def assert_close(got: Results, expected: Results, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, of=name: f"{of}: {text}"
        )


# The arguments of the ops


def head_of(inputs: Inputs, prefix: str = "") -> gk.LMHead | Tensor | None:
    """The head of these fields: an LMHead, its weight if there is nothing else, or None.

    With "is_wide" an adapter is in float32 beside halves.
    """
    fields = {name: inputs[prefix + name] for name in FIELDS if prefix + name in inputs}
    if len(fields) <= 1:
        return fields.get("weight")
    if "lora_a" in fields:
        a, b = fields.pop("lora_a"), fields.pop("lora_b")
        wide = torch.promote_types(a.dtype, F32) if "is_wide" in inputs else a.dtype
        fields["lora"] = a.to(wide), b.to(wide), LORA_SCALE
    return gk.LMHead(**fields)


def arguments_of(inputs: Inputs) -> Inputs:
    """Arguments of an op: the head, and inputs that are arguments themselves."""
    fields = {*FIELDS, *(f"ref_{name}" for name in FIELDS), "is_wide"}
    names = [name for name in inputs.keys() - fields if not name.startswith(("teacher_", "by_"))]
    return {"head": head_of(inputs)} | {name: inputs[name] for name in names}


def leaves_of(inputs: Inputs, *frozen: str) -> tuple[str, ...]:
    return tuple(name for name in LEAVES if name in inputs and name not in frozen)
