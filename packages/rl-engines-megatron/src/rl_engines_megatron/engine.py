"""TrainEngine on megatron-core."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.process_group import join, pick_device, read_environment
from rl_contracts.batch.trajectory import PackedBatch, lengths
from rl_contracts.data import FinetuneSpec, ParamSpec, SaveLoadMeta
from rl_contracts.engine import MAX_SKIPPED_STEPS, LossFn, LossWeightFn, OutputFn, Snapshot, TokenOutputs, TrainEngine
from rl_contracts.errors import ConfigError, EngineError, ModelError
from rl_contracts.models import micro_batches
from rl_contracts.models.atomic_directory import new_directory
from rl_contracts.models.config_files import read_config
from rl_contracts.models.step_sums import AUXILIARY, StepSums
from rl_contracts.models.usage import UsageMeter, attended_pairs
from rl_engines_megatron.config import MegatronEngineConfig
from rl_engines_megatron.cpu import without_cuda
from rl_engines_megatron.offload import OffloadedTensors

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_engines_megatron.model.packed_sequences import PackedSequences

OutputCallback = Callable[[TokenOutputs, PackedBatch], Tensor]
"""Function from the outputs of a micro-batch to its loss. The last stage calls it for each micro-batch with tokens."""


class MegatronEngine(TrainEngine):
    """One rank of a language model, critic or reward model on megatron-core.

    Args:
        config: settings of the engine, or None for the defaults.
        strategy: number of ranks along each dimension, or None for one rank.
    """

    def __init__(self, config: MegatronEngineConfig | None = None, strategy: ParallelStrategy | None = None) -> None:
        self.config = config or MegatronEngineConfig()
        self.strategy = strategy or ParallelStrategy()
        self.version = 0
        self._exit = ExitStack()  # closed by `destroy`
        self._steps = self._skipped = 0
        self._usage = UsageMeter()
        self._stepper: Any = None
        self._parts: list[Any] = []
        self._offloaded: OffloadedTensors | None = None
        self._chunks: list[Any] = []
        """Model chunks, wrapped with gradient buffers if they are trained."""

    # ---- initialization and end

    def initialize(self, spec: FinetuneSpec) -> None:
        """See `TrainEngine.initialize`."""
        info, layout = read_environment(), self.strategy
        if layout.world_size != info.world_size:
            raise ConfigError(
                f"allocation megatron:{layout} requires {layout.world_size} ranks, but WORLD_SIZE is "
                f"{info.world_size}. Start {layout.world_size} processes, or change the allocation."
            )
        self._spec = spec
        self.config.check(layout, spec)
        self._device = pick_device(spec.device, info.local_rank)
        replica = layout.world_size // layout.data
        self.parallel = join(info, self._device, self.config.timeout_seconds, True, replica, self._exit)
        self._exit.callback(self._free)
        try:
            self._build()
        except BaseException:  # destroy now, so that the other ranks notice the failure immediately
            self.destroy()
            raise

    def _build(self) -> None:
        spec, config = self._spec, self.config
        with self.parallel.agree_on_errors(f"reading {spec.model_path}"):  # the directory may be missing on one host
            self._hf_config = read_config(spec.model_path, spec.head)
            from rl_engines_megatron.model.checks import partition_from_settings

            stages = (config.interleaved, config.stage_layers)
            partition = partition_from_settings(self._hf_config, self.strategy, *stages, spec.head)
        from rl_engines_megatron.model.building import build
        from rl_engines_megatron.model.experts import ExpertLoad
        from rl_engines_megatron.optimizer import Stepper, wrap
        from rl_engines_megatron.process_groups import make_groups

        torch.manual_seed(spec.seed)
        timeout = config.timeout_seconds
        make_groups(self.strategy, config.interleaved, spec.seed, self._device, timeout, self._exit)
        with without_cuda(self._device):
            self._parts = build(self._hf_config, partition, self.strategy, config, spec, self._device)
        self._expert_load = ExpertLoad([part.routing for part in self._parts if part.routing is not None])
        self._read(spec.model_path, new_head=True)
        self._chunks = self._parts
        if spec.optimizer is not None:
            # also with one rank, so that other layouts can load its states; megatron-core does not split other states
            distributed = spec.optimizer.name == "adamw"
            with without_cuda(self._device):
                self._chunks = wrap(self._parts, distributed)
                dtype, offload = getattr(torch, spec.dtype), config.offload_moments
                self._stepper = Stepper(self._chunks, spec.optimizer, dtype, distributed, offload)

    def _read(self, path: str, new_head: bool) -> None:
        from rl_engines_megatron.weights.transfer import StoredWeights, load_weights

        with self.parallel.agree_on_errors(f"loading {path}"):
            load_weights(self._parts, StoredWeights(path), new_head)

    def destroy(self) -> None:
        """See `TrainEngine.destroy`."""
        self._exit.close()

    def _free(self) -> None:
        from rl_engines_megatron.model.building import release

        release(self._parts)
        self._stepper, self._parts, self._chunks = None, [], []
        self.__dict__.pop("_expert_load", None)  # not set if initialize failed
        gc.collect()  # megatron-core's modules and hooks form reference cycles
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- training

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.train_batch`."""
        stepper, settings = self._stepper, self._spec.optimizer
        if stepper is None or settings is None:
            raise EngineError(
                "train_batch requires an optimizer, but FinetuneSpec.optimizer is None. Set it, or call only forward "
                "and eval_batch."
            )
        start_time = time.perf_counter()
        bins, denominator, tokens, pairs = self._begin(batch, loss_weight_fn)
        sums = StepSums(self._reports_stats)
        self._expert_load.begin(tokens, self._device)

        def scaled_loss(outputs: TokenOutputs, packed: PackedBatch) -> Tensor:
            loss, stats = loss_fn(outputs, packed)
            sums.add(loss, stats)
            return loss / denominator

        with without_cuda(self._device):
            stepper.zero_grad()
            self._run(batch, bins, scaled_loss, train=True)
            norm = stepper.norm()
        self._expert_load.end(tokens, sums)
        result = sums.reduce(self.parallel)
        result["loss"] /= denominator
        if AUXILIARY in result:
            result[AUXILIARY] /= tokens
        rate = settings.rate(self._steps, self._spec.total_steps)
        applied = math.isfinite(norm) and math.isfinite(result["loss"])
        if applied:
            with without_cuda(self._device):
                stepper.step(norm, rate)
            self._steps, self._skipped = self._steps + 1, 0
        else:
            self._skipped += 1
            if self._skipped > MAX_SKIPPED_STEPS:
                raise EngineError(
                    f"loss or gradients were not finite in {self._skipped} consecutive steps (allowed: "
                    f"{MAX_SKIPPED_STEPS}). Lower the learning rate, and inspect the last batch with "
                    "`rl replay`."
                )
        self._usage.add(time.perf_counter() - start_time, tokens, pairs)
        return result | {"grad_norm": norm, "lr": rate, "applied": float(applied), "tokens": float(tokens)}

    def _begin(self, batch: TensorDict, loss_weight_fn: LossWeightFn) -> tuple[list[list[int]], float, int, int]:
        """Return the micro-batches, and denominator, tokens and `attended_pairs` over all ranks."""
        bins = self._plan(batch)
        weight = loss_weight_fn(batch).detach().to("cpu", torch.float64)
        sizes, windows = lengths(batch), self._parts[0].partition.architecture.windows
        sums = torch.stack([weight, sizes.sum().double(), attended_pairs(sizes, windows)])
        denominator, tokens, pairs = self.parallel.sum_over_replicas(sums).tolist()
        if not (denominator > 0 and tokens > 0):
            raise EngineError(
                f"minibatch: expected tokens and a positive denominator over all ranks, found {int(tokens)} tokens and "
                f"a denominator of {denominator}. Check that loss_mask is True for some tokens."
            )
        return bins, denominator, int(tokens), int(pairs)

    def _plan(self, batch: TensorDict) -> list[list[int]]:
        """Return the batch rows of each micro-batch (collective).

        With interleaved stages, the number of micro-batches is a multiple of the number of pipeline ranks.
        """
        multiple = self.strategy.pipeline if self.config.interleaved > 1 else 1
        return micro_batches.plan(batch, self._spec, self.parallel, multiple)

    def _run(self, batch: TensorDict, bins: list[list[int]], on_outputs: OutputCallback, train: bool) -> None:
        """Run all micro-batches through the pipeline (collective).

        Args:
            batch: the batch.
            bins: rows of each micro-batch.
            on_outputs: function that the last stage calls for each micro-batch with tokens, in the order of `bins`.
            train: whether to compute gradients.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rl_engines_megatron.model.packed_sequences import make_packed_sequences, padded_lengths

        divisor = self.strategy.tensor if self.config.sequence_parallel else 1
        packed_batches = [packed.to(self._device) for _, packed in micro_batches.packed(batch, bins)]
        longest = 1  # stages exchange the length of each micro-batch
        # with interleaved stages, this exchange would deadlock, so all micro-batches get the same length
        if self.config.interleaved > 1:
            longest = max(sum(padded_lengths(packed, divisor)) for packed in packed_batches)
        inputs = [(packed, make_packed_sequences(packed, divisor, self._device, longest)) for packed in packed_batches]

        def step(data: Any, model: Any) -> tuple[Any, Any]:
            packed, rows = next(data)
            part = getattr(model, "module", model)
            return part.run(rows, model), partial(self._loss, packed, rows, on_outputs)

        for part in self._parts:
            part.train(train)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(inputs) for _ in self._parts],
            model=self._chunks,
            num_microbatches=len(inputs),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=not train,
        )

    def _loss(
        self, packed: PackedBatch, rows: PackedSequences, on_outputs: OutputCallback, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, None]:
        """Return the loss of a micro-batch in the form that megatron-core expects.

        Args:
            packed: the micro-batch.
            rows: its layout over the ranks of the replica.
            on_outputs: see `_run`.
            states: per-token outputs of the last stage.
        """
        token_count = torch.zeros((), dtype=torch.int, device=self._device)
        anchor = states[0].sum() * 0.0  # a zero whose backward runs through the whole model
        if packed.num_tokens == 0:
            return anchor, token_count, None
        values = [rows.outputs(state, of_previous=self._spec.head != "score") for state in states]
        if self._spec.head == "lm":
            outputs = TokenOutputs(*values)
        else:
            zero = torch.zeros_like(values[0]).detach()
            outputs = TokenOutputs(zero, zero, values[0])
        return on_outputs(outputs, packed) + anchor, token_count, None

    @property
    def _reports_stats(self) -> bool:
        """True if this rank reports the statistics of its replica: one rank of the last stage does."""
        from megatron.core import parallel_state

        return bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def stats(self) -> dict[str, float | None]:
        """Return the metrics of `UsageMeter.read` and `ExpertLoad.read` since the last call."""
        flops_of = partial(self._parts[0].partition.architecture.step_flops, self._spec.head)
        usage = self._usage.read(flops_of, self._device, self._spec.dtype, self.parallel.world_size)
        return usage | self._expert_load.read()

    # ---- without training

    @torch.no_grad()
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.eval_batch`."""
        bins, denominator, _, _ = self._begin(batch, loss_weight_fn)
        sums = StepSums(self._reports_stats)

        def summed_loss(outputs: TokenOutputs, packed: PackedBatch) -> Tensor:
            loss, stats = loss_fn(outputs, packed)
            sums.add(loss, stats)
            return loss

        with without_cuda(self._device):
            self._run(batch, bins, summed_loss, train=False)
        result = sums.reduce(self.parallel)
        result["loss"] /= denominator
        return result

    @torch.no_grad()
    def forward(self, batch: TensorDict, output_fn: OutputFn) -> Tensor:
        """See `TrainEngine.forward`."""
        bins = self._plan(batch)
        result, row_lists = torch.zeros(batch["attention_mask"].shape), iter([rows for rows in bins if rows])

        def store_values(outputs: TokenOutputs, packed: PackedBatch) -> Tensor:
            values = output_fn(outputs, packed).cpu().to(result.dtype)
            result[torch.tensor(next(row_lists))[packed.sequence_of_token.cpu()], packed.position_ids.cpu()] = values
            return values.new_zeros((), device=self._device)

        with without_cuda(self._device):
            self._run(batch, bins, store_values, train=False)
        return self._from_last_stage(result)

    def _from_last_stage(self, result: Tensor) -> Tensor:
        """Broadcast the result of the last stage to all stages and return it (collective)."""
        from megatron.core import parallel_state

        if self.strategy.pipeline > 1:
            broadcast = result.to(self._device)
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(broadcast, source, group=parallel_state.get_pipeline_model_parallel_group())
            result = broadcast.cpu()
        return result

    # ---- weights

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """See `TrainEngine.param_specs`.

        Tensor rank 0 of each stage of the first replica yields the parameters of the stage, and each expert rank its
        experts.
        """
        from rl_engines_megatron.weights.transfer import own_parameters

        dtype = self.config.serve_dtype or self._spec.dtype
        return tuple(
            ParamSpec(name, shape, dtype)
            for _, parameter in own_parameters(self._parts)
            for name, shape in zip(parameter.sources, parameter.layout.shapes(), strict=True)
        )

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.full_parameters`."""
        from rl_engines_megatron.weights.transfer import full_parameters

        return full_parameters(self._parts)

    def save(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.save`. For kind `state`, each rank first copies its files to host memory."""
        from rl_engines_megatron.weights.export import save_hugging_face
        from rl_engines_megatron.weights.transfer import full_parameters

        match meta.kind:
            case "hf":
                dtype = self.config.serve_dtype or self._spec.dtype
                config, source = self._hf_config, Path(self._spec.model_path)
                weights = full_parameters(self._parts, spread=True)
                with new_directory(meta.path, self.parallel) as scratch:
                    save_hugging_face(weights, config, source, meta, scratch, dtype, self.parallel)
            case "state":
                write = self._copy_state(meta)
                with new_directory(meta.path, self.parallel) as scratch:
                    write(scratch)
            case _:
                raise _unknown_kind(meta)

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot | None:
        """See `TrainEngine.snapshot`. Each rank keeps the files to write in host memory until they are written."""
        from rl_engines_megatron.weights.export import copy_hugging_face
        from rl_engines_megatron.weights.transfer import full_parameters

        match meta.kind:
            case "hf":
                dtype = self.config.serve_dtype or self._spec.dtype
                source = Path(self._spec.model_path)
                weights = full_parameters(self._parts, spread=True)
                return copy_hugging_face(weights, self._hf_config, source, meta, dtype, self.parallel)
            case "state":
                return partial(self._copy_state(meta), Path(meta.path))
        return None

    def _copy_state(self, meta: SaveLoadMeta) -> Callable[[Path], list[Path]]:
        from rl_engines_megatron.weights.checkpoint import copy_state

        with without_cuda(self._device):
            return copy_state(self._parts, self._stepper, self._counters(), meta.path, self.parallel)

    def load(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.load`. Kind `hf` replaces only the weights."""
        from rl_engines_megatron.weights.checkpoint import load_state

        match meta.kind:
            case "hf":
                self._read(meta.path, new_head=False)
                if self._stepper is not None:
                    self._stepper.weights_changed()
            case "state":
                with without_cuda(self._device):
                    counters = load_state(self._parts, self._stepper, meta.path, self.parallel)
                self.version, self._steps, self._skipped = (counters[name] for name in self._counters())
            case _:
                raise _unknown_kind(meta)

    def _counters(self) -> dict[str, int]:
        return {"version": self.version, "steps": self._steps, "skipped": self._skipped}

    def offload(self) -> None:
        """See `TrainEngine.offload`. Without effect on a CPU."""
        if self._device.type == "cuda" and self._offloaded is None:
            self._offloaded = OffloadedTensors(tensor for tensor in self._tensors() if tensor.is_cuda)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that stay in memory between two steps: weights, buffers, gradients and optimizer state."""
        for part in self._parts:
            yield from part.buffers()
            for parameter in part.parameters():
                yield parameter
                if (gradient := getattr(parameter, "main_grad", None)) is not None:
                    yield gradient
        if self._stepper is not None:
            yield from self._stepper.tensors()


def _unknown_kind(meta: SaveLoadMeta) -> ModelError:
    return ModelError(f"{meta.path}: expected kind hf or state, found {meta.kind!r}.")
