"""The calls that `benchmarks.commits` times, in a process for each commit: run inside a checkout, which it imports.

Both commits run this file, so it belongs to neither. A case has a function for each API that a commit may have, the
newest first; the first one whose call works there is timed. A function makes the inputs and returns the call.

A line of stdin is the name of a case and the seconds to spend on it; the answer is the duration of the fastest call, or
the reason why the commit has no such call.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

Call = Callable[[], object]
Make = Callable[[], Call]
WARM_UP = 3
_LACKS = (AttributeError, ImportError, TypeError, ValueError)  # errors of a call that the API does not have


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def gradient_of(loss: Callable[[], Tensor], *leaves: Tensor) -> Call:
    return lambda: torch.autograd.grad(loss(), leaves)


def rows(count: int, width: int, is_packed: bool = False) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, old log-probs and advantages of rows of which three quarters count, and the mask or the bounds."""
    logprobs = (0.5 * noise(count, width) - 1).clamp(max=-1e-3)
    old = logprobs + 0.1 * noise(count, width)
    lengths = width // 2 + (torch.arange(count) * 7) % (width // 2 + 1)
    mask = torch.arange(width) < lengths[:, None]
    layout = {"mask": mask}
    if is_packed:
        logprobs, old = logprobs[mask], old[mask]
        layout = {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])}
    return logprobs.requires_grad_(), old, noise(count), layout


def policy_loss(kind: str, is_packed: bool = False, count: int = 64, width: int = 1024) -> Call:
    logprobs, old, advantages, layout = rows(count, width, is_packed)
    fields = {"loss_type": "dapo", "importance_sampling_level": "sequence"} if kind == "gspo" else {"loss_type": kind}
    config = gk.LossConfig.trl(beta=0.04, **fields)
    arguments = layout | {"ref_logprobs": old + 0.01}
    return gradient_of(lambda: gk.policy_loss(logprobs, old, advantages, config=config, **arguments).loss, logprobs)


def head(tokens: int = 128, width: int = 64, vocabulary: int = 2048) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.arange(tokens) * 31 % vocabulary
    return noise(tokens, width).requires_grad_(), (noise(vocabulary, width) / 8).requires_grad_(), targets


def linear_policy_loss(memory: str) -> Call:
    hidden, weight, targets = head()
    old = gk.linear_logprobs(hidden, weight, targets).logprobs.detach() + 0.1 * noise(len(targets))
    bounds = torch.arange(0, len(targets) + 1, 16)
    inputs = hidden, weight, targets, old, noise(len(bounds) - 1)
    return gradient_of(
        lambda: gk.linear_policy_loss(*inputs, cu_seqlens=bounds, memory=memory).loss,
        hidden,
        weight,
    )


def linear_logprobs() -> Call:
    hidden, weight, targets = head()
    return gradient_of(lambda: gk.linear_logprobs(hidden, weight, targets).logprobs.sum(), hidden, weight)


def token_logprobs() -> Call:
    logits = noise(128, 2048).requires_grad_()
    targets = torch.arange(128) * 16
    return gradient_of(lambda: gk.token_logprobs(logits, targets).logprobs.sum(), logits)


def group_advantages(count: int) -> Call:
    rewards, groups = noise(count), torch.arange(count) // 8
    return lambda: gk.group_advantages(rewards, groups)


def token_advantages(config: str) -> Call:
    rewards, values, _, layout = rows(64, 1024)
    arguments = [rewards.detach(), values] if config == "gae" else [rewards.detach()]
    return lambda: gk.token_advantages(*arguments, config=config, **layout)


def similarity_groups(linkage: str) -> Call:
    vectors = noise(512, 64)
    return lambda: gk.similarity_groups(vectors, 32, config=linkage)


def endpoint_segments() -> Call:
    logprobs, old, _, layout = rows(64, 1024)
    rewards = noise(64, 1024)
    return lambda: gk.endpoint_segments(rewards, logprobs.detach(), old, layout["mask"], groups=8)


def sampling_correction(**fields: Any) -> Call:
    logprobs, old, _, layout = rows(64, 1024)
    config = gk.CorrectionConfig.verl(**fields)
    return lambda: gk.sampling_correction(old, logprobs.detach(), config=config, **layout)


_REJECTION = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}
CASES: dict[str, tuple[Make, ...]] = {
    **{f"policy_loss, {kind}, padded": (partial(policy_loss, kind),) for kind in ("grpo", "dapo", "gspo")},
    **{f"policy_loss, {kind}, packed": (partial(policy_loss, kind, True),) for kind in ("grpo", "dapo", "gspo")},
    "policy_loss, 8 x 16 tokens": (partial(policy_loss, "grpo", False, 8, 16),),
    **{f"linear_policy_loss, {memory}": (partial(linear_policy_loss, memory),) for memory in ("fast", "low")},
    "linear_logprobs": (linear_logprobs,),
    "token_logprobs": (token_logprobs,),
    **{f"group_advantages, {count} rewards": (partial(group_advantages, count),) for count in (64, 8192)},
    **{f"token_advantages, {name}": (partial(token_advantages, name),) for name in ("gae", "reinforce_plus_plus")},
    **{f"similarity_groups, {name}": (partial(similarity_groups, name),) for name in ("average", "ward")},
    "endpoint_segments": (endpoint_segments,),
    "sampling_correction, tokens": (partial(sampling_correction, rollout_is="token"),),
    "sampling_correction, rows": (partial(sampling_correction, **_REJECTION),),
}


def call_of(name: str) -> Call | str:
    """The first call of a case that works with this commit, warmed up, or why none does."""
    reason = ""
    for make in CASES[name]:
        try:
            call = make()
            for _ in range(WARM_UP):
                call()
            return call
        except _LACKS as error:
            reason = f"{type(error).__name__}: {error}"
    return reason


def fastest(call: Call, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Other processes lengthen single calls, so that the shortest of many is the steadiest figure."""
    best, start = math.inf, clock()
    while True:
        before = clock()
        call()
        after = clock()
        best = min(best, after - before)
        if after - start >= seconds:
            return best


def main() -> None:
    assert Path(gk.__file__).is_relative_to(Path.cwd()), f"{gk.__file__} is not of this checkout"
    torch.set_num_threads(1)
    calls: dict[str, Call | str] = {}
    for line in sys.stdin:
        name, seconds = json.loads(line)
        if name not in calls:
            calls = {name: call_of(name)}  # the tensors of the case before go
        call = calls[name]
        print(json.dumps(call if isinstance(call, str) else fastest(call, seconds)), flush=True)


if __name__ == "__main__":
    main()
