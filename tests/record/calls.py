"""The calls of the record. No other module of it but compose.py knows the API.

A call takes a case and a way to compute it, and returns tensors by name, always in the padded layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.record import compose, inputs
from tests.record.cases import Case, Fields
from tests.record.compose import old_and_advantages

Results = dict[str, Tensor]


class Way(NamedTuple):
    """How a case is computed. Layout and memory matter to some calls only."""

    backend: str = "reference"  # or "kernel"
    dtype: torch.dtype = torch.float64
    layout: str = "padded"  # or "packed"
    memory: str = "fast"  # or "low"

    def __str__(self) -> str:
        return f"{self.backend}, {str(self.dtype).removeprefix('torch.')}, {self.layout}, {self.memory}"

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": "reference" if self.backend == "reference" else None}

    def laid_out(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs in the dtype and, if they have an entry per token, in the layout of the call."""

        def converted(value: Tensor) -> Tensor:
            value = value.to(self.dtype) if value.is_floating_point() else value
            is_of_tokens = value.shape[:2] == inputs.IN_ROW.shape
            return value[inputs.IN_ROW] if self.layout == "packed" and is_of_tokens else value.clone()

        batch = {name: converted(value) for name, value in batch.items()}
        if self.layout == "packed":
            batch["bounds"] = torch.cat((torch.zeros(1, dtype=torch.long), inputs.LENGTHS.cumsum(0)))
        return batch

    def padded(self, value: Tensor) -> Tensor:
        """A result with an entry per token as [ROWS, WIDTH, ...]."""
        if self.layout == "padded":
            return value
        padded = value.new_zeros((*inputs.IN_ROW.shape, *value.shape[1:]))
        padded[inputs.IN_ROW] = value
        return padded


def named(prefix: str, metrics: dict[str, float]) -> Results:
    return {f"{prefix}/{name}": torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def config_of(kind: Any, method: Fields) -> Any:
    """A config from the fields of a system's settings under its name, or from its own."""
    for peer, fields in method.items():
        if isinstance(fields, dict):
            return getattr(kind, peer)(**fields)
    return kind(**method)


# Losses

_TOKENS = {
    "reference": "ref_logprobs",
    "far reference": "ref_logprobs",
    "importance": "is_weights",
    "row importance": "is_weights",
    "segments": "segments",
    "shares": "weights",
    "index": "term_index",
}


def _of_tokens(case: Case, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments that a loss has whatever it starts from."""
    arguments: dict[str, Any] = {_TOKENS[name]: batch[name] for name in case.inputs if name in _TOKENS}
    arguments["mask"] = batch["mask"]
    arguments["cu_seqlens"] = batch.get("bounds")
    if "counts" in case.inputs:
        arguments["normalizer"] = {"tokens": 40.0, "rows": 8.0, "segments": torch.tensor(17)}
    if "importance of rows" in case.inputs:
        arguments["is_weights"] = batch["row importance"][:, 0]
    return arguments


def _loss(result: Any, leaves: dict[str, Tensor], way: Way) -> Results:
    """Loss, gradients and metrics. Leaves with an entry per token are in the layout of the call."""
    result.loss.backward()
    metrics = result.metrics
    results = {"loss": result.loss.detach()}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            is_of_tokens = name in ("logprobs", "entropy", "hidden", "logits")
            results[f"gradient by {name}"] = way.padded(leaf.grad) if is_of_tokens else leaf.grad
    if metrics is None:
        return results
    results |= named("metrics", metrics.to_dict()) | named("trl", metrics.trl()) | named("verl", metrics.verl())
    if metrics.distillation is not None:
        divergence, mass = metrics.distillation.divergence, metrics.distillation.mass
        results |= {"divergence": way.padded(divergence), "mass": way.padded(mass)}
    return results


def policy_loss(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.tokens())
    leaves = {"logprobs": batch["logprobs"].requires_grad_()}
    arguments = _of_tokens(case, batch) | way.options
    if "entropy" in case.inputs:
        leaves["entropy"] = arguments["entropy"] = batch["entropy"].requires_grad_()
    if "log_z" in case.inputs:
        leaves["log_z"] = batch["log_z"].requires_grad_()
    config, composed = compose.split(case.method)
    return _loss(compose.loss(batch["logprobs"], case, batch, arguments, config, composed), leaves, way)


_SCALING = {"softcap": 2.0, "logit_scale": 0.75}


def _lm_head(case: Case, batch: dict[str, Tensor], leaves: dict[str, Tensor]) -> gk.LMHead:
    """The head, whose tensors with a gradient become leaves."""
    options: dict[str, Any] = {name: number for name, number in _SCALING.items() if name in case.inputs}
    if "bias" in case.inputs:
        options["bias"] = leaves["bias"] = batch["bias"].requires_grad_()
    if "lora" in case.inputs:
        leaves |= {name: batch[name].requires_grad_() for name in ("lora a", "lora b")}
        options["lora"] = (batch["lora a"], batch["lora b"], 0.5)
    return gk.LMHead(batch["weight"], **options)


def _of_head(case: Case, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments beside the head."""
    arguments: dict[str, Any] = {"temperature": batch["temperatures"]} if "temperatures" in case.inputs else {}
    if "temperature" in case.inputs:
        arguments["temperature"] = 1.25
    if "support" in case.inputs:
        kept = batch["kept ids"].flatten(0, -2)
        arguments["support"] = (kept.flatten(), torch.arange(len(kept) + 1) * kept.shape[-1])
    if "positions" in case.inputs:
        arguments["positions"] = batch["positions"]
    return arguments


def linear_policy_loss(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.head())
    leaves = {name: batch[name].requires_grad_() for name in ("hidden", "weight")}
    lm_head, of_head = _lm_head(case, batch, leaves), _of_head(case, batch)
    arguments = _of_tokens(case, batch)
    if "reference hidden" in case.inputs:
        arguments["ref_hidden"] = batch["reference hidden"]
    if "reference weight" in case.inputs:
        bias = batch["bias"].detach() / 2
        arguments["ref_head"] = dataclasses.replace(lm_head, weight=batch["reference weight"], bias=bias, lora=None)
    method = {name: fields for name, fields in case.method.items() if name != "teacher"}
    config, composed = compose.split(method)
    chunk = None if "support" in case.inputs else 7
    head = (batch["hidden"], lm_head, batch["targets"])
    if composed:  # four products
        has_entropy = "top_entropy_quantile" in composed
        measured = gk.linear_logprobs(*head, return_entropy=has_entropy, chunk_size=chunk, **of_head, **way.options)
        arguments["mask"] = arguments["mask"] & (batch["targets"] != -100)
        arguments |= {"entropy": measured.entropy} | way.options
        result = compose.loss(measured.logprobs, case, batch, arguments, config, composed)
        return _loss(result, leaves, way)
    if "teacher" in case.method:
        arguments["teacher"] = gk.Teacher(batch["teacher ids"], batch["teacher logprobs"], **case.method["teacher"])
    result = gk.linear_policy_loss(
        *head,
        *old_and_advantages(case, batch),
        config=config,
        memory=way.memory,
        chunk_size=chunk,
        return_entropy="measured entropy" in case.inputs,
        **arguments,
        **of_head,
        **way.options,
    )
    return _loss(result, leaves, way)


def loss_of_logits(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.head())
    logits = (batch["hidden"] @ batch["weight"].T).requires_grad_()
    config, _ = compose.split(case.method)
    arguments = _of_tokens(case, batch)
    logprobs, entropy = gk.token_logprobs(logits, batch["targets"], return_entropy=True, **way.options)
    arguments["mask"] = arguments["mask"] & (batch["targets"] != -100)
    arguments["entropy"] = entropy if config.entropy_coef != 0 else None
    result = gk.policy_loss(logprobs, *old_and_advantages(case, batch), config=config, **arguments, **way.options)
    return _loss(result, {"logits": logits}, way)


def _logprobs(result: gk.TokenLogprobs, batch: dict[str, Tensor], leaves: dict[str, Tensor]) -> Results:
    """Log-probs and entropies, and the gradients of a sum of both with fixed factors."""
    factors = batch["upstream"], batch["entropy upstream"]
    sum((values * factor).sum() for values, factor in zip(result, factors, strict=True)).backward()
    gradients = {f"gradient by {name}": leaf.grad for name, leaf in leaves.items()}
    return {"logprobs": result.logprobs.detach(), "entropy": result.entropy.detach()} | gradients


def token_logprobs(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.head())
    logits = (batch["hidden"] @ batch["weight"].T).requires_grad_()
    arguments = _of_head(case, batch) | {name: number for name, number in _SCALING.items() if name in case.inputs}
    kept = logits
    if arguments.pop("support", None) is not None:
        others = torch.ones_like(logits, dtype=torch.bool).scatter(-1, batch["kept ids"], False)
        kept = logits.masked_fill(others, -torch.inf)
    result = gk.token_logprobs(kept, batch["targets"], return_entropy=True, **arguments, **way.options)
    return _logprobs(result, batch, {"logits": logits})


def linear_logprobs(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.head())
    leaves = {name: batch[name].requires_grad_() for name in ("hidden", "weight")}
    lm_head, arguments = _lm_head(case, batch, leaves), _of_head(case, batch)
    chunk = {} if "support" in case.inputs else {"chunk_size": 7}
    result = gk.linear_logprobs(
        batch["hidden"], lm_head, batch["targets"], return_entropy=True, **chunk, **arguments, **way.options
    )
    if "index" in case.inputs:
        index = batch["index"]
        result = gk.TokenLogprobs(*(torch.where(index < 0, 0, value.view(-1)[index.clamp(min=0)]) for value in result))
    return _logprobs(result, batch, leaves)


def distillation(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.head())
    leaves = {name: batch[name].requires_grad_() for name in ("hidden", "weight")}
    shares = batch["shares"] if "shares" in case.inputs else None
    teacher = gk.Teacher(batch["teacher ids"], batch["teacher logprobs"], weights=shares, **case.method)
    result = gk.linear_distillation_loss(
        batch["hidden"],
        _lm_head(case, batch, leaves),
        teacher,
        mask=batch["mask"],
        **_of_head(case, batch),
        **way.options,
    )
    result.loss.backward()
    gradients = {f"gradient by {name}": leaf.grad for name, leaf in leaves.items()}
    per_token = {"divergence": way.padded(result.divergence), "mass": way.padded(result.mass)}
    return {"loss": result.loss.detach()} | per_token | gradients


# Advantages


def _tensors(result: Any) -> Results:
    """The fields of a NamedTuple that are tensors."""
    return {name: value for name, value in result._asdict().items() if isinstance(value, Tensor)}


def group_advantages(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.rewards())
    rewards = batch["columns"] if "columns" in case.inputs else batch["rewards"]
    arguments = {name: batch[name] for name in ("valid", "subgroups", "lengths", "baselines") if name in case.inputs}
    config = gk.AdvantageConfig(**case.method)
    return _tensors(gk.group_advantages(rewards, batch["groups"], config=config, **arguments, **way.options))


def gigpo_advantages(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.rewards())
    arguments = (batch["rewards"], batch["columns"][:, 1], batch["groups"], batch["subgroups"])
    return {"advantages": gk.gigpo_advantages(*arguments, **case.method, **way.options)}


def running(case: Case, way: Way) -> Results:
    """Two batches, the second without the first key of the other."""
    batch = way.laid_out(inputs.rewards())
    ((kind, fields),) = case.method.items()
    state = {"ema": gk.EmaBaseline, "tracker": gk.ValueTracker, "norm": gk.RunningNorm}[kind](**fields)
    values = batch["shares of success"] if kind == "tracker" else batch["rewards"]
    drift = [batch["drift"]] if kind == "tracker" else []
    first = state.step(values, batch["groups"], *drift)
    second = state.step(values[:5], batch["groups"][1:6], *(part[1:6] for part in drift))
    return {"first": first, "second": second}


def token_advantages(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.steps())
    result = gk.token_advantages(
        batch["unscored rewards" if "unscored rewards" in case.inputs else "rewards"],
        batch["values"] if "values" in case.inputs else None,
        mask=batch["mask"],
        turns=batch["turns"] if "turns" in case.inputs else None,
        cu_seqlens=batch.get("bounds"),
        config=gk.TokenAdvantageConfig(**case.method),
        **way.options,
    )
    return {name: way.padded(value) for name, value in _tensors(result).items()}


def optimal_baseline(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.steps())
    weights = batch["importance"] if "importance" in case.inputs else None
    result = gk.optimal_token_baseline(
        batch["rewards"],
        batch["logprobs"],
        batch["squares"],
        inputs.GROUPS,
        mask=batch["mask"],
        is_weights=weights,
        **case.method,
    )
    return _tensors(result)


# Corrections, segments, groups of similar responses


def sampling_correction(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.tokens())
    config = config_of(gk.CorrectionConfig, case.method)
    result = gk.sampling_correction(
        batch["old"],
        batch["sampler"],
        mask=batch["mask"],
        cu_seqlens=batch.get("bounds"),
        config=config,
        **way.options,
    )
    peer = next((name for name in ("verl", "trl") if name in case.method), None)
    metrics = named("metrics", result.metrics.to_dict())
    if peer is not None:
        metrics |= named(peer, result.metrics.to_dict(peer))
    return {"weights": way.padded(result.weights), "mask": way.padded(result.mask)} | metrics


def endpoint_segments(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.long_rows())
    arguments = {name: batch[name] for name in ("values", "groups") if name in case.inputs}
    config = gk.SegmentConfig(**case.method)
    tokens = (batch[name] for name in ("rewards", "logprobs", "old", "mask"))
    result = gk.endpoint_segments(*tokens, config=config, **arguments, **way.options)
    if "metrics" not in case.inputs:
        return _tensors(result)
    threshold = gk.SegmentThreshold(config)
    moved = {"next threshold": torch.tensor(threshold.update(result), dtype=torch.float64)}
    return _tensors(result) | named("metrics", gk.segment_metrics(result, batch["groups"])) | moved


def similarity_groups(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.embeddings())
    config = gk.SimilarityConfig(**case.method)
    arguments: dict[str, Any] = {"valid": batch["valid"]} if "valid" in case.inputs else {}
    if "sizes" in case.inputs:
        arguments |= {"num_groups": 8, "max_size": 7}
    result = gk.similarity_groups(batch["vectors"], batch["groups"], config=config, **arguments, **way.options)
    return _tensors(result) | named("metrics", gk.similarity_metrics(result))


def similarity_parts(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.embeddings())
    distances = gk.pairwise_cosine(batch["vectors"], batch["groups"], valid=batch["valid"], **way.options)
    results = {"distances": distances}
    for linkage in ("single", "complete", "average", "ward"):
        tree = gk.agglomerate(distances, linkage=linkage, **way.options)
        results |= {f"{linkage} {name}": value for name, value in _tensors(tree).items()}
    clusters = gk.cluster_distances(distances, **way.options)
    scores = gk.silhouette(distances, clusters.labels, **way.options)
    return results | _tensors(scores) | {f"clusters {name}": value for name, value in _tensors(clusters).items()}


def diversity(case: Case, way: Way) -> Results:
    batch = inputs.embeddings()
    distances = gk.pairwise_cosine(batch["vectors"], batch["groups"], valid=batch["valid"], backend="reference")
    labels = gk.cluster_distances(distances, **way.options).labels
    rewards = gk.diversity.pad_rows(batch["rewards"], batch["groups"])
    return {
        "similarity weights": gk.diversity.similarity_weights(distances),
        "threshold components": gk.diversity.threshold_components(distances, 0.2),
        "distinctness weights": gk.diversity.distinctness_weights(labels),
        "agreement weights": gk.diversity.agreement_weights(labels, entropy_bound=0.9),
        "uniqueness weights": gk.diversity.uniqueness_weights(labels),
        "semantic entropy": gk.diversity.semantic_entropy(labels),
        "normalized entropy": gk.diversity.semantic_entropy(labels, normalize=True),
        "vendi score": gk.diversity.vendi_score(distances),
        "log determinants": gk.diversity.leave_one_out_logdet(distances).marginal,
        "mmr rewards": gk.diversity.mmr_rewards(rewards, distances, lam=0.5),
        "set advantages": gk.diversity.set_advantages(rewards, labels, set_size=2),
    }


def similarity_advantages(case: Case, way: Way) -> Results:
    batch = way.laid_out(inputs.embeddings())
    config = gk.AdvantageConfig(**case.method)
    arguments = (batch["rewards"], batch["vectors"], batch["groups"])
    return _tensors(gk.similarity_advantages(*arguments, valid=batch["valid"], config=config, **way.options))
