"""Parse the tokens of a completion into an assistant message: text, reasoning and tool calls.

Each model family writes tool calls in its own format. `transformers` parses them if the tokenizer has a
`response_template`. Otherwise `rl_workflows.agents.tool_calls` parses them. It detects the format from a sample call
that the chat template renders. A malformed call stays in the text, so that the agent sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

from rl_contracts.chat.reasoning import MARKS, split_reasoning
from rl_contracts.chat.rendering import completion_text
from rl_contracts.config import require_choice
from rl_contracts.errors import ConfigError
from rl_workflows.agents.tool_calls import FORMATS, Call, detect_format, parse_call

CALL_ID_LENGTH = 9
"""Length of the id of a tool call. Ids consist of letters and digits; chat templates of Mistral reject other ids."""


class MessageParser:
    """Parser of the completions of one model.

    Args:
        tokenizer: a Hugging Face tokenizer.
        form: a key of `rl_workflows.agents.tool_calls.FORMATS`, or `auto` for the format that the chat template
            renders.
        stop_ids: tokens that end a completion and are not part of its text.

    Raises:
        ConfigError: the form is unknown, or it is `transformers` and the tokenizer has no `response_template`.
    """

    def __init__(self, tokenizer: Any, form: str = "auto", stop_ids: Sequence[int] = ()) -> None:
        require_choice("endpoint.tool_calls", form, ("auto", *FORMATS))
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        has_response_template = bool(getattr(tokenizer, "response_template", None))
        self._has_reasoning = any(end_mark in template for _, end_mark in MARKS)
        if form == "auto":
            form = (
                "transformers"
                if has_response_template
                else detect_format(tokenizer, lambda text: self._split(text, "")[1])
            )
        if form == "transformers" and not has_response_template:
            raise ConfigError(
                "endpoint.tool_calls=transformers: the tokenizer has no `response_template`; "
                f"choose one of {', '.join(name for name in FORMATS if name != form)}."
            )
        self.form = form
        """Format of tool calls."""

    @property
    def reads_tools(self) -> bool:
        """True if the format of tool calls is known, so that they can be parsed."""
        return self.form != "none"

    def text(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Return the text of a completion before its final stop token, or before the first stop string."""
        text, ended = completion_text(self._tokenizer, ids, self._stop_ids), len(ids) > 0 and ids[-1] in self._stop_ids
        positions = [] if ended else [at for string in stop if (at := text.find(string)) >= 0]
        return text[: min(positions)] if positions else text

    def final_text(self, ids: Sequence[int], opening: str) -> str:
        """Return the text of a completion after its reasoning, without special tokens.

        The result is empty if the reasoning does not end.

        Args:
            ids: the completion.
            opening: end of the prompt, from the opening of the assistant's turn.
        """
        text = completion_text(self._tokenizer, ids, self._stop_ids)
        reasoning = content = ""
        if getattr(self._tokenizer, "response_template", None):
            reasoning, content, _ = self._parse_with_template(text, opening, None)
        final = content if reasoning else split_reasoning(text, opening)[1]
        return self._special_tokens.sub("", final)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = {*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def message(
        self, prompt_ids: Sequence[int], opening: str, ids: Sequence[int], tools: Any = None, stop: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the assistant message of a completion.

        Args:
            prompt_ids: the prompt. Ids of tool calls are digests of prompt and completion.
            opening: last part of the prompt, which opens the assistant's turn. Some templates also open the reasoning
                in it.
            ids: the completion.
            tools: tools of the request. Without tools, no text is parsed as a call.
            stop: stop strings of the request.
        """
        text = self.text(ids, stop)
        if self.form == "transformers":
            parsed = self._parse_with_template(text, opening, tools)
        else:
            parsed = self._parse_with_format(text, opening, tools)
        reasoning, content, calls = parsed
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

    def _parse_with_format(self, text: str, opening: str, tools: Any) -> tuple[str, str, list[Call]]:
        reasoning, text = self._split(text, opening)
        parse = FORMATS[self.form]
        if parse is None or not tools:
            return reasoning, text, []
        content, calls = parse(text, list(tools))
        return reasoning, content.strip() if calls else text, calls

    def _split(self, text: str, opening: str) -> tuple[str, str]:
        return split_reasoning(text, opening) if self._has_reasoning else ("", text)

    def _parse_with_template(self, text: str, opening: str, tools: Any) -> tuple[str, str, list[Call]]:
        try:
            parsed = self._tokenizer.parse_response(text, prefix=opening, tools=list(tools) if tools else None)
        except ValueError:
            return "", text, []
        entries = parsed.get("tool_calls") or []
        calls = [call for call in (parse_call(entry.get("function", entry)) for entry in entries) if call]
        if len(calls) < len(entries) or (entries and not tools):
            return "", text, []
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or parsed.get("reasoning") or ""
        return reasoning, parsed.get("content") or "", calls
