"""Our fused head in verl's actor: by name and by patch, against verl's fused head and its logits."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")
pytest.importorskip("transformers")

from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.integrations import fsdp_verl, tiny_verl, tiny_vision
from tests.integrations.test_verl import in_new_process

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.utils.torch_functional as verl_functions
    from verl.models.transformers import monkey_patch, qwen3_vl
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.engine.fsdp import transformer_impl

    from grpo_kernels.integrations.verl import head as _head
    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

V = 4000
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_PLAIN_FORWARD = LlamaForCausalLM.forward
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 2.5}),
    "phi": (PhiForCausalLM, PhiConfig, {}),
}
FSDP = Path(fsdp_verl.__file__)
LENGTHS = (120, 70, 4, 250)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """verl takes the device for a GPU, and replaces the forward of a model's class, which later tests need."""
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    forwards = {kind: kind.forward for kind in (*(of[0] for of in KINDS.values()), Qwen2_5_VLForConditionalGeneration)}
    yield
    unpatch_verl()
    for kind, forward in forwards.items():
        kind.forward = forward


def model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    kind, config, options = KINDS[name]
    result = kind(config(**SIZES, attn_implementation="eager", **options))
    if name == "phi":
        result.lm_head.bias.data.normal_()
    return result.to(dtype)


class Engine(transformer_impl.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine around a model that is not sharded."""

    def __init__(self, module: Any, autocast: torch.dtype = torch.float32) -> None:
        self.module, self._autocast_dtype = module, autocast
        self.use_ulysses_sp = self.pad_to_length = False
        self.compute_entropy_from_logits = verl_functions.entropy_from_logits
        self.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)

    def get_data_parallel_group(self) -> None:
        return None


def micro_batch(fused: bool, packed: bool, temperature: float) -> Any:
    torch.manual_seed(2)
    rows = [torch.randint(1, V, (length,)) for length in LENGTHS]
    tensors = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(n) for n in LENGTHS], layout=torch.jagged),
    }
    options = {
        "use_remove_padding": packed,
        "use_fused_kernels": fused,
        "calculate_entropy": True,
        "temperature": temperature,
        "pad_token_id": 0,
    }
    return tiny_verl.tensordict_utils.get_tensordict(tensors, options)


class Result(NamedTuple):
    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]


# the last position of a row has no token after it, so that its target depends on the layout
_PLACES = torch.cat([torch.arange(length) < length - 1 for length in LENGTHS])


def stepped(
    module: Any, fused: bool, *, packed: bool = True, temperature: float = 0.7, autocast: torch.dtype = torch.float32
) -> Result:
    """Runs verl's forward step with a loss of log-probs and entropies, and its backward."""
    found: dict[str, Tensor] = {}

    def loss(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        assert all(model_output[name].is_nested for name in ("log_probs", "entropy"))
        logprobs, entropy = (model_output[name].values()[_PLACES] for name in ("log_probs", "entropy"))
        found.update(logprobs=logprobs.detach(), entropy=entropy.detach())
        weights = torch.linspace(-1, 1, len(logprobs))
        return (weights * logprobs.float() + 0.1 * weights.flip(0) * entropy.float()).sum(), {}

    module.zero_grad()
    value, _ = Engine(module, autocast).forward_step(micro_batch(fused, packed, temperature), loss, False)
    value.backward()
    return Result(**found, gradients=gradients_of(module))


def gradients_of(module: Any) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}


def with_backend(module: Any, backend: str) -> Any:
    monkey_patch.patch_forward_with_backends(module, use_fused_kernels=True, fused_kernels_backend=backend)
    return module


def assert_near(got: Result, want: Result, near: float = 1e-5) -> None:
    """Within float32 rounding: sums over 16 products and 4,000 columns, of the size of the largest value."""
    for ours, theirs in ((got.logprobs, want.logprobs), (got.entropy, want.entropy)):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near, check_dtype=False)
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-4, atol=near * float(gradient.abs().max()))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_parity_with_verl(name: str, packed: bool, temperature: float) -> None:
    """One model, whose class gets verl's fused forward and then ours, in verl's own forward step."""
    module = model(name)
    of_logits = stepped(module, False, packed=packed, temperature=temperature)
    of_torch = stepped(with_backend(module, "torch"), True, packed=packed, temperature=temperature)
    ours = stepped(with_backend(module, "grpo_kernels"), True, packed=packed, temperature=temperature)
    assert_near(ours, of_logits)
    assert_near(ours, of_torch)


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
    assert_near(stepped(module, True), want)
    unpatch_verl()
    assert with_backend(model(), "torch")._verl_fused_kernels_backend == "torch"


def test_patch_can_leave_the_head_out() -> None:
    patch_verl(grpo=False, loss=False, correction=False, head=False)
    assert with_backend(model(), "liger")._verl_fused_kernels_backend == "liger"


def test_other_models_of_the_class_keep_their_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl replaces the forward of a class: a model of the class that was patched for 'torch' keeps that."""
    other = with_backend(model(), "torch")
    with_backend(model(), "grpo_kernels")
    calls: list[Any] = []
    original = _head._THEIR_HEAD.forward
    monkeypatch.setattr(_head._THEIR_HEAD, "forward", lambda self, *a: calls.append(a) or original(self, *a))
    monkeypatch.setattr(_head, "get_ulysses_sequence_parallel_world_size", lambda: 2)  # our checks are not theirs
    other(input_ids=torch.ones(1, 4, dtype=torch.long), return_dict=True)
    assert len(calls) == 1


def test_without_fused_kernels_nothing_changes() -> None:
    forward = LlamaForCausalLM.forward
    monkey_patch.patch_forward_with_backends(model(), use_fused_kernels=False, fused_kernels_backend="grpo_kernels")
    assert LlamaForCausalLM.forward is forward


# ------------------------------------------------------------------------------------------------ half precision


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
    ours = stepped(with_backend(module, "grpo_kernels"), True, **options)
    LlamaForCausalLM.forward = _PLAIN_FORWARD
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
    # A body in bfloat16 adds noise of a quarter to the distance of a single parameter, on either side.
    ours_in_all, verl_in_all = (math.hypot(*values) for values in zip(*distances.values(), strict=True))
    assert ours_in_all <= verl_in_all, distances
    for name in ("lm_head.weight", "model.norm.weight"):  # next to the head, before the body
        assert distances[name][0] <= 1.1 * distances[name][1] + 1e-6, (name, distances[name])


# ------------------------------------------------------------------------------------------------------- memory


def largest_allocation(call: Callable[[], Any]) -> int:
    """Bytes of the largest tensor that a call allocates, also within compiled ops."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


def test_no_logits() -> None:
    module, logits = model(), 4 * sum(LENGTHS) * V
    largest = []
    for backend in (None, "torch", "grpo_kernels"):
        if backend is not None:
            with_backend(module, backend)
        largest.append(largest_allocation(lambda b=backend: stepped(module, b is not None)))
    assert min(largest[:2]) >= logits  # verl's 512 rows at a time are all
    assert largest[2] <= 0.51 * logits  # two chunks of 224 rows


# --------------------------------------------------------------------------------- what models do with their logits


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "phi"])
def test_softcap_scale_and_bias(name: str) -> None:
    module = model(name)
    want = stepped(module, False)
    assert_near(stepped(with_backend(module, "grpo_kernels"), True), want)
    theirs = stepped(with_backend(module, "torch"), True)
    assert float((theirs.logprobs - want.logprobs).abs().max()) > 0.1  # verl's fused path leaves them out


def test_images() -> None:
    """verl's forward of Qwen2.5-VL, which takes the positions of text and of images, [4, B, T]."""
    module = tiny_vision.model()
    torch.manual_seed(0)
    ids, ones = torch.randint(6, tiny_vision.VOCABULARY, (4, 6)), torch.ones(4, 3, dtype=torch.long)
    prompts = {"prompt_ids": ids[:, :3], "prompt_mask": ones, "completion_ids": ids[:, 3:], "completion_mask": ones}
    inputs = tiny_vision.with_images(prompts)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask, grid = torch.ones_like(ids), inputs["image_grid_thw"]
    positions, _ = module.model.get_rope_index(ids, inputs["mm_token_type_ids"], grid, attention_mask=mask)
    options = {"attention_mask": mask, "pixel_values": inputs["pixel_values"], "image_grid_thw": grid}
    options["position_ids"] = torch.cat([torch.arange(ids.shape[1]).expand(1, 4, -1), positions])
    results = []
    for fused in (False, True):
        if fused:
            output = with_backend(module, "grpo_kernels")(ids, return_dict=True, temperature=0.7, **options)
            logprobs, entropy = output.log_probs, output.entropy
            assert output.logits is None
        else:
            logits = (module(ids, **options).logits / 0.7).log_softmax(-1)
            logprobs = logits.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
            entropy = -(logits.exp() * logits).sum(-1)
        module.zero_grad()
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        results.append(Result(logprobs.detach(), entropy.detach(), gradients_of(module)))
    assert_near(results[1], results[0])
    assert any("patch_embed" in name for name in results[1].gradients)


def test_hyperclovax_multiplies() -> None:
    config = SimpleNamespace(model_type="hyperclovax", logits_scaling=4.0)
    config.get_text_config = lambda: config
    fake = SimpleNamespace(config=config, lm_head=torch.nn.Linear(2, 3))
    assert _head.head_options(fake)[1:3] == (None, 4.0)
    config.model_type = "granite"
    assert _head.head_options(fake)[1:3] == (None, 0.25)


# ----------------------------------------------------------------------------------------------------- refusals


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    module = with_backend(model(), "grpo_kernels")
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match=r"'grpo_kernels': lm_head must be a torch[.]nn[.]Linear, got Linear"):
        stepped(adapted, True)
    without = LlamaForCausalLM(LlamaConfig(**SIZES))
    del without.lm_head
    with pytest.raises(ValueError, match=r"lm_head must be a torch[.]nn[.]Linear, got NoneType"):
        with_backend(without, "grpo_kernels")
    odd = model()
    odd.config.logit_scale = "inv_sqrt_d_model"
    with pytest.raises(TypeError, match=r"^impl_backend='grpo_kernels': config.logit_scale must be a number, got str"):
        with_backend(odd, "grpo_kernels")
    odd.config.logit_scale, odd.config.model_type = None, "chameleon"
    with pytest.raises(ValueError, match="model_type must not be 'chameleon'"):
        with_backend(odd, "grpo_kernels")
    module = with_backend(model(), "grpo_kernels")
    monkeypatch.setattr(_head, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match="shift_labels must be given with Ulysses sequence parallelism"):
        module(input_ids=torch.ones(1, 4, dtype=torch.long), return_dict=True)


def test_adapters_elsewhere_are_trained() -> None:
    peft = pytest.importorskip("peft")
    module = model()
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    results = []
    for fused in (False, True):
        if fused:
            with_backend(module, "grpo_kernels")
        adapted.zero_grad()
        seen: dict[str, Tensor] = {}

        def loss(model_output: Any, data: Any, dp_group: Any, seen: dict[str, Tensor] = seen) -> Any:
            seen["logprobs"] = model_output["log_probs"].values()[_PLACES]
            return seen["logprobs"].sum(), {}

        Engine(adapted).forward_step(micro_batch(fused, True, 0.7), loss, False)[0].backward()
        results.append((seen["logprobs"].detach(), gradients_of(adapted)))
    assert results[0][1] and all("lora" in name for name in results[0][1])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_head_that_fsdp2_shards_by_itself(tmp_path: Path) -> None:
    """verl makes an untied lm_head a unit of its own. Gradients are means over two ranks, as in one process."""
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*launch, str(FSDP), str(tmp_path)], timeout=300, cwd=FSDP.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    whole = with_backend(fsdp_verl.model(), "grpo_kernels")
    for rank in range(2):
        (fsdp_verl.loss(whole, rank) / 2).backward()
    for rank in ranks:
        assert "mixed torch.Tensor and DTensor" in rank["theirs"]  # verl's own head does not run here
        assert rank["ours"].keys() == gradients_of(whole).keys()
        for name, gradient in gradients_of(whole).items():
            # the two losses are added up in another order, in float32
            torch.testing.assert_close(rank["ours"][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_verls_forwards_hand_over_a_sharded_weight() -> None:
    """verl's full_tensor() in Qwen3-VL and Qwen3.5 loses the gradients of other ranks."""
    seen = []

    def forward(self: Any) -> None:
        seen.append(isinstance(torch.ones(1), qwen3_vl.DTensor))
        raise ZeroDivisionError

    forward.__module__ = qwen3_vl.__name__
    theirs, module = qwen3_vl.DTensor, model()
    module._verl_fused_kernels_backend = "grpo_kernels"
    wrapped = _head._with_options(forward)
    qwen3_vl.DTensor = torch.Tensor
    try:
        with pytest.raises(ZeroDivisionError):
            wrapped(module)
        assert qwen3_vl.DTensor is torch.Tensor and seen == [False]
    finally:
        qwen3_vl.DTensor = theirs


def test_shards_of_ulysses_make_up_the_whole() -> None:
    """Ranks get slices of the hidden states and of labels that were shifted before."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(1, 64, 8), torch.randn(50, 8)
    ids = torch.randint(50, (1, 64))
    shifted = ids.roll(-1, 1)
    fused = FusedLinearForPPO(impl_backend="grpo_kernels")
    whole = fused(hidden, weight, shifted, 0.9)
    parts = [fused(h, weight, t, 0.9) for h, t in zip(hidden.split(32, 1), shifted.split(32, 1), strict=True)]
    for k in range(2):
        torch.testing.assert_close(torch.cat([part[k] for part in parts], 1), whole[k], rtol=1e-6, atol=1e-6)
    theirs = FusedLinearForPPO()(hidden, weight, shifted, 0.9)
    torch.testing.assert_close(whole, theirs, rtol=1e-5, atol=1e-5)


def test_a_chunk_size_is_obeyed() -> None:
    hidden, weight, ids = torch.randn(1, 64, 8), torch.randn(500, 8), torch.randint(500, (1, 64))
    fused = FusedLinearForPPO(chunk_size=16, impl_backend="grpo_kernels")
    assert largest_allocation(lambda: fused(hidden, weight, ids)) == 4 * 16 * 500
    assert FusedLinearForPPO().chunk_size == 512 and FusedLinearForPPO(chunk_size=7).chunk_size == 7
    with pytest.raises(ValueError, match="Unsupported FusedLinearForPPO backend: grpo"):
        FusedLinearForPPO(impl_backend="grpo")


@pytest.mark.full
def test_name_is_known_in_a_new_process(tmp_path: Path) -> None:
    done = in_new_process(
        tmp_path,
        "auto",
        """if True:
        from verl.workers.utils import losses  # as the actor's worker does
        from verl.models.transformers.monkey_patch import patch_forward_with_backends
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
        patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="grpo_kernels")
        import torch
        output = model(input_ids=torch.arange(6)[None], return_dict=True, temperature=1.0)
        assert output.logits is None and output.log_probs.shape == (1, 6)
    """,
    )
    assert done.returncode == 0, done.stderr
