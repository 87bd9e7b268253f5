"""An agent: any program that calls the OpenAI API

`math-agent` trains an agent that may use a calculator. An agent is a loop around the OpenAI client, without code for
tokens or training. This program trains its own agent.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_contracts.workflow import AgentWorkflow
from rl_workflows.agents.calculator import calculator


# 1. A tool.
# A tool is a function with type annotations and a docstring. The prompt shows both, and the model calls it by name.
def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: For example `(2 + 3) * 4`.
    """
    return calculator(expression)


# 2. The agent.
# Three things make the agent trainable: its calls go to `base_url`, they use the given key, and `run` returns the
# reward of the episode.
class Reckoner(AgentWorkflow):
    def __init__(self, reward):
        from transformers.utils import get_json_schema

        self.reward, self.tools = reward, [get_json_schema(calculate)]

    async def run(self, data, *, base_url, api_key, http_client):
        import openai

        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages, calls = list(data["messages"]), 0
        for _ in range(3):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=self.tools)
            message = completion.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message)
            for call in message.tool_calls:
                calls += 1
                try:
                    result = calculate(json.loads(call.function.arguments)["expression"])
                except (KeyError, TypeError, ValueError, ArithmeticError) as error:
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        reward = await self.reward("", message.content or "", [], [], answer=data["answer"])
        return {"reward": reward, "calls": calls}


# 3. The run.
# The agent is selected by file and class.
if __name__ == "__main__":
    run = Path("runs/tutorials/agent")
    agent = f"rollout.workflow={Path(__file__).absolute()}:Reckoner"
    size = ["data.batch_size=16", "rollout.group_size=8", "total_steps=30", "evaluation.examples=64"]
    settings = [agent, *size, f"run_dir={run}", *sys.argv[1:]]
    code = main("math-agent", settings)
    if code or "--dry-run" in settings:
        sys.exit(code)

    # 4. The result.
    # Each metric that the agent returns together with the reward is in `metrics.jsonl`, as `agent/NAME`.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record.get("agent/calls") is not None]
    for record in (steps[0], steps[-1]):
        print(f"step {record['step']}: reward {record['reward/mean']:.2f}, calls {record['agent/calls']:.2f}")
