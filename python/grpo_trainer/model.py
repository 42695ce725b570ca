"""The policy: a language model of transformers, its value head, and what training asks of it.

A batch is prompts, left-padded, and responses to them, right-padded; row i answers prompt `prompt_of[i]`. Position t of
a response's log-probs, values and hidden states belongs to its t-th token, and has seen everything before it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_trainer import processes
from grpo_trainer.recipe import Model
from grpo_trainer.tiny import make_tiny, train_tokenizer

MIXED = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        self.mixed_precision, self.mixed = mixed, MIXED[mixed]
        self.temperature, self.backend = temperature, backend
        self.value_head: nn.Linear | None = None
        self.critic: Policy | None = None  # whose value head is read in place of an own one
        self.is_seq2seq = bool(lm.config.is_encoder_decoder)
        self.end = int(tokenizer.eos_token_id)
        self.ends = _ends(self.inner, self.end)
        self.pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
        self.has_plain_head = not self.is_seq2seq and self._head_is_plain()

    def with_lm(self, lm: Any) -> Policy:
        """Another language model in place of this one."""
        return Policy(lm, self.tokenizer, self.temperature, self.backend, self.mixed_precision)

    def add_value_head(self) -> None:
        size = self.lm.config.d_model if self.is_seq2seq else self.lm.config.hidden_size
        self.value_head = nn.Linear(size, 1, dtype=torch.float32, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @property
    def is_sharded(self) -> bool:
        """Whether this process has a part of the weights only."""
        return processes.is_sharded(next(self.lm.parameters()))

    @property
    def inner(self) -> Any:
        """The model of transformers, without what peft wraps around it."""
        return self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm

    @property
    def context(self) -> int | None:
        """The most tokens that the model can read: prompt and response, or each of them after an encoder."""
        most = getattr(self.inner.config.get_text_config(), "max_position_embeddings", None)
        return most if most is not None and most > 0 else None

    def autocast(self) -> torch.autocast:
        """Mixed precision: the same in sampling, scoring and the update, or ratios would begin beside 1."""
        return torch.autocast(self.device.type, self.mixed, enabled=self.mixed is not None)

    def forward(self, what: str, batch: Batch | None, **arguments: Any) -> Any:
        with self.autocast():
            return getattr(self, f"_{what}")(batch, **arguments)

    def _next(self, _: None, **arguments: Any) -> Any:
        """As sampling asks, token by token."""
        return self.lm(**arguments)

    def _encoded(self, _: None, **arguments: Any) -> Any:
        return self.lm.get_encoder()(**arguments)

    def _logprobs(self, batch: Batch, share: bool = True) -> Tensor:
        return self._of_states(batch, self._states(batch, share)[0])

    @property
    def has_values(self) -> bool:
        return self.value_head is not None or self.critic is not None

    def add_critic(self) -> None:
        """A copy of the policy, with a value head, that is trained for values alone."""
        self.critic = self.with_lm(copy.deepcopy(self.lm))
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
        with self.autocast():
            hidden, _ = self._trunk(ids, mask, positions_of(mask), None)
            logits, _ = self._logits(ids, mask, positions_of(mask), None)
            expected = head(hidden)
        self.lm.train(was_training)
        # Bit for bit, as it is the same product: small logits are changed by a cap in their last digits only.
        return torch.equal(expected.float(), logits.float())


def _ends(lm: Any, end: int) -> list[int]:
    """Tokens that end a response: the tokenizer's, and those that the model generates with, as of a turn in a chat."""
    config = getattr(lm, "generation_config", None)
    given = getattr(config, "eos_token_id", None)
    more = given if isinstance(given, list) else [] if given is None else [given]
    size = lm.get_input_embeddings().num_embeddings
    return sorted({end, *(each for each in more if 0 <= each < size)})


class Reference:
    """The policy that KL is measured from: another model, or the policy at this moment, a frozen copy of its weights
    or of its adapters."""

    def __init__(self, policy: Policy, settings: Model, adapters: dict[str, Tensor] | None = None) -> None:
        """adapters  those of the moment that is meant, for a run that goes on from a later one"""
        self.policy = policy
        self.other: Policy | None = None
        self.adapters: dict[str, Tensor] = {}
        if settings.reference_model_path is not None:
            other = dataclasses.replace(settings, path=settings.reference_model_path, lora=None)
            self.other = self._frozen(load_lm(other, "cpu" if policy.is_sharded else policy.device))
            if policy.is_sharded:
                processes.shard(self.other, policy.device)
        elif settings.lora is None:
            self.other = self._frozen(copy.deepcopy(policy.lm))
        else:
            now = adapters or adapters_of(policy)
            self.adapters = {name: value.to(policy.device, copy=True) for name, value in now.items()}

    def _frozen(self, lm: Any) -> Policy:
        return self.policy.with_lm(lm).requires_grad_(False).eval()

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


def encode_demonstration(policy: Policy, text: str) -> list[int]:
    return [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.end]


def load_policy(
    settings: Model, corpus: Sequence[str], backend: str | None, device: torch.device | str = "cpu"
) -> Policy:
    """The policy and its tokenizer; `corpus` is what a tiny model's tokenizer is trained on."""
    if settings.path == "tiny":
        tokenizer = train_tokenizer(corpus, settings.tiny.vocabulary, settings.tiny.architecture == "seq2seq")
        with _naming_attention(settings.attention):
            lm = make_tiny(settings.tiny, tokenizer, _attention(settings.attention))
        lm = lm.to(device, getattr(torch, settings.dtype))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.path: the tokenizer must have an end-of-sequence token, got none in {settings.path!r}"
            )
        lm = load_lm(settings, device)
    if settings.lora is not None:
        lm = _with_adapters(lm, settings)
    return policy_with(lm, tokenizer, settings, backend)


def policy_with(lm: Any, tokenizer: Any, settings: Model, backend: str | None) -> Policy:
    if settings.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(lm, tokenizer, backend=backend, mixed=settings.mixed_precision)


def load_lm(settings: Model, device: torch.device | str) -> Any:
    """On its device, as a policy is made of it by a forward pass, which not every attention can do elsewhere."""
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
        extra["device_map"] = {"": device}  # quantized while it is loaded, and not moved after
    with _naming_attention(settings.attention):
        lm: Any = kind.from_pretrained(
            settings.path, dtype=getattr(torch, settings.dtype), attn_implementation=_attention(settings.attention),
            trust_remote_code=remote, **extra,
        )  # fmt: skip
    return lm if settings.four_bit else lm.to(device)


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
    told = json.loads((folder / "adapter_config.json").read_text())
    for key, theirs in (("rank", told["r"]), ("alpha", told["lora_alpha"])):
        own = getattr(settings.lora, key)
        if own != theirs:
            raise ValueError(f"model.lora.{key}: must be that of the adapters in {str(folder)!r}, {theirs}, got {own}")
    given = load_file(folder / "adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(policy.lm, save_embedding_layers=False)
    if given.keys() != wanted.keys():
        raise ValueError(
            f"model.lora.targets: must be the layers of the adapters in {str(folder)!r}, {told['target_modules']!r}, "
            f"got {settings.lora.targets!r}: missing {sorted(wanted.keys() - given.keys())}, "
            f"unexpected {sorted(given.keys() - wanted.keys())}"
        )
    peft.set_peft_model_state_dict(policy.lm, given)


def save_policy(policy: Policy, folder: Path, whole: dict[str, Tensor] | None = None) -> None:
    """As transformers and peft load it: safetensors, config, tokenizer; the value head and the critic beside it.

    whole  the language model's weights, where this process has but a part of them
    """
    from safetensors.torch import save_file, save_model

    policy.lm.save_pretrained(folder, state_dict=whole)
    policy.tokenizer.save_pretrained(folder)
    head = (policy.critic or policy).value_head
    if head is not None:
        save_file(dict(head.state_dict()), folder / "value_head.safetensors")
    if policy.critic is not None:
        save_model(policy.critic.lm, str(folder / "critic.safetensors"))
