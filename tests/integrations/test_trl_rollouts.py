"""Answers of several rows, and flat groups, in TRL's loss: against the formula in float64, written apart.

The faults to notice: the rows of a rollout are counted one by one, in a baseline or in the loss; a loss depends on how
the rows are dealt to micro-batches or processes; a group without an advantage still has a KL term or a share.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

import grpo_kernels as gk
from tests.integrations import tiny_trl, two_rollouts
from tests.integrations.test_trl_parts import letters
from tests.integrations.two_rollouts import ADVANTAGES, LENGTHS, ROLLOUTS, trainer_of

BY_SEQUENCE = ("grpo", "dr_grpo", "luspo", "sapo")
ALL = [True] * 16
NOT_FLAT = [True] * 12 + [False] * 4


def generated(
    folder: Path, loss_type: str, batches: int = 4, names: Sequence[Any] | None = ROLLOUTS, **options: Any
) -> Any:
    """A trainer, and its generation batch, whose old log-probs differ from the current ones."""
    changes = {
        "loss_type": loss_type,
        "per_device_train_batch_size": 16 // batches,
        "gradient_accumulation_steps": batches,
        "steps_per_generation": batches,
    }
    trainer = trainer_of(folder, names, changes | options.pop("changes", {}), **options)
    trainer.model.train()
    output = trainer._generate_and_score_completions([dict(tiny_trl.prompts()[i // 4]) for i in range(16)])
    with torch.no_grad():
        now, _, _ = trainer._forward(trainer.model, output)
    random = torch.Generator().manual_seed(1)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        output[name] = now + 0.3 * torch.randn(now.shape, generator=random)
    return trainer, output


def gradient_of(trainer: Any) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])


def accumulated(trainer: Any, output: dict[str, Tensor], seed: int = 0) -> tuple[float, Tensor]:
    """The loss and the gradient of all micro-batches, as one optimizer step has them."""
    torch.manual_seed(seed)
    batches = trainer.args.steps_per_generation
    trainer.current_gradient_accumulation_steps = batches
    trainer.model.zero_grad()
    total = 0.0
    for inputs in split_tensor_dict(shuffle_sequence_dict(output), batches):
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    return total, gradient_of(trainer)


def expected(trainer: Any, output: dict[str, Tensor], loss_type: str, kept: list[bool]) -> tuple[float, Tensor]:
    """The loss of the kept rows in float64, and its gradient."""
    trainer.model.zero_grad()
    whole = {**output, "completion_mask": torch.arange(7) < torch.tensor(LENGTHS)[:, None]}
    logprobs = trainer._forward(trainer.model, whole)[0].double()
    ratio = (logprobs - output["old_per_token_logps"].double()).exp()
    advantage = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None]
    if loss_type == "sapo":
        heat = torch.where(advantage > 0, 1.0, 1.05)
        term = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
    else:
        term = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    away = output["ref_per_token_logps"].double() - logprobs
    term = term + 0.04 * (away.exp() - away - 1)
    here = two_rollouts.mask() & torch.tensor(kept)[:, None]
    loss = torch.where(here, weights_by_hand(loss_type, kept) * term, 0).sum()
    loss.backward()
    return loss.item(), gradient_of(trainer)


def weights_by_hand(loss_type: str, kept: list[bool]) -> Tensor:
    """The weight of each row's tokens, by loops over rollouts."""
    lengths = two_rollouts.mask().sum(1).tolist()
    if loss_type == "dapo":
        tokens = sum(length for length, is_kept in zip(lengths, kept, strict=True) if is_kept)
        return torch.full((16, 1), 1 / tokens, dtype=torch.float64)
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(ROLLOUTS):
        if kept[row]:
            rows.setdefault(name, []).append(row)
    weights = torch.zeros(16, 1, dtype=torch.float64)
    for members in rows.values():
        tokens = max(sum(lengths[row] for row in members), 1)
        weights[members] = {"dr_grpo": 1 / 7, "luspo": 1.0}.get(loss_type, 1 / tokens) / len(rows)
    return weights


def assert_close(got: tuple[float, Tensor], want: tuple[float, Tensor]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", [*BY_SEQUENCE, "dapo"])
def test_a_rollout_counts_once(tmp_path: Path, loss_type: str) -> None:
    """However its rows are dealt to micro-batches."""
    for batches, head in ((4, "logprobs"), (8, "logprobs"), (4, "fused"), (1, "logprobs")):
        trainer, output = generated(tmp_path, loss_type, batches, head=head)
        assert output["advantages"].tolist() == pytest.approx(ADVANTAGES)
        want = expected(trainer, output, loss_type, ALL)
        for seed in (0, 1):
            assert_close(accumulated(trainer, output, seed), want)


@pytest.mark.parametrize("loss_type", [*BY_SEQUENCE, "dapo", "bnpo"])
def test_rollouts_of_one_row_are_those_of_trl(tmp_path: Path, loss_type: str) -> None:
    """The same loss as without ids."""
    results = []
    for names in (None, tuple(range(16))):
        trainer, output = generated(tmp_path, loss_type, names=names, rewards=range(16))
        assert output["advantages"].any()
        results.append(accumulated(trainer, output))
    assert_close(*results)


def test_masked_rows_vote_where_asked(tmp_path: Path) -> None:
    _, output = generated(tmp_path, "grpo", masked_rows="vote")
    # the mean of c, d and k
    assert output["advantages"][4:8].tolist() == pytest.approx([2 - 103 / 3, 1 - 103 / 3, 2 - 103 / 3, 100 - 103 / 3])


def test_lengths_are_those_of_rollouts(tmp_path: Path) -> None:
    _, output = generated(tmp_path, "grpo", advantages=gk.AdvantageConfig("opo"))
    # 12 tokens of a, 5 of b
    assert output["advantages"][:4].tolist() == pytest.approx([5 / 17] * 3 + [-12 / 17])


@pytest.mark.parametrize("loss_type", [*BY_SEQUENCE, "dapo"])
@pytest.mark.parametrize("head", ["logprobs", "fused"])
def test_flat_groups_are_left_out(tmp_path: Path, loss_type: str, head: str) -> None:
    """In the loss, its KL term and its divisor."""
    trainer, output = generated(tmp_path, loss_type, flat_groups="leave_out", head=head)
    want = expected(trainer, output, loss_type, NOT_FLAT)
    assert_close(accumulated(trainer, output), want)
    assert not torch.allclose(want[1], expected(trainer, output, loss_type, ALL)[1], rtol=1e-2)


def test_flat_groups_without_rollouts(tmp_path: Path) -> None:
    """The loss of a batch with flat groups is that of the batch without them."""
    rewards = (1.0, 0.0, 0.5, 0.0, *[0.7] * 8, 1.0, 2.0, 0.0, 0.0)
    trainer, output = generated(tmp_path, "grpo", names=None, rewards=rewards, flat_groups="leave_out")
    got = accumulated(trainer, output)
    other, own = generated(tmp_path, "grpo", names=None, rewards=rewards)
    rows = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    own["num_items_in_batch"] = own["num_items_in_batch"][None].expand(16)
    part = {name: value[rows] for name, value in own.items()}
    part["num_items_in_batch"] = part["num_items_in_batch"][0]
    other.args.steps_per_generation = 1
    assert_close(got, accumulated(other, part))
    assert not torch.allclose(
        got[1], accumulated(*generated(tmp_path, "grpo", names=None, rewards=rewards))[1], rtol=1e-2
    )


def entropies_by_hand(trainer: Any, output: dict[str, Tensor]) -> tuple[float, Tensor]:
    """The mean entropy of the batch's tokens in the loss, from the logits, and its gradient."""
    trainer.model.zero_grad()
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    seen = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=seen).logits.double()
    logits = logits[:, -output["completion_ids"].shape[1] - 1 : -1] / trainer.temperature
    entropy = -(logits.softmax(2) * logits.log_softmax(2)).sum(2)
    mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
    mean = entropy[mask].mean()
    mean.backward()
    return mean.item(), gradient_of(trainer)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
def test_the_entropy_bonus_is_a_mean_over_the_batch_where_asked(tmp_path: Path, loss_type: str) -> None:
    """And not of micro-batches, however the rows are dealt."""
    for batches, options in (
        (8, {"names": None, "rewards": range(16), "head": "fused"}),
        (2, {"flat_groups": "leave_out"}),
    ):
        results = []
        for coef, kind in ((0.0, "batch"), (0.5, "batch"), (0.5, "micro_batch")):
            trainer, output = generated(
                tmp_path, loss_type, batches, changes={"entropy_coef": coef}, entropy_mean=kind, **options
            )
            results.append(accumulated(trainer, output))
        mean, gradient = entropies_by_hand(trainer, output)
        (without, plain), (got, moved), (of_parts, _) = results
        assert without - got == pytest.approx(0.5 * mean, rel=1e-4)
        torch.testing.assert_close(plain - moved, 0.5 * gradient, rtol=1e-3, atol=1e-5)
        assert batches == 2 or of_parts != pytest.approx(got, rel=1e-4)


def test_a_mean_entropy_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"entropy_mean must be 'micro_batch' with top_entropy_quantile, .* with 0\.5"):
        trainer_of(tmp_path, changes={"top_entropy_quantile": 0.5}, entropy_mean="batch")
    with pytest.raises(ValueError, match="entropy_mean must be one of micro_batch, batch, got 'batches'"):
        trainer_of(tmp_path, entropy_mean="batches")


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_batch_of_flat_groups_alone(tmp_path: Path, loss_type: str) -> None:
    trainer, output = generated(tmp_path, loss_type, names=None, rewards=[1.0] * 16, flat_groups="leave_out")
    loss, gradient = accumulated(trainer, output)
    assert loss == 0 and not gradient.any()


def test_a_loss_of_ones_own_gets_the_weights(tmp_path: Path) -> None:
    seen: list[Any] = []

    def loss(*arguments: Any, **options: Any) -> gk.PolicyLoss:
        seen.append(options.get("weights"))
        return gk.policy_loss(*arguments, **options)

    for names in (ROLLOUTS, None):
        trainer, output = generated(
            tmp_path, "grpo", 1, names=names, rewards=range(16) if names is None else two_rollouts.REWARDS, loss=loss
        )
        accumulated(trainer, output)
    assert seen[0] is not None and float(seen[0].sum()) == pytest.approx(9 / 10)  # k has no token
    assert seen[1] is None


REFUSED = [
    ({"importance_sampling_level": "sequence"}, {}, "the ratio of the loss must be that of a token .*, got 'sequence'"),
    ({"loss_type": "vespo"}, {}, "loss_type must not be 'vespo'"),
    ({"off_policy_mask_threshold": 0.5}, {}, "off_policy_mask_threshold must be None .*, got 0.5"),
    ({}, {"similarity": gk.SimilarityConfig(), "embedder": letters}, "similarity must be None"),
    ({}, {"segments": gk.SegmentConfig()}, "segments must be None"),
    ({}, {"loss": gk.LossConfig(ratio="sequence_token")}, "the ratio of the loss must .*, got 'sequence_token'"),
]


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED)
def test_what_reads_sequences_is_refused(tmp_path: Path, changes: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^FusedGRPOTrainer: {message}"):
        generated(tmp_path, changes.get("loss_type", "grpo"), changes=changes, **options)
    if "segments" not in options:
        generated(tmp_path, changes.get("loss_type", "grpo"), names=None, rewards=range(16), changes=changes, **options)


def test_a_correction_of_sequences_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.use_vllm = True
    rewards = torch.zeros(16, 1)
    output, rollouts = {"completion_mask": torch.ones(16, 1)}, torch.arange(16)
    with pytest.raises(ValueError, match=r"vllm_importance_sampling_mode must be of tokens .*, got 'sequence_mask'"):
        trainer.add_advantages(output, rewards, 4, rollouts)
    trainer.vllm_importance_sampling_mode = "token_truncate"
    assert not trainer.add_advantages(output, rewards, 4, rollouts).any()


def test_ids_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    rows = torch.zeros(16, 1)
    trainer.rollouts._names = list("aab")
    with pytest.raises(
        ValueError, match=r"^FusedGRPOTrainer: 'rollout' of rollout_func must be a list .* of 16 .* 3 ids"
    ):
        trainer.rollouts.gather(rows)
    trainer.rollouts._names = "a" * 16
    with pytest.raises(ValueError, match=r"got str$"):
        trainer.rollouts.gather(rows)
    trainer.rollouts._names = list(ROLLOUTS)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda ids: torch.cat([torch.full_like(ids, -1), ids]))
    with pytest.raises(ValueError, match="in all processes or in none, got both"):
        trainer.rollouts.gather(rows)
    with pytest.raises(RuntimeError, match="rewards must be equal in all rows of a rollout"):
        generated(tmp_path, "grpo", rewards=range(16))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="groups must be equal in all rows of a rollout"):  # of two prompts
        trainer.add_advantages({"completion_mask": torch.ones(4, 1)}, torch.zeros(4, 1), 2, torch.tensor([0, 1, 1, 3]))
    with pytest.raises(ValueError, match=r"flat_groups must be one of keep, leave_out, got 'leaveout' \(did you mean"):
        trainer_of(tmp_path, flat_groups="leaveout")
    with pytest.raises(ValueError, match="flat_groups must be 'keep' with segments"):
        trainer_of(tmp_path, segments=gk.SegmentConfig(), flat_groups="leave_out")


@pytest.mark.full
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Ids of one process are not those of the other, although they are equal."""
    file = tmp_path / "logs.json"
    script = str(Path(two_rollouts.__file__))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, str(file)]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parent.parent.parent, capture_output=True)
    for got, want in zip(json.loads(file.read_text()), two_rollouts.trained(4), strict=True):
        assert len(got) == len(want) == 2
        for ours, single in zip(got, want, strict=True):
            assert ours == pytest.approx(single, rel=1e-4, abs=1e-6)
