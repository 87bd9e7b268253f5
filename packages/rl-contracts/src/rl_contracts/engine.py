"""The contract of a train engine: the model, its optimizer and the ranks that hold them.

A loss function sees one packed micro-batch and returns *sums*; the engine divides once, by the minibatch's denominator
over all micro-batches and data-parallel ranks. That is why a gradient does not depend on how a batch was split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_contracts.config import Settings
from rl_contracts.data import AdapterSpec, FinetuneSpec, ParamSpec, SaveLoadMeta

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.allocation import ParallelStrategy
    from rl_contracts.batch.parallel import ParallelContext
    from rl_contracts.batch.trajectory import PackedBatch
    from rl_contracts.models.sizes import ModelSizes

__all__ = [
    "LossFn",
    "LossWeightFn",
    "OutputFn",
    "Snapshot",
    "Stats",
    "TokenOutputs",
    "TrainEngine",
    "TrainEngineConfig",
]


@dataclass(slots=True)
class TokenOutputs:
    """What a model says of each token of a packed micro-batch: float32 [N], entry t from the hidden state at t-1.

    The first token of each row has no such state; its entries are 0. The scores of a reward model are the exception:
    they come from the hidden state at t itself.
    """

    logprobs: torch.Tensor
    """[N] log_softmax(logits / temperature of the row) at the token that stands there; 0 where the model has a scalar
    head."""
    entropy: torch.Tensor
    """[N] entropy of that distribution, in nats; carries gradient only if the engine was asked for it. 0 where the
    model has a scalar head."""
    values: torch.Tensor | None = None
    """[N] of models with a scalar head, with gradient; None for language models. Of a critic entry t is the value
    before token t is known, from the hidden state at t-1 of its row, 0 for the row's first token. Of a reward model
    entry t is the score of the row up to and with token t, from the hidden state at t; a loss reads it at the row's
    last token."""


Stats = dict[str, "tuple[torch.Tensor, torch.Tensor]"]
"""Name to (sum, denominator), both scalars on the outputs' device. The engine sums both over micro-batches and ranks
and then divides. A name that ends in `/max` is combined by maximum instead and its denominator is ignored."""

LossFn = Callable[[TokenOutputs, "PackedBatch"], "tuple[torch.Tensor, Stats]"]
"""`(outputs, packed) -> (loss_sum, stats)`: a scalar with gradient, not divided by any count."""

LossWeightFn = Callable[["TensorDict"], "torch.Tensor"]
"""`(minibatch share of this rank) -> scalar`: its part of the denominator; the engine sums it over ranks."""

Snapshot = Callable[[], "Sequence[Path]"]
"""Writes this rank's files of what was copied, and says which; see `TrainEngine.snapshot`."""

OutputFn = Callable[[TokenOutputs, "PackedBatch"], "torch.Tensor"]
"""`(outputs, packed) -> [N]`: what `forward` returns for each token."""


@dataclass
class TrainEngineConfig(Settings):
    """Settings that an engine has beside what follows from the run (`FinetuneSpec`); base of each engine's own.

    An engine that is called `theirs:TheirEngine` brings `theirs:TheirEngineConfig`, beside it and importable without
    torch; all its fields have defaults.
    """

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Refuse what the engine cannot do with these settings; by default nothing.

        Called before any process starts, where the model may not be there yet, and once more by `initialize`.

        Raises:
            ConfigError: names what does not go together, and what to set instead.
        """

    def memory(
        self, strategy: ParallelStrategy, spec: FinetuneSpec, sizes: ModelSizes, micro_batches: int
    ) -> dict[str, float]:
        """Bytes that a rank's device holds at most, by part, for `rl plan`; by default nothing is known.

        Args:
            strategy: how many ranks, and along which dimensions.
            spec: precision, optimizer and tokens of a micro-batch.
            sizes: of the model.
            micro_batches: of a rank in one optimizer step.
        """
        return {}


class TrainEngine(ABC):
    """One rank of a model in training (SPMD: every rank makes the same calls in the same order).

    Engines are made by `Engine(config, strategy)`, of their own `TrainEngineConfig` and the layout of ranks, and told
    the rest by `initialize`. `batch` arguments are this rank's rows, as `rl_contracts.batch.trajectory` defines them,
    on the CPU; a rank may have none (0 rows).
    """

    parallel: ParallelContext
    """Ranks and groups; set by `initialize`."""

    version: int = 0
    """Training batches applied. The actor sets it; the engine saves and restores it."""

    @abstractmethod
    def initialize(self, spec: FinetuneSpec) -> None:
        """Join the process group, load the model and make the optimizer.

        Raises:
            ModelError: the directory has no weights, or the architecture is not supported.
            ConfigError: the parallel layout does not fit the number of ranks, or what `TrainEngineConfig.check` says.
        """

    @abstractmethod
    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """One optimizer step on one minibatch.

        Returns:
            `loss` (the quotient), `grad_norm` (before clipping), `lr`, `applied` (1.0, or 0.0 where the step was
            skipped for non-finite gradients), `tokens` (over all ranks), and each of the loss's statistics. The same on
            every rank.

        Raises:
            EngineError: the denominator is zero over all ranks, a row is longer than a micro-batch, or more consecutive
                steps were skipped than allowed.
        """

    @abstractmethod
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """`loss` and the loss's statistics without a step, the same on every rank."""

    @abstractmethod
    def forward(self, batch: TensorDict, output_fn: OutputFn) -> torch.Tensor:
        """`output_fn` of every token, without gradient: [B, T] on the CPU, rows as in `batch`, 0 at padding."""

    @abstractmethod
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """What this rank's `full_parameters` yields, in that order; the same for as long as the engine lives.

        Names and shapes are those of the model's checkpoint on the hub (`rl_contracts.models.hub_names`), which servers
        load: each expert of a mixture has its own. A tied parameter has one name. The dtype is the one in which they
        are to be served (the cast is left to the route). No collective.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The current weights as a stream of whole parameters by name (collective), one at a time, never a whole copy.

        Each parameter is yielded, whole, on exactly one rank: on rank 0 by most engines, on one rank of each stage
        where there are pipeline stages. A rank that yields nothing takes part all the same, so every rank must exhaust
        its iterator. Tensors have any dtype, are detached, and are not to be kept or written to: the next one may use
        their memory. Adapters are merged into the weights that they adapt.
        """

    def adapter(self) -> AdapterSpec | None:
        """What an update says that carries `adapter_parameters` in place of `full_parameters` (collective, and the same
        on every rank). None, which is the default: only whole weights can be published."""
        return None

    def adapter_specs(self) -> tuple[ParamSpec, ...]:
        """What this rank's `adapter_parameters` yields, in that order; see `param_specs`. A and B in float32."""
        return ()

    def adapter_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A and B of each adapted weight (`AdapterSpec.matrices`), and what else is trained, as `full_parameters` has
        it (collective)."""
        return iter(())

    def without_adapter(self) -> AbstractContextManager[None] | None:
        """For the time of a block, compute with the base weights alone; None: no adapter is trained. A diagnosis asks
        for it, on every rank."""
        return None

    def as_served(self) -> AbstractContextManager[None] | None:
        """For the time of a block, compute with the weights as they are published, where the engine keeps more digits
        than that. None: it cannot, or it always does. The gap gate asks for it, on every rank."""
        return None

    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Save (collective) into a new directory that appears whole or not at all."""

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot | None:
        """Copy what `save` would write to host memory (collective), so that training may go on while it is written.

        Returns:
            what writes this rank's files into the directory `meta.path`, made where it is missing, and says which they
            are. It takes part in no collective, may be called in another thread, once, and before the next snapshot of
            that kind, which may use the same memory. The directory is whole when it was called on every rank, and
            nothing renames it. None, which is the default: this engine does without, and `save` is called.
        """
        return None

    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Load what `save` wrote (collective).

        Raises:
            ModelError: the directory is not what `meta.kind` says.
        """

    @abstractmethod
    def offload(self) -> None:
        """Move weights and optimizer state to host memory, so that a server may use the device. A no-op on CPU."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`."""

    def stats(self) -> dict[str, float | None]:
        """Figures of this rank since the last call, for people: `memory/peak_gib`, `time/train_batch` (seconds in
        `train_batch`), `throughput/mfu` (model FLOPs utilisation in that time; None where the peak of the device is not
        known). None at all by default."""
        return {}

    @abstractmethod
    def destroy(self) -> None:
        """Free memory, shared memory and process groups. Safe to call twice."""
