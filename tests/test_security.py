"""The claims of SECURITY.md that can be checked on the sources and the defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "grpo_kernels").rglob("*.py"), *(ROOT / "python").rglob("*.py")])
pytestmark = pytest.mark.skipif(not (ROOT / "SECURITY.md").exists(), reason="tests are run from outside the checkout")

# Modules that unpickle, and calls that unpickle or run text.
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "pandas.read_pickle", "eval", "exec", "yaml.unsafe_load"}

# Compiles statements of the installed TRL's source, which importing TRL runs as well.
OF_PEERS = {"python/grpo_conformance/adapters/trl.py": "exec"}


def unsafe_places(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in CALLS:
            yield f"line {node.lineno}: {called}"
        yield from (f"line {node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)


def test_no_file_is_unpickled_and_no_text_is_run() -> None:
    assert len(SOURCES) > 100
    for path in SOURCES:
        allowed = OF_PEERS.get(path.relative_to(ROOT).as_posix())
        found = [place for place in unsafe_places(path.read_text()) if place.rpartition(" ")[2] != allowed]
        assert not found, path


def test_code_of_models_runs_only_on_request() -> None:
    pytest.importorskip("transformers")
    from grpo_trainer.recipe import Model
    from grpo_trainer.rewards.reward_model import RewardModel

    assert Model().trust_remote_code is False
    assert RewardModel.model_fields["trust_remote_code"].default is False


def test_a_recipe_imports_only_functions_that_it_names() -> None:
    from grpo_trainer import tasks
    from grpo_trainer.recipe import Reward
    from grpo_trainer.rewards import load_reward

    assert load_reward(Reward(name="posixpath:basename")).function is __import__("posixpath").basename
    with pytest.raises(ValueError, match=r"rewards\.name"):
        load_reward(Reward(name="posixpath"))
    with pytest.raises(ValueError, match=r"data\.task"):
        tasks.make("base", 0, {})
