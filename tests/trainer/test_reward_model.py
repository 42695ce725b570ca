"""The reward from a sequence classifier, against transformers called directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.pretrained import load_lm
from grpo_trainer.recipe import Model, Reward
from grpo_trainer.rewards import load_reward
from grpo_trainer.rewards.reward_model import RewardModel
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

PROMPTS = ["what is this"] * 3 + ["say more"] * 3
RESPONSES = ["it is a cat", "a cat it is", "it", "", "a cat " * 9, "it is a cat"]
PLAIN = "{prompt} : {response}"


def save_classifier(folder: Path, labels: int, chat: bool) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = ["<unk>", "<end>", *["what", "is", "this", "say", "more", "it", "a", "cat", ":", "user", "assistant"]]
    base = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", eos_token="<end>")
    if chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m.role + ' : ' + m.content + ' <end> ' }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=40,
        num_labels=labels,
    )
    if labels > 1:
        config.id2label = {i: f"trait {i}" for i in range(labels)}
    model = LlamaForSequenceClassification(config)
    # large enough weights that the tokens decide
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("classifiers")
    torch.manual_seed(0)
    return {
        "plain": save_classifier(folder / "plain", 1, chat=False),
        "chat": save_classifier(folder / "chat", 1, chat=True),
        "several": save_classifier(folder / "several", 3, chat=False),
    }


def made(path: str, **options: Any) -> RewardModel:
    function = load_reward(Reward(name="reward_model", options={"path": path, **options})).function
    assert isinstance(function, RewardModel)
    return function


def logits_of(reward: RewardModel, text: str) -> list[float]:
    """Logits of one text, from transformers alone."""
    model = LlamaForSequenceClassification.from_pretrained(reward.model.config.name_or_path)
    return list(model(**reward.tokenizer(text, return_tensors="pt")).logits[0].tolist())


@pytest.mark.parametrize("batch_tokens", [1, 20, 16384])
def test_scores_are_those_of_transformers(folders: dict[str, str], batch_tokens: int) -> None:
    plain = made(folders["plain"], template=PLAIN, batch_tokens=batch_tokens)
    texts = [f"{prompt} : {response}" for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    want = [logits_of(plain, text)[0] for text in texts]
    # float32 sums of at most 32 terms of size about 1, in two layers and the head
    allowed = 2 * 32 * torch.finfo(torch.float32).eps * max(1.0, *map(abs, want))
    assert len({round(value, 3) for value in want}) == 6, "the texts have different scores"
    assert plain(PROMPTS, RESPONSES) == pytest.approx(want, abs=allowed, rel=0)
    half = made(folders["plain"], template=PLAIN, dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16 and half.__name__ == "reward_model"
    several = made(folders["several"], template=PLAIN, label="trait 2")
    want = [logits_of(several, text)[2] for text in texts]
    assert several(PROMPTS, RESPONSES) == pytest.approx(want, abs=2 * allowed, rel=0)
    assert several(PROMPTS, RESPONSES) == made(folders["several"], template=PLAIN, label=2)(PROMPTS, RESPONSES)


def test_the_chat_template_is_used_without_further_special_tokens(folders: dict[str, str]) -> None:
    chat = made(folders["chat"])
    want = logits_of(chat, "user : what is this <end> assistant : it is a cat <end>")[0]
    assert chat(PROMPTS[:1], RESPONSES[:1]) == pytest.approx([want], abs=1e-5)
    # the last token is the end token, which must be read although models often pad with it
    assert want != pytest.approx(logits_of(chat, "user : what is this <end> assistant : it is a cat")[0], abs=1e-3)


def test_texts_of_equal_length_are_batched_and_repeated_ones_cached(folders: dict[str, str]) -> None:
    reward, sizes = made(folders["plain"], template=PLAIN), list[list[int]]()
    reward.model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(list(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reward([*PROMPTS, PROMPTS[0]], [*RESPONSES, RESPONSES[0]])
    # lengths: 3 + 1 + words of the response, or 2 + 1 + words
    assert sizes == [[1, 3], [1, 5], [1, 7], [2, 8], [1, 21]] and reward.counters == {"truncated": 0, "cached": 0}
    reward(PROMPTS, RESPONSES)
    assert len(sizes) == 5 and reward.counters["cached"] == 6


def test_long_texts_are_refused_or_lose_their_beginning(folders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"reward_model.max_length: .* at most 40 tokens, got 103 for response 1"):
        made(folders["plain"], template=PLAIN)(["say more"] * 2, ["it", "it " * 100])
    reward = made(folders["plain"], template=PLAIN, max_length=4, on_long="truncate")
    value = reward(["say more"], ["a cat it is this"])
    assert value == pytest.approx([logits_of(reward, "cat it is this")[0]], abs=1e-5)
    assert reward.counters["truncated"] == 1


def test_braces_are_left_alone(folders: dict[str, str]) -> None:
    reward = made(folders["plain"], template="{x} {prompt} : {response}")
    assert reward.tokenizer.decode(reward._ids("{response} a", "{prompt} it")).split() == (
        ["<unk>", "<unk>", "a", ":", "<unk>", "it"]
    )


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plain", {}, r"reward_model.template: must be given for a tokenizer without a chat template"),
        ("plain", {"template": "{prompt}"}, r"reward_model.template: must contain \{response\}, got '\{prompt\}'"),
        (
            "several",
            {"template": PLAIN},
            r"reward_model.label: must be one of \['trait 0', .*number, got None",
        ),
        ("several", {"template": PLAIN, "label": 3}, r"reward_model.label: .* got 3"),
        ("plain", {"dtype": "fp8"}, r"options.dtype: must be 'float32', 'bfloat16' or 'float16', got 'fp8'"),
        ("plain", {"on_long": "cut"}, r"options.on_long: must be 'raise' or 'truncate', got 'cut'"),
        ("plain", {"batch_tokens": 0}, r"options.batch_tokens: must be greater than 0, got 0"),
        ("plain", {"path": None}, r"options.path: must be of type string, got None"),
    ],
)
def test_bad_options_are_named(folders: dict[str, str], kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        load_reward(Reward(name="reward_model", options={"path": folders[kind]} | options))


def test_a_model_of_another_kind_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    """Or its head would be drawn at random."""
    config = LlamaConfig.from_pretrained(folders["plain"], num_labels=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folders["plain"]).save_pretrained(tmp_path)
    rule = r"every weight of a LlamaForSequenceClassification, got '.*' without score\.weight$"
    with pytest.raises(ValueError, match=rf"^rewards\.options: reward_model\.path: must have {rule}"):
        made(str(tmp_path), template=PLAIN)
    rule = r"every weight of a LlamaForCausalLM, got '.*' without lm_head\.weight$"
    with pytest.raises(ValueError, match=rf"^model\.path: must have {rule}"):
        load_lm(Model(path=folders["plain"]), "cpu")
