"""The agreed language of the rl packages: contracts, data structures and the shared kernel.

Import the module that holds what you need (`rl_contracts.registry`, `rl_contracts.batch.trajectory`, ...). This package
imports nothing by itself, so that its light modules (names, errors, registry, configs) never cost an import of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    __version__: str
else:
    __getattr__ = lazy_getattr(__name__, {})
