"""What is staged inside servers of others beside whole weights: adapters alone, and what lies on a GPU."""

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

sys.path.insert(0, str(Path(rl_inference.__file__).parent / "backends" / "plugins"))  # as the servers have it
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
    """A model of two files, one of them in bfloat16; `c` is never adapted."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(random(0, a_weight=(30, 20), c_weight=(7, 20)), directory / "1.safetensors")
    save_file({n: t.bfloat16() for n, t in random(1, b_weight=(600, 700)).items()}, directory / "2.safetensors")
    return directory


def adapter_of(checkpoint: Path, dtype: str = "float32") -> AdapterSpec:
    base = adapters.BaseWeights(checkpoint)
    begins = {name: adapters.prefix_checksum(base[name]) for name in ("a.weight", "b.weight", "c.weight")}
    return AdapterSpec(SCALES, begins, dtype)


def matrices(seed: int) -> Tensors:
    found = random(seed, a_A=(4, 20), a_B=(30, 4), b_A=(4, 700), b_B=(600, 4))
    names = [name for weight in SCALES for name in AdapterSpec.matrices(weight)]
    return dict(zip(names, found.values(), strict=True))


def made(checkpoint: Path, seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    base, sent = adapters.BaseWeights(checkpoint), matrices(seed)
    return {
        name: adapters.merged(base[name], *(sent[each] for each in AdapterSpec.matrices(name)), scale).to(dtype)
        for name, scale in SCALES.items()
    }


def attempt_of(meta: WeightUpdateMeta, checkpoint: Path, area: Path, state: Any = None) -> Any:
    given = {**json.loads(json.dumps(meta.to_json())), "area": str(area)}
    attempt = staging.Attempt(given, state or staging.State())
    attempt.checkpoint = checkpoint
    return attempt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("route", ["shm", "disk"])
def test_attempt_makes_what_the_trainer_would_have_sent_whole(tmp_path, monkeypatch, checkpoint, route, dtype):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    meta, sent = put_weights(tmp_path / "weights", 1, matrices(1).items(), route)
    attempt = attempt_of(replace(meta, adapter=adapter_of(checkpoint, dtype)), checkpoint, tmp_path / "area")

    attempt.run()

    assert attempt.error == ""
    told = attempt.told()
    assert {name: int(text) for name, text in told["checksums"].items()} == sent.checksums  # as they arrived
    expected = made(checkpoint, 1, getattr(torch, dtype))
    assert {name: int(text) for name, text in told["shared"].items()} == {n: checksum(t) for n, t in expected.items()}
    assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in expected.items())
    assert attempt.tensors.keys() == {"a.weight", "b.weight", "c.weight"}
    assert torch.equal(attempt.tensors["c.weight"], adapters.BaseWeights(checkpoint)["c.weight"])


def test_attempt_makes_weights_of_adapters_that_came_by_broadcast(tmp_path, monkeypatch, checkpoint):
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
            expected = made(checkpoint, version)
            assert all(torch.equal(attempt.tensors[name], tensor) for name, tensor in expected.items())
    finally:
        sender.close()


def test_other_ranks_open_what_the_first_has_made_and_see_that_it_is_that(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    meta, _ = put_weights(tmp_path / "weights", 1, matrices(1).items())
    meta = replace(meta, adapter=adapter_of(checkpoint))
    first, second, third = (attempt_of(meta, checkpoint, tmp_path / "area") for _ in range(3))
    first.run()

    second.share(first.told()["shared"])
    third.share({**first.told()["shared"], "a.weight": "1"})

    assert (second.done, second.error) == (True, "")
    assert all(torch.equal(second.tensors[name], tensor) for name, tensor in first.tensors.items())
    assert "'a.weight': this rank finds other weights" in third.error


def test_attempt_refuses_an_adapter_of_another_base_or_that_is_not_whole(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    tensors, adapter = matrices(1), adapter_of(checkpoint)

    def error(sent: Tensors, adapter: AdapterSpec, path: Path = checkpoint) -> str:
        meta, _ = put_weights(tmp_path / "weights", 1, sent.items())
        attempt = attempt_of(replace(meta, adapter=adapter), path, tmp_path / "area")
        attempt.run()
        return str(attempt.error)

    lone = {name: tensor for name, tensor in tensors.items() if name != "b.lora_B.weight"}
    few = {name: begin for name, begin in adapter.base.items() if name != "c.weight"}
    nan = {**tensors, "a.lora_A.weight": torch.full((4, 20), torch.nan)}
    large = {**tensors, "a.lora_A.weight": torch.full((4, 20), 3e38)}
    assert error(tensors, adapter) == ""
    other = replace(adapter, base={**adapter.base, "c.weight": "1"})
    assert "'c.weight' is not the one that the trainer adapts" in error(tensors, other)
    assert "missing is 'b.lora_B.weight'" in error(lone, adapter)
    assert "1 parameters were not sent, the first ['c.weight']" in error(tensors, replace(adapter, base=few))
    assert "nan or infinity in 'a.lora_A.weight'" in error(nan, adapter)
    assert "nan or infinity in 'a.weight'" in error(large, adapter)
    assert "the model has no parameter 'd'" in error({**tensors, "d": torch.ones(1)}, adapter)
    assert "expected the base weight 'a.weight'" in error(tensors, adapter, tmp_path)


class Worker(extension.WeightStage):
    """vLLM's worker, as far as the extension asks it."""

    rank, device = 0, "cpu"

    def __init__(self, checkpoint: Path) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(checkpoint)))
        self.model = torch.nn.Module()
        self.loaded: Tensors = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}


async def test_vllm_loads_the_whole_model_and_keeps_no_area(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    worker, asked = Worker(checkpoint), []

    class Client:
        async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
            asked.append(dict(kwargs or {}))
            return [getattr(worker, method)(**(kwargs or {}))]

    async def app(*_: Any) -> None: ...

    meta, sent = put_weights(tmp_path / "weights", 1, matrices(1).items())
    meta = replace(meta, adapter=adapter_of(checkpoint))
    async with asyncio.timeout(30):
        receipt = await extension.Guard(app)._stage(Client(), {"meta": meta.to_json(), "timeout": 20})
    worker.rl_load(1)

    assert {name: int(text) for name, text in receipt["checksums"].items()} == sent.checksums
    assert not Path(asked[0]["meta"]["area"]).exists()
    assert worker.loaded.keys() == {"a.weight", "b.weight", "c.weight"}
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in made(checkpoint, 1).items())
    assert worker.rl_loaded()["checksums"] == receipt["checksums"]
    assert worker._rl_state().attempt.tensors == {}


def test_sglang_schedulers_load_what_was_made(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv(staging.WEIGHTS_DIR, str(tmp_path))
    monkeypatch.setenv(sglang.STAGE, str(tmp_path))
    meta, _ = put_weights(tmp_path / "weights", 1, matrices(1).items())
    attempt = attempt_of(replace(meta, adapter=adapter_of(checkpoint)), checkpoint, tmp_path / "area")
    attempt.run()
    (tmp_path / "meta.json").write_text(json.dumps({"meta": attempt.meta, "place": attempt.place}))
    found: Tensors = {}
    model = torch.nn.Module()
    model.load_weights = lambda pairs: found.update(pairs)

    sglang.load_staged(model, [])

    assert found.keys() == {"a.weight", "b.weight", "c.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in made(checkpoint, 1).items())


# ---- memory of a GPU


def test_attempt_copies_what_lies_on_the_gpu_and_opens_each_handle_once(tmp_path, monkeypatch):
    """With the host's memory in place of a GPU's."""
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
        memory.zero_()  # the trainer may write the next version
        assert all(torch.equal(attempt.tensors[name], tensor + version) for name, tensor in tensors.items())
        assert set(attempt.place) <= set(str(tmp_path / "area"))
    assert opened == ["a handle"]


def test_gpu_memory_of_a_device_that_is_not_here_is_refused_by_name():
    handle = [1, {"base64": base64.b64encode(b"x").decode()}]
    location = json.dumps({"device": "GPU-of-nobody", "offset": 0, "size": 8, "handle": handle})

    for wrong, told in ((location, "expected the trainer's GPU GPU-of-nobody"), ("{}", "cannot be opened")):
        with pytest.raises(Exception, match=told):
            stored.open_gpu_memory(wrong)


@pytest.mark.parametrize("engine", [VLLMEngine, SGLangEngine])
def test_servers_take_ipc_where_they_run_on_gpus_and_adapters_everywhere(engine):
    config = (VLLMEngineConfig if engine is VLLMEngine else SGLangEngineConfig)()

    assert "ipc" in engine(config, ServeSpec(gpus=1, device="cuda")).capabilities.routes
    on_cpu = engine(config, ServeSpec(device="cpu")).capabilities
    assert on_cpu.routes == ("shm", "disk", "broadcast")
    assert on_cpu.lora
