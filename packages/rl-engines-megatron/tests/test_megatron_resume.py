"""Resume of a state in another layout, with the same weights and moments, and equal losses."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import load_plain_tensors
from test_megatron_families import MODELS, make_models

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.config import OptimizerConfig
from rl_contracts.conformance.train_engine import policy_loss, trained_tokens
from rl_contracts.data import FinetuneSpec, SaveLoadMeta
from rl_contracts.testing import make_batch, make_tiny_model
from rl_contracts.testing.processes import run_ranks
from rl_engines_megatron import MegatronEngine

RANKS = Path(__file__).parent / "megatron_resume_ranks.py"
VOCABULARY = 259


def make_model(directory, family):
    """Save a model whose vocabulary is not a multiple of 128, and return its path."""
    if family == "gemma3":
        config, settings = MODELS["gemma3"]
        return str(make_models(directory, {"gemma3": (config, settings | {"vocab_size": VOCABULARY})}) / "gemma3")
    return str(make_tiny_model(directory, family, layers=2))


def read(path):
    """Return all tensors of a state, unsharded."""
    if is_owner := not dist.is_initialized():  # an engine of another test may have initialized it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return {name: value for name, value in load_plain_tensors(path).items() if isinstance(value, torch.Tensor)}
    finally:
        if is_owner:
            dist.destroy_process_group()


INTERLEAVED = {"pipeline": 2, "interleaved": 2}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("qwen3", {"tensor": 2}, {"pipeline": 2}),
        ("qwen3", {"data": 2}, {}),
        ("qwen3", {"pipeline": 2}, {"context": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}, {}),
        ("qwen3_moe", {"data": 2}, {"data": 2, "expert": 2}),
        ("gemma3", {"tensor": 2}, INTERLEAVED),
        ("gemma3", INTERLEAVED, {"data": 2}),
    ],
)
def test_resume_in_other_layout_keeps_moments_and_losses(tmp_path, family, first, second):
    model = make_model(tmp_path / "model", family)
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    metric_files = [tmp_path / "one.json", tmp_path / "other.json"]

    for layout, load, save, out in ((first, "", one, metric_files[0]), (second, one, other, metric_files[1])):
        sizes = {name: size for name, size in layout.items() if name != "interleaved"}
        settings = {name: size for name, size in layout.items() if name == "interleaved"}
        arguments = [model, json.dumps(sizes), json.dumps(settings), load, save, str(out)]
        run_ranks(RANKS, arguments, ParallelStrategy(**sizes).world_size)

    saved, copied = Path(f"{one}-saved"), Path(f"{one}-copied")
    assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in copied.iterdir())
    for file in saved.iterdir():
        assert (copied / file.name).read_bytes() == file.read_bytes(), file
    before, after = read(one), read(other)
    moments = [name for name in before if "exp_avg" in name]
    assert len(moments) > 10
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # without padding: two ranks pad the vocabulary, one rank does not
        rows = slice(VOCABULARY if "word_embeddings" in name else None)
        assert torch.equal(tensor[rows], after[name][rows]), name
    expected, actual = (json.loads(file.read_text()) for file in metric_files)
    for a, b in zip(expected, actual, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_load_of_sgd_state_gives_the_same_step(tmp_path, momentum):
    engine, meta = MegatronEngine(), SaveLoadMeta(str(tmp_path / "state"), "state")
    optimizer = OptimizerConfig(name="sgd", lr=1e-2, options={"momentum": momentum})
    path = str(make_tiny_model(tmp_path / "model"))
    engine.initialize(FinetuneSpec(path, 4, optimizer=optimizer, device="cpu"))

    def step(seed):
        return engine.train_batch(make_batch(4, seed=seed), policy_loss, trained_tokens)

    step(0), step(1)
    engine.save(meta)
    expected = step(2), step(3)
    engine.load(meta)
    assert (step(2), step(3)) == expected
    engine.destroy()
