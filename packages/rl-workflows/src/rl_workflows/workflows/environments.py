"""Episodes in an environment: a program answers the model's completions; base class for games with gymnasium's API."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_contracts.config import require
from rl_contracts.errors import TaskEnvironmentError
from rl_contracts.runtime.aio import run_in_thread
from rl_contracts.runtime.metrics import record
from rl_contracts.workflow import Environment
from rl_workflows.agents.conversation import Conversation
from rl_workflows.rollout.episode import call_user_code, stage
from rl_workflows.workflows.multi_turn import MultiTurnWorkflow

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.config import GenerationConfig
    from rl_contracts.endpoint import Credit
    from rl_contracts.inference import InferenceEngine


class EnvironmentWorkflow(MultiTurnWorkflow):
    """Workflow in which environment and model take turns until one of them ends the episode.

    The environment rewards each step. The run's reward function is not called.

    Args:
        tokenizer, generation, reward, max_length, template_options, discount, form: see `MultiTurnWorkflow`.
        environment: called without arguments at the start of each episode; returns its environment.
        turns: maximum number of completions.
        seconds: time limit of each `reset`, `step` and `close`.
        credit: use of the rewards of steps; see `rl_workflows.agents.conversation.Conversation.trajectories`.
    """

    def __init__(
        self,
        tokenizer: Any,
        generation: GenerationConfig,
        reward: Callable[..., float | Awaitable[float]],
        max_length: int | None = None,
        template_options: Mapping[str, Any] | None = None,
        *,
        environment: Callable[[], Environment],
        turns: int = 16,
        seconds: float = 60.0,
        credit: Credit = "episode",
        discount: float = 1.0,
        form: str = "auto",
    ) -> None:
        super().__init__(
            tokenizer, generation, reward, max_length, template_options, turns=turns, discount=discount, form=form
        )
        require(seconds > 0, "workflow.seconds", "more than 0", seconds)
        self._make_environment, self._seconds, self._credit = environment, seconds, credit

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Run one conversation. Never returns None."""
        conversation, environment = Conversation(self._renderer), self._make_environment()
        try:
            messages = self._with_valid_text(list(await self._call_environment(environment, "reset", dict(data))))
            while len(conversation.turns) < self._turns:
                turn = await self._sample_turn(engine, conversation, messages)
                if turn is None:
                    break
                replies, turn.reward, done = await self._call_environment(environment, "step", turn.message["content"])
                if not math.isfinite(turn.reward):
                    raise TaskEnvironmentError(
                        f"{type(environment).__name__}.step returned reward {turn.reward}; expected a finite number."
                    )
                if done:
                    break
                messages += [turn.message, *self._with_valid_text(list(replies))]
        finally:
            await self._call_environment(environment, "close")
        record("conversation/turns", len(conversation.turns))
        return self._trajectories(conversation, 0.0, data, credit=self._credit, discount=self._discount)

    async def _call_environment(self, environment: Environment, method: str, *args: Any) -> Any:
        with stage("environment"):
            name, work = f"{type(environment).__name__}.{method}", partial(getattr(environment, method), *args)
            return await call_user_code(work, name, self._seconds, TaskEnvironmentError)


class TextGame(Environment):
    """Environment for a game with the methods of `gymnasium`. Subclass it and define `make`.

    `reset(seed=...)` of the game returns (observation, info). `step(action)` returns (observation, reward, terminated,
    truncated, info). Each call runs in a separate thread; a call that hangs blocks only that thread.
    """

    instructions: str = ""
    """Text before the first observation."""

    @abstractmethod
    def make(self, data: dict[str, Any]) -> Any:
        """Return the game of an example. The game is reset with the example's `seed`, if it has one."""

    def action(self, completion: str) -> Any:
        """Return the action that a completion stands for; by default its text without surrounding whitespace."""
        return completion.strip()

    def format_observation(self, observation: Any) -> str:
        """Return an observation as text."""
        return str(observation)

    async def reset(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        self._game = await _call_in_thread(self.make, data)
        observation, _ = await _call_in_thread(self._game.reset, seed=data.get("seed"))
        return [self._message("\n\n".join(filter(None, (self.instructions, self.format_observation(observation)))))]

    async def step(self, completion: str) -> tuple[list[dict[str, Any]], float, bool]:
        observation, reward, terminated, truncated, _ = await _call_in_thread(self._game.step, self.action(completion))
        return [self._message(self.format_observation(observation))], float(reward), bool(terminated or truncated)

    async def close(self) -> None:
        if hasattr(self, "_game"):
            await _call_in_thread(self._game.close)

    @staticmethod
    def _message(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}


async def _call_in_thread(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return await asyncio.wrap_future(run_in_thread(partial(work, *args, **named)))
