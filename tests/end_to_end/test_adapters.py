"""Publish LoRA adapters from a real trainer to each kind of server: log-probs, bytes sent, restarts and faults."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_servers import SHARED, interpreter_of, make_request

from rl_contracts.batch.redistribution import shard_batch
from rl_contracts.config import ClientConfig, OptimizerConfig
from rl_contracts.data import FinetuneSpec, SaveLoadMeta, ServeSpec
from rl_contracts.errors import WeightUpdateError
from rl_contracts.inference import InferenceEngine
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing import make_batch, make_tiny_model
from rl_contracts.weights import broadcast
from rl_engines_fsdp import FSDPEngine, FSDPEngineConfig
from rl_engines_fsdp.config import LoRAConfig
from rl_inference import EmbeddedEngine, SGLangEngine, SGLangEngineConfig, VLLMEngine, VLLMEngineConfig
from rl_inference.backends.vllm.config import INSIDE
from rl_inference.testing import JobProcess, ServerProcess
from rl_trainers import PublishConfig, WeightPublisher

SUPPORT = Path(__file__).parents[1] / "support"
CONTEXT = 1024
KEY = "the run key of this test"
TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]


def make_embedded(model: Path, directory: Path) -> tuple[ServerProcess, InferenceEngine]:
    options = {"weights_dir": directory / "weights", "max_sequences": 16, "context_length": CONTEXT}
    command = (sys.executable, "-m", "rl_inference.embedded_server.fault_injection")
    process = ServerProcess(model, directory / "server.log", key=KEY, options=options, command=command)
    return process, EmbeddedEngine(spec=ServeSpec(rejoin_timeout=60), client=ClientConfig(progress_timeout=60))


def make_backend(kind: str, model: Path, directory: Path) -> tuple[ServerProcess, InferenceEngine]:
    """Return a vLLM or SGLang server that runs `faulty_adapters` instead of this project's plugin, and its client."""
    engine, config = (VLLMEngine, VLLMEngineConfig) if kind == "vllm" else (SGLangEngine, SGLangEngineConfig)
    settings: Any = config(python=str(interpreter_of(kind)), context_length=CONTEXT)
    spec = ServeSpec(model_path=str(model), device="cpu", weights_dir=str(directory / "weights"), cpus=1)
    job = engine.server_spec(settings, spec)
    replacements = {
        "vllm_extension.WeightStage": "faulty_adapters.WeightStage",
        str(INSIDE / "sglang_server.py"): str(SUPPORT / "faulty_adapters.py"),
    }
    env = {**job.env, "PYTHONPATH": f"{INSIDE}:{SUPPORT}", "FAULT_PLUGINS": str(INSIDE)}
    job = replace(job, command=tuple(replacements.get(text, text) for text in job.command), env=env)
    process = JobProcess(model, directory / "server.log", key=KEY, job=job)
    return process, engine(settings, replace(spec, rejoin_timeout=120), ClientConfig(progress_timeout=120))


class Run:
    """Trainer of adapters with one server."""

    def __init__(self, kind: str, directory: Path, loop: LoopThread) -> None:
        self.directory, self.loop, self.fault_file = directory, loop, directory / "fault"
        self.fault_file.write_text("")
        os.environ["FAULT_FILE"] = str(self.fault_file)
        self.model = make_tiny_model(directory / "model", layers=2)
        if kind == "embedded":
            self.server, self.client = make_embedded(self.model, directory)
        else:
            self.server, self.client = make_backend(kind, self.model, directory)
        self.engine = FSDPEngine(FSDPEngineConfig(lora=LoRAConfig(rank=4, alpha=8.0)))
        self.engine.initialize(FinetuneSpec(str(self.model), 1000, optimizer=OptimizerConfig(lr=1e-2), device="cpu"))
        self.batch = shard_batch(make_batch(8, 0, lengths=(16, 24)), self.engine.parallel)

    def make_publisher(self, route: str = "shm", **settings: Any) -> WeightPublisher:
        config = PublishConfig(route=route, canary="always", **settings)
        return WeightPublisher(self.engine, self.client, self.loop, config, str(self.directory / "weights"))

    def update(self, publisher: WeightPublisher) -> int:
        """Take a training step, publish the weights, and return their version."""

        def loss(outputs: Any, packed: Any) -> Any:
            return -(outputs.logprobs * packed["advantages"]).sum(), {}

        self.engine.train_batch(self.batch, loss, lambda rows: rows["loss_mask"].sum())
        self.engine.version += 1
        publisher.publish(self.engine.version)
        return self.engine.version

    def generate(self, seed: int) -> Any:
        return self.loop.run(self.client.agenerate(make_request([*SHARED, 7], seed, temperature=1.0)), 200)

    @torch.no_grad()
    def peft_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probs of all tokens but the first, from the base model with the adapter in peft."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        path = self.directory / f"adapter-{self.engine.version}"
        if not path.exists():
            self.engine.save(SaveLoadMeta(str(path), kind="adapter"))
        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        logits = PeftModel.from_pretrained(base, str(path)).eval()(input_ids=torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits[:-1].float(), -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    def check(self, version: int) -> None:
        """Check that the server records this version and the log-probs of peft for its tokens."""
        for seed in range(2):
            response = self.generate(seed)
            expected = self.peft_logprobs(response.input_ids + response.output_ids)[-len(response.output_ids) :]
            assert response.versions == [version] * len(response.output_ids)
            assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.fixture(
    scope="module",
    params=["embedded", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("vllm", "sglang"))],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with LoopThread("client") as loop:
        run = Run(request.param, tmp_path_factory.mktemp(request.param), loop)
        with run.server as server:
            run.client.initialize([server.address], KEY)
            yield run
            loop.run(run.client.destroy(), 10)
        run.engine.destroy()
        del os.environ["FAULT_FILE"]


@pytest.mark.parametrize("route", ["shm", "disk", "broadcast"])
def test_publish_adapter_sends_only_matrices_and_matches_peft(run, route, monkeypatch, record_property):
    put, sizes = broadcast._Group.put, list[int]()
    monkeypatch.setattr(
        broadcast._Group, "put", lambda self, piece, at: sizes.append(piece.nbytes) or put(self, piece, at)
    )
    publisher = run.make_publisher(route)
    for _ in range(2):
        sizes.clear()
        version = run.update(publisher)
        run.check(version)

    adapter_bytes = sum(4 * torch.Size(spec.shape).numel() for spec in run.engine.adapter_specs())
    full_bytes = sum(4 * torch.Size(spec.shape).numel() for spec in run.engine.param_specs())
    slots = run.directory / "weights" / f"slot-{version % 2}-rank-0"
    stored = {"shm": slots.with_suffix(".weights"), "disk": slots / "model.safetensors"}
    sent = stored[route].stat().st_size if route in stored else sum(sizes)
    publisher.destroy()
    record_property("bytes sent", sent)
    record_property("bytes of all weights", full_bytes)
    assert adapter_bytes <= sent < adapter_bytes + 8192 < full_bytes / 2
    assert publisher.receipt.checksums.keys() == {spec.name for spec in run.engine.adapter_specs()}


def test_publish_full_weights_then_adapter_serves_each_version(run):
    for adapter in ("never", "always"):
        publisher = run.make_publisher(adapter=adapter)
        run.check(run.update(publisher))
        assert (len(publisher.receipt.checksums) == len(run.engine.param_specs())) == (adapter == "never")
    publisher.destroy()


@pytest.mark.nightly
def test_restarted_server_has_base_and_adapter_of_committed_version(run):
    """The server loads them itself, or its client restores them."""
    publisher = run.make_publisher("disk")
    version = run.update(publisher)

    run.server.stop()
    run.server.start().wait_ready(timeout=600)

    run.check(version)
    run.check(run.update(publisher))


def test_publish_adapter_not_applied_raises(run):
    publisher = run.make_publisher()
    run.check(run.update(publisher))

    run.fault_file.write_text("adapter not applied")

    with pytest.raises(WeightUpdateError, match="the adapter is not applied"):
        run.update(publisher)
