"""A tiny model and tokenizer, created locally without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_trainer.recipe import Tiny

END, PAD, START, UNKNOWN = "<end>", "<pad>", "<start>", "<unknown>"


def make_tiny(settings: Tiny, tokenizer: Any, attention: str | None = None) -> Any:
    """Creates a Llama or T5 model with random weights from torch's global seed."""
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": attention,
    }
    if settings.architecture == "seq2seq":
        config: Any = T5Config(
            **common,
            d_model=settings.hidden,
            d_ff=settings.intermediate,
            num_layers=settings.layers,
            num_heads=settings.heads,
            d_kv=settings.hidden // settings.heads,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
        config.decoder_start_token_id = tokenizer.pad_token_id
        return T5ForConditionalGeneration(config)
    config = LlamaConfig(
        **common,
        bos_token_id=tokenizer.bos_token_id,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config)


def train_tokenizer(corpus: Sequence[str], vocabulary: int, is_seq2seq: bool) -> Any:
    """Trains a byte-pair tokenizer that keeps digits apart and the space before a word or first digit with it.

    Prompts begin with START, or end with END for an encoder-decoder.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d| ?[^\s\d]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, START, UNKNOWN]
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    )
    template = f"$A {END}" if is_seq2seq else f"{START} $A"
    special_ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        bos_token=START,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
