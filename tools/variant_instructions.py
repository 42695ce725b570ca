#!/usr/bin/env python3
"""Count the instructions a token of the Triton kernels of newer losses, beside those of PPO clip. No GPU is needed.

    python tools/variant_instructions.py [--target sm_90] [--into docs/performance.md]

The kernels over rows and tokens are compiled for each loss, and the longest way through their machine code is counted.
The exit status is 1 if a loss takes more than LIMIT times those. The CUDA backend has one general kernel for all of
these losses, in which such a way cannot be told apart.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_kernels.ops.policy_loss.config import LossConfig  # noqa: E402 - found through the line above
from tools.gpu_model import ARCHITECTURES, GPUS  # noqa: E402
from tools.roofline_cases import Launch  # noqa: E402
from tools.roofline_predict import WORKERS, predict_launch  # noqa: E402
from tools.sass import read_cubin  # noqa: E402

LIMIT = 1.5
SCRATCH = tempfile.gettempdir()  # compiling a kernel changes what this returns
SAMPLING, WEIGHTS, KINDS = {"sampling_ptr": "*fp32"}, {"is_weights_ptr": "*fp32"}, {"kinds_ptr": "*i8"}
THROUGH = {"through_ptr": "*fp64"}


class Variant(NamedTuple):
    config: LossConfig
    pointers: dict[str, str]


VARIANTS = {
    "clip": Variant(LossConfig(), {}),
    "ipo": Variant(LossConfig(loss="ipo"), {}),
    "icepop": Variant(LossConfig(loss="icepop"), {}),
    "topr": Variant(LossConfig(loss="topr"), {}),
    "clip_cov": Variant(LossConfig(loss="clip_cov"), KINDS),
    "kl_cov": Variant(LossConfig(loss="kl_cov"), KINDS),
    "reinforce": Variant(LossConfig(loss="reinforce"), {}),
    "kinds": Variant(LossConfig(), KINDS),
    "is_weights": Variant(LossConfig(), WEIGHTS),
    "token_truncate": Variant(LossConfig(correction="token_truncate", correction_max=2.0), SAMPLING),
    "sequence_mask": Variant(LossConfig(correction="sequence_mask", correction_max=2.0), SAMPLING),
    "geometric_mask": Variant(LossConfig(correction="geometric_mask", correction_max=2.0), SAMPLING),
    "sequence": Variant(LossConfig(ratio="sequence"), THROUGH),
    "average": Variant(LossConfig(ratio="average"), THROUGH),
    "geometric_average": Variant(LossConfig(ratio="geometric_average"), THROUGH),
}


class Cost(NamedTuple):
    """Instructions a token of each kernel, 0 for one that is not launched."""

    rows: float
    tokens: float
    spread: float

    @property
    def total(self) -> float:
        return self.rows + self.tokens + self.spread


def cost_of(name: str, target: str) -> Cost:
    """Compiles a variant's kernels and counts their instructions."""
    from grpo_kernels.ops.policy_loss import aot
    from tools import aot_compile

    aot_compile.prepare_environment()
    variant, kernels = VARIANTS[name], aot.kernels
    modes: dict[str, int] = dict(zip(kernels._MODES, variant.config.modes, strict=True))
    modes["HAS_ROW_WEIGHT"] = int(modes["CORRECTION"] >= kernels.SEQUENCE_TRUNCATE)
    used = [(aot.of_rows.rows_kernel, 8, ""), (aot.of_tokens.tokens_kernel, 4, "body")]
    if variant.pointers is THROUGH:
        used.append((aot.ratio_gradients.ratio_gradients_kernel, 8, "body"))
    counts = []
    with tempfile.TemporaryDirectory(prefix="variant_instructions_", dir=SCRATCH) as folder:
        for kernel, per_thread, loop in used:
            case = aot.case_of(kernel, name, modes, variant.pointers)
            path = Path(folder) / f"{re.sub(r'[^a-z_]', '', aot_compile.case_name(case))}.cubin"
            path.write_bytes(aot_compile.compile_cubin(case, target, f"{path}.cache"))
            (compiled,) = read_cubin(path, "")
            launch = Launch("", 1 << 22, 1, 4096, threads=32 * case.num_warps, per_thread=per_thread, loop=loop)
            counts.append(predict_launch(compiled, launch, GPUS[ARCHITECTURES[target]]).instructions)
    return Cost(*counts, *(0.0,) * (3 - len(counts)))


def costs(target: str, names: Sequence[str] = tuple(VARIANTS)) -> dict[str, Cost]:
    with ProcessPoolExecutor(WORKERS) as pool:
        return dict(zip(names, pool.map(cost_of, names, [target] * len(names)), strict=True))


def table(results: dict[str, Cost]) -> str:
    base = results["clip"].total
    lines = [
        "| loss | rows | tokens | spread over rows | in all | relative to PPO clip | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cost in results.items():
        share = cost.total / base
        verdict = "" if name == "clip" else "met" if share <= LIMIT else "**not met**"
        each = " | ".join(f"{count:.1f}" if count else "" for count in cost)
        lines.append(f"| `{name}` | {each} | {cost.total:.1f} | {share:.2f} | {verdict} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target",
        choices=list(ARCHITECTURES),
        default="sm_90",
        help="architecture to compile for; default: %(default)s",
    )
    parser.add_argument("--into", type=Path, help="also write the table between the marks of this document")
    options = parser.parse_args(argv)
    results = costs(options.target)
    text = table(results)
    print(text)
    if options.into is not None:
        from tools.gpu_roofline import replaced

        options.into.write_text(replaced(options.into.read_text(), text, "variants"))
    return int(max(cost.total for cost in results.values()) > LIMIT * results["clip"].total)


if __name__ == "__main__":
    sys.exit(main())
