"""Whether the first line of a commit message is a Conventional Commit: `type(scope)!: what it does`.

    python infra/ci/commit_message.py FILE

Git gives the file to the hook `commit-msg`. What git writes by itself (merges, reverts, fixups) passes.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

TYPES = ("build", "chore", "ci", "docs", "feat", "fix", "perf", "refactor", "revert", "style", "test")
LONGEST = 120
FORM = re.compile(rf"(?:{'|'.join(TYPES)})(?:\([a-z0-9-]+\))?!?: \S.*[^.\s]")
BY_GIT = re.compile(r"(?:Merge |Revert \"|fixup! |squash! |amend! )")


def complaint(message: str) -> str:
    """What is wrong with a message; empty: nothing."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    first = lines[0] if lines else ""
    if BY_GIT.match(first):
        return ""
    if not FORM.fullmatch(first):
        return (
            f"expected a first line such as 'feat(rl-rewards): partial credit' (no full stop; the type one of "
            f"{', '.join(TYPES)}; the scope, a package, may be left out), found {first!r}."
        )
    if len(first) > LONGEST:
        return f"expected a first line of at most {LONGEST} characters, found {len(first)}. Say the rest below it."
    if len(lines) > 1 and lines[1]:
        return f"expected an empty line after the first, found {lines[1]!r}."
    return ""


def main() -> int:
    """1 if the message is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the message")
    wrong = complaint(parser.parse_args().file.read_text())
    if wrong:
        print(f"commit message: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
