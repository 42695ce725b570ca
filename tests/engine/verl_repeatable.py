"""Extensions of verl that make two runs sample the same tokens and train on them in the same order.

verl offers a place for each: `rollout.agent.agent_loop_config_path` and `trainer.v1.sampler.custom_sampler`. Its own
`full_determinism` gives every request the same seed, so that all responses to a prompt are equal.
"""

from __future__ import annotations

from typing import Any

import transfer_queue
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class SeededAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        seed = (int(kwargs["global_steps"]) * 10_000 + int(kwargs["index"])) * 100 + int(kwargs["session_id"])
        return await super().run({**sampling_params, "seed": seed}, **kwargs)


class OrderedReplayBuffer(ReplayBuffer):
    """Returns responses in the order of prompts, where verl returns them in the order in which they were finished."""

    def sample(self, *arguments: Any, **options: Any) -> Any:
        batch, metrics = super().sample(*arguments, **options)
        held = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["index", "session_id"]
        )
        places = list(zip(map(int, held["index"]), map(int, held["session_id"]), strict=True))
        batch.reorder(sorted(range(len(places)), key=places.__getitem__))
        return batch, metrics
