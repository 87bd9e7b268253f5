"""Rows of data sets as trajectories."""

from typing import Any

from rl_contracts.rendering import ChatRenderer
from rl_contracts.testing.chat_formats import make_chat_tokenizer
from rl_trainers.preference import preference_rows
from rl_trainers.supervised import supervised_rows

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def talk(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": answer}]


def test_rows_with_tools_show_them_in_the_prompt() -> None:
    tokenizer = make_chat_tokenizer("gemma3")
    renderer = ChatRenderer(tokenizer)

    rows = supervised_rows([{"messages": talk("Rain."), "tools": TOOLS}], renderer, 2048)
    rows += preference_rows([{"chosen": talk("Rain."), "rejected": talk("Sun."), "tools": TOOLS}], renderer, 2048)

    for row in rows:
        prompt = row.input_ids[: row.loss_mask.argmax()].tolist()
        assert prompt == renderer.render(talk("")[:1], TOOLS)
