"""Argument checks with one wording: "<op>: <argument> must be <rule>, got <value>".

Tensor checks look at type, shape, dtype and device only, never at data, so that nothing waits for a GPU and
torch.compile can trace them.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GROUP_IDS = "gk.group_ids(...) makes the tensor from a name for each row"


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(op: str, name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A local tensor of one of these dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}{_as_tensor(name, value)}")
    if type(value) is not Tensor and type(value).__name__ == "DTensor":  # whose import takes a second
        raise TypeError(f"{op}: {name} must be a tensor of this rank, got DTensor; use to_local() or full_tensor()")
    if value.dtype not in dtypes:
        way_out = "; .float() converts it" if torch.float32 in dtypes and value.dtype in (torch.bool, *INTEGERS) else ""
        raise TypeError(f"{op}: {name} must be of dtype {dtype_names(dtypes)}, got {value.dtype}{way_out}")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got {value.layout}")
    may_be_dual = value.is_floating_point() and not torch.compiler.is_compiling()
    if may_be_dual and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"{op}: {name} must not be differentiated in forward mode, got such a tensor; gradients come from "
            "backward() and torch.autograd.grad alone"
        )
    return value


def local(op: str, name: str, value: Any) -> Any:
    """This rank's tensor of a DTensor that every rank has whole; anything else than a DTensor as it is."""
    if type(value).__name__ != "DTensor":
        return value
    sizes = value.device_mesh.shape
    if any(size > 1 and not one.is_replicate() for size, one in zip(sizes, value.placements, strict=True)):
        raise ValueError(
            f"{op}: {name} must be whole on every rank, got a DTensor with placements {value.placements}; "
            f"{name}.full_tensor(grad_placements=[Partial()]) gathers it, with the sum of the ranks' gradients"
        )
    return value.to_local()


def _as_tensor(name: str, value: object) -> str:
    """How a value becomes the tensor that it stands for, as the end of an error."""
    fields = getattr(value, "_fields", ())  # of a result of ours: is_weights are its weights, segments its segment_ids
    stem = name.rpartition("_")[2].removesuffix("s")
    meant = (field for field in fields if stem in field or field.partition("_")[0] in name)
    if own := next(meant, fields[0] if fields else None):
        return f"; pass its .{own}"
    if isinstance(value, list | tuple) or type(value).__name__ == "ndarray":
        return "; torch.as_tensor(...) converts it"
    has_weight = isinstance(value, torch.nn.Module) and isinstance(getattr(value, "weight", None), Tensor)
    return "; use its .weight" if has_weight else ""


def same_device(op: str, name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like the first argument, got {value.device}")


def shaped(
    op: str,
    name: str,
    value: object,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    shape: Sequence[int],
    of: str = "",
) -> Tensor:
    """A tensor of this shape, which is that `of` another argument, where that is said."""
    checked = tensor(op, name, value, dtypes)
    if checked.shape != tuple(shape):
        rule = f"the shape of {of}, {list(shape)}" if of else f"shape {list(shape)}"
        raise ValueError(f"{op}: {name} must have {rule}, got {list(checked.shape)}")
    same_device(op, name, checked, device)
    return checked


def per_row(op: str, name: str, value: object, dtypes: tuple[torch.dtype, ...], like: Tensor) -> Tensor:
    """A tensor with one element for each row of `like`, on the same device."""
    if (
        not isinstance(value, Tensor)
        and dtypes is INTEGERS
        and isinstance(value, Iterable)
        and not isinstance(value, str)
    ):
        way_out = _as_tensor(name, value) if hasattr(value, "_fields") else f"; {_GROUP_IDS}"
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}{way_out}")
    checked = tensor(op, name, value, dtypes)
    if checked.shape != like.shape[:1]:
        raise ValueError(
            f"{op}: {name} must have shape [{like.shape[0]}], one element per row, got {list(checked.shape)}"
        )
    same_device(op, name, checked, like.device)
    return checked


def integer(op: str, name: str, value: object, rule: str = "an int") -> int:
    """An int that is not a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be {rule}, got {type(value).__name__} {value!r}")
    return value


def keys(where: str, value: object) -> list[Hashable]:
    """A key for each row: of an iterable, or the elements of a tensor, which itself is equal to no other."""
    if isinstance(value, Tensor) and value.dim() == 1:
        return value.tolist()
    if isinstance(value, str | bytes | Tensor) or not isinstance(value, Iterable):
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"
        raise TypeError(f"{where}: keys must be an iterable with a key for each row, got {got}")
    listed = list(value)
    for row, key in enumerate(listed):
        if isinstance(key, Tensor):
            raise TypeError(f"{where}: keys must not be tensors, got {key!r} in row {row}; pass one tensor of all keys")
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"{where}: keys must be hashable, got {type(key).__name__} {key!r} in row {row}") from error
    return listed


def metric_rows(where: str, value: object, length: int) -> Tensor:
    """The tensors of several metrics as rows; `value` is that, or the metrics."""
    if isinstance(value, list | tuple) and value and all(isinstance(getattr(m, "tensor", None), Tensor) for m in value):
        value = torch.stack([m.tensor for m in value])
    if isinstance(value, Tensor) and value.dim() == 2 and len(value) > 0 and value.shape[1] == length:
        return value
    got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"
    raise ValueError(
        f"{where}: rows must be a list of metrics, or the tensor of each as a row [K, {length}], got {got}"
    )


def values(op: str, name: str, rule: str, is_wrong: Tensor, found: Tensor, way_out: str = "") -> None:
    """Refuses values: at once on the CPU, with the first and its place, and on a GPU when its stream gets there."""
    if not is_readable(is_wrong):
        torch._assert_async(~is_wrong.any(), f"{op}: {name} must {rule}{way_out}")
    elif bool(is_wrong.any()):
        place = is_wrong.nonzero()[0].tolist()
        raise ValueError(f"{op}: {name} must {rule}, got {found[tuple(place)].item()} at {place}{way_out}")


def is_readable(values: Tensor) -> bool:
    """Whether values can be looked at without a wait for a GPU or a break of torch.compile's graph."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def flags(op: str, name: str, value: Tensor) -> Tensor:
    """A mask as bools. One of floats holds 0 and 1 alone, as an additive mask has 0 where a token takes part."""
    if value.dtype == torch.bool:
        return value
    if value.is_floating_point():
        is_neither = (value != 0) & (value != 1)
        values(op, name, "hold 0 and 1 alone", is_neither, value, "; an additive mask? pass mask == 0")
    return value != 0


# Rounding, and log-probs that stand for the ratios of rollouts or for averages, may end above 0.
_LARGEST_LOGPROB = 0.01


def log_probs(op: str, name: str, value: Tensor, valid: Tensor | None) -> None:
    """Refuses on the CPU what cannot be log-probs: none is below 0, and of the tokens that take part one above."""
    if not is_readable(value) or value.numel() == 0 or bool((value.detach() < 0).any()):
        return
    counted = value.detach() if valid is None else torch.where(valid, value.detach(), 0)
    least, most = (float(end) for end in counted.nan_to_num(0.0).aminmax())
    if least >= 0 and most > _LARGEST_LOGPROB:
        raise ValueError(
            f"{op}: {name} must be log-probs, which are at most 0, got none below 0 and {most:.3g}; "
            f"a negative log-likelihood? pass -{name}; probabilities? pass {name}.log()"
        )


def no_token_left_out(op: str, cu_seqlens: Tensor, tokens: int, valid: Tensor | None) -> None:
    """Refuses on the CPU tokens after the last row that no mask leaves out."""
    if not is_readable(cu_seqlens):
        return
    last = int(cu_seqlens[-1])
    if 0 <= last < tokens and (valid is None or bool(valid[last:].any())):
        raise ValueError(
            f"{op}: cu_seqlens must end at the number of tokens, {tokens}, got {last}; "
            "padding after the last row needs a mask that is False there"
        )


def constant(op: str, name: str, value: Tensor) -> None:
    """A tensor whose gradient nobody waits for."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: {name} must not require grad, got requires_grad=True; it has no gradient here, pass {name}.detach()"
        )


def group_size(op: str, groups: object, rows: int, way_out: str | None = None) -> int:
    """The argument `groups` that is no tensor: the number of consecutive rows of each group."""
    rule = "an int, the size of each group, or an integer tensor of ids"
    if hasattr(groups, "_fields"):
        raise TypeError(f"{op}: groups must be {rule}, got {type(groups).__name__}{_as_tensor('groups', groups)}")
    try:
        size = integer(op, "groups", groups, rule)
    except TypeError as error:
        if isinstance(groups, Iterable) and not isinstance(groups, str):
            raise TypeError(f"{error}; {_GROUP_IDS}") from None
        raise
    if size < 1 or rows % size != 0:
        way_out = way_out or "pass a tensor of ids for groups of unequal size"
        raise ValueError(
            f"{op}: groups must be the size of each group and divide the number of rows, {rows}, got {size}; {way_out}"
        )
    return size


def config_or_name(where: str, name: str, value: object, kind: type) -> None:
    """Refuses what is neither a config of this class nor a string, which may name one."""
    if not isinstance(value, kind | str):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        way_out = f"; pass {kind.__name__}(**{name})" if isinstance(value, Mapping) else ""
        got = type(value).__name__
        raise TypeError(f"{where}: {name} must be {article} {kind.__name__} or a str, got {got}{way_out}")


def unknown(
    where: str,
    argument: str,
    value: object,
    allowed: Sequence[str] | dict[str, Any],
    meant: str | None = None,
) -> ValueError:
    """The error for a name that is not allowed, with what is meant by it if that is known, or the nearest that is."""
    hint = f"; {meant}" if meant else nearest(value, allowed)
    return ValueError(f"{where}: {argument} must be one of {', '.join(allowed)}, got {value!r}{hint}")


def nearest(value: object, allowed: Sequence[str] | dict[str, Any]) -> str:
    """A question that names the nearest allowed name, for the end of an error; empty if none is near."""
    by_lower = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1) if isinstance(value, str) else []
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def boolean(where: str, **flags: object) -> None:
    """Requires a bool of each of these arguments."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{where}: {name} must be a bool, got {type(value).__name__} {value!r}")


# Keywords that are looked for in a config that does not have them, and where they are.
ELSEWHERE = {
    "vllm_importance_sampling_cap": "TRL 1.16 calls it vllm_importance_sampling_clip_max",
    "tis_imp_ratio_cap": "verl 0.9.1 calls it rollout_is_threshold",
    "epsilon_low": "TRL calls it epsilon",
    "temperature": "it is an argument of the ops that take logits or hidden states",
    "kl_beta": "it is kl_coef",
    "epsilon": "in an AdvantageConfig it is eps",
    "scale_rewards": "TRL's advantages are AdvantageConfig('trl-group'), 'trl-batch' and 'trl-none'",
    "multi_objective_aggregation": "TRL's normalize_then_sum is AdvantageConfig('trl-gdpo')",
    "normalize_advantages": "TRL's advantages are AdvantageConfig('trl-rloo') and 'trl-rloo-normalized'",
    "adv_estimator": "verl's advantages are AdvantageConfig('verl-grpo') and so on",
    "norm_adv_by_std_in_grpo": "verl's advantages are AdvantageConfig('verl-grpo') and 'verl-dr-grpo'",
}


def with_defaults(where: str, fields: Any, defaults: dict[str, Any], unchecked: Sequence[str] = ()) -> dict[str, Any]:
    """A peer's defaults, replaced by the fields that are given, which must be of their kind or None.

    Args:
        where: function that errors name.
        fields: the fields that are given.
        defaults: all fields of the peer.
        unchecked: fields of other kinds than their default; the others whose default is None are numbers.
    """
    if not isinstance(fields, Mapping):
        raise TypeError(f"{where} must be a mapping of fields, got {type(fields).__name__} {fields!r}")
    for name, value in fields.items():
        if name not in defaults:
            raise unknown(where, "field", name, defaults, ELSEWHERE.get(name))
        default = defaults[name]
        if value is None or name in unchecked:
            continue
        if isinstance(default, bool):
            boolean(where, **{name: value})
        elif isinstance(default, str) and not isinstance(value, str):
            raise TypeError(f"{where}: {name} must be a str, got {type(value).__name__} {value!r}")
        elif isinstance(default, int | float | None) and (isinstance(value, bool) or not isinstance(value, Real)):
            raise TypeError(f"{where}: {name} must be a number, got {type(value).__name__} {value!r}")
    return defaults | dict(fields)


def peer_fields(defaults: dict[str, Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Gives a constructor that takes a peer's fields a signature with these, which help() shows."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
        fields = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=d) for name, d in defaults.items()]
        function.__signature__ = inspect.Signature([first, *fields])  # type: ignore[attr-defined]
        return function

    return decorate


def of_peer(config: type[T], peer: str, translate: Callable[..., dict[str, Any]], given: dict[str, Any]) -> T:
    """A config made from a peer's fields; errors name these, too.

    Args:
        config: its class.
        peer: its constructor for the peer.
        translate: makes the config's fields of the peer's.
        given: the peer's fields that are given.
    """
    fields = translate(**given)
    try:
        return config(**fields)
    except (TypeError, ValueError) as error:
        rule = str(error).removeprefix(f"{config.__name__}: ")
        own = rule.partition(" ")[0]
        made = fields.get(own, object())
        names = [name for name, value in given.items() if (value is made or value == made) and name != own]
        source = f"; {own} is made from {' and '.join(names)}" if names else ""
        raise type(error)(f"{config.__name__}.{peer}: {rule}{source}") from None


def instance(where: str, name: str, value: object, kind: type) -> None:
    """Requires None or an instance of a config; where a preset is named, the error shows how to get it."""
    if value is None or isinstance(value, kind):
        return
    way_out = ""
    makers = [make for make in (getattr(kind, "of", None), kind) if make is not None and isinstance(value, str)]
    for make in makers:
        with contextlib.suppress(TypeError, ValueError):  # others are made from mappings
            make(value)
            way_out = f"; {make.__qualname__}({value!r}) is one"
            break
    raise TypeError(f"{where}: {name} must be of {kind.__name__}, got {type(value).__name__} {value!r}{way_out}")


def choices(config: object, **allowed: Sequence[str]) -> None:
    """Requires each of these fields of a config to have one of its allowed values."""
    for field, names in allowed.items():
        if getattr(config, field) not in names:
            raise unknown(type(config).__name__, field, getattr(config, field), names)


def finite(where: str, argument: str, value: object, minimum: float | None = None, open_end: bool = False) -> None:
    """Requires a finite number of at least `minimum`, or above it with `open_end`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where}: {argument} must be a number, got {type(value).__name__} {value!r}")
    low_enough = minimum is None or value > minimum or (value == minimum and not open_end)
    # a comparison, since torch.compile of torch 2.11 cannot trace isfinite of a number that may change
    if not -math.inf < value < math.inf or not low_enough:
        rule = "" if minimum is None else f" {'above' if open_end else 'of at least'} {minimum:g}"
        raise ValueError(f"{where}: {argument} must be a finite number{rule}, got {value!r}")
