"""CUDA IPC to servers of others: needs a GPU and the server in this environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from real_servers import SHARED, Models

from rl_contracts.config import ClientConfig
from rl_contracts.data import ParamSpec, ServeSpec, WeightReceipt
from rl_contracts.weights import open_sender, verify_receipt
from rl_inference import SGLangEngine, SGLangEngineConfig, VLLMEngine, VLLMEngineConfig
from rl_inference.testing import JobProcess

KEY = "a key of this run"


@pytest.mark.gpu
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_ipc_server_of_others_on_the_same_gpu_computes_with_what_was_sent(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed here: uv sync --package rl-apps --extra {kind}")
    engine, config = (VLLMEngine, VLLMEngineConfig) if kind == "vllm" else (SGLangEngine, SGLangEngineConfig)
    models, settings = Models(tmp_path, tied=True), config(dtype="bfloat16", memory_share=0.3, context_length=1024)
    weights = tmp_path / "weights"
    spec = ServeSpec(model_path=str(models.paths[0]), device="cuda", gpus=1, weights_dir=str(weights))
    sender: Any = open_sender("ipc", "", device="cuda")
    job = engine.server_spec(settings, spec)
    with JobProcess(models.paths[0], tmp_path / "server.log", key=KEY, job=job) as server:
        client = engine(settings, spec, ClientConfig(progress_timeout=120, probe_timeout=60))
        client.initialize([server.address], KEY)
        for version in (1, 2):
            tensors = [(name, tensor.cuda().bfloat16()) for name, tensor in models.tensors(version)]
            specs = tuple(ParamSpec(name, tuple(tensor.shape), "bfloat16") for name, tensor in tensors)
            meta = sender.begin(version, specs)
            sent = WeightReceipt("trainer", version, sender.send(iter(tensors)))
            [receipt] = await client.stage_weights(meta)
            verify_receipt(sent, receipt, "ipc")
            await client.commit_weights(version)
            scores = await client.score([*SHARED, 5])

            right, wrong = (models.logprobs(each, [*SHARED, 5]) for each in (version, version + 1))
            off, far = (sum(abs(x - y) for x, y in zip(scores, ours, strict=True)) for ours in (right, wrong))
            assert 5 * off < far  # 16 bits are coarse, and the other weights are far off
        await client.destroy()
    sender.close()
