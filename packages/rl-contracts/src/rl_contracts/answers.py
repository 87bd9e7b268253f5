"""From the tokens of an answer to the message that an agent is given: its text, its reasoning and its tool calls.

Models write tool calls in forms of their own. A tokenizer with a `response_template` says how to read its model's
(`transformers` does it); for the others there are the forms of a few families, found by what the chat template writes.
What is not well-formed stays text, so that the agent sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

from rl_contracts.config import require_choice
from rl_contracts.errors import ConfigError
from rl_contracts.reasoning import MARKS, split_reasoning
from rl_contracts.rendering import answer_text

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool."""
CALL_ID_LENGTH = 9
"""Letters and digits; templates of Mistral refuse other ids."""


def _hermes(text: str) -> tuple[str, list[Call]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen 2.5 and 3."""
    calls: list[Call] = []
    rest, left = "", text
    while True:
        before, opened, after = left.partition("<tool_call>")
        body, closed, following = after.partition("</tool_call>")
        rest += before
        if not (opened and closed):
            return rest + opened + body, calls
        read = _only(_objects(body))
        calls += read
        rest += "" if read else opened + body + closed
        left = following


def _mistral(text: str) -> tuple[str, list[Call]]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` once for each."""
    said, *written = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in written:
        name, args, body = part.partition("[ARGS]")
        found = [{"name": name.strip(), "arguments": _json(body)}] if args else _json(part)
        read = [call for call in map(_as_call, found) if call] if isinstance(found, list) else []
        if not read or len(read) < len(found):
            return text, []
        calls += read
    return said, calls


def _llama3(text: str) -> tuple[str, list[Call]]:
    """`{"name": ..., "parameters": {...}}` and nothing else, or several with semicolons between: Llama 3.1 to 3.3."""
    body = text.strip().removeprefix("<|python_tag|>")
    calls = _only(_objects(body))
    return ("", calls) if calls else (text, [])


FORMATS: dict[str, Callable[[str], tuple[str, list[Call]]] | None] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
    "transformers": None,
    "none": None,
}
"""Forms of tool calls: `(text) -> (text without them, calls)`. `transformers`: what the tokenizer's `response_template`
says of the whole answer. `none`: there are none."""
_SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": '"parameters": '}
"""What chat templates of a form write."""


class AnswerReader:
    """Reads the answers of one model.

    Args:
        tokenizer: a Hugging Face tokenizer.
        form: one of `FORMATS`; `auto`: by the tokenizer.
        stop_ids: tokens that end an answer and are not part of its text.

    Raises:
        ConfigError: there is no such form, or it is `transformers` and the tokenizer has no `response_template`.
    """

    def __init__(self, tokenizer: Any, form: str = "auto", stop_ids: Sequence[int] = ()) -> None:
        require_choice("endpoint.tool_calls", form, ("auto", *FORMATS))
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        described = bool(getattr(tokenizer, "response_template", None))
        if form == "auto":
            signs = (name for name, sign in _SIGNS.items() if sign in template)
            form = "transformers" if described else next(signs, "none")
        if form == "transformers" and not described:
            raise ConfigError(
                "endpoint.tool_calls=transformers: the tokenizer has no `response_template`; "
                f"choose one of {', '.join(name for name in FORMATS if name != form)}."
            )
        self.form = form
        """The form of tool calls."""
        self._thinks = any(end in template for _, end in MARKS)

    @property
    def reads_tools(self) -> bool:
        """Whether tool calls can be read at all."""
        return self.form != "none"

    def text(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Text of an answer without the token that ended it, and without what follows from the first stop string on."""
        text, ended = answer_text(self._tokenizer, ids, self._stop_ids), len(ids) > 0 and ids[-1] in self._stop_ids
        ends = [] if ended else [at for end in stop if (at := text.find(end)) >= 0]
        return text[: min(ends)] if ends else text

    def final_text(self, ids: Sequence[int], opening: str) -> str:
        """What an answer says after its reasoning, without special tokens; empty where the reasoning does not end.

        Args:
            ids: the answer.
            opening: text of the prompt since the assistant's turn was opened.
        """
        text = answer_text(self._tokenizer, ids, self._stop_ids)
        reasoning = ""
        if getattr(self._tokenizer, "response_template", None):
            reasoning, text, _ = self._described(text, opening, None)
        final = text if reasoning else split_reasoning(text, opening)[1]
        return self._special_tokens.sub("", final)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = {*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def message(
        self, prompt_ids: Sequence[int], opening: str, ids: Sequence[int], tools: Any = None, stop: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The assistant message of an answer.

        Args:
            prompt_ids: what was answered; ids of tool calls follow from it and the answer.
            opening: text of the prompt since the assistant's turn was opened; some templates begin to reason there.
            ids: the answer.
            tools: what the model may call, as in the request; without any, no text counts as a call.
            stop: strings that ended the answer.
        """
        text = self.text(ids, stop)
        if self.form == "transformers":
            found = self._described(text, opening, tools)
        else:
            found = self._read(text, opening, bool(tools))
        reasoning, content, calls = found
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            digest = blake2b(json.dumps([list(prompt_ids), list(ids)]).encode(), digest_size=8)
            message["tool_calls"] = [
                {
                    "id": blake2b(b"%d" % index, key=digest.digest()).hexdigest()[:CALL_ID_LENGTH],
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(calls)
            ]
        return message

    def _read(self, text: str, opening: str, tools: bool) -> tuple[str, str, list[Call]]:
        reasoning, text = split_reasoning(text, opening) if self._thinks else ("", text)
        read = FORMATS[self.form]
        if read is None or not tools:
            return reasoning, text, []
        content, calls = read(text)
        return reasoning, content.strip() if calls else text, calls

    def _described(self, text: str, opening: str, tools: Any) -> tuple[str, str, list[Call]]:
        try:
            found = self._tokenizer.parse_response(text, prefix=opening, tools=list(tools) if tools else None)
        except ValueError:
            return "", text, []
        told = found.get("tool_calls") or []
        calls = [call for call in (_as_call(entry.get("function", entry)) for entry in told) if call]
        if len(calls) < len(told) or (told and not tools):
            return "", text, []
        reasoning = found.get("reasoning_content") or found.get("thinking") or found.get("reasoning") or ""
        return reasoning, found.get("content") or "", calls


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_call(found: Any) -> Call | None:
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def _objects(text: str) -> Iterator[Any]:
    """JSON values that a text is made of, with blanks or semicolons between; None where it is something else."""
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        text = text[end:].lstrip("; \t\r\n")


def _only(found: Iterator[Any]) -> list[Call]:
    """The calls, if everything is one."""
    values = list(found)
    calls = [call for call in map(_as_call, values) if call]
    return calls if len(calls) == len(values) else []
