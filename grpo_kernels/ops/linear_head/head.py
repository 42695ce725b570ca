"""The LM head: LMHead as users make it, its checked form with the tokens it is applied to, and a split vocabulary."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.sizes import tokens_per_chunk
from grpo_kernels.ops.token_logprobs.config import IGNORED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Fields of Head with a gradient, which come first.
FACTORS = ("hidden", "weight", "bias", "lora_a", "lora_b")
NO_COLUMN = 2**62  # an id that no rank has
_NOT_HERE = 1.0  # marks a target of another rank; a log-prob is at most 0
_WHERE = "LMHead"
_OWNED = "must be columns of exactly one rank each"


@dataclasses.dataclass(frozen=True, eq=False)
class LMHead:
    """The last layer of a language model: logits = logit_scale * (hidden @ weight.T + bias), with options.

    The ops take a weight tensor wherever they take a head without options. Tensors keep their gradients, and a head
    whose tensors stay in place can be used for many steps.

    Args:
        weight: [V, H]. A DTensor must be whole on every rank
        bias: [V], of the same dtype
        lora: (A [r, H], B [V, r], scale) of an adapter. It adds scale * (hidden @ A.T) @ B.T to the logits and is never
            merged into the weight. A and B are float32 or of the dtype of the weight. Not with a support
        softcap: positive number; logits become softcap * tanh(x / softcap)
        logit_scale: positive number
        banned: ids that have probability 0, in the log-probs, entropies and gradients: integers [K], or a bool mask
            [V], which waits for a GPU once. A target that counts must not be one of them
        vocab_start: first column that this rank holds, if the rows of weight, bias and B are split over process_group.
            Targets and banned ids count over all columns. All ranks must agree on which tensors need a gradient
        process_group: ranks that hold the other columns; None means all ranks
    """

    weight: Tensor
    bias: Tensor | None = None
    _: dataclasses.KW_ONLY
    lora: tuple[Tensor, Tensor, float] | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    banned: Tensor | None = None
    vocab_start: int | None = None
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        weight = checks.tensor(_WHERE, "weight", checks.local(_WHERE, "weight", self.weight), checks.FLOATS)
        if weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"{_WHERE}: weight must have shape [V, H] with V, H > 0, got {list(weight.shape)}")
        values: dict[str, Any] = {"weight": weight, "bias": _check_bias(self.bias, weight)}
        values["lora"] = _check_lora(self.lora, weight)
        if self.softcap is not None:
            values["softcap"] = _positive("softcap", self.softcap)
        values["logit_scale"] = _positive("logit_scale", self.logit_scale)
        _check_split(self.vocab_start, self.process_group)
        values["banned"] = _check_banned(self.banned, weight, self.vocab_start is not None)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, op: str, name: str, head: object) -> LMHead:
        """The argument `name` of an op: an LMHead, or the weight of one without options."""
        if isinstance(head, LMHead):
            return head
        if isinstance(head, Tensor):
            return cls(head)
        has_weight = isinstance(head, torch.nn.Module) and isinstance(getattr(head, "weight", None), Tensor)
        way_out = "; gk.LMHead(module.weight, module.bias) is one" if has_weight else ""
        got = type(head).__name__
        raise TypeError(f"{op}: {name} must be an LMHead or its weight, a tensor, got {got}{way_out}")


def _positive(name: str, value: object) -> float:
    checks.finite(_WHERE, name, value, minimum=0.0, open_end=True)
    assert isinstance(value, int | float)
    return float(value)


def _check_bias(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    if bias is None:
        return None
    bias = checks.local(_WHERE, "bias", bias)
    return checks.shaped(_WHERE, "bias", bias, (weight.dtype,), weight.device, weight.shape[:1])


def _check_lora(lora: object, weight: Tensor) -> tuple[Tensor, Tensor, float] | None:
    if lora is None:
        return None
    if not isinstance(lora, (tuple, list)) or len(lora) != 3:
        size = f" of {len(lora)}" if isinstance(lora, (tuple, list)) else ""
        raise TypeError(
            f"{_WHERE}: lora must be a tuple of A [r, H], B [V, r] and a scale, got {type(lora).__name__}{size}"
        )
    a, b, scale = (checks.local(_WHERE, "lora", value) for value in lora)
    checks.finite(_WHERE, "the scale of lora", scale)
    dtypes = tuple({weight.dtype: 0, torch.promote_types(weight.dtype, torch.float32): 0})
    a = checks.tensor(_WHERE, "A of lora", a, dtypes)
    columns, width = weight.shape
    if a.dim() != 2 or a.shape[1] != width or len(a) == 0:
        raise ValueError(f"{_WHERE}: A of lora must have shape [r, {width}] with r > 0, got {list(a.shape)}")
    checks.same_device(_WHERE, "A of lora", a, weight.device)
    checks.shaped(_WHERE, "B of lora", b, (a.dtype,), weight.device, (columns, len(a)))
    return a, b, float(scale)


def _check_split(start: object, group: object) -> None:
    if start is None:
        if group is not None:
            raise ValueError(f"{_WHERE}: vocab_start must be given with process_group, got None")
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{_WHERE}: vocab_start must be None under torch.compile, got {start}")
    if checks.integer(_WHERE, "vocab_start", start) < 0:
        raise ValueError(f"{_WHERE}: vocab_start must be at least 0, got {start}")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{_WHERE}: vocab_start must be None unless torch.distributed is initialised, as the columns are those of "
            f"one of its ranks, got {start!r}"
        )


def _check_banned(banned: Any, weight: Tensor, is_split: bool) -> Tensor | None:
    """Ids in ascending order."""
    if banned is None:
        return None
    # no uint8, which other arguments take as a mask
    checks.tensor(_WHERE, "banned", banned, (torch.bool, torch.int64, torch.int32))
    checks.same_device(_WHERE, "banned", banned, weight.device)
    if banned.dtype == torch.bool:
        if is_split:
            raise TypeError(f"{_WHERE}: banned must be ids with vocab_start, which count over all ranks, got a mask")
        checks.shaped(_WHERE, "banned", banned, (torch.bool,), weight.device, weight.shape[:1])
        ids: Tensor = banned.nonzero().squeeze(1)
    elif banned.dim() != 1:
        raise ValueError(f"{_WHERE}: banned must be ids [K] or a mask [V], got shape {list(banned.shape)}")
    else:
        ids = banned.long().sort().values
    if len(ids) == 0:
        return None
    columns = None if is_split else len(weight)
    is_wrong = (ids < 0) if columns is None else (ids < 0) | (ids >= columns)
    checks.values(
        _WHERE, "banned", "be ids of at least 0" if columns is None else f"be in [0, {columns})", is_wrong, ids
    )
    if columns is not None and len(ids) >= columns:
        is_all = (ids.diff() != 0).sum() + 1 >= columns
        checks.values(_WHERE, "banned", f"leave one of {columns} ids", is_all[None], (ids[-1:] + 1))
    return ids


@op_inputs
class Head:
    """Checked arguments of the head's ops: tokens [N, H] with targets [N], weight [V, H], bias [V].

    An adapter A = lora_a [r, H], B = lora_b [V, r] adds lora_scale (x A^T) B^T to the logits. `banned` are ascending
    columns of this rank; the column after the last stands for those of others.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    targets: Tensor
    row_temperature: Tensor | None
    banned: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float
    lora_scale: float

    @property
    def wide(self) -> torch.dtype:
        """dtype of logits, log-probs and accumulated gradients."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def scaling(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.logit_scale

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, self.weight, self.bias, self.lora_a, self.lora_b

    @property
    def lora(self) -> tuple[Tensor, Tensor, float] | None:
        return None if self.lora_a is None or self.lora_b is None else (self.lora_a, self.lora_b, self.lora_scale)

    @property
    def needs_grad(self) -> list[bool]:
        return [value is not None and value.requires_grad for value in self.factors]

    def with_factors(self, *factors: Tensor | None) -> Head:
        """The same head with other tensors for those with a gradient."""
        hidden, weight, bias, lora_a, lora_b = factors
        assert hidden is not None and weight is not None
        return dataclasses.replace(self, hidden=hidden, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b)

    def without(self, is_ignored: Tensor) -> Head:
        """Replaces numbers of ignored tokens, because NaN there times a gradient of 0 would be NaN."""
        temperature = None if self.row_temperature is None else torch.where(is_ignored, 1, self.row_temperature)
        hidden = torch.where(is_ignored[:, None], 0, self.hidden)
        return dataclasses.replace(self, hidden=hidden, row_temperature=temperature)

    def at(self, tokens: Tensor) -> Head:
        """Only these tokens."""
        temperature = None if self.row_temperature is None else self.row_temperature[tokens]
        return dataclasses.replace(
            self, hidden=self.hidden[tokens], targets=self.targets[tokens], row_temperature=temperature
        )

    def only(self, tokens: Tensor) -> Head:
        """The same head for all tokens, of which the others are ignored."""
        targets = torch.full_like(self.targets, IGNORED).index_copy(0, tokens, self.targets[tokens])
        return dataclasses.replace(self, targets=targets)

    def at_half_temperature(self) -> Head:
        row_temperature = None if self.row_temperature is None else self.row_temperature / 2
        return dataclasses.replace(self, row_temperature=row_temperature, temperature=self.temperature / 2)

    def for_targets_of(self, head: Head) -> Head:
        """The same head for the targets of another one, of the same columns."""
        return dataclasses.replace(self, targets=head.targets, row_temperature=head.row_temperature)


def head_of(lm_head: LMHead, hidden: Tensor, weight: Tensor, bias: Tensor | None, **of_tokens: Any) -> Head:
    """The head on checked tokens [N, H], with weight and bias as autocast has them."""
    a, b, scale = lm_head.lora or (None, None, 1.0)
    return Head(
        hidden,
        weight,
        bias,
        a,
        b,
        banned=lm_head.banned,
        softcap=lm_head.softcap,
        logit_scale=lm_head.logit_scale,
        lora_scale=scale,
        **of_tokens,
    )


class Want(NamedTuple):
    """Measurements beside log-probs."""

    entropy: bool
    sum_pi_squared: bool


NOTHING_MORE = Want(False, False)


class Measurements(NamedTuple):
    """Log-probs, entropies, sums of squared probabilities and log-sum-exps of tokens; empty unless wanted."""

    logprobs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor
    normalizer: Tensor

    @classmethod
    def zeros(cls, head: Head, want: Want, with_normalizer: bool) -> Measurements:
        """Memory for those of all tokens, 0 where a token will not be measured."""
        logprobs = head.hidden.new_zeros(head.hidden.shape[0], dtype=head.wide)
        entropy, squares = (torch.zeros_like(logprobs) if each else logprobs.new_empty(0) for each in want)
        normalizer = logprobs.new_zeros(logprobs.shape[0] if with_normalizer else 0, dtype=torch.float64)
        return cls(logprobs, entropy, squares, normalizer)

    def keep(self, others: Measurements, tokens: slice | Tensor) -> None:
        """Copies those of some tokens to their places, as far as they are wanted."""
        for values, of_tokens in zip(self, others, strict=True):
            if values.shape[0] > 0:
                values[tokens] = of_tokens.to(values.dtype)

    @property
    def wanted(self) -> list[Tensor]:
        """Entropies and sums of squares, as far as they are."""
        return [values for values in (self.entropy, self.sum_pi_squared) if len(values) > 0]

    def over_ranks(
        self, logprobs: Tensor, normalizers: Tensor, wanted: list[Tensor], is_ignored: Tensor
    ) -> Measurements:
        """These over the columns of all ranks, of which each has its log-sum-exps and what is wanted, [ranks, N]."""
        total = normalizers.logsumexp(0)
        has_any = normalizers != -torch.inf
        share = torch.where(has_any, torch.exp(normalizers - total), 0)

        def finish(value: Tensor) -> Tensor:
            return torch.where(is_ignored, 0, value).to(self.logprobs.dtype)

        entropy, squares = self.entropy, self.sum_pi_squared
        if len(squares) > 0:
            squares = finish(torch.where(share == 0, 0, share * share * wanted[-1]).sum(0))
        if len(entropy) > 0:
            entropy = finish(torch.where(share == 0, 0, share * (wanted[0] + (total - normalizers))).sum(0))
        return Measurements(finish(logprobs), entropy, squares, torch.where(is_ignored, 0, total))


def columns_of(ids: Tensor, columns: int) -> Tensor:
    """Ids as columns, of which the padding column after the last stands for all others."""
    return torch.where((ids >= 0) & (ids < columns), ids, columns)


class Shard(NamedTuple):
    """The columns `start`, `start` + 1, ... of the vocabulary, `columns` many, that this rank of a group holds."""

    op: str
    group: Any
    start: int
    columns: int

    def part(self, head: Head) -> Head:
        """The head whose targets and banned ids are columns here; those of other ranks are the padding column."""
        banned = None if head.banned is None else self.local(head.banned).sort().values
        return dataclasses.replace(head, targets=self.local(head.targets), banned=banned)

    def local(self, ids: Tensor) -> Tensor:
        """Ids as columns here; that of another rank, or of none, is the padding column after the last."""
        return torch.where(ids == IGNORED, IGNORED, columns_of(ids - self.start, self.columns))

    def tokens_per_chunk(self, tokens: int, like: Tensor) -> int:
        """By the largest part of any rank, as all must take part in the same all-reduces.

        It costs an all-reduce, and a wait, in every call: a rank that remembered the answer for its own part would skip
        the one that another rank, whose part has changed, still waits in.
        """
        largest = torch.tensor(self.columns, device=like.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return tokens_per_chunk(tokens, int(largest), like.device.type, like.dtype)

    def of_all_ranks(self, numbers: list[Tensor], of_owners: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Numbers of tokens as each rank has them, [ranks, N], and those that one rank has, [N, k], in one all-reduce.

        The former have a slot per rank in it, so that all ranks get the same bits. The latter are 0 on other ranks.
        """
        own = torch.stack([values.double() for values in numbers])
        once = own.new_zeros(own.shape[1], 0) if of_owners is None else of_owners.double()
        ranks = dist.get_world_size(self.group)
        sent = own.new_zeros(ranks * own.numel() + once.numel())
        slots, owned = sent[: ranks * own.numel()].view(ranks, *own.shape), sent[ranks * own.numel() :]
        slots[dist.get_rank(self.group)] = own
        owned.copy_(once.flatten())
        dist.all_reduce(sent, group=self.group)
        return list(slots.unbind(1)), owned.view(once.shape)

    def combine(self, results: Measurements, local: Tensor, ids: Tensor | None = None) -> Measurements:
        """Measurements over the columns of all ranks, in one all-reduce.

        `ids` tells how many ids of a support a token has here, and how many it should have on all ranks, [2, N].
        """
        is_ignored = local == IGNORED
        is_here = ~is_ignored & (local < self.columns)
        own = [results.normalizer, torch.where(is_here, results.logprobs, _NOT_HERE), *results.wanted]
        (normalizers, candidates, *more), _ = self.of_all_ranks(own if ids is None else [*own, ids[0]])
        is_owner = candidates != _NOT_HERE
        has_owner = self._has_owner(f"targets {_OWNED}, or {IGNORED}", is_owner.sum(0), 1, is_ignored)
        if ids is not None:
            rule = f"support.token_ids {_OWNED}"
            has_owner = has_owner & self._has_owner(rule, more.pop().sum(0), ids[1], is_ignored)
        of_owner = torch.where(is_owner, normalizers, 0).sum(0)
        # not the difference of two large numbers: exact where the target is nearly certain
        others = torch.where(is_owner, 0, torch.exp(normalizers - of_owner)).sum(0)
        of_target = torch.where(is_owner, candidates, 0).sum(0) - torch.log1p(others)
        of_target = torch.where(has_owner, of_target, torch.nan)
        return results.over_ranks(of_target, normalizers, more, is_ignored)

    def combine_rest(
        self, rest: Measurements, raw: Tensor, columns: Tensor, ids: Tensor, targets: Tensor
    ) -> tuple[Measurements, Tensor]:
        """Measurements of the rest over the columns of all ranks, and the logits kept apart, in one all-reduce.

        `ids` are those of the columns here, [tokens, k], negative for none.
        """
        is_here, is_ignored = columns < self.columns, targets == IGNORED
        own = [rest.normalizer, is_here.sum(1), *rest.wanted]
        (normalizers, counts, *more), raw = self.of_all_ranks(own, torch.where(is_here, raw, 0))
        rule = f"teacher.ids and targets {_OWNED}"
        has_owner = self._has_owner(rule, counts.sum(0), (ids >= 0).sum(1), is_ignored)
        raw = torch.where(ids < 0, -torch.inf, torch.where(has_owner[:, None], raw, torch.nan))
        return rest.over_ranks(rest.logprobs, normalizers, more, is_ignored), raw

    def _has_owner(self, rule: str, owners: Tensor, expected: Tensor | int, is_ignored: Tensor) -> Tensor:
        """Whether each token's ids are columns of one rank each. On a CPU it is an error if not."""
        has_owner = owners == expected
        if owners.device.type == "cpu" and not bool((has_owner | is_ignored).all()):
            raise RuntimeError(f"{self.op}: {rule}")
        return has_owner

    def complete(self, gradients: tuple[Tensor, ...], needs: list[bool]) -> None:
        """Adds up the gradients of factors that are whole on every rank, of which each rank has a part.

        All ranks must agree on which of them need a gradient, or they would wait for each other.
        """
        by_hidden, _, _, by_lora_a, _ = gradients
        needs_hidden, _, _, needs_lora_a, _ = needs
        if needs_hidden:
            dist.all_reduce(by_hidden, group=self.group)
        if needs_lora_a:
            dist.all_reduce(by_lora_a, group=self.group)
