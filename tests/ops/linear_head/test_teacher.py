"""The divergence from a teacher as a term of linear_policy_loss: the sum of two losses that are tested alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_distillation_loss import registration as distillation
from grpo_kernels.ops.linear_head import chunks
from tests.harness import EXP2_ERROR, INDUCTOR, assert_raises, assert_within_budget, device_of, needs_cpu_kernels
from tests.ops.linear_head.test_policy_loss_edges import (
    CONFIGS,
    F64,
    HIDDEN,
    KERNELS,
    ROWS,
    VOCABULARY,
    WIDTH,
    assert_close,
    batch,
    leaves_of,
    noise,
)
from tests.ops.linear_head.test_policy_loss_kernels import inherited_errors

pytestmark = needs_cpu_kernels
K, COEF = 4, 0.7
KINDS, TAILS = ("forward_kl", "reverse_kl", "jsd"), ("bucket", "ignore", "renormalise")
OF_HEAD = ("bias", "lora", "temperature", "softcap", "logit_scale", "weight_grad")


def teacher(k: int = K, shape: tuple[int, ...] = (ROWS, WIDTH), **fields: Any) -> gk.Teacher:
    logprobs, ids = (2 * noise(*shape, VOCABULARY)).log_softmax(-1).topk(k, -1)
    return gk.Teacher(ids, logprobs, **{"coef": COEF} | fields)


def on(device: Any, value: Any) -> Any:
    if isinstance(value, gk.Teacher):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return gk.Teacher(**{name: on(device, part) for name, part in fields.items()})
    return value.to(device) if isinstance(value, Tensor) else value


def taught(arguments: dict[str, Any], backend: str = "cpu", **options: Any) -> dict[str, Tensor]:
    given = {name: on(device_of(backend), value) for name, value in (arguments | options).items()}
    leaves = leaves_of(given)
    result = gk.linear_policy_loss(**given | leaves, backend=backend)
    result.loss.backward()
    part = result.metrics.distillation
    assert not any(value.requires_grad for value in part)
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    measured = {"metrics": result.metrics.tensor, "part": part.loss, "divergence": part.divergence, "mass": part.mass}
    return {"loss": result.loss.detach()} | measured | gradients


def takes_part(arguments: dict[str, Any]) -> Tensor:
    """Rows of the loss, from the arguments that leave tokens out."""
    is_row = arguments["targets"] != -100
    if "mask" in arguments and "term_index" not in arguments:
        is_row = is_row & arguments["mask"]
    if "positions" in arguments:
        chosen = torch.zeros(is_row.numel(), dtype=torch.bool).index_fill(0, arguments["positions"], True)
        is_row = is_row & chosen.view(is_row.shape)
    return is_row


def apart(arguments: dict[str, Any], backend: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """The same from two calls that know nothing of each other."""
    given = arguments | options
    lesson = given.pop("teacher")
    leaves = leaves_of(given)
    policy = gk.linear_policy_loss(**given | leaves, backend=backend)
    mask = takes_part(given) if lesson.mask is None else takes_part(given) & (lesson.mask != 0)
    of_head = {name: given[name] for name in OF_HEAD if name in given} | leaves
    of_teacher = {name: getattr(lesson, name) for name in ("kind", "tail", "beta", "weights", "normalizer")}
    ids = {"teacher_ids": lesson.ids, "teacher_logprobs": lesson.logprobs}
    distilled = gk.linear_distillation_loss(**of_head | ids | of_teacher, mask=mask, backend=backend)
    loss = policy.loss + lesson.coef * distilled.loss
    loss.backward()
    measured = {"part": lesson.coef * distilled.loss.detach(), "divergence": distilled.divergence}
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    measured |= {"metrics": policy.metrics.tensor, "mass": distilled.mass}
    return {"loss": loss.detach()} | measured | gradients


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product for logits from here on."""
    calls: list[int] = []
    once = chunks.Products.logits

    def counted(self: chunks.Products, rows: Any) -> Any:
        hidden, logits = once(self, rows)
        calls.append(len(hidden))
        return hidden, logits

    monkeypatch.setattr(chunks.Products, "logits", counted)
    return calls


@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CONFIGS)
def test_is_the_sum_of_two_losses(name: str, memory: str, compact: bool | None) -> None:
    arguments = batch(name) | {"config": CONFIGS[name], "compact": compact, "chunk_size": 8, "return_entropy": True}
    arguments["teacher"] = teacher()
    got = taught(arguments, memory=memory)
    assert_close(got, apart(arguments, memory="low"))
    assert got["part"] != 0 and not got["by hidden"][~takes_part(arguments)].any()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dapo", "entropy"])
def test_every_divergence(name: str, kind: str, tail: str) -> None:
    """Targets are the first id, another, or none; some slots are unused, and a row has no id."""
    lesson = teacher(kind=kind, tail=tail, beta=0.3 if kind == "jsd" else None)
    lesson.ids[1, 0, 2:], lesson.ids[2, 1] = -1, -1
    arguments = batch(name) | {"config": CONFIGS[name], "teacher": lesson, "chunk_size": 8}
    arguments["targets"][0, 0], arguments["targets"][2, 0] = lesson.ids[0, 0, 0], lesson.ids[2, 0, K - 1]
    assert_close(taught(arguments), apart(arguments, memory="low"))


@pytest.mark.parametrize("name", ["dapo", "entropy"])
def test_ids_may_be_the_whole_vocabulary(name: str) -> None:
    """Nothing is left for the kernels; or one column, which is the target of a row and not of another."""
    arguments = batch(name) | {"config": CONFIGS[name]}
    for k in (VOCABULARY, VOCABULARY - 1):
        arguments["teacher"] = teacher(k)
        missing = {*range(VOCABULARY)} - {*arguments["teacher"].ids[0, 0].tolist()}
        arguments["targets"][0, 0] = next(iter(missing), 3)
        assert_close(taught(arguments), apart(arguments, memory="low"))


def test_nothing_is_left_but_logits_of_minus_infinity() -> None:
    """A column that no model may choose, as the padding of a vocabulary."""
    lesson, last = teacher(VOCABULARY), VOCABULARY - 1
    lesson.ids[lesson.ids == last] = -1
    arguments = batch("entropy") | {"config": CONFIGS["entropy"], "teacher": lesson}
    arguments["bias"][last] = -math.inf
    arguments["targets"] = arguments["targets"].clamp(max=last - 1)
    got = taught(arguments)
    assert_close(got, apart(arguments, memory="low"))
    assert got["by weight"].isfinite().all() and not got["by weight"][last].any()


OPTIONS: dict[str, dict[str, Any]] = {
    "scaling": {"softcap": 3.0, "logit_scale": 1.5, "temperature": torch.linspace(0.5, 2, ROWS, dtype=F64)[:, None]},
    "no bias": {"bias": None},
    "lora": {"lora": (torch.ones(2, HIDDEN, dtype=F64), torch.eye(VOCABULARY, 2, dtype=F64), 0.5)},
    "positions": {"positions": torch.tensor([1, 0, 9, 15])},
    "another reference": {"ref_hidden": torch.linspace(-1, 1, ROWS * WIDTH * HIDDEN, dtype=F64).view(ROWS, WIDTH, -1)},
}


@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_head(name: str, compact: bool | None) -> None:
    config = CONFIGS["dapo"] if name == "another reference" else CONFIGS["entropy"]
    arguments = batch() | {"config": config, "teacher": teacher(), "compact": compact, "chunk_size": 8} | OPTIONS[name]
    arguments = {key: value for key, value in arguments.items() if value is not None}
    assert_close(taught(arguments), apart(arguments, memory="low"))


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": torch.arange(WIDTH).repeat(ROWS, 1) % 2},
        {"weights": torch.linspace(-1, 1, ROWS * WIDTH, dtype=F64).view(ROWS, WIDTH)},
        {"normalizer": 7.0},
        {"normalizer": torch.tensor([7.0]), "coef": -2.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_of_the_teacher(fields: dict[str, Any]) -> None:
    arguments = batch() | {"teacher": teacher(**fields)}
    assert_close(taught(arguments), apart(arguments))


def test_a_teacher_beside_a_normalizer_needs_its_own() -> None:
    """Its tokens would be counted in this call alone, so that micro-batches would not add up to the batch."""
    arguments = batch() | {"normalizer": 7.0}
    with pytest.raises(ValueError, match=r"^linear_policy_loss: teacher.normalizer must be given with normalizer, as "):
        taught(arguments | {"teacher": teacher()})
    for fields in ({"normalizer": 7.0}, {"weights": torch.ones(ROWS, WIDTH)}):
        assert taught(arguments | {"teacher": teacher(**fields)})["loss"].isfinite()


def test_tokens_without_a_part_hold_anything() -> None:
    """They are too few to be left out of the products."""
    arguments = batch("dapo") | {"config": CONFIGS["dapo"], "teacher": teacher(mask=torch.ones(ROWS, WIDTH))}
    arguments["mask"] = (torch.arange(ROWS * WIDTH) != 20).view(ROWS, WIDTH)
    lesson, outside = arguments["teacher"], ~takes_part(arguments)
    lesson.mask[0, 1] = 0
    want = taught(arguments)
    lesson.ids[outside], lesson.ids[0, 1], lesson.logprobs[outside] = 10**6, -7, math.nan
    arguments["hidden"][outside] = math.nan
    temperature = torch.where(outside, math.nan, 1.0).double()
    for compact in (None, False):
        got = taught(arguments, compact=compact, temperature=temperature)
        assert_close(got, want)
    assert want["divergence"][0, 1] == 0 and want["by hidden"][0, 1].any()


def test_rows_without_an_advantage_are_taught(products: list[int]) -> None:
    """And rows that have neither are in one product only."""
    arguments = batch() | {"advantages": torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=F64), "chunk_size": 100}
    mask = torch.zeros(ROWS, WIDTH)
    mask[0, :3] = 1
    arguments["teacher"] = teacher(mask=mask)
    got = taught(arguments)
    assert products == [8, 7]  # without a gradient; then two taught tokens and five of the third row
    assert_close(got, apart(arguments, memory="low"))
    assert got["by hidden"][0, :2].any() and got["by hidden"][2, :5].any() and not got["by hidden"][0, 3:].any()


def test_an_entropy_bonus_alone_is_a_gradient() -> None:
    arguments = batch("entropy") | {"config": CONFIGS["entropy"], "teacher": teacher(mask=torch.eye(ROWS, WIDTH))}
    arguments["advantages"][:] = 0
    got = taught(arguments)
    assert_close(got, apart(arguments, memory="low"))
    assert got["by hidden"][0, 1].any()


def test_shares_the_products(products: list[int]) -> None:
    arguments = batch() | {"teacher": teacher(), "chunk_size": 8}
    taught(arguments, compact=False)
    assert products == [8, 8, 8, 4]


def test_packed_tokens_and_shared_positions() -> None:
    """A position's divergence counts once, however many samples share it."""
    packed = {name: value.flatten(0, 1) for name, value in batch().items() if name in ("hidden", "targets", "mask")}
    others = {name: value for name, value in batch().items() if name in ("weight", "bias")}
    index = torch.tensor([[0, 1, 2, 5], [0, 1, 3, -1], [20, 21, 8, 9]])
    terms = {"term_index": index, "old_logprobs": noise(3, 4) - 3, "advantages": noise(3)}
    used = torch.zeros(ROWS * WIDTH, dtype=torch.bool)
    used[index[index >= 0]] = True
    lesson = teacher(shape=(ROWS * WIDTH,), mask=used)
    arguments = packed | others | terms | {"teacher": lesson, "config": CONFIGS["entropy"]}
    del arguments["mask"]
    assert_close(taught(arguments), apart(arguments, memory="low"))


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_over_a_support_the_divergence_is_of_the_whole_vocabulary(memory: str) -> None:
    arguments = batch() | {"teacher": teacher()}
    targets = arguments["targets"].clamp(min=0).view(-1)
    ids = torch.stack((targets, (targets + 1) % VOCABULARY), 1).sort(1).values
    arguments["support"] = ids.view(-1), torch.arange(len(ids) + 1) * 2
    if memory == "fast":
        assert_close(taught(arguments), apart(arguments))
    into = torch.zeros_like(arguments["weight"])
    got = taught(arguments, weight_grad=into)
    torch.testing.assert_close(into, apart(arguments)["by weight"], rtol=1e-9, atol=1e-11)
    assert "by weight" not in got


def test_weight_grad_is_added_to() -> None:
    arguments = batch() | {"teacher": teacher()}
    into = torch.ones_like(arguments["weight"])
    taught(arguments, weight_grad=into)
    torch.testing.assert_close(into - 1, apart(arguments)["by weight"], rtol=1e-9, atol=1e-11)


def certain(name: str, **fields: Any) -> tuple[dict[str, Any], Tensor]:
    """A batch whose student is sure of every target, and its probabilities of the other columns."""
    arguments = batch(name) | {"config": CONFIGS[name], "teacher": teacher(k=2, **fields)}
    arguments["bias"][5] += 60
    arguments["targets"][:] = 5
    arguments["old_logprobs"][:] = 0
    logits = torch.nn.functional.linear(arguments["hidden"], arguments["weight"], arguments["bias"])
    others = (logits - logits[..., 5:6]).exp().index_fill(2, torch.tensor(5), 0)
    assert others.sum(2)[takes_part(arguments)].max() < 1e-15
    return arguments, others


def test_a_certain_target_is_exact() -> None:
    arguments, _ = certain("entropy")
    assert_close(taught(arguments), apart(arguments, memory="low"), rtol=1e-8, atol=0)


def test_the_gradient_of_a_certain_target_is_exact() -> None:
    """Its logit's is 1 minus a probability of nearly 1."""
    arguments, others = certain("grpo", mask=(torch.arange(ROWS) > 0)[:, None].expand(ROWS, WIDTH))
    got = taught(arguments)["by hidden"][0]
    each = -arguments["advantages"][0] / WIDTH / ROWS  # the row has no ignored target
    pulls = others[0, :, :, None] * (arguments["weight"][5] - arguments["weight"])
    # others has an error of 60 times a rounding
    torch.testing.assert_close(got, each * pulls.sum(1), rtol=1e-12, atol=0)


# the teacher's columns must not leave room for another row's: each kernel rounds its own part
@pytest.mark.parametrize("name", ["dapo", "entropy"])
@pytest.mark.parametrize("backend", KERNELS)
def test_float32(backend: str, name: str) -> None:
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch(name, 2).items()}
    exact = {k: v.double() if v.is_floating_point() else v for k, v in arguments.items()}
    lesson, options = teacher(shape=(2, WIDTH), kind="jsd"), {"config": CONFIGS[name], "chunk_size": 8}
    got = taught(arguments, backend, teacher=lesson, **options)
    working = taught(arguments, "reference", teacher=lesson, **options)
    gold = taught(exact, "reference", teacher=lesson, **options)
    inherited = inherited_errors(exact, CONFIGS[name], backend)
    if inherited:  # and the derivative of a Jensen-Shannon divergence by the student's normalizer is at most 1
        inherited |= {"part": COEF * EXP2_ERROR, "loss": inherited["loss"] + COEF * EXP2_ERROR}
    for what in ("loss", "part", "divergence", "mass", "by hidden", "by weight", "by bias"):
        assert got[what].dtype == working[what].dtype == torch.float32
        error = inherited.get(what.removeprefix("by "), 0.0)
        assert_within_budget(got[what], working[what], gold[what], what, error)


@pytest.mark.parametrize("backend", KERNELS)
def test_halves(backend: str) -> None:
    exact = {k: v.bfloat16().double() if v.is_floating_point() else v for k, v in batch("dapo", 2).items()}
    arguments = {k: v.bfloat16() if v.is_floating_point() else v for k, v in exact.items()}
    options = {"config": CONFIGS["dapo"], "chunk_size": 8, "teacher": teacher(shape=(2, WIDTH))}
    got, gold = taught(arguments, backend, **options), taught(exact, "reference", **options)
    torch.testing.assert_close(got["loss"].cpu().double(), gold["loss"].cpu(), rtol=1e-5, atol=1e-6)
    for what in ("by hidden", "by weight", "by bias"):
        # two roundings, of terms whose largest is that of the result; Triton's interpreter truncates
        allowed = 4 * torch.finfo(torch.bfloat16).eps * float(gold[what].abs().max())
        assert float((got[what].cpu().double() - gold[what].cpu()).abs().max()) <= allowed, what


@pytest.mark.parametrize("target", [VOCABULARY, VOCABULARY + 1, -1])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name in ("cuda", "triton")])
def test_a_wrong_target_is_nan_on_a_gpu(backend: str, target: int) -> None:
    """As without a teacher: its values are not looked at before the kernels run."""
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch(rows=2).items()}
    arguments["targets"][0, 1] = target
    for options in ({}, {"teacher": teacher(shape=(2, WIDTH))}):
        given = {name: on(device_of(backend), value) for name, value in (arguments | options).items()}
        assert gk.linear_policy_loss(**given | leaves_of(given), backend=backend).loss.isnan()


@pytest.mark.parametrize("backend", [name for name in KERNELS if name in ("cuda", "triton")])
def test_rows_with_a_gradient_by_the_teacher_alone_are_not_left_out(backend: str) -> None:
    arguments = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(rows=2).items()}
    arguments |= {"hidden": noise(2, WIDTH, 16).bfloat16(), "weight": noise(VOCABULARY, 16).bfloat16()}
    arguments |= {"advantages": torch.zeros(2), "teacher": teacher(shape=(2, WIDTH), tail="renormalise")}
    got, want = (taught(arguments, backend, compact=compact) for compact in (True, False))
    for what in ("by hidden", "by weight"):
        assert want[what].any()
        torch.testing.assert_close(got[what], want[what], rtol=0.02, atol=0.02 * float(want[what].abs().max()))


def test_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch().items()}
    lesson = teacher()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, **others: Tensor) -> Tensor:
        return gk.linear_policy_loss(hidden * 2, weight, bias=bias, **others, teacher=lesson).loss * 3

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=INDUCTOR)):
        leaves = leaves_of(arguments)
        value = function(**arguments | leaves)
        value.backward()
        results.append({"loss": value.detach()} | {k: leaf.grad for k, leaf in leaves.items()})
    assert_close(*results, rtol=1e-5, atol=1e-6)


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = batch() | {"teacher": teacher()}
    want = apart(arguments)
    monkeypatch.setattr(chunks, "Gradients", None)  # nothing is computed that no backward can ask for
    monkeypatch.setattr(distillation, "Gradients", None)
    with torch.no_grad():
        result = gk.linear_policy_loss(**arguments | leaves_of(arguments))
    torch.testing.assert_close(result.loss, want["loss"])
    torch.testing.assert_close(result.metrics.distillation.divergence, want["divergence"])


def test_backward_runs_once_with_products_of_its_own() -> None:
    arguments = batch() | {"teacher": teacher(), "memory": "low"}
    loss = gk.linear_policy_loss(**arguments | leaves_of(arguments)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^linear_policy_loss: backward must run once with teacher, got a second"):
        loss.backward()


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str, list[str]]] = {
    "another type": ({"teacher": torch.ones(2)}, TypeError, "teacher must be a Teacher", ["Tensor"]),
    "shape": ({"teacher": teacher(shape=(2, 3))}, ValueError, "teacher.ids must", [f"[{ROWS}, {WIDTH}, k]"]),
    "kind": ({"teacher": teacher(kind="kl")}, ValueError, "teacher.kind must", ["'kl'", "forward_kl"]),
    "coef": ({"teacher": teacher(coef=math.nan)}, ValueError, "teacher.coef must", ["nan"]),
    "mask": ({"teacher": teacher(mask=torch.ones(3))}, ValueError, "teacher.mask must", ["[3]"]),
    "split": ({"teacher": teacher(), "vocab_start": 0}, ValueError, "vocab_start must be None with teacher", ["0"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    options, kind, start, parts = ERRORS[name]
    assert_raises(kind, f"linear_policy_loss: {start}", parts, lambda: gk.linear_policy_loss(**batch() | options))
