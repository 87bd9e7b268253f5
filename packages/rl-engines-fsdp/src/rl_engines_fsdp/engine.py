"""TrainEngine on PyTorch FSDP2."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.process_group import join, pick_device, read_environment
from rl_contracts.batch.trajectory import PackedBatch, lengths
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import AdapterSpec, FinetuneSpec, ParamSpec, SaveLoadMeta
from rl_contracts.engine import MAX_SKIPPED_STEPS, LossFn, LossWeightFn, OutputFn, Snapshot, TokenOutputs, TrainEngine
from rl_contracts.errors import ConfigError, EngineError, ModelError
from rl_contracts.models import micro_batches
from rl_contracts.models.attention_windows import layer_windows
from rl_contracts.models.config_files import read_config
from rl_contracts.models.hub_names import HubSlice, hub_slices
from rl_contracts.models.sizes import sizes_of
from rl_contracts.models.step_sums import AUXILIARY, StepSums
from rl_contracts.models.usage import UsageMeter, attended_pairs
from rl_contracts.weights.adapters import prefix_checksum
from rl_engines_fsdp.checkpoint.adapter import load_adapter, save_adapter
from rl_engines_fsdp.checkpoint.hugging_face import copy_hugging_face, save_hugging_face
from rl_engines_fsdp.checkpoint.shards import HostCopies, shards_of, write_shards
from rl_engines_fsdp.checkpoint.state import COUNTERS, load_state, save_state, state_of
from rl_engines_fsdp.config import FSDPEngineConfig, check_heads
from rl_engines_fsdp.model import lora
from rl_engines_fsdp.model.inputs import image_filler, model_inputs
from rl_engines_fsdp.model.maker import ModelMaker
from rl_engines_fsdp.optimizer import clip, make_optimizer, set_rate, squared_norm
from rl_engines_fsdp.ranks import sharding
from rl_engines_fsdp.usage import device_memory, step_flops

if TYPE_CHECKING:
    from tensordict import TensorDict


class FSDPEngine(TrainEngine):
    """One rank of a language model, critic or reward model, sharded over data, context and tensor ranks.

    Sharding uses `fully_shard`. A single process that computes in float32 has nothing to shard or cast, so its model is
    not wrapped.

    Args:
        config: settings.
        strategy: number of data, context and tensor ranks. None: all processes of torchrun are data-parallel ranks.
    """

    def __init__(self, config: FSDPEngineConfig, strategy: ParallelStrategy | None = None) -> None:
        self.config = config
        self.strategy = strategy
        self.version = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._copies = HostCopies()
        self._adapter: AdapterSpec | None = None
        self._exit = ExitStack()  # callbacks of `destroy`, run in reverse order
        self._steps = 0
        self._skipped = 0
        self._first = True
        """True until the first call of `train_batch`."""
        self._usage = UsageMeter()

    # ---- setup and teardown

    def initialize(self, spec: FinetuneSpec) -> None:
        """See `TrainEngine.initialize`."""
        info = read_environment()
        if self.strategy is not None and self.strategy.world_size != info.world_size:
            raise ConfigError(
                f"allocation fsdp:{self.strategy} requires {self.strategy.world_size} ranks, but WORLD_SIZE is "
                f"{info.world_size}. Start {self.strategy.world_size} processes, or change the allocation."
            )
        self._spec = spec
        self._layout = self.strategy or ParallelStrategy(info.world_size)
        self.config.check(self._layout, spec)
        if spec.deterministic:
            _make_deterministic(self._exit)
        self._device = pick_device(spec.device, info.local_rank)
        if self.config.offload and self._device.type != "cuda":
            raise ConfigError(
                "offload=true requires CUDA: on a CPU all tensors are in host memory already. Set offload=false."
            )
        sharded = info.world_size > 1 or spec.dtype != "float32" or self.config.offload
        size = self._layout.model_size
        self.parallel = join(info, self._device, self.config.timeout_seconds, sharded, size, self._exit)
        self._exit.callback(self._free)
        torch.manual_seed(spec.seed)
        self._maker = ModelMaker(self.config, spec, self._layout, self._device, self.parallel, sharded)
        try:
            # the directory may be missing on one host
            with self.parallel.agree_on_errors(f"reading {spec.model_path}"):
                config = read_config(spec.model_path, spec.head)
                text_config = config.get_text_config()  # has standard names for sizes, unlike some `config.json`
                check_heads(
                    {n: getattr(text_config, n, None) for n in ("num_attention_heads", "num_key_value_heads")},
                    self._layout,
                )
            self._model = self._maker.make(config)
            # without an image, the other ranks would wait for this one in the collectives of the vision encoder, which
            # gather its weights even if it is frozen
            self._filler = image_filler(self._model.vision if sharded else None)
            self._check_memory(1, 1)  # everything that does not depend on a batch
            with self.parallel.agree_on_errors("preparing to publish and to train"):
                if self.parallel.is_main:  # only rank 0 yields parameters and knows the names in the directory
                    self._hub_slices = hub_slices(self._model.model, self._model.hugging_face_parameters())
                if spec.optimizer is not None:
                    self._optimizer = make_optimizer(self._model, spec.optimizer)
        except BaseException:  # leave the process group, so that the other ranks notice at once
            self.destroy()
            raise

    def destroy(self) -> None:
        """See `TrainEngine.destroy`."""
        self._exit.close()

    def _free(self) -> None:
        self._optimizer, self._copies = None, HostCopies()
        self.__dict__.pop("_model", None)  # absent if initialize failed
        self.__dict__.pop("_maker", None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- training

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.train_batch`."""
        optimizer, settings = self._optimizer, self._spec.optimizer
        if optimizer is None or settings is None:
            raise EngineError(
                "train_batch requires an optimizer, but FinetuneSpec.optimizer is None. Set it, or call only forward "
                "and eval_batch."
            )
        start = time.perf_counter()
        bins, denominator, tokens, pairs = self._begin(batch, loss_weight_fn)
        if self._first:
            sizes, self._first = lengths(batch), False
            self._check_memory(max([1, *(int(sizes[indices].sum()) for indices in bins)]), len(bins))
        optimizer.zero_grad(set_to_none=True)
        sums = StepSums(self.parallel.is_dp_leader)
        # FSDP averages gradients over data and context ranks (see sharding.shard); the loss is a sum
        factor = self._layout.data * self._layout.context / denominator
        for index, (_, packed) in enumerate(micro_batches.packed(batch, bins)):
            last = index == len(bins) - 1
            sharding.sync_gradients(self._model, last or self.config.sync_every_micro_batch, last)
            self._backward(packed, loss_fn, factor, factor * denominator / tokens, sums)
        if self._maker.tensor_gradients is not None:
            self._maker.tensor_gradients.finish(self.parallel)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        sums.put("grad_norm", squared_norm(gradients, self.parallel.world_size).to(self._device))
        result = sums.reduce(self.parallel)
        result["loss"] /= denominator
        if AUXILIARY in result:
            result[AUXILIARY] /= tokens
        result["grad_norm"] **= 0.5
        rate = settings.rate(self._steps, self._spec.total_steps)
        applied = self._step(optimizer, settings, gradients, result, rate)
        self._usage.add(time.perf_counter() - start, tokens, pairs)
        return result | {"lr": rate, "applied": float(applied), "tokens": float(tokens)}

    def _check_memory(self, tokens: int, micro_batches: int) -> None:
        """Reject a step that does not fit in GPU memory (collective).

        Args:
            tokens: tokens of the largest micro-batch.
            micro_batches: number of micro-batches in the step.

        Raises:
            ConfigError: the step does not fit, and this is the only rank; see `FSDPEngineConfig.check_memory`.
            EngineError: the step does not fit on one of several ranks. Every rank raises it.
        """
        available, inner = device_memory(self._device), self._model.model
        if available is None or self._spec.optimizer is None:
            return
        try:
            sizes = sizes_of(inner, inner.config)
        except (AttributeError, RuntimeError):  # the configuration has no single size for all layers
            return
        spec = replace(self._spec, micro_batch=MicroBatchConfig(tokens))
        with self.parallel.agree_on_errors("estimating the memory of a step"):
            self.config.check_memory(self._layout, spec, sizes, micro_batches, available)

    def _begin(self, batch: TensorDict, loss_weight_fn: LossWeightFn) -> tuple[list[list[int]], float, int, int]:
        """Return the micro-batches, and denominator, tokens and `attended_pairs` over all ranks."""
        bins = micro_batches.plan(batch, self._spec, self.parallel)
        sizes, windows = lengths(batch), layer_windows(self._model.model.config)
        weight = loss_weight_fn(batch).detach().to("cpu", torch.float64)
        sums = torch.stack([weight, sizes.sum().double(), attended_pairs(sizes, windows)])
        denominator, tokens, pairs = self.parallel.sum_over_replicas(sums).tolist()
        if not (denominator > 0 and tokens > 0):
            raise EngineError(
                f"minibatch: expected tokens and a positive denominator over all ranks, found {int(tokens)} tokens and "
                f"a denominator of {denominator}. Check that loss_mask is True for some tokens."
            )
        return bins, denominator, int(tokens), int(pairs)

    def _backward(
        self, packed: PackedBatch, loss_fn: LossFn, factor: float, factor_per_token: float, sums: StepSums
    ) -> None:
        outputs, device_batch, auxiliary = self._outputs(packed)
        if device_batch is None:
            # no tokens here, but the collectives of the other ranks require this rank
            torch.autograd.backward(_anchor(outputs))
            return
        loss_sum, stats = loss_fn(outputs, device_batch)
        sums.add(loss_sum, stats)
        if not loss_sum.requires_grad:
            loss_sum = loss_sum + _anchor(outputs)
        total, balance = loss_sum * factor, self._model.balance
        if auxiliary is not None and balance is not None:
            # each context rank has a different part of the sum; tensor ranks have equal copies
            sums.put(AUXILIARY, auxiliary / self._layout.tensor)
            total = total + auxiliary * (balance.coefficient * factor_per_token)
        torch.autograd.backward(total)

    def _outputs(self, packed: PackedBatch) -> tuple[TokenOutputs, PackedBatch | None, Tensor | None]:
        """Run the model on a micro-batch.

        Returns:
            the outputs, the micro-batch on the device (None if it has no tokens), and the sum of the router auxiliary
            loss (None if not required).
        """
        dtype, count, vision = getattr(torch, self._spec.dtype), packed.num_tokens, self._model.vision
        # agree here, because the other ranks would wait in the collectives of the forward
        with nullcontext() if vision is None else self.parallel.agree_on_errors("computing image features"):
            inputs = model_inputs(packed, self._filler, vision, self._device, dtype)
        outputs, auxiliary = self._token_outputs(*inputs)
        if count == 0:
            return outputs, None, None
        if len(inputs.input_ids) > count:  # without the filler
            outputs = TokenOutputs(outputs.logprobs[:count], outputs.entropy[:count])
        return outputs, packed if self._device.type == "cpu" else packed.to(self._device), auxiliary

    def _token_outputs(self, *inputs: Any) -> tuple[TokenOutputs, Tensor | None]:
        outputs, count = self._model(*inputs), 2 if self._model.head == "lm" else 3
        return TokenOutputs(*outputs[:count]), outputs[count] if len(outputs) > count else None

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        settings: OptimizerConfig,
        gradients: list[Tensor],
        result: dict[str, float],
        rate: float,
    ) -> bool:
        """Take the optimizer step, or skip it if loss or gradients are not finite; return whether it was taken."""
        if not (math.isfinite(result["grad_norm"]) and math.isfinite(result["loss"])):
            self._skipped += 1
            optimizer.zero_grad(set_to_none=True)
            if self._skipped > MAX_SKIPPED_STEPS:
                raise EngineError(
                    f"loss or gradients were not finite in {self._skipped} consecutive steps (allowed: "
                    f"{MAX_SKIPPED_STEPS}). Lower the learning rate, and inspect the last batch with "
                    "`rl replay`."
                )
            return False
        clip(gradients, result["grad_norm"], settings.max_grad_norm)
        set_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._skipped = 0
        return True

    def stats(self) -> dict[str, float | None]:
        """Return `memory/peak_gib`, `time/train_batch` and `throughput/mfu` of this rank; see `UsageMeter.read`.

        The last two cover the steps since the last call.
        """
        flops_of = partial(step_flops, self._model)
        return self._usage.read(flops_of, self._device, self._spec.dtype, self.parallel.world_size)

    # ---- evaluation and inference

    @torch.no_grad()
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.eval_batch`."""
        bins, denominator, _, _ = self._begin(batch, loss_weight_fn)
        sums = StepSums(self.parallel.is_dp_leader)
        for _, outputs, packed in self._run(batch, bins):
            sums.add(*loss_fn(outputs, packed))
        result = sums.reduce(self.parallel)
        result["loss"] /= denominator
        return result

    @torch.no_grad()
    def forward(self, batch: TensorDict, output_fn: OutputFn) -> Tensor:
        """See `TrainEngine.forward`."""
        bins = micro_batches.plan(batch, self._spec, self.parallel)
        result = torch.zeros(batch["attention_mask"].shape)
        for indices, outputs, packed in self._run(batch, bins):
            values = output_fn(outputs, packed)
            sequence_of_token = torch.tensor(indices)[packed.sequence_of_token.cpu()]
            result[sequence_of_token, packed.position_ids.cpu()] = values.cpu().to(result.dtype)
        return result

    def _run(self, batch: TensorDict, bins: list[list[int]]) -> Iterator[tuple[list[int], TokenOutputs, PackedBatch]]:
        for indices, packed in micro_batches.packed(batch, bins):
            outputs, device_batch, _ = self._outputs(packed)
            if device_batch is not None:
                yield indices, outputs, device_batch
        sharding.reshard(self._model)

    # ---- publishing, saving and loading weights

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """See `TrainEngine.param_specs`. Only rank 0 yields parameters; the dtype is the served dtype."""
        if not self.parallel.is_main:
            return ()
        return tuple(self._spec_of(hub_slice) for slices in self._hub_slices.values() for hub_slice in slices)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.full_parameters`."""
        for name, value in sharding.full_parameters(self._model):
            yield from self._hub_tensors(name, value)

    def _spec_of(self, hub_slice: HubSlice) -> ParamSpec:
        return ParamSpec(hub_slice.name, hub_slice.shape, self.config.serve_dtype or self._spec.dtype)

    def _hub_tensors(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Split a whole parameter into the tensors that the checkpoint stores; yield them on rank 0 only."""
        for hub_slice in self._hub_slices[name] if self.parallel.is_main else ():
            yield (
                hub_slice.name,
                value.as_strided(hub_slice.shape, hub_slice.strides, value.storage_offset() + hub_slice.offset),
            )

    def adapter(self) -> AdapterSpec | None:
        """See `TrainEngine.adapter`. The first call, and the first after `load`, computes checksums of the base."""
        if self.config.lora is None or self._spec.head != "lm":
            return None
        if self._adapter is None:
            self._adapter = self._describe_adapter(self._model.adapters())
        return self._adapter

    def _describe_adapter(self, pairs: dict[str, lora.Pair]) -> AdapterSpec | None:
        """Return the adapter spec, or None if the checkpoint stores an adapted weight split or transposed."""
        scales, base_checksums, fields = dict[str, float](), dict[str, str](), None
        for name, parameter in self._model.hugging_face_parameters():
            if parameter.requires_grad:
                continue
            for tensor_name, value in self._hub_tensors(name, sharding.whole(parameter.detach())):
                base_checksums[tensor_name] = prefix_checksum(value)
                if name in pairs and value.shape == parameter.shape and value.is_contiguous():
                    scales[tensor_name] = pairs[name].scaling
        if len(scales) == len(pairs):
            fields = asdict(AdapterSpec(scales, base_checksums, self.config.serve_dtype or self._spec.dtype))
        shared_fields = self.parallel.broadcast_json(fields)
        return shared_fields and AdapterSpec(**shared_fields)

    def adapter_specs(self) -> tuple[ParamSpec, ...]:
        """See `TrainEngine.adapter_specs`. Only rank 0 yields parameters."""
        if not self.parallel.is_main:
            return ()
        matrices = (
            ParamSpec(name, tuple(matrix.shape), "float32")
            for weight, pair in self._model.adapters().items()
            for name, matrix in zip(self._matrices(weight), (pair.a, pair.b), strict=True)
        )
        other_specs = (
            self._spec_of(hub_slice) for name, _ in self._trained_whole() for hub_slice in self._hub_slices[name]
        )
        return (*matrices, *other_specs)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.adapter_parameters`."""
        for weight, pair in self._model.adapters().items():
            matrices = pair.whole()
            if self.parallel.is_main:
                yield from zip(self._matrices(weight), matrices, strict=True)
        for name, parameter in self._trained_whole():
            yield from self._hub_tensors(name, sharding.whole(parameter.detach()))

    def _matrices(self, weight: str) -> tuple[str, str]:
        return AdapterSpec.matrices(self._hub_slices[weight][0].name)

    def _trained_whole(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the trained parameters that are not adapters, by Hugging Face name; empty without adapters."""
        named = [] if self.config.lora is None else self._model.hugging_face_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def without_adapter(self) -> AbstractContextManager[None] | None:
        """See `TrainEngine.without_adapter`."""
        return None if self.config.lora is None else lora.switched_off(self._model)

    def as_served(self) -> AbstractContextManager[None] | None:
        """See `TrainEngine.as_served`.

        Available only if the model computes in float32 and `serve_dtype` has less precision. The context stores a copy
        of this rank's parameters. None with adapters, because they are merged before the cast.
        """
        served = self.config.serve_dtype or self._spec.dtype
        if self._spec.dtype != "float32" or served == "float32" or self.config.lora is not None:
            return None
        return sharding.rounded(self._model, getattr(torch, served), self.parallel)

    def save(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.save`. Kind `hf` merges adapters into the weights; kind `adapter` saves only adapters."""
        config, parallel, dtype = self.config, self.parallel, self.config.serve_dtype or self._spec.dtype
        match meta.kind:
            case "hf":
                save_hugging_face(self._model, meta, dtype, parallel)
            case "state":
                save_state(self._state(), meta.path, parallel)
            case "adapter" if config.lora is not None:
                save_adapter(self._model, config.lora, self._spec.model_path, meta.path, dtype, parallel)
            case _:
                raise _unknown_kind(meta, config)

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot | None:
        """See `TrainEngine.snapshot`. Supports the kinds `state` and `hf`.

        For `state`, each rank reuses the memory of the previous copy. For `hf`, rank 0 writes.
        """
        config, parallel = self.config, self.parallel
        match meta.kind:
            case "hf":
                dtype = config.serve_dtype or self._spec.dtype
                return copy_hugging_face(self._model, meta, dtype, parallel)
            case "state":
                copied = self._copies.of(shards_of(self._state(), parallel))
                return partial(write_shards, copied, Path(meta.path), parallel.rank)
        return None

    def load(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.load`. Kind `hf` replaces only the weights, and reinitializes the adapters."""
        model, settings, self._adapter = self._model, self.config.lora, None
        match meta.kind:
            case "hf":
                source = self._maker.read(meta.path, like=model)
                sharding.copy_weights(model, source, self._device, self.parallel)
            case "state":
                counters = load_state(model, self._optimizer, meta.path, self.parallel)
                self.version, self._steps, self._skipped = (counters[name] for name in COUNTERS)
            case "adapter" if settings is not None:
                load_adapter(model, settings, meta.path, self._device, self.parallel)
            case _:
                raise _unknown_kind(meta, self.config)

    def _state(self) -> dict[str, Any]:
        sharding.reshard(self._model)  # an aborted step has not resharded
        counters = dict(zip(COUNTERS, (self.version, self._steps, self._skipped), strict=True))
        return state_of(self._model, self._optimizer, counters, self.parallel)

    def offload(self) -> None:
        """See `TrainEngine.offload`."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        """Move weights and optimizer state; no effect on a CPU or with `config.offload`."""
        if self._device.type != "cuda" or self.config.offload:
            return
        self._model.to(device)
        for moments in self._optimizer.state.values() if self._optimizer is not None else ():
            moments.update({name: value.to(device) for name, value in moments.items() if isinstance(value, Tensor)})
        torch.cuda.empty_cache()


def _unknown_kind(meta: SaveLoadMeta, config: FSDPEngineConfig) -> ModelError:
    kinds = "hf or state" if config.lora is None else "hf, state or adapter"
    return ModelError(f"{meta.path}: expected kind {kinds}, found {meta.kind!r}. Kind adapter requires lora to be set.")


def _make_deterministic(undo: ExitStack) -> None:
    """Restrict torch to one thread and deterministic algorithms in this process, until `undo` is closed.

    A sum over several threads depends on their number. With one thread, machines with different core counts agree.
    """
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch on a GPU
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _anchor(outputs: TokenOutputs) -> Tensor:
    """Return a zero whose backward runs through the whole model."""
    trained = outputs.logprobs if outputs.values is None else outputs.values
    return trained.sum() * 0.0
