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
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_trainer.embed import embedded_text
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards import RewardError
from grpo_trainer.rewards.chat_client import Answer, ChatClient, RequestError
from grpo_trainer.rewards.judgement_cache import JudgementCache

BODY = {"temperature": 0, "seed": 0, "max_tokens": 1024}
OWN_FIELDS = ("messages", "model", "stream", "n")  # of the request, not to be set by `body`
FORMAT = 'Answer with a JSON object {{"score": s}}, where s is a number from {low:g} to {high:g}.'


class JudgeError(RewardError):
    """Too many judgements failed; ends the run, also with `on_error: skip`."""


def make(
    *,
    base_url: str | None = None,
    model: str | None = None,
    rubric: str | None = None,
    rubric_file: str | None = None,
    key_env: str | None = None,
    columns: Sequence[str] = (),
    text: str = "answer",
    scores: Sequence[float] = (1, 10),
    rewards: Sequence[float] = (0, 1),
    body: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    batch_seconds: float = 600.0,
    retries: int = 4,
    backoff: float = 1.0,
    concurrency: int = 16,
    max_failures: float = 0.1,
    cache: int = 65536,
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
        timeout: seconds for one request.
        batch_seconds: seconds for all responses of a call, with their retries.
        retries: how often a failed request is repeated.
        backoff: largest delay in seconds before the first retry, which doubles with each further one.
        concurrency: largest number of simultaneous requests of a process.
        max_failures: largest fraction of a call's responses whose judgement may fail.
        cache: number of judgements kept in memory.
        cache_file: file that keeps them, too, for resumed runs.
    """
    _check(
        ("text", text, text in ("answer", "whole"), "be 'answer' or 'whole'"),
        ("model", model, isinstance(model, str) and bool(model), "be the name of a model"),
        ("scores", scores, _is_pair(scores) and scores[0] < scores[1], "be two numbers in ascending order"),
        ("rewards", rewards, _is_pair(rewards) and rewards[0] != rewards[1], "be two different numbers"),
        ("timeout", timeout, _is_number(timeout) and timeout > 0, "be positive"),
        ("batch_seconds", batch_seconds, _is_number(batch_seconds) and batch_seconds > 0, "be positive"),
        ("retries", retries, _is_int(retries) and retries >= 0, "be a non-negative int"),
        ("backoff", backoff, _is_number(backoff) and backoff >= 0, "not be negative"),
        ("concurrency", concurrency, _is_int(concurrency) and concurrency > 0, "be a positive int"),
        ("max_failures", max_failures, _is_number(max_failures) and 0 <= max_failures <= 1, "be in [0, 1]"),
        ("cache", cache, _is_int(cache) and cache >= 0, "be a non-negative int"),
        ("cache", cache, cache > 0 or cache_file is None, "be positive with a cache_file"),
    )
    own = [name for name in body or {} if name in OWN_FIELDS]
    _check(("body", own, not own, f"not set {', '.join(OWN_FIELDS)}"))
    request = {name: value for name, value in {**BODY, **(body or {})}.items() if value is not None}
    client = ChatClient(_checked_url(base_url), _key(key_env), timeout=timeout, retries=retries, backoff=backoff)
    judge = Judge(client, {"model": model, **request}, _rubric(rubric, rubric_file), JudgementCache(cache, cache_file))
    judge.columns, judge.text = tuple(columns), Similarity(text=text, unfinished="whole")  # type: ignore[arg-type]
    judge.scores, judge.rewards = (scores[0], scores[1]), (rewards[0], rewards[1])
    judge.batch_seconds, judge.concurrency, judge.max_failures = batch_seconds, concurrency, max_failures
    return judge


class Judge:
    """The reward; `counters` describe its last call."""

    columns: tuple[str, ...] = ()
    text = Similarity(unfinished="whole")
    scores: tuple[float, float] = (1, 10)
    rewards: tuple[float, float] = (0, 1)
    batch_seconds, concurrency, max_failures = 600.0, 16, 0.1

    def __init__(self, client: ChatClient, request: Mapping[str, Any], rubric: str, cache: JudgementCache) -> None:
        self.__name__ = "judge"  # TRL logs a reward under its function's name
        self.client, self.request, self.rubric, self.cache = client, dict(request), rubric, cache
        self.counters = {"failed": 0, "cached": 0, "requests": 0, "retries": 0}

    @property
    def needs(self) -> list[tuple[str, ...]]:
        """Alternatives for each column that the data must have."""
        return [(name,) for name in self.columns]

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        for name in self.columns:
            if name not in columns:
                raise ValueError(f"judge.columns: must be columns of the data, {sorted(columns)}, got {name!r}")
        bodies = [
            self._body(prompt, response, {name: columns[name][i] for name in self.columns})
            for i, (prompt, response) in enumerate(zip(prompts, completions, strict=True))
        ]
        keys = [self._key(body) for body in bodies]
        answers: dict[str, Answer[float]] = {}
        for key in keys:
            score = self.cache.get(key)
            if score is not None:
                answers[key] = Answer(score)
        cached = sum(key in answers for key in keys)
        answers |= self._ask({key: body for key, body in zip(keys, bodies, strict=True) if key not in answers})
        asked = [answer for answer in answers.values() if answer.requests]
        causes = Counter(answers[key].cause for key in keys if answers[key].value is None)
        self.counters = {
            "failed": causes.total(),
            "cached": cached,
            "requests": sum(answer.requests for answer in asked),
            "retries": sum(answer.requests - 1 for answer in asked),
        }
        self._check_failures(causes, len(keys))
        return [self._reward(answers[key].value) for key in keys]

    def _body(self, prompt: str, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self.scores
        shown = {"prompt": prompt, **row, "response": embedded_text(response, self.text)}
        return self.request | {
            "messages": [
                {"role": "system", "content": f"{self.rubric}\n\n{FORMAT.format(low=low, high=high)}"},
                {"role": "user", "content": json.dumps(shown, ensure_ascii=False)},
            ]
        }

    def _key(self, body: Mapping[str, Any]) -> str:
        content = {"url": self.client.url.geturl(), "scores": self.scores, "body": body}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _ask(self, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Answer[float]]:
        """Answers by key, each cached as soon as it is there, so that a run killed in between keeps it."""
        if not bodies:
            return {}
        deadline, stop = time.monotonic() + self.batch_seconds, threading.Event()
        answers: dict[str, Answer[float]] = {}
        pool = ThreadPoolExecutor(min(self.concurrency, len(bodies)))
        try:
            futures = {
                pool.submit(self.client.ask, body, self._score, deadline, stop): key for key, body in bodies.items()
            }
            for future in as_completed(futures):
                key, answer = futures[future], future.result()
                answers[key] = answer
                if answer.value is not None:
                    self.cache.put(key, answer.value)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        return answers

    def _score(self, text: str) -> float:
        low, high = self.scores
        score = read_score(text)
        if not low <= score <= high:
            raise RequestError(f"the score must be within {low:g} and {high:g}, got {score!r}")
        return score

    def _reward(self, score: float | None) -> float | None:
        if score is None:
            return None
        (low, high), (worst, best) = self.scores, self.rewards
        return worst + (best - worst) * (score - low) / (high - low)

    def _check_failures(self, causes: Counter[str], count: int) -> None:
        if causes.total() <= self.max_failures * count:
            return
        cause, times = causes.most_common(1)[0]
        judge = f"{self.request['model']!r} at {self.client.url.geturl()}"
        raise JudgeError(
            f"reward 'judge': max_failures allows {self.max_failures:g} of the judgements to fail, and "
            f"{causes.total()} of {count} did; the most frequent cause, {times} times, is: {cause}. Judge: {judge}"
        )


def read_score(text: str) -> float:
    """The "score" of the last JSON object in a text that has one; prose and code fences around it are ignored."""
    score: Any = None
    decoder, start = json.JSONDecoder(parse_int=float), text.find("{")  # an int may exceed the floats
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except RecursionError:  # trying each of the nested braces would take quadratic time
            raise RequestError("the judge's answer must not be nested deeply") from None
        except ValueError:
            end = start + 1
        else:
            score = value.get("score", score)
        start = text.find("{", end)
    if isinstance(score, str):
        with contextlib.suppress(ValueError):
            score = float(score)
    if not _is_number(score):
        raise RequestError(f"the judge must answer with a JSON object that has a number 'score', got {text[-80:]!r}")
    return float(score)


def _checked_url(base_url: str | None) -> str:
    url = urlsplit(base_url if isinstance(base_url, str) else "")
    is_plain = url.scheme in ("http", "https") and bool(url.hostname) and not (url.query or url.fragment)
    # not shown, as it may hold a password
    _check(("base_url", "one with a user", "@" not in url.netloc, "have no user or password; use key_env"))
    _check(("base_url", base_url, is_plain, "be an address such as http://127.0.0.1:8000/v1"))
    return url.geturl()


def _key(name: str | None) -> str | None:
    """The key in an environment variable; no message shows it."""
    if name is None:
        return None
    key = os.environ.get(name)
    _check(("key_env", name, key is not None, "name an environment variable that is set"))
    assert key is not None
    is_token = key.isascii() and key.isprintable() and " " not in key and key != ""
    _check(("key_env", name, is_token, "name a variable that holds printable ASCII without spaces"))
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: Sequence[float]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
