"""Plain data types exchanged between packages and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import GenerationConfig, MicroBatchConfig, OptimizerConfig, Settings, bounded, choice

if TYPE_CHECKING:
    from rl_contracts.images import Image

__all__ = [
    "DEVICES",
    "DTYPES",
    "HEADS",
    "NO_GPU_ROUTES",
    "RENDEZVOUS_ROUTES",
    "ROUTES",
    "STORED_ROUTES",
    "VISION_PARTS",
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
    """Reason why a generation ended."""

    STOP = "stop"
    """Ended by an end token, a stop token or a stop string."""
    LENGTH = "length"
    """Reached `max_new_tokens` or the model's context length."""
    ABORT = "abort"
    """Interrupted. The tokens so far are valid; the client may resubmit the prompt plus these tokens."""


@dataclass(slots=True)
class ModelRequest:
    """Request for one completion."""

    input_ids: list[int]
    """Prompt token ids."""
    generation: GenerationConfig
    """Sampling settings."""
    request_id: str = ""
    """Unique id of the request; if empty, the client creates one."""
    seed: int | None = None
    """Sampling seed; the same seed, prompt and weights give the same tokens. None lets the server choose one."""
    group: str | None = None
    """Id of the group, whose requests share a prompt: a hint for routing and for reuse of the prefix cache."""
    schema: dict[str, Any] | None = None
    """JSON schema of the completion, or None for free text. Requires a server with `Capabilities.schemas`. The schema
    changes the sampling distribution, so these tokens must not be trained on."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, in the order of their placeholders in `input_ids`. Requires a server with
    `Capabilities.images`."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Function that an engine may call with all tokens received so far, on its event loop, to show a completion while
    it is generated. None: no such calls."""


@dataclass(slots=True)
class ModelResponse:
    """One completion. All per-token lists have the length of `output_ids`."""

    input_ids: list[int]
    """Prompt token ids, as sent in the request."""
    output_ids: list[int]
    """Generated token ids, including an end token."""
    logprobs: list[float]
    """Log-prob of each generated token: log_softmax(logits / temperature) over the full vocabulary, with temperature 1
    for greedy decoding."""
    versions: list[int]
    """Weight version that produced each token, as reported by the server."""
    stop_reason: StopReason
    """Reason why the generation ended; never `ABORT` in results of `InferenceEngine.agenerate`."""
    server: str = ""
    """Name of the server that finished the completion."""
    seconds: float = 0.0
    """Seconds from submission to the last token."""
    resubmissions: int = 0
    """Number of times that the client resumed the completion after an interruption or a failure."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Name, shape and served dtype of one parameter."""

    name: str
    """Hugging Face name, as in the model's checkpoint files."""
    shape: tuple[int, ...]
    """Full (unsharded) shape, as in the checkpoint files."""
    dtype: str
    """Name of the torch dtype in which the parameter is served, for example `"float32"` or `"bfloat16"`."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Parameters of one weight version that one trainer rank sends, and the location of their data."""

    location: str
    """Location of the data, by route: path of a shared-memory file, directory of safetensors files, address of the
    broadcast rendezvous, or handle of GPU memory."""
    params: tuple[ParamSpec, ...]
    """Parameters, in the order in which they are sent."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Description of a weight update that contains low-rank adapters instead of the weights that they adapt.

    A server computes each adapted weight as base + scale B A. It reads the base weights from the model directory that
    it was started with. Parameters that are neither sent nor adapted keep their values from that directory.
    """

    scales: dict[str, float]
    """Scale of each adapted weight [out, in], by its name. The update contains A [rank, in] and B [out, rank] under the
    names that `matrices` returns."""
    base: dict[str, str]
    """Checksum of the trainer's copy of each parameter that is not sent, by name
    (`rl_contracts.weights.adapters.prefix_checksum`). A server that was started with other weights rejects the update.
    """
    dtype: str
    """Name of the torch dtype in which the adapted weights are served, rounded once after the float32 computation."""

    @staticmethod
    def matrices(name: str) -> tuple[str, str]:
        """Return the names of A and B of an adapted weight."""
        layer = name.removesuffix(".weight")
        return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


STORED_ROUTES = ("shm", "disk")
"""Weight routes that store a version, so that a server can read it at any time."""
RENDEZVOUS_ROUTES = ("broadcast",)
"""Weight routes on which all senders and receivers must be present at the same time."""
NO_GPU_ROUTES = (*STORED_ROUTES, *RENDEZVOUS_ROUTES)
"""Weight routes that work without a GPU."""
ROUTES = (*NO_GPU_ROUTES, "ipc")
"""All weight routes."""


@dataclass(frozen=True, slots=True)
class WeightUpdateMeta:
    """Location and route of one version of the weights."""

    route: str
    """Weight route, one of `ROUTES`."""
    version: int
    """Version of these weights once they are committed."""
    parts: tuple[WeightPart, ...] = ()
    """Part that each sending rank sends; each parameter is in exactly one part."""
    adapter: AdapterSpec | None = None
    """Adapter description if only adapters are sent, or None if `parts` contain every parameter."""

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """Parameters of all `parts`."""
        return tuple(spec for part in self.parts for spec in part.params)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for `from_json`. Without an adapter it has no key `adapter`."""
        value = asdict(self)
        if self.adapter is None:
            del value["adapter"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightUpdateMeta:
        """Build an update from the result of `to_json`.

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
        spec = value.get("adapter")  # absent in records of earlier commits
        adapter = spec and AdapterSpec(
            {str(name): float(scale) for name, scale in spec["scales"].items()},
            {str(name): str(begin) for name, begin in spec["base"].items()},
            str(spec["dtype"]),
        )
        return cls(str(value["route"]), int(value["version"]), parts, adapter)


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """Checksums of the parameters of a version in one process, computed after the cast to the served dtype."""

    holder: str
    """Name of the server, or `"trainer"`."""
    version: int
    """Version that the checksums belong to."""
    checksums: dict[str, int]
    """Checksum of each parameter (`rl_contracts.weights.checksum`), by name."""


@dataclass(frozen=True, slots=True)
class SaveLoadMeta:
    """Location and kind of the data to save or load."""

    path: str
    """Directory to write to or read from."""
    kind: str = "hf"
    """Kind of data. `hf`: a Hugging Face model directory. `state`: weights, optimizer, schedule and RNG state, for an
    exact resume. `adapter`: only the adapter (LoRA) of an engine that trains one, in the format of peft."""
    tokenizer_path: str | None = None
    """Directory of tokenizer files to copy into the saved directory (`hf` only), or None."""


DTYPES = ("float32", "bfloat16")
"""Dtypes in which a model can compute and in which its weights can be served."""
HEADS = ("lm", "value", "score")
"""Output heads of a model, see `FinetuneSpec.head`."""
VISION_PARTS = ("vision_tower", "projector")
"""Parts of a vision-language model besides its language model: the encoder of images, and the layers that map its
outputs to embeddings of the language model."""
DEVICES = ("auto", "cpu", "cuda")
"""Values of a `device` setting."""


@dataclass(frozen=True, slots=True)
class FinetuneSpec(Settings):
    """Settings of a run that every train engine receives, in addition to the engine's own config."""

    model_path: str
    """Hugging Face model directory or hub id."""
    total_steps: int
    """Total number of optimizer steps of the run, for the learning-rate schedule."""
    seed: int = 0
    """Random seed of the engine."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """Optimizer and its schedule, or None for a model that is not trained (a reference policy)."""
    micro_batch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    """Size limit of a micro-batch."""
    dtype: str = choice("float32", DTYPES)
    """Dtype in which the model computes: `float32`, or `bfloat16` with float32 master weights and reductions."""
    head: str = choice("lm", HEADS)
    """Output head. `lm`: log-probs and entropy of each token. `value`: a critic's estimate before each token. `score`:
    a reward model's score after each token. `value` and `score` load a saved model with a scalar head, or replace the
    head of a causal language model with a scalar head initialized to zero."""
    entropy_grad: bool = False
    """True if the entropy has a gradient, as an entropy bonus in the loss requires; costs backward memory and time."""
    deterministic: bool = False
    """True if results are bitwise reproducible, with the same log-probs as a deterministic embedded server."""
    device: str = choice("auto", DEVICES)
    """Device: `cpu`, `cuda`, or `auto` (CUDA if available)."""
    freeze: tuple[str, ...] = bounded((), f"some of {VISION_PARTS}", lambda parts: {*parts} <= {*VISION_PARTS})
    """Parts of a vision-language model that are not trained, names of `VISION_PARTS`."""


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """Settings of a run that its inference servers and their clients receive, for any inference engine."""

    model_path: str = ""
    """Hugging Face model directory that the servers load; empty for a client of servers that already run."""
    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    """Parallel layout; `data` is the number of servers."""
    weights_dir: str = ""
    """Directory in which weight updates are published, the only one that servers read. Empty: no updates."""
    version: int = 0
    """Version of the weights in `model_path`."""
    cpus: int = 0
    """Cores, and threads of numeric libraries, per server; 0 if not specified."""
    gpus: int = 0
    """GPUs per server."""
    device: str = "auto"
    """Device of the servers: `cpu`, `cuda`, or `auto` (a GPU if available)."""
    shared: bool = False
    """True if a trainer uses the same devices, so that the servers of the run release their memory while it trains."""
    deterministic: bool = False
    """True if completions are bitwise reproducible, independent of other requests, with the same log-probs as a trainer
    that processes the sequence alone."""
    update_timeout: float = 300.0
    """Seconds within which a server must stage a new version of the weights. The commands derive it from
    `publish.timeout`."""
    rejoin_timeout: float = 0.0
    """Seconds for which requests and weight updates wait for a server to return when all servers are lost. 0: fail
    immediately, because no process restarts the servers. The commands derive it from the servers' `ready_timeout`."""
    clients: int = 1
    """Number of clients of the servers. Each probes less often, so that together they probe about as often as one."""
