"""The fused path of verl's actor (`use_fused_kernels`), with log-probs and entropies from linear_logprobs.

verl gives a model's class a forward that ends in FusedLinearForPPO instead of logits. Ours calls that forward and takes
the place of its last step, so that the handling of images, labels and sequence parallelism remains verl's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.models.transformers import monkey_patch
from verl.utils.experimental import torch_functional
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

import grpo_kernels as gk
from grpo_kernels import checks
from grpo_kernels.integrations.sharded import dtype_of, gathered
from grpo_kernels.integrations.verl import squares

BACKEND = "grpo_kernels"  # value of fused_kernel_options.impl_backend
_WHERE = f"impl_backend={BACKEND!r}"
_THEIR_BACKENDS = ("torch", "triton", "liger")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_SCALING = "logits_scaling"
# parts of the names of a model's inputs beside text
_MEDIA = ("pixel", "image", "video", "audio", "input_features")
# Chameleon sets the logits of image tokens to the least number, which verl's fused path leaves out.
_UNSUPPORTED_MODELS = ("chameleon",)

_THEIR_PATCH: Callable[..., None] = monkey_patch.patch_forward_with_backends
_THEIR_HEAD: type = torch_functional.FusedLinearForPPO
# whether verl's own backends are replaced, too
replaced = {"backends": False}


class HeadOptions(NamedTuple):
    """Parts of a model's head beyond its product. verl's own backends leave all of them out."""

    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    units: tuple[torch.nn.Module, ...] = ()  # the head and its model, which FSDP2 may shard


# Options of the model whose forward is running; None in a direct call of FusedLinearForPPO.
_OPTIONS: ContextVar[HeadOptions | None] = ContextVar("grpo_kernels_verl_head", default=None)


class FusedLinearForPPO(_THEIR_HEAD):  # type: ignore[misc]
    """verl's class, with the further impl_backend 'grpo_kernels'."""

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch") -> None:
        is_ours = impl_backend == BACKEND
        sizes = {} if chunk_size is None else {"chunk_size": chunk_size}
        super().__init__(**sizes, impl_backend="torch" if is_ours else impl_backend)
        self.impl_backend, self._rows_per_chunk = impl_backend, chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies in the shape of input_ids, float32 for half inputs."""
        if self.impl_backend != BACKEND:
            theirs: tuple[Tensor, Tensor] = super().forward(hidden_states, vocab_weights, input_ids, temperature)
            return theirs
        options = _OPTIONS.get() or HeadOptions(None, None, 1.0)
        dtype = dtype_of(hidden_states)
        weight, bias = (
            gathered(_WHERE, value, options.units, hidden_states.device, dtype)
            for value in (vocab_weights, options.bias)
        )
        logprobs, entropy, sums = gk.linear_logprobs(
            hidden_states,
            gk.LMHead(weight, bias, softcap=options.softcap, logit_scale=options.logit_scale),
            input_ids,
            temperature=temperature,
            return_entropy=True,
            return_sum_pi_squared=squares.are_wanted(),
            chunk_size=self._rows_per_chunk,
        )
        assert entropy is not None
        squares.put(sums)
        return logprobs, entropy


def patch_forward_with_backends(
    model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """Replaces verl's function, which skips unknown backends with a printed line."""
    is_ours = fused_kernels_backend == BACKEND or (replaced["backends"] and fused_kernels_backend in _THEIR_BACKENDS)
    if not (use_fused_kernels and is_ours):
        _THEIR_PATCH(model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend)
        return
    _check_model(model)
    head_options(model)
    _THEIR_PATCH(model, use_fused_kernels=True, fused_kernels_backend="torch")
    model._verl_fused_kernels_backend = BACKEND
    type(model).forward = _with_options(type(model).forward)


def head_options(model: Any) -> HeadOptions:
    """Bias, softcap and scale of a model's logits, by the names that transformers' configurations have for them."""
    config = model.config.get_text_config()
    settings: dict[str, float] = {}
    for name in (*_SOFTCAPS, *_SCALES, _SCALING):
        value = getattr(config, name, None)
        if value is not None:
            checks.finite(_WHERE, f"config.{name}", value)
            settings[name] = float(value)
    scale = next((settings[name] for name in _SCALES if name in settings), 1.0)
    if _SCALING in settings and not settings.keys() & set(_SCALES):
        is_factor = config.model_type == "hyperclovax"  # in Granite it is a divisor
        scale = settings[_SCALING] if is_factor else 1 / settings[_SCALING]
    softcap = next((settings[c] for c in _SOFTCAPS if c in settings), None)
    return HeadOptions(model.lm_head.bias, softcap, scale, (model.lm_head, model))


def register() -> None:
    """Makes the backend known to verl. Does nothing if it is."""
    torch_functional.FusedLinearForPPO = FusedLinearForPPO
    monkey_patch.patch_forward_with_backends = patch_forward_with_backends


def _with_options(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_options(self: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(self, "_verl_fused_kernels_backend", None) != BACKEND:  # another model of this class
            return forward(self, *arguments, **options)
        if get_ulysses_sequence_parallel_world_size() > 1 and options.get("shift_labels") is None:
            raise ValueError(
                f"{_WHERE}: shift_labels must be given with Ulysses sequence parallelism, as a rank "
                "does not hold the token after its last one, got None"
            )
        _check_inputs(forward, options)
        _check_head(self)
        token = _OPTIONS.set(head_options(self))
        module = sys.modules[forward.__module__]
        theirs = vars(module).get("DTensor")
        if theirs is not None:
            module.DTensor = _Never  # type: ignore[attr-defined]
        try:
            return forward(self, *arguments, **options)
        finally:
            _OPTIONS.reset(token)
            if theirs is not None:
                module.DTensor = theirs  # type: ignore[attr-defined]

    return with_options


def _check_inputs(forward: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuses what verl's forward of text models takes and does not read."""
    if not forward.__module__.endswith("dense_common"):
        return
    for name, value in options.items():
        if value is not None and any(part in name for part in _MEDIA):
            raise ValueError(
                f"{_WHERE}: the model's inputs must be text, got {name!r}, which verl's fused forward of this "
                "model_type ignores; set use_fused_kernels=False"
            )


class _Never:
    """Stands for DTensor in verl's forwards, so that they hand over a sharded weight, which is gathered here.

    Their full_tensor() would keep each rank's part of its own gradient, and lose those of the other ranks.
    """


def _check_model(model: Any) -> None:
    kind = model.config.get_text_config().model_type
    if kind in _UNSUPPORTED_MODELS or model.config.model_type in _UNSUPPORTED_MODELS:
        raise ValueError(
            f"{_WHERE}: model_type must not be {kind!r}, whose logits are changed after the head; set "
            "use_fused_kernels=False"
        )
    _check_head(model)


def _check_head(model: Any) -> None:
    """Refuses heads that compute more than a product with `weight`, whose rest would be left out."""
    head = getattr(model, "lm_head", None)
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"{_WHERE}: lm_head must be a torch.nn.Linear, got {type(head).__name__}; leave lm_head "
            "out of LoRA's target_modules, or set use_fused_kernels=False"
        )
