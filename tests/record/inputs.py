"""Small fixed inputs of the record: the same numbers on every machine, and with every Python and torch.

A call copies what it changes.
"""

from __future__ import annotations

import functools
import random
import zlib

import torch
from torch import Tensor

ROWS, WIDTH, HIDDEN, VOCABULARY = 5, 6, 3, 7
LENGTHS = torch.tensor([6, 3, 0, 4, 5])
IN_ROW = torch.arange(WIDTH) < LENGTHS[:, None]
GROUPS = torch.tensor([0, 0, 1, 1, 1])
NAN = float("nan")
IGNORED = -100


def noise(name: str, *shape: int) -> Tensor:
    """Numbers in [-4, 4] with a standard deviation of 1.15, float64 in steps of 2^-11 and therefore exact in float32.

    Only random() of Python's generator promises to stay as it is. No function of libm is called.
    """
    source = random.Random(zlib.crc32(name.encode()))
    count = torch.Size(shape).numel()
    sums = [sum(int(source.random() * 4096) for _ in range(4)) for _ in range(count)]
    return (torch.tensor(sums, dtype=torch.float64) / 2048 - 4).view(shape)


@functools.cache
def tokens() -> dict[str, Tensor]:
    """A batch of rows of tokens, padded [ROWS, WIDTH]: holes in the mask, an empty row, ratios on both sides of bounds.

    Names in two words are another version of the input named last.
    """
    logprobs = -(noise("logprobs", ROWS, WIDTH).abs() / 2 + 2**-4)
    old = (logprobs + noise("old", ROWS, WIDTH) / 8).clamp(max=-(2**-10))
    for place, new, before in (((0, 3), -0.5, -1.5), ((0, 4), -2, -0.5), ((1, 1), -0.5, -1.75), ((3, 2), -2.5, -0.75)):
        logprobs[place], old[place] = new, before
    sampler = old + noise("sampler", ROWS, WIDTH) / 8
    sampler[0, 1] = NAN  # a token that the sampler could not score
    mask = IN_ROW.clone()
    mask[0, 2] = mask[3, 1] = False
    reference = logprobs + noise("reference", ROWS, WIDTH) / 4
    far_old, far_reference = old.clone(), reference.clone()
    far_old[1, 1], far_old[4, 2] = logprobs[1, 1] - 40, logprobs[4, 2] - 25
    far_reference[0, 0], far_reference[1, 0] = logprobs[0, 0] - 25, logprobs[1, 0] + 4
    steps = torch.tensor([0, 0, 1, 1, 1, 2]).expand(ROWS, WIDTH)
    return {
        "logprobs": logprobs,
        "old": old,
        "far old": far_old,
        "advantages": torch.tensor([1.25, -0.75, 0.5, -1.125, 0.375], dtype=torch.float64),
        "token advantages": noise("token advantages", ROWS, WIDTH),
        "mask": mask,
        "reference": reference,
        "far reference": far_reference,
        "sampler": sampler,
        "entropy": noise("entropy", ROWS, WIDTH).abs() / 2 + 0.25,
        "importance": noise("importance", ROWS, WIDTH).abs() / 2 + 0.5,
        "row importance": noise("row importance", ROWS, 1).abs() / 2 + 0.5,
        "segments": torch.where(mask, steps, -1),
        "kinds": (torch.arange(ROWS)[:, None] + torch.arange(WIDTH)) % 5,
        "shares": noise("shares", ROWS, WIDTH).abs() / 32,
        "log_z": noise("log_z", ROWS),
        # one log-prob serves several tokens
        "index": torch.where(IN_ROW, (3 * torch.arange(ROWS)[:, None] + torch.arange(WIDTH)) % (ROWS * WIDTH), -1),
    }


@functools.cache
def head() -> dict[str, Tensor]:
    """Hidden states and heads for the same rows of tokens. The other log-probs are near those of this head."""
    hidden = noise("hidden", ROWS, WIDTH, HIDDEN)
    weight, bias = noise("weight", VOCABULARY, HIDDEN) / 2, noise("bias", VOCABULARY) / 4
    targets = (torch.arange(ROWS)[:, None] * 2 + torch.arange(WIDTH) * 3) % VOCABULARY
    logprobs = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    on_grid = (logprobs * 2**11).round() / 2**11
    kept = (targets[..., None] + torch.tensor([0, 1, 3])) % VOCABULARY
    teacher_ids = (targets[..., None] + torch.tensor([0, 2, 5])) % VOCABULARY
    teacher = noise("teacher", ROWS, WIDTH, 3) / 2
    batch = dict(tokens())
    batch |= {name: on_grid + noise(f"head {name}", ROWS, WIDTH) / 4 for name in ("old", "reference", "sampler")}
    return batch | {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "targets": torch.where(IN_ROW, targets, IGNORED),
        "lora a": noise("lora a", 2, HIDDEN) / 2,
        "lora b": noise("lora b", VOCABULARY, 2) / 2,
        "temperatures": noise("temperatures", ROWS, WIDTH).abs() / 4 + 0.75,
        "reference hidden": noise("reference hidden", ROWS, WIDTH, HIDDEN),
        "reference weight": noise("reference weight", VOCABULARY, HIDDEN) / 2,
        "kept ids": kept,
        "positions": mask_of_positions(),
        "teacher ids": teacher_ids,
        # of the whole vocabulary, so that the three sum to less than 1
        "teacher logprobs": teacher - 3,
        "upstream": noise("upstream", ROWS, WIDTH),
        "entropy upstream": noise("entropy upstream", ROWS, WIDTH),
    }


def mask_of_positions() -> Tensor:
    return (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 != 1) & IN_ROW


@functools.cache
def rewards() -> dict[str, Tensor]:
    """Rewards of four prompts with 4, 4, 1 and 4 responses: one that is not scored, one alone, and a tie of all."""
    groups = torch.tensor([7, -2, 7, 3, 5, 7, -2, 5, -2, 5, 7, -2, 5])
    values = noise("rewards", 13)
    values[groups == 5] = 0.75
    values[5] = NAN
    return {
        "rewards": values,
        "columns": torch.stack((values, noise("second reward", 13)), 1),
        "groups": groups,
        "subgroups": torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 2, -1]),
        "valid": torch.arange(13) != 6,
        "lengths": torch.arange(13) % 5 + 1,
        "baselines": noise("baselines", 13) / 2,
        "shares of success": noise("success", 13).abs().clamp(max=1),
        "drift": noise("drift", 13).abs() / 8,
    }


@functools.cache
def steps() -> dict[str, Tensor]:
    """Rewards and values of tokens in the rows of `tokens`."""
    values = torch.where(IN_ROW, noise("step rewards", ROWS, WIDTH), 0)  # packed tokens have none after a row
    return tokens() | {
        "rewards": values,
        "unscored rewards": torch.where((torch.arange(ROWS) == 3)[:, None] & IN_ROW, NAN, values),
        "values": noise("values", ROWS, WIDTH),
        "turns": torch.tensor([0, 0, 1, -1, 2, 2]).expand(ROWS, WIDTH).contiguous(),
        "squares": noise("squares", ROWS, WIDTH).abs() / 4,
    }


@functools.cache
def long_rows() -> dict[str, Tensor]:
    """Rows of twelve tokens for segments; old log-probs differ more from row to row."""
    logprobs = -(noise("long logprobs", 4, 12).abs() / 2 + 2**-4)
    mask = torch.arange(12) < torch.tensor([12, 7, 0, 10])[:, None]
    mask[0, 5] = False
    return {
        "rewards": noise("long rewards", 4, 12),
        "logprobs": logprobs,
        "old": logprobs + noise("long old", 4, 12) * torch.tensor([[0.5], [0.25], [0.25], [0.125]]),
        "mask": mask,
        "values": noise("long values", 4, 12),
        "groups": torch.tensor([4, 4, 4, 1]),
    }


@functools.cache
def embeddings() -> dict[str, Tensor]:
    """Embeddings of the responses to six prompts, with three clusters, two, one, orthogonal responses, two, one."""
    groups = torch.tensor([6] * 6 + [5] * 5 + [4] * 4 + [3] * 3 + [2] * 2 + [1])
    centers = noise("centers", 3, 5)
    member = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 0, 1, 1, 2, 2, 2, 2, 0, 1, 2, 0, 1, 2])
    vectors = centers[member] + noise("embeddings", 21, 5) / 4
    vectors[15:18] = torch.eye(5, dtype=torch.float64)[:3]
    vectors[12] = vectors[11]
    return {
        "vectors": vectors,
        "groups": groups,
        "valid": torch.arange(21) != 3,
        "rewards": noise("similar rewards", 21),
    }
