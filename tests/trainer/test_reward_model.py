"""The reward from a sequence classifier, against transformers called directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.pretrained import load_lm
from grpo_trainer.recipe import Model, Reward
from grpo_trainer.rewards import load_reward, reward_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

PROMPTS = ["what is this"] * 3 + ["say more"] * 3 + ["what is this"]
RESPONSES = ["it is a cat", "a cat it is", "it", "", "a cat " * 9, "it is a cat", "it is a cat"]
PLAIN = "{prompt} : {response}"
TEXTS = [f"{prompt} : {response}" for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
WORDS = ["<unk>", "<end>", *["what", "is", "this", "say", "more", "it", "a", "cat", ":", "user", "assistant"]]
CHAT = "{% for m in messages %}{{ m.role + ' : ' + m.content + ' <end> ' }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, and classifiers with one label, with a chat template and with three labels."""
    top = tmp_path_factory.mktemp("classifiers")
    torch.manual_seed(0)
    base = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    base.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", eos_token="<end>")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config: Any = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=40, num_labels=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(top / "language")
    tokenizer.save_pretrained(top / "language")
    for name, labels in (("plain", 1), ("several", 3), ("chat", 1)):
        config.id2label = {i: f"trait {i}" for i in range(labels)}
        tokenizer.chat_template = CHAT if name == "chat" else None
        model = LlamaForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight)  # large enough that the tokens decide
        model.save_pretrained(top / name)
        tokenizer.save_pretrained(top / name)
    return top


def made(path: Path, **options: Any) -> Any:
    return load_reward(Reward(name="reward_model", options={"path": str(path), **options})).function


def logits_of(path: Path, *texts: str, label: int = 0) -> list[float]:
    """Logits of texts one by one, from transformers alone."""
    model = LlamaForSequenceClassification.from_pretrained(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    return [model(**tokenizer(text, return_tensors="pt")).logits[0, label].item() for text in texts]


def test_scores_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # float32 sums of at most 32 terms of size about 1, in two layers and the head
    allowed = 2 * 32 * torch.finfo(torch.float32).eps
    want = logits_of(folder / "plain", *TEXTS)
    assert len({round(value, 3) for value in want}) == 6, "the texts have different scores"
    plain, sizes = made(folder / "plain", template=PLAIN), list[list[int]]()
    note = lambda _, __, inputs: sizes.append([*inputs["input_ids"].shape])  # noqa: E731
    plain._model.register_forward_pre_hook(note, with_kwargs=True)
    for tokens in (16384, 8):
        monkeypatch.setattr(reward_model, "BATCH_TOKENS", tokens)
        assert plain(PROMPTS, RESPONSES) == pytest.approx(want, abs=allowed * max(1.0, *map(abs, want)), rel=0)
    # lengths: 3 + 1 + words of the response, or 2 + 1 + words; the last text repeats the first
    assert sizes[:5] == [[1, 3], [1, 5], [1, 7], [2, 8], [1, 21]] and sizes[5:] == [[1, n] for n in (3, 5, 7, 8, 8, 21)]
    assert made(folder / "plain", template=PLAIN, dtype="bfloat16")._model.dtype == torch.bfloat16
    assert plain.__name__ == "reward_model"
    several = made(folder / "several", template=PLAIN, label="trait 2")(PROMPTS, RESPONSES)
    assert several == pytest.approx(logits_of(folder / "several", *TEXTS, label=2), abs=1e-4)
    assert several == made(folder / "several", template=PLAIN, label=2)(PROMPTS, RESPONSES)


def test_the_text_that_is_read(folder: Path) -> None:
    """The last token is the end token, which must be read although models often pad with it."""
    text = "user : what is this <end> assistant : it is a cat"
    want, unended = logits_of(folder / "chat", f"{text} <end>", text)
    assert made(folder / "chat")(PROMPTS[:1], RESPONSES[:1]) == pytest.approx([want], abs=1e-5)
    assert want != pytest.approx(unended, abs=1e-3)
    # braces are left alone
    reward = made(folder / "plain", template="{x} {prompt} : {response}")
    read = reward._tokenizer.decode(reward._ids("{response} a", "{prompt} it"))
    assert read.split() == ["<unk>", "<unk>", "a", ":", "<unk>", "it"]
    with pytest.raises(ValueError, match=r"reward_model: .* at most 40 tokens, .* got 103 for response 1"):
        reward(["say more"] * 2, ["it", "it " * 99])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plain", {}, r"options.template: must be given for a tokenizer without a chat template"),
        ("plain", {"template": "{prompt}"}, r"options.template: must contain \{response\}, got '\{prompt\}'"),
        ("several", {"template": PLAIN}, r"options.label: must be one of \['trait 0', .*number, got None"),
        ("several", {"template": PLAIN, "label": 3}, r"options.label: .* got 3"),
        # its head would be drawn at random
        ("language", {"template": PLAIN}, r"must have every weight of a LlamaForSequence.* without score\.weight$"),
    ],
)
def test_bad_options_are_named(folder: Path, kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(Reward(name="reward_model", options={"path": str(folder / kind)} | options))


def test_a_classifier_is_no_policy(folder: Path) -> None:
    rule = r"every weight of a LlamaForCausalLM, got '.*' without lm_head\.weight$"
    with pytest.raises(ValueError, match=rf"^model\.path: must have {rule}"):
        load_lm(Model(path=str(folder / "plain")), "cpu")
