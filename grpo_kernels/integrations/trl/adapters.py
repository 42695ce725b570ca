"""The model whose forward pass ends in TRL's fused head, and PEFT's adapters on that head.

TRL's trainers refuse such adapters because they read the weight of the head alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import trl.trainer.utils as host
from torch import Tensor, nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.import_utils import is_peft_available

if is_peft_available():
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

# A [r, H], B [V, r], and the scale of their product
Adapter = tuple[Tensor, Tensor, float]

_ADD, _TUNER = "add_fused_lm_head", "BaseTunerLayer"
_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto")
_originals: dict[str, Any] = {}


class Call(NamedTuple):
    """A forward pass that is under way.

    Attributes:
        units: the head and its model, which FSDP2 may shard
        adapter: A, B and scale of the adapter on the head, or None if its weight is all there is
    """

    units: tuple[nn.Module, ...] = ()
    adapter: Adapter | None = None


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def patch() -> None:
    """Lets the trainers with a fused head accept an adapter, and `current` know the model of a forward pass."""
    if _originals:
        return
    _originals[_ADD] = getattr(host, _ADD)
    if is_peft_available():
        for trainer in _TRAINERS:  # TRL imports them when they are used, and then they would take PEFT's type
            with contextlib.suppress(ImportError):
                importlib.import_module(f"trl.trainer.{trainer}_trainer")
        _originals[_TUNER] = BaseTunerLayer
    _replace(_originals[_ADD], _add_fused_lm_head, _Refused)


def unpatch() -> None:
    """Restores TRL; models that were prepared in the meantime refuse their adapters from now on."""
    if _originals:
        _replace(_add_fused_lm_head, _originals[_ADD], _originals.get(_TUNER))
        _originals.clear()


def _replace(old: Any, new: Any, tuner: type | None) -> None:
    """In every module of TRL that prepares a fused head."""
    for path in [path for path in sys.modules if path.split(".")[0] == "trl"]:
        module = sys.modules[path]
        if vars(module).get(_ADD) is old:
            setattr(module, _ADD, new)
            if _TUNER in _originals and _TUNER in vars(module):
                setattr(module, _TUNER, tuner)


def current() -> Call:
    """The forward pass that calls the fused head; without units in a model that was prepared before the patch."""
    return _current.get() or Call()


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """The weight that the head multiplies by."""
    a, b, scale = adapter
    return weight + (scale * b @ a).to(weight.dtype)


def of_dtype(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The adapter for hidden states of this dtype: the same, or float32."""
    a, b, scale = adapter
    wanted = dtype if a.dtype == b.dtype == dtype else torch.promote_types(dtype, torch.float32)
    return a.to(wanted), b.to(wanted), scale


def _is_tuner(head: nn.Module) -> bool:
    return is_peft_available() and isinstance(head, BaseTunerLayer)


def _adapter_of(head: nn.Module) -> Adapter | None:
    if not is_peft_available():
        return None
    _refuse(head)
    if not isinstance(head, LoraLinear) or head.disable_adapters or head.merged:
        return None
    names = _active(head)
    if not names:
        return None
    (name,) = names
    a: Any = head.lora_A[name]
    b: Any = head.lora_B[name]
    return a.weight, b.weight, float(head.scaling[name])


def _active(head: Any) -> list[str]:
    return [name for name in head.active_adapters if name in head.lora_A]


def _refuse(head: Any, is_running: bool = True) -> None:
    reason = _refusal(head, is_running)
    if reason:
        raise ValueError(f"patch_trl: {reason}, which the fused head does not compute; got {type(head).__name__}")


def _refusal(head: Any, is_running: bool) -> str:
    """Why this head is not a matrix product with at most one adapter of LoRA; empty if it is.

    A trainer's disable_dropout holds only once the model runs.
    """
    if isinstance(head, AuxiliaryTrainingWrapper) and not isinstance(head, ModulesToSaveWrapper):
        return "the LM head must not train single tokens"
    if not isinstance(head, BaseTunerLayer):
        return ""
    if not isinstance(head, LoraLinear):
        return "an adapter on the LM head must be LoRA's"
    if head.disable_adapters or head.merged:
        return ""
    names = _active(head)
    if len(names) > 1:
        return f"one adapter may be active on the LM head, not {names}"
    for name in names:
        if name in head.lora_variant:
            return f"the adapter {name!r} of the LM head must be plain LoRA, without DoRA or another variant"
        if head.lora_B[name].bias is not None or head.fan_in_fan_out:
            return f"the adapter {name!r} of the LM head must have no bias and no transposed weight"
        if is_running and head.training and getattr(head.lora_dropout[name], "p", 0) > 0:
            return f"the adapter {name!r} of the LM head must have lora_dropout=0"
    return ""


class _RefusedType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        _refuse(instance, is_running=False)  # with the reason, which TRL's own error does not have
        return False


class _Refused(metaclass=_RefusedType):
    """Stands for BaseTunerLayer in TRL's trainers, which refuse heads of that type."""


def _add_fused_lm_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: Sequence[str] = ("log_probs",)
) -> None:
    head = model.get_output_embeddings()
    if cast_lm_head_to_fp32 and _is_tuner(head):
        raise ValueError("patch_trl: cast_lm_head_to_fp32 must be False with an adapter on the LM head, got True")
    if is_deepspeed_zero3_enabled() and _is_tuner(head):  # type: ignore[no-untyped-call]
        raise ValueError("patch_trl: the LM head must have no adapter under ZeRO-3, got one; only its weight is here")
    _originals[_ADD](model, temperature, cast_lm_head_to_fp32, outputs)
    fused = model.forward.__func__

    @functools.wraps(fused)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(self, *args, **kwargs)
        head = self.get_output_embeddings()
        if not _originals and _is_tuner(head):
            raise RuntimeError("unpatch_trl: the LM head must have no adapter after it, as TRL would ignore it")
        token = _current.set(Call((head, self), _adapter_of(head)))
        try:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        finally:
            _current.reset(token)

    model.forward = types.MethodType(forward, model)
