"""The parts of an algorithm that are found by name, ours and anybody's alike.

A part is a function whose constants are keyword-only arguments, or a class that takes them so and whose objects are
called like the function. What it is called with, and gives back, depends on what it is:

- policy loss (`rl.policy_losses`): `loss(terms: PolicyTerms) -> (losses [N], marks)`;
- correction (`rl.corrections`): `correction(off: OffPolicy) -> (weights [N], marks)`;
- mask (`rl.masks`): `mask(off: OffPolicy) -> dropped, bool [N]`; see `SecondMomentMask` for one that has to look at the
  whole minibatch;
- advantage estimator (`rl.advantages`): `estimator(outcomes: Outcomes) -> (advantages [B, T], returns or None)`.

Marks are bool [N] by name; their shares of the trained tokens are reported.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_contracts import registry
from rl_contracts.errors import ConfigError
from rl_contracts.sharding import MINIBATCH_KEY
from rl_trainers.functional.correction import OffPolicy, second_moment_cutoff, trust_region_tokens
from rl_trainers.proximal import PROXIMAL_KEY

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.parallel import ParallelContext
    from rl_trainers.algorithm import PartConfig

DROPPED_KEY = "moment_dropped"
"""bool [B, T]: tokens that the second-moment mask drops."""


def load_parts(config: PartConfig) -> list[Any]:
    """What the settings of a part name, with its constants; nothing for `none`, several for names joined by `+`.

    Raises:
        ConfigError: nothing of that name is installed, an option is none of its keyword arguments, or one that it needs
            is missing.
    """
    constants, parts, known = config.constants(), [], set[str]()
    for kind in config.kind.split("+") if config.kind != "none" else ():
        found = registry.load(config.group, kind)
        takes = {n: p for n, p in inspect.signature(found).parameters.items() if p.kind is p.KEYWORD_ONLY}
        missing = sorted(n for n, p in takes.items() if p.default is p.empty and n not in constants)
        if missing:
            raise ConfigError(
                f"{config.setting}.kind={kind} needs the constants {missing}; give them as "
                f"{config.setting}.options.<name>=<value>."
            )
        bound = {n: constants[n] for n in takes if n in constants}
        parts.append(found(**bound) if inspect.isclass(found) else partial(found, **bound))
        known |= set(takes)
    unknown = sorted(name for name, value in config.options.items() if value is not None and name not in known)
    if unknown:
        raise ConfigError(
            f"{config.setting}.options: {unknown} are no constants of {config.setting}.kind={config.kind}; it takes "
            f"{sorted(known)}. Leave them out with {config.setting}.options.<name>=null."
        )
    return parts


def load_part(config: PartConfig) -> Any:
    """The one part that settings name.

    Raises:
        ConfigError: they name none or several, or as `load_parts`.
    """
    parts = load_parts(config)
    if len(parts) != 1:
        raise ConfigError(f"{config.setting}.kind: expected one name, found {config.kind!r}.")
    return parts[0]


@dataclass(frozen=True, kw_only=True)
class SecondMomentMask:
    """M2PO's mask (arXiv 2510.01161, algorithm 1), over each minibatch, whatever the ranks and micro-batches that share
    it.

    A mask that has `prepare` is shown the whole batch, with its old log-probs, before the first loss; what it adds to
    the batch its call finds in `off.packed`.

    The log-ratio is that of the policy at the start of the step to the sampler: exact in the step's first minibatch; a
    later one's ratio has moved on by what the minibatches before it changed.
    """

    threshold: float
    """tau_M2."""

    def prepare(self, batch: TensorDict, parallel: ParallelContext) -> None:
        """Add which tokens are dropped (collective)."""
        log_ratio = torch.where(batch["loss_mask"], batch[PROXIMAL_KEY] - batch["logprobs"], 0.0)
        held = trust_region_tokens(log_ratio, batch["advantages"])
        squares, minibatch = log_ratio.double().square(), batch[MINIBATCH_KEY][:, None].expand_as(held)
        parts = parallel.gather_tensors({"squares": squares[held], "minibatch": minibatch[held]})
        every, of = (torch.cat([part[name] for part in parts]) for name in ("squares", "minibatch"))
        dropped = torch.zeros_like(held)
        for number in of.unique().tolist():
            cutoff = second_moment_cutoff(every[of == number], self.threshold)
            dropped |= held & (minibatch == number) & (squares > cutoff)
        batch[DROPPED_KEY] = dropped

    def __call__(self, off: OffPolicy) -> torch.Tensor:
        """Dropped tokens, bool [N]."""
        return off.packed[DROPPED_KEY]
