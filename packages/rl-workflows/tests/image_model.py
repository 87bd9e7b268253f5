"""Processors of tiny vision-language models, and engines that record the images of their requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from agent_model import Says, ScriptedEngine
from PIL import Image as Picture

from rl_contracts.images import Image, read_image
from rl_contracts.testing.vision_families import make_vision_model

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content or [] %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Template of the Qwen families with tools."""


def noise(width: int, height: int, seed: int) -> Image:
    """Return an image of random pixels."""
    pixels = random.Random(seed).randbytes(3 * width * height)
    return read_image(Picture.frombytes("RGB", (width, height), pixels))


def load_processor(family: str, directory: Path, tools: bool = False) -> Any:
    """Return the processor of a new tiny model; with `tools`, its template lists tools (Qwen families only)."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(make_vision_model(family, directory))
    if tools:
        processor.chat_template = processor.tokenizer.chat_template = TOOL_TEMPLATE
    return processor


def vision_engine(processor: Any, says: Says = lambda prompt: "red<|im_end|>") -> ScriptedEngine:
    """Return an engine with scripted completions."""
    return ScriptedEngine("", says, processor)


def user(*parts: str | Image) -> dict[str, Any]:
    """Return a user message of texts and images, the latter as data URLs."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.data_url}}
        for part in parts
    ]
    return {"role": "user", "content": content}
