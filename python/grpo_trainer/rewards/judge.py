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
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_trainer.embed import embedded_text
from grpo_trainer.messages import require_package
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards import RewardError

BODY = {"temperature": 0, "seed": 0, "max_tokens": 1024}
OWN_FIELDS = ("messages", "model", "stream", "n")  # of the request, not to be set by `body`
FORMAT = 'Answer with a JSON object {{"score": s}}, where s is a number from {low:g} to {high:g}.'

Judgement = tuple[float | None, str]  # the score, or None and the cause


class JudgeError(RewardError):
    """Too many judgements failed; ends the run, also with `on_error: skip`."""


def make(
    *,
    base_url: str,
    model: str,
    rubric: str | None = None,
    rubric_file: str | None = None,
    key_env: str | None = None,
    columns: Sequence[str] = (),
    text: Literal["answer", "whole"] = "answer",
    scores: Sequence[float] = (1, 10),
    rewards: Sequence[float] = (0, 1),
    body: dict[str, Any] | None = None,
    timeout: PositiveFloat = 60.0,
    retries: NonNegativeInt = 4,
    concurrency: PositiveInt = 16,
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.1,
    cache_file: str | None = None,
) -> Judge:
    """Creates the reward.

    Args:
        base_url: address of the endpoint up to "/chat/completions", for example http://127.0.0.1:8000/v1.
        model: name of the model at the endpoint.
        rubric: instructions for the judge.
        rubric_file: file that holds them instead.
        key_env: name of the environment variable with the endpoint's key; None: no key.
        columns: columns of the data that the judge reads as well, such as a reference answer.
        text: "answer", what follows the last </think>, or "whole"; an unclosed <think> is judged as it is.
        scores: lowest and highest score.
        rewards: rewards of these two scores.
        body: further fields of the request; they replace those of BODY, and None removes one.
        timeout: seconds that a request waits for the endpoint.
        retries: how often the client repeats a request that failed for a reason that may pass.
        concurrency: largest number of simultaneous requests of a process.
        max_failures: largest fraction of a call's responses whose judgement may fail.
        cache_file: file that keeps judgements for resumed and further runs.
    """
    require_package("judge", "openai", "judge")
    from openai import OpenAI

    own = [name for name in body or {} if name in OWN_FIELDS]
    _check(
        ("base_url", "one with a user", "@" not in base_url, "have no user or password; use key_env"),
        ("base_url", base_url, base_url.startswith(("http://", "https://")), "be an address like http://host:8000/v1"),
        ("scores", scores, len(scores) == 2 and scores[0] < scores[-1], "be two numbers in ascending order"),
        ("rewards", rewards, len(rewards) == 2 and rewards[0] != rewards[-1], "be two different numbers"),
        ("body", own, not own, f"not set {', '.join(OWN_FIELDS)}"),
    )
    key = _key(key_env)
    # OpenAI's own variables are meant for another endpoint
    client = OpenAI(
        base_url=base_url, api_key=key or "none", organization="", project="", timeout=timeout, max_retries=retries
    )
    request = {name: value for name, value in {**BODY, **(body or {})}.items() if value is not None}
    judge = Judge(client, model, request, _rubric(rubric, rubric_file), cache_file)
    judge.key, judge.columns, judge.text = key, tuple(columns), Similarity(text=text, unfinished="whole")
    judge.scores, judge.rewards = (scores[0], scores[1]), (rewards[0], rewards[1])
    judge.concurrency, judge.max_failures = concurrency, max_failures
    return judge


class Judge:
    """The reward; `counters` describe its last call."""

    key: str | None = None  # of the endpoint; no error shows it
    columns: tuple[str, ...] = ()
    text = Similarity(unfinished="whole")
    scores: tuple[float, float] = (1, 10)
    rewards: tuple[float, float] = (0, 1)
    concurrency, max_failures = 16, 0.1

    def __init__(
        self, client: Any, model: str, request: Mapping[str, Any], rubric: str, cache_file: str | None
    ) -> None:
        self.__name__ = "judge"  # TRL logs a reward under its function's name
        self.client, self.model, self.request, self.rubric = client, model, dict(request), rubric
        self.known, self.cache_file = _open_cache(cache_file)
        self.counters = {"failed": 0, "cached": 0, "requests": 0}

    @property
    def needs(self) -> list[tuple[str, ...]]:
        """Alternatives for each column that the data must have."""
        return [(name,) for name in self.columns]

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        for name in self.columns:
            if name not in columns:
                raise ValueError(f"judge.columns: must be columns of the data, {sorted(columns)}, got {name!r}")
        requests = [
            self._request(prompt, response, {name: columns[name][i] for name in self.columns})
            for i, (prompt, response) in enumerate(zip(prompts, completions, strict=True))
        ]
        keys = [self._cache_key(request) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.known}
        cached = sum(key in self.known for key in keys)
        causes = self._judge(missing)
        failures = Counter(causes[key] for key in keys if key in causes)
        self.counters = {"failed": failures.total(), "cached": cached, "requests": len(missing)}
        self._check_failures(failures, len(keys))
        return [None if key in causes else self._reward(self.known[key]) for key in keys]

    def _request(self, prompt: str, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self.scores
        shown = {"prompt": prompt, **row, "response": embedded_text(response, self.text)}
        messages = [
            {"role": "system", "content": f"{self.rubric}\n\n{FORMAT.format(low=low, high=high)}"},
            {"role": "user", "content": json.dumps(shown, ensure_ascii=False)},
        ]
        return {"model": self.model, "messages": messages, "extra_body": self.request}

    def _cache_key(self, request: Mapping[str, Any]) -> str:
        content = {"url": str(self.client.base_url), "scores": self.scores, "request": request}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _judge(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Asks for judgements and keeps each as soon as it is there; returns the causes of those that failed."""
        causes = {}
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            keys = {pool.submit(self._ask, request): key for key, request in requests.items()}
            for future in as_completed(keys):
                key, (score, cause) = keys[future], future.result()
                if score is None:
                    causes[key] = cause
                    continue
                self.known[key] = score
                if self.cache_file is not None:
                    self.cache_file.write(json.dumps({"key": key, "score": score}) + "\n")
        finally:
            pool.shutdown(cancel_futures=True)
        return causes

    def _ask(self, request: Mapping[str, Any]) -> Judgement:
        from openai import OpenAIError

        try:
            score = read_score(self.client.chat.completions.create(**request).choices[0].message.content)
        # the client does not check a reply, which may have other content in any place
        except (OpenAIError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return None, (text if self.key is None else text.replace(self.key, "[key]"))[:300]
        low, high = self.scores
        if not low <= score <= high:
            return None, f"the score must be within {low:g} and {high:g}, got {score!r}"
        return score, ""

    def _reward(self, score: float) -> float:
        (low, high), (worst, best) = self.scores, self.rewards
        return worst + (best - worst) * (score - low) / (high - low)

    def _check_failures(self, causes: Counter[str], count: int) -> None:
        if causes.total() <= self.max_failures * count:
            return
        cause, times = causes.most_common(1)[0]
        raise JudgeError(
            f"reward 'judge': max_failures allows {self.max_failures:g} of the judgements to fail, and "
            f"{causes.total()} of {count} did; the most frequent cause, {times} times, is: {cause}. Judge: "
            f"{self.model!r} at {self.client.base_url}"
        )


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
    if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
        raise ValueError(f"the judge must answer with a JSON object that has a number 'score', got {text[-80:]!r}")
    return float(score)


def _open_cache(path: str | None) -> tuple[dict[str, float], Any]:
    """Scores in a file of judgements, and the file, to which lines are appended; a cut-off line is skipped."""
    if path is None:
        return {}, None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    content = Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
    scores = {}
    for line in content.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        try:
            scores[entry["key"]] = float(entry["score"])
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"judge.cache_file: must hold judgements alone, got {path!r} with {line:.80}") from None
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 # stays open; a line is one write
    if content and not content.endswith("\n"):
        file.write("\n")  # ends the line that was cut off, so that the next one can be read
    return scores, file


def _key(name: str | None) -> str | None:
    """The key in an environment variable."""
    if name is None:
        return None
    key = os.environ.get(name, "")
    _check(("key_env", name, key.isascii() and key.isprintable() and key != "", "name a variable that holds a key"))
    return key


def _rubric(text: str | None, file: str | None) -> str:
    _check(("rubric", [text, file], (text is None) != (file is None), "be given either here or by rubric_file"))
    if file is not None:
        _check(("rubric_file", file, Path(file).is_file(), "be a file"))
        text = Path(file).read_text(encoding="utf-8")
    assert text is not None
    _check(("rubric", text, bool(text.strip()), "not be empty"))
    return text.strip()


def _check(*rules: tuple[str, object, bool, str]) -> None:
    for name, value, is_met, rule in rules:
        if not is_met:
            raise ValueError(f"judge.{name}: must {rule}, got {value!r}")
