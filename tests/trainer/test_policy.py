"""The policy scores responses as it sampled them, irrespective of sharing, padding and splitting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_trainer import checkpoint
from grpo_trainer.adapters import load_adapter
from grpo_trainer.checkpoint import save_policy
from grpo_trainer.data import pad
from grpo_trainer.policy import Policy, Reference, evaluating, load_policy
from grpo_trainer.recipe import Lora, Model, Tiny
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rollout import Rollout, roll_out, select_usable
from grpo_trainer.setup import set_up

from tests.trainer import small

CORPUS = [f"Ann has {i} shells, sells {i % 9}. How many? {i} - {i % 9} = {i - i % 9}. #### {i}" for i in range(60)]
PROMPTS = [text[: 12 + i] for i, text in enumerate(CORPUS[:7])]
KINDS = ("causal", "seq2seq")


def policy_of(kind: str = "causal", lora: Lora | None = None, **settings: Any) -> Policy:
    torch.manual_seed(1)
    tiny = Tiny(architecture=kind, hidden=32, layers=2, heads=2, intermediate=64, vocabulary=100)  # type: ignore[arg-type]
    return load_policy(Model(tiny=tiny, lora=lora, **settings), CORPUS, None)


def rolled(policy: Policy, **settings: Any) -> Rollout:
    items = select_usable(policy, [{"prompt": text} for text in PROMPTS], "prompt", 100, False)
    kwargs = {"num_generations": 3, "max_completion_length": 9, "batch": 6} | settings
    return roll_out(policy, items, Sampling().model_copy(update=kwargs), torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("cap", "is_plain"), [(None, True), (30.0, False)])
def test_a_head_with_a_softcap_is_not_plain(cap: float | None, is_plain: bool) -> None:
    """With a softcap, the fused head would train another model than the one that sampled."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    policy = policy_of("causal")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma2Config(
        vocab_size=len(policy.tokenizer), intermediate_size=64, head_dim=16, final_logit_softcapping=cap, **sizes
    )
    gemma = Policy(Gemma2ForCausalLM(config), policy.tokenizer)
    assert gemma.has_plain_head is is_plain and policy.has_plain_head


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_an_embedding_are_refused(kind: str) -> None:
    policy = policy_of(kind)
    rows = len(policy.tokenizer)
    policy.lm.resize_token_embeddings(rows - 1)
    policy.check_tokens([rows - 2], "the prompts")
    missing = f"model.path: must have an embedding of every token of the prompts, got token {rows - 1} of its tokenizer"
    with pytest.raises(ValueError, match=f"^{missing} and an embedding of {rows - 1} rows$"):
        policy.check_tokens([0, rows - 1], "the prompts")
    policy.lm.resize_token_embeddings(20)
    with pytest.raises(ValueError, match="of every token of the prompts"):
        rolled(policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_and_scoring_agree(kind: str, temperature: float) -> None:
    policy = policy_of(kind)
    policy.temperature = temperature
    rollout = rolled(policy, temperature=temperature)
    with torch.no_grad(), evaluating(policy):
        for share in (True, False):
            scored = policy("logprobs", rollout.batch, share=share)
            torch.testing.assert_close(scored, rollout.logprobs, rtol=1e-4, atol=1e-5)
        rows = torch.tensor([1, 4, 20, 11])
        part = rollout.batch.rows(rows)
        of_part = policy("logprobs", part)
    torch.testing.assert_close(of_part, rollout.logprobs[rows][:, : of_part.shape[1]], rtol=1e-4, atol=1e-5)
    if kind == "causal":
        lengths = [len(item["prompt_ids"]) for item in rollout.items]
        shortest = lengths.index(min(lengths))
        assert rollout.batch.rows(torch.tensor([3 * shortest])).prompts.shape[1] == min(lengths) < max(lengths)


def test_responses_end_at_their_first_end_or_are_truncated() -> None:
    policy = policy_of("causal")
    rollout = rolled(policy, max_completion_length=40)
    ends = 0
    for row, mask, cut in zip(rollout.batch.tokens, rollout.batch.mask, rollout.truncated.tolist(), strict=True):
        tokens = row[mask].tolist()
        assert tokens and policy.eos_id not in tokens[:-1]
        assert cut == (tokens[-1] != policy.eos_id) and (not cut or len(tokens) == 40)
        ends += not cut
    assert 0 < ends < len(rollout.texts)


def test_sampling_follows_the_policys_probabilities() -> None:
    """Chi-squared of the first tokens of 6,000 responses against the softmax, within five sigma."""
    policy = policy_of("causal")
    items = select_usable(policy, [{"prompt": PROMPTS[3]}], "prompt", 100, False)
    sampling = Sampling(num_generations=6000, max_completion_length=1, batch=6000)
    rollout = roll_out(policy, items, sampling, torch.Generator().manual_seed(3))
    with torch.no_grad():
        chances = policy.lm(torch.tensor([items[0]["prompt_ids"]])).logits[0, -1].softmax(-1).double()
    counts = torch.bincount(rollout.batch.tokens[:, 0], minlength=len(chances)).double()
    often = chances * 6000 >= 5
    apart = ((counts - chances * 6000).square() / (chances * 6000))[often].sum()
    degrees = int(often.sum())
    assert abs(float(apart) - degrees) < 5 * (2 * degrees) ** 0.5


def test_prompts_that_do_not_fit_are_left_out() -> None:
    policy = policy_of("causal")
    lines = [{"prompt": text} for text in (*PROMPTS, "")]
    lengths = [len(policy.tokenizer(line["prompt"])["input_ids"]) for line in lines]
    assert [len(item["prompt_ids"]) for item in select_usable(policy, lines, "prompt", 9, False)] == [
        length for length in lengths if length <= 9
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_give_the_same_gradient(kind: str) -> None:
    policy = policy_of(kind)
    rollout = rolled(policy)
    gradients = []
    for share in (True, False):
        policy.zero_grad()
        loss, _ = policy(
            "loss",
            rollout.batch,
            share=share,
            old_logprobs=rollout.logprobs,
            config="grpo",
            advantages=torch.linspace(-1, 1, len(rollout.texts)),
        )
        loss.loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert float(gradients[0].norm()) > 0


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["weights", "adapters"])
def test_the_reference_is_the_policy_until_it_moves(lora: Lora | None) -> None:
    policy = policy_of("causal", lora)
    rollout = rolled(policy)
    reference = Reference(policy, Model(lora=lora))
    with torch.no_grad(), evaluating(policy):
        before = policy("logprobs", rollout.batch)
    assert torch.equal(reference.logprobs(rollout.batch), before)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1
        with evaluating(policy):
            moved = policy("logprobs", rollout.batch)
    assert torch.equal(reference.logprobs(rollout.batch), before) and not torch.equal(moved, before)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["causal", "seq2seq", "adapters"])
def test_a_critic(kind: str, separate: bool) -> None:
    """A separate critic has no gradient into the policy; before it is trained, both read the same states."""
    policy = policy_of("seq2seq" if kind == "seq2seq" else "causal", Lora(rank=2) if kind == "adapters" else None)
    policy.add_critic() if separate else policy.add_value_head()
    head = (policy.critic or policy).value_head
    assert head is not None
    rollout = rolled(policy)
    assert torch.equal(policy("values", rollout.batch), torch.zeros_like(rollout.logprobs))
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    rows = {"old_logprobs": rollout.logprobs, "advantages": torch.ones(len(rollout.texts))}
    own = [name for name, p in policy.lm.named_parameters() if p.requires_grad]
    for values in ("head", "all"):
        policy.zero_grad()
        _, predicted = policy("loss", rollout.batch, values=values, **rows)
        torch.testing.assert_close(predicted, policy("values", rollout.batch))
        predicted.square().sum().backward()
        moved = [name for name, p in policy.lm.named_parameters() if p.grad is not None and float(p.grad.norm()) > 0]
        assert bool(moved) == (values == "all" and not separate) and set(moved) <= set(own)
        if policy.critic is not None:
            assert any(p.grad is not None and float(p.grad.norm()) > 0 for p in policy.critic.parameters())
    shared = policy("values", rollout.batch, share=False)
    torch.testing.assert_close(shared, policy("values", rollout.batch), rtol=1e-4, atol=1e-5)


def test_padding() -> None:
    ids, mask = pad([[1, 2, 3], [], [4]], 9, left=True)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [9, 9, 4]] and mask.sum(1).tolist() == [3, 0, 1]
    ids, mask = pad([[1, 2, 3], [4]], 9, left=False)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]] and mask.tolist()[1] == [True, False, False]


def test_a_model_is_on_its_device_before_a_policy_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy runs its model when it is created, and a reference is created before the first step."""
    save_policy(policy_of("causal"), tmp_path / "checkpoints" / "rl-1" / "model")
    seen = []
    monkeypatch.setattr(Policy, "_head_is_plain", lambda self: bool(seen.append(self.device.type)))
    monkeypatch.setattr("grpo_trainer.distributed.start", lambda: torch.device("meta"))
    model = tmp_path / "checkpoints" / "rl-1" / "model"
    recipe = small.recipe(tmp_path, f"model.path={model}")
    for path in (model, "tiny"):
        policy = set_up(small.recipe(tmp_path / "run", f"model.path={path}")).policy
    checkpoint.restore_policy(recipe, checkpoint.State("rl", 1, None, {}, 1, {}), policy)
    Reference(policy, Model(reference_model_path=str(model)))
    policy.add_critic()
    assert seen == ["meta"] * 5


def test_responses_end_at_every_stop_token_of_the_generation_config(tmp_path: Path) -> None:
    policy = policy_of("causal")
    before = rolled(policy, temperature=0.0, max_completion_length=6)
    other = int(before.batch.tokens[0, 2])
    policy.lm.generation_config.eos_token_id = [policy.eos_id, other]
    save_policy(policy, tmp_path)
    policy = load_policy(Model(path=str(tmp_path)), [], None)
    assert policy.stop_ids == sorted({policy.eos_id, other})
    rollout = rolled(policy, temperature=0.0, max_completion_length=6)
    tokens = rollout.batch.tokens[0][rollout.batch.mask[0]].tolist()
    first = before.batch.tokens[0].tolist()
    assert tokens == first[: first.index(other) + 1] and not rollout.truncated[0]
    rollout = rolled(policy, max_completion_length=6, min_completion_length=5)
    assert not torch.isin(rollout.batch.tokens[:, :5], torch.tensor(policy.stop_ids)).any()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank=3, targets=["q_proj"]), "model.lora.rank: must be that of the adapters in .*, 2, got 3"),
        (Lora(rank=2, alpha=4, targets=["q_proj"]), "model.lora.alpha: must be that of the adapters in .*, 16, got 4"),
        (
            Lora(rank=2, targets=["v_proj"]),
            r"model.lora.targets: must be the layers of .*\['q_proj'\], got \['v_proj'\]: missing .*v_.*unexp.*q_",
        ),
    ],
)
def test_adapters_of_another_shape_are_refused(tmp_path: Path, lora: Lora, message: str) -> None:
    save_policy(policy_of("causal", Lora(rank=2, targets=["q_proj"])), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_adapter(policy_of("causal", lora), Model(lora=lora), tmp_path)
    with pytest.raises(
        ValueError, match=r"^model.lora: must be set .* or model.lora.rank=2 model.lora.alpha=16 beside"
    ):
        load_adapter(policy_of("causal"), Model(), tmp_path)
