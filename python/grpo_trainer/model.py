"""The policy: a language model of transformers, its value head, and what training asks of it.

A batch is prompts, left-padded, and responses to them, right-padded; row i answers prompt `prompt_of[i]`. Position t of
a response's log-probs, values and hidden states belongs to its t-th token, and has seen everything before it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_trainer.recipe import Model, Tiny

END, PAD, START, UNKNOWN = "<end>", "<pad>", "<start>", "<unknown>"


@dataclasses.dataclass
class Batch:
    prompts: Tensor  # [P, S] token ids
    prompt_mask: Tensor  # [P, S] bool
    tokens: Tensor  # [N, T] token ids of the responses, the end included
    mask: Tensor  # [N, T] bool
    prompt_of: Tensor  # [N]

    def rows(self, rows: Tensor) -> Batch:
        """These responses, with the prompts that they need and no more columns than they need."""
        used, prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        width = max(1, int(self.mask[rows].sum(1).max()))
        first = int(self.prompt_mask[used].int().argmax(1).min())
        prompts, prompt_mask = self.prompts[used][:, first:], self.prompt_mask[used][:, first:]
        return Batch(prompts, prompt_mask, self.tokens[rows][:, :width], self.mask[rows][:, :width], prompt_of)

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


class Policy(nn.Module):
    """Everything that has weights goes through forward, so that wrappers for many devices see it."""

    def __init__(
        self, lm: Any, tokenizer: Any, temperature: float = 1.0, backend: str | None = None, mixed: str = "no"
    ) -> None:
        super().__init__()
        self.lm, self.tokenizer = lm, tokenizer
        self.mixed = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed]
        self.temperature, self.backend = temperature, backend
        self.value_head: nn.Linear | None = None
        self.critic: Policy | None = None  # whose value head is read in place of an own one
        self.is_seq2seq = bool(lm.config.is_encoder_decoder)
        self.end = int(tokenizer.eos_token_id)
        self.pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
        self.has_plain_head = not self.is_seq2seq and self._head_is_plain()

    def add_value_head(self) -> None:
        size = self.lm.config.d_model if self.is_seq2seq else self.lm.config.hidden_size
        self.value_head = nn.Linear(size, 1, dtype=torch.float32, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @property
    def inner(self) -> Any:
        """The model of transformers, without what peft wraps around it."""
        return self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm

    def autocast(self) -> torch.autocast:
        """Mixed precision: the same in sampling, scoring and the update, or ratios would begin beside 1."""
        return torch.autocast(self.device.type, self.mixed, enabled=self.mixed is not None)

    def forward(self, what: str, batch: Batch, **arguments: Any) -> Any:
        with self.autocast():
            return getattr(self, f"_{what}")(batch, **arguments)

    def _logprobs(self, batch: Batch, share: bool = True) -> Tensor:
        return self._of_states(batch, self._states(batch, share)[0])

    @property
    def has_values(self) -> bool:
        return self.value_head is not None or self.critic is not None

    def add_critic(self) -> None:
        """A copy of the policy, with a value head, that is trained for values alone."""
        mixed = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.mixed]
        self.critic = Policy(copy.deepcopy(self.lm), self.tokenizer, self.temperature, self.backend, mixed)
        self.critic.add_value_head()

    def _values(self, batch: Batch, share: bool = True) -> Tensor:
        if self.critic is not None:
            return self.critic._values(batch, share)
        return self._valued(self._states(batch, share)[1])

    def _valued(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        with torch.autocast(self.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)

    def _loss(
        self, batch: Batch, share: bool = True, config: Any = "grpo", values: Literal["none", "all", "head"] = "none",
        **given: Any,
    ) -> tuple[gk.PolicyLoss, Tensor | None]:  # fmt: skip
        """The policy loss, straight from hidden states where the head allows it; and the values, for a critic, whose
        error goes into all weights or into the value head alone."""
        states, hidden = self._states(batch, share)
        valued = None
        if values != "none" and self.critic is not None:
            valued = self.critic._values(batch, share)
        elif values != "none":
            valued = self._valued(hidden if values == "all" else hidden.detach())
        old, advantages = given.pop("old_logprobs"), given.pop("advantages")
        mask = given.pop("mask", None)
        mask = batch.mask if mask is None else mask & batch.mask
        if self.has_plain_head:
            weight, bias = self._head()
            loss = gk.linear_policy_loss(
                states.to(weight.dtype), weight, batch.tokens, old, advantages, bias=bias,
                temperature=self.temperature, mask=mask, config=config, backend=self.backend, **given,
            )  # fmt: skip
        else:
            entropy = given.pop("return_entropy", False)
            found = gk.token_logprobs(
                states, batch.tokens, temperature=self.temperature, return_entropy=entropy, backend=self.backend
            )
            loss = gk.policy_loss(
                found.logprobs, old, advantages, mask=mask, entropy=found.entropy, config=config,
                backend=self.backend, **given,
            )  # fmt: skip
        return loss, valued

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in the precision that the model itself would multiply them in."""
        head = self.inner.get_output_embeddings()
        dtype = self.mixed or head.weight.dtype
        return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)

    def _of_states(self, batch: Batch, states: Tensor) -> Tensor:
        """Log-probs of the responses' tokens, 0 beyond their ends."""
        targets = torch.where(batch.mask, batch.tokens, -100)
        if not self.has_plain_head:
            return gk.token_logprobs(states, targets, temperature=self.temperature, backend=self.backend).logprobs
        weight, bias = self._head()
        return gk.linear_logprobs(
            states.to(weight.dtype), weight, targets, bias=bias, temperature=self.temperature, backend=self.backend
        ).logprobs

    def _states(self, batch: Batch, share: bool) -> tuple[Tensor, Tensor]:
        """What is scored, hidden states [N, T, H], or logits [N, T, V] where the head is more than a product; and the
        hidden states, where there is a value head."""
        if self.is_seq2seq:
            return self._decoded(batch)
        run = self._trunk if self.has_plain_head else self._logits
        if share:
            return self._after_shared_prompts(batch, run)
        prompts, prompt_mask = batch.prompts[batch.prompt_of], batch.prompt_mask[batch.prompt_of]
        ids, mask = torch.cat((prompts, batch.tokens), 1)[:, :-1], torch.cat((prompt_mask, batch.mask), 1)[:, :-1]
        of_responses = slice(prompts.shape[1] - 1, None)
        scored, hidden = run(ids, mask, positions_of(mask), None)
        return scored[:, of_responses], hidden[:, of_responses]

    def _after_shared_prompts(self, batch: Batch, run: Any) -> tuple[Tensor, Tensor]:
        """Each prompt once; what attention keeps of it is repeated for its responses, and so is the gradient."""
        from transformers import DynamicCache

        cache = DynamicCache()
        found = run(batch.prompts, batch.prompt_mask, positions_of(batch.prompt_mask), cache)
        scored, hidden = (each[:, -1:][batch.prompt_of] for each in found)
        if batch.tokens.shape[1] == 1:
            return scored, hidden
        cache.batch_select_indices(batch.prompt_of)
        mask = torch.cat((batch.prompt_mask[batch.prompt_of], batch.mask[:, :-1]), 1)
        rest = run(batch.tokens[:, :-1], mask, positions_of(mask)[:, batch.prompts.shape[1] :], cache)
        return torch.cat((scored, rest[0]), 1), torch.cat((hidden, rest[1]), 1)

    def _trunk(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        found = self.inner.base_model(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions, past_key_values=cache,
            use_cache=cache is not None,
        )  # fmt: skip
        return found.last_hidden_state, found.last_hidden_state

    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        found = self.lm(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions, past_key_values=cache,
            use_cache=cache is not None, output_hidden_states=self.value_head is not None,
        )  # fmt: skip
        return found.logits, found.logits if self.value_head is None else found.hidden_states[-1]

    def _decoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        encoded = self.lm.get_encoder()(input_ids=batch.prompts, attention_mask=batch.prompt_mask.long())
        encoded.last_hidden_state = encoded.last_hidden_state[batch.prompt_of]
        start = batch.tokens.new_full((len(batch.tokens), 1), self.lm.config.decoder_start_token_id)
        found = self.lm(
            encoder_outputs=encoded, attention_mask=batch.prompt_mask[batch.prompt_of].long(),
            decoder_input_ids=torch.cat((start, batch.tokens[:, :-1]), 1), use_cache=False,
            output_hidden_states=self.value_head is not None,
        )  # fmt: skip
        return found.logits, found.logits if self.value_head is None else found.decoder_hidden_states[-1]

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Whether logits are the last hidden state times the head's weight, no scale and no cap: tried on a token."""
        head = self.inner.get_output_embeddings()
        if not isinstance(head, nn.Linear) or type(head.weight) is not nn.Parameter:
            return False
        was_training = self.lm.training
        self.lm.eval()
        ids = torch.tensor([[self.end]], device=self.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        hidden, _ = self._trunk(ids, mask, positions_of(mask), None)
        logits, _ = self._logits(ids, mask, positions_of(mask), None)
        self.lm.train(was_training)
        expected = head(hidden)
        return expected.shape == logits.shape and torch.allclose(expected.float(), logits.float(), rtol=1e-3, atol=1e-3)


class Reference:
    """The policy that KL is measured from: another model, or the policy at this moment, a frozen copy of its weights
    or of its adapters."""

    def __init__(self, policy: Policy, settings: Model, adapters: dict[str, Tensor] | None = None) -> None:
        """adapters  those of the moment that is meant, for a run that goes on from a later one"""
        self.policy = policy
        self.other: Policy | None = None
        self.adapters: dict[str, Tensor] = {}
        if settings.reference_model_path is not None:
            lm = load_lm(dataclasses.replace(settings, path=settings.reference_model_path, lora=None))
            self.other = self._like_policy(lm)
        elif settings.lora is None:
            self.other = self._like_policy(copy.deepcopy(policy.lm))
        else:
            self.adapters = {name: value.clone() for name, value in (adapters or adapters_of(policy)).items()}

    def _like_policy(self, lm: Any) -> Policy:
        policy = self.policy
        mixed = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[policy.mixed]
        other = Policy(lm, policy.tokenizer, policy.temperature, policy.backend, mixed)
        return other.requires_grad_(False).eval().to(policy.device)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        if self.other is not None:
            return self.other("logprobs", batch)
        now = {name: value.clone() for name, value in adapters_of(self.policy).items()}
        set_adapters(self.policy, self.adapters)
        try:
            with evaluating(self.policy):
                return self.policy("logprobs", batch)
        finally:
            set_adapters(self.policy, now)


def adapters_of(policy: Policy) -> dict[str, Tensor]:
    """The weights that are trained, of a model with adapters."""
    return {name: value.detach() for name, value in policy.lm.named_parameters() if value.requires_grad}


@torch.no_grad()
def set_adapters(policy: Policy, weights: dict[str, Tensor]) -> None:
    for name, value in adapters_of(policy).items():
        value.copy_(weights[name])


@contextlib.contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Without dropout."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


def set_training(policy: Policy, dropout: bool) -> None:
    """For the update. Layers check whether they are in training to recompute their activations, too: with dropout off
    they alone are, and what is in them is not."""
    policy.train(dropout)
    if dropout:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            own = getattr(layer, "dropout", 0.0)
            if isinstance(own, float) and own > 0:
                raise ValueError(
                    "rl.dropout: must be true with model.gradient_checkpointing for this model, as its layers drop "
                    f"out by themselves, got false with {own} of {type(layer).__name__}"
                )
            layer.training = True


def positions_of(mask: Tensor) -> Tensor:
    """Of tokens, counted where the mask is true."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def pad(rows: Sequence[Sequence[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    """Ids [N, longest] and which of them are there."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), value, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(list(row), dtype=torch.int64)
        mask[i, place] = True
    return ids, mask


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """For what reads texts: of a chat, what is said in it."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]], chat: bool) -> list[int]:
    if isinstance(prompt, list) or chat:
        if tokenizer.chat_template is None:
            where = "data.prompt: a list of messages" if isinstance(prompt, list) else "model.chat_template: true"
            raise ValueError(f"{where} needs a tokenizer with a chat template, and that of model.path has none")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def load_policy(settings: Model, corpus: Sequence[str], backend: str | None) -> Policy:
    """The policy and its tokenizer; `corpus` is what a tiny model's tokenizer is trained on."""
    if settings.path == "tiny":
        tokenizer = train_tokenizer(corpus, settings.tiny.vocabulary, settings.tiny.architecture == "seq2seq")
        lm = make_tiny(settings.tiny, tokenizer, settings.attention).to(getattr(torch, settings.dtype))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.path: the tokenizer must have an end-of-sequence token, got none in {settings.path!r}"
            )
        lm = load_lm(settings)
    if settings.lora is not None:
        lm = _with_adapters(lm, settings)
    return policy_with(lm, tokenizer, settings, backend)


def policy_with(lm: Any, tokenizer: Any, settings: Model, backend: str | None) -> Policy:
    if settings.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(lm, tokenizer, backend=backend, mixed=settings.mixed_precision)


def load_lm(settings: Model) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    remote = settings.trust_remote_code
    config = AutoConfig.from_pretrained(settings.path, trust_remote_code=remote)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    extra: dict[str, Any] = {}
    if settings.four_bit:
        from transformers import BitsAndBytesConfig

        if not torch.cuda.is_available():
            raise ValueError("model.four_bit: needs a GPU, and there is none")
        compute = torch.bfloat16 if settings.dtype == "float32" else getattr(torch, settings.dtype)
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
        )
    with _naming_attention(settings.attention):
        return kind.from_pretrained(
            settings.path, dtype=getattr(torch, settings.dtype), attn_implementation=_attention(settings.attention),
            trust_remote_code=remote, **extra,
        )  # fmt: skip


@contextlib.contextmanager
def _naming_attention(attention: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, ValueError) as error:
        if attention == "auto" or "attention" not in str(error).lower():
            raise
        raise ValueError(f"model.attention: {attention!r} cannot be used here: {error}") from error


def _attention(name: str) -> str | None:
    return None if name == "auto" else name


def _with_adapters(lm: Any, settings: Model) -> Any:
    import peft

    assert settings.lora is not None
    lora = settings.lora
    if settings.four_bit:
        lm = peft.prepare_model_for_kbit_training(lm, use_gradient_checkpointing=settings.gradient_checkpointing)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.targets or "all-linear"
    )
    return peft.get_peft_model(lm, config)


def load_adapter(policy: Policy, settings: Model, folder: Path) -> None:
    """Onto the recipe's own model."""
    import peft
    from safetensors.torch import load_file

    if settings.lora is None:
        raise ValueError(f"model.lora: must be given to load the adapters in {str(folder)!r}, got None")
    peft.set_peft_model_state_dict(policy.lm, load_file(folder / "adapter_model.safetensors"))


def make_tiny(settings: Tiny, tokenizer: Any, attention: str = "auto") -> Any:
    """Without a download; its weights follow torch's seed."""
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    size: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": _attention(attention),
    }
    if settings.architecture == "seq2seq":
        config: Any = T5Config(
            **size, d_model=settings.hidden, d_ff=settings.intermediate, num_layers=settings.layers,
            num_heads=settings.heads, d_kv=settings.hidden // settings.heads, dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        config.decoder_start_token_id = tokenizer.pad_token_id
        with _naming_attention(attention):
            return T5ForConditionalGeneration(config)
    config = LlamaConfig(
        **size, bos_token_id=tokenizer.bos_token_id, hidden_size=settings.hidden,
        intermediate_size=settings.intermediate, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, num_key_value_heads=settings.heads, tie_word_embeddings=True,
        max_position_embeddings=4096,
    )  # fmt: skip
    with _naming_attention(attention):
        return LlamaForCausalLM(config)


def train_tokenizer(corpus: Sequence[str], vocabulary: int, is_seq2seq: bool) -> Any:
    """Byte pairs of the corpus, each digit by itself, words and first digits with the space before them.

    Prompts begin with START, or end with END before an encoder.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d| ?[^\s\d]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    special = [PAD, END, START, UNKNOWN]
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    )
    frame = f"$A {END}" if is_seq2seq else f"{START} $A"
    marks = [(mark, inner.token_to_id(mark)) for mark in (START, END)]
    inner.post_processor = processors.TemplateProcessing(single=frame, special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=PAD, bos_token=START, unk_token=UNKNOWN,
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def save_policy(policy: Policy, folder: Path) -> None:
    """As transformers and peft load it: safetensors, config, tokenizer; the value head and the critic beside it."""
    from safetensors.torch import save_file, save_model

    policy.lm.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    head = (policy.critic or policy).value_head
    if head is not None:
        save_file(dict(head.state_dict()), folder / "value_head.safetensors")
    if policy.critic is not None:
        save_model(policy.critic.lm, str(folder / "critic.safetensors"))
