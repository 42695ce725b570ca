"""What linear_logprobs and linear_policy_loss have in common: the checks of the LM head's arguments, and its chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.functional.token_logprobs import Scaling, check_scaling
from grpo_kernels.ops.token_logprobs import IGNORED


class LinearHead(NamedTuple):
    """Flat: hidden [N, H], weight [V, H], bias [V], targets [N] and the scaling's rows [N]; `shape` is the targets'."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    scaling: Scaling
    shape: torch.Size

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def arguments(self) -> tuple[Tensor | float | None, ...]:
        """As the ops take them."""
        return self.hidden, self.weight, self.bias, self.targets, *self.scaling

    def only(self, places: Tensor) -> LinearHead:
        of_row = self.scaling.row_temperature
        scaling = self.scaling._replace(row_temperature=None if of_row is None else of_row[places])
        return self._replace(hidden=self.hidden[places], targets=self.targets[places], scaling=scaling)


def check_head(
    op: str, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float | Tensor,
    softcap: float | None, logit_scale: float,
) -> LinearHead:  # fmt: skip
    checks.tensor(op, "hidden", hidden, checks.FLOATS)
    checks.tensor(op, "weight", weight, checks.FLOATS)
    checks.tensor(op, "targets", targets, checks.INTEGERS)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"{op}: hidden must have shape [..., H] with H > 0, got {list(hidden.shape)}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: targets must have the shape of hidden but its last dimension, {list(hidden.shape[:-1])}, "
            f"got {list(targets.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"{op}: weight must have shape [V, {hidden.shape[-1]}] with V > 0, got {list(weight.shape)}")
    if bias is not None:
        checks.tensor(op, "bias", bias, checks.FLOATS)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{op}: bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    hidden, weight, bias = _as_autocast_has_it(hidden, weight, bias)
    for name, value in (("weight", weight), ("bias", bias), ("targets", targets)):
        if value is None:
            continue
        checks.same_device(op, name, value, hidden.device)
        if name != "targets" and value.dtype != hidden.dtype:
            raise TypeError(f"{op}: {name} must be of dtype {hidden.dtype} like hidden, got {value.dtype}")
    scaling = check_scaling(op, temperature, softcap, logit_scale, targets, hidden.dtype)
    of_row = scaling.row_temperature
    # Not _replace: torch.compile of torch 2.11 fails if its result outlives a graph break, such as a mask of positions.
    flat = Scaling(None if of_row is None else of_row.reshape(-1).contiguous(), *scaling[1:])
    rows = hidden.reshape(-1, hidden.shape[-1])
    return LinearHead(rows, weight, bias, targets.long().reshape(-1).contiguous(), flat, targets.shape)


def _as_autocast_has_it(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Under autocast a linear layer takes everything in the type it says; so does the head."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_targets(op: str, head: LinearHead, backend: str) -> None:
    """Looks at data: where that does not wait, and is not traced. A GPU's kernels give NaN for such a row."""
    targets, columns = head.targets, head.weight.shape[0]
    if targets.device.type != "cpu" or backend not in ("cpu", "reference") or torch.compiler.is_compiling():
        return
    is_wrong = ((targets < 0) | (targets >= columns)) & (targets != IGNORED)
    if bool(is_wrong.any()):
        row = int(is_wrong.flatten().int().argmax())
        raise RuntimeError(
            f"{op}: targets must be in [0, {columns}) or {IGNORED}, got {int(targets.flatten()[row])} in row {row}"
        )


def check_chunk_size(op: str, chunk_size: object) -> int | None:
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"{op}: chunk_size must be a number of rows, got {type(chunk_size).__name__} {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, got {chunk_size}")
    return chunk_size


def check_positions(op: str, positions: object, targets: Tensor) -> Tensor | None:
    """Places in the flat targets, ascending. Of a mask, finding them waits for a GPU, once."""
    if positions is None:
        return None
    given = checks.tensor(op, "positions", positions, (torch.bool, *checks.INTEGERS))
    checks.same_device(op, "positions", given, targets.device)
    if given.dtype == torch.bool:
        if given.shape != targets.shape:
            raise ValueError(
                f"{op}: positions must as a mask have the shape of targets, {list(targets.shape)}, "
                f"got {list(given.shape)}"
            )
        return given.reshape(-1).nonzero().squeeze(1)
    if given.dim() != 1:
        raise ValueError(f"{op}: positions must be a mask or have shape [P], got {list(given.shape)}")
    if given.device.type == "cpu" and given.numel() > 0 and not torch.compiler.is_compiling():
        ordered = given.long().sort().values
        if int(ordered[0]) < 0 or int(ordered[-1]) >= targets.numel() or bool((ordered.diff() == 0).any()):
            raise ValueError(
                f"{op}: positions must be different places in [0, {targets.numel()}), got values from "
                f"{int(ordered[0])} to {int(ordered[-1])}, {int((ordered.diff() == 0).sum())} of them again"
            )
    return given.long()
