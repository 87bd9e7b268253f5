"""Plain data that crosses package and process borders."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import GenerationConfig, MicroBatchConfig, OptimizerConfig, Settings, choice

__all__ = [
    "DEVICES",
    "DTYPES",
    "HEADS",
    "NO_GPU_ROUTES",
    "RENDEZVOUS_ROUTES",
    "ROUTES",
    "STORED_ROUTES",
    "AdapterSpec",
    "FinetuneSpec",
    "ModelRequest",
    "ModelResponse",
    "ParamSpec",
    "SaveLoadMeta",
    "ServeSpec",
    "StopReason",
    "WeightPart",
    "WeightReceipt",
    "WeightUpdateMeta",
]


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_new_tokens` or the model's context length was reached."""
    ABORT = "abort"
    """Interrupted; the tokens so far are valid and the client may resubmit prompt plus tokens."""


@dataclass(slots=True)
class ModelRequest:
    """One generation to make."""

    input_ids: list[int]
    """Prompt token ids."""
    generation: GenerationConfig
    """How to sample."""
    request_id: str = ""
    """Unique per request; empty: the client makes one."""
    seed: int | None = None
    """Sampling seed; the same seed, prompt and weights give the same tokens. None: the server draws one."""
    group: str | None = None
    """Requests of one group share their prompt: a hint for routing and prefix sharing."""
    schema: dict[str, Any] | None = None
    """JSON schema that the answer is kept to, by servers that can (`Capabilities.schemas`). Its tokens are then drawn
    from what the schema leaves of the distribution, so nothing is to be learned from them. None: free text."""


@dataclass(slots=True)
class ModelResponse:
    """One generated answer. All per-token lists have the length of `output_ids`."""

    input_ids: list[int]
    """Prompt token ids, as sent."""
    output_ids: list[int]
    """Generated token ids, an end token included."""
    logprobs: list[float]
    """Log-prob of each generated token: log_softmax(logits / temperature) over the full vocabulary (temperature 1 if
    greedy)."""
    versions: list[int]
    """Weight version that produced each token, as stamped by the server."""
    stop_reason: StopReason
    """Why it ended; never `ABORT` when it comes from a client's `agenerate`."""
    server: str = ""
    """Name of the server that finished it."""
    seconds: float = 0.0
    """Time from submission to the last token."""
    resubmissions: int = 0
    """How often the client continued the answer after an interruption or a failure."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Name, shape and served dtype of one parameter."""

    name: str
    """Hugging Face name, as in the files of the model's checkpoint."""
    shape: tuple[int, ...]
    """Full (unsharded) shape, as there."""
    dtype: str
    """Name of the torch dtype in which it is served, for example `"float32"` or `"bfloat16"`."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What one rank of the trainer sends of a version, and where."""

    location: str
    """Path of the shared-memory file or of the directory with the safetensors, address of a broadcast's rendezvous, or
    handle of memory on a GPU."""
    params: tuple[ParamSpec, ...]
    """The parameters, in the order in which they are sent."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What an update says that carries low-rank adapters in place of the weights that they adapt. A server makes each
    of these, base + scale B A, of the weights in the model directory that it was started with; what is neither sent
    nor adapted is as it is there."""

    scales: dict[str, float]
    """Of each adapted weight [out, in] by its name. A [rank, in] and B [out, rank] are among the update's parameters,
    under the names of `matrices`."""
    base: dict[str, str]
    """Of each parameter that is not sent, by name: `rl_contracts.weights.adapters.prefix_checksum` of what the trainer
    has. A server that was started with other weights refuses the update."""
    dtype: str
    """Name of the torch dtype in which the adapted weights are served: computed in float32, they are rounded once."""

    @staticmethod
    def matrices(name: str) -> tuple[str, str]:
        """Names of A and B of the weight of that name."""
        layer = name.removesuffix(".weight")
        return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


STORED_ROUTES = ("shm", "disk")
"""Routes of weights on which a version lies somewhere for whoever comes to read it."""
RENDEZVOUS_ROUTES = ("broadcast",)
"""Routes on which senders and receivers must be there at the same time."""
NO_GPU_ROUTES = (*STORED_ROUTES, *RENDEZVOUS_ROUTES)
"""Routes that need no GPU."""
ROUTES = (*NO_GPU_ROUTES, "ipc")
"""Every way for weights to travel."""


@dataclass(frozen=True, slots=True)
class WeightUpdateMeta:
    """Where one version of the weights is and how it travels."""

    route: str
    """One of `ROUTES`."""
    version: int
    """The version that these weights become once committed."""
    parts: tuple[WeightPart, ...] = ()
    """One for each rank that sends; each parameter is in one of them."""
    adapter: AdapterSpec | None = None
    """How servers make weights of adapters, where these are sent alone. None: the parts have every parameter."""

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """The parameters of all parts."""
        return tuple(spec for part in self.parts for spec in part.params)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse. Whole weights are told as before there were adapters."""
        value = asdict(self)
        if self.adapter is None:
            del value["adapter"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightUpdateMeta:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or has the wrong type.
        """
        parts = tuple(
            WeightPart(
                str(part["location"]),
                tuple(ParamSpec(p["name"], tuple(int(n) for n in p["shape"]), str(p["dtype"])) for p in part["params"]),
            )
            for part in value["parts"]
        )
        given = value.get("adapter")  # which records of earlier commits do not have
        adapter = given and AdapterSpec(
            {str(name): float(scale) for name, scale in given["scales"].items()},
            {str(name): str(begin) for name, begin in given["base"].items()},
            str(given["dtype"]),
        )
        return cls(str(value["route"]), int(value["version"]), parts, adapter)


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """What one side holds of a version: a checksum per parameter, taken after the cast to the served dtype."""

    holder: str
    """Name of the server, or `"trainer"`."""
    version: int
    """The version that the checksums belong to."""
    checksums: dict[str, int]
    """`rl_contracts.weights.checksum` of each parameter by name."""


@dataclass(frozen=True, slots=True)
class SaveLoadMeta:
    """Where and what to save or load."""

    path: str
    """A directory."""
    kind: str = "hf"
    """`hf`: a Hugging Face model directory; `state`: weights, optimizer, schedule and RNG, to continue exactly;
    `adapter`: the adapter of an engine that trains one (LoRA) by itself, as peft reads it."""
    tokenizer_path: str | None = None
    """Directory whose tokenizer files are copied beside the weights (`hf` only)."""


DTYPES = ("float32", "bfloat16")
"""Types in which a model may compute, and in which its weights may be served."""
HEADS = ("lm", "value", "score")
"""What a model may say of each token, see `FinetuneSpec.head`."""
DEVICES = ("auto", "cpu", "cuda")
"""Kinds of device that may be asked for."""


@dataclass(frozen=True, slots=True)
class FinetuneSpec(Settings):
    """What follows from the run and is the same for every train engine; the engine's own settings are its config."""

    model_path: str
    """Hugging Face model directory or hub id."""
    total_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    seed: int = 0
    """Seed of everything random inside the engine."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """The optimizer and its schedule; None for a model that is never trained (a reference policy)."""
    micro_batch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    """How much is run at once."""
    dtype: str = choice("float32", DTYPES)
    """Type in which the model computes: `float32`, or `bfloat16` with float32 master weights and reductions."""
    head: str = choice("lm", HEADS)
    """What the model says of each token: `lm` log-probs and entropies of its vocabulary; `value` a critic's estimate,
    made before the token is seen; `score` a reward model's, made after it. The last two load a causal language model,
    whose head they replace by a new one that is zero, or a saved model of their own."""
    entropy_grad: bool = False
    """Let the entropy carry gradient, for a loss that has an entropy bonus; costs memory and time in backward."""
    deterministic: bool = False
    """The same rows give the same bits, and the log-probs of an embedded server that is deterministic too."""
    device: str = choice("auto", DEVICES)
    """`cpu`, `cuda`, or `auto`: CUDA where there is one."""


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """What follows from a run for its inference servers, whichever engine serves."""

    model_path: str = ""
    """Hugging Face model directory that the servers load; empty for a client of servers that are already there."""
    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    """How the model is served; `data` is the number of servers."""
    weights_dir: str = ""
    """Directory in which weight updates are published; the servers read from nowhere else. Empty: no updates."""
    version: int = 0
    """Version of the weights in `model_path`."""
    cpus: int = 0
    """Cores, and threads of numeric libraries, per server; 0: not said."""
    gpus: int = 0
    """Devices per server."""
    device: str = "auto"
    """Where they run: `cpu`, `cuda`, or `auto` (a GPU if there is one)."""
    shared: bool = False
    """A trainer has the same devices, and servers that the run starts are to give their memory back while it learns."""
    deterministic: bool = False
    """Every answer is the same, to the last bit, whatever else is served, and its log-probs are those of a trainer that
    runs it alone."""
