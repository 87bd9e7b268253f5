"""A batch with everything that a policy objective may read, and the objective over any split of it."""

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
    """Terms of single tokens, with gradient at their log-probs; the old ones are such that the ratio is as given."""
    ratio = torch.as_tensor(ratio, dtype=torch.float64)
    logprobs = torch.full_like(ratio, -1.0) if logprobs is None else torch.as_tensor(logprobs, dtype=torch.float64)
    leaf = logprobs.clone().requires_grad_()
    shown = ratio * (leaf - logprobs).exp()
    return leaf, PolicyTerms(
        leaf,
        shown,
        torch.as_tensor(advantages, dtype=torch.float64),
        torch.ones(len(ratio), dtype=torch.bool),
        torch.zeros_like(ratio),
    )


def prepared_batch(config, rows=9, seed=0):
    """Rows of mixed lengths and versions, one of them without a trained token, with all prepared entries in float64."""
    batch = make_batch(rows, seed=seed, version=VERSION)
    generator = torch.Generator().manual_seed(seed)
    shape = batch["input_ids"].shape
    batch["loss_mask"][1] = False
    learn = batch["loss_mask"]
    old = torch.arange(rows)[:, None] % 3
    batch["versions"] = torch.where(batch["versions"] >= 0, VERSION - old.int(), -1)

    def noise(scale):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    base = -1 - noise(0.3).abs()
    batch["logprobs"] = base
    batch["prox_logprobs"] = base + noise(0.4)
    batch["ref_logprobs"] = base + noise(0.5)
    per_row = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    batch["advantages"] = torch.where(learn, per_row + 0 * base, 0.0)
    batch["values"], batch["returns"] = noise(1.0), noise(1.0)
    batch["moment_dropped"] = torch.rand(shape, generator=generator) >= 0.8
    batch["staleness"] = (VERSION - batch["versions"]).clamp(min=0)
    weights = token_weights(learn, config.aggregation.kind, config.aggregation.constant_length).double()
    batch["loss_weights"] = weights * torch.rand(shape, generator=generator, dtype=torch.float64)
    batch["theta"] = base + noise(0.4)
    return batch


def objective(batch, config, parts, theta=None):
    """Loss over the denominator, its gradient [B, T] at the log-probs, and the statistics, summed over parts."""
    loss = make_policy_loss(config, minibatches=2)
    return total(loss, batch, parts, denominator(batch["loss_mask"], config.aggregation.kind), theta)


def total(loss, batch, parts, divisor, theta=None):
    """The same for any loss function; `theta` is a leaf [B, T]."""
    theta = batch["theta"].clone().requires_grad_() if theta is None else theta
    result, merged = torch.zeros((), dtype=torch.float64), {}
    for rows in parts:
        rows = list(rows)
        share = select(batch, rows)
        here = theta[rows][:, : share["input_ids"].shape[1]][share["attention_mask"]]
        value, stats = loss(TokenOutputs(here, -0.5 * here.sin(), values=here), pack(share))
        result = result + value / divisor
        for name, (top, bottom) in stats.items():
            before = merged.get(name, (0.0, 0.0))
            if name.endswith("/max"):
                merged[name] = (max(before[0], float(top)), 1.0)
            else:
                merged[name] = (before[0] + float(top), before[1] + float(bottom))
    (gradient,) = torch.autograd.grad(result, theta)
    figures = {n: a / b if b else math.nan for n, (a, b) in merged.items()}
    return result.detach(), gradient, figures


class Replica(ParallelContext):
    """One of several data-parallel replicas that are threads of this process."""

    def __init__(self, rank, size, slots, barrier):
        super().__init__(rank=rank, world_size=size, dp_rank=rank, dp_size=size)
        self._slots, self._barrier = slots, barrier

    def gather_tensors(self, tensors, all_ranks=False):
        self._slots[self.rank] = tensors
        self._barrier.wait(30)
        found = list(self._slots)
        self._barrier.wait(30)
        return found

    def gather_json(self, value, replicas=False):
        return self.gather_tensors(value)

    def sum_over_replicas(self, values):
        return sum(part["values"] for part in self.gather_tensors({"values": values}))

    def max_over_replicas(self, values):
        return torch.stack([part["values"] for part in self.gather_tensors({"values": values})]).amax(0)


def on_replicas(size, work):
    """What `work(replica)` returns on each of `size` replicas that run at the same time."""
    slots, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Replica(rank, size, slots, barrier)), range(size)))


class Rank(Replica):
    """One of the ranks of a single replica that are threads of this process; rank 0 is its head."""

    def __init__(self, rank, size, slots, barrier):
        super().__init__(rank, size, slots, barrier)
        self.dp_rank, self.dp_size, self.is_dp_leader = 0, 1, rank == 0

    def gather_json(self, value):
        return self.gather_tensors(value, all_ranks=True)

    def broadcast_json(self, value):
        return self.gather_json(value)[0]

    def agree(self, error, doing):
        failed = [note for note in self.gather_json(error and str(error)) if note]
        if failed:
            raise EngineError(f"{doing} failed: {failed}")


def on_ranks(size, work):
    """What `work(rank)` returns on each rank of one replica."""
    slots, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Rank(rank, size, slots, barrier)), range(size)))
