"""The reference of linear_logprobs against the logits written out, and what the pages say of heads and supports.

Faults that this is for: a bias or an adapter outside of logit_scale; a softcap before it, or after the temperature; a
banned id with a logit of 0, or of the softcap; an entropy over ids that are banned or not kept; a row of a support that
reads the ids of another; a temperature of the wrong token; an ignored token that counts; a wrong or missing gradient.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from torch import Tensor

import grpo_kernels as gk
from tests.harness import examples
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import F64, IGNORED, LEAVES
from tests.ops.promises import Inputs, Results, run

NAMES = ("logprobs", "entropy")


def logits_of(inputs: Inputs, leaves: Results) -> Tensor:
    """After scaling, [N, V]."""
    hidden, shape = leaves["hidden"].reshape(-1, leaves["hidden"].shape[-1]), inputs["targets"].shape
    logits = hidden @ leaves["weight"].T + leaves.get("bias", 0)
    if "lora_a" in inputs:
        logits = logits + hidden @ (inputs["lora_scale"] * leaves["lora_b"] @ leaves["lora_a"]).T
    logits = inputs.get("logit_scale", 1.0) * logits
    if "softcap" in inputs:
        logits = inputs["softcap"] * torch.tanh(logits / inputs["softcap"])
    temperature = torch.as_tensor(inputs.get("temperature", 1.0), dtype=F64)
    missing = max(len(shape) - temperature.dim(), 0)
    return logits / temperature[(..., *[None] * missing)].expand(shape).reshape(-1, 1)


def by_definition(inputs: Inputs) -> Results:
    """Log-probs and entropies from whole logits, with the gradients that torch gives them."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES if name in inputs}
    logits, targets = logits_of(inputs, leaves), inputs["targets"]
    results = torch.zeros(2, targets.numel(), dtype=F64)
    for row, target in enumerate(targets.flatten().tolist()):
        if target != IGNORED:
            ids = cases.kept_by(inputs)[row] if "offsets" in inputs else cases.allowed_by(inputs)
            log_p = logits[row][ids].log_softmax(0)
            results[0, row], results[1, row] = log_p[ids == target].sum(), -(log_p.exp() * log_p).sum()
    upstream = torch.stack([inputs.get(f"by_{name}", 0 * inputs["hidden"][..., 0]).flatten() for name in NAMES])
    positions = inputs.get("positions")
    shape = targets.shape
    if positions is not None and positions.dtype == torch.bool:
        results = torch.where(positions.flatten(), results, 0)
    elif positions is not None:
        results, upstream, shape = results[:, positions], upstream[:, positions], positions.shape
    loss = (results * upstream).sum() + 0 * sum(leaf.sum() for leaf in leaves.values())  # each has a gradient
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"loss": loss} | {name: result.view(shape) for name, result in zip(NAMES, results, strict=True)}
    found |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: value.detach() for name, value in found.items()}


@settings(max_examples=examples(300))
@given(cases.batches())
def test_any_head_and_tokens_give_the_definition(inputs: Inputs) -> None:
    expected, got = by_definition(inputs), run(cases.op_of(inputs), inputs, "reference", F64)
    cases.assert_equal_in_float64(got, {name: expected[name] for name in got})


def test_log_probs_in_numbers() -> None:
    """The example of the page on supports: the logits are [3, 2, 1, 0] and [0, 1, 5, 1]."""
    hidden, weight = torch.eye(2), torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 5.0, 1.0]]).T
    targets, support = torch.tensor([1, 2]), (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))

    def logprobs(head: gk.LMHead | Tensor, **options: object) -> list[float]:
        got = gk.linear_logprobs(hidden, head, targets, backend="reference", **options)  # type: ignore[arg-type]
        return [round(number, 4) for number in got.logprobs.tolist()]

    assert logprobs(weight) == [-1.4402, -0.0425]
    assert logprobs(weight, support=support) == [-1.3133, 0.0]  # log sigmoid(-1), and a certain token
    # without ids 0 and 3: log sigmoid(1) and log sigmoid(4)
    assert logprobs(gk.LMHead(weight, banned=torch.tensor([3, 0]))) == [-0.3133, -0.0181]
    assert logprobs(gk.LMHead(weight, logit_scale=0.5), temperature=0.5) == [-1.4402, -0.0425]


def test_gradcheck() -> None:
    torch.manual_seed(1)
    for support in (False, True):
        options = cases.EVERYTHING | {"adapter": 0 if support else 2, "columns": 9, "width": 3, "banned": 2}
        inputs = cases.draw(**options)
        inputs |= cases.draw_support(inputs, 5) if support else {}
        leaves = [name for name in LEAVES if name in inputs]

        def results(*values: Tensor, names: list[str] = leaves, given: Inputs = inputs) -> tuple[Tensor, Tensor]:
            got = cases.call(given | dict(zip(names, values, strict=True)), "reference")
            return got["logprobs"], got["entropy"]

        assert torch.autograd.gradcheck(results, [inputs[name].requires_grad_() for name in leaves])
