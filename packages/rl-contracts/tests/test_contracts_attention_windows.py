from types import SimpleNamespace

import pytest

from rl_contracts.errors import ModelError
from rl_contracts.models.attention_windows import layer_window, short_windows


def layer(**settings):
    return SimpleNamespace(config=SimpleNamespace(**settings), layer_idx=0)


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ({"sliding_window": 4}, None, 4),
        ({"sliding_window": 4}, 3, 3),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, None, 4),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, None, None),
        ({}, None, None),
    ],
)
def test_the_window_of_a_layer_is_its_own_or_that_of_the_configuration(settings, given, expected):
    assert layer_window(layer(**settings), given) == expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("chunked_attention", "found 'chunked_attention' in layer 0"), ("sliding_attention", "sliding attention layer 0")],
)
def test_a_window_that_cannot_be_honoured_is_refused_in_a_sentence(kind, reason):
    with pytest.raises(ModelError, match=reason):
        layer_window(layer(layer_types=[kind]), None)


def test_short_windows_are_those_of_modules_and_configurations_and_last_for_the_block():
    config = SimpleNamespace(sliding_window=4096, attention_chunk_size=None)
    module = SimpleNamespace(sliding_window=4096, config=config)
    model = SimpleNamespace(modules=lambda: [module])

    with short_windows(model, 8) as any_:
        assert any_
        assert (module.sliding_window, config.sliding_window, config.attention_chunk_size) == (8, 8, None)
    assert (module.sliding_window, config.sliding_window) == (4096, 4096)
