"""`rl plan`: rates given, measured and assumed, memory by part, and what is refused."""

from __future__ import annotations

import json
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


def test_page_has_memory_arithmetic_rates_splits_and_every_assumption(
    model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"model.path={model}", "data.batch_size=4", "rollout.group_size=4", "cluster.devices=4")
    assert main(["plan", "gsm8k-grpo", *settings, "--rates", str(rates), "--memory", "1"]) == 0
    out = capsys.readouterr().out
    for part in ("rows of a step", "optimizer", "keys and values", "waiting for a batch", "Splits of 4 devices"):
        assert part in out
    assert f"given ({rates})" in out
    assert "assumed: half" not in out
    assert "publish_seconds                                  5 s                   assumed" in out


def test_json_is_one_line_with_the_same(model: Path, rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (f"model.path={model}", "data.batch_size=4", "allocation=embedded:d2+fsdp:d2")
    assert main(["plan", "gsm8k-grpo", *settings, "--rates", str(rates), "--json"]) == 0
    (printed,) = capsys.readouterr().out.splitlines()
    found = json.loads(printed)
    assert found["arithmetic"]["rows of a step"] == 4 * 8
    assert found["simulated"]["servers"] == 2
    assert found["simulated"]["trained_tokens"] == pytest.approx(32 * (20 + 12), rel=0.1)
    assert {each["servers"] + each["trainer_devices"] for each in found["candidates"]} == {4}
    assert found["assumptions"]["publish_seconds"] == {"value": 5.0, "source": "assumed"}


def test_what_is_not_known_is_asked_for_and_a_data_sheet_stands_for_it(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "gsm8k-grpo", f"model.path={model}", "data.batch_size=4"]
    assert main([*words, "--no-splits"]) == 2
    assert "expected decode_seconds (" in capsys.readouterr().err
    assert main([*words, "--gpu", "H100", "--no-splits"]) == 0
    assert "of an H100's bandwidth" in capsys.readouterr().out
    assert main([*words, "--gpu", "X9", "--no-splits"]) == 2
    assert "--gpu: expected one of H100" in capsys.readouterr().err


def test_splits_whose_trainer_has_no_room_are_left_out(
    model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "gsm8k-grpo", f"model.path={model}", "data.batch_size=4", "--rates", str(rates)]
    assert main([*words, "--memory", "0.02"]) == 0
    out = capsys.readouterr().out
    assert "!! more than there is" in out
    assert "none holds the trainer" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "expected keys"),
        ("speed: 3", "found 'speed'"),
        ("train_tokens_per_s: fast", "expected a number"),
        ("decode: {1: 100}", "two or more"),
    ],
)
def test_a_file_of_rates_that_is_none_is_refused(
    text: str, said: str, model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates.write_text(text)
    assert main(["plan", "gsm8k-grpo", f"model.path={model}", "--rates", str(rates)]) == 2
    assert said in capsys.readouterr().err


def test_a_cluster_that_is_too_small_and_an_app_without_servers_are_refused(
    model: Path, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"model.path={model}", "cluster.devices=2", "allocation=embedded:d2+fsdp:d2", "--rates", str(rates))
    assert main(["plan", "gsm8k-grpo", *more]) == 2
    assert "at least 4, for the allocation" in capsys.readouterr().err
    assert main(["plan", "hh-rlhf-dpo", f"model.path={model}", "--rates", str(rates)]) == 2
    assert "an app that learns from answers" in capsys.readouterr().err


def test_decode_rates_of_two_numbers_of_answers_give_the_line_through_both() -> None:
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
    """The files of a run that went as the simulation of a set-up."""
    found = simulate(setup)
    busy = found.servers_busy * found.step_seconds
    record = {
        "time/step": found.step_seconds,
        "time/rollout_wait": found.wait_seconds,
        "time/train": found.train_seconds,
        "time/publish": found.publish_seconds,
        "tokens": found.trained_tokens,
        "rows": 16.0,
        "length/mean": found.trained_tokens / 16 - setup.rates.prompt_tokens,
    }
    names = {"server/busy_seconds": busy, "server/generated_tokens": found.generated_tokens}
    servers = ({name: step * each for name, each in names.items()} for step in range(steps))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record | each | changed) + "\n" for each in servers))
    (directory / "rollouts").mkdir(exist_ok=True)
    odd = "\u2028\x85"  # ends of lines elsewhere, and not in JSON
    lines = (
        json.dumps({"completion": odd, "token_ids": [1] * length}, ensure_ascii=False) for length in setup.rates.lengths
    )
    (directory / "rollouts" / "step_1-0.jsonl").write_text("\n".join(lines))


def calibrated(directory: Path) -> Rates:
    """What the files of a run say."""
    known, lengths = calibration.measured_rates(directory, trainers=1)
    value = {name: rate.value for name, rate in known.items() if name != "answer_tokens"}
    rates = Rates(**value | {"decode_seconds": 1.0, "episode_seconds": 0.0, "max_running": 16, "lengths": lengths})
    found = calibration.measured_servers(directory, replace(TRUE, rates=rates))
    return replace(rates, **{name: rate.value for name, rate in found.items()})


@pytest.mark.parametrize("lives", [1, 2])  # in each its servers count from 0
def test_a_run_gives_back_the_rates_that_it_had_and_other_runs_are_predicted(tmp_path: Path, lives: int) -> None:
    write_run(tmp_path, TRUE)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(lives * metrics.read_text())
    rates = calibrated(tmp_path)
    assert rates.decode_seconds == pytest.approx(0.02, rel=0.1)
    assert rates.train_tokens_per_s == pytest.approx(2000.0)
    for changes in ({}, {"max_staleness": 0}, {"max_staleness": 3, "batch_size": 8}, {"servers": 2}):
        predicted = simulate(replace(TRUE, rates=rates, **changes))
        assert predicted.step_seconds == pytest.approx(simulate(replace(TRUE, **changes)).step_seconds, rel=0.1), (
            changes
        )


def test_a_run_that_is_too_short_or_whose_servers_say_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the directory of a run"):
        calibration.measured_steps(tmp_path)
    write_run(tmp_path, TRUE, steps=3)
    with pytest.raises(DataError, match="expected at least 4 steps"):
        calibrated(tmp_path)
    write_run(tmp_path, TRUE, **{"server/busy_seconds": None})
    with pytest.raises(DataError, match="its servers do not say them"):
        calibrated(tmp_path)
