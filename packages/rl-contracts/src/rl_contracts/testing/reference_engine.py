"""Reference for all other train engines: plain torch, one process, one sequence at a time, full logits."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.config import OptimizerConfig, require
from rl_contracts.data import FinetuneSpec, ParamSpec, SaveLoadMeta
from rl_contracts.engine import (
    MAX_SKIPPED_STEPS,
    LossFn,
    LossWeightFn,
    OutputFn,
    Snapshot,
    TokenOutputs,
    TrainEngine,
    TrainEngineConfig,
)
from rl_contracts.errors import EngineError, ModelError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import PackedBatch


@dataclass
class ReferenceTrainEngineConfig(TrainEngineConfig):
    """Settings of the reference engine; it has none."""

    def check(self, strategy: ParallelStrategy, spec: FinetuneSpec) -> None:
        """Require a language model in float32 on one CPU process.

        Raises:
            ConfigError: this engine does not support the value of a setting; the message names the setting.
        """
        require(strategy.world_size == 1, "allocation", "one rank (the reference engine has no more)", str(strategy))
        for name, expected in (("dtype", "float32"), ("head", "lm"), ("deterministic", False)):
            value = getattr(spec, name)
            require(value == expected, name, f"{expected} (the only value of the reference engine)", value)
        require(spec.device != "cuda", "device", "cpu or auto (the reference engine runs on the CPU)", spec.device)


class ReferenceTrainEngine(TrainEngine):
    """Train engine that defines the expected results of all others. It is written for clarity, not for speed.

    Args:
        config: settings.
        strategy: one rank.
        model: float32 module; `model(input_ids=[1, T])` returns logits [1, T, vocab] or an object with `logits`. None
            loads the causal language model at the spec's `model_path`.
    """

    def __init__(
        self,
        config: ReferenceTrainEngineConfig | None = None,
        strategy: ParallelStrategy | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.config = config or ReferenceTrainEngineConfig()
        self.strategy = strategy or ParallelStrategy()
        self.parallel = ParallelContext()
        self.model: Any = model
        self._steps = self._skipped = 0

    def initialize(self, spec: FinetuneSpec) -> None:
        import torch

        self.config.check(self.strategy, spec)
        self.spec = spec
        self.settings = spec.optimizer or OptimizerConfig()
        require(self.settings.name == "adamw", "optimizer.name", "adamw with this engine", self.settings.name)
        torch.manual_seed(spec.seed)
        if self.model is None:
            self.model = _read_model(spec.model_path)
        self.model.train()
        decayed = [p for n, p in self.model.named_parameters() if p.ndim >= 2 and not n.endswith("bias")]
        undecayed = [p for n, p in self.model.named_parameters() if p.ndim < 2 or n.endswith("bias")]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.settings.weight_decay},
                {"params": undecayed, "weight_decay": 0.0},
            ],
            lr=self.settings.lr,
            betas=(self.settings.beta1, self.settings.beta2),
            eps=self.settings.eps,
        )

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        import torch

        if self.spec.optimizer is None:
            raise EngineError("train_batch: this engine has no optimizer (FinetuneSpec.optimizer is None).")
        self._optimizer.zero_grad()
        loss, result = self._loss(batch, loss_fn, loss_weight_fn)
        loss.backward()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        rate = learning_rate(self.settings, self._steps, self.spec.total_steps)
        applied = math.isfinite(norm)
        if applied:
            if self.settings.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.max_grad_norm, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._steps, self._skipped = self._steps + 1, 0
        else:
            self._skipped += 1
            if self._skipped > MAX_SKIPPED_STEPS:
                raise EngineError(
                    f"gradients were not finite in {self._skipped} consecutive steps (allowed: {MAX_SKIPPED_STEPS})."
                )
        tokens = float(batch["attention_mask"].sum())
        return result | {"grad_norm": norm, "lr": rate, "applied": float(applied), "tokens": tokens}

    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        import torch

        with torch.no_grad():
            return self._loss(batch, loss_fn, loss_weight_fn)[1]

    def forward(self, batch: TensorDict, output_fn: OutputFn) -> torch.Tensor:
        import torch

        result = torch.zeros(batch["attention_mask"].shape)
        with torch.no_grad():
            for rows, outputs, packed in self._run(batch):
                result[torch.tensor(rows)[packed.sequence_of_token], packed.position_ids] = output_fn(outputs, packed)
        return result

    def _loss(
        self, batch: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss as a tensor with a gradient, and a dictionary of `loss` and the statistics as numbers."""
        import torch

        denominator = float(loss_weight_fn(batch))
        if not denominator > 0:
            raise EngineError(f"minibatch: expected a positive denominator, found {denominator}.")
        loss, all_stats = torch.zeros(()), []
        for _, outputs, packed in self._run(batch):
            unit_loss, stats = loss_fn(outputs, packed)
            loss = loss + unit_loss
            all_stats.append(stats)
        result = {"loss": float(loss.detach()) / denominator}
        for name in all_stats[0] if all_stats else ():
            if name.endswith("/max"):
                result[name] = max(float(stats[name][0]) for stats in all_stats)
            else:
                total = sum(float(stats[name][1]) for stats in all_stats)
                result[name] = sum(float(stats[name][0]) for stats in all_stats) / total if total else math.nan
        return loss / denominator, result

    def _run(self, batch: TensorDict) -> Iterator[tuple[list[int], TokenOutputs, PackedBatch]]:
        """Yield the row indices, the outputs and the packed form of each unit of sequences.

        A unit is a single sequence, unless the batch has `unit_ids`.
        """
        import torch

        from rl_contracts.batch.trajectory import lengths, pack, select, units
        from rl_contracts.models.step_gate import STEP

        tokens, limit = lengths(batch), self.spec.micro_batch.max_tokens
        batch_units = units(batch)
        if any(int(tokens[rows].sum()) > limit for rows in batch_units):
            raise EngineError(
                f"micro_batch.max_tokens={limit} must be at least the length of the longest unit of sequences."
            )
        for rows in batch_units:
            STEP.begin_micro_batch()
            packed = pack(select(batch, rows))
            sequences = packed["input_ids"].split(packed.cu_seqlens.diff().tolist())
            outputs = [self._row(ids, packed["temperature"][i]) for i, ids in enumerate(sequences)]
            logprobs, entropy = (torch.cat(values) for values in zip(*outputs, strict=True))
            yield rows, TokenOutputs(logprobs, entropy), packed

    def _row(self, ids: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and entropies, [T] each, of one sequence of ids [T]; entry 0 is 0."""
        import torch

        out = self.model(input_ids=ids[None])
        logits = getattr(out, "logits", out)[0].float() / temperature
        distribution = torch.log_softmax(logits[:-1], -1)
        first = torch.zeros(1)
        logprobs = distribution.gather(1, ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        entropy = entropy if self.spec.entropy_grad else entropy.detach()
        return torch.cat([first, logprobs]), torch.cat([first, entropy])

    def param_specs(self) -> tuple[ParamSpec, ...]:
        return tuple(
            ParamSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in self.model.named_parameters()
        )

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def save(self, meta: SaveLoadMeta) -> None:
        scratch = Path(meta.path).with_name(f".{Path(meta.path).name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        self.snapshot(replace(meta, path=str(scratch)))()
        scratch.rename(meta.path)

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot:
        counters = {"version": self.version, "steps": self._steps, "skipped": self._skipped}
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "counters": counters}
        copied = copy.deepcopy(self.model if meta.kind == "hf" else state)
        return partial(_write, copied, meta)

    def load(self, meta: SaveLoadMeta) -> None:
        import torch

        if meta.kind == "hf":
            self.model.load_state_dict(_read_model(meta.path).state_dict())
            return
        try:
            state = torch.load(Path(meta.path) / "state.pt", weights_only=True)
        except OSError as error:
            raise ModelError(f"{meta.path}: expected a directory of kind state: {error}") from error
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        counters = state["counters"]
        self.version, self._steps, self._skipped = counters["version"], counters["steps"], counters["skipped"]

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def destroy(self) -> None:
        self.model = None


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises to `lr` during the warm-up and reaches its minimum after the last step.
    """
    warmup_setting = config.warmup_steps  # below 1 it is a fraction of all steps
    warmup = min(math.ceil(warmup_setting * total_steps if warmup_setting < 1 else warmup_setting), total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    remaining = max((total_steps - step) / (total_steps - warmup), 0.0) if total_steps > warmup else 0.0
    curve = {"constant": 1.0, "linear": remaining, "cosine": (1 - math.cos(math.pi * remaining)) / 2}[config.schedule]
    min_ratio = 0.0 if config.schedule == "constant" else config.min_lr_ratio
    return config.lr * (min_ratio + (1 - min_ratio) * curve)


def _write(copied: Any, meta: SaveLoadMeta) -> list[Path]:
    import torch

    directory = Path(meta.path)
    directory.mkdir(parents=True, exist_ok=True)
    if meta.kind == "state":
        torch.save(copied, directory / "state.pt")
    else:
        copied.save_pretrained(directory)
        if meta.tokenizer_path is not None:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(meta.tokenizer_path).save_pretrained(directory)
    return [path for path in directory.rglob("*") if path.is_file()]


def _read_model(path: str) -> torch.nn.Module:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a Hugging Face model directory with weights: {error}") from error
