"""The fused path of verl's Megatron engine: log-probs, entropies and sums of squares by our output processor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from verl.models.mcore.util import postprocess_thd_engine
from verl.utils.model import CausalLMOutputForPPO

import grpo_kernels as gk
from grpo_kernels.integrations.megatron import output_processor
from grpo_kernels.integrations.verl import squares


def fused_output_processor(*, hidden_states: Tensor, context: Any, packed_seq_params: Any = None, **given: Any) -> Any:
    """Replaces verl's function of this name, whose context has the temperature."""
    options = {"temperature": context.temperature, "return_entropy": True}
    options["return_sum_pi_squared"] = squares.are_wanted()
    result = output_processor(hidden_states=hidden_states, context=options, **given)
    assert isinstance(result, gk.TokenLogprobs)
    squares.put(result.sum_pi_squared, packed_seq_params)
    absent = dict.fromkeys(("loss", "logits", "past_key_values", "attentions"))
    return CausalLMOutputForPPO(
        **absent, hidden_states=hidden_states, log_probs=result.logprobs, entropy=result.entropy
    )


def with_squares(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps verl's fused_forward_model_engine."""

    @functools.wraps(original)
    def fused_forward_model_engine(vision_model: bool = False) -> Callable[..., Any]:
        theirs = original(vision_model)

        def forward(*arguments: Any, input_ids: Tensor, **options: Any) -> Any:
            output = theirs(*arguments, input_ids=input_ids, **options)
            if not squares.are_wanted() or not isinstance(output, dict):
                return output
            if (found := squares.take()) is None:
                raise NotImplementedError(
                    "fused_forward_model_engine: calculate_sum_pi_squared must be False with use_fused_kernels for a "
                    "model without an output_processor, got True; Megatron-core 0.18 and later has it"
                )
            where = {name: options[name] for name in ("cp_layout", "local_cp_size") if name in options}
            values, packed = found
            output["sum_pi_squared"] = postprocess_thd_engine(values, packed, input_ids, input_ids.shape[0], **where)
            return output

        return forward

    return fused_forward_model_engine
