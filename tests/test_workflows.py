"""GitHub's files follow their schemas, CI runs what .ci/run does, and only a tag publishes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-actions": sorted(GITHUB.glob("actions/*/action.yml")),
    "dependabot": [GITHUB / "dependabot.yml"],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "github-issue-forms": sorted(GITHUB.glob("ISSUE_TEMPLATE/*_*.yml")),
    "citation-file-format": [ROOT / "CITATION.cff"],
}
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="tests are run from outside the checkout")


def load(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads the key `on` as a boolean
    return workflow


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schemas(schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *map(str, SCHEMAS[schema])], capture_output=True, text=True)
    assert SCHEMAS[schema] and done.returncode == 0, done.stdout + done.stderr


def commands(workflow: dict[str, Any]) -> list[str]:
    """Shell lines of all steps."""
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_ci_runs_every_stage_of_ci_run() -> None:
    stages = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    lines = commands(load(GITHUB / "workflows" / "ci.yml"))
    assert len(stages) >= 5
    for stage in stages:
        assert any(line == stage or line.startswith(f"{stage} ") for line in lines), f"ci.yml lacks {stage!r}"


def test_ci_covers_the_supported_versions_of_python() -> None:
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    jobs = load(GITHUB / "workflows" / "ci.yml")["jobs"]
    tested = {version for name in ("test", "floor") for version in jobs[name]["strategy"]["matrix"]["python"]}
    assert len(supported) >= 4 and tested == set(supported)


def test_nightly_runs_every_part() -> None:
    assert load(GITHUB / "workflows" / "nightly.yml")["jobs"]["nightly"]["strategy"]["matrix"]["part"] == [
        *re.search(r"^NIGHTLY := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()  # type: ignore[index]
    ]


def test_only_a_tag_publishes_and_no_pull_request_reaches_the_gpu_runner() -> None:
    release, gpu = load(GITHUB / "workflows" / "release.yml"), load(GITHUB / "workflows" / "gpu.yml")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert publish["needs"] == "dist"
    names = [
        step["with"]["name"]
        for job in (load(GITHUB / "workflows" / "dist.yml")["jobs"]["dist"], publish)
        for step in job["steps"]
        if "artifact@" in step.get("uses", "")
    ]
    assert names == ["dist", "dist"], "what is built is what is published"
    assert "make gpu-check" in commands(gpu) and not {"pull_request", "pull_request_target"} & set(gpu["on"])
    for path in WORKFLOWS:
        writes = [job for job in load(path)["jobs"].values() if "write" in job.get("permissions", {}).values()]
        assert writes == ([publish] if path.stem == "release" else []), path.stem
