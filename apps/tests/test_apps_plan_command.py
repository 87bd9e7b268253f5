"""`rl plan`: given, measured and assumed rates, memory by component, and rejected inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_apps.cli.main import main
from rl_apps.plan import calibration
from rl_apps.plan.rates import Rates, fit_decode, sampled
from rl_apps.plan.simulation import Setup, simulate
from rl_contracts.errors import ConfigError, DataError
from rl_contracts.testing import make_tiny_model

GIVEN = """
decode: {1: 140, 64: 4200}
prefill_tokens_per_s: 20000
train_tokens_per_s: 4000
prompt_tokens: 20
answer_tokens: 12
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    file = tmp_path / "rates.yaml"
    file.write_text(GIVEN)
    return file


def test_page_shows_memory_counts_rates_splits_and_assumptions(
    model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"model.path={model}", "data.batch_size=4", "rollout.group_size=4", "cluster.devices=4")
    assert main(["plan", "gsm8k-grpo", *settings, "--rates", str(rates), "--memory", "1"]) == 0
    out = capsys.readouterr().out
    for part in ("sequences per step", "optimizer", "keys and values", "waiting for a batch", "Splits of 4 devices"):
        assert part in out
    assert f"given ({rates})" in out
    assert "assumed: half" not in out
    assert "over shm) + 0.1 s" in out


def test_json_is_one_line_with_the_plan(model: Path, rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (f"model.path={model}", "data.batch_size=4", "allocation=embedded:d2+fsdp:d2")
    assert main(["plan", "gsm8k-grpo", *settings, "--rates", str(rates), "--json"]) == 0
    (printed,) = capsys.readouterr().out.splitlines()
    plan = json.loads(printed)
    assert plan["arithmetic"]["sequences per step"] == 4 * 8
    assert plan["simulated"]["servers"] == 2
    assert plan["simulated"]["trained_tokens"] == pytest.approx(32 * (20 + 12), rel=0.1)
    assert {each["servers"] + each["trainer_devices"] for each in plan["candidates"]} == {4}
    assert plan["assumptions"]["other_seconds"] == {"value": 1.0, "source": "assumed"}


def test_plan_without_rates_or_model_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gsm8k-grpo"]) == 2
    assert "`rl plan gsm8k-grpo --gpu H100`" in capsys.readouterr().err
    assert main(["plan", "grpo", "--gpu", "H100"]) == 2
    assert "model.path=" in capsys.readouterr().err
    assert main(["plan", "grpo", "--gpu", "X9"]) == 2
    assert "--gpu: expected one of H100" in capsys.readouterr().err


def test_plan_missing_argument_answers_without_torch() -> None:
    program = (
        "import sys; from rl_apps.cli.main import main; code = main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    for arguments in (["gsm8k-grpo"], ["grpo", "--gpu", "H100"]):
        assert subprocess.run([sys.executable, "-c", program, "plan", *arguments], check=False).returncode == 0


def test_settings_may_follow_options(model: Path, rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", "--rates", str(rates), f"model.path={model}", "--json", "data.batch_size=2"]) == 0
    assert json.loads(capsys.readouterr().out)["arithmetic"]["prompts per step"] == 2
    assert main(["plan", "grpo", "--rates", str(rates), "--jsn"]) == 2
    assert "unknown arguments: --jsn" in capsys.readouterr().err


def test_file_with_partial_rates_names_the_missing_ones(
    model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates.write_text("publish_seconds: 1")
    assert main(["plan", "gsm8k-grpo", f"model.path={model}", "--rates", str(rates)]) == 2
    assert "decode_seconds, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected keys"),
        ("speed: 3", "found 'speed'"),
        ("train_tokens_per_s: fast", "expected a number"),
    ],
)
def test_invalid_rates_file_exits_with_an_error(
    text: str, message: str, model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates.write_text(text)
    assert main(["plan", "gsm8k-grpo", f"model.path={model}", "--rates", str(rates)]) == 2
    assert message in capsys.readouterr().err


def test_small_cluster_and_app_without_servers_exit_with_an_error(
    model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"model.path={model}", "cluster.devices=2", "allocation=embedded:d2+fsdp:d2", "--rates", str(rates))
    assert main(["plan", "gsm8k-grpo", *more]) == 2
    assert "cluster.nodes * cluster.devices: expected at least 4" in capsys.readouterr().err
    assert main(["plan", "hh-rlhf-dpo", f"model.path={model}", "--rates", str(rates)]) == 2
    assert "found 'hh-rlhf-dpo'" in capsys.readouterr().err


def test_fit_decode_two_rates_gives_the_line_through_both() -> None:
    first, more = fit_decode({1: 1 / 0.012, 64: 64 / 0.138}, "decode")
    assert (first, more) == (pytest.approx(0.01), pytest.approx(0.002))
    with pytest.raises(ConfigError, match="two or more"):
        fit_decode({1: 0, 2: 3}, "decode")


TRUE = Setup(
    Rates(0.02, 0.0, 0.0, 1e12, 16, 0.5, 2000.0, 0.3, 0.2, 10, 0.0, sampled([*range(4, 40)])),
    batch_size=4,
    group_size=4,
    max_staleness=1,
    servers=1,
    replicas=1,
    trainer_devices=1,
)


def write_run(directory: Path, setup: Setup, steps: int = 6, **changed: Any) -> None:
    """Write the files of a run that matches the simulation of a set-up."""
    outcome = simulate(setup)
    busy = outcome.servers_busy * outcome.step_seconds
    record = {
        "time/step": outcome.step_seconds,
        "time/rollout_wait": outcome.wait_seconds,
        "time/train": outcome.train_seconds,
        "time/publish": outcome.publish_seconds,
        "tokens": outcome.trained_tokens,
        "sequences": 16.0,
        "length/mean": outcome.trained_tokens / 16 - setup.rates.prompt_tokens,
    }
    names = {"server/busy_seconds": busy, "server/generated_tokens": outcome.generated_tokens}
    servers = ({name: step * each for name, each in names.items()} for step in range(steps))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record | each | changed) + "\n" for each in servers))
    (directory / "rollouts").mkdir(exist_ok=True)
    odd = "\u2028\x85"  # line separators for str.splitlines, but not in JSON lines
    lines = (
        json.dumps({"completion": odd, "token_ids": [1] * length}, ensure_ascii=False) for length in setup.rates.lengths
    )
    (directory / "rollouts" / "step_1-0.jsonl").write_text("\n".join(lines))


def calibrated(directory: Path) -> Rates:
    """Return the rates measured from the files of a run."""
    measured, lengths = calibration.measured_rates(directory, trainers=1)
    value = {name: rate.value for name, rate in measured.items() if name != "answer_tokens"}
    rates = Rates(**value | {"decode_seconds": 1.0, "episode_seconds": 0.0, "max_running": 16, "lengths": lengths})
    server_rates = calibration.measured_servers(directory, replace(TRUE, rates=rates))
    return replace(rates, **{name: rate.value for name, rate in server_rates.items()})


@pytest.mark.parametrize("starts", [1, 2])  # server counters restart at 0 after each resume
def test_measured_rates_match_the_run_and_predict_other_runs(tmp_path: Path, starts: int) -> None:
    write_run(tmp_path, TRUE)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(starts * metrics.read_text())
    rates = calibrated(tmp_path)
    assert rates.decode_seconds == pytest.approx(0.02, rel=0.1)
    assert rates.train_tokens_per_s == pytest.approx(2000.0)
    for changes in ({}, {"max_staleness": 0}, {"max_staleness": 3, "batch_size": 8}, {"servers": 2}):
        predicted = simulate(replace(TRUE, rates=rates, **changes))
        assert predicted.step_seconds == pytest.approx(simulate(replace(TRUE, **changes)).step_seconds, rel=0.1), (
            changes
        )


def test_run_that_is_short_or_lacks_server_counters_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        calibration.measured_steps(tmp_path)
    write_run(tmp_path, TRUE, steps=3)
    with pytest.raises(DataError, match="expected at least 4 steps"):
        calibrated(tmp_path)
    write_run(tmp_path, TRUE, **{"server/busy_seconds": None})
    with pytest.raises(DataError, match="server/busy_seconds"):
        calibrated(tmp_path)
