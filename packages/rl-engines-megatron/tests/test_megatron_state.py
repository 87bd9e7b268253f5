"""States of several layouts in one process, and errors that every rank raises."""

from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.testing import make_tiny_model
from rl_contracts.testing.processes import run_ranks
from rl_engines_megatron import MegatronEngine

RANKS = Path(__file__).parent / "megatron_state_ranks.py"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the output of each of two ranks."""
    directory = tmp_path_factory.mktemp("states")
    return run_ranks(RANKS, [str(make_tiny_model(directory / "model", layers=2)), str(directory)], 2, seconds=60)


@pytest.mark.slow
def test_save_and_load_of_second_layout_in_one_process(outputs):
    assert all("second layout: saved and loaded" in output for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "path", "cause"),
    [
        ("missing shard", "absent", "rank 0: CheckpointingException"),
        ("no memory", "absent", "rank 1: OSError: no memory"),
        ("full disk", "absent", "rank 1: OSError: disk is full"),
        ("file on one rank", "second", "rank 1: ModelError"),
    ],
)
def test_state_error_on_one_rank_is_raised_on_every_rank(outputs, fault, path, cause):
    for rank, output in enumerate(outputs):
        (line,) = [line for line in output.splitlines() if line.startswith(f"{fault}:")]
        assert cause in line
        assert (path if fault != "file on one rank" else ("second", "absent")[rank]) in line


@pytest.mark.slow
def test_snapshot_of_unserializable_state_raises_error(tmp_path, monkeypatch):
    engine = MegatronEngine()
    engine.initialize(FinetuneSpec(str(make_tiny_model(tmp_path / "model")), 1, device="cpu"))
    monkeypatch.setattr(filesystem_async, "_write_item", lambda *_, **__: 1 / 0)

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        engine.snapshot(SaveLoadMeta(str(tmp_path / "state"), "state"))
    engine.destroy()
