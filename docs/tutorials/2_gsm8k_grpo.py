"""GRPO: your own reward

`gsm8k-grpo` generates completions, scores them, and makes the better ones of each group more likely. A server generates
while the trainer learns. The first run creates a tiny model and trains it for half a minute. Later runs reuse this
model.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl
from rl_rewards import gsm8k_reward_fn


# 1. The reward.
# A reward is a function of a completion and the columns of its example. This one returns 1 for the right number, and
# subtracts 0.1 for a completion of more than two lines. It runs in a separate process with a time limit.
def brief_reward_fn(prompt, completions, prompt_ids, completion_ids, *, answer, **columns):
    right = gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=answer)
    return right - 0.1 * (completions.strip().count("\n") > 1)


# 2. The settings.
# `rollout.reward` names the file and the function. A step has 32 prompts with 8 completions each. With
# `max_staleness=1`, a group may start one version before the step that trains on it.
run = Path("runs/tutorials/grpo")
settings = [
    f"rollout.reward={Path(__file__).absolute()}:brief_reward_fn",
    "algorithm=grpo",
    "data.batch_size=32",
    "rollout.group_size=8",
    "rollout.max_staleness=1",
    "total_steps=60",
    "evaluation.examples=128",
    f"run_dir={run}",
    *sys.argv[1:],
]

# 3. The run.
# Before anything starts, a trial episode runs workflow and reward on one example, so that a mistake in the function
# above is reported at once. The reward worker also imports this file. The `if` prevents this import from starting a
# run.
if __name__ == "__main__":
    code = main("gsm8k-grpo", settings)
    if code or "--dry-run" in settings:
        sys.exit(code)

    # 4. The result.
    # Each step reports the mean reward of its completions, and their mean staleness in versions.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record.get("reward/mean") is not None]
    for record in (steps[0], steps[-1]):
        print(f"step {record['step']}: reward {record['reward/mean']:.2f}, staleness {record['staleness/mean']:.1f}")

    # 5. The completions.
    # `rollouts/` contains every finished completion with its outcome. This command shows the two completions of the
    # last step with the lowest rewards.
    rl(["show", str(run), "--worst", "-n", "2"])
