"""Models of a few thousand weights that change their logits after the head, and one that sees images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
# the prefix of the names of a model and its config, and options beside the sizes
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 2.5}),
    "phi": ("Phi", {}),
    "moe": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.3}
        | {"shared_expert_intermediate_size": 8, "output_router_logits": True},
    ),
}
VISION_VOCABULARY = 19
_IMAGE, _VIDEO, _START = 3, 4, 5


def model(name: str, vocabulary: int = 19) -> Any:
    torch.manual_seed(1)
    prefix, options = KINDS[name]
    config = getattr(transformers, f"{prefix}Config")(
        **SIZES | options, vocab_size=vocabulary, attn_implementation="eager"
    )
    result = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if name == "phi":
        result.lm_head.bias.data.normal_()
    return result


def vision_model() -> Any:
    torch.manual_seed(8)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1, "fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=SIZES | {"vocab_size": VISION_VOCABULARY, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=_IMAGE,
        video_token_id=_VIDEO,
        vision_start_token_id=_START,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def with_images(inputs: dict[str, Any]) -> dict[str, Any]:
    """TRL's inputs with an image of 4 x 4 patches of 2 x 2 pixels before each prompt, merged to four tokens."""
    rows = len(inputs["prompt_ids"])
    ids = {name: torch.where(inputs[name] > _START, inputs[name], 6) for name in ("prompt_ids", "completion_ids")}
    image = torch.tensor([_START, *[_IMAGE] * 4]).expand(rows, 5)
    ids["prompt_ids"] = torch.cat([image, ids["prompt_ids"]], 1)
    is_image = torch.cat([ids["prompt_ids"], ids["completion_ids"]], 1) == _IMAGE
    of_images = {
        "prompt_mask": torch.cat([torch.ones_like(image), inputs["prompt_mask"]], 1),
        "pixel_values": torch.randn(rows * 16, 3 * 2 * 2, generator=torch.Generator().manual_seed(9)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "num_images": [1] * rows,
        "mm_token_type_ids": is_image.int(),
    }
    return inputs | ids | of_images


def largest_allocation(call: Callable[[], Any]) -> int:
    """Bytes of the largest tensor that a call allocates, also within compiled ops."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
