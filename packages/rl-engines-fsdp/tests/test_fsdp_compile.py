"""Compiled layers compute the same results as plain layers."""

from functools import partial

import pytest
import torch
from fsdp_toys import loss_fn, loss_weight_fn, make_batch, make_engine, make_model, weights_of


def assert_compiled_equals_plain(path, tolerance, **settings):
    plain, compiled = (make_engine(path, micro_batch=40, compile=c, **settings) for c in (False, True))
    torch._dynamo.utils.counters.clear()
    for seed in range(2):  # lengths differ between micro-batches
        expected = plain.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn)
        actual = compiled.train_batch(make_batch(seed=seed), loss_fn, loss_weight_fn)
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 12, "layers and lengths must share graphs"
    return plain, compiled


@pytest.mark.slow
def test_train_batch_with_traced_layers_equals_plain_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # no code is generated
    torch._dynamo.reset()

    assert_compiled_equals_plain(make_model(tmp_path), 1e-5)


@pytest.mark.nightly  # code generation takes a minute and more
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True}], ids=["plain", "bf16"])
def test_train_batch_with_compiled_layers_equals_plain_layers(settings, tmp_path):
    torch._dynamo.reset()

    plain, compiled = assert_compiled_equals_plain(make_model(tmp_path), 0.05 if settings else 1e-5, **settings)

    if not settings:
        for name, value in weights_of(plain).items():
            torch.testing.assert_close(weights_of(compiled)[name], value, atol=1e-5, rtol=1e-4)
