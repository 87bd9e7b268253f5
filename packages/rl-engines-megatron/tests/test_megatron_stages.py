"""Gradients of interleaved and uneven stages and of recomputation, compared with the plain layout."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from test_megatron_families import GEMMA, SIZES, TWO_ROPES

from rl_contracts.testing.processes import run_ranks

RANKS = Path(__file__).parent / "megatron_stages_ranks.py"
VARIANTS = [
    {"interleaved": 3},
    {"interleaved": 2, "stage_layers": [1, 2, 1, 2]},
    {"stage_layers": [4, 2]},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "interleaved": 3},
]


@pytest.mark.slow
def test_interleaved_stages_and_recompute_match_plain_gradients(tmp_path):
    torch.manual_seed(0)
    settings = GEMMA | {"rope_parameters": TWO_ROPES, "layer_types": ["sliding_attention", "full_attention"] * 3}
    config = transformers.Gemma3TextConfig(**SIZES | settings | {"num_hidden_layers": 6})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    for output in run_ranks(RANKS, [str(tmp_path), json.dumps([{}, *VARIANTS])], 2, seconds=150):
        assert [s for s in VARIANTS if f"as the first: {json.dumps(s)}" in output] == VARIANTS
