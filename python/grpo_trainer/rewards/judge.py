"""Scores from a language model behind an OpenAI-compatible endpoint, mapped linearly to a reward.

The judge reads a rubric, and the prompt and the response as one JSON object, so that a response cannot end its own
field. It answers with a JSON object that has a "score". A response whose judgement failed is not scored: None, never 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from grpo_trainer.data import Prompt
from grpo_trainer.embed import embedded_text
from grpo_trainer.messages import require_package
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards import RewardError
from grpo_trainer.rewards.base import BundledReward
from grpo_trainer.section import PathText, Rule, Share

BODY = {"temperature": 0, "seed": 0, "max_tokens": 1024}
OWN_FIELDS = ("messages", "model", "stream", "n")  # of the request, not to be set by `body`
FORMAT = 'Answer with a JSON object {{"score": s}}, where s is a number from {low:g} to {high:g}.'
ANSWER = Similarity(unfinished="whole")  # the judge reads what follows the last </think>

Pair = Annotated[tuple[float, float], Field(strict=False)]  # YAML has lists


class Judge(BundledReward):
    base_url: str
    """address of the endpoint up to "/chat/completions", for example http://127.0.0.1:8000/v1"""
    model: str
    """name of the model at the endpoint"""
    rubric: Annotated[str, Field(pattern=r"\S")]
    """instructions for the judge"""
    key_env: str | None = None
    """name of the environment variable with the endpoint's key; null: no key"""
    columns: list[str] = Field(default_factory=list)
    """columns of the data that the judge reads as well, such as a reference answer"""
    scores: Pair = (1, 10)
    """lowest and highest score"""
    rewards: Pair = (0, 1)
    """rewards of these two scores"""
    body: dict[str, Any] = Field(default_factory=dict)
    """further fields of the request; they replace those of BODY, and null removes one"""
    timeout: PositiveFloat = 60.0
    """seconds that a request waits for the endpoint"""
    retries: NonNegativeInt = 4
    """how often the client repeats a request that failed for a reason that may pass"""
    concurrency: PositiveInt = 16
    """largest number of simultaneous requests of a process"""
    max_failures: Share = 0.1
    """largest fraction of a call's responses whose judgement may fail"""
    cache_file: PathText | None = None
    """file that keeps judgements for resumed and further runs"""

    _client: Any = None
    _key: str | None = None
    _known: dict[str, float] = PrivateAttr(default_factory=dict)
    _file: Any = None
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def rules(self) -> Iterator[Rule]:
        yield "base_url", self.base_url.startswith(("http://", "https://")), "must be an address like http://host/v1"
        is_free = not {*self.columns} & {"prompt", "response"}
        yield "columns", is_free, "must not have prompt or response, which the judge reads as well"
        yield "scores", self.scores[0] < self.scores[1], "must be in ascending order"
        yield "rewards", self.rewards[0] != self.rewards[1], "must be two different numbers"
        yield "body", not {*self.body} & {*OWN_FIELDS}, f"must not set {', '.join(OWN_FIELDS)}"
        is_key = self._key is None or (self._key != "" and self._key.isascii() and self._key.isprintable())
        yield "key_env", is_key, "must name a variable that holds a key"

    def model_post_init(self, _: Any) -> None:
        require_package("judge", "openai", "judge")
        from openai import OpenAI

        if "@" in self.base_url:  # no error may show it
            raise ValueError("base_url: must have no user or password; use key_env")
        self._key = None if self.key_env is None else os.environ.get(self.key_env, "")
        # OpenAI's own variables are meant for another endpoint
        own: Any = {"api_key": self._key or "none", "organization": "", "project": ""}
        self._client = OpenAI(base_url=self.base_url, timeout=self.timeout, max_retries=self.retries, **own)
        if self.cache_file is not None:
            self._known, self._file = _open_cache(Path(self.cache_file))
        self._counters = dict.fromkeys(("failed", "cached", "requests"), 0)

    @property
    def needs(self) -> list[tuple[str, ...]]:
        return [(name,) for name in self.columns]

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Any) -> list[float | None]:
        self.require(columns)
        requests = [
            self._request(prompt, response, {name: columns[name][i] for name in self.columns})
            for i, (prompt, response) in enumerate(zip(prompts, completions, strict=True))
        ]
        keys = [self._cache_key(request) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._known}
        cached = sum(key in self._known for key in keys)
        with ThreadPoolExecutor(self.concurrency) as pool:
            answers = zip(missing, pool.map(self._ask, missing, missing.values()), strict=True)
            causes = {key: cause for key, cause in answers if cause is not None}
        failures = Counter(causes[key] for key in keys if key in causes)
        self._counters = {"failed": failures.total(), "cached": cached, "requests": len(missing)}
        if failures.total() > self.max_failures * len(keys):
            cause, times = failures.most_common(1)[0]
            raise RewardError(
                f"reward 'judge': max_failures allows {self.max_failures:g} of the judgements to fail, and "
                f"{failures.total()} of {len(keys)} did; the most frequent cause, {times} times, is: {cause}. Judge: "
                f"{self.model!r} at {self.base_url}"
            )
        (low, high), (worst, best) = self.scores, self.rewards
        scores = [self._known.get(key) for key in keys]
        return [None if s is None else worst + (best - worst) * (s - low) / (high - low) for s in scores]

    def _request(self, prompt: Prompt, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self.scores
        shown = {"prompt": prompt, **row, "response": embedded_text(response, ANSWER)}
        messages = [
            {"role": "system", "content": f"{self.rubric.strip()}\n\n{FORMAT.format(low=low, high=high)}"},
            {"role": "user", "content": json.dumps(shown, ensure_ascii=False)},
        ]
        body = {name: value for name, value in {**BODY, **self.body}.items() if value is not None}
        return {"model": self.model, "messages": messages, "extra_body": body}

    def _cache_key(self, request: Mapping[str, Any]) -> str:
        content = {"url": str(self._client.base_url), "scores": self.scores, "request": request}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _ask(self, key: str, request: Mapping[str, Any]) -> str | None:
        """Asks for a judgement and keeps it; returns the cause if it failed."""
        from openai import OpenAIError

        low, high = self.scores
        try:
            score = read_score(self._client.chat.completions.create(**request).choices[0].message.content)
        # the client does not check a reply, which may have other content in any place
        except (OpenAIError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return (text if self._key is None else text.replace(self._key, "[key]"))[:300]
        if not low <= score <= high:
            return f"the score must be within {low:g} and {high:g}, got {score!r}"
        with self._lock:
            self._known[key] = score
            if self._file is not None:
                self._file.write(json.dumps({"key": key, "score": score}) + "\n")
        return None


def read_score(text: str) -> float:
    """The "score" of the last JSON object in a text that has one; prose and code fences around it are ignored."""
    score: Any = None
    decoder, start = json.JSONDecoder(parse_int=float), text.find("{")  # an int may exceed the floats
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            score = value.get("score", score)
        start = text.find("{", end)
    if isinstance(score, str):
        with contextlib.suppress(ValueError):
            score = float(score)
    if not isinstance(score, float) or not math.isfinite(score):
        raise ValueError(f"the judge must answer with a JSON object that has a number 'score', got {text[-80:]!r}")
    return score


def _open_cache(path: Path) -> tuple[dict[str, float], Any]:
    """Scores in a file of judgements, and the file, to which lines are appended; a cut-off line is skipped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    scores = {}
    for line in content.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if not isinstance(entry, dict) or entry.keys() != {"key", "score"}:
                raise ValueError(f"cache_file: must hold judgements alone, got {str(path)!r} with {line:.80}")
            scores[entry["key"]] = float(entry["score"])
    file = path.open("a", encoding="utf-8", buffering=1)  # stays open; a line is one write
    if content and not content.endswith("\n"):
        file.write("\n")  # ends the line that was cut off, so that the next one can be read
    return scores, file
