"""Contract of the HTTP endpoint that agents call, between its server and the workflow that runs episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.config import GenerationConfig
    from rl_contracts.errors import RLError
    from rl_contracts.inference import InferenceEngine

__all__ = ["Credit", "EpisodeReport", "RolloutEndpoint", "RolloutSession", "SequencesPer"]

type SequencesPer = Literal["branch", "call"]
"""Unit of a conversation that becomes one sequence. `branch`: from the first prompt to a final completion; each sampled
token is trained in exactly one branch. `call`: one prompt and its completion."""

type Credit = Literal["episode", "turn"]
"""Use of turn rewards: added to the single reward of the `episode`, or turned into a return for each `turn`."""


@dataclass(slots=True)
class EpisodeReport:
    """Rewards and metrics that an agent reported during its episode, in addition to its return value."""

    reward: float | None = None
    """Reward of the episode, or None if the agent reported none."""
    turns: float | None = None
    """Sum of the rewards of single completions, or None if the agent reported none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by name, recorded with the metrics of the run."""


class RolloutSession(ABC):
    """Calls of one episode. The agent makes them over HTTP with the session's key while the session is open."""

    @property
    @abstractmethod
    def base_url(self) -> str:
        """URL to pass as `base_url` to the clients of OpenAI and Anthropic."""

    @property
    @abstractmethod
    def api_key(self) -> str:
        """Key of this session only. It permits calls until the session is closed, and nothing else."""

    @property
    @abstractmethod
    def failure(self) -> RLError | None:
        """First engine error in a call of this session, or None. It takes precedence over an error of the agent."""

    @property
    def report(self) -> EpisodeReport:
        """Rewards and metrics that the agent reported; empty by default."""
        return EpisodeReport()

    @abstractmethod
    def trajectories(self, reward: float, per: SequencesPer = "branch") -> list[Trajectory]:
        """Return the sequences sampled in all completed calls of a closed session, in the order of completion.

        Args:
            reward: reward of the episode, which every sequence gets. The settings of the endpoint define how rewards of
                single completions are added.
            per: unit that becomes one sequence.

        Returns:
            sequences with exactly the sampled tokens, their log-probs and versions; empty without a completion.

        Raises:
            AgentError: the session is still open.
        """

    @abstractmethod
    async def close(self) -> None:
        """Cancel unfinished calls and reject further ones. Calling it again has no effect."""


class RolloutEndpoint(ABC):
    """HTTP server of a run that offers the APIs of OpenAI and Anthropic to agents."""

    @abstractmethod
    async def open(
        self, engine: InferenceEngine, generation: GenerationConfig, max_length: int | None = None
    ) -> RolloutSession:
        """Open a session. Call this on the event loop on which `engine` is used.

        Args:
            engine: the episode's engine handle, which generates the completions of its calls.
            generation: sampling settings. They override the sampling settings in an agent's calls, so that training
                knows the sampling distribution. An agent may request fewer tokens and add stop strings.
            max_length: maximum number of tokens of a prompt and its completion; None for the engine's limit. A call
                whose prompt leaves no room is rejected with OpenAI's error code `context_length_exceeded`.

        Raises:
            AgentError: the maximum number of sessions is open.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Close all sessions and stop the server. Safe to call twice."""
