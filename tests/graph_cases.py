"""Calls of every op, forward and backward, that a CUDA graph can capture: with inputs that stay in place and change.

Python numbers are constants of a graph, so everything that differs between two draws of the inputs is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends
from tests.graph_groups import (
    diversity,
    draw_embeddings,
    draw_tokens,
    gigpo_advantages,
    of_distances,
    optimal_token_baseline,
    segments,
    similarity,
    similarity_advantages,
    token_advantages,
)
from tests.graph_inputs import (
    COLUMNS,
    HIDDEN,
    ROWS,
    TOKENS,
    WIDTH,
    Case,
    Inputs,
    bounds,
    present,
    segment_ids,
    with_gradients,
)

# group_advantages


def draw_rewards() -> Inputs:
    clusters, ids = torch.randint(-1, 3, (16,)), torch.randint(-5, 5, (16,))
    return {"rewards": torch.randn(16), "groups": ids, "subgroups": clusters, "valid": torch.rand(16) < 0.8}


def advantages(config: Any, *names: str) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        more = {name: inputs[name] for name in names}
        return present(
            *gk.group_advantages(inputs["rewards"], more.pop("groups", 4), config=config, backend=backend, **more)
        )

    return Case(draw_rewards, call)


# token_logprobs


def draw_logits() -> Inputs:
    targets = torch.randint(0, COLUMNS, (ROWS, WIDTH))
    targets[0, 0] = -100
    return {
        "logits": torch.randn(ROWS, WIDTH, COLUMNS).requires_grad_(),
        "targets": targets,
        "temperature": torch.rand(ROWS, WIDTH) + 0.5,
        "upstream": torch.randn(ROWS, WIDTH),
    }


def draw_half_logits() -> Inputs:
    inputs = draw_logits()
    return inputs | {"logits": inputs["logits"].detach().bfloat16().requires_grad_()}


def token_logprobs(inplace: bool) -> Callable[[Inputs, str], list[Tensor]]:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        result = gk.token_logprobs(
            inputs["logits"] * 1,
            inputs["targets"],
            temperature=inputs["temperature"],
            softcap=9.0,
            return_entropy=True,
            inplace_backward=inplace,
            backend=backend,
        )
        assert result.entropy is not None
        return with_gradients(inputs, ((result.logprobs + result.entropy) * inputs["upstream"]).sum(), *result)

    return call


# policy_loss and the losses from logits and hidden states


def draw_policy(shape: tuple[int, ...]) -> Inputs:
    old = -torch.rand(shape)
    inputs = {
        "old_logprobs": old,
        "advantages": torch.randn(ROWS),
        "mask": torch.rand(shape) < 0.8,
        "segments": segment_ids((ROWS, WIDTH)).reshape(shape),
        "ref_logprobs": old + 0.1 * torch.randn(shape),
        "sampling_logprobs": old + 0.1 * torch.randn(shape),
        "policy_mask": torch.rand(shape) < 0.6,
        "is_weights": torch.rand(shape) + 0.5,
        "groups": torch.randint(3, (ROWS,)),
        "log_z": torch.randn(ROWS),
        "tokens": torch.rand(()) + 9,
        "logprobs": (old + 0.3 * torch.randn(shape)).requires_grad_(),
        "entropy": torch.rand(shape).requires_grad_(),
    }
    return inputs | ({"cu_seqlens": bounds()} if len(shape) == 1 else {})


def policy_arguments(inputs: Inputs, config: gk.LossConfig, *optional: str) -> dict[str, Any]:
    """Inputs that the config uses, and optional ones, without log-probs, old log-probs and advantages."""
    names = ["mask", *optional]
    names += ["cu_seqlens"] if "cu_seqlens" in inputs else []
    names += ["segments"] if config.ratio == "segment" and "cu_seqlens" not in inputs else []
    names += ["ref_logprobs"] if config.kl != "none" and "ref_logprobs" in inputs else []
    normalizer: Any = inputs["tokens"]
    if config.ratio == "segment":
        normalizer = {"segments": inputs["tokens"] / 2, "tokens": inputs["tokens"]}
    return {"config": config, "normalizer": normalizer} | {name: inputs[name] for name in names}


CLIP = gk.LossConfig.trl(loss_type="dapo", beta=0.1)
SEQUENCES = gk.LossConfig.trl(loss_type="grpo", importance_sampling_level="sequence", beta=0.1)
SEGMENTS = gk.LossConfig(ratio="segment", kl="k3", kl_coef=0.1)
BONUS = gk.LossConfig(entropy_coef=0.01)


def policy_loss(config: gk.LossConfig, shape: tuple[int, ...], *optional: str) -> Case:
    needs_entropy = config.entropy_coef != 0

    def draw() -> Inputs:
        inputs = draw_policy(shape)
        return inputs if needs_entropy else {name: value for name, value in inputs.items() if name != "entropy"}

    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        arguments = policy_arguments(inputs, config, *optional)
        arguments |= {"entropy": inputs.get("entropy"), "backend": backend}
        result = gk.policy_loss(inputs["logprobs"], inputs["old_logprobs"], inputs["advantages"], **arguments)
        return with_gradients(inputs, result.loss * inputs["tokens"], result.metrics.tensor)

    return Case(draw, call)


def variants(inputs: Inputs, backend: str) -> list[Tensor]:
    lp, old, advantages = (inputs[name] for name in ("logprobs", "old_logprobs", "advantages"))
    rows = {"mask": inputs["mask"], "cu_seqlens": inputs.get("cu_seqlens")}
    of = gk.variants
    shares = gk.token_shares(**rows, aggregation="seq-mean-token-mean")
    loss = of.gvpo_loss(lp, old, advantages, inputs["groups"], **rows)
    loss = loss + of.real_loss(lp, old, advantages, inputs["groups"], count=inputs["tokens"], **rows)
    loss = loss + of.flowrl_loss(lp, old, inputs["ref_logprobs"], advantages, inputs["log_z"], **rows)
    loss = loss + of.kl_cov_penalty(lp, old, advantages, shares, ratio=0.2, **rows)
    loss = loss + of.average_logprobs(lp, old, **rows).sum() + of.geometric_average_logprobs(lp, old, **rows).sum()
    results = [
        shares,
        of.off_policy_mask(lp, inputs["sampling_logprobs"], advantages, threshold=0.01, **rows),
        of.high_entropy_mask(inputs["entropy"], quantile=0.5, **rows),
        of.clip_cov_weights(lp, old, advantages, ratio=0.2, bounds=(-1.0, 1.0), **rows),
        of.future_kl_weights(lp, old, advantages, half_life=2.0, cap=1.2, safety=1.1, **rows),
    ]
    return with_gradients({"logprobs": lp}, loss, *results)


CORRECTION = gk.CorrectionConfig(
    weights="token",
    weight_max=1.1,
    batch_normalize=True,
    rejections=(("token_k3", None, 0.01), ("seq_mean_k1", -0.05, 0.05)),
    m2_threshold=0.01,
)


def correction(shape: tuple[int, ...]) -> Case:
    def draw() -> Inputs:
        inputs = draw_policy(shape)
        return {
            name: inputs[name] for name in ("old_logprobs", "sampling_logprobs", "mask", "cu_seqlens") if name in inputs
        }

    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        result = gk.sampling_correction(**inputs, config=CORRECTION)
        return [result.weights, result.mask, result.metrics.tensor]

    return Case(draw, call)


def from_source(shape: tuple[int, ...], source: Inputs) -> Inputs:
    policy = {name: value for name, value in draw_policy(shape).items() if not value.requires_grad}
    return policy | source | {"targets": torch.randint(0, COLUMNS, shape)}


def draw_head(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (ROWS, WIDTH)) -> Inputs:
    return from_source(
        shape,
        {
            "hidden": torch.randn(*shape, HIDDEN).to(dtype).requires_grad_(),
            "weight": torch.randn(COLUMNS, HIDDEN).to(dtype).requires_grad_(),
            "bias": torch.randn(COLUMNS).to(dtype).requires_grad_(),
            "upstream": torch.randn(shape),
            "positions": torch.randperm(TOKENS)[:7],
        },
    )


def linear_logprobs(inputs: Inputs, backend: str) -> list[Tensor]:
    """Two chunks of rows."""
    result = gk.linear_logprobs(
        inputs["hidden"],
        inputs["weight"],
        inputs["targets"],
        bias=inputs["bias"],
        return_entropy=True,
        chunk_size=8,
        backend=backend,
    )
    assert result.entropy is not None
    return with_gradients(inputs, ((result.logprobs + result.entropy) * inputs["upstream"]).sum(), *result)


def linear_logprobs_at_positions(inputs: Inputs, backend: str) -> list[Tensor]:
    result = gk.linear_logprobs(
        inputs["hidden"],
        inputs["weight"],
        inputs["targets"],
        bias=inputs["bias"],
        positions=inputs["positions"],
        backend=backend,
    )
    return with_gradients(inputs, result.logprobs.sum(), result.logprobs)


def linear_loss(
    config: gk.LossConfig, draw: Callable[[], Inputs] = draw_head, at_positions: bool = False, **options: Any
) -> Case:
    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        result = gk.linear_policy_loss(
            inputs["hidden"],
            inputs["weight"],
            inputs["targets"],
            inputs["old_logprobs"],
            inputs["advantages"],
            bias=inputs["bias"],
            backend=backend,
            **options,
            **policy_arguments(inputs, config),
            **{name: inputs[name] for name in ("ref_hidden", "ref_weight") if name in inputs},
            **({"positions": inputs["positions"]} if at_positions else {}),
        )
        return with_gradients(inputs, result.loss * 3, result.metrics.tensor)

    return Case(draw, call)


def draw_with_reference() -> Inputs:
    inputs = draw_head()
    del inputs["ref_logprobs"]
    return inputs | {"ref_hidden": torch.randn(ROWS, WIDTH, 3), "ref_weight": torch.randn(COLUMNS, 3)}


def draw_adapted(dtype: torch.dtype = torch.float32) -> Inputs:
    factors = {"lora_a": torch.randn(2, HIDDEN), "lora_b": torch.randn(COLUMNS, 2)}
    return draw_head(dtype) | {name: factor.requires_grad_() for name, factor in factors.items()}


def loss_with_adapter(inputs: Inputs, backend: str) -> list[Tensor]:
    """Factors in float32, also of a head in half precision."""
    lora = (inputs["lora_a"], inputs["lora_b"], 0.5)
    return linear_loss(BONUS, lora=lora, chunk_size=8).call(inputs, backend)


def draw_tree() -> Inputs:
    """Tokens that share positions; some positions have no token, and some tokens are padding."""
    return draw_head() | {"term_index": torch.randint(-1, TOKENS, (ROWS, WIDTH))}


def loss_of_tree(inputs: Inputs, backend: str) -> list[Tensor]:
    return linear_loss(CLIP, term_index=inputs["term_index"], chunk_size=8).call(inputs, backend)


def draw_taught(dtype: torch.dtype = torch.float32) -> Inputs:
    """A batch for the loss, and the most probable tokens of a teacher."""
    inputs = draw_head(dtype)
    logprobs, ids = torch.randn(ROWS, WIDTH, COLUMNS).log_softmax(-1).topk(3)
    return inputs | {"teacher_ids": ids, "teacher_logprobs": logprobs}


def loss_with_teacher(inputs: Inputs, backend: str) -> list[Tensor]:
    teacher = gk.Teacher(inputs["teacher_ids"], inputs["teacher_logprobs"], coef=0.5, normalizer=inputs["tokens"])
    return linear_loss(BONUS, teacher=teacher, chunk_size=8).call(inputs, backend)


def draw_teacher(dtype: torch.dtype = torch.float32) -> Inputs:
    names = ("hidden", "weight", "bias", "mask", "teacher_ids", "teacher_logprobs")
    return {name: value for name, value in draw_taught(dtype).items() if name in names}


def distillation(dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    """Two chunks of rows."""

    def call(inputs: Inputs, backend: str) -> list[Tensor]:
        result = gk.linear_distillation_loss(**inputs, **options, chunk_size=8, backend=backend)
        return with_gradients(inputs, result.loss * 3, result.divergence, result.mass)

    return Case(lambda: draw_teacher(dtype), call)


def draw_kept() -> Inputs:
    """Five ids a row, the target first."""
    inputs = draw_head()
    ids = inputs["targets"].clamp(min=0).reshape(-1, 1) + 6 * torch.arange(5)
    return inputs | {"token_ids": (ids % COLUMNS).flatten(), "offsets": 5 * torch.arange(TOKENS + 1)}


def loss_over_support(inputs: Inputs, backend: str) -> list[Tensor]:
    """In Triton also with the CUDA backend, which has no kernels over a support."""
    support = inputs["token_ids"], inputs["offsets"]
    return linear_loss(BONUS, support=support).call(inputs, "triton" if backend == "cuda" else backend)


PADDED, PACKED = (ROWS, WIDTH), (TOKENS,)
CASES: dict[str, Case] = {
    "group_advantages": advantages("grpo"),
    "group_advantages of ids": advantages("rloo", "groups", "valid"),
    "group_advantages of subgroups": advantages(gk.AdvantageConfig("grpo", shrinkage=2.0), "groups", "subgroups"),
    "group_advantages of a batch": advantages("batch_std", "groups"),
    "gigpo_advantages": Case(draw_rewards, gigpo_advantages),
    "token_logprobs": Case(draw_logits, token_logprobs(False)),
    "token_logprobs of halves": Case(draw_half_logits, token_logprobs(False)),
    "token_logprobs in place": Case(draw_logits, token_logprobs(True)),
    "policy_loss": policy_loss(CLIP, PADDED),
    "policy_loss of sequences": policy_loss(SEQUENCES, PACKED),
    "policy_loss of segments": policy_loss(SEGMENTS, PADDED),
    "policy_loss of weighted tokens": policy_loss(CLIP, PADDED, "is_weights"),
    "policy_loss with a policy mask": policy_loss(CLIP, PACKED, "policy_mask"),
    "policy_loss with an entropy bonus": policy_loss(BONUS, PACKED),
    "sampling_correction": correction(PADDED),
    "sampling_correction of packed rows": correction(PACKED),
    "linear_logprobs": Case(draw_head, linear_logprobs),
    "linear_logprobs of halves": Case(lambda: draw_head(torch.bfloat16), linear_logprobs),
    "linear_logprobs at positions": Case(draw_head, linear_logprobs_at_positions),
    "linear_distillation_loss": distillation(),
    "linear_distillation_loss of halves": distillation(torch.bfloat16, kind="jsd", tail="renormalise"),
    "linear_policy_loss": linear_loss(CLIP, chunk_size=8),
    "linear_policy_loss with a teacher": Case(draw_taught, loss_with_teacher),
    "linear_policy_loss of halves": linear_loss(BONUS, lambda: draw_head(torch.bfloat16)),
    "linear_policy_loss with a reference head": linear_loss(CLIP, draw_with_reference, chunk_size=8),
    "linear_policy_loss at positions": linear_loss(CLIP, at_positions=True),
    "linear_policy_loss at positions in little memory": linear_loss(CLIP, at_positions=True, memory="low"),
    "linear_policy_loss in little memory": linear_loss(CLIP, memory="low"),
    "linear_policy_loss over a support": Case(draw_kept, loss_over_support),
    "linear_policy_loss with an adapter": Case(draw_adapted, loss_with_adapter),
    "linear_policy_loss of halves with an adapter": Case(lambda: draw_adapted(torch.bfloat16), loss_with_adapter),
    "linear_policy_loss of shared positions": Case(draw_tree, loss_of_tree),
    "linear_policy_loss of sequences": linear_loss(SEQUENCES, chunk_size=2 * WIDTH),
    "linear_policy_loss of packed sequences": linear_loss(SEQUENCES, lambda: draw_head(shape=PACKED)),
    "endpoint_segments": segments(PADDED, "values", norm="batch"),
    "endpoint_segments of prompts": segments(PACKED, "groups", norm="prompt"),
    "token_advantages": token_advantages(PADDED, "values", gamma=0.9),
    "token_advantages of turns": token_advantages(PACKED, "turns", estimator="reinforce_plus_plus", gamma=0.9),
    "optimal_token_baseline": Case(lambda: draw_tokens(PADDED), optimal_token_baseline),
    "similarity_groups": Case(
        draw_embeddings,
        lambda inputs, backend: present(*gk.similarity_groups(inputs["embeddings"], 8, backend=backend)),
    ),
    "similarity_groups of ids": Case(draw_embeddings, similarity),
    "similarity_advantages": Case(draw_embeddings, similarity_advantages),
    "pairwise_cosine": Case(
        draw_embeddings, lambda inputs, backend: present(gk.pairwise_cosine(inputs["embeddings"], 8, backend=backend))
    ),
    "cluster_distances": of_distances(gk.cluster_distances),
    "agglomerate": of_distances(gk.agglomerate),
    "silhouette": Case(
        draw_embeddings,
        lambda inputs, backend: present(*gk.silhouette(inputs["distances"], inputs["labels"], backend=backend)),
    ),
    "silhouette of rows": Case(
        draw_embeddings,
        lambda inputs, backend: present(
            *gk.silhouette(inputs["distances"], inputs["labels"].flatten(), inputs["halves"], backend=backend)
        ),
    ),
    "diversity": Case(draw_embeddings, diversity),
    "variants": Case(lambda: draw_policy(PADDED), variants),
    "variants of packed rows": Case(lambda: draw_policy(PACKED), variants),
}

# Ops that call two whose CPU kernels take copies of a GPU's tensors, and the cases of all of these.
OF_TWO_COPIED = ("gigpo_advantages", "similarity_advantages")
COPIED = [name for name in CASES if name.partition(" ")[0] in (*backends.through_host, *OF_TWO_COPIED)]


def waiting(run: Callable[[Inputs, str], Any], draw: Callable[[], Inputs] = draw_head) -> Case:
    return Case(draw, lambda inputs, backend: run(inputs, backend) and [])


# Settings that wait for the GPU, as documented, and therefore cannot be captured.
WAITING: dict[str, Case] = {
    "linear_logprobs at a mask": waiting(
        lambda inputs, backend: gk.linear_logprobs(
            inputs["hidden"], inputs["weight"], inputs["targets"], positions=inputs["mask"], backend=backend
        )
    ),
    "linear_policy_loss without excluded tokens": linear_loss(CLIP, compact=True),
    "linear_policy_loss at a mask": waiting(
        lambda inputs, backend: gk.linear_policy_loss(
            inputs["hidden"],
            inputs["weight"],
            inputs["targets"],
            None,
            inputs["advantages"],
            positions=inputs["mask"],
            backend=backend,
        )
    ),
    "linear_policy_loss of packed sequences in chunks": linear_loss(
        SEQUENCES, lambda: draw_head(shape=PACKED), chunk_size=8
    ),
    "similarity_groups of uncounted ids": waiting(
        lambda inputs, backend: gk.similarity_groups(inputs["embeddings"], inputs["groups"], backend=backend),
        draw_embeddings,
    ),
    "pairwise_cosine of uncounted ids": waiting(
        lambda inputs, backend: gk.pairwise_cosine(
            inputs["embeddings"], inputs["groups"], num_groups=3, backend=backend
        ),
        draw_embeddings,
    ),
    "reading metrics": waiting(
        lambda inputs, backend: gk.policy_loss(
            inputs["logprobs"], None, inputs["advantages"], config="grpo", backend=backend
        ).metrics.to_dict(),
        lambda: draw_policy(PADDED),
    ),
}
