"""A vision-language model of a few thousand weights, and prompts with images: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VOCABULARY = 19
_IMAGE, _VIDEO, _START = 3, 4, 5


def model() -> Any:
    torch.manual_seed(8)
    text = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
    text |= {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=_IMAGE,
        video_token_id=_VIDEO,
        vision_start_token_id=_START,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def with_images(inputs: dict[str, Any]) -> dict[str, Any]:
    """TRL's inputs with an image of 4 x 4 patches of 2 x 2 pixels before each prompt, merged to four tokens."""
    rows = len(inputs["prompt_ids"])
    ids = {name: torch.where(inputs[name] > _START, inputs[name], 6) for name in ("prompt_ids", "completion_ids")}
    image = torch.tensor([_START, *[_IMAGE] * 4]).expand(rows, 5)
    ids["prompt_ids"] = torch.cat([image, ids["prompt_ids"]], 1)
    is_image = torch.cat([ids["prompt_ids"], ids["completion_ids"]], 1) == _IMAGE
    generator = torch.Generator().manual_seed(9)
    return (
        inputs
        | ids
        | {
            "prompt_mask": torch.cat([torch.ones_like(image), inputs["prompt_mask"]], 1),
            "pixel_values": torch.randn(rows * 16, 3 * 2 * 2, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
            "num_images": [1] * rows,
            "mm_token_type_ids": is_image.int(),
        }
    )
