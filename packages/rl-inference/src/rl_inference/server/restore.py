"""A server that starts in the middle of a run: it serves the version that was committed last, not the one it was
started with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rl_contracts.errors import WeightUpdateError
from rl_contracts.logging import get_logger
from rl_contracts.weights import CommittedWeights, read_committed, verify_receipt

if TYPE_CHECKING:
    from rl_inference.server.weights import ServedWeights

logger = get_logger("inference.server")

OVERTAKEN_SECONDS = 60.0
"""How long to try again while newer versions are committed faster than they are read."""


def restore(weights: ServedWeights, directory: str) -> None:
    """Stage and commit what the record in `directory` names; nothing without a record. Before the decode thread runs.

    A version is written over the last but one, so one that is overtaken while it is read has a newer record. The same
    record with other weights than it says is no race.

    Raises:
        WeightUpdateError: what the last record names cannot be read, or is not what was committed; names the parameter.
    """
    deadline = time.monotonic() + OVERTAKEN_SECONDS
    record = read_committed(directory) if directory else None
    while record is not None:
        if not record.readable:
            logger.info("version %d came over %s, which leaves nothing to read", record.version, record.meta.route)
            return
        try:
            verify_receipt(record.receipt, weights.stage(record.meta), record.meta.route)
        except WeightUpdateError:
            newer = _newer(directory, record)
            if newer is None or time.monotonic() > deadline:
                raise
            record = newer
            continue
        weights.commit(record.version)
        logger.info("restored version %d, committed before this process started", record.version)
        return


def _newer(directory: str, record: CommittedWeights) -> CommittedWeights | None:
    found = read_committed(directory)
    return found if found is not None and found.version != record.version else None
