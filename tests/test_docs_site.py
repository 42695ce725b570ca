"""The site names every page of docs/, its reference every public name, and links and anchors lead somewhere."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo_kernels as gk
from tools import docs_site

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="tests are run from outside the checkout")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the objects that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_the_navigation_names_every_page_once() -> None:
    named = list(pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    files = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(files) > 25
    assert sorted(named) == sorted(files | set(docs_site.generated_pages()))


def test_the_list_of_documents_names_every_page() -> None:
    text = (DOCS / "README.md").read_text()
    for path in DOCS.rglob("*.md"):
        name = str(path.relative_to(DOCS))
        is_listed_elsewhere = name == "README.md" or name.startswith("results/")  # these in a list of their own
        assert f"]({name})" in text or is_listed_elsewhere, f"docs/README.md lacks {name}"


def test_the_reference_names_every_public_name() -> None:
    names = re.findall(r"^::: grpo_kernels\.(?:ops\.\w+\.)?(?:[\w.]+\.)?(\w+)$", docs_site.api_page(), re.MULTILINE)
    assert {*gk.__all__} - {"__version__"} <= set(names)
    assert {"FusedGRPOTrainer", "patch_trl", "patch_verl"} <= set(names)


def documented_arguments(function: Any) -> set[str]:
    """Names in the section Args of a docstring; a line may have several, separated by commas."""
    section = re.search(r"Args:\n((?: +.*\n|\n)+)", f"{inspect.getdoc(function)}\n")
    lines = re.findall(r"^    (\*{0,2}\w[\w, *]*): ", section[1], re.MULTILINE) if section else []
    return {name.strip().lstrip("*") for line in lines for name in line.split(",")}


def test_documented_arguments_exist() -> None:
    for name in [*gk.__all__, *(f"variants.{name}" for name in gk.variants.__all__)]:
        value = operator.attrgetter(name)(gk)
        if inspect.isroutine(value) or inspect.isclass(value):
            unknown = documented_arguments(value) - set(inspect.signature(value).parameters)
            assert not unknown, f"{name}: Args names {unknown}, which the signature lacks"


def anchors_of(text: str) -> set[str]:
    """Anchors that GitHub and the site make of headings: lower case, spaces as -, without punctuation."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def test_links_lead_to_files_and_headings() -> None:
    for path in [ROOT / "README.md", *(ROOT / name for name in docs_site.DOCUMENTS), *DOCS.rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", path.read_text()):
            file = path.parent / target if target else path
            assert file.exists(), f"{path.name}: {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors_of(file.read_text()), f"{path.name}: {target}#{anchor}"


def test_links_are_rewritten_for_the_site() -> None:
    def relinked(text: str, place: str, folder: str = "") -> str:
        return docs_site.relinked(text, place, folder)

    assert relinked("[a](docs/ops/policy_loss.md#formula)", "README.md") == "[a](ops/policy_loss.md#formula)"
    assert relinked("[a](../../README.md)", "docs/ops/policy_loss.md", "ops") == "[a](../README.md)"
    assert relinked("[`a`](examples/grpo.py)", "README.md") == "`a`"
    assert relinked("[a](tutorial.ipynb)", "docs/README.md") == "[a](tutorial.md)"
    assert relinked("[a](absent.md)", "README.md") == "[a](absent.md)"
    picture = (
        '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="docs/images/curve_dark.png">\n'
        '  <img src="docs/images/curve_light.png" width="830" alt="A curve">\n</picture>'
    )
    images = docs_site.pictures_by_scheme(picture)
    assert "![A curve](docs/images/curve_light.png#only-light){ width=830 }" in images
    assert "curve_dark.png#only-dark" in images
    readme = docs_site.pictures_by_scheme((ROOT / "README.md").read_text())
    assert "<picture>" not in readme and readme.count("#only-light") == readme.count("#only-dark") > 1
