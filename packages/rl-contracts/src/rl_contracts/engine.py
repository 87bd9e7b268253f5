"""Contract of a train engine: the model, its optimizer and the ranks that store them.

A loss function gets one packed micro-batch and returns *sums*. The engine divides once, by the minibatch's denominator
over all micro-batches and data-parallel ranks. Therefore a gradient does not depend on how a batch was split.
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
    "MAX_SKIPPED_STEPS",
    "LossFn",
    "LossWeightFn",
    "OutputFn",
    "Snapshot",
    "Stats",
    "TokenOutputs",
    "TrainEngine",
    "TrainEngineConfig",
]

MAX_SKIPPED_STEPS = 8
"""Consecutive steps that an engine may skip for non-finite gradients. Some batches cause one; more in a row mean that
training has diverged, and generating further batches wastes time."""


@dataclass(slots=True)
class TokenOutputs:
    """Model outputs for each token of a packed micro-batch: float32 [N], entry t from the hidden state at t-1.

    The first token of each sequence has no previous state, so its entries are 0. The scores of a reward model are the
    exception: they come from the hidden state at t.
    """

    logprobs: torch.Tensor
    """Log-probs [N]: log_softmax(logits / the sequence's temperature) at the actual token; 0 for a model with a scalar
    head."""
    entropy: torch.Tensor
    """Entropy [N] of softmax(logits / temperature), in nats; 0 for a model with a scalar head. It has a gradient only
    with `FinetuneSpec.entropy_grad`."""
    values: torch.Tensor | None = None
    """Outputs [N] of a scalar head, with gradient; None for a language model.

    Critic: entry t is the value before token t, from the hidden state at t-1; 0 for the first token of a sequence.
    Reward model: entry t is the score of the sequence up to and including token t, from the hidden state at t; a loss
    reads it at the last token.
    """


Stats = dict[str, "tuple[torch.Tensor, torch.Tensor]"]
"""Statistics of a loss: name to (sum, denominator), both scalars on the device of the outputs.

The engine sums both over micro-batches and ranks, and then divides. For a name that ends in `/max` it takes the maximum
of the first entries and ignores the denominators.
"""

LossFn = Callable[[TokenOutputs, "PackedBatch"], "tuple[torch.Tensor, Stats]"]
"""Loss function `(outputs, packed) -> (loss_sum, stats)`; the loss is a scalar with gradient, not yet divided."""

LossWeightFn = Callable[["TensorDict"], "torch.Tensor"]
"""Function `(this rank's sequences) -> scalar`: contribution to the denominator, which the engine sums over ranks."""

Snapshot = Callable[[], "Sequence[Path]"]
"""Function that writes the copied data of this rank and returns the paths of the files; see `TrainEngine.snapshot`."""

OutputFn = Callable[[TokenOutputs, "PackedBatch"], "torch.Tensor"]
"""Function `(outputs, packed) -> [N]`: the value of each token in the result of `forward`."""


@dataclass
class TrainEngineConfig(Settings):
    """Base class of an engine's own settings, which complement the run's settings (`FinetuneSpec`).

    An engine `package.module:MyEngine` requires a class `package.module:MyEngineConfig` in the same module. That module
    must be importable without torch, and all fields of the class must have defaults.
    """

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Reject settings that the engine cannot run with. The default accepts all.

        Called before any process starts, when the model may not be available yet, and again by `initialize`.

        Raises:
            ConfigError: settings conflict; the message names them and the values to use instead.
        """

    def memory(
        self, strategy: ParallelStrategy, spec: FinetuneSpec, sizes: ModelSizes, micro_batches: int
    ) -> dict[str, float]:
        """Return the peak device memory of a rank in bytes, by use, for `rl plan`. Empty by default (unknown).

        Args:
            strategy: parallel layout.
            spec: precision, optimizer and micro-batch size.
            sizes: sizes of the model.
            micro_batches: number of micro-batches of a rank in one optimizer step.
        """
        return {}


class TrainEngine(ABC):
    """One rank of a model in training (SPMD: every rank makes the same calls in the same order).

    The constructor is `Engine(config, strategy)`: the engine's `TrainEngineConfig` and the parallel layout.
    `initialize` receives the settings of the run. `batch` arguments are this rank's sequences on the CPU, in the format
    of `rl_contracts.batch.trajectory`; a rank may have none.
    """

    parallel: ParallelContext
    """Ranks and process groups; set by `initialize`."""

    version: int = 0
    """Number of training batches applied. The actor sets it; the engine saves and restores it."""

    @abstractmethod
    def initialize(self, spec: FinetuneSpec) -> None:
        """Join the process group, load the model and create the optimizer.

        Raises:
            ModelError: the directory has no weights, or the architecture is not supported.
            ConfigError: the parallel layout does not fit the number of ranks, or `TrainEngineConfig.check` fails.
        """

    @abstractmethod
    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """Run one optimizer step on one minibatch.

        Returns:
            `loss` (the quotient), `grad_norm` (before clipping), `lr`, `applied` (1.0, or 0.0 if the step was skipped
            for non-finite gradients), `tokens` (over all ranks), and each statistic of the loss; the same on every
            rank.

        Raises:
            EngineError: the denominator over all ranks is zero, a sequence is longer than a micro-batch, or more than
                `MAX_SKIPPED_STEPS` consecutive steps were skipped.
        """

    @abstractmethod
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """Return `loss` and the statistics of the loss without an optimizer step, the same on every rank."""

    @abstractmethod
    def forward(self, batch: TensorDict, output_fn: OutputFn) -> torch.Tensor:
        """Return `output_fn` of every token without gradient: [B, T] on the CPU, in batch order, 0 at padding."""

    @abstractmethod
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Return the parameters that this rank's `full_parameters` yields, in that order; constant for an engine.

        Names and shapes match the model's checkpoint on the hub (`rl_contracts.models.hub_names`), which servers load:
        in an MoE each expert has separate parameters. A tied parameter has one name. The dtype is the served dtype; the
        weight route does the cast. Not a collective.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current weights as (name, full parameter) one at a time, without a full copy (collective).

        Each parameter is yielded on exactly one rank: by most engines on rank 0, with pipeline parallelism on one rank
        of each stage. Ranks that yield nothing take part in the collectives too, so every rank must exhaust its
        iterator. Tensors are detached and have any dtype. The caller must not keep or modify a tensor: the next tensor
        may reuse its memory. Adapters are merged into the weights that they adapt.
        """

    def adapter(self) -> AdapterSpec | None:
        """Return the adapter description for updates with `adapter_parameters` (collective, equal on all ranks).

        None, the default, means that only full weights can be published.
        """
        return None

    def adapter_specs(self) -> tuple[ParamSpec, ...]:
        """Return the parameters that this rank's `adapter_parameters` yields, in that order; A and B are float32."""
        return ()

    def adapter_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of each adapted weight (`AdapterSpec.matrices`) and all other trained parameters (collective).

        The other parameters have the names and values of `full_parameters`.
        """
        return iter(())

    def without_adapter(self) -> AbstractContextManager[None] | None:
        """Return a context manager in which the model computes with the base weights only, or None without an adapter.

        The diagnosis of a log-prob gap and the canary check use it, on every rank.
        """
        return None

    def as_served(self) -> AbstractContextManager[None] | None:
        """Return a context manager in which the model computes with the weights rounded to the served dtype.

        None means that the engine cannot do this, or that its weights already have that precision. The log-prob gap
        gate uses it, on every rank.
        """
        return None

    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Save into a new directory, which appears complete or not at all (collective)."""

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot | None:
        """Copy the data of `save` to host memory (collective), so that training can continue while it is written.

        Returns:
            a function that writes this rank's files into the directory `meta.path`, which it creates if missing, and
            returns their paths; or None, the default, if the engine has no snapshots and the caller must use `save`.
            The function is not a collective and may run in another thread. It may be called once, before the next
            snapshot of that kind, which may reuse the memory. The directory is complete when all ranks have called it;
            it is not renamed.
        """
        return None

    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Load a directory that `save` wrote (collective).

        Raises:
            ModelError: the directory does not contain data of `meta.kind`.
        """

    @abstractmethod
    def offload(self) -> None:
        """Move weights and optimizer state to host memory, so that a server can use the device. No effect on CPU."""

    @abstractmethod
    def onload(self) -> None:
        """Move weights and optimizer state back to the device after `offload`."""

    def stats(self) -> dict[str, float | None]:
        """Return metrics of this rank since the last call, for display. Empty by default.

        `memory/peak_gib`: peak memory in GiB. `time/train_batch`: seconds in `train_batch`. `throughput/mfu`: model
        FLOPs utilization in that time, or None if the peak FLOPs of the device are unknown.
        """
        return {}

    @abstractmethod
    def destroy(self) -> None:
        """Free memory, shared memory and process groups. Safe to call twice."""
