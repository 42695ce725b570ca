"""Predicts linear_policy_loss in half precision on a GPU: every byte that it moves, beside three bare products.

    python tools/head_model.py
    python tools/head_model.py --into docs/performance.md

The plan of chunks and products is that of the op. tests/test_head_model.py counts the bytes of real calls.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from grpo_kernels.ops.linear_head import chunks, sizes
from tools.gpu_model import GPUS, LAUNCH_SECONDS, Gpu
from tools.gpu_roofline import replaced

__all__ = ["Head", "Step", "steps_of"]

FLOPS = 700e12  # per second, of cuBLAS in bf16 on an H100 or H200 that does nothing else
WIDTH = 100
HEADS = ((8192, 4096, 151_936), (8192, 2048, 151_936), (8192, 2048, 32_768), (32_768, 4096, 151_936))


@dataclass(frozen=True)
class Head:
    """Sizes of a call: rows, width of the hidden states, vocabulary; and the rows of a chunk and of a product."""

    rows: int
    width: int
    vocabulary: int
    chunk_rows: int
    product_rows: int

    @staticmethod
    def planned(rows: int, width: int, vocabulary: int, processors: int) -> Head:
        """The sizes that the op chooses."""
        chunk_rows = min(rows, sizes.rows_per_chunk(rows, vocabulary, "cuda", torch.bfloat16))
        product_rows = sizes.rows_per_product(rows, chunk_rows, (vocabulary, width), True, processors)
        return Head(rows, width, vocabulary, chunk_rows, max(product_rows, chunk_rows))


@dataclass(frozen=True)
class Step:
    """All passes of one kind.

    Attributes:
        flops: of a product; 0 for a pass over memory.
        launches: kernels that it takes.
        waves: share of multiprocessors that have a tile, over all waves of a product.
    """

    what: str
    read: int
    written: int
    launches: int
    flops: int = 0
    waves: float = 1.0

    def seconds(self, gpu: Gpu) -> float:
        moving = (self.read + self.written) / gpu.copy
        if self.flops:
            return max(self.flops / (FLOPS * self.waves), moving)
        return moving + self.launches * LAUNCH_SECONDS


def steps_of(head: Head, processors: int, ref_width: int | None = None) -> list[Step]:
    """The steps of a forward with gradients; with `ref_width` the reference model's head, too."""
    rows, width, vocabulary = head.rows, head.width, head.vocabulary
    logits, weight, hidden = rows * vocabulary, vocabulary * width, rows * width
    count = math.ceil(rows / head.chunk_rows)
    products = math.ceil(rows / head.product_rows)
    flops = 2 * logits * width
    tiles = math.ceil(head.product_rows / sizes.TILE_ROWS) * math.ceil(width / sizes.TILE_COLUMNS)
    is_direct = products == 1 and weight >= chunks.UNSPLIT
    item = 2 if is_direct else 4  # bytes of an element of the weight's gradient
    steps = [
        Step("logits: product", 2 * hidden + count * 2 * weight, 4 * logits, count, flops),
        Step("log-probs: kernel", 4 * logits, 8 * rows, count),
        Step("policy loss of all tokens", count * 17 * rows, count * 4 * rows, 3 * count),
        Step("gradient by logits: kernel", 4 * logits, 2 * logits, count),
        Step(
            "gradient of hidden states: product",
            2 * logits + products * 2 * weight,
            4 * hidden,
            products,
            flops,
            tiles / processors / math.ceil(tiles / processors),
        ),
        Step("gradient of hidden states: rounding", 4 * hidden, 4 * hidden, 2 * products),
        Step(
            "gradient of the weight: product",
            2 * logits + 2 * hidden + (products - 1) * item * weight,
            products * item * weight,
            products,
            flops,
        ),
    ]
    if not is_direct:
        steps.append(Step("gradient of the weight: rounding", 4 * weight, 2 * weight, 1))
    if ref_width is not None:
        read = 2 * rows * ref_width + count * 2 * vocabulary * ref_width
        steps[:0] = [
            Step("reference's logits: product", read, 4 * logits, count, 2 * logits * ref_width),
            Step("reference's log-probs: kernel", 4 * logits, 8 * rows, count),
        ]
    return steps


def bare_products(head: Head) -> float:
    """Seconds of three products that do nothing else."""
    return 3 * 2 * head.rows * head.vocabulary * head.width / FLOPS


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def step_table(head: Head, gpu: Gpu) -> list[tuple[str, ...]]:
    """The steps of a call, and their sum."""
    steps = steps_of(head, gpu.sms)
    rows: list[tuple[str, ...]] = [("step", "read", "written", "time")]
    for step in steps:
        rows.append((step.what, gigabytes(step.read), gigabytes(step.written), f"{step.seconds(gpu) * 1e3:.2f} ms"))
    total = sum(step.seconds(gpu) for step in steps)
    read, written = sum(step.read for step in steps), sum(step.written for step in steps)
    rows.append(("all", gigabytes(read), gigabytes(written), f"{total * 1e3:.2f} ms"))
    return rows


def memory(head: Head) -> int:
    """Bytes beside inputs and returned gradients: logits of a chunk, gradients by logits, a float32 accumulator."""
    is_direct = head.product_rows >= head.rows and head.vocabulary * head.width >= chunks.UNSPLIT
    accumulator = 0 if is_direct else 4 * head.vocabulary * head.width
    return (4 * head.chunk_rows + 2 * head.product_rows) * head.vocabulary + accumulator


def head_table(gpus: Sequence[Gpu]) -> list[tuple[str, ...]]:
    """Several heads, each beside its three bare products."""
    names = tuple(f"{gpu.name}, over bare products" for gpu in gpus)
    rows: list[tuple[str, ...]] = [
        ("rows x width x vocabulary", "rows of a chunk / product", "bare products", *names, "memory", "measured")
    ]
    for shape in HEADS:
        head = Head.planned(*shape, gpus[0].sms)
        bare = bare_products(head)
        ratios = (f"{sum(step.seconds(gpu) for step in steps_of(head, gpu.sms)) / bare:.2f}" for gpu in gpus)
        cells = (" x ".join(f"{size:,}" for size in shape), f"{head.chunk_rows:,} / {head.product_rows:,}")
        rows.append((*cells, f"{bare * 1e3:.1f} ms", *ratios, gigabytes(memory(head)), ""))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def document_text() -> str:
    gpus = GPUS["H100"], GPUS["H200"]
    shape = HEADS[0]
    copies = ", ".join(f"{gpu.name}: {gpu.copy / 1e12:.1f} TB/s" for gpu in gpus)
    text = (
        f"Predicted from counted bytes, not measured (`python tools/head_model.py`). Products run at "
        f"{FLOPS / 1e12:.0f} Tflop/s in bf16 or as fast as their bytes move, whichever takes longer, that for the "
        f"hidden states in whole waves of tiles of {sizes.TILE_ROWS} x {sizes.TILE_COLUMNS}. Kernels run at the "
        f"speed of a copy ({copies}) and take {LAUNCH_SECONDS * 1e6:.0f} us a launch. A call of {shape[0]:,} rows, a "
        f"width of {shape[1]:,} and a vocabulary of {shape[2]:,} on {gpus[0].name}:"
    )
    wrapped = textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    head = Head.planned(*shape, gpus[0].sms)
    return f"{wrapped}\n\n{markdown(step_table(head, gpus[0]))}\n\n{markdown(head_table(gpus))}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="also write the tables between the marks of this document")
    options = parser.parse_args(argv)
    print(document_text())
    if options.into is not None:
        options.into.write_text(replaced(options.into.read_text(), document_text(), "head"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
