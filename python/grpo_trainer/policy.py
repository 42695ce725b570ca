"""The policy: a transformers language model, its value head, its reference, and how they are loaded and saved.

Prompts are left-padded, responses right-padded; row i of a batch answers prompt `prompt_of[i]`. Position t of a
response's log-probs, values and hidden states belongs to its t-th token and depends on all tokens before it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_trainer import distributed, pretrained
from grpo_trainer.adapters import with_adapters
from grpo_trainer.data import Batch, positions_of
from grpo_trainer.pretrained import attention_of, explaining_attention, keep_layout_of_four_bits, load_lm
from grpo_trainer.recipe import LOADING_KEYS, Model
from grpo_trainer.tiny import make_tiny, train_tokenizer
from grpo_trainer.vocabulary import banned_ids, count_logits, stop_ids

AUTOCAST_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]


class Policy(nn.Module):
    """A language model that samples, scores responses and computes the loss.

    Everything that uses weights goes through `forward`, so that wrappers such as FSDP see it.

    Args:
        lm: causal or encoder-decoder model of transformers, possibly with peft adapters.
        tokenizer: its tokenizer.
        temperature: of the distribution that is sampled and scored.
        backend: "kernel", "reference" or None, as in the ops.
        mixed_precision: "no", "bf16" or "fp16".
        banned: ids that the policy cannot produce: their probability is 0 in sampling, scoring and the loss.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any,
        temperature: float = 1.0,
        backend: str | None = None,
        mixed_precision: str = "no",
        banned: Sequence[int] = (),
    ) -> None:
        super().__init__()
        keep_layout_of_four_bits(lm)
        self.lm, self.tokenizer = lm, tokenizer
        self.mixed_precision, self.autocast_dtype = mixed_precision, AUTOCAST_DTYPES[mixed_precision]
        self.temperature, self.backend = temperature, backend
        self.value_head: nn.Linear | None = None
        self.critic: Policy | None = None  # its value head replaces this policy's own
        self.is_seq2seq = bool(lm.config.is_encoder_decoder)
        self.eos_id = int(tokenizer.eos_token_id)
        self.stop_ids = stop_ids(self.inner, self.eos_id)
        self.banned_ids = sorted(banned)
        self.banned: Tensor
        self.register_buffer("banned", torch.tensor(self.banned_ids, dtype=torch.int64, device=self.device), False)
        self.cache_name = cache_name(self.inner)
        self.pad_id = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
        self.has_plain_head = not self.is_seq2seq and self._head_is_plain()

    def with_lm(self, lm: Any) -> Policy:
        """A policy with the same settings and another language model."""
        # a reference may lack the ids that pad the policy's vocabulary
        banned = [i for i in self.banned_ids if i < count_logits(lm)]
        return Policy(lm, self.tokenizer, self.temperature, self.backend, self.mixed_precision, banned)

    def add_value_head(self) -> None:
        size = self.lm.config.d_model if self.is_seq2seq else self.lm.config.hidden_size
        self.value_head = nn.Linear(size, 1, dtype=torch.float32, device=self.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def add_critic(self) -> None:
        """Adds a separate critic: a copy of the policy with a value head, trained for values alone."""
        self.critic = self.with_lm(distributed.unsharded_copy(self.lm) if self.is_sharded else copy.deepcopy(self.lm))
        self.critic.add_value_head()
        if self.is_sharded:
            distributed.shard(self.critic, self.device)

    @property
    def has_values(self) -> bool:
        return self.value_head is not None or self.critic is not None

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only part of the weights."""
        return distributed.is_sharded(next(self.lm.parameters()))

    @property
    def inner(self) -> Any:
        """The transformers model without peft's wrapper."""
        return self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm

    @property
    def context_length(self) -> int | None:
        """Limit on prompt plus response, or on each of them for an encoder-decoder; None: no limit."""
        return context_length(self.inner.config)

    def check_tokens(self, ids: Sequence[int], what: str) -> None:
        """Raises if the tokenizer has given a token that the model has no embedding of."""
        rows = self.inner.get_input_embeddings().num_embeddings
        if ids and max(ids) >= rows:
            raise ValueError(
                f"model.path: must have an embedding of every token of {what}, got token {max(ids)} of its tokenizer "
                f"and an embedding of {rows} rows"
            )

    @property
    def computes_in_half(self) -> bool:
        is_quantised = getattr(self.inner, "is_loaded_in_4bit", False)  # whose products are bfloat16
        return is_quantised or self.autocast_dtype is not None or self.inner.dtype != torch.float32

    def autocast(self) -> torch.autocast:
        """Mixed precision, the same in sampling, scoring and the update."""
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def forward(self, what: str, batch: Batch | None, **kwargs: Any) -> Any:
        """Runs one of the passes, all by `forward`, as FSDP gathers the weights for that call alone."""
        passes: dict[str, Callable[..., Any]] = {
            "next": self._next,
            "encoded": self._encoded,
            "logprobs": self._logprobs,
            "values": self._values,
            "loss": self._loss,
        }
        with self.autocast():
            return passes[what](batch, **kwargs)

    def _next(self, _: None, **kwargs: Any) -> Any:
        """One step of sampling."""
        output = self.lm(**kwargs)
        output.logits = self._without_banned(output.logits)
        return output

    def _encoded(self, _: None, **kwargs: Any) -> Any:
        return self.lm.get_encoder()(**kwargs)

    def _logprobs(self, batch: Batch, share: bool = True) -> Tensor:
        """Log-probs [N, T] of the responses' tokens, 0 in the padding; `share`: compute each prompt once."""
        states, _ = self._states(batch, share)
        targets = torch.where(batch.mask, batch.tokens, -100)
        if not self.has_plain_head:
            logits = _within(self._without_banned(states), batch.support)
            return gk.token_logprobs(logits, targets, temperature=self.temperature, backend=self.backend).logprobs
        head = self._head()
        return gk.linear_logprobs(
            states.to(head.weight.dtype),
            head,
            targets,
            temperature=self.temperature,
            support=batch.support,
            backend=self.backend,
        ).logprobs

    def _values(self, batch: Batch, share: bool = True) -> Tensor:
        if self.critic is not None:
            values: Tensor = self.critic("values", batch, share=share)
            return values
        return self._apply_value_head(self._states(batch, share)[1])

    def _apply_value_head(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        with torch.autocast(self.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)

    def _loss(
        self,
        batch: Batch,
        share: bool = True,
        config: Any = "grpo",
        values: Literal["none", "all", "head"] = "none",
        **kwargs: Any,
    ) -> tuple[gk.PolicyLoss, Tensor | None]:
        """Computes the policy loss, from hidden states where the head allows it, and the critic's values.

        Args:
            batch: N responses of at most T tokens.
            share: compute each prompt once for all its responses.
            config: LossConfig.
            values: whether values are computed, and whether their gradient reaches all weights or only the value head.
            **kwargs: further arguments of `gk.linear_policy_loss`.
        """
        states, hidden = self._states(batch, share)
        predicted = None
        if values != "none" and self.critic is not None:
            predicted = self._values(batch, share)
        elif values != "none":
            predicted = self._apply_value_head(hidden if values == "all" else hidden.detach())
        old, advantages = kwargs.pop("old_logprobs"), kwargs.pop("advantages")
        mask = kwargs.pop("mask", None)
        mask = batch.mask if mask is None else mask & batch.mask
        if self.has_plain_head:
            head = self._head()
            loss = gk.linear_policy_loss(
                states.to(head.weight.dtype),
                head,
                batch.tokens,
                old,
                advantages,
                temperature=self.temperature,
                support=batch.support,
                mask=mask,
                config=config,
                backend=self.backend,
                **kwargs,
            )
        else:
            logprobs, entropy, _ = gk.token_logprobs(
                _within(self._without_banned(states), batch.support),
                torch.where(batch.mask, batch.tokens, -100),
                temperature=self.temperature,
                return_entropy=kwargs.pop("return_entropy", False),
                backend=self.backend,
            )
            kwargs |= {"config": config, "backend": self.backend}
            loss = gk.policy_loss(logprobs, old, advantages, mask=mask, entropy=entropy, **kwargs)
        return loss, predicted

    def _head(self) -> gk.LMHead:
        """The LM head, in the precision in which the model itself would apply it."""
        head = self.inner.get_output_embeddings()
        dtype = self.autocast_dtype or head.weight.dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        return gk.LMHead(head.weight.to(dtype), bias, banned=self.banned)

    def _without_banned(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, self.banned, float("-inf")) if self.banned_ids else logits

    def _states(self, batch: Batch, share: bool) -> tuple[Tensor, Tensor]:
        """Inputs of the loss and of the value head.

        Returns:
            Hidden states [N, T, H] if the head is a plain product, else logits [N, T, V]; and the hidden states
            [N, T, H], if there is a value head.
        """
        if self.is_seq2seq:
            return self._decode(batch)
        run = self._trunk if self.has_plain_head else self._logits
        if share:
            return self._run_after_shared_prompts(batch, run)
        prompts, prompt_mask = batch.prompts[batch.prompt_of], batch.prompt_mask[batch.prompt_of]
        ids, mask = torch.cat((prompts, batch.tokens), 1)[:, :-1], torch.cat((prompt_mask, batch.mask), 1)[:, :-1]
        response = slice(prompts.shape[1] - 1, None)
        states, hidden = run(ids, mask, positions_of(mask), None)
        return states[:, response], hidden[:, response]

    def _run_after_shared_prompts(self, batch: Batch, run: Run) -> tuple[Tensor, Tensor]:
        """Runs each prompt once and repeats its key-value cache, and thereby its gradient, for its responses."""
        from transformers import DynamicCache

        cache = DynamicCache()
        prompt_outputs = run(batch.prompts, batch.prompt_mask, positions_of(batch.prompt_mask), cache)
        states, hidden = (output[:, -1:][batch.prompt_of] for output in prompt_outputs)
        if batch.tokens.shape[1] == 1:
            return states, hidden
        cache.batch_select_indices(batch.prompt_of)
        mask = torch.cat((batch.prompt_mask[batch.prompt_of], batch.mask[:, :-1]), 1)
        rest = run(batch.tokens[:, :-1], mask, positions_of(mask)[:, batch.prompts.shape[1] :], cache)
        return torch.cat((states, rest[0]), 1), torch.cat((hidden, rest[1]), 1)

    def _inputs(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "position_ids": positions,
            self.cache_name: cache,
            "use_cache": cache is not None,
        }

    def _trunk(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        output = self.inner.base_model(**self._inputs(ids, mask, positions, cache))
        return output.last_hidden_state, output.last_hidden_state

    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        has_head = self.value_head is not None
        output = self.lm(**self._inputs(ids, mask, positions, cache), output_hidden_states=has_head)
        return output.logits, output.hidden_states[-1] if has_head else output.logits

    def _decode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        encoded = self.lm.get_encoder()(input_ids=batch.prompts, attention_mask=batch.prompt_mask.long())
        encoded.last_hidden_state = encoded.last_hidden_state[batch.prompt_of]
        start = batch.tokens.new_full((len(batch.tokens), 1), self.lm.config.decoder_start_token_id)
        output = self.lm(
            encoder_outputs=encoded,
            attention_mask=batch.prompt_mask[batch.prompt_of].long(),
            decoder_input_ids=torch.cat((start, batch.tokens[:, :-1]), 1),
            use_cache=False,
            output_hidden_states=self.value_head is not None,
        )
        return output.logits, output.logits if self.value_head is None else output.decoder_hidden_states[-1]

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Whether logits are exactly the last hidden state times the head's weight, without scale or softcap."""
        head = self.inner.get_output_embeddings()
        if not isinstance(head, nn.Linear) or type(head.weight) is not nn.Parameter:
            return False
        was_training = self.lm.training
        self.lm.eval()
        ids = torch.tensor([[self.eos_id]], device=self.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        with self.autocast():
            hidden, _ = self._trunk(ids, mask, positions_of(mask), None)
            logits, _ = self._logits(ids, mask, positions_of(mask), None)
            expected = head(hidden)
        self.lm.train(was_training)
        # Bitwise, as both are the same product: a softcap changes small logits in their last digits only.
        return torch.equal(expected.float(), logits.float())


def cache_name(lm: Any) -> str:
    """The name of a model's key-value cache, in arguments and outputs; transformers 5.40 drops the old one."""
    return "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"


class Reference:
    """The frozen policy that the KL term is measured from.

    Another model, or the policy as it is now, as a copy of its weights or of its adapters.

    Args:
        policy: the policy that is trained.
        settings: the model settings; `reference_model_path` names another model.
        lm: another model, already loaded.
        like: a model that the named one has the class, dtype, attention and buffers of; see `load_lm`.
    """

    def __init__(self, policy: Policy, settings: Model, lm: Any = None, like: Any = None) -> None:
        self.policy = policy
        self.other: Policy | None = None
        self.adapters: dict[str, Tensor] = {}
        if settings.reference_model_path is not None or lm is not None:
            path, device = settings.reference_model_path or "", "cpu" if policy.is_sharded else policy.device
            other = settings.model_copy(update={"path": path, "lora": None})
            self.other = self._frozen(load_lm(other, device, like) if lm is None else copy.deepcopy(lm).to(device))
            if policy.is_sharded:
                distributed.shard(self.other, policy.device)
        elif settings.lora is None:
            self.other = self._frozen(copy.deepcopy(policy.lm))
        else:
            self.adapters = {name: value.clone() for name, value in adapters_of(policy).items()}

    def _frozen(self, lm: Any) -> Policy:
        return self.policy.with_lm(lm).requires_grad_(False).eval()

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probs [N, T] of the responses' tokens under the reference."""
        if self.other is not None:
            return self.other("logprobs", batch)
        current = {name: value.clone() for name, value in adapters_of(self.policy).items()}
        set_adapters(self.policy, self.adapters)
        try:
            with evaluating(self.policy):
                return self.policy("logprobs", batch)
        finally:
            set_adapters(self.policy, current)


def adapters_of(policy: Policy) -> dict[str, Tensor]:
    """The trained weights of a model with adapters."""
    return {name: value.detach() for name, value in policy.lm.named_parameters() if value.requires_grad}


@torch.no_grad()
def set_adapters(policy: Policy, weights: dict[str, Tensor]) -> None:
    for name, value in adapters_of(policy).items():
        value.copy_(weights[name])


@contextlib.contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Context without dropout."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


def set_training(policy: Policy, dropout: bool) -> None:
    """Prepares the policy for the update.

    Layers recompute their activations only in training mode. Without dropout, checkpointed layers are set to training
    mode on their own, and the modules inside them are not.
    """
    policy.train(dropout)
    if dropout:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            rate = getattr(layer, "dropout", 0.0)
            if isinstance(rate, float) and rate > 0:
                raise ValueError(
                    "rl.dropout: must be true with model.gradient_checkpointing for this model, whose layers apply "
                    f"dropout themselves, got false with a rate of {rate} in {type(layer).__name__}"
                )
            layer.training = True


def context_length(config: Any) -> int | None:
    """Limit on prompt plus response that a model's configuration states; None: no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def load_policy(
    settings: Model, corpus: Sequence[str], backend: str | None, device: torch.device | str = "cpu"
) -> Policy:
    """Loads or creates the policy and its tokenizer.

    Args:
        settings: the model settings.
        corpus: texts that a tiny model's tokenizer is trained on.
        backend: "kernel", "reference" or None, as in the ops.
        device: device of the weights.
    """
    if settings.path == "tiny":
        tokenizer = train_tokenizer(corpus, settings.tiny.vocabulary, settings.tiny.architecture == "seq2seq")
        with explaining_attention(settings.attention):
            lm = make_tiny(settings.tiny, tokenizer, attention_of(settings.attention))
        lm = lm.to(device, getattr(torch, settings.dtype))
    else:
        tokenizer = pretrained.load_tokenizer(settings.path, settings.trust_remote_code)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.path: the tokenizer must have an end-of-sequence token, got none in {settings.path!r}"
            )
        lm = load_lm(settings, device)
    if settings.lora is not None:
        lm = with_adapters(lm, settings)
    return make_policy(lm, tokenizer, settings, backend)


def make_policy(lm: Any, tokenizer: Any, settings: Model, backend: str | None) -> Policy:
    if settings.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    banned = banned_ids(settings.banned, lm, tokenizer) if settings.banned else []
    return Policy(lm, tokenizer, backend=backend, mixed_precision=settings.mixed_precision, banned=banned)


def take_policy(lm: Any, tokenizer: Any, settings: Model, backend: str | None, device: torch.device | str) -> Policy:
    """The policy of a model that the caller has loaded; the caller's own object is trained.

    Args:
        lm: a model of transformers, without adapters.
        tokenizer: its tokenizer.
        settings: the model settings; those that say how a model is loaded must have their defaults.
        backend: "kernel", "reference" or None, as in the ops.
        device: device of the weights.
    """
    if tokenizer is None:
        raise ValueError("train: tokenizer must be given with a model, got None")
    if not hasattr(lm, "get_output_embeddings") or hasattr(lm, "peft_config"):
        rule = "must be a model of transformers without adapters, which model.lora adds"
        raise TypeError(f"train: model {rule}, got {type(lm).__name__}")
    if lm.get_output_embeddings() is None:
        raise TypeError(f"train: model must have a language-modelling head, got {type(lm).__name__} without one")
    if not hasattr(tokenizer, "eos_token_id"):
        raise TypeError(f"train: tokenizer must be one of transformers, got {type(tokenizer).__name__} {tokenizer!r}")
    if tokenizer.eos_token_id is None:
        raise ValueError("train: tokenizer must have an end-of-sequence token, got none")
    for name in LOADING_KEYS:
        value, default = getattr(settings, name), getattr(Model(), name)
        if value != default:
            raise ValueError(f"model.{name}: must be unset with a model object, which is loaded already, got {value!r}")
    lm = lm.to(device)
    return make_policy(lm if settings.lora is None else with_adapters(lm, settings), tokenizer, settings, backend)


def _within(logits: Tensor, support: tuple[Tensor, Tensor] | None) -> Tensor:
    """Logits [N, T, V] with -inf for every token that sampling did not keep."""
    if support is None:
        return logits
    ids, offsets = support
    numbers = torch.arange(len(offsets) - 1, device=ids.device)
    of_token = numbers.repeat_interleave(offsets.diff(), output_size=len(ids))
    is_kept = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    is_kept.flatten(0, 1)[of_token, ids] = True
    return logits.masked_fill(~is_kept, float("-inf"))
