"""Weight updates of the embedded server that contain only adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from rl_contracts.data import AdapterSpec, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.testing import put_weights
from rl_contracts.weights import checksum, verify_receipt, write_committed
from rl_contracts.weights.adapters import BaseWeights, merged, prefix_checksum
from rl_inference.embedded_server.requests import Stage
from rl_inference.embedded_server.weights import ServedWeights, restore

SCALE = 2.0
ADAPTED = "layer.weight"

Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """Model with an adapted layer, a frozen layer whose weight is tied to another, and a fully trained norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layer, self.frozen = torch.nn.Linear(5, 4), torch.nn.Linear(4, 6, bias=False)
        self.tied = torch.nn.Linear(4, 6, bias=False)
        self.tied.weight = self.frozen.weight
        self.norm = torch.nn.LayerNorm(6, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random)
        self.to(dtype)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Directory with the model's weights in two files, one of the weights in bfloat16."""
    directory = tmp_path / "base"
    directory.mkdir()
    tensors = {name: p.detach().clone() for name, p in Model().named_parameters()}
    tensors["frozen.weight"] = tensors["frozen.weight"].bfloat16()
    save_file({name: tensors.pop(name) for name in ("layer.weight", "layer.bias")}, directory / "model-1.safetensors")
    save_file(tensors, directory / "model-2.safetensors")
    return directory


def load_model(base: Path, dtype: torch.dtype = torch.float32) -> Model:
    model, weights = Model(dtype), BaseWeights(base)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(dtype)
    return model


def matrices(seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    a, b = AdapterSpec.matrices(ADAPTED)
    return {a: torch.randn(2, 5, generator=random), b: torch.randn(4, 2, generator=random)}


def update(directory: Path, base: Path, version: int, dtype: str = "float32", **replaced: Any) -> Any:
    """Return metadata and receipt of an update with an adapter and a norm; `replaced` replaces tensors."""
    sent = {
        **matrices(version),
        "norm.weight": torch.full((6,), float(version), dtype=getattr(torch, dtype)),
        **replaced,
    }
    meta, receipt = put_weights(directory, version, sent.items())
    names = [name for name, _ in Model().named_parameters() if name not in sent]
    adapter = AdapterSpec({ADAPTED: SCALE}, {name: prefix_checksum(BaseWeights(base)[name]) for name in names}, dtype)
    return replace(meta, adapter=adapter), receipt


def expected(base: Path, version: int) -> torch.Tensor:
    return merged(BaseWeights(base)[ADAPTED], *matrices(version).values(), SCALE)


def served_weights(tmp_path: Path, base: Path, model: torch.nn.Module) -> ServedWeights:
    return ServedWeights(model, str(tmp_path / "weights"), "server", 0, str(base))


def test_adapter_update_serves_merged_weight_and_keeps_the_others(tmp_path, base):
    model = load_model(base, torch.bfloat16)
    weights = served_weights(tmp_path, base, model)
    frozen, frozen_memory = model.frozen.weight.detach().clone(), model.frozen.weight.data_ptr()
    for version in (1, 2, 3):
        meta, sent = update(tmp_path / "weights", base, version, "bfloat16")

        receipt = weights.stage(meta)
        before = model.layer.weight.detach().clone()
        weights.commit(version)

        verify_receipt(sent, receipt, "shm")
        assert torch.equal(model.layer.weight, expected(base, version).bfloat16())
        assert not torch.equal(model.layer.weight, before)
        assert bool((model.norm.weight == version).all())
        assert torch.equal(model.frozen.weight, frozen)
        assert model.frozen.weight.data_ptr() == frozen_memory == model.tied.weight.data_ptr()  # not copied


def test_receipt_of_modified_merged_weight_omits_its_matrices(tmp_path, base):
    model = load_model(base)
    weights = served_weights(tmp_path, base, model)
    meta, sent = update(tmp_path / "weights", base, 1)
    weights.stage(meta)
    assert not weights.receipt().checksums.keys() & matrices(1).keys()  # staged but not served
    weights.commit(1)

    live = weights.receipt().checksums

    assert {name: live[name] for name in sent.checksums} == sent.checksums
    assert live[ADAPTED] == checksum(model.layer.weight.detach())
    with torch.no_grad():
        model.layer.weight[0, 0] += 1
    assert weights.receipt().checksums.keys() == live.keys() - matrices(1).keys()


def test_adapter_update_after_full_update_restores_base_weights(tmp_path, base):
    model = load_model(base)
    weights = served_weights(tmp_path, base, model)
    changed = [(name, p.detach() + 1) for name, p in model.named_parameters()]
    full, _ = put_weights(tmp_path / "weights", 1, changed)
    weights.stage(full)
    weights.commit(1)
    assert not weights.receipt().checksums.keys() & matrices(1).keys()
    for version in (2, 3):
        weights.stage(update(tmp_path / "weights", base, version)[0])
        weights.commit(version)

        assert torch.equal(model.layer.weight, expected(base, version))
        assert torch.equal(model.frozen.weight, BaseWeights(base)["frozen.weight"].float())
        assert torch.equal(model.layer.bias, BaseWeights(base)["layer.bias"])
    with weights.before():
        assert torch.equal(model.layer.weight, expected(base, 2))


def test_restarted_server_serves_adapter_of_committed_version(tmp_path, base):
    meta, sent = update(tmp_path / "weights", base, 6)
    write_committed(tmp_path / "weights", meta, sent)
    model = load_model(base)
    weights = served_weights(tmp_path, base, model)

    restore(weights, str(tmp_path / "weights"))

    assert weights.version == 6
    assert torch.equal(model.layer.weight, expected(base, 6))


def test_stage_invalid_adapter_update_is_rejected_without_change(tmp_path, base):
    model = load_model(base)
    weights, directory = served_weights(tmp_path, base, model), tmp_path / "weights"
    good, _ = update(directory, base, 1)
    adapter = good.adapter
    name = AdapterSpec.matrices(ADAPTED)[1]
    changed_base = {**adapter.base, "frozen.weight": "1"}
    missing_base = {name: prefix for name, prefix in adapter.base.items() if name != "layer.bias"}
    one_matrix = replace(good, parts=(replace(good.parts[0], params=good.params[:1]),))
    for invalid, match in (
        (replace(good, adapter=replace(adapter, base=changed_base)), r"parameter 'frozen\.weight'"),
        (replace(good, adapter=replace(adapter, base=missing_base)), r"1 parameters.*\['layer\.bias'\]"),
        (replace(good, adapter=replace(adapter, base={**missing_base, "x": "1"})), "base weight 'x'"),
        (replace(good, adapter=replace(adapter, dtype="bfloat16")), f"'{ADAPTED}': expected torch.float32"),
        (one_matrix, f"the adapter is .*'{name}'"),
        (torch.ones(4, 3), "shapes cannot be multiplied"),
        (torch.full((4, 2), 3e38), f"'{ADAPTED}'.*finite"),
        (torch.full((4, 2), torch.nan), "expected finite numbers"),
    ):
        meta = update(directory, base, 1, **{name: invalid})[0] if isinstance(invalid, torch.Tensor) else invalid
        with pytest.raises(WeightUpdateError, match=match):
            weights.stage(meta)
        assert weights.staged_version is None
    without_base = ServedWeights(model, str(directory), "server", 0)
    with pytest.raises(WeightUpdateError, match=r"publish\.adapter=never"):
        without_base.stage(good)
    with pytest.raises(WeightUpdateError, match="expected the base weight"):
        served_weights(tmp_path, tmp_path, model).stage(good)
    assert torch.equal(model.layer.weight, BaseWeights(base)[ADAPTED])


def test_weight_update_meta_with_and_without_adapter_survives_json(tmp_path, base):
    meta, _ = update(tmp_path / "weights", base, 1)

    assert WeightUpdateMeta.from_json(meta.to_json()) == meta
    request = {"meta": json.loads(json.dumps(meta.to_json()))}
    assert msgspec.convert(request, Stage).update() == meta
    full = replace(meta, adapter=None)
    assert "adapter" not in full.to_json()
    assert WeightUpdateMeta.from_json(full.to_json()) == full


def test_base_weights_are_memory_mapped(base):
    weights = BaseWeights(base)

    assert weights[ADAPTED].data_ptr() == weights[ADAPTED].data_ptr()
