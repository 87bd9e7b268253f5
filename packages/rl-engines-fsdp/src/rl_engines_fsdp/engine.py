"""The TrainEngine on PyTorch FSDP2."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec, ParamSpec, SaveLoadMeta
from rl_contracts.engine import LossFn, LossWeightFn, OutputFn, TokenOutputs, TrainEngine
from rl_contracts.errors import ConfigError, EngineError, RLError
from rl_contracts.trajectory import PackedBatch, lengths
from rl_engines_fsdp import micro_batches
from rl_engines_fsdp.checkpoint import state as state_checkpoint
from rl_engines_fsdp.checkpoint.checkpoints import Checkpoints
from rl_engines_fsdp.config import FSDPEngineConfig, check_heads
from rl_engines_fsdp.determinism import make_deterministic
from rl_engines_fsdp.model import loading
from rl_engines_fsdp.model.attention import Segments
from rl_engines_fsdp.model.model_maker import ModelMaker
from rl_engines_fsdp.model.packed_model import PackedModel
from rl_engines_fsdp.optimizer import clip, learning_rate, make_optimizer, squared_norm
from rl_engines_fsdp.ranks import sharding
from rl_engines_fsdp.ranks.process_group import Membership, RankInfo, join, pick_device, read_environment
from rl_engines_fsdp.ranks.tensor_gradients import TensorGradients
from rl_engines_fsdp.step_sums import StepSums
from rl_engines_fsdp.usage import UsageMeter

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

    _model: PackedModel
    _device: torch.device
    _layout: ParallelStrategy
    _spec: FinetuneSpec
    _maker: ModelMaker
    _checkpoints: Checkpoints

    def __init__(self, config: FSDPEngineConfig, strategy: ParallelStrategy | None = None) -> None:
        self.config = config
        self.strategy = strategy
        self.version = 0
        self._membership: Membership | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._tensor_gradients: TensorGradients | None = None
        self._undo: Callable[[], None] | None = None
        self._steps = 0
        self._skipped = 0
        self._usage = UsageMeter()

    # ---- life

    def initialize(self, spec: FinetuneSpec) -> None:
        """See `TrainEngine.initialize`."""
        info = read_environment()
        self._check_ranks(info)
        self._spec = spec
        self._layout = self.strategy or ParallelStrategy(info.world_size)
        self.config.check(self._layout, spec)
        if spec.deterministic:
            self._undo = make_deterministic()
        config = loading.read_config(spec.model_path, spec.head)
        text = config.get_text_config()  # knows sizes by names that `config.json` may not have
        check_heads({n: getattr(text, n, None) for n in ("num_attention_heads", "num_key_value_heads")}, self._layout)
        self._device = pick_device(spec.device, info.local_rank)
        if self.config.offload and self._device.type != "cuda":
            raise ConfigError("offload=true needs CUDA: on a CPU everything lies in host memory. Set offload=false.")
        sharded = info.world_size > 1 or spec.dtype != "float32" or self.config.offload
        size = self._layout.model_size
        self._membership = join(info, self._device, self.config.timeout_seconds, sharded, replica_size=size)
        self.parallel = self._membership.parallel
        torch.manual_seed(spec.seed)
        try:
            self._make_model(config, sharded)
        except RLError:
            self.destroy()
            raise

    def _make_model(self, hf_config: Any, sharded: bool) -> None:
        self._maker = ModelMaker(self.config, self._spec, self._layout, self._device, self.parallel, sharded)
        made = self._maker.make(hf_config)
        self._model, self._tensor_gradients = made.model, made.tensor_gradients
        if self._spec.optimizer is not None:
            self._optimizer = make_optimizer(self._model.own_parameters(), self._spec.optimizer)
        self._checkpoints = Checkpoints(
            self._model,
            self._optimizer,
            self.config,
            self._served_dtype,
            made.described,
            self._spec.model_path,
            self._device,
            self.parallel,
        )

    @property
    def _served_dtype(self) -> str:
        """Name of the torch dtype in which weights leave the engine."""
        return self.config.serve_dtype or self._spec.dtype

    def _check_ranks(self, info: RankInfo) -> None:
        if self.strategy is not None and self.strategy.world_size != info.world_size:
            raise ConfigError(
                f"allocation fsdp:{self.strategy}: expected {self.strategy.world_size} ranks, but WORLD_SIZE is "
                f"{info.world_size}. Start as many processes as the allocation says."
            )

    def destroy(self) -> None:
        """See `TrainEngine.destroy`."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._membership is None:
            return
        checkpoints = self.__dict__.pop("_checkpoints", None)  # absent where initialize failed
        try:
            if checkpoints is not None:
                checkpoints.close()
        finally:
            self._free()
            self._membership.leave()
            self._membership = None

    def _free(self) -> None:
        self._optimizer = self._tensor_gradients = None
        self.__dict__.pop("_model", None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- training

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.train_batch`."""
        optimizer, settings = self._optimizer, self._spec.optimizer
        if optimizer is None or settings is None:
            raise EngineError("train_batch: this engine has no optimizer (FinetuneSpec.optimizer is None).")
        began = time.perf_counter()
        bins, denominator, tokens, squares = self._begin(batch, loss_weight_fn)
        optimizer.zero_grad(set_to_none=True)
        sums = StepSums(self.parallel.is_dp_head)
        # FSDP averages gradients over data and context ranks (see sharding.shard); the loss is a sum
        factor = self._layout.data * self._layout.context / denominator
        for index, (_, packed) in enumerate(micro_batches.packed(batch, bins)):
            last = index == len(bins) - 1
            sharding.sync_gradients(self._model, last or self.config.sync_every_micro_batch, last)
            self._backward(packed, loss_fn, factor, sums)
        if self._tensor_gradients is not None:
            self._tensor_gradients.finish(self.parallel)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        sums.put("grad_norm", squared_norm(gradients, self.parallel.world_size).to(self._device))
        result = sums.reduce(self.parallel)
        result["loss"] /= denominator
        result["grad_norm"] **= 0.5
        rate = learning_rate(settings, self._steps, self._spec.total_steps)
        applied = self._step(optimizer, gradients, result, rate)
        self._usage.add(time.perf_counter() - began, tokens, squares)
        return result | {"lr": rate, "applied": float(applied), "tokens": float(tokens)}

    def _begin(self, batch: TensorDict, loss_weight_fn: LossWeightFn) -> tuple[list[list[int]], float, int, int]:
        """Micro-batches; denominator, tokens and squared lengths of rows over all ranks."""
        bins = micro_batches.plan(batch, self._spec, self.parallel)
        sizes = lengths(batch).to(torch.float64)
        weight = loss_weight_fn(batch).detach().to("cpu", torch.float64)
        share = torch.stack([weight, sizes.sum(), sizes.square().sum()])
        denominator, tokens, squares = self.parallel.sum_over_replicas(share).tolist()
        if not (denominator > 0 and tokens > 0):
            raise EngineError(
                f"minibatch: expected tokens and a positive denominator over all ranks, found {int(tokens)} tokens and "
                f"a denominator of {denominator}: there is nothing to learn from. Is every loss_mask False?"
            )
        return bins, denominator, int(tokens), int(squares)

    def _backward(self, packed: PackedBatch, loss_fn: LossFn, factor: float, sums: StepSums) -> None:
        outputs, moved = self._outputs(packed)
        if moved is None:
            # nothing to learn from, but the other ranks' collectives need this rank's
            torch.autograd.backward(_anchor(outputs))
            return
        loss_sum, stats = loss_fn(outputs, moved)
        sums.add(loss_sum, stats)
        if not loss_sum.requires_grad:
            loss_sum = loss_sum + _anchor(outputs)
        torch.autograd.backward(loss_sum * factor)

    def _outputs(self, packed: PackedBatch) -> tuple[TokenOutputs, PackedBatch | None]:
        """What the model says of a micro-batch, and the micro-batch on the device; None for one without tokens."""
        if packed.num_tokens == 0:
            ids = torch.zeros(2, dtype=torch.int64, device=self._device)
            edges = torch.tensor([0, 2], dtype=torch.int32, device=self._device)
            positions = torch.arange(2, device=self._device)
            temperature = torch.ones(2, device=self._device)
            return TokenOutputs(*self._model(ids, positions, temperature, Segments((2,), edges))), None
        sizes = tuple(packed.cu_seqlens.diff().tolist())
        if self._device.type != "cpu":
            packed = packed.to(self._device)
        segments = Segments(sizes, packed.cu_seqlens)
        temperature = packed.per_token("temperature")
        return TokenOutputs(*self._model(packed["input_ids"], packed.position_ids, temperature, segments)), packed

    def _step(
        self, optimizer: torch.optim.AdamW, gradients: list[Tensor], result: dict[str, float], rate: float
    ) -> bool:
        """Take the optimizer step, unless loss or gradients are not finite."""
        settings = self._spec.optimizer
        assert settings is not None
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
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._skipped = 0
        return True

    def stats(self) -> dict[str, float | None]:
        """`memory/peak_gib` of this rank and `throughput/mfu` of the steps since the last call; see `UsageMeter`."""
        return self._usage.read(self._model, self._device, self._spec.dtype, self.parallel.world_size)

    # ---- without training

    @torch.no_grad()
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """See `TrainEngine.eval_batch`."""
        bins, denominator, _, _ = self._begin(batch, loss_weight_fn)
        sums = StepSums(self.parallel.is_dp_head)
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
            row_of_token = torch.tensor(rows)[packed.row_of_token.cpu()]
            result[row_of_token, packed.position_ids.cpu()] = values.cpu().to(result.dtype)
        return result

    def _run(self, batch: TensorDict, bins: list[list[int]]) -> Iterator[tuple[list[int], TokenOutputs, PackedBatch]]:
        for rows, packed in micro_batches.packed(batch, bins):
            outputs, moved = self._outputs(packed)
            if moved is not None:
                yield rows, outputs, moved
        sharding.reshard(self._model)

    # ---- weights out and in

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """See `TrainEngine.param_specs`. Rank 0 yields all, in the served dtype."""
        if not self.parallel.is_main:
            return ()
        return tuple(
            ParamSpec(name, tuple(p.shape), self._served_dtype) for name, p in self._model.hugging_face_parameters()
        )

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.full_parameters`."""
        for pair in sharding.full_parameters(self._model):
            if self.parallel.is_main:
                yield pair

    def save(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.save`. Of kind `hf` adapters are merged into the weights, kind `adapter` has them alone."""
        self._checkpoints.save(meta, self._counters())

    def save_async(self, meta: SaveLoadMeta) -> None:
        """Copy the state and return; it is written while training goes on (collective). Kind `state` only.

        The directory appears when every rank's part lies complete; `wait_for_save` waits for that. Waits for the state
        before, if that is still being written, and raises what went wrong with it.

        Raises:
            ModelError, EngineError: another kind, or the directory cannot be made.
        """
        self._checkpoints.save_async(meta, self._counters())

    def wait_for_save(self) -> None:
        """Return when what `save_async` began lies complete.

        Raises:
            EngineError: it could not be written, on any rank.
        """
        self._checkpoints.wait()

    def load(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine.load`. Of kind `hf` only the weights are replaced, and adapters start anew."""
        counters = self._checkpoints.load(meta, lambda path: self._maker.read(path, like=self._model))
        if counters is not None:
            self.version, self._steps, self._skipped = (counters[name] for name in state_checkpoint.COUNTERS)

    def _counters(self) -> dict[str, int]:
        return {"version": self.version, "steps": self._steps, "skipped": self._skipped}

    def offload(self) -> None:
        """See `TrainEngine.offload`."""
        if self._device.type == "cuda" and not self.config.offload:
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `TrainEngine.onload`."""
        if self._device.type == "cuda" and not self.config.offload:
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        if self._optimizer is not None:
            for moments in self._optimizer.state.values():
                for name, value in moments.items():
                    moments[name] = value.to(device)


def _anchor(outputs: TokenOutputs) -> Tensor:
    """A zero whose backward runs through the whole model."""
    trained = outputs.logprobs if outputs.values is None else outputs.values
    return trained.sum() * 0.0
