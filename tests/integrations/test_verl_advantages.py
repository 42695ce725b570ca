"""Our advantage estimators in verl's trainers, and verl's own that patch_verl replaces.

The faults to notice: an estimator or option under another name; the reward of a response without a token in the loss is
part of the statistics of the others; a session whose last output has no token in the loss loses its advantage; rows
that verl's v1 trainer appends to make a batch divisible count as responses; verl keeps ours after unpatch_verl.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

from omegaconf import OmegaConf

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding
from tests.integrations import tiny_verl
from tests.integrations.tiny_verl import PAD, WIDTH, computed, data_of
from tests.ops.group_advantages import test_peers as of_advantages
from tests.ops.group_advantages.test_peers import VerlBatch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.config import AlgoConfig
    from verl.trainer.distillation import losses as distillation
    from verl.trainer.ppo import core_algos, padding_utils, ray_trainer, rollout_corr_helper
    from verl.trainer.ppo.v1 import utils as v1
    from verl.workers.utils import losses

    from grpo_kernels.integrations.verl import advantages, patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl.advantages import PRESETS
    from grpo_kernels.integrations.verl.sessions import COLUMNS

# verl's name for each estimator that it has too, and the group sizes that it supports
PEERS = {
    "fused_grpo": ("grpo", of_advantages.RAGGED),
    "fused_dr_grpo": ("grpo", of_advantages.RAGGED),
    "fused_rloo": ("rloo", of_advantages.RAGGED),
    "fused_opo": ("opo", of_advantages.RAGGED),
    "fused_grpo_passk": ("grpo_passk", of_advantages.PLURAL),
    "fused_reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", of_advantages.RAGGED),
    "fused_gpg": ("gpg", of_advantages.RAGGED),
    "grpo": ("grpo", of_advantages.RAGGED),  # patched
}
# verl's functions of estimators of tokens
OF_TOKENS = {
    "gae": "compute_gae_advantage_return",
    "reinforce_plus_plus": "compute_reinforce_plus_plus_outcome_advantage",
    "optimal_token_baseline": "compute_optimal_token_baseline_advantage",
    "tir_optimal_token_baseline": "compute_multi_turn_optimal_token_baseline_advantage",
}


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    patch_verl(loss=False, correction=True)
    yield
    unpatch_verl()


def proto(batch: VerlBatch, **columns: Any) -> Any:
    return tiny_verl.trainer_batch(batch.tokens(batch.scores), batch.mask, batch.uids, **columns)


def assert_rows(name: str, batch: VerlBatch, tokens: Tensor, peer: Tensor, **changes: Any) -> None:
    """Checks for one advantage per row, equal to verl's up to rounding and except for groups of equal rewards."""
    assert tokens.dtype == torch.float32 and torch.equal(tokens, tokens[:, :1] * batch.mask)
    settings = dataclasses.replace(gk.AdvantageConfig.of(PRESETS.get(name, "verl-grpo")), **changes)
    known = batch.ours(settings.estimator, "reference", **changes)
    extra = 1.0 if settings.scale == "none" else 1 / of_advantages.smallest_divisor(known)
    extra *= 4 if settings.whiten != "none" else 1
    of_advantages.assert_parity(known._replace(advantages=tokens[:, 0]), peer, batch.scores, extra)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("kind", of_advantages.KINDS)
@pytest.mark.parametrize("name", PEERS)
def test_estimators(name: str, kind: str, by_std: bool) -> None:
    peer, sizes = PEERS[name]
    batch, config = VerlBatch(sizes, kind), AlgoConfig(norm_adv_by_std_in_grpo=by_std)
    without = name == "fused_dr_grpo" or not by_std
    options = {"norm_adv_by_std_in_grpo": not without} if peer == "grpo" else {"config": config}
    got = computed(name, proto(batch, reward_baselines=batch.baselines), config, norm_adv_by_std_in_grpo=by_std)
    unpatch_verl()
    want = batch.peer(peer, index=batch.uids, **options)
    changes = {"scale": "none"} if without and name in ("fused_grpo", "fused_grpo_passk", "grpo") else {}
    assert_rows(name, batch, got["advantages"], want, **changes)
    assert torch.equal(got["returns"], got["advantages"])
    # other rounding, so ours was called
    assert name != "grpo" or kind == "binary" or not torch.equal(got["advantages"][:, 0], want)


def test_epsilon_of_the_patched_function() -> None:
    batch = VerlBatch(of_advantages.RAGGED, "normal")
    got, _ = advantages.grpo_outcome_advantage(batch.tokens(batch.scores), batch.mask, batch.uids, epsilon=0.5)
    unpatch_verl()
    assert_rows("fused_grpo", batch, got, batch.peer("grpo", index=batch.uids, epsilon=0.5), eps=0.5)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, -1.0]])
@pytest.mark.parametrize("name", ["gdpo", "fused_gdpo"])
def test_gdpo(name: str, weights: list[float] | None) -> None:
    batch = VerlBatch(of_advantages.RAGGED, "normal", columns=3)
    columns = {f"reward_{i}": batch.columns[:, i].numpy().astype(object) for i in range(3)}
    config = AlgoConfig(gdpo_reward_keys=list(columns), gdpo_reward_weights=weights)
    got = computed(name, proto(batch, **columns), config)["advantages"]
    unpatch_verl()
    want = computed("gdpo", proto(batch, **columns), config)["advantages"]
    # three normalized rewards of up to 2 each, whitened over tokens with a deviation of about 1
    spread = batch.ours("verl-gdpo", "reference", batch.columns)
    allowed = 64 * torch.finfo(torch.float32).eps * (1 + 3 / of_advantages.smallest_divisor(spread))
    assert not torch.equal(got, want) and float((got - want).abs().max()) < allowed


@pytest.mark.parametrize("name", OF_TOKENS)
def test_estimators_of_tokens(name: str) -> None:
    batch, config = VerlBatch([4, 1, 6], "normal"), AlgoConfig(gamma=0.97, lam=0.9)
    columns = {key: torch.randn(batch.mask.shape) for key in ("rewards", "values", "sums", "old")}

    def results() -> dict[str, Tensor]:
        rewards = columns["rewards"] * batch.mask
        data = tiny_verl.trainer_batch(rewards, batch.mask, batch.uids, values=columns["values"])
        data.batch["old_log_probs"], data.batch["sum_pi_squared"] = -columns["old"].abs(), columns["sums"].sigmoid()
        of = computed(name, data, config, gamma=config.gamma, lam=config.lam)
        return {key: of[key] * batch.mask for key in ("advantages", "returns")}

    got, _, wanted = results(), unpatch_verl(), results()
    assert any(not torch.equal(got[key], wanted[key]) for key in got)  # other rounding, so ours was called
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_close_to_rounding(got, wanted, results)


HOLDERS = [
    *((core_algos, name) for name in ("compute_grpo_outcome_advantage", *OF_TOKENS.values())),
    (ray_trainer, "compute_advantage"),
    (v1, "compute_advantage"),
    (v1, "compute_advantage_for_multi_trajectories"),
    (rollout_corr_helper, "compute_rollout_correction_and_add_to_batch"),
    (losses, "ppo_loss"),
    (distillation, "ppo_loss"),
]


def test_unpatch_restores() -> None:
    def held() -> list[Any]:
        found = [getattr(module, name) for module, name in HOLDERS]
        return found + [core_algos.get_adv_estimator_fn(name) for name in OF_TOKENS]

    unpatch_verl()
    before = held()
    for options, of_ours in (
        ({}, range(len(before))),
        ({"grpo": False}, (8, 9, 10)),
        ({"grpo": False, "loss": False}, (8,)),
        ({"grpo": False, "correction": False, "head": False}, (9, 10)),
    ):
        patch_verl(**options)
        patch_verl(**options)
        during = held()
        assert [i for i, (ours, theirs) in enumerate(zip(during, before, strict=True)) if ours is not theirs] == [
            *of_ours
        ]
        unpatch_verl()
        unpatch_verl()
        assert held() == before


# --------------------------------------------------------------------------------- estimators that verl does not have


def clusters(batch: VerlBatch) -> tuple[Tensor, Tensor]:
    embeddings = torch.randn(len(batch.uids), 5)
    return embeddings, gk.similarity_groups(embeddings, gk.group_ids(batch.uids), config="ward").labels


@pytest.mark.parametrize("options", [{}, {"shrinkage": 2.0}, {"singleton": "parent", "clip": 0.5}])
def test_similarity_labels_and_embeddings(options: dict[str, Any]) -> None:
    batch = VerlBatch([8, 5, 1, 12], "normal")
    embeddings, labels = clusters(batch)
    assert labels.max() > 0
    settings = gk.AdvantageConfig("grpo", **options)
    ids = gk.group_ids(batch.uids)
    want = gk.group_advantages(batch.tokens(batch.scores).sum(1), ids, subgroups=labels, config=settings).advantages
    # labels as the published implementation writes them: uid and cluster
    texts = [f"{uid}_{label}" for uid, label in zip(batch.uids, labels.tolist(), strict=True)]
    columns = [
        ({}, {"similarity_labels": np.array(labels.tolist(), dtype=object)}),
        ({}, {"similarity_labels": labels}),
        ({}, {"similarity_group_labels": np.array(texts, dtype=object)}),
        ({"linkage": "ward"}, {"similarity_embeddings": embeddings.numpy()}),
        ({"linkage": "ward"}, {"similarity_embeddings": np.array([*embeddings.tolist(), None], dtype=object)[:-1]}),
    ]
    for extra, column in columns:
        got = computed("similarity_group_grpo", proto(batch, **column), {"grpo_kernels": options | extra})
        assert torch.equal(got["advantages"], want[:, None] * batch.mask)


def test_more_padding_than_a_group_may_have_rows() -> None:
    vectors = np.random.default_rng(0).normal(size=(304, 5)).astype(np.float32)
    found = []
    for pads in (0, 300):
        rows = zip(*[(1.0, 3, "a"), (0.0, 2, "a"), (0.5, 6, "a"), (0.25, 4, "a"), *[(0.0, 0, PAD)] * pads], strict=True)
        data = data_of(*map(list, rows), similarity_embeddings=vectors[: 4 + pads])
        found.append(computed("similarity_group_grpo", data, {"grpo_kernels": {"shrinkage": 4.0}})["advantages"])
    assert torch.equal(found[0], found[1][:4]) and found[0].any() and not found[1][4:].any()


def test_options_from_omegaconf() -> None:
    """Options in the form that Hydra makes of +algorithm.grpo_kernels.shrinkage=2."""
    batch = VerlBatch([8, 5], "normal")
    _, labels = clusters(batch)
    options = {"shrinkage": 2, "reward_weights": [3.0]}
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": False, "grpo_kernels": options})
    got = computed("similarity_group_grpo", proto(batch, similarity_labels=labels), config)
    settings = gk.AdvantageConfig("dr_grpo", shrinkage=2, reward_weights=(3.0,))
    rewards = batch.tokens(batch.scores).sum(1)
    want = gk.group_advantages(rewards, gk.group_ids(batch.uids), subgroups=labels, config=settings).advantages
    assert torch.equal(got["advantages"], want[:, None] * batch.mask)


@pytest.mark.parametrize("critic", [False, True], ids=["prompts", "critic"])
def test_group_ppo(critic: bool) -> None:
    batch = VerlBatch([8, 5, 3], "normal")
    now, sampled, values = (torch.randn(batch.mask.shape) for _ in range(3))
    columns = {"old_log_probs": now, "rollout_log_probs": sampled} | ({"values": values} if critic else {})
    fields = {"group_max_size": 4, "credit": "broadcast", "norm": "prompt" if critic else "batch"}
    fields |= {"adaptive_threshold": False}
    got = computed("group_ppo", proto(batch, **columns), {"gamma": 0.9, "lam": 0.8, "grpo_kernels": fields})
    want = gk.endpoint_segments(
        batch.tokens(batch.scores),
        now,
        sampled,
        batch.mask,
        values=values if critic else None,
        groups=gk.group_ids(batch.uids),
        config=gk.SegmentConfig(gamma=0.9, lam=0.8, **fields),
    )
    for name in ("advantages", "returns", "segment_ids"):
        assert torch.equal(got[name], getattr(want, name)), name


def test_threshold_goes_on() -> None:
    batch = VerlBatch([8, 5, 3], "normal")
    fields = {"threshold_lr": 0.07, "group_max_size": 1}  # one segment per token is above every band
    settings = gk.SegmentConfig(**fields)
    for _ in range(3):
        computed("group_ppo", proto(batch, old_log_probs=torch.randn(batch.mask.shape)), {"grpo_kernels": fields})
    moved = advantages.thresholds[settings].value / settings.group_variance_threshold
    assert moved == pytest.approx(float(np.exp(3 * 0.07)), rel=1e-6)
    unpatch_verl()  # the next run in this process starts from its configuration
    assert not advantages.thresholds


# ------------------------------------------------------------------------------------------------- what is counted

REWARDS = [100.0, 3.0, 1.0, 2.5, 7.0, -4.0, 5.0]
LENGTHS = [0, 4, 2, 6, 0, 3, 1]  # of the tokens in the loss
UIDS = [*"aaabbbb"]
ALONE = [name for name in PRESETS if name not in ("fused_gdpo", "similarity_group_grpo")]  # read no columns


def of_name(name: str, rewards: Any, lengths: Any, uids: Any, rows: Any = slice(None), **options: Any) -> Tensor:
    """Advantages of the tokens, with the further columns of these rows that the estimator reads."""
    embeddings = torch.tensor([[1.0, 0.1], [1, 0], [0.6, 0.8], [0, 1], [0.7, 0.7], [0.1, 1], [1, 0]])
    columns = {
        "similarity_group_grpo": {"similarity_embeddings": embeddings[rows].numpy()},
        "fused_gdpo": {"first": np.array(REWARDS)[rows], "second": np.array(REWARDS)[::-1][rows]},
        "group_ppo": {"old_log_probs": -torch.rand(7, WIDTH, generator=torch.Generator().manual_seed(0))[rows]},
    }
    config = {"gdpo_reward_keys": ["first", "second"], "grpo_kernels": options} if name == "fused_gdpo" else {}
    config |= {"grpo_kernels": options} if options else {}
    result: Tensor = computed(name, data_of(rewards, lengths, uids, **columns.get(name, {})), config)["advantages"]
    return result


@pytest.mark.parametrize("name", [*PRESETS, "group_ppo"])
def test_masked_responses_do_not_vote(name: str) -> None:
    """The others' advantages are those of a batch without them."""
    got = of_name(name, REWARDS, LENGTHS, UIDS)
    rows = [row for row, length in enumerate(LENGTHS) if length]
    rest = [np.array(values)[rows].tolist() for values in (REWARDS, LENGTHS, UIDS)]
    want = of_name(name, *rest, rows)
    assert want.any() and torch.equal(got[rows], want)


@pytest.mark.parametrize("name", [*ALONE, "grpo"])
def test_masked_responses_vote_as_in_verl_where_asked(name: str) -> None:
    """And with the names of verl's own."""
    own = {"fused_dr_grpo": "grpo"}.get(name, name.removeprefix("fused_"))
    got = of_name(name, REWARDS, LENGTHS, UIDS, **({} if name == "grpo" else {"masked_rows": "vote"}))
    unpatch_verl()
    by_std = {"norm_adv_by_std_in_grpo": name in ("fused_grpo", "grpo")}

    def theirs() -> Any:
        return computed(own, data_of(REWARDS, LENGTHS, UIDS), **by_std)["advantages"]

    assert_close_to_rounding(got, theirs(), theirs)
    # a response of no length weighs nothing in opo's baseline
    votes_elsewhere = name in ("fused_opo", "grpo")
    assert votes_elsewhere or not torch.allclose(got, of_name(name, REWARDS, LENGTHS, UIDS), rtol=1e-2)


@pytest.mark.parametrize("choice", ["leave_out", "vote"])
@pytest.mark.parametrize("name", ALONE)
def test_pads_are_no_responses(name: str, choice: str) -> None:
    want = of_name(name, REWARDS, LENGTHS, UIDS, masked_rows=choice)
    got = of_name(name, REWARDS + [0.0] * 3, LENGTHS + [0] * 3, UIDS + [PAD] * 3, masked_rows=choice)
    assert torch.equal(got[:7], want) and not got[7:].any()


def test_pads_have_the_uid_that_verl_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, Any] = {}
    sample = {"uid": "a", "responses": torch.ones(2), "response_mask": torch.ones(2)}
    queue = type("Queue", (), {"kv_batch_get": lambda **_: [sample], "kv_batch_put": stored.update})
    monkeypatch.setattr(padding_utils, "tq", queue)
    monkeypatch.setattr(padding_utils, "list_of_dict_to_tensordict", lambda rows: rows)
    batch = padding_utils.KVBatchMeta(keys=["a_0_0"], tags=[{}], partition_id="train")
    padding_utils.upsample_batch_to_divisible_size(batch, 3, 1)
    uids = np.array(["a", *(row["uid"] for row in stored["fields"])], dtype=object)
    counts = torch.tensor([0, *(int(row["response_mask"].sum()) for row in stored["fields"])])
    assert advantages.is_pad(uids, counts).tolist() == [False, True, True]


# Four sessions of two outputs, the second first; the last output of the first two has no token in the loss.
KEYS = [f"a_{session}_{output}" for session in range(4) for output in (1, 0)]
OF_LAST = torch.tensor([1.0, 1.0, 0.0, -1.0])
TOKENS = [0, 3, 0, 1, 4, 2, 1, 5]


@pytest.mark.parametrize("name", ["fused_grpo", "fused_rloo", "fused_gpg", "fused_opo"])
def test_a_session_is_one_response(name: str) -> None:
    """With the reward of its last output, whether or not that is in the loss, the length of all, and beside pads."""
    rewards = torch.stack([OF_LAST, torch.full((4,), 50.0)], 1).flatten().tolist()
    lengths = {"lengths": torch.tensor(TOKENS).view(4, 2).sum(1)} if name == "fused_opo" else {}
    want = gk.group_advantages(OF_LAST, 4, config=PRESETS[name], **lengths).advantages.repeat_interleave(2)
    pads = [f"{PAD}_{i}_0" for i in range(3)]
    for choice in ("leave_out", "vote"):
        data = data_of(rewards + [0.0] * 3, TOKENS + [0] * 3, ["a"] * 8 + [PAD] * 3)
        got = computed(name, data, {"grpo_kernels": {"masked_rows": choice}}, KEYS + pads)
        mask = torch.arange(WIDTH) < torch.tensor(TOKENS)[:, None]
        torch.testing.assert_close(got["advantages"][:8], want[:, None] * mask)
        assert not got["advantages"][8:].any()
        # the sessions, their tokens, and rows per session, in which pads are none
        ids, tokens, rows = (got[column] for column in COLUMNS)
        assert ids[:8:2].equal(ids[1:8:2]) and len(ids.unique()) == 7
        assert tokens.tolist() == [3, 3, 1, 1, 6, 6, 6, 6, 0, 0, 0] and rows.tolist() == [2.0] * 11


@pytest.mark.parametrize(("choice", "third"), [("leave_out", [0, 2, -2]), ("vote", [0, -47.5, -50.5])])
def test_a_session_without_tokens(choice: str, third: list[float]) -> None:
    data = data_of([100, 50, 3, 50, 1, 50], [0, 0, 0, 1, 2, 2], ["a"] * 6)
    got = computed("fused_rloo", data, {"grpo_kernels": {"masked_rows": choice}}, KEYS[:6])["advantages"]
    assert got[1::2, 0].tolist() == third


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_estimators_of_verl_get_columns_of_sessions(name: str) -> None:
    data = data_of([1.0, 2.0] * 4, TOKENS, ["a"] * 8)
    assert computed(name, data, keys=KEYS)[COLUMNS[1]].tolist() == [3, 3, 1, 1, 6, 6, 6, 6]
    lone = computed(name, data_of([1.0, 2.0] * 4, TOKENS, ["a"] * 8), keys=[f"a_{i}_0" for i in range(8)])
    assert not any(column in lone for column in COLUMNS)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("carries", [False, True])
def test_joined_outputs_are_one_row(name: str, carries: bool) -> None:
    """Three outputs, the last one first, with a penalty beside the score, which verl copies to all."""
    penalty, values = torch.rand(3, 4), torch.rand(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 1]])
    scores, order = torch.tensor([[0, 0, 0, 1.0]] * 3), [1, 2, 0]
    columns = {"token_level_scores": scores, "values": values}
    data = tiny_verl.trainer_batch(scores - penalty, mask, np.array(["a"] * 3, dtype=object), **columns)
    options = {"carry_rewards": carries, "session_outputs": "joined"}
    config = OmegaConf.create({"gamma": 0.9, "grpo_kernels": options})
    got = computed(name, data, config, ["a_0_2", "a_0_0", "a_0_1"], gamma=0.9, lam=0.8)["returns"]
    rewards = scores * torch.tensor([[1], [0], [0]]) - penalty
    rewards, whole, critic = (value[order].reshape(1, 12) for value in (rewards, mask, values))
    settings = gk.TokenAdvantageConfig(
        name, gamma=0.9, carry_rewards=carries, **({"lam": 0.8} if name == "gae" else {})
    )
    want = gk.token_advantages(rewards, critic if name == "gae" else None, mask=whole, config=settings).returns
    assert torch.equal((got * mask)[order], want.view(3, 4) * mask[order])
    assert torch.equal(data.batch["token_level_rewards"], scores - penalty)  # which verl puts back into its queue


def test_rejected_responses_do_not_vote() -> None:
    data = data_of([100, 3, 1], [2, 2, 2], ["a"] * 3)
    data.batch["old_log_probs"] = torch.full((3, WIDTH), -4.0)
    data.batch["rollout_log_probs"] = torch.tensor([[-1.0], [-4.0], [-4.0]]).expand(3, WIDTH).clone()
    config = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    data, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(data, config)
    assert computed("fused_rloo", data)["advantages"][:, 0].tolist() == [0, 2, -2]


# ------------------------------------------------------------------------------------------------------------ errors


def objects(*values: Any) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


LABELS, VECTORS, TEXTS = torch.zeros(2, dtype=torch.long), torch.randn(2, 3), objects("a_0", "a_0")
OLD = {"old_log_probs": torch.zeros(2, WIDTH)}
FIRST = {"first": np.ones(2, dtype=object)}
# the estimator, our options or all of the config, further columns, and the error
REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("fused_grpo", {"shrinkag": 1}, {}, "fused_grpo: keys of algorithm.grpo_kernels .*'shrinkag' .*'shrinkage'"),
    ("fused_grpo", 3, {}, "algorithm.grpo_kernels must be a mapping, got int 3"),
    ("fused_grpo", {"masked_rows": "votes"}, {}, r"masked_rows must be one of leave_out, vote, got 'votes' \(did you "),
    ("fused_grpo", {"mask_rows": "vote"}, {}, r"'mask_rows' \(did you mean 'masked_rows'\?\)"),
    ("group_ppo", {"masked_rows": "vote"}, OLD, "group_ppo: keys of algorithm.grpo_kernels .*, got 'masked_rows'"),
    ("group_ppo", {"gamma": 1.0}, OLD, "group_ppo: gamma must be set as algorithm.gamma"),
    ("group_ppo", {}, {}, "group_ppo: the batch must hold 'old_log_probs'"),
    ("fused_gdpo", {}, {}, "gdpo_reward_keys must name the rewards, got None"),
    ("rloo", {"clip": 1.0}, {}, "algorithm.grpo_kernels must be left out unless .*, got 'rloo'"),
    ("gae", {"carry_reward": True}, OLD, "gae: keys of algorithm.grpo_kernels .*'carry_reward'.*carry_rewards"),
    ("gae", {"carry_rewards": "yes"}, OLD, "carry_rewards must be true or false, got 'yes'"),
    ("gae", {"session_outputs": "join"}, OLD, "session_outputs must be one of separate, joined, got 'join'"),
    (
        "gae",
        {"session_outputs": "joined"},
        OLD,
        "session_outputs must be .* where the outputs of sessions have no keys",
    ),
    ("similarity_group_grpo", {}, {}, "either 'similarity_labels' or .*, got neither"),
    (
        "similarity_group_grpo",
        {},
        {"similarity_labels": LABELS, "similarity_embeddings": VECTORS},
        "either 'similarity_labels' or .*, got both",
    ),
    (
        "similarity_group_grpo",
        {},
        {"similarity_labels": LABELS, "similarity_group_labels": TEXTS},
        "got 'similarity_labels' and 'similarity_group_labels'",
    ),
    *(
        ("similarity_group_grpo", options, {f"similarity_{name}": column}, message)
        for name, column, options, message in (
            ("labels", LABELS, {"k_min": 3}, "must be left out with 'similarity_labels'"),
            ("group_labels", TEXTS, {"k_min": 3}, "must be left out with 'similarity_group_labels'"),
            ("labels", LABELS.double(), {}, "must hold integers, -1 for a response to leave out"),
            ("labels", objects(0, None), {}, r"'similarity_labels' must hold integers, got \[0, None\]"),
            ("embeddings", objects([1.0], [1.0, 2.0]), {}, r"one size, got sizes \[1, 2\]"),
            ("group_labels", objects("a_0", None), {}, "_group_labels' must hold texts, got None for response 1"),
            ("group_labels", objects("a_0", 1), {}, "_group_labels' must hold texts, got 1 for response 1"),
        )
    ),
]


@pytest.mark.parametrize(("name", "options", "columns", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(name: str, options: Any, columns: dict[str, Any], message: str) -> None:
    data = data_of([1.0, 2.0], [2, 2], ["a", "a"], values=torch.zeros(2, WIDTH), **columns)
    with pytest.raises((TypeError, ValueError), match=message):
        computed(name, data, {"grpo_kernels": options})


def test_other_refusals() -> None:
    two = data_of([1.0, 2.0], [WIDTH] * 2, ["a", "a"], **FIRST, **OLD)
    for config, message in (
        ({"gdpo_reward_keys": ["b"]}, r"every one of gdpo_reward_keys, got \['first', 'uid'\] without 'b'"),
        (
            {"gdpo_reward_keys": ["first"], "gdpo_reward_weights": [1.0, 2.0]},
            r"gdpo_reward_weights must have one weight for each .*, got \[1.0, 2.0\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            computed("fused_gdpo", two, config)
    assert computed("group_ppo", two, keys=["a_0_0", "a_1_0"])["advantages"].any()
    with pytest.raises(ValueError, match=r"group_ppo: every session must have one output.* got 2 outputs of 1"):
        computed("group_ppo", two, keys=["a_0_0", "a_0_1"])
    for key in ("a-b", "a_b_c"):
        with pytest.raises(ValueError, match=f"of the form uid_session_output, got '{key}'"):
            computed("fused_grpo", two, keys=[key] * 2)
    with pytest.raises(ValueError, match="fused_grpo: index must be given"):
        core_algos.get_adv_estimator_fn("fused_grpo")(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="reinforce_plus_plus: config must be verl's algorithm section"):
        core_algos.get_adv_estimator_fn("reinforce_plus_plus")(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"'similarity_group_labels' must hold a label for each of 5 .*, got 4"):
        advantages._numbered("similarity_group_grpo", ["a_0"] * 4, 5)
    with pytest.raises(TypeError, match="patch_verl: grpo must be a bool"):
        patch_verl(grpo="no")  # type: ignore[arg-type]
    unpatch_verl()
    for name in ("similarity_group_grpo", "group_ppo", "fused_gdpo"):
        with pytest.raises(RuntimeError, match=f"{name}: .* call grpo_kernels.integrations.verl.patch_verl"):
            computed(name, two, {"gdpo_reward_keys": ["first"]})
