"""Run tests several times under load, and print the tests that failed at least once.

    python infra/ci/flaky.py tests/chaos/test_chaos.py -n 20
    python infra/ci/flaky.py --changed origin/main     # the test files that differ from a commit
    python infra/ci/flaky.py --tier quick -n 5         # all quick tests

Other processes keep all cores busy. Each run shuffles the files, and the tests within each file, with a new seed, which
is also the hash seed of Python. The seed is printed with each failure. To repeat a run, put `infra/ci` on PYTHONPATH
and run `FLAKY_SEED=7 PYTHONHASHSEED=7 pytest -p flaky PATH`. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
BUSY = "while True: pass"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Shuffle the collected tests; a hook of pytest."""
    shuffle(items, int(os.environ["FLAKY_SEED"]))


def shuffle(items: list[Any], seed: int) -> None:
    """Shuffle tests in place: the order of the files, then the tests within each file. Each test has a `path`."""
    draw = random.Random(seed)
    files: dict[Any, list[Any]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep `count` cores busy inside the context."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failures(report: ElementTree.Element) -> dict[str, str]:
    """Return the first line of each failure in a JUnit XML report, by test."""
    messages = {}
    for case in report.iter("testcase"):
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            name = f"{case.attrib['classname']}::{case.attrib['name']}"
            messages[name] = problem.attrib.get("message", "").partition("\n")[0]
    return messages


def run(paths: Sequence[str], seed: int, tier: str) -> dict[str, str]:
    """Run the tests of the paths, or all tests, once; return the failures by test."""
    environment = {
        **os.environ,
        "FLAKY_SEED": str(seed),
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        flags = [] if tier == "quick" else [f"--{tier}"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "flaky", *flags, f"--junitxml={report}", *paths]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code not in (0, 1):
            raise SystemExit(f"pytest exited with code {code}; expected 0 or 1. Its output above states the reason.")
        return failures(ElementTree.parse(report).getroot())


def changed(base: str) -> list[str]:
    """Return the test files that differ from a commit."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", f"{base}...", "--", "*/test_*.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, print the tests that failed at least once, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run tests several times under load.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="test files or directories; default: all tests")
    parser.add_argument("-n", type=int, default=10, help="number of runs (default: %(default)s)")
    parser.add_argument("--changed", metavar="BASE", help="the test files that differ from this commit")
    parser.add_argument("--tier", choices=["quick", "all", "nightly"], default="all", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    paths = [*options.paths, *(changed(options.changed) if options.changed else [])]
    if options.changed and not paths:
        print("no test files changed")
        return 0
    failed: dict[str, list[tuple[int, str]]] = {}
    with busy_cores(os.cpu_count() or 1):
        for _ in range(options.n):
            seed = random.SystemRandom().randrange(2**32)
            for test, message in run(paths, seed, options.tier).items():
                failed.setdefault(test, []).append((seed, message))
    for test, cases in sorted(failed.items()):
        print(f"{test}: {len(cases)} of {options.n} runs failed")
        for seed, message in cases:
            print(f"  seed {seed}: {message}")
    print(f"{len(failed)} tests failed at least once in {options.n} runs")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
