"""Errors of token_logprobs that it finds before a kernel runs."""

from __future__ import annotations

import torch

import grpo_kernels as gk
from tests.ops.error_rows import Call, Errors, each
from tests.ops.token_logprobs.cases import INF, NAN

LOGITS, TARGETS = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
OVERLAPPING = (torch.zeros(7).requires_grad_() * 1).expand(2, 3, 7)
LEAF = LOGITS.clone().requires_grad_()
OF_TARGETS = "must have the shape of the targets, [2, 3], ... got {}"
CALLS = {"token_logprobs": Call(gk.token_logprobs, {"logits": LOGITS, "targets": TARGETS})}
ERRORS = [
    Errors(
        "token_logprobs",
        TypeError,
        {
            **each("logits", "must be of dtype ... ", TARGETS),
            **each("targets", "must be a tensor, got list", [1.0]),
            **each("temperature", "must be a number, got ... {}", "1", True, [1.0]),
            **each("temperature", "must be of dtype ... torch.int64", TARGETS),
            **each("softcap", "must be a number, got str", "1"),
            **each("return_entropy", "must be a bool, got ... {}", 1, None),
            **each("inplace_backward", "must be a bool, got ... {}", 1),
        },
    ),
    Errors(
        "token_logprobs",
        ValueError,
        {
            **each("logits", "must have shape [..., V] with V > 0, got {}", torch.zeros(()), torch.zeros(2, 3, 0)),
            **each("targets", "must have shape [2, 3], ... {}", TARGETS[..., None], TARGETS.T, TARGETS.flatten()),
            **each("temperature", "must be positive and finite, got {}", 0, -1.0, NAN, INF),
            **each("softcap", "must be positive and finite, got {}", 0.0),
            **each("logit_scale", "must be positive and finite, got {}", -1.0),
            **each("temperature", OF_TARGETS, torch.ones(3), torch.ones(2, 4), torch.ones(2, 3, 1), torch.ones(())),
            "temperature must not require grad ... detach": {"temperature": torch.ones(2, requires_grad=True)},
            **each("inplace_backward", "must be False for logits that are a leaf or a view of one", True, logits=LEAF),
            **each("inplace_backward", "must be False for logits that are a leaf", True, logits=LEAF[:, :, :5]),
            "logits must not overlap ... got strides [0, 0, 1]": {"logits": OVERLAPPING, "inplace_backward": True},
        },
    ),
    Errors(
        "token_logprobs",
        RuntimeError,
        {
            f"targets must be in [0, 7) or -100, got {target}": {"targets": TARGETS + target, "backend": backend}
            for target, backend in ((-1, "reference"), (-99, None), (7, None), (2**40, None))
        },
    ),
]
