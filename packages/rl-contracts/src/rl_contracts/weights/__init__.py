"""Moving weights between trainer and server: checksums, shared memory and files. Both sides use this one
implementation."""

from rl_contracts.weights.checksum import checksum, verify_receipt
from rl_contracts.weights.transport import open_weights, staged_location, write_weights

__all__ = ["checksum", "open_weights", "staged_location", "verify_receipt", "write_weights"]
