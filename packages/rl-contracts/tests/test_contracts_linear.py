"""Products by oneDNN against torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rl_contracts.models import cpu_matmul as module
from rl_contracts.models.cpu_matmul import linear, use_faster_matmul


@pytest.fixture(autouse=True)
def _taken_for_every_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use oneDNN wherever it can be called, whatever the processor; later tests choose anew."""
    monkeypatch.setattr(module, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(module, "_mkl_wastes_speed", lambda: True)
    module.prefers_onednn.cache_clear()
    if not module.prefers_onednn():
        pytest.skip("this build of torch has no oneDNN")
    yield
    module.prefers_onednn.cache_clear()


@pytest.mark.parametrize("shape", [(7, 16), (1, 130, 16), (2, 3, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_values_and_gradients_equal_torch(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    bias = torch.randn(24, requires_grad=True) if with_bias else None
    wanted = [t for t in (x, weight, bias) if t is not None]
    toward = torch.randn(*shape[:-1], 24)

    ours = linear(x, weight, bias)
    theirs = F.linear(x, weight, bias)

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((ours * toward).sum(), wanted)
    expected = torch.autograd.grad((theirs * toward).sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 16), (1, 130, 16), (2, 3, 16)])
def test_linear_result_may_be_changed_in_place_as_torchs_may(shape: tuple[int, ...]) -> None:
    """Tensor parallelism adds a bias to what its layers return, in place."""
    x, weight = torch.randn(*shape), torch.randn(24, 16, requires_grad=True)

    linear(x, weight).add_(1.0).sum().backward()

    torch.testing.assert_close(weight.grad, x.reshape(-1, 16).sum(0).expand(24, 16), rtol=1e-5, atol=1e-5)


def test_linear_only_the_weight_learns_no_other_gradient_is_made() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)

    linear(x, weight).sum().backward()

    assert x.grad is None
    assert weight.grad is not None


def test_linear_other_dtypes_take_torchs_product() -> None:
    x, weight = torch.randn(4, 8).double(), torch.randn(3, 8).double()

    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_linear_under_deterministic_algorithms_is_torchs_product_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    x, weight = torch.randn(64, 128), torch.randn(96, 128)

    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_speed_up_layers_follow_exchanged_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    before = model(x)

    assert use_faster_matmul(model) == 2
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2

    assert not torch.allclose(model(x), before, atol=1e-3)


def test_prefers_onednn_operator_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_onednn", lambda x, weight, bias: F.linear(x, weight, bias) + 1)
    module.prefers_onednn.cache_clear()

    assert not module.prefers_onednn()


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_prefers_onednn_where_mkl_leaves_vector_instructions_unused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, capability: str, expected: bool
) -> None:
    monkeypatch.undo()
    named = tmp_path / "cpuinfo"
    named.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n" if vendor else "processor\t: 0\n")
    monkeypatch.setattr(module, "_PROCESSORS", named)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module.prefers_onednn.cache_clear()

    assert module.prefers_onednn() is expected


@pytest.mark.slow
@pytest.mark.parametrize("with_grad", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_speed_up_compiled_model_equals_uncompiled(with_grad: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8, bias=False))
    use_faster_matmul(model)
    x = torch.randn(5, 16)

    with torch.set_grad_enabled(with_grad):
        found, expected = torch.compile(model, dynamic=True)(x), model(x)

    torch.testing.assert_close(found, expected)
    if with_grad:
        parameters = list(model.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)
        )


SIZES = """
import sys, torch
from rl_contracts.models import cpu_matmul
cpu_matmul._mkl_wastes_speed = lambda: True
assert cpu_matmul.prefers_onednn()
weight, after = torch.ones(512, 64), []
for rows in range(2, 802):
    cpu_matmul.linear(torch.ones(16 + rows, 64), weight)
    if rows in (401, 801):
        after.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
print(*after)
"""


@pytest.mark.nightly
def test_products_of_many_sizes_do_not_grow_memory() -> None:
    env = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}

    done = subprocess.run([sys.executable, "-c", SIZES], env=env, capture_output=True, text=True, check=True)

    half, whole = map(int, done.stdout.split())
    assert whole - half < 100 * 2**20  # 400 descriptions and what belongs to them take 260 MiB
