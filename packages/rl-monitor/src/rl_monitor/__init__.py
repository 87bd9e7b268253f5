"""Read run directories: report, live view, completions, curves. Needs only rl-contracts, not torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    __version__: str
else:
    __getattr__ = lazy_getattr(__name__, {})
