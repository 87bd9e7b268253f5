"""Test helpers: a batch with all entries of a policy objective, the objective over any split, and ranks as threads."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.batch.trajectory import pack, select
from rl_contracts.engine import TokenOutputs
from rl_contracts.errors import EngineError
from rl_contracts.testing.batches import make_batch
from rl_trainers.algorithms.functional.aggregation import denominator, token_weights
from rl_trainers.algorithms.functional.policy_terms import PolicyTerms
from rl_trainers.algorithms.objective import make_policy_loss

VERSION = 3


def terms_of(ratio, advantages, logprobs=None):
    """Return the log-probs of single tokens as a leaf, and their `PolicyTerms`.

    The old log-probs are chosen so that the ratio has the requested value.
    """
    ratio = torch.as_tensor(ratio, dtype=torch.float64)
    logprobs = torch.full_like(ratio, -1.0) if logprobs is None else torch.as_tensor(logprobs, dtype=torch.float64)
    leaf = logprobs.clone().requires_grad_()
    differentiable_ratio = ratio * (leaf - logprobs).exp()
    return leaf, PolicyTerms(
        leaf,
        differentiable_ratio,
        torch.as_tensor(advantages, dtype=torch.float64),
        torch.ones(len(ratio), dtype=torch.bool),
        torch.zeros_like(ratio),
    )


def prepared_batch(config, rows=9, seed=0):
    """Return a batch of sequences of mixed lengths and versions, with all prepared entries in float64.

    Sequence 1 has no trained token.
    """
    batch = make_batch(rows, seed=seed, version=VERSION)
    generator = torch.Generator().manual_seed(seed)
    shape = batch["input_ids"].shape
    batch["loss_mask"][1] = False
    trained = batch["loss_mask"]
    age = torch.arange(rows)[:, None] % 3
    batch["versions"] = torch.where(batch["versions"] >= 0, VERSION - age.int(), -1)

    def noise(scale):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    base = -1 - noise(0.3).abs()
    batch["logprobs"] = base
    batch["prox_logprobs"] = base + noise(0.4)
    batch["ref_logprobs"] = base + noise(0.5)
    per_row = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    batch["advantages"] = torch.where(trained, per_row + 0 * base, 0.0)
    batch["values"], batch["returns"] = noise(1.0), noise(1.0)
    batch["moment_dropped"] = torch.rand(shape, generator=generator) >= 0.8
    batch["staleness"] = (VERSION - batch["versions"]).clamp(min=0)
    weights = token_weights(trained, config.aggregation.kind, constant_length=20).double()
    batch["loss_weights"] = weights * torch.rand(shape, generator=generator, dtype=torch.float64)
    batch["theta"] = base + noise(0.4)
    return batch


def objective(batch, config, splits, theta=None):
    """Return the objective summed over `splits` of the batch.

    Returns:
        Loss divided by the denominator, its gradient with respect to the log-probs, [B, T], and the statistics.
    """
    loss = make_policy_loss(config, minibatches=2)
    return total(loss, batch, splits, denominator(batch["loss_mask"], config.aggregation.kind), theta)


def total(loss, batch, splits, divisor, theta=None):
    """Return the results of `objective` for any loss function; `theta` is a leaf tensor, [B, T]."""
    theta = batch["theta"].clone().requires_grad_() if theta is None else theta
    loss_sum, merged = torch.zeros((), dtype=torch.float64), {}
    for rows in splits:
        rows = list(rows)
        micro_batch = select(batch, rows)
        logprobs = theta[rows][:, : micro_batch["input_ids"].shape[1]][micro_batch["attention_mask"]]
        value, stats = loss(TokenOutputs(logprobs, -0.5 * logprobs.sin(), values=logprobs), pack(micro_batch))
        loss_sum = loss_sum + value / divisor
        for name, (value_sum, count) in stats.items():
            previous = merged.get(name, (0.0, 0.0))
            if name.endswith("/max"):
                merged[name] = (max(previous[0], float(value_sum)), 1.0)
            else:
                merged[name] = (previous[0] + float(value_sum), previous[1] + float(count))
    (gradient,) = torch.autograd.grad(loss_sum, theta)
    metrics = {n: a / b if b else math.nan for n, (a, b) in merged.items()}
    return loss_sum.detach(), gradient, metrics


class Replica(ParallelContext):
    """One of several data-parallel replicas, each a thread of this process."""

    def __init__(self, rank, size, slots, barrier):
        super().__init__(rank=rank, world_size=size, dp_rank=rank, dp_size=size)
        self._slots, self._barrier = slots, barrier

    def gather_tensors(self, tensors, all_ranks=False):
        self._slots[self.rank] = tensors
        self._barrier.wait(30)
        gathered = list(self._slots)
        self._barrier.wait(30)
        return gathered

    def gather_json(self, value, replicas=False):
        return self.gather_tensors(value)

    def sum_over_replicas(self, values):
        return sum(part["values"] for part in self.gather_tensors({"values": values}))

    def max_over_replicas(self, values):
        return torch.stack([part["values"] for part in self.gather_tensors({"values": values})]).amax(0)


def on_replicas(size, work):
    """Run `work(replica)` on `size` concurrent replicas and return the results."""
    slots, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Replica(rank, size, slots, barrier)), range(size)))


class Rank(Replica):
    """One of the ranks of a single replica, each a thread of this process; rank 0 is the data-parallel leader."""

    def __init__(self, rank, size, slots, barrier):
        super().__init__(rank, size, slots, barrier)
        self.dp_rank, self.dp_size, self.is_dp_leader = 0, 1, rank == 0

    def gather_json(self, value):
        return self.gather_tensors(value, all_ranks=True)

    def broadcast_json(self, value):
        return self.gather_json(value)[0]

    def agree(self, error, doing):
        errors = [message for message in self.gather_json(error and str(error)) if message]
        if errors:
            raise EngineError(f"{doing} failed: {errors}")


def on_ranks(size, work):
    """Run `work(rank)` on `size` concurrent ranks of one replica and return the results."""
    slots, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Rank(rank, size, slots, barrier)), range(size)))
