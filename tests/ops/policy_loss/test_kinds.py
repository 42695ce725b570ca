"""Tokens of several kinds in one batch: policy terms, cross-entropy, KL to the reference, only counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import (
    COUNTED,
    CROSS_ENTROPY,
    POLICY,
    POLICY_CROSS_ENTROPY,
    REFERENCE_KL,
    SELECTED,
)
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import INDUCTOR, device_of, runnable_backends
from tests.ops.policy_loss.test_spec import assert_near, graded

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
SHAPE = (4, 60)
POLICIES, IMITATED = torch.tensor([POLICY, POLICY_CROSS_ENTROPY]), torch.tensor([CROSS_ENTROPY, POLICY_CROSS_ENTROPY])


def draw(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(SHAPE, generator=random, dtype=F64)

    old = -2 * torch.rand(SHAPE, generator=random, dtype=F64)
    return {
        "logprobs": old + noise(0.3),
        "old_logprobs": old,
        "advantages": noise(1.0),
        "mask": torch.rand(SHAPE, generator=random) < 0.8,
        "ref_logprobs": old + noise(0.2),
        "entropy": noise(1.0).abs(),
        "kinds": torch.randint(SELECTED, SHAPE, generator=random),
    }


def run(backend: str, batch: dict[str, Tensor], **options: Any) -> tuple[Any, Tensor]:
    batch = batch | options
    return graded(backend, batch.pop("logprobs"), batch.pop("old_logprobs"), batch.pop("advantages"), **batch)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_terms_of_each_kind(backend: str, aggregation: str) -> None:
    batch = draw()
    now, mask, kinds = batch["logprobs"].clone().requires_grad_(), batch["mask"], batch["kinds"]
    ratio, advantages = (now - batch["old_logprobs"]).exp(), batch["advantages"]
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    kl = (now - batch["ref_logprobs"]).square() / 2
    bonus = 0.3 * kl - 0.01 * batch["entropy"]
    of_kinds = [policy + bonus, -0.5 * now, bonus, torch.zeros_like(now), policy + bonus - 0.5 * now]
    terms = torch.stack(of_kinds).gather(0, kinds[None])[0]
    terms = torch.where(mask, terms, 0)
    tokens = mask.sum(1) if aggregation == "seq-mean-token-mean" else mask.sum() / len(mask)
    expected = (terms.sum(1) / tokens).mean()
    (gradient,) = torch.autograd.grad(expected, now)
    fields = {"kl": "k2", "kl_coef": 0.3, "entropy_coef": 0.01, "cross_entropy_coef": 0.5}
    config = gk.LossConfig(aggregation=aggregation, **fields)
    result, got = run(backend, batch, config=config)
    assert_near(result.loss.detach(), expected.detach())
    assert_near(got, gradient)
    metrics = result.metrics.to_dict()
    is_policy, imitated = mask & torch.isin(kinds, POLICIES), mask & torch.isin(kinds, IMITATED)
    outside = ((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.2) & (advantages > 0))
    assert metrics["tokens"] == metrics["terms"] == mask.sum() and metrics["policy_tokens"] == is_policy.sum()
    assert metrics["clipped"] == (outside & is_policy).sum() > 0
    assert metrics["ratio_sum"] == pytest.approx(float(ratio[is_policy].sum()))
    shares = (1 / tokens / len(mask)).expand(len(mask))[:, None]
    assert metrics["cross_entropy_loss"] == pytest.approx(float(-(shares * now)[imitated].sum()))
    verls = result.metrics.verl()
    assert verls["actor/pg_clipfrac"] == pytest.approx(float(outside[is_policy].double().mean()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("loss", ["clip", "sequence", "vespo", "reinforce", "off_policy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_a_kind_does_not_use_change_nothing(backend: str, loss: str, value: float) -> None:
    """Cross-entropy needs the log-prob alone, and the KL no advantage."""
    fields: dict[str, Any] = {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.1}
    fields |= {"sequence": {"ratio": "sequence"}, "off_policy": {"off_policy_threshold": 0.01}}.get(
        loss, {"loss": loss}
    )
    if loss != "vespo":
        fields |= {"correction": "sequence_truncate", "correction_max": 1.1}
    config, batch = gk.LossConfig(**fields), draw()
    batch |= {"sampling_logprobs": batch["old_logprobs"] + 0.1, "weights": 1 + batch["entropy"]}
    kinds = batch["kinds"]
    of_policy = (POLICY, POLICY_CROSS_ENTROPY)
    users = dict.fromkeys(("old_logprobs", "ref_logprobs", "entropy"), (*of_policy, REFERENCE_KL))
    users |= dict.fromkeys(("advantages", "sampling_logprobs"), of_policy)
    users |= dict.fromkeys(("logprobs", "weights"), (*of_policy, REFERENCE_KL, CROSS_ENTROPY))
    want, expected = run(backend, batch, config=config)
    for name, kinds_of in users.items():
        used = torch.isin(kinds, torch.tensor(kinds_of))
        got, gradient = run(backend, batch | {name: torch.where(used, batch[name], value)}, config=config)
        assert torch.equal(got.loss, want.loss) and torch.equal(gradient, expected), name
        assert torch.equal(got.metrics.tensor.nan_to_num(-1), want.metrics.tensor.nan_to_num(-1)), name
    assert not expected[kinds == COUNTED].any()


@pytest.mark.parametrize("loss", ["sequence", "vespo", "correction", "off_policy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_is_measured_by_its_policy_tokens(backend: str, loss: str) -> None:
    """A row of mixed kinds has the policy terms of the row without the other tokens."""
    fields: dict[str, Any] = {
        "sequence": {"ratio": "sequence"},
        "vespo": {"loss": "vespo"},
        "correction": {"correction": "geometric_truncate", "correction_max": 0.95},
        "off_policy": {"off_policy_threshold": 0.0},
    }[loss]
    config, batch = gk.LossConfig(aggregation="token-sum", **fields), draw()
    batch["sampling_logprobs"] = batch["old_logprobs"] + 0.1 * batch["entropy"]
    kinds, _ = batch.pop("kinds").clamp(max=COUNTED), batch.pop("ref_logprobs")
    mixed, gradient = run(backend, batch, kinds=kinds, config=config)
    alone, expected = run(backend, batch | {"mask": batch["mask"] & (kinds == POLICY)}, config=config)
    assert_near(mixed.metrics["policy_loss"], alone.metrics["policy_loss"])
    assert_near(torch.where(kinds == CROSS_ENTROPY, 0, gradient), expected)
    for name in ("policy_tokens", "ratio_sum", "clipped", "phi_rows", "is_sum", "off_policy_tokens", "log_ratio_sum"):
        assert_near(mixed.metrics[name], alone.metrics[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_components_with_counts_of_their_own(backend: str) -> None:
    """prime-rl divides each component by its own number of tokens, which `weights` express."""
    batch = draw()
    mask, kinds = batch["mask"], batch["kinds"]
    batch.pop("ref_logprobs")
    ratio = (batch["logprobs"] - batch["old_logprobs"]).exp()
    kinds = batch["kinds"] = kinds.clamp(max=COUNTED)
    policy, imitated = mask & (kinds == POLICY), mask & (kinds == CROSS_ENTROPY)
    expected = -(batch["advantages"] * ratio)[policy].mean() - batch["logprobs"][imitated].mean()
    weights = sum(chosen.to(F64) / chosen.sum() for chosen in (policy, imitated))
    config = gk.LossConfig(clip_low=None, clip_high=None)
    result, _ = run(backend, batch, weights=weights, config=config)
    assert_near(result.loss, expected)
    config = gk.LossConfig(clip_low=None, clip_high=None, cross_entropy_aggregation="token-mean")
    device = device_of(backend)
    counted = {"tokens": policy.sum(), "cross_entropy": imitated.sum()}
    for counts in ({k: float(n) for k, n in counted.items()}, {k: n.to(device) for k, n in counted.items()}):
        result, _ = run(backend, batch, normalizer=counts, config=config)
        assert_near(result.loss, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chord(backend: str) -> None:
    """CHORD: (1 - mu) GRPO on the policy's rows and mu times the weighted cross-entropy of an expert's rows."""
    batch, mu, expert = draw(), 0.3, torch.tensor([False, True, False, True])
    now, mask = batch["logprobs"].clone().requires_grad_(), batch["mask"]
    p = now.detach().exp()
    ratio, advantages = (now - batch["old_logprobs"]).exp(), batch["advantages"]
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    ours, experts = mask & ~expert[:, None], mask & expert[:, None]
    expected = (1 - mu) * policy[ours].mean() + mu * (-now * p * (1 - p))[experts].mean()
    (gradient,) = torch.autograd.grad(expected, now)
    weights = torch.where(experts, mu * p * (1 - p) / experts.sum(), (1 - mu) / ours.sum().to(F64))
    kinds = torch.where(expert, CROSS_ENTROPY, POLICY)[:, None].expand(SHAPE)
    batch = {name: batch[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")}
    batch |= {"old_logprobs": torch.where(experts, torch.nan, batch["old_logprobs"])}
    result, got = run(backend, batch, kinds=kinds, weights=weights, config=gk.LossConfig())
    assert_near(result.loss, expected.detach())
    assert_near(got, gradient)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy_of_positive_examples(backend: str, aggregation: str, weighted: bool) -> None:
    """VAPO's auxiliary loss, as in NeMo RL and Cosmos-RL: its mean is over the tokens of rewarded rows alone."""
    batch, rewards = draw(), torch.tensor([1.0, 0.0, 0.5, -1.0])
    batch.pop("ref_logprobs")
    now, mask = batch["logprobs"].clone().requires_grad_(), batch["mask"]
    kinds = torch.where(rewards > 0, POLICY_CROSS_ENTROPY, POLICY)[:, None].expand(SHAPE)
    options = {"weights": 1 + batch["entropy"]} if weighted else {}
    positive = mask & (rewards > 0)[:, None]
    plain = gk.LossConfig(aggregation=aggregation)
    config = gk.LossConfig(aggregation=aggregation, cross_entropy_coef=0.1, cross_entropy_aggregation="token-mean")
    policy, slopes = run(backend, batch, kinds=None, config=plain, **options)
    nll = -(now * options.get("weights", 1))[positive].mean()
    result, gradient = run(backend, batch, kinds=kinds, config=config, **options)
    assert_near(result.loss, policy.loss.cpu() + 0.1 * nll.detach())
    assert_near(gradient, slopes + 0.1 * torch.autograd.grad(nll, now)[0])
    assert_near(result.metrics["cross_entropy_loss"], nll.detach())
    if weighted:
        return
    # with the counts of the whole batch, micro-batches add up
    parts = []
    known = {"tokens": mask.sum().item(), "rows": 4, "cross_entropy": positive.sum().item()}
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: value[rows] for name, value in (batch | {"kinds": kinds}).items()}
        for normalizer in (
            known,
            {key: torch.tensor(value, device=device_of(backend)) for key, value in known.items()},
        ):
            parts.append(run(backend, part, normalizer=normalizer, config=config))
    for first, second in (parts[::2], parts[1::2]):
        assert_near(first[0].loss + second[0].loss, result.loss)
        assert_near(torch.cat([first[1], second[1]]), gradient)


def test_count_of_cross_entropies_without_its_mean() -> None:
    batch = draw()
    batch.pop("ref_logprobs")
    with pytest.raises(
        ValueError, match=r"^policy_loss: normalizer must be without 'cross_entropy' for cross_entropy_"
    ):
        run("reference", batch, normalizer={"cross_entropy": 3})
    with pytest.raises(ValueError, match=r"^LossConfig: cross_entropy_aggregation must be one of token-mean, got"):
        gk.LossConfig(cross_entropy_aggregation="token-sum")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_top_entropies_are_those_of_policy_tokens(backend: str) -> None:
    batch = draw()
    batch["kinds"] = batch["kinds"].clamp(max=COUNTED)
    is_policy = batch["mask"] & (batch["kinds"] == POLICY)
    batch["entropy"] = torch.where(is_policy, batch["entropy"], 100.0)
    batch.pop("ref_logprobs")
    kept = is_policy & (batch["entropy"] >= batch["entropy"][is_policy].quantile(0.5))
    batch["kinds"] = torch.where(batch["kinds"] == CROSS_ENTROPY, COUNTED, batch["kinds"])
    result, gradient = run(backend, batch, config=gk.LossConfig(loss="reinforce", top_entropy_quantile=0.5))
    assert torch.equal(gradient != 0, kept)
    assert result.metrics["kept_tokens"] == kept.sum()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_integers(backend: str, dtype: torch.dtype) -> None:
    batch = draw()
    batch.pop("ref_logprobs")
    want, expected = run(backend, batch)
    got, gradient = run(backend, batch | {"kinds": batch["kinds"].to(dtype)})
    assert torch.equal(got.loss, want.loss) and torch.equal(gradient, expected)


@pytest.mark.parametrize("value", [-1, SELECTED, 100, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_that_do_not_exist(backend: str, value: int) -> None:
    """256 would be 0 in eight bits."""
    batch = draw()
    batch.pop("ref_logprobs")
    masked = torch.where(batch["mask"], batch["kinds"], value)
    want, got = run(backend, batch)[0], run(backend, batch | {"kinds": masked})[0]
    assert torch.equal(got.loss, want.loss)
    wrong = batch["kinds"].clone()
    token = int(batch["mask"].flatten().int().argmax())
    wrong.view(-1)[token] = value
    if device_of(backend).type == "cpu":
        message = rf"^policy_loss: kinds must be 0 to 4 \(policy, .*\), got {value} at token {token}$"
        with pytest.raises(ValueError, match=message):
            run(backend, batch | {"kinds": wrong})


@pytest.mark.parametrize("fields", [{"ratio": "segment"}, {"loss": "geo_mean", "aggregation": "seq-mean-token-sum"}])
def test_terms_of_segments_and_rows_have_no_kinds(fields: dict[str, Any]) -> None:
    batch = draw()
    segments = torch.zeros(SHAPE, dtype=torch.int32)
    for name in ("ref_logprobs", "entropy"):
        batch.pop(name)
    with pytest.raises(ValueError, match=r"^policy_loss: kinds must be left out where terms are segments or rows, got"):
        gk.policy_loss(**batch, segments=segments, config=gk.LossConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"memory": "low"}, {"compact": True}, {"compact": False, "chunk_size": 16}])
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float32))
def test_from_hidden_states(backend: str, options: dict[str, Any]) -> None:
    device = device_of(backend)
    batch = {name: value.float() if value.is_floating_point() else value for name, value in draw().items()}
    batch = {name: value.to(device) for name, value in batch.items() if name not in ("logprobs", "entropy")}
    batch["advantages"] = torch.zeros(4, device=device)  # without a gradient, except for cross-entropy and KL
    torch.manual_seed(0)
    hidden, weight = torch.randn(*SHAPE, 8, device=device) / 2, torch.randn(13, 8, device=device)
    targets = torch.randint(13, SHAPE, device=device)
    config = gk.LossConfig(kl="k3")
    results = []
    for of_logits in (False, True):
        leaf = hidden.clone().requires_grad_()
        if of_logits:
            logprobs = (leaf @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            loss = gk.policy_loss(logprobs, **batch, config=config, backend=backend).loss
        else:
            loss = gk.linear_policy_loss(leaf, weight, targets, **batch, config=config, backend=backend, **options).loss
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert results[0][1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph(backend: str) -> None:
    batch = {name: value.to(device_of(backend)) for name, value in draw().items() if name != "ref_logprobs"}
    others = [batch.pop(name) for name in ("logprobs", "old_logprobs", "advantages")]

    def loss(*tensors: Tensor) -> Tensor:
        return gk.policy_loss(*tensors[:3], **dict(zip(batch, tensors[3:], strict=True)), backend=backend).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    assert_near(compiled(*others, *batch.values()), loss(*others, *batch.values()))
