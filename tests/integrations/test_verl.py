"""Our entries in verl's registries, and our advantages compared with verl's."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

import grpo_kernels as gk
from tests.integrations import tiny_verl
from tests.ops.group_advantages import test_peers as of_advantages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.config import AlgoConfig
    from verl.trainer.distillation import losses as distillation
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.trainer.ppo.v1 import utils as v1
    from verl.workers.utils import losses

    from grpo_kernels.integrations.verl import advantages as _verl_advantages
    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

ROOT = Path(__file__).parents[2]
# verl's name for each estimator that it has too, and the group sizes that it supports
PEERS = {
    "fused_grpo": ("grpo", of_advantages.RAGGED),
    "fused_dr_grpo": ("grpo", of_advantages.RAGGED),
    "fused_rloo": ("rloo", of_advantages.RAGGED),
    "fused_opo": ("opo", of_advantages.RAGGED),
    "fused_grpo_passk": ("grpo_passk", of_advantages.PLURAL),
    "fused_reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", of_advantages.RAGGED),
    "fused_gpg": ("gpg", of_advantages.RAGGED),
}


@pytest.fixture
def patched() -> Iterator[None]:
    patch_verl()
    yield
    unpatch_verl()


# ------------------------------------------------------------------------------------------------------- plug-in


def in_new_process(folder: Path, policy: str, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process where grpo-kernels is installed with the entry point of pyproject.toml."""
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "verl_plugin" in line)
    info = folder / "grpo_kernels_here-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-kernels-here\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + line.replace('"', "") + "\n")
    environment = {"PATH": "", "PYTHONPATH": f"{folder}:{ROOT}", "HOME": str(folder)}
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": policy, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder)


@pytest.mark.full
def test_plugin_waits_for_the_registries(tmp_path: Path) -> None:
    done = in_new_process(
        tmp_path,
        "none",
        """if True:
        import sys
        import verl
        is_waiting = lambda: [f for f in sys.meta_path if type(f).__name__ == "_WhenImported"]
        assert not is_waiting() and "grpo_kernels" not in sys.modules
        from importlib.metadata import entry_points
        for entry in entry_points(group="verl.plugins"):
            entry.load()
            entry.load()
        assert len(is_waiting()) == 1 and "verl.trainer.ppo.core_algos" not in sys.modules
        from verl.trainer.ppo import core_algos
        assert not is_waiting()
        core_algos.get_adv_estimator_fn("fused_rloo"), core_algos.get_policy_loss_fn("fused_gspo")
    """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_plugin_fails_aloud(tmp_path: Path) -> None:
    done = in_new_process(
        tmp_path,
        "auto",
        """if True:
        import verl
        verl.__version__, found = "0.8.2", verl.__version__
        from verl.trainer.ppo import core_algos
        assert not any(name.startswith("fused") for name in core_algos.POLICY_LOSS_REGISTRY)
        verl.__version__ = found
        core_algos.register_policy_loss("fused_gspo")(print)
        from grpo_kernels.integrations import verl_plugin as _verl_plugin
        try:
            _verl_plugin.register()
        except ValueError as error:
            assert "'fused_gspo' must not be registered yet" in str(error)
        else:
            raise AssertionError
        del core_algos.POLICY_LOSS_REGISTRY["fused_gspo"]
        assert "fused_grpo" not in core_algos.ADV_ESTIMATOR_REGISTRY  # all or nothing
        import grpo_kernels.integrations.verl
        assert core_algos.get_policy_loss_fn("fused_gspo") is not print
    """,
    )
    assert done.returncode == 0, done.stderr
    assert "ERROR" in done.stderr and "is not registered with verl" in done.stderr
    assert "needs verl 0.9.1 or later, got 0.8.2" in done.stderr and "must not be registered yet" in done.stderr


@pytest.mark.full
def test_patch_by_an_external_module(tmp_path: Path) -> None:
    """verl imports external modules before its plug-ins, while verl itself is only partly imported."""
    (tmp_path / "my_patches.py").write_text("from grpo_kernels.integrations.verl import patch_verl\npatch_verl()\n")
    done = in_new_process(
        tmp_path,
        "auto",
        """if True:
        import verl
        from verl.trainer.distillation import losses as distillation
        from verl.trainer.ppo import core_algos, ray_trainer
        from verl.trainer.ppo.v1 import utils
        from verl.workers.utils import losses
        ours = [core_algos.compute_grpo_outcome_advantage, losses.ppo_loss, distillation.ppo_loss,
                ray_trainer.compute_advantage, utils.compute_advantage,
                utils.compute_advantage_for_multi_trajectories]
        assert all(f.__globals__["__name__"].startswith("grpo_kernels") for f in ours), ours
        core_algos.get_adv_estimator_fn("fused_rloo")
    """,
        VERL_USE_EXTERNAL_MODULES="my_patches",
    )
    assert done.returncode == 0, done.stderr
    assert "not registered" not in done.stderr


# ---------------------------------------------------------------------------------------------------- advantages


def assert_rows(name: str, batch: of_advantages.VerlBatch, tokens: Tensor, peer: Tensor, **changes: Any) -> None:
    """Checks for one advantage per row, equal to verl's up to rounding and except for groups of equal rewards."""
    assert tokens.dtype == torch.float32 and torch.equal(tokens, tokens[:, :1] * batch.mask)
    settings = dataclasses.replace(gk.AdvantageConfig.of(_verl_advantages.PRESETS[name]), **changes)
    known = batch.ours(settings.estimator, "reference", **changes)
    extra = 1.0 if settings.scale == "none" else 1 / of_advantages.smallest_divisor(known)
    extra *= 4 if settings.whiten != "none" else 1
    of_advantages.assert_parity(known._replace(advantages=tokens[:, 0]), peer, batch.scores, extra)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("kind", of_advantages.KINDS)
@pytest.mark.parametrize("name", PEERS)
def test_estimators(name: str, kind: str, by_std: bool) -> None:
    peer, sizes = PEERS[name]
    batch = of_advantages.VerlBatch(sizes, kind)
    config = AlgoConfig(norm_adv_by_std_in_grpo=by_std)
    without = name == "fused_dr_grpo" or not by_std
    options = {"norm_adv_by_std_in_grpo": not without} if peer == "grpo" else {"config": config}
    want = batch.peer(peer, index=batch.uids, **options)
    tokens, returns = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=batch.tokens(batch.scores), response_mask=batch.mask, index=batch.uids, config=config
    )
    assert torch.equal(tokens, returns)
    changes = {"scale": "none"} if without and name in ("fused_grpo", "fused_grpo_passk") else {}
    assert_rows(name, batch, tokens, want, **changes)


def test_equal_rewards_teach_nothing() -> None:
    rewards, mask = torch.full((8, 3), 0.7 / 3), torch.ones(8, 3)
    uids = np.array(["a"] * 8, dtype=object)
    tokens, _ = core_algos.get_adv_estimator_fn("fused_grpo")(rewards, mask, uids)
    assert not tokens.any()


def test_epsilon_of_the_patched_function() -> None:
    batch = of_advantages.VerlBatch(of_advantages.RAGGED, "normal")
    arguments = batch.tokens(batch.scores), batch.mask, batch.uids
    got, _ = _verl_advantages.grpo_outcome_advantage(*arguments, epsilon=0.5)
    assert_rows("fused_grpo", batch, got, batch.peer("grpo", index=batch.uids, epsilon=0.5), eps=0.5)


def of_trainer(name: Any, batch: of_advantages.VerlBatch, config: Any = None, **columns: Any) -> Any:
    data = tiny_verl.trainer_batch(batch.tokens(batch.scores), batch.mask, batch.uids, **columns)
    return ray_trainer.compute_advantage(data, name, config={} if config is None else config)


@pytest.mark.parametrize("name", ["fused_grpo", "fused_rloo", "fused_gpg"])
def test_compute_advantage(name: str) -> None:
    batch = of_advantages.VerlBatch(of_advantages.RAGGED, "normal")
    got, want = of_trainer(name, batch, reward_baselines=batch.baselines), of_trainer(PEERS[name][0], batch)
    assert_rows(name, batch, got.batch["advantages"], want.batch["advantages"][:, 0])
    assert torch.equal(got.batch["returns"], got.batch["advantages"])


@pytest.mark.parametrize("by_std", [True, False])
def test_patched_grpo(by_std: bool) -> None:
    batch = of_advantages.VerlBatch(of_advantages.RAGGED, "normal")
    data = [tiny_verl.trainer_batch(batch.tokens(batch.scores), batch.mask, batch.uids) for _ in range(2)]
    want = ray_trainer.compute_advantage(data[0], "grpo", norm_adv_by_std_in_grpo=by_std)
    patch_verl(loss=False)
    try:
        got = ray_trainer.compute_advantage(data[1], "grpo", norm_adv_by_std_in_grpo=by_std)
    finally:
        unpatch_verl()
    assert not torch.equal(got.batch["advantages"], want.batch["advantages"])  # other rounding, so ours was called
    changes = {} if by_std else {"scale": "none"}
    assert_rows("fused_grpo", batch, got.batch["advantages"], want.batch["advantages"][:, 0], **changes)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, -1.0]])
@pytest.mark.parametrize("name", ["gdpo", "fused_gdpo"])
def test_gdpo(name: str, weights: list[float] | None) -> None:
    batch = of_advantages.VerlBatch(of_advantages.RAGGED, "normal", columns=3)
    columns = {f"reward_{i}": batch.columns[:, i].numpy().astype(object) for i in range(3)}
    config = AlgoConfig(gdpo_reward_keys=list(columns), gdpo_reward_weights=weights)
    want = of_trainer("gdpo", batch, config, **columns).batch["advantages"]
    patch_verl(loss=False)
    try:
        got = of_trainer(name, batch, config, **columns).batch["advantages"]
    finally:
        unpatch_verl()
    # three normalized rewards of up to 2 each, whitened over tokens with a deviation of about 1
    spread = batch.ours("verl-gdpo", "reference", batch.columns)
    allowed = 64 * torch.finfo(torch.float32).eps * (1 + 3 / of_advantages.smallest_divisor(spread))
    assert not torch.equal(got, want) and float((got - want).abs().max()) < allowed


def clusters(batch: of_advantages.VerlBatch) -> tuple[Tensor, Tensor]:
    embeddings = torch.randn(len(batch.uids), 5)
    return embeddings, gk.similarity_groups(embeddings, gk.group_ids(batch.uids), config="ward").labels


def named_labels(batch: of_advantages.VerlBatch, labels: Tensor) -> Any:
    """Labels as the published implementation writes them: uid and cluster."""
    texts = [f"{uid}_{label}" for uid, label in zip(batch.uids, labels.tolist(), strict=True)]
    return np.array(texts, dtype=object)


@pytest.mark.parametrize("options", [{}, {"shrinkage": 2.0}, {"singleton": "parent", "clip": 0.5}])
def test_similarity_labels_and_embeddings(patched: None, options: dict[str, Any]) -> None:
    batch = of_advantages.VerlBatch([8, 5, 1, 12], "normal")
    embeddings, labels = clusters(batch)
    assert labels.max() > 0
    settings = gk.AdvantageConfig("grpo", **options)
    ids = gk.group_ids(batch.uids)
    want = gk.group_advantages(batch.tokens(batch.scores).sum(1), ids, subgroups=labels, config=settings).advantages
    columns = [
        ({}, {"similarity_labels": np.array(labels.tolist(), dtype=object)}),
        ({}, {"similarity_labels": labels}),
        ({}, {"similarity_group_labels": named_labels(batch, labels)}),
        ({"linkage": "ward"}, {"similarity_embeddings": embeddings.numpy()}),
        ({"linkage": "ward"}, {"similarity_embeddings": np.array([*embeddings.tolist(), None], dtype=object)[:-1]}),
    ]
    for extra, column in columns:
        got = of_trainer("similarity_group_grpo", batch, {"grpo_kernels": options | extra}, **column)
        assert torch.equal(got.batch["advantages"], want[:, None] * batch.mask)


def test_options_from_omegaconf(patched: None) -> None:
    """Options in the form that Hydra makes of +algorithm.grpo_kernels.shrinkage=2."""
    omegaconf = pytest.importorskip("omegaconf")
    batch = of_advantages.VerlBatch([8, 5], "normal")
    _, labels = clusters(batch)
    config = omegaconf.OmegaConf.create(
        {
            "adv_estimator": "similarity_group_grpo",
            "norm_adv_by_std_in_grpo": False,
            "grpo_kernels": {"shrinkage": 2, "reward_weights": [3.0]},
        }
    )
    got = of_trainer("similarity_group_grpo", batch, config, similarity_labels=labels)
    settings = gk.AdvantageConfig("dr_grpo", shrinkage=2, reward_weights=(3.0,))
    rewards = batch.tokens(batch.scores).sum(1)
    want = gk.group_advantages(rewards, gk.group_ids(batch.uids), subgroups=labels, config=settings).advantages
    assert torch.equal(got.batch["advantages"], want[:, None] * batch.mask)


@pytest.mark.parametrize("critic", [False, True], ids=["prompts", "critic"])
def test_group_ppo(patched: None, critic: bool) -> None:
    batch = of_advantages.VerlBatch([8, 5, 3], "normal")
    now, sampled, values = (torch.randn(batch.mask.shape) for _ in range(3))
    columns = {"old_log_probs": now, "rollout_log_probs": sampled} | ({"values": values} if critic else {})
    fields = {
        "group_max_size": 4,
        "credit": "broadcast",
        "norm": "prompt" if critic else "batch",
        "adaptive_threshold": False,
    }
    config = {"gamma": 0.9, "lam": 0.8, "grpo_kernels": fields}
    got = of_trainer("group_ppo", batch, config, **columns).batch
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


def test_threshold_goes_on(patched: None) -> None:
    batch = of_advantages.VerlBatch([8, 5, 3], "normal")
    fields = {"threshold_lr": 0.07, "group_max_size": 1}  # one segment per token is above every band
    settings = gk.SegmentConfig(**fields)
    for _ in range(3):
        of_trainer("group_ppo", batch, {"grpo_kernels": fields}, old_log_probs=torch.randn(batch.mask.shape))
    moved = _verl_advantages.thresholds[settings].value / settings.group_variance_threshold
    assert moved == pytest.approx(float(np.exp(3 * 0.07)), rel=1e-6)
    unpatch_verl()  # the next run in this process starts from its configuration
    assert not _verl_advantages.thresholds


def keys_of(batch: of_advantages.VerlBatch, outputs: int) -> list[str]:
    """Keys for sessions of up to `outputs` outputs; a session's final output need not come last."""
    return [f"{uid}_{i // outputs}_{(i + 1) % outputs}" for i, uid in enumerate(batch.uids)]


def of_sessions(name: Any, batch: of_advantages.VerlBatch, keys: list[str], **columns: Any) -> Tensor:
    data = tiny_verl.trainer_batch(batch.tokens(batch.scores), batch.mask, batch.uids, **columns)
    result: Tensor = v1.compute_advantage_for_multi_trajectories(data, keys, name, config={}).batch["advantages"]
    return result


@pytest.mark.parametrize("outputs", [1, 3])
def test_sessions_with_several_outputs(patched: None, outputs: int) -> None:
    batch = of_advantages.VerlBatch([18], "normal")
    keys = keys_of(batch, outputs)
    # verl's own path for 'grpo', which uses our formula while patched
    want = of_sessions(core_algos.AdvantageEstimator.GRPO, batch, keys)
    assert torch.equal(of_sessions("fused_grpo", batch, keys), want)
    assert len(set(want[:, 0].tolist())) == 18 // outputs


def test_sessions_that_group_ppo_has_no_way_for(patched: None) -> None:
    batch = of_advantages.VerlBatch([18], "normal")
    zeros = torch.zeros(batch.mask.shape)
    assert of_sessions("group_ppo", batch, keys_of(batch, 1), old_log_probs=zeros).any()
    with pytest.raises(ValueError, match=r"group_ppo: every session must have one output.* got 18 outputs of 6"):
        of_sessions("group_ppo", batch, keys_of(batch, 3), old_log_probs=zeros)
    with pytest.raises(ValueError, match="of the form uid_session_output, got 'a-b'"):
        of_sessions("fused_grpo", batch, ["a-b"] * 18)


def test_what_estimators_refuse() -> None:
    batch = of_advantages.VerlBatch([4, 4], "normal")
    for name, config in (("similarity_group_grpo", {}), ("group_ppo", {}), ("fused_gdpo", {"gdpo_reward_keys": ["a"]})):
        with pytest.raises(RuntimeError, match=f"{name}: .* call grpo_kernels.integrations.verl.patch_verl"):
            of_trainer(name, batch, config)
    with pytest.raises(ValueError, match="fused_grpo: index must be given"):
        core_algos.get_adv_estimator_fn("fused_grpo")(batch.tokens(batch.scores), batch.mask)
    with pytest.raises(ValueError, match=r"fused_grpo: keys of algorithm.grpo_kernels .*'shrinkag' .*'shrinkage'\?"):
        of_trainer("fused_grpo", batch, {"grpo_kernels": {"shrinkag": 1}})
    with pytest.raises(TypeError, match=r"algorithm.grpo_kernels must be a mapping, got int 3"):
        of_trainer("fused_grpo", batch, {"grpo_kernels": 3})


def test_what_estimators_refuse_of_a_batch(patched: None) -> None:
    batch = of_advantages.VerlBatch([4, 4], "normal")
    embeddings, labels = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
    both = {"similarity_labels": labels, "similarity_embeddings": embeddings}
    for columns, got in (({}, "neither"), (both, "both")):
        with pytest.raises(ValueError, match=f"either 'similarity_labels' or .*, got {got}"):
            of_trainer("similarity_group_grpo", batch, **columns)
    with pytest.raises(ValueError, match="must be left out with 'similarity_labels'"):
        of_trainer("similarity_group_grpo", batch, {"grpo_kernels": {"k_min": 3}}, similarity_labels=labels)
    with pytest.raises(TypeError, match="must hold integers, -1 for a response to leave out"):
        of_trainer("similarity_group_grpo", batch, similarity_labels=labels.double())
    with pytest.raises(ValueError, match=r"group_ppo: gamma must be set as algorithm.gamma"):
        of_trainer("group_ppo", batch, {"grpo_kernels": {"gamma": 1.0}}, old_log_probs=torch.zeros(8, 12))
    with pytest.raises(ValueError, match="group_ppo: the batch must hold 'old_log_probs'"):
        of_trainer("group_ppo", batch)
    with pytest.raises(ValueError, match="gdpo_reward_keys must name the rewards, got None"):
        of_trainer("fused_gdpo", batch)
    with pytest.raises(ValueError, match=r"every one of gdpo_reward_keys, got \['uid'\] without 'a'"):
        of_trainer("fused_gdpo", batch, {"gdpo_reward_keys": ["a"]})
    with pytest.raises(ValueError, match=r"gdpo_reward_weights must have one weight for each .*, got \[1.0, 2.0\]"):
        config = {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1.0, 2.0]}
        of_trainer("fused_gdpo", batch, config, a=np.ones(8, dtype=object))
    with pytest.raises(ValueError, match=r"algorithm.grpo_kernels must be left out unless .*, got 'rloo'"):
        of_trainer("rloo", batch, {"grpo_kernels": {"clip": 1.0}})


# --------------------------------------------------------------------------------------------------------- patch


def test_unpatch_restores() -> None:
    holders = [
        (core_algos, "compute_grpo_outcome_advantage"),
        (ray_trainer, "compute_advantage"),
        (v1, "compute_advantage"),
        (v1, "compute_advantage_for_multi_trajectories"),
        (losses, "ppo_loss"),
        (distillation, "ppo_loss"),
    ]
    before = [getattr(module, name) for module, name in holders]
    patch_verl()
    patch_verl()
    during = [getattr(module, name) for module, name in holders]
    unpatch_verl()
    unpatch_verl()
    assert not any(ours is theirs for ours, theirs in zip(during, before, strict=True))
    assert all(getattr(module, name) is theirs for (module, name), theirs in zip(holders, before, strict=True))
    patch_verl(grpo=False)
    assert [getattr(module, name) is theirs for (module, name), theirs in zip(holders, before, strict=True)] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    unpatch_verl()


def test_text_labels_need_one_entry_per_response_and_no_other_column(patched: None) -> None:
    batch = of_advantages.VerlBatch([3, 2], "normal")
    labels = torch.zeros(5, dtype=torch.int64)
    texts = named_labels(batch, labels)
    with pytest.raises(ValueError, match=r"got 'similarity_labels' and 'similarity_group_labels'"):
        of_trainer("similarity_group_grpo", batch, similarity_labels=labels, similarity_group_labels=texts)
    with pytest.raises(ValueError, match="must be left out with 'similarity_group_labels'"):
        options = {"grpo_kernels": {"k_min": 3}}
        of_trainer("similarity_group_grpo", batch, options, similarity_group_labels=texts)
    with pytest.raises(ValueError, match=r"'similarity_group_labels' must hold a label for each of 5 .*, got 4"):
        _verl_advantages._numbered("similarity_group_grpo", texts[:4], 5)


@pytest.mark.parametrize(
    ("column", "values", "error", "message"),
    [
        ("similarity_labels", [0, None], TypeError, r"'similarity_labels' must hold integers, got \[0, None\]"),
        ("similarity_embeddings", [[1.0, 2.0], [1.0, 2.0, 3.0]], ValueError, r"one size, got sizes \[2, 3\]"),
        (
            "similarity_group_labels",
            ["a_0", None],
            TypeError,
            r"_group_labels' must hold texts, got None for .* 1",
        ),
        ("similarity_group_labels", ["a_0", 1], TypeError, r"_group_labels' must hold texts, got 1 for response 1"),
    ],
)
def test_columns_that_are_no_labels_or_vectors(column: str, values: Any, error: type[Exception], message: str) -> None:
    held = np.empty(2, dtype=object)
    held[:] = values
    token = _verl_advantages.BATCH.set(SimpleNamespace(batch={}, non_tensor_batch={column: held}))
    try:
        with pytest.raises(error, match=message):
            ids, valid = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
            _verl_advantages._clusters("similarity_group_grpo", ids, valid, gk.SimilarityConfig())
    finally:
        _verl_advantages.BATCH.reset(token)
