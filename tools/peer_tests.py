"""Runs the peers' own tests with their functions, and with ours in their place.

    python tools/peer_tests.py trl ~/trl               # a checkout of huggingface/trl: its tests of GRPOTrainer
    python tools/peer_tests.py verl ~/verl             # of verl-project/verl: its tests of losses and advantages
    python tools/peer_tests.py trl ~/trl -k "train"    # further arguments go to pytest
    python tools/peer_tests.py trl ~/trl --by-length   # ours with batching="by_length", which refuses some settings

The models and data that TRL's tests download are generated instead, small and random, under the same names. Functions
`is_PACKAGE_available` that the tests import and the installed TRL lacks are added. A test that
passes with the peer's functions must pass with ours; the exit status is 1 otherwise. --json stores all outcomes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

VARIABLE = "PEER_TESTS"  # environment variable, set for the processes of pytest
FILES = {
    "trl": ["tests/test_grpo_trainer.py"],
    "verl": [
        *(
            f"tests/trainer/ppo/test_{name}.py"
            for name in (
                "core_algos_on_cpu",
                "dynamic_policy_losses_on_cpu",
                "loss_aggregation_on_cpu",
                "metric_utils_on_cpu",
                "reinforce_pp_multiturn_on_cpu",
                "rollout_corr_integration",
                "value_loss_normalization_on_cpu",
            )
        ),
        "tests/trainer/test_multi_trajectories_advantage_on_cpu.py",
    ],
}
# imported at the top of verl's modules, but not used by the tested functions
UNUSED_IMPORTS = ("cachetools", "uvicorn", "fastapi", "transfer_queue")
HUB = "trl-internal-testing"
# with the class of each in its name
MODELS = (
    "tiny-Qwen2ForCausalLM-2.5",
    "tiny-Qwen2ForSequenceClassification-2.5",
    "tiny-Qwen3ForCausalLM",
    "tiny-Qwen3ForSequenceClassification",
    "tiny-Qwen3MoeForCausalLM",
    "tiny-LlamaForCausalLM-3.2",
    "tiny-LlamaForSequenceClassification-3.2",
    "tiny-MistralForCausalLM-0.2",
    "tiny-Gemma2ForCausalLM",
    "tiny-Cohere2ForCausalLM",
)
TEXTS = [
    "Better late than never",
    "Beautiful is better than ugly",
    "Simple is better than complex",
    "Now is the time",
    "Readability counts",
    "Errors should never pass silently",
    "In the face of doubt",
    "There should be one way",
    "Flat is better than nested",
    "Sparse is better than dense",
    "Special cases are rare",
    "Explicit is better",
    "Practicality beats purity",
    "Unless silenced",
    "Although that way",
    "If it is hard to explain",
    "One idea",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_models(folder: Path) -> None:
    import torch
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = TEMPLATE
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "initializer_range": 0.2,
        **ends,
    }
    # all have the sizes of all kinds of them, of which a kind reads its own
    size |= {"head_dim": 4, "num_labels": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for name in MODELS:
        torch.manual_seed(0)
        kind = getattr(tf, name.split("-")[1])
        config = kind.config_class(**size, output_router_logits="Moe" in name)
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_data(folder: Path) -> None:
    """Writes a stand-in for TRL's data set `zen`, as text and as conversations."""
    configs = {
        "standard_prompt_only": [{"prompt": text} for text in TEXTS],
        "conversational_prompt_only": [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS],
    }
    header = ["---", "configs:"]
    for name, lines in configs.items():
        header += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", lines), ("test", lines[:2])):
            path = folder / "zen" / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in part))
            header += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "zen" / "README.md").write_text("\n".join([*header, "---", ""]))


def run(peer: str, folder: Path, kind: str, arguments: list[str]) -> dict[str, str]:
    """Outcome of each test by name: passed, failed, error or skipped."""
    report = folder / f"{kind}.xml"
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths), VARIABLE: f"{peer} {kind}"}
    files = [name for name in FILES[peer] if (folder / name).exists()]
    options = ["-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--tb=short"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files, *arguments],
        cwd=folder,
        env=environment,
        check=False,
    )
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {"failure": "failed", "error": "error", "skipped": "skipped"}
        outcome = next((outcomes[child.tag] for child in case if child.tag in outcomes), "passed")
        results[f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"] = outcome
    return results


def package_check(name: str) -> Callable[..., bool]:
    """A function `is_PACKAGE_available` that a module lacks.

    TRL drops such a function once it no longer uses the package, and the tests of another version then fail to import.
    """
    package = re.fullmatch(r"is_(\w+)_available", name)
    if package is None:
        raise AttributeError(name)
    return lambda *_, **__: importlib.util.find_spec(package[1]) is not None


def replace_in_trl(batching: str) -> None:
    import trl

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    class Ours(FusedGRPOTrainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, batching=batching, **options)

    trl.GRPOTrainer = Ours  # type: ignore[misc]


def replace_in_verl() -> None:
    from verl.trainer.ppo import core_algos

    from grpo_kernels.integrations.verl import patch_verl

    patch_verl()
    for registry, suffixes in (
        (core_algos.POLICY_LOSS_REGISTRY, ("compute_policy_loss_{}",)),
        (core_algos.ADV_ESTIMATOR_REGISTRY, ("compute_{}_outcome_advantage", "compute_{}_advantage")),
    ):
        for fused in [name for name in registry if name.startswith("fused_")]:
            name, ours = fused.removeprefix("fused_"), registry[fused]
            # verl calls grpo and gdpo directly, and patch_verl replaces them
            if name in registry and name not in ("grpo", "gdpo"):
                registry[name] = ours
                for function in (suffix.format(name) for suffix in suffixes):
                    if hasattr(core_algos, function):
                        setattr(core_algos, function, ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=FILES, help="whose tests")
    parser.add_argument("checkout", type=Path, help="folder of the peer's sources")
    parser.add_argument("--by-length", action="store_true", help="TRL's tests with batching='by_length'")
    parser.add_argument("--json", type=Path, help="file for the outcome of each test")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        shutil.copytree(options.checkout / "tests", place / "tests")
        if options.peer == "trl":
            make_models(place / HUB)
            make_data(place / HUB)
        theirs, ours = (
            run(options.peer, place, kind, arguments)
            for kind in ("theirs", "by_length" if options.by_length else "ours")
        )
    worse = [name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed"]
    print(f"theirs {dict(Counter(theirs.values()))}, ours {dict(Counter(ours.values()))}")
    print("passing only with the peer's code:", *(worse or ["none"]), sep="\n  ")
    if options.json is not None:
        options.json.write_text(json.dumps({"theirs": theirs, "ours": ours}, indent=1) + "\n")
    return 1 if worse or "passed" not in theirs.values() else 0


if VARIABLE in os.environ and __name__ != "__main__":  # loaded by pytest as a plugin
    _peer, _kind = os.environ[VARIABLE].split()
    if _peer == "verl":
        for _name in UNUSED_IMPORTS:
            if importlib.util.find_spec(_name) is None:
                sys.modules[_name] = MagicMock(__path__=[], __spec__=ModuleSpec(_name, None))
    else:
        importlib.import_module("trl.import_utils").__getattr__ = package_check  # type: ignore[method-assign]
    if _kind != "theirs":
        replace_in_trl({"ours": "trl"}.get(_kind, _kind)) if _peer == "trl" else replace_in_verl()

if __name__ == "__main__":
    raise SystemExit(main())
