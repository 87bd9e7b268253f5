"""Commands that combine the rl packages into training programs, such as GRPO and SFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    __version__: str
else:
    __getattr__ = lazy_getattr(__name__, {})
