"""Restore of the last committed version when a server starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_contracts.data import WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.testing import put_weights
from rl_contracts.weights import write_committed
from rl_inference.embedded_server.weights import ServedWeights, restore


def make_model(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(4, 3, dtype=torch.float32)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, -value)
    return model


def commit(directory: Path, version: int) -> WeightUpdateMeta:
    """Publish weights whose values are the version number, and write the commit record."""
    tensors = [(name, p.detach()) for name, p in make_model(float(version)).named_parameters()]
    meta, receipt = put_weights(directory, version, tensors)
    write_committed(directory, meta, receipt)
    return meta


def serve(model: torch.nn.Module, directory: Path) -> ServedWeights:
    return ServedWeights(model, str(directory), "server", 0)


def test_restore_serves_the_committed_version(tmp_path: Path) -> None:
    commit(tmp_path, 6)
    model = make_model(0.0)
    weights = serve(model, tmp_path)

    restore(weights, str(tmp_path))

    assert weights.version == 6
    assert bool((model.weight == 6).all())
    assert weights.receipt().version == 6


def test_restore_without_stored_weights_keeps_the_model(tmp_path: Path) -> None:
    weights = serve(make_model(0.5), tmp_path)

    restore(weights, str(tmp_path))
    restore(weights, "")
    write_committed(tmp_path, WeightUpdateMeta("broadcast", 6), WeightReceipt("trainer", 6, {}))
    restore(weights, str(tmp_path))

    assert weights.version == 0


def test_restore_weights_that_differ_from_record_names_parameter(tmp_path: Path) -> None:
    path = Path(commit(tmp_path, 6).parts[0].location)
    data = bytearray(path.read_bytes())
    data[-64] ^= 1  # the bias
    path.write_bytes(data)

    with pytest.raises(WeightUpdateError, match="version 6, server: parameter 'bias' differs"):
        restore(serve(make_model(0.0), tmp_path), str(tmp_path))


def test_restore_version_overwritten_meanwhile_takes_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, 6)
    weights = serve(make_model(0.0), tmp_path)
    stage: Callable[[WeightUpdateMeta], WeightReceipt] = weights.stage

    def overwrite_and_stage(meta: WeightUpdateMeta) -> WeightReceipt:
        if meta.version == 6:
            commit(tmp_path, 7)
            commit(tmp_path, 8)  # overwrites version 6
        return stage(meta)

    monkeypatch.setattr(weights, "stage", overwrite_and_stage)

    restore(weights, str(tmp_path))

    assert weights.version == 8


def test_restore_overwritten_repeatedly_fails_at_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, 6)
    weights = serve(make_model(0.0), tmp_path)
    stage: Callable[[WeightUpdateMeta], WeightReceipt] = weights.stage

    def overwrite_and_stage(meta: WeightUpdateMeta) -> WeightReceipt:
        commit(tmp_path, meta.version + 2)
        return stage(meta)

    monkeypatch.setattr(weights, "stage", overwrite_and_stage)
    monkeypatch.setattr("rl_inference.embedded_server.weights.OVERTAKEN_SECONDS", 0.2)

    with pytest.raises(WeightUpdateError, match="differs"):
        restore(weights, str(tmp_path))
