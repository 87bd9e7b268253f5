"""GPU features of inference servers: weights over CUDA IPC, and sleep.

The tests need a GPU, and vLLM or SGLang in this environment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real_servers import SHARED, Models, make_request

from rl_contracts.config import ClientConfig
from rl_contracts.data import ParamSpec, ServeSpec, WeightReceipt
from rl_contracts.weights import open_sender, verify_receipt
from rl_inference import SGLangEngine, SGLangEngineConfig, VLLMEngine, VLLMEngineConfig
from rl_inference.testing import JobProcess

KEY = "a key of this run"


@pytest.mark.gpu
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_ipc_update_of_a_server_on_the_same_gpu_serves_the_new_weights(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed here: uv sync --package rl-apps --extra {kind}")
    engine, config = (VLLMEngine, VLLMEngineConfig) if kind == "vllm" else (SGLangEngine, SGLangEngineConfig)
    models, settings = Models(tmp_path, tied=True), config(dtype="bfloat16", memory_share=0.3, context_length=1024)
    weights = tmp_path / "weights"
    spec = ServeSpec(model_path=str(models.paths[0]), device="cuda", gpus=1, weights_dir=str(weights))
    sender: Any = open_sender("ipc", "", device="cuda")
    job = engine.server_spec(settings, spec)
    with JobProcess(models.paths[0], tmp_path / "server.log", key=KEY, job=job) as server:
        client = engine(settings, spec, ClientConfig(progress_timeout=120))
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
            error, distance = (
                sum(abs(x - y) for x, y in zip(scores, logprobs, strict=True)) for logprobs in (right, wrong)
            )
            assert 5 * error < distance  # bfloat16 is coarse, so compare with the error to the other weights
        await client.destroy()
    sender.close()


@pytest.mark.gpu
@pytest.mark.timeout(1500)
async def test_vllm_sleep_frees_gpu_memory_and_wake_keeps_the_version(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here: uv sync --package rl-apps --extra vllm")
    models = Models(tmp_path, tied=True)
    settings = VLLMEngineConfig(dtype="bfloat16", memory_share=0.3, context_length=1024)
    spec = ServeSpec(
        model_path=str(models.paths[0]), device="cuda", gpus=1, weights_dir=str(tmp_path / "weights"), shared=True
    )
    job = VLLMEngine.server_spec(settings, spec)
    with JobProcess(models.paths[0], tmp_path / "server.log", key=KEY, job=job) as server:
        client = VLLMEngine(settings, spec, ClientConfig(progress_timeout=120))
        client.initialize([server.address], KEY)
        before = await client.agenerate(make_request(SHARED, 1, temperature=0.0))
        free_awake, total = torch.cuda.mem_get_info()
        await client.sleep()
        free_asleep, _ = torch.cuda.mem_get_info()
        waiting = asyncio.ensure_future(client.agenerate(make_request(SHARED, 1, temperature=0.0)))
        await client.wake()
        after = await asyncio.wait_for(waiting, 120)
        await client.destroy()

    assert free_asleep - free_awake > 0.2 * total  # the KV cache uses most of memory_share=0.3
    assert (after.output_ids, set(after.versions)) == (before.output_ids, {0})


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_embedded_server_sleeps_while_the_trainer_uses_its_gpu(tmp_path: Path) -> None:
    settings = ("allocation='embedded:d1|fsdp:d1'", "cluster.device=cuda", "total_steps=3", "evaluation.examples=0")
    line = [str(Path(sys.executable).parent / "gsm8k-grpo"), f"run_dir={tmp_path / 'run'}", *settings]

    done = subprocess.run(line, capture_output=True, text=True, timeout=500)

    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    freed = [step["sharing/freed_gib"] for step in steps if "sharing/freed_gib" in step]
    assert len(freed) == 3
    assert min(freed) > 0.01  # KV cache of 128 slots with 256 positions of 1 KiB, and cached allocator blocks
