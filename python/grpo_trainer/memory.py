"""Memory that a recipe needs on each device, from the model's configuration alone; nothing of the model is allocated.

Weights, gradients, optimizer states and caches follow from shapes. Activations are those that autograd saves in a
forward pass over tensors without data, for tokens of the largest lengths that the recipe allows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import pretrained
from grpo_trainer.algorithm import Plan
from grpo_trainer.loading import with_adapters
from grpo_trainer.recipe import Model, Recipe, Rl, Sft

GIB = 2**30
ADAM_STATES = 2  # of the dtype of the weight
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a weight, its share of a block's 8-bit scale, and of that scale's own
SAMPLED_LOGITS = 3  # float32 copies of the next tokens' logits: by temperature, as probabilities, and as they are
LARGEST_CHUNK = GIB  # of logits, in linear_policy_loss on a GPU
PROBE = 16  # tokens of the forward pass that activations are extrapolated from


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one phase on each device.

    Attributes:
        phase: index of the phase.
        kind: "sft" or "rl".
        held: weights, gradients, optimizer states: held for the whole phase.
        sampling: held while responses are sampled.
        update: held in the update.
        unheld: logits of a micro-batch, which the fused loss does not materialise.
    """

    phase: int
    kind: str
    held: dict[str, float]
    sampling: dict[str, float]
    update: dict[str, float]
    unheld: float

    @property
    def total(self) -> float:
        return sum(self.held.values()) + max(sum(self.sampling.values()), sum(self.update.values()))


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A model whose tensors have shapes and no data.

    Attributes:
        lm: the model, with adapters if the recipe has them.
        settings: its part of the recipe.
    """

    lm: Any
    settings: Model

    @property
    def count(self) -> int:
        return sum(weight.numel() for weight in self.lm.parameters())

    @property
    def trained(self) -> int:
        return sum(weight.numel() for weight in self.lm.parameters() if weight.requires_grad)

    @property
    def config(self) -> Any:
        return self.lm.config.get_text_config(decoder=True)

    @property
    def is_seq2seq(self) -> bool:
        return bool(self.lm.config.is_encoder_decoder)

    def weight_bytes(self) -> float:
        quantized = {id(weight) for weight in self._quantized()}
        return sum(
            weight.numel() * (NF4_BYTES if id(weight) in quantized else weight.element_size())
            for weight in self.lm.parameters()
        )

    def trained_bytes(self) -> float:
        return float(sum(weight.nbytes for weight in self.lm.parameters() if weight.requires_grad))

    @functools.cached_property
    def saved_per_token(self) -> tuple[float, float]:
        """Bytes saved for a token, and for a pair of tokens of one row if attention matrices are held."""
        once, twice = (float(saved_bytes(self, length)) for length in (PROBE, 2 * PROBE))
        quadratic = max(0.0, twice - 2 * once) / (2 * PROBE**2)
        linear = once / PROBE - quadratic * PROBE
        # the skeleton has the dtype of the weights; autocast saves halves
        return (linear / 2, quadratic / 2) if self.settings.mixed_precision != "no" else (linear, quadratic)

    def _quantized(self) -> list[Tensor]:
        """Weights that bitsandbytes stores in 4 bits: those of all linear layers but the head and the adapters."""
        if not self.settings.four_bit:
            return []
        head = self.lm.get_output_embeddings()
        layers = [layer for name, layer in self.lm.named_modules() if "lora_" not in name]
        return [layer.weight for layer in layers if isinstance(layer, torch.nn.Linear) and layer is not head]


def load_skeleton(settings: Model, config: Any = None) -> Skeleton:
    """Creates a model from its configuration on the meta device.

    Args:
        settings: the model settings.
        config: configuration of the model; None: that of `settings.path`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if config is None:
        where = pretrained.source(settings.path)
        with pretrained.loading("model.path", settings.path):
            config = AutoConfig.from_pretrained(**where, trust_remote_code=settings.trust_remote_code)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    dtype = getattr(torch, settings.dtype)
    return make_skeleton(
        settings, lambda attention: kind.from_config(config, dtype=dtype, attn_implementation=attention)
    )


def make_skeleton(settings: Model, create: Callable[[str | None], Any]) -> Skeleton:
    """Calls a function of an attention implementation that creates the model, on the meta device."""
    # Flash attention cannot be created without its package; sdpa has the same tensors.
    attention = "sdpa" if settings.attention == "flash_attention_2" else settings.attention
    with torch.device("meta"):
        lm = create(None if attention == "auto" else attention)
        if settings.lora is not None:
            lm = with_adapters(lm, dataclasses.replace(settings, four_bit=False))
    return Skeleton(lm, settings)


def estimate(recipe: Recipe, skeleton: Skeleton, processes: int = 1) -> list[Estimate]:
    """Estimates every phase.

    Args:
        recipe: the recipe.
        skeleton: its model.
        processes: devices that share the work, and with `distributed: fsdp2` the weights.
    """
    return [
        _sft(recipe, number, phase.sft, skeleton, processes)
        if phase.sft is not None
        else _rl(recipe, number, phase.rl, skeleton, processes)  # type: ignore[arg-type]
        for number, phase in enumerate(recipe.phases)
    ]


def _sft(recipe: Recipe, number: int, sft: Sft, skeleton: Skeleton, processes: int) -> Estimate:
    rows, length = min(sft.micro_batch, -(-sft.batch // processes)), recipe.model.max_prompt_tokens
    # No key bounds demonstrations: one and its prompt are taken to be as long as the longest prompt.
    responses = rows * length if skeleton.is_seq2seq else 0
    update, unheld = _update(recipe.model, skeleton, rows * length, responses, length, rows * length)
    return Estimate(number, "sft", _held(recipe, skeleton, processes), {}, update, unheld)


def _rl(recipe: Recipe, number: int, rl: Rl, skeleton: Skeleton, processes: int) -> Estimate:
    plan, rollout, model = Plan.of(rl.algorithm, rl.rollout.max_new_tokens), rl.rollout, recipe.model
    held = _held(recipe, skeleton, processes)
    if plan.needs_reference and model.lora is None:
        held["reference model"] = skeleton.weight_bytes() / _shards(recipe, processes)
    if rl.algorithm.critic is not None and rl.algorithm.critic.separate:
        held["separate critic"] = sum(_held(recipe, skeleton, processes).values())
    prompt, response = model.max_prompt_tokens, rollout.max_new_tokens
    responses = rollout.prompts * rollout.group_size
    sampling = {}
    if rollout.engine == "transformers":
        at_once = -(-min(rollout.batch, responses) // processes)
        sampling["keys and values"] = at_once * (prompt + response) * _cache_bytes(model, skeleton)
        sampling["logits of the next tokens"] = 4.0 * SAMPLED_LOGITS * at_once * skeleton.config.vocab_size
    rows = min(rl.micro_batch, -(-responses // rl.minibatches // processes))
    shares = rl.share_prompts and not model.gradient_checkpointing
    prompts = -(-rows // rollout.group_size) if shares or skeleton.is_seq2seq else rows
    update, unheld = _update(model, skeleton, prompts * prompt, rows * response, prompt + response, rows * response)
    if shares and not skeleton.is_seq2seq:
        update["keys and values of shared prompts"] = rows * prompt * _cache_bytes(model, skeleton)
    return Estimate(number, "rl", held, sampling, update, unheld)


def _held(recipe: Recipe, skeleton: Skeleton, processes: int) -> dict[str, float]:
    shards = _shards(recipe, processes)
    trained = skeleton.trained_bytes() / shards
    held = {"weights": skeleton.weight_bytes() / shards, "gradients": trained, "AdamW": ADAM_STATES * trained}
    if recipe.model.mixed_precision != "no":
        # autocast keeps the casts of trained weights until the end of a forward pass
        held["half-precision copies of weights"] = 2.0 * skeleton.trained / shards
    return held


def _shards(recipe: Recipe, processes: int) -> int:
    return processes if recipe.distributed == "fsdp2" else 1


def _computed_size(model: Model) -> int:
    """Bytes of an activation."""
    return 2 if model.mixed_precision != "no" else getattr(torch, model.dtype).itemsize


def _cache_bytes(model: Model, skeleton: Skeleton) -> float:
    """Keys and values of one token; of an encoder-decoder, in the decoder."""
    config = skeleton.config
    if skeleton.is_seq2seq:
        return 2.0 * config.num_decoder_layers * config.num_heads * config.d_kv * _computed_size(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2.0 * config.num_hidden_layers * heads * width * _computed_size(model)


def _update(
    model: Model, skeleton: Skeleton, prompt_tokens: int, response_tokens: int, length: int, scored: int
) -> tuple[dict[str, float], float]:
    """Bytes of the parts of one micro-batch's update, and of the logits that it does not hold.

    Args:
        model: the model settings.
        skeleton: the model.
        prompt_tokens: tokens of all prompts.
        response_tokens: tokens of all responses.
        length: longest prompt and response together.
        scored: tokens whose log-probs are computed.
    """
    tokens, layers = prompt_tokens + response_tokens, skeleton.config.num_hidden_layers
    linear, quadratic = skeleton.saved_per_token
    holds_matrices = model.attention == "eager" or skeleton.is_seq2seq
    activations = tokens * (linear + (quadratic * length if holds_matrices else 0.0))
    if model.gradient_checkpointing:  # the inputs of all layers, and what is saved in the one that is computed again
        activations = activations / layers + tokens * layers * skeleton.config.hidden_size * _computed_size(model)
    logits = 4.0 * scored * skeleton.config.vocab_size
    update = {"activations": activations}
    if skeleton.is_seq2seq:
        return update | {"logits and their gradient": 2 * logits}, 0.0
    return update | {"a chunk of logits": min(logits, LARGEST_CHUNK)}, logits


def saved_bytes(skeleton: Skeleton, length: int) -> int:
    """Bytes that autograd saves in a forward pass of one row, besides weights and without the LM head."""
    storages = {weight.untyped_storage()._cdata for weight in skeleton.lm.parameters()}
    saved: dict[int, Tensor] = {}  # by storage, which a tensor keeps in use, so that no other gets its address

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in storages:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    inner = skeleton.lm.get_base_model() if hasattr(skeleton.lm, "get_base_model") else skeleton.lm
    device = next(skeleton.lm.parameters()).device
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if skeleton.is_seq2seq:
            half = ids[:, : length // 2]
            inner(input_ids=half, decoder_input_ids=half, use_cache=False)
        else:
            # a mask of four dimensions is taken as it is: others are read, and these tensors have no values
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
            inner.base_model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
