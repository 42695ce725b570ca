"""TRL's GRPOTrainer with our advantages, similarity groups, segments and loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

import grpo_kernels as gk
from grpo_kernels.checks import instance, unknown
from grpo_kernels.integrations.trl import by_length, composed, counting
from grpo_kernels.integrations.trl import head as fused_head
from grpo_kernels.integrations.trl.arguments import (
    IMAGES,
    POLICY_TERM,
    check_advantages,
    check_batching,
    check_choices,
    check_loss,
    check_segments,
    check_settings,
)
from grpo_kernels.integrations.trl.installed import refuse_other_trl

_THRESHOLD = "segment_threshold.json"  # in a checkpoint
_SEGMENTS = "num_segments_in_batch"  # of inputs, as TRL's num_items_in_batch: of the generation batch of all processes
_ADVANTAGES = {"group": "trl-group", "batch": "trl-batch", "none": "trl-none"}


class _Measured(NamedTuple):
    """The loss of a micro-batch, log-probs and entropies [B, T], and the load-balancing loss of experts."""

    result: gk.PolicyLoss
    tokens: tuple[Tensor, Tensor] | None
    aux_loss: Tensor | None


class _Record(NamedTuple):
    """The numbers of a micro-batch that are logged.

    Attributes:
        metrics: of the loss
        others: [4], the sum and number of entropies, the number of rows left out, and the load-balancing loss
    """

    metrics: gk.PolicyLossMetrics
    others: Tensor


class FusedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with the loss in one pass, and one collective and one wait for the device per micro-batch.

    Args:
        *arguments, **options: as for GRPOTrainer
        similarity: compute advantages within clusters of similar completions; needs `embedder`
        embedder: function from texts to embeddings [N, D]
        advantages: an AdvantageConfig that replaces scale_rewards and multi_objective_aggregation, for example to let
            small clusters borrow from their prompt, or to set a minimal standard deviation or a clip
        loss: a LossConfig whose policy term replaces that of loss_type; the mean and the other terms are GRPOConfig's.
            Or a function with the arguments of gk.policy_loss, to be called in its place, for gk.variants
        segments: group tokens into segments that share an advantage; scale_rewards must be "none", because the config's
            `norm` scales
        head: "fused" computes the loss from hidden states within the forward, for the scored tokens alone, in three
            matrix products instead of four unless the loss is a function or needs the current log-probs before its
            terms (off_policy_mask_threshold, top_entropy_quantile); "logprobs" computes log-probs and then the loss.
            None means "fused", but "logprobs" with torch_compile, FSDP's version 1, or top_entropy_quantile in several
            processes
        masked_rows: "leave_out" compares completions with those of their group that have a token in the loss; "vote"
            with all, as TRL does, also with those that mask_truncated_completions or a tool mask empties
        flat_groups: "keep", as TRL, or "leave_out": completions of prompts whose advantages are all 0 are not in the
            loss, neither in its KL term and entropy bonus nor in what it divides by
        entropy_mean: the entropy bonus is a mean over the tokens of a "micro_batch", as TRL's, in which a token weighs
            more the fewer others there are, or of the "batch" of all micro-batches and processes
        batching: "trl" pads every micro-batch to the longest response of the generation batch; "by_length" deals the
            rows of one optimizer step by length and leaves out those without a gradient, with the same gradient
        micro_batch_tokens: with "by_length", tokens that a micro-batch may have, padding included, so that fewer and
            fuller ones run; None means as many micro-batches as TRL's
        backend: "kernel" or "reference"; None means the kernel where there is one
    """

    entropy_coef: float
    _head_call: fused_head.HeadCall  # what the forward ends in with head="fused"
    _kept_entropy: Tensor | None = None  # with top_entropy_quantile, the sum over the kept tokens, and their number

    def __init__(
        self,
        *arguments: Any,
        similarity: gk.SimilarityConfig | None = None,
        embedder: Callable[[Sequence[str]], Tensor] | None = None,
        advantages: gk.AdvantageConfig | None = None,
        loss: gk.LossConfig | Callable[..., gk.PolicyLoss] | None = None,
        segments: gk.SegmentConfig | None = None,
        head: str | None = None,
        masked_rows: str = "leave_out",
        flat_groups: str = "keep",
        entropy_mean: str = "micro_batch",
        batching: str = "trl",
        micro_batch_tokens: int | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        refuse_other_trl("FusedGRPOTrainer")
        for name, value, kind in (
            ("similarity", similarity, gk.SimilarityConfig),
            ("advantages", advantages, gk.AdvantageConfig),
            ("loss", None if callable(loss) else loss, gk.LossConfig),
            ("segments", segments, gk.SegmentConfig),
        ):
            instance("FusedGRPOTrainer", name, value, kind)
        if embedder is not None and not callable(embedder):
            raise TypeError(
                "FusedGRPOTrainer: embedder must be a function from texts to embeddings, got "
                f"{type(embedder).__name__} {embedder!r}"
            )
        if backend not in (None, "kernel", "reference"):
            raise unknown("FusedGRPOTrainer", "backend", backend, ("kernel", "reference"))
        if backend == "kernel" and "ok" not in (known := gk.available_kernels()).values():
            raise ValueError(f"FusedGRPOTrainer: backend 'kernel' cannot run here: {known}")
        if (similarity is None) != (embedder is None):
            missing = "similarity" if similarity is None else "embedder"
            raise ValueError(f"FusedGRPOTrainer: similarity and embedder go together, got no {missing}")
        if similarity is not None and segments is not None:
            raise ValueError("FusedGRPOTrainer: similarity and segments exclude each other, got both")
        if advantages is not None and segments is not None:
            raise ValueError("FusedGRPOTrainer: advantages and segments exclude each other, got both")
        check_advantages(advantages, similarity)
        if loss is not None and segments is not None:
            raise ValueError("FusedGRPOTrainer: loss and segments exclude each other, got both")
        if isinstance(loss, gk.LossConfig):
            check_loss(loss)
        check_choices(
            head=head, masked_rows=masked_rows, flat_groups=flat_groups, entropy_mean=entropy_mean, batching=batching
        )
        parameters = [p for of in (FusedGRPOTrainer, GRPOTrainer) for p in inspect.signature(of).parameters.values()]
        keywords = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        for name in options:
            if name not in keywords:
                raise TypeError(str(unknown("FusedGRPOTrainer", "keywords", name, keywords)))
        super().__init__(*arguments, **options)
        self.advantages, self.policy_term = advantages, loss if isinstance(loss, gk.LossConfig) else None
        self.loss_function = loss if callable(loss) else None
        self.similarity, self.embedder, self.segments, self.kernel_backend = similarity, embedder, segments, backend
        self._head_call = functools.partial(fused_head.logprobs, backend=backend)
        self.masked_rows, self.flat_groups, self.entropy_mean = masked_rows, flat_groups, entropy_mean
        self.rollouts = counting.Rollouts(self)
        self.threshold = None if segments is None else gk.SegmentThreshold(segments)
        self._entropy_window = torch.zeros(2, dtype=torch.float64)
        if entropy_mean == "batch" and self.top_entropy_quantile < 1.0:
            raise ValueError(
                "FusedGRPOTrainer: entropy_mean must be 'micro_batch' with top_entropy_quantile, as the tokens kept in "
                f"other micro-batches are not known yet, got 'batch' with {self.top_entropy_quantile!r}"
            )
        obstacle = fused_head.obstacle(self)
        if head == "fused" and obstacle is not None:
            raise ValueError(f"FusedGRPOTrainer: {obstacle}; leave head out, or use 'logprobs'")
        self.head = head or ("fused" if obstacle is None else "logprobs")
        check_settings(self)
        if segments is not None:
            check_segments(self)
        check_batching(self, batching, micro_batch_tokens)
        self.dealer = by_length.Dealer(self, micro_batch_tokens) if batching == "by_length" else None
        self._loss_config(0.0)  # refuses unsupported settings now rather than at the first step

    # ------------------------------------------------------------------------------------------------ rewards

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Sequence[Any], completion_ids_list: Any
    ) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = rewards  # of all processes, in rank order
        if self.embedder is not None:
            vectors = torch.as_tensor(self.embedder([_text(completion) for completion in completions]))
            if vectors.dim() != 2 or len(vectors) != len(completions):
                raise ValueError(
                    f"FusedGRPOTrainer: embedder must give a vector for each of {len(completions)} texts, got shape "
                    f"{list(vectors.shape)}"
                )
            self._embeddings = self.accelerator.gather(vectors.to(rewards.device).contiguous())
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        rollouts = self.rollouts.gather(output["prompt_ids"])
        if self.segments is not None:
            if rollouts is not None:
                counting.check_rollouts(self)  # which refuses segments
            self._add_segments(output, size, mode)
            all_advantages = self.accelerator.gather(output["advantages"].sum(1))
        else:
            all_advantages = self.add_advantages(output, self._scored, size, rollouts)
        logged = self._logs["advantages"]
        for _ in range(min(len(all_advantages), len(logged))):  # TRL's values for the same completions
            logged.pop()
        logged.extend(all_advantages.tolist())
        return output

    def add_advantages(
        self, output: dict[str, Any], rewards: Tensor, size: int, rollouts: Tensor | None = None
    ) -> Tensor:
        """Adds a generation batch's advantages to it, and weights of its tokens where a mean over rows is not right.

        To make advantages of your own, override this method; it must set output["advantages"].

        Args:
            output: this process's part of the batch, by TRL's names: completion_mask, and tool_mask with tools
            rewards: of all processes, in rank order, [N, R]; NaN where there is none
            size: completions of a prompt
            rollouts: ids [N] below N of the answers that the rows are parts of; None: each is one

        Returns:
            the advantages of all processes, [N]
        """
        mode = "train" if self.model.training else "eval"
        if rollouts is not None:
            counting.check_rollouts(self)
        advantages = self._advantages(output, rewards, size, mode, rollouts)
        output["advantages"] = counting.own(self, advantages).to(output["completion_mask"].device)
        is_flat = counting.flat(advantages, size) if self.flat_groups == "leave_out" else None
        counting.count_once(self, output, rollouts, is_flat, self.args.steps_per_generation if mode == "train" else 1)
        return advantages

    def _advantages(
        self, output: dict[str, Any], rewards: Tensor, size: int, mode: str, rollouts: Tensor | None
    ) -> Tensor:
        by_reward = self.multi_objective_aggregation == "normalize_then_sum"
        config = self.advantages or gk.AdvantageConfig.of("trl-gdpo" if by_reward else _ADVANTAGES[self.scale_rewards])
        config = dataclasses.replace(config, reward_weights=tuple(self.reward_weights.tolist()))
        lengths: Tensor | None = None
        valid: Tensor | None = None
        if config.needs_lengths or self.masked_rows == "leave_out":
            counts = self.accelerator.gather(counting.loss_mask(output).sum(1))
            lengths = counts if config.needs_lengths else None
            valid = counting.of_rollouts(counts, rollouts) > 0 if self.masked_rows == "leave_out" else None
        subgroups = None
        if self.similarity is not None:
            clusters = gk.similarity_groups(
                self._embeddings, size, valid=valid, config=self.similarity, backend=self.kernel_backend
            )
            subgroups = clusters.labels
            for name, value in gk.similarity_metrics(clusters).items():
                self._metrics[mode][name].append(value)
        return gk.group_advantages(
            rewards,
            size,
            rollouts=rollouts,
            subgroups=subgroups,
            valid=valid,
            lengths=lengths,
            config=config,
            backend=self.kernel_backend,
        ).advantages

    def _add_segments(self, output: dict[str, Any], size: int, mode: str) -> None:
        """Places rewards at the ends of completions. The baseline is a prompt's mean, as TRL has no critic.

        Each process computes the segments of all, as their advantages are normalised over the whole batch.
        """
        mask = counting.loss_mask(output)
        old = output.get("old_per_token_logps")
        if old is None:  # the policy has not changed since sampling
            rows = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size
            with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                old, _, _ = self._forward(self.model, output, rows=rows)
            output["old_per_token_logps"] = old
        sampled = output.get("sampling_per_token_logps", old)
        sampled = torch.where(sampled.isnan(), old, sampled)  # tokens that vLLM could not score
        width = mask.shape[1]
        old, sampled, mask = counting.of_all(self, old, sampled, mask)
        totals = (self._scored * self.reward_weights.to(self._scored.device)).nansum(1)
        at_end = torch.zeros_like(old)
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1, keepdim=True)
        at_end.scatter_(1, last, totals[:, None].to(at_end))
        scored = mask & ~self._scored.isnan().all(1)[:, None]
        segments = gk.endpoint_segments(
            at_end,
            old,
            sampled,
            scored,
            groups=size,
            threshold=self.threshold,
            config=self.segments,
            backend=self.kernel_backend,
        )
        output["advantages"] = counting.own(self, segments.advantages)[:, :width]
        output["segment_ids"] = counting.own(self, segments.segment_ids)[:, :width]
        output[_SEGMENTS] = (segments.segment_ids.amax(1) + 1).sum()
        output["num_items_in_batch"] = scored.sum()  # the others are in no segment, nor in the KL term
        for name, value in gk.segment_metrics(segments, size).items():
            self._metrics[mode][name].append(value)
        if self.threshold is not None and mode == "train":
            self.threshold.update(segments)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.threshold is not None and self.args.should_save:
            path = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}" / _THRESHOLD
            path.write_text(json.dumps(self.threshold.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.threshold is None or checkpoint is None:
            return
        path = Path(checkpoint) / _THRESHOLD
        if path.exists():
            self.threshold.load_state_dict(json.loads(path.read_text()))
        elif self.threshold.config.adaptive_threshold:
            raise ValueError(
                f"FusedGRPOTrainer: resume_from_checkpoint must hold {_THRESHOLD}, as a run with segments leaves it, "
                f"got {checkpoint!r}"
            )

    # --------------------------------------------------------------------------------------------------- loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        return inputs if self.dealer is None or not self.model.training else self.dealer.next()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        by_all = self.loss_type in counting.BY_ALL_TOKENS
        bonus = self._entropy_coefficient()
        # the bonus is a mean over the micro-batch's tokens, whatever the policy term's divisor
        config = self._loss_config(bonus / steps if by_all else bonus)
        normalizer = None
        if by_all:
            counts = {"tokens": inputs["num_items_in_batch"], "segments": inputs.get(_SEGMENTS)}
            share = (steps / self.args.steps_per_generation if mode == "train" else 1) / self.accelerator.num_processes
            normalizer = {unit: count.clamp(min=1.0) * share for unit, count in counts.items() if count is not None}
        options = {"config": config, "normalizer": normalizer, "backend": self.kernel_backend}
        measured = None
        if by_length.is_empty(inputs):
            loss = torch.zeros((), device=self.accelerator.device, requires_grad=True)
        else:
            measured = self._policy_loss(model, inputs, options)
            loss = measured.result.loss if by_all else measured.result.loss / steps
            if self.aux_loss_enabled:
                assert measured.aux_loss is not None
                loss = loss + self.router_aux_loss_coef * measured.aux_loss / steps
        if self.dealer is None or mode == "eval":
            assert measured is not None
            self._log_losses(mode, [self._record(measured.result.metrics, measured.aux_loss)])
        elif originals := self.dealer.measured(inputs, None if measured is None else measured.tokens):
            self._log_losses(mode, [self._record_original(part, options) for part in originals])
        return loss

    def _policy_loss(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> _Measured:
        if self.head == "fused":
            results: list[tuple[gk.PolicyLoss, tuple[Tensor, Tensor] | None]] = []

            def compute(head: fused_head.HeadInputs, outputs: Sequence[str]) -> tuple[Tensor, None]:
                scored = inputs["completion_mask"] != 0
                if composed.needs_logprobs(self):
                    tokens = fused_head.padded_logprobs(head, scored, self.kernel_backend)
                    results.append((self._compose(inputs, *tokens, options), tokens))
                else:
                    result = fused_head.packed_policy_loss(head, self._token_inputs(inputs), scored, **options)
                    is_dealt = self.dealer is not None and self.model.training
                    results.append((result, fused_head.padded_tokens(result.metrics, scored) if is_dealt else None))
                loss = results[-1][0].loss
                return torch.nn.functional.pad(loss[None], (0, len(head.targets) - 1)), None

            scoring, self._head_call = self._head_call, compute
            try:
                outputs, _, aux_loss = self._forward(model, inputs, with_aux_loss=self.aux_loss_enabled)
            finally:
                self._head_call = scoring
            ((result, tokens),) = results
            # the first of these is the loss, the others are 0: the hooks of a model that ZeRO-3 partitions, or that
            # DistributedDataParallel wraps, are those of its outputs
            return _Measured(result._replace(loss=outputs.sum()), tokens, aux_loss)
        logprobs, entropy, aux_loss = self._forward(
            model, inputs, with_entropy=True, with_aux_loss=self.aux_loss_enabled
        )
        assert entropy is not None
        return _Measured(self._compose(inputs, logprobs, entropy, options), (logprobs, entropy), aux_loss)

    def _token_inputs(self, inputs: dict[str, Any]) -> fused_head.TokenInputs:
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        return fused_head.TokenInputs(
            old_logprobs=inputs.get("old_per_token_logps"),
            advantages=inputs["advantages"],
            mask=counting.loss_mask(inputs),
            ref_logprobs=inputs["ref_per_token_logps"] if self.beta != 0.0 else None,
            is_weights=inputs["importance_sampling_ratio"] if corrected else None,
            segments=inputs.get("segment_ids"),
            weights=inputs.get(counting.WEIGHTS),
        )

    def _compose(
        self, inputs: dict[str, Any], logprobs: Tensor, entropy: Tensor, options: dict[str, Any]
    ) -> gk.PolicyLoss:
        """The loss of log-probs and entropies [B, T]."""
        batch_share = None
        if composed.has_bonus_of_batch(self):
            batches = self.args.steps_per_generation if self.model.training else 1
            batch_share = inputs["num_items_in_batch"].clamp(min=1.0) / (batches * self.accelerator.num_processes)
        tokens, sampler = self._token_inputs(inputs), inputs.get("sampling_per_token_logps")
        result, self._kept_entropy = composed.policy_loss(
            self, logprobs, entropy, tokens, sampler, batch_share, options
        )
        return result

    def _forward(
        self,
        model: Any,
        inputs: dict[str, Any],
        with_entropy: bool = False,
        with_aux_loss: bool = False,
        rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        results: tuple[Tensor, Tensor | None, Tensor | None] = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].shape[1],
            batch_size=rows,
            compute_entropy=with_entropy,
            compute_aux_loss=with_aux_loss,
            **{name: inputs.get(name) for name in IMAGES},
        )
        return results

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As TRL's, with our head if it is the fused one, and by length where many rows are only scored."""
        results: tuple[Tensor, Tensor | None, Tensor | None]
        call, tokens = super()._get_per_token_logps_and_entropies, (input_ids, attention_mask, logits_to_keep)
        with fused_head.head_calls(self._head_call, model) if self.head == "fused" else contextlib.nullcontext():
            if self.dealer is None or batch_size is None or any(value is not None for value in options.values()):
                results = call(model, *tokens, batch_size, **options)
            else:
                results = by_length.score(call, self.dealer, model, *tokens, batch_size)
        return results

    def _loss_config(self, entropy_coef: float) -> gk.LossConfig:
        fields = {
            name: getattr(self.args, name)
            for name in (
                "delta",
                "use_bias_correction_kl",
                "sapo_temperature_pos",
                "sapo_temperature_neg",
                "vespo_k_pos",
                "vespo_lambda_pos",
                "vespo_k_neg",
                "vespo_lambda_neg",
            )
        }
        config = gk.LossConfig.trl(
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            epsilon=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            max_completion_length=self.max_completion_length,
            entropy_coef=entropy_coef,
            **fields,
        )
        if self.policy_term is not None:
            config = dataclasses.replace(config, **{name: getattr(self.policy_term, name) for name in POLICY_TERM})
        return config if self.segments is None else dataclasses.replace(config, ratio="segment")

    def _entropy_coefficient(self) -> float:
        """Coefficient of this step; the adaptive one is active only while the last step's entropy was low."""
        if not self._entropy_bonus_enabled:
            return 0.0
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return float(self.entropy_coef)

    def _record(self, metrics: gk.PolicyLossMetrics, aux_loss: Tensor | None) -> _Record:
        kept = torch.stack([metrics["entropy_sum"], metrics["tokens"]])
        if self.top_entropy_quantile < 1.0:
            assert self._kept_entropy is not None
            kept = self._kept_entropy.to(kept)
        aux = kept.new_zeros(1) if aux_loss is None else aux_loss.detach().to(kept).view(1)
        return _Record(metrics, torch.cat([kept, kept.new_zeros(1), aux]))

    def _record_original(self, part: by_length.Original, options: dict[str, Any]) -> _Record:
        """The record of a micro-batch as TRL makes it. Rows that did not run have no entropy, and no part in phi."""
        inputs, logprobs, entropy, has_run = part
        index = has_run.nonzero().squeeze(1).to(logprobs.device)
        num_tokens = counting.loss_mask(inputs)[index].sum()
        if options["config"].loss == "vespo":
            inputs, logprobs, entropy = by_length.at(inputs, index), logprobs[index], entropy[index]
        with torch.no_grad():
            metrics = self._compose(inputs, logprobs, entropy, options).metrics
        others = metrics.tensor.new_tensor([0.0, 0.0, len(has_run) - len(index), 0.0])
        others[0], others[1] = metrics["entropy_sum"], num_tokens
        return _Record(metrics, others)

    def _log_losses(self, mode: str, records: Sequence[_Record]) -> None:
        """Logs TRL's metrics of micro-batches under TRL's names, from one gathered vector."""
        vectors = torch.stack([torch.cat([record.metrics.tensor, record.others]) for record in records])
        left_out = 0.0
        for number, gathered in enumerate(self.accelerator.gather(vectors[None]).cpu().unbind(1), 1):
            self._log_loss(mode, records[0].metrics.merged(gathered[:, :-4]), gathered, number == len(records))
            left_out += float(gathered[:, -2].sum())
        if self.dealer is not None and mode == "train":
            self._metrics[mode]["by_length/rows_left_out"].append(left_out)

    def _log_loss(self, mode: str, merged: gk.PolicyLossMetrics, gathered: Tensor, is_last: bool) -> None:
        """Logs the metrics of a micro-batch of all processes."""
        values, log = merged.trl(), self._metrics[mode]
        entropy, tokens = gathered[:, -4:-2].sum(0).tolist()
        if self.dealer is not None and mode == "train":
            values["entropy"] = entropy / max(tokens, 1)
            if tokens == 0:  # no row ran
                values.pop("entropy")
                values.pop("vespo/phi_seq_mean", None)
        values.pop("entropy_coef", None)
        policy = values.pop("policy_loss", merged.to_dict()["policy_loss"] + self.beta * merged.to_dict()["kl_loss"])
        for name, value in values.items():
            log[name].append(value)
        if self.aux_loss_enabled:
            log["aux_loss"].append(float(gathered[:, -1].mean()))
        if not self._entropy_bonus_enabled:
            return
        log["policy_loss"].append(policy / len(gathered))
        ends_step = is_last and self.accelerator.sync_gradients
        if self.use_adaptive_entropy and mode == "train":
            self._adapt_entropy(gathered[:, -4:-2].sum(0), ends_step)
        if mode == "train" and ends_step:
            log["entropy_coef"].append(self.entropy_coef)

    def _adapt_entropy(self, sum_and_count: Tensor, ends_step: bool) -> None:
        """Sets the coefficient of the next step from the entropy of all tokens of this one."""
        self._entropy_window += sum_and_count
        if not ends_step:
            return
        entropy = float(self._entropy_window[0] / self._entropy_window[1].clamp(min=1.0))
        step = self.args.entropy_coef_delta
        if entropy <= self.args.entropy_target:
            self.entropy_coef = min(self.entropy_coef + step, self.args.entropy_coef_max)
        else:
            self.entropy_coef = max(self.entropy_coef - step, self.args.entropy_coef_min)
        self._last_world_entropy = entropy
        self._entropy_window.zero_()


def _text(completion: str | list[dict[str, Any]]) -> str:
    """The last assistant message of a conversation, with its text parts joined."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    content = said[-1] if said else None
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")
    return content or ""
