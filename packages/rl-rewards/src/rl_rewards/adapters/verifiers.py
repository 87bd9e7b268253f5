"""Adapters for reward functions of the `verifiers` package.

Since version 0.4 a reward function of verifiers reads the `trace` of an episode, and is a method of a task or is named
in the settings of one. Before, it read `prompt`, `completion` and `answer`, and was part of a `Rubric`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from rl_contracts.reward import CompositeReward
from rl_rewards.adapters.examples import Messages, completion_text, convert, example_of, name_of, prompt_text

__all__ = ["for_verifiers", "from_verifiers"]


def for_verifiers(reward: Callable[..., float | Awaitable[float]]) -> Callable[..., Awaitable[float]]:
    """Return a reward function for a task of verifiers, or for a `Rubric` of verifiers before 0.4.

    The fields of the task's data (in a `Rubric`, the columns of the data set) are the example; the last reply is the
    completion.

    Args:
        reward: a `RewardFunction`, plain or asynchronous.
    """

    async def score(
        task: Any = None, trace: Any = None, prompt: Messages = "", completion: Messages = "", **example: Any
    ) -> float:
        if trace is not None:
            data = trace.task.data
            prompt, completion, example = data.prompt_text, trace.last_reply, dict(data)
        value = reward(prompt_text(prompt), completion_text(completion), [], [], **example_of(example))
        return float(await value if inspect.isawaitable(value) else value)

    score.__name__ = name_of(reward)
    return score


def from_verifiers(function: Callable[..., Any]) -> Callable[..., float | Awaitable[float]]:
    """Return a `RewardFunction` that calls a reward function of verifiers.

    The function gets the arguments that it names: `task` and `trace`, with the attributes `trace.last_reply`,
    `trace.messages`, `trace.info` and `trace.task.data`; or, as in a `Rubric`, `prompt`, `completion`, `answer`,
    `info`, `state` and the other fields of the example. A method of a task class gets a `self` whose only attribute is
    `data`. Keyed scores become a `CompositeReward`.

    Args:
        function: plain or asynchronous reward function, or a method of a task class.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def score(
        prompt: str,
        completions: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        final_text: str | None = None,
        **data: Any,
    ) -> float | Awaitable[float]:
        reply = completions if final_text is None else final_text
        available = _arguments(prompt, reply.strip(), example_of(data))
        owner = {"self": SimpleNamespace(data=available["task"])}
        chosen = {name: value for name, value in (available | owner).items() if name in parameters}
        return convert(function(**(available | chosen if takes_all else chosen)), _reward)

    score.__name__ = name_of(function)
    return score


def _arguments(prompt: str, reply: str, example: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all arguments that a reward function may name."""
    prompts, completion = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": reply}]
    info = example.get("info", {})
    task = SimpleNamespace(**{**example, "prompt": prompt, "prompt_text": prompt})
    trace = SimpleNamespace(
        task=SimpleNamespace(data=task), messages=[*prompts, *completion], last_reply=reply, info=info
    )
    values = {"prompt": prompts, "completion": completion, "answer": example.get("answer", ""), "info": info}
    return {
        **example,
        **values,
        "state": {**example, **values},
        "task": task,
        "trace": trace,
    }


def _reward(value: Any) -> float:
    return CompositeReward(**value) if isinstance(value, Mapping) else float(value)
