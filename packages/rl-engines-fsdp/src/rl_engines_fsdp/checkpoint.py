"""Saving and loading: Hugging Face directories for others, states to continue from exactly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ModelError
from rl_contracts.parallel import ParallelContext
from rl_engines_fsdp.causal_lm import PackedCausalLM
from rl_engines_fsdp.loading import empty_model
from rl_engines_fsdp.sharding import full_parameters

KINDS = ("hf", "state")
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def check_kind(meta: SaveLoadMeta) -> None:
    """Refuse an unknown kind.

    Raises:
        ModelError: the kind is neither `hf` nor `state`.
    """
    if meta.kind not in KINDS:
        raise ModelError(f"{meta.path}: expected a kind of {' or '.join(KINDS)}, found {meta.kind!r}.")


class NewDirectory:
    """A directory that appears whole or not at all: rank 0 writes beside it and renames."""

    def __init__(self, path: str, parallel: ParallelContext) -> None:
        self.final = Path(path)
        self.scratch = self.final.with_name(f".{self.final.name}.partial")
        self.parallel = parallel

    def prepare(self) -> None:
        """Make the scratch directory (collective).

        Raises:
            ModelError, EngineError: the directory exists already and is not empty, or cannot be made.
        """
        error: Exception | None = None
        if self.parallel.is_main:
            try:
                if self.final.exists() and (not self.final.is_dir() or any(self.final.iterdir())):
                    raise ModelError(f"{self.final}: expected a new directory to save into, found one with files.")
                shutil.rmtree(self.scratch, ignore_errors=True)
                self.scratch.mkdir(parents=True)
            except (OSError, ModelError) as failure:
                error = failure
        self.parallel.agree(error, f"preparing {self.final}")

    def commit(self, error: Exception | None) -> None:
        """Rename the scratch directory, unless writing failed on any rank (collective).

        Raises:
            EngineError: writing failed.
        """
        try:
            self.parallel.agree(error, f"saving {self.final}")
        except Exception:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        if self.parallel.is_main:
            if self.final.exists():
                self.final.rmdir()
            os.replace(self.scratch, self.final)
        self.parallel.barrier()


def save_hugging_face(
    model: PackedCausalLM, config: Any, meta: SaveLoadMeta, dtype: str, parallel: ParallelContext
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` loads (collective); rank 0 writes."""
    target = NewDirectory(meta.path, parallel)
    target.prepare()
    whole: dict[str, Tensor] = {}
    for name, value in full_parameters(model):
        if parallel.is_main:
            whole[name] = value.to("cpu", getattr(torch, dtype))
    error: Exception | None = None
    if parallel.is_main:
        try:
            _write_model(model, config, whole, target.scratch, dtype)
            if meta.tokenizer_path is not None:
                _copy_tokenizer(Path(meta.tokenizer_path), target.scratch)
        except (OSError, RuntimeError, ValueError, ModelError) as failure:
            error = failure
    target.commit(error)


def _write_model(model: PackedCausalLM, config: Any, whole: dict[str, Tensor], path: Path, dtype: str) -> None:
    inner: Any = model.model
    shell: Any = empty_model(config).to(getattr(torch, dtype))
    shell.generation_config = inner.generation_config
    shell.save_pretrained(path, state_dict=whole)


def _copy_tokenizer(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ModelError(f"tokenizer {source}: expected a directory with tokenizer files, found none.")
    for pattern in TOKENIZER_PATTERNS:
        for entry in source.glob(pattern):
            if entry.is_file():
                shutil.copy2(entry, target / entry.name)
            else:
                shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)


def save_state(
    model: PackedCausalLM,
    optimizer: torch.optim.Optimizer | None,
    counters: dict[str, int],
    path: str,
    parallel: ParallelContext,
) -> None:
    """Write weights, optimizer, counters and each rank's random state (collective); every rank writes its shards."""
    target = NewDirectory(path, parallel)
    target.prepare()
    error: Exception | None = None
    try:
        save(
            _state(model, optimizer, counters, parallel),
            checkpoint_id=target.scratch,
            process_group=parallel.host_group,
            no_dist=parallel.host_group is None,
        )
    except (OSError, RuntimeError, ValueError) as failure:
        error = failure
    target.commit(error)


def load_state(
    model: PackedCausalLM, optimizer: torch.optim.Optimizer | None, path: str, parallel: ParallelContext
) -> dict[str, int]:
    """Read what `save_state` wrote, with any number of ranks, in place (collective).

    Returns:
        the counters.

    Raises:
        ModelError: the directory is no saved state, or not of this model.
    """
    directory = Path(path)
    if not (directory / ".metadata").is_file():
        found = sorted(entry.name for entry in directory.iterdir())[:6] if directory.is_dir() else "nothing"
        raise ModelError(
            f"{path}: expected a saved state (a directory with .metadata and *.distcp files), found {found}. "
            "Give a directory that was saved with kind 'state', or load it with kind 'hf'."
        )
    reader = FileSystemReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    state = _state(model, optimizer, dict.fromkeys(COUNTERS, 0), parallel)
    random = [key for key in state if key.startswith("random.")]
    for key in random:
        if key not in stored:  # another number of ranks, or another kind of device: this rank keeps its own
            del state[key]
    missing = sorted(set(state) - set(stored))
    if missing:
        raise ModelError(
            f"{path}: expected the state of this model and optimizer, but {len(missing)} entries are missing, "
            f"{missing[:3]} first. Was it saved by an engine with another model, or without an optimizer?"
        )
    try:
        load(
            state,
            storage_reader=reader,
            process_group=parallel.host_group,
            no_dist=parallel.host_group is None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: the saved state cannot be loaded into this model: {error}") from error
    _restore_random(state, parallel)
    return {name: int(state[f"counter.{name}"]) for name in COUNTERS}


COUNTERS = ("version", "steps", "skipped")
"""Training batches applied, optimizer steps done, consecutive steps skipped."""


def _state(
    model: PackedCausalLM,
    optimizer: torch.optim.Optimizer | None,
    counters: dict[str, int],
    parallel: ParallelContext,
) -> dict[str, Any]:
    """One flat mapping; its tensors are the live ones, so that loading fills them."""
    state: dict[str, Any] = {}
    for name, parameter in model.hugging_face_parameters():
        state[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            moments = _moments(optimizer, parameter)
            state.update({f"optimizer.{moment}.{name}": moments[moment] for moment in MOMENTS})
    state.update({f"counter.{name}": torch.tensor(value) for name, value in counters.items()})
    state[f"random.{parallel.rank}.cpu"] = torch.get_rng_state()
    if parallel.device.startswith("cuda"):
        state[f"random.{parallel.rank}.cuda"] = torch.cuda.get_rng_state(parallel.device)
    return state


def _moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    moments: dict[str, Tensor] = optimizer.state[parameter]
    if not moments:  # before the first step
        moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        moments["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    return moments


def _restore_random(state: dict[str, Any], parallel: ParallelContext) -> None:
    cpu, cuda = (state.get(f"random.{parallel.rank}.{kind}") for kind in ("cpu", "cuda"))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, parallel.device)
