"""Staging in vLLM and SGLang servers: updates with only adapters, and updates from GPU memory."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rl_inference
from rl_contracts.data import AdapterSpec, ParamSpec, ServeSpec, WeightPart, WeightUpdateMeta
from rl_contracts.testing import put_weights
from rl_contracts.weights import adapters, checksum, open_sender, with_rank
from rl_contracts.weights.flat_layout import fill, offsets, views
from rl_contracts.weights.rendezvous import Address
from rl_inference import SGLangEngine, SGLangEngineConfig, VLLMEngine, VLLMEngineConfig

sys.path.insert(0, str(Path(rl_inference.__file__).parent / "backends" / "plugins"))  # the servers' import path
NAMES = ("rl_staging", "rl_stored", "vllm_extension", "sglang_server")
staging, stored, extension, sglang = (importlib.import_module(name) for name in NAMES)
sys.path.pop(0)

SCALES = {"a.weight": 2.0, "b.weight": 0.5}
Tensors = dict[str, torch.Tensor]


def random(seed: int, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name.replace("_", "."): torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Model directory with two files, one of them in bfloat16; `c` is never adapted."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(random(0, a_weight=(30, 20), c_weight=(7, 20)), directory / "1.safetensors")
    save_file({n: t.bfloat16() for n, t in random(1, b_weight=(600, 700)).items()}, directory / "2.safetensors")
    return directory


def adapter_of(checkpoint: Path, dtype: str = "float32") -> AdapterSpec:
    base = adapters.BaseWeights(checkpoint)
    prefixes = {name: adapters.prefix_checksum(base[name]) for name in ("a.weight", "b.weight", "c.weight")}
    return AdapterSpec(SCALES, prefixes, dtype)


def matrices(seed: int) -> Tensors:
    tensors = random(seed, a_A=(4, 20), a_B=(30, 4), b_A=(4, 700), b_B=(600, 4))
    names = [name for weight in SCALES for name in AdapterSpec.matrices(weight)]
    return dict(zip(names, tensors.values(), strict=True))


def merged(checkpoint: Path, seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    base, sent = adapters.BaseWeights(checkpoint), matrices(seed)
    return {
        name: adapters.merged(base[name], *(sent[matrix] for matrix in AdapterSpec.matrices(name)), scale).to(dtype)
        for name, scale in SCALES.items()
    }


def attempt_of(meta: WeightUpdateMeta, checkpoint: Path, area: Path, state: Any = None) -> Any:
    with_area = {**json.loads(json.dumps(meta.to_json())), "area": str(area)}
    attempt = staging.Attempt(with_area, state or staging.State())
    attempt.checkpoint = checkpoint
    return attempt


@pytest.mark.parametrize(("route", "dtype"), [("shm", "bfloat16"), ("disk", "float32")])
def test_attempt_with_adapter_merges_as_the_trainer(tmp_path, monkeypatch, checkpoint, route, dtype):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    meta, sent = put_weights(tmp_path / "weights", 1, matrices(1).items(), route)
    attempt = attempt_of(replace(meta, adapter=adapter_of(checkpoint, dtype)), checkpoint, tmp_path / "area")

    attempt.run()

    assert attempt.error == ""
    status = attempt.status()
    assert {name: int(text) for name, text in status["checksums"].items()} == sent.checksums
    expected = merged(checkpoint, 1, getattr(torch, dtype))
    assert {name: int(text) for name, text in status["shared"].items()} == {n: checksum(t) for n, t in expected.items()}
    assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in expected.items())
    assert attempt.tensors.keys() == {"a.weight", "b.weight", "c.weight"}
    assert torch.equal(attempt.tensors["c.weight"], adapters.BaseWeights(checkpoint)["c.weight"])


def test_attempt_with_broadcast_adapter_merges_weights(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    sender, state = open_sender("broadcast", Address("127.0.0.1", timeout=30.0).location), staging.State()
    try:
        for version in (1, 2):
            tensors = matrices(version)
            specs = tuple(ParamSpec(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items())
            meta = replace(with_rank(sender.begin(version, specs), 1, 2), adapter=adapter_of(checkpoint))
            attempt = attempt_of(meta, checkpoint, tmp_path / "area", state)
            thread = threading.Thread(target=attempt.run)
            thread.start()
            sums = sender.send(iter(tensors.items()))
            thread.join(30)

            assert attempt.error == ""
            assert {name: int(text) for name, text in attempt.sums.items()} == sums
            expected = merged(checkpoint, version)
            assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in expected.items())
    finally:
        sender.close()


def test_share_merged_weights_checks_their_checksums(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    meta, _ = put_weights(tmp_path / "weights", 1, matrices(1).items())
    meta = replace(meta, adapter=adapter_of(checkpoint))
    first, second, third = (attempt_of(meta, checkpoint, tmp_path / "area") for _ in range(3))
    first.run()

    second.share(first.status()["shared"])
    third.share({**first.status()["shared"], "a.weight": "1"})

    assert (second.done, second.error) == (True, "")
    assert all(torch.equal(second.tensors[name], tensor) for name, tensor in first.tensors.items())
    assert "parameter 'a.weight'" in third.error


def test_attempt_with_invalid_adapter_names_the_parameter(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors, adapter = matrices(1), adapter_of(checkpoint)

    def error(sent: Tensors, adapter: AdapterSpec, path: Path = checkpoint) -> str:
        meta, _ = put_weights(tmp_path / "weights", 1, sent.items())
        attempt = attempt_of(replace(meta, adapter=adapter), path, tmp_path / "area")
        attempt.run()
        return str(attempt.error)

    incomplete = {name: tensor for name, tensor in tensors.items() if name != "b.lora_B.weight"}
    missing_base = {name: prefix for name, prefix in adapter.base.items() if name != "c.weight"}
    nan = {**tensors, "a.lora_A.weight": torch.full((4, 20), torch.nan)}
    large = {**tensors, "a.lora_A.weight": torch.full((4, 20), 3e38)}
    assert error(tensors, adapter) == ""
    changed_base = replace(adapter, base={**adapter.base, "c.weight": "1"})
    assert "'c.weight' differs" in error(tensors, changed_base)
    assert "'b.lora_B.weight' was not sent" in error(incomplete, adapter)
    assert "1 parameters were not sent, the first ['c.weight']" in error(tensors, replace(adapter, base=missing_base))
    assert "nan or infinity in 'a.lora_A.weight'" in error(nan, adapter)
    assert "nan or infinity in 'a.weight'" in error(large, adapter)
    assert "the model has no parameter 'd'" in error({**tensors, "d": torch.ones(1)}, adapter)
    assert "expected the base weight 'a.weight'" in error(tensors, adapter, tmp_path)


class Worker(extension.WeightStage):
    """Stand-in for vLLM's worker, with the attributes that the extension uses."""

    rank, device = 0, "cpu"

    def __init__(self, checkpoint: Path) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(checkpoint)))
        self.model = torch.nn.Module()
        self.loaded: Tensors = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}


async def test_vllm_adapter_update_loads_full_model_and_removes_area(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    worker, calls = Worker(checkpoint), []

    class Client:
        async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
            calls.append(dict(kwargs or {}))
            return [getattr(worker, method)(**(kwargs or {}))]

    async def app(*_: Any) -> None: ...

    meta, sent = put_weights(tmp_path / "weights", 1, matrices(1).items())
    meta = replace(meta, adapter=adapter_of(checkpoint))
    async with asyncio.timeout(30):
        receipt = await extension.Guard(app)._stage(Client(), {"meta": meta.to_json(), "timeout": 20})
    worker.rl_load(1)

    assert {name: int(text) for name, text in receipt["checksums"].items()} == sent.checksums
    assert not Path(calls[0]["meta"]["area"]).exists()
    assert worker.loaded.keys() == {"a.weight", "b.weight", "c.weight"}
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in merged(checkpoint, 1).items())
    assert worker.rl_loaded()["checksums"] == receipt["checksums"]
    assert worker._rl_state().attempt.tensors == {}


def test_sglang_adapter_update_loads_full_model(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    monkeypatch.setenv(sglang.STAGE, str(tmp_path))
    meta, _ = put_weights(tmp_path / "weights", 1, matrices(1).items())
    attempt = attempt_of(replace(meta, adapter=adapter_of(checkpoint)), checkpoint, tmp_path / "area")
    attempt.run()
    (tmp_path / "meta.json").write_text(json.dumps({"meta": attempt.meta, "place": attempt.area}))
    loaded: Tensors = {}
    model = torch.nn.Module()
    model.load_weights = lambda pairs: loaded.update(pairs)

    sglang.load_staged(model, [])

    assert loaded.keys() == {"a.weight", "b.weight", "c.weight"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in merged(checkpoint, 1).items())


# ---- memory of a GPU


def test_attempt_over_ipc_copies_weights_and_opens_handle_once(tmp_path, monkeypatch):
    """Uses host memory as a stand-in for GPU memory."""
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors = random(0, a_weight=(30, 20), b_weight=(7,))
    tensors["b.weight"] = tensors["b.weight"].bfloat16()
    specs = tuple(ParamSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())
    memory, opened = torch.zeros(offsets(specs)[1], dtype=torch.uint8), []
    monkeypatch.setattr(stored, "open_gpu_memory", lambda location: opened.append(location) or memory)
    state = staging.State()
    for version in (1, 2):
        sums = fill(views(memory, specs), specs, [(name, tensor + version) for name, tensor in tensors.items()])
        meta = WeightUpdateMeta("ipc", version, (WeightPart("a handle", specs),))
        attempt = attempt_of(meta, Path(), tmp_path / "area", state)

        attempt.run()

        assert attempt.error == ""
        assert {name: int(text) for name, text in attempt.sums.items()} == sums
        memory.zero_()  # simulates the next version of the trainer
        assert all(torch.equal(attempt.tensors[name], tensor + version) for name, tensor in tensors.items())
        assert set(attempt.area) <= set(str(tmp_path / "area"))
    assert opened == ["a handle"]


def test_open_gpu_memory_of_unknown_device_names_it():
    handle = [1, {"base64": base64.b64encode(b"x").decode()}]
    location = json.dumps({"device": "GPU-unknown", "offset": 0, "size": 8, "handle": handle})

    for invalid, match in ((location, "GPU-unknown"), ("{}", "route ipc: .*KeyError")):
        with pytest.raises(Exception, match=match):
            stored.open_gpu_memory(invalid)


def test_capabilities_have_ipc_only_on_gpus_and_lora_always():
    for engine, config in ((VLLMEngine, VLLMEngineConfig()), (SGLangEngine, SGLangEngineConfig())):
        assert "ipc" in engine(config, ServeSpec(gpus=1, device="cuda")).capabilities.routes
        on_cpu = engine(config, ServeSpec(device="cpu")).capabilities
        assert on_cpu.routes == ("shm", "disk", "broadcast")
        assert on_cpu.lora
