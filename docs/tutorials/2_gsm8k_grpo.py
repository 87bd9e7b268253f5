"""GRPO: a reward of your own

`gsm8k-grpo` lets a model answer, scores the answers, and makes the better ones of each group more likely. A server
generates while the trainer learns. The model is tiny and made on the spot; its warm-up, half a minute, is kept for
the next time.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl
from rl_rewards import gsm8k_reward_fn


# 1. The reward.
# A function of an answer and its row's columns. This one wants the right number, and takes a tenth away for more than
# one line: the model is to be brief. It runs in a process of its own, under a deadline.
def brief_reward_fn(prompt, completions, prompt_ids, completion_ids, *, answer, **columns):
    right = gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=answer)
    return right - 0.1 * (completions.strip().count("\n") > 1)


# 2. The settings.
# The reward is named by file and function. A step has 32 prompts with 8 answers each; answers may be one version old.
run = Path("runs/tutorials/grpo")
settings = [
    f"rollout.reward={Path(__file__).absolute()}:brief_reward_fn",
    "algorithm=grpo",
    "data.batch_size=32",
    "rollout.group_size=8",
    "rollout.max_staleness=1",
    "total_steps=60",
    "evaluation.rows=128",
    f"run_dir={run}",
    *sys.argv[1:],
]

# 3. The run.
# Before anything starts, workflow and reward are tried on a row, so that a mistake in the function above is told at
# once. The file is imported by the reward's process too, where it must not start a run: hence the condition.
if __name__ == "__main__":
    code = main("gsm8k-grpo", settings)
    if code or "--dry-run" in settings:
        sys.exit(code)

    # 4. What was learned.
    # The mean reward of each step's answers, and the version of the weights that wrote them.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record.get("reward/mean") is not None]
    for record in (steps[0], steps[-1]):
        print(f"step {record['step']}: reward {record['reward/mean']:.2f}, staleness {record['staleness/mean']:.1f}")

    # 5. The answers.
    # Every finished answer is in `rollouts/`, with what became of it: the worst two of the last step.
    rl(["show", str(run), "--worst", "-n", "2"])
