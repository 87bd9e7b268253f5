from types import SimpleNamespace

import pytest
from torch import nn

from rl_contracts.models.sizes import ModelSizes, sizes_of


@pytest.mark.parametrize(("widths", "expected"), [([8, 48, 24], 48), (None, 4 * 16)])
def test_sizes_of_several_mlp_widths_returns_largest(widths, expected):
    config = SimpleNamespace(
        num_attention_heads=2, hidden_size=16, num_hidden_layers=3, vocab_size=5, intermediate_size=widths
    )
    config.get_text_config = lambda: config

    assert sizes_of(nn.Linear(2, 2), config).intermediate == expected


@pytest.mark.parametrize(("experts_per_token", "active"), [(2, 20 + 2 * 6), (0, 20 + 8 * 6)])
def test_active_parameters_count_the_experts_of_a_token(experts_per_token, active):
    shapes = {"layers.0.attention.weight": (4, 5), "layers.0.mlp.experts.down_proj": (8, 2, 3)}
    sizes = ModelSizes(shapes, 1, 4, 4, 1, 1, 4, 5, experts_per_token=experts_per_token)

    assert sizes.active_parameters == active
