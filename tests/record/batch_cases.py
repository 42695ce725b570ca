"""Cases of the record beside the losses: advantages, corrections, segments and groups of similar responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.record.cases import Case, Fields

# name: optional inputs
_ESTIMATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "rloo", "maxrl", "grpo_passk", "gpg", "batch_std"), ()),
    **dict.fromkeys(("trl-group", "trl-batch", "trl-none", "trl-rloo", "trl-rloo-normalized", "trl-async"), ()),
    **dict.fromkeys(("verl-grpo", "verl-grpo-vectorized", "verl-dr-grpo", "verl-rloo", "verl-rloo-vectorized"), ()),
    **dict.fromkeys(("verl-grpo-passk", "verl-gpg", "nemo-grpo"), ()),
    **dict.fromkeys(("gdpo", "trl-gdpo"), ("columns",)),
    "verl-gdpo": ("columns", "lengths"),
    **dict.fromkeys(("opo", "verl-opo"), ("lengths",)),
    **dict.fromkeys(("reinforce_plus_plus_baseline", "verl-reinforce-plus-plus-baseline"), ("lengths",)),
    **dict.fromkeys(("remax", "verl-remax", "spo"), ("baselines",)),
}
_ADVANTAGE_OPTIONS: dict[str, tuple[Fields, tuple[str, ...]]] = {
    "weighted columns": ({"reward_weights": (1.0, 0.5)}, ("columns",)),
    "clip": ({"clip": 0.5, "ddof": 0}, ()),
    "batch std floor": ({"estimator": "batch_std", "std_floor": 2.0}, ()),
    "others' std floor": ({"estimator": "nemo-grpo", "std_floor": 2.0}, ()),
    "std floor": ({"std_floor": 1.0, "eps": 1e-4}, ()),
    "parent": ({"singleton": "parent"}, ("subgroups",)),
    "shrinkage": ({"shrinkage": 2.0}, ("subgroups",)),
}


def _advantages() -> Iterator[tuple[str, Case]]:
    for name, inputs in _ESTIMATORS.items():
        yield f"advantages/{name}", Case("group_advantages", {"estimator": name}, inputs)
        yield (
            f"advantages/{name}, parts",
            Case("group_advantages", {"estimator": name}, (*inputs, "valid", "subgroups")),
        )
    for name, (fields, inputs) in _ADVANTAGE_OPTIONS.items():
        yield f"advantages/{name}", Case("group_advantages", fields, inputs)
    yield "advantages/gigpo", Case("gigpo_advantages", {"episode_weight": 0.5, "step_weight": 2.0})
    yield "running/average", Case("running", {"ema": {"decay": 0.9}})
    yield "running/value", Case("running", {"tracker": {"half_life": 0.06, "rho_min": 0.875, "rho_max": 0.96}})
    yield "running/norm", Case("running", {"norm": {}})


def _token_advantages() -> Iterator[tuple[str, Case]]:
    methods: dict[str, tuple[Fields, tuple[str, ...]]] = {
        "gae": ({"estimator": "gae"}, ("values",)),
        "gae, discounted": ({"estimator": "gae", "gamma": 0.9, "lam": 0.8}, ("values",)),
        "gae, raw": ({"estimator": "gae", "gamma": 0.9, "lam": 0.8, "whiten": "none"}, ("values", "unscored rewards")),
        "reinforce": ({"estimator": "reinforce", "gamma": 0.9}, ()),
        "reinforce++": ({"estimator": "reinforce_plus_plus", "gamma": 0.9}, ("unscored rewards",)),
    }
    for name, (fields, inputs) in methods.items():
        yield f"token advantages/{name}", Case("token_advantages", fields, inputs)
        yield f"token advantages/{name}, turns", Case("token_advantages", fields, (*inputs, "turns"))
    for places, tail in itertools.product(("position", "rank"), (True, False)):
        fields = {"places": places, "zero_tail": tail}
        yield f"optimal baseline/{places}, {tail}", Case("optimal_baseline", fields, () if tail else ("importance",))


_VERL_STATISTICS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


def _corrections() -> Iterator[tuple[str, Case]]:
    for level, threshold in itertools.product(("token", "sequence"), (1.1, "0.9_1.1")):
        for normalize in (False, True):
            fields = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
            name = f"correction/verl/{level}, {threshold}{', normalized' if normalize else ''}"
            yield name, Case("sampling_correction", {"verl": fields})
    for statistic in _VERL_STATISTICS:
        threshold = "0.9_1.1" if statistic.endswith("k1") else 0.01
        fields = {"rollout_is": None, "rollout_rs": statistic, "rollout_rs_threshold": threshold}
        yield f"correction/verl/{statistic}", Case("sampling_correction", {"verl": fields})
    both = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.8_1.2,0.05"}
    yield "correction/verl/both", Case("sampling_correction", {"verl": both})
    for level, what in itertools.product(("token", "sequence"), ("truncate", "mask")):
        fields = {
            "vllm_importance_sampling_mode": f"{level}_{what}",
            "vllm_importance_sampling_clip_min": 0.9,
            "vllm_importance_sampling_clip_max": 1.1,
        }
        yield f"correction/trl/{level}_{what}", Case("sampling_correction", {"trl": fields})
    geometric, token = (0.009950330853168092, 0.01005033585350145), (0.09531017980432493, 0.10536051565782628)
    skyrl: dict[str, Fields] = {
        "token": {"weights": "token", "weight_max": 1.05},
        "geometric": {
            "weights": "sequence",
            "weight_max": 5.0,
            "rejections": (("seq_mean_k1", -geometric[0], geometric[1]),),
        },
        "product": {
            "rejections": (
                ("seq_max_k1", -0.3364722366212129, None),
                ("seq_sum_k1", -0.6931471805599453, 0.6931471805599453),
            )
        },
        "token mask": {"rejections": (("token_k1", -token[0], token[1]),)},
    }
    for name, fields in skyrl.items():
        yield f"correction/skyrl/{name}", Case("sampling_correction", {**fields, "log_ratio_bound": None})
    own: dict[str, Fields] = {
        "measured": {},
        "geometric": {"weights": "geometric", "weight_min": 0.95, "weight_max": 1.05, "outside": "mask"},
        "veto": {"rejections": (("seq_max_k1", -0.3, 0.3),)},
        "kpop": {"rejections": (("token_binary_kl", None, 0.005), ("seq_mean_binary_kl", None, 0.01))},
        "m2": {"m2_threshold": 0.01},
        "bound": {"weights": "token", "log_ratio_bound": 0.1},
    }
    for name, fields in own.items():
        yield f"correction/{name}", Case("sampling_correction", fields)


def _segments() -> Iterator[tuple[str, Case]]:
    options = itertools.product(
        ("bounded", "literal"), ("coherent", "uncorrelated"), ("endpoint", "broadcast"), ("none", "batch", "prompt")
    )
    for rule, proxy, credit, norm in options:
        fields = {"rule": rule, "proxy": proxy, "credit": credit, "norm": norm, "group_variance_threshold": 0.25}
        fields |= {"gamma": 0.9, "lam": 0.8} if credit == "broadcast" else {}
        baseline = ("groups",) if rule == "bounded" else ("values",)
        inputs = (*baseline, "groups") if norm == "prompt" else baseline
        yield f"segments/{rule}, {proxy}, {credit}, {norm}", Case("endpoint_segments", fields, inputs)
    short = {"group_max_size": 3, "group_variance_threshold": 2.0}
    yield "segments/short", Case("endpoint_segments", short, ("groups", "metrics"))
    early = {"rule": "literal", "group_variance_threshold": 4.0}
    yield "segments/early", Case("endpoint_segments", early, ("values",))
    yield "segments/tokens", Case("endpoint_segments", {"group_max_size": 1}, ("values", "metrics"))


def _similarity() -> Iterator[tuple[str, Case]]:
    for linkage in ("single", "complete", "average", "ward"):
        yield f"similarity/{linkage}", Case("similarity_groups", {"linkage": linkage})
    options: dict[str, Fields] = {
        "few": {"k_max": 2},
        "many": {"k_min": 3, "min_silhouette": -1.0},
        "tolerant": {"tie_tolerance": 0.3},
        "floor": {"distance_floor": 0.05},
        "singletons": {"min_silhouette": 1.0, "collapse": "singletons"},
        "different": {"min_silhouette": 1.0, "different": "singletons"},
    }
    for name, fields in options.items():
        yield f"similarity/{name}", Case("similarity_groups", fields, ("valid",))
    yield "similarity/spare places", Case("similarity_groups", {}, ("sizes",))
    yield "similarity/parts", Case("similarity_parts", {})
    yield "similarity/diversity", Case("diversity", {})
    yield "similarity/advantages", Case("similarity_advantages", {"estimator": "grpo"}, ("valid",))


CASES: dict[str, Case] = {}
for _part in (_advantages, _token_advantages, _corrections, _segments, _similarity):
    CASES |= dict(_part())
