"""FusedGRPOTrainer(batching="by_length"): gradients and metrics of TRL's micro-batches, from other ones.

Faults in view: a weight of a token counted in another micro-batch than TRL's, a row that has a gradient and does not
run, a metric of other rows, columns cropped that are not padding, positions that a model counts from the left,
gradients that are None where TRL's are zeros, another random stream.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import GradientState
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, by_length
from grpo_kernels.integrations.trl.by_length import Croppable, Lengths
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.harness import assert_close_to_rounding, quick
from tests.integrations import tiny_models, tiny_trl
from tests.integrations.test_trl import Ours, Theirs, figures
from tests.integrations.test_trl_rollouts import trainer_of
from tests.integrations.tiny_trl import trainer as made

on_heads = pytest.mark.parametrize("head", ["logprobs", "fused"])
BY_LENGTH = {"batching": "by_length", "masked_rows": "vote"}
PROMPTS = [2, 5, 1, 3, 4, 1, 2, 3, 1, 5, 2, 2, 3, 1, 4, 2]
COMPLETIONS = [7, 1, 3, 2, 5, 4, 0, 2, 6, 3, 1, 5, 2, 4, 3, 2]
FLAT = [3, 4, 5, 9]  # rows without an advantage; so is row 6, which has no token
Window = list[dict[str, Any]]


def window(trainer: Any, rows: int = 4, **changes: Any) -> Window:
    """A generation batch in micro-batches of some rows, with tools, old, reference and sampling log-probs."""
    random = torch.Generator().manual_seed(5)
    total, before, width = len(PROMPTS), 6, 8  # a column more than the longest on both sides
    ids = torch.randint(3, len(tiny_trl.WORDS), (total, before + width), generator=random)
    columns, prompts, completions = torch.arange(width), torch.tensor(PROMPTS), torch.tensor(COMPLETIONS)
    mask = (columns < completions[:, None]).long()
    tool_mask = torch.ones_like(mask)
    tool_mask[0, 2:4] = tool_mask[8, 0] = 0
    advantages = torch.randn(total, generator=random)
    advantages[FLAT] = 0
    batch = {
        "prompt_ids": ids[:, :before],
        "prompt_mask": (torch.arange(before) >= before - prompts[:, None]).long(),
        "completion_ids": ids[:, before:],
        "completion_mask": mask,
        "tool_mask": tool_mask,
        "advantages": advantages,
    }
    with torch.no_grad():
        now, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            trainer.model,
            ids,
            torch.cat([batch["prompt_mask"], mask], 1),
            width,
        )
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        batch[name] = now + 0.3 * torch.randn(now.shape, generator=random)
    if trainer.use_vllm:
        ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
        ratio[10] = 0  # a whole row that a correction leaves out
        ratio[0, :3] = 0
        batch["importance_sampling_ratio"] = torch.where((mask * tool_mask).bool(), ratio, 1.0)
    batch |= changes
    parts = [{name: value[at : at + rows] for name, value in batch.items()} for at in range(0, total, rows)]
    count = (mask * tool_mask).sum()
    return [part | {"num_items_in_batch": count} for part in parts]


def exact(folder: Path, changes: dict[str, Any], **options: Any) -> Any:
    """A trainer of GPT-2 with our head, all in float64. It is cropped on the right alone."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=len(tiny_trl.WORDS), bos_token_id=1, eos_token_id=1, **sizes, **dropout))
    trainer = made(
        folder, changes={**changes, "beta": 0.0}, model=lm.double(), **{"head": "fused", **BY_LENGTH, **options}
    )
    trainer.beta = changes.get("beta", 0.0)  # the reference's log-probs are given
    return trainer


@pytest.fixture(autouse=True)
def synchronising() -> Iterator[None]:
    """As accelerate's state of a process is without a trainer."""
    yield
    GradientState()._set_sync_gradients(True)


def passes(trainer: Any, parts: Window, compute: Any = FusedGRPOTrainer._compute_loss) -> Any:
    """The loss of an optimizer step over a window, the gradients, and the means that it logs."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer._buffered_inputs, trainer._step, total = parts, 0, 0.0
    if trainer.dealer is not None:
        trainer.dealer.on_step_begin()
    for part in parts:
        trainer.accelerator.gradient_state._set_sync_gradients(trainer._step == len(parts) - 1)
        inputs = dict(part) if trainer.dealer is None else trainer.dealer.next()
        loss = compute(trainer, trainer.model, inputs)
        loss.backward()
        total += loss.item()
        trainer._step += 1
    gradients = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
    return total, gradients, {name: statistics.fmean(values) for name, values in trainer._metrics["train"].items()}


def without_dealer(trainer: Any, parts: Window, compute: Any = FusedGRPOTrainer._compute_loss) -> Any:
    with mock.patch.object(trainer, "dealer", None):
        return passes(trainer, parts, compute)


def without_entropy(logs: dict[str, float]) -> dict[str, float]:
    """Means of all rows; those of entropies are of the rows that ran."""
    return {name: value for name, value in logs.items() if name not in ("entropy", "vespo/phi_seq_mean")}


def assert_same_step(trainer: Any, parts: Window, left_out: int) -> None:
    """The step of the micro-batches that the trainer makes by default, which other tests compare with TRL's."""
    got, want = passes(trainer, parts), without_dealer(trainer, parts)
    assert got[2].pop("by_length/rows_left_out") == left_out and got[2].keys() == want[2].keys()
    if left_out:
        got, want = ((*result[:2], without_entropy(result[2])) for result in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, equal_nan=True)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL": {"beta": 0.04},
    "sequences": {"importance_sampling_level": "sequence"},
    "filters": {"off_policy_mask_threshold": 0.05, "delta": 1.3},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_the_step_does_not_depend_on_the_dealing(tmp_path: Path, loss_type: str, setting: str) -> None:
    if loss_type == "vespo" and setting == "sequences":
        pytest.skip("TRL refuses it")
    trainer = exact(tmp_path, {"loss_type": loss_type} | SETTINGS[setting])
    assert_same_step(trainer, window(trainer), left_out=5 if trainer.beta == 0 else 1)


@pytest.mark.parametrize("name", quick(("llama", "gemma2", "cohere"), "llama", "gemma2"))
def test_the_step_is_trls(tmp_path: Path, name: str) -> None:
    """Models with RoPE are cropped on both sides."""
    trainer = made(tmp_path, changes={"loss_type": "grpo", "beta": 0.0}, model=tiny_models.model(name), **BY_LENGTH)
    parts = window(trainer)

    def theirs() -> Any:
        loss, gradients, logs = without_dealer(trainer, parts, GRPOTrainer._compute_loss)
        return loss, gradients, without_entropy(logs)

    loss, gradients, logs = passes(trainer, parts)
    assert logs.pop("by_length/rows_left_out") == 5
    assert_close_to_rounding((loss, gradients, without_entropy(logs)), theirs(), theirs)


@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("by_row", [False, True], ids=["token", "row"])
def test_weights_of_vllm(tmp_path: Path, loss_type: str, by_row: bool) -> None:
    """A row of weights of 0 has no gradient, except with VESPO."""
    if loss_type == "vespo" and by_row:
        pytest.skip("TRL refuses it")
    trainer = exact(tmp_path, {"loss_type": loss_type})
    trainer.use_vllm = True
    parts = window(trainer)
    if by_row:
        parts = [part | {"importance_sampling_ratio": part["importance_sampling_ratio"][:, :1]} for part in parts]
    # by rows, that of the first token is 0 in two rows
    assert_same_step(trainer, parts, left_out=5 if loss_type == "vespo" else 7 if by_row else 6)


@pytest.mark.parametrize("rows", [16, 8, 2, 1])
def test_other_numbers_of_micro_batches(tmp_path: Path, rows: int) -> None:
    """One can only be cropped; with one row each, as many have nothing to run as rows are left out."""
    for loss_type in ("grpo", "dapo"):
        trainer = exact(tmp_path, {"loss_type": loss_type})
        assert_same_step(trainer, window(trainer, rows), left_out=5)


def runs_of(trainer: Any, parts: Window) -> list[tuple[int, int]]:
    """Rows and tokens, with padding, of the calls of the model in a step."""
    with mock.patch.object(trainer.model, "forward", wraps=trainer.model.forward) as forward:
        passes(trainer, parts)
    shapes = [tuple(call.kwargs["input_ids"].shape) for call in forward.call_args_list]
    return [(rows, rows * columns) for rows, columns in shapes]


def test_what_runs(tmp_path: Path) -> None:
    changes = {"beta": 0.0}
    parts = window(made(tmp_path, changes=changes))
    plain = runs_of(made(tmp_path, changes=changes), parts)
    assert plain == [(4, 4 * 14)] * 4
    dealt = runs_of(made(tmp_path, changes=changes, **BY_LENGTH), parts)
    assert sum(rows for rows, _ in dealt) == 16 - 5 and len(dealt) == 4
    assert max(tokens for _, tokens in dealt) <= 0.5 * 56 and sum(tokens for _, tokens in dealt) <= 0.4 * 4 * 56
    fuller = runs_of(made(tmp_path, changes=changes, micro_batch_tokens=60, **BY_LENGTH), parts)
    assert len(fuller) == 2 and 28 < max(tokens for _, tokens in fuller) <= 60
    trainer = exact(tmp_path, {}, micro_batch_tokens=60)
    assert_same_step(trainer, window(trainer), left_out=5)
    padded = runs_of(made(tmp_path, changes=changes | {"pad_to_multiple_of": 2}, **BY_LENGTH), parts)
    assert {tokens // rows % 2 for rows, tokens in dealt} == {0, 1} and {
        tokens // rows % 2 for rows, tokens in padded
    } == {0}


def test_every_process_runs_the_model_equally_often(tmp_path: Path) -> None:
    """A micro-batch without rows runs one of weight zero, as forwards may be collectives."""
    trainer = exact(tmp_path, {})
    parts = window(trainer, rows=1)
    assert len(runs_of(trainer, parts)) == 11
    trainer.dealer.is_alone = False
    assert len(runs_of(trainer, parts)) == 16
    assert_same_step(trainer, parts, left_out=5)


@pytest.mark.parametrize("is_alone", [True, False])
@on_heads
def test_without_any_gradient_there_are_zeros(tmp_path: Path, head: str, is_alone: bool) -> None:
    """Not None: weight decay and momentum go on, as in TRL."""
    trainer = made(tmp_path, changes={"beta": 0.0}, head=head, **BY_LENGTH)
    trainer.dealer.is_alone = is_alone
    parts = window(trainer, advantages=torch.zeros(16))
    assert [rows for rows, _ in runs_of(trainer, parts)] == [1] * (1 if is_alone else 4)
    _, gradients, logs = passes(trainer, parts)
    assert not any(gradient.any() for gradient in gradients.values())
    assert logs["by_length/rows_left_out"] == 16 and "entropy" not in logs and logs["clip_ratio/low_mean"] == 0


def test_terms_that_need_no_advantage_run(tmp_path: Path) -> None:
    """DRO's, and the entropy bonus of a batch."""
    for changes, options in (
        ({}, {"loss": gk.LossConfig("dro", dro_beta=0.3)}),
        ({"entropy_coef": 0.1}, {"entropy_mean": "batch"}),
    ):
        trainer = exact(tmp_path, changes, **options)
        assert_same_step(trainer, window(trainer), left_out=1)


# ----------------------------------------------------------------------------------------------------------- training

TRAINED: dict[str, dict[str, Any]] = {
    # windows of five micro-batches in generations of four, and a last one of four
    "across generations": {"gradient_accumulation_steps": 5, "beta": 0.0, "loss_type": "bnpo"},
    "several generations in a step": {"gradient_accumulation_steps": 8, "loss_type": "grpo", "max_steps": 3},
    "iterations": {"num_iterations": 3, "beta": 0.0},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "truncated": {"mask_truncated_completions": True, "loss_type": "dr_grpo"},
    "checkpointing": {"gradient_checkpointing": True, "loss_type": "luspo", "beta": 0.0},
    "adapters": {"loss_type": "sapo"},
}


@pytest.mark.parametrize("row", quick(TRAINED, "across generations", "iterations", "truncated"))
def test_training_is_trls(tmp_path: Path, row: str) -> None:
    """With SGD, to which the size of a gradient matters, and the rollouts of the same random stream."""
    options = {}
    if row == "adapters":
        peft = pytest.importorskip("peft")
        options = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}
    changes = {"max_steps": 6, "optim": "sgd", "learning_rate": 0.1} | TRAINED[row]
    moves, logs = [], []
    for kind in (Theirs, functools.partial(Ours, batching="by_length", head="fused")):
        torch.manual_seed(0)
        trainer: Any = made(tmp_path, kind, changes, **options)
        trainer.losses = []
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        moves.append({name: weight.detach() - before[name] for name, weight in trainer.model.named_parameters()})
        logs.append(figures(trainer))
    largest = max(float(move.abs().max()) for move in moves[0].values())
    assert largest > 1e-3
    for name, move in moves[0].items():
        assert float((moves[1][name] - move).abs().max()) <= 2e-4 * largest, name
    for theirs, ours in zip(*logs, strict=True):
        left_out = ours.pop("by_length/rows_left_out")
        assert ours.keys() == theirs.keys() - ({"entropy"} - ours.keys() if left_out else set())
        for name in ours.keys() - ({"entropy"} if left_out else set()):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5, nan_ok=True), name


def test_adamw_goes_on_without_a_gradient(tmp_path: Path) -> None:
    """A step in which no row has an advantage decays the weights and keeps its momentum, as in TRL."""
    changes = {"optim": "adamw_torch", "weight_decay": 0.1, "beta": 0.0, "max_steps": 4, "num_iterations": 1}
    changes |= {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    weights = []
    for batching in ("trl", "by_length"):
        calls: list[int] = []

        def only_first(completions: list[str], calls: list[int] = calls, **_: Any) -> list[float]:
            calls.append(1)
            return [float(len(calls) == 1 and "a" in text) for text in completions]

        torch.manual_seed(0)
        trainer = made(tmp_path, changes=changes, reward_funcs=[only_first], batching=batching)
        trainer.train()
        weights.append({name: weight.detach().clone() for name, weight in trainer.model.named_parameters()})
        assert len(calls) == 4
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-6)


def test_the_default_gives_trls_own_micro_batches(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.model.train()
    inputs = trainer._prepare_inputs([dict(tiny_trl.prompts()[i // 4]) for i in range(16)])
    assert trainer.dealer is None and inputs is trainer._buffered_inputs[0]


def test_rollouts_of_several_rows(tmp_path: Path) -> None:
    """The weights of a rollout's rows are those of the generation batch, wherever they run."""
    changes = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.1, "beta": 0.0}
    changes |= dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation"), 4) | {"loss_type": "grpo"}
    weights, logs = [], []
    for batching in ("trl", "by_length"):
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path, changes=changes, batching=batching, flat_groups="leave_out")
        trainer.train()
        weights.append([weight.detach().clone() for weight in trainer.model.parameters()])
        logs.append(trainer.state.log_history[:-1])
    assert all(entry["by_length/rows_left_out"] > 0 for entry in logs[1])
    for got, want in zip(*weights, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- passes without loss


@pytest.mark.parametrize("is_alone", [True, False])
def test_old_and_reference_log_probs_are_dealt(tmp_path: Path, is_alone: bool) -> None:
    changes = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}
    trainer = made(tmp_path, changes=changes, **BY_LENGTH)
    trainer.dealer.is_alone = is_alone
    batch = window(trainer, rows=16)[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    arguments = (trainer.model, ids, mask, 8)
    with torch.no_grad():
        want, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments, batch_size=4)
        with mock.patch.object(trainer.model, "forward", wraps=trainer.model.forward) as forward:
            got, _, _ = trainer._get_per_token_logps_and_entropies(*arguments, batch_size=4)
    shapes = [call.kwargs["input_ids"].shape for call in forward.call_args_list]
    assert len(shapes) == 4 and sum(rows * columns for rows, columns in shapes) <= 0.65 * ids.numel()
    is_scored = batch["completion_mask"].bool()
    torch.testing.assert_close(got[is_scored], want[is_scored], rtol=1e-5, atol=1e-5)
    assert not got[~is_scored].any()


# -------------------------------------------------------------------------------------------------------------- models


def sides(of_model: Any = None, **fields: Any) -> Croppable:
    """Croppable sides of a Llama with fields of its config, or of another config."""
    sizes = {"hidden_size": 8, "num_attention_heads": 1}
    config = of_model or AutoConfig.for_model("llama", **sizes | fields)
    return Croppable.of(SimpleNamespace(config=config))


def text(**fields: Any) -> Any:
    """A config that has these fields alone."""
    inner = SimpleNamespace(model_type="a model", **fields)
    return SimpleNamespace(get_text_config=lambda: inner)


ROPE = {"rope_type": "default", "rope_theta": 1e4}


def test_sides_that_may_be_cropped() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert sides() == sides(rope_parameters=dynamic | {"rope_type": "linear"}) == (True, True)
    assert sides(rope_parameters=dynamic) == (False, False)
    assert sides(rope_parameters=long | {"original_max_position_embeddings": 32}) == (False, False)
    assert sides(text(rope_parameters={"full_attention": dynamic, "sliding_attention": ROPE})) == (False, False)
    assert sides(text(rope_parameters=ROPE, attention_chunk_size=4)) == (False, True)
    assert sides(text(rope_parameters=ROPE | {"llama_4_scaling_beta": 0.1})) == (False, True)
    assert sides(GPT2Config()) == (False, True)
    prefix = {"default": SimpleNamespace(is_prompt_learning=True)}
    assert Croppable.of(SimpleNamespace(config=text(rope_parameters=ROPE), peft_config=prefix)) == (False, True)


def test_recurrent_layers_must_not_see_padding() -> None:
    """With RoPE a row that runs alone is cropped to its prompt; others mask the padding."""
    assert sides(text(rope_parameters=ROPE, linear_conv_kernel_dim=4)) == (True, True)
    for fields in ({"state_size": 16}, {"rope_parameters": ROPE, "lru_width": 8}):
        with pytest.raises(ValueError, match=r"^FusedGRPOTrainer: batching must be 'trl' for a model .*'a model'$"):
            sides(text(**fields))
    masks = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]), torch.ones(2, 8)
    lengths = Lengths(*masks, Croppable(True, True), 4)
    assert lengths.longest(torch.tensor([0])) == (1, 8) and lengths.longest(torch.tensor([0, 1])) == (4, 8)


def test_inputs_of_a_subclass(tmp_path: Path) -> None:
    """Lists are dealt as in TRL, and tokens are masked anywhere in a completion."""
    trainer = exact(tmp_path, {"loss_type": "grpo"})
    parts = window(trainer)
    for number, part in enumerate(parts):
        part["completion_mask"] = part["completion_mask"] * (torch.arange(8) >= 2)
        part["names"] = [f"{number}{row}" for row in range(4)]
        part["lengths"] = part["completion_mask"].sum(1)
    left_out = sum(
        int(((part["completion_mask"] * part["tool_mask"]).sum(1) * part["advantages"] == 0).sum()) for part in parts
    )
    assert left_out > 5
    assert_same_step(trainer, parts, left_out)
    trainer._buffered_inputs, trainer._step = parts, 0
    trainer.dealer.on_step_begin()
    dealt = [trainer.dealer.next() for _ in parts]
    names = {name: int(count) for part in parts for name, count in zip(part["names"], part["lengths"], strict=True)}
    for inputs in dealt:
        assert len(inputs["names"]) == len(inputs["completion_ids"])
        assert [names[name] for name in inputs["names"]] == inputs["completion_mask"].sum(1).tolist()


def test_vespo_as_a_config_counts_rows_that_ran(tmp_path: Path) -> None:
    """Also in a micro-batch of TRL's of which none ran."""
    trainer = exact(tmp_path, {}, loss=gk.LossConfig("vespo"))
    parts = window(trainer)
    parts[1]["advantages"] = torch.zeros(4)
    logs = passes(trainer, parts)[2]
    seen = []
    for part in (parts[0], parts[2], parts[3]):
        ran = (part["advantages"] != 0) & (part["completion_mask"] * part["tool_mask"]).any(1)
        seen.append(without_dealer(trainer, [by_length.at(part, ran.nonzero().squeeze(1))])[2]["vespo/phi_seq_mean"])
    assert logs["vespo/phi_seq_mean"] == pytest.approx(statistics.fmean(seen), rel=1e-9)


def test_images_are_refused(tmp_path: Path) -> None:
    trainer = made(tmp_path, changes={"beta": 0.0}, **BY_LENGTH)
    parts = [part | {"pixel_values": torch.zeros(4, 3)} for part in window(trainer)]
    with pytest.raises(ValueError, match=r"^FusedGRPOTrainer: batching must be 'trl' with images, got pixel_values$"):
        passes(trainer, parts)
