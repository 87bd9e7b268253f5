"""Control protocol of the embedded server and of the plugins: health, metrics, pauses and staged weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import InferenceError
from rl_contracts.inference import ServedModel
from rl_inference.client.protocol import Call, Exchange, Health, ServerProtocol, Stats, as_object, ignored


@dataclass(frozen=True)
class ControlPaths:
    """Paths of the control routes; by default as in `rl_inference/backends/plugins/rl_guard.py`."""

    health: str = "/rl/health"
    stats: str = "/rl/stats"
    model: str = "/rl/info"
    pause: str = "/rl/pause"
    resume: str = "/rl/resume"
    stage: str = "/rl/stage"
    commit: str = "/rl/commit"
    receipt: str = "/rl/receipt"


class ControlProtocol(ServerProtocol):
    """Protocol of servers with these control routes. Subclasses add generation and scores."""

    paths: ClassVar[ControlPaths] = ControlPaths()
    life_header: ClassVar[str] = "X-Server-Instance"

    def describe(self) -> Exchange[ServedModel | None]:
        return (yield Call(self.paths.model, served_model))

    def health(self) -> Exchange[Health]:
        return (yield Call(self.paths.health, _health))

    def stats(self) -> Exchange[Stats]:
        return (yield Call(self.paths.stats, _stats))

    def pause(self, mode: str, lease: float) -> Exchange[float | None]:
        return (yield Call(self.paths.pause, _tokens_until_paused, {"mode": mode, "lease": lease}))

    def resume(self) -> Exchange[float | None]:
        return (yield Call(self.paths.resume, _paused_seconds, {}))

    def load(self, meta: WeightUpdateMeta, timeout: float) -> Exchange[WeightReceipt | None]:
        return (yield Call(self.paths.stage, _receipt, {"meta": meta.to_json(), "timeout": timeout}))

    def commit(self, version: int, mode: str) -> Exchange[None]:
        yield Call(self.paths.commit, ignored, {"version": version, "mode": mode})

    def receipt(self) -> Exchange[WeightReceipt]:
        return (yield Call(self.paths.receipt, _receipt))


def served_model(body: bytes) -> ServedModel:
    """Parse a server's description of itself.

    Raises:
        InferenceError: another program replied on the same path (SGLang has a `/model_info` too).
    """
    value = as_object(body)
    if "weights_dir" not in value:
        raise InferenceError("it reports no weights_dir, so it is a different program")
    version = value["weight_version"] if "weight_version" in value else value["version"]
    program = str(value.get("server", ""))
    return ServedModel(str(value["model_path"]), int(version), str(value["weights_dir"]), program)


def _health(body: bytes) -> Health:
    value = as_object(body)
    return Health(int(value["version"]), int(value["open"]))


def _stats(body: bytes) -> Stats:
    value = as_object(body)
    names = ("running", "waiting", "generated_tokens", "busy_seconds")
    return Stats(int(value["version"]), bool(value["paused"]), *(float(value[name]) for name in names))


def _tokens_until_paused(body: bytes) -> float | None:
    value = as_object(body)
    return None if value["paused"] else float(value["generated_tokens"])


def _paused_seconds(body: bytes) -> float:
    return float(as_object(body)["paused_seconds"])


def _receipt(body: bytes) -> WeightReceipt:
    value = as_object(body)
    checksums = {name: int(text) for name, text in value["checksums"].items()}
    return WeightReceipt(str(value["holder"]), int(value["version"]), checksums)
