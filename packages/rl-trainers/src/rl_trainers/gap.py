"""The gap gate: do servers and trainer compute the same log-probs from the weights that both should hold?

After a commit the servers score a few rows of the last batch, and the trainer compares with its own forward pass.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_contracts.config import require
from rl_contracts.errors import InferenceError, WeightUpdateError
from rl_contracts.logging import get_logger
from rl_contracts.trajectory import lengths, select

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.engine import TrainEngine
    from rl_contracts.inference import InferenceEngine
    from rl_trainers.publish import Runner

log = get_logger("trainers.gap")


@dataclass
class GapConfig:
    """When servers and trainer are said to disagree."""

    rows: int = 2
    """Rows of the batch that each replica compares after a commit; 0 switches the comparison off."""
    warn: float = 0.02
    """Mean absolute difference, in nats, above which a warning is logged. bfloat16 on either side makes 0.01 to 0.05.
    """
    stop: float = 0.5
    """Mean absolute difference, in nats, above which the run stops."""
    timeout: float = 60.0
    """Seconds for the servers to score the rows."""

    def __post_init__(self) -> None:
        require(self.rows >= 0, "gap.rows", "0 (off) or more", self.rows)
        require(0 < self.warn <= self.stop, "gap.warn", f"more than 0 and at most gap.stop ({self.stop})", self.warn)


class GapGate:
    """Compares a few rows after each commit."""

    def __init__(self, engine: TrainEngine, inference: InferenceEngine, run: Runner, config: GapConfig) -> None:
        self.engine, self.inference, self.run, self.config = engine, inference, run, config

    def check(self, batch: TensorDict) -> dict[str, float | None]:
        """`gap/mean_abs`, `gap/max_abs`, `gap/k3` over the compared tokens of all replicas (collective); None without
        any.

        Raises:
            WeightUpdateError: the mean is above `stop`.
        """
        if not self.config.rows:
            return {"gap/mean_abs": None, "gap/max_abs": None, "gap/k3": None}
        import torch

        from rl_trainers.functional.divergence import gap_sums

        rows = select(batch, list(range(min(self.config.rows, batch.batch_size[0]))))
        ours = self.engine.forward(rows, lambda outputs, _: outputs.logprobs)
        error, theirs = None, torch.zeros_like(ours)
        try:
            theirs = self._scores(rows, ours)
        except (InferenceError, TimeoutError) as caught:
            error = caught
        self.engine.parallel.agree(error, "scoring rows on the servers")
        sums, largest = gap_sums(ours, theirs, rows["attention_mask"])
        count, total, k3 = self.engine.parallel.sum_over_replicas(sums).tolist()
        top = self.engine.parallel.max_over_replicas(largest).item()
        if count == 0:
            return {"gap/mean_abs": None, "gap/max_abs": None, "gap/k3": None}
        self._judge(total / count, top)
        return {"gap/mean_abs": total / count, "gap/max_abs": top, "gap/k3": k3 / count}

    def _scores(self, rows: TensorDict, like: torch.Tensor) -> torch.Tensor:
        """What the servers compute for the rows' tokens, [B, T]."""
        import torch

        async def score_all() -> list[list[float]]:
            calls = [
                self.inference.score(ids[:length].tolist(), float(temperature))
                for ids, length, temperature in zip(rows["input_ids"], lengths(rows), rows["temperature"], strict=True)
            ]
            return await asyncio.gather(*calls)

        result = torch.zeros_like(like)
        for row, scores in zip(result, self.run(score_all(), self.config.timeout), strict=True):
            row[: len(scores)] = torch.tensor(scores)
        return result

    def _judge(self, mean: float, largest: float) -> None:
        if mean <= self.config.warn:
            return
        message = (
            f"servers and trainer disagree at version {self.engine.version}: log-probs of the same tokens differ by "
            f"{mean:.3g} nats on average, {largest:.3g} at most "
            f"(warn above {self.config.warn:g}, stop above {self.config.stop:g})."
        )
        if mean > self.config.stop:
            raise WeightUpdateError(
                f"{message} The weights arrived as sent, so look at what is computed with them: temperature, "
                "dtype, the tokenizer's special tokens, a stale prefix cache, a fused or quantised copy on the server."
            )
        log.warning(message)
