"""Settings of the endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded, choice
from rl_workflows.agents.tool_calls import FORMATS

__all__ = ["EndpointConfig"]


@dataclass
class EndpointConfig(Settings):
    """Address of the endpoint, parsing of completions, and limits of an episode."""

    setting: ClassVar[str] = "endpoint"
    host: str = "127.0.0.1"
    """Address to listen on. Agents in containers or on other nodes need an address that they can reach. With `0.0.0.0`
    the endpoint listens on all addresses of this machine, and agents get the address that other machines can reach."""
    port: int = bounded(0, "0 (a free one) to 65535", lambda port: 0 <= port <= 65535)
    """Port to listen on. 0 selects a free port."""
    url: str = ""
    """URL that agents use (`http://name:port`), if it differs from host and port."""
    tool_calls: str = choice("auto", ("auto", *FORMATS))
    """Format of the model's tool calls: `hermes`, `qwen3_coder`, `glm45`, `mistral`, `llama3`, `gpt_oss`,
    `transformers` (defined by the tokenizer's `response_template`) or `none`. `auto` takes the format in which the chat
    template renders a call, or `none` if that format is unknown. With `none`, requests with tools are rejected."""
    credit: str = choice("episode", ("episode", "turn"))
    """Use of the rewards of single calls (`POST /v1/rewards`), per `episode` or per `turn`. `episode`: they are added
    to the reward of the episode, which all completions share; works with any estimator. `turn`: the return of a
    completion is the sum of its reward and all later rewards; requires an estimator that reads token rewards
    (`algorithm.advantage.kind=return` or `gae`)."""
    discount: float = bounded(1.0, "in (0, 1]", lambda discount: 0 < discount <= 1)
    """Discount factor of rewards per turn. With `credit=episode` a reward is multiplied by it once for each earlier
    turn of its branch. With `credit=turn` the return of the next turn is multiplied by it."""
    sequences_per: str = choice("branch", ("branch", "call"))
    """Unit that becomes one training sequence: `branch` or `call`. `branch`: a conversation from its first prompt to a
    final completion; tokens that branches share are trained in one of them. `call`: a completion and its prompt."""
    session_seconds: float = bounded(1800.0, "seconds above 0", lambda seconds: seconds > 0)
    """Seconds after which an open session is closed and its episode fails."""
    max_calls: int = bounded(256, "at least 1", lambda calls: calls >= 1)
    """Maximum number of completions of a session. Further calls are rejected."""
