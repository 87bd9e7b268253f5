"""Moving weights between trainer and server: checksums, shared memory and files. Both sides use this one
implementation."""

from rl_contracts.weights.checksum import checksum, copy_with_checksum, verify_receipt
from rl_contracts.weights.committed import CommittedWeights, read_committed, write_committed
from rl_contracts.weights.transport import open_weights, staged_location, write_weights

__all__ = [
    "CommittedWeights",
    "checksum",
    "copy_with_checksum",
    "open_weights",
    "read_committed",
    "staged_location",
    "verify_receipt",
    "write_committed",
    "write_weights",
]
