"""Workflow for agents: programs that call the OpenAI or Anthropic API."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_contracts.errors import AgentError
from rl_contracts.runtime.metrics import record
from rl_contracts.workflow import AgentWorkflow, RolloutWorkflow
from rl_workflows.rollout.episode import call_user_code, stage

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.config import GenerationConfig
    from rl_contracts.endpoint import EpisodeReport, RolloutEndpoint, SequencesPer
    from rl_contracts.inference import InferenceEngine


class AgentEpisodeWorkflow(RolloutWorkflow):
    """Workflow that runs an agent against an endpoint and trains on the completions of its calls.

    Args:
        agent: the agent, shared by all episodes.
        endpoint: HTTP server that receives the agent's calls.
        generation: sampling settings of the agent's completions.
        max_length: maximum number of tokens of a prompt and its completion. None leaves the limit to the server.
        per: unit of a conversation that becomes one sequence.
        deadline: time limit of an episode, in seconds.
        http_client: HTTP client that is passed to the agent.
    """

    def __init__(
        self,
        agent: AgentWorkflow,
        endpoint: RolloutEndpoint,
        generation: GenerationConfig,
        max_length: int | None = None,
        per: SequencesPer = "branch",
        deadline: float = 1800.0,
        http_client: Any = None,
    ) -> None:
        self._agent, self._endpoint, self._http_client = agent, endpoint, http_client
        self.generation, self.max_length = generation, max_length
        self._per, self._deadline = per, deadline

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Run the agent once. Never returns None."""
        session = await self._endpoint.open(engine, self.generation, self.max_length)
        try:
            with stage("agent"):
                result = await self._run(data, session.base_url, session.api_key)
        except AgentError:
            if session.failure is not None:  # the cause: the agent received it as HTTP status 500
                raise session.failure from None
            raise
        finally:
            await session.close()
        trajectories = session.trajectories(self._reward(result, session.report), self._per)
        if not trajectories:
            raise AgentError(
                f"{self._name} ended without a completion to train on; expected a call whose completion is not "
                "constrained by a JSON schema."
            )
        record("agent/rows", len(trajectories))
        return trajectories

    @property
    def _name(self) -> str:
        return f"{type(self._agent).__name__}.run"

    async def _run(self, data: dict[str, Any], base_url: str, api_key: str) -> Any:
        work = partial(self._agent.run, data, base_url=base_url, api_key=api_key, http_client=self._http_client)
        return await call_user_code(work, self._name, self._deadline, AgentError)

    def _reward(self, result: Any, reported: EpisodeReport) -> float:
        """Return the reward that the agent returned or reported during its run, and record its other metrics."""
        metrics = dict(result) if isinstance(result, dict) else {} if result is None else {"reward": result}
        rewards = [value for value in (metrics.pop("reward", None), reported.reward) if value is not None]
        for name, value in [*metrics.items(), *(("reward", reward) for reward in rewards)]:
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise AgentError(f"{self._name} returned {name}={value!r}; expected a finite number.")
        if len(rewards) > 1:
            raise AgentError(
                f"{self._name} returned the reward {rewards[0]} and reported the reward {rewards[1]} at /v1/rewards; "
                "expected only one of them."
            )
        if not rewards and reported.turns is None:
            raise AgentError(
                f"{self._name} returned the metrics {sorted(metrics)} and reported no reward; expected `reward` among "
                "them, or a report at /v1/rewards."
            )
        for name, value in {**reported.metrics, **metrics}.items():
            record(f"agent/{name}", value)
        if reported.turns is not None:
            record("agent/turn_rewards", reported.turns)
        return float(rewards[0]) if rewards else 0.0
