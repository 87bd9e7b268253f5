"""Snapshots: state is copied, and written while training continues."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine, make_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import ModelError
from rl_contracts.testing.processes import run_ranks


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def step(engine, seed):
    return engine.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn)


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_snapshot_in_bfloat16_has_the_state_before_later_training_steps(model_path, tmp_path):
    engine, path = make_engine(model_path, dtype="bfloat16"), tmp_path / "state"
    for seed in range(2):
        step(engine, seed)
    engine.version = 2

    write = engine.snapshot(SaveLoadMeta(str(path), kind="state"))
    expected = [step(engine, seed) for seed in (2, 3)]
    engine.version = 4
    assert not path.exists()
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write).result()

    assert sorted(written) == files_of(path)
    other = make_engine(model_path, dtype="bfloat16")
    other.load(SaveLoadMeta(str(path), kind="state"))
    assert other.version == 2
    assert [step(other, seed) for seed in (2, 3)] == expected


def test_snapshot_reuses_memory_of_the_previous_one(model_path, tmp_path):
    engine = make_engine(model_path)
    addresses = []
    for index in range(3):
        step(engine, index)
        write = engine.snapshot(SaveLoadMeta(str(tmp_path / str(index)), kind="state"))
        addresses.append({name: copy.data_ptr() for name, copy in engine._copies._memory.items()})
        write()

    assert addresses[0] == addresses[1] == addresses[2]
    first, last = (load_file(tmp_path / str(index) / "rank-0.safetensors") for index in (0, 2))
    assert first.keys() == last.keys()
    assert not all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("damage", ["truncated", "another model", "missing rank"])
def test_load_of_damaged_state_names_the_damage(damage, model_path, tmp_path):
    engine, path = make_engine(model_path), tmp_path / "state"
    engine.save(SaveLoadMeta(str(path), kind="state"))
    file = path / "rank-0.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "another model":
        save_file({"model.odd": torch.zeros(2)}, file, {"shards": '{"model.odd": {"offset": [0], "shape": [2]}}'})
    else:
        tensors, locations = load_file(file), json.loads(safe_open(file, "pt").metadata()["shards"])
        name = next(name for name, location in locations.items() if len(location["shape"]) == 2)
        tensors[name] = tensors[name][1:].contiguous()
        locations[name]["offset"][0] = 1
        save_file(tensors, file, {"shards": json.dumps(locations)})

    with pytest.raises(ModelError, match=r"cannot read|entries differ|saved elements, found"):
        make_engine(model_path).load(SaveLoadMeta(str(path), kind="state"))


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_state_resumes_from_one_rank_to_two_and_back(model_path, tmp_path):
    """Save on 1 rank, resume on 2, save there while training continues, and resume on 1."""
    first = make_engine(model_path)
    for seed in range(2):
        step(first, seed)
    first.version = 2
    first.save(SaveLoadMeta(str(tmp_path / "one"), kind="state"))
    random = torch.get_rng_state()
    expected = [step(first, seed) for seed in (2, 3, 4, 5)]

    run_ranks(Path(__file__).with_name("fsdp_state_ranks.py"), [model_path, str(tmp_path)], 2)

    results = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    last = make_engine(model_path)
    last.load(SaveLoadMeta(str(tmp_path / "two"), kind="state"))
    assert last.version == 4
    actual = [*results[0], step(last, 4), step(last, 5)]
    assert results[0] == results[1]
    random_states = [torch.load(tmp_path / f"random-{rank}") for rank in range(2)]
    assert torch.equal(random_states[0], random)
    assert not torch.equal(random_states[1], random), "an added rank must have a different random stream"
    for actual_step, expected_step in zip(actual, [*expected[:4], *expected[2:]], strict=True):
        assert actual_step == pytest.approx(expected_step, rel=2e-5)
