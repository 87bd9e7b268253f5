"""States of several layouts in one process, and errors that every rank raises."""

from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.testing import make_tiny_model
from rl_contracts.testing.processes import run_ranks
from rl_engines_megatron import MegatronEngine

RANKS = Path(__file__).parent / "megatron_state_ranks.py"


@pytest.mark.slow
def test_state_of_second_layout_works_and_errors_are_raised_on_every_rank(tmp_path):
    arguments = [str(make_tiny_model(tmp_path / "model", layers=2)), str(tmp_path)]
    outputs = run_ranks(RANKS, arguments, 2, seconds=60)

    for rank, output in enumerate(outputs):
        assert "second layout: saved and loaded" in output
        for fault, path, cause in (
            ("missing shard", "absent", "rank 0: CheckpointingException"),
            ("no memory", "absent", "rank 1: OSError: no memory"),
            ("full disk", "absent", "rank 1: OSError: disk is full"),
            ("file on one rank", ("second", "absent")[rank], "rank 1: ModelError"),
        ):
            (line,) = [line for line in output.splitlines() if line.startswith(f"{fault}:")]
            assert cause in line
            assert path in line


@pytest.mark.slow
def test_snapshot_of_unserializable_state_raises_error(tmp_path, monkeypatch):
    engine = MegatronEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path / "model")), 1, device="cpu"))
    monkeypatch.setattr(filesystem_async, "_write_item", lambda *_, **__: 1 / 0)

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        engine.snapshot(SaveLoadMeta(str(tmp_path / "state"), "state"))
    engine.destroy()
