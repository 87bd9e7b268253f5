"""TrainEngine on megatron-core, and conversion of weights between Hugging Face and megatron-core.

Public names are imported on first access, so that `import rl_engines_megatron` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr
from rl_engines_megatron.config import MegatronEngineConfig

if TYPE_CHECKING:
    from rl_engines_megatron.engine import MegatronEngine
    from rl_engines_megatron.model.megatron_config import gpt_model_kwargs, transformer_kwargs
    from rl_engines_megatron.weights.conversion import from_megatron, to_megatron

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "MegatronEngine": "engine",
            "from_megatron": "weights.conversion",
            "gpt_model_kwargs": "model.megatron_config",
            "to_megatron": "weights.conversion",
            "transformer_kwargs": "model.megatron_config",
        },
    )

__all__ = [
    "MegatronEngine",
    "MegatronEngineConfig",
    "from_megatron",
    "gpt_model_kwargs",
    "to_megatron",
    "transformer_kwargs",
]
