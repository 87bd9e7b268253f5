"""Log-prob gap gate between a trainer and a server process: an injected fault stops the run with its cause."""

import importlib.util
import os
import sys
from contextlib import ExitStack

import pytest
from training_run import Run

from rl_contracts.config import ClientConfig
from rl_contracts.errors import WeightUpdateError
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.testing.models import make_tiny_model
from rl_engines_fsdp.config import LoRAConfig
from rl_inference import EmbeddedEngine
from rl_inference.testing import ServerProcess


def _run(directory, model, addresses, loop, **options):
    client = EmbeddedEngine(client=ClientConfig(progress_timeout=20))
    client.initialize(addresses)
    return Run(directory, model, client, loop, **options)


@pytest.fixture(autouse=True)
def stop_at_first_failure(monkeypatch):
    monkeypatch.setattr("rl_trainers.weight_sync.gap.alarm.PATIENCE", 1)


@pytest.fixture
def regenerate_after_two_steps(monkeypatch):
    monkeypatch.setattr("rl_trainers.weight_sync.gap.recorded.REGENERATE_STEPS", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, hidden=32)


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("")
    os.environ["FAULT_FILE"] = str(path)
    yield path
    del os.environ["FAULT_FILE"]


COMMAND = (sys.executable, "-m", "rl_inference.embedded_server.fault_injection")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, model, fault_file):
    directory = tmp_path_factory.mktemp("run")
    options = {"weights_dir": directory / "weights", "max_sequences": 16}
    with (
        ServerProcess(model, directory / "server.log", options=options, command=COMMAND) as server,
        LoopThread("client") as loop,
    ):
        run = _run(directory / "weights", model, [server.address], loop)
        yield run
        run.close()


@pytest.fixture
def run(whole_run, fault_file):
    """A run without faults, after two steps without an alarm."""
    fault_file.write_text("")
    whole_run.reset()
    for _ in range(2):
        stats = whole_run.step()
        assert stats["gap/mean_abs"] < 1e-4
        assert stats["gap/fresh_mean_abs"] < 1e-4
        assert stats["gap/empty"] == 0
    yield whole_run
    fault_file.write_text("")


def _alarm(function, *arguments):
    """Return the message of the error that a function raises."""
    with pytest.raises(WeightUpdateError) as error:
        function(*arguments)
    return str(error.value)


def _steps(run, count):
    for _ in range(count):
        run.step()


pytestmark = pytest.mark.slow


@pytest.mark.guarantee(
    "If a server misses an update, the run stops and reports missing weights as the cause.", area="gap"
)
def test_gap_weights_not_sent_reports_cause(run, fault_file):
    fault_file.write_text("weights not sent")
    message = _alarm(_steps, run, 1)
    assert "Likely cause: weights not received" in message
    assert "its scores match the previous version" in message


@pytest.mark.parametrize(
    ("fault", "steps", "message_parts"),
    [
        ("one tensor", 1, ("Likely cause: one tensor wrong", "model.norm.weight")),
        ("stale copy", 1, ("Likely cause: stale fused copy",)),
        ("truncated", 3, ("Likely cause: truncated sampling",)),
    ],
)
def test_gap_fault_after_receipt_or_in_sampling_reports_cause(run, fault_file, fault, steps, message_parts):
    fault_file.write_text(fault)
    message = _alarm(_steps, run, steps)
    assert all(part in message for part in message_parts)


@pytest.mark.guarantee(
    "If a server samples at a wrong temperature, the run stops and reports the temperature.", area="gap"
)
def test_gap_wrong_temperature_reports_cause_and_temperature(run, fault_file):
    fault_file.write_text("temperature")
    message = _alarm(_steps, run, 3)
    assert "Likely cause: temperature" in message
    assert "at temperature 0.7 instead" in message


@pytest.mark.guarantee(
    "If a server reuses an outdated prefix cache, the run stops and reports the cache as the cause.", area="gap"
)
def test_gap_stale_prefix_cache_reports_cause(run, fault_file):
    fault_file.write_text("stale prefix")
    message = _alarm(_steps, run, 4)
    assert "Likely cause: stale prefix cache" in message
    assert "completions of new prompts are correct" in message


def _train_on_completions_of_previous_step(run, clean, steps=2):
    """Train on batches that are one step old, as an asynchronous run does, and return the metrics of the last step."""
    batch, stats = run.sample_batch(), run.step(clean)
    for _ in range(steps):
        next_batch = run.sample_batch()
        stats = run.step(batch)
        batch = next_batch
    return stats


@pytest.mark.usefixtures("regenerate_after_two_steps")
def test_gap_stale_batches_are_measured_on_regenerated_completions(run):
    clean = run.sample_batch()
    assert _train_on_completions_of_previous_step(run, clean, 1)["gap/fresh_mean_abs"] is None
    stats = _train_on_completions_of_previous_step(run, run.sample_batch(), 2)
    assert stats["gap/fresh_mean_abs"] < 1e-4
    assert stats["gap/empty"] == 0


@pytest.mark.usefixtures("regenerate_after_two_steps")
@pytest.mark.parametrize(("fault", "cause"), [("temperature", "temperature"), ("stale prefix", "stale prefix cache")])
def test_gap_fault_with_stale_batches_reports_cause(run, fault_file, fault, cause):
    clean = run.sample_batch()
    fault_file.write_text(fault)
    assert f"Likely cause: {cause}" in _alarm(_train_on_completions_of_previous_step, run, clean, 4)


def test_gap_version_stamped_late_reports_cause(run, fault_file):
    clean = run.sample_batch()
    fault_file.write_text("stamped late")
    message = _alarm(_train_on_completions_of_previous_step, run, clean)
    assert "Likely cause: version stamped late" in message


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("steps", [0, pytest.param(3, marks=pytest.mark.nightly)])
def test_gap_adapter_not_applied_by_server_reports_cause(tmp_path, model, fault_file, steps):
    fault_file.write_text("")
    options = {"weights_dir": tmp_path / "weights", "max_sequences": 16}
    with (
        ServerProcess(model, tmp_path / "server.log", options=options, command=COMMAND) as server,
        LoopThread("client") as loop,
    ):
        run = _run(tmp_path / "weights", model, [server.address], loop, lora=LoRAConfig(rank=4))
        for _ in range(steps):
            assert run.step()["gap/mean_abs"] < 1e-4
        fault_file.write_text("adapter not applied")
        assert "Likely cause: adapter not applied" in _alarm(_steps, run, 4)
        assert run.publisher.receipt.checksums.keys() == {spec.name for spec in run.engine.adapter_specs()}
        run.close()


@pytest.mark.nightly
def test_gap_server_one_version_behind_is_identified_at_lr_1e_6(tmp_path, model, fault_file):
    """The fault is injected into the second of four servers."""
    options = {"weights_dir": tmp_path, "max_sequences": 4}
    fault_file.write_text("")
    with LoopThread("client") as loop, ExitStack() as stack:
        servers = [
            ServerProcess(
                model, tmp_path / f"server-{number}.log", options=options, command=COMMAND if number == 1 else None
            )
            for number in range(4)
        ]
        for server in servers:
            stack.callback(server.start().stop)
        addresses = [server.wait_ready().address for server in servers]
        run = _run(tmp_path, model, addresses, loop, lr=1e-6)
        for _ in range(4):
            assert run.step()["gap/mean_abs"] < 1e-4
        fault_file.write_text("one behind")
        message = _alarm(_steps, run, 12)
        run.close()
    assert f"the scores of {addresses[1]}, closer to the log-probs before the update" in message
    assert "Likely cause: weights not received" in message


def test_gap_rounding_to_16_bits_warns_without_stopping_run(tmp_path, model, caplog):
    options = {"weights_dir": tmp_path / "weights", "dtype": "bfloat16", "max_sequences": 16}
    with ServerProcess(model, tmp_path / "server.log", options=options) as server, LoopThread("client") as loop:
        run = _run(tmp_path / "weights", model, [server.address], loop, serve_dtype="bfloat16")
        assert max(run.step()["gap/mean_abs"] for _ in range(3)) > 0.005, "expected a gap above the warning threshold"
        run.close()
    assert "Likely cause: dtype" in caplog.text
