"""verl's advantage estimators, from the arguments that verl passes and, where needed, from the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.checks import unknown

# What patch_verl knows of the batch being processed. verl passes registered functions only a part of the DataProto, its
# gae no config, and none of them the sessions of its v1 trainer.
BATCH: ContextVar[Any] = ContextVar("grpo_kernels_verl_batch", default=None)
CONFIG: ContextVar[Any] = ContextVar("grpo_kernels_verl_config", default=None)
SESSIONS: ContextVar[Any] = ContextVar("grpo_kernels_verl_sessions", default=None)
# Key of our options in verl's `algorithm`.
OPTIONS = "grpo_kernels"
LABELS, EMBEDDINGS, SEGMENTS = "similarity_labels", "similarity_embeddings", "segment_ids"
NAMES = "similarity_group_labels"  # of the published implementation: texts such as "uid_0"
# whether responses without a token in the loss take part in the statistics of their group, as they do in verl
MASKED_ROWS, LEAVE_OUT, VOTE = "masked_rows", "leave_out", "vote"
# uid of the rows that verl's v1 trainer appends to make a batch divisible
_PAD_UID = re.compile(r"pad[0-9a-f]{32}")

PRESETS = {
    "fused_grpo": "verl-grpo",
    "fused_dr_grpo": "verl-dr-grpo",
    "fused_rloo": "verl-rloo",
    "fused_opo": "verl-opo",
    "fused_grpo_passk": "verl-grpo-passk",
    "fused_reinforce_plus_plus_baseline": "verl-reinforce-plus-plus-baseline",
    "fused_gpg": "verl-gpg",
    "fused_gdpo": "verl-gdpo",
    "similarity_group_grpo": "grpo",  # a cluster of one has nothing to compare with: 0, not its reward
}
# Estimators with one advantage per response, equal at all of its tokens; group_ppo has one per token.
OF_RESPONSES = tuple(PRESETS)
ESTIMATORS = (*OF_RESPONSES, "group_ppo")
# verl's own estimators that have TokenOptions
OF_TOKENS = ("gae", "reinforce_plus_plus")

SEPARATE, JOINED = "separate", "joined"


@dataclasses.dataclass(frozen=True)
class TokenOptions:
    """Keys of algorithm.grpo_kernels for advantages of tokens, by default as in verl.

    Args:
        carry_rewards: a reward at a token that does not count belongs to the last one before it that does
        session_outputs: "separate", or "joined": the outputs of a session follow each other as one response, with the
            score of the last one, which verl has copied to all
    """

    carry_rewards: bool = False
    session_outputs: str = SEPARATE

    @classmethod
    def of(cls, name: str) -> TokenOptions:
        options = cls(**_options(name, options_of(CONFIG.get()), cls, None)[0])
        carry = options.carry_rewards
        if not isinstance(carry, bool):
            raise TypeError(f"{name}: algorithm.{OPTIONS}.carry_rewards must be true or false, got {carry!r}")
        if options.session_outputs not in (SEPARATE, JOINED):
            key = f"algorithm.{OPTIONS}.session_outputs"
            raise unknown(name, key, options.session_outputs, (SEPARATE, JOINED))
        return options


Estimator = Callable[..., tuple[Tensor, Tensor]]
# Adaptive thresholds persist from batch to batch.
thresholds: dict[gk.SegmentConfig, gk.SegmentThreshold] = {}


def estimator(name: str) -> Estimator:
    """The function registered with verl under this name."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        reward_baselines: Any = None,  # passed to every estimator except verl's own GAE and GRPO
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if name == "group_ppo":
                return _of_segments(token_level_rewards, response_mask, index, config)
            advantages = response_advantages(name, token_level_rewards, response_mask.sum(-1), index, config)
            return to_tokens(advantages, token_level_rewards, response_mask)

    estimate.__name__ = estimate.__qualname__ = name
    return estimate


def response_advantages(name: str, token_level_rewards: Tensor, counts: Tensor, index: Any, config: Any) -> Tensor:
    """Advantages [B] of responses, of each of which `counts` [B] tokens are in the loss."""
    ids = _ids(name, index, token_level_rewards)
    clustering = gk.SimilarityConfig if name == "similarity_group_grpo" else None
    options, vote = _without_masked_rows(name, options_of(config))
    of_advantages, of_clusters = _options(name, options, gk.AdvantageConfig, clustering, (MASKED_ROWS,))
    settings = gk.AdvantageConfig.of(PRESETS[name])
    if settings.scale == "std" and config is not None and not config.get("norm_adv_by_std_in_grpo", True):
        of_advantages = {"scale": "none"} | of_advantages
    rewards = token_level_rewards.detach().sum(-1)
    if name == "fused_gdpo":
        rewards, weights = _columns(name, config, rewards)
        of_advantages = {"reward_weights": weights} | of_advantages
    settings = dataclasses.replace(settings, **of_advantages)
    valid = ~is_pad(index, counts) if vote else counts > 0
    kwargs: dict[str, Any] = {}
    if clustering is not None:
        kwargs["subgroups"] = _clusters(name, ids, valid, gk.SimilarityConfig(**of_clusters))
    if settings.needs_lengths:
        kwargs["lengths"] = counts
    return gk.group_advantages(rewards, ids, valid=valid, config=settings, **kwargs).advantages


def is_pad(index: Any, counts: Tensor) -> Tensor:
    """Rows [B] that verl's v1 trainer appended to make a batch divisible: those with its uid and without tokens."""
    named = [isinstance(uid, str) and _PAD_UID.fullmatch(uid) is not None for uid in index.tolist()]
    return torch.tensor(named, dtype=torch.bool, device=counts.device) & (counts == 0)


def to_tokens(advantages: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of advantages [B]."""
    tokens = advantages.to(rewards.dtype)[:, None] * mask
    return tokens, tokens


def grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Replaces verl's function, which has these arguments and does not read its config."""
    settings = dataclasses.replace(
        gk.AdvantageConfig.of("verl-grpo"), eps=epsilon, scale="std" if norm_adv_by_std_in_grpo else "none"
    )
    ids = gk.group_ids(index.tolist(), device=token_level_rewards.device)
    with torch.no_grad():
        result = gk.group_advantages(token_level_rewards.detach().sum(-1), ids, config=settings)
        return to_tokens(result.advantages, token_level_rewards, response_mask)


def gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Replaces verl's function, which has these arguments."""
    settings = gk.TokenAdvantageConfig("gae", gamma=float(gamma), lam=float(lam))
    return _of_tokens(token_level_rewards, values, response_mask, settings)


def reinforce_plus_plus_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Replaces verl's function, which ignores further arguments, too."""
    if config is None:
        raise ValueError("reinforce_plus_plus: config must be verl's algorithm section, which has gamma, got None")
    settings = gk.TokenAdvantageConfig("reinforce_plus_plus", gamma=float(config.gamma))
    return _of_tokens(token_level_rewards, None, response_mask, settings)


def optimal_token_baseline(name: str, places: str) -> Estimator:
    """Replaces verl's function of this name, which has these arguments."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any,
        old_log_probs: Tensor,
        sum_pi_squared: Tensor,
        rollout_is_weights: Tensor | None = None,
        handle_zero_tail: bool = True,
        epsilon: float = 1e-8,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        result = gk.optimal_token_baseline(
            token_level_rewards,
            old_log_probs,
            sum_pi_squared,
            gk.group_ids(index.tolist(), device=token_level_rewards.device),
            mask=response_mask,
            is_weights=rollout_is_weights,
            places=places,
            zero_tail=handle_zero_tail,
            eps=epsilon,
        )
        dtype = token_level_rewards.dtype
        return result.advantages.to(dtype), result.returns.to(dtype)

    estimate.__name__ = estimate.__qualname__ = name
    return estimate


def _of_tokens(
    rewards: Tensor, values: Tensor | None, mask: Tensor, settings: gk.TokenAdvantageConfig
) -> tuple[Tensor, Tensor]:
    options = TokenOptions.of(settings.estimator)
    settings = dataclasses.replace(settings, carry_rewards=options.carry_rewards)
    if options.session_outputs == JOINED:
        result = _of_sessions(settings.estimator, rewards, values, mask, settings)
    else:
        result = gk.token_advantages(rewards, values, mask=mask, config=settings)
    return result.advantages.to(rewards.dtype), result.returns.to(rewards.dtype)


def _of_sessions(
    name: str, rewards: Tensor, values: Tensor | None, mask: Tensor, settings: gk.TokenAdvantageConfig
) -> gk.TokenAdvantages:
    """Advantages across the outputs of each session."""
    sessions = SESSIONS.get()
    if sessions is None:
        raise ValueError(
            f"{name}: algorithm.{OPTIONS}.session_outputs must be {SEPARATE!r} where the outputs of sessions have no "
            f"keys, as in verl's trainer before v1, got {JOINED!r}"
        )
    scores = _column(name, "token_level_scores")
    if scores is None:
        raise ValueError(f"{name}: the batch must hold 'token_level_scores' for {JOINED!r} outputs, got none")
    is_copy = torch.ones(len(rewards), 1, dtype=torch.bool, device=rewards.device)
    is_copy[sessions.last] = False
    rewards = torch.where(is_copy, rewards - scores, rewards)  # what is left is the penalty of use_kl_in_reward
    order, of_row = sessions.order.to(rewards.device), sessions.of_row.to(rewards.device)
    result = gk.token_advantages(
        rewards[order],
        None if values is None else values[order],
        mask=mask[order],
        rollouts=of_row[order],
        config=settings,
    )
    place = order.argsort()
    return gk.TokenAdvantages(result.advantages[place], result.returns[place])


def _of_segments(rewards: Tensor, mask: Tensor, index: Any, config: Any) -> tuple[Tensor, Tensor]:
    name = "group_ppo"
    ids = _ids(name, index, rewards)
    fields, _ = _options(name, options_of(config), gk.SegmentConfig, None)
    for field in ("gamma", "lam"):
        if field in fields:
            raise ValueError(f"{name}: {field} must be set as algorithm.{field}, got algorithm.{OPTIONS}.{field}")
        fields[field] = 1.0 if config is None else float(config.get(field, 1.0))
    settings = gk.SegmentConfig(**fields)
    batch = _batch(name).batch
    if "old_log_probs" not in batch:
        raise ValueError(f"{name}: the batch must hold 'old_log_probs', got {sorted(batch.keys())}")
    now, values = batch["old_log_probs"], batch.get("values", None)
    grouped = values is None or settings.norm == "prompt"
    threshold = thresholds.setdefault(settings, gk.SegmentThreshold(settings))
    segments = gk.endpoint_segments(
        _inside(rewards, mask),
        now,
        batch.get("rollout_log_probs", now),
        mask,
        values=values,
        groups=ids if grouped else None,
        threshold=threshold,
        config=settings,
    )
    threshold.update(segments)
    batch[SEGMENTS] = segments.segment_ids  # for the loss 'fused_segment'
    return segments.advantages.to(rewards.dtype), segments.returns.to(rewards.dtype)


def _inside(rewards: Tensor, mask: Tensor) -> Tensor:
    """Moves rewards outside the mask to the last token before them inside it, as token_advantages carries them.

    verl puts a score at the last token of a response, which may be a tool's or a rejected one.
    """
    is_inside = mask.bool()
    before = torch.where(is_inside, torch.arange(rewards.shape[1], device=rewards.device), -1).cummax(1).values
    counts = is_inside | (rewards.isfinite() & (before >= 0))
    return torch.zeros_like(rewards).scatter_add(1, before.clamp(min=0), torch.where(counts, rewards, 0))


def _ids(name: str, index: Any, rewards: Tensor) -> Tensor:
    """Numbers of the rows' uids."""
    if index is None:
        raise ValueError(f"{name}: index must be given, which verl takes from the batch's 'uid', got None")
    ids = gk.group_ids(index.tolist(), device=rewards.device)
    if len(ids) != len(rewards):
        raise ValueError(f"{name}: index must have {len(rewards)} uids, got {len(ids)}")
    return ids


def _without_masked_rows(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The other options, and whether responses without a token in the loss vote."""
    choice = options.get(MASKED_ROWS, LEAVE_OUT)
    if choice not in (LEAVE_OUT, VOTE):
        raise unknown(name, f"algorithm.{OPTIONS}.{MASKED_ROWS}", choice, (LEAVE_OUT, VOTE))
    return {key: value for key, value in options.items() if key != MASKED_ROWS}, choice == VOTE


def _options(
    name: str, options: dict[str, Any], first: type, second: type | None, others: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options in algorithm.grpo_kernels as fields of the two classes; `others` are keys beside them, for errors."""
    fields = [_fields(kind) for kind in (first, second) if kind is not None]
    for key in options:
        if not any(key in names for names in fields):
            known = [*(field for names in fields for field in names), *others]
            raise unknown(name, f"keys of algorithm.{OPTIONS}", key, known)
    parts = [{key: value for key, value in options.items() if key in names} for names in fields]
    return parts[0], parts[1] if len(parts) > 1 else {}


def options_of(config: Any) -> dict[str, Any]:
    """Our options in an AlgoConfig, a dict or a DictConfig."""
    options = None if config is None else config.get(OPTIONS, None)
    if options is None:
        return {}
    if not isinstance(options, Mapping) and not hasattr(options, "items"):
        raise TypeError(f"algorithm.{OPTIONS} must be a mapping, got {type(options).__name__} {options!r}")
    # OmegaConf has its own list type
    return {
        key: value if isinstance(value, str) or not hasattr(value, "__len__") else tuple(value)
        for key, value in options.items()
    }


def _fields(kind: type) -> list[str]:
    # the estimator follows from the name
    return [field.name for field in dataclasses.fields(kind) if field.init and field.name != "estimator"]


@contextlib.contextmanager
def knowing(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Within this context estimators see a value of BATCH, CONFIG or SESSIONS."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _batch(name: str) -> Any:
    batch = BATCH.get()
    if batch is None:
        raise RuntimeError(
            f"{name}: verl passes a registered estimator only a part of the batch, and this one needs the rest; call "
            "grpo_kernels.integrations.verl.patch_verl(loss=False) in the process that computes advantages"
        )
    return batch


def _column(name: str, key: str) -> Any:
    batch = _batch(name)
    return batch.non_tensor_batch[key] if key in batch.non_tensor_batch else batch.batch.get(key, None)


def _columns(name: str, config: Any, like: Tensor) -> tuple[Tensor, tuple[float, ...] | None]:
    """One column per reward, by verl's own keys."""
    keys = None if config is None else config.get("gdpo_reward_keys", None)
    if not keys:
        raise ValueError(f"{name}: algorithm.gdpo_reward_keys must name the rewards, got {keys!r}")
    columns = []
    for key in keys:
        column = _column(name, key)
        if column is None:
            held = sorted(_batch(name).non_tensor_batch)
            raise ValueError(f"{name}: the batch must hold every one of gdpo_reward_keys, got {held} without {key!r}")
        columns.append(torch.from_numpy(np.asarray(column, dtype=np.float32)) if _is_array(column) else column.float())
    weights = config.get("gdpo_reward_weights", None)
    if weights is not None and len(weights) != len(columns):
        raise ValueError(
            f"{name}: algorithm.gdpo_reward_weights must have one weight for each of {list(keys)}, got {list(weights)}"
        )
    return torch.stack(columns, 1).to(like.device), None if weights is None else tuple(float(w) for w in weights)


def _clusters(name: str, ids: Tensor, valid: Tensor, settings: gk.SimilarityConfig) -> Tensor:
    columns = {key: _column(name, key) for key in (LABELS, EMBEDDINGS, NAMES)}
    held = [key for key, column in columns.items() if column is not None]
    if len(held) != 1:
        got = "neither" if not held else "both" if held == [LABELS, EMBEDDINGS] else " and ".join(map(repr, held))
        raise ValueError(
            f"{name}: the batch must hold either {LABELS!r} or {EMBEDDINGS!r}, or {NAMES!r}, one per response, "
            f"got {got}"
        )
    if columns[NAMES] is not None:
        if settings != gk.SimilarityConfig():
            raise ValueError(f"{name}: options of the clustering must be left out with {NAMES!r}, got {settings}")
        return _numbered(name, columns[NAMES], len(ids)).to(ids.device)
    labels, embeddings = columns[LABELS], columns[EMBEDDINGS]
    if labels is not None:
        values = np.asarray(labels.tolist()) if _is_array(labels) else labels
        if _is_array(values) and values.dtype == object:
            raise TypeError(f"{name}: {LABELS!r} must hold integers, got {labels.tolist()[:8]}")
        numbers = torch.as_tensor(values)
        if settings != gk.SimilarityConfig():
            raise ValueError(f"{name}: options of the clustering must be left out with {LABELS!r}, got {settings}")
        if numbers.dtype.is_floating_point or numbers.dtype == torch.bool:
            raise TypeError(
                f"{name}: {LABELS!r} must hold integers, -1 for a response to leave out, got {numbers.dtype}"
            )
        return numbers.to(ids.device)
    vectors = embeddings
    if _is_array(embeddings):
        sizes = {np.size(vector) for vector in embeddings}
        if len(sizes) > 1:
            raise ValueError(f"{name}: {EMBEDDINGS!r} must hold vectors of one size, got sizes {sorted(sizes)}")
        vectors = torch.from_numpy(np.asarray(embeddings.tolist(), dtype=np.float32))
    # verl may pad with more rows than a group can have
    vectors, labels = vectors.to(ids.device)[valid], torch.full_like(ids, -1)
    labels[valid] = gk.similarity_groups(vectors, ids[valid], config=settings).labels.to(labels.dtype)
    return labels


def _numbered(name: str, labels: Any, count: int) -> Tensor:
    """Numbers of text labels, by equality; a prompt's labels are compared with each other only."""
    texts = list(labels)
    if len(texts) != count:
        raise ValueError(f"{name}: {NAMES!r} must hold a label for each of {count} responses, got {len(texts)}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}: {NAMES!r} must hold texts, got {text!r} for response {i}")
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return torch.tensor([numbers[text] for text in texts], dtype=torch.int64)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)
