"""The advantage code of the installed peers, made callable without copying any of it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import warnings
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def verl(estimator: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The advantage function that verl registers under this name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo import core_algos
    return core_algos.get_adv_estimator_fn(estimator)


def trl_grpo(
    rewards_per_func: Tensor,
    group_size: int,
    *,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
    weights: Tensor | None = None,
) -> Tensor:
    """TRL's GRPO advantages, by its trainer's statements from the mask of unscored rows to the final zeroing."""
    functions = rewards_per_func.shape[1]
    trainer = types.SimpleNamespace(
        reward_weights=torch.ones(functions) if weights is None else weights,
        reward_funcs=[None] * functions,
        multi_objective_aggregation=aggregation,
        scale_rewards=scale_rewards,
    )
    block = _statements("trl.trainer.grpo_trainer", "GRPOTrainer", "unscorable_mask")
    return block(trainer, rewards_per_func=rewards_per_func, num_generations=group_size, device=rewards_per_func.device)


def trl_rloo(rewards: Tensor, group_size: int, *, normalize: bool = False) -> Tensor:
    """TRL's RLOO advantages for rewards summed over functions."""
    trainer = types.SimpleNamespace(normalize_advantages=normalize)
    block = _statements("trl.trainer.rloo_trainer", "RLOOTrainer", "grouped_rewards")
    return block(trainer, rewards=rewards, num_generations=group_size, device=rewards.device)


@functools.cache
def _statements(module_name: str, trainer: str, first: str) -> Callable[..., Tensor]:
    """Compiles _generate_and_score_completions from the assignment of `first` to advantages = nan_to_num(...)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = __import__(module_name, fromlist=[trainer])
    method = getattr(module, trainer)._generate_and_score_completions
    body = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body  # type: ignore[attr-defined]
    lines = [ast.unparse(statement) for statement in body]
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{first} = "))
    end = next(i for i in range(begin, len(lines)) if lines[i].startswith("advantages = torch.nan_to_num("))
    code = "def block(self, *, num_generations, device, rewards=None, rewards_per_func=None):\n"
    code += textwrap.indent("\n".join([*lines[begin : end + 1], "return advantages"]), "    ")
    scope = dict(vars(module))
    exec(compile(code, f"<{module_name}>", "exec"), scope)
    return scope["block"]  # type: ignore[no-any-return]
