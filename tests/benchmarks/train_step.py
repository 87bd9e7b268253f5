"""Tokens per second of a training step, compared with a padded step of transformers, and memory and time of the loss.

    uv run python tests/benchmarks/train_step.py

Step: one AdamW step of next-token prediction on sequences of log-normal length. All sides use the same random float32
Qwen3, optimizer settings, gradient clipping and denominator. They run in one process, in turn. `fsdp` is
`FSDPEngine.train_batch` with packed micro-batches of at most `--max-tokens`. The peer is the training step of the
Trainer of transformers: micro-batches in data order, padded to their longest sequence, with attention mask, labels,
accumulated gradients and SDPA attention. Trials choose the fastest number of threads for each side, and the fastest
micro-batch size for the peer. Losses and gradient norms must agree. `fill` is the fraction of the micro-batches'
capacity that holds tokens. `--engine megatron` also runs the step of that engine. With `--device cuda`, `mfu` is the
model FLOPs utilization of each side.

Loss: see `train_step_loss.py`; each side runs alone in a process. If memory is too small for the materialized side, it
runs on fewer tokens (`tokens`), and its seconds and bytes are scaled up.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict

HERE = Path(__file__).resolve().parent
REQUIRED = {"step": 2.0, "fill": 0.95, "loss_memory": 0.25, "loss_time": 1.4}
"""Minimum ratio of tokens/s, minimum fill, maximum fraction of the logits' bytes, maximum ratio of seconds."""
PEER_ROWS = (8, 16, 32)
"""Sequences per padded micro-batch that the peer tries; 8 is the Trainer's default."""
MEDIAN_TOKENS, SIGMA = 100.0, 1.0
"""Median of the log-normal lengths, and standard deviation of the logarithm."""
LR, WEIGHT_DECAY, BETAS, EPS, MAX_NORM = 1e-4, 0.01, (0.9, 0.95), 1e-8, 1.0
GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """Model, batch and settings of all sides."""

    model: str
    """Directory in Hugging Face format."""
    batch: TensorDict
    """Sequences in the format of `rl_contracts.batch.trajectory`."""
    max_tokens: int
    """Token limit of the packed micro-batches."""
    device: str = "cpu"
    dtype: str = "float32"
    """Dtype of the computation; the weights are float32."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch, without padding."""
        return int(self.batch["attention_mask"].sum())


def make_workload(
    directory: Path,
    rows: int,
    longest: int,
    max_tokens: int,
    vocabulary: int,
    hidden: int,
    device: str = "cpu",
    dtype: str = "float32",
) -> Workload:
    """Create a random model of 4 layers with a head dimension of at most 128, and sequences of log-normal length."""
    import numpy as np
    import torch
    import transformers

    from rl_contracts.batch.trajectory import Trajectory, stack

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=max(4, hidden // 128),
        num_key_value_heads=max(2, hidden // 256),
        head_dim=min(128, hidden // 4),
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    draw, numbers = random.Random(1), np.random.default_rng(1)
    trajectories = []
    for row in range(rows):
        length = min(max(2, round(draw.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))), longest)
        learn = np.arange(length) > 0
        ids = numbers.integers(0, vocabulary, length)
        none = np.zeros(length, np.float32)
        trajectories.append(
            Trajectory(ids, learn, none, np.where(learn, 0, -1).astype(np.int32), group_id=row, episode_id=row)
        )
    return Workload(str(directory), stack(trajectories), max_tokens, device, dtype)


def nll(outputs: Any, packed: Any) -> Any:
    """Loss of the engines: the sum of the negative log-probs."""
    return -(outputs.logprobs * packed["loss_mask"]).sum(), {}


class EngineSide:
    """Train engine, found by its entry point."""

    def __init__(self, workload: Workload, name: str = "fsdp") -> None:
        from rl_contracts import registry
        from rl_contracts.config import MicroBatchConfig, OptimizerConfig
        from rl_contracts.data import FinetuneSpec

        optimizer = OptimizerConfig(
            lr=LR, weight_decay=WEIGHT_DECAY, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, max_grad_norm=MAX_NORM
        )
        micro_batch = MicroBatchConfig(workload.max_tokens)
        computing = {"device": workload.device, "dtype": workload.dtype}
        self.spec = FinetuneSpec(workload.model, 100, optimizer=optimizer, micro_batch=micro_batch, **computing)
        settings = registry.settings("rl.train_engines", name)()
        self.workload, self.engine = workload, registry.load("rl.train_engines", name)(settings)
        self.engine.initialize(self.spec)

    def step(self) -> tuple[float, float]:
        """Take one step; return loss and gradient norm."""
        result = self.engine.train_batch(self.workload.batch, nll, lambda batch: batch["loss_mask"].sum())
        return result["loss"], result["grad_norm"]

    def fill(self) -> dict[str, float]:
        """Return the number of micro-batches, their fill, and the load of the heaviest of 8 ranks over the mean."""
        from rl_contracts.batch.packing import balance
        from rl_contracts.models import micro_batches

        sizes = self.workload.batch["attention_mask"].sum(-1).tolist()
        heaviest = max(sum(sizes[row] for row in share) for share in balance(sizes, 8))
        count = len(micro_batches.plan(self.workload.batch, self.spec, self.engine.parallel))
        return {
            "micro_batches": count,
            "fill": round(self.workload.tokens / (count * self.workload.max_tokens), 4),
            "heaviest_of_8_ranks": round(8 * heaviest / self.workload.tokens, 4),
        }


class PaddedSide:
    """Training step of transformers on padded micro-batches."""

    def __init__(self, workload: Workload) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.workload = workload
        self.model = AutoModelForCausalLM.from_pretrained(
            workload.model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model.to(workload.device).train()
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def step(self, rows: int) -> tuple[float, float]:
        """Take one step in micro-batches of `rows` sequences; return loss and gradient norm."""
        import torch

        batch, loss = self.workload.batch, 0.0
        learned = int(batch["loss_mask"].sum())
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(batch), rows):
            mask = batch["attention_mask"][start : start + rows]
            longest = int(mask.sum(-1).max())
            mask, ids = mask[:, :longest], batch["input_ids"][start : start + rows, :longest]
            ids, mask = ids.to(self.workload.device), mask.to(self.workload.device)
            labels, is_bfloat16 = ids.masked_fill(~mask, -100), self.workload.dtype == "bfloat16"
            with torch.autocast(self.workload.device, torch.bfloat16, enabled=is_bfloat16):
                part = self.model(
                    input_ids=ids,
                    attention_mask=mask.long(),
                    labels=labels,
                    num_items_in_batch=learned,
                    use_cache=False,
                ).loss
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return loss, norm.item()


def timed(step: Callable[[], tuple[float, float]], threads: int) -> tuple[float, tuple[float, float]]:
    """Return the seconds of a step on `threads` threads, and its result."""
    import torch

    torch.set_num_threads(threads)
    begin = time.perf_counter()
    result = step()
    return time.perf_counter() - begin, result


def trial_seconds(step: Callable[[], tuple[float, float]], threads: int) -> float:
    """Return the seconds of a step, or infinity if the GPU has too little memory."""
    import torch

    try:
        return timed(step, threads)[0]
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def utilization(fsdp: EngineSide, seconds: float) -> float | None:
    """Return the model FLOPs utilization, or None if the peak FLOP/s of the device is unknown, as on CPUs.

    `rl_engines_fsdp.usage.step_flops` counts the useful FLOPs of a step.
    """
    import torch

    from rl_contracts.models.attention_windows import layer_windows
    from rl_contracts.models.usage import attended_pairs, peak_flops
    from rl_engines_fsdp.usage import step_flops

    workload, model = fsdp.workload, fsdp.engine._model
    pairs = attended_pairs(workload.batch["attention_mask"].sum(-1), layer_windows(model.model.config))
    flops = step_flops(model, workload.tokens, int(pairs))
    peak = peak_flops(torch.device(workload.device), workload.dtype)
    return round(flops / (peak * seconds), 4) if flops and peak else None


def measure_step(workload: Workload, repeats: int, engine: str) -> dict[str, Any]:
    """Measure all sides in turn, after trials of their settings; `engine` adds an engine to FSDP."""
    fsdp, padded = EngineSide(workload), PaddedSide(workload)
    extra_sides = {engine: EngineSide(workload, engine)} if engine != "fsdp" else {}
    counts = sorted({1, os.cpu_count() or 1})
    first_results = [timed(side.step, counts[-1])[1] for side in (fsdp, *extra_sides.values())]
    first_results.append(timed(partial(padded.step, PEER_ROWS[0]), counts[-1])[1])
    tolerance = 1e-3 if workload.dtype == "float32" else 3e-2
    for result in first_results[1:]:
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(first_results[0], result, strict=True)):
            raise SystemExit(
                f"expected equal loss and gradient norm on all sides, found {first_results[0]} and {result}"
            )
    fsdp_trials = {threads: timed(fsdp.step, threads)[0] for threads in counts}
    peer_trials = {
        (threads, rows): trial_seconds(partial(padded.step, rows), threads) for threads in counts for rows in PEER_ROWS
    }
    threads = min(fsdp_trials, key=fsdp_trials.__getitem__)
    peer_threads, rows = min(peer_trials, key=peer_trials.__getitem__)
    best = {name: min(counts, key=lambda n, side=side: timed(side.step, n)[0]) for name, side in extra_sides.items()}
    runs: list[tuple[float, float]] = []
    extra_seconds: list[float] = []
    for _ in range(repeats):
        fsdp_seconds = timed(fsdp.step, threads)[0]
        extra_seconds += [timed(side.step, best[name])[0] for name, side in extra_sides.items()]
        peer_seconds = timed(partial(padded.step, rows), peer_threads)[0]
        runs.append((fsdp_seconds, peer_seconds))
        load = os.getloadavg()[0]
        print(
            f"step: fsdp {workload.tokens / fsdp_seconds:.0f} tokens/s, "
            f"transformers {workload.tokens / peer_seconds:.0f}, load {load:.1f}"
        )
    rates = [statistics.median(workload.tokens / run[side] for run in runs) for side in range(2)]
    mfu = [utilization(fsdp, workload.tokens / rate) for rate in rates]
    extra_results = {
        name: {
            "tokens_per_s": round(statistics.median(workload.tokens / seconds for seconds in extra_seconds), 1),
            "threads": best[name],
            "mfu": utilization(fsdp, statistics.median(extra_seconds)),
            "ratio_to_fsdp": round(
                statistics.median(run[0] / seconds for run, seconds in zip(runs, extra_seconds, strict=True)), 3
            ),
        }
        for name in extra_sides
    }
    return extra_results | {
        "rows": len(workload.batch),
        "tokens": workload.tokens,
        "longest": workload.batch["input_ids"].shape[1],
        **fsdp.fill(),
        "fsdp": {"tokens_per_s": round(rates[0], 1), "threads": threads, "mfu": mfu[0]},
        "transformers": {"tokens_per_s": round(rates[1], 1), "threads": peer_threads, "rows": rows, "mfu": mfu[1]},
        "ratio": round(statistics.median(peer_seconds / fsdp_seconds for fsdp_seconds, peer_seconds in runs), 3),
        "ratios": [round(peer_seconds / own, 3) for own, peer_seconds in runs],
    }


def measure_quick(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one small step per engine and the fused loss on few tokens, without peers."""
    results: dict[str, Any] = {}
    if options.part in ("all", "step"):
        workload = make_workload(directory, 24, 96, 128, 512, 64, options.device, options.dtype)
        sides = {name: EngineSide(workload, name) for name in dict.fromkeys(("fsdp", options.engine))}
        rates = {name: round(workload.tokens / timed(side.step, 1)[0], 1) for name, side in sides.items()}
        results["step"] = {"tokens": workload.tokens, "tokens_per_s": rates, **sides["fsdp"].fill()}
        for side in sides.values():
            side.engine.destroy()
    if options.part in ("all", "loss"):
        results["loss"] = {"fused": loss_side("fused", tokens=256, vocabulary=8192, hidden=64)}
    return results


def available_bytes() -> int:
    """Return the available memory in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))


def max_fitting_tokens(tokens: int, vocabulary: int, hidden: int) -> int:
    """Return the tokens, at most `tokens`, for which the materialized loss fits into memory.

    It needs three times the logits, and twice the weight with its gradient.
    """
    fixed = 4 * vocabulary * hidden * 4 + 2 * GIB
    while tokens > 64 and 3.2 * 4 * vocabulary * tokens + fixed > available_bytes():
        tokens //= 2
    return tokens


def loss_side(side: str, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """Run `train_step_loss.py` once and return its result."""
    arguments = [str(number) for number in (tokens, vocabulary, hidden, os.cpu_count() or 1)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    command = [sys.executable, str(HERE / "train_step_loss.py"), side, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{side}: exit code {result.returncode}\n{result.stderr[-4000:]}")
    loss: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    print(f"loss: {side} {tokens} tokens, {loss['seconds']:.1f} s, peak {loss['peak_bytes'] / GIB:.2f} GiB", flush=True)
    return loss


def measure_loss(tokens: int, vocabulary: int, hidden: int, repeats: int) -> dict[str, Any]:
    """Run both sides of the loss in turn, after a check that they agree."""
    check_tokens = min(tokens, 64)
    small = [loss_side(side, check_tokens, vocabulary, hidden) for side in ("fused", "materialized")]
    for name in ("logprob", "gradient"):
        if not math.isclose(small[0][name], small[1][name], rel_tol=1e-4):
            raise SystemExit(f"expected equal {name} on both sides, found {small[0][name]} and {small[1][name]}")
    runs = []
    for _ in range(repeats):
        fused = loss_side("fused", tokens, vocabulary, hidden)
        peer = loss_side("materialized", max_fitting_tokens(tokens, vocabulary, hidden), vocabulary, hidden)
        runs.append((fused, peer))
    logits = 4 * tokens * vocabulary
    scale = tokens / peer["tokens"]
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "logits_gib": round(logits / GIB, 3),
        "fused": {"peak_gib": round(fused["peak_bytes"] / GIB, 3), "seconds": round(fused["seconds"], 2)},
        "materialized": {
            "peak_gib": round(peer["peak_bytes"] * scale / GIB, 3),
            "seconds": round(peer["seconds"] * scale, 2),
            "tokens": peer["tokens"],
        },
        "memory_ratio": round(max(run[0]["peak_bytes"] for run in runs) / logits, 4),
        "time_ratio": round(
            statistics.median(a["seconds"] / (b["seconds"] * tokens / b["tokens"]) for a, b in runs), 3
        ),
    }


def main() -> None:
    """Measure and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128, help="sequences per step")
    parser.add_argument("--longest", type=int, default=1024, help="length limit; longer sequences are truncated")
    parser.add_argument("--max-tokens", type=int, default=1024, help="token limit of the packed micro-batches")
    parser.add_argument("--vocabulary", type=int, default=8192, help="vocabulary size of the step's model")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the step's model")
    parser.add_argument("--repeats", type=int, default=3, help="measurements per side")
    parser.add_argument(
        "--engine", default="fsdp", help="train engine to measure in addition to fsdp, for example megatron"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the step; mfu needs a known GPU"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the step's computation; weights are float32",
    )
    parser.add_argument("--part", choices=("all", "step", "loss"), default="all")
    parser.add_argument("--quick", action="store_true", help="small sizes, no peer; only checks that it runs")
    options = parser.parse_args()
    results: dict[str, Any] = {"required": REQUIRED}
    with tempfile.TemporaryDirectory() as directory:
        if options.quick:
            print(json.dumps(measure_quick(Path(directory), options)))
            return
        if options.part in ("all", "step"):
            sizes = (options.rows, options.longest, options.max_tokens, options.vocabulary, options.hidden)
            workload = make_workload(Path(directory), *sizes, options.device, options.dtype)
            results["step"] = measure_step(workload, options.repeats, options.engine)
    if options.part in ("all", "loss"):
        results["loss"] = measure_loss(8192, 151_936, 1024, options.repeats)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
