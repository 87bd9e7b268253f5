"""Check that a rendered text contains all of a conversation."""

import json
from typing import Any

import pytest

from rl_contracts.chat.template_check import require_rendered
from rl_contracts.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'Say  "hi"\nin Ulm: \\frac é'}
CALL = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"town": 'U "x"', "days": [1, 2.5], "now": True}}}],
}
RESULT = {"role": "tool", "content": "12"}
ASSISTANT = {"role": "assistant", "content": "It is 12.", "reasoning_content": "So it is."}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CONVERSATION = [SYSTEM, USER, CALL, RESULT, ASSISTANT]


def text(*messages: dict[str, Any], escape: bool = False, python: bool = False) -> str:
    """Render messages as a template might."""
    parts = []
    for message in messages:
        content = json.dumps(message["content"]) if escape else message["content"].strip()
        calls = [call["function"] for call in message.get("tool_calls", ())]
        parts += [message["role"], message.get("reasoning_content", ""), content]
        parts += [f"{call['name']}({call['arguments']})" if python else json.dumps(call) for call in calls]
    return "|".join(parts)


@pytest.mark.parametrize("form", [{}, {"escape": True}, {"python": True}])
def test_require_rendered_complete_conversation_passes(form: dict[str, bool]) -> None:
    require_rendered(CONVERSATION, TOOLS, text(*CONVERSATION, **form))


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        (CONVERSATION, text(USER, SYSTEM, CALL, RESULT, ASSISTANT)),
        (
            CONVERSATION,
            text(SYSTEM, USER, {**CALL, "content": ""}, {**RESULT, "content": "12 Let me look."}, ASSISTANT),
        ),
        ([USER, ASSISTANT, USER, ASSISTANT], text(USER, {**ASSISTANT, "reasoning_content": ""}, USER, ASSISTANT)),
        (
            [USER, {**ASSISTANT, "content": "<think>\nso</think>\n\nYes."}, USER, ASSISTANT],
            text(USER, {"role": "assistant", "content": "Yes."}, USER, ASSISTANT),
        ),
        ([{**USER, "content": [{"type": "text", "text": "Hi"}]}, RESULT], text({**USER, "content": "Hi"}, RESULT)),
    ],
)
def test_require_rendered_moved_system_and_old_reasoning_pass(messages: Any, rendered: str) -> None:
    require_rendered(messages, None, rendered)


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        (CONVERSATION, text(*CONVERSATION[1:])),
        (CONVERSATION, text(SYSTEM, USER, CALL, ASSISTANT)),
        (CONVERSATION, text(SYSTEM, USER, {**CALL, "content": ""}, RESULT, ASSISTANT)),
        (CONVERSATION, text(*CONVERSATION).replace('"days"', '"hours"')),
        (CONVERSATION, text(*CONVERSATION).replace("2.5", "3")),
        (CONVERSATION, text(*CONVERSATION).replace("So it is.", "")),
        ([USER, {**ASSISTANT, "content": "<think>\nso</think>\n\nYes."}], text(USER, {**ASSISTANT, "content": "Yes."})),
        ([USER, {**ASSISTANT, "content": ""}, USER], text(USER, ASSISTANT)),
    ],
)
def test_require_rendered_missing_text_raises_data_error(messages: Any, rendered: str) -> None:
    with pytest.raises(DataError, match="message"):
        require_rendered(messages, None, rendered)


def test_require_rendered_missing_tool_raises_data_error() -> None:
    with pytest.raises(DataError, match="'stock'"):
        require_rendered(CONVERSATION, [{"type": "function", "function": {"name": "stock"}}], text(*CONVERSATION))
