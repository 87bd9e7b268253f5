"""Linear layers with oneDNN match `torch.nn.functional.linear`."""

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
def _use_onednn_for_every_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use oneDNN for all sizes on any processor, and clear the cached choice afterwards."""
    monkeypatch.setattr(module, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(module, "_mkl_wastes_speed", lambda: True)
    module.prefers_onednn.cache_clear()
    if not module.prefers_onednn():
        pytest.skip("the oneDNN operator of this torch build is missing or computes wrong results")
    yield
    module.prefers_onednn.cache_clear()


@pytest.mark.parametrize(("shape", "with_bias"), [((7, 16), False), ((1, 130, 16), False), ((2, 3, 16), True)])
def test_linear_values_and_gradients_equal_torch(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    bias = torch.randn(24, requires_grad=True) if with_bias else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    upstream = torch.randn(*shape[:-1], 24)

    actual = linear(x, weight, bias)
    reference = F.linear(x, weight, bias)

    torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((actual * upstream).sum(), inputs)
    expected_gradients = torch.autograd.grad((reference * upstream).sum(), inputs)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 16), (1, 130, 16)])
def test_linear_result_can_be_modified_in_place(shape: tuple[int, ...]) -> None:
    """Tensor parallelism adds a bias in place to the output of its layers."""
    x, weight = torch.randn(*shape), torch.randn(24, 16, requires_grad=True)

    linear(x, weight).add_(1.0).sum().backward()

    torch.testing.assert_close(weight.grad, x.reshape(-1, 16).sum(0).expand(24, 16), rtol=1e-5, atol=1e-5)


def test_linear_other_dtypes_use_torch() -> None:
    x, weight = torch.randn(4, 8).double(), torch.randn(3, 8).double()

    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_linear_deterministic_algorithms_equal_torch_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    x, weight = torch.randn(64, 128), torch.randn(96, 128)

    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_use_faster_matmul_layers_use_replaced_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    before = model(x)

    assert use_faster_matmul(model) == 2
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2

    assert not torch.allclose(model(x), before, atol=1e-3)


def test_prefers_onednn_wrong_results_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_prefers_onednn_only_if_mkl_leaves_avx512_unused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, capability: str, expected: bool
) -> None:
    monkeypatch.undo()
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n" if vendor else "processor\t: 0\n")
    monkeypatch.setattr(module, "_PROCESSORS", cpuinfo)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module.prefers_onednn.cache_clear()

    assert module.prefers_onednn() is expected


@pytest.mark.slow
@pytest.mark.parametrize("with_grad", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_use_faster_matmul_compiled_equals_uncompiled(with_grad: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8, bias=False))
    use_faster_matmul(model)
    x = torch.randn(5, 16)

    with torch.set_grad_enabled(with_grad):
        compiled, expected = torch.compile(model, dynamic=True)(x), model(x)

    torch.testing.assert_close(compiled, expected)
    if with_grad:
        parameters = list(model.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(compiled.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)
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
def test_linear_many_sizes_do_not_grow_memory() -> None:
    env = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}

    completed = subprocess.run([sys.executable, "-c", SIZES], env=env, capture_output=True, text=True, check=True)

    half, whole = map(int, completed.stdout.split())
    assert whole - half < 100 * 2**20  # 400 cached descriptors and their primitives take 260 MiB
