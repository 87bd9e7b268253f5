"""Tiny vision-language models of the architecture Qwen2.5-VL, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_apps.embedded.prepare import cached, default_cache_dir, generation_config, key_of, save, sources
from rl_apps.embedded.tokenizer import IMAGE_TOKENS, trained_tokenizer

_KIND = "qwen2_5_vl"
_HEAD_DIM = 32
_POSITION_SECTIONS = [8, 4, 4]
"""Pairs of head dimensions that encode time, height and width; their sum is half of the head dimension."""


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a tiny Qwen2.5-VL model."""

    hidden_size: int = 64
    """Width of the residual stream of both the vision encoder and the decoder."""
    layers: int = 2
    """Number of decoder layers."""
    vision_layers: int = 1
    """Number of layers of the vision encoder."""
    patch_size: int = 14
    """Width of a patch in pixels. An image token covers 2 x 2 patches: a cell of a drawn scene."""
    max_pixels: int = 448 * 448
    """Maximum width * height of an image. Larger images are scaled down."""
    vocab_size: int = 2048
    """Maximum vocabulary size of the byte-level BPE tokenizer."""
    max_length: int = 1024
    """Maximum number of tokens of prompt and completion together, image tokens included."""

    def fields(self, vocab_size: int) -> dict[str, Any]:
        """Return the fields of `config.json` that depend on the sizes."""
        layer = {"hidden_size": self.hidden_size, "intermediate_size": 2 * self.hidden_size}
        heads = self.hidden_size // _HEAD_DIM
        text = {
            "vocab_size": vocab_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": self.max_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _POSITION_SECTIONS},
        }
        vision = {
            "depth": self.vision_layers,
            "num_heads": heads,
            "out_hidden_size": self.hidden_size,
            "patch_size": self.patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "fullatt_block_indexes": [*range(self.vision_layers)],
        }
        return {"text_config": {**layer, **text}, "vision_config": {**layer, **vision}}

    def sketch(self, directory: Path) -> Path:
        """Create a directory with only a `config.json`, for checks of the layout before the model is built."""
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": _KIND, **self.fields(self.vocab_size)}))
        return directory


def prepare_vision(
    texts: Iterable[str],
    seed: int,
    shape: VisionShape | None = None,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the directory of a random vision-language model with a byte-level BPE tokenizer trained on `texts`.

    The model is built if it is not cached. Arguments and errors are those of
    `rl_apps.embedded.prepare.prepare_from_scratch`.

    Returns:
        A directory that `AutoModelForImageTextToText` and `AutoProcessor` can load.
    """
    chosen, text_list = shape or VisionShape(), list(texts)
    ingredients = {"model": _KIND, "seed": seed, "shape": asdict(chosen), "texts": text_list}

    def make(directory: Path) -> None:
        say("building a small random vision-language model, with a tokenizer trained on the data")
        tokenizer = trained_tokenizer(text_list, chosen.vocab_size, chosen.max_length, IMAGE_TOKENS)
        save(random_vision_model(chosen, tokenizer, seed), vision_processor(chosen, tokenizer), directory)

    return cached(cache_dir or default_cache_dir(), key_of(ingredients, sources()), make)


def random_vision_model(shape: VisionShape, tokenizer: Any, seed: int) -> Any:
    """Return a float32 model with random weights for the vocabulary of `tokenizer`.

    The state of torch's global random generator does not change.
    """
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    tokens = dict(zip(names, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))
    fields = shape.fields(len(tokenizer))
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = CONFIG_MAPPING[_KIND](**tokens, **fields | {"text_config": fields["text_config"] | ends})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float()
    model.generation_config = generation_config(tokenizer)
    return model


def vision_processor(shape: VisionShape, tokenizer: Any) -> Any:
    """Return the processor of the models with this shape."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    sizes = {"patch_size": shape.patch_size, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": (2 * shape.patch_size) ** 2, "longest_edge": shape.max_pixels}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, size=limits),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )
