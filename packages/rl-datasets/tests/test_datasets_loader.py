"""Data loaders: every example once per epoch, and exact resumption from any position."""

import json
import time
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_contracts.errors import ConfigError
from rl_datasets import BatchLoader, EpochOrder, PromptLoader


def make_rows(n: int) -> list[dict[str, Any]]:
    return [
        {"prompt_id": i, "messages": [{"role": "user", "content": f"question {i}"}], "answer": f"#### {i}"}
        for i in range(n)
    ]


def keys(rows: Any) -> list[tuple[int, int]]:
    return [(row["epoch"], row["prompt_id"]) for row in rows]


def resumed(loader: Any, fresh: Any) -> Any:
    """Return `fresh` after loading the state of `loader`, converted to JSON and back."""
    fresh.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return fresh


def test_prompt_loader_yields_endless_epochs_in_their_order():
    rows = make_rows(5)
    loader = PromptLoader(rows, seed=3)

    returned = list(islice(loader, 12))

    expected = [(epoch, i) for epoch in range(3) for i in EpochOrder(5, seed=3).indices(epoch)]
    assert keys(returned) == expected[:12]
    assert returned[0] == {**rows[returned[0]["prompt_id"]], "epoch": 0}
    assert "epoch" not in rows[0]
    assert (loader.epoch, len(loader)) == (2, 5)


def test_prompt_loader_without_prompt_ids_adds_indices():
    assert [row["prompt_id"] for row in PromptLoader([{"q": "a"}, {"q": "b"}], shuffle=False, epochs=1)] == [0, 1]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
def test_prompt_loaders_of_all_shards_yield_each_example_once_per_epoch(n, num_shards, epochs, seed):
    num_shards = min(n, num_shards)
    rows = make_rows(n)

    returned = [
        key
        for shard in range(num_shards)
        for key in keys(PromptLoader(rows, seed=seed, epochs=epochs, num_shards=num_shards, shard=shard))
    ]

    assert sorted(returned) == [(epoch, i) for epoch in range(epochs) for i in range(n)]


@given(st.data())
def test_prompt_loader_resumed_anywhere_continues_exactly(data):
    n = data.draw(st.integers(1, 20), "rows")
    num_shards = data.draw(st.integers(1, min(n, 3)), "shards")
    arguments = {"seed": 7, "epochs": 3, "num_shards": num_shards, "shard": data.draw(st.integers(0, num_shards - 1))}
    expected = keys(PromptLoader(make_rows(n), **arguments))
    splits = sorted(data.draw(st.lists(st.integers(0, len(expected)), max_size=3), "splits"))

    loader, returned = PromptLoader(make_rows(n), **arguments), []
    for split in splits:
        returned += keys(islice(loader, split - len(returned)))
        loader = resumed(loader, PromptLoader(make_rows(n), **arguments))
    returned += keys(loader)

    assert returned == expected


@given(st.data())
def test_prompt_loaders_resumed_with_other_shards_yield_each_example_once(data):
    n, epochs = data.draw(st.integers(4, 20), "rows"), data.draw(st.integers(1, 4), "epochs")
    counts = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5), "numbers of shards")
    returned: list[tuple[int, int]] = []
    states: list[Any] = []
    for restart, count in enumerate(counts):
        shards = [PromptLoader(make_rows(n), seed=7, epochs=epochs, num_shards=count, shard=i) for i in range(count)]
        if restart:
            data.draw(st.randoms(use_true_random=False)).shuffle(states)
            for shard in shards:
                shard.load_states(states)
        for shard in shards:  # shards advance independently, also by whole epochs
            pairs = keys(islice(shard, data.draw(st.integers(0, n)) if restart + 1 < len(counts) else None))
            assert [epoch for epoch, _ in pairs] == sorted(epoch for epoch, _ in pairs)
            returned += pairs
        states = json.loads(json.dumps([shard.state_dict() for shard in shards]))

    assert sorted(returned) == [(epoch, i) for epoch in range(epochs) for i in range(n)]


def test_prompt_loaders_with_other_shards_split_the_rest_then_whole_epochs():
    order = EpochOrder(10, seed=3)
    former_loaders = [PromptLoader(make_rows(10), seed=3, num_shards=2, shard=shard) for shard in range(2)]
    for shard, count in zip(former_loaders, (3, 5), strict=True):  # positions 0, 2, 4; and 1, 3, 5, 7, 9
        list(islice(shard, count))

    shards = [PromptLoader(make_rows(10), seed=3, num_shards=3, shard=shard) for shard in range(3)]
    for shard in shards:
        shard.load_states([loader.state_dict() for loader in former_loaders])

    first = order.indices(0)
    assert [shard.epoch for shard in shards] == [0, 0, 1]
    assert keys(islice(shards[0], 2)) == [(0, first[6]), (1, order.indices(1)[0])]
    assert keys(islice(shards[1], 2)) == [(0, first[8]), (1, order.indices(1)[1])]
    assert keys(islice(shards[2], 3)) == [(1, order.indices(1)[i]) for i in (2, 5, 8)]


def test_prompt_loader_load_states_with_same_shards_is_load_state_dict():
    former_loaders = [PromptLoader(make_rows(9), num_shards=2, shard=shard) for shard in range(2)]
    list(islice(former_loaders[1], 6))
    states = [shard.state_dict() for shard in former_loaders]

    from_states, from_state = (PromptLoader(make_rows(9), num_shards=2, shard=1) for _ in range(2))
    from_states.load_states(states)
    from_state.load_state_dict(states[1])

    assert from_states.state_dict() == from_state.state_dict()


@pytest.mark.slow
def test_prompt_loader_state_after_redistribution_stays_small():
    former_loaders = [PromptLoader(make_rows(100_000), num_shards=2, shard=shard) for shard in range(2)]
    for shard, count in zip(former_loaders, (40_000, 10), strict=True):
        list(islice(shard, count))
    loader = PromptLoader(make_rows(100_000), num_shards=3, shard=1)

    loader.load_states([shard.state_dict() for shard in former_loaders])

    assert len(json.dumps(loader.state_dict())) < 1000
    # a third of the remaining 10,000 + 49,990 examples
    assert sum(1 for row in islice(loader, 30_000) if row["epoch"] == 0) == 19_997


@pytest.mark.parametrize(
    ("shards", "seed", "message"),
    [
        ([0, 0], 0, "expected a state with shard=1, found shard=0"),
        ([0, 1, 1], 0, "expected a state with num_shards=3, found num_shards=2"),
        ([0, 1], 1, "expected a state with seed=0, found seed=1"),
    ],
)
def test_prompt_loader_rejects_states_of_other_shards_or_order(shards, seed, message):
    states = [PromptLoader(make_rows(6), seed=seed, num_shards=2, shard=shard).state_dict() for shard in shards]

    with pytest.raises(ConfigError, match=message):
        PromptLoader(make_rows(6), num_shards=3).load_states(states)


@given(st.integers(1, 25), st.integers(1, 6), st.booleans(), st.data())
def test_batch_loader_resumed_anywhere_continues_exactly(n, batch_size, drop_last, data):
    batch_size = min(n, batch_size)
    arguments = {"seed": 5, "epochs": 2, "drop_last": drop_last}
    expected = [keys(batch) for batch in BatchLoader(make_rows(n), batch_size, **arguments)]
    split = data.draw(st.integers(0, len(expected)))

    loader = BatchLoader(make_rows(n), batch_size, **arguments)
    returned = [keys(batch) for batch in islice(loader, split)]
    returned += [keys(batch) for batch in resumed(loader, BatchLoader(make_rows(n), batch_size, **arguments))]

    assert returned == expected


def test_loader_at_its_end_stays_and_resumes_at_its_end():
    loader = PromptLoader(make_rows(3), epochs=1)
    assert len(list(loader)) == 3

    assert next(loader, None) is None
    assert list(resumed(loader, PromptLoader(make_rows(3), epochs=1))) == []
    assert keys(resumed(loader, PromptLoader(make_rows(3), epochs=2))) == keys(PromptLoader(make_rows(3), epochs=2))[3:]


def test_loader_can_load_a_state_after_use():
    loader = PromptLoader(make_rows(4), epochs=1)
    state = loader.state_dict()
    first = keys(loader)

    loader.load_state_dict(state)

    assert keys(loader) == first


@pytest.mark.parametrize(
    ("arguments", "n", "message"),
    [
        ({"num_shards": 2}, 6, "num_shards=2, found num_shards=3"),
        ({"num_shards": 3, "shard": 1}, 6, "shard=1, found shard=0"),
        ({"num_shards": 3, "seed": 1}, 6, "seed=1, found seed=0"),
        ({"num_shards": 3, "shuffle": False}, 6, "shuffle=False"),
        ({"num_shards": 3}, 7, "rows=7, found rows=6"),
    ],
)
def test_prompt_loader_rejects_a_state_of_another_order(arguments, n, message):
    state = PromptLoader(make_rows(6), num_shards=3).state_dict()

    with pytest.raises(ConfigError, match=message):
        PromptLoader(make_rows(n), **arguments).load_state_dict(state)


def test_loader_rejects_a_state_of_other_data():
    rows = make_rows(6)
    state = PromptLoader(rows).state_dict()

    with pytest.raises(ConfigError, match="fingerprint"):
        PromptLoader([{**row, "answer": "#### 0"} for row in rows]).load_state_dict(state)


@pytest.mark.parametrize("drop_last", [True, False])
def test_batch_loader_cuts_each_epoch_into_batches(drop_last):
    batches = [keys(batch) for batch in BatchLoader(make_rows(10), 4, seed=1, epochs=2, drop_last=drop_last)]

    order = EpochOrder(10, seed=1)
    starts = [0, 4] if drop_last else [0, 4, 8]
    assert batches == [[(e, i) for i in order.indices(e)[s : s + 4]] for e in range(2) for s in starts]


def test_batch_loader_resumes_with_another_number_of_shards():
    rows = make_rows(12)
    loader = BatchLoader(rows, 4, epochs=1)
    next(loader)

    halves = [resumed(loader, BatchLoader(rows, 4, epochs=1, num_shards=2, shard=shard)) for shard in range(2)]

    for batch, a, b in zip(loader, *halves, strict=True):
        assert sorted(keys(batch)) == sorted(keys(a + b))


@pytest.mark.parametrize(
    ("n", "batch_size", "arguments", "message"),
    [
        (10, 4, {"num_shards": 3}, "batch_size: expected a positive multiple of the 3 shards, found 4"),
        (10, 0, {}, "batch_size"),
        (3, 4, {}, "at least one batch of 4 examples, found 3"),
        (9, 4, {"num_shards": 2, "drop_last": False}, "drop_last=False: .* 2 shards, found 1"),
        (10, 4, {"num_shards": 2, "shard": 2}, "shard"),
        (10, 4, {"num_shards": 0}, "num_shards"),
        (10, 4, {"epochs": -1}, "epochs"),
    ],
)
def test_batch_loader_rejects_invalid_arguments(n, batch_size, arguments, message):
    with pytest.raises(ConfigError, match=message):
        BatchLoader(make_rows(n), batch_size, **arguments)


def test_prompt_loader_resume_does_not_replay_epochs():
    loader = PromptLoader(make_rows(1000))
    state = loader.state_dict()
    state["epoch"] = 10**9  # would take hours to replay

    started = time.process_time()
    loader.load_state_dict(state)

    assert next(loader)["epoch"] == 10**9
    assert time.process_time() - started < 5


def test_loader_state_of_torchdata_resumes_at_its_position():
    loader = PromptLoader(make_rows(10), seed=1)
    first = list(islice(loader, 14))
    saved = {"epoch": 1, "position": 4}
    state = {"identity": loader.state_dict()["identity"], "loader": {"_index_sampler_state": saved}}

    resumed_loader = PromptLoader(make_rows(10), seed=1)
    resumed_loader.load_state_dict(state)

    assert len(first) == 14
    assert next(resumed_loader) == next(loader)
