"""Measures of diversity: against sacrebleu, against counts by hand, and where they are undefined."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_trainer.diversity_measures import (
    collapse_point,
    distinct,
    diversity_efficiency,
    measure_embeddings,
    measure_prompts,
    medoids,
    pareto_front,
    rouge_diversity,
    rouge_l,
    self_bleu,
    words_of,
)
from grpo_trainer.embed import hashed
from grpo_trainer.recipe import Evaluation, Reward, Rollout

import grpo_kernels as gk

VOCABULARY = ["3", "+", "4", "=", "7", "so", "Ann", "has", "7", "."]
EMBEDDED = ("semantic_diversity", "vendi", "clusters", "cluster_entropy")


def some_texts(seed: int, count: int, most: int) -> list[str]:
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(VOCABULARY, k=chosen.randint(1, most))) for _ in range(count)]


def test_words_are_runs_of_letters_and_single_signs() -> None:
    assert words_of("Don't pay $1,250.5 -- über_all!\n") == (
        "don",
        "'",
        "t",
        "pay",
        "$",
        "1",
        ",",
        "250",
        ".",
        "5",
        "-",
        "-",
        "über_all",
        "!",
    )
    assert words_of(" \n\t") == ()


@pytest.mark.parametrize("seed", range(40))
def test_self_bleu_is_the_mean_of_sacrebleus(seed: int) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    texts = some_texts(seed, count=2 + seed % 4, most=1 + seed % 9)
    expected = [
        sacrebleu.sentence_bleu(
            text, texts[:i] + texts[i + 1 :], tokenize="none", lowercase=True, use_effective_order=True
        ).score
        for i, text in enumerate(texts)
    ]
    assert self_bleu(texts) == pytest.approx(sum(expected) / len(expected) / 100, abs=1e-12)


def test_self_bleu_at_its_ends() -> None:
    assert self_bleu(["a b c d e"] * 3) == 1
    assert self_bleu(["a b", "c d", "e f"]) == 0
    assert self_bleu(["", ""]) == 1
    assert self_bleu(["", "a b c d"]) == 0
    # 1 and 1 for the two that agree, 0 for the third
    assert self_bleu(["a b c d", "a b c d", ""]) == pytest.approx(2 / 3)


def test_self_bleu_by_hand() -> None:
    # precisions of "a b c": 2/3, 1/2 and a first miss of 1/(2 * 1); the other is no longer
    of_first = (2 / 3 * 1 / 2 * 1 / 2) ** (1 / 3)
    # of "a b d": the same by symmetry
    assert self_bleu(["a b c", "a b d"]) == pytest.approx(of_first)
    # "a": one word of one, but a penalty for being shorter by 2; "a b c": 1/3, then misses of 1/(2 * 2), 1/(4 * 1)
    assert self_bleu(["a", "a b c"]) == pytest.approx((math.exp(1 - 3) + (1 / 3 * 1 / 4 * 1 / 4) ** (1 / 3)) / 2)


def test_a_word_repeated_is_matched_as_often_as_another_text_has_it() -> None:
    # "a a a a" against "a b": one of four, misses of 1/(2 * 3), 1/(4 * 2), 1/(8 * 1)
    first = (1 / 4 * 1 / 6 * 1 / 8 * 1 / 8) ** 0.25
    second = (1 / 2 * 1 / 2) ** 0.5 * math.exp(1 - 4 / 2)
    assert self_bleu(["a a a a", "a b"]) == pytest.approx((first + second) / 2)


def test_distinct_counts_ngrams_of_all_texts_but_none_across_two() -> None:
    assert distinct(["a b a", "b c"], 1) == pytest.approx(3 / 5)
    assert distinct(["a b a", "b c"], 2) == pytest.approx(3 / 3)
    assert distinct(["a b", "a b"], 2) == pytest.approx(1 / 2)
    assert distinct(["a b c", "a b d"], 3) == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {"self_bleu": math.nan, "distinct_1": math.nan, "distinct_2": math.nan}),
        (["a"], {"self_bleu": math.nan, "distinct_1": 1.0, "distinct_2": math.nan}),
        ([""], {"self_bleu": math.nan, "distinct_1": math.nan, "distinct_2": math.nan}),
        (["a b"], {"self_bleu": math.nan, "distinct_1": 1.0, "distinct_2": 1.0}),
    ],
)
def test_undefined_measures_are_nan(texts: list[str], expected: dict[str, float]) -> None:
    measures = {"self_bleu": self_bleu(texts), "distinct_1": distinct(texts, 1), "distinct_2": distinct(texts, 2)}
    assert measures == pytest.approx(expected, nan_ok=True)


def test_embedded_measures_by_hand() -> None:
    # two equal and one orthogonal: distances 0, 1, 1
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    measures = {name: float(values) for name, values in measure_embeddings(rows, 3).items()}
    assert measures == pytest.approx(
        {
            "semantic_diversity": 2 / 3,
            "vendi": 9 / 5,
            "clusters": 2.0,
            "cluster_entropy": -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)),
        }
    )


def test_embedded_measures_of_few_responses() -> None:
    nan = math.nan
    rows = torch.tensor([[1.0, 0.0], [nan, nan], [nan, nan], [nan, nan], [1.0, 0.0], [-1.0, 0.0]])
    measures = {name: values.tolist() for name, values in measure_embeddings(rows, 2).items()}
    assert measures["semantic_diversity"] == pytest.approx([nan, nan, 2.0], nan_ok=True)
    assert measures["vendi"] == pytest.approx([1.0, nan, 1.0], nan_ok=True)
    assert measures["clusters"] == pytest.approx([1.0, nan, 1.0], nan_ok=True)
    assert measures["cluster_entropy"] == pytest.approx([0.0, nan, 0.0], nan_ok=True)


def test_embedded_measures_agree_with_pairs_in_plain_python() -> None:
    rows = torch.randn(5, 8, dtype=torch.float64)
    unit = rows / rows.norm(dim=1, keepdim=True)
    pairs = [1 - float(unit[i] @ unit[j]) for i, j in itertools.combinations(range(5), 2)]
    measures = measure_embeddings(rows.float(), 5)
    assert float(measures["semantic_diversity"]) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert float(measures["clusters"]) == float(gk.similarity_groups(rows.float(), 5).num_groups)


def test_measures_of_a_prompt_do_not_depend_on_other_prompts_or_on_order() -> None:
    prompts = [some_texts(seed, 4, 6) for seed in range(3)]
    together = measure_prompts(prompts, hashed([text for texts in prompts for text in texts]))
    assert set(together) == {"self_bleu", "distinct_1", "distinct_2", "rouge_diversity", *EMBEDDED}
    for i, texts in enumerate(prompts):
        turned = texts[::-1]
        alone = measure_prompts([turned], hashed(turned))
        for name, values in together.items():
            assert alone[name][0] == pytest.approx(values[i], abs=1e-6), name


def test_no_prompts_have_no_measures() -> None:
    assert all(values == [] for values in measure_prompts([], torch.zeros(0, 1)).values())


ANSWERS = {"p": ["3 + 4 = 7", "3 + 4 = 7", "so 8 .", "Ann has 7"], "q": ["7", "7", "7", "7"]}


def answered(policy: object, items: list[dict[str, Any]], sampling: Rollout, _: object) -> SimpleNamespace:
    size = sampling.group_size
    texts = [text for item in items for text in ANSWERS[item["prompt"]][:size]]
    return SimpleNamespace(
        items=items,
        group_size=size,
        texts=texts,
        truncated=torch.zeros(len(texts), dtype=torch.bool),
        lengths=torch.tensor([len(words_of(text)) for text in texts]),
    )


def test_samples_without_a_reward_are_not_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_trainer import evaluate

    monkeypatch.setattr(evaluate, "roll_out", answered)

    def known_for_some(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
        pairs = zip(prompts, completions, strict=True)
        return [None if text == "so 8 ." or prompt == "q" else 1.0 for prompt, text in pairs]

    policy: Any = None
    result = evaluate.evaluate(
        policy,
        [{"prompt": "p"}, {"prompt": "q"}],
        Evaluation(samples=4, pass_k=[1, 4], embedder="hashed"),
        [Reward()],
        [known_for_some],
        8,
        torch.Generator(),
    )
    assert result.metrics["pass@1"] == 1 and math.isnan(result.metrics["pass@4"])
    assert result.metrics["sampled_exact"] == 1 and result.metrics["skipped"] == 0


@pytest.mark.parametrize("samples", [0, 4])
def test_evaluation_averages_the_measures_over_prompts(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_trainer import evaluate

    monkeypatch.setattr(evaluate, "roll_out", answered)

    def ends_in_seven(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
        return [float(text.endswith("7")) for text in completions]

    items = [{"prompt": "p"}, {"prompt": "q"}]
    policy: Any = None
    result = evaluate.evaluate(
        policy,
        items,
        Evaluation(samples=samples, pass_k=[1, 4], embedder="hashed"),
        [Reward()],
        [ends_in_seven],
        8,
        torch.Generator(),
    )
    assert result.metrics["exact"] == 1
    measures = ("self_bleu", "distinct_1", "distinct_2", "rouge_diversity", *EMBEDDED)
    if samples == 0:
        assert result.to_json()["embedder"] is None
        assert not set(measures) & set(result.metrics)
        return
    assert result.to_json()["embedder"] == "hashed"
    assert result.metrics["pass@1"] == pytest.approx((3 / 4 + 1) / 2)
    of_each = measure_prompts(list(ANSWERS.values()), hashed([text for texts in ANSWERS.values() for text in texts]))
    for name in measures:
        known = [value for value in of_each[name] if not math.isnan(value)]
        assert result.metrics[name] == pytest.approx(sum(known) / len(known)), name
    # the second prompt's responses have one word each: no bigrams, which must not count as no distinct ones
    assert math.isnan(of_each["distinct_2"][1])
    # rewards of p: 1, 1, 0, 1 and of q: 1 each; the response nearest to the others of p is right
    assert result.metrics["usq"] == 1
    assert [line["measures"]["usq"] for line in result.lines] == [1, 1]
    assert result.lines[0]["measures"]["rouge_diversity"] == of_each["rouge_diversity"][0]
    # pass@1 = (3/4 + 1) / 2 and pass@4 = 1
    assert result.metrics["der@4"] == pytest.approx(1 / (4 * 7 / 8))


@pytest.mark.parametrize("seed", range(40))
def test_rouge_is_that_of_rouge_score(seed: int) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    chosen = random.Random(seed)
    words = ["so", "7", "ann", "has", "it"]
    texts = [" ".join(chosen.choices(words, k=chosen.randint(1, 80))) for _ in range(2 + seed % 3)]
    pairs = list(itertools.combinations(texts, 2))
    expected = [scorer.score(a, b)["rougeL"].fmeasure for a, b in pairs]
    assert [rouge_l(words_of(a), words_of(b)) for a, b in pairs] == pytest.approx(expected, abs=1e-12)
    assert rouge_diversity(texts) == pytest.approx(1 - sum(expected) / len(expected), abs=1e-12)


def test_rouge_diversity_by_hand() -> None:
    # a c is common to the first two: 2 * 2 / (3 + 3); nothing is common with the third
    assert rouge_diversity(["a b c", "a c b", "d"]) == pytest.approx(1 - (4 / 6 + 0 + 0) / 3)
    assert rouge_diversity(["a b", "a b"]) == 0 and rouge_diversity(["a", "b"]) == 1
    assert rouge_diversity(["", ""]) == 0 and rouge_diversity(["", "a"]) == 1
    assert math.isnan(rouge_diversity(["a"])) and math.isnan(rouge_diversity([]))


def test_diversity_efficiency_by_hand() -> None:
    assert diversity_efficiency({1: 0.2, 5: 0.5, 10: 0.8}) == pytest.approx({5: 0.5, 10: 0.4})
    assert diversity_efficiency({5: 0.5}) == {} and diversity_efficiency({1: 0.5}) == {}
    assert math.isnan(diversity_efficiency({1: 0.0, 5: 0.0})[5])
    assert math.isnan(diversity_efficiency({1: math.nan, 5: 0.5})[5])


def test_collapse_is_the_first_step_after_which_nothing_recovers() -> None:
    steps = [0, 20, 40, 60, 80]
    assert collapse_point(steps, [1.0, 0.4, 0.6, 0.4, 0.3]) == 60
    assert collapse_point(steps, [1.0, 0.4, 0.6, 0.4, 0.3], share=0.7) == 20
    assert math.isnan(collapse_point(steps, [1.0, 0.4, 0.3, 0.2, 0.5]))  # recovered, exactly to the limit
    assert collapse_point(steps, [math.nan, 1.0, 0.4, math.nan, 0.3]) == 40
    for values in ([0.0] * 5, [math.nan] * 5, [-1.0] * 5):
        assert math.isnan(collapse_point(steps, values))
    assert math.isnan(collapse_point([], []))
    with pytest.raises(ValueError, match=r"^collapse_point: share must be in \(0, 1\), got 1.0"):
        collapse_point(steps, [1.0] * 5, share=1.0)


def test_the_front_holds_what_nothing_dominates() -> None:
    points = [(0.1, 0.9), (0.5, 0.5), (0.4, 0.4), (0.9, 0.1), (0.5, 0.5), (0.9, 0.05), (math.nan, 1.0)]
    assert pareto_front(points) == [0, 1, 4, 3]
    assert pareto_front([]) == [] and pareto_front([(math.nan, 1.0)]) == [] and pareto_front([(1.0, 1.0)]) == [0]


def test_medoids_are_nearest_to_the_others() -> None:
    # of the second prompt's three rows one is missing; the last has none
    nan = math.nan
    rows = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [nan, nan], [0.0, 1.0], [0.0, 1.0], *[[nan, nan]] * 3]
    assert medoids(torch.tensor(rows), 3) == [1, 1, None]
    assert medoids(torch.tensor([[0.0, 1.0]] * 2 + [[1.0, 0.0]]), 3) == [0]
    # equal rows with unequal order of their distances tie, and the first is taken
    equal = torch.nn.functional.normalize(torch.rand(1, 16), dim=1).repeat(5, 1)
    assert medoids(torch.cat([torch.rand(3, 16), equal]), 8) in ([3], [0], [1], [2])
