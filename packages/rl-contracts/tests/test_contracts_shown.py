"""Whether a text shows all of a conversation."""

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
ANSWER = {"role": "assistant", "content": "It is 12.", "reasoning_content": "So it is."}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
TALK = [SYSTEM, USER, CALL, RESULT, ANSWER]


def text(*messages: dict[str, Any], escape: bool = False, python: bool = False) -> str:
    """Messages as a template may write them."""
    parts = []
    for message in messages:
        content = json.dumps(message["content"]) if escape else message["content"].strip()
        calls = [call["function"] for call in message.get("tool_calls", ())]
        parts += [message["role"], message.get("reasoning_content", ""), content]
        parts += [f"{call['name']}({call['arguments']})" if python else json.dumps(call) for call in calls]
    return "|".join(parts)


@pytest.mark.parametrize("form", [{}, {"escape": True}, {"python": True}])
def test_require_shown_conversation_that_is_shown_whole_passes(form: dict[str, bool]) -> None:
    require_rendered(TALK, TOOLS, text(*TALK, **form))


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (TALK, text(USER, SYSTEM, CALL, RESULT, ANSWER)),
        (TALK, text(SYSTEM, USER, {**CALL, "content": ""}, {**RESULT, "content": "12 Let me look."}, ANSWER)),
        ([USER, ANSWER, USER, ANSWER], text(USER, {**ANSWER, "reasoning_content": ""}, USER, ANSWER)),
        (
            [USER, {**ANSWER, "content": "<think>\nso</think>\n\nYes."}, USER, ANSWER],
            text(USER, {"role": "assistant", "content": "Yes."}, USER, ANSWER),
        ),
        ([{**USER, "content": [{"type": "text", "text": "Hi"}]}, RESULT], text({**USER, "content": "Hi"}, RESULT)),
    ],
)
def test_require_shown_moved_system_text_and_old_reasoning_pass(messages: Any, shown: str) -> None:
    require_rendered(messages, None, shown)


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (TALK, text(*TALK[1:])),
        (TALK, text(SYSTEM, USER, CALL, ANSWER)),
        (TALK, text(SYSTEM, USER, {**CALL, "tool_calls": []}, RESULT, ANSWER)),
        (TALK, text(SYSTEM, USER, {**CALL, "content": ""}, RESULT, ANSWER)),
        (TALK, text(*TALK).replace('"days"', '"hours"')),
        (TALK, text(*TALK).replace("2.5", "3")),
        (TALK, text(*TALK).replace("true", "")),
        (TALK, text(*TALK).replace("So it is.", "")),
        ([USER, {**ANSWER, "content": "<think>\nso</think>\n\nYes."}], text(USER, {**ANSWER, "content": "Yes."})),
        ([USER, {**ANSWER, "content": ""}, USER], text(USER, ANSWER)),
    ],
)
def test_require_shown_missing_part_of_a_message_is_rejected(messages: Any, shown: str) -> None:
    with pytest.raises(DataError, match="message"):
        require_rendered(messages, None, shown)


def test_require_shown_missing_tool_is_rejected() -> None:
    with pytest.raises(DataError, match="'stock'"):
        require_rendered(TALK, [{"type": "function", "function": {"name": "stock"}}], text(*TALK))
