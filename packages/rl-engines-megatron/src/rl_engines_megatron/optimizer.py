"""megatron-core's optimizer and what stands around it: gradients in buffers, their norm, clipping, and the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as core
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from rl_contracts.config import OptimizerConfig
from rl_engines_megatron.model.gpt import PackedGPT


def wrap(parts: list[PackedGPT], distributed: bool) -> list[Any]:
    """The parts with buffers for their gradients, which are summed over data and context ranks.

    Args:
        distributed: whether each rank keeps the optimizer state of a share of them.
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunks = [
        DistributedDataParallel(part.config, settings, part, disable_bucketing=index > 0)
        for index, part in enumerate(parts)
    ]
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers):
        _save_whole(buffer)
    return chunks


def _save_whole(buffer: Any) -> None:
    """megatron-core (0.19) leaves out what fills up the buckets of a buffer (copies of tied embeddings have one of
    their own) where it saves their optimizer state, and then takes it for what lies where the parameters do: it mixes
    up what lies behind the first bucket that is filled up."""
    buffer.numel_unpadded = buffer.numel
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()


class Stepper:
    """The optimizer of this rank's parts of a model.

    Args:
        chunks: as `wrap` makes them.
        settings: of the optimizer.
        dtype: in which the model computes.
        distributed: as for `wrap`.
        offload: whether the moments lie in host memory but while they are needed.
    """

    def __init__(
        self,
        chunks: list[Any],
        settings: OptimizerConfig,
        dtype: torch.dtype,
        distributed: bool,
        offload: bool = False,
    ) -> None:
        self.chunks, self.settings, self._offload = chunks, settings, offload
        _take_those_of_torch()
        self._hosts: dict[tuple[int, str], Tensor] = {}
        """Host memory of each moment."""
        config = core.OptimizerConfig(
            optimizer="adam" if settings.name == "adamw" else settings.name,
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            sgd_momentum=settings.momentum or 0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
        )
        self.inner: Any = core.get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        self._make_state()
        with self.resident():
            pass

    def _make_state(self) -> None:
        """What the optimizer keeps of each parameter, which a saved state is read into; torch would make it at the
        first step."""
        adam = self.settings.name == "adamw"
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) * bool(self.settings.momentum)
        for part in self.inner.chained_optimizers:
            part.init_state_fn = _nothing  # which megatron-core (0.19) lacks for SGD, and calls
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                state = {name: torch.zeros_like(parameter.data) for name in names}
                part.optimizer.state[parameter] = state | ({"step": torch.tensor(0.0)} if adam else {})

    @contextmanager
    def resident(self) -> Iterator[None]:
        """A block in which the moments lie where the parameters do."""
        if not self._offload:
            yield
            return
        for _, name, state, device in self._moments():
            state[name] = state[name].to(device, non_blocking=True)
        yield
        for number, name, state, device in self._moments():
            value, kept = state[name], self._hosts.get((number, name))
            if kept is None:
                kept = torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda")
            self._hosts[number, name] = state[name] = kept.copy_(value, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # before the host reads them

    def _moments(self) -> list[tuple[int, str, dict[str, Tensor], torch.device]]:
        """What the optimizer keeps of parameters: the number of one, the name of the moment, its place, and the
        parameter's device."""
        kept = [pair for part in self.inner.chained_optimizers for pair in part.optimizer.state.items()]
        return [
            (number, name, state, parameter.device)
            for number, (parameter, state) in enumerate(kept)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.ndim
        ]

    def tensors(self) -> Iterator[Tensor]:
        """What it steps and what it keeps of that, wherever it lies; parts of the model's parameters among them."""
        yield from self.inner.get_parameters()
        yield from (state[name] for _, name, state, _ in self._moments())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def norm(self) -> float:
        """Of the gradients of the whole model (collective)."""
        if self.inner.prepare_grads():
            return math.inf
        return float(self.inner.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float, rate: float) -> None:
        """Take a step with gradients whose norm is `norm`, clipped where that is too large (collective)."""
        limit = self.settings.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_([p.grad for p in self.inner.get_parameters() if p.grad is not None], limit / norm)
        for group in self.inner.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]  # 0 for biases and norms
        with self.resident():
            self.inner.step_with_ready_grads()

    def weights_changed(self) -> None:
        """Take up weights that something else has written."""
        self.inner.reload_model_params()


def _take_those_of_torch() -> None:
    """megatron-core (0.19) takes the optimizers of TransformerEngine or apex where it finds them, which keep another
    state than torch's; this engine knows that of torch's."""
    core.USING_PYTORCH_OPTIMIZER, core.Adam, core.SGD = True, torch.optim.AdamW, torch.optim.SGD
    distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.Adam = False, torch.optim.AdamW


def _nothing(*_: Any) -> None: ...
