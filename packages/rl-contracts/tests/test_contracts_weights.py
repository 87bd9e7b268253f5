"""Checksums, receipts and the stored routes, with every way in which weights can arrive wrong."""

from __future__ import annotations

import errno
import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_contracts.data import ParamSpec, WeightPart, WeightReceipt, WeightUpdateMeta
from rl_contracts.errors import WeightUpdateError
from rl_contracts.weights import (
    WeightReceiver,
    WeightSender,
    checksum,
    checksum_kernel,
    copy_with_checksum,
    open_sender,
    open_weights,
    read_committed,
    verify_receipt,
)
from rl_contracts.weights.committed_record import MEMORY

checksum_module = importlib.import_module("rl_contracts.weights.checksums")

ROUTES = ["shm", "disk"]
CONSTANT = 0x1E3779B97F4A7C15


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def formula(data: bytes, first: int = 0) -> int:
    """Return the checksum by its definition, word by word."""
    words = [int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(data), 8)]
    return sum(((w ^ (w >> 31)) + CONSTANT) * (2 * i + 1) for i, w in enumerate(words, start=first)) % 2**64


# ---- checksum


@settings(deadline=None)  # the first call compiles
@given(st.binary(max_size=200), st.integers(0, 1000))
def test_checksum_equals_its_definition(data: bytes, first: int) -> None:
    assert checksum(as_tensor(data), offset_bytes=8 * first) == formula(data, first)


@pytest.mark.parametrize("size", [8 * 4096 - 8, 8 * 4096, 8 * 4096 * 2 + 13])
def test_checksum_equals_its_definition_around_the_block_size(size: int) -> None:
    data = os.urandom(size)

    assert checksum(as_tensor(data)) == formula(data)


@given(st.binary(min_size=1, max_size=100), st.integers(0), st.integers(1, 255))
def test_checksum_changes_with_any_one_byte(data: bytes, index: int, change: int) -> None:
    other = bytearray(data)
    other[index % len(data)] ^= change

    assert checksum(as_tensor(bytes(other))) != checksum(as_tensor(data))


@given(st.lists(st.floats(width=32, allow_nan=False, min_value=-4, max_value=4), min_size=4, max_size=64), st.data())
def test_checksum_changes_when_two_elements_are_swapped(values: list[float], data: st.DataObject) -> None:
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    tensor = torch.tensor(values, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[i, j]] = tensor[[j, i]]
    assume(tensor.numpy().tobytes() != swapped.numpy().tobytes())

    assert checksum(swapped) != checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_checksum_changes_when_value_and_negative_are_swapped(dtype: torch.dtype) -> None:
    for value in (0.0, 1.0, 0.37):
        for i in range(16):
            for distance in (1, 2, 3, 4, 8, 64, 4096):
                tensor = torch.zeros(i + distance + 1, dtype=dtype)
                tensor[i], tensor[i + distance] = value, -value
                swapped = tensor.clone()
                swapped[[i, i + distance]] = tensor[[i + distance, i]]

                assert checksum(swapped) != checksum(tensor), (value, i, distance)


def test_checksum_changes_when_row_and_negative_are_swapped() -> None:
    rows = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        for i, j in combinations(range(6), 2):
            weight = rows.to(dtype)
            weight[j] = -weight[i]
            swapped = weight.clone()
            swapped[[i, j]] = weight[[j, i]]

            assert checksum(swapped) != checksum(weight)


def test_checksum_differs_between_permutations_and_zero_counts() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rolled = [weight.roll(1, 0), weight.roll(1, 1), weight.t().contiguous(), weight.flip(0)]

    assert len({checksum(weight), *map(checksum, rolled)}) == 5
    assert len({checksum(torch.zeros(n)) for n in (0, 2, 4, 6)}) == 4


@given(st.binary(max_size=400), st.lists(st.integers(0, 50), max_size=4))
def test_checksum_of_shards_adds_up_to_full_checksum(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(8 * c, len(data) // 8 * 8) for c in cuts), len(data)]

    parts = [checksum(as_tensor(data[a:b]), offset_bytes=a) for a, b in pairwise(edges)]

    assert sum(parts) % 2**64 == checksum(as_tensor(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.int64])
def test_checksum_all_dtypes_and_alignments_equal_definition(dtype: torch.dtype) -> None:
    whole = torch.arange(-40, 41).to(dtype)

    for start in range(9):
        part = whole[start:]
        assert checksum(part) == checksum(part.clone()) == formula(part.view(torch.uint8).numpy().tobytes())
    assert checksum(whole[3]) == formula(whole[3:4].view(torch.uint8).numpy().tobytes())


def test_checksum_odd_address_equals_definition() -> None:
    buffer = torch.frombuffer(bytearray(range(200)), dtype=torch.uint8)
    for first in range(8):
        shifted = torch.frombuffer(buffer.numpy()[first:], dtype=torch.uint8)
        for second in range(9):
            part = shifted[second : second + 32]
            assert checksum(part) == formula(part.numpy().tobytes())


def test_checksum_strided_tensor_or_odd_offset_raises() -> None:
    with pytest.raises(WeightUpdateError, match="expected a contiguous tensor"):
        checksum(torch.zeros(4, 4).t()[1:])
    with pytest.raises(WeightUpdateError, match="multiple of 8 bytes, found 4"):
        checksum(torch.zeros(4), offset_bytes=4)


@pytest.mark.parametrize(
    ("target", "size"),
    [
        (torch.float32, 0),
        (torch.float32, 2**17),
        (torch.float32, 5 * 2**19 + 1),
        (torch.bfloat16, 5),
        (torch.bfloat16, 2**17 + 3),
        (torch.bfloat16, 5 * 2**19 + 1),
        (torch.uint8, 2**17 + 3),
    ],
)
def test_copy_with_checksum_equals_copy_then_checksum(target: torch.dtype, size: int) -> None:
    whole = torch.randint(0, 100, (size + 14,), generator=torch.Generator().manual_seed(0)).float()
    shifted = [whole[first : first + size] for first in range(14)]  # an address divisible by 7 or 8, both, or neither
    for source in (*shifted, torch.stack([shifted[1]] * 2, -1)[:, 0]):
        copy = torch.empty(size, dtype=target)

        value = copy_with_checksum(copy, source)

        assert torch.equal(copy, source.to(target))
        assert value == checksum(copy)


# ---- receipts

SENT = WeightReceipt("trainer", 3, {"a": 1, "b": 2})


@pytest.mark.guarantee("The error of a wrong receipt names the first wrong parameter.", area="weights")
@pytest.mark.parametrize(
    ("receipt", "match"),
    [
        (
            WeightReceipt("server-0", 2, {"a": 1, "b": 2}),
            "route shm, version 3, server-0: the receipt is for version 2",
        ),
        (WeightReceipt("server-0", 3, {"a": 1}), r"'b' was sent but not received \(2 parameters sent, 1 received\)"),
        (WeightReceipt("server-0", 3, {"a": 1, "b": 7}), "'b' differs: the trainer sent checksum 2, the server has 7"),
        (WeightReceipt("server-0", 3, {"a": 1, "b": 2, "c": 3}), r"also loaded \['c'\]"),
        (WeightReceipt("server-0", 3, {}), "'a' was sent but not received"),
    ],
)
def test_verify_receipt_mismatch_raises_naming_first_difference(receipt: WeightReceipt, match: str) -> None:
    with pytest.raises(WeightUpdateError, match=match):
        verify_receipt(SENT, receipt, "shm")


def test_verify_receipt_same_weights_passes() -> None:
    verify_receipt(SENT, WeightReceipt("server-1", 3, {"b": 2, "a": 1}), "disk")


# ---- routes


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "odd": torch.randn(3, generator=generator),
        "nothing": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "vector": torch.randn(33, generator=generator),
    }


def specs_of(dtype: str = "float32") -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, tuple(t.shape), dtype) for name, t in weights().items())


Tensors = Iterable[tuple[str, torch.Tensor]]


def write(
    sender: WeightSender, version: int, tensors: Tensors, specs: tuple[ParamSpec, ...] | None = None
) -> tuple[WeightUpdateMeta, WeightReceipt]:
    """Send one version."""
    meta = sender.begin(version, specs_of() if specs is None else specs)
    return meta, WeightReceipt("trainer", version, sender.send(tensors))


def shifted_weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """Return different weights for each version."""
    return [(name, tensor + version) for name, tensor in weights().items()]


def read_weights(meta: WeightUpdateMeta) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in open_weights(meta)}


def file_of(meta: WeightUpdateMeta) -> Path:
    (part,) = meta.parts
    return Path(part.location) if meta.route == "shm" else Path(part.location) / "model.safetensors"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_route_delivers_sent_tensors_and_matching_receipt(tmp_path: Path, route: str, dtype: str) -> None:
    sent = {name: torch.stack([t, t], -1)[..., 0] for name, t in weights().items()}  # not contiguous

    meta, receipt = write(open_sender(route, str(tmp_path / "new" / "folder")), 1, sent.items(), specs_of(dtype))

    received = read_weights(WeightUpdateMeta.from_json(meta.to_json()))
    assert received.keys() == sent.keys()
    for name, tensor in weights().items():
        assert torch.equal(received[name], tensor.to(getattr(torch, dtype))), name
    verify_receipt(receipt, WeightReceipt("server", 1, {n: checksum(t) for n, t in received.items()}), route)


@pytest.mark.parametrize("route", ROUTES)
def test_route_casts_each_parameter_to_its_spec_dtype(tmp_path: Path, route: str) -> None:
    dtypes = {"odd": "bfloat16", "scalar": "float16"}
    specs = tuple(replace(spec, dtype=dtypes.get(spec.name, "float32")) for spec in specs_of())

    meta, receipt = write(open_sender(route, str(tmp_path)), 1, weights().items(), specs)

    received = read_weights(meta)
    for spec in specs:
        assert torch.equal(received[spec.name], weights()[spec.name].to(getattr(torch, spec.dtype))), spec.name
    assert receipt.checksums == {name: checksum(tensor) for name, tensor in received.items()}


@pytest.mark.parametrize("route", ROUTES)
def test_route_keeps_previous_version_readable(tmp_path: Path, route: str) -> None:
    sender = open_sender(route, str(tmp_path))
    metas = [write(sender, version, shifted_weights(version))[0] for version in (1, 2, 3)]

    assert torch.equal(read_weights(metas[1])["odd"], weights()["odd"] + 2)
    assert torch.equal(read_weights(metas[2])["odd"], weights()["odd"] + 3)
    assert len(list(tmp_path.iterdir())) == 2
    assert metas[0].parts == metas[2].parts != metas[1].parts


@pytest.mark.parametrize("route", ROUTES)
def test_sender_close_removes_shm_files_and_keeps_disk(tmp_path: Path, route: str) -> None:
    sender = open_sender(route, str(tmp_path))
    for version in (1, 2):
        write(sender, version, shifted_weights(version))

    sender.close()
    sender.close()

    assert len(list(tmp_path.iterdir())) == (0 if route == "shm" else 2)


@pytest.mark.parametrize("route", ROUTES)
def test_sender_wrong_names_order_or_shapes_raises(tmp_path: Path, route: str) -> None:
    named = list(weights().items())
    cases = [
        (named[:-1], "parameter 'vector' is in the specs but was not given"),
        ([], "parameter 'matrix' is in the specs"),
        ([*named, ("more", torch.zeros(1))], r"expected no more parameters, found more \[1\]"),
        ([named[1], named[0], *named[2:]], r"expected matrix \[5, 7\], found odd \[3\]"),
        ([("matrix", torch.zeros(7, 5)), *named[1:]], r"expected matrix \[5, 7\], found matrix \[7, 5\]"),
    ]
    for stream, match in cases:
        with pytest.raises(WeightUpdateError, match=match):
            write(open_sender(route, str(tmp_path)), 1, stream)


@pytest.mark.parametrize("route", ROUTES)
def test_sender_unknown_dtype_raises(tmp_path: Path, route: str) -> None:
    for dtype in ("float31", "nn"):
        with pytest.raises(WeightUpdateError, match=f"'{dtype}' is not a torch dtype"):
            write(open_sender(route, str(tmp_path)), 1, weights().items(), specs_of(dtype))


@pytest.mark.parametrize("route", ROUTES)
def test_sender_without_space_raises_with_remedy_before_writing(
    tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full memory file system, as /dev/shm in a container: a sparse file there would end the process with SIGBUS."""
    reserved: list[int] = []

    def failing_fallocate(descriptor: int, offset: int, size: int) -> None:
        reserved.append(size)
        if len(reserved) == (2 if route == "shm" else 1):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", failing_fallocate)
    specs = (ParamSpec("large", (2**20,), "float32"),)

    with pytest.raises(WeightUpdateError, match=r"4\.0 MiB of weights, found .* MiB.*--shm-size.*publish.route=disk"):
        open_sender(route, str(tmp_path)).begin(1, specs)

    assert min(reserved) >= 2**22


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_shm_space_is_reserved_before_first_parameter() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        sender = open_sender("shm", folder)
        sender.begin(1, (ParamSpec("large", (2**20,), "float32"),))

        assert [path.stat().st_blocks * 512 for path in Path(folder).iterdir()] == [2**22] * 2
        sender.close()


@pytest.mark.parametrize("route", ROUTES)
def test_open_weights_missing_file_raises_naming_location(tmp_path: Path, route: str) -> None:
    meta = WeightUpdateMeta(route, 1, (WeightPart(str(tmp_path / "slot-1"), specs_of()),))

    with pytest.raises(WeightUpdateError, match=r"slot-1.*the weights cannot be"):
        read_weights(meta)


@pytest.mark.parametrize(("route", "keep"), [("shm", 0), ("shm", 300), ("disk", 0), ("disk", 10), ("disk", 300)])
def test_open_weights_truncated_file_raises(tmp_path: Path, route: str, keep: int) -> None:
    meta, _ = write(open_sender(route, str(tmp_path)), 1, weights().items())
    os.truncate(file_of(meta), keep)

    with pytest.raises(WeightUpdateError):
        read_weights(meta)


def test_open_weights_disk_wrong_shape_raises_naming_parameter(tmp_path: Path) -> None:
    meta, _ = write(open_sender("disk", str(tmp_path)), 1, weights().items())
    specs = tuple(replace(spec, shape=(7, 5)) if spec.name == "matrix" else spec for spec in meta.params)

    with pytest.raises(WeightUpdateError, match=r"'matrix': expected float32 \[7, 5\], found .*\[5, 7\]"):
        read_weights(replace(meta, parts=(replace(meta.parts[0], params=specs),)))


def test_disk_file_is_readable_by_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    specs = tuple(replace(spec, dtype="bfloat16" if spec.name == "odd" else spec.dtype) for spec in specs_of())
    meta, _ = write(open_sender("disk", str(tmp_path)), 1, weights().items(), specs)

    loaded = load_file(file_of(meta))

    assert {name: torch.equal(tensor, read_weights(meta)[name]) for name, tensor in loaded.items()} == dict.fromkeys(
        weights(), True
    )


@pytest.mark.parametrize("route", ROUTES)
def test_route_changed_byte_fails_receipt_naming_parameter(tmp_path: Path, route: str) -> None:
    meta, receipt = write(open_sender(route, str(tmp_path)), 1, weights().items())
    data = bytearray(file_of(meta).read_bytes())
    offset = data.index(weights()["odd"].numpy().tobytes())
    data[offset + 5] ^= 1
    file_of(meta).write_bytes(data)

    server_receipt = WeightReceipt("server", 1, {n: checksum(t) for n, t in open_weights(meta)})

    with pytest.raises(WeightUpdateError, match="'odd' differs"):
        verify_receipt(receipt, server_receipt, route)


def test_shm_views_do_not_write_back(tmp_path: Path) -> None:
    meta, _ = write(open_sender("shm", str(tmp_path)), 1, weights().items())

    for _, tensor in open_weights(meta):
        tensor.zero_()

    assert torch.equal(read_weights(meta)["matrix"], weights()["matrix"])


def test_shm_receiver_sees_later_versions_and_replaced_file(tmp_path: Path) -> None:
    sender, receiver = open_sender("shm", str(tmp_path / "new")), WeightReceiver()
    for version in (1, 3, 5):
        meta, receipt = write(sender, version, shifted_weights(version))
        targets = {name: torch.empty_like(tensor) for name, tensor in weights().items()}

        sums = receiver.receive(meta, targets)

        assert torch.equal(targets["odd"], weights()["odd"] + version)
        assert sums == receipt.checksums
        if version == 3:
            file_of(meta).unlink()


@pytest.mark.skipif(not MEMORY.is_dir(), reason="this system has no /dev/shm")
def test_shm_directory_open_to_others_raises() -> None:
    directory = MEMORY / f"rl-test-{os.getpid()}"
    directory.mkdir()
    try:
        directory.chmod(0o777)
        with pytest.raises(WeightUpdateError, match="mode 700"):
            open_sender("shm", str(directory)).begin(1, ())
        with pytest.raises(WeightUpdateError, match="mode 700"):
            read_committed(directory)
    finally:
        directory.rmdir()


def test_shm_file_is_private_and_resized_for_another_model(tmp_path: Path) -> None:
    sender = open_sender("shm", str(tmp_path))
    meta, _ = write(sender, 1, weights().items())
    small, _ = write(sender, 3, [("odd", weights()["odd"])], specs_of()[1:2])

    assert file_of(meta).stat().st_mode & 0o777 == 0o600
    assert read_weights(small).keys() == {"odd"}
    with pytest.raises(WeightUpdateError, match=r"expected \d+ bytes"):
        read_weights(meta)


def test_disk_failed_write_leaves_previous_version(tmp_path: Path) -> None:
    """A writer that fails midway leaves the previous version in place."""
    sender = open_sender("disk", str(tmp_path))
    meta, _ = write(sender, 1, weights().items())

    def failing_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "matrix", weights()["matrix"] + 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(sender, 3, failing_tensors())

    assert torch.equal(read_weights(meta)["matrix"], weights()["matrix"])


def test_open_sender_unknown_route_raises(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="expected one of shm, disk, broadcast, ipc, found 'unknown'"):
        open_sender("unknown", str(tmp_path))


@settings(max_examples=40, deadline=None)
@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=80), first=st.integers(0, 2**40))
def test_checksum_compiled_loop_and_devices_agree(words: list[int], first: int) -> None:
    tensor = torch.tensor(words, dtype=torch.int64)
    target = torch.empty_like(tensor)
    expected = formula(tensor.numpy().tobytes(), first)

    values = {checksum(tensor, 8 * first), checksum_module._device_sum(tensor, tensor, first).value}
    copied, _ = checksum_kernel.copy_words(target.numpy(), tensor.numpy(), first)

    assert values == {expected}
    assert copied == expected
    assert torch.equal(target, tensor)


@settings(max_examples=60, deadline=None)
@given(
    halves=st.lists(
        st.integers(0, 2**16 - 1) | st.sampled_from([0x7F80, 0xFF80, 0x7FF0, 0xFFF0, 0x7C00, 0xFC00, 0x7F7F, 0x7BFF]),
        min_size=4,
        max_size=40,
    ),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_checksum_finite_equals_isfinite_for_any_bits(halves: list[int], dtype: torch.dtype) -> None:
    count = len(halves) * 2 // dtype.itemsize * dtype.itemsize // 2
    numbers = torch.tensor(halves[:count], dtype=torch.int32).to(torch.uint16).view(dtype)
    largest = torch.finfo(dtype).max
    expected = bool(numbers.isfinite().all())

    assert checksum_module.checksum_of(numbers).finite == expected
    assert checksum_module.copy_summed(torch.empty_like(numbers), numbers).finite == expected
    assert checksum_module._device_sum(numbers, checksum_module._words(numbers.clone()), 0).finite == expected
    assert checksum_module.copy_summed(torch.empty_like(numbers), torch.full_like(numbers, -largest)).finite


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.float32, float("nan")), (torch.float32, -float("inf")), (torch.bfloat16, float("inf"))],
)
def test_checksum_one_nonfinite_number_in_any_thread_is_found(dtype: torch.dtype, number: float) -> None:
    large = torch.ones(2**23 + 3)
    for index in (0, 2**20, 2**22 + 5, 2**23 + 2):
        corrupted = large.clone()
        corrupted[index] = number

        assert not checksum_module.copy_summed(torch.empty_like(large, dtype=dtype), corrupted).finite
    assert checksum_module.copy_summed(torch.empty_like(large, dtype=dtype), large).finite
