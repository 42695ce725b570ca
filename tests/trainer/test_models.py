"""Models from folders, GGUF files, in 4 bits and as objects of the caller; adapters and their page; references.

Faults they are there for: weights or tokens that are not the file's; adapters on a model that they were not trained on;
a misspelt folder that is sought on the hub without a word; an object that is trained otherwise than its folder.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from grpo_trainer import checkpoint
from grpo_trainer.adapters import load_adapter, settings_of_base, with_adapters
from grpo_trainer.checkpoint import save_policy
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.policy import load_policy
from grpo_trainer.pretrained import load_lm, loading
from grpo_trainer.recipe import Lora, Model, Recipe
from grpo_trainer.report.adapters import Update, measure, read_adapter, write_adapters
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from tests.trainer import small
from tests.trainer.small import lines, newest, steps, stop_before, timeless
from tests.trainer.test_report import Reader

SHORT = ("sft.steps=2", "rl.steps=3", "evaluation.every=0", "checkpoints.every=1")


class MyModel(LlamaForCausalLM):
    """A class that no automatic choice finds."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(small.saved_model(tmp_path_factory.mktemp("saved") / "model", "seed=5", *small.WIDE))


# Objects of the caller


def loaded(folder: Path, kind: Any = AutoModelForCausalLM, **more: Any) -> dict[str, Any]:
    return {"model": kind.from_pretrained(folder, **more), "tokenizer": AutoTokenizer.from_pretrained(folder)}


def object_recipe(folder: Path, *overrides: str) -> Recipe:
    """The small recipe without the keys that say how a model is loaded."""
    return small.recipe(folder, "model={}", *SHORT, *overrides)


@pytest.mark.parametrize("adapters", [[], ["model.lora={rank: 4}"]], ids=["all weights", "adapters"])
def test_objects_train_as_their_folders_do(saved: Path, tmp_path: Path, adapters: list[str]) -> None:
    other = load_policy(Model(path=str(saved)), [], None)
    with torch.no_grad():
        for weight in other.lm.parameters():
            weight.mul_(1.1)
    save_policy(other, tmp_path / "other")
    model = f"model={{path: {saved}, reference_model_path: {tmp_path / 'other'}}}"
    train(small.recipe(tmp_path / "folder", model, *SHORT, *adapters))
    objects, before = loaded(saved), loaded(saved)["model"].state_dict()
    train(object_recipe(tmp_path / "object", *adapters), **objects, reference=other.lm)
    assert timeless(lines(tmp_path / "object")) == timeless(lines(tmp_path / "folder"))
    assert steps(tmp_path / "object")[0]["train/kl_mean"] > 1e-3
    now = objects["model"].state_dict()
    assert any(not torch.equal(value, before.get(name, value + 1)) for name, value in now.items()), "itself is trained"
    # the reference is left as it was
    expected = load_file(tmp_path / "other" / "model.safetensors")
    assert all(torch.equal(expected[name], weight) for name, weight in other.lm.named_parameters())
    assert all(weight.requires_grad for weight in other.lm.parameters())


def test_a_resumed_run_keeps_the_class_of_the_object(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (object_recipe(tmp_path / name) for name in ("whole", "broken"))
    # the KL term, too, is that to a model of half precision
    objects = {name: loaded(saved, MyModel, dtype=torch.bfloat16) for name in ("whole", "stopped", "resumed")}
    train(whole, **objects["whole"])
    stop_before(monkeypatch, broken, "rl", 3, **objects["stopped"])
    kinds: list[Any] = []
    load_lm = checkpoint.load_lm
    monkeypatch.setattr(checkpoint, "load_lm", lambda *a: kinds.append(type(load_lm(*a))) or load_lm(*a))
    train(broken, resume=True, **objects["resumed"])
    assert MyModel in kinds
    small.assert_equal_runs(whole.folder, broken.folder)
    # the policy at the start of RL is the reference also if the caller names it
    own = [loaded(saved, MyModel, dtype=torch.bfloat16) for _ in range(2)]
    again = object_recipe(tmp_path / "again")
    stop_before(monkeypatch, again, "rl", 3, **own[0], reference=own[0]["model"])
    train(again, resume=True, **own[1], reference=own[1]["model"])
    small.assert_equal_runs(whole.folder, again.folder)
    states = [objects[name]["model"].state_dict() for name in ("whole", "resumed")]
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items()), "itself is trained"


def test_objects_that_do_not_fit_are_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_trainer.engine.check_installed", lambda key, sampling: None)
    objects = loaded(saved)
    lm, adapted = objects["model"], load_policy(Model(path=str(saved), lora=Lora(rank=2)), [], None).lm
    cases: list[tuple[dict[str, Any], str]] = [
        ({"recipe": {}}, r"train: recipe must be a Recipe, .* got dict \{\}"),
        ({"reference": "gpt2"}, "train: reference must be a model of transformers, got str"),
        ({"tokenizer": "gpt2"}, "train: tokenizer must be one of transformers, got str 'gpt2'"),
        ({"tokenizer": None}, "train: tokenizer must be given with a model, got None"),
        ({"model": None}, "train: tokenizer must be given with a model, got a tokenizer alone"),
        ({"model": lm.base_model}, r"train: model must have a language-modelling head, got \w+ without one"),
        ({"model": adapted}, "train: model must be a model of transformers without adapters"),
    ]
    for key, message in (
        ("model.path=here", "model.path: must be unset with a model object, which is loaded already, got 'here'"),
        ("model.dtype=bfloat16", "model.dtype: must be unset"),
        ("model.tiny.hidden=64", "model.tiny: must be unset"),
        ("rl.rollout.engine=vllm", "rl.rollout.engine: must be transformers with a model"),
        ("model.reference_model_path=x", ".* must be null with a reference object"),
    ):
        cases += [({"recipe": object_recipe(tmp_path, key), "reference": lm if "reference" in key else None}, message)]
    for changes, message in cases:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            set_up(**{"recipe": object_recipe(tmp_path), **objects, **changes})


def test_a_model_whose_cache_is_more_than_keys_and_values_is_refused(saved: Path, tmp_path: Path) -> None:
    """Before SFT, which needs no cache."""
    config = MambaConfig(vocab_size=500, hidden_size=8, num_hidden_layers=1)
    model, tokenizer = MambaForCausalLM(config), AutoTokenizer.from_pretrained(saved)
    with pytest.raises(ValueError, match=r"^model.path: must be a model whose cache holds keys and values alone, got"):
        train(object_recipe(tmp_path), model=model, tokenizer=tokenizer)


def test_a_reference_that_reads_other_tokens_is_refused(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(saved, other)

    def recipe(path: Path) -> Recipe:
        return small.recipe(tmp_path / "run", f"model={{path: {saved}, reference_model_path: {path}}}")

    def refused(path: Path = other) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as raised:
            set_up(recipe(path))
        return str(raised.value)

    assert refused(tmp_path / "none").startswith("model.reference_model_path: no such model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    assert "must read the tokens of model.path, got" in refused()
    (other / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    first, second = sorted(words, key=words.get)[-2:]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert f"is token {words[first]} and not {words[second]}" in refused()
    assert evaluate_model(recipe(other), str(saved), "test").metrics  # which has no KL term


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
        ("other/model", "a/model", "'other/model', which the adapters in .* were trained on, got 'a/model'; if"),
        ("other/model", "tiny", "'other/model', .* were trained on, got 'tiny', whose weights are new$"),
        (None, "tiny", "the model, which the adapters in .* got 'tiny'"),
    ):
        with pytest.raises(ValueError, match=rf"^model\.path: must be {message}"):
            base_of(base, path)
    for place in (tmp_path / "elsewhere" / "base", tmp_path / "run" / "base"):  # the run's own comes first
        place.mkdir(parents=True)
        (place / "config.json").touch()
        assert base_of(str(tmp_path / "elsewhere" / "base"), "tiny") == str(place)


def test_errors_name_the_key_that_has_the_model_and_targets_are_linear_layers(tmp_path: Path) -> None:
    (tmp_path / "modell").mkdir()
    missing = r"no such model '.*model': .* the nearest is '.*modell'$"
    with pytest.raises(FileNotFoundError, match=f"^a.path: {missing}"), loading("a.path", str(tmp_path / "model")):
        pass
    with pytest.raises(FileNotFoundError, match=rf"^model\.path: {missing}"):
        load_lm(Model(path=str(tmp_path / "model")), "cpu")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    lm = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    for targets, near in ((["c_attn", "c_prj"], "; the nearest is 'c_proj'"), (["wte"], "")):
        message = rf"^model.lora.targets: must be names of linear layers, such as c_attn, .*, got \[.*\]{near}$"
        with pytest.raises(ValueError, match=message):
            with_adapters(lm, Model(lora=Lora(rank=1, targets=targets)))
    adapted = with_adapters(lm, Model(lora=Lora(rank=1, targets=["c_attn"])))
    assert {name.split(".")[-4] for name, weight in adapted.named_parameters() if weight.requires_grad} == {"c_attn"}


def test_adapters_of_another_shape_are_refused(saved: Path, tmp_path: Path) -> None:
    def policy_of(lora: Lora | None) -> Any:
        return load_policy(Model(path=str(saved), lora=lora), [], None)

    save_policy(policy_of(Lora(rank=2, targets=["q_proj"])), tmp_path)
    of_layers = r"\['q_proj'\], got \['v_proj'\]: missing .*v_.*unexp.*q_"
    for lora, message in (
        (Lora(rank=3, targets=["q_proj"]), "model.lora.rank: must be that of the adapters in .*, 2, got 3"),
        (Lora(rank=2, alpha=4, targets=["q_proj"]), "model.lora.alpha: must be that of the adapters in .*, 16, got 4"),
        (Lora(rank=2, targets=["v_proj"]), f"model.lora.targets: must be the layers of .*{of_layers}"),
        (None, r"^model.lora: must be set .* or model.lora.rank=2 model.lora.alpha=16 beside"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter(policy_of(lora), Model(lora=lora), tmp_path)


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not DOCS.exists(), reason="tests are run from outside the checkout")
def test_a_run_starts_from_the_adapters_that_the_page_merges(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapted = load_policy(Model(path=str(saved), lora=Lora(rank=2)), [], None)
    save_policy(adapted, Path("runs/a/checkpoints/rl-80/model"))
    page = (DOCS / "trainer.md").read_text()
    snippet = page.partition("another run starts from them:\n\n")[2].partition("\n\n")[0]
    exec(textwrap.dedent(snippet), {"AutoTokenizer": AutoTokenizer, **vars(pytest.importorskip("peft"))})
    assert load_policy(Model(path="merged"), [], None).tokenizer.get_vocab()


# The page of adapters


def saved_adapter(folder: Path, *targets: str, **options: Any) -> Any:
    """Saves adapters of eleven layers of the same weights, and returns peft's model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    layers = [torch.nn.ModuleDict({kind: torch.nn.Linear(5, 5, bias=False) for kind in "qv"}) for _ in range(11)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    config = peft.LoraConfig(target_modules=[*targets], init_lora_weights=False, **({"r": 3} | options))
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    return adapted


def test_the_page_of_two_adapters(tmp_path: Path) -> None:
    folders, updates, products = [tmp_path / "a", tmp_path / "b"], list[dict[str, Update]](), list[torch.Tensor]()
    for folder, options in zip(folders, ({"lora_alpha": 6}, {"r": 2, "use_rslora": True}), strict=True):
        adapted = saved_adapter(folder, "q", "v", **options)
        updates.append(read_adapter(folder))
        assert [*updates[-1]] == [f"layers.{layer}.{kind}" for layer in range(11) for kind in "qv"]
        before = copy.deepcopy(adapted.get_base_model()["layers"][1]["q"].base_layer.weight)
        products.append((adapted.merge_and_unload()["layers"][1]["q"].weight - before).detach().double())
    values = torch.linalg.svdvals(products[0])[:3]
    shares = values / values.sum()
    expected = {"norm": float(values.norm()), "effective rank": math.exp(-float((shares * shares.log()).sum()))}
    expected["cosine"] = float((products[0] * products[1]).sum() / products[0].norm() / products[1].norm())
    first, second = (update["layers.1.q"] for update in updates)
    assert measure(second)["norm"] == pytest.approx(float(products[1].norm()), rel=1e-4)
    assert measure(first, second) == pytest.approx(expected, rel=1e-4) and "cosine" not in measure(first)
    zero = measure(first._replace(b=torch.zeros_like(first.b)), first)  # neither rank nor direction
    assert [*zero.values()] == pytest.approx([0, math.nan, math.nan], nan_ok=True)
    reader = Reader(write_adapters(folders, tmp_path / "out"))
    assert "layers.10.v" in reader.text and "module norm effective rank cosine" in reader.text
    content = json.loads((tmp_path / "out" / "adapters.json").read_text())
    assert content[str(folders[0])]["layers.1.q"] == pytest.approx(expected, rel=1e-4)
    # a curve for each kind of module, over the layers
    assert sum(label.startswith("norm: layers.*.q from ") for label in reader.labels) == 2
    assert "effective rank cosine" not in Reader(write_adapters(folders[:1], tmp_path / "one")).text
    saved_adapter(tmp_path / "c", "v")
    saved_adapter(tmp_path / "d", "v", rank_pattern={"q": 3})
    for given, message in (
        ([folders[0], tmp_path / "c"], "folders must adapt the same weights.*layers.0.q"),
        ([folders[0]] * 3, "folders must be one or two, got 3"),
        ([tmp_path], rf"folders must have adapters, .* got '{tmp_path}', which has no adapter_config\.json$"),
        ([tmp_path / "d"], "rank_pattern of .* must be unset, got {'q': 3}"),
    ):
        with pytest.raises(ValueError, match=f"^write_adapters: {message}"):
            write_adapters(given, tmp_path / "out")


# GGUF files

gguf: Any = pytest.importorskip("gguf")

# A message begins with START and ends with END, which is what ends a response, too. Then a byte-pair vocabulary: ASCII,
# space, line feed and two merges.
TOKENS = ["<unknown>", "<start>", "<end>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "an", "in"]
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


def write(file: Path) -> dict[str, torch.Tensor]:
    """Writes a model with matrices of 4 bits, and returns the weights that are in the file."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    more = {"num_key_value_heads": HEADS, "tie_word_embeddings": True, "initializer_range": 0.1}
    weights = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), **sizes, **more)).state_dict()
    writer, kinds, result = gguf.GGUFWriter(file, "llama"), gguf.GGMLQuantizationType, {}
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)
    fields = {"context_length": 256, "embedding_length": 32, "feed_forward_length": 64, "block_count": 1}
    fields |= {"head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0}
    fields |= {"vocab_size": len(TOKENS), "tokenizer_model": "gpt2", "token_list": TOKENS, "token_types": types}
    fields |= {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, value in (fields | {"token_merges": ["a n", "i n"], "chat_template": TEMPLATE}).items():
        getattr(writer, f"add_{name}")(value)
    del weights["lm_head.weight"]
    for name, weight in weights.items():
        kind = kinds.Q4_1 if weight.dim() == 2 else kinds.F32
        # rows are quantised in blocks of their own, so that the order of rows does not matter
        result[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind).copy())
        if "q_proj" in name or "k_proj" in name:  # GGUF interleaves the halves that are rotated
            weight = weight.view(HEADS, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        theirs = name
        for ours, other in GGUF_NAMES.items():
            theirs = theirs.replace(ours, other)
        writer.add_tensor(theirs, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


def test_weights_and_tokens_are_those_of_the_file_and_a_run_saves_them(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    expected = write(file)
    policy = load_policy(Model(path=str(file)), [], None)
    weights = policy.lm.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert policy.lm.dtype == torch.float32
    assert (policy.eos_id, policy.pad_id, policy.stop_ids) == (2, 2, [2])
    chat = [{"role": "user", "content": "a b"}]
    text = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<start>user\na b<end>\n<start>assistant\n"
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids.count(2) == 1 and policy.tokenizer.decode(ids) == text
    recipe = small.recipe(tmp_path / "run", f"model.path={file}", "model.chat_template=true")
    train(recipe)
    saved = newest(recipe.folder)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.eos_token == "<end>" and tokenizer.chat_template == TEMPLATE
    assert getattr(LlamaForCausalLM.from_pretrained(saved).config, "quantization_config", None) is None
    assert evaluate_model(recipe, str(saved), "test").metrics["prompts"] > 0


# 4 bits

bitsandbytes: Any = pytest.importorskip("bitsandbytes")


def test_log_probs_are_those_of_weights_in_four_bits(saved: Path) -> None:
    model = Model(path=str(saved), four_bit=True, lora=Lora(rank=4))
    policy = load_policy(model, [], None)
    plain = load_policy(model.model_copy(update={"four_bit": False, "lora": None}), [], None)
    modules = dict(plain.inner.named_modules())
    layers = {name: layer for name, layer in policy.inner.named_modules() if name.endswith(".base_layer")}
    quantized = {name: layer.weight for name, layer in layers.items() if hasattr(layer.weight, "quant_state")}
    assert len(quantized) == 7 and all("proj" in name for name in quantized)  # neither head nor adapters
    for name, weight in quantized.items():
        assert weight.dtype == torch.uint8 and weight.quant_state.quant_type == "nf4"
        values = bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state)
        modules[name.removesuffix(".base_layer")].weight.data.copy_(values)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        ours, expected = (of.lm(input_ids=ids).logits for of in (policy, plain))
    # Seven products in a row round their operands to bfloat16, each by 2^-9 at most.
    assert float((ours - expected).abs().max()) < 7 * 2 * 2.0**-9 * float(expected.abs().max())
    assert not torch.equal(ours, expected)
