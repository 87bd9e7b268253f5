"""States that are copied, and written while training goes on."""

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshot_keeps_the_state_of_the_moment_while_training_goes_on(dtype, model_path, tmp_path):
    engine, path = make_engine(model_path, dtype=dtype), tmp_path / "state"
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
    other = make_engine(model_path, dtype=dtype)
    other.load(SaveLoadMeta(str(path), kind="state"))
    assert other.version == 2
    assert [step(other, seed) for seed in (2, 3)] == expected


def test_snapshot_uses_the_memory_of_the_one_before(model_path, tmp_path):
    engine = make_engine(model_path)
    where = []
    for number in range(3):
        step(engine, number)
        write = engine.snapshot(SaveLoadMeta(str(tmp_path / str(number)), kind="state"))
        where.append({name: kept.data_ptr() for name, kept in engine._copies._memory.items()})
        write()

    assert where[0] == where[1] == where[2]
    first, last = (load_file(tmp_path / str(number) / "rank-0.safetensors") for number in (0, 2))
    assert first.keys() == last.keys()
    assert not all(torch.equal(first[name], last[name]) for name in first)


def test_snapshot_of_an_export_holds_the_weights_of_the_moment(model_path, tmp_path):
    engine = make_engine(model_path)
    step(engine, 0)
    engine.save(SaveLoadMeta(str(tmp_path / "at-once"), "hf", model_path))

    write = engine.snapshot(SaveLoadMeta(str(tmp_path / "later"), "hf", model_path))
    step(engine, 1)
    written = write()

    assert sorted(written) == files_of(tmp_path / "later")
    for file in files_of(tmp_path / "at-once"):
        assert (tmp_path / "later" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("damage", ["shorter", "of another model", "a rank missing"])
def test_load_damaged_state_says_what_is_wrong(damage, model_path, tmp_path):
    engine, path = make_engine(model_path), tmp_path / "state"
    engine.save(SaveLoadMeta(str(path), kind="state"))
    file = path / "rank-0.safetensors"
    if damage == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "of another model":
        save_file({"model.odd": torch.zeros(2)}, file, {"shards": '{"model.odd": {"offset": [0], "shape": [2]}}'})
    else:
        tensors, places = load_file(file), json.loads(safe_open(file, "pt").metadata()["shards"])
        name = next(name for name, place in places.items() if len(place["shape"]) == 2)
        tensors[name] = tensors[name][1:].contiguous()
        places[name]["offset"][0] = 1
        save_file(tensors, file, {"shards": json.dumps(places)})

    with pytest.raises(ModelError, match=r"cannot be read|entries are missing|of its numbers, found"):
        make_engine(model_path).load(SaveLoadMeta(str(path), kind="state"))


@pytest.mark.slow
def test_states_on_two_ranks_continue_on_one_and_back(model_path, tmp_path):
    """Saved on 1 rank, continued on 2, saved there while training goes on, and continued on 1."""
    first = make_engine(model_path)
    for seed in range(2):
        step(first, seed)
    first.version = 2
    first.save(SaveLoadMeta(str(tmp_path / "one"), kind="state"))
    random = torch.get_rng_state()
    expected = [step(first, seed) for seed in (2, 3, 4, 5)]

    run_ranks(Path(__file__).with_name("fsdp_state_ranks.py"), [model_path, str(tmp_path)], 2)

    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    last = make_engine(model_path)
    last.load(SaveLoadMeta(str(tmp_path / "two"), kind="state"))
    assert last.version == 4
    found = [*seen[0], step(last, 4), step(last, 5)]
    assert seen[0] == seen[1]
    of_ranks = [torch.load(tmp_path / f"random-{rank}") for rank in range(2)]
    assert torch.equal(of_ranks[0], random)
    assert not torch.equal(of_ranks[1], random), "a rank that was added draws from a stream of its own"
    for one, other in zip(found, [*expected[:4], *expected[2:]], strict=True):
        assert one == pytest.approx(other, rel=2e-5)
