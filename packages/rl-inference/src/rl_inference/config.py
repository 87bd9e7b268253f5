"""Settings of the client, and of the servers that a launcher starts for it."""

from __future__ import annotations

from dataclasses import dataclass

from rl_contracts.config import require, require_choice


@dataclass
class InferenceConfig:
    """An `EmbeddedEngine` and its servers."""

    model_path: str = ""
    """Hugging Face model directory that the servers load."""
    servers: int = 1
    """Server processes."""
    device: str = "auto"
    """Where they run: `cpu`, `cuda`, or `auto` (a GPU if there is one)."""
    dtype: str = "float32"
    """Dtype in which they serve: `float32`, `bfloat16` or `float16`."""
    slots: int = 64
    """Sequences that one server generates at the same time."""
    context_length: int = 0
    """Tokens of prompt and answer together at most; 0: what the model says."""
    prefill_tokens: int = 2048
    """Prompt tokens that a server reads in one pass at most, beside a token of each answer."""
    max_waiting: int = 4096
    """Requests that may wait at one server; beyond, the client backs off."""
    cpus: int = 1
    """Cores, and threads of torch, per server."""
    weights_dir: str = ""
    """Directory in which weight updates are published; the servers read from nowhere else. Empty: no
    updates."""
    version: int = 0
    """Version of the weights in `model_path`."""
    deterministic: bool = False
    """Every answer is the same, to the last bit, whatever else is served, and its log-probs are those of a trainer that
    runs it alone: one sequence at a time, on one thread, scored as a whole when it ends. `slots` is then 1. Slow."""
    compile: bool = False
    """The servers compile their forward pass when they start: faster tokens (1.2 to 1.5 times on a CPU with a small
    model), a start that takes tens of seconds longer; raise `ready_timeout` for a large model. Not with
    `deterministic`."""
    python: str = ""
    """Interpreter of the servers; empty: this one."""
    ready_timeout: float = 180.0
    """Seconds within which a started server must be ready."""
    max_concurrent: int = 1024
    """Requests that the client has open at the same time, over all servers."""
    progress_timeout: float = 60.0
    """Seconds without a byte (generation) or an answer (control) after which a server counts as lost, and
    after which a request that no server moves on fails."""
    update_timeout: float = 300.0
    """Seconds within which a server must have staged a version."""
    connect_timeout: float = 5.0
    """Seconds for a connection to a server."""
    retry_seconds: float = 0.2
    """First pause before a request tries again; doubles up to 5 s."""
    probe_interval: float = 2.0
    """Seconds between two questions to each server whether it is well; then also one that was evicted may come back.
    0: never asked, and evicted for good."""
    probe_timeout: float = 5.0
    """Seconds for such an answer."""
    rejoin_timeout: float = 0.0
    """Seconds for which requests and updates wait when all servers are lost, until one is back. 0: nobody restarts
    them, so fail at once."""
    affinity_slack: int = 32
    """A group follows its first member's server unless that has so many more open requests than the least
    busy one."""

    def __post_init__(self) -> None:
        require(self.servers >= 1, "inference.servers", "at least 1", self.servers)
        require_choice("inference.dtype", self.dtype, ("float32", "bfloat16", "float16"))
        require(self.slots >= 1, "inference.slots", "at least 1", self.slots)
        require(self.cpus >= 1, "inference.cpus", "at least 1", self.cpus)
        require(self.max_concurrent >= 1, "inference.max_concurrent", "at least 1", self.max_concurrent)
        # servers show that they are alive every half second
        require(self.progress_timeout >= 1, "inference.progress_timeout", "1 s or more", self.progress_timeout)
        require(self.update_timeout > 0, "inference.update_timeout", "seconds above 0", self.update_timeout)
        require(self.connect_timeout > 0, "inference.connect_timeout", "seconds above 0", self.connect_timeout)
        require(self.probe_interval >= 0, "inference.probe_interval", "0 (never) or more", self.probe_interval)
        require(self.probe_timeout > 0, "inference.probe_timeout", "seconds above 0", self.probe_timeout)
        require(
            self.rejoin_timeout == 0 or (self.rejoin_timeout > 0 and self.probe_interval > 0),
            "inference.rejoin_timeout",
            "0 or more seconds, and 0 where inference.probe_interval is 0, for then nobody sees a server come back",
            self.rejoin_timeout,
        )
        require(self.retry_seconds > 0, "inference.retry_seconds", "seconds above 0", self.retry_seconds)
