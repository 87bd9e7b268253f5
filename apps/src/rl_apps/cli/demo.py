"""`rl demo`: inject a fault into a short run, and show which check detects it, with the check's message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl_contracts.errors import ConfigError, RLError
from rl_contracts.runtime.json_lines import json_lines
from rl_monitor.status import status_of

HEALTHY_STEPS = 2
"""Steps before the fault."""
SECONDS = 600.0
"""Time limit of a whole demonstration on a busy machine. The first demonstration also builds the model."""
POLL_SECONDS = 0.2
"""Seconds between two polls of the run."""
RUN = (
    *("model.path=embedded", "recipe=embedded", "total_steps=20", "data.batch_size=8", "rollout.group_size=4"),
    "evaluation.examples=0",
    *("actor.optimizer.warmup_steps=0", "actor.optimizer.lr=1e-3"),  # large steps, whose effect shows immediately
)
FAULTY_SERVER = ("allocation=rl_apps.cli.demo_faults:FaultyEngine:d1+fsdp:d1", "rollout.max_staleness=0")
"""Settings of the faults inside a server. Without staleness, each step compares the sampled completions directly."""


@dataclass(frozen=True, slots=True)
class Demo:
    """A fault, and the check that must detect it."""

    what: str
    """Description of the fault."""
    says: str
    """Regular expression that matches a line of the run's output once the check has detected the fault."""
    settings: Sequence[str] = ()
    """Settings of the run, in addition to `RUN`."""
    fault: str = ""
    """Name of the fault, written to FAULT_FILE; see `rl_apps.cli.demo_faults` and
    `rl_inference.embedded_server.fault_injection`."""
    sent: signal.Signals | None = None
    """Signal to send to the server process instead of writing FAULT_FILE."""
    goes_on: bool = False
    """True if the run must recover and finish; otherwise it must end with an error."""


DEMOS = {
    "broken-sync": Demo(
        "the server acknowledges new weights but keeps serving the old ones",
        "weights not received",
        FAULTY_SERVER,
        "weights not sent",
    ),
    "wrong-tensor": Demo(
        "one tensor of the server changes after its receipt matched",
        "one tensor wrong",
        FAULTY_SERVER,
        "one tensor",
    ),
    "wrong-temperature": Demo(
        "the server samples at temperature 0.7 and ignores the requested temperature",
        "Likely cause: temperature",
        FAULTY_SERVER,
        "temperature",
    ),
    "stale-cache": Demo(
        "the server reuses keys and values of cached prompts that the old weights computed",
        "its prefix cache",
        [*FAULTY_SERVER, "publish.canary=always"],
        "stale prefix",
    ),
    "stuck-reward": Demo(
        "the reward function never returns",
        "took longer than its limit",
        ["rollout.reward=rl_apps.cli.demo_faults:reward", "rollout.reward_timeout=2"],
        "stuck reward",
    ),
    "dead-producer": Demo(
        "the thread that generates completions dies during an episode",
        "the rollout thread died",
        ["rollout.workflow=rl_apps.cli.demo_faults:DyingWorkflow"],
        "dead producer",
    ),
    "nan-loss": Demo(
        "the loss becomes NaN",
        "not finite in 9 consecutive steps",
        ["algorithm.loss.kind=rl_apps.cli.demo_faults:nan_loss"],
        "nan loss",
    ),
    "frozen-server": Demo(
        "the only server is stopped (SIGSTOP) and no longer responds",
        "restart 1 of",
        ["launcher.health_timeout=5"],
        sent=signal.SIGSTOP,
        goes_on=True,
    ),
    "dead-server": Demo("the only server is killed (SIGKILL)", "restart 1 of", sent=signal.SIGKILL, goes_on=True),
}


def demo(name: str) -> int:
    """Run a demonstration, print the output of its run, and report whether the check detected the fault.

    Returns:
        0 if the fault was detected and the run ended as expected, else 1.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in DEMOS:
        raise ConfigError(f"rl demo {name}: expected one of {', '.join(DEMOS)}.")
    scenario = DEMOS[name]
    print(f"{name}: {scenario.what}, after {HEALTHY_STEPS} healthy steps.", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-demo-") as scratch:
        code, lines = _run_with_fault(scenario, Path(scratch))
    evidence = next((line for line in lines if re.search(scenario.says, line)), None)
    passed = evidence is not None and (code == 0) == scenario.goes_on
    print(f"\nThe fault was {'detected' if evidence else 'NOT detected'}{f': {evidence}' if evidence else ''}")
    end = "recovered and finished" if code == 0 else f"ended with exit code {code}"
    print(f"The run {end}{'' if passed else '; this was NOT expected'}.")
    return 0 if passed else 1


def _run_with_fault(scenario: Demo, scratch: Path) -> tuple[int, list[str]]:
    """Run the command with a fault injected during the run; return its exit code and its lines."""
    run, fault = scratch / "run", scratch / "fault"
    fault.write_text("")
    command = [
        sys.executable,
        "-m",
        "rl_apps.cli.main",
        "run",
        "gsm8k-grpo",
        *RUN,
        *scenario.settings,
        f"run_dir={run}",
    ]
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "FAULT_FILE": str(fault)},
    ) as process:
        assert process.stdout is not None
        ended = threading.Event()
        injector = threading.Thread(target=_inject_fault, args=(scenario, run, fault, ended), daemon=True)
        deadline = threading.Timer(SECONDS, process.terminate)
        injector.start()
        deadline.start()
        try:
            for line in process.stdout:
                print(f"  {line}", end="", flush=True)
                lines.append(line.strip())
        except BaseException:
            process.terminate()  # the launcher stops all its workers
            raise
        finally:
            ended.set()
            deadline.cancel()
    return process.returncode, lines


def _inject_fault(scenario: Demo, run: Path, fault: Path, ended: threading.Event) -> None:
    """Wait for the first steps, then inject the fault."""
    while not ended.wait(POLL_SECONDS):
        if _steps(run) < HEALTHY_STEPS:
            continue
        print(f"\n>>> now {scenario.what}\n", flush=True)
        if scenario.sent is None:
            fault.write_text(scenario.fault)
        else:
            with suppress(RLError, ProcessLookupError):
                [server] = [worker for worker in status_of(run)["workers"] if worker["name"].startswith("rollout")]
                os.kill(server["pid"], scenario.sent)
        return


def _steps(run: Path) -> int:
    with suppress(OSError):
        return sum("sequences" in record for record in json_lines(run / "metrics.jsonl"))
    return 0
