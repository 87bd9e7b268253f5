"""One rank of a test in `test_fsdp_ranks.py`: create an engine and print the addresses that the process listens on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from fsdp_toys import make_engine

LISTENING = "0A"


def listening() -> set[str]:
    """Return the listening addresses in the format of /proc/net: 0100007F is 127.0.0.1, in native byte order."""
    own_sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own_sockets.add(os.readlink(descriptor))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and f"socket:[{rest[5]}]" in own_sockets:
                addresses.add(local.rpartition(":")[0])
    return addresses


engine = make_engine(sys.argv[1])
engine.parallel.gather_json(0)
print(*sorted(listening()))
engine.parallel.gather_json(0)
engine.destroy()
