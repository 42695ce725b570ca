"""Checks small cases of every GPU kernel: values and gradients on a backend against the float64 reference.

    python -m tests.kernel_cases                           # the CUDA kernels' cases
    python -m tests.kernel_cases logprobs kept
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.kernel_cases

The error against float64 must be at most twice that of the reference in the working dtype. tests/test_kernel_cases.py
runs the cases on a GPU or emulated, and checks that they launch every kernel of csrc. With --emulated LIBRARY, the
kernels run on the host: tests/test_sanitizer.py does so under AddressSanitizer.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends, registry
from grpo_kernels.ops.policy_loss.registration import scaled_in_place
from grpo_kernels.ops.similarity_groups import reference, registration
from tests.harness import assert_within_budget, device_error
from tests.ops.linear_head.cases import TABLE
from tests.ops.promises import evaluated, placed

backends.name_implementations()

Put = Callable[[Tensor], Tensor]  # moves a tensor to the device of the backend
Results = Iterator[Tensor]
BOUNDS = ([0, 40, 40, 73], [0, 9000], [0, 40, 101], [9, 41, 60, 73], [-9, 50, 20, 900], [0, 2**63 - 1, -(2**63), 60])
BOUNDS_OF_SUPPORTS = ([0, 2, 5], [0, 9, 3], [2**63 - 1, -(2**63), 4], [5, 5, 5], [0, 0, 0])


class Case(NamedTuple):
    """A generator of results and its backend."""

    run: Callable[[str, Put], Results]
    backend: str = "cuda"


def outside(call: Callable[[str, Put, Tensor], object], bounds: Sequence[list[int]] = (*BOUNDS, [5])) -> Any:
    """Invalid bounds of rows: a GPU reports them only after the kernels have run, so the assertion is disabled, and the
    kernels must not touch memory outside. Results are undefined."""

    def run(backend: str, put: Put) -> Results:
        if backend != "reference":
            for each in bounds:
                with mock.patch("torch._assert_async"), mock.patch("grpo_kernels.checks.no_token_left_out"):
                    call(backend, put, torch.tensor(each))
        return iter(())

    return run


# Advantages of groups


def advantages(backend: str, put: Put) -> Results:
    """Named configs, with groups by size and by id: of a lane, a warp and a block."""
    for name in gk.AdvantageConfig.names():
        config = gk.AdvantageConfig(name)
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
    """Shrinkage, which needs the statistics of the parent groups first."""
    config = gk.AdvantageConfig("grpo", shrinkage=2.0)
    groups, clusters = put(torch.randint(0, 9, (500,))), put(torch.randint(-1, 3, (500,)))
    yield from gk.group_advantages(put(torch.randn(500)), groups, subgroups=clusters, config=config, backend=backend)


def large_advantages(backend: str, put: Put) -> Results:
    """More rows than one block handles, in groups that are accessed four rows at a time or not."""
    for config in ("grpo", "batch_std"):
        for size in (8, 256):
            yield from gk.group_advantages(put(torch.randn(65536 + 256)), size, config=config, backend=backend)


# Log-probs and the LM head


def logprobs(backend: str, put: Put) -> Results:
    shapes = ((1, torch.float32), (31, torch.bfloat16), (1041, torch.float16), (1041, torch.float32))
    for columns, dtype in shapes:
        for shift in (0, 1):  # unaligned rows, up to the last byte of their memory
            logits = put(torch.randn(3 * columns + shift).to(dtype))[shift:].view(3, columns).requires_grad_()
            targets, cap = put(torch.tensor([0, -100, columns - 1])), 9.0 if shift else None
            result = gk.token_logprobs(logits, targets, softcap=cap, return_entropy=shift == 0, backend=backend)
            yield from (tensor for tensor in result if tensor is not None)
            total = result.logprobs.sum() if result.entropy is None else (result.logprobs + result.entropy).sum()
            yield torch.autograd.grad(total, logits)[0]
    logits = put(torch.randn(3, 1041)).requires_grad_()
    targets = put(torch.tensor([0, -100, 9]))
    in_place = gk.token_logprobs(logits * 1, targets, inplace_backward=True, backend=backend)
    yield torch.autograd.grad(in_place.logprobs.sum(), logits)[0]


def outside_logprobs(backend: str, put: Put) -> Results:
    """Targets outside the vocabulary, which the reference refuses: NaN, without a read."""
    if backend == "reference":
        yield from [torch.tensor([True, True])] * 2
        return
    logits = put(torch.randn(2, 7)).requires_grad_()
    result = gk.token_logprobs(logits, put(torch.tensor([7, -1])), backend=backend)
    yield result.logprobs.isnan()
    yield torch.autograd.grad(result.logprobs.sum(), logits)[0].isnan().any(1)


def head(name: str, dtype: torch.dtype, backend: str, put: Put) -> Results:
    """A row of the table of the head's cases."""
    case = TABLE[name].draw()
    yield from evaluated(case.op, placed(case.op, case.inputs, dtype, put), backend).values()


def kept(backend: str, put: Put) -> Results:
    """Supports of 1 to 300 ids, an ignored row without any, and widths around a tile; values and all gradients."""
    sizes = torch.tensor([1, 5, 0, 300, 256, 2])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
    token_ids = torch.cat([torch.randperm(310)[:size] for size in sizes.tolist()])
    targets = torch.where(sizes > 0, token_ids[(offsets[1:] - 1).clamp(min=0)], -100)
    for width, dtype in ((7, torch.float32), (260, torch.bfloat16)):
        hidden, weight, bias = (put(torch.randn(shape).to(dtype)) for shape in ((6, width), (310, width), (310,)))
        leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
        result = gk.linear_logprobs(
            hidden,
            gk.LMHead(weight, bias, softcap=9.0 if width == 7 else None),
            put(targets),
            temperature=put(torch.rand(6) + 0.5),
            support=(put(token_ids), put(offsets)),
            return_entropy=True,
            backend=backend,
        )
        yield from result[:2]
        yield from torch.autograd.grad((result.logprobs + result.entropy).sum(), leaves)


def support_outside(backend: str, put: Put, bounds: Tensor) -> None:
    hidden, weight = put(torch.randn(2, 8)).requires_grad_(), put(torch.randn(7, 8)).requires_grad_()
    support = put(torch.tensor([3, 9, -4, 2**62, 5])), put(bounds)
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        logprobs = gk.linear_logprobs(hidden, weight, put(torch.tensor([3, 6])), support=support, backend=backend)
    torch.autograd.grad(logprobs.logprobs.sum(), (hidden, weight))


# The policy loss

LOSSES = {
    "clip": gk.LossConfig.trl(loss_type="dapo", beta=0.1),
    "sequence": gk.LossConfig.trl(loss_type="grpo", importance_sampling_level="sequence", beta=0.1),
    "segment": gk.LossConfig(ratio="segment", kl="k3", kl_coef=0.1),
    "geo_mean": gk.LossConfig.verl(loss_mode="geo_mean", use_kl_loss=True),
    "vespo": gk.LossConfig.trl(loss_type="vespo", beta=0.1),
    "cispo": gk.LossConfig(loss="cispo", kl="k3", kl_coef=0.1),
    "gspo": gk.LossConfig(ratio="sequence", kl="k3", kl_coef=0.1),
    "entropy": gk.LossConfig(entropy_coef=0.01),
    "policy_mask": gk.LossConfig(),
}


def losses(name: str, backend: str, put: Put) -> Results:
    """Padded and packed rows, some longer than a task and one without tokens."""
    lengths = [1500, 40, 0, 70]
    place = torch.cat([torch.arange(length) for length in lengths])  # position in the row
    for is_packed in (False, True):
        places = place if is_packed else torch.arange(70).expand(4, 70)
        bounds = put(torch.tensor([0, *lengths]).cumsum(0)) if is_packed else None
        policy_mask = put(places % 4 > 0) if name == "policy_mask" else None
        yield from one_loss(LOSSES[name], places, 4, backend, put, cu_seqlens=bounds, policy_mask=policy_mask)


def many_losses(backend: str, put: Put) -> Results:
    """Enough rows for a reduction in two steps."""
    places = torch.arange(2).expand(1100, 2)
    yield from one_loss(gk.LossConfig.trl(loss_type="dapo"), places, 1100, backend, put, normalizer=7.0)


def one_loss(config: gk.LossConfig, places: Tensor, rows: int, backend: str, put: Put, **options: Any) -> Results:
    shape = places.shape
    start = -torch.rand(shape)
    near = [put(start + 0.1 * torch.randn(shape)) for _ in range(2)]
    leaf, entropy = put(start).requires_grad_(), put(torch.rand(shape)) if config.entropy_coef else None
    segments = put(places.div(7, rounding_mode="floor").contiguous())
    result = gk.policy_loss(
        leaf,
        near[0],
        put(torch.randn(rows)),
        mask=put(torch.rand(shape) > 0.3),
        entropy=entropy,
        ref_logprobs=near[1] if config.kl != "none" else None,
        segments=segments if config.ratio == "segment" else None,
        config=config,
        backend=backend,
        **options,
    )
    yield result.loss.detach()
    yield result.metrics.tensor.to(leaf.dtype)  # sums of terms in that precision
    yield torch.autograd.grad(result.loss * 2, leaf)[0]


def losses_outside(backend: str, put: Put, bounds: Tensor) -> None:
    """Segment ids are arbitrary, too."""
    places = 7 * torch.randint(-(2**31), 2**31, (100,))
    for config in LOSSES.values():
        list(one_loss(config, places, len(bounds) - 1, backend, put, cu_seqlens=put(bounds)))


def scaled(backend: str, put: Put) -> Results:
    """A gradient of the LM head, of which only the first and the last piece are not whole, by the upstream gradient."""
    of_head = "triton" if backend == "cuda" else backend
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for upstream in (1.0, 0.3):
            gradient = put(torch.randn(1042).to(dtype))[1:]
            with torch.no_grad():
                yield scaled_in_place("scaled", of_head, gradient, put(torch.tensor(upstream)))


# Rows of tokens


def segments(backend: str, put: Put) -> Results:
    """Padded rows with and without a critic, for each normalisation; long rows have blocks of more threads."""
    for rows, width in ((6, 70), (2, 2100)):
        for norm in ("none", "batch", "prompt"):
            for has_critic in (False, True):
                shape, groups = (rows, width), put(torch.tensor([3, 0, 3, 3, 0, -1][:rows]))
                start = -torch.rand(shape)
                old, values = put(start + 0.1 * torch.randn(shape)), put(torch.randn(shape))
                yield from gk.endpoint_segments(
                    put(torch.randn(shape)),
                    put(start),
                    old,
                    put(torch.rand(shape) > 0.1),
                    values=values if has_critic else None,
                    groups=groups if norm == "prompt" or not has_critic else None,
                    config={"norm": norm, "group_variance_threshold": 2.0},
                    backend=backend,
                )


def segments_outside(backend: str, put: Put, bounds: Tensor) -> None:
    groups, tokens = put(torch.arange(len(bounds) - 1) % 2), put(torch.randn(3, 73))
    for values in (put(torch.randn(73)), None):
        gk.endpoint_segments(
            *tokens,
            put(torch.rand(73) < 0.9),
            values=values,
            groups=groups,
            cu_seqlens=put(bounds),
            config={"norm": "prompt", "credit": "broadcast"},
            backend=backend,
        )


def token_advantages(backend: str, put: Put) -> Results:
    """Padded rows of tokens and of turns, with and without a critic; few long rows are cut into chunks."""
    for rows, width in ((6, 70), (2, 2100), (1, 6000)):
        for by_turn in (False, True):
            for estimator in gk.TokenAdvantageConfig.names():
                rewards, turns = torch.randn(rows, width), torch.randint(-1, 3, (rows, width)).cumsum(1) // 4
                rewards[0, 7] = float("nan") if estimator == "reinforce" else 1.0
                yield from gk.token_advantages(
                    put(rewards),
                    put(torch.randn(rows, width)) if estimator == "gae" else None,
                    mask=put(torch.rand(rows, width) > 0.1),
                    turns=put(turns) if by_turn else None,
                    config=gk.TokenAdvantageConfig(estimator, gamma=0.99),
                    backend=backend,
                )


def token_advantages_outside(backend: str, put: Put, bounds: Tensor) -> None:
    tokens, mask = put(torch.randn(2, 73)), put(torch.rand(73) < 0.9)
    for turns in (None, put(torch.randint(-(2**31), 2**31, (73,)))):
        gk.token_advantages(*tokens, mask=mask, turns=turns, cu_seqlens=put(bounds), backend=backend)


# Similarity


def similarity(backend: str, put: Put) -> Results:
    """Prompts of each tile size, and ragged ones."""
    for size, dtype in ((5, torch.float32), (20, torch.bfloat16), (40, torch.float16)):
        yield from one_prompt(size, dtype, backend, put)
    ids = put(torch.randint(0, 3, (40,)))
    valid = put(torch.rand(40) > 0.2)
    for width in (9, 16):  # unaligned rows, and aligned ones, of which masked ones are not read
        yield gk.similarity_groups(put(torch.randn(40, width)), ids, valid=valid, backend=backend).labels


def outside_similarity(backend: str, put: Put) -> Results:
    """More and larger groups than `num_groups` and `max_size` announce. The op is called directly, as the public
    function checks them off the GPU."""
    if backend != "reference":
        order, offsets = put(torch.randperm(40)), put(torch.tensor([0, 20, 29]))
        config = gk.SimilarityConfig()
        responses = reference.Responses(put(torch.randn(40, 9)), order, offsets, 2, 5, None)
        registration.GROUPS("cuda", reference.Grouping(responses, config.settings))
    return iter(())


def large_similarity(backend: str, put: Put) -> Results:
    """Prompts whose matrix exceeds shared memory."""
    yield from one_prompt(256, torch.float32, backend, put)
    yield from parts(200, backend, put)


def one_prompt(size: int, dtype: torch.dtype, backend: str, put: Put) -> Results:
    rows = put(torch.randn(size, 9).to(dtype))
    yield gk.pairwise_cosine(rows, size, backend=backend)
    yield gk.similarity_groups(rows, size, backend=backend).labels


def similarity_parts(backend: str, put: Put) -> Results:
    for size in (7, 40):
        yield from parts(size, backend, put)


def parts(size: int, backend: str, put: Put) -> Results:
    distances = put(gk.pairwise_cosine(torch.randn(2 * size, 9), size, backend="reference"))
    yield gk.cluster_distances(distances, backend=backend).labels
    yield from gk.agglomerate(distances, backend=backend)
    yield from gk.silhouette(distances, put(torch.randint(-1, 4, (2, size))), backend=backend)


CASES = {
    "advantages": Case(advantages),
    "shrunk_advantages": Case(shrunk_advantages),
    "large_advantages": Case(large_advantages),
    "logprobs": Case(logprobs, "triton"),
    "outside_logprobs": Case(outside_logprobs, "triton"),
    "head": Case(functools.partial(head, "LMHead with all options", torch.float32), "triton"),
    "linear_losses": Case(functools.partial(head, "linear_policy_loss", torch.float32), "triton"),
    "linear_halves": Case(functools.partial(head, "linear_policy_loss", torch.bfloat16), "triton"),
    "taught_losses": Case(functools.partial(head, "linear_policy_loss with a teacher", torch.float32), "triton"),
    "kept": Case(kept, "triton"),
    "outside_kept": Case(outside(support_outside, BOUNDS_OF_SUPPORTS), "triton"),
    **{f"loss_{name}": Case(functools.partial(losses, name)) for name in LOSSES},
    "many_losses": Case(many_losses),
    "outside_losses": Case(outside(losses_outside)),
    "scaled": Case(scaled),
    "segments": Case(segments),
    "outside_segments": Case(outside(segments_outside)),
    "token_advantages": Case(token_advantages, "triton"),
    "outside_token_advantages": Case(outside(token_advantages_outside), "triton"),
    "similarity": Case(similarity),
    "outside_similarity": Case(outside_similarity),
    "similarity_parts": Case(similarity_parts),
    "large_similarity": Case(large_similarity),
}


def check(name: str, device: torch.device) -> None:
    """Compares the results of one case with the reference's."""
    case, outputs = CASES[name], list[list[Tensor]]()
    puts: tuple[tuple[str, Put], ...] = (
        (case.backend, lambda tensor: tensor.to(device)),
        ("reference", lambda tensor: tensor),
        ("reference", lambda tensor: tensor.double() if tensor.is_floating_point() else tensor),
    )
    for backend, put in puts:
        torch.manual_seed(0)
        outputs.append([result.detach().cpu() for result in case.run(backend, put)])
    for number, (got, working, gold) in enumerate(zip(*outputs, strict=True)):
        label = f"{name} on {case.backend}, result {number}"
        if got.is_floating_point():
            assert_within_budget(got, working, gold.double(), label)
        else:
            torch.testing.assert_close(got, working, rtol=0, atol=0, msg=lambda text, of=label: f"{of}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_cuda = [name for name, case in CASES.items() if case.backend == "cuda"]
    parser.add_argument("cases", nargs="*", default=of_cuda, help="names of cases; default: those of the CUDA kernels")
    parser.add_argument("--emulated", metavar="LIBRARY", help="run on the host, the CUDA kernels of this library")
    options = parser.parse_args()
    if options.emulated:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        torch.ops.load_library(options.emulated)
        registry.enable_emulated_cuda()
    if unknown := {*options.cases} - CASES.keys():
        parser.error(f"cases must be of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    for name in options.cases:
        check(name, torch.device("cpu" if options.emulated else "cuda"))
        print(name, flush=True)
    if error := device_error():
        raise SystemExit(f"kernel_cases: {error}")
    print("all cases ran")


if __name__ == "__main__":
    main()
