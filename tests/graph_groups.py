"""Cases for CUDA graphs of endpoint_segments, token_advantages and the ops on embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.graph_inputs import ROWS, Case, Inputs, bounds, present, segment_ids


def draw_tokens(shape: tuple[int, ...]) -> Inputs:
    old = -torch.rand(shape)
    inputs = {
        "rewards": torch.randn(shape),
        "logprobs": old + 0.3 * torch.randn(shape),
        "old_logprobs": old,
        "mask": torch.rand(shape) < 0.9,
        "values": torch.randn(shape),
        "groups": torch.randint(0, 2, (ROWS,)),
    }
    return inputs | ({"cu_seqlens": bounds()} if len(shape) == 1 else {})


def segments(shape: tuple[int, ...], *names: str, **config: Any) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        tokens = (inputs[name] for name in ("rewards", "logprobs", "old_logprobs", "mask"))
        more = {name: inputs[name] for name in names} | {"cu_seqlens": inputs.get("cu_seqlens")}
        return present(*gk.endpoint_segments(*tokens, config=config, backend=backend, **more))

    return Case(lambda: draw_tokens(shape), call)


def token_advantages(shape: tuple[int, ...], *names: str, **config: Any) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        more = {name: inputs.get(name) for name in ("mask", "cu_seqlens", *names)}
        settings = gk.TokenAdvantageConfig(**config)
        return present(*gk.token_advantages(inputs["rewards"], **more, config=settings, backend=backend))

    return Case(lambda: draw_tokens(shape) | {"turns": segment_ids(shape)}, call)


def optimal_token_baseline(inputs: Inputs, backend: str) -> list[Tensor]:
    tokens = inputs["rewards"], inputs["old_logprobs"], inputs["values"].sigmoid()
    return present(*gk.optimal_token_baseline(*tokens, inputs["groups"], mask=inputs["mask"], places="rank"))


def gigpo_advantages(inputs: Inputs, backend: str) -> list[Tensor]:
    rewards = inputs["rewards"]
    return [gk.gigpo_advantages(rewards, rewards.flip(0), 4, inputs["subgroups"], backend=backend)]


def draw_embeddings() -> Inputs:
    embeddings = torch.randn(16, 5)
    embeddings[1] = embeddings[0]
    return {
        "embeddings": embeddings,
        "groups": torch.randint(0, 3, (16,)),
        "valid": torch.rand(16) < 0.9,
        "distances": gk.pairwise_cosine(embeddings, 8, backend="reference"),
        "labels": torch.randint(-1, 3, (2, 8)),
        "halves": torch.randperm(16) % 2,
        "rewards": torch.randn(2, 8),
    }


def of_distances(call: Callable[..., Any]) -> Case:
    return Case(
        draw_embeddings, lambda inputs, backend: present(*call(inputs["distances"].contiguous(), backend=backend))
    )


def similarity(inputs: Inputs, backend: str) -> list[Tensor]:
    result = gk.similarity_groups(
        inputs["embeddings"], inputs["groups"], valid=inputs["valid"], num_groups=3, max_size=16, backend=backend
    )
    return present(*result)


def similarity_advantages(inputs: Inputs, backend: str) -> list[Tensor]:
    rewards, embeddings = inputs["rewards"].flatten(), inputs["embeddings"]
    *of_rows, groups = gk.similarity_advantages(rewards, embeddings, 8, valid=inputs["valid"], backend=backend)
    return present(*of_rows, *groups)


def diversity(inputs: Inputs, backend: str) -> list[Tensor]:
    """Plain torch, the same for each backend."""
    of, distances, labels, rewards = gk.diversity, inputs["distances"], inputs["labels"], inputs["rewards"]
    return present(
        of.similarity_weights(distances),
        of.threshold_components(distances, 0.5),
        of.distinctness_weights(labels),
        of.agreement_weights(labels, entropy_bound=1.0),
        of.uniqueness_weights(labels),
        of.semantic_entropy(labels),
        of.vendi_score(distances),
        *of.leave_one_out_logdet(distances),
        of.mmr_rewards(rewards, distances, lam=0.5),
        of.set_advantages(rewards, labels, set_size=2),
        of.unpad_rows(of.pad_rows(inputs["embeddings"], inputs["groups"], num_groups=3, max_size=16), inputs["groups"]),
    )
