"""linear_policy_loss where nothing is to be computed, and where targets or ids are special.

Faults that this is for: a gradient of no token; rows that are not there; a target that is no id; a vocabulary of which
a teacher leaves nothing to the kernels.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness import needs_cpu_kernels
from tests.ops.linear_head import teachers
from tests.ops.linear_head.cases import problem
from tests.ops.linear_head.heads import EXACT, F32, INF, KERNELS, assert_close
from tests.ops.linear_head.terms import CONFIGS

on_exact = pytest.mark.parametrize("backend", EXACT)
both_memories = pytest.mark.parametrize("memory", ["fast", "low"])


@both_memories
@pytest.mark.parametrize("name", CONFIGS)
@on_exact
def test_no_token_takes_part(backend: str, name: str, memory: str) -> None:
    """None that counts, no target, or no term of any position."""
    case = problem(name, "bias", "teacher", memory=memory, chunk_size=9)
    shared = problem(name, "bias", "shared", memory=memory, compact=False)
    shape = case.inputs["mask"].shape
    names = ("advantages", "old_logprobs", "ref_logprobs", "segments", "mask", "term_index")
    empty = {key: shared.inputs[key][:0] for key in names if key in shared.inputs}
    for each in (case.but(mask=torch.zeros(shape)), case.but(targets=torch.full(shape, -100)), shared.but(**empty)):
        got = each.run(backend)
        assert got["loss"] == 0 and not any(got[f"d_{leaf}"].any() for leaf in each.op.leaves)


def test_targets_of_bytes_may_be_any_id() -> None:
    """-100, which is ignored, would be 156 among them."""
    case = problem("grpo", columns=256)
    case.inputs["targets"][0, 0] = 156
    losses = [case.run(None, F32, targets=case.inputs["targets"].to(of))["loss"] for of in (torch.int64, torch.uint8)]
    assert torch.equal(*losses)


@needs_cpu_kernels
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", ["grpo", "sequence"])
def test_no_rows_before_tokens_that_belong_to_none(name: str, compact: bool) -> None:
    """A micro-batch padded to a length can have tokens without rows, as for policy_loss."""
    case = problem(name, "packed")
    none = {"cu_seqlens": torch.tensor([0]), "advantages": torch.zeros(0).double()}
    case = case.but(**none, mask=torch.zeros_like(case.inputs["mask"]))
    assert_close(case.run("cpu", compact=compact, chunk_size=4), case.defined())


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["dapo", "entropy"])
@pytest.mark.parametrize("kept", [31, 30])
def test_ids_may_be_the_whole_vocabulary(name: str, kept: int) -> None:
    """Nothing is left for the kernels; or one column, which is the target of a token and not of another."""
    case = problem(name, "bias")
    case = case.but(**teachers.draw_teacher(case.inputs, k=kept))
    inputs = case.inputs
    missing = {*range(31)} - {*inputs["teacher_ids"][0, 0].tolist()}
    inputs["targets"][0, 0] = next(iter(missing), 3)
    assert_close(case.run("cpu"), case.defined())
    # nothing is left but the logit of a column that no model may choose, as in the padding of a vocabulary
    inputs["teacher_ids"][inputs["teacher_ids"] == 30] = -1
    inputs["bias"][30], inputs["targets"] = -INF, inputs["targets"].clamp(max=29)
    fast = case.run("cpu")
    assert_close(fast, case.run("cpu", memory="low"))
    assert fast["d_weight"].isfinite().all() and not fast["d_weight"][30].any() and fast["loss"].isfinite()


@pytest.mark.pairs
@pytest.mark.parametrize("target", [31, 32, -1])
@pytest.mark.parametrize("features", [(), ("teacher",)])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cpu"])
def test_a_wrong_target_is_nan_on_a_gpu(backend: str, features: tuple[str, ...], target: int) -> None:
    """Its values are not looked at before the kernels run."""
    case = problem("grpo", *features, rows=2)
    case.inputs["targets"][0, 1] = target
    assert case.run(backend, F32)["loss"].isnan()
