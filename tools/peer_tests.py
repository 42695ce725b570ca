"""The peers' own tests, run with their functions and with ours in their place.

    python tools/peer_tests.py trl ~/trl               # a checkout of huggingface/trl: its tests of GRPOTrainer
    python tools/peer_tests.py verl ~/verl             # of verl-project/verl: those of its losses and advantages
    python tools/peer_tests.py trl ~/trl -k "train"    # what follows goes to pytest

The models and data that TRL's tests download are made here instead, small and random, under the same names. A test that
passes with the peer's own functions has to pass with ours; the exit status says whether all do. Lists go to --json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock
from xml.etree import ElementTree

PLACE = "PEER_TESTS"  # of the environment: set in the processes that pytest runs in
FILES = {
    "trl": ["tests/test_grpo_trainer.py"],
    "verl": [
        *(f"tests/trainer/ppo/test_{name}.py" for name in (
            "core_algos_on_cpu", "dynamic_policy_losses_on_cpu", "loss_aggregation_on_cpu", "metric_utils_on_cpu",
            "reinforce_pp_multiturn_on_cpu", "rollout_corr_integration", "value_loss_normalization_on_cpu",
        )),
        "tests/trainer/test_multi_trajectories_advantage_on_cpu.py",
    ],
}  # fmt: skip
# verl imports servers and queues at the top of modules whose functions on tensors are tested
OTHER_PARTS = ("cachetools", "uvicorn", "fastapi", "transfer_queue")
HUB = "trl-internal-testing"
TEXTS = [
    "Better late than never", "Beautiful is better than ugly", "Simple is better than complex", "Now is the time",
    "Readability counts", "Errors should never pass silently", "In the face of doubt", "There should be one way",
    "Flat is better than nested", "Sparse is better than dense", "Special cases are rare", "Explicit is better",
    "Practicality beats purity", "Unless silenced", "Although that way", "If it is hard to explain", "One idea",
]  # fmt: skip
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
        "vocab_size": len(tokenizer), "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 32, "initializer_range": 0.2, **ends,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    kinds: dict[str, tuple[type, dict[str, object]]] = {
        "tiny-Qwen2ForCausalLM-2.5": (tf.Qwen2ForCausalLM, size),
        "tiny-Qwen2ForSequenceClassification-2.5": (tf.Qwen2ForSequenceClassification, size | {"num_labels": 1}),
        "tiny-Qwen3ForCausalLM": (tf.Qwen3ForCausalLM, size | {"head_dim": 4}),
        "tiny-Qwen3ForSequenceClassification": (
            tf.Qwen3ForSequenceClassification, size | {"head_dim": 4, "num_labels": 1},
        ),
        "tiny-Qwen3MoeForCausalLM": (tf.Qwen3MoeForCausalLM, size | {"head_dim": 4} | experts),
        "tiny-LlamaForCausalLM-3.2": (tf.LlamaForCausalLM, size),
        "tiny-LlamaForSequenceClassification-3.2": (tf.LlamaForSequenceClassification, size | {"num_labels": 1}),
        "tiny-MistralForCausalLM-0.2": (tf.MistralForCausalLM, size | {"head_dim": 4}),
        "tiny-Gemma2ForCausalLM": (tf.Gemma2ForCausalLM, size | {"head_dim": 4}),
        "tiny-Cohere2ForCausalLM": (tf.Cohere2ForCausalLM, size),
    }  # fmt: skip
    for name, (kind, settings) in kinds.items():
        torch.manual_seed(0)
        kind(kind.config_class(**settings)).save_pretrained(folder / name)  # type: ignore[attr-defined]
        tokenizer.save_pretrained(folder / name)


def make_data(folder: Path) -> None:
    """The prompts of `zen`, as text and as a conversation."""
    of_name = {
        "standard_prompt_only": [{"prompt": text} for text in TEXTS],
        "conversational_prompt_only": [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS],
    }
    header = ["---", "configs:"]
    for name, lines in of_name.items():
        header += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", lines), ("test", lines[:2])):
            path = folder / "zen" / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in part))
            header += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "zen" / "README.md").write_text("\n".join([*header, "---", ""]))


def run(peer: str, place: Path, kind: str, arguments: list[str]) -> dict[str, str]:
    """Of each test: passed, failed, error or skipped."""
    report = place / f"{kind}.xml"
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths), PLACE: f"{peer} {kind}"}
    files = [name for name in FILES[peer] if (place / name).exists()]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--tb=short",
         f"--junitxml={report}", *files, *arguments],
        cwd=place, env=environment, check=False,
    )  # fmt: skip
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {"failure": "failed", "error": "error", "skipped": "skipped"}
        outcome = next((outcomes[child.tag] for child in case if child.tag in outcomes), "passed")
        found[f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"] = outcome
    return found


def put_ours_into_trl() -> None:
    import trl

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    trl.GRPOTrainer = FusedGRPOTrainer  # type: ignore[misc]


def put_ours_into_verl() -> None:
    from verl.trainer.ppo import core_algos

    from grpo_kernels.integrations.verl import patch_verl

    patch_verl()
    for registry, suffixes in (
        (core_algos.POLICY_LOSS_REGISTRY, ("compute_policy_loss_{}",)),
        (core_algos.ADV_ESTIMATOR_REGISTRY, ("compute_{}_outcome_advantage", "compute_{}_advantage")),
    ):
        for name in [name for name in registry if name.startswith("fused_")]:
            theirs, ours = name.removeprefix("fused_"), registry[name]
            if theirs in registry and theirs not in ("grpo", "gdpo"):  # called by verl itself, and patched
                registry[theirs] = ours
                for attribute in [each.format(theirs) for each in suffixes if hasattr(core_algos, each.format(theirs))]:
                    setattr(core_algos, attribute, ours)


def listed(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Markdown: the tests by what came of them with either, cases of one test counted."""
    outcomes: dict[tuple[str, str], Counter[str]] = {}
    for name, outcome in theirs.items():
        outcomes.setdefault((outcome, ours.get(name, "missing")), Counter())[name.split("::")[-1].split("[")[0]] += 1
    lines = []
    for (with_theirs, with_ours), tests in sorted(outcomes.items()):
        lines.append(f"**{with_theirs} with theirs, {with_ours} with ours: {tests.total()}**\n")
        lines.append(
            ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(tests.items())) + "\n"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", type=Path)
    given, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        shutil.copytree(given.checkout / "tests", place / "tests")
        if given.peer == "trl":
            make_models(place / HUB)
            make_data(place / HUB)
        theirs, ours = (run(given.peer, place, kind, arguments) for kind in ("theirs", "ours"))
    worse = [name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed"]
    print(f"theirs {dict(Counter(theirs.values()))}, ours {dict(Counter(ours.values()))}")
    print("passing with theirs alone:", *(worse or ["none"]), sep="\n  ")
    print(listed(theirs, ours))
    if given.json is not None:
        given.json.write_text(json.dumps({"theirs": theirs, "ours": ours}, indent=1) + "\n")
    return 1 if worse or "passed" not in theirs.values() else 0


if PLACE in os.environ and __name__ != "__main__":  # loaded by pytest as a plugin
    _peer, _kind = os.environ[PLACE].split()
    if _peer == "verl":
        for _name in OTHER_PARTS:
            if importlib.util.find_spec(_name) is None:
                sys.modules[_name] = MagicMock(__path__=[], __spec__=ModuleSpec(_name, None))
    if _kind == "ours":
        put_ours_into_trl() if _peer == "trl" else put_ours_into_verl()

if __name__ == "__main__":
    raise SystemExit(main())
