"""How long a run stands still when something of it dies, and what recover points cost.

    uv run python tests/benchmarks/recovery.py [--case CASE ...] [--kills 3] [--check]

Cases, each a real command (`gsm8k-grpo` with a model of one small layer, on-policy, a recover point every two steps) of
which a part is killed several times at random moments, `recovery_kills.py`:

- `server-kill`: the only embedded server gets a SIGKILL; `server-stop`: a SIGSTOP.
- `trainer-kill`: one of two trainer ranks gets a SIGKILL.
- `node-ray`: the node of the trainer is killed with all that runs on it, in the cluster of `infra/clusters/ray.py`; a
  third node stands in.
- `node-slurm-spare`: the same in that of `infra/clusters/slurm.py`, with a spare node in the allocation.
- `node-slurm-requeue`: without one, so that Slurm must see the loss and start the job again.

`seconds` are those from the kill to the line in `metrics.jsonl` of the next trained step. After the loss of a server
that is a step later than the one that was under way, whose answers may have been there: the first of which every answer
was asked for after the kill. After the loss of a trainer it is the first step that the new trainers took, which may be
one that had been taken before; `new` are the seconds to the first step beyond all that had been reached. `restart` are
the seconds until the lost process runs anew, by the launcher's own account. The clusters' timeouts are told beside. The
limits hold on a machine that has nothing else to do.

`cost`: seconds that training is held for a recover point, and CPU of the thread that writes it, over the time of the
steps between two points, `recovery_cost.py`.

The last line is one JSON object. With `--check` the exit code is 1 where a limit is missed. Slurm needs root; a case
that cannot be had is skipped with its reason, and with `--check` that counts as missed.
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
    """Least, median and most of each figure of a case, and whether the most is within the limit."""
    ranges = {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values), "all": values}
        for name, values in measured.pop("measurements").items()
    }
    return ranges | measured | {"limit": limit, "ok": ranges["seconds"]["max"] <= limit}


def print_case(case: str, result: dict[str, Any]) -> None:
    """One line for people."""
    if "skipped" in result:
        print(f"{case}: skipped, {result['skipped']}", flush=True)
        return
    ranges = (
        f"{name} {result[name]['min']:.1f} to {result[name]['max']:.1f} s (median {result[name]['median']:.1f})"
        for name in ("seconds", "first_new_step", "restart")
        if name in result
    )
    timeouts = ", ".join(f"{name} {value:g} s" for name, value in result["timeouts"].items())
    verdict = "ok" if result["ok"] else "MISSED"
    print(f"{case}: {'; '.join(ranges)}; limit {result['limit']:g} s, {verdict}; {timeouts}", flush=True)


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_cases = [*kills.CASES, "cost"]
    parser.add_argument("--case", nargs="+", choices=all_cases, help="all by default; with --quick, cost")
    parser.add_argument("--kills", type=int, default=3, help="per case")
    parser.add_argument("--checkpoints", type=int, default=5, help="of the cost")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a limit is missed")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
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
                step = f"{measured['mebibytes']:.1f} MiB, a step {measured['step_s']:.3f} s"
                print(
                    f"cost, {size}: {step}, {measured['cost']:.2%} at one point every {cost.INTERVAL} steps", flush=True
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
