"""A tiny model and tokenizer, created locally without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_trainer.recipe import Tiny

END, PAD, START, UNKNOWN = "<end>", "<pad>", "<start>", "<unknown>"


def make_tiny(settings: Tiny, tokenizer: Any, attention: str | None = None) -> Any:
    """Creates a Llama or T5 model with random weights from torch's global seed."""
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    size, heads = settings.hidden, settings.heads
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": attention,
    }
    if settings.architecture == "seq2seq":
        t5: Any = T5Config(
            **common,
            d_model=size,
            d_ff=settings.intermediate,
            num_layers=settings.layers,
            num_heads=heads,
            d_kv=size // heads,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
        t5.decoder_start_token_id = tokenizer.pad_token_id
        return T5ForConditionalGeneration(t5)
    llama = LlamaConfig(
        **common,
        bos_token_id=tokenizer.bos_token_id,
        hidden_size=size,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(llama)


def train_tokenizer(corpus: Sequence[str], vocabulary: int, is_seq2seq: bool) -> Any:
    """Trains a byte-pair tokenizer that keeps digits apart and the space before a word or first digit with it.

    Prompts begin with START, or end with END for an encoder-decoder.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    words = pre_tokenizers.Split(Regex(r" ?\d| ?[^\s\d]+|\s"), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, START, UNKNOWN]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    template = f"$A {END}" if is_seq2seq else f"{START} $A"
    special_ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_ids)
    names = {"eos_token": END, "pad_token": PAD, "bos_token": START, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, padding_side="left", clean_up_tokenization_spaces=False
    )
