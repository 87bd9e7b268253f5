"""Run tasks of an environment of the `verifiers` package (0.4 or later), as a separate program.

The program imports `verifiers` and nothing of this project. Run it with `python -P`, which keeps the files in this
folder out of the import path.

The argument is the environment's configuration as JSON. Each line of stdin starts an episode. It is a JSON object with
`base_url`, `api_key`, and `data`, whose `task` is the number of a task. Each line of stdout is a result: reward and
metrics of the task. The program ends when stdin is closed. With `--tasks` it writes one example per task instead, for
`data.name=chat`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY = "VERIFIERS_EPISODE_KEY"


def example_of_task(task: vf.Task[Any]) -> dict[str, Any]:
    """Return the example of a task. The agent uses only its number; the messages are for length checks and display."""
    messages = [{"role": "user", "content": task.data.prompt_text}]
    if task.data.system_prompt:
        messages.insert(0, {"role": "system", "content": task.data.system_prompt})
    return {"task": task.data.idx, "messages": messages}


async def run_episode(env: vf.Env[Any], task: vf.Task[Any], base_url: str, api_key: str) -> dict[str, float]:
    """Run one episode; return its reward and metrics, each summed over the traces of trainable agents.

    Raises:
        SystemExit: the episode failed.
    """
    os.environ[KEY] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
    async with env.serving():  # per episode: `serving` caches the client, and each episode has a different key
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("\n".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    result = {"reward": 0.0}
    for trace in episode.traces:
        if trace.agent.trainable:
            result["reward"] += trace.reward
            for name, value in trace.metrics.items():
                if value is not None:
                    result[name] = result.get(name, 0.0) + float(value)
    return result


def write_json_line(value: dict[str, Any]) -> None:
    """Write a value to stdout as one line of JSON."""
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


async def main(config: str, *flags: str) -> None:
    """Run the program with its command-line arguments."""
    env = load_environment(resolve_env_config(json.loads(config)))
    if flags:
        for task in env.taskset:
            write_json_line(example_of_task(task))
        return
    tasks: dict[int, vf.Task[Any]] = {}
    unread = iter(env.taskset)
    for line in sys.stdin:
        request = json.loads(line)
        number = int(request["data"]["task"])
        for task in itertools.islice(unread, max(0, number + 1 - len(tasks))):
            tasks[task.data.idx] = task
        if number not in tasks:
            sys.exit(
                f"task {number}: expected the number of one of the taskset's {len(tasks)} tasks; create the examples "
                "with --tasks"
            )
        write_json_line(await run_episode(env, tasks[number], request["base_url"], request["api_key"]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
