"""Our fused head in verl's actor: by name and by patch, against verl's fused head and its logits.

The faults to notice: a change of the logits after the head, a bias or a temperature that is left out; logits in memory;
another model of the class, or verl's own backend, that gets our head; an option that stays set.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")
pytest.importorskip("transformers")

import transformers

from tests.harness import assert_close_to_rounding
from tests.integrations import tiny_models, tiny_verl
from tests.integrations.tiny_models import largest_allocation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.utils.torch_functional as verl_functions
    from verl.models.transformers import monkey_patch, qwen3_vl
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.engine.fsdp import transformer_impl

    from grpo_kernels.integrations.verl import head as _head
    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

V = 400
LENGTHS = (12, 7, 4, 25)
_PREFIXES = [prefix for prefix, _ in tiny_models.KINDS.values()]
CLASSES = [getattr(transformers, f"{prefix}ForCausalLM") for prefix in _PREFIXES]
CLASSES += [transformers.Qwen2_5_VLForConditionalGeneration]
_FORWARDS = {kind: kind.forward for kind in CLASSES}


def restore_forwards() -> None:
    for kind, forward in _FORWARDS.items():
        kind.forward = forward


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """verl takes the device for a GPU, and replaces the forward of a model's class, which later tests need."""
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    yield
    unpatch_verl()
    restore_forwards()


def model(name: str = "llama", dtype: torch.dtype = torch.float32, vocabulary: int = V) -> Any:
    return tiny_models.model(name, vocabulary).to(dtype)


class Engine(transformer_impl.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine around a model that is not sharded."""

    def __init__(self, module: Any, autocast: torch.dtype = torch.float32) -> None:
        self.module, self._autocast_dtype = module, autocast
        self.use_ulysses_sp = self.pad_to_length = False
        self.compute_entropy_from_logits = verl_functions.entropy_from_logits
        self.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)

    def get_data_parallel_group(self) -> None:
        return None


def micro_batch(fused: bool, packed: bool, temperature: float, lengths: Sequence[int]) -> Any:
    torch.manual_seed(2)
    rows = [torch.randint(1, V, (length,)) for length in lengths]
    places = [torch.arange(length) for length in lengths]
    tensors = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in {"input_ids": rows, "position_ids": places}.items()
    }
    options = {"use_remove_padding": packed, "use_fused_kernels": fused, "calculate_entropy": True}
    options |= {"temperature": temperature, "pad_token_id": 0}
    return tiny_verl.tensordict_utils.get_tensordict(tensors, options)


class Result(NamedTuple):
    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]


def stepped(
    module: Any,
    fused: bool,
    *,
    packed: bool = True,
    temperature: float = 0.7,
    autocast: torch.dtype = torch.float32,
    lengths: Sequence[int] = LENGTHS,
) -> Result:
    """Runs verl's forward step with a loss of log-probs and entropies, and its backward."""
    found: dict[str, Tensor] = {}
    # the last position of a row has no token after it, so that its target depends on the layout
    has_target = torch.cat([torch.arange(length) < length - 1 for length in lengths])

    def loss(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        assert all(model_output[name].is_nested for name in ("log_probs", "entropy"))
        logprobs, entropy = (model_output[name].values()[has_target] for name in ("log_probs", "entropy"))
        found.update(logprobs=logprobs.detach(), entropy=entropy.detach())
        weights = torch.linspace(-1, 1, len(logprobs))
        return (weights * logprobs.float() + 0.1 * weights.flip(0) * entropy.float()).sum(), {}

    module.zero_grad()
    value, _ = Engine(module, autocast).forward_step(micro_batch(fused, packed, temperature, lengths), loss, False)
    value.backward()
    return Result(**found, gradients=gradients_of(module))


@pytest.mark.parametrize("packed", [True, False])
def test_sums_of_squares_are_those_of_the_logits(packed: bool) -> None:
    found: dict[bool, dict[str, Tensor]] = {}
    patch_verl(grpo=False, loss=False, correction=False)
    for fused in (False, True):
        module = model()
        monkey_patch.patch_forward_with_backends(module, use_fused_kernels=fused, fused_kernels_backend="torch")
        batch = micro_batch(fused, packed, 0.7, LENGTHS)
        tiny_verl.tensordict_utils.assign_non_tensor(batch, calculate_sum_pi_squared=True)

        def loss(model_output: dict[str, Tensor], fused: bool = fused, **_: Any) -> tuple[Tensor, dict[str, Any]]:
            found[fused] = {name: value.values().detach() for name, value in model_output.items()}
            return found[fused]["log_probs"].sum(), {}

        Engine(module).forward_step(batch, loss, False)
        restore_forwards()
    assert found[True].keys() == found[False].keys() > {"sum_pi_squared"}
    for name in ("entropy", "sum_pi_squared"):
        torch.testing.assert_close(found[True][name], found[False][name], rtol=1e-4, atol=1e-5)


def test_a_head_that_is_not_ours_has_no_sums_of_squares() -> None:
    patch_verl(grpo=False, loss=False, correction=False)
    module, batch = model(), micro_batch(True, True, 0.7, LENGTHS)
    _head._THEIR_PATCH(module, use_fused_kernels=True, fused_kernels_backend="torch")
    tiny_verl.tensordict_utils.assign_non_tensor(batch, calculate_sum_pi_squared=True)
    with pytest.raises(NotImplementedError, match="calculate_sum_pi_squared=True is not supported"):
        Engine(module).forward_step(batch, lambda **_: None, False)


def by_logits(module: Any, **options: Any) -> Result:
    """The same step through the logits, by the forward that the class of the model had at first."""
    restore_forwards()
    return stepped(module, False, **options)


def gradients_of(module: Any) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}


def with_backend(module: Any, backend: str = "grpo_kernels") -> Any:
    monkey_patch.patch_forward_with_backends(module, use_fused_kernels=True, fused_kernels_backend=backend)
    return module


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "cohere", "granite", "phi"])
def test_parity_with_verl(name: str, packed: bool, temperature: float) -> None:
    """One model, whose class gets verl's fused forward and then ours, in verl's own forward step.

    verl's fused path leaves the softcap, scale and bias of the last four out.
    """
    module = model(name)
    options: dict[str, Any] = {"packed": packed, "temperature": temperature}
    of_logits = by_logits(module, **options)
    of_torch = stepped(with_backend(module, "torch"), True, **options)
    ours = stepped(with_backend(module), True, **options)
    assert_close_to_rounding(ours, of_logits, lambda: by_logits(module, **options))
    if name in ("llama", "qwen2"):
        assert_close_to_rounding(ours, of_torch, lambda: by_logits(module, **options))
    else:
        assert float((of_torch.logprobs - of_logits.logprobs).abs().max()) > 0.1


def test_images() -> None:
    """verl's forward of Qwen2.5-VL, which takes the positions of text and of images, [4, B, T]."""
    module = tiny_models.vision_model()
    torch.manual_seed(0)
    ids, ones = torch.randint(6, tiny_models.VISION_VOCABULARY, (4, 6)), torch.ones(4, 3, dtype=torch.long)
    prompts = {"prompt_ids": ids[:, :3], "prompt_mask": ones, "completion_ids": ids[:, 3:], "completion_mask": ones}
    inputs = tiny_models.with_images(prompts)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask, grid = torch.ones_like(ids), inputs["image_grid_thw"]
    positions, _ = module.model.get_rope_index(ids, inputs["mm_token_type_ids"], grid, attention_mask=mask)
    options = {"attention_mask": mask, "pixel_values": inputs["pixel_values"], "image_grid_thw": grid}
    options["position_ids"] = torch.cat([torch.arange(ids.shape[1]).expand(1, 4, -1), positions])

    def result(fused: bool) -> Result:
        if fused:
            output = with_backend(module)(ids, return_dict=True, temperature=0.7, **options)
            logprobs, entropy = output.log_probs, output.entropy
            assert output.logits is None
        else:
            restore_forwards()
            logits = (module(ids, **options).logits / 0.7).log_softmax(-1)
            logprobs = logits.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
            entropy = -(logits.exp() * logits).sum(-1)
        module.zero_grad()
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        return Result(logprobs.detach(), entropy.detach(), gradients_of(module))

    got = result(True)
    assert_close_to_rounding(got, result(False), lambda: result(False))
    assert any("patch_embed" in name for name in got.gradients)


@pytest.mark.parametrize("backend", ["torch", "triton", "liger"])
def test_by_patch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # verl would import a class that TRL 1.16 does not have
    monkeypatch.setattr(monkey_patch, "is_trl_available", lambda: False)
    patch_verl(grpo=False, loss=False, correction=False)
    module = model()
    want = stepped(module, False)
    monkey_patch.apply_monkey_patch(
        module, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend=backend
    )
    assert module._verl_fused_kernels_backend == "grpo_kernels"
    assert_close_to_rounding(stepped(module, True), want, lambda: by_logits(module))
    unpatch_verl()
    assert with_backend(model(), "torch")._verl_fused_kernels_backend == "torch"
    patch_verl(grpo=False, loss=False, correction=False, head=False)
    assert with_backend(model(), backend)._verl_fused_kernels_backend == backend


def test_other_models_of_the_class_keep_their_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl replaces the forward of a class: a model of the class that was patched for 'torch' keeps that."""
    module = model()
    monkey_patch.patch_forward_with_backends(module, use_fused_kernels=False, fused_kernels_backend="grpo_kernels")
    assert type(module).forward is _FORWARDS[type(module)]
    other = with_backend(model(), "torch")
    with_backend(model())
    calls: list[Any] = []
    original = _head._THEIR_HEAD.forward
    monkeypatch.setattr(_head._THEIR_HEAD, "forward", lambda self, *a: calls.append(a) or original(self, *a))
    monkeypatch.setattr(_head, "get_ulysses_sequence_parallel_world_size", lambda: 2)  # our checks are not theirs
    other(input_ids=torch.ones(1, 4, dtype=torch.long), return_dict=True)
    assert len(calls) == 1


class _Exact(torch.nn.Linear):
    """A head whose logits are computed in float64 from the values that it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            bias = None if self.bias is None else self.bias.double()
            return torch.nn.functional.linear(hidden.double(), self.weight.double(), bias)


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_half_precision_is_nearer_to_exact_logits_than_verl(autocast: bool) -> None:
    """The same body in bfloat16 under three heads. verl rounds its logits to bfloat16, and ours does not."""
    dtype = torch.float32 if autocast else torch.bfloat16
    options: dict[str, Any] = {"autocast": torch.bfloat16 if autocast else torch.float32, "temperature": 1.0}
    module = model(dtype=dtype)
    plain = stepped(module, False, **options)
    ours = stepped(with_backend(module), True, **options)
    restore_forwards()
    if autocast:
        module.lm_head.weight.data = module.lm_head.weight.data.bfloat16().float()
        module.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    module.lm_head.__class__ = _Exact
    exact = stepped(module, False, **options)
    errors = {
        kind: float((result.logprobs.double() - exact.logprobs.double()).abs().max())
        for kind, result in (("ours", ours), ("verl", plain))
    }
    # logits of about 30 are rounded by up to 2**-4 in bfloat16, and by 2**-20 in float32
    assert errors["ours"] < 1e-4 and errors["verl"] > 100 * errors["ours"], errors
    assert ours.logprobs.dtype == ours.entropy.dtype == torch.float32
    distances = {
        name: [float((result.gradients[name] - gradient).float().norm()) for result in (ours, plain)]
        for name, gradient in exact.gradients.items()
    }
    # A body in bfloat16, from the last norm on, adds noise of a quarter to the distance of a single parameter.
    ours_in_all, verl_in_all = (math.hypot(*values) for values in zip(*distances.values(), strict=True))
    assert ours_in_all <= verl_in_all, distances
    ours_of_head, verl_of_head = distances["lm_head.weight"]
    assert ours_of_head <= 1.1 * verl_of_head + 1e-6, (ours_of_head, verl_of_head)


def test_no_logits() -> None:
    vocabulary, lengths = 4000, (120, 70, 4, 250)
    module, logits = model(vocabulary=vocabulary), 4 * sum(lengths) * vocabulary
    largest = []
    for backend in (None, "torch", "grpo_kernels"):
        if backend is not None:
            with_backend(module, backend)
        largest.append(largest_allocation(lambda b=backend: stepped(module, b is not None, lengths=lengths)))
    assert min(largest[:2]) >= logits  # verl's 512 rows at a time are all
    assert largest[2] <= 0.51 * logits  # two chunks of 224 rows


def test_the_class_of_verl() -> None:
    """Ranks of Ulysses get slices of the hidden states and of labels that were shifted before; chunks are obeyed."""
    torch.manual_seed(3)
    hidden, weight, ids = torch.randn(1, 64, 8), torch.randn(500, 8), torch.randint(500, (1, 64))
    fused = FusedLinearForPPO(impl_backend="grpo_kernels")
    plain = functools.partial(FusedLinearForPPO(), hidden, weight, ids, 0.9)
    whole, want = fused(hidden, weight, ids, 0.9), plain()
    parts = [fused(h, weight, t, 0.9) for h, t in zip(hidden.split(32, 1), ids.split(32, 1), strict=True)]
    joined = tuple(torch.cat(results, 1) for results in zip(*parts, strict=True))
    for results in (whole, joined):
        assert_close_to_rounding(results, want, plain)
    in_chunks = FusedLinearForPPO(chunk_size=16, impl_backend="grpo_kernels")
    assert largest_allocation(lambda: in_chunks(hidden, weight, ids)) == 4 * 16 * 500
    assert FusedLinearForPPO().chunk_size == 512 and FusedLinearForPPO(chunk_size=7).chunk_size == 7
    with pytest.raises(ValueError, match="Unsupported FusedLinearForPPO backend: grpo"):
        FusedLinearForPPO(impl_backend="grpo")


def test_verls_forwards_hand_over_a_sharded_weight() -> None:
    """verl's full_tensor() in Qwen3-VL and Qwen3.5 loses the gradients of other ranks."""
    seen = []

    def forward(self: Any) -> None:
        seen.append((isinstance(torch.ones(1), qwen3_vl.DTensor), _head._OPTIONS.get() is None))
        raise ZeroDivisionError

    forward.__module__ = qwen3_vl.__name__
    theirs, module = qwen3_vl.DTensor, model()
    module._verl_fused_kernels_backend = "grpo_kernels"
    wrapped = _head._with_options(forward)
    qwen3_vl.DTensor = torch.Tensor
    try:
        with pytest.raises(ZeroDivisionError):
            wrapped(module)
        assert qwen3_vl.DTensor is torch.Tensor and seen == [(False, False)] and _head._OPTIONS.get() is None
    finally:
        qwen3_vl.DTensor = theirs


def test_hyperclovax_multiplies() -> None:
    config = SimpleNamespace(model_type="hyperclovax", logits_scaling=4.0)
    config.get_text_config = lambda: config
    fake = SimpleNamespace(config=config, lm_head=torch.nn.Linear(2, 3))
    assert _head.head_options(fake)[1:3] == (None, 4.0)


def test_adapters_on_the_head_are_refused_and_others_trained() -> None:
    peft = pytest.importorskip("peft")
    module = model()
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    want = stepped(adapted, False)
    with_backend(module)
    assert_close_to_rounding(stepped(adapted, True), want, lambda: by_logits(adapted))
    assert want.gradients and all("lora" in name for name in want.gradients)
    on_head = peft.get_peft_model(with_backend(model()), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match=r"'grpo_kernels': lm_head must be a torch[.]nn[.]Linear, got Linear"):
        stepped(on_head, True)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = model()
    del odd.lm_head
    with pytest.raises(ValueError, match=r"lm_head must be a torch[.]nn[.]Linear, got NoneType"):
        with_backend(odd)
    for name, value, message in (
        ("logit_scale", "inv", r"^impl_backend='grpo_kernels': config.logit_scale must be a number, got str"),
        ("model_type", "chameleon", "model_type must not be 'chameleon'"),
    ):
        odd = model()
        setattr(odd.config, name, value)
        with pytest.raises((TypeError, ValueError), match=message):
            with_backend(odd)
    module, ids = with_backend(model()), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="inputs must be text, got 'pixel_values', which verl's fused forward of this"):
        module(input_ids=ids, pixel_values=torch.ones(1, 3), return_dict=True)  # read by no forward of text models
    monkeypatch.setattr(_head, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="shift_labels must be given with Ulysses sequence parallelism"):
        module(input_ids=ids, return_dict=True)


# ------------------------------------------------------------------------------- what transformers does with its logits


@pytest.mark.full
def test_every_change_of_logits_in_transformers_is_known() -> None:
    """Reads transformers' sources for models with an lm_head whose results are changed."""
    known = {*_head._SOFTCAPS, *_head._SCALES, _head._SCALING, "final_logit_softcapping"}
    # heads that are not linear layers, or models without the attribute `model`: verl cannot run them either
    beyond = {"ModernBertDecoderForCausalLM", "ClvpForCausalLM", "ProphetNetForCausalLM"}
    beyond |= {"Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "ProphetNetForConditionalGeneration"}
    unknown, seen = set(), set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for kind, change in _changes(path.read_text()):
            parts = list(ast.walk(change))
            names = {part.attr for part in parts if isinstance(part, ast.Attribute)}
            names |= {part.id for part in parts if isinstance(part, ast.Name)}
            seen |= names & known
            is_cap = {"tanh", "cap", "soft_cap"} & names
            is_of_encoder_decoder = "final_logits_bias" in names
            if not (names & known or is_cap or is_of_encoder_decoder or kind in beyond):
                unknown.add((path.parent.name, ast.unparse(change)))
    assert {model_type for model_type, _ in unknown} == set(_head._UNSUPPORTED_MODELS), unknown
    assert {"final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"} <= seen


def _changes(source: str) -> Iterator[tuple[str, ast.stmt]]:
    """Statements that change logits after the head, with the names of their classes."""
    lines = source.splitlines()
    for kind in ast.parse(source).body if "self.lm_head(" in source else ():
        for function in kind.body if isinstance(kind, ast.ClassDef) else ():
            is_forward = isinstance(function, ast.FunctionDef) and function.name == "forward"
            if not is_forward or not any("self.lm_head(" in x for x in lines[function.lineno : function.end_lineno]):
                continue
            for line in ast.walk(function):
                if not isinstance(line, ast.Assign | ast.AugAssign):
                    continue
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                places = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
                if not any(isinstance(place, ast.Name) and place.id in ("logits", "lm_logits") for place in places):
                    continue
                called = ast.unparse(line.value.func) if isinstance(line.value, ast.Call) else ""
                if called != "self.lm_head" and not called.endswith((".float", ".contiguous")):
                    yield kind.name, line
