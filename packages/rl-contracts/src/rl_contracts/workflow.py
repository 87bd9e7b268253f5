"""Contracts of what happens in one episode: rollout workflows, agents, and environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.inference import InferenceEngine

__all__ = ["AgentWorkflow", "Environment", "RolloutWorkflow"]


class RolloutWorkflow(ABC):
    """Turns one data row into the trajectories of one episode.

    The runtime fans a prompt out into a group of episodes, stamps ids and seeds, and decides what a failure means; a
    workflow only says what happens in one of them.
    """

    max_length: int | None = None
    """Tokens of a row at most, prompt and answers together: the runtime ends each generation there. None: the server
    decides."""
    invalid_text: str = "reject"
    """Handling of text of tools and environments that is not UTF-8: `reject` it (the episode fails) or `replace` it."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        """Run one episode.

        Args:
            engine: the episode's own handle: its requests get the episode's seed and group.
            data: the data row.

        Returns:
            one trajectory or several (one a turn, say), each with the reward of the whole episode; or None to reject
            the episode.

        Raises:
            RLError: anything that failed, by boundary. The runtime records it; it is never retried from here.
        """


class AgentWorkflow(ABC):
    """An agent that speaks the OpenAI or Anthropic API, and so any program: what it samples in an episode becomes the
    episode's trajectories (`rl_contracts.endpoint`). It knows nothing of tokens, versions or training. A command makes
    one for all episodes, with the run's reward function as its only argument."""

    @abstractmethod
    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> float | dict[str, float] | None:
        """Run one episode.

        Args:
            data: a copy of the data row.
            base_url: where its calls go; what OpenAI's and Anthropic's clients take under this name.
            api_key: the key of this episode.
            http_client: a client that all episodes share, for SDKs that take one as `http_client`; None: they make
                their own.

        Returns:
            the reward of the episode; or figures by name, of which `reward` is that, and the others reach the metrics.
            Either without the reward where it was said at the endpoint.

        Raises:
            Exception: whatever it raises fails the episode, at the boundary `agent`.
        """

    async def close(self) -> None:  # noqa: B027 - most keep nothing
        """End what it keeps from one episode to the next. Called once, when there are no more."""


class Environment(ABC):
    """The other side of one episode: it says something, the model answers, and it says what came of that. A command
    makes one for each episode, without arguments."""

    @abstractmethod
    async def reset(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin.

        Args:
            data: a copy of the data row.

        Returns:
            the first messages, at least one.

        Raises:
            Exception: whatever it raises fails the episode, at the boundary `environment`; so in the others.
        """

    @abstractmethod
    async def step(self, completion: str) -> tuple[list[dict[str, Any]], float, bool]:
        """Go on.

        Args:
            completion: the text of the model's answer, without its reasoning.

        Returns:
            the next messages, without the answer itself; what the answer earned, a finite number; and whether the
            episode is over, so that the messages are not shown.
        """

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what it holds. Called once, however the episode ended."""
