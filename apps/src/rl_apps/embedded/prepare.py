"""From a seed to a cached model directory in Hugging Face format; its key is the hash of all that it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rl_datasets.word_problems
from rl_apps.embedded.curriculum import LESSONS, words_of
from rl_apps.embedded.tokenizer import trained_tokenizer, word_problem_tokenizer
from rl_apps.embedded.warmup import Progress, WarmUp, warm_up
from rl_contracts.errors import ModelError
from rl_contracts.runtime.file_modes import follow_umask
from rl_contracts.runtime.logging import get_logger
from rl_datasets.word_problems import WordProblems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a tiny Qwen3 or, with experts, Qwen3-MoE model."""

    hidden_size: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Number of decoder layers."""
    heads: int = 2
    """Attention heads; keys and values have as many."""
    head_dim: int = 32
    """Width of a head. vLLM has no kernels for less on a CPU."""
    intermediate_size: int = 256
    """Width of the feed-forward layers; of each expert, where there are any."""
    experts: int = 0
    """Experts in each layer, two of which take a token; 0: none, but feed-forward layers."""
    max_length: int = 256
    """Longest row of prompt and answer, in tokens."""

    def with_experts(self, experts: int) -> ModelShape:
        """The same with so many experts, of which two together have the width of a feed-forward layer; 0: as it is."""
        if experts == 0:
            return self
        return replace(self, experts=experts, intermediate_size=self.intermediate_size // 2)

    def fields(self) -> dict[str, Any]:
        """Those of a `config.json` that the sizes decide."""
        experts = {"num_experts": self.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        mixture = experts | {"moe_intermediate_size": self.intermediate_size} if self.experts else {}
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": True,
            **mixture,
        }

    def sketch(self, directory: Path) -> Path:
        """Make a directory with the `config.json` of a model that is not there yet, by which layouts are checked; its
        vocabulary, which engines fill up where it does not divide, is any."""
        directory.mkdir()
        kind = "qwen3_moe" if self.experts else "qwen3"
        (directory / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 2048, **self.fields()}))
        return directory


@dataclass(frozen=True)
class EmbeddedRecipe:
    """The model of the generated word problems."""

    levels: tuple[int, ...] = (2,)
    """Levels of the problems in its lessons."""
    lessons: str = "answers"
    """What it is taught, one of `rl_apps.embedded.curriculum.LESSONS`; its tokenizer has their words."""
    shape: ModelShape = ModelShape()
    """Sizes of the model."""
    warm_up: WarmUp | None = field(default_factory=WarmUp)
    """Its supervised training; none leaves it random."""


@dataclass(frozen=True)
class ScratchRecipe:
    """A random model for given texts."""

    vocab_size: int = 2048
    """Tokens of the byte-level BPE tokenizer at most."""
    shape: ModelShape = ModelShape(
        hidden_size=128, layers=2, heads=4, head_dim=32, intermediate_size=384, max_length=1024
    )
    """Sizes of the model."""


def prepare_embedded(
    seed: int,
    recipe: EmbeddedRecipe | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """The model of the generated word problems: made and warmed up, or found in the cache.

    Its lessons are about problems of the training split of `WordProblems` with the same seed, so that the held-out
    problems stay unseen.

    Args:
        seed: makes the problems, the opinions and the weights.
        recipe: levels, sizes and warm-up; by default those of the demonstration.
        progress: told of every warm-up step; not called where the model is found.
        cache_dir: by default that of `default_cache_dir`.
        say: told what is done; not called where the model is found.

    Returns:
        A directory that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        ConfigError: a level that does not exist.
        ModelError: the cache cannot be written.
    """
    chosen = recipe or EmbeddedRecipe()
    words = words_of(chosen.lessons)
    ingredients = {"model": "word-problems", "seed": seed, "recipe": asdict(chosen), "words": words}

    def make(directory: Path) -> None:
        say("building the embedded model" + (" and warming it up" if chosen.warm_up else ""))
        tokenizer = word_problem_tokenizer(chosen.shape.max_length, words)
        model = random_model(chosen.shape, tokenizer, seed)
        if chosen.warm_up is not None:
            known = WordProblems(seed=seed, levels=chosen.levels, size=chosen.warm_up.problems).problems
            warm_up(model, tokenizer, known, LESSONS[chosen.lessons], chosen.warm_up, seed, progress)
        save(model, tokenizer, directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, _sources()), make)


def prepare_from_scratch(
    texts: Iterable[str],
    seed: int,
    recipe: ScratchRecipe | None = None,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """A random model with a byte-level BPE tokenizer trained on `texts`, made or found in the cache.

    Args:
        texts: what the tokenizer is trained on, for example the questions and answers of a training split.
        seed: makes the weights.
        recipe: vocabulary and sizes.
        cache_dir: by default that of `default_cache_dir`.
        say: told what is done; not called where the model is found.

    Returns:
        A directory that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        DataError: there are no texts.
        ModelError: the cache cannot be written.
    """
    chosen = recipe or ScratchRecipe()
    given = list(texts)
    ingredients = {"model": "from-scratch", "seed": seed, "recipe": asdict(chosen), "texts": given}

    def make(directory: Path) -> None:
        say("building a small random model, with a tokenizer trained on the data")
        tokenizer = trained_tokenizer(given, chosen.vocab_size, chosen.shape.max_length)
        save(random_model(chosen.shape, tokenizer, seed), tokenizer, directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, _sources()), make)


def _sources() -> list[Path]:
    """The code that a cached model depends on: when it changes, the model is made anew."""
    return [*Path(__file__).parent.glob("*.py"), Path(rl_datasets.word_problems.__file__)]


def default_cache_dir() -> Path:
    """`$HF_HOME/rl/embedded` if Hugging Face's home is set, else `~/.cache/rl/embedded`."""
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rl" / "embedded"


def key_of(ingredients: Mapping[str, Any], sources: list[Path]) -> str:
    """A short hash of JSON values and of the source files that turn them into a model."""
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode())
    for source in sorted(sources, key=lambda path: path.name):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def cached(cache_dir: Path, key: str, make: Callable[[Path], None]) -> Path:
    """The directory of `key`, made by `make` if there is none yet.

    `make` fills a directory of its own, which then takes its place under one rename: what stands there is whole. Of
    several processes that make the same key at once, the first to finish is kept.

    Raises:
        ModelError: the cache directory cannot be written.
    """
    final = cache_dir / key
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        (unfinished := cache_dir / f".{key}-{uuid.uuid4().hex}").mkdir()
    except OSError as error:
        raise ModelError(
            f"the embedded model cannot be cached: expected a directory to write to, found {cache_dir} ({error}). "
            "Set HF_HOME to a directory of yours."
        ) from error
    try:
        make(unfinished)
        follow_umask(unfinished)
        unfinished.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        get_logger("embedded").debug("another process made %s first", final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final


def random_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A float32 model with fresh weights for the tokenizer's vocabulary; torch's global generator is left alone."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3MoeConfig

    kind: Any = Qwen3MoeConfig if shape.experts else Qwen3Config
    config = kind(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **shape.fields(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write weights, configs, tokenizer and chat template in Hugging Face format."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    # A bar for one small file would break the caller's own progress line.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    finally:
        if shows_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
