"""Properties of the Triton kernels of similarity_groups alone: tiles, unused places, the limit on rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends
from grpo_kernels.ops.similarity_groups import registration as op
from grpo_kernels.ops.similarity_groups.config import LINKAGES
from tests import harness

if "triton" not in harness.runnable_backends(op.SUPPORTS):
    pytest.skip("triton cannot run here", allow_module_level=True)

DEVICE = harness.device_of("triton")
# Sizes on both sides of the tile widths, and of 3, below which there is no cut to choose.
SIZES = (1, 2, 3, 16, 17, 33)


def distances_of(size: int, steps: int | None) -> Tensor:
    """Distances of two prompts, the second with unused places; given `steps`, multiples of 1 / steps with many ties."""
    random = torch.Generator().manual_seed(size)
    values = torch.rand(2, size, size, generator=random)
    values = values if steps is None else (values * steps).round() / steps
    values = values.triu(1) + values.triu(1).mT
    left_out = torch.rand(size, generator=random) < 0.3
    values[1] = values[1].masked_fill(left_out | left_out[:, None], torch.inf)
    return values.to(DEVICE)


def assert_equal_bits(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, p=place: f"result {p}: {m}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [None, 2])
def test_trees_cuts_and_silhouettes_are_those_of_the_reference_to_the_bit(size: int, steps: int | None) -> None:
    distances = distances_of(size, steps)
    linkage = LINKAGES[(size + (steps is None)) % 4]
    config = gk.SimilarityConfig(linkage, min_silhouette=0.0, collapse="singletons")
    labels = (torch.arange(2 * size, device=DEVICE).view(2, size) * 7) % 5 - 1
    result = {}
    for backend in ("triton", "reference"):
        groups = gk.cluster_distances(distances, config=config, backend=backend)
        tree = gk.agglomerate(distances, linkage=linkage, backend=backend)
        result[backend] = (*groups, *tree, *gk.silhouette(distances, labels, backend=backend))
    assert_equal_bits(result["triton"], result["reference"])


def test_distances_hang_on_neither_place_nor_number_of_rows() -> None:
    rows = torch.randn(37, 150, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows[20] = rows[3]
    many = gk.pairwise_cosine(rows, 37, backend="triton")[0]
    taken = torch.tensor([30, 3, 11, 20, 36], device=DEVICE)
    few = gk.pairwise_cosine(rows[taken], 5, backend="triton")[0]
    assert torch.equal(few, many[taken][:, taken]) and torch.equal(many, many.mT)
    assert few[1, 3] == 0 and few.diagonal().count_nonzero() == 0
    torch.testing.assert_close(many, gk.pairwise_cosine(rows, 37, backend="reference")[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_in_any_order_some_of_them_left_out(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    centers = torch.randn(6, 70, generator=random)
    topic = torch.randint(0, 6, (40,), generator=random)
    rows = (centers[topic] + 0.1 * torch.randn(40, 70, generator=random)).to(DEVICE, dtype)
    rows[4], rows[9, 3], rows[11, 69] = 0, torch.nan, torch.inf
    ids = torch.randint(-2, 2, (40,), generator=random).to(DEVICE)
    valid = torch.rand(40, generator=random).to(DEVICE) < 0.8
    got, gold = (
        gk.similarity_groups(rows, ids, valid=valid, num_groups=6, max_size=33, backend=backend)
        for backend in ("triton", "reference")
    )
    for name in ("labels", "group_ids", "num_groups", "best_k", "verdict", "status"):
        assert torch.equal(getattr(got, name), getattr(gold, name)), name
    torch.testing.assert_close(got.silhouette, gold.silhouette, rtol=0, atol=1e-5)
    assert got.verdict[4:].tolist() == [gk.Verdict.EMPTY] * 2


def test_a_prompt_too_large_for_a_tile_goes_elsewhere_or_is_refused() -> None:
    rows = torch.randn(65, 3, device=DEVICE)
    reason = "backend 'triton' cannot run here: it takes prompts of at most 64 rows, got 65; use "
    with pytest.raises(RuntimeError, match=f"similarity_groups: {reason}backend="):
        gk.similarity_groups(rows, 65, backend="triton")
    with (
        pytest.raises(RuntimeError, match=f"agglomerate: {reason}GRPO_KERNELS_BACKEND or use_backend"),
        backends.use_backend("triton"),
    ):
        gk.agglomerate(torch.zeros(1, 65, 65, device=DEVICE))
    elsewhere = gk.similarity_groups(rows, 65)
    assert elsewhere.labels.min() == 0
    assert "triton" not in op.too_large(64) and "triton" in op.too_large(65)
