"""From a seed to a cached model directory in Hugging Face format."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path

import rl_datasets.word_problems
from rl_apps.embedded.cache import cached, default_cache_dir, key_of
from rl_apps.embedded.recipe import EmbeddedRecipe, ScratchRecipe
from rl_apps.embedded.warmup import Progress, warm_up
from rl_datasets.word_problems import WordProblems


def prepare_embedded(
    seed: int,
    recipe: EmbeddedRecipe | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The model of the generated word problems: made and warmed up, or found in the cache.

    Its lessons are about problems of the training split of `WordProblems` with the same seed, so that the held-out
    problems stay unseen.

    Args:
        seed: makes the problems, the opinions and the weights.
        recipe: levels, sizes and warm-up; by default those of the demonstration.
        progress: told of every warm-up step; not called where the model is found.
        cache_dir: by default that of `default_cache_dir`.

    Returns:
        A directory that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        ConfigError: a level that does not exist.
        ModelError: the cache cannot be written.
    """
    chosen = recipe or EmbeddedRecipe()
    ingredients = {"model": "word-problems", "seed": seed, "recipe": dataclasses.asdict(chosen)}

    def make(directory: Path) -> None:
        from rl_apps.embedded.model import random_model, save
        from rl_apps.embedded.tokenizer import word_problem_tokenizer

        tokenizer = word_problem_tokenizer(chosen.shape.max_length)
        model = random_model(chosen.shape, tokenizer, seed)
        if chosen.warm_up is not None:
            lessons = WordProblems(seed=seed, levels=chosen.levels, size=chosen.warm_up.problems)
            warm_up(model, tokenizer, lessons.problems, chosen.warm_up, seed, progress)
        save(model, tokenizer, directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, _sources()), make)


def prepare_from_scratch(
    texts: Iterable[str],
    seed: int,
    recipe: ScratchRecipe | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """A random model with a byte-level BPE tokenizer trained on `texts`, made or found in the cache.

    Args:
        texts: what the tokenizer is trained on, for example the questions and answers of a training split.
        seed: makes the weights.
        recipe: vocabulary and sizes.
        cache_dir: by default that of `default_cache_dir`.

    Returns:
        A directory that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        DataError: there are no texts.
        ModelError: the cache cannot be written.
    """
    chosen = recipe or ScratchRecipe()
    given = list(texts)
    digest = hashlib.sha256()
    for text in given:
        digest.update(len(text).to_bytes(8, "big"))
        digest.update(text.encode())
    ingredients = {
        "model": "from-scratch",
        "seed": seed,
        "recipe": dataclasses.asdict(chosen),
        "texts": digest.hexdigest(),
    }

    def make(directory: Path) -> None:
        from rl_apps.embedded.model import random_model, save
        from rl_apps.embedded.tokenizer import trained_tokenizer

        tokenizer = trained_tokenizer(given, chosen.vocab_size, chosen.shape.max_length)
        save(random_model(chosen.shape, tokenizer, seed), tokenizer, directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, _sources()), make)


def _sources() -> list[Path]:
    """The code that a cached model depends on: when it changes, the model is made anew."""
    return [*Path(__file__).parent.glob("*.py"), Path(rl_datasets.word_problems.__file__)]
