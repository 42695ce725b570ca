"""calculate_sum_pi_squared with fused kernels, which verl refuses: our head measures it without the logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from verl.utils import tensordict_utils as tu

_NAME = "calculate_sum_pi_squared"
# Sums of squares that our head has put here during a step that asks for them, with packed_seq_params of Megatron.
_FOUND: ContextVar[list[tuple[Tensor, Any]] | None] = ContextVar("grpo_kernels_verl_squares", default=None)


def are_wanted() -> bool:
    return _FOUND.get() is not None


def put(squares: Tensor | None, packed: Any = None) -> None:
    found = _FOUND.get()
    if found is not None and squares is not None:
        found.append((squares, packed))


def take() -> tuple[Tensor, Any] | None:
    found = _FOUND.get()
    return found.pop() if found else None


@contextmanager
def _collected() -> Iterator[None]:
    token = _FOUND.set([])
    try:
        yield
    finally:
        _FOUND.reset(token)


def _asks(batch: Any, default: bool = False) -> bool:
    fused = tu.get_non_tensor_data(batch, key="use_fused_kernels", default=default)
    return bool(fused and tu.get_non_tensor_data(batch, key=_NAME, default=False))


def _changed(batch: Any, **values: Any) -> Any:
    changed = batch.copy()
    tu.assign_non_tensor(changed, **values)
    return changed


def of_fsdp_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_step(self: Any, micro_batch: Any, *arguments: Any, **options: Any) -> Any:
        if not _asks(micro_batch):
            return original(self, micro_batch, *arguments, **options)
        with _collected():
            return original(self, micro_batch, *arguments, **options)

    return forward_step


def of_fsdp_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has verl unpack the squares as the entropies that it unpacks alike."""

    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        found = take() if _asks(micro_batch) else None
        if found is None:  # a head that is not ours, of which verl says that it cannot
            return original(self, output, output_args, micro_batch, logits_processor_func)
        batch = _changed(micro_batch, **{_NAME: False})
        results = original(self, output, output_args, batch, logits_processor_func)
        batch = _changed(batch, calculate_entropy=True, distillation_use_topk=False)
        output.entropy = found[0]
        results["sum_pi_squared"] = original(self, output, output_args, batch, None)["entropy"]
        return results

    return prepare_model_outputs


def of_megatron_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_step(self: Any, batch_iter: Iterator[Any], *arguments: Any, **options: Any) -> Any:
        batch = next(batch_iter)
        if not _asks(batch, self.engine_config.use_fused_kernels):
            return original(self, iter([batch]), *arguments, **options)
        with _collected():
            return original(self, iter([_changed(batch, **{_NAME: False})]), *arguments, **options)

    return forward_step
