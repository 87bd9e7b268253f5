"""Record of the last committed version: location and checksums of its weights.

The trainer's side writes this record next to the weights after each commit. A restarted server loads that version
automatically, and any process can check the weights that it loaded. The record is written to a temporary file and
renamed, so a reader sees the old or the new record. The recorded version stays readable until the commit after the next
one, because version n overwrites version n - 2.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rl_contracts.data import STORED_ROUTES, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError

RECORD_FILE = "committed.json"
"""File name of the record in the directory of the weights."""
MEMORY = Path("/dev/shm")
"""Linux's in-memory file system, in which every user may create directories."""


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """Version that all live servers have acknowledged."""

    meta: WeightUpdateMeta
    """Route and location of the version."""
    receipt: WeightReceipt
    """Checksums of the trainer. The servers' checksums matched them."""

    @property
    def version(self) -> int:
        """Version number."""
        return self.meta.version

    @property
    def readable(self) -> bool:
        """True if the weights can still be read after the commit; only `STORED_ROUTES` store them."""
        return self.meta.route in STORED_ROUTES


def make_private(directory: Path) -> None:
    """Create a directory that only this user may enter, unless it exists.

    Raises:
        WeightUpdateError: the directory cannot be created, or `require_private` rejects it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_private(directory)
    except OSError as error:
        raise WeightUpdateError(f"{directory}: the directory for weights cannot be created: {error}") from error


def require_private(directory: Path) -> None:
    """Reject a directory in the in-memory file system that other users own or may enter.

    Otherwise they could place weights there.

    Raises:
        WeightUpdateError: the directory belongs to another user, or its mode is not 700.
        OSError: the status of the directory cannot be read.
    """
    if not directory.is_relative_to(MEMORY):
        return
    status = directory.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise WeightUpdateError(
            f"{directory}: expected a private directory (mode 700) of this user, found one of user "
            f"{status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}. Remove it, choose another run_dir, or set "
            "publish.route=disk."
        )


def write_committed(directory: str | Path, meta: WeightUpdateMeta, receipt: WeightReceipt) -> None:
    """Write the record, replacing the previous one."""
    # as text: checksums have 64 bits, more than a JSON number safely carries
    sums = {name: str(value) for name, value in receipt.checksums.items()}
    value = {"meta": meta.to_json(), "receipt": {"holder": receipt.holder, "version": receipt.version, "sums": sums}}
    path = Path(directory) / RECORD_FILE
    make_private(path.parent)
    scratch = path.with_name(f".{RECORD_FILE}.{os.getpid()}")
    scratch.write_text(json.dumps(value))
    scratch.replace(path)


def read_committed(directory: str | Path) -> CommittedWeights | None:
    """Return the record of the last commit, or None before the first commit.

    Raises:
        WeightUpdateError: the record exists and cannot be read.
    """
    path = Path(directory) / RECORD_FILE
    try:
        require_private(path.parent)
        value = json.loads(path.read_text())
        receipt = value["receipt"]
        sums = {str(name): int(text) for name, text in receipt["sums"].items()}
        return CommittedWeights(
            WeightUpdateMeta.from_json(value["meta"]),
            WeightReceipt(str(receipt["holder"]), int(receipt["version"]), sums),
        )
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightUpdateError(f"{path}: the record of the last commit cannot be read: {error!r}") from error


def verify_receipt(expected: WeightReceipt, actual: WeightReceipt, route: str) -> None:
    """Compare a server's receipt with the trainer's receipt.

    Raises:
        WeightUpdateError: the receipts differ. The message names route, version, server and the first wrong parameter.
    """
    where = f"route {route}, version {expected.version}, {actual.holder}"
    if actual.version != expected.version:
        raise WeightUpdateError(
            f"{where}: the receipt is for version {actual.version}; the server has other weights than the trainer sent."
        )
    for name, value in expected.checksums.items():
        if name not in actual.checksums:
            raise WeightUpdateError(
                f"{where}: parameter {name!r} was sent but not received "
                f"({len(expected.checksums)} parameters sent, {len(actual.checksums)} received). "
                "Check the parameter names of the server's model."
            )
        if actual.checksums[name] != value:
            raise WeightUpdateError(
                f"{where}: parameter {name!r} differs: the trainer sent checksum {value}, the server has "
                f"{actual.checksums[name]}. The transfer, the cast to the served dtype or the server's copy is wrong; "
                "the update was not committed."
            )
    extra = sorted(set(actual.checksums) - set(expected.checksums))
    if extra:
        raise WeightUpdateError(f"{where}: the server also loaded {extra[:3]}, which the trainer did not send.")
