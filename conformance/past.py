"""Small adapters of versions in which a bug was, and was fixed, where the adapter of today does not fit."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from cutter import Source
from grpo_conformance import Batch
from torch import Tensor


def _policy(batch: Batch) -> Tensor:
    """Losses of tokens without a clip, so that the loss depends on all that it should."""
    return -batch.advantages[:, None] * (batch.logprobs - batch.old_logprobs).exp()


class VerlLosses:
    """verl's means, its critic's loss and its distillation."""

    def __init__(self, version: str) -> None:
        source = Source("verl", version)
        self.name = f"verl {source.version}"
        scope: dict[str, Any] = vars(typing) | {"torch": torch}
        functional = source.cut("verl/utils/torch_functional.py", "masked_sum", "masked_mean", "clip_by_value", **scope)
        core = "verl/trainer/ppo/core_algos.py"
        scope |= vars(source.cut(core, "agg_loss", "compute_value_loss", verl_F=functional, **scope))
        scope |= {"Metric": MagicMock(), "AggregationType": MagicMock(), "masked_mean": functional.masked_mean}
        scope["no_padding_2_padding"] = lambda values, data: values
        self.functions = source.cut("verl/workers/utils/losses.py", "value_loss", **scope)
        distance = lambda model_output, **options: (model_output["log_probs"], {})  # noqa: E731
        vars(self.functions).update(
            agg_loss=scope["agg_loss"],
            **vars(
                source.cut(
                    "verl/trainer/distillation/losses.py",
                    "distillation_loss",
                    get_distillation_loss_fn=lambda mode: distance,
                    compute_distillation_loss_range=lambda **options: {},
                    **scope,
                )
            ),
        )

    def loss(self, batch: Batch) -> Tensor:
        counts = {"dp_size": batch.ranks, "batch_num_tokens": batch.total.mask.sum()}
        counts["global_batch_size"] = len(batch.total.mask)
        mode = batch.aggregation or "token-mean"
        config = SimpleNamespace(loss_agg_mode=mode, loss_scale_factor=None, cliprange_value=0.5, global_batch_info={})
        data = Rows(counts, response_mask=batch.mask, values=batch.values, returns=batch.returns)
        loss = self.functions.agg_loss(_policy(batch), batch.mask, mode, **counts)
        if batch.value_coef:
            loss = loss + batch.value_coef * self.functions.value_loss(config, {"values": batch.values}, data)[0]
        if batch.teacher_coef:
            settings = SimpleNamespace(loss_mode="k1", loss_max_clamp=None, use_policy_gradient=False)
            distillation = SimpleNamespace(distillation_loss=settings)
            distances = {"log_probs": batch.logprobs - batch.teacher_logprobs}
            loss = (
                loss + batch.teacher_coef * self.functions.distillation_loss(config, distillation, distances, data)[0]
            )
        return loss / batch.ranks


class Rows(dict[str, Any]):
    """A batch of tensors, in the place of a TensorDict."""

    def __init__(self, counts: dict[str, Any], **tensors: Tensor) -> None:
        super().__init__(counts | tensors)

    def select(self, *names: str) -> Any:
        return Rows({}, **{name: self[name] for name in names})

    def to_padded_tensor(self) -> Any:
        return self


class TrlCounts:
    """TRL's mask without truncated completions, and its number of tokens."""

    def __init__(self, version: str) -> None:
        source, path = Source("trl", version), "trl/trainer/grpo_trainer.py"
        self.name = f"trl {source.version}"
        method, arguments = (
            "_generate_and_score_completions",
            "self, completion_ids_list, completion_mask, tool_mask, device",
        )
        start, count, own = "if self.mask_truncated_completions", "num_items_in_batch", "num_items_in_batch = "
        try:
            both = f"completion_mask, {count}"
            self.masked = source.statements(path, method, start, own, arguments, both, torch=torch)
        except KeyError:  # it counted where it generated
            mask = source.statements(path, method, start, start, arguments, "completion_mask", torch=torch)
            gather, add = "agg_completion_lengths = ", "total_completion_tokens = "
            gathered = source.statements(path, "_generate", gather, gather, "self, completion_lengths", gather[:-3])
            added = source.statements(path, "_generate", add, add, gather[:-3], add[:-3])
            total = lambda me, lengths: added(gathered(me, lengths))  # noqa: E731
            self.masked = lambda me, ids, given, *others: (mask(me, ids, given, *others), total(me, given.sum(1)))

    def loss(self, batch: Batch) -> Tensor:
        me = SimpleNamespace(mask_truncated_completions=batch.mask_truncated, eos_token_ids=[1])
        me._tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
        me.accelerator = SimpleNamespace(gather=lambda values: values)
        ends = [[2 if is_cut else 1] for is_cut in batch.truncated.tolist()]
        mask, count = self.masked(me, ends, batch.mask.long(), None, "cpu")
        return (_policy(batch) * mask).sum() / count


class TrlLogprobs:
    """TRL's log-probs of completions."""

    def __init__(self, version: str) -> None:
        source = Source("trl", version)
        self.name = f"trl {source.version}"
        pick = lambda logits, ids: logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]  # noqa: E731
        path, method = "trl/trainer/grpo_trainer.py", "GRPOTrainer._get_per_token_logps"
        self.function = source.cut(path, method, selective_log_softmax=pick)._get_per_token_logps

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        me, model = SimpleNamespace(temperature=temperature), lambda **inputs: SimpleNamespace(logits=logits)
        return self.function(me, model, tokens, torch.ones_like(tokens), tokens.shape[1] - 1)


class SkyRLParts:
    """SkyRL's means before they were in the advantages: of a micro-batch, then over micro-batches."""

    def __init__(self, version: str) -> None:
        source, folder = Source("skyrl", version), "skyrl/backends/skyrl_train"
        self.name = f"SkyRL {source.version}"
        scope: dict[str, Any] = vars(typing) | {"torch": torch}
        scope |= vars(source.cut(f"{folder}/utils/torch_utils.py", "masked_mean", "safe_exp_delta", **scope))
        names = "reduce_loss", "ppo_policy_loss"
        correct = lambda loss, old, rollout, mask, config: (loss, mask, {})  # noqa: E731
        self.losses = source.cut(f"{folder}/utils/ppo_utils.py", *names, apply_off_policy_correction=correct, **scope)
        worker, text = f"{folder}/workers/worker.py", "scale = 1.0 / self._micro_batches_accumulated"
        self.scale = source.statements(worker, "optim_step", text, text, "self", "scale")

    def loss(self, batch: Batch) -> Tensor:
        reduction = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}[str(batch.aggregation)]
        config = SimpleNamespace(policy_loss_type="regular", loss_reduction=reduction, off_policy_correction=None)
        config.eps_clip_low = config.eps_clip_high = batch.clip
        config.max_seq_len = None
        rows = batch.logprobs, batch.old_logprobs, batch.advantages[:, None].expand(batch.mask.shape)
        loss = self.losses.ppo_policy_loss(*rows, config, batch.mask.double())[0]
        return loss * self.scale(SimpleNamespace(_micro_batches_accumulated=batch.steps)) / batch.ranks


class PrimeRLScale:
    """prime-rl's loss with the tokens that its loop counts, and the factor of its gradients."""

    def __init__(self, version: str) -> None:
        source, loop, name = Source("prime-rl", version), "src/prime_rl/trainer/rl/train.py", "train"
        self.name = f"prime-rl {source.version}"
        self.ranks, self.tokens = 1, 0
        group = SimpleNamespace(get_group=lambda: None)
        self.parallel = SimpleNamespace(get_mesh=lambda name: group)
        dist = SimpleNamespace(
            all_reduce=lambda count, **options: count.fill_(self.tokens), ReduceOp=SimpleNamespace(SUM=0)
        )
        on_cpu = SimpleNamespace(tensor=lambda value, dtype, device: torch.tensor(value), int64=torch.int64)
        scope = {"torch": on_cpu, "dist": dist}
        self.undoes_averages = "fsdp_gradient_divide_factor" in (source.root / loop).read_text()
        start = "local_loss_scale = " if self.undoes_averages else "loss_scale = sum("
        arguments = "micro_batches, parallel_dims"
        self.count = source.statements(loop, name, start, "loss_scale = max(", arguments, "loss_scale", **scope)

    def loss(self, batch: Batch) -> Tensor:
        """The share of a rank whose parts are this one and, over steps, others with the rest of its tokens."""
        self.ranks, self.tokens = batch.ranks, int(batch.total.mask.sum())
        scale = self.count([{"loss_mask": batch.mask if batch.steps == 1 else batch.total.mask}], self.parallel)
        loss = (_policy(batch) * batch.mask).sum() / scale
        return loss * (self.ranks if self.undoes_averages else 1) / self.ranks  # FSDP averages, unless that is undone


class RollFiltered:
    """ROLL's agentic loss, with a filter of tokens that runs after the advantages."""

    def __init__(self, version: str) -> None:
        source, path = Source("roll", version), "roll/utils/functionals.py"
        self.name = f"ROLL {source.version}"
        scope: dict[str, Any] = vars(typing) | {"torch": torch, "F": torch.nn.functional}
        names = ("masked_sum", "masked_mean", "compute_approx_kl", "agg_loss")
        scope |= vars(source.cut(path, *names, **scope))
        self.batch: Any = None
        scope["compute_train_infer_correction"] = lambda **options: (None, self.batch.mask, {})
        worker = "roll/pipeline/agentic/agentic_actor_worker.py"
        self.function = source.cut(worker, "ActorWorker.loss_func", **scope).loss_func

    def loss(self, batch: Batch) -> Tensor:
        self.batch = batch
        names = ("use_pg_clip_range", "dual_clip_loss", "enable_old_logprobs_recompute")
        config = MagicMock(**dict.fromkeys(names, False), ratio_type="token", pg_clip=batch.clip)
        config.train_infer_correction.is_weight.enabled = False
        config.loss_agg_mode, config.use_kl_loss = batch.aggregation or "seq-mean-token-mean", batch.kl_coef > 0
        config.kl_loss_coef, config.entropy_loss_coef = batch.kl_coef, batch.entropy_coef
        me = MagicMock(pipeline_config=config, get_old_log_probs_with_cache=lambda data, given: batch.old_logprobs)
        me.strategy.op_compute_log_probs = lambda **options: batch.logprobs
        me.strategy.op_compute_entropy = lambda **options: batch.entropy
        everything = torch.ones(len(batch.mask), batch.mask.shape[1] + 1)
        rows = {"response_mask": everything, "ref_log_probs": batch.ref_logprobs, "input_ids": None}
        rows["advantages"] = batch.advantages[:, None].expand(batch.mask.shape)
        counts = {"batch_num_tokens": {"response_mask": batch.total.mask.sum()}}
        counts["global_valid_samples"] = {"response_mask": batch.total.mask.any(1).sum()}
        data = SimpleNamespace(batch=rows, meta_info=counts, non_tensor_batch={})
        return self.function(me, data, batch.logprobs)[0]
