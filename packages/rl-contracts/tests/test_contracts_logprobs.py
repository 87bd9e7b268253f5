import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rl_contracts.models import fused_logprobs as module
from rl_contracts.models.fused_logprobs import HeadOptions, LogitTransform, token_logprobs
from rl_contracts.models.token_logprobs import chosen_logprobs


def reference(hidden, weight, bias, targets, temperature, transform):
    raw = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    logits = raw if transform.cap is None else transform.cap * torch.tanh(raw / transform.cap)
    distribution = (logits / temperature[:, None]).log_softmax(-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 13),
    max_logits=st.integers(1, 200),
    cap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([1.0, 0.25]),
    with_bias=st.booleans(),
    entropy_grad=st.booleans(),
)
def test_token_logprobs_and_gradients_any_tiles_equal_full_softmax(
    tokens, vocabulary, max_logits, cap, scale, with_bias, entropy_grad
):
    torch.manual_seed(tokens * 100 + vocabulary)
    hidden, weight = torch.randn(tokens, 5), torch.randn(vocabulary, 5)
    bias = torch.randn(vocabulary) if with_bias else None
    inputs = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    targets, temperature = torch.randint(vocabulary, (tokens,)), torch.rand(tokens) + 0.5
    transform = LogitTransform(scale, cap)
    first, second = torch.randn(2, tokens)

    def gradients(pair):
        total = (pair[0] * first).sum() + ((pair[1] * second).sum() if entropy_grad else 0)
        return torch.autograd.grad(total, inputs)

    options = HeadOptions(transform, max_logits, entropy_grad)
    actual = token_logprobs(hidden, weight, bias, targets, temperature, options)
    expected = reference(hidden, weight, bias, targets, temperature, transform)

    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(actual), gradients(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("max_logits", "with_bias"), [(10_000, True), (1 << 20, False)])
def test_token_logprobs_bfloat16_inputs_equal_float32_softmax(device, max_logits, with_bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 128, device=device).bfloat16(), torch.randn(512, 128, device=device).bfloat16() / 3
    bias = torch.randn(512, device=device).bfloat16() if with_bias else None
    targets, temperature = torch.randint(512, (64,), device=device), torch.ones(64, device=device)

    logprobs, entropy = token_logprobs(
        hidden, weight, bias, targets, temperature, HeadOptions(LogitTransform(), max_logits, False)
    )

    wide_bias = None if bias is None else bias.float()
    expected, expected_entropy = reference(
        hidden.float(), weight.float(), wide_bias, targets, temperature, LogitTransform()
    )
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=2e-5, rtol=1e-5)


def test_token_logprobs_without_entropy_grad_entropy_has_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)

    _, entropy = token_logprobs(
        hidden, weight, None, torch.zeros(3, dtype=torch.int64), torch.ones(3), HeadOptions(LogitTransform(), 99, False)
    )

    assert not entropy.requires_grad


class _LargestTensor(TorchDispatchMode):
    """Dispatch mode that records the largest number of entries in a returned tensor."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.entries = max(self.entries, value.numel())
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_token_logprobs_never_exceed_max_logits(entropy_grad, monkeypatch):
    monkeypatch.setattr(module, "KEEP_AT_MOST", 0)
    hidden = torch.randn(100, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    options = HeadOptions(LogitTransform(), 2000, entropy_grad)

    with _LargestTensor() as largest:
        logprobs, entropy = token_logprobs(
            hidden, weight, None, torch.zeros(100, dtype=torch.int64), torch.ones(100), options
        )
        (logprobs.sum() + (entropy.sum() if entropy_grad else 0)).backward()

    assert largest.entries <= 2000


def test_token_logprobs_whole_vocabulary_equal_server_bit_for_bit():
    torch.manual_seed(0)
    hidden, weight, targets, temperature = torch.randn(7, 16), torch.randn(40, 16), torch.arange(7), torch.rand(7) + 0.5

    logprobs, _ = token_logprobs(
        hidden, weight, None, targets, temperature, HeadOptions(LogitTransform(), 10**9, False)
    )

    logits = torch.nn.functional.linear(hidden, weight)
    assert torch.equal(logprobs, chosen_logprobs(logits, targets, temperature.reciprocal()))
