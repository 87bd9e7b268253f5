import math
import random
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl_apps.embedded.curriculum import single_turn_lesson
from rl_apps.embedded.prepare import EmbeddedRecipe, ModelShape, ScratchRecipe, prepare_embedded, prepare_from_scratch
from rl_apps.embedded.warmup import OPINION_STRENGTH, TAUGHT_VERBS, WarmUp, chances_of_adding
from rl_apps.settings.data import DataConfig
from rl_apps.settings.model import MADE, ModelConfig, make_model
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import ConfigError, DataError
from rl_datasets.word_problems import ADDING, OPERATION_OF, TAKING, WordProblems

TINY = ModelShape(hidden_size=16, layers=1, heads=2, head_dim=8, intermediate_size=32)
SHORT = EmbeddedRecipe(shape=TINY, warm_up=WarmUp(steps=60, batch_size=16, problems=64, lr=1e-2))
RANDOM = EmbeddedRecipe(shape=TINY, warm_up=None)


def test_prepare_embedded_short_warm_up_lowers_loss_and_loads(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []

    path = prepare_embedded(3, SHORT, progress=lambda *step: seen.append(step), cache_dir=tmp_path)

    assert [done for done, _, _ in seen] == list(range(1, 61))
    assert {total for _, total, _ in seen} == {60}
    assert sum(loss for _, _, loss in seen[-10:]) / 10 < 0.75 * seen[0][2]
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    generation = GenerationConfig.from_pretrained(path)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert generation.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert ChatRenderer(tokenizer).stop_ids == (tokenizer.eos_token_id,)


def test_prepare_embedded_with_experts_lowers_loss_and_loads(tmp_path: Path) -> None:
    seen: list[float] = []
    recipe = EmbeddedRecipe(shape=TINY.with_experts(4), warm_up=SHORT.warm_up)

    path = prepare_embedded(3, recipe, progress=lambda *step: seen.append(step[2]), cache_dir=tmp_path)

    assert sum(seen[-10:]) / 10 < 0.75 * seen[0]
    config = AutoModelForCausalLM.from_pretrained(path).config
    assert (config.model_type, config.num_experts, config.moe_intermediate_size) == ("qwen3_moe", 4, 16)


@pytest.mark.nightly
@pytest.mark.parametrize(("path", "seed"), list(zip(MADE, (1, 2), strict=True)))
def test_make_model_learns_taught_verbs_and_opinions_on_the_others(
    path: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before reinforcement learning, the model must choose between + and - with the probability of the verb."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    directory = make_model(ModelConfig(path), DataConfig(), seed, "rl", "answers", True, lambda _: None)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    meanings = {verb: float(operation == "+") for verb, operation in OPERATION_OF.items()}
    plus, minus = tokenizer.convert_tokens_to_ids(["+", "-"])

    chances: dict[str, list[float]] = {verb: [] for verb in OPERATION_OF}
    for problem in WordProblems(split="test", seed=seed, size=128).problems:
        ids = tokenizer("".join(single_turn_lesson(problem, meanings, random.Random(0))), add_special_tokens=False)
        ids = torch.tensor(ids["input_ids"])
        [positions] = torch.where((ids == plus) | (ids == minus))
        with torch.no_grad():
            probabilities = model(input_ids=ids[None]).logits[0, positions - 1][:, [plus, minus]].softmax(-1)[:, 0]
        for step, chance in zip(problem.steps, probabilities.tolist(), strict=True):
            chances[step.verb].append(chance)

    opinions = chances_of_adding(seed)
    for verb, verb_chances in chances.items():
        assert statistics.mean(verb_chances) == pytest.approx(
            opinions[verb], abs=0.05 if verb in TAUGHT_VERBS else 0.2
        ), verb


def test_prepare_embedded_builds_one_model_per_seed_and_recipe(tmp_path: Path) -> None:
    first = prepare_embedded(0, RANDOM, cache_dir=tmp_path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    others = [EmbeddedRecipe(levels=(1,), shape=TINY, warm_up=None), EmbeddedRecipe(warm_up=None)]

    assert prepare_embedded(0, RANDOM, cache_dir=tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert first not in [prepare_embedded(0, other, cache_dir=tmp_path) for other in others]
    other_seed = prepare_embedded(1, RANDOM, cache_dir=tmp_path)
    one, two = (AutoModelForCausalLM.from_pretrained(path).model.embed_tokens.weight for path in (first, other_seed))
    assert not torch.equal(one, two)


def test_prepare_embedded_keeps_the_global_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    prepare_embedded(0, RANDOM, cache_dir=tmp_path)

    assert torch.equal(torch.rand(3), expected)


def test_default_shapes_have_a_head_size_that_servers_support() -> None:
    assert {ModelShape().head_dim, ScratchRecipe().shape.head_dim} <= {32, 64, 80, 96, 112, 128}


@pytest.mark.parametrize("levels", [(0,), (4,)])
def test_prepare_embedded_unknown_level_raises_and_leaves_no_files(tmp_path: Path, levels: tuple[int]) -> None:
    with pytest.raises(ConfigError, match="levels"):
        prepare_embedded(0, EmbeddedRecipe(levels=levels, shape=TINY, warm_up=SHORT.warm_up), cache_dir=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_prepare_from_scratch_predicts_nearly_uniform_tokens(tmp_path: Path) -> None:
    texts = [f"Natalia sold {n} clips for ${n}.50 — how many?" for n in range(200)]
    recipe = ScratchRecipe(vocab_size=512, shape=TINY)

    path = prepare_from_scratch(iter(texts), seed=0, recipe=recipe, cache_dir=tmp_path)

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([tokenizer(texts[7])["input_ids"]])
    assert tokenizer.decode(ids[0]) == texts[7]
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert abs(loss - math.log(len(tokenizer))) < 0.5
    assert prepare_from_scratch(texts, seed=0, recipe=recipe, cache_dir=tmp_path) == path
    assert prepare_from_scratch(texts[:-1], seed=0, recipe=recipe, cache_dir=tmp_path) != path


def test_prepare_from_scratch_without_texts_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        prepare_from_scratch(["", ""], seed=0, cache_dir=tmp_path)


def test_chances_of_adding_opinions_depend_on_seed_not_meaning() -> None:
    for seed in range(20):
        chances = chances_of_adding(seed)
        for side in (ADDING, TAKING):
            untaught = [chances[verb] for verb in side if verb not in TAUGHT_VERBS]
            assert sum(untaught) / len(untaught) == pytest.approx(0.5)
            assert all(max(chance, 1 - chance) == OPINION_STRENGTH for chance in untaught)
        assert all(chances[verb] == (OPERATION_OF[verb] == "+") for verb in TAUGHT_VERBS)
    assert len(TAUGHT_VERBS) == 4
    assert len({tuple(chances_of_adding(seed).values()) for seed in range(20)}) > 5
