"""Recovery time after the loss of a process or node, and the cost of recovery checkpoints.

    uv run python tests/benchmarks/recovery.py [--case CASE ...] [--kills 3] [--check]

Each case except `cost` starts the real command `gsm8k-grpo` with a small one-layer model, on-policy, with a recovery
checkpoint every two steps. It kills a process or node several times at random moments (`recovery_kills.py`):

- `server-kill`: SIGKILL to the only embedded server; `server-stop`: SIGSTOP.
- `trainer-kill`: SIGKILL to one of two trainer ranks.
- `node-ray`: the trainer's node dies with all its processes, in the cluster of `infra/clusters/ray.py`. A third node
  replaces it.
- `node-slurm-spare`: the same in the cluster of `infra/clusters/slurm.py`, with a spare node in the allocation.
- `node-slurm-requeue`: the same without a spare node, so Slurm must detect the loss and requeue the job.

`seconds` is the time from the kill to the line of the next trained step in `metrics.jsonl`. After the loss of a server
this is the first step whose requests were all sent after the kill. After the loss of a trainer it is the first step of
the new trainers, which may repeat an earlier step. `first_new_step` is the time to the first step that was not trained
before. `restart` is the time until the launcher reports a new process. The results include the timeouts of the cluster.
The limits hold on an idle machine.

`cost` is the time that training is blocked for a recovery checkpoint, plus the CPU time of its writer, divided by the
time of the steps between two checkpoints (`recovery_cost.py`).

The last line is one JSON object. With `--check` the exit code is 1 if a limit is exceeded. Slurm needs root. A case
whose requirements are missing is skipped with the reason; with `--check` this counts as exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import recovery_cost as cost
import recovery_kills as kills


def summary(measured: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return minimum, median and maximum of each measurement, and whether the maximum is within the limit."""
    ranges = {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values), "all": values}
        for name, values in measured.pop("measurements").items()
    }
    return ranges | measured | {"limit": limit, "ok": ranges["seconds"]["max"] <= limit}


def print_case(case: str, result: dict[str, Any]) -> None:
    """Print a readable line for a case."""
    if "skipped" in result:
        print(f"{case}: skipped, {result['skipped']}", flush=True)
        return
    ranges = (
        f"{name} {result[name]['min']:.1f} to {result[name]['max']:.1f} s (median {result[name]['median']:.1f})"
        for name in ("seconds", "first_new_step", "restart")
        if name in result
    )
    timeouts = ", ".join(f"{name} {value:g} s" for name, value in result["timeouts"].items())
    verdict = "ok" if result["ok"] else "EXCEEDED"
    print(f"{case}: {'; '.join(ranges)}; limit {result['limit']:g} s, {verdict}; {timeouts}", flush=True)


def main() -> int:
    """Run the selected cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_cases = [*kills.CASES, "cost"]
    parser.add_argument("--case", nargs="+", choices=all_cases, help="all by default; with --quick, cost")
    parser.add_argument("--kills", type=int, default=3, help="kills per case")
    parser.add_argument("--checkpoints", type=int, default=5, help="recovery checkpoints of the case cost")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    parser.add_argument("--directory", type=Path, help="parent of the temporary directory")
    parser.add_argument("--quick", action="store_true", help="one kill; cost with a small batch and without peers")
    arguments = parser.parse_args()
    cases = arguments.case or (["cost"] if arguments.quick else all_cases)
    kill_count, checkpoints, sizes = arguments.kills, arguments.checkpoints, list(cost.SIZES)
    if arguments.quick:
        kill_count, checkpoints, sizes = 1, 2, ["demo"]
    results: dict[str, Any] = {"recovery": {}, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="recovery-") as scratch:
        for name in (name for name in kills.CASES if name in cases):
            case = kills.CASES[name]
            try:
                results["recovery"][name] = summary(case.measure(Path(scratch) / name, kill_count), case.limit)
            except kills.UnavailableError as reason:
                results["recovery"][name] = {"skipped": str(reason), "ok": False}
            print_case(name, results["recovery"][name])
        if "cost" in cases:
            costs = {size: cost.measure(size, checkpoints, Path(scratch), arguments.quick) for size in sizes}
            for size, measured in costs.items():
                step = f"{measured['mebibytes']:.1f} MiB, step {measured['step_s']:.3f} s"
                print(
                    f"cost, {size}: {step}, {measured['cost']:.2%} with a checkpoint every {cost.INTERVAL} steps",
                    flush=True,
                )
            results["recovery_checkpoints"] = costs | {"interval_steps": cost.INTERVAL, "required": cost.REQUIRED}
    checked = [
        *results["recovery"].values(),
        *(results["recovery_checkpoints"][s] for s in sizes if "recovery_checkpoints" in results),
    ]
    results["ok"] = all(result["ok"] for result in checked)
    print(json.dumps(results))
    return int(arguments.check and not results["ok"])


if __name__ == "__main__":
    sys.exit(main())
