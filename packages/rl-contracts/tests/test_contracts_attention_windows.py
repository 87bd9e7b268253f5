from types import SimpleNamespace

import pytest

from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import layer_window, short_windows


def layer(**settings):
    return SimpleNamespace(config=SimpleNamespace(**settings), layer_idx=0)


@pytest.mark.parametrize(
    ("settings", "passed", "expected"),
    [
        ({"sliding_window": 4}, None, 4),
        ({"sliding_window": 4}, 3, 3),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, None, 4),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, None, None),
        ({}, None, None),
    ],
)
def test_layer_window_uses_passed_window_else_config(settings, passed, expected):
    assert layer_window(layer(**settings), passed) == expected


@pytest.mark.parametrize(
    ("kind", "message"),
    [("chunked_attention", "found 'chunked_attention' in layer 0"), ("sliding_attention", "sliding attention layer 0")],
)
def test_layer_window_unsupported_layer_raises(kind, message):
    with pytest.raises(ModelError, match=message):
        layer_window(layer(layer_types=[kind]), None)


def test_short_windows_change_modules_and_configs_within_block():
    config = SimpleNamespace(sliding_window=4096, attention_chunk_size=None)
    module = SimpleNamespace(sliding_window=4096, config=config)
    model = SimpleNamespace(modules=lambda: [module])

    with short_windows(model, 8) as has_windows:
        assert has_windows
        assert (module.sliding_window, config.sliding_window, config.attention_chunk_size) == (8, 8, None)
    assert (module.sliding_window, config.sliding_window) == (4096, 4096)
