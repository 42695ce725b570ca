"""Terms of a distillation in Triton."""

# without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _log(x):
    """-inf for 0, without a warning of the interpreter."""
    return tl.where(x != 0, tl.log(tl.where(x != 0, x, 1.0)), -float("inf"))


@triton.jit
def _logsumexp(values):
    top = tl.max(values, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    return _log(tl.sum(tl.exp(values - top), 0)) + top


@triton.jit
def _logaddexp(a, b):
    top = tl.maximum(a, b)
    top = tl.where(top == -float("inf"), 0.0, top)
    return _log(tl.exp(a - top) + tl.exp(b - top)) + top


@triton.jit
def _part_and_slope(log_p, log_q, beta, KIND: tl.constexpr):
    """The part of a category in the divergence, and the derivative by the student's log-probability; 0 without it."""
    exists, has_any = log_p != -float("inf"), log_q != -float("inf")
    log_p, finite = tl.where(exists, log_p, 0.0), tl.where(has_any & exists, log_q, 0.0)
    p, q = tl.exp(log_p), tl.where(has_any | ~exists, tl.exp(finite), 0.0)
    if KIND == "forward_kl":
        part, slope = p * (log_p - tl.where(exists, log_q, 0.0)), -p
    elif KIND == "reverse_kl":
        part, slope = q * (finite - log_p), q * (finite - log_p + 1)
    else:
        log_m = _logaddexp(log_p + tl.log(beta), tl.where(exists, log_q, 0.0) + tl.log(1 - beta))
        slope = (1 - beta) * q * (finite - log_m)
        part = beta * p * (log_p - log_m) + slope
    return tl.where(exists, part, 0.0), tl.where(exists, slope, 0.0)


@triton.jit
def _terms_kernel(
    others_ptr,
    scaled_ptr,
    ids_ptr,
    teacher_logprobs_ptr,
    shares_ptr,
    values_ptr,
    mass_ptr,
    by_rest_ptr,
    by_id_ptr,
    beta: "fp64",
    count: "i32",
    stride: "i64",
    KIND: tl.constexpr,
    TAIL: tl.constexpr,
    LEAST_REST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The formulas of divergence.py for one token."""
    token = tl.program_id(0).to(tl.int64)
    id = tl.arange(0, COUNT)
    inside = id < count
    share = tl.load(shares_ptr + token)
    others = tl.load(others_ptr + token).to(tl.float64)
    scaled = tl.load(scaled_ptr + token * stride + id, mask=inside, other=-float("inf"))
    is_used = tl.load(ids_ptr + token * count + id, mask=inside, other=-1) >= 0
    log_p = tl.load(teacher_logprobs_ptr + token * count + id, mask=is_used, other=-float("inf"))

    among = _logsumexp(scaled)
    total = _logaddexp(among, others)
    log_rest = others - total
    if TAIL == "renormalise":
        has_any = among != -float("inf")
        log_p -= tl.where(has_any, _logsumexp(log_p), 0.0)
        log_q = scaled - tl.where(has_any, among, 0.0)
    else:
        log_q = scaled - total
    parts, slopes = _part_and_slope(log_p, log_q, beta, KIND)
    value, sum = tl.sum(parts, 0), tl.sum(slopes, 0)
    has_rest = others != -float("inf")
    by_rest = 0.0
    if TAIL == "bucket":
        left = tl.log(tl.maximum(1 - tl.exp(_logsumexp(log_p)), LEAST_REST))
        part, by_rest = _part_and_slope(
            tl.where(has_rest, left, -float("inf")), tl.where(has_rest, log_rest, -float("inf")), beta, KIND
        )
        value, sum = value + part, sum + by_rest
    if TAIL != "renormalise":
        by_rest = tl.where(has_rest, share * (sum * tl.exp(log_rest) - by_rest), 0.0)
    by_id = share * (slopes - sum * tl.exp(log_q))
    counts = share != 0
    tl.store(values_ptr + token, tl.where(counts, value, 0.0))
    tl.store(mass_ptr + token, tl.where(counts, tl.exp(among - total), 0.0))
    tl.store(by_rest_ptr + token, tl.where(counts, by_rest, 0.0))
    tl.store(by_id_ptr + token * count + id, tl.where(counts, by_id, 0.0), mask=inside)


def terms(
    others: Tensor,
    scaled: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    shares: Tensor,
    kind: str,
    tail: str,
    beta: float,
    least_rest: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergence and mass of each token, and gradients: of the rest as of minus a log-prob, and of ids' scaled logits.

    One kernel in place of some 80 of torch's for each chunk, which the host could not launch in time.
    """
    count, scaled = ids.shape[1], scaled.contiguous()
    values, mass, by_rest = (torch.empty_like(shares) for _ in range(3))
    by_id = torch.empty_like(teacher_logprobs)
    inputs, results = (others.contiguous(), scaled, ids, teacher_logprobs, shares), (values, mass, by_rest, by_id)
    width = triton.next_power_of_2(count)
    constants, warps = (kind, tail, least_rest, width), min(8, max(1, width // 128))
    if len(shares) > 0:
        _terms_kernel[(len(shares),)](*inputs, *results, beta, count, scaled.stride(0), *constants, num_warps=warps)
    return results
