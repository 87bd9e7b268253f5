from types import SimpleNamespace

import pytest
from torch import nn

from rl_contracts.models.sizes import sizes_of


@pytest.mark.parametrize(("widths", "expected"), [([8, 48, 24], 48), (None, 4 * 16)])
def test_sizes_of_several_mlp_widths_returns_largest(widths, expected):
    config = SimpleNamespace(
        num_attention_heads=2, hidden_size=16, num_hidden_layers=3, vocab_size=5, intermediate_size=widths
    )
    config.get_text_config = lambda: config

    assert sizes_of(nn.Linear(2, 2), config).intermediate == expected
