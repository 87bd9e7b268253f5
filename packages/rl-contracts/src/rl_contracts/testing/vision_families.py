"""Tiny vision-language models of transformers with their processors, for tests of engines and servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _qwen(kind: str, tokenizer: Any, **vision: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor
    from transformers.models.auto.processing_auto import processor_class_from_name

    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"size": {"shortest_edge": 8 * 8, "longest_edge": 40 * 40}}
    images = Qwen2VLImageProcessor(**sizes, **limits)
    processor_class: Any = processor_class_from_name(kind)
    processor = processor_class(
        image_processor=images, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor(**sizes)
    )
    config = {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 2,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    return config, processor


def _qwen2_vl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    return _qwen("Qwen2VLProcessor", tokenizer, embed_dim=32, hidden_size=32, mlp_ratio=2)


def _qwen2_5_vl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    return _qwen(
        "Qwen2_5_VLProcessor",
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        window_size=16,
        fullatt_block_indexes=[1],
    )


def _qwen3_vl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    return _qwen(
        "Qwen3VLProcessor",
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
    )


def _gemma3(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": 16, "width": 16})
    processor = Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)
    config = {
        "text_config": {
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**_VISION, "image_size": 16, "patch_size": 4},
        "mm_tokens_per_image": 4,
        "image_token_index": tokenizer.image_token_id,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
    }
    return config, processor


def _idefics3(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    images = Idefics3ImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True
    )
    processor = Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4)
    config = {
        "text_config": {"model_type": "llama"},
        "vision_config": {**_VISION, "image_size": 16, "patch_size": 4},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "pad_token_id": 0,
    }
    return config, processor


def _internvl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    images = GotOcr2ImageProcessor(size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4)
    processor = InternVLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=InternVLVideoProcessor(), image_seq_length=4
    )
    config = {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": tokenizer.context_image_token_id,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
    }
    return config, processor


def _llava_onevision(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    grid = [[16, 16], [16, 32], [32, 16]]
    images = LlavaOnevisionImageProcessor(size={"height": 16, "width": 16}, image_grid_pinpoints=grid)
    processor = LlavaOnevisionProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    config = {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "video_token_index": tokenizer.convert_tokens_to_ids("<video>"),
        "image_grid_pinpoints": grid,
        "vision_feature_layer": -1,
    }
    return config, processor


_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
VISION_FAMILIES: dict[str, tuple[Callable[[Any], tuple[dict[str, Any], Any]], str, Sequence[str] | dict[str, str]]] = {
    "qwen2_vl": (_qwen2_vl, _QWEN_MARK, _QWEN_TOKENS),
    "qwen2_5_vl": (_qwen2_5_vl, _QWEN_MARK, _QWEN_TOKENS),
    "qwen3_vl": (_qwen3_vl, _QWEN_MARK, _QWEN_TOKENS),
    "gemma3": (_gemma3, "<start_of_image>", _GEMMA_TOKENS),
    "idefics3": (_idefics3, "<image>", _IDEFICS_TOKENS),
    "internvl": (_internvl, "<IMG_CONTEXT>", _INTERNVL_TOKENS),
    "llava_onevision": (_llava_onevision, "<image>", ("<image>", "<video>")),
}
"""Configuration and processor of each family, its mark of an image in a chat template, and its special tokens, with the
names of those that its processor reads as attributes of the tokenizer."""


def make_vision_model(family: str, directory: Path, seed: int = 0, **text: Any) -> Path:
    """Write a random model of a family with its processor, tokenizer and chat template, and return its directory.

    Args:
        family: key of `VISION_FAMILIES`.
        directory: directory of the model.
        seed: seed of the weights.
        **text: values for the configuration of the language model, such as `head_dim`.
    """
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parts, mark, tokens = VISION_FAMILIES[family]
    tokenizer = _tokenizer(tokens, _TEMPLATE.replace("IMAGE", mark))
    settings, processor = parts(tokenizer)
    settings["text_config"] = {**_TEXT, "vocab_size": len(tokenizer), **settings["text_config"], **text}
    config = CONFIG_MAPPING[family](**settings)
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # large enough that each component affects the outputs
                parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer(tokens: Sequence[str] | dict[str, str], template: str) -> Any:
    """Return a tokenizer of bytes with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    named = tokens if isinstance(tokens, dict) else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>", extra_special_tokens=named
    )
    unnamed = [] if named else [*tokens]
    tokenizer.add_tokens(["<|im_start|>", *unnamed], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer
