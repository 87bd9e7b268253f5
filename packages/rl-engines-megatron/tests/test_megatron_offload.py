"""Offload of moments between steps, and of the whole engine."""

import pytest
import torch

from rl_contracts.conformance.train_engine import OPTIMIZER, policy_loss, trained_tokens
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.errors import ConfigError
from rl_contracts.testing import make_batch, make_tiny_model
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig
from rl_engines_megatron.offload import OffloadedTensors


def moments(engine):
    return [value for _, name, state, _ in engine._stepper._moments() for value in [state[name]]]


def steps(engine, seeds):
    return [engine.train_batch(make_batch(4, seed=seed), policy_loss, trained_tokens) for seed in seeds]


def start(path, offload, device="cpu", dtype="float32"):
    engine = MegatronEngine(MegatronEngineConfig(offload_moments=offload))
    engine.initialize(FinetuneSpec(path, 4, optimizer=OPTIMIZER, device=device, dtype=dtype))
    return engine


def test_offload_moments_on_cpu_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"offload_moments=true.*device=cpu"):
        start(str(make_tiny_model(tmp_path)), offload=True)


@pytest.mark.nightly
def test_optimizers_of_other_libraries_are_not_used(tmp_path, monkeypatch):
    path, results = str(make_tiny_model(tmp_path / "model")), []
    for with_other_libraries in (False, True):
        if with_other_libraries:
            for name, value in (("USING_PYTORCH_OPTIMIZER", False), ("Adam", None), ("SGD", None)):
                monkeypatch.setattr(f"megatron.core.optimizer.{name}", value)
            monkeypatch.setattr("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", True)
        engine, meta = (
            start(path, offload=False),
            SaveLoadMeta(str(tmp_path / f"state-{with_other_libraries}"), "state"),
        )
        first = steps(engine, [0])
        engine.save(meta)
        results.append([first, steps(engine, [1])])
        engine.load(meta)
        assert steps(engine, [1]) == results[-1][1]
        engine.destroy()

    assert results[0] == results[1]


@pytest.mark.nightly
def test_offloaded_moments_give_the_same_steps_and_states(tmp_path, monkeypatch):
    monkeypatch.setattr(MegatronEngineConfig, "check", lambda *_: None)  # the code path also runs on a CPU
    path, results = str(make_tiny_model(tmp_path / "model")), []
    for offload in (False, True):
        engine, meta = start(path, offload), SaveLoadMeta(str(tmp_path / f"state-{offload}"), "state")
        first = steps(engine, [0, 1])
        places = [value.data_ptr() for value in moments(engine)]
        engine.save(meta)
        after_save = steps(engine, [2])
        assert [value.data_ptr() for value in moments(engine)] == places, "the moments must keep their memory"
        hosts = [host.data_ptr() for host in engine._stepper._hosts.values()]
        assert hosts == (places if offload else [])
        engine.load(meta)
        assert steps(engine, [2]) == after_save
        results.append([first, after_save, *(value.clone() for value in moments(engine))])
        engine.destroy()

    assert results[0][:2] == results[1][:2]
    assert len(results[0]) > 10
    for one, other in zip(results[0][2:], results[1][2:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_moments_on_cuda_are_in_host_memory_between_steps(tmp_path):
    path, losses = str(make_tiny_model(tmp_path)), []
    for offload in (False, True):
        engine = start(path, offload, "cuda", "bfloat16")
        losses.append([step["loss"] for step in steps(engine, [0, 1, 2])])
        assert {value.device.type for value in moments(engine)} == {"cpu" if offload else "cuda"}
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
def test_engine_offloaded_between_steps_takes_the_same_steps(tmp_path):
    path, results = str(make_tiny_model(tmp_path)), []
    for with_offload in (False, True):
        engine = start(path, False)
        first = steps(engine, [0, 1])
        if with_offload:
            tensors = list(engine._tensors())
            offloaded = OffloadedTensors(tensors)  # engine.offload() has no effect on a CPU
            assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
            offloaded.restore()
        results.append([first, steps(engine, [2]), [value.clone() for _, value in engine.full_parameters()]])
        engine.destroy()

    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_offload_frees_gpu_memory_and_onload_restores_it(dtype, tmp_path):
    path = str(make_tiny_model(tmp_path))
    engine, other = (start(path, False, "cuda", dtype) for _ in range(2))
    steps(engine, [0, 1])
    steps(other, [0, 1])
    before = torch.cuda.memory_allocated()
    resident_bytes = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in engine._tensors()}.values()
    )

    engine.offload()
    engine.offload()  # a second call has no effect
    freed_bytes = before - torch.cuda.memory_allocated()
    engine.onload()

    assert freed_bytes >= resident_bytes > 0
    losses = [[step["loss"] for step in steps(each, [2, 3])] for each in (engine, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    engine.destroy()
    other.destroy()
