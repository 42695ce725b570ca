"""GVPO, REAL and FlowRL against their published formulas written out, group by group and row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import METRICS
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import INDUCTOR, assert_within_budget, device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
ROWS, WIDTH = 9, 14
GROUPS = torch.tensor([7, -2, 7, 40, -2, 7, 40, 7, 5])  # of four, two, two and one rows, in no order
Batch = dict[str, Tensor]
Formula = Callable[[Tensor, Batch], Tensor]


def draw(seed: int = 0) -> Batch:
    """Log-probs, one advantage a row, and a mask with holes and an empty row, whose advantage is NaN."""
    random = torch.Generator().manual_seed(seed)
    old = -0.1 - torch.rand(ROWS, WIDTH, generator=random, dtype=F64)
    noise = lambda: 0.3 * torch.randn(ROWS, WIDTH, generator=random, dtype=F64)  # noqa: E731
    mask = torch.rand(ROWS, WIDTH, generator=random) < 0.7
    mask[2] = False
    advantages = torch.randn(ROWS, generator=random, dtype=F64)
    advantages[2] = math.nan
    return {
        "logprobs": old + noise(),
        "old_logprobs": old,
        "ref_logprobs": old + noise(),
        "advantages": advantages,
        "mask": mask,
        "log_z": torch.randn(ROWS, generator=random, dtype=F64),
        "is_weights": 0.5 + torch.rand(ROWS, generator=random, dtype=F64),
    }


def active_groups(batch: Batch) -> list[list[int]]:
    """The rows with tokens of every group that has one."""
    has_tokens = batch["mask"].any(1)
    rows = [[i for i in range(ROWS) if GROUPS[i] == g and has_tokens[i]] for g in GROUPS.unique()]
    return [group for group in rows if group]


def gvpo(lp: Tensor, batch: Batch, base: str = "old_logprobs", beta: float = 0.1) -> Tensor:
    """The mean over prompts of the published code's 0.5 * sum((beta s - its mean) - (R - its mean))^2 / (k - 1)."""
    total = lp.new_zeros(())
    groups = active_groups(batch)
    for rows in groups:
        mask = batch["mask"][rows]
        score = beta * torch.where(mask, lp[rows] - batch[base][rows], 0).sum(1)
        reward = batch["advantages"][rows]
        excess = (score - score.detach().mean()) - (reward - reward.mean())
        total = total + 0.5 * excess.square().sum() / max(len(rows) - 1, 1)
    return total / len(groups)


def real(lp: Tensor, batch: Batch, tau: float = 0.5) -> Tensor:
    """ms-swift's form of arXiv 2602.05630."""
    total = lp.new_zeros(())
    groups = active_groups(batch)
    for rows in groups:
        mask, is_better = batch["mask"][rows], batch["advantages"][rows] > 0
        score = torch.where(mask, lp[rows] - batch["old_logprobs"][rows], 0).sum(1) / mask.sum(1) / tau
        if is_better.any() and not is_better.all():
            total = (
                total + torch.log(1 + score[~is_better].exp().sum()) + torch.log(1 + (-score[is_better]).exp().sum())
            )
    return total / len(groups)


def flowrl(lp: Tensor, batch: Batch, clip: str = "product", cap: float = math.inf, beta: float = 15) -> Tensor:
    """The forms of verl's recipe: a clipped product or geometric mean of ratios, or a clipped mean log-prob."""
    rows = batch["mask"].any(1).nonzero()[:, 0]
    mask = batch["mask"][rows]
    mean = lambda values: torch.where(mask, values[rows], 0).sum(1) / mask.sum(1)  # noqa: E731
    now, old, ref = mean(lp), mean(batch["old_logprobs"]), mean(batch["ref_logprobs"])
    log_ratio = (now - old) * (1 if clip == "geometric" else mask.sum(1))
    weight = log_ratio.exp().detach()
    if clip == "logprob":
        now = torch.minimum(torch.maximum(now, old + math.log(0.9)), old + math.log(1.1))
    else:
        weight = weight.clamp(0.9, 1.1)
    weight = weight.clamp(max=cap) * batch["is_weights"][rows]
    residual = batch["log_z"][rows] + now - beta * batch["advantages"][rows] - ref
    return (weight * residual.square()).mean()


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], Formula]] = {
    "gvpo": ({"loss": "gvpo"}, (), gvpo),
    "gvpo of a reference": (
        {"loss": "gvpo", "gvpo_beta": 0.4},
        ("ref_logprobs",),
        lambda lp, batch: gvpo(lp, batch, "ref_logprobs", 0.4),
    ),
    "real": ({"loss": "real"}, (), real),
    "real at 0.05": ({"loss": "real", "real_tau": 0.05}, (), lambda lp, batch: real(lp, batch, 0.05)),
    "flowrl": ({"loss": "flowrl"}, ("ref_logprobs", "log_z", "is_weights"), flowrl),
    "flowrl of geometric means": (
        {"loss": "flowrl", "flowrl_clip": "geometric"},
        ("ref_logprobs", "log_z", "is_weights"),
        lambda lp, batch: flowrl(lp, batch, "geometric"),
    ),
    "flowrl of clipped log-probs": (
        {"loss": "flowrl", "flowrl_clip": "logprob", "ratio_cap": 1.3, "flowrl_beta": 4.0},
        ("ref_logprobs", "log_z", "is_weights"),
        lambda lp, batch: flowrl(lp, batch, "logprob", 1.3, 4.0),
    ),
}


def config_of(name: str, **more: Any) -> gk.LossConfig:
    fields = CASES[name][0]
    bounds = {"clip_low": 0.1, "clip_high": 0.1} if fields["loss"] == "flowrl" else {}
    return gk.LossConfig(**fields, **bounds, **more)


def arguments_of(name: str, batch: Batch, *more: str) -> dict[str, Any]:
    names = ("old_logprobs", "advantages", "mask", *CASES[name][1], *more)
    arguments: dict[str, Any] = {key: batch[key] for key in dict.fromkeys(names)}
    return arguments | ({} if name.startswith("flowrl") else {"groups": GROUPS})


def run(
    backend: str, config: gk.LossConfig, lp: Tensor, arguments: dict[str, Any], dtype: torch.dtype = F64
) -> tuple[gk.PolicyLoss, Tensor, Tensor | None]:
    """The result, and its gradients by log-probs and log_z."""
    device = device_of(backend)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(device, dtype) if value.is_floating_point() else value.to(device)

    leaf, kwargs = moved(lp).detach().requires_grad_(), {name: moved(value) for name, value in arguments.items()}
    log_z = kwargs["log_z"].requires_grad_() if "log_z" in kwargs else None
    result = gk.policy_loss(leaf, **kwargs, config=config, backend=backend)
    leaves = [leaf] if log_z is None else [leaf, log_z]
    gradient, *by_log_z = torch.autograd.grad(result.loss, leaves)
    return result, gradient.cpu(), by_log_z[0].cpu() if by_log_z else None


def packed(batch: dict[str, Any], lp: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Whole rows one behind the other, with two tokens behind the last that hold NaN."""
    flat = lambda value: torch.cat([value.reshape(-1), torch.full((2,), math.nan).to(value)])  # noqa: E731
    shaped = {
        name: flat(value) if isinstance(value, Tensor) and value.shape == lp.shape else value
        for name, value in batch.items()
    }
    return shaped | {"cu_seqlens": torch.arange(ROWS + 1) * WIDTH}, flat(lp)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_published_formula(backend: str, name: str, layout: str) -> None:
    batch = draw()
    leaves = {key: batch[key].clone().requires_grad_() for key in ("logprobs", "log_z")}
    want = CASES[name][2](leaves["logprobs"], batch | {"log_z": leaves["log_z"]})
    wanted = torch.autograd.grad(want, list(leaves.values()), allow_unused=True)
    lp, arguments = batch["logprobs"], arguments_of(name, batch)
    for key in ("old_logprobs", "ref_logprobs"):  # what masked slots hold has no effect
        if key in arguments:
            arguments[key] = torch.where(batch["mask"], arguments[key], math.nan)
    if layout == "packed":
        arguments, lp = packed(arguments, lp)
    result, gradient, by_log_z = run(backend, config_of(name), lp, arguments)
    # rounding of sums of a few hundred terms of up to 15^2
    torch.testing.assert_close(result.loss.cpu(), want.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(result.metrics["policy_loss"].cpu(), want.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(gradient[: ROWS * WIDTH].reshape(ROWS, -1), wanted[0], rtol=1e-11, atol=1e-14)
    assert gradient.any() and not gradient[ROWS * WIDTH :].any()
    if by_log_z is not None:
        torch.testing.assert_close(by_log_z, wanted[1], rtol=1e-12, atol=1e-14)
    assert float(result.metrics["tokens"]) == batch["mask"].sum()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_float32_loses_no_more_than_torch_does(backend: str, name: str) -> None:
    batch = {key: value.float().double() if value.is_floating_point() else value for key, value in draw(1).items()}
    config, arguments = config_of(name), arguments_of(name, batch)
    gold, working = (run("reference", config, batch["logprobs"], arguments, d) for d in (F64, torch.float32))
    got = run(backend, config, batch["logprobs"], arguments, torch.float32)
    assert got[0].loss.dtype == got[1].dtype == torch.float32
    assert_within_budget(got[1], working[1], gold[1], "gradient")
    assert_within_budget(got[0].loss, working[0].loss, gold[0].loss, "loss")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_terms_are_those_of_reinforce(backend: str, name: str) -> None:
    """KL, entropy bonus and cross-entropy of other tokens are added to the objective."""
    batch = draw()
    random = torch.Generator().manual_seed(2)
    others: dict[str, Any] = {
        "kl": "k3",
        "kl_coef": 0.2,
        "entropy_coef": 0.1,
        "cross_entropy_aggregation": "token-mean",
        "aggregation": "seq-mean-token-mean",
    }
    more = {
        "ref_logprobs": batch["ref_logprobs"],
        "entropy": torch.rand(ROWS, WIDTH, generator=random, dtype=F64),
        "kinds": (torch.rand(ROWS, WIDTH, generator=random) < 0.2).to(torch.int8),
    }
    lp, own = batch["logprobs"], batch["mask"] & (more["kinds"] == 0)
    result, gradient, _ = run(backend, config_of(name, **others), lp, arguments_of(name, batch) | more)
    alone = arguments_of(name, batch | {"mask": own}, "ref_logprobs")
    if name in ("gvpo", "real", "real at 0.05"):
        del alone["ref_logprobs"]
    if name == "gvpo":  # a reference is the base of the log ratio
        alone["old_logprobs"] = batch["ref_logprobs"]
    objective, slope, _ = run(backend, config_of(name), lp, alone)
    rest = gk.LossConfig(loss="reinforce", **others)
    silent = {"old_logprobs": batch["old_logprobs"], "advantages": torch.zeros(ROWS), "mask": batch["mask"]}
    terms, gradient_of_terms, _ = run(backend, rest, lp, silent | more)
    torch.testing.assert_close(result.loss, objective.loss + terms.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, slope + gradient_of_terms, rtol=1e-11, atol=1e-14)
    for key in ("kl_loss", "entropy_loss", "cross_entropy_loss", "kl_sum"):
        torch.testing.assert_close(result.metrics[key], terms.metrics[key])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_of_whole_groups_add_up(backend: str, name: str) -> None:
    batch, config = draw(), config_of(name)
    lp, arguments = batch["logprobs"], arguments_of(name, batch)
    whole, gradient, _ = run(backend, config, lp, arguments)
    count = int(batch["mask"].any(1).sum()) if name.startswith("flowrl") else len(active_groups(batch))
    first = (GROUPS == 7) | (GROUPS == 40)
    loss = 0.0
    parts = torch.zeros_like(gradient)
    for part, known in ((first, float(count)), (~first, {"rows" if name[0] == "f" else "groups": torch.tensor(count)})):
        own = {key: value[part] for key, value in arguments.items()}
        if isinstance(known, dict):
            known = {key: value.to(device_of(backend)) for key, value in known.items()}
        result, parts[part], _ = run(backend, config, lp[part], own | {"normalizer": known})
        loss += float(result.loss.detach())
    assert loss == pytest.approx(float(whole.loss.detach()), rel=1e-12)
    torch.testing.assert_close(parts, gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_one_size_and_by_id(backend: str) -> None:
    batch, config = draw(), gk.LossConfig(loss="gvpo")
    arguments = arguments_of("gvpo", batch)
    by_size = run(backend, config, batch["logprobs"], arguments | {"groups": 3})
    by_id = run(backend, config, batch["logprobs"], arguments | {"groups": torch.arange(ROWS) // 3})
    assert torch.equal(by_size[0].loss, by_id[0].loss) and torch.equal(by_size[1], by_id[1])


@pytest.mark.parametrize("name", ["gvpo", "real", "flowrl"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_and_nothing_at_all(backend: str, name: str) -> None:
    batch = draw()
    arguments = arguments_of(name, batch)
    own = run(backend, config_of(name), batch["logprobs"], arguments | {"old_logprobs": batch["logprobs"]})
    none = run(backend, config_of(name), batch["logprobs"], arguments | {"old_logprobs": None})
    assert torch.equal(own[0].loss, none[0].loss) and torch.equal(own[1], none[1]) and none[1].any()
    for rows, width in ((ROWS, WIDTH), (0, WIDTH), (ROWS, 0)):
        nothing = {
            key: value[:rows] if key in ("advantages", "log_z", "is_weights", "groups") else value[:rows, :width]
            for key, value in arguments.items()
        }
        nothing["mask"] = torch.zeros(rows, width, dtype=torch.bool)
        result, gradient, _ = run(backend, config_of(name), batch["logprobs"][:rows, :width], nothing)
        assert float(result.loss) == 0 and not gradient.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_count_empty_rows(backend: str) -> None:
    """The mean of FlowRL over all rows, that of REAL over all groups."""
    batch = draw()
    batch["mask"][8] = False  # a group of its own
    for name, counted in (("flowrl", 7 / 9), ("real", 3 / 4)):
        arguments = arguments_of(name, batch)
        some, all_rows = (
            run(backend, config_of(name, count_empty_rows=flag), batch["logprobs"], arguments)[0].loss
            for flag in (False, True)
        )
        torch.testing.assert_close(all_rows, some * counted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_does_not_overflow(backend: str) -> None:
    lp, old = torch.zeros(4, 3), torch.tensor([[-800.0], [800.0], [0.0], [1e30]]).expand(4, 3)
    arguments = {"old_logprobs": old, "advantages": torch.tensor([-1.0, 1.0, 1.0, -1.0]), "groups": 2}
    result, gradient, _ = run(backend, gk.LossConfig(loss="real"), lp, arguments, torch.float32)
    assert float(result.loss) == pytest.approx((1600 + 1600 + math.log(2)) / 2) and gradient.isfinite().all()
    assert torch.allclose(gradient[:2], torch.tensor([[1.0], [-1.0]]).expand(2, 3) / 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_flowrl_are_measured(backend: str) -> None:
    batch = draw()
    result, _, _ = run(backend, config_of("flowrl"), batch["logprobs"], arguments_of("flowrl", batch))
    has_tokens = batch["mask"].any(1)
    d = torch.where(batch["mask"], batch["logprobs"] - batch["old_logprobs"], 0).sum(1)
    weights = (d.exp().clamp(0.9, 1.1) * batch["is_weights"])[has_tokens]
    m = result.metrics.to_dict()
    assert m["is_count"] == len(weights)
    wanted = {"is_sum": weights.sum(), "is_square_sum": weights.square().sum()}
    wanted |= {"is_min": weights.min(), "is_max": weights.max()}
    assert {key: m[key] for key in wanted} == pytest.approx({key: float(value) for key, value in wanted.items()})


@pytest.mark.parametrize("name", ["gvpo", "real", "flowrl"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str, name: str) -> None:
    """Central differences of the value, whose weights in FlowRL are constants where clipped."""
    batch = {key: value.to(device_of(backend)) for key, value in draw().items()}
    arguments = arguments_of(name, batch)
    if name == "flowrl":
        arguments |= {"log_z": batch["log_z"].requires_grad_()}
        config = config_of(name).__class__(loss="flowrl", clip_low=0.0, clip_high=0.0)
    else:
        arguments["groups"] = GROUPS.to(device_of(backend))
        config = config_of(name)

    def loss(lp: Tensor, log_z: Tensor | None = None) -> Tensor:
        more = {} if log_z is None else {"log_z": log_z}
        return gk.policy_loss(lp, **arguments | more, config=config, backend=backend).loss

    leaves = [batch["logprobs"].requires_grad_()] + ([batch["log_z"]] if name == "flowrl" else [])
    # a difference quotient of a loss of some hundred has an error of 1e-16 * 300 / 1e-6
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gvpo", "real", "flowrl"])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None, name: str) -> None:
    batch = {key: value.to(device_of(backend or "cpu")) for key, value in draw().items()}
    config, arguments = config_of(name), arguments_of(name, batch)
    if "groups" in arguments:
        arguments["groups"] = GROUPS.to(device_of(backend or "cpu"))

    def loss(lp: Tensor, arguments: dict[str, Tensor]) -> Tensor:
        return gk.policy_loss(lp, **arguments, config=config, backend=backend).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    got, want = compiled(batch["logprobs"], arguments), loss(batch["logprobs"], arguments)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_agree_to_the_bit(backend: str, name: str) -> None:
    batch = draw()
    first, second = (
        run(backend, config_of(name), batch["logprobs"], arguments_of(name, batch), torch.float32) for _ in range(2)
    )
    assert torch.equal(first[1], second[1])
    for key in METRICS:
        assert torch.equal(first[0].metrics[key].nan_to_num(-1), second[0].metrics[key].nan_to_num(-1)), key


@pytest.mark.parametrize("name", ["gvpo", "real", "flowrl"])
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float32))
def test_from_logits_and_hidden_states(backend: str, name: str) -> None:
    device, config = device_of(backend), config_of(name)
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 8, device=device), torch.randn(13, 8, device=device)
    targets, advantages = torch.randint(13, (4, 10), device=device), torch.tensor([1.0, -2, -1, 0.5], device=device)
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    old = logprobs + 0.1 * torch.randn_like(logprobs)
    arguments: dict[str, Any] = {"config": config, "backend": backend, "mask": torch.rand(4, 10, device=device) < 0.8}
    if name == "flowrl":
        arguments |= {"log_z": torch.randn(4, device=device), "ref_logprobs": old + 0.1}
    else:
        arguments["groups"] = 2
    results = []
    for source in ("logprobs", "hidden", "compact"):
        leaf = hidden.clone().requires_grad_()
        if source == "logprobs":
            logprobs = (leaf @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            loss = gk.policy_loss(logprobs, old, advantages, **arguments).loss
        else:
            loss = gk.linear_policy_loss(
                leaf, weight, targets, old, advantages, compact=source == "compact", chunk_size=16, **arguments
            ).loss
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert results[0][1].any()
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
