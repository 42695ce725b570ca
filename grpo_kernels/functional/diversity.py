"""Diversity of the responses to a prompt, and rewards that know of it: what other recipes do with similarities.

All work on the padded layout [P, K], P prompts of at most K responses: distances [P, K, K] from pairwise_cosine,
labels [P, K] from cluster_distances or threshold_components, rewards [P, K]. pad_rows and unpad_rows go from rows [N]
to it and back. In plain torch for any device: inside float64, one pass for all prompts, nothing waits for a GPU.

A response is absent where the diagonal of the distances is infinite, its label is negative or its reward is NaN. It
changes nothing about the others, as if the prompt were smaller; its own result is 0, in mmr_rewards NaN.
A prompt's result depends on that prompt alone. S = 1 - distance is the cosine similarity, n_c the size of a response's
cluster, K the number of responses that are there. Not differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.config.rules import finite
from grpo_kernels.functional.group_layout import pad_rows, unpad_rows
from grpo_kernels.functional.similarity_groups import check_metric


class LogDeterminants(NamedTuple):
    """total     [P], log det(S + eps I); 0 for a prompt without responses
    marginal  [P, K], by how much total would be less without this response
    """

    total: Tensor
    marginal: Tensor


def similarity_weights(distances: Tensor, *, least: float = 1.0, eps: float = 1e-6) -> Tensor:
    """1 / (max(sum_j S_ij, least) + eps), to multiply rewards with: those of crowded responses shrink. [P, K]

    From DRA-GRPO, arXiv 2505.09655; the sum has the response itself in it. Its code sums over all responses of the
    process, those to other prompts too, here it is one prompt's. There a sum can be 0 or negative, which flips the
    reward's sign; here it is at least `least`, and 1 is that of a response orthogonal to all others.
    """
    name = "similarity_weights"
    finite(name, "least", least, minimum=0.0, open_end=True)
    finite(name, "eps", eps, minimum=0.0)
    similarity, present = _similarities(name, distances)
    weights = 1 / (similarity.sum(-1).clamp(min=least) + eps)
    return torch.where(present, weights, 0).to(distances.dtype)


def threshold_components(distances: Tensor, threshold: float) -> Tensor:
    """Labels, int32 [P, K], of responses linked by steps of at most `threshold`; -1: absent.

    In order of first appearance. Exactly what is left of the single-linkage tree if it is cut above that height.
    DARLING, arXiv 2509.02534, makes its partition so, from the verdicts of a classifier on pairs.
    """
    name = "threshold_components"
    finite(name, "threshold", threshold, minimum=0.0)
    _, present = _similarities(name, distances)
    prompts, size = present.shape
    if size == 0:
        return distances.new_zeros((prompts, 0), dtype=torch.int32)
    both = present[:, :, None] & present[:, None]
    # Compared in the dtype of the distances, so that one of their own values links its pair.
    linked = (both & (distances <= threshold)).float()
    # Squaring doubles the number of steps: after this many, the size - 1 of the longest chain are in it.
    for _ in range(max(size - 2, 0).bit_length()):
        linked = (linked @ linked > 0).float()
    place = torch.arange(size, device=distances.device)
    first = torch.where(linked > 0, place, size).amin(-1)
    numbers = (first == place).cumsum(-1) - 1
    return torch.where(present, numbers.gather(1, first.clamp(max=size - 1)), -1).int()


def distinctness_weights(labels: Tensor, *, least: float = 0.1) -> Tensor:
    """max(least, (K - n_c) / (K - 1)), the share of the others that are in other clusters. float32 [P, K]

    From DARLING, arXiv 2509.02534, which multiplies rewards with it and does not divide by their deviation
    afterwards (config="dr_grpo"). K is that of the prompt. A response alone in its prompt, 0/0, has weight 1, like
    every other that is alone in its cluster.
    """
    name = "distinctness_weights"
    _share(name, "least", least)
    sizes, rows = _cluster_sizes(_same_label(name, labels))
    weights = ((rows - sizes) / (rows - 1).clamp(min=1)).clamp(min=least)
    weights = torch.where(sizes == 1, 1, weights)
    return torch.where(sizes > 0, weights, 0).float()


def agreement_weights(labels: Tensor, *, entropy_bound: float | None = None) -> Tensor:
    """n_c / K, the share of the responses that say the same: a reward without a verifier. float32 [P, K]

    entropy_bound  0 for the whole prompt where the entropy of its clusters is at least this share of log K, its
                   largest value; None: never

    From EMPO, arXiv 2504.05812, whose code has entropy_bound=1: no reward where all differ, nor for a lone response,
    whose log K is 0. Its clusters depend on the order of the responses; here they are those of `labels`.
    """
    name = "agreement_weights"
    if entropy_bound is not None:
        _share(name, "entropy_bound", entropy_bound)
    sizes, rows = _cluster_sizes(_same_label(name, labels))
    weights = sizes / rows.clamp(min=1)
    if entropy_bound is not None:
        entropy, largest = _entropy(sizes, rows)
        weights = torch.where(entropy >= entropy_bound * largest, 0, weights)
    return weights.float()


def uniqueness_weights(labels: Tensor) -> Tensor:
    """1 / n_c: each cluster has weight 1 in all. float32 [P, K]

    From uniqueness-aware RL, arXiv 2601.08763, where only correct responses count: give the others the label -1, and
    they have weight 0 and take nothing from those who are right.
    """
    sizes, _ = _cluster_sizes(_same_label("uniqueness_weights", labels))
    return torch.where(sizes > 0, 1 / sizes.clamp(min=1), 0).float()


def semantic_entropy(labels: Tensor, *, normalize: bool = False) -> Tensor:
    """-sum_c (n_c / K) log(n_c / K) over the clusters of each prompt, in nats. float32 [P]

    normalize  as a share of its largest value, log K; 0 for fewer than two responses

    0 is exact where all agree, log K where all differ. SEED-GRPO, arXiv 2505.12346, makes the advantages of uncertain
    prompts smaller by it. It has cluster probabilities from the likelihoods of the responses, here every response
    counts the same.
    """
    entropy, largest = _entropy(*_cluster_sizes(_same_label("semantic_entropy", labels)))
    if normalize:
        entropy = torch.where(largest > 0, entropy / largest, 0)
    return entropy.squeeze(1).float()


def vendi_score(distances: Tensor) -> Tensor:
    """K^2 / sum_ij S_ij^2, from 1 (all alike) to K (all orthogonal): how many different ones there seem to be. [P]

    The Vendi score, arXiv 2210.02410, of order 2, which needs no eigenvalues: 1 / sum of their squares, for S / K.
    0 for a prompt without responses.
    """
    similarity, present = _similarities("vendi_score", distances)
    rows = present.sum(-1)
    squares = similarity.square().sum((-1, -2))
    return torch.where(rows > 0, rows.double().square() / squares, 0).to(distances.dtype)


def leave_one_out_logdet(distances: Tensor, *, eps: float = 1e-3) -> LogDeterminants:
    """log det(S + eps I) of each prompt, and what each response adds to it, -log[(S + eps I)^-1]_ii.

    eps  above 0: with the rounding of float32 distances S alone may have no factor

    The volume the embeddings span, as a determinantal point process has it: DQO, arXiv 2509.04784, rewards the sum over
    a group; the part of one response is known as leave-one-out in DPP-GRPO, arXiv 2511.20647. All of them are from one
    Cholesky factor, not from K determinants. Of n copies of a response each adds about log(eps), for the others have
    its place already. NaN for a prompt whose S + eps I is not positive definite, which no cosines are.
    """
    name = "leave_one_out_logdet"
    finite(name, "eps", eps, minimum=0.0, open_end=True)
    similarity, present = _similarities(name, distances)
    # An absent response is a block of its own with determinant 1.
    ridge = similarity.new_full(present.shape, eps).masked_fill(~present, 1)
    factor, broken = torch.linalg.cholesky_ex(similarity + torch.diag_embed(ridge))
    total = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(-1)
    one = torch.eye(present.shape[1], dtype=factor.dtype, device=factor.device).expand_as(factor)
    inverse = torch.linalg.solve_triangular(factor, one, upper=False)
    marginal = torch.where(present, -inverse.square().sum(-2).log(), 0)
    is_broken = broken != 0
    total = total.masked_fill(is_broken, torch.nan)
    marginal = marginal.masked_fill(is_broken[:, None] & present, torch.nan)
    return LogDeterminants(total.to(distances.dtype), marginal.to(distances.dtype))


def mmr_rewards(rewards: Tensor, distances: Tensor, *, lam: float | Tensor) -> Tensor:
    """Rewards of a greedy order by maximal marginal relevance: late ones resemble an earlier, better one. [P, K]

    lam  in [0, 1], of all or [P]: 1 leaves the rewards as they are

    First the best reward, which is kept. Then again and again the largest lam r_i - (1 - lam) max S_ij over those that
    were chosen, and that score is its reward; of equals the lowest place. NaN: no reward, or absent.

    From MMR-GRPO (Findings of ACL 2026). Its code takes the responses to all prompts as one list, here an order is of
    one prompt. It has lam from the batch, x / (1 + x) with x = temperature * std / |mean| smoothed over steps, and
    rescales to the former mean and deviation: both are the caller's; advantages that are divided by the deviation do
    not depend on the latter.
    """
    name = "mmr_rewards"
    similarity, present = _similarities(name, distances)
    given = _rewards(name, rewards, present)
    weight = _lam(name, lam, given)
    left = present & ~given.isnan()
    size = given.shape[1]
    place = torch.arange(size, device=given.device)
    result, score = torch.full_like(given, torch.nan), given
    nearest = torch.full_like(given, -torch.inf)
    for _ in range(size):
        best = torch.where(left, score, -torch.inf).amax(-1, keepdim=True)
        # NaN, from an infinite reward, is chosen first: it must not stop the choice.
        is_best = left & ((score == best) | score.isnan())
        chosen = torch.where(is_best, place, size).amin(-1, keepdim=True)
        is_chosen = place == chosen  # none where nothing was left
        result, left = torch.where(is_chosen, score, result), left & ~is_chosen
        row = chosen.clamp(max=size - 1)[:, :, None].expand(-1, 1, size)
        nearest = torch.maximum(nearest, similarity.gather(1, row).squeeze(1))
        score = weight * given - (1 - weight) * nearest
    return result.to(_result_dtype(rewards))


def set_advantages(rewards: Tensor, labels: Tensor, *, set_size: int) -> Tensor:
    """Advantages for sets of `set_size` responses that are good and differ from each other. [P, K]

    A set is worth (mean reward) * (number of its clusters / set_size). A response's advantage is the mean worth of all
    sets it is in, less that of all sets. With K responses, n = set_size, clusters of sizes m_j and reward sums R_j, R
    in all, p = (n-1)/(K-1), a_j = C(K-1-m_j, n-1) / C(K-1, n-1), b_j = C(K-2-m_j, n-2) / C(K-1, n-1):

        E[f | i] = sum_j (r_i + (R - r_i) p - [j is not i's] (r_i a_j + (R - r_i - R_j) b_j)) / n^2

    From polychromic objectives, arXiv 2509.25424, and Poly-EPO, arXiv 2604.17654, which draw some of the sets. Here it
    is all of them, in closed form: a_j and b_j say how likely cluster j is missed. 0 for prompts with no more than
    `set_size` responses, whose sets are one or none, and for responses without a label or reward.
    """
    name = "set_advantages"
    same = _same_label(name, labels)
    given = _rewards(name, rewards, labels >= 0)
    size = given.shape[1]
    if isinstance(set_size, bool) or not isinstance(set_size, int):
        raise TypeError(f"{name}: set_size must be an int, got {type(set_size).__name__} {set_size!r}")
    if set_size < 1 or (size > 0 and set_size > size):
        raise ValueError(f"{name}: set_size must be 1 to the {size} places of a prompt, got {set_size}")
    if size == 0:
        return torch.zeros_like(rewards, dtype=_result_dtype(rewards))
    scored = (labels >= 0) & ~given.isnan()
    same = same & scored[:, :, None] & scored[:, None]
    sizes, rows = _cluster_sizes(same)
    r = torch.where(scored, given, 0)
    worth = _mean_worth(r, same, sizes, rows, set_size)
    low = torch.where(scored, worth, torch.inf).amin(-1, keepdim=True)
    high = torch.where(scored, worth, -torch.inf).amax(-1, keepdim=True)
    mean = torch.where(scored, worth, 0).sum(-1, keepdim=True) / rows.clamp(min=1)
    # Equal ones are exactly 0, not what rounding leaves of the mean.
    tells = scored & (rows > set_size) & (low != high)
    return torch.where(tells, worth - mean, 0).to(_result_dtype(rewards))


def _mean_worth(r: Tensor, same: Tensor, sizes: Tensor, rows: Tensor, n: int) -> Tensor:
    """E[f | i] of set_advantages. A sum over clusters is one over responses that count 1 / n_c each."""
    share = torch.where(sizes > 0, 1 / sizes.clamp(min=1), 0)
    sums = torch.where(same, r[:, None], 0).sum(-1)
    total = r.sum(-1, keepdim=True)
    both = (n - 1) / (rows - 1).clamp(min=1)
    a = _missed(rows - 1, sizes, n - 1)
    b = both * _missed(rows - 2, sizes, n - 2)
    clusters = share.sum(-1, keepdim=True)
    # of all clusters but one's own
    a_rest = (a * share).sum(-1, keepdim=True) - a
    b_rest = (b * share).sum(-1, keepdim=True) - b
    sums_rest = (sums * b * share).sum(-1, keepdim=True) - sums * b
    others = total - r
    return (clusters * (r + others * both) - r * a_rest - others * b_rest + sums_rest) / n**2


def _missed(rows: Tensor, sizes: Tensor, draws: int) -> Tensor:
    """How likely none of `sizes` special ones is among `draws` of `rows`, as a product: factorials would overflow."""
    chance = torch.ones_like(sizes)
    for t in range(draws):
        chance = chance * (rows - sizes - t).clamp(min=0) / (rows - t).clamp(min=1)
    return chance


def _similarities(name: str, distances: Tensor) -> tuple[Tensor, Tensor]:
    """S in float64, 0 where one of the two is absent, and which [P, K] are there."""
    checks.tensor(name, "distances", distances, (torch.float32, torch.float64))
    if distances.dim() != 3 or distances.shape[1] != distances.shape[2]:
        raise ValueError(f"{name}: distances must have shape [P, K, K], got {list(distances.shape)}")
    _no_gradient(name, "distances", distances)
    if distances.device.type == "cpu" and not torch.compiler.is_compiling():
        check_metric(name, distances)
    present = distances.diagonal(dim1=1, dim2=2).isfinite()
    pairs = present[:, :, None] & present[:, None]
    return torch.where(pairs, 1 - distances.double(), 0), present


def _same_label(name: str, labels: Tensor) -> Tensor:
    """Which two responses [P, K, K] are in one cluster. Labels need not be small numbers."""
    checks.tensor(name, "labels", labels, checks.INTEGERS)
    if labels.dim() != 2:
        raise ValueError(f"{name}: labels must have shape [P, K], got {list(labels.shape)}")
    return (labels[:, :, None] == labels[:, None]) & (labels >= 0)[:, :, None]


def _cluster_sizes(same: Tensor) -> tuple[Tensor, Tensor]:
    """n_c [P, K], 0: absent, and K [P, 1], both float64."""
    sizes = same.sum(-1)
    return sizes.double(), (sizes > 0).sum(-1, keepdim=True).double()


def _entropy(sizes: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of each prompt [P, 1], and its largest possible value: log K less the mean of log n_c."""
    largest = rows.clamp(min=1).log()
    entropy = largest - sizes.clamp(min=1).log().sum(-1, keepdim=True) / rows.clamp(min=1)
    is_one = (sizes == rows).any(-1, keepdim=True)
    return torch.where(is_one, 0, entropy), largest


def _rewards(name: str, rewards: Tensor, like: Tensor) -> Tensor:
    checks.tensor(name, "rewards", rewards, checks.FLOATS)
    if rewards.shape != like.shape:
        raise ValueError(f"{name}: rewards must have shape {list(like.shape)}, got {list(rewards.shape)}")
    checks.same_device(name, "rewards", rewards, like.device)
    _no_gradient(name, "rewards", rewards)
    return rewards.double()


def _result_dtype(rewards: Tensor) -> torch.dtype:
    """As in group_advantages: half precision holds too few digits for a result."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32


def _lam(name: str, lam: float | Tensor, like: Tensor) -> float | Tensor:
    if not isinstance(lam, Tensor):
        _share(name, "lam", lam)
        return lam
    checks.per_row(name, "lam", lam, checks.FLOATS, like)
    _no_gradient(name, "lam", lam)
    return lam.double()[:, None]


def _share(name: str, argument: str, value: object) -> None:
    finite(name, argument, value)
    if not 0 <= value <= 1:  # type: ignore[operator]  # finite() has seen that it is a number
        raise ValueError(f"{name}: {argument} must be in [0, 1], got {value!r}")


def _no_gradient(name: str, argument: str, value: Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: {argument} must not require grad, got requires_grad=True; pass {argument}.detach()")


__all__ = [
    "LogDeterminants", "agreement_weights", "distinctness_weights", "leave_one_out_logdet", "mmr_rewards", "pad_rows",
    "semantic_entropy", "set_advantages", "similarity_weights", "threshold_components", "uniqueness_weights",
    "unpad_rows", "vendi_score",
]  # fmt: skip
