"""A state that one layout copied while it trained on, another one continues: with the same weights and moments, and
equal losses."""

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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=2))  # its embedding is no multiple of 128


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", layers=2))


def read(path):
    """All tensors of a state, whole."""
    if own := not dist.is_initialized():  # another test's engine may be there
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return {name: value for name, value in load_plain_tensors(path).items() if isinstance(value, torch.Tensor)}
    finally:
        if own:
            dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tensor": 2}, {"pipeline": 2}),
        ({"data": 2}, {}),
        ({}, {"data": 2}),
        ({"pipeline": 2}, {"context": 2}),
    ],
)
def test_state_of_another_layout_has_the_same_moments_and_continues_with_equal_losses(model, tmp_path, first, then):
    resume(model, tmp_path, first, then)


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "then"), [({"data": 2, "expert": 2}, {}), ({"data": 2}, {"data": 2, "expert": 2})])
def test_state_of_spread_experts_continues_where_they_lie_otherwise(mixture, tmp_path, first, then):
    resume(mixture, tmp_path, first, then)


INTERLEAVED = {"pipeline": 2, "interleaved": 2}


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "then"), [({"tensor": 2}, INTERLEAVED), (INTERLEAVED, {"data": 2})])
def test_state_of_gemma_continues_in_interleaved_stages_and_from_them(tmp_path, first, then):
    family, settings = MODELS["gemma3"]
    models = make_models(tmp_path / "models", {"gemma": (family, settings | {"vocab_size": VOCABULARY})})

    resume(str(models / "gemma"), tmp_path, first, then)


def resume(model, tmp_path, first, then):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    figures = [tmp_path / "one.json", tmp_path / "other.json"]

    for layout, load, save, out in ((first, "", one, figures[0]), (then, one, other, figures[1])):
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
        rows = slice(VOCABULARY if "word_embeddings" in name else None)  # two ranks fill it up, one need not
        assert torch.equal(tensor[rows], after[name][rows]), name
    expected, found = (json.loads(file.read_text()) for file in figures)
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_of_sgd_is_read_again_and_gives_the_same_step(tmp_path, momentum):
    engine, meta = MegatronEngine(), SaveLoadMeta(str(tmp_path / "state"), "state")
    optimizer = OptimizerConfig(name="sgd", lr=1e-2, momentum=momentum)
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
