"""The gradient of the forward pass times the upstream gradient of the loss.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def scale_kernel(gradient_ptr, upstream_ptr, count, BLOCK: tl.constexpr):
    upstream = tl.load(upstream_ptr)
    if upstream != 1:  # else nothing is read
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        gradient = tl.load(gradient_ptr + at, mask=at < count)
        scaled = gradient.to(upstream.dtype) * upstream
        tl.store(gradient_ptr + at, scaled.to(gradient.dtype), mask=at < count)


def scale_gradient(gradient: Tensor, upstream: Tensor) -> None:
    count = gradient.numel()
    if count > 0:
        scale_kernel[(triton.cdiv(count, BLOCK),)](gradient, upstream, count, BLOCK=BLOCK)
