"""Our entry point for verl, in processes of their own.

The faults to notice: verl does not find our names, an import that comes too early, a failure that nobody reads or that
leaves half of our names, a patch of an external module that later imports undo.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("tensordict")

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def in_new_process(folder: Path, policy: str, code: str, **variables: str) -> str:
    """Runs code in a process where grpo-kernels is installed with the entry point of pyproject.toml."""
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "verl_plugin" in line)
    info = folder / "grpo_kernels_here-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-kernels-here\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + line.replace('"', "") + "\n")
    environment = {"PATH": "", "PYTHONPATH": f"{folder}:{ROOT}", "HOME": str(folder)}
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": policy, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_plugin_waits_for_the_registries(tmp_path: Path) -> None:
    in_new_process(
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
        from verl.workers.utils import losses  # as the actor's worker does
        assert not is_waiting()
        from verl.trainer.ppo import core_algos
        core_algos.get_adv_estimator_fn("fused_rloo"), core_algos.get_policy_loss_fn("fused_gspo")
        from verl.utils.experimental.torch_functional import FusedLinearForPPO
        FusedLinearForPPO(impl_backend="grpo_kernels")
    """,
    )


def test_the_plugin_fails_aloud(tmp_path: Path) -> None:
    errors = in_new_process(
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
    assert "ERROR" in errors and "is not registered with verl" in errors
    assert "needs verl 0.9.1 or later, got 0.8.2" in errors and "must not be registered yet" in errors


def test_patch_by_an_external_module(tmp_path: Path) -> None:
    """verl imports external modules before its plug-ins, while verl itself is only partly imported."""
    (tmp_path / "my_patches.py").write_text("from grpo_kernels.integrations.verl import patch_verl\npatch_verl()\n")
    errors = in_new_process(
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
    assert "not registered" not in errors
