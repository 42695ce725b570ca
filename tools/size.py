"""Lines of code per folder and the longest files."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

SUFFIXES = {".py", ".cpp", ".h", ".cu", ".txt", ".md", ".toml", ".yaml"}


def main() -> None:
    root = Path(__file__).parent.parent
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    lines = {
        path: (root / path).read_text().count("\n")
        for path in listed.stdout.splitlines()
        if Path(path).suffix in SUFFIXES and (root / path).exists()
    }
    folders: Counter[str] = Counter()
    for path, count in lines.items():
        folders[str(Path(path).parent)] += count
    for folder, count in sorted(folders.items()):
        print(f"{count:7d}  {folder}")
    print(f"{sum(lines.values()):7d}  all")
    print("longest files:")
    for path, count in sorted(lines.items(), key=lambda item: -item[1])[:8]:
        print(f"{count:7d}  {path}")


if __name__ == "__main__":
    main()
