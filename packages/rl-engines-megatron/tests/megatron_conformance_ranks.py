"""Conformance suite on one of several ranks.

Environment: `LAYOUT` and `SETTINGS` as JSON, and `SHARED`, a directory that all ranks share.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.batch.trajectory import select, units
from rl_contracts.conformance.train_engine import TrainEngineConformance
from rl_contracts.data import FinetuneSpec, ParamSpec, SaveLoadMeta
from rl_contracts.engine import Snapshot
from rl_contracts.errors import EngineError
from rl_contracts.testing import make_tiny_model
from rl_contracts.testing.processes import rank_device
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig


class Together(MegatronEngine):
    """Engine that acts as one rank: each rank gets the whole batch and returns the results of all ranks."""

    def initialize(self, spec: FinetuneSpec) -> None:
        try:
            super().initialize(spec)
        except EngineError as error:
            raise error.__cause__ or error from error

    def load(self, meta: SaveLoadMeta) -> None:
        try:
            super().load(meta)
        except EngineError as error:
            raise error.__cause__ or error from error

    def _local_rows(self, batch: TensorDict) -> list[int]:
        local_units = units(batch)[self.parallel.dp_rank :: self.parallel.dp_size]
        return sorted(row for unit in local_units for row in unit)

    def train_batch(self, batch: TensorDict, *functions: Any) -> dict[str, float]:
        return super().train_batch(select(batch, self._local_rows(batch)), *functions)

    def eval_batch(self, batch: TensorDict, *functions: Any) -> dict[str, float]:
        return super().eval_batch(select(batch, self._local_rows(batch)), *functions)

    def forward(self, batch: TensorDict, output_fn: Any) -> torch.Tensor:
        rows = self._local_rows(batch)
        outputs = {"rows": torch.tensor(rows), "values": super().forward(select(batch, rows), output_fn)}
        result = torch.zeros(batch["attention_mask"].shape)
        for part in self.parallel.gather_tensors(outputs):
            result[part["rows"].long(), : part["values"].shape[1]] = part["values"]
        return result

    def param_specs(self) -> tuple[ParamSpec, ...]:
        own = [[spec.name, list(spec.shape), spec.dtype] for spec in super().param_specs()]
        parts = self.parallel.gather_json(own)
        return tuple(ParamSpec(name, tuple(shape), dtype) for part in parts for name, shape, dtype in part)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = {name: tensor.clone() for name, tensor in super().full_parameters()}
        for part in self.parallel.gather_tensors(own, all_ranks=True):
            yield from ((name, part[name]) for name in self._order(part))

    def snapshot(self, meta: SaveLoadMeta) -> Snapshot:
        write = super().snapshot(meta)
        assert write is not None

        def write_together() -> list[Path]:
            parts = self.parallel.gather_json([str(file) for file in write()])
            return [Path(file) for part in parts for file in part]

        return write_together

    def _order(self, part: dict[str, torch.Tensor]) -> list[str]:
        return [spec.name for spec in self.param_specs() if spec.name in part]


class TestOnRanks(TrainEngineConformance):
    device = rank_device()

    def make_engine(self) -> Together:
        strategy = ParallelStrategy(**json.loads(os.environ["LAYOUT"]))
        return Together(MegatronEngineConfig(**json.loads(os.environ["SETTINGS"])), strategy)

    @pytest.fixture(scope="class")
    def model_path(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        directory = tmp_path_factory.mktemp("model")
        kind = "qwen3_moe" if "expert" in os.environ["LAYOUT"] else "qwen3"
        return str(make_tiny_model(directory, kind, hidden=128, layers=4))

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        """Return a directory that ranks share in tests that save, and a separate one per rank in others."""
        name = request.node.name
        is_shared = "save" in name or "snapshot" in name
        directory = Path(os.environ["SHARED"]) / name / ("" if is_shared else os.environ["RANK"])
        directory.mkdir(parents=True, exist_ok=True)
        return directory


if __name__ == "__main__":
    base = Path(os.environ["SHARED"]) / f"rank-{os.environ['RANK']}"
    options = ["-q", "--all", "-x", "-p", "no:warnings", "--show-capture=no", f"--basetemp={base}"]
    sys.exit(pytest.main([__file__, *options]))
