"""Contracts, data structures and the shared kernel of the rl packages.

Import the module that defines the name you need (`rl_contracts.registry`, `rl_contracts.batch.trajectory`, ...).
`rl_contracts` itself exports no names, so modules such as `errors`, `registry` and `config` load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    __version__: str
else:
    __getattr__ = lazy_getattr(__name__, {})
