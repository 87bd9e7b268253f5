"""Weight transfer between trainer and server: routes, checksums, receipts. Both sides use this one implementation.

Modules that move tensors are imported at first use, so that comparing receipts does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr
from rl_contracts.weights.committed_record import CommittedWeights, read_committed, verify_receipt, write_committed
from rl_contracts.weights.rendezvous import with_rank

if TYPE_CHECKING:
    from rl_contracts.weights.checksums import checksum, copy_with_checksum
    from rl_contracts.weights.routes import WeightReceiver, WeightSender, open_sender
    from rl_contracts.weights.stored import open_weights
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "WeightReceiver": "routes",
            "WeightSender": "routes",
            "checksum": "checksums",
            "copy_with_checksum": "checksums",
            "open_sender": "routes",
            "open_weights": "stored",
        },
    )

__all__ = [
    "CommittedWeights",
    "WeightReceiver",
    "WeightSender",
    "checksum",
    "copy_with_checksum",
    "open_sender",
    "open_weights",
    "read_committed",
    "verify_receipt",
    "with_rank",
    "write_committed",
]
