"""Every benchmark runs and prints one JSON object as its last line."""

import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def run(name: str, *options: str, timeout: float = 560) -> dict[str, Any]:
    """Run a benchmark and return its JSON line."""
    command = [sys.executable, str(BENCHMARKS / name), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    results: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return results


def benchmark_files() -> list[str]:
    """Return the names of all files with an option `--quick`."""
    files = [path for path in sorted(BENCHMARKS.glob("*.py")) if not path.name.startswith("test_")]
    return [path.name for path in files if '"--quick"' in path.read_text()]


@pytest.fixture
def keep_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which some benchmarks set."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("keep_signals")
@pytest.mark.parametrize("program", benchmark_files())
def test_benchmark_quick_last_line_is_a_json_object(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # in this process, which has already imported torch and transformers
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [program, "--quick"])
    with suppress(SystemExit) if program == "recovery.py" else nullcontext():  # which calls `sys.exit`
        runpy.run_path(str(BENCHMARKS / program), run_name="__main__")
    assert isinstance(json.loads(capsys.readouterr().out.splitlines()[-1]), dict)


@pytest.mark.timeout(3000)  # eight minutes
def test_grpo_step_with_trl_reports_ratios_and_completions_to_goal() -> None:
    results = run("grpo_step.py", "--peer", "trl", "--repeats", "1", "--seeds", "1", timeout=2900)
    for case in ("uniform", "long_tail"):
        assert min(results[case][side]["completions_per_s"] for side in ("rl", "trl")) > 0
        assert results[case]["ratio"]["tokens_per_s"] > 0
    assert results["uniform"]["rl"]["mean_tokens"] == 64
    assert all(results["samples"]["completions"][side][0] for side in ("rl", "trl"))


def test_embedded_server_reports_ratio_to_transformers_per_case() -> None:
    results = run("embedded_server.py", "--rounds", "1")
    assert results["logprob_error"] < 2e-5
    for case in ("uniform", "long_tail"):
        assert results[case]["tokens_per_s"]["embedded"] > 0
        assert results[case]["ratio"]["transformers"] > 0
    assert results["long_tail"]["requests"] == 512


def test_rollout_endpoint_is_within_its_limits(record_property: Callable[[str, object], None]) -> None:
    results = run("rollout_endpoint.py")
    for agents in ("1", "16", "128"):
        result = results["agents"][agents]
        record_property(f"CPU ms, added latency in ms, {agents} agents", f"{result['cpu_ms']}, {result['added_ms']}")
        assert result["calls"] >= 32
    record_property("prefilled tokens over tokens of the conversation", results["prefill"]["ratio"])
    assert results["prefill"]["prefilled_tokens"] >= 0.5 * results["prefill"]["final_tokens"]
    assert results["exceeded_limits"] == []


def test_embedded_server_scores_mixed_load_retains_required_rates(
    record_property: Callable[[str, object], None],
) -> None:
    results = run("embedded_server_scores.py")
    for load in ("1_generating", "32_generating"):
        retained = results[load]["retained"]
        record_property(
            f"retained tokens/s, {load}", f"generation {retained['generation']}, scoring {retained['scoring']}"
        )
        assert retained["generation"] >= 1 / 3
        assert retained["scoring"] >= 1 / 4


def test_rollout_runtime_few_episodes_reports_rate_memory_baselines() -> None:
    results = run("rollout_runtime.py", "--outstanding", "800", "--batches", "4", "--repeats", "1")
    assert results["runtime"]["episodes"] == 4 * results["outstanding"] / 10
    assert results["runtime"]["outstanding_min"] <= results["outstanding"]
    assert results["runtime"]["episodes_per_s"] > 0
    assert 0 < results["runtime"]["peak_gib"] < 2
    assert min(results[baseline]["tasks_per_s"] for baseline in ("tasks", "engine")) > 0


def test_staleness_sweep_measured_and_simulated_keep_max_staleness(tmp_path: Path) -> None:
    results = run("staleness_sweep.py", "--steps", "12", "--svg", str(tmp_path / "plot.svg"))
    for kind in ("measured", "simulated"):
        assert [int(bound) for bound in results[kind]] == [0, 1, 2, 4, 8]
        for bound, row in results[kind].items():
            assert row["staleness_max"] <= int(bound)
            assert row["groups_per_s"] > 0


def test_areal_speedups_planned_are_within_15_percent_of_published(
    record_property: Callable[[str, object], None],
) -> None:
    results = run("areal_speedups.py")
    for model, published in (("1.5B", 2.77), ("7B", 2.27)):
        record_property(f"speed-up, {model} (published {published})", results[model]["speed_up"])
        assert results[model]["published"] == published
        assert results[model]["within_tolerance"]


def test_async_overlap_few_steps_reports_seconds_of_all_runs() -> None:
    results = run("async_overlap.py", "--steps", "4", "--warmup", "1", "--repeats", "1")
    assert set(results["seconds_per_step"]) == {"asynchronous", "synchronous", "training", "generation"}
    assert all(seconds > 0 for seconds in results["seconds_per_step"].values())


def test_weight_publish_small_model_reports_ratio_per_route() -> None:
    results = run("weight_publish.py", "--mebibytes", "8", "--warmup", "1", "--rounds", "2")
    for route in ("shm", "broadcast", "disk"):
        assert results[route]["ratio"] > 0
        assert results[route]["paused_s"] > 0
    assert 7 < results["shm"]["mebibytes"] < 9


def test_servers_client_cpu_time_per_completion_is_at_most_2_ms(
    record_property: Callable[[str, object], None],
) -> None:
    results = run("servers.py", "--quick", "--client")["client"]
    for server in ("vllm", "sglang"):
        assert results[server]["stream_interval"] == 8
        record_property(
            f"client, CPU ms per completion, {server}",
            f"{results[server]['client']} (minimal {results[server]['minimal']})",
        )
        assert 0 < results[server]["minimal"] < results[server]["client"] <= results[server]["required"] == 2


@pytest.mark.timeout(1800)  # starts each server whose environment exists
def test_servers_quick_reports_metrics_or_reason_for_skipping() -> None:
    every = [option for server in ("embedded", "vllm", "sglang") for option in ("--server", server)]
    results = run("servers.py", "--quick", *every, timeout=1700)
    assert "skipped" not in results["embedded"]
    for server in ("embedded", "vllm", "sglang"):
        result = results[server]
        if "skipped" in result:
            assert "infra/servers/build.py" in result["skipped"]
            continue
        assert min(result["tokens_per_s"].values()) > 0
        assert result["max_lost_tokens"] > 0
        for route in ("shm", "disk", "broadcast"):
            assert min(result["publish"][route].values()) > 0


@pytest.mark.timeout(1500)  # minutes of an idle machine for each case
@pytest.mark.parametrize(
    "case",
    ["server-kill", "server-stop", "trainer-kill", "node-ray", "node-slurm-spare", "node-slurm-requeue", "cost"],
)
def test_recovery_is_within_its_limits(case: str, record_property: Callable[[str, object], None]) -> None:
    results = run("recovery.py", "--case", case, timeout=1400)
    if case == "cost":
        for size in ("demo", "larger"):
            record_property(
                f"cost of a recovery checkpoint every 20 steps, {size}", results["recovery_checkpoints"][size]["cost"]
            )
            assert results["recovery_checkpoints"][size]["cost"] <= 0.02
            assert min(peer["blocked_s"] for peer in results["recovery_checkpoints"][size]["peers"].values()) > 0
        return
    result = results["recovery"][case]
    if "skipped" in result:
        pytest.skip(result["skipped"])
    record_property(f"seconds to the next step, {case}", {"timeouts": result["timeouts"], **result["seconds"]})
    assert (result["ok"], result["seconds"]["max"] <= result["limit"]) == (True, True)


def test_train_step_small_with_peers_reports_rates_and_fill() -> None:
    sizes = {"rows": 24, "longest": 96, "max-tokens": 128, "vocabulary": 512, "hidden": 64, "repeats": 1}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    step = run("train_step.py", "--part", "step", "--engine", "megatron", *options)["step"]
    assert min(step[side]["tokens_per_s"] for side in ("fsdp", "transformers", "megatron")) > 0
    assert step["ratio"] > 0
    assert 0.5 < step["fill"] <= 1


@pytest.mark.timeout(1500)  # minutes
def test_train_step_loss_reports_memory_and_time_of_both_sides() -> None:
    loss = run("train_step.py", "--part", "loss", "--repeats", "1", timeout=1400)["loss"]
    assert loss["memory_ratio"] > 0
    assert loss["time_ratio"] > 0
    assert loss["materialized"]["peak_gib"] > loss["logits_gib"]
