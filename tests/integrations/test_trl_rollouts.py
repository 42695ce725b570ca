"""Answers of several rows, and flat groups, in TRL's loss: against the formula in float64, written apart.

The faults to notice: the rows of a rollout are counted one by one, in a baseline or in the loss; a loss depends on how
the rows are dealt to micro-batches or processes; a group without an advantage still has a KL term or a share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

import grpo_kernels as gk
from grpo_kernels.integrations.trl import counting
from tests.harness import assert_close_to_rounding
from tests.integrations import tiny_trl
from tests.integrations.test_trl_errors import SEGMENTS, SIMILAR

# Four rows for each of four prompts. The second row of c has no token in the loss, nor has k; i is alone.
ROLLOUTS = (*"aaab", *"cdck", *"efgh", *"iiii")
LENGTHS = (7, 1, 4, 5, 3, 6, 2, 4, 1, 7, 3, 2, 5, 5, 1, 6)
MASKED = (6, 7)
BY_SEQUENCE = ("grpo", "dr_grpo", "luspo", "sapo")
ALL = [True] * 16
NOT_FLAT = [True] * 12 + [False] * 4
# in the last row of each rollout, the others state none
REWARDS = (None, None, 1.0, 0.0, None, 1.0, 2.0, 100.0, 1.0, 0.25, 0.0, 0.75, None, None, None, 1.0)
ADVANTAGES = (0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.5, 0, 0.5, -0.25, -0.5, 0.25, 0, 0, 0, 0)


def mask() -> Tensor:
    lengths = torch.tensor([0 if row in MASKED else length for row, length in enumerate(LENGTHS)])
    return torch.arange(max(LENGTHS)) < lengths[:, None]


def rollouts_of(
    names: Sequence[Any] | None, rewards: Sequence[float | None] = REWARDS, lengths: Sequence[int] = LENGTHS
) -> Callable[..., Any]:
    """A rollout_func. Prompts are numbered within a process, so that other processes have the same ids."""

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        first = trainer.accelerator.process_index * count
        rows = [row % 16 for row in range(first, first + count)]
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, len(tiny_trl.WORDS), (16, max(LENGTHS)), generator=random).tolist()
        output: dict[str, Any] = {
            "prompt_ids": [tiny_trl.tokenizer()(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [tokens[row][: lengths[row]] for row in rows],
            "logprobs": None,
            "env_mask": [[int(row not in MASKED)] * lengths[row] for row in rows],
            "score": [rewards[row] for row in rows],
        }
        if names is not None:
            output["rollout"] = [(place // 4, names[row]) for place, row in enumerate(rows)]
        return output

    return rollouts


def trainer_of(folder: Path, names: Sequence[Any] | None = ROLLOUTS, changes: Any = None, **options: Any) -> Any:
    """A trainer of generation batches of these 16 rows."""
    settings = {"scale_rewards": "none", "use_bias_correction_kl": False, "optim": "sgd", **(changes or {})}
    rollouts = rollouts_of(names, options.pop("rewards", REWARDS), options.pop("lengths", LENGTHS))
    rewards = [lambda completions, score, **_: score]
    return tiny_trl.trainer(folder, changes=settings, reward_funcs=rewards, rollout_func=rollouts, **options)


def generated(
    folder: Path, loss_type: str, batches: int = 4, names: Sequence[Any] | None = ROLLOUTS, **options: Any
) -> Any:
    """A trainer, and its generation batch, whose old log-probs differ from the current ones."""
    changes = {"loss_type": loss_type, "per_device_train_batch_size": 16 // batches}
    changes |= dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation"), batches)
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


def weights_by_hand(loss_type: str, kept: list[bool]) -> Tensor:
    """The weight of each row's tokens, by loops over rollouts."""
    lengths = mask().sum(1).tolist()
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(ROLLOUTS):
        if kept[row]:
            rows.setdefault(name, []).append(row)
    weights = torch.zeros(16, 1)
    for members in rows.values():
        tokens = max(sum(lengths[row] for row in members), 1)
        weights[members] = {"dr_grpo": 1 / 7, "luspo": 1.0}.get(loss_type, 1 / tokens) / len(rows)
    return weights


@pytest.mark.parametrize("flat_groups", ["keep", "leave_out"])
@pytest.mark.parametrize("loss_type", [*BY_SEQUENCE, "dapo"])
def test_a_rollout_counts_once_and_flat_groups_where_asked(tmp_path: Path, loss_type: str, flat_groups: str) -> None:
    """In the weights of the loss, whose sum and gradient do not depend on how rows are dealt to micro-batches.

    With a bonus of the mean entropy of the batch.
    """
    kept = ALL if flat_groups == "keep" else NOT_FLAT
    options: dict[str, Any] = {"changes": {"entropy_coef": 0.5}, "entropy_mean": "batch", "flat_groups": flat_groups}
    calls = []
    for batches, head, seed in ((4, "logprobs", 0), (8, "logprobs", 1), (4, "fused", 2), (1, "logprobs", 3)):
        trainer, output = generated(tmp_path, loss_type, batches, head=head, **options)
        assert output["advantages"].tolist() == pytest.approx(ADVANTAGES)
        in_loss = mask() & torch.tensor(kept)[:, None]
        assert output["num_items_in_batch"] == in_loss.sum()
        if loss_type == "dapo":
            assert "loss_weights" not in output
        else:
            want = torch.where(in_loss, weights_by_hand(loss_type, kept), 0) * batches
            torch.testing.assert_close(output["loss_weights"], want)
        calls.append(functools.partial(accumulated, trainer, output, seed))
    want = calls[0]()
    for call in calls[1:]:
        assert_close_to_rounding(call(), want, calls[0])
    trainer.entropy_coef = 0.0

    def with_bonus() -> Tensor:
        _, entropy, _ = trainer._forward(trainer.model, output, with_entropy=True)
        return accumulated(trainer, output)[0] - 0.5 * entropy.detach()[in_loss].mean()

    assert_close_to_rounding(want[0], with_bonus(), with_bonus)


def test_a_bonus_of_segments_is_of_completions_with_a_reward(tmp_path: Path) -> None:
    calls = []
    for mean in ("batch", "micro_batch"):
        options: dict[str, Any] = {"changes": {"entropy_coef": 0.5}, "entropy_mean": mean}
        options["segments"] = gk.SegmentConfig(group_max_size=3)
        trainer, output = generated(tmp_path, "dapo", 1, None, **options)
        assert 0 < output["num_items_in_batch"] < mask().sum()
        calls.append(functools.partial(accumulated, trainer, output))
    assert_close_to_rounding(calls[0](), calls[1](), calls[1])


@pytest.mark.parametrize("loss_type", [*BY_SEQUENCE, "dapo", "bnpo"])
def test_rollouts_of_one_row_are_those_of_trl(tmp_path: Path, loss_type: str) -> None:
    """The same loss as without ids."""
    calls = []
    for names in (None, tuple(range(16))):
        trainer, output = generated(tmp_path, loss_type, names=names, rewards=range(16))
        assert output["advantages"].any()
        calls.append(functools.partial(accumulated, trainer, output))
    assert_close_to_rounding(calls[0](), calls[1](), calls[1])


def test_rollouts_of_the_second_of_two_processes() -> None:
    """Equal ids of two processes are of different rollouts, and the processes' losses are averaged."""
    accelerator = SimpleNamespace(num_processes=2, process_index=1, gather=lambda values: torch.cat([values, values]))
    config = gk.LossConfig(aggregation="seq-mean-token-mean")
    trainer: Any = SimpleNamespace(accelerator=accelerator, _loss_config=lambda _: config)
    trainer.rollout_func = lambda: {"rollout": ["a", "b", "a"]}
    rollouts = counting.Rollouts(trainer)
    trainer.rollout_func()
    ids = rollouts.gather(torch.zeros(3))
    assert ids is not None and ids.tolist() == [0, 1, 0, 3, 4, 3]
    output: dict[str, Any] = {"completion_mask": torch.ones(3, 2)}
    counting.count_once(trainer, output, ids, None, 4)
    # a fourth of a mean over four tokens, or two; of two processes, in one of four micro-batches
    assert output[counting.WEIGHTS].tolist() == [[0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("options", "first", "want"),
    [
        # the mean of c, d and k
        ({"masked_rows": "vote"}, 4, [2 - 103 / 3, 1 - 103 / 3, 2 - 103 / 3, 100 - 103 / 3]),
        # 12 tokens of a, 5 of b
        (
            {"advantages": gk.AdvantageConfig("opo"), "changes": {"scale_rewards": "group"}},
            0,
            [*[5 / 17] * 3, -12 / 17],
        ),
    ],
    ids=str,
)
def test_rollouts_vote_and_have_lengths(tmp_path: Path, options: Any, first: int, want: list[float]) -> None:
    _, output = generated(tmp_path, "grpo", **options)
    assert output["advantages"][first : first + 4].tolist() == pytest.approx(want)


def test_flat_groups_without_rollouts(tmp_path: Path) -> None:
    """The loss of a batch with flat groups is that of the batch without them, and 0 if there are no others."""
    rewards = (1.0, 0.0, 0.5, 0.0, *[0.7] * 8, 1.0, 2.0, 0.0, 0.0)
    got = accumulated(*generated(tmp_path, "grpo", names=None, rewards=rewards, flat_groups="leave_out"))
    trainer, output = generated(tmp_path, "grpo", names=None, rewards=rewards)
    assert not torch.allclose(got[1], accumulated(trainer, output)[1], rtol=1e-2)
    rows = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    part = {name: value[rows] if value.dim() else value for name, value in output.items()}
    trainer.args.steps_per_generation = 1
    assert_close_to_rounding(got, accumulated(trainer, part), lambda: accumulated(trainer, part))
    for loss_type in ("grpo", "dapo"):
        flat = generated(tmp_path, loss_type, names=None, rewards=[1.0] * 16, flat_groups="leave_out")
        loss, gradient = accumulated(*flat)
        assert loss == 0 and not gradient.any()


def test_a_loss_of_ones_own_gets_the_weights(tmp_path: Path) -> None:
    seen: list[Any] = []

    def loss(*arguments: Any, **options: Any) -> gk.PolicyLoss:
        seen.append(options.get("weights", "left out"))
        return gk.policy_loss(*arguments, **options)

    for names in (ROLLOUTS, None):
        trainer, output = generated(
            tmp_path, "grpo", 1, names=names, rewards=range(16) if names is None else REWARDS, loss=loss
        )
        accumulated(trainer, output)
    assert float(seen[0].sum()) == pytest.approx(9 / 10)  # k has no token
    assert seen[1] == "left out"
    trainer, output = generated(tmp_path, "grpo", 1, loss=lambda *arguments, **options: 0.0)
    with pytest.raises(TypeError, match=r"^FusedGRPOTrainer: loss must return a PolicyLoss, got float 0.0$"):
        accumulated(trainer, output)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"importance_sampling_level": "sequence"}, {}, "the ratio of the loss must be that of a token .*, got 'sequence'"),
    ({"loss_type": "vespo"}, {}, "loss_type must not be 'vespo'"),
    ({"off_policy_mask_threshold": 0.5}, {}, "off_policy_mask_threshold must be None .*, got 0.5"),
    ({}, SIMILAR, "similarity must be None"),
    ({}, SEGMENTS, "segments must be None"),
    ({}, {"loss": gk.LossConfig(ratio="sequence_token")}, "the ratio of the loss must .*, got 'sequence_token'"),
]


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED)
def test_what_reads_sequences_is_refused(tmp_path: Path, changes: Any, options: Any, message: str) -> None:
    loss_type = changes.get("loss_type", "grpo")
    with pytest.raises(ValueError, match=f"^FusedGRPOTrainer: {message}"):
        generated(tmp_path, loss_type, changes=changes, **options)
    if "segments" not in options:
        generated(tmp_path, loss_type, names=None, rewards=range(16), changes=changes, **options)


def test_ids_and_rewards_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rows = trainer_of(tmp_path), torch.zeros(16, 1)
    for names, message in (
        (list("aab"), "^FusedGRPOTrainer: 'rollout' of rollout_func must be a list .* of 16 .* 3 ids"),
        ("a" * 16, "got str$"),
    ):
        trainer.rollouts._names = names
        with pytest.raises(ValueError, match=message):
            trainer.rollouts.gather(rows)
    trainer.rollouts._names = list(ROLLOUTS)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.accelerator, "gather", lambda ids: torch.cat([torch.full_like(ids, -1), ids]))
        with pytest.raises(ValueError, match="in all processes or in none, got both"):
            trainer.rollouts.gather(rows)
    with pytest.raises(RuntimeError, match="rewards must be equal in all rows of a rollout"):
        generated(tmp_path, "grpo", rewards=range(16))
    with pytest.raises(RuntimeError, match="groups must be equal in all rows of a rollout"):  # of two prompts
        trainer.add_advantages({"completion_mask": torch.ones(4, 1)}, torch.zeros(4, 1), 2, torch.tensor([0, 1, 1, 3]))
    trainer.use_vllm = True
    arguments = {"completion_mask": torch.ones(16, 1)}, rows, 4, torch.arange(16)
    with pytest.raises(ValueError, match=r"vllm_importance_sampling_mode must be of tokens .*, got 'sequence_mask'"):
        trainer.add_advantages(*arguments)
    trainer.vllm_importance_sampling_mode = "token_truncate"
    assert not trainer.add_advantages(*arguments).any()
