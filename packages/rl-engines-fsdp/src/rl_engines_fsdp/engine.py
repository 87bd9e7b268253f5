"""The TrainEngine on PyTorch FSDP2."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import PackedBatch, lengths
from rl_contracts.config import MicroBatchConfig, OptimizerConfig
from rl_contracts.data import AdapterSpec, FinetuneSpec, ParamSpec, SaveLoadMeta
from rl_contracts.engine import LossFn, LossWeightFn, OutputFn, Snapshot, TokenOutputs, TrainEngine
from rl_contracts.errors import ConfigError, EngineError, ModelError
from rl_contracts.models import micro_batches
from rl_contracts.models.attention_windows import layer_windows
from rl_contracts.models.config_files import read_config
from rl_contracts.models.hub_names import HubSlice, hub_slices
from rl_contracts.models.process_group import join, pick_device, read_environment
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
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.maker import ModelMaker
from rl_engines_fsdp.optimizer import clip, make_optimizer, set_rate, squared_norm
from rl_engines_fsdp.ranks import sharding
from rl_engines_fsdp.usage import device_memory, step_flops

if TYPE_CHECKING:
    from tensordict import TensorDict


class FSDPEngine(TrainEngine):
    """One rank of a language model, critic or reward model, sharded with `fully_shard` over data, context and tensor
    ranks.

    A single process that computes in float32 has nothing to shard and nothing to cast, so its model stays as it is.

    Args:
        config: settings.
        strategy: how many ranks along data, context and tensor. None: as many data-parallel ones as torchrun started.
    """

    def __init__(self, config: FSDPEngineConfig, strategy: ParallelStrategy | None = None) -> None:
        self.config = config
        self.strategy = strategy
        self.version = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._copies = HostCopies()
        self._adapter: AdapterSpec | None = None
        self._exit = ExitStack()  # what `destroy` undoes, in reverse order
        self._steps = 0
        self._skipped = 0
        self._first = True
        """Whether no batch was trained on yet."""
        self._usage = UsageMeter()

    # ---- life

    def initialize(self, spec: FinetuneSpec) -> None:
        """See `TrainEngine.initialize`."""
        info = read_environment()
        if self.strategy is not None and self.strategy.world_size != info.world_size:
            raise ConfigError(
                f"allocation fsdp:{self.strategy}: expected {self.strategy.world_size} ranks, but WORLD_SIZE is "
                f"{info.world_size}. Start as many processes as the allocation says."
            )
        self._spec = spec
        self._layout = self.strategy or ParallelStrategy(info.world_size)
        self.config.check(self._layout, spec)
        if spec.deterministic:
            _make_deterministic(self._exit)
        self._device = pick_device(spec.device, info.local_rank)
        if self.config.offload and self._device.type != "cuda":
            raise ConfigError("offload=true needs CUDA: on a CPU everything lies in host memory. Set offload=false.")
        sharded = info.world_size > 1 or spec.dtype != "float32" or self.config.offload
        size = self._layout.model_size
        self.parallel = join(info, self._device, self.config.timeout_seconds, sharded, size, self._exit)
        self._exit.callback(self._free)
        torch.manual_seed(spec.seed)
        self._maker = ModelMaker(self.config, spec, self._layout, self._device, self.parallel, sharded)
        try:
            with self.parallel.agree_on_errors(f"reading {spec.model_path}"):  # one host may not have it
                config = read_config(spec.model_path, spec.head)
                text = config.get_text_config()  # knows sizes by names that `config.json` may not have
                check_heads(
                    {n: getattr(text, n, None) for n in ("num_attention_heads", "num_key_value_heads")}, self._layout
                )
            self._model = self._maker.make(config)
            self._check_memory(1, 1)  # the components that do not depend on a batch
            with self.parallel.agree_on_errors("preparing to publish and to train"):
                if self.parallel.is_main:  # which alone yields them, and alone knows the directory's own names
                    self._hub_parts = hub_slices(self._model.model, self._model.hugging_face_parameters())
                if spec.optimizer is not None:
                    self._optimizer = make_optimizer(self._model, spec.optimizer)
        except BaseException:  # the other ranks see at once that this one left
            self.destroy()
            raise

    def destroy(self) -> None:
        """See `TrainEngine.destroy`."""
        self._exit.close()

    def _free(self) -> None:
        self._optimizer, self._copies = None, HostCopies()
        self.__dict__.pop("_model", None)  # absent where initialize failed
        self.__dict__.pop("_maker", None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- training

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.train_batch`."""
        optimizer, settings = self._optimizer, self._spec.optimizer
        if optimizer is None or settings is None:
            raise EngineError("train_batch: this engine has no optimizer (FinetuneSpec.optimizer is None).")
        began = time.perf_counter()
        bins, denominator, tokens, pairs = self._begin(batch, loss_weight_fn)
        if self._first:
            sizes, self._first = lengths(batch), False
            self._check_memory(max([1, *(int(sizes[rows].sum()) for rows in bins)]), len(bins))
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
        self._usage.add(time.perf_counter() - began, tokens, pairs)
        return result | {"lr": rate, "applied": float(applied), "tokens": float(tokens)}

    def _check_memory(self, tokens: int, micro_batches: int) -> None:
        """Reject a step of so many micro-batches, the largest of so many tokens, that a GPU cannot hold (collective).

        Raises:
            ConfigError, EngineError: see `FSDPEngineConfig.check_memory`; on every rank.
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
        """Micro-batches; denominator, tokens and `attended_pairs` over all ranks."""
        bins = micro_batches.plan(batch, self._spec, self.parallel)
        sizes, windows = lengths(batch), layer_windows(self._model.model.config)
        weight = loss_weight_fn(batch).detach().to("cpu", torch.float64)
        sums = torch.stack([weight, sizes.sum().double(), attended_pairs(sizes, windows)])
        denominator, tokens, pairs = self.parallel.sum_over_replicas(sums).tolist()
        if not (denominator > 0 and tokens > 0):
            raise EngineError(
                f"minibatch: expected tokens and a positive denominator over all ranks, found {int(tokens)} tokens and "
                f"a denominator of {denominator}: there is nothing to learn from. Is every loss_mask False?"
            )
        return bins, denominator, int(tokens), int(pairs)

    def _backward(
        self, packed: PackedBatch, loss_fn: LossFn, factor: float, factor_of_tokens: float, sums: StepSums
    ) -> None:
        outputs, moved, auxiliary = self._outputs(packed)
        if moved is None:
            # nothing to learn from, but the other ranks' collectives need this rank's
            torch.autograd.backward(_anchor(outputs))
            return
        loss_sum, stats = loss_fn(outputs, moved)
        sums.add(loss_sum, stats)
        if not loss_sum.requires_grad:
            loss_sum = loss_sum + _anchor(outputs)
        total, balance = loss_sum * factor, self._model.balance
        if auxiliary is not None and balance is not None:
            # a part on each context rank, the same on all tensor ranks
            sums.put(AUXILIARY, auxiliary / self._layout.tensor)
            total = total + auxiliary * (balance.coefficient * factor_of_tokens)
        torch.autograd.backward(total)

    def _outputs(self, packed: PackedBatch) -> tuple[TokenOutputs, PackedBatch | None, Tensor | None]:
        """What the model says of a micro-batch; the micro-batch on the device, None for one without tokens; and the
        sum of the routers' auxiliary loss, where it is wanted."""
        if packed.num_tokens == 0:
            ids = torch.zeros(2, dtype=torch.int64, device=self._device)
            edges = torch.tensor([0, 2], dtype=torch.int32, device=self._device)
            positions = torch.arange(2, device=self._device)
            temperature = torch.ones(2, device=self._device)
            return self._token_outputs(ids, positions, temperature, Segments((2,), edges))[0], None, None
        sizes = tuple(packed.cu_seqlens.diff().tolist())
        if self._device.type != "cpu":
            packed = packed.to(self._device)
        segments = Segments(sizes, packed.cu_seqlens)
        temperature = packed.per_token("temperature")
        outputs, auxiliary = self._token_outputs(packed["input_ids"], packed.position_ids, temperature, segments)
        return outputs, packed, auxiliary

    def _token_outputs(self, *inputs: Any) -> tuple[TokenOutputs, Tensor | None]:
        said, fields = self._model(*inputs), 2 if self._model.head == "lm" else 3
        return TokenOutputs(*said[:fields]), said[fields] if len(said) > fields else None

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        settings: OptimizerConfig,
        gradients: list[Tensor],
        result: dict[str, float],
        rate: float,
    ) -> bool:
        """Take the optimizer step, unless loss or gradients are not finite."""
        if not (math.isfinite(result["grad_norm"]) and math.isfinite(result["loss"])):
            self._skipped += 1
            optimizer.zero_grad(set_to_none=True)
            if self._skipped > settings.max_skipped_steps:
                raise EngineError(
                    f"loss or gradients were not finite in {self._skipped} consecutive steps (allowed: "
                    f"{settings.max_skipped_steps}). Lower the learning rate, and check the last batch "
                    "with `rl replay`."
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
        """`memory/peak_gib` of this rank; `throughput/mfu` of the steps since the last call, and `time/train_batch`,
        the seconds that it is about; see `UsageMeter.read`."""
        flops_of = partial(step_flops, self._model)
        return self._usage.read(flops_of, self._device, self._spec.dtype, self.parallel.world_size)

    # ---- without training

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
        for rows, outputs, packed in self._run(batch, bins):
            values = output_fn(outputs, packed)
            row_of_token = torch.tensor(rows)[packed.sequence_of_token.cpu()]
            result[row_of_token, packed.position_ids.cpu()] = values.cpu().to(result.dtype)
        return result

    def _run(self, batch: TensorDict, bins: list[list[int]]) -> Iterator[tuple[list[int], TokenOutputs, PackedBatch]]:
        for rows, packed in micro_batches.packed(batch, bins):
            outputs, moved, _ = self._outputs(packed)
            if moved is not None:
                yield rows, outputs, moved
        sharding.reshard(self._model)

    # ---- weights out and in

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """See `TrainEngine.param_specs`. Rank 0 yields all, in the served dtype."""
        if not self.parallel.is_main:
            return ()
        return tuple(self._spec_of(part) for parts in self._hub_parts.values() for part in parts)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.full_parameters`."""
        for name, value in sharding.full_parameters(self._model):
            yield from self._parts_of(name, value)

    def _spec_of(self, part: HubSlice) -> ParamSpec:
        return ParamSpec(part.name, part.shape, self.config.serve_dtype or self._spec.dtype)

    def _parts_of(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A whole parameter as its checkpoint has it, on rank 0."""
        for part in self._hub_parts[name] if self.parallel.is_main else ():
            yield part.name, value.as_strided(part.shape, part.strides, value.storage_offset() + part.offset)

    def adapter(self) -> AdapterSpec | None:
        """See `TrainEngine.adapter`. The base is looked at when this is asked first, and after a `load`."""
        if self.config.lora is None or self._spec.head != "lm":
            return None
        if self._adapter is None:
            self._adapter = self._describe_adapter(self._model.adapters())
        return self._adapter

    def _describe_adapter(self, pairs: dict[str, lora.Pair]) -> AdapterSpec | None:
        """None where a checkpoint holds an adapted weight in pieces, or turned round."""
        scales, base, found = dict[str, float](), dict[str, str](), None
        for name, parameter in self._model.hugging_face_parameters():
            if parameter.requires_grad:
                continue
            for part, value in self._parts_of(name, sharding.whole(parameter.detach())):
                base[part] = prefix_checksum(value)
                if name in pairs and value.shape == parameter.shape and value.is_contiguous():
                    scales[part] = pairs[name].scaling
        if len(scales) == len(pairs):
            found = asdict(AdapterSpec(scales, base, self.config.serve_dtype or self._spec.dtype))
        told = self.parallel.broadcast_json(found)
        return told and AdapterSpec(**told)

    def adapter_specs(self) -> tuple[ParamSpec, ...]:
        """See `TrainEngine.adapter_specs`. Rank 0 yields all."""
        if not self.parallel.is_main:
            return ()
        matrices = (
            ParamSpec(name, tuple(matrix.shape), "float32")
            for weight, pair in self._model.adapters().items()
            for name, matrix in zip(self._matrices(weight), (pair.a, pair.b), strict=True)
        )
        others = (self._spec_of(part) for name, _ in self._trained_whole() for part in self._hub_parts[name])
        return (*matrices, *others)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.adapter_parameters`."""
        for weight, pair in self._model.adapters().items():
            whole = pair.whole()
            if self.parallel.is_main:
                yield from zip(self._matrices(weight), whole, strict=True)
        for name, parameter in self._trained_whole():
            yield from self._parts_of(name, sharding.whole(parameter.detach()))

    def _matrices(self, weight: str) -> tuple[str, str]:
        return AdapterSpec.matrices(self._hub_parts[weight][0].name)

    def _trained_whole(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What is trained beside adapters."""
        named = [] if self.config.lora is None else self._model.hugging_face_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def without_adapter(self) -> AbstractContextManager[None] | None:
        """See `TrainEngine.without_adapter`."""
        return None if self.config.lora is None else lora.switched_off(self._model)

    def as_served(self) -> AbstractContextManager[None] | None:
        """See `TrainEngine.as_served`: only where it computes in float32 and `serve_dtype` is less. Keeps a copy of
        this rank's parameters meanwhile. None for adapters too, which are merged before they are cast."""
        served = self.config.serve_dtype or self._spec.dtype
        if self._spec.dtype != "float32" or served == "float32" or self.config.lora is not None:
            return None
        return sharding.rounded(self._model, getattr(torch, served), self.parallel)

    def save(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.save`. Of kind `hf` adapters are merged into the weights, kind `adapter` has them alone."""
        config, parallel, dtype = self.config, self.parallel, self.config.serve_dtype or self._spec.dtype
        match meta.kind:
            case "hf":
                save_hugging_face(self._model, meta, dtype, config.max_shard_gb, parallel)
            case "state":
                save_state(self._state(), meta.path, parallel)
            case "adapter" if config.lora is not None:
                save_adapter(self._model, config.lora, self._spec.model_path, meta.path, dtype, parallel)
            case _:
                raise _unknown_kind(meta, config)

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot | None:
        """See `TrainEngine.snapshot`: of kinds `state`, of which each rank keeps the memory of the copy for the next
        one, and `hf`, which rank 0 writes."""
        config, parallel = self.config, self.parallel
        match meta.kind:
            case "hf":
                dtype = config.serve_dtype or self._spec.dtype
                return copy_hugging_face(self._model, meta, dtype, config.max_shard_gb, parallel)
            case "state":
                copied = self._copies.of(shards_of(self._state(), parallel))
                return partial(write_shards, copied, Path(meta.path), parallel.rank)
        return None

    def load(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.load`. Of kind `hf` only the weights are replaced, and adapters start anew."""
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
        sharding.reshard(self._model)  # which an abandoned step has not done
        counters = dict(zip(COUNTERS, (self.version, self._steps, self._skipped), strict=True))
        return state_of(self._model, self._optimizer, counters, self.parallel)

    def offload(self) -> None:
        """See `TrainEngine.offload`."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        """Nothing moves on a CPU, or where `config.offload` keeps everything in host memory."""
        if self._device.type != "cuda" or self.config.offload:
            return
        self._model.to(device)
        for moments in self._optimizer.state.values() if self._optimizer is not None else ():
            moments.update({name: value.to(device) for name, value in moments.items() if isinstance(value, Tensor)})
        torch.cuda.empty_cache()


def _unknown_kind(meta: SaveLoadMeta, config: FSDPEngineConfig) -> ModelError:
    known = "hf or state" if config.lora is None else "hf or state or adapter"
    return ModelError(f"{meta.path}: expected a kind of {known}, found {meta.kind!r}; adapter needs lora set.")


def _make_deterministic(undo: ExitStack) -> None:
    """Let torch use one thread and algorithms of a fixed order only, in this whole process, until `undo` is closed.

    A sum that several threads make depends on how many there are; with one, machines of another size agree too.
    """
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it where there is a GPU
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _anchor(outputs: TokenOutputs) -> Tensor:
    """A zero whose backward runs through the whole model."""
    trained = outputs.logprobs if outputs.values is None else outputs.values
    return trained.sum() * 0.0
