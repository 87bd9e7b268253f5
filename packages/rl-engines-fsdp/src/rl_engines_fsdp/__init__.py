"""TrainEngine on PyTorch FSDP2 (`fully_shard`): gloo on CPU, nccl on CUDA.

`FSDPEngine` is imported on first access, so `import rl_engines_fsdp` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr
from rl_engines_fsdp.config import FSDPEngineConfig, LoRAConfig

if TYPE_CHECKING:
    from rl_engines_fsdp.engine import FSDPEngine

    __version__: str
else:
    __getattr__ = lazy_getattr(__name__, {"FSDPEngine": "engine"})

__all__ = ["FSDPEngine", "FSDPEngineConfig", "LoRAConfig"]
