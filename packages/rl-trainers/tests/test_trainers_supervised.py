"""Trajectories from the examples of data sets."""

from typing import Any

import pytest

from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.errors import DataError
from rl_contracts.testing.chat_formats import make_chat_tokenizer
from rl_trainers.learners.preference import preference_sequences
from rl_trainers.learners.supervised import supervised_sequences

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def talk(completion: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": completion}]


def test_sequences_of_rows_with_tools_have_them_in_prompt() -> None:
    tokenizer = make_chat_tokenizer("gemma3")
    renderer = ChatRenderer(tokenizer)

    rows = supervised_sequences([{"messages": talk("Rain."), "tools": TOOLS}], renderer, 2048)
    rows += preference_sequences([{"chosen": talk("Rain."), "rejected": talk("Sun."), "tools": TOOLS}], renderer, 2048)

    for row in rows:
        prompt = row.input_ids[: row.loss_mask.argmax()].tolist()
        assert prompt == renderer.render(talk("")[:1], TOOLS)


def test_sequences_of_row_with_unrendered_content_are_rejected() -> None:
    renderer = ChatRenderer(make_chat_tokenizer("gemma3"))
    hidden = [
        {"role": "user", "content": "Weather?"},
        {"role": "developer", "content": "Be brief."},
        *talk("Rain.")[1:],
    ]

    for rows, render in (
        ([{"prompt_id": 7, "messages": hidden}], supervised_sequences),
        ([{"prompt_id": 7, "chosen": hidden, "rejected": talk("Sun.")}], preference_sequences),
    ):
        with pytest.raises(DataError, match=r"example 7: .*Be brief"):
            render(rows, renderer, 2048)
