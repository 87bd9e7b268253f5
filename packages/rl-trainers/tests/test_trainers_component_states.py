"""States of components, restored on the saved number of ranks or on another one."""

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


class Component:
    """Component whose state changes only when `load_state_dict` replaces it."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class ReshardableComponent(Component):
    """Component that restores the states of all ranks."""

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        self.state = {"all": [state["at"] for state in states]}


def save(checkpoint: Path, states: list[dict[str, Any]]) -> Path:
    for rank, state in enumerate(states):
        ComponentState.capture("component", Component(state)).write(checkpoint, rank)
    (checkpoint / MANIFEST).write_text(json.dumps({"ranks": len(states)}))
    return checkpoint


def restore(checkpoint: Path, component: Component, rank: int, ranks: int) -> Any:
    restore_components(checkpoint, {"component": component}, ParallelContext(rank, ranks))
    return component.state


def test_restore_identical_states_works_with_any_number_of_ranks(tmp_path: Path) -> None:
    empty = torch.zeros(0, dtype=torch.bool)
    checkpoint = save(tmp_path, [{"step": 4, "list": [1, {"b": torch.arange(3), "c": None}], "d": {"e": empty}}] * 2)

    for rank, ranks in ((0, 1), (1, 2), (2, 3)):
        state = restore(checkpoint, Component(), rank, ranks)
        assert state["step"] == 4
        assert state["list"][1]["b"].tolist() == [0, 1, 2]
        assert state["list"][1]["c"] is None
        assert state["d"]["e"].dtype == torch.bool


def test_restore_differing_states_works_with_same_number_of_ranks(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, [{"at": 5}, {"at": 7}])

    assert [restore(checkpoint, Component(), rank, 2)["at"] for rank in range(2)] == [5, 7]


@pytest.mark.parametrize(
    "states", [[{"at": 5}, {"at": 7}], [{"at": torch.zeros(2)}, {"at": torch.ones(2)}]], ids=["values", "tensors"]
)
def test_restore_differing_states_rejects_other_number_of_ranks(states: list[dict[str, Any]], tmp_path: Path) -> None:
    checkpoint = save(tmp_path, states)

    with pytest.raises(ConfigError, match=r"component \(Component\) .*load_states.* 2 .* 1"):
        restore(checkpoint, Component(), 0, 1)


def test_restore_reshardable_component_receives_states_of_all_ranks(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, [{"at": 5}, {"at": 7}])

    for rank, ranks in ((0, 1), (1, 2), (2, 3)):
        assert restore(checkpoint, ReshardableComponent(), rank, ranks)["all"] == [5, 7]


def test_saved_states_of_twelve_ranks_are_in_rank_order(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, [{"at": rank} for rank in range(12)])
    (checkpoint / "component-two-0.json").write_text("{}")  # another component, whose name has the same prefix

    assert [state["at"] for state in SavedStates(checkpoint, "component")] == list(range(12))


def test_restore_missing_state_raises_error_naming_its_file(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, [{"at": 5}, {"at": 5}])
    (checkpoint / "component-1.json").unlink()

    with pytest.raises(EngineError, match=r"component-1\.json.*recover\.resume=false"):
        restore(checkpoint, ReshardableComponent(), 0, 1)


def test_saved_states_are_read_on_access(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, [{"at": 5}, {"at": 7}])
    states = SavedStates(checkpoint, "component")
    (checkpoint / "component-0.json").write_text("incomplete")

    assert states[1]["at"] == 7
    with pytest.raises(EngineError, match=r"component-0.*cannot be read"):
        states[0]
