"""A small case of every CUDA kernel, its results compared with the reference backend's on the CPU.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tools.kernel_cases

Without a GPU tests/test_sanitizer.py runs the same cases on the host under AddressSanitizer, and
tests/test_kernel_cases.py checks that they launch the kernels they say and that no kernel of csrc is without one.
Never run on a GPU.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import grpo_kernels as gk

Put = Callable[[Tensor], Tensor]  # onto the device of the backend
Results = Iterator[Tensor]


class Case(NamedTuple):
    """kernels  which kernels of csrc/cuda/<source>.cu it launches, as source.kernel"""

    run: Callable[[str, Put], Results]
    kernels: set[str]


def advantages(backend: str, put: Put) -> Results:
    """Every config; sizes of a lane, a warp and a block a group; groups by number and by id."""
    for name in gk.AdvantageConfig.names():
        config = gk.AdvantageConfig(name)
        # 2,100 rows: a segment that a whole block works on
        for rows in (0, 1, 7, 40, 2100) if name in ("gdpo", "grpo_passk") else (7, 40):
            for groups in (7, torch.randint(-3, 4, (rows,)), torch.zeros(rows, dtype=torch.int64)):
                if isinstance(groups, int) and rows % groups:
                    continue
                more = {"lengths": put(torch.randint(0, 9, (rows,)))} if config.needs_lengths else {}
                if config.needs_baselines:
                    more["baselines"] = put(torch.randn(rows))
                if rows == 40:
                    more["subgroups"] = put(torch.randint(-1, 3, (rows,)))
                rewards = torch.randn(rows, 2) if config.combine == "normalize_then_sum" else torch.randn(rows)
                where = groups if isinstance(groups, int) else put(groups)
                yield from gk.group_advantages(put(rewards), where, config=name, backend=backend, **more)


def shrunk_advantages(backend: str, put: Put) -> Results:
    """Small clusters borrow from their group, whose statistics come first."""
    config = gk.AdvantageConfig("grpo", shrinkage=2.0)
    groups, clusters = put(torch.randint(0, 9, (500,))), put(torch.randint(-1, 3, (500,)))
    yield from gk.group_advantages(put(torch.randn(500)), groups, subgroups=clusters, config=config, backend=backend)


def large_advantages(backend: str, put: Put) -> Results:
    """More rows than one block takes."""
    yield from gk.group_advantages(put(torch.randn(65536 + 256)), 256, config="batch_std", backend=backend)


def logprobs(backend: str, put: Put) -> Results:
    shapes = ((1, torch.float32), (31, torch.bfloat16), (1041, torch.float16), (1041, torch.float32))
    for columns, dtype in shapes:
        for shift in (0, 1):  # rows at any address, and to the last byte of their memory
            logits = put(torch.randn(3 * columns + shift).to(dtype))[shift:].view(3, columns).requires_grad_()
            targets, cap = put(torch.tensor([0, -100, columns - 1])), 9.0 if shift else None
            found = gk.token_logprobs(logits, targets, softcap=cap, return_entropy=shift == 0, backend=backend)
            yield from (each for each in found if each is not None)
            total = found.logprobs.sum() if found.entropy is None else (found.logprobs + found.entropy).sum()
            yield torch.autograd.grad(total, logits)[0]
    logits = put(torch.randn(3, 1041)).requires_grad_()
    targets = put(torch.tensor([0, -100, 9]))
    in_place = gk.token_logprobs(logits * 1, targets, inplace_backward=True, backend=backend)
    yield torch.autograd.grad(in_place.logprobs.sum(), logits)[0]


def outside_logprobs(backend: str, put: Put) -> Results:
    """Targets that no column has, which the reference refuses: NaN, and nothing is read there."""
    if backend == "reference":
        yield from [torch.tensor([True, True])] * 2
        return
    logits = put(torch.randn(2, 7)).requires_grad_()
    found = gk.token_logprobs(logits, put(torch.tensor([7, -1])), backend=backend)
    yield found.logprobs.isnan()
    yield torch.autograd.grad(found.logprobs.sum(), logits)[0].isnan().any(1)


LOSSES = (  # each kernel's kinds of walk
    gk.LossConfig.trl(loss_type="dapo", beta=0.1),
    gk.LossConfig.trl(loss_type="grpo", importance_sampling_level="sequence", beta=0.1),
    gk.LossConfig(ratio="segment", kl="k3", kl_coef=0.1),
    gk.LossConfig.verl(loss_mode="geo_mean", use_kl_loss=True),
    gk.LossConfig.trl(loss_type="vespo", beta=0.1),
    gk.LossConfig(entropy_coef=0.01),
)


def losses(backend: str, put: Put) -> Results:
    """Every loss; rows padded and packed, longer than a task, without tokens."""
    lengths = [1500, 40, 0, 70]
    place = torch.cat([torch.arange(length) for length in lengths])  # in its row
    for config in LOSSES:
        for is_packed in (False, True):
            places = place if is_packed else torch.arange(70).expand(4, 70)
            bounds = put(torch.tensor([0, *lengths]).cumsum(0)) if is_packed else None
            yield from one_loss(config, places, 4, backend, put, cu_seqlens=bounds)


def many_losses(backend: str, put: Put) -> Results:
    """So many rows that their sums are added up in two steps."""
    yield from one_loss(
        gk.LossConfig.trl(loss_type="dapo"), torch.arange(2).expand(1100, 2), 1100, backend, put, normalizer=7.0
    )


def one_loss(config: gk.LossConfig, places: Tensor, rows: int, backend: str, put: Put, **options: Any) -> Results:
    shape = places.shape
    start = -torch.rand(shape)
    near = [put(start + 0.1 * torch.randn(shape)) for _ in range(2)]
    leaf, entropy = put(start).requires_grad_(), put(torch.rand(shape)) if config.entropy_coef else None
    segments = put(places.div(7, rounding_mode="floor").contiguous())
    found = gk.policy_loss(
        leaf, near[0], put(torch.randn(rows)), mask=put(torch.rand(shape) > 0.3), entropy=entropy,
        ref_logprobs=near[1] if config.kl != "none" else None,
        segments=segments if config.ratio == "segment" else None, config=config, backend=backend, **options,
    )  # fmt: skip
    yield found.loss.detach()
    yield found.metrics.tensor
    yield torch.autograd.grad(found.loss, leaf)[0]


def segments(backend: str, put: Put) -> Results:
    """With a critic and without; rows that are padded, and rows that are packed."""
    for norm in ("none", "batch", "prompt"):
        for has_critic in (False, True):
            shape, groups = (6, 70), put(torch.tensor([3, 0, 3, 3, 0, -1]))
            start = -torch.rand(shape)
            old, values = put(start + 0.1 * torch.randn(shape)), put(torch.randn(shape))
            yield from gk.endpoint_segments(
                put(torch.randn(shape)), put(start), old, put(torch.rand(shape) > 0.1),
                values=values if has_critic else None, groups=groups if norm == "prompt" or not has_critic else None,
                config={"norm": norm, "group_variance_threshold": 2.0}, backend=backend,
            )  # fmt: skip


WRONG_BOUNDS = ([0, 9000], [0, 40, 101], [9, 41, 60, 73], [-9, 50, 20, 900], [0, 2**63 - 1, -(2**63), 60], [5])


def outside_segments(backend: str, put: Put) -> Results:
    """Kernels run on whatever `cu_seqlens` holds before a GPU reports it, so the assertion is left out: no memory
    outside is touched. Nothing is promised of the results but their shape."""
    for bounds in ([0, 40, 40, 73], *WRONG_BOUNDS):
        if backend == "reference":
            yield from [torch.tensor([73])] * 2
            continue
        groups, tokens = torch.arange(len(bounds) - 1) % 2, put(torch.randn(3, 73))
        for values in (put(torch.randn(73)), None):
            with mock.patch("torch._assert_async"):
                found = gk.endpoint_segments(
                    *tokens, put(torch.rand(73) < 0.9), values=values, groups=put(groups),
                    cu_seqlens=put(torch.tensor(bounds)), config={"norm": "prompt", "credit": "broadcast"},
                    backend=backend,
                )  # fmt: skip
            yield torch.tensor(found.advantages.shape)


def outside_losses(backend: str, put: Put) -> Results:
    """As outside_segments; the numbers of segments may hold anything, too."""
    anything = torch.randint(-(2**31), 2**31, (100,))
    for config in LOSSES:
        for bounds in ([0, 40, 40, 73], *WRONG_BOUNDS):
            if backend == "reference":
                yield from (torch.tensor(shape) for shape in ([], [35], [100]))
                continue
            rows, cu_seqlens = len(bounds) - 1, put(torch.tensor(bounds))
            with mock.patch("torch._assert_async"):
                for result in one_loss(config, 7 * anything, rows, backend, put, cu_seqlens=cu_seqlens):
                    yield torch.tensor(result.shape)


def similarity(backend: str, put: Put) -> Results:
    """Prompts of each size of tile, ragged ones, and one whose matrix does not fit into shared memory."""
    for size, dtype in ((5, torch.float32), (20, torch.bfloat16), (40, torch.float16), (256, torch.float32)):
        rows = put(torch.randn(size, 9).to(dtype))
        yield gk.pairwise_cosine(rows, size, backend=backend)
        yield gk.similarity_groups(rows, size, backend=backend).labels
    ids = put(torch.randint(0, 3, (40,)))
    valid = put(torch.rand(40) > 0.2)
    yield gk.similarity_groups(put(torch.randn(40, 9)), ids, valid=valid, backend=backend).labels


def outside_similarity(backend: str, put: Put) -> Results:
    """More and larger groups than `num_groups` and `max_size` promise; as outside_segments. The op is called directly:
    off the GPU the promises are checked at once."""
    if backend == "reference":
        yield torch.tensor([40])
        return
    order, offsets = put(torch.randperm(40)), put(torch.tensor([0, 20, 29]))
    config = gk.SimilarityConfig()
    forward = importlib.import_module("grpo_kernels.native.similarity_groups").forward
    results = forward(put(torch.randn(40, 9)), order, offsets, 2, 5, None, config.modes, config.coefficients)
    yield torch.tensor(results[0].shape)


def similarity_parts(backend: str, put: Put) -> Results:
    for size in (7, 40, 200):
        distances = put(gk.pairwise_cosine(torch.randn(2 * size, 9), size, backend="reference"))
        yield gk.cluster_distances(distances, backend=backend).labels
        yield from gk.agglomerate(distances, backend=backend)
        yield from gk.silhouette(distances, put(torch.randint(-1, 4, (2, size))), backend=backend)


def kernels(source: str, *names: str) -> set[str]:
    return {f"{source}.{name}_kernel" for name in names}


CASES = {
    "advantages": Case(advantages, kernels("group_advantages", "segments", "one_block")),
    "shrunk_advantages": Case(shrunk_advantages, kernels("group_advantages", "parent_stats", "segments")),
    "large_advantages": Case(large_advantages, kernels("group_advantages", "segments", "moments", "finish")),
    "logprobs": Case(logprobs, kernels("token_logprobs", "forward", "backward")),
    "outside_logprobs": Case(outside_logprobs, kernels("token_logprobs", "forward", "backward")),
    "losses": Case(losses, kernels("policy_loss", "count", "total", "tokens", "rows", "reduce")),
    "outside_losses": Case(outside_losses, kernels("policy_loss", "count", "total", "tokens", "rows", "reduce")),
    "many_losses": Case(many_losses, kernels("policy_loss", "tokens", "reduce", "finish")),
    "segments": Case(segments, kernels(
        "endpoint_segments", "returns", "baselines", "tokens", "scale", "segments", "moments", "results"
    )),
    "outside_segments": Case(outside_segments, kernels(
        "endpoint_segments", "returns", "baselines", "tokens", "scale", "segments", "moments", "results"
    )),
    "similarity": Case(similarity, kernels("pairwise_cosine", "cosine") | kernels("similarity_groups", "cluster")),
    "outside_similarity": Case(
        outside_similarity, kernels("pairwise_cosine", "cosine") | kernels("similarity_groups", "cluster")
    ),
    "similarity_parts": Case(similarity_parts, kernels("similarity_groups", "cluster", "tree", "silhouette")),
}  # fmt: skip


def check(name: str, device: torch.device) -> int:
    """Runs a case on both backends; how many results were the same."""
    found: list[list[Tensor]] = []
    for backend, where in (("cuda", device), ("reference", torch.device("cpu"))):
        torch.manual_seed(0)
        found.append([result.detach().cpu() for result in CASES[name].run(backend, lambda x, to=where: x.to(to))])
    for number, (got, expected) in enumerate(zip(*found, strict=True)):
        rough = got.dtype in (torch.float16, torch.bfloat16)
        close = {"rtol": 2e-2, "atol": 1e-3} if rough else {"rtol": 2e-4, "atol": 2e-5}
        if not got.is_floating_point():
            close = {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(
            got, expected, **close, equal_nan=True, msg=lambda text, n=number: f"{name}, result {n}: {text}"
        )
    return len(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="some of them by name; all if left out")
    device = torch.device("cuda")
    for name in parser.parse_args().cases:
        print(f"{name}: {check(name, device)} results", flush=True)
    torch.cuda.synchronize()
    print("all cases ran")


if __name__ == "__main__":
    main()
