"""Settings of one server process."""

from __future__ import annotations

from dataclasses import dataclass

from rl_contracts.config import require, require_choice

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class ServerConfig:
    """What `python -m rl_inference.server` takes. Each field is the option of the same name."""

    model: str
    """Hugging Face model directory."""
    port: int
    """TCP port to listen on; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one."""
    dtype: str = "float32"
    """Dtype in which the weights are served."""
    slots: int = 64
    """Sequences generated at the same time."""
    context_length: int = 0
    """Tokens of prompt and answer together at most; 0: what the model says."""
    max_waiting: int = 4096
    """Requests that may wait for a slot; beyond, 503."""
    prefill_tokens: int = 2048
    """Prompt tokens that are read in one pass at most, beside a token of each answer; longer prompts take several."""
    max_request_bytes: int = 64 * 2**20
    """Larger request bodies are refused with 413."""
    threads: int = 0
    """Threads of torch; 0 leaves its choice."""
    weights_dir: str = ""
    """Directory that weight updates must lie in; empty: no updates."""
    version: int = 0
    """Version of the weights in `model`."""
    deterministic: bool = False
    """An answer is the same whatever else is served, to the last bit: one sequence at a time (`slots` is then 1) on
    one thread, and its log-probs come from one forward pass over all of it when it ends, as a trainer makes it. Slow.
    """
    compile: bool = False
    """Compile the forward pass when the server starts: tokens come faster (1.2 to 1.5 times on a CPU with a small
    model), the start takes tens of seconds longer. Needs a C++ compiler on a CPU.
    """
    name: str = ""
    """Name in receipts; empty: `host:port`."""
    stuck_seconds: int = 300
    """Seconds without a turn of the decode thread after which `/health` answers 503."""

    def __post_init__(self) -> None:
        if self.deterministic:
            self.slots = self.threads = 1
        require(
            not (self.compile and self.deterministic),
            "server.compile",
            "false with deterministic=true (a compiled pass rounds differently than a trainer's)",
            self.compile,
        )
        require_choice("server.dtype", self.dtype, DTYPES)
        require(0 <= self.port < 65536, "server.port", "between 0 and 65535", self.port)
        require(self.slots >= 1, "server.slots", "at least 1", self.slots)
        require(self.context_length >= 0, "server.context_length", "0 (the model's) or more", self.context_length)
        require(self.max_waiting >= 0, "server.max_waiting", "0 or more", self.max_waiting)
        require(self.prefill_tokens >= 1, "server.prefill_tokens", "at least 1", self.prefill_tokens)
        require(self.stuck_seconds >= 1, "server.stuck_seconds", "at least 1", self.stuck_seconds)
        require(self.threads >= 0, "server.threads", "0 (torch's choice) or more", self.threads)
