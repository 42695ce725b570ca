"""Diversity of the responses to a prompt, and rewards that depend on it, as other recipes use similarities.

All functions work on the padded layout [P, K] of P prompts with at most K responses: distances [P, K, K] from
pairwise_cosine, labels [P, K] from cluster_distances or threshold_components, rewards [P, K]. pad_rows and unpad_rows
convert rows [N] to it and back. They are plain torch for any device, compute in float64, handle all prompts in one
pass, and never wait for a GPU.

A response is absent if the diagonal of its distances is infinite, its label is negative or its reward is NaN. The
others are computed as if the prompt were smaller; the absent response's own result is 0, or NaN in mmr_rewards. The
result of a prompt depends on that prompt alone. Below, S = 1 - distance is the cosine similarity, n_c the size of a
response's cluster, and K the number of responses present. There are no gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.checks import finite
from grpo_kernels.groups import pad_rows, unpad_rows
from grpo_kernels.ops.similarity_groups import check_metric


class LogDeterminants(NamedTuple):
    """Result of leave_one_out_logdet.

    Attributes:
        total: [P], log det(S + eps I); 0 for a prompt without responses
        marginal: [P, K], decrease of the total without this response
    """

    total: Tensor
    marginal: Tensor


def similarity_weights(distances: Tensor, *, least: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Computes 1 / (max(sum_j S_ij, least) + eps), weights that shrink the rewards of crowded responses. [P, K]

    From DRA-GRPO, arXiv 2505.09655; the sum includes the response itself. Its code sums over all responses of the
    process, including those to other prompts; here the sum is over one prompt. There a sum of 0 or below flips the
    sign of the reward; here it is at least `least`, and 1 is the sum of a response orthogonal to all others.
    """
    name = "similarity_weights"
    finite(name, "least", least, minimum=0.0, open_end=True)
    finite(name, "eps", eps, minimum=0.0)
    similarity, present = _similarities(name, distances)
    weights = 1 / (similarity.sum(-1).clamp(min=least) + eps)
    return torch.where(present, weights, 0).to(distances.dtype)


def threshold_components(distances: Tensor, threshold: float) -> Tensor:
    """Labels responses linked by steps of at most `threshold`: int32 [P, K], by first appearance, -1 if absent.

    These are the components of the single-linkage tree cut above that height. DARLING, arXiv 2509.02534, partitions
    responses this way, by the verdicts of a classifier on pairs.
    """
    name = "threshold_components"
    finite(name, "threshold", threshold, minimum=0.0)
    _, present = _similarities(name, distances)
    prompts, size = present.shape
    if size == 0:
        return distances.new_zeros((prompts, 0), dtype=torch.int32)
    both = present[:, :, None] & present[:, None]
    # compared in the dtype of the distances, so that a threshold equal to a distance links its pair
    linked = (both & (distances <= threshold)).float()
    # squaring doubles the number of steps, so this covers the longest chain of size - 1 steps
    for _ in range(max(size - 2, 0).bit_length()):
        linked = (linked @ linked > 0).float()
    place = torch.arange(size, device=distances.device)
    first = torch.where(linked > 0, place, size).amin(-1)
    numbers = (first == place).cumsum(-1) - 1
    return torch.where(present, numbers.gather(1, first.clamp(max=size - 1)), -1).int()


def distinctness_weights(labels: Tensor, *, least: float = 0.1) -> Tensor:
    """Computes max(least, (K - n_c) / (K - 1)), the share of the other responses in other clusters. float32 [P, K]

    From DARLING, arXiv 2509.02534, which multiplies rewards by it and does not divide by their deviation afterwards
    (config="dr_grpo"). K is that of the prompt. A response alone in its prompt, 0/0, has weight 1, like every response
    alone in its cluster.
    """
    name = "distinctness_weights"
    _share(name, "least", least)
    sizes, rows = _cluster_sizes(_same_label(name, labels))
    weights = ((rows - sizes) / (rows - 1).clamp(min=1)).clamp(min=least)
    weights = torch.where(sizes == 1, 1, weights)
    return torch.where(sizes > 0, weights, 0).float()


def agreement_weights(labels: Tensor, *, entropy_bound: float | None = None) -> Tensor:
    """Computes n_c / K, the share of responses that agree: a reward without a verifier. float32 [P, K]

    From EMPO, arXiv 2504.05812, whose code has entropy_bound=1: no reward if all responses differ, nor for a lone
    response, whose log K is 0. Its clusters depend on the order of the responses; here they are those of `labels`.

    Args:
        labels: [P, K]
        entropy_bound: 0 for the whole prompt if the entropy of its clusters is at least this share of log K, its
            maximum; None never does that
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
    """Computes 1 / n_c, so that the weights of each cluster add up to 1. float32 [P, K]

    From uniqueness-aware RL, arXiv 2601.08763, where only correct responses count: with the label -1, the others have
    weight 0 and take nothing from the correct ones.
    """
    sizes, _ = _cluster_sizes(_same_label("uniqueness_weights", labels))
    return torch.where(sizes > 0, 1 / sizes.clamp(min=1), 0).float()


def semantic_entropy(labels: Tensor, *, normalize: bool = False) -> Tensor:
    """Computes -sum_c (n_c / K) log(n_c / K) over the clusters of each prompt, in nats. float32 [P]

    It is exactly 0 if all agree and log K if all differ. SEED-GRPO, arXiv 2505.12346, shrinks the advantages of
    uncertain prompts by it. There clusters have probabilities from the likelihoods of the responses; here every
    response counts the same.

    Args:
        labels: [P, K]
        normalize: divide by the maximum, log K; 0 for fewer than two responses
    """
    entropy, largest = _entropy(*_cluster_sizes(_same_label("semantic_entropy", labels)))
    if normalize:
        entropy = torch.where(largest > 0, entropy / largest, 0)
    return entropy.squeeze(1).float()


def vendi_score(distances: Tensor) -> Tensor:
    """Computes K^2 / sum_ij S_ij^2, the effective number of distinct responses, from 1 (equal) to K (orthogonal). [P]

    This is the Vendi score, arXiv 2210.02410, of order 2: one over the sum of the squared eigenvalues of S / K, which
    needs no eigenvalues. 0 for a prompt without responses.
    """
    similarity, present = _similarities("vendi_score", distances)
    rows = present.sum(-1)
    squares = similarity.square().sum((-1, -2))
    return torch.where(rows > 0, rows.double().square() / squares, 0).to(distances.dtype)


def leave_one_out_logdet(distances: Tensor, *, eps: float = 1e-3) -> LogDeterminants:
    """Computes log det(S + eps I) of each prompt, and the part of each response, -log[(S + eps I)^-1]_ii.

    This is the volume that the embeddings span, as in a determinantal point process. DQO, arXiv 2509.04784, rewards the
    sum over a group; the part of one response is the leave-one-out term of DPP-GRPO, arXiv 2511.20647. All parts come
    from one Cholesky factor instead of K determinants. Each of n copies of a response adds about log(eps), as the
    others already hold its place. NaN for a prompt whose S + eps I is not positive definite, which no cosines give.

    Args:
        distances: [P, K, K]
        eps: positive; with float32 rounding S alone may have no factor
    """
    name = "leave_one_out_logdet"
    finite(name, "eps", eps, minimum=0.0, open_end=True)
    similarity, present = _similarities(name, distances)
    # an absent response is a block of its own with determinant 1
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
    """Rewards in greedy order of maximal marginal relevance: late responses resemble an earlier, better one. [P, K]

    The best reward comes first and is kept. Then the largest lam r_i - (1 - lam) max S_ij over the chosen j comes next,
    and that score becomes its reward; ties go to the lowest place. NaN where there is no reward or no response.

    From MMR-GRPO (Findings of ACL 2026). Its code orders the responses to all prompts as one list, here each prompt is
    ordered alone. It derives lam from the batch, x / (1 + x) with x = temperature * std / |mean| smoothed over steps,
    and rescales to the former mean and deviation; both are left to the caller, and advantages divided by the deviation
    do not depend on the latter.

    Args:
        rewards: [P, K]
        distances: [P, K, K]
        lam: in [0, 1], for all prompts or [P]; 1 leaves the rewards unchanged
    """
    name = "mmr_rewards"
    similarity, present = _similarities(name, distances)
    values = _rewards(name, rewards, present)
    weight = _lam(name, lam, values)
    left = present & ~values.isnan()
    size = values.shape[1]
    place = torch.arange(size, device=values.device)
    result, score = torch.full_like(values, torch.nan), values
    nearest = torch.full_like(values, -torch.inf)
    for _ in range(size):
        best = torch.where(left, score, -torch.inf).amax(-1, keepdim=True)
        # NaN, from an infinite reward, is chosen first so that it does not block the others
        is_best = left & ((score == best) | score.isnan())
        chosen = torch.where(is_best, place, size).amin(-1, keepdim=True)
        is_chosen = place == chosen  # none if nothing is left
        result, left = torch.where(is_chosen, score, result), left & ~is_chosen
        row = chosen.clamp(max=size - 1)[:, :, None].expand(-1, 1, size)
        nearest = torch.maximum(nearest, similarity.gather(1, row).squeeze(1))
        score = weight * values - (1 - weight) * nearest
    return result.to(_result_dtype(rewards))


def set_advantages(rewards: Tensor, labels: Tensor, *, set_size: int) -> Tensor:
    """Advantages for sets of `set_size` responses that are both good and distinct. [P, K]

    A set is worth (mean reward) * (number of its clusters / set_size). The advantage of a response is the mean worth of
    all sets that contain it, minus that of all sets. With K responses, n = set_size, clusters of sizes m_j with reward
    sums R_j, R in total, p = (n-1)/(K-1), a_j = C(K-1-m_j, n-1) / C(K-1, n-1), b_j = C(K-2-m_j, n-2) / C(K-1, n-1):

        E[f | i] = sum_j (r_i + (R - r_i) p - [j is not i's] (r_i a_j + (R - r_i - R_j) b_j)) / n^2

    From polychromic objectives, arXiv 2509.25424, and Poly-EPO, arXiv 2604.17654, which sample sets. Here all sets
    count, in closed form: a_j and b_j are the probabilities that cluster j is missed. 0 for prompts with at most
    `set_size` responses, which have one set or none, and for responses without a label or reward.
    """
    name = "set_advantages"
    same = _same_label(name, labels)
    values = _rewards(name, rewards, labels >= 0)
    size = values.shape[1]
    checks.integer(name, "set_size", set_size)
    if set_size < 1 or (size > 0 and set_size > size):
        raise ValueError(f"{name}: set_size must be 1 to the {size} places of a prompt, got {set_size}")
    if size == 0:
        return torch.zeros_like(rewards, dtype=_result_dtype(rewards))
    scored = (labels >= 0) & ~values.isnan()
    same = same & scored[:, :, None] & scored[:, None]
    sizes, rows = _cluster_sizes(same)
    r = torch.where(scored, values, 0)
    worth = _mean_worth(r, same, sizes, rows, set_size)
    low = torch.where(scored, worth, torch.inf).amin(-1, keepdim=True)
    high = torch.where(scored, worth, -torch.inf).amax(-1, keepdim=True)
    mean = torch.where(scored, worth, 0).sum(-1, keepdim=True) / rows.clamp(min=1)
    # equal worths give exactly 0, not the rounding error of their mean
    has_signal = scored & (rows > set_size) & (low != high)
    return torch.where(has_signal, worth - mean, 0).to(_result_dtype(rewards))


def _mean_worth(r: Tensor, same: Tensor, sizes: Tensor, rows: Tensor, n: int) -> Tensor:
    """E[f | i] of set_advantages. A sum over clusters is a sum over responses weighted by 1 / n_c."""
    share = torch.where(sizes > 0, 1 / sizes.clamp(min=1), 0)
    sums = torch.where(same, r[:, None], 0).sum(-1)
    total = r.sum(-1, keepdim=True)
    both = (n - 1) / (rows - 1).clamp(min=1)
    a = _missed(rows - 1, sizes, n - 1)
    b = both * _missed(rows - 2, sizes, n - 2)
    clusters = share.sum(-1, keepdim=True)
    # over all clusters except the response's own
    a_rest = (a * share).sum(-1, keepdim=True) - a
    b_rest = (b * share).sum(-1, keepdim=True) - b
    sums_rest = (sums * b * share).sum(-1, keepdim=True) - sums * b
    others = total - r
    return (clusters * (r + others * both) - r * a_rest - others * b_rest + sums_rest) / n**2


def _missed(rows: Tensor, sizes: Tensor, draws: int) -> Tensor:
    """Probability that none of `sizes` special ones is among `draws` of `rows`. A product, as factorials overflow."""
    chance = torch.ones_like(sizes)
    for t in range(draws):
        chance = chance * (rows - sizes - t).clamp(min=0) / (rows - t).clamp(min=1)
    return chance


def _similarities(name: str, distances: Tensor) -> tuple[Tensor, Tensor]:
    """S in float64, 0 where either response is absent, and the mask [P, K] of present responses."""
    checks.tensor(name, "distances", distances, (torch.float32, torch.float64))
    if distances.dim() != 3 or distances.shape[1] != distances.shape[2]:
        raise ValueError(f"{name}: distances must have shape [P, K, K], got {list(distances.shape)}")
    checks.constant(name, "distances", distances)
    if distances.device.type == "cpu" and not torch.compiler.is_compiling():
        check_metric(name, distances)
    present = distances.diagonal(dim1=1, dim2=2).isfinite()
    pairs = present[:, :, None] & present[:, None]
    return torch.where(pairs, 1 - distances.double(), 0), present


def _same_label(name: str, labels: Tensor) -> Tensor:
    """Pairs of responses [P, K, K] in one cluster. Labels need not be small numbers."""
    checks.tensor(name, "labels", labels, checks.INTEGERS)
    if labels.dim() != 2:
        raise ValueError(f"{name}: labels must have shape [P, K], got {list(labels.shape)}")
    return (labels[:, :, None] == labels[:, None]) & (labels >= 0)[:, :, None]


def _cluster_sizes(same: Tensor) -> tuple[Tensor, Tensor]:
    """n_c [P, K], 0 if absent, and K [P, 1], both float64."""
    sizes = same.sum(-1)
    return sizes.double(), (sizes > 0).sum(-1, keepdim=True).double()


def _entropy(sizes: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of each prompt [P, 1] and its maximum: log K minus the mean of log n_c."""
    largest = rows.clamp(min=1).log()
    entropy = largest - sizes.clamp(min=1).log().sum(-1, keepdim=True) / rows.clamp(min=1)
    is_one = (sizes == rows).any(-1, keepdim=True)
    return torch.where(is_one, 0, entropy), largest


def _rewards(name: str, rewards: Tensor, like: Tensor) -> Tensor:
    checks.shaped(name, "rewards", rewards, checks.FLOATS, like.device, like.shape)
    checks.constant(name, "rewards", rewards)
    return rewards.double()


def _result_dtype(rewards: Tensor) -> torch.dtype:
    """As in group_advantages, half-precision rewards give float32 results."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32


def _lam(name: str, lam: float | Tensor, like: Tensor) -> float | Tensor:
    if not isinstance(lam, Tensor):
        _share(name, "lam", lam)
        return lam
    checks.per_row(name, "lam", lam, checks.FLOATS, like)
    checks.constant(name, "lam", lam)
    return lam.double()[:, None]


def _share(name: str, argument: str, value: object) -> None:
    finite(name, argument, value)
    if not 0 <= value <= 1:  # type: ignore[operator]  # finite() has seen that it is a number
        raise ValueError(f"{name}: {argument} must be in [0, 1], got {value!r}")


__all__ = [
    "LogDeterminants",
    "agreement_weights",
    "distinctness_weights",
    "leave_one_out_logdet",
    "mmr_rewards",
    "pad_rows",
    "semantic_entropy",
    "set_advantages",
    "similarity_weights",
    "threshold_components",
    "uniqueness_weights",
    "unpad_rows",
    "vendi_score",
]
