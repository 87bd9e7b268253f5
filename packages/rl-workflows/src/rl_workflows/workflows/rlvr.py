"""Workflow for reinforcement learning from verifiable rewards (RLVR): one prompt, one completion, one reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_contracts.chat.image_messages import has_images, images_in, with_read_images
from rl_contracts.chat.rendering import ChatRenderer, tokenizer_of
from rl_contracts.data import ModelRequest
from rl_contracts.errors import ConfigError, DataError, RewardError, RLError
from rl_contracts.reward import RESERVED_KEYS, CompositeReward, is_valid_reward, takes_final_text
from rl_contracts.workflow import RolloutWorkflow
from rl_workflows.agents.message_parsing import MessageParser
from rl_workflows.rollout.episode import group_cache, stage

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.config import GenerationConfig
    from rl_contracts.images import Image
    from rl_contracts.inference import InferenceEngine


class RLVRWorkflow(RolloutWorkflow):
    """Workflow that renders the messages of an example, samples one completion, and computes its reward.

    An example has `messages` (the conversation before the completion, see `rl_contracts.chat.image_messages` for
    images), optionally `tools` to list in the prompt, and arguments of the reward function, such as `answer`.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template, or the processor of a vision-language model.
        generation: sampling settings; the stop ids of the template are added.
        reward: an `rl_contracts.reward.RewardFunction`, plain or async. A plain function runs on the event loop of all
            episodes and must be fast. Wrap a slow one in `rl_contracts.reward_worker.AsyncRewardWrapper`.
        max_length: maximum number of tokens of prompt and completion together, at which the runtime ends generation.
            None leaves the limit to the server.
        template_options: additional variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        generation: GenerationConfig,
        reward: Callable[..., float | Awaitable[float]],
        max_length: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(reward):
            raise ConfigError(f"workflow.reward: expected a function, found {type(reward).__name__}.")
        self._tokenizer, self._reward, self.max_length = tokenizer_of(tokenizer), reward, max_length
        self._reads_final_text = takes_final_text(reward)
        self._renderer = ChatRenderer(tokenizer, template_options)
        self._parser = MessageParser(self._tokenizer, stop_ids=self._renderer.stop_ids)
        stops = dict.fromkeys([*generation.stop_token_ids, *self._renderer.stop_ids])
        self.generation = replace(generation, stop_token_ids=list(stops))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Sample one completion. Never returns None."""
        from rl_contracts.batch.trajectory import from_response

        prompt, prompt_ids, images = await self._prompt(data)
        request = ModelRequest(input_ids=prompt_ids, generation=self.generation, images=images)
        response = await engine.agenerate(request)
        self._renderer.reject_placeholders(response.output_ids)
        completion = self._tokenizer.decode(response.output_ids, skip_special_tokens=True)
        with stage("reward"):
            reward = await self._score(prompt, completion, prompt_ids, response.output_ids, data)
        info = {"prompt": prompt, "completion": completion, "answer": data.get("answer")}
        trajectory = from_response(response, reward=reward, temperature=self.generation.temperature, info=info)
        trajectory.images = images
        return [trajectory]

    async def _prompt(self, data: dict[str, Any]) -> tuple[str, list[int], tuple[Image, ...]]:
        """Return text, ids and images of the prompt, which is rendered once per group."""
        cache = group_cache()
        if "rlvr_prompt" not in cache:
            if not data.get("messages"):
                raise DataError(
                    f"example: expected `messages`, a list of chat messages, found the keys {sorted(data)}."
                )
            messages, tools = data["messages"], data.get("tools")
            self._require_rendered(messages, tools, data)
            render = partial(self._render, messages, tools)
            # in a thread, because the processor needs milliseconds per image
            prompt = asyncio.ensure_future(asyncio.to_thread(render)) if has_images(messages) else render()
            cache["rlvr_prompt"] = prompt
        prompt = cache["rlvr_prompt"]
        text, ids, images = await asyncio.shield(prompt) if isinstance(prompt, asyncio.Future) else prompt
        return text, ids, images

    def _render(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> tuple[str, list[int], tuple[Image, ...]]:
        messages = with_read_images(messages)
        ids = self._renderer.render(messages, tools)
        return self._renderer.decode(ids), ids, images_in(messages)

    def _require_rendered(self, messages: Sequence[Any], tools: Sequence[Any] | None, data: dict[str, Any]) -> None:
        """Raise if the chat template omits a part of the prompt. Checked once per group."""
        cache = group_cache()
        if "is_rendered" not in cache:
            try:
                self._renderer.require_rendered(messages, tools, add_generation_prompt=True)
            except DataError as error:
                raise DataError(f"example {data.get('prompt_id')}: {error}") from error
            cache["is_rendered"] = True

    async def _score(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        data: dict[str, Any],
    ) -> float:
        reward_args = {name: value for name, value in data.items() if name not in RESERVED_KEYS}
        if self._reads_final_text:
            reward_args["final_text"] = self._parser.final_text(completion_ids, self._renderer.generation_prompt)
        try:
            value = self._reward(prompt, completion, prompt_ids, completion_ids, **reward_args)
            if inspect.isawaitable(value):
                value = await value
        except RLError:
            raise
        except Exception as error:
            raise RewardError(f"the reward function raised {type(error).__name__}: {error}") from error
        if not isinstance(value, int | float) or not is_valid_reward(value):
            raise RewardError(f"the reward function returned {value!r:.200}; expected a finite number in float32.")
        return value if isinstance(value, CompositeReward) else float(value)


VisionRLVRWorkflow = RLVRWorkflow
"""The same workflow under the name that other libraries use for prompts with images."""
