"""megatron-core's optimizer: gradient buffers, gradient norm, clipping and the optimizer step."""

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
    """Wrap model chunks with gradient buffers, whose gradients are summed over data and context ranks.

    Args:
        parts: model chunks of this rank.
        distributed: whether the optimizer state is split over the data and context ranks.
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunks = [
        DistributedDataParallel(part.config, settings, part, disable_bucketing=index > 0)
        for index, part in enumerate(parts)
    ]
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers):
        _include_padding(buffer)
    return chunks


def _include_padding(buffer: Any) -> None:
    """Count the padding of a gradient buffer as parameters, so that saved optimizer state keeps its offsets.

    megatron-core (0.19) saves optimizer state without the padding of buckets, but loads it as if the padding were
    included. All state behind the first padded bucket would be misplaced. Copies of tied embeddings have a separate
    bucket.
    """
    buffer.numel_unpadded = buffer.numel
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()


class Stepper:
    """Optimizer of this rank's model chunks.

    Args:
        chunks: result of `wrap`.
        settings: optimizer settings.
        dtype: dtype in which the model computes.
        distributed: as for `wrap`.
        offload: whether the moments stay in host memory except inside `resident`.
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
        _use_torch_optimizers()
        self._hosts: dict[tuple[int, str], Tensor] = {}
        """Host copy of each moment, by number of the parameter and name of the moment."""
        config = core.OptimizerConfig(
            optimizer="adam" if settings.name == "adamw" else settings.name,
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            sgd_momentum=settings.options.get("momentum", 0.0),
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
        )
        self.inner: Any = core.get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        self._create_state()
        with self.resident():
            pass

    def _create_state(self) -> None:
        """Create the optimizer state of each parameter, into which a saved state is loaded.

        torch would create it only in the first step.
        """
        adam, momentum = self.settings.name == "adamw", self.settings.options.get("momentum")
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) * bool(momentum)
        for optimizer in self.inner.chained_optimizers:
            optimizer.init_state_fn = _no_operation  # megatron-core (0.19) calls it, but does not set it for SGD
            for parameter in (p for group in optimizer.optimizer.param_groups for p in group["params"]):
                state = {name: torch.zeros_like(parameter.data) for name in names}
                optimizer.optimizer.state[parameter] = state | ({"step": torch.tensor(0.0)} if adam else {})

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Move the moments to the device of the parameters for the duration of the `with` block."""
        if not self._offload:
            yield
            return
        for _, name, state, device in self._moments():
            state[name] = state[name].to(device, non_blocking=True)
        yield
        for number, name, state, device in self._moments():
            value, host = state[name], self._hosts.get((number, name))
            if host is None:
                host = torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda")
            self._hosts[number, name] = state[name] = host.copy_(value, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # before the host reads them

    def _moments(self) -> list[tuple[int, str, dict[str, Tensor], torch.device]]:
        """Return parameter number, moment name, dict with the moment, and device of the parameter, for each moment."""
        states = [item for optimizer in self.inner.chained_optimizers for item in optimizer.optimizer.state.items()]
        return [
            (number, name, state, parameter.device)
            for number, (parameter, state) in enumerate(states)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.ndim
        ]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer updates, which may be views of model parameters, and its moments."""
        yield from self.inner.get_parameters()
        yield from (state[name] for _, name, state, _ in self._moments())

    def zero_grad(self) -> None:
        """Reset all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def norm(self) -> float:
        """Return the gradient norm of the whole model, or infinity if gradients are not finite (collective)."""
        if self.inner.prepare_grads():
            return math.inf
        return float(self.inner.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float, rate: float) -> None:
        """Take an optimizer step (collective).

        Args:
            norm: gradient norm. If it exceeds `settings.max_grad_norm`, the gradients are scaled to this maximum.
            rate: learning rate.
        """
        limit = self.settings.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_([p.grad for p in self.inner.get_parameters() if p.grad is not None], limit / norm)
        for group in self.inner.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]  # 0 for biases and norms
        with self.resident():
            self.inner.step_with_ready_grads()

    def weights_changed(self) -> None:
        """Copy externally changed weights into the optimizer's main parameters."""
        self.inner.reload_model_params()


def _use_torch_optimizers() -> None:
    """Make megatron-core use torch's optimizers.

    megatron-core (0.19) uses the optimizers of TransformerEngine or apex if they are installed. Their state differs
    from the state of torch's optimizers, which this engine saves and loads.
    """
    core.USING_PYTORCH_OPTIMIZER, core.Adam, core.SGD = True, torch.optim.AdamW, torch.optim.SGD
    distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.Adam = False, torch.optim.AdamW


def _no_operation(*_: Any) -> None: ...
