"""Errors of similarity_groups, its parts, its config, its metrics, its advantages and gk.diversity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import diversity as div
from tests.ops.error_rows import Call, Errors, Rows, each
from tests.ops.similarity_groups.cases import INF, LINKAGES, NAN

ROWS, IDS, LEAF = torch.ones(6, 4), torch.tensor([0, 1, 1, 1, 5, 5]), torch.ones(6, 4, requires_grad=True)
D, R, L = torch.zeros(2, 3, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
REWARDED = {"rewards": ROWS[:, 0], "embeddings": ROWS, "groups": 3}
CALLS = {
    "similarity_groups": Call(gk.similarity_groups, {"embeddings": ROWS, "groups": 3}),
    "pairwise_cosine": Call(gk.pairwise_cosine, {"embeddings": ROWS, "groups": 3}),
    "pairwise_cosine of ids": Call(gk.pairwise_cosine, {"embeddings": ROWS, "groups": IDS}),
    "cluster_distances": Call(gk.cluster_distances, {"distances": D}),
    "agglomerate": Call(gk.agglomerate, {"distances": D}),
    "silhouette": Call(gk.silhouette, {"distances": D, "labels": L}),
    "silhouette of rows": Call(gk.silhouette, {"distances": D, "labels": L.flatten(), "groups": 3}),
    "SimilarityConfig": Call(gk.SimilarityConfig, {}),
    "similarity_metrics": Call(gk.similarity_metrics, {"result": gk.similarity_groups(ROWS, 3)}),
    "similarity_advantages": Call(gk.similarity_advantages, REWARDED),
    # errors of the two steps have their names
    "similarity_groups before advantages": Call(gk.similarity_advantages, REWARDED),
    "group_advantages of similar rows": Call(gk.similarity_advantages, REWARDED),
    "similarity_weights": Call(div.similarity_weights, {"distances": D}),
    "threshold_components": Call(div.threshold_components, {"distances": D, "threshold": 0.1}),
    "vendi_score": Call(div.vendi_score, {"distances": D}),
    "leave_one_out_logdet": Call(div.leave_one_out_logdet, {"distances": D}),
    "distinctness_weights": Call(div.distinctness_weights, {"labels": L}),
    "agreement_weights": Call(div.agreement_weights, {"labels": L}),
    "uniqueness_weights": Call(div.uniqueness_weights, {"labels": L}),
    "semantic_entropy": Call(div.semantic_entropy, {"labels": L}),
    "mmr_rewards": Call(div.mmr_rewards, {"rewards": R, "distances": D, "lam": 1}),
    "set_advantages": Call(div.set_advantages, {"rewards": R, "labels": L, "set_size": 2}),
    "pad_rows": Call(div.pad_rows, {"values": R[0], "groups": 3}),
    "unpad_rows": Call(div.unpad_rows, {"values": R, "groups": 3}),
}
OF_DISTANCES = tuple(name for name, call in CALLS.items() if "distances" in call.arguments)
OF_LABELS = tuple(name for name, call in CALLS.items() if [*call.arguments] == ["labels"])
DIVERSITY = tuple(name for name in OF_DISTANCES if hasattr(div, name))


def one_wrong(i: int, j: int, value: float, mirrored: bool = True) -> dict[str, Any]:
    """Valid distances except for one entry of the second prompt, whose last place is unused."""
    distances = torch.ones(2, 3, 3) - torch.eye(3)
    distances[1, 2] = distances[1, :, 2] = INF
    distances[1, i, j] = value
    if mirrored:
        distances[1, j, i] = value
    return {"distances": distances}


def big(sizes: list[int]) -> dict[str, Tensor]:
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    return {"embeddings": torch.ones(len(ids), 2), "groups": ids}


NOT_POSITIVE, NEGATIVE, SHARE = (
    f"must be {rule}, got {{}}" for rule in ("a finite number above 0", "a finite number of at least 0", "in [0, 1]")
)
METRIC: Rows = {
    **each("distances", "must have shape [P, K, K], got {}", D[0], D[:, :2], D[None]),
    **{
        f"distances must be finite and at least 0 ... got {value} at [1, 0, 1]": one_wrong(0, 1, value)
        for value in (-(2.0**-20), INF, NAN)
    },
    **{
        f"distances must be 0 on the diagonal, or infinite, got {value} at [1, 1]": one_wrong(1, 1, value)
        for value in (0.5, -INF, NAN)
    },
    "distances must be symmetric, got ... at [1, 0, 1]": one_wrong(0, 1, 1 + 2**-23, False),
}
LAYOUT: Rows = {
    **each("embeddings", "must have shape [N, D] with D > 0, got {}", ROWS[0], ROWS[None], ROWS[:, :0]),
    "embeddings must not require grad ... pass embeddings.detach()": {"embeddings": LEAF},
    **each("groups", "must be the size of each group ... got {}", 0, -1),
    "groups must have at most 256 rows each, got 257": {"groups": 257, "embeddings": torch.ones(257, 2)},
    **each("groups", "must be the size of each group ... number of rows, 6, got {}; pass a tensor of ids", 4, 12),
    **each("num_groups", "must be 2 for 6 rows in groups of 3, got {}", 3, 1),
    **each("max_size", "must be 3 for 6 rows in groups of 3, got {}", 4),
    **each("num_groups", "must be from 0 to 2**31 - 1, got {}", -1, 2**31),
    **each("max_size", "must be from 0 to 2**31 - 1, got {}", -1, 2**31),
}
CONFIG: Rows = {
    **each("k_min", "must be at least 2, got {}", 1),
    **each("k_max", "must be at least k_min, 2, got {}", 1),
    **each("k_max", "must be at least k_min, 4, got {}", 3, k_min=4),
    **each("min_silhouette", "must be in [-1, 1], got {}", -1.01, 1.01),
}
for field in ("tie_tolerance", "distance_floor", "different_at"):
    CONFIG |= each(field, NEGATIVE, -1e-6)
NAMES = f"must be one of {', '.join(LINKAGES)}, got {{}}"
WITHIN = "groups must be those of {}, 2 of at most 3 rows, got {}"
ERRORS = [
    Errors(("similarity_groups", "pairwise_cosine"), ValueError, LAYOUT),
    Errors(
        ("similarity_groups", "pairwise_cosine"),
        TypeError,
        {
            "embeddings must be of dtype ... torch.int64; .float() converts it": {"embeddings": ROWS.long()},
            **each(
                "groups",
                "must be an int, ... tensor of ids, got ... {}",
                True,
                2.0,
                None,
                "3",
            ),
            "groups must be ... list ... gk.group_ids(...) makes the tensor": {"groups": [0] * 6},
            **each("num_groups", "must be an int, got ... {}", 2.0, True, "3"),
            **each("max_size", "must be an int, got ... {}", 2.0),
        },
    ),
    Errors(
        "pairwise_cosine of ids",
        ValueError,
        {
            **each("groups", "must have shape [6], one element per row, got {}", IDS[:5]),
            **each("num_groups", "must be at least 3 for these groups, got {}", 2, 0),
            **each("max_size", "must be at least 3 for these groups, got {}", 2, 0),
            **each("max_size", "must be at most 256, got {}", 257),
            **each("max_size", "must be at most 256, got {}", 300, **big([]), num_groups=2),
            "groups must have at most 256 rows each, got one of 257": big([257, 3]),
        },
    ),
    Errors(OF_DISTANCES, ValueError, METRIC),
    Errors(
        OF_DISTANCES,
        TypeError,
        {
            f"distances must be of dtype float32 or float64, got {dtype}": {"distances": D.to(dtype)}
            for dtype in (torch.float16, torch.int64)
        },
    ),
    Errors(DIVERSITY, ValueError, {"distances must not require grad": {"distances": D.clone().requires_grad_()}}),
    Errors(
        ("cluster_distances", "agglomerate", "silhouette"),
        ValueError,
        {"distances must have at most 256 places, got 257": {"distances": torch.zeros(1, 257, 257)}},
    ),
    Errors(
        ("similarity_groups", "cluster_distances"),
        ValueError,
        {
            **each("config", NAMES, "zzz"),
            "config must be one of ... 'averge' (did you mean 'average'?)": {"config": "averge"},
        },
    ),
    Errors(
        ("similarity_groups", "cluster_distances"),
        TypeError,
        {
            "config must be a SimilarityConfig or a str, got NoneType": {"config": None},
            "config must be ... got dict; pass SimilarityConfig(**config)": {"config": {"linkage": "ward"}},
        },
    ),
    Errors("agglomerate", ValueError, each("linkage", NAMES, "centroid", None, 2, ["ward"])),
    Errors(
        ("silhouette", *OF_LABELS, "set_advantages"),
        TypeError,
        {"labels must be of dtype ... torch.float32": {"labels": L.float()}},
    ),
    Errors(OF_LABELS, ValueError, each("labels", "must have shape [P, K], got {}", L[0])),
    Errors(
        "silhouette",
        ValueError,
        each("labels", "must have shape [2, 3], or [N] with groups, got {}", L[:1], L[0], L[:, :2]),
    ),
    Errors(
        "silhouette of rows",
        ValueError,
        {
            **each("labels", "must have shape [N] with groups, got {}", L),
            **{
                WITHIN.format("the distances", found): {"labels": torch.zeros(rows).long(), "groups": groups}
                for found, rows, groups in (
                    ("3 of at most 3", 9, 3),
                    ("3 of at most 2", 6, 2),
                    ("1 of at most 3", 3, 3),
                    ("4 of at most 3", 6, torch.tensor([0, 0, 0, 1, 2, 3])),
                    ("2 of at most 4", 6, torch.tensor([0, 0, 0, 0, 1, 1])),
                )
            },
        },
    ),
    Errors("silhouette of rows", TypeError, each("groups", "must be an int, ... {}", True, "3")),
    Errors("SimilarityConfig", ValueError, CONFIG),
    Errors("similarity_metrics", TypeError, {"result must be SimilarityGroups, got tuple": {"result": ()}}),
    Errors(
        "similarity_advantages",
        ValueError,
        {
            **each("embeddings", "must have one row per reward, 6, got {}", ROWS[:2]),
            "similarity must be one of ... 'averag' (did you mean 'average'?)": {"similarity": "averag"},
            "config must be one of grpo ... did you mean 'grpo'": {"config": "grop"},
        },
    ),
    Errors(
        "similarity_advantages",
        TypeError,
        {"similarity must be a SimilarityConfig or a str, got int": {"similarity": 3}},
    ),
    Errors(
        "similarity_groups before advantages",
        ValueError,
        each("groups", "must be the size of each group ... number of rows, 6", 4),
    ),
    Errors("group_advantages of similar rows", ValueError, {"lengths must be left out": {"lengths": ROWS[:, 0]}}),
    # diversity
    Errors("similarity_weights", ValueError, each("eps", NEGATIVE, -1.0) | each("least", NOT_POSITIVE, 0.0)),
    Errors("leave_one_out_logdet", ValueError, each("eps", NOT_POSITIVE, 0.0)),
    Errors("threshold_components", ValueError, each("threshold", NEGATIVE, NAN, -1.0)),
    Errors("threshold_components", TypeError, {"threshold must be a number, got NoneType": {"threshold": None}}),
    Errors("distinctness_weights", ValueError, each("least", SHARE, 1.5)),
    Errors("agreement_weights", ValueError, each("entropy_bound", SHARE, -0.1)),
    Errors(
        ("mmr_rewards", "set_advantages"),
        ValueError,
        {
            **each("rewards", "must have shape [2, 3], got {}", R[:1]),
            "rewards must not require grad": {"rewards": R.clone().requires_grad_()},
        },
    ),
    Errors(
        ("mmr_rewards", "set_advantages"),
        TypeError,
        {"rewards must be of dtype float32 or float64 or bfloat16 or float16, got torch.int64": {"rewards": L}},
    ),
    Errors(
        "mmr_rewards",
        ValueError,
        each("lam", SHARE, 1.1, -0.1) | each("lam", "must have shape [2], one element per row, got {}", R[0]),
    ),
    Errors("mmr_rewards", TypeError, {"lam must be of dtype ... torch.int64": {"lam": L[:, 0]}}),
    Errors("set_advantages", ValueError, each("set_size", "must be 1 to the 3 places of a prompt, got {}", 4, 0)),
    Errors("set_advantages", TypeError, each("set_size", "must be an int, got ... {}", 1.5, True)),
    Errors(
        "pad_rows",
        ValueError,
        {
            **each("values", "must have shape [N, ...], got {}", R[0, 0]),
            "fill must be given for uint8": {"fill": None, "values": L[0].to(torch.uint8)},
            **each("groups", "must have shape [3], one element per row, got {}", L[0, :2]),
            **each("groups", "must be the size of each group ... number of rows, 3, got {}", 2),
            "max_size must be at least 3 for these groups, got 2": {"max_size": 2, "groups": L[0]},
        },
    ),
    Errors(
        "pad_rows",
        TypeError,
        {
            "values must be a tensor, got list": {"values": [1.0]},
            "groups must be an int, ... tensor of ids, got str '3'": {"groups": "3"},
        },
    ),
    Errors(
        "unpad_rows",
        ValueError,
        {
            WITHIN.format("values", "3 of at most 2"): {"groups": 2},
            WITHIN.format("values", "1 of at most 4"): {"groups": L.new_zeros(4)},
            WITHIN.format("values", "3 of at most 1"): {"groups": torch.arange(3)},
            **each("groups", "must have shape [N], got {}", L),
            **each("values", "must have shape [P, K, ...], got {}", R[0]),
        },
    ),
]
