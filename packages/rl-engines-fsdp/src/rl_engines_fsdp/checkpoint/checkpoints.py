"""Saving and loading an engine's model in every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.checkpoint.adapter import load_adapter, save_adapter
from rl_engines_fsdp.checkpoint.async_state import AsyncWriter
from rl_engines_fsdp.checkpoint.hugging_face import Description, save_hugging_face
from rl_engines_fsdp.checkpoint.state import load_state, save_state, state_of
from rl_engines_fsdp.config import FSDPEngineConfig
from rl_engines_fsdp.model.packed_model import PackedModel
from rl_engines_fsdp.ranks import sharding

Counters = dict[str, int]
"""`state_checkpoint.COUNTERS` and their values."""


@dataclass(slots=True)
class Checkpoints:
    """What an engine saves and loads; every method is collective."""

    model: PackedModel
    """Trained."""
    optimizer: torch.optim.Optimizer | None
    """Its optimizer, if it has one."""
    config: FSDPEngineConfig
    """The engine's settings."""
    dtype: str
    """In which weights are saved for others."""
    described: Description
    """What the model's directory says besides the weights."""
    base: str
    """Directory or hub id that was loaded."""
    device: torch.device
    """On which the model computes."""
    parallel: ParallelContext
    """Ranks."""
    _writer: AsyncWriter | None = field(default=None, init=False)

    def save(self, meta: SaveLoadMeta, counters: Counters) -> None:
        """Of kind `hf` adapters are merged into the weights, kind `adapter` has them alone.

        Raises:
            ModelError, EngineError: there is no such kind here, or the directory cannot be written.
        """
        self._check_kind(meta)
        if meta.kind == "hf":
            save_hugging_face(self.model, self.described, meta, self.dtype, self.config.max_shard_gb, self.parallel)
        elif meta.kind == "adapter" and self.config.lora is not None:
            head = self.described.head
            save_adapter(self.model, self.config.lora, head, self.base, meta.path, self.dtype, self.parallel)
        else:
            save_state(state_of(self.model, self.optimizer, counters, self.parallel), meta.path, self.parallel)

    def save_async(self, meta: SaveLoadMeta, counters: Counters) -> None:
        """See `FSDPEngine.save_async`."""
        if meta.kind != "state":
            raise ModelError(f"{meta.path}: expected kind state, found {meta.kind!r}; others are saved by `save`.")
        if self._writer is None:
            self._writer = AsyncWriter(self.parallel)
        self._writer.begin(state_of(self.model, self.optimizer, counters, self.parallel), meta.path)

    def wait(self) -> None:
        """See `FSDPEngine.wait_for_save`."""
        if self._writer is not None:
            self._writer.wait()

    def load(self, meta: SaveLoadMeta, read: Callable[[str], PackedModel | None]) -> Counters | None:
        """Replace weights, or the whole state, by what a directory holds.

        Args:
            read: the whole model of a directory on rank 0, checked; None elsewhere.

        Returns:
            the counters of a state; None of other kinds.

        Raises:
            ModelError, EngineError: the directory is not what `meta.kind` says, or not of this model.
        """
        self._check_kind(meta)
        if meta.kind == "state":
            return load_state(self.model, self.optimizer, meta.path, self.parallel)
        if meta.kind == "adapter" and self.config.lora is not None:
            load_adapter(self.model, self.config.lora, meta.path, self.device, self.parallel)
        else:
            sharding.copy_parameters(self.model, read(meta.path), self.device)
        return None

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _check_kind(self, meta: SaveLoadMeta) -> None:
        kinds = ("hf", "state") if self.config.lora is None else ("hf", "state", "adapter")
        if meta.kind not in kinds:
            raise ModelError(
                f"{meta.path}: expected a kind of {' or '.join(kinds)}, found {meta.kind!r}; adapter needs lora set."
            )
