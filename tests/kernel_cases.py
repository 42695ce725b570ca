"""Checks small cases of every GPU kernel: values and gradients on a backend against the float64 reference.

    python -m tests.kernel_cases                           # the CUDA kernels' cases
    python -m tests.kernel_cases logprobs --backend triton
    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.kernel_cases

The error against float64 must be at most twice that of the reference in the working dtype. tests/test_kernel_cases.py
runs the cases and a small call of each op, on a GPU or emulated, and checks that the cases launch the kernels they name
and that every kernel of csrc has a case. Without a GPU, --device cpu runs the kernels in the emulator and in Triton's
interpreter; tests/test_sanitizer.py does so under AddressSanitizer.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends, registry
from grpo_kernels.ops.policy_loss.registration import scaled_in_place
from grpo_kernels.ops.similarity_groups import reference, registration
from tests import row_cases, support_cases
from tests.harness import device_error
from tests.row_cases import WRONG_BOUNDS, Put, Results

backends.name_implementations()


class Case(NamedTuple):
    """A generator of results, the CUDA kernels that it launches, as op.kernel, and its backend."""

    run: Callable[[str, Put], Results]
    kernels: set[str]
    backend: str = "cuda"


def advantages(names: tuple[str, ...], sizes: tuple[int, ...], backend: str, put: Put) -> Results:
    """Named configs on several numbers of rows, with groups by size and by id."""
    for name in names:
        config = gk.AdvantageConfig(name)
        for rows in sizes:
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


every_config = functools.partial(advantages, gk.AdvantageConfig.names(), (7, 40))
# Groups of a lane, a warp and a block.
every_size = functools.partial(advantages, ("gdpo", "grpo_passk"), (0, 1, 7, 40, 2100))


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


def linear_losses(dtype: torch.dtype, backend: str, put: Put) -> Results:
    hidden, weight = (put(torch.randn(shape).to(dtype)).requires_grad_() for shape in ((2, 4, 16), (64, 16)))
    targets, old = put(torch.randint(0, 64, (2, 4))), put(-4 - torch.rand(2, 4))
    result = gk.linear_policy_loss(hidden, weight, targets, old, put(torch.randn(2)), backend=backend)
    yield result.loss.detach()
    yield from torch.autograd.grad(result.loss, (hidden, weight))


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
OF_TOKENS = ("clip", "cispo", "entropy", "policy_mask")
LOSS_KERNELS = dict.fromkeys(OF_TOKENS, "tokens") | {"gspo": "sequences"}  # others: rows


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
    yield from one_loss(
        gk.LossConfig.trl(loss_type="dapo"), torch.arange(2).expand(1100, 2), 1100, backend, put, normalizer=7.0
    )


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


def outside_losses(backend: str, put: Put) -> Results:
    """Invalid `cu_seqlens`, as in row_cases.outside_segments, with arbitrary segment ids."""
    arbitrary = torch.randint(-(2**31), 2**31, (100,))
    for config in LOSSES.values():
        for bounds in ([0, 40, 40, 73], *WRONG_BOUNDS):
            if backend == "reference":
                yield from (torch.tensor(shape) for shape in ([], [len(gk.PolicyLossMetrics.names)], [100]))
                continue
            rows, cu_seqlens = len(bounds) - 1, put(torch.tensor(bounds))
            with mock.patch("torch._assert_async"):
                for result in one_loss(config, 7 * arbitrary, rows, backend, put, cu_seqlens=cu_seqlens):
                    yield torch.tensor(result.shape)


def scaled(backend: str, put: Put) -> Results:
    """A gradient of the LM head, of which only the first and the last piece are not whole, by the upstream gradient."""
    of_head = "triton" if backend == "cuda" else backend
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for upstream in (1.0, 0.3):
            gradient = put(torch.randn(1042).to(dtype))[1:]
            with torch.no_grad():
                yield scaled_in_place("scaled", of_head, gradient, put(torch.tensor(upstream)))


def similarity(backend: str, put: Put) -> Results:
    """Prompts of each tile size, and ragged ones."""
    for size, dtype in ((5, torch.float32), (20, torch.bfloat16), (40, torch.float16)):
        yield from one_prompt(size, dtype, backend, put)
    ids = put(torch.randint(0, 3, (40,)))
    valid = put(torch.rand(40) > 0.2)
    for width in (9, 16):  # unaligned rows, and aligned ones, of which masked ones are not read
        yield gk.similarity_groups(put(torch.randn(40, width)), ids, valid=valid, backend=backend).labels


def outside_similarity(backend: str, put: Put) -> Results:
    """More and larger groups than `num_groups` and `max_size` announce, as in row_cases.outside_segments. The op is
    called directly, as the public function checks them off the GPU."""
    if backend == "reference":
        yield torch.tensor([40])
        return
    order, offsets = put(torch.randperm(40)), put(torch.tensor([0, 20, 29]))
    config = gk.SimilarityConfig()
    responses = reference.Responses(put(torch.randn(40, 9)), order, offsets, 2, 5, None)
    results = registration.GROUPS("cuda", reference.Grouping(responses, config.modes, config.coefficients))
    yield torch.tensor(results[0].shape)


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


def kernels(source: str, *names: str) -> set[str]:
    return {f"{source}.{name}_kernel" for name in names}


CASES = {
    "every_config": Case(every_config, kernels("group_advantages", "groups")),
    "every_size": Case(every_size, kernels("group_advantages", "groups", "finish")),
    "shrunk_advantages": Case(shrunk_advantages, kernels("group_advantages", "parent_stats", "groups")),
    "large_advantages": Case(large_advantages, kernels("group_advantages", "groups", "finish")),
    "logprobs": Case(logprobs, set(), "triton"),
    "outside_logprobs": Case(outside_logprobs, set(), "triton"),
    "linear_halves": Case(
        functools.partial(linear_losses, torch.bfloat16),
        kernels("policy_loss", "count", "tokens", "reduce", "scale"),
        "triton",
    ),
    "kept": Case(support_cases.kept, set(), "triton"),
    "outside_kept": Case(support_cases.outside_kept, set(), "triton"),
    **{
        f"loss_{name}": Case(
            functools.partial(losses, name), kernels("policy_loss", "count", "reduce", LOSS_KERNELS.get(name, "rows"))
        )
        for name in LOSSES
    },
    "outside_losses": Case(outside_losses, kernels("policy_loss", "count", "tokens", "rows", "sequences", "reduce")),
    "scaled": Case(scaled, kernels("policy_loss", "scale")),
    "many_losses": Case(many_losses, kernels("policy_loss", "tokens", "reduce")),
    "segments": Case(
        row_cases.segments,
        kernels("endpoint_segments", "returns", "baselines", "tokens", "scale", "segments", "moments", "results"),
    ),
    "outside_segments": Case(
        row_cases.outside_segments,
        kernels("endpoint_segments", "returns", "baselines", "tokens", "scale", "segments", "moments", "results"),
    ),
    "token_advantages": Case(row_cases.token_advantages, set(), "triton"),
    "outside_token_advantages": Case(row_cases.outside_token_advantages, set(), "triton"),
    "similarity": Case(similarity, kernels("similarity_groups", "cosine", "cluster")),
    "outside_similarity": Case(outside_similarity, kernels("similarity_groups", "cosine", "cluster")),
    "similarity_parts": Case(similarity_parts, kernels("similarity_groups", "cluster", "tree", "silhouette")),
    "large_similarity": Case(large_similarity, kernels("similarity_groups", "cosine", "cluster", "tree", "silhouette")),
}


def smoke_logprobs(backend: str, put: Put) -> Results:
    logits = put(torch.randn(8, 1024)).requires_grad_()
    logprobs = gk.token_logprobs(logits, put(torch.arange(8)), backend=backend).logprobs
    yield logprobs
    yield torch.autograd.grad(logprobs.sum(), logits)[0]


def smoke_head(backend: str, put: Put) -> Results:
    hidden, weight = put(torch.randn(8, 16)).requires_grad_(), put(torch.randn(64, 16)).requires_grad_()
    logprobs = gk.linear_logprobs(hidden, weight, put(torch.arange(8)), backend=backend).logprobs
    yield logprobs
    yield from torch.autograd.grad(logprobs.sum(), (hidden, weight))


def smoke_distillation(backend: str, put: Put) -> Results:
    hidden, weight = put(torch.randn(8, 16)).requires_grad_(), put(torch.randn(64, 16)).requires_grad_()
    logprobs, ids = torch.randn(8, 64).log_softmax(1).topk(4)
    result = gk.linear_distillation_loss(hidden, weight, gk.Teacher(put(ids), put(logprobs)), backend=backend)
    yield from (value.detach() for value in result)
    yield from torch.autograd.grad(result.loss, (hidden, weight))


def smoke_loss(backend: str, put: Put) -> Results:
    yield from one_loss(gk.LossConfig.trl(loss_type="dapo", beta=0.1), torch.arange(70).expand(4, 70), 4, backend, put)


def smoke_similarity(backend: str, put: Put) -> Results:
    """Rows whose pieces are copied asynchronously, and masked ones that are not."""
    vectors, valid = put(torch.randn(16, 16)), put(torch.arange(16) % 3 > 0)
    yield gk.similarity_groups(vectors, 8, valid=valid, backend=backend).labels


def smoke_silhouette(backend: str, put: Put) -> Results:
    yield from gk.silhouette(put(two_prompts()), put(torch.randint(0, 3, (2, 8))), backend=backend)


def two_prompts() -> Tensor:
    """Distances of eight responses to each of two prompts."""
    return gk.pairwise_cosine(torch.randn(16, 9), 8, backend="reference")


# One small call of each op that chooses a backend.
SMOKE: dict[str, Callable[[str, Put], Iterable[Tensor]]] = {
    "group_advantages": lambda backend, put: gk.group_advantages(put(torch.randn(64)), 8, backend=backend),
    "token_logprobs": smoke_logprobs,
    "linear_logprobs": smoke_head,
    "policy_loss": smoke_loss,
    "linear_distillation_loss": smoke_distillation,
    "linear_policy_loss": functools.partial(linear_losses, torch.float32),
    "endpoint_segments": row_cases.smoke_segments,
    "token_advantages": row_cases.smoke_token_advantages,
    "similarity_groups": smoke_similarity,
    "pairwise_cosine": lambda backend, put: [gk.pairwise_cosine(put(torch.randn(16, 9)), 8, backend=backend)],
    "cluster_distances": lambda backend, put: [gk.cluster_distances(put(two_prompts()), backend=backend).labels],
    "agglomerate": lambda backend, put: gk.agglomerate(put(two_prompts()), backend=backend),
    "silhouette": smoke_silhouette,
}


def as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def compare(run: Callable[[str, Put], Iterable[Tensor]], what: str, backend: str, device: torch.device) -> int:
    """Compares the results of one case with the reference's, and returns their number."""
    from tests.harness import assert_within_budget  # imports pytest, which is slow under the sanitizer

    outputs: list[list[Tensor]] = []
    puts: tuple[tuple[str, Put], ...] = (
        (backend, lambda tensor: tensor.to(device)),
        ("reference", lambda tensor: tensor),
        ("reference", as_double),
    )
    for name, put in puts:
        torch.manual_seed(0)
        outputs.append([result.detach().cpu() for result in run(name, put)])
    for number, (got, working, gold) in enumerate(zip(*outputs, strict=True)):
        label = f"{what} on {backend}, result {number}"
        if got.is_floating_point():
            assert_within_budget(got, working, gold.double(), label)
        else:
            torch.testing.assert_close(got, working, rtol=0, atol=0, msg=lambda text, of=label: f"{of}: {text}")
    return len(outputs[0])


def check(name: str, device: torch.device) -> int:
    return compare(CASES[name].run, name, CASES[name].backend, device)


def enable_stand_ins() -> None:
    """Runs the CUDA kernels in the emulator and Triton's in its interpreter, on CPU tensors."""
    from tests.emulation import build

    torch.ops.load_library(str(build.library()))
    registry.enable_emulated_cuda()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; default: all")
    parser.add_argument(
        "--backend", nargs="+", choices=("cuda", "triton"), default=["cuda"], help="backends to check; default: cuda"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where to run; cpu: emulator and interpreter; default: %(default)s",
    )
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        enable_stand_ins()
    device = torch.device(options.device)
    unknown = set(options.cases) - CASES.keys()
    if unknown:
        parser.error(f"cases must be of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    for name in options.cases or CASES:
        if CASES[name].backend in options.backend:
            print(f"{name} on {CASES[name].backend}: {check(name, device)} results", flush=True)
    if error := device_error():
        raise SystemExit(f"kernel_cases: {error}")
    print("all cases ran")


if __name__ == "__main__":
    main()
