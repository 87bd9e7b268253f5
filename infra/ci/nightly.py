"""Run every test, and write what was seen to docs/nightly.md: date, commit, counts, time, figures, reasons of skips.

    python infra/ci/nightly.py [further arguments of pytest]

With further arguments, such as files, only a part runs: figures and failures of other tests stay on the page, with the
commit that they were seen at.

A test that measures something says so with pytest's `record_property(name, value)`. Ends with pytest's exit code. Needs
the standard library, and pytest in the same environment.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "nightly.md"
HEAD = """# Nightly runs

`uv run python infra/ci/nightly.py` runs every test (`pytest --nightly`, in two processes) and writes this page.

| date | commit | machine | passed | failed | skipped | minutes |
|---|---|---|---|---|---|---|
"""


_FIGURE = re.compile(r"\| (test_.*?) \| .* \| \d{4}-\S+ \S+( and changes)? \|$")
"""A line of the table of figures; the name of its test."""
_FAILURE = re.compile(r"- (test_.*?)(?:, \d{4}-\S+ \S+(?: and changes)?)?$")
"""A line of the list of failures; the name of its test."""


def page(report: ElementTree.Element, commit: str, machine: str, before: str = "", part: str = "") -> str:
    """The page after one more run.

    Args:
        report: the root of pytest's JUnit XML.
        commit: that was tested.
        machine: in a few words.
        before: the page so far; its table of runs is continued, and figures and failures of tests that did not run, or
            were skipped, stay.
        part: which tests ran; empty: all.
    """
    suites, cases = list(report.iter("testsuite")), list(report.iter("testcase"))
    day = min(suite.attrib["timestamp"] for suite in suites)[:10]
    minutes = sum(float(suite.attrib["time"]) for suite in suites) / 60
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = Counter(skip.attrib["message"] for case in cases if (skip := case.find("skipped")) is not None)
    passed, skipped = len(cases) - len(failed) - reasons.total(), reasons.total()
    rows = [line for line in before.splitlines() if re.match(r"\| \d{4}-", line)]
    which = f"{commit}, {part}" if part else commit
    rows.append(f"| {day} | {_cell(which)} | {machine} | {passed} | {len(failed)} | {skipped} | {minutes:.0f} |")
    ran = {case.attrib["name"] for case in cases if case.find("skipped") is None}
    figures, failures = (
        [line for line in before.splitlines() if (found := kind.match(line)) and found[1] not in ran]
        for kind in (_FIGURE, _FAILURE)
    )
    failures += [f"- {case.attrib['name']}, {day} {commit}" for case in failed]
    figures += [
        f"| {case.attrib['name']} | {figure.attrib['name']} | {_cell(figure.attrib['value'])} | {day} {commit} |"
        for case in cases
        if case.attrib["name"] in ran
        for figure in case.iter("property")
    ]
    return "\n".join(
        [
            HEAD + "\n".join(rows),
            "\n## Figures\n\n| test | figure | value | seen |\n|---|---|---|---|",
            *figures,
            *(["\n## Failed when last run\n", *failures] if failures else []),
            "\n## Skipped in the last run\n\n| tests | reason |\n|---|---|",
            *(f"| {count} | {_cell(reason)} |" for reason, count in reasons.most_common()),
            "",
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Run the tests and write the page; pytest's exit code."""
    commit = _git("rev-parse", "--short", "HEAD") + (" and changes" if _git("status", "--porcelain") else "")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--nightly", f"--junitxml={path}", *sys.argv[1:]]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        report = ElementTree.parse(path).getroot()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    PAGE.write_text(page(report, commit, machine, PAGE.read_text() if PAGE.exists() else "", " ".join(sys.argv[1:])))
    return code


if __name__ == "__main__":
    sys.exit(main())
