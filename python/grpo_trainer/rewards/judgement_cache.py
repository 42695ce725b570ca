"""A cache of scores, in memory and optionally in a file that survives a process killed while writing to it."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path

_HEADER = b'{"cache": "judgements", "version": 1}\n'


class JudgementCache:
    """Scores by key, the least recently used ones dropped from memory.

    The file has a header and one JSON object per line. A line is appended by a single write, so processes may share the
    file, and a line cut off by a kill is skipped when the file is read.

    Args:
        size: number of scores in memory.
        path: the file, created if it does not exist; None: memory only.
    """

    def __init__(self, size: int, path: str | None = None) -> None:
        self.size, self.scores = size, OrderedDict[str, float]()
        self.descriptor: int | None = None
        if path is not None:
            self._open(Path(path))

    def get(self, key: str) -> float | None:
        if key not in self.scores:
            return None
        self.scores.move_to_end(key)
        return self.scores[key]

    def put(self, key: str, score: float) -> None:
        self._remember(key, score)
        if self.descriptor is not None:
            os.write(self.descriptor, (json.dumps({"key": key, "score": score}) + "\n").encode())

    def _remember(self, key: str, score: float) -> None:
        self.scores[key] = score
        self.scores.move_to_end(key)
        while len(self.scores) > self.size:
            self.scores.popitem(last=False)

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if not (content.startswith(_HEADER) or _HEADER.startswith(content)):
            raise ValueError(
                f"judge.cache_file: must be a cache of judgements or a new file, got {str(path)!r} with other content"
            )
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if len(content) < len(_HEADER):
            os.write(self.descriptor, _HEADER[len(content) :])
        elif not content.endswith(b"\n"):
            os.write(self.descriptor, b"\n")  # ends the line that was cut off, so that the next one can be read
        for line in content[len(_HEADER) :].splitlines():
            try:
                entry = json.loads(line)
                key, score = str(entry["key"]), float(entry["score"])
            except (ValueError, LookupError, TypeError):
                continue
            if math.isfinite(score):
                self._remember(key, score)
