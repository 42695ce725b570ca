"""The judge against a stub endpoint: scores, failures, retries, deadlines, order, cache."""

from __future__ import annotations

import email.utils
import json
import math
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.metrics import counter_metrics
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import RewardError, load_reward, score, sum_counters
from grpo_trainer.rewards.chat_client import ChatClient, _seconds
from grpo_trainer.rewards.judge import BODY, Judge, JudgeError, read_score
from grpo_trainer.rewards.judgement_cache import _HEADER, JudgementCache
from grpo_trainer.rollout import Rollout
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.chat_stub import Reply, Stub, serve
from tests.trainer.test_train import lines, weights


def made(url: str, **options: Any) -> Judge:
    values = {"base_url": url, "model": "m", "rubric": "Be strict.", "backoff": 0.0, "timeout": 5.0} | options
    function = load_reward(Reward(name="judge", options=values))
    assert isinstance(function, Judge)
    return function


def judged(judge: Judge, *texts: str) -> list[float | None]:
    return judge(prompts=["p"] * len(texts), completions=list(texts))


def number_in(shown: dict[str, Any], _: int) -> float:
    return float(shown["response"].split()[-1])


# ------------------------------------------------------------------------------------------------------------ requests


def test_the_request_has_rubric_prompt_response_columns_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-1")
    with serve(lambda *_: 10) as stub:
        judge = made(stub.url, key_env="KEY_OF_TEST", columns=["answer"], scores=[0, 10])
        judge(prompts=["Write."], completions=["<think>no</think> a poem"], answer=["x"], other=[1])
        made(stub.url, body={"temperature": 0.5, "seed": None}, text="whole")(["Write."], ["<think>no</think> a poem"])
    first, second = stub.requests
    assert first["path"] == "/v1/chat/completions" and first["headers"]["Authorization"] == "Bearer secret-1"
    assert first["shown"] == {"prompt": "Write.", "answer": "x", "response": "a poem"}
    assert second["shown"] == {"prompt": "Write.", "response": "<think>no</think> a poem"}
    system = first["body"]["messages"][0]["content"]
    assert system.startswith("Be strict.\n\n") and 'with a JSON object {"score": s}, where s is a number from 0 to' in (
        system
    )
    assert {name: first["body"][name] for name in ("model", *BODY)} == {"model": "m", **BODY}
    assert second["body"]["temperature"] == 0.5 and "seed" not in second["body"]
    assert "Authorization" not in second["headers"]


@pytest.mark.parametrize(
    ("options", "score", "reward"),
    [
        ({}, 1, 0.0),
        ({}, 10, 1.0),
        ({}, 4, 1 / 3),
        ({"scores": [0, 100], "rewards": [-1, 1]}, 75, 0.5),
        ({"rewards": [1, 0]}, 10, 0.0),
    ],
)
def test_scores_are_mapped_to_rewards(options: dict[str, Any], score: float, reward: float) -> None:
    with serve(lambda *_: score) as stub:
        assert judged(made(stub.url, **options), "a") == [pytest.approx(reward, abs=1e-15)]


def test_results_belong_to_their_responses_whatever_the_order_of_the_replies() -> None:
    def slow_first(shown: dict[str, Any], _: int) -> Reply:
        score = float(shown["response"])
        return Reply(json.dumps({"score": score}), wait=0.02 * (10 - score))

    with serve(slow_first) as stub:
        values = judged(made(stub.url, concurrency=5, scores=[0, 9], rewards=[0, 9]), *map(str, range(10)))
    assert values == list(range(10))
    assert 1 < stub.most_running <= 5


# ------------------------------------------------------------------------------------------------------------- replies


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 7}', 7),
        ('{"score": "7.5"}', 7.5),
        ('I think so.\n```json\n{"reason": "good {sic}", "score": 7}\n```\nDone.', 7),
        ('First {"score": 2}, no: {"score": 3} and {"verdict": 1}', 3),
        ('a { b {"score": 4}', 4),
        ('{"score": {"score": 1}} {"score": 2}', 2),
    ],
)
def test_a_score_is_read(text: str, score: float) -> None:
    assert read_score(text) == score


BAD = [
    Reply("seven"),
    Reply('{"score": 7'),
    Reply('{"score": null}'),
    Reply('{"score": true}'),
    Reply('{"score": NaN}'),
    Reply('{"score": 1' + "0" * 400 + "}"),
    Reply('{"score": 11}'),
    Reply('{"score": 0}'),
    Reply('{"a":' * 20000),
    Reply(payload=b"[" * 100_000),
    Reply(payload=b"not json"),
    Reply(payload=b'{"choices": []}'),
    Reply(payload=b'{"choices": [{"message": {"content": null}}]}'),
    Reply(payload=b'{"choices": [{"message"'),
    Reply('{"score": 7}', kind="text/html"),
    Reply('{"score": 7}', kind=None),
    Reply(payload=b" " * (1 << 22) + b'{"choices": [{"message": {"content": "{\\"score\\": 7}"}}]}'),
    Reply(status=500),
    Reply(status=404),
    Reply('{"score": 7}', status=302, headers={"Location": "/"}),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_reply_is_not_scored_and_counted(bad: Reply) -> None:
    def reply(shown: dict[str, Any], _: int) -> Reply | float:
        return bad if shown["response"] == "bad" else 10

    with serve(reply) as stub:
        judge = made(stub.url, retries=1, max_failures=0.5)
        assert judged(judge, "good", "bad") == [1.0, None]
        is_permanent = bad.status in (302, 404)
        assert judge.counters == {
            "failed": 1,
            "cached": 0,
            "requests": 2 if is_permanent else 3,
            "retries": 0 if is_permanent else 1,
        }
        assert judged(judge, "good", "good", "bad") == [1.0, 1.0, None], "failures are not cached"
        assert judge.counters["cached"] == 2


def test_a_retry_reseeds_and_succeeds() -> None:
    with serve(lambda shown, earlier: "?" if earlier < 2 else 10) as stub:
        judge = made(stub.url, retries=2, body={"seed": 7})
        assert judged(judge, "a") == [1.0]
        assert [request["body"]["seed"] for request in stub.requests] == [7, 8, 9]
        assert judge.counters == {"failed": 0, "cached": 0, "requests": 3, "retries": 2}


def test_retry_after_is_honoured_by_all_requests() -> None:
    def reply(shown: dict[str, Any], earlier: int) -> Reply | float:
        is_refused = shown["response"] == "a" and not earlier
        return Reply(status=429, headers={"Retry-After": "0.4"}) if is_refused else 10

    with serve(reply) as stub:
        start = time.monotonic()
        assert judged(made(stub.url, concurrency=1), "a", "b") == [1.0, 1.0]
    times = [request["time"] - start for request in stub.requests]
    assert times[0] < 0.3 and min(times[1:]) >= 0.4


def test_a_retry_after_beyond_the_batch_fails_without_waiting() -> None:
    with serve(lambda *_: Reply(status=429, headers={"Retry-After": "3600"})) as stub:
        start = time.monotonic()
        with pytest.raises(JudgeError, match="batch_seconds ran out after HTTP 429"):
            judged(made(stub.url), "a")
        assert time.monotonic() - start < 2 and len(stub.requests) == 1


def test_retry_after_in_seconds_or_as_a_date() -> None:
    assert _seconds("1.5") == 1.5
    assert 98 < _seconds(email.utils.formatdate(time.time() + 100, usegmt=True)) <= 101
    assert [_seconds(text) for text in (None, "soon", "-1", "nan", "inf", "Thu, 01 Jan 1970 00:00:00 GMT")] == [0] * 6


def test_back_off_doubles_up_to_a_limit_with_full_jitter() -> None:
    client = ChatClient("http://127.0.0.1:1", None, timeout=1, retries=9, backoff=1.0)
    assert client._delay(0) == 0
    for attempt, largest in ((1, 1.0), (2, 2.0), (4, 8.0), (30, 60.0)):
        delays = [client._delay(attempt) for _ in range(300)]
        # 300 uniform draws: each bound fails with probability 0.9 ** 300 < 1e-13
        assert 0 <= min(delays) < 0.1 * largest and 0.9 * largest < max(delays) <= largest


# ----------------------------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("slow", [Reply('{"score": 7}', wait=30.0), Reply('{"score": 7}', drip=0.05)])
def test_a_hanging_or_dripping_reply_ends_at_the_timeout(slow: Reply) -> None:
    with serve(lambda *_: slow) as stub:
        start = time.monotonic()
        with pytest.raises(JudgeError, match=r"no complete reply within 0.3 s"):
            judged(made(stub.url, timeout=0.3, retries=1), "a")
        assert 0.6 <= time.monotonic() - start < 5
        while len(stub.requests) < 2 and time.monotonic() - start < 20:
            time.sleep(0.01)  # a busy machine may note a request after its caller has given up
        assert len(stub.requests) == 2


def test_a_batch_ends_at_its_own_limit_and_keeps_what_it_has() -> None:
    def reply(shown: dict[str, Any], _: int) -> Reply | float:
        return 10 if shown["response"] == "quick" else Reply(wait=30.0)

    with serve(reply) as stub:
        start = time.monotonic()
        judge = made(stub.url, batch_seconds=0.5, max_failures=0.9, concurrency=2)
        assert judged(judge, "quick", "a", "b", "c", "d", "e", "f", "g", "h", "i") == [1.0, *[None] * 9]
        assert time.monotonic() - start < 5


def test_a_refused_connection_names_the_cause() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=r"2 of 2 did; .* 2 times, is: ConnectionRefusedError: .*'m' at " + url):
            judged(made(url, retries=1), "a", "b")


# ------------------------------------------------------------------------------------------------------------ failures


def rollout(*texts: str) -> Rollout:
    items = [{"prompt": "p", "prompt_ids": [1]}]
    truncated = torch.zeros(len(texts), dtype=torch.bool)
    return cast(Rollout, SimpleNamespace(items=items, group_size=len(texts), texts=list(texts), truncated=truncated))


def bad_is_bad(shown: dict[str, Any], _: int) -> float | str:
    return "?" if shown["response"].startswith("bad") else 10


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_too_many_failures_end_the_run(on_error: Any) -> None:
    setting = Reward(name="judge", on_error=on_error)
    with serve(bad_is_bad) as stub:
        judge = made(stub.url, retries=0, max_failures=0.25)
        values, skipped, _ = score([setting], [judge], rollout("a", "b", "c", "bad"))
        assert values[:, 0].tolist()[:3] == [1.0] * 3 and math.isnan(values[3, 0]) and skipped == 1
        assert counter_metrics([setting], sum_counters([judge])) == {
            "rewards/judge_failed": 1.0,
            "rewards/judge_cached": 0.0,
            "rewards/judge_requests": 4.0,
            "rewards/judge_retries": 0.0,
        }
        with pytest.raises(RewardError, match=r"max_failures allows 0.25 of .* and 2 of 4 did; .*number 'score'"):
            score([setting], [judge], rollout("a", "b", "bad 1", "bad 2"))


def test_no_error_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-2")
    with serve(lambda *_: Reply(status=401, payload=b"x" * 195 + b"secret-2 is wrong")) as stub:
        with pytest.raises(JudgeError, match=r"HTTP 401: 'x{195}\[key\]") as caught:
            judged(made(stub.url, key_env="KEY_OF_TEST"), "a")
        assert len(stub.requests) == 1
    monkeypatch.setenv("KEY_OF_TEST", "secret-2\n")
    with pytest.raises(ValueError, match="key_env: must name a variable that holds printable ASCII") as refused:
        made(stub.url, key_env="KEY_OF_TEST")
    assert "secret" not in f"{caught.value} {refused.value}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": None}, r"judge.base_url: must be an address"),
        ({"base_url": "ftp://x"}, r"judge.base_url: must be an address .* got 'ftp://x'"),
        ({"base_url": "http://me:secret@x/v1"}, r"judge.base_url: must have no user or password"),
        ({"model": None}, r"judge.model: must be the name of a model, got None"),
        ({"rubric": None}, r"judge.rubric: must be given either here or by rubric_file, got \[None, None\]"),
        ({"rubric_file": "x"}, r"judge.rubric: must be given either"),
        ({"rubric": None, "rubric_file": "/no/such"}, r"judge.rubric_file: must be a file, got '/no/such'"),
        ({"key_env": "NO_SUCH_VARIABLE"}, r"judge.key_env: must name .* that is set, got 'NO_SUCH_VARIABLE'"),
        ({"key": "secret"}, r"rewards.options.key: no such key"),
        ({"scores": [10, 1]}, r"judge.scores: must be two numbers in ascending order, got \[10, 1\]"),
        ({"scores": [1]}, r"judge.scores: must be two"),
        ({"rewards": [1, 1]}, r"judge.rewards: must be two different"),
        ({"body": {"n": 2}}, r"judge.body: must not set messages, model, stream, n, got \['n'\]"),
        ({"timeout": 0}, r"judge.timeout: must be positive, got 0"),
        ({"retries": -1}, r"judge.retries: .* got -1"),
        ({"concurrency": True}, r"options.concurrency: must be int, got bool True"),
        ({"max_failures": 1.5}, r"judge.max_failures: must be in \[0, 1\], got 1.5"),
        ({"cache": 0, "cache_file": "x"}, r"judge.cache: must be positive with a cache_file, got 0"),
        ({"text": "all"}, r"judge.text: must be 'answer' or 'whole', got 'all'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        made("http://127.0.0.1:1/v1", **options)
    assert "secret" not in str(caught.value)


def test_a_rubric_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_bytes(b"be \xff")
    with pytest.raises(ValueError, match=r"^rewards\.options: 'utf-8' codec"):
        made("http://127.0.0.1:1/v1", rubric=None, rubric_file=str(tmp_path / "rubric.txt"))


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match=r"judge.columns: must be columns of the data, \['gold'\], got 'answer'"):
        made("http://127.0.0.1:1/v1", columns=["answer"])(["p"], ["a"], gold=["x"])


# --------------------------------------------------------------------------------------------------------------- cache


def count_requests(stub: Stub, judge: Judge, *texts: str) -> int:
    before = len(stub.requests)
    judged(judge, *texts)
    return len(stub.requests) - before


def test_equal_responses_are_judged_once(tmp_path: Path) -> None:
    with serve(number_in) as stub:
        judge = made(stub.url)
        assert judged(judge, "a 1", "a 10", "a 1") == [0.0, 1.0, 0.0]
        assert len(stub.requests) == 2
        assert count_requests(stub, judge, "a 1", "a 4") == 1
        assert judge.counters["cached"] == 1
        assert len(stub.requests) == 3 and judge([*"pq"], ["a 1"] * 2) == [0.0, 0.0] and len(stub.requests) == 4


def test_the_file_serves_another_process_of_the_same_judge(tmp_path: Path) -> None:
    file = str(tmp_path / "folder" / "cache.jsonl")
    with serve(number_in) as stub:
        assert count_requests(stub, made(stub.url, cache_file=file), "a 1", "a 10") == 2
        assert count_requests(stub, made(stub.url, cache_file=file), "a 1", "a 10") == 0
        assert judged(made(stub.url, cache_file=file, rewards=[0, 9]), "a 4") == [3.0], "the score is kept"
        for other in ({"rubric": "Be kind."}, {"model": "n"}, {"body": {"seed": 1}}, {"scores": [0, 10]}):
            assert count_requests(stub, made(stub.url, cache_file=file, **other), "a 1") == 1, other


def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    first = JudgementCache(9, str(whole))
    first.put("a", 1.0)
    first.put("b", 2.5)
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        path = tmp_path / f"{cut}"
        path.write_bytes(content[:cut])
        resumed = JudgementCache(9, str(path))
        # without its line end, a line is complete as well
        known = [cut >= end - 1 for end in ends[1:]]
        assert [resumed.get("a"), resumed.get("b")] == [1.0 if known[0] else None, 2.5 if known[1] else None]
        resumed.put("c", 3.0)
        again = JudgementCache(9, str(path))
        assert again.get("c") == 3.0 and again.get("a") == resumed.get("a") and again.get("b") == resumed.get("b")


def test_another_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "p"}\n')
    with pytest.raises(ValueError, match=r"judge.cache_file: must be a cache of judgements or a new file, got '.*data"):
        made("http://127.0.0.1:1/v1", cache_file=str(path))
    assert path.read_text() == '{"prompt": "p"}\n'


def test_the_least_recently_used_judgement_is_dropped() -> None:
    cache = JudgementCache(2)
    cache.put("a", 1.0)
    cache.put("b", 2.0)
    assert cache.get("a") == 1.0
    cache.put("c", 3.0)
    assert [cache.get(key) for key in "abc"] == [1.0, None, 3.0]
    assert _HEADER.endswith(b"\n")


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.full
def test_a_resumed_run_repeats_the_judgements_in_its_file(tmp_path: Path) -> None:
    """The judge's answers change with every request: with the file, the resumed run still ends with the same bits."""

    def changing(_: dict[str, Any], __: int) -> float:
        return 1 + len(stub.requests) * 7 % 9

    with serve(changing) as stub:
        options = {"base_url": stub.url, "model": "m", "rubric": "r", "cache_file": str(tmp_path / "cache")}
        judge = json.dumps([{"name": "judge", "options": options}])
        overrides = (f"rl.rewards={judge}", "checkpoints.every=1", "checkpoints.keep=9", "evaluation.every=0")
        train(small.recipe(tmp_path / "run", *overrides))
        steps = [line for line in lines(tmp_path / "run") if line["phase"] == "rl"]
        assert steps[0]["rewards/judge_requests"] > 0 == steps[0]["rewards/judge_failed"]
        final, asked = weights(tmp_path / "run"), len(stub.requests)
        for folder in ("1-000003", "1-000004"):
            for file in sorted((tmp_path / "run" / "checkpoints" / folder).rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            (tmp_path / "run" / "checkpoints" / folder).rmdir()
        train(small.recipe(tmp_path / "run", *overrides), resume=True)
        resumed = weights(tmp_path / "run")
        assert all(torch.equal(value, final[name]) for name, value in resumed.items())
        assert len(stub.requests) == asked
