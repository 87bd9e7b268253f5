"""`rl demo`: breaks one thing of a short run on purpose, and shows the guard that sees it and what it says."""

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
"""Before the fault."""
SECONDS = 600.0
"""For a whole demonstration on a busy machine; the first one also makes the model."""
LOOK_EVERY = 0.2
"""Seconds between two looks at the run."""
RUN = (
    *("model.path=embedded", "recipe=embedded", "total_steps=20", "data.batch_size=8", "rollout.group_size=4"),
    *("evaluation.rows=0", "rollout.failure_min_groups=4", "gap.patience=2"),
    *("actor.optimizer.warmup_steps=0", "actor.optimizer.lr=1e-3"),  # steps that are large enough to be seen at once
)
FAULTY_SERVER = ("allocation=rl_apps.cli.demo_faults:FaultyEngine:d1+fsdp:d1", "rollout.max_staleness=0")
"""Without staleness the answers themselves can be compared in every step; else those that are asked for that end."""


@dataclass(frozen=True, slots=True)
class Demo:
    """A fault, and the guard that must see it."""

    what: str
    """What is broken."""
    says: str
    """A regular expression that the run's output has once the guard has seen it."""
    settings: Sequence[str] = ()
    """Of the run, beside `RUN`."""
    fault: str = ""
    """What is written to FAULT_FILE; see `rl_apps.cli.demo_faults` and
    `rl_inference.embedded_server.fault_injection`."""
    sent: signal.Signals | None = None
    """What the server's process is sent instead."""
    goes_on: bool = False
    """Whether the run mends itself and ends well; else it ends with an error."""


DEMOS = {
    "broken-sync": Demo(
        "the server acknowledges new weights and goes on with the old ones",
        "weights not received",
        FAULTY_SERVER,
        "weights not sent",
    ),
    "wrong-tensor": Demo(
        "one tensor of the server changes after its receipt was right",
        "one tensor wrong",
        FAULTY_SERVER,
        "one tensor",
    ),
    "wrong-temperature": Demo(
        "the server samples at temperature 0.7, whatever it is asked for",
        "Likely cause: temperature",
        FAULTY_SERVER,
        "temperature",
    ),
    "stale-cache": Demo(
        "the server goes on with keys and values of known prompts that the old weights made",
        "its prefix cache",
        [*FAULTY_SERVER, "publish.canary=always", "publish.canary_tokens=200"],
        "stale prefix",
    ),
    "stuck-reward": Demo(
        "the reward function never returns",
        "took longer than its limit",
        ["rollout.reward=rl_apps.cli.demo_faults:reward", "rollout.reward_timeout=2"],
        "stuck reward",
    ),
    "dead-producer": Demo(
        "what makes the answers dies in the middle of one",
        "the producer of answers died",
        ["rollout.workflow=rl_apps.cli.demo_faults:DyingWorkflow"],
        "dead producer",
    ),
    "nan-loss": Demo(
        "the loss is no number from now on",
        "not finite in 3 consecutive steps",
        ["algorithm.loss.kind=rl_apps.cli.demo_faults:nan_loss", "actor.optimizer.max_skipped_steps=2"],
        "nan loss",
    ),
    "frozen-server": Demo(
        "the only server is stopped (SIGSTOP) and answers nothing any more",
        "restart 1 of",
        ["launcher.health_timeout=5", "launcher.health_interval=1"],
        sent=signal.SIGSTOP,
        goes_on=True,
    ),
    "dead-server": Demo("the only server is killed (SIGKILL)", "restart 1 of", sent=signal.SIGKILL, goes_on=True),
}


def demo(name: str) -> int:
    """Run one, with the run's own output, and say whether the guard saw it.

    Returns:
        0 if it did.

    Raises:
        ConfigError: there is no such demonstration.
    """
    if name not in DEMOS:
        raise ConfigError(f"rl demo {name}: expected one of {', '.join(DEMOS)}.")
    shown = DEMOS[name]
    print(f"{name}: {shown.what}, after {HEALTHY_STEPS} steps in which all is well.", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-demo-") as scratch:
        code, lines = _run_with_fault(shown, Path(scratch))
    seen = next((line for line in lines if re.search(shown.says, line)), None)
    well = seen is not None and (code == 0) == shown.goes_on
    print(f"\nThe guard {'saw it' if seen else 'did NOT see it'}{f': {seen}' if seen else ''}")
    end = "went on and ended well" if code == 0 else f"was ended, with exit code {code}"
    print(f"The run {end}{'' if well else ', which was NOT expected'}.")
    return 0 if well else 1


def _run_with_fault(shown: Demo, scratch: Path) -> tuple[int, list[str]]:
    """Exit code and lines of a run that is broken on its way."""
    run, fault = scratch / "run", scratch / "fault"
    fault.write_text("")
    command = [sys.executable, "-m", "rl_apps.cli.main", "run", "gsm8k-grpo", *RUN, *shown.settings, f"run_dir={run}"]
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
        breaker = threading.Thread(target=_break, args=(shown, run, fault, ended), daemon=True)
        deadline = threading.Timer(SECONDS, process.terminate)
        breaker.start()
        deadline.start()
        try:
            for line in process.stdout:
                print(f"  {line}", end="", flush=True)
                lines.append(line.strip())
        except BaseException:
            process.terminate()  # the launcher ends all that it started
            raise
        finally:
            ended.set()
            deadline.cancel()
    return process.returncode, lines


def _break(shown: Demo, run: Path, fault: Path, ended: threading.Event) -> None:
    """Wait for the first steps, and plant the fault."""
    while not ended.wait(LOOK_EVERY):
        if _steps(run) < HEALTHY_STEPS:
            continue
        print(f"\n>>> now {shown.what}\n", flush=True)
        if shown.sent is None:
            fault.write_text(shown.fault)
        else:
            with suppress(RLError, ProcessLookupError):
                [server] = [worker for worker in status_of(run)["workers"] if worker["name"].startswith("rollout")]
                os.kill(server["pid"], shown.sent)
        return


def _steps(run: Path) -> int:
    with suppress(OSError):
        return sum("rows" in record for record in json_lines(run / "metrics.jsonl"))
    return 0
