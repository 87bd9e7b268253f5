"""Check that commit messages are Conventional Commits: `type(scope)!: subject` of at most 72 characters.

    python infra/ci/commit_message.py FILE           # the hook `commit-msg`: one message
    python infra/ci/commit_message.py --range A..B   # CI: every commit of a pull request

Messages that git writes (merges, reverts, fixups) pass.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

TYPES = ("build", "chore", "ci", "docs", "feat", "fix", "perf", "refactor", "revert", "style", "test")
MAX_SUBJECT = 72
FORM = re.compile(rf"(?:{'|'.join(TYPES)})(?:\([a-z0-9-]+\))?!?: \S.*[^.\s]")
BY_GIT = re.compile(r"(?:Merge |Revert \"|fixup! |squash! |amend! )")


def problem(message: str) -> str:
    """Return the rule that a message breaks, or an empty string."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if BY_GIT.match(subject):
        return ""
    if not FORM.fullmatch(subject):
        return (
            f"expected a subject such as 'feat(rl-rewards): add partial credit', without a period, with one of the "
            f"types {', '.join(TYPES)} and an optional scope, found {subject!r}."
        )
    if len(subject) > MAX_SUBJECT:
        return (
            f"expected a subject of at most {MAX_SUBJECT} characters, found {len(subject)}; move details to the body."
        )
    if len(lines) > 1 and lines[1]:
        return f"expected an empty line after the subject, found {lines[1]!r}."
    return ""


def messages(commits: str) -> list[str]:
    """Return the messages of a range of commits, without merges."""
    command = ["git", "log", "-z", "--no-merges", "--format=%B", commits]
    return [text for text in subprocess.check_output(command, text=True).split("\0") if text]


def main() -> int:
    """Print each problem; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", type=Path, nargs="?", help="file with one message")
    source.add_argument("--range", metavar="A..B", help="commits to check")
    options = parser.parse_args()
    texts = messages(options.range) if options.range else [options.file.read_text()]
    problems = list(filter(None, map(problem, texts)))
    for text in problems:
        print(f"commit message: {text}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
