"""Tokenizers with the chat formats of seven model families, which differ in turns, reasoning, tools and tool calls.

The chat templates are written for this project from the public descriptions of the formats. Each has its difficulty:

- `qwen3` shows reasoning only after the last user turn, and puts the results of parallel calls into one turn.
- `llama3` shows no reasoning, and puts the tools into the first user turn.
- `gemma3` has neither a system turn nor tool turns: the user turn contains both.
- `mistral` does not open the assistant turn, and moves the tools before the last user turn.
- `qwen3_coder` is `qwen3` with calls in XML, whose values have no types.
- `glm45` also writes calls in XML, and only the token that opens the next turn ends an assistant turn.
- `gpt_oss` writes each call as a message to the tool, and ends it with a different token than a final message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rl_contracts.config import require_choice

__all__ = ["CHAT_FORMATS", "TOOL_FORMATS", "format_completion", "make_chat_tokenizer"]

_JSON_CALL = """\
{%- macro called(call) %}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endmacro %}"""

_XML_CALL = """\
{%- macro called(call) %}<tool_call>
<function={{ call.name }}>
{% for key, value in call.arguments.items() %}<parameter={{ key }}>
{{ value if value is string or value is not iterable else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endmacro %}"""

_QWEN3 = """\
{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{%- set shown %}{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endset %}
{{- turn('system', system ~ '\n\n# Tools\n<tools>\n' ~ shown ~ '</tools>\n\nCall one so:\n'
    ~ called({'name': '...', 'arguments': {}})) }}
{%- elif system %}{{ turn('system', system) }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ turn('user', m.content) }}
{%- elif m.role == 'assistant' %}
{%- set reply = namespace(text=(m.content or '').strip('\n')) %}
{%- if loop.index0 > last.question and (loop.last or m.reasoning_content) %}
{%- set reply.text = '<think>\n' ~ (m.reasoning_content or '').strip('\n') ~ '\n</think>\n\n' ~ reply.text %}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- set reply.text = reply.text ~ ('\n' if reply.text and not reply.text.endswith('\n\n') else '')
    ~ called(call.function) %}
{%- endfor %}{{ turn('assistant', reply.text) }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_LLAMA3 = """\
{%- macro open(role) %}<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{{- '<|begin_of_text|>' }}
{%- set first = namespace(question=true) %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ open('system') ~ m.content.strip() }}<|eot_id|>
{%- elif m.role == 'user' %}{{ open('user') }}
{%- if tools and first.question %}{{ 'Answer with {"name": name, "parameters": arguments} to call one.\n\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) ~ '\n\n' }}{% endfor %}{% endif %}
{%- set first.question = false %}{{ m.content.strip() }}<|eot_id|>
{%- elif m.role == 'assistant' %}{{ open('assistant') }}
{%- if m.tool_calls %}
{%- for call in m.tool_calls %}{{ '; ' if not loop.first }}{"name": "{{ call.function.name }}", "parameters": {{
    call.function.arguments | tojson }}}{% endfor %}
{%- else %}{{ m.content.strip() }}{% endif %}<|eot_id|>
{%- elif m.role == 'tool' %}{{ open('ipython') ~ m.content | tojson }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ open('assistant') }}{% endif %}"""

_GEMMA3 = """\
{{- '<bos>' }}
{%- set before = namespace(text='') %}
{%- if messages[0].role == 'system' %}{% set before.text = messages[0].content ~ '\n\n' %}{% endif %}
{%- if tools %}{% set before.text = before.text
    ~ 'Tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>: '
    ~ tools | tojson ~ '\n\n' %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<start_of_turn>user
{{ before.text ~ m.content | trim }}<end_of_turn>
{% set before.text = '' %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<start_of_turn>user
{% endif %}<tool_response>{{ m.content | trim }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<end_of_turn>
{% endif %}
{%- elif m.role == 'assistant' %}<start_of_turn>model
{{ (m.content or '') | trim }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
    call.function.arguments | tojson }}}</tool_call>{% endfor %}<end_of_turn>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_MISTRAL = """\
{{- '<s>' }}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.index0 == last.question and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]
{{- ' ' ~ (system if loop.index0 == last.question else '') ~ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{{- '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{{ ', ' if not loop.first }}{"name": "{{ call.function.name }}", "arguments": {{
    call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% endfor %}]</s>
{%- else %}{{ ' ' ~ m.content | trim }}</s>{% endif %}
{%- endif %}
{%- endfor %}"""

_GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}<|system|>
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
<think></think>{{ '\n' ~ m.content if m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' ~ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_GPT_OSS = """\
{%- macro message(role, header, text) %}<|start|>{{ role }}{{ header }}<|message|>{{ text }}{% endmacro %}
{%- if tools %}{{ message('developer', '', tools | tojson) }}<|end|>{% endif %}
{%- set last = namespace(tool='') %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.content %}{{ message('assistant', '<|channel|>analysis', m.content) }}<|end|>{% endif %}
{%- for call in m.tool_calls %}{% set last.tool = 'functions.' ~ call.function.name %}
{{- message('assistant to=' ~ last.tool, '<|channel|>commentary json', call.function.arguments | tojson) }}<|call|>
{%- endfor %}
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- elif m.role == 'tool' %}{{ message(last.tool ~ ' to=assistant', '<|channel|>commentary', m.content) }}<|end|>
{%- else %}{{ message(m.role, '', m.content) }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

_FORMATS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "qwen3": (_JSON_CALL + _QWEN3, "<|endoftext|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "qwen3_coder": (_XML_CALL + _QWEN3, "<|endoftext|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "llama3": (
        _LLAMA3,
        "<|end_of_text|>",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma3": (_GEMMA3, "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "mistral": (
        _MISTRAL,
        "</s>",
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
        ),
    ),
    "glm45": (
        _GLM45,
        "<|endoftext|>",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gpt_oss": (
        _GPT_OSS,
        "<|return|>",
        ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    ),
}
"""Chat template, end-of-text token and special tokens of each family."""
TOOL_FORMATS = tuple(_FORMATS)
"""Names of all families."""
CHAT_FORMATS = tuple(name for name in _FORMATS if name not in ("glm45", "gpt_oss"))
"""Families that end every assistant turn with the token that the template shows after a message."""


@cache
def make_chat_tokenizer(name: str) -> Any:
    """Return a byte-level BPE tokenizer with the special tokens and chat template of a family.

    It has at most 400 tokens, and all callers share it. Its merges come from English, JSON and numbers, so that most
    texts have several encodings.

    Args:
        name: one of `TOOL_FORMATS`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    require_choice("format", name, TOOL_FORMATS)
    template, end, special = _FORMATS[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = 'user assistant system tool the question what is it? {"name": "add", "arguments": {"a": 12, "b": 345}} \n\n'
    core.train_from_iterator([text + "tool_call tool_response think about the answer\n\n"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=special[0])
    tokenizer.chat_template = template
    return tokenizer


def format_completion(
    name: str, content: str = "", calls: Sequence[Mapping[str, Any]] = (), reasoning: str = ""
) -> str:
    """Return the text that a model of a family generates after its prompt, up to the end of its turn.

    Args:
        name: one of `TOOL_FORMATS`.
        content: text of the message.
        calls: tool calls, objects with `name` and `arguments`.
        reasoning: reasoning of `qwen3`, `qwen3_coder` and `glm45`; the other families write none.
    """
    if name == "mistral":
        return "[TOOL_CALLS]" + json.dumps(list(calls)) + "</s>" if calls else f" {content}</s>"
    if name == "llama3":
        parts = (json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in calls)
        return ("; ".join(parts) if calls else content) + "<|eot_id|>"
    if name == "gpt_oss":
        if not calls:
            return f"<|channel|>final<|message|>{content}<|return|>"
        sent = [
            f" to=functions.{call['name']} <|constrain|>json<|message|>{json.dumps(call['arguments'])}<|call|>"
            for call in calls
        ]
        called = "<|start|>assistant".join("<|channel|>commentary" + message for message in sent)
        return f"<|channel|>analysis<|message|>{content}<|end|><|start|>assistant{called}" if content else called
    if name in ("qwen3_coder", "glm45"):
        shown = [_in_xml(name, call) for call in calls]
    else:
        shown = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
    if name == "gemma3":
        return content + "".join(f"<tool_call>{call}</tool_call>" for call in shown) + "<end_of_turn>"
    if name == "glm45":
        called = "".join(f"\n<tool_call>{call}</tool_call>" for call in shown)
        return f"\n<think>{reasoning}</think>{content and chr(10)}{content}{called}"
    called = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in shown)
    return f"<think>\n{reasoning}\n</think>\n\n{content}{chr(10) if content and called else ''}{called}<|im_end|>"


def _in_xml(name: str, call: Mapping[str, Any]) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in call["arguments"].items()}
    if name == "glm45":
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
        return f"{call['name']}\n" + "".join(pairs)
    parameters = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={call['name']}>\n" + "".join(parameters) + "</function>"
