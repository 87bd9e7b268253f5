"""One rank of a test in `test_fsdp_ranks.py`: has an engine, and prints the addresses at which this process listens."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from fsdp_toys import make_engine

LISTENING = "0A"


def listening() -> set[str]:
    """As /proc/net writes them: 0100007F is 127.0.0.1, in the machine's order of bytes."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and f"socket:[{rest[5]}]" in mine:
                found.add(local.rpartition(":")[0])
    return found


engine = make_engine(sys.argv[1])
engine.parallel.gather_json(0)
print(*sorted(listening()))
engine.parallel.gather_json(0)
engine.destroy()
