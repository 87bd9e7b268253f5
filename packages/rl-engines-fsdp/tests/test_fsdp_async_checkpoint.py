"""States that are written while training goes on."""

import json
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine, make_model

from rl_contracts.data import SaveLoadMeta
from rl_contracts.errors import EngineError, ModelError
from rl_contracts.testing.processes import run_ranks
from rl_engines_fsdp.checkpoint import state


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def held_back(monkeypatch):
    """Writing waits until this event is set; copies are made before."""
    release, honest = threading.Event(), state.new_directory

    @contextmanager
    def held(path, parallel):
        with honest(path, parallel) as scratch:
            yield scratch
            assert release.wait(30)

    monkeypatch.setattr(state, "new_directory", held)
    yield release
    release.set()


def step(engine, seed):
    return engine.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn)


def test_save_async_keeps_the_state_of_the_moment_while_training_goes_on(model_path, tmp_path, held_back):
    engine, path = make_engine(model_path), tmp_path / "state"
    for seed in range(2):
        step(engine, seed)
    engine.version = 2

    engine.save_async(SaveLoadMeta(str(path), kind="state"))
    expected = [step(engine, seed) for seed in (2, 3)]
    engine.version = 4
    assert not path.exists()
    held_back.set()
    engine.wait_for_save()

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["state"]
    other = make_engine(model_path)
    other.load(SaveLoadMeta(str(path), kind="state"))
    assert other.version == 2
    assert [step(other, seed) for seed in (2, 3)] == expected
    engine.destroy()


def test_save_async_twice_waits_for_the_first_and_destroy_for_the_last(model_path, tmp_path):
    engine = make_engine(model_path)

    for number in range(2):
        step(engine, number)
        engine.save_async(SaveLoadMeta(str(tmp_path / f"state-{number}"), kind="state"))
    engine.destroy()

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["state-0", "state-1"]


def test_save_async_that_fails_says_so_when_waited_for_and_leaves_nothing(model_path, tmp_path, monkeypatch):
    engine = make_engine(model_path)

    def failing(state, **_):
        from concurrent.futures import Future

        future: Future = Future()
        future.set_exception(OSError("no space left on device"))
        return future

    monkeypatch.setattr(state, "async_save", failing)
    engine.save_async(SaveLoadMeta(str(tmp_path / "state"), kind="state"))

    with pytest.raises(EngineError, match="no space left"):
        engine.wait_for_save()
    assert list(tmp_path.iterdir()) == []
    engine.destroy()


def test_save_async_of_another_kind_or_into_a_directory_with_files_is_refused(model_path, tmp_path):
    engine = make_engine(model_path)
    (tmp_path / "mine.txt").write_text("precious")

    with pytest.raises(ModelError, match="kind state"):
        engine.save_async(SaveLoadMeta(str(tmp_path / "new")))
    with pytest.raises(ModelError, match="new directory"):
        engine.save_async(SaveLoadMeta(str(tmp_path), kind="state"))
    engine.destroy()


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
