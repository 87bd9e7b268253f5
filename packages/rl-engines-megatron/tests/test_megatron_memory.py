"""Memory of publishing a model of 512 MiB, and the distribution of exports over ranks."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.testing.processes import run_ranks

RANKS = Path(__file__).parent / "megatron_memory_ranks.py"
MIB = 2**20
VOCABULARY, HIDDEN = 32768, 1024
LARGEST = 4 * VOCABULARY * HIDDEN
"""Size of the largest parameter, the embedding, in bytes."""
NOISE = 4 * MIB
"""Tolerance for other memory that the process touches, and for delayed accounting by the kernel."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=HIDDEN // 8,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "route"), [({"tensor": 2}, "shm"), ({"pipeline": 2}, "broadcast")], ids=str)
def test_publishing_takes_at_most_twice_the_largest_parameter(model, tmp_path, layout, route, record_property):
    assert (Path(model) / "model.safetensors").stat().st_size > 512 * MIB

    with tempfile.TemporaryDirectory(dir="/dev/shm") as weights:
        arguments = [model, json.dumps(layout), route, weights, str(tmp_path)]
        run_ranks(RANKS, arguments, ParallelStrategy(**layout).world_size)

    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    record_property("MiB at the peak of publishing, of each rank", [rank["streamed"] // MIB for rank in ranks])
    assert all(rank["streamed"] <= 2 * LARGEST + NOISE for rank in ranks)
    assert ranks[0]["collected"] > 2 * LARGEST + NOISE, "the injected fault was not detected"
    record_property("MiB of an export that each rank holds", [rank["export"] // MIB for rank in ranks])
    for directory in (tmp_path / "exported", tmp_path / "saved"):
        files = [sum(f.stat().st_size for f in directory.glob(f"model-{rank:05d}-*.safetensors")) for rank in range(2)]
        assert max(files) <= sum(files) / 2 + LARGEST
    assert all(rank["export"] <= sum(files) / 2 + 2 * LARGEST + NOISE for rank in ranks)
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    expected = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
