"""Hooks of MkDocs (mkdocs.yml) that make a site of documents written for GitHub.

The README becomes the home page, and the project's other documents, the notebooks and the API reference become pages.
Links between documents and sources are rewritten: the sources are no part of the site, so their names stay as text.
"""

from __future__ import annotations

import ast
import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")  # pages with the same name
HOME = "README.md"  # that of the project; docs/README.md lists the pages for readers on GitHub
NOTEBOOKS = [path.stem for path in sorted((ROOT / "docs").glob("*.ipynb"))]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)" width="(\d+)" alt="([^"]*)">\s*</picture>'
)
API = "grpo_kernels/__init__.py"
HOSTS = {  # packages whose public names are in __all__ and are imported with their host
    "grpo_kernels.integrations.trl": "grpo_kernels/integrations/trl/__init__.py",
    "grpo_kernels.integrations.verl": "grpo_kernels/integrations/verl/__init__.py",
}


def public_names(source: str) -> dict[str, str]:
    """Where each name of `__all__` is defined, as a dotted path, by name."""
    tree = ast.parse((ROOT / source).read_text())
    imported: dict[str, str] = {}
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    package = source.removesuffix("/__init__.py").replace("/", ".")
    return {name: imported.get(name, f"{package}.{name}") for name in names if not name.startswith("__")}


def api_page() -> str:
    """Every public name, from the docstrings, by the op that defines it."""
    sections: dict[str, list[str]] = {}
    for name, path in public_names(API).items():
        parts = path.split(".")
        section = parts[2] if parts[1] == "ops" else parts[1] if name == parts[1] else "backends and batches"
        sections.setdefault(section, []).append(f"::: grpo_kernels.{name}" if name == parts[-2] else f"::: {path}")
    text = ["# API reference", "All names of `import grpo_kernels as gk`, and those of the integrations."]
    for section in sorted(sections):
        text += [f"## {section}", *sorted(sections[section])]
    for host, source in HOSTS.items():
        text += [f"## {host}", *(f"::: {path}" for path in sorted(public_names(source).values()))]
    return "\n\n".join(text) + "\n"


def pictures_by_scheme(text: str) -> str:
    """Replaces `<picture>`, which follows the system, by two images of which the theme's scheme selects one."""
    return PICTURE.sub(
        lambda m: f"![{m[4]}]({m[2]}#only-light){{ width={m[3]} }}\n![{m[4]}]({m[1]}#only-dark){{ width={m[3]} }}",
        text,
    )


def relinked(text: str, place: str, folder: str) -> str:
    """Rewrites the links of a document for the site.

    Args:
        text: the document.
        place: path of the file in the checkout.
        folder: folder of its page in the site.
    """

    def relink(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        is_page = path.startswith("docs/") or path in (*DOCUMENTS, HOME)
        page = re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
        if not is_page:
            return label if (ROOT / path).exists() else match[0]  # strict mode reports what leads nowhere
        return f"[{label}]({posixpath.relpath(page, folder or '.')}{anchor})"

    return LINK.sub(relink, text)


def notebook_page(name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, and its images by name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads((ROOT / "docs" / f"{name}.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                image = f"images/{name}_{len(images) + 1}.png"
                images[image] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![Plot of the cell above]({image})")
    return "\n\n".join(parts) + "\n", images


def generated_pages() -> dict[str, str]:
    """Pages that are not files of docs/, by their names."""
    documents = {name: (ROOT / name).read_text() for name in DOCUMENTS}
    notebooks = {f"{name}.md": notebook_page(name)[0] for name in NOTEBOOKS}
    return {"api.md": api_page()} | notebooks | documents


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages and the images of the notebooks."""
    from mkdocs.structure.files import File

    images = {path: image for name in NOTEBOOKS for path, image in notebook_page(name)[1].items()}
    for name, content in (generated_pages() | images).items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_read_source(page: Any, config: Any) -> str | None:
    """Reads the project's README for the home page."""
    return (ROOT / HOME).read_text() if page.file.src_uri == HOME else None


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapts links and pictures."""
    uri = page.file.src_uri
    place = uri if uri in (*DOCUMENTS, HOME) else f"docs/{uri}"
    text = relinked(markdown, place, posixpath.dirname(uri))
    if uri == HOME:
        text = text.replace('srcset="docs/', 'srcset="').replace('src="docs/', 'src="')
    return pictures_by_scheme(text)
