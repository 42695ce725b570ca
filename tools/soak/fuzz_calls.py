"""Random valid calls of every op that chooses a backend, and random changes that may make a call invalid.

A call follows from its seed alone. Shapes include 0, 1 and odd sizes; tensors are views with offsets and strides whose
gaps hold NaN; tokens outside of a mask hold NaN.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.policy_loss import cases as policy_cases

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 130)
WIDE, HALVES = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
NAN = math.nan


@dataclasses.dataclass
class Call:
    """Arguments of an op; those named in `leaves` get a gradient if they are floating-point tensors."""

    op: str
    arguments: dict[str, Any]
    leaves: tuple[str, ...] = ()


class Draw:
    """Random choices, and random tensors in a dtype."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = torch.float32

    def size(self, least: int = 0) -> int:
        return max(least, self.choose.choice(SIZES))

    def maybe(self, share: float = 0.5) -> bool:
        return self.choose.random() < share

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to(self.dtype)

    def logprobs(self, *shape: int) -> Tensor:
        return (-torch.rand(shape) - 0.01).to(self.dtype)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape) < self.choose.choice((0.0, 0.5, 0.9, 1.0))

    def ids(self, rows: int) -> Tensor:
        """Unsorted, sparse and negative ids of a few groups."""
        names = torch.tensor([self.choose.choice((-(2**63), 2**63 - 1, -7, 0, 3, 10**12)) for _ in range(5)])
        return names[torch.randint(5, (rows,))]

    def bounds(self, tokens: int) -> Tensor:
        """Boundaries of packed rows, some of them empty."""
        inner = torch.randint(0, tokens + 1, (self.choose.choice((0, 1, 4)),)).sort().values
        return torch.cat((torch.tensor([0]), inner, torch.tensor([tokens])))


# The ops


def group_advantages(draw: Draw) -> Call:
    draw.dtype = draw.choose.choice(WIDE)
    name = draw.choose.choice(gk.AdvantageConfig.names())
    size, prompts = draw.choose.choice((1, 2, 3, 8, 33)), draw.size()
    rows = size * prompts
    config = gk.AdvantageConfig(name)
    rewards = draw.normal(rows, 2) if config.combine == "normalize_then_sum" else draw.normal(rows)
    if draw.maybe():
        rewards = rewards.round()
    if draw.maybe(0.3):
        rewards = torch.where(torch.rand(rewards.shape) < 0.2, NAN, rewards)
    arguments: dict[str, Any] = {"rewards": rewards, "groups": size if draw.maybe() else draw.ids(rows), "config": name}
    if config.needs_lengths:
        arguments["lengths"] = torch.randint(1, 50, (rows,))
    if config.needs_baselines:
        arguments["baselines"] = draw.normal(rows)
    if draw.maybe(0.3):
        arguments["valid"] = draw.mask(rows)
    if config.needs_parent or draw.maybe(0.3):
        arguments["subgroups"] = torch.randint(-1, 3, (rows,))
    return Call("group_advantages", arguments)


def gigpo_advantages(draw: Draw) -> Call:
    draw.dtype = draw.choose.choice(WIDE)
    rows = 4 * draw.size()
    arguments = {"episode_rewards": draw.normal(rows), "step_returns": draw.normal(rows), "groups": 4}
    return Call("gigpo_advantages", arguments | {"states": torch.randint(0, 3, (rows,))})


def policy_loss(draw: Draw) -> Call:
    """The random settings and batches of the op's own tests."""
    pick = draw.choose.choice
    config = policy_cases.a_config(pick, *pick(policy_cases.KINDS))
    arguments = {"old_logprobs": None} | policy_cases.a_batch(pick, config)
    draw.dtype = draw.choose.choice(WIDE)
    numbers = {name: value for name, value in arguments.items() if is_float(value) and value.dim()}
    arguments |= {name: value.to(draw.dtype) for name, value in numbers.items()} | {"config": config}
    outside = arguments.get("mask")
    if outside is not None and draw.maybe():
        for name, value in numbers.items():
            if value.shape == outside.shape and name not in ("weights", "is_weights"):
                arguments[name] = torch.where(outside, arguments.get(name, value), NAN)
    return Call("policy_loss", arguments, ("logprobs", "entropy"))


def scaling(draw: Draw, rows: tuple[int, ...] = ()) -> dict[str, Any]:
    """Temperature, soft cap and scale of logits."""
    arguments: dict[str, Any] = {"temperature": draw.choose.choice((1.0, 0.7))}
    if rows and draw.maybe(0.3):
        arguments["temperature"] = torch.rand(rows) + 0.5
    return arguments | {"softcap": draw.choose.choice((None, None, 9.0)), "logit_scale": draw.choose.choice((1.0, 0.5))}


def targets(draw: Draw, columns: int, *shape: int) -> Tensor:
    found = torch.randint(0, columns, shape)
    return torch.where(torch.rand(shape) < 0.2, -100, found) if draw.maybe() else found


def token_logprobs(draw: Draw) -> Call:
    draw.dtype = draw.choose.choice((*WIDE, *HALVES))
    columns = draw.choose.choice((1, 2, 31, 33, 64, 129, 1000))
    shape = (draw.size(),) if draw.maybe() else (draw.choose.choice((0, 1, 3)), draw.size())
    arguments = {"logits": draw.normal(*shape, columns, scale=3), "targets": targets(draw, columns, *shape)}
    arguments |= scaling(draw, shape) | {"return_entropy": draw.maybe()}
    return Call("token_logprobs", arguments, ("logits",))


def head(draw: Draw, rows: int) -> tuple[dict[str, Any], int]:
    """Hidden states, weight and bias, and the number of columns."""
    draw.dtype = draw.choose.choice((*WIDE, torch.bfloat16))
    columns, width = draw.choose.choice((1, 2, 31, 64, 129)), draw.choose.choice((1, 3, 8, 33))
    arguments = {"hidden": draw.normal(rows, width), "weight": draw.normal(columns, width, scale=0.5)}
    return arguments | ({"bias": draw.normal(columns)} if draw.maybe(0.3) else {}), columns


HEAD = ("hidden", "weight", "bias")
OPTIONS = ("weight", "bias", "softcap", "logit_scale")


def assembled(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an op, with tensors and options of a head or a teacher in one object."""
    arguments = dict(arguments)
    if "weight" in arguments:
        arguments["head"] = gk.LMHead(**{name: arguments.pop(name) for name in OPTIONS if name in arguments})
    if "ids" in arguments:
        arguments["teacher"] = gk.Teacher(*(arguments.pop(name) for name in ("ids", "logprobs", "coef", "kind")))
    return arguments


def linear_logprobs(draw: Draw) -> Call:
    rows = draw.size()
    arguments, columns = head(draw, rows)
    arguments |= {"targets": targets(draw, columns, rows), "return_entropy": draw.maybe()} | scaling(draw)
    arguments["chunk_size"] = draw.choose.choice((None, 1, 8))
    if rows and draw.maybe(0.3):
        arguments["positions"] = torch.randperm(rows)[: draw.choose.randint(1, rows)]
    return Call("linear_logprobs", arguments, HEAD)


LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo")


def loss_arguments(draw: Draw, rows: int, width: int) -> dict[str, Any]:
    """Arguments of a loss beside log-probs, for padded rows."""
    beta = draw.choose.choice((0.0, 0.1))
    arguments: dict[str, Any] = {
        "old_logprobs": draw.logprobs(rows, width).float() - 1,
        "advantages": torch.randn(rows),
    }
    arguments["config"] = gk.LossConfig.trl(
        loss_type=draw.choose.choice(LOSSES), beta=beta, max_completion_length=max(1, width)
    )
    if beta:
        arguments["ref_logprobs"] = arguments["old_logprobs"] + 0.1 * torch.randn(rows, width)
    if draw.maybe():
        arguments["mask"] = draw.mask(rows, width)
    return arguments


def linear_policy_loss(draw: Draw) -> Call:
    rows, width = draw.choose.choice((1, 2, 4)), draw.size(1)
    arguments, columns = head(draw, rows * width)
    arguments["hidden"] = arguments["hidden"].reshape(rows, width, -1)
    arguments |= {"targets": torch.randint(0, columns, (rows, width))} | loss_arguments(draw, rows, width)
    arguments |= {
        "chunk_size": draw.choose.choice((None, width, 4 * width)),
        "memory": draw.choose.choice(("fast", "low")),
    }
    return Call("linear_policy_loss", arguments, HEAD)


def linear_distillation_loss(draw: Draw) -> Call:
    rows = draw.size(1)
    arguments, columns = head(draw, rows)
    logprobs, ids = torch.randn(rows, columns).log_softmax(-1).topk(min(columns, 3))
    arguments |= {"ids": ids, "logprobs": logprobs, "coef": 1.0, "chunk_size": draw.choose.choice((None, 8))}
    arguments |= {"kind": draw.choose.choice(("forward_kl", "reverse_kl", "jsd")), "mask": draw.mask(rows)}
    return Call("linear_distillation_loss", arguments, HEAD)


def tokens(draw: Draw, *names: str) -> dict[str, Any]:
    """Padded or packed numbers of tokens, NaN outside of the mask, and the mask."""
    draw.dtype = draw.choose.choice(WIDE)
    is_packed = draw.maybe(0.3)
    shape = (draw.size(1),) if is_packed else (draw.size(), draw.size(1))
    mask = draw.mask(*shape)
    numbers = {name: draw.logprobs(*shape) if "logprobs" in name else draw.normal(*shape) for name in names}
    if draw.maybe():
        numbers = {name: torch.where(mask, value, NAN) for name, value in numbers.items()}
    return numbers | {"mask": mask} | ({"cu_seqlens": draw.bounds(shape[0])} if is_packed else {})


def token_advantages(draw: Draw) -> Call:
    estimator = draw.choose.choice(gk.TokenAdvantageConfig.names())
    arguments = tokens(draw, "rewards", *(["values"] if estimator == "gae" else []))
    config = gk.TokenAdvantageConfig(estimator, gamma=draw.choose.choice((1.0, 0.99)))
    return Call("token_advantages", arguments | {"config": config})


def endpoint_segments(draw: Draw) -> Call:
    norm = draw.choose.choice(("none", "batch", "prompt"))
    has_critic = draw.maybe()
    arguments = tokens(draw, "rewards", "logprobs", "old_logprobs", *(["values"] if has_critic else []))
    rows = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else len(arguments["mask"])
    if norm == "prompt" or not has_critic:
        arguments["groups"] = torch.randint(0, 3, (rows,))
    arguments["config"] = gk.SegmentConfig(
        norm=norm,
        credit=draw.choose.choice(("endpoint", "broadcast")),
        rule=draw.choose.choice(("bounded", "literal")),
        proxy=draw.choose.choice(("coherent", "uncorrelated")),
        group_max_size=draw.choose.choice((1, 4, 16)),
        lam=draw.choose.choice((1.0, 0.95)),
    )
    return Call("endpoint_segments", arguments)


def embeddings(draw: Draw) -> dict[str, Any]:
    """Responses near a few centres, some of them equal, zero or not finite."""
    size, prompts, width = draw.choose.choice((1, 2, 3, 8, 17)), draw.choose.choice((0, 1, 3)), draw.size(2)
    rows = size * prompts
    centres = torch.randn(3, width)
    vectors = centres[torch.randint(3, (rows,))] + draw.choose.choice((0.0, 0.1, 2.0)) * torch.randn(rows, width)
    if rows and draw.maybe(0.3):
        vectors[draw.choose.randrange(rows)] = draw.choose.choice((0.0, NAN, math.inf))
    draw.dtype = draw.choose.choice((torch.float32, torch.bfloat16))
    arguments: dict[str, Any] = {"embeddings": vectors.to(draw.dtype), "groups": size}
    if draw.maybe(0.3):
        arguments["valid"] = draw.mask(rows)
    return arguments


def similarity_config(draw: Draw) -> gk.SimilarityConfig:
    return gk.SimilarityConfig(
        linkage=draw.choose.choice(("average", "complete", "single")),
        k_max=draw.choose.choice((None, 3)),
        collapse=draw.choose.choice(("one", "singletons")),
        min_silhouette=draw.choose.choice((0.1, 0.5)),
    )


def similarity_groups(draw: Draw) -> Call:
    return Call("similarity_groups", embeddings(draw) | {"config": similarity_config(draw)})


def similarity_advantages(draw: Draw) -> Call:
    arguments = embeddings(draw)
    return Call("similarity_advantages", arguments | {"rewards": torch.randn(len(arguments["embeddings"]))})


def pairwise_cosine(draw: Draw) -> Call:
    return Call("pairwise_cosine", embeddings(draw))


def distances(draw: Draw) -> Tensor:
    arguments = embeddings(draw)
    return gk.pairwise_cosine(arguments["embeddings"], arguments["groups"], backend="reference")


def agglomerate(draw: Draw) -> Call:
    linkage = draw.choose.choice(("average", "complete", "single"))
    return Call("agglomerate", {"distances": distances(draw), "linkage": linkage})


def cluster_distances(draw: Draw) -> Call:
    return Call("cluster_distances", {"distances": distances(draw), "config": similarity_config(draw)})


def silhouette(draw: Draw) -> Call:
    found = distances(draw)
    return Call("silhouette", {"distances": found, "labels": torch.randint(-1, 3, found.shape[:2])})


CALLS: dict[str, Callable[[Draw], Call]] = {
    function.__name__: function
    for function in (
        group_advantages,
        gigpo_advantages,
        policy_loss,
        token_logprobs,
        linear_logprobs,
        linear_policy_loss,
        linear_distillation_loss,
        token_advantages,
        endpoint_segments,
        similarity_groups,
        similarity_advantages,
        pairwise_cosine,
        agglomerate,
        cluster_distances,
        silhouette,
    )
}


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# Layouts


def laid_out(draw: Draw, tensor: Tensor) -> Tensor:
    """The tensor as a view: with an offset, with gaps between its elements, transposed, or as it is."""
    filler = NAN if tensor.is_floating_point() or tensor.is_complex() else True if tensor.dtype == torch.bool else 123
    kind = draw.choose.choice(("as it is", "offset", "gaps", "transposed"))
    if kind == "as it is" or tensor.dim() == 0:
        return tensor
    if kind == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "offset":
        holder = tensor.new_full((tensor.numel() + 5,), filler)
        view = holder[3 : 3 + tensor.numel()].view(tensor.shape)
    else:
        view = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), filler)[..., 1::2]
    return view.copy_(tensor)


# Changes that may make a call invalid

CHANGES: tuple[str, ...] = ("shape", "rank", "dtype", "nothing", "text", "number", "wild", "meta", "long")


def changed(draw: Draw, call: Call) -> str:
    """Changes one argument, and says which and how."""
    name = draw.choose.choice(sorted(name for name, value in call.arguments.items() if value is not None))
    value, kind = call.arguments[name], draw.choose.choice(CHANGES)
    call.arguments[name] = change(draw, value, kind)
    return f"{name}: {kind}"


def change(draw: Draw, value: Any, kind: str) -> Any:
    if not isinstance(value, Tensor) or kind in ("nothing", "text", "number"):
        others: tuple[Any, ...] = (None, "no such thing", -1, 0, NAN, 2**70, [1, 2], torch.tensor(1.0))
        return draw.choose.choice(others)
    if kind == "shape":
        return value[1:] if value.dim() and len(value) else torch.ones(3, dtype=value.dtype)
    if kind == "rank":
        return value[None] if draw.maybe() else value.flatten()
    if kind == "long":
        return torch.cat((value, value)) if value.dim() else value
    if kind == "dtype":
        others = (torch.int64, torch.bool, torch.complex64, torch.float16, torch.uint8, torch.float64, torch.int32)
        return value.to(draw.choose.choice(others))
    if kind == "meta":
        return value.to("meta")
    if value.is_floating_point():
        return torch.where(torch.rand(value.shape) < 0.3, draw.choose.choice((NAN, math.inf, -math.inf, 3e38)), value)
    if value.dtype == torch.bool:
        return ~value
    wild = torch.tensor(draw.choose.choice((-1, -(2**31), 2**31, 10**6, 2**62)), dtype=torch.int64)
    return torch.where(torch.rand(value.shape) < 0.3, wild, value)
