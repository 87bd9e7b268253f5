"""Expected memory of a trainer and time of a step, before the first step."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rl_apps.plan.memory import read_sizes
from rl_apps.preflight.expectation import PROCESS_BYTES, _seconds_on_cpu, _step_tokens, _trainer_bytes, expectation
from rl_apps.run.app import App, Run
from rl_apps.settings.device_layout import layout_of
from rl_apps.settings.dtypes import resolve_dtypes
from rl_contracts import registry
from rl_contracts.testing import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


def _run(model: Path, directory: Path, *settings: str) -> tuple[App, Run]:
    app = registry.load("rl.apps", "gsm8k-grpo")
    config = app.config([f"model.path={model}", "data.batch_size=4", *settings])
    resolve_dtypes(config, has_bfloat16=False)
    return app, Run(config, layout_of(config.allocation, app.servers), directory, "cpu")


def test_expectation_has_estimated_or_usual_step_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, run = _run(model, tmp_path, "rollout.generation.max_new_tokens=16")
    monkeypatch.setattr("rl_apps.preflight.expectation._measure_flops", lambda sizes, cores: 1e6)
    new = expectation(app, run, 1)
    monkeypatch.setattr("rl_apps.preflight.expectation._measure_flops", lambda sizes, cores: 1e12)
    short = expectation(app, run, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 12.5}\n')

    resumed = expectation(app, run, 1)

    beginning = r"expected with completions of 16 tokens: about "
    assert re.fullmatch(beginning + r"\d+ s per step, trainer memory about \d\.\d GiB per rank", new)
    assert re.fullmatch(beginning + r"12 s per step, trainer memory about \d\.\d GiB per rank", resumed)
    on_gpu = expectation(app, replace(run, directory=tmp_path / "new", device="cuda"), 1)
    assert " s per step" not in on_gpu + short


def test_trainer_memory_grows_with_completions_up_to_micro_batch(model: Path, tmp_path: Path) -> None:
    def memory(length: int, *settings: str) -> float:
        app, run = _run(model, tmp_path, f"rollout.generation.max_new_tokens={length}", *settings)
        return _trainer_bytes(run, read_sizes(run, app.form, app.lessons), _step_tokens(app, run)) - PROCESS_BYTES

    full = memory(1024)
    assert memory(16) < memory(64) < full
    assert memory(1024, "data.batch_size=8") == full
    assert memory(1024, "actor.micro_batch.max_tokens=2048") < full


def test_step_seconds_grow_with_group_size_and_shrink_with_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_apps.preflight.expectation._measure_flops", lambda sizes, cores: 1e9)

    def seconds(*settings: str) -> float:
        app, run = _run(model, tmp_path, *settings)
        return _seconds_on_cpu(run, read_sizes(run, app.form, app.lessons), _step_tokens(app, run), 1)

    one = seconds("rollout.group_size=4")
    assert seconds("rollout.group_size=8") == pytest.approx(2 * one)
    assert seconds("rollout.group_size=4", "allocation=embedded:d2+fsdp:d2") == pytest.approx(one / 2)


def test_expectation_without_estimate_of_engine_is_empty(model: Path, tmp_path: Path) -> None:
    engine = "rl_contracts.testing.reference_engine:ReferenceTrainEngine"
    assert expectation(*_run(model, tmp_path, f"allocation=embedded:d1+{engine}:d1"), 1) == ""
