"""Replaces verl's own functions, for configurations that use verl's own names."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from verl.trainer.ppo import core_algos

from grpo_kernels.checks import boolean
from grpo_kernels.integrations.verl import advantages, checkpoints, queue, sessions, squares
from grpo_kernels.integrations.verl import head as fused_head
from grpo_kernels.integrations.verl import loss as loss_side
from grpo_kernels.integrations.verl.correction import rollout_correction

_GRPO = "compute_grpo_outcome_advantage"
_OF_TOKENS = {
    "compute_gae_advantage_return": advantages.gae_advantage_return,
    "compute_reinforce_plus_plus_outcome_advantage": advantages.reinforce_plus_plus_advantage,
    **{
        name: advantages.optimal_token_baseline(name, places)
        for name, places in (
            ("compute_optimal_token_baseline_advantage", "position"),
            ("compute_multi_turn_optimal_token_baseline_advantage", "rank"),
        )
    },
}
_CORRECTION = "compute_rollout_correction_and_add_to_batch"
_PROCESSOR, _FUSED = "fused_output_processor", "fused_forward_model_engine"
_ADVANTAGE, _OF_SESSIONS, _LOSS = "compute_advantage", "compute_advantage_for_multi_trajectories", "ppo_loss"
# name -> (verl's function, ours)
_replaced: dict[str, tuple[Any, Any]] = {}
# (class, name) -> verl's method
_wrapped: dict[tuple[type, str], Any] = {}


def patch_verl(grpo: bool = True, loss: bool = True, correction: bool = True, head: bool = True) -> None:
    """Replaces verl's estimators, loss, rollout correction and fused LM head.

    Call it before the workers are created, in every process concerned: the trainer's for advantages, the actors' for
    losses.

    Args:
        grpo: compute adv_estimator 'grpo', 'gdpo', 'gae', 'reinforce_plus_plus', 'optimal_token_baseline' and
            'tir_optimal_token_baseline' ourselves, let our estimators see the whole batch and outputs by session,
            tell the loss and the correction which outputs are one session, and save adaptive thresholds with verl's
            checkpoints
        loss: replace ppo_loss by fused_ppo_loss
        correction: compute the weights, rejections and metrics of algorithm.rollout_correction with our kernel
        head: with use_fused_kernels, compute log-probs, entropies and calculate_sum_pi_squared by linear_logprobs
            whatever impl_backend is, in the FSDP and Megatron engines; a model keeps the head that it was built with
    """
    boolean("patch_verl", grpo=grpo, loss=loss, correction=correction, head=head)
    if grpo:
        from verl.trainer.ppo import ray_trainer

        _replace(core_algos, _GRPO, advantages.grpo_outcome_advantage)
        for name, ours in _OF_TOKENS.items():
            _replace(core_algos, name, ours)
        _replace(ray_trainer, _ADVANTAGE, _with_batch(getattr(ray_trainer, _ADVANTAGE)))
        # only the v1 trainer needs this package
        if importlib.util.find_spec("transfer_queue") is not None:
            from verl.trainer.ppo.v1 import trainer_base, utils

            _replace(utils, _OF_SESSIONS, _by_sessions(getattr(utils, _OF_SESSIONS), utils))
            _wrap(trainer_base.PPOTrainer, "_compute_advantage", queue.with_queue)
            _wrap_checkpoints(trainer_base.PPOTrainer)
        _wrap_checkpoints(ray_trainer.RayPPOTrainer)
    if loss:
        from verl.workers.utils import losses

        loss_side.originals.setdefault(_LOSS, losses.ppo_loss)
        _replace(losses, _LOSS, loss_side.fused_ppo_loss)
    if correction:
        from verl.trainer.ppo import rollout_corr_helper

        _replace(rollout_corr_helper, _CORRECTION, rollout_correction)
    if head:
        fused_head.replaced["backends"] = True
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        _wrap(FSDPEngineWithLMHead, "forward_step", squares.of_fsdp_step)
        _wrap(FSDPEngineWithLMHead, "prepare_model_outputs", squares.of_fsdp_outputs)
        if importlib.util.find_spec("megatron") is not None:
            _replace_megatron()


def unpatch_verl() -> None:
    """Restores verl, including modules imported since."""
    while _replaced:
        name, (theirs, ours) = _replaced.popitem()
        _swap(name, ours, theirs)
    while _wrapped:
        (kind, name), method = _wrapped.popitem()
        setattr(kind, name, method)
    fused_head.replaced["backends"] = False
    loss_side.originals.clear()
    advantages.thresholds.clear()


def _replace_megatron() -> None:
    from verl.models.mcore import model_forward_fused
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from grpo_kernels.integrations.verl import megatron

    _replace(model_forward_fused, _PROCESSOR, megatron.fused_output_processor)
    _replace(model_forward_fused, _FUSED, megatron.with_squares(getattr(model_forward_fused, _FUSED)))
    _wrap(MegatronEngineWithLMHead, "forward_step", squares.of_megatron_step)


def _replace(module: Any, name: str, ours: Any) -> None:
    if name not in _replaced:
        _replaced[name] = (getattr(module, name), ours)
        _swap(name, *_replaced[name])


def _wrap(kind: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    if (kind, name) not in _wrapped:
        _wrapped[kind, name] = getattr(kind, name)
        setattr(kind, name, wrapper(getattr(kind, name)))


def _wrap_checkpoints(trainer: type) -> None:
    _wrap(trainer, "_save_checkpoint", checkpoints.with_thresholds_saved)
    _wrap(trainer, "_load_checkpoint", checkpoints.with_thresholds_loaded)


def _swap(name: str, old: Any, new: Any) -> None:
    """Swaps the function where it is defined, in every module of verl that imported it by name, and if verl finds it by
    the estimator's name, there."""
    for module in [module for path, module in sys.modules.items() if path.split(".")[0] == "verl"]:
        if vars(module).get(name) is old:
            setattr(module, name, new)
    if name in _OF_TOKENS:
        for estimator, function in core_algos.ADV_ESTIMATOR_REGISTRY.items():
            if function is old:
                core_algos.ADV_ESTIMATOR_REGISTRY[estimator] = new


def _with_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_advantage(data: Any, adv_estimator: Any, *arguments: Any, **options: Any) -> Any:
        config = _config_of(arguments, options)
        name = str(getattr(adv_estimator, "value", adv_estimator))
        with_options = (*advantages.ESTIMATORS, *advantages.OF_TOKENS)
        if advantages.options_of(config) and name not in with_options:
            raise ValueError(
                f"compute_advantage: algorithm.{advantages.OPTIONS} must be left out unless adv_estimator is one of "
                f"{', '.join(with_options)}, got {name!r}"
            )
        with advantages.knowing(advantages.BATCH, data), advantages.knowing(advantages.CONFIG, config):
            return original(data, adv_estimator, *arguments, **options)

    return compute_advantage


def _config_of(arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """verl's algorithm section among the arguments after adv_estimator."""
    return options.get("config", arguments[4] if len(arguments) > 4 else None)


def _by_sessions(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_advantage_for_multi_trajectories(
        data: Any, batch_keys: Sequence[str], adv_estimator: Any, *arguments: Any, **options: Any
    ) -> Any:
        """As verl does for 'grpo', gives all outputs of a session one advantage, from the reward of its last one."""
        name, config = str(getattr(adv_estimator, "value", adv_estimator)), _config_of(arguments, options)
        queue.add_columns(data, name, config)
        of_keys = sessions.of_keys(batch_keys)
        if adv_estimator not in advantages.ESTIMATORS:
            with advantages.knowing(advantages.SESSIONS, of_keys):
                data = original(data, batch_keys, adv_estimator, *arguments, **options)
        elif not of_keys.has_several:
            data = module.compute_advantage(data, adv_estimator, *arguments, **options)
        elif adv_estimator in advantages.OF_RESPONSES:
            _add_advantages(data, name, config, of_keys.of_row, of_keys.last)
        else:
            raise ValueError(
                f"{adv_estimator}: every session must have one output, as an output's advantages are those of its own "
                f"tokens, got {len(batch_keys)} outputs of {len(of_keys.last)} sessions"
            )
        if of_keys.has_several:
            sessions.add_columns(data, of_keys.of_row)
        queue.put_columns(data)
        return data

    return compute_advantage_for_multi_trajectories


def _add_advantages(data: Any, name: str, config: Any, of_row: torch.Tensor, last: list[int]) -> None:
    """Adds advantages and returns of sessions to a DataProto."""
    final, mask = data.select_idxs(last), data.batch["response_mask"]
    of_row = of_row.to(mask.device)
    # a session whose last output is masked still votes if another one has tokens in the loss
    counts = sessions.lengths(mask, of_row)[last]
    with torch.no_grad(), advantages.knowing(advantages.BATCH, final):
        rewards, uids = final.batch["token_level_rewards"], final.non_tensor_batch["uid"]
        of_session = advantages.response_advantages(name, rewards, counts, uids, config)
    tokens, returns = advantages.to_tokens(of_session[of_row], rewards, mask)
    data.batch["advantages"], data.batch["returns"] = tokens, returns
