"""Build a model from a seed and cache its directory in Hugging Face format.

The cache key is a hash of the arguments and of the source files that build the model.
"""

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
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a tiny Qwen3 or, with experts, Qwen3-MoE model."""

    hidden_size: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Number of decoder layers."""
    heads: int = 2
    """Number of attention heads, and of key and value heads."""
    head_dim: int = 32
    """Width of an attention head. vLLM has no CPU kernels for less than 32."""
    intermediate_size: int = 256
    """Width of a feed-forward layer, or of each expert."""
    experts: int = 0
    """Number of experts per layer, two of which process each token. 0 means dense feed-forward layers."""
    max_length: int = 256
    """Maximum number of tokens of prompt and completion together."""

    def with_experts(self, experts: int) -> ModelShape:
        """Return the shape with `experts` experts of half the feed-forward width, or the same shape for 0."""
        if experts == 0:
            return self
        return replace(self, experts=experts, intermediate_size=self.intermediate_size // 2)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `config.json` that depend on the sizes."""
        experts = {"num_experts": self.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        moe_fields = experts | {"moe_intermediate_size": self.intermediate_size} if self.experts else {}
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": True,
            **moe_fields,
        }

    def sketch(self, directory: Path) -> Path:
        """Create a directory with only a `config.json`, for checks of the layout before the model is built.

        Its vocabulary size is arbitrary: engines pad the vocabulary to a divisible size.
        """
        directory.mkdir()
        kind = "qwen3_moe" if self.experts else "qwen3"
        (directory / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 2048, **self.fields()}))
        return directory


@dataclass(frozen=True)
class EmbeddedRecipe:
    """Recipe of the model for the generated word problems."""

    levels: tuple[int, ...] = (2,)
    """Levels of the problems in the lessons."""
    lessons: str = "answers"
    """Kind of lesson, one of `rl_apps.embedded.curriculum.LESSONS`. The tokenizer includes its words."""
    shape: ModelShape = ModelShape()
    """Sizes of the model."""
    warm_up: WarmUp | None = field(default_factory=WarmUp)
    """Settings of the supervised warm-up, or None for random weights."""


@dataclass(frozen=True)
class ScratchRecipe:
    """Recipe of a random model for given texts."""

    vocab_size: int = 2048
    """Maximum vocabulary size of the byte-level BPE tokenizer."""
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
    """Return the directory of the model for the generated word problems.

    The model is built and warmed up if it is not cached.
    The lessons use problems of the training split of `WordProblems` with the same seed, so the held-out problems stay
    unseen.

    Args:
        seed: seed of the problems, the opinions about untaught verbs, and the weights.
        recipe: levels, sizes and warm-up; the default is the recipe of the demonstration.
        progress: called after each warm-up step; not called for a cached model.
        cache_dir: cache directory; the default is `default_cache_dir()`.
        say: called with a progress message; not called for a cached model.

    Returns:
        A directory that `AutoModelForCausalLM` and `AutoTokenizer` can load.

    Raises:
        ConfigError: a level does not exist.
        ModelError: the cache directory is not writable.
    """
    chosen = recipe or EmbeddedRecipe()
    words = words_of(chosen.lessons)
    ingredients = {"model": "word-problems", "seed": seed, "recipe": asdict(chosen), "words": words}

    def make(directory: Path) -> None:
        say("building the embedded model" + (" and warming it up" if chosen.warm_up else ""))
        tokenizer = word_problem_tokenizer(chosen.shape.max_length, words)
        model = random_model(chosen.shape, tokenizer, seed)
        if chosen.warm_up is not None:
            problems = WordProblems(seed=seed, levels=chosen.levels, size=chosen.warm_up.problems).problems
            warm_up(model, tokenizer, problems, LESSONS[chosen.lessons], chosen.warm_up, seed, progress)
        save(model, tokenizer, directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, sources()), make)


def prepare_from_scratch(
    texts: Iterable[str],
    seed: int,
    recipe: ScratchRecipe | None = None,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the directory of a random model with a byte-level BPE tokenizer trained on `texts`.

    The model is built if it is not cached.

    Args:
        texts: training texts of the tokenizer, for example the questions and answers of a training split.
        seed: seed of the weights.
        recipe: vocabulary size and sizes of the model.
        cache_dir: cache directory; the default is `default_cache_dir()`.
        say: called with a progress message; not called for a cached model.

    Returns:
        A directory that `AutoModelForCausalLM` and `AutoTokenizer` can load.

    Raises:
        DataError: `texts` is empty.
        ModelError: the cache directory is not writable.
    """
    chosen = recipe or ScratchRecipe()
    text_list = list(texts)
    ingredients = {"model": "from-scratch", "seed": seed, "recipe": asdict(chosen), "texts": text_list}

    def make(directory: Path) -> None:
        say("building a small random model, with a tokenizer trained on the data")
        tokenizer = trained_tokenizer(text_list, chosen.vocab_size, chosen.shape.max_length)
        save(random_model(chosen.shape, tokenizer, seed), tokenizer, directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, sources()), make)


def sources() -> list[Path]:
    """Return the source files that a cached model depends on. A change of any of them rebuilds the model."""
    return [*Path(__file__).parent.glob("*.py"), Path(rl_datasets.word_problems.__file__)]


def default_cache_dir() -> Path:
    """Return `$HF_HOME/rl/embedded` if `HF_HOME` is set, else `~/.cache/rl/embedded`."""
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rl" / "embedded"


def key_of(ingredients: Mapping[str, Any], sources: list[Path]) -> str:
    """Return a short hash of JSON values and of source files.

    Args:
        ingredients: arguments that the model depends on.
        sources: files that build the model from them.
    """
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode())
    for source in sorted(sources, key=lambda path: path.name):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def cached(cache_dir: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Return the cached directory of `key`; call `make` to fill it if it does not exist.

    `make` fills a temporary directory, and one rename moves it to its final path, so the cache never contains a partial
    model. If several processes build the same key at the same time, the directory of the first to finish is kept.

    Raises:
        ModelError: the cache directory is not writable.
    """
    final = cache_dir / key
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        (unfinished := cache_dir / f".{key}-{uuid.uuid4().hex}").mkdir()
    except OSError as error:
        raise ModelError(
            f"cannot cache the embedded model: {cache_dir} is not a writable directory ({error}). Set HF_HOME to a "
            "directory that you can write to."
        ) from error
    try:
        make(unfinished)
        follow_umask(unfinished)
        unfinished.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        get_logger("embedded").debug("another process built %s first", final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final


def random_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return a float32 model with random weights for the vocabulary of `tokenizer`.

    The state of torch's global random generator does not change.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

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
    model.generation_config = generation_config(tokenizer)
    return model


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Return the `generation_config.json` of a model: sampling at temperature 1 up to the end token."""
    from transformers import GenerationConfig

    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | ProcessorMixin, directory: Path) -> None:
    """Write weights, configs, tokenizer or processor, and chat template in Hugging Face format."""
    from transformers.utils import logging

    bars_enabled = logging.is_progress_bar_enabled()
    # A progress bar for one small file would break the caller's progress line.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    finally:
        if bars_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
