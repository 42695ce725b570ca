"""Hidden states to the log-probabilities of chosen tokens, without the logits of more than a chunk of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels import dispatch
from grpo_kernels.functional.linear_head import LinearHead, check_chunk_size, check_head, check_positions, check_targets
from grpo_kernels.functional.token_logprobs import TokenLogprobs
from grpo_kernels.ops import linear_logprobs as op

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OP = "linear_logprobs"


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    positions: Tensor | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    vocab_start: int | None = None,
    process_group: ProcessGroup | None = None,
    backend: str | None = None,
) -> TokenLogprobs:
    """token_logprobs(hidden @ weight.T + bias, targets), of which neither logits nor their gradient are ever whole.

    hidden          [..., H], of the rows whose targets are given: shift first; bfloat16, float16, float32 (float64 on
                    the CPU)
    weight          [V, H], of the same dtype; without requires_grad nothing is computed for it
    targets         [...], integers; -100: log-probability and entropy 0, no gradient
    bias            [V]
    temperature, softcap, logit_scale, return_entropy
                    as in token_logprobs
    positions       only these rows are computed: as a mask in the shape of targets, the results have that shape and
                    are 0 elsewhere; as integers [P] into the flat targets, the results are [P]. A mask waits for a GPU
    chunk_size      rows whose logits are in memory at a time; None: chosen from the shapes
    vocab_start     weight and bias are those of the columns from here on, and other ranks of process_group have the
                    others; targets count over all. Hidden states must be the same on all ranks, whose gradient is
                    complete on each. One all-reduce forward, one backward
    backend         of the kernels: "cuda", "triton", "cpu", "reference"; None: the first that can

    Logits are accumulated and kept in float32 whatever the dtype of the weight. The backward computes them again, of
    the rows whose gradient is not 0 (on a GPU, where finding those would wait, of all). Only a first derivative.
    """
    head = check_head(_OP, hidden, weight, targets, bias, temperature, softcap, logit_scale)
    size = check_chunk_size(_OP, chunk_size)
    places = check_positions(_OP, positions, targets)
    chosen = dispatch.select(_OP, backend, hidden.device.type, head.hidden.dtype, op.SUPPORTS, hidden.device.index)
    if process_group is not None and vocab_start is None:
        raise ValueError(f"{_OP}: vocab_start must be given with process_group, got None")
    rows = head if places is None else head.only(places)
    logprobs, entropy = _compute(chosen, rows, return_entropy, size, vocab_start, process_group)
    is_mask = positions is not None and positions.dtype == torch.bool

    def shaped(result: Tensor) -> Tensor:
        if places is None:
            return result.view(head.shape)
        return result.new_zeros(head.targets.shape).index_put((places,), result).view(head.shape) if is_mask else result

    return TokenLogprobs(shaped(logprobs), shaped(entropy) if return_entropy else None)


def _compute(
    backend: str, head: LinearHead, want_entropy: bool, chunk_size: int | None, vocab_start: int | None,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns = head.hidden.shape[0], head.weight.shape[0]
    size = chunk_size or op.rows_per_chunk(rows, columns, head.hidden.device.type)
    if vocab_start is None:
        check_targets(_OP, head, backend)
        logprobs, entropy, _ = op.apply(backend, *head.arguments(), want_entropy, size)
        return logprobs, entropy
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{_OP}: vocab_start must be None under torch.compile, got {vocab_start}")
    return op.apply_sharded(backend, group, vocab_start, head.arguments(), want_entropy, size)
