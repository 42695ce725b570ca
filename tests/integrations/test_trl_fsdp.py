"""TRL's fused head and FusedGRPOTrainer with models that FSDP2 shards over two processes, against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl.trainer.utils import add_fused_lm_head

from grpo_kernels.integrations.trl import patch_trl, unpatch_trl
from tests.harness import quick
from tests.integrations import fsdp_trl, tiny_trl

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]
WORKER = Path(fsdp_trl.__file__)
TRAINING = "test_the_trainer_learns_as_with_replicated_weights"
CASES = [(kind, outputs, has) for kind in fsdp_trl.KINDS[1:] for outputs in fsdp_trl.OUTPUTS for has in (True, False)]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    trains = any(getattr(item, "originalname", "") == TRAINING for item in request.session.items)
    parts = ("gradients", "training") if trains else ("gradients",)
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*launch, str(WORKER), str(folder), *parts], timeout=300, cwd=WORKER.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def in_one_process(has_labels: bool) -> dict[str, torch.Tensor]:
    """The gradient of the mean of both processes' losses, with TRL's own function."""
    lm = fsdp_trl.model("replicated")
    add_fused_lm_head(lm, outputs=fsdp_trl.OUTPUTS["ours"])
    for rank in range(2):
        if has_labels or rank == 0:
            (fsdp_trl.loss(lm, fsdp_trl.rows(rank)) / 2).backward()
    return {name: value.grad for name, value in lm.named_parameters() if name in fsdp_trl.NAMES}


@pytest.mark.parametrize("case", quick(CASES, *CASES[::3]), ids=str)
def test_gradients_are_those_of_one_process(ranks: list[dict[Any, Any]], case: tuple[str, str, bool]) -> None:
    expected = in_one_process(case[2])
    assert expected.keys() == set(fsdp_trl.NAMES)
    for rank in ranks:
        for name, gradient in expected.items():
            assert gradient.any()
            # the two losses are added up in another order, in float32
            torch.testing.assert_close(rank[case]["gradients"][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_labels", [True, False])
def test_the_head_is_gathered_once(ranks: list[dict[Any, Any]], has_labels: bool) -> None:
    part = 4 * -(-len(tiny_trl.WORDS) // 2) * 16
    for rank in ranks:
        found = rank["head", "ours", has_labels]
        assert [call for call in found["forward"] if call[1] == part and "gather" in call[0]] == [
            ("all_gather_into_tensor", part)
        ]
        assert [call for call in found["backward"] if call == ("reduce_scatter_tensor", 2 * part)] == [
            ("reduce_scatter_tensor", 2 * part)
        ]


@pytest.mark.full
@pytest.mark.parametrize("kind", fsdp_trl.KINDS[1:])
def test_the_trainer_learns_as_with_replicated_weights(ranks: list[dict[Any, Any]], kind: str) -> None:
    for rank in ranks:
        assert len(rank[kind]) >= 4
        for got, expected in zip(rank[kind], rank["replicated"], strict=True):
            assert got == pytest.approx(expected, rel=2e-4, abs=2e-5)


def test_unpatching_restores_the_gather() -> None:
    from torch.distributed.tensor import DTensor
    from trl.trainer import utils

    assert utils.DTensor is DTensor
    patch_trl()
    assert utils.DTensor is not DTensor
    unpatch_trl()
    assert utils.DTensor is DTensor
