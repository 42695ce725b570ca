"""Times a whole GRPO step by phases: TRL's GRPOTrainer, FusedGRPOTrainer with either head, and this trainer.

    python -m benchmarks.step --steps 6 --json step.json [--device cpu|cuda] [--who NAME ...]
    python -m benchmarks.step --lengths real --flat 0.3 --beta 0 --micro-batches 32 [--size 135M]

All have the same random model, prompts, reward and sizes, dtype of the weights, and one optimizer step per rollout.
They alternate step by step, each in a thread that waits for the others; TRL runs its own train(). The first step of
each is not counted; each later one is printed and saved when it ends.

Responses have the same number of tokens in all. With --lengths equal none ends before its last token. With real ones
they are cut where those of a reasoning run end, after the time in which the longest is generated; --flat makes the
rewards of a share of the prompts equal.

On a GPU the responses are given, as eager generation would take most of the time and is the same in TRL's trainers.
This trainer, which is left out there unless --who names it, samples with its own loop, which computes a prompt once for
all its responses and in float32 keeps the log-probs that it sampled with, and it computes a prompt once in the update,
too; TRL generates with transformers. The sampled texts and their rewards differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import pkgutil
import statistics
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure as measuring
from benchmarks.tables import markdown

PHASES = ("generation", "rewards and advantages", "log-probs", "forward and backward", "optimizer", "rest")
UPDATE = ("log-probs", "forward and backward")


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    model: dict[str, int]  # of LlamaConfig
    dtype: str
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    micro_batch: int
    is_given: bool = False  # responses are drawn, not generated
    who: tuple[str, ...] = ()  # of RUNNERS; () for all
    lengths: str = "equal"
    flat: float = 0.0  # share of prompts whose rewards are equal
    beta: float = 0.04
    micro_batch_tokens: int | None = None  # with batching="by_length"


def shape(*numbers: int) -> dict[str, int]:
    layers = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(("vocab_size", "hidden_size", "intermediate_size", *layers), numbers, strict=True))


TRLS = ("TRL's GRPOTrainer", 'FusedGRPOTrainer, head="logprobs"', 'FusedGRPOTrainer, head="fused"')
DEALT = ("TRL's GRPOTrainer", 'FusedGRPOTrainer, head="fused"', 'FusedGRPOTrainer, head="fused", batching="by_length"')
SIZES = {
    size.name: size
    for size in (
        Size("tiny", shape(160, 128, 256, 2, 4, 4), "float32", 16, 8, 24, 32, 64),
        # with the vocabulary of Llama 2
        Size("tiny-32k", shape(32_000, 128, 256, 2, 4, 4), "float32", 10, 8, 24, 256, 8, True, DEALT),
        # the shapes of SmolLM2-135M, and of Qwen2.5-0.5B and 1.5B
        Size("135M", shape(49_152, 576, 1536, 30, 9, 3), "float32", 10, 8, 8, 48, 8, True, DEALT),
        Size("0.5B", shape(151_936, 896, 4864, 24, 14, 2), "bfloat16", 16, 8, 128, 128, 32, True, TRLS),
        Size("1.5B", shape(151_936, 1536, 8960, 28, 12, 2), "bfloat16", 16, 8, 128, 128, 32, True, TRLS),
    )
}
DEFAULTS = {"cpu": "tiny", "cuda": "0.5B"}


class Clock:
    """Seconds in each phase. Time in a nested phase counts for the inner one alone."""

    def __init__(self, device: str) -> None:
        self.device, self.open, self.seconds = device, ["rest"], defaultdict(float)
        self.since = time.perf_counter()

    def _switch(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._switch()
        self.open.append(name)
        try:
            yield
        finally:
            self._switch()
            self.open.pop()

    def wrap(self, owner: Any, method: str, name: str, seen: Callable[[Any], None] | None = None) -> None:
        """Counts the method's time for a phase, and passes its result to `seen`."""
        inner = getattr(owner, method)

        @functools.wraps(inner)  # torch's schedulers look for an attribute of optimizer.step
        def call(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                result = inner(*arguments, **options)
            if seen is not None:
                seen(result)
            return result

        setattr(owner, method, call)

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        self._switch()
        seconds, self.seconds = self.seconds, defaultdict(float)
        return {name: seconds.get(name, 0.0) for name in PHASES}


class Runner:
    """A trainer that takes a step when it is told to, and closes."""

    def __init__(self, device: str) -> None:
        self.clock = Clock(device)
        self.tokens = 0  # sampled since the start
        self.model_tokens = 0  # computed by models in the phases of UPDATE, padding included


class Ours(Runner):
    def __init__(self, size: Size, folder: Path, device: str, steps: int) -> None:
        super().__init__(device)
        from grpo_trainer import checkpoint
        from grpo_trainer import train as training
        from grpo_trainer.recipe import Recipe
        from grpo_trainer.recipes import validated
        from grpo_trainer.setup import set_up

        rl = {
            "steps": 10_000,
            "num_iterations": 1,
            "minibatches": 1,
            "micro_batch": size.micro_batch,
            "optimizer": {"lr": 1e-6, "schedule": "constant"},
            "rewards": [{"name": "benchmarks.step:reward"}],
            "rollout": {
                "prompts": size.prompts,
                "num_generations": size.group,
                "max_completion_length": size.new_tokens,
                "min_completion_length": size.new_tokens,
            },
            "algorithm": {"beta": size.beta, "drop_flat": False},
        }
        recipe = validated(
            Recipe,
            {
                "name": "step",
                "output": str(folder / "run"),
                "threads": torch.get_num_threads(),
                "model": {"path": str(folder / "model"), "dtype": size.dtype},
                "data": {"task": None, "train": str(folder / "prompts.jsonl")},
                "rl": rl,
                "logging": {"progress": False, "samples": 0},
            },
        )
        self.run = set_up(recipe)
        checkpoint.start_run(recipe)
        training.prepare_rl(self.run, 0)
        if self.run.device.type != device:
            raise RuntimeError(f"step: the policy must be on {device}, got {self.run.device}")
        self.number = 0
        phases = {"generate": "generation", "model": "rest"}
        self.run.timed = lambda what: self.clock.phase(phases.get(what, "rewards and advantages"))
        self.clock.wrap(self.run, "roll_out", "generation", self._count)
        self.clock.wrap(training, "correct_sampling", "log-probs")
        self.clock.wrap(training, "reference_logprobs", "log-probs")
        self.clock.wrap(training, "accumulate", "forward and backward")
        self.clock.wrap(training, "optimizer_step", "optimizer")

    def _count(self, rollout: Any) -> None:
        self.tokens += int(rollout.batch.mask.sum())

    def step(self) -> None:
        from grpo_trainer import train as training

        self.number += 1
        torch.manual_seed(self.number)
        data = self.run.items("train")
        items = training.items_of_step(self.run.recipe, "rl", data, self.run.rl.rollout.prompts, self.number)
        training.rl_step(self.run, items, self.number)

    def close(self) -> None:
        self.run.close()


class Theirs(Runner):
    """A trainer with TRL's interface, whose train() runs in a thread, step by step; `options` are the trainer's."""

    def __init__(self, size: Size, folder: Path, device: str, steps: int, kind: str, **options: Any) -> None:
        from datasets import Dataset
        from transformers import AutoTokenizer, PrinterCallback
        from trl import GRPOConfig

        super().__init__(device)
        if "batching" in options:
            options["micro_batch_tokens"] = size.micro_batch_tokens

        def rewards(**columns: Any) -> list[float]:
            return reward(**columns, flat=size.flat)

        rows = size.prompts * size.group
        settings = GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            per_device_train_batch_size=size.micro_batch,
            gradient_accumulation_steps=rows // size.micro_batch,
            num_generations=size.group,
            max_completion_length=size.new_tokens,
            generation_kwargs={"min_new_tokens": size.new_tokens},
            beta=size.beta,
            loss_type="grpo",
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            use_cpu=device == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            model_init_kwargs={"dtype": size.dtype},
        )
        self.trainer = pkgutil.resolve_name(kind)(
            str(folder / "model"),
            rewards,
            settings,
            Dataset.from_json(str(folder / "prompts.jsonl")),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            **options,
        )
        generate, turns = self.trainer._generate_single_turn, itertools.count()

        def responses(ids: Any, *arguments: Any, **options: Any) -> tuple[list[list[int]], Any]:
            sampled = given(size, len(ids)) if size.is_given else generate(ids, *arguments, **options)[0]
            return ended(size, sampled, next(turns)), None

        self.trainer._generate_single_turn = responses
        for model in (self.trainer.model, self.trainer.ref_model):
            if model is not None:
                model.register_forward_pre_hook(self._count_inputs, with_kwargs=True)
        self.trainer.remove_callback(PrinterCallback)
        self._time_phases()
        self.goes_on, self.has_stepped = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._train, args=(torch.get_num_threads(),), daemon=True)
        self.thread.start()

    def _time_phases(self) -> None:
        clock, trainer = self.clock, self.trainer
        clock.wrap(trainer, "training_step", "forward and backward")
        clock.wrap(trainer, "_prepare_inputs", "rest")
        clock.wrap(trainer, "_generate_and_score_completions", "rewards and advantages", self._count)
        clock.wrap(trainer, "_generate", "generation")
        clock.wrap(trainer.accelerator, "clip_grad_norm_", "optimizer")
        events = trainer.callback_handler
        clock.wrap(events, "on_train_begin", "rest", lambda _: clock.wrap(trainer.optimizer, "step", "optimizer"))
        clock.wrap(events, "on_step_end", "rest", self._wait)
        forward = trainer._get_per_token_logps_and_entropies

        def logprobs(*arguments: Any, **options: Any) -> Any:
            # with gradients enabled it is the forward pass of the policy itself
            with contextlib.nullcontext() if torch.is_grad_enabled() else clock.phase("log-probs"):
                return forward(*arguments, **options)

        trainer._get_per_token_logps_and_entropies = logprobs

    def _wait(self, _: Any) -> None:
        self.has_stepped.release()
        self.goes_on.acquire()

    def _train(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a setting of each thread
        self.goes_on.acquire()
        try:
            self.trainer.train()
        except BaseException as error:  # raised again in step()
            self.error = error
        self.has_stepped.release()

    def _count_inputs(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        if self.clock.open[-1] in UPDATE:  # not those of generation
            self.model_tokens += inputs["input_ids"].numel()

    def _count(self, output: dict[str, Any]) -> None:
        self.tokens += int(output["completion_mask"].sum())

    def step(self) -> None:
        self.goes_on.release()
        self.has_stepped.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.goes_on.release()
        self.thread.join()


def given(size: Size, rows: int) -> list[list[int]]:
    """Random responses, of words and not of special tokens."""
    ids: list[list[int]] = torch.randint(3, size.model["vocab_size"], (rows, size.new_tokens)).tolist()
    return ids


def ended(size: Size, responses: list[list[int]], turn: int) -> list[list[int]]:
    """Responses as long as those of a reasoning run: log-normal, also between prompts, a median of a third."""
    if size.lengths == "equal":
        return responses
    generator = torch.Generator().manual_seed(turn)
    of_prompts = torch.randn(len(responses) // size.group, generator=generator).repeat_interleave(size.group)
    spread = (0.5 * of_prompts + 0.7 * torch.randn(len(responses), generator=generator)).exp()
    lengths = (size.new_tokens / 3 * spread).round().clamp(1, size.new_tokens).int().tolist()
    cut = zip(responses, lengths, strict=True)
    return [[*ids[: n - 1], 1] if n < size.new_tokens else ids for ids, n in cut]  # 1 is <end>


def reward(prompts: list[str], completions: list[str], flat: float = 0.0, **_: Any) -> list[float]:
    """A pseudo-random number that depends on the text, or 0 for a share of the prompts."""
    order = sorted(set(prompts), key=lambda prompt: zlib.crc32(prompt.encode()))
    are_flat = {*order[: round(flat * len(order))]}
    numbers = [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
    return [0.0 if prompt in are_flat else number for prompt, number in zip(prompts, numbers, strict=True)]


def write_model(size: Size, folder: Path, device: str) -> None:
    """Writes the model, a tokenizer with one word per token, and prompts of `size.prompt_tokens` words.

    Half a billion weights are drawn on a GPU in a moment, and on the host in 13 seconds.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<unknown>"]
    words = special + [f"w{i}" for i in range(size.model["vocab_size"] - len(special))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", padding_side="left"
    )
    config = LlamaConfig(
        **size.model,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, size.dtype)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(special), len(words), (4 * size.prompts, size.prompt_tokens), generator=generator)
    lines = (json.dumps({"prompt": " ".join(words[i] for i in row)}) for row in ids.tolist())
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


FUSED = "grpo_kernels.integrations.trl:FusedGRPOTrainer"
# Each is made, with the size, the folder, the device and the number of steps, when its first turn comes.
RUNNERS: dict[str, Callable[..., Any]] = {
    "grpo_trainer": Ours,
    "TRL's GRPOTrainer": functools.partial(Theirs, kind="trl:GRPOTrainer"),
    'FusedGRPOTrainer, head="logprobs"': functools.partial(Theirs, kind=FUSED, head="logprobs"),
    'FusedGRPOTrainer, head="fused"': functools.partial(Theirs, kind=FUSED, head="fused"),
    'FusedGRPOTrainer, head="fused", batching="by_length"': functools.partial(
        Theirs, kind=FUSED, head="fused", batching="by_length"
    ),
}


def measure(size: Size, device: str, steps: int, file: Path | None = None) -> dict[str, Any]:
    """Takes the steps of the runners in turn, the first of each without counting it.

    Args:
        size: the model and the batch, and the runners.
        device: "cpu" or "cuda".
        steps: of each runner.
        file: gets the result so far after each step that counts.
    """
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()
    disable_progress_bar()
    names = [*(size.who or RUNNERS)]
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    running: dict[str, Any] = {}
    machine = measuring.machine()
    with tempfile.TemporaryDirectory() as folder:
        write_model(size, Path(folder), device)
        for step in range(steps):
            for name in names:
                if name not in running:
                    running[name] = RUNNERS[name](size, Path(folder), device, steps)
                seconds = timed(running[name], device)
                print(f"{name}, step {step}: {seconds['total'] * 1e3:,.1f} ms", flush=True)
                if running[name].tokens != (expected := running[names[0]].tokens):
                    raise RuntimeError(f"step: {name} must sample {expected} tokens, got {running[name].tokens}")
                if step > 0:
                    taken[name].append(seconds)
                    result = document(size, device, taken) | {"machine": machine}
                    if file is not None:
                        measuring.write(file, result)
        for runner in running.values():
            runner.close()
    return result


def timed(runner: Runner, device: str) -> dict[str, float]:
    """Seconds of the phases of a step and of all, the bytes that it takes, and tokens that the model computes."""
    gc.collect()  # of the previous trainer's garbage, outside the measured time
    before, seconds = runner.model_tokens, dict[str, float]()

    def step() -> None:
        runner.clock.read()
        began = time.perf_counter()
        runner.step()
        seconds.update(runner.clock.read() | {"total": time.perf_counter() - began})

    peak = measuring.peak_memory(step, torch.device(device))
    seconds |= {"update": sum(seconds[phase] for phase in UPDATE), "model_tokens": runner.model_tokens - before}
    return seconds | ({} if peak is None else {"peak": peak})


def document(size: Size, device: str, taken: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The result of the steps so far, of runners that have counted one."""
    counted = {name: steps for name, steps in taken.items() if steps}
    first, rows, totals = next(iter(counted.values())), [], []
    for name, steps in counted.items():
        rows += [{"who": name, "phase": phase} | spread("seconds", [step[phase] for step in steps]) for phase in PHASES]
        gains = [a["update"] / b["update"] for a, b in zip(first, steps, strict=False)]
        total = {"who": name, "model_tokens": statistics.fmean(step["model_tokens"] for step in steps)}
        total |= spread("seconds", [step["total"] for step in steps]) | spread("gain", gains)
        totals.append(total | {"peak": max(step["peak"] for step in steps)} if "peak" in steps[0] else total)
    model = dataclasses.asdict(size)
    return {"device": device, "model": model, "steps": max(map(len, counted.values())), "rows": rows, "totals": totals}


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {f"{name}_median": statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def table(result: dict[str, Any]) -> str:
    totals = result["totals"]
    lines = []
    for phase in (*PHASES, "total"):
        cells = totals if phase == "total" else [row for row in result["rows"] if row["phase"] == phase]
        ms = ([cell[f"seconds_{what}"] * 1e3 for what in ("median", "low", "high")] for cell in cells)
        lines.append([phase, *(f"{median:.1f} ({low:.1f} to {high:.1f})" for median, low, high in ms)])
    figures = {
        f"times as fast in {' and '.join(UPDATE)}, by pairs of steps": (
            "{gain_median:.2f} ({gain_low:.2f} to {gain_high:.2f})"
        ),
        "tokens through the model there, with padding": "{model_tokens:,.0f}",
    }
    if "peak" in totals[0]:
        figures["MiB beside weights and optimizer"] = "{mebibytes:,.0f}"
    for name, form in figures.items():
        lines.append([name, *(form.format(**total, mebibytes=total.get("peak", 0) / 2**20) for total in totals)])
    return markdown(["ms a step, median (fastest to slowest)", *(total["who"] for total in totals)], lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of each, of which the first is not counted; default: %(default)s"
    )
    parser.add_argument(
        "--device",
        choices=DEFAULTS,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to measure; default: %(default)s",
    )
    parser.add_argument("--size", choices=SIZES, help="of the model; default: tiny, on a GPU 0.5B")
    parser.add_argument("--micro-batches", type=int, help="of a step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; default: %(default)s")
    parser.add_argument("--json", type=Path, help="the result file")
    of_size = parser.add_argument_group("fields of the size", argument_default=argparse.SUPPRESS)
    of_size.add_argument("--lengths", choices=("equal", "real"), help="of responses; default: equal")
    of_size.add_argument("--flat", type=float, help="share of prompts with equal rewards; default: none")
    of_size.add_argument("--beta", type=float, help="of the KL term; default: 0.04")
    of_size.add_argument(
        "--given", dest="is_given", action="store_true", help="draw responses instead of generating them"
    )
    of_size.add_argument("--micro-batch-tokens", type=int, help="with batching by length")
    of_size.add_argument("--prompts", type=int, help="of a step")
    of_size.add_argument("--new-tokens", type=int, help="of a response, at most")
    of_size.add_argument("--who", nargs="+", choices=RUNNERS, help="trainers; default: all, on a GPU TRL's")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        raise SystemExit(f"step: --steps must be 2 or more, as the first is not counted, got {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("step: --device cuda needs a GPU, and there is none")
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # accelerate would take a GPU if there is one
    torch.set_num_threads(options.threads)
    size = SIZES[options.size or DEFAULTS[options.device]]
    chosen = {name: value for name, value in vars(options).items() if hasattr(size, name)}
    if chosen.get("lengths") == "real":
        chosen.setdefault("who", DEALT)
    size = dataclasses.replace(size, **chosen)
    if options.micro_batches:
        size = dataclasses.replace(size, micro_batch=size.prompts * size.group // options.micro_batches)
    result = measure(size, options.device, options.steps, options.json)
    responses = f"{size.prompts} prompts x {size.group} responses of up to {size.new_tokens} tokens"
    batches = (
        f"{size.lengths} lengths, {size.flat:.0%} flat prompts, beta {size.beta}, micro-batches of {size.micro_batch}"
    )
    print(f"\n{size.name} on {options.device}: {responses}, {batches}\n")
    print(table(result))


if __name__ == "__main__":
    main()
