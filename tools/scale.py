"""Cost of a step, by formulas: the tables of docs/scale.md. Nothing here is measured.

A model of 7.6 billion weights on GPUs of 989 TFLOP/s (bfloat16), 4.8 TB/s and 450 GB/s to each other, of which 40, 70
and 80 % are taken to be had; responses of 512 tokens, 8 to a prompt of 256.
"""

from __future__ import annotations

import dataclasses

FLOPS, MEMORY, LINK = 0.4 * 989e12, 0.7 * 4.8e12, 0.8 * 450e9  # a second, of one GPU
WEIGHTS, HIDDEN, VOCABULARY, LAYERS = 7.6e9, 3584, 152_064, 28
KV = 2 * LAYERS * 4 * 128 * 2  # bytes a token
PROMPT, TOKENS, GROUP, WIDTH = 256, 512, 8, 384  # the last of an embedding
EMBEDDING = 5e-3  # seconds a text, one at a time: assumed


@dataclasses.dataclass(frozen=True)
class Setting:
    rollouts: int
    gpus: int
    together: int  # responses that a GPU samples at a time
    micro: int  # responses a forward pass with gradients
    minibatches: int
    embedders: int
    sharded: bool = False
    vllm: bool = False  # an engine in each process samples

    @property
    def rows(self) -> float:
        """Responses of one GPU."""
        return self.rollouts / self.gpus

    @property
    def tokens(self) -> float:
        return self.rows * TOKENS

    @property
    def others(self) -> float:
        return (self.gpus - 1) / self.gpus

    @property
    def gather(self) -> float:
        """Seconds to put all bfloat16 weights together from their parts."""
        return self.others * 2 * WEIGHTS / LINK if self.sharded else 0.0

    def seconds(self) -> dict[str, float]:
        passes = self.rows / self.micro
        read = (2 * WEIGHTS + self.together * (PROMPT + TOKENS / 2) * KV) / MEMORY
        of_token = max(read, 2 * WEIGHTS * self.together / FLOPS) + (0 if self.vllm else self.gather)
        forward = 2 * WEIGHTS * self.tokens / FLOPS + passes * self.gather
        random = 0 if self.vllm else 3 * 4 * self.rollouts * TOKENS * VOCABULARY / MEMORY
        return {
            "hand-over of weights": 2 * 2 * WEIGHTS / MEMORY + self.gather if self.vllm else 0.0,
            "sampling": self.rows / self.together * TOKENS * of_token,
            "random numbers of all rows, in every process": random,
            "scores of the engine's tokens": forward if self.vllm else 0.0,
            "embedding": self.rollouts / self.embedders * EMBEDDING,
            "reference": forward,
            "update, transformer body": 6 * WEIGHTS * self.tokens / FLOPS + passes * 3 * self.gather,
            "update, head and loss": 6 * HIDDEN * VOCABULARY * self.tokens / FLOPS,
            "all-reduce of gradients": 0.0 if self.sharded else self.minibatches * 2 * self.others * 2 * WEIGHTS / LINK,
        }

    def bytes(self) -> dict[str, float]:
        state = 2 + 2 + 2 + 2  # weights, gradients, two moments in bfloat16
        parts = self.gpus if self.sharded else 1
        return {
            "weights, gradients, moments": state * WEIGHTS / parts,
            "reference": 2 * WEIGHTS / parts,
            "weights of the engine, while it samples": 2 * WEIGHTS if self.vllm else 0,
            "keys and values while sampling": self.together * (PROMPT + TOKENS) * KV,
            "token probabilities of all rows, in every process": 0
            if self.vllm
            else 4.0 * self.together * self.gpus * VOCABULARY,
            "logits of a micro-batch, if materialised": 4.0 * self.micro * TOKENS * VOCABULARY,
            "embeddings": 4.0 * self.rollouts * WIDTH,
            "group_advantages reads and writes": 21.0 * self.rollouts,
            "policy_loss reads and writes": 17.0 * self.rollouts * TOKENS,
            "distances within prompts": 4.0 * self.rollouts * GROUP,
        }

    def calls(self) -> dict[str, float]:
        batches, passes = self.rows / self.together, self.rows / self.micro
        return {
            "forward passes while sampling": batches * TOKENS,
            "exchanges of tokens": 0 if self.gpus == 1 else 1 if self.vllm else batches * TOKENS,
            "forward passes of the reference": passes,
            "forward passes for the engine's tokens": passes if self.vllm else 0,
            "forward and backward passes": passes,
            "all-reduces of gradients": 0 if self.sharded or self.gpus == 1 else self.minibatches,
            "launches of policy_loss (2 a micro-batch, 1 more over 1,024 rows)": 2 * passes,
            "launches of similarity_groups": 2,
            "launches of group_advantages": 1 if self.rollouts <= 2_048 else 2,
        }


SETTINGS = {
    "8k, 1 GPU": Setting(8_192, 1, 512, 16, 2, 1),
    "8k, 8 GPUs": Setting(8_192, 8, 512, 16, 2, 8),
    "8k, 8 GPUs, fsdp2": Setting(8_192, 8, 512, 16, 2, 8, sharded=True),
    "8k, 8 GPUs, vLLM": Setting(8_192, 8, 512, 16, 2, 8, vllm=True),
    "8k, 8 GPUs, fsdp2, vLLM": Setting(8_192, 8, 512, 16, 2, 8, sharded=True, vllm=True),
}


def number(value: float, unit: str) -> str:
    if unit == "seconds":
        return f"{value:.3g}"
    if unit == "calls":
        return f"{value:,.0f}"
    power = next((power for power in (12, 9, 6, 3) if value >= 10**power), 0)
    return f"{value / 10**power:.3g} {({12: 'T', 9: 'G', 6: 'M', 3: 'k', 0: ''})[power]}B"


def table(unit: str) -> list[str]:
    columns = {name: getattr(setting, unit)() for name, setting in SETTINGS.items()}
    rows = next(iter(columns.values()))
    lines = [f"| {unit} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(number(each[row], unit) for each in columns.values()) + " |" for row in rows]
    if unit == "seconds":
        lines.append("| a step | " + " | ".join(number(sum(each.values()), unit) for each in columns.values()) + " |")
    return lines


def main() -> None:
    print("\n\n".join("\n".join(table(unit)) for unit in ("seconds", "bytes", "calls")))


if __name__ == "__main__":
    main()
