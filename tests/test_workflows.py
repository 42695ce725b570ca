"""GitHub's files follow their schemas, and the workflows call make's targets with few permissions and time limits."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo_kernels

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


def schema_errors(schema: str, *paths: Path) -> str:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schemas(schema: str) -> None:
    assert SCHEMAS[schema]
    errors = schema_errors(schema, *SCHEMAS[schema])
    assert not errors, errors


def test_the_schema_sees_a_fault(tmp_path: Path) -> None:
    faulty = tmp_path / "ci.yml"
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    faulty.write_text(text.replace("runs-on: ubuntu-latest", "run-on: ubuntu-latest", 1))
    assert "run-on" in schema_errors("github-workflows", faulty)


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert citation["version"] == grpo_kernels.__version__ and f'license = "{citation["license"]}"' in project


def test_a_bug_report_asks_for_the_output_of_the_module() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug_report.yml").read_text())
    asked = next(part for part in form["body"] if part.get("id") == "environment")
    assert "python -m grpo_kernels" in asked["attributes"]["label"] and asked["validations"]["required"]


def commands(workflow: dict[str, Any]) -> list[str]:
    """Shell lines of all steps."""
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def actions(job: dict[str, Any]) -> list[str]:
    return [name for place in (job, *job.get("steps", [])) if (name := place.get("uses"))]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def faults(workflow: dict[str, Any]) -> Iterator[str]:
    """Violations of our rules, which the schema does not know."""
    permissions = workflow.get("permissions")
    if not isinstance(permissions, dict) or set(permissions.values()) - {"read"}:
        yield f"permissions must be read-only for the whole workflow, got {permissions!r}"
    is_called = set(workflow["on"]) == {"workflow_call"}
    if not is_called and "concurrency" not in workflow:
        yield "a workflow must have a concurrency group"
    for name, job in workflow["jobs"].items():
        if "steps" in job and not 0 < job.get("timeout-minutes", 0) <= 360:
            yield f"{name}: timeout-minutes must be 1 to 360, got {job.get('timeout-minutes')}"
        required = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        for other in required:
            if other not in workflow["jobs"]:
                yield f"{name}: needs must name a job, got {other!r}"
        for action in actions(job):
            is_own = action.startswith("./") and (ROOT / action).exists()
            if not is_own and not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action):
                yield f"{name}: an action must be pinned by its major version, got {action!r}"
        matrix = job.get("strategy", {}).get("matrix", {})
        for key in re.findall(r"\$\{\{ *matrix\.(\w+)", str(job)):
            if key not in matrix:
                yield f"{name}: matrix has no key {key!r}"
    for line in commands(workflow):
        match = re.match(r"make ([\w-]+)", line)
        if match is None or match.group(1) not in make_targets():
            yield f"a step must run a target of the Makefile, got {line!r}"
        if re.search(r"\$\{\{ *(github|inputs)\.", line):
            yield f"a step must take text from outside as a variable, got {line!r}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_follow_our_rules(path: Path) -> None:
    assert list(faults(load(path))) == []


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda w: w.pop("permissions"), "permissions must be read-only"),
        (lambda w: w["permissions"].update(contents="write"), "permissions must be read-only"),
        (lambda w: w.pop("concurrency"), "concurrency group"),
        (lambda w: w["jobs"]["lint"].pop("timeout-minutes"), "lint: timeout-minutes"),
        (lambda w: w["jobs"]["lint"].update(needs="absent"), "got 'absent'"),
        (lambda w: w["jobs"]["lint"]["steps"][0].update(uses="actions/checkout@main"), "got 'actions/checkout@main'"),
        (lambda w: w["jobs"]["lint"]["steps"][1].update(uses="./.github/actions/absent"), "absent"),
        (lambda w: w["jobs"]["lint"]["steps"][-1].update(run="ruff check ."), "got 'ruff check .'"),
        (lambda w: w["jobs"]["lint"]["steps"][-1].update(run="make absent"), "got 'make absent'"),
        (lambda w: w["jobs"]["lint"]["steps"][-1].update(run="make lint X=${{ github.head_ref }}"), "from outside"),
        (lambda w: w["jobs"]["test"]["strategy"]["matrix"].pop("python"), "test: matrix has no key 'python'"),
    ],
)
def test_a_planted_fault_is_seen(plant: Any, message: str) -> None:
    workflow = copy.deepcopy(load(GITHUB / "workflows" / "ci.yml"))
    plant(workflow)
    assert any(message in fault for fault in faults(workflow)), list(faults(workflow))


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
