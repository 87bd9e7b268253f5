"""A workflow with one completion per episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import GenerationConfig
from rl_contracts.data import ModelRequest
from rl_contracts.runtime.metrics import record
from rl_contracts.workflow import RolloutWorkflow

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.inference import InferenceEngine


class SingleTurnWorkflow(RolloutWorkflow):
    """Generate one completion and reward it. Examples have `messages` and the field `answer` for the reward.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        generation: sampling settings.
        reward: an asynchronous `rl_contracts.reward.RewardFunction`.
        max_length: context length of the model, which this workflow does not use.
    """

    def __init__(
        self, tokenizer: Any, generation: GenerationConfig, reward: Callable[..., Any], max_length: int
    ) -> None:
        self._tokenizer, self._reward = tokenizer, reward
        self._renderer = ChatRenderer(tokenizer)
        self._generation = replace(generation, stop_token_ids=list(self._renderer.stop_ids))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        from rl_contracts.batch.trajectory import from_response

        ids = self._renderer.render(data["messages"])
        response = await engine.agenerate(ModelRequest(ids, self._generation))
        text = self._tokenizer.decode(response.output_ids, skip_special_tokens=True)
        record("acme/characters", len(text))
        question = data["messages"][-1]["content"]
        reward = await self._reward(question, text, ids, response.output_ids, answer=data["answer"])
        return [from_response(response, reward=reward, temperature=self._generation.temperature)]
