"""Contracts of rollout workflows, agents and environments, which define one episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.inference import InferenceEngine

__all__ = ["AgentWorkflow", "Environment", "RolloutWorkflow"]


class RolloutWorkflow(ABC):
    """Workflow that turns one example into the trajectories of one episode.

    The runtime starts a group of episodes per prompt, assigns ids and seeds, and handles failures. A workflow defines
    only a single episode.
    """

    max_length: int | None = None
    """Maximum number of tokens of a sequence, prompt and completions together, at which the runtime ends each
    generation. None leaves the limit to the server."""
    invalid_text: str = "reject"
    """Handling of invalid UTF-8 from tools and environments: `reject` (the episode fails) or `replace`."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory] | None:
        """Run one episode.

        Args:
            engine: the episode's engine handle; its requests get the episode's seed and group.
            data: the example.

        Returns:
            one or several trajectories (for example one per turn), each with the reward of the whole episode; or None
            to reject the episode.

        Raises:
            RLError: the episode failed; the class is the boundary of the failure. The runtime records it and does not
                retry the episode.
        """


class AgentWorkflow(ABC):
    """Agent that calls the model through the OpenAI or Anthropic API.

    Its calls during an episode become the trajectories of the episode (`rl_contracts.endpoint`), so the agent needs no
    code for tokens, versions or training. A command creates one object for all episodes, with the run's reward function
    as the only constructor argument.
    """

    @abstractmethod
    async def run(
        self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any
    ) -> float | dict[str, float] | None:
        """Run one episode.

        Args:
            data: a copy of the example.
            base_url: URL of the endpoint, for the argument `base_url` of the clients of OpenAI and Anthropic.
            api_key: the key of this episode.
            http_client: HTTP client that all episodes share, for SDKs with an argument `http_client`; None lets the SDK
                create one.

        Returns:
            the reward of the episode, or metrics by name with the reward as `reward`. The reward may be missing (or the
            result None) if the agent reported it at the endpoint.

        Raises:
            Exception: any exception fails the episode, at the boundary `agent`.
        """

    async def close(self) -> None:  # noqa: B027 - optional
        """Release resources that are kept between episodes. Called once, after the last episode."""


class Environment(ABC):
    """Environment of one episode: it sends messages, and responds to the model's completions with messages and rewards.

    A command creates one object per episode, without arguments.
    """

    @abstractmethod
    async def reset(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin the episode.

        Args:
            data: a copy of the example.

        Returns:
            the first messages, at least one.

        Raises:
            Exception: any exception fails the episode, at the boundary `environment`; this holds for all methods.
        """

    @abstractmethod
    async def step(self, completion: str) -> tuple[list[dict[str, Any]], float, bool]:
        """Process one completion.

        Args:
            completion: text of the model's completion, without its reasoning.

        Returns:
            the next messages, without the completion; the reward of the completion, a finite number; and whether the
            episode has ended, in which case the model does not get the messages.
        """

    async def close(self) -> None:  # noqa: B027 - optional
        """Release resources. Called once, however the episode ended."""
