"""Results repeat bit for bit outside torch's deterministic mode, which conftest.py sets for all other tests.

The fault that this is for: sums by atomics, whose order changes from call to call, in a reference on a GPU or in a
kernel. Sizes and values make another order visible: many tokens a row, and terms of all magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends
from grpo_kernels.ops.endpoint_segments.registration import SUPPORTS as OF_SEGMENTS
from grpo_kernels.ops.group_advantages.registration import SUPPORTS as OF_GROUPS
from grpo_kernels.ops.policy_loss.registration import SUPPORTS as OF_POLICY
from grpo_kernels.ops.sampled_support.registration import SUPPORTS as OVER_SUPPORT
from grpo_kernels.ops.similarity_groups.registration import SUPPORTS as OF_SIMILARITY
from grpo_kernels.ops.token_advantages.registration import SUPPORTS as OF_TOKENS
from grpo_kernels.ops.token_logprobs.registration import SUPPORTS as OF_LOGITS
from tests.graph_inputs import Inputs, present, with_gradients

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, WIDTH, CALLS = (24, 512, 8) if ON_GPU else (3, 17, 2)
HIDDEN, COLUMNS = 32, 257
TOKENS = ROWS * WIDTH
# The emulator draws another schedule for every launch; Triton's interpreter runs programs one after another.
IMPLEMENTATIONS = ("reference", "cuda", "triton") if ON_GPU else ("reference", "cpu", "cuda")


class Case(NamedTuple):
    call: Callable[[Inputs, str], list[Tensor]]
    supports: backends.Supports


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 10 ** (6 * torch.rand(*shape, dtype=torch.float64) - 3)


def draw(dtype: torch.dtype) -> Inputs:
    """Inputs of all cases by name, on the device; floating-point ones in the dtype."""
    torch.manual_seed(0)
    old = -3 * torch.rand(ROWS, WIDTH, dtype=torch.float64)
    targets = torch.randint(COLUMNS, (ROWS, WIDTH))
    kept = torch.stack((targets.flatten(), (targets.flatten() + 7) % COLUMNS), 1)
    logprobs, ids = (2 * torch.randn(ROWS, WIDTH, COLUMNS)).log_softmax(-1).topk(4)
    inputs = {
        "rewards": wide(TOKENS),
        "groups": torch.randint(ROWS, (TOKENS,)),
        "subgroups": torch.randint(-1, 3, (TOKENS,)),
        "old_logprobs": old,
        "logprobs": old + 0.3 * torch.randn(ROWS, WIDTH),
        "ref_logprobs": old + 0.1 * torch.randn(ROWS, WIDTH),
        "advantages": wide(ROWS),
        "token_rewards": wide(ROWS, WIDTH),
        "values": wide(ROWS, WIDTH),
        "mask": torch.rand(ROWS, WIDTH) < 0.9,
        "segments": (torch.arange(WIDTH) // 5).repeat(ROWS, 1),
        "prompts": torch.arange(ROWS) // 3,
        "term_index": torch.randint(TOKENS, (ROWS, WIDTH)) // 3,
        "hidden": torch.randn(ROWS, WIDTH, HIDDEN),
        "weight": torch.randn(COLUMNS, HIDDEN),
        "bias": torch.randn(COLUMNS),
        "targets": targets,
        "logits": 4 * torch.randn(ROWS, WIDTH, COLUMNS),
        "upstream": wide(ROWS, WIDTH),
        "kept": kept.sort(1).values.flatten(),
        "offsets": 2 * torch.arange(TOKENS + 1),
        "teacher_ids": ids,
        "teacher_logprobs": logprobs,
        "embeddings": torch.randn(4 * ROWS, HIDDEN),
        "owners": torch.randint(ROWS // 3, (4 * ROWS,)),
        "cu_seqlens": torch.arange(ROWS + 1) * WIDTH,
    }
    return {name: value.to(DEVICE, dtype if value.is_floating_point() else None) for name, value in inputs.items()}


def leaves(inputs: Inputs, *names: str) -> Inputs:
    return {name: inputs[name].detach().requires_grad_() for name in names}


def advantages(config: Any, *names: str) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        more = {name: inputs[name] for name in names}
        return present(
            *gk.group_advantages(inputs["rewards"], inputs["groups"], config=config, backend=backend, **more)
        )

    return Case(call, OF_GROUPS)


def policy(config: gk.LossConfig, *names: str, is_packed: bool = False) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        names_of_tokens = ("old_logprobs", "mask", *names)
        leaf = leaves(inputs, "logprobs")
        tokens = {name: inputs[name] for name in names_of_tokens} | leaf
        if is_packed:
            tokens = {name: value.flatten() for name, value in tokens.items()} | {"cu_seqlens": inputs["cu_seqlens"]}
        result = gk.policy_loss(**tokens, advantages=inputs["advantages"], config=config, backend=backend)
        return with_gradients(leaf, result.loss, result.metrics.tensor)

    return Case(call, OF_POLICY)


def token_logprobs(inputs: Inputs, backend: str) -> list[Tensor]:
    leaf = leaves(inputs, "logits")
    result = gk.token_logprobs(leaf["logits"], inputs["targets"], return_entropy=True, backend=backend)
    assert result.entropy is not None
    return with_gradients(leaf, ((result.logprobs + result.entropy) * inputs["upstream"]).sum(), *result)


def linear_logprobs(inputs: Inputs, backend: str) -> list[Tensor]:
    head = leaves(inputs, "hidden", "weight", "bias")
    result = gk.linear_logprobs(**head, targets=inputs["targets"], return_entropy=True, backend=backend)
    assert result.entropy is not None
    return with_gradients(head, ((result.logprobs + result.entropy) * inputs["upstream"]).sum(), *result)


def linear_loss(*names: str, **options: Any) -> Callable[[Inputs, str], list[Tensor]]:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        head = leaves(inputs, "hidden", "weight", "bias")
        others = {name: inputs[name] for name in ("targets", "old_logprobs", "advantages", *names)}
        result = gk.linear_policy_loss(**head, **others, **options, backend=backend)
        return with_gradients(head, result.loss, result.metrics.tensor)

    return call


def loss_over_support(inputs: Inputs, backend: str) -> list[Tensor]:
    return linear_loss("mask", support=(inputs["kept"], inputs["offsets"]))(inputs, backend)


def distillation(inputs: Inputs, backend: str) -> list[Tensor]:
    head = leaves(inputs, "hidden", "weight", "bias")
    teacher = {name: inputs[name] for name in ("teacher_ids", "teacher_logprobs", "mask")}
    result = gk.linear_distillation_loss(**head, **teacher, backend=backend)
    return with_gradients(head, result.loss, result.divergence)


def correction(inputs: Inputs, backend: str) -> list[Tensor]:
    config = gk.CorrectionConfig(weights="sequence", weight_max=2.0, rejections=(("seq_mean_k1", -0.5, 0.5),))
    tokens = inputs["old_logprobs"], inputs["ref_logprobs"]
    result = gk.sampling_correction(*tokens, mask=inputs["mask"], config=config, backend=backend)
    return present(result.weights, result.mask, result.metrics.tensor)


def segments(norm: str) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        tokens = [inputs[name] for name in ("token_rewards", "logprobs", "old_logprobs", "mask")]
        more = {"values": inputs["values"], "groups": inputs["prompts"] if norm == "prompt" else None}
        return present(*gk.endpoint_segments(*tokens, **more, config={"norm": norm}, backend=backend))

    return Case(call, OF_SEGMENTS)


def token_advantages(inputs: Inputs, backend: str) -> list[Tensor]:
    tokens = inputs["token_rewards"], inputs["values"]
    return present(*gk.token_advantages(*tokens, mask=inputs["mask"], config="gae", backend=backend))


def similarity(inputs: Inputs, backend: str) -> list[Tensor]:
    return present(*gk.similarity_groups(inputs["embeddings"], inputs["owners"], backend=backend))


CLIP = gk.LossConfig.trl(loss_type="dapo", beta=0.1)
CASES: dict[str, Case] = {
    "group_advantages": advantages("grpo"),
    "group_advantages of subgroups": advantages(gk.AdvantageConfig("grpo", shrinkage=2.0), "subgroups"),
    "group_advantages of a batch": advantages("batch_std"),
    "policy_loss": policy(CLIP, "ref_logprobs"),
    "policy_loss of packed sequences": policy(gk.LossConfig(ratio="sequence"), is_packed=True),
    "policy_loss of segments": policy(gk.LossConfig(ratio="segment"), "segments"),
    "policy_loss of VESPO": policy(gk.LossConfig(loss="vespo"), is_packed=True),
    "policy_loss of GMPO": policy(gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum")),
    "policy_loss of shared positions": policy(gk.LossConfig(), "term_index"),
    "token_logprobs": Case(token_logprobs, OF_LOGITS),
    "linear_logprobs": Case(linear_logprobs, OF_LOGITS),
    "linear_policy_loss": Case(linear_loss("mask", "ref_logprobs", config=CLIP), OF_LOGITS),
    "linear_policy_loss of shared positions": Case(linear_loss("term_index"), OF_LOGITS),
    "linear_policy_loss over a support": Case(loss_over_support, OVER_SUPPORT),
    "linear_distillation_loss": Case(distillation, OF_LOGITS),
    "sampling_correction": Case(correction, {"reference": (torch.float32, torch.float64)}),
    "endpoint_segments of a batch": segments("batch"),
    "endpoint_segments of prompts": segments("prompt"),
    "token_advantages": Case(token_advantages, OF_TOKENS),
    "similarity_groups": Case(similarity, OF_SIMILARITY),
}
# In one parameter, so that no selection of its values leaves a combination out, and not named "backend", as the check
# on a GPU leaves out references by that name.
COMBINATIONS = [
    f"{name}, {implementation}, {str(dtype)[6:]}"
    for name, case in CASES.items()
    for implementation in IMPLEMENTATIONS
    for dtype in (torch.float32, torch.float64)
    if backends.refusal(implementation, DEVICE, dtype, case.supports) is None
]


@pytest.fixture(autouse=True)
def default_mode(poisoned_memory: None) -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_results_repeat_outside_the_deterministic_mode(combination: str) -> None:
    name, implementation, dtype = combination.split(", ")
    inputs = draw(getattr(torch, dtype))
    first, *others = (CASES[name].call(inputs, implementation) for _ in range(CALLS))
    assert not torch.are_deterministic_algorithms_enabled() and any(result.any() for result in first)
    for again in others:
        for number, (result, want) in enumerate(zip(again, first, strict=True)):
            torch.testing.assert_close(
                result, want, rtol=0, atol=0, equal_nan=True, msg=lambda text, of=number: f"result {of}: {text}"
            )
