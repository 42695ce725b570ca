"""The layout of the kernels hub: `kernels` itself loads the variants from disk, beside the installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import quick

hub_kernel = pytest.importorskip("tools.hub_kernel", reason="tests are run from outside the checkout")
# `kernels` is kept apart from the other packages, as transformers behaves differently where it is installed.
HUB = Path(sys.prefix) / "hub"
needs_kernels = pytest.mark.skipif(not HUB.exists(), reason="kernels is not installed")
CHECKS = """
import json, sys
from pathlib import Path

import torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata

import grpo_kernels as installed

root = Path(sys.argv[1])
for folder in sorted((root / "build").iterdir()):
    Metadata.read_from_file(folder / "metadata.json").digest.validate(
        Digest.hash_variant(DigestAlgorithm.SHA256, folder)
    )
loaded = get_local_kernel(root, backend="cpu", trust_remote_code=True)
backend = sys.argv[2]

def results(gk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets, old = torch.randint(50, (6,)), torch.randn(6) / 10 - 4
    advantages = gk.group_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5, 0.5, 2.0]), 3, backend=backend).advantages
    options = {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "config": "dapo", "backend": backend}
    loss = gk.linear_policy_loss(hidden, weight, targets, old, advantages, **options)
    loss.loss.backward()
    groups = gk.similarity_groups(torch.randn(6, 8), 3, backend=backend)
    compile = torch.compile(gk.token_logprobs, fullgraph=True, backend="eager")
    logprobs = compile(weight[:6], targets % 8, backend=backend).logprobs
    return [advantages, loss.loss, loss.metrics.tensor, hidden.grad, weight.grad, groups.labels, logprobs]

namespaces = [getattr(torch.ops, name) for name in (loaded.__name__, "grpo_kernels")]
pairs = zip(results(loaded), results(installed), strict=True)
print(json.dumps({
    "name": loaded.__name__,
    "cpu": loaded.available_kernels()["cpu"],
    "equal": all(torch.equal(a.nan_to_num(-9), b.nan_to_num(-9)) for a, b in pairs),  # metrics of absent terms
    "names": sorted(loaded.__all__) == sorted(installed.__all__),
    "apart": loaded.policy_loss is not installed.policy_loss,
    "namespaces": all(hasattr(namespace, "token_logprobs") for namespace in namespaces),
}))
"""


def load(root: Path, backend: str) -> dict[str, Any]:
    """Facts seen by a process that loads the kernel with `kernels`."""
    environment = os.environ | {"PYTHONPATH": f"{hub_kernel.ROOT}{os.pathsep}{HUB}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHECKS, str(root), backend]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("hub")
    assert hub_kernel.main([str(output)]) == 0
    return output


@pytest.mark.full
@needs_kernels
def test_kernels_loads_the_universal_variant(universal: Path) -> None:
    facts = load(universal, "reference")
    assert facts.pop("name").startswith("_grpo_kernels_cpu_") and facts.pop("cpu").startswith("not built")
    assert facts == {"equal": True, "names": True, "apart": True, "namespaces": True}


@needs_kernels
@pytest.mark.full
def test_kernels_prefers_the_compiled_variant(tmp_path: Path) -> None:
    assert hub_kernel.main([str(tmp_path), "--compiled", "cpu"]) == 0
    facts = load(tmp_path, "kernel")
    assert facts.pop("name").startswith("_grpo_kernels_compiled_cpu_")
    assert facts == {"cpu": "ok", "equal": True, "names": True, "apart": True, "namespaces": True}


WITHOUT_LIBRARIES = """
import importlib.util, json, sys
import torch

spec = importlib.util.spec_from_file_location(sys.argv[1], sys.argv[2])
gk = sys.modules[sys.argv[1]] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gk)
rewards, tokens = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.full((2, 3), -0.5)
assert "grpo_kernels" not in sys.modules
print(json.dumps({
    "cpu": gk.available_kernels()["cpu"],
    "advantages": gk.group_advantages(rewards, 2, config="dr_grpo").advantages.tolist(),
    "segments": gk.endpoint_segments(tokens, tokens, tokens, values=tokens).segment_ids.tolist(),
    "labels": gk.similarity_groups(torch.eye(3), 3).labels.tolist(),
    "score": gk.silhouette(1 - torch.eye(3)[None], torch.tensor([[0, 0, 1]])).score.tolist(),
}))
"""


@pytest.mark.parametrize("backend", quick(hub_kernel.UNIVERSAL, "cuda"))
def test_ops_without_triton_are_plain_torch_in_the_universal_variants(universal: Path, backend: str) -> None:
    folder = universal / "build" / f"torch-{backend}"
    name = json.loads((folder / "metadata.json").read_text())["id"]
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, name, str(folder / "__init__.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=universal, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts.pop("cpu").startswith("not built")
    assert facts == {
        "advantages": [0.5, -0.5, 0.0, 0.0],
        "segments": [[0, 0, 0], [0, 0, 0]],
        "labels": [0, 0, 0],
        "score": [0.0],
    }


def test_no_variant_names_the_installed_package(universal: Path) -> None:
    for folder in (universal / "build").iterdir():
        modules = sorted(folder.rglob("*.py"))
        assert len(modules) > 80 and not (folder / "integrations").exists()
        lines = [line for path in modules for line in path.read_text().splitlines()]
        assert not [line for line in lines if line.lstrip().startswith(("from grpo_kernels", "import grpo_kernels"))]


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit):
        hub_kernel.main([str(tmp_path)])
    assert "OUTPUT must be empty" in capsys.readouterr().err
