"""Run the nightly tests, and the property tests with new examples, one part at a time.

    python infra/ci/nightly.py [PATH ...]            # list the parts and their results
    python infra/ci/nightly.py --parts [PATH ...]    # run the parts that have no result yet
    python infra/ci/nightly.py --parts --shard 2/6   # every sixth part, starting with the second

A part is one test file, or one test of a file in `SPLIT`. A part that still runs after 25 minutes is stopped and fails.
Paths restrict the parts to files or directories.

Each finished part appends one JSON line to `runs/nightly/COMMIT.jsonl`: part, commit, passed, failed (test ids),
skipped (number of tests per reason), seconds, and metrics (values that tests recorded with pytest's
`record_property`). A second call with the same commit runs the remaining parts. With uncommitted changes, all parts
run. The exit code is 1 if a part failed, in this call or an earlier one. Needs the standard library and pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "nightly"
LIMIT = 25 * 60.0
"""Time limit of a part in seconds."""
SPLIT = {
    "packages/rl-engines-megatron/tests/test_megatron_ranks.py",
    "tests/chaos/test_chaos.py",
    "tests/clusters/test_clusters_commands.py",
    "tests/clusters/test_clusters_learn.py",
    "tests/end_to_end/test_conversations_learn.py",
    "tests/infra/test_infra_checks.py",
    "tests/end_to_end/test_presets_learn.py",
    "tests/end_to_end/test_pretrained_model.py",
    "tests/servers/test_servers_learn.py",
    "tests/clusters/test_slurm_jobs.py",
}
"""Test files that take longer than the limit; each of their tests is a part."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "--nightly", "-m", "nightly or gpu or multi_gpu or hypothesis"]


def cut(tests: Iterable[str]) -> list[str]:
    """Return the parts that contain the tests, in the order of the tests.

    Args:
        tests: Test ids of pytest, such as `tests/chaos/test_chaos.py::test_run[local]`.
    """
    files = ((test, test.partition("::")[0]) for test in tests)
    return list(dict.fromkeys(test if file in SPLIT else file for test, file in files))


def summarize(report: ElementTree.Element) -> dict[str, Any]:
    """Return the passed, failed and skipped tests, the seconds and the metrics of a JUnit XML report."""
    cases = list(report.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = [skip.attrib["message"] for case in cases if (skip := case.find("skipped")) is not None]
    metrics: dict[str, dict[str, str]] = {}
    for case in cases:
        for metric in case.iter("property"):
            metrics.setdefault(case.attrib["name"], {})[metric.attrib["name"]] = metric.attrib["value"]
    return {
        "passed": len(cases) - len(failed) - len(reasons),
        "failed": [f"{case.attrib['classname']}::{case.attrib['name']}" for case in failed],
        "skipped": dict(Counter(reasons)),
        "seconds": round(sum(float(suite.attrib["time"]) for suite in report.iter("testsuite")), 1),
        "metrics": metrics,
    }


def run(part: str, limit: float = LIMIT) -> dict[str, Any]:
    """Run a part and return its result; kill it after `limit` seconds. Its output goes to the console."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        process = subprocess.Popen([*PYTEST, f"--junitxml={report}", part], cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return _without_report(f"{part}: stopped after {limit:g} s", limit)
        except BaseException:  # the child has its own session, so it does not receive Ctrl-C
            os.killpg(process.pid, signal.SIGTERM)
            raise
        if not report.exists():
            return _without_report(f"{part}: pytest exited with code {code} and wrote no report", 0.0)
        return summarize(ElementTree.parse(report).getroot())


def _without_report(failure: str, seconds: float) -> dict[str, Any]:
    return {"passed": 0, "failed": [failure], "skipped": {}, "seconds": seconds, "metrics": {}}


def _collect(paths: Sequence[str]) -> list[str]:
    command = [*PYTEST, "--collect-only", "-n0", *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: no tests
        raise SystemExit(f"pytest could not collect the tests:\n{done.stdout}")
    return [line for line in done.stdout.splitlines() if "::" in line and " " not in line.partition("[")[0]]


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("-changed" if git("status", "--porcelain") else "")


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise ValueError
    return int(index), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """List or run the parts and return the exit code."""
    parser = argparse.ArgumentParser(description="Run the nightly tests, in parts.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="test files or directories; default: all")
    parser.add_argument("--parts", action="store_true", help="run the parts that have no result yet")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="select every N-th part, starting with the I-th"
    )
    options = parser.parse_args(arguments)
    index, count = options.shard
    parts = cut(_collect(options.paths))[index - 1 :: count]

    commit = _commit()
    file = RESULTS / f"{commit}.jsonl"
    resumes = file.exists() and not commit.endswith("-changed")  # uncommitted changes differ between calls
    lines = file.read_text().splitlines() if resumes else []
    results = {result["part"]: result for result in map(json.loads, lines)}
    for number, part in enumerate(parts, 1):
        if options.parts and part not in results:
            print(f"=== part {number} of {len(parts)}: {part}", flush=True)
            results[part] = {"part": part, "commit": commit, **run(part)}
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.write(json.dumps(results[part]) + "\n")
    for part in parts:
        print(json.dumps(results.get(part, {"part": part, "commit": commit})))
    return int(any(results[part]["failed"] for part in parts if part in results))


if __name__ == "__main__":
    sys.exit(main())
