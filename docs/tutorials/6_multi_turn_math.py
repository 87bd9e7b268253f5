"""Several turns: an answer, feedback, a better answer

`multi-turn-math` is `gsm8k-grpo` with another workflow: where an answer is wrong, the model is told so and may answer
again. All turns are one row, and exactly the tokens that were sampled are trained.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl

# 1. The workflow.
# `rollout.workflow=multi-turn` is the default of this command. One of your own is named in the same way: the how-to
# page about workflows has this one, in forty lines.
workflow = ["rollout.workflow=multi-turn"]

# 2. The run.
run = Path("runs/tutorials/multi-turn")
size = ["data.batch_size=16", "rollout.group_size=8", "total_steps=30", "evaluation.rows=64"]
settings = [*workflow, *size, f"run_dir={run}", *sys.argv[1:]]
code = main("multi-turn-math", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 3. Turns.
# Fewer of them are needed as the first answer is right more often.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [record for record in records if record.get("conversation/turns") is not None]
for record in (steps[0], steps[-1]):
    print(f"step {record['step']}: reward {record['reward/mean']:.2f}, turns {record['conversation/turns']:.2f}")

# 4. A conversation.
# Turn by turn, with who said what and under which version of the weights.
rl(["show", str(run), "-n", "1"])
