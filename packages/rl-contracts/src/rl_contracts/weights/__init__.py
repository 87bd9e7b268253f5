"""Moving weights between trainer and server: routes, checksums, receipts. Both sides use this one implementation."""

from rl_contracts.weights.checksum import checksum, copy_with_checksum, verify_receipt
from rl_contracts.weights.committed import CommittedWeights, read_committed, write_committed
from rl_contracts.weights.rendezvous import seated
from rl_contracts.weights.routes import MEETING_ROUTES, ROUTES, WeightReceiver, WeightSender, open_sender
from rl_contracts.weights.stored import STORED_ROUTES, open_weights

__all__ = [
    "MEETING_ROUTES",
    "ROUTES",
    "STORED_ROUTES",
    "CommittedWeights",
    "WeightReceiver",
    "WeightSender",
    "checksum",
    "copy_with_checksum",
    "open_sender",
    "open_weights",
    "read_committed",
    "seated",
    "verify_receipt",
    "write_committed",
]
