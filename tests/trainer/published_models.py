"""Configurations of the models that the -gpu recipes name, as published beside their weights, and smaller stand-ins."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen2Config, Qwen3Config, T5Config

QWEN = {"vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6}


def qwen2_half_billion(**changes: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "max_position_embeddings": 32768}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return Qwen2Config(**(QWEN | sizes | heads | changes))


def qwen3_8_billion(**changes: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "max_position_embeddings": 40960}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    return Qwen3Config(**(QWEN | sizes | heads | changes))


def t5_base(**changes: Any) -> PretrainedConfig:
    sizes = {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
    kinds = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    return T5Config(**(sizes | kinds | changes))


CONFIGS = {
    "Qwen/Qwen2.5-0.5B": qwen2_half_billion,
    "Qwen/Qwen2.5-0.5B-Instruct": qwen2_half_billion,
    "Qwen/Qwen3-8B": qwen3_8_billion,
    "google/t5-v1_1-base": t5_base,
}
