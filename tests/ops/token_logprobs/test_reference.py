"""The reference of token_logprobs against log_softmax.

Faults that this is for: a softcap, scale or temperature in another order, or of another row; a masked logit that
becomes NaN; an ignored row with a value or a gradient; a backward pass, written by hand, that is not the derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings

from tests.harness import examples
from tests.ops.promises import Inputs, Results, run
from tests.ops.token_logprobs import cases
from tests.ops.token_logprobs.cases import F64


def by_definition(inputs: Inputs, options: dict[str, Any]) -> Results:
    logits, targets = inputs["logits"].clone().requires_grad_(), inputs["targets"]
    temperature = torch.as_tensor(inputs.get("temperature", options.get("temperature")), dtype=F64)
    if temperature.dim() == 1:
        temperature = temperature[:, None]
    x, cap = options["logit_scale"] * logits, options["softcap"]
    if cap is not None:
        x = torch.where(x.isinf(), x, cap * (x / cap).tanh())
    log_p = (x / temperature.expand(targets.shape)[..., None]).log_softmax(-1)
    kept = targets != -100
    logprobs = torch.where(kept, log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0], 0)
    terms = torch.where(log_p.exp() == 0, 0, log_p.exp() * torch.where(log_p.exp() == 0, 0, log_p))
    entropy = torch.where(kept, -terms.sum(-1), 0)
    results = {"logprobs": logprobs, "entropy": entropy}
    upstream = {name: inputs[f"by_{name}"] for name in results if f"by_{name}" in inputs}
    (gradient,) = torch.autograd.grad([results[name] for name in upstream], logits, list(upstream.values()))
    return (results if "by_entropy" in inputs else {"logprobs": logprobs}) | {"d_logits": gradient}


@settings(max_examples=examples(300))
@given(cases.batches(F64, 40))
def test_any_rows_are_those_of_log_softmax(case: tuple[Inputs, dict[str, Any]]) -> None:
    inputs, options = case
    got = run(cases.op_of(**options), inputs, "reference", F64)
    for name, want in by_definition(inputs, options).items():
        torch.testing.assert_close(
            got[name], want.detach(), rtol=1e-11, atol=1e-12, msg=lambda text, of=name: f"{of}: {text}"
        )
