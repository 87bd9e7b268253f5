"""The `broadcast` route between threads of one process, with several senders and receivers, and failed updates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch

from rl_contracts.data import ParamSpec, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights import WeightReceiver, checksum, open_sender, with_rank

SOON = 15.0
"""Seconds within which all members must raise after a failure; a step may take 60."""
SHAPES = {"large": (700, 600), "small": (33,), "scalar": (), "nothing": (0, 4), "wide": (3, 800_000)}
"""Shapes from no elements to more than one broadcast carries."""


def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def specs(dtype: str = "float32") -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, shape, dtype) for name, shape in SHAPES.items())


class Meeting:
    """Senders and receivers of one trainer, each in a separate thread."""

    def __init__(self, senders: int = 1, receivers: int = 2) -> None:
        first: Any = open_sender("broadcast", "tcp://127.0.0.1:0?timeout=60")
        self.senders = [first] + [open_sender("broadcast", first.location, rank) for rank in range(1, senders)]
        self.receivers = [WeightReceiver() for _ in range(receivers)]
        self.pool = ThreadPoolExecutor(senders + receivers)

    def begin(self, version: int, parts: list[tuple[ParamSpec, ...]]) -> WeightUpdateMeta:
        metas = [sender.begin(version, part_specs) for sender, part_specs in zip(self.senders, parts, strict=True)]
        return WeightUpdateMeta("broadcast", version, tuple(part for meta in metas for part in meta.parts))

    def receive(self, meta: WeightUpdateMeta, index: int) -> Future[tuple[dict[str, torch.Tensor], dict[str, int]]]:
        def work() -> tuple[dict[str, torch.Tensor], dict[str, int]]:
            targets = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in meta.params}
            ranked_meta = with_rank(meta, index + 1, len(self.receivers) + 1)
            return targets, self.receivers[index].receive(ranked_meta, targets)

        return self.pool.submit(work)

    def receive_all(self, meta: WeightUpdateMeta) -> list[Future[Any]]:
        return [self.receive(meta, index) for index in range(len(self.receivers))]

    def close(self) -> None:
        for end in (*self.receivers, *reversed(self.senders)):
            end.close()
            end.close()
        self.pool.shutdown()


@pytest.fixture
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    created = Meeting(**getattr(request, "param", {}))
    yield created
    created.close()


def failures(futures: list[Future[Any]]) -> list[str]:
    """Return the error message of each future, all of which must fail within `SOON`."""
    deadline = time.monotonic() + SOON
    messages = []
    for future in futures:
        with pytest.raises(WeightUpdateError) as caught:
            future.result(deadline - time.monotonic())
        messages.append(str(caught.value))
    return messages


def test_broadcast_all_receivers_get_cast_tensors_and_equal_checksums(meeting: Meeting) -> None:
    for version in (1, 2):
        meta = meeting.begin(version, [specs("bfloat16")])
        received = meeting.receive_all(meta)

        sums = meeting.senders[0].send(iter(tensors(version)))

        for future in received:
            targets, checksums = future.result(SOON)
            assert checksums == sums == {name: checksum(tensor) for name, tensor in targets.items()}
            for name, tensor in tensors(version):
                assert torch.equal(targets[name], tensor.bfloat16()), name


def test_broadcast_reuses_group_and_deletes_keys_of_past_updates(meeting: Meeting) -> None:
    sender, keys, groups = meeting.senders[0], [], []
    for version in range(12):
        meta = meeting.begin(version, [specs()])
        received = meeting.receive_all(meta)
        sender.send(iter(tensors(version)))
        for future in received:
            future.result(SOON)
        keys.append(sender._store.num_keys())
        groups.append(sender._group)

    assert len({id(group) for group in groups}) == 1
    assert keys[-1] == keys[2]


def test_broadcast_to_other_receivers_forms_group_and_deletes_old_keys(meeting: Meeting) -> None:
    sender, keys, all_receivers = meeting.senders[0], [], meeting.receivers
    for version in range(1, 9):
        meeting.receivers = all_receivers if version % 2 else all_receivers[:1]
        meta = meeting.begin(version, [specs()])
        received = meeting.receive_all(meta)
        sums = sender.send(iter(tensors(version)))

        assert all(future.result(SOON)[1] == sums for future in received)
        keys.append(sender._store.num_keys())
    meeting.receivers = all_receivers
    assert keys[-2:] == keys[2:4]


@pytest.mark.parametrize("meeting", [{"senders": 2, "receivers": 2}], indirect=True)
def test_broadcast_two_interdependent_senders_deliver_one_version(meeting: Meeting) -> None:
    """Both senders iterate in step, as in a gather, while each sends only its own parameters."""
    halves = [specs()[::2], specs()[1::2]]
    steps = Barrier(2)

    def stream(rank: int, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(tensors(version)):
            steps.wait(SOON)
            if index % 2 == rank:
                yield pair

    for version in (1, 2):
        meta = meeting.begin(version, halves)
        received = meeting.receive_all(meta)
        sending = [
            meeting.pool.submit(sender.send, stream(rank, version)) for rank, sender in enumerate(meeting.senders)
        ]
        sums = {name: value for future in sending for name, value in future.result(SOON).items()}

        for future in received:
            targets, checksums = future.result(SOON)
            assert checksums == sums
            assert all(torch.equal(targets[name], tensor) for name, tensor in tensors(version))


@pytest.mark.parametrize("meeting", [{"senders": 2, "receivers": 2}], indirect=True)
def test_broadcast_refused_by_one_receiver_fails_for_all_with_reason(meeting: Meeting) -> None:
    meta = meeting.begin(1, [specs()[::2], specs()[1::2]])
    waiting = [
        meeting.pool.submit(sender.send, iter(tensors(1)[rank::2])) for rank, sender in enumerate(meeting.senders)
    ]
    waiting.append(meeting.receive(meta, 0))

    meeting.receivers[1].reject(with_rank(meta, 2, 3), "the model has no parameter 'x'")

    assert all("receiver 2 rejected the update: the model has no parameter 'x'" in text for text in failures(waiting))


def test_broadcast_canceled_before_any_join_fails_with_first_reason(meeting: Meeting) -> None:
    meta = meeting.begin(1, [specs()])
    sending = meeting.pool.submit(meeting.senders[0].send, iter(tensors(1)))

    meeting.senders[0].cancel("no server could be reached")
    meeting.senders[0].cancel("another reason")

    assert "no server could be reached" in failures([sending])[0]
    assert "no server could be reached" in failures([meeting.receive(meta, 0)])[0]


def test_broadcast_sender_error_fails_receivers_at_once(meeting: Meeting) -> None:
    """The group must close at once, even while the caller of `send` still handles the error."""

    def failing_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(1)[:2]
        raise OSError("the gather failed")

    meta = meeting.begin(1, [specs()])
    received = meeting.receive_all(meta)
    error: BaseException | None = None
    try:
        meeting.senders[0].send(failing_tensors())
    except OSError as raised:
        error = raised  # keep a reference, like a caller that first notifies other processes

    assert all("failed at parameter" in text for text in failures(received))
    assert str(error) == "the gather failed"
    meta = meeting.begin(2, [specs()])
    received = meeting.receive_all(meta)
    sums = meeting.senders[0].send(iter(tensors(2)))
    assert all(future.result(SOON)[1] == sums for future in received)


def test_broadcast_invalid_location_raises() -> None:
    for location in ("http://127.0.0.1:1", "tcp://", "tcp://127.0.0.1:x", "tcp://127.0.0.1:1?rank=a", "/dev/shm"):
        with pytest.raises(WeightUpdateError, match="expected a location such as tcp://host:port"):
            open_sender("broadcast", location)


@pytest.mark.slow
def test_broadcast_without_rank_or_trainer_raises(meeting: Meeting) -> None:
    meta = meeting.begin(1, [()])
    with pytest.raises(WeightUpdateError, match="the rank of this server"):
        meeting.receivers[0].receive(meta, {})
    unreachable = replace(meta, parts=(replace(meta.parts[0], location="tcp://127.0.0.1:9/1-1/0?timeout=1"),))
    with pytest.raises(WeightUpdateError, match=r"no trainer listens at 127\.0\.0\.1:9"):
        meeting.receivers[0].receive(with_rank(unreachable, 1, 2), {})
