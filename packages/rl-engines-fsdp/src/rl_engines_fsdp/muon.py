"""Muon optimizer for matrices, with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from rl_engines_fsdp.ranks.sharding import local, mesh_of, whole

STEPS = 5
"""Number of Newton-Schulz iterations."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic of the Newton-Schulz iteration (Jordan et al. 2024)."""
MATCH_ADAMW = 0.2
"""Typical root mean square of an AdamW update (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""


class Muon(torch.optim.Optimizer):
    """Muon: updates matrices by their orthogonalized momentum (Jordan et al. 2024), and all else with AdamW.

    The update of a matrix [m, n] is scaled by 0.2 sqrt(max(m, n)), so that learning rate and weight decay have the same
    effect as in AdamW (Liu et al. 2025, arXiv:2502.16982, equation 4). Each expert of a stacked parameter
    [experts, m, n] is a separate matrix.

    With sharded parameters, the matrices are assigned to ranks in turn. Each rank computes the whole update of its
    matrices and broadcasts it, so the result is the same as on one rank. Updates are computed in float32 on a CPU and
    in bfloat16 on a GPU.

    Args:
        groups: parameter groups of torch; Muon updates those with `matrices: True`.
        lr, betas, eps, weight_decay: as in AdamW.
        momentum: decay of the Nesterov momentum.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._momentum = momentum
        self._matrices = [(group, p) for group in self.param_groups if group["matrices"] for p in group["params"]]
        rest = [group for group in self.param_groups if not group["matrices"]]
        self._rest = torch.optim.AdamW(rest, fused=True) if rest else None
        if self._rest is not None:
            self._rest.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step (collective if parameters are sharded)."""
        if self._rest is not None:
            self._rest.step()
        updated = [(group, p) for group, p in self._matrices if p.grad is not None]
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for begin in range(0, len(updated), ranks):
            chunk, own_update = updated[begin : begin + ranks], torch.empty(0)
            for owner, (_, parameter) in enumerate(chunk):
                update = whole(self._with_momentum(parameter))
                if owner == rank:
                    own_update = orthogonal(update)
            for owner, (group, parameter) in enumerate(chunk):
                update = own_update if owner == rank else torch.empty(parameter.shape, device=parameter.device)
                mesh = mesh_of(parameter)
                if mesh is not None:
                    dist.broadcast(update, src=owner)
                    placements: Any = parameter.placements  # type: ignore[attr-defined]
                    update = local(distribute_tensor(update, mesh, placements, src_data_rank=None))
                scale = MATCH_ADAMW * max(parameter.shape[-2:]) ** 0.5
                shard = local(parameter)
                shard.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _with_momentum(self, parameter: nn.Parameter) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(state["momentum_buffer"], self._momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximately the nearest orthogonal matrices, float32 [..., m, n], with singular values in 0.7 to 1.2.

    It runs five steps of a Newton-Schulz iteration (Jordan et al. 2024, "Muon: An optimizer for hidden layers").
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float().contiguous()
