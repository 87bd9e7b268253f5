"""What agents talk to: the contract between the side that serves their calls and the side that runs episodes."""

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
"""What a row of a conversation is: a `branch`, from its first prompt to an answer that nothing follows, with each
sampled token trained in one of them; or a `call`, its prompt and its answer."""

type Credit = Literal["episode", "turn"]
"""What rewards of single turns become: a part of the `episode`'s one reward, or returns of the `turn`s."""


@dataclass(slots=True)
class EpisodeReport:
    """What an agent said of its episode while it ran, besides what it returns."""

    reward: float | None = None
    """Outcome of the episode."""
    turns: float | None = None
    """Sum of what single answers earned; None where it was said of none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name; they reach the metrics."""


class RolloutSession(ABC):
    """One episode's calls. They are made over HTTP with the session's key, and only while it is open."""

    @property
    @abstractmethod
    def base_url(self) -> str:
        """What OpenAI's clients take as `base_url`; those of Anthropic take the same."""

    @property
    @abstractmethod
    def api_key(self) -> str:
        """Of this session alone. Whoever has it may make calls until the session is closed, and nothing else."""

    @property
    @abstractmethod
    def failure(self) -> RLError | None:
        """The first error of an engine in one of its calls. An agent that saw it fail cannot be blamed for its end."""

    @property
    def report(self) -> EpisodeReport:
        """What its agent said of it; by default an endpoint is told nothing."""
        return EpisodeReport()

    @abstractmethod
    def trajectories(self, reward: float, per: SequencesPer = "branch") -> list[Trajectory]:
        """What was sampled in all calls that were answered, in the order of their answers. Of a closed session alone.

        Args:
            reward: outcome of the episode, which all rows get. What single answers earned comes to it as the endpoint
                is set up.
            per: what a row is.

        Returns:
            rows of exactly the tokens that were sampled, with their log-probs and versions; none without an answer.

        Raises:
            AgentError: the session is still open.
        """

    @abstractmethod
    async def close(self) -> None:
        """End its unfinished calls and refuse further ones. A second call does nothing."""


class RolloutEndpoint(ABC):
    """An HTTP server of a run, which agents speak to as they would to OpenAI's or Anthropic's."""

    @abstractmethod
    async def open(
        self, engine: InferenceEngine, generation: GenerationConfig, max_length: int | None = None
    ) -> RolloutSession:
        """Open a session; called on the event loop on which `engine` is used.

        Args:
            engine: the episode's own handle, on which its calls generate.
            generation: how answers are sampled, whatever an agent asks for, so that training knows the distribution. An
                agent may ask for less tokens and for further stop strings.
            max_length: tokens of a prompt and its answer at most; None: what the engine takes. A call whose prompt
                leaves no room is refused as OpenAI's servers do (`context_length_exceeded`).

        Raises:
            AgentError: there are as many sessions as may be.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Close all sessions and stop serving. Safe to call twice."""
