"""How many files of ours one prompt goes through, and how many borders between packages a publication crosses.

    python infra/ci/count_hops.py

Runs `gsm8k-grpo` for two steps with a tiny model. Counted are the files on the call and await stacks of one real
prompt: from `next_batch` to the moment at which the HTTP request is written (the trainer's thread inside `next_batch`,
the episode's task, and the tasks that started it), and on to the moment at which one of its tokens is sampled (the
handler in the server, and the decode thread). A border is a pair of packages of which one calls the other in a
publication, in the trainer or in the server; data classes do not count, nor does the shared kernel (errors, logs, time,
figures, the ranks' context).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rl_contracts.testing.models import make_tiny_model

TO_REQUEST, TO_TOKEN, BORDERS = 12, 20, 4
"""At most: files to the request, files to the sampled token, borders of a publication."""
KERNEL = ("aio", "clock", "config", "data", "errors", "logging", "metrics", "parallel", "trace")
"""Modules of rl_contracts that everything may use without crossing a border."""
SETTINGS = (
    "total_steps=2",
    "data.batch_size=4",
    "rollout.group_size=4",
    "rollout.generation.max_new_tokens=12",
    "evaluation.rows=0",
)


def watch(directory: Path) -> dict[str, list[str]]:
    """Run the program under watch; what was on each stack, and the borders."""
    seen = directory / "seen"
    seen.mkdir()
    model = make_tiny_model(directory / "model", layers=1, hidden=32)
    probe = str(Path(__file__).with_name("hop_probe"))
    environment = {**os.environ, "HOPS_DIR": str(seen), "PYTHONPATH": probe}
    command = [
        str(Path(sys.executable).with_name("gsm8k-grpo")),
        f"model.path={model}",
        "recipe=embedded",
        f"run_dir={directory / 'run'}",
    ]
    done = subprocess.run([*command, *SETTINGS], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout}{done.stderr}")
    found: dict[str, list[str]] = {}
    for name in ("request", "token"):
        path = seen / f"{name}.json"
        if not path.exists():
            raise SystemExit(f"nothing was seen of the moment '{name}': was what {probe} looks for renamed?")
        found |= json.loads(path.read_text())
    borders: dict[str, str] = {}
    processes = list(seen.glob("borders-*.json"))
    for path in processes:
        borders |= json.loads(path.read_text())
    if len(processes) < 2:
        raise SystemExit(f"a publication was not seen in trainer and server: was what {probe} looks for renamed?")
    found["borders"] = [f"{key} {example}" for key, example in sorted(borders.items())]
    return found


def files(places: list[str]) -> list[str]:
    """The files of places, each once, in order."""
    return list(dict.fromkeys(place.split()[0] for place in places))


def crossed(borders: list[str]) -> dict[str, str]:
    """The borders that count, with an example of each."""
    found = {}
    for line in borders:
        caller, called, module, kind, example = line.split(maxsplit=4)
        kernel = called == "rl_contracts" and module.split(".")[1:2] and module.split(".")[1] in KERNEL
        if kind == "code" and not kernel:
            found.setdefault(f"{caller} -> {called}", example)
    return found


def report(found: dict[str, list[str]]) -> list[str]:
    """Print the tables; what is above its limit, in words."""
    request = files(found["next_batch"] + found["episode"])
    token = files([*request, *found["handler"], *found["decode"]])
    borders = crossed(found["borders"])
    for title, places in (
        ("next_batch, in the trainer's thread", found["next_batch"]),
        ("the episode's task and those that started it, at the HTTP request", found["episode"]),
        ("the request's handler in the server", found["handler"]),
        ("the decode thread, at a token", found["decode"]),
    ):
        print(f"\n{title}")
        for place in places:
            print("  {:<40} {}".format(*place.split(maxsplit=1)))
    print("\nborders of a publication")
    for border, example in borders.items():
        print(f"  {border:<34} {example}")
    wrong = []
    print()
    for what, count, limit in (
        ("files from next_batch to the HTTP request", len(request), TO_REQUEST),
        ("files from next_batch to the sampled token", len(token), TO_TOKEN),
        ("borders that a publication crosses", len(borders), BORDERS),
    ):
        print(f"{what:<44}{count:>4}   (at most {limit})")
        if count > limit:
            wrong.append(f"{count} {what}, at most {limit} expected: see the table")
    return wrong


def main() -> int:
    """1 if a count is above its limit."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wrong = report(watch(Path(directory)))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
