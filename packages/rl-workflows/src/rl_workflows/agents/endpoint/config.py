"""Settings of the endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.config import Settings, bounded, choice
from rl_workflows.agents.tool_calls import FORMATS

__all__ = ["EndpointConfig"]


@dataclass
class EndpointConfig(Settings):
    """Where agents find the endpoint, how answers are read, and what one episode may take of it."""

    setting: ClassVar[str] = "endpoint"
    host: str = "127.0.0.1"
    """Address to listen on. Agents in containers or on other nodes need one that they reach; with `0.0.0.0`, which is
    all of this machine's, they are given the one that others see."""
    port: int = bounded(0, "0 (a free one) to 65535", lambda port: 0 <= port <= 65535)
    """Port to listen on; 0: a free one."""
    url: str = ""
    """How agents reach it (`http://name:port`), where that differs from host and port."""
    tool_calls: str = choice("auto", ("auto", *FORMATS))
    """Format of the model's tool calls: `hermes`, `qwen3_coder`, `glm45`, `mistral`, `llama3`, `gpt_oss`,
    `transformers` (as the tokenizer's `response_template` describes), or `none`; `auto`: the format in which the chat
    template renders a call, and `none` if that is no known format. With `none` requests with tools are refused."""
    credit: str = choice("episode", ("episode", "turn"))
    """What rewards of single calls (`POST /v1/rewards`) become. `episode`: their sum and the outcome are the one reward
    of the episode, which any estimator can use. `turn`: a call's answer has what it and those after it earned; for
    estimators that read rewards of tokens (`algorithm.advantage.kind=return` or `gae`)."""
    discount: float = bounded(1.0, "in (0, 1]", lambda discount: 0 < discount <= 1)
    """Of what is earned, per turn before it (`credit=episode`) or between the two (`credit=turn`)."""
    rows: str = choice("branch", ("branch", "call"))
    """What is trained as a row. `branch`: a conversation from its first prompt to an answer that nothing follows; what
    branches share is trained in one of them. `call`: an answer and its prompt."""
    session_seconds: float = bounded(1800.0, "seconds above 0", lambda seconds: seconds > 0)
    """After which an episode has failed and its session is closed, whatever its agent does."""
    max_sessions: int = bounded(4096, "at least 1", lambda sessions: sessions >= 1)
    """Open sessions."""
    max_calls: int = bounded(256, "at least 1", lambda calls: calls >= 1)
    """Answers of a session; further calls are refused."""
    max_concurrent: int = bounded(32, "at least 1", lambda calls: calls >= 1)
    """Answers of a session that are generated at the same time; further calls are refused."""
    max_tokens: int = bounded(1 << 20, "at least 1", lambda tokens: tokens >= 1)
    """Tokens of all branches of a session, prompts and answers, what they share counted once; further calls are
    refused."""
    max_memory: int = bounded(1 << 27, "at least 1024", lambda size: size >= 1024)
    """Bytes of memory for the messages and tools of a session; further calls are refused. Messages that a call repeats
    and tools equal to the last call's are counted once, except in responses that are stored (`store`)."""
    max_body_bytes: int = bounded(1 << 23, "at least 1024", lambda size: size >= 1024)
    """Of a request."""
