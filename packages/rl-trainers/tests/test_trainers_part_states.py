"""Parts of a run that go on with another number of ranks than it was saved with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_contracts.batch.parallel import ParallelContext
from rl_contracts.errors import ConfigError, EngineError
from rl_contracts.runtime.run_files import MANIFEST
from rl_trainers.recovery.component_states import ComponentState, SavedStates, restore_components


class Part:
    """Says what it is given, and remembers what it goes on from."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Dealt(Part):
    """Goes on from the states of all ranks."""

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        self.state = {"all": [state["at"] for state in states]}


def saved(point: Path, states: list[dict[str, Any]]) -> Path:
    for rank, state in enumerate(states):
        ComponentState.describe("part", Part(state)).write(point, rank)
    (point / MANIFEST).write_text(json.dumps({"ranks": len(states)}))
    return point


def restored(point: Path, part: Part, rank: int, ranks: int) -> Any:
    restore_components(point, {"part": part}, ParallelContext(rank, ranks))
    return part.state


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_part_that_is_the_same_on_all_ranks_goes_on_with_any_number(ranks: int, tmp_path: Path) -> None:
    point = saved(tmp_path, [{"step": 4, "kept": torch.arange(3)}] * 2)

    for rank in range(ranks):
        state = restored(point, Part(), rank, ranks)
        assert state["step"] == 4
        assert state["kept"].tolist() == [0, 1, 2]


def test_part_that_differs_between_ranks_goes_on_with_their_number(tmp_path: Path) -> None:
    point = saved(tmp_path, [{"at": 5}, {"at": 7}])

    assert [restored(point, Part(), rank, 2)["at"] for rank in range(2)] == [5, 7]


@pytest.mark.parametrize(
    "states", [[{"at": 5}, {"at": 7}], [{"at": torch.zeros(2)}, {"at": torch.ones(2)}]], ids=["values", "tensors"]
)
def test_part_that_differs_between_ranks_is_refused_with_another_number(
    states: list[dict[str, Any]], tmp_path: Path
) -> None:
    point = saved(tmp_path, states)

    with pytest.raises(ConfigError, match=r"part \(Part\) has another state on each of 2 .* Resume with 2"):
        restored(point, Part(), 0, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_part_that_can_be_divided_is_given_the_states_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    point = saved(tmp_path, [{"at": 5}, {"at": 7}])

    assert [restored(point, Dealt(), rank, ranks)["all"] for rank in range(ranks)] == [[5, 7]] * ranks


def test_states_of_a_dozen_ranks_come_in_order_of_rank(tmp_path: Path) -> None:
    point = saved(tmp_path, [{"at": rank} for rank in range(12)])
    (point / "part-two-0.json").write_text("{}")  # another part, whose name begins alike

    assert [state["at"] for state in SavedStates(point, "part")] == list(range(12))


@pytest.mark.parametrize("rank", [0, 1])
def test_states_of_which_one_is_missing_are_refused_by_its_name(rank: int, tmp_path: Path) -> None:
    point = saved(tmp_path, [{"at": 5}, {"at": 5}])
    (point / f"part-{rank}.json").unlink()

    with pytest.raises(EngineError, match=rf"part-{rank}.*missing.*recover\.resume=false"):
        restored(point, Dealt(), 0, 1)


def test_state_is_read_only_where_it_is_asked_for(tmp_path: Path) -> None:
    point = saved(tmp_path, [{"at": 5}, {"at": 7}])
    states = SavedStates(point, "part")
    (point / "part-0.json").write_text("half of")

    assert states[1]["at"] == 7
    with pytest.raises(EngineError, match=r"part-0.*cannot be read"):
        states[0]
