"""Several turns: an answer, feedback, a better answer

`multi-turn-math` is `gsm8k-grpo` with another workflow: after a wrong answer, the model gets feedback and may answer
again. All turns form one sequence, and the loss covers exactly the sampled tokens.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl

# 1. The workflow.
# `rollout.workflow=multi-turn` is the default of this command. Select your own workflow in the same way. The how-to
# page about workflows implements a similar one in forty lines.
workflow = ["rollout.workflow=multi-turn"]

# 2. The run.
# A step has 16 prompts with 8 episodes each.
run = Path("runs/tutorials/multi-turn")
size = ["data.batch_size=16", "rollout.group_size=8", "total_steps=30", "evaluation.examples=64"]
settings = [*workflow, *size, f"run_dir={run}", *sys.argv[1:]]
code = main("multi-turn-math", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 3. The turns.
# The number of turns per episode decreases as the first answer is right more often.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [record for record in records if record.get("conversation/turns") is not None]
for record in (steps[0], steps[-1]):
    print(f"step {record['step']}: reward {record['reward/mean']:.2f}, turns {record['conversation/turns']:.2f}")

# 4. A conversation.
# This shows one conversation turn by turn, with the role of each message and the weight version of each completion.
rl(["show", str(run), "-n", "1"])
