"""Times sampling in the trainer: its own loop beside vLLM, in turns in one process.

    make .venv-engine/packages
    PYTHONPATH=.:python .venv-engine/bin/python -m benchmarks.sampling --hidden 256 --layers 4 --tokens 128

Both sample from the same random model, prompts and settings. The model ends a response at each token with about the
same small probability, so that lengths differ. A hand-over of the weights precedes each of vLLM's turns and is counted.
The first turn of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from grpo_trainer.engine import Engine
from grpo_trainer.policy import load_policy
from grpo_trainer.recipe import Model, Rl, Tiny
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rollout import Rollout, roll_out, select_usable
from grpo_trainer.tasks import make

from benchmarks.machine import describe


def compare(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each turn."""
    torch.manual_seed(0)
    texts = [item["prompt"] for item in make("arithmetic", 0, {}).train[: args.prompts]]
    model = Model(
        tiny=Tiny(hidden=args.hidden, layers=args.layers, heads=args.hidden // 64, intermediate=2 * args.hidden)
    )
    policy = load_policy(model, texts, None)
    items = select_usable(policy, [{"prompt": text} for text in texts], "prompt", model.max_prompt_length, False)
    sampling = Sampling(
        prompts=args.prompts, num_generations=args.group_size, max_completion_length=args.tokens, engine="vllm"
    )
    engine = Engine(policy, model, Rl(rollout=sampling), "rollout")

    def with_engine(generator: torch.Generator) -> Rollout:
        engine.is_current = False
        return engine.roll_out(items, generator)

    ways: dict[str, Callable[[torch.Generator], Rollout]] = {
        "transformers": lambda generator: roll_out(policy, items, sampling, generator),
        "vllm": with_engine,
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.turns + 1):
        for name, sample in ways.items():
            start = time.perf_counter()
            rollout = sample(torch.Generator().manual_seed(turn))
            seconds = time.perf_counter() - start
            if turn:
                speeds[name].append(float(rollout.lengths.sum()) / seconds)
    engine.close()
    return speeds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts = {
        "hidden": "hidden size",
        "layers": "layers of the model",
        "prompts": "prompts sampled together",
        "group-size": "responses per prompt",
        "tokens": "mean length of a response",
    }
    for name, default in (("hidden", 256), ("layers", 4), ("prompts", 32), ("group-size", 8), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{texts[name]}; default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="timed turns of each; default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for the speeds")
    args = parser.parse_args(argv)
    speeds = compare(args)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name:<12} {medians[name]:>9,.0f} tokens/s  ({min(values):,.0f} to {max(values):,.0f})")
    print(f"vllm / transformers: {medians['vllm'] / medians['transformers']:.2f}")
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(
            json.dumps({"machine": describe(), "settings": settings, "tokens_per_second": speeds}, indent=1)
        )


if __name__ == "__main__":
    main()
