"""PPO: a policy with a critic

`algorithm=ppo` selects other components than `grpo`. Its advantages come from GAE (generalized advantage estimation)
and a critic, a second model that learns to predict the return. Every algorithm is selected like this, and settings
change its components.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main

# 1. The algorithm.
# A preset is a set of settings; `gsm8k-grpo --cfg job algorithm=ppo` prints it. This program overrides lambda and the
# learning rate of the critic. `actor.minibatches=2` takes two optimizer steps per batch: the policy moves within a
# batch, so that the clip has an effect.
algorithm = [
    "algorithm=ppo",
    "algorithm.advantage.lam=0.95",
    "critic.lr=1e-3",
    "actor.minibatches=2",
]

# 2. The run.
# PPO with a critic does not compare the completions of a group. Here each prompt still gets four completions.
run = Path("runs/tutorials/ppo")
size = ["data.batch_size=32", "rollout.group_size=4", "total_steps=40", "evaluation.examples=128"]
settings = [*algorithm, *size, f"run_dir={run}", *sys.argv[1:]]
code = main("gsm8k-grpo", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 3. The result.
# `critic/explained_variance` is 1 if the values equal the returns, and 0 if they predict no better than the mean. In
# such a short run it stays near 0, because it is hard to predict a reward before the completion ends. The accuracy on
# held-out problems still improves.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
accuracy = [record["eval/accuracy"] for record in records if record.get("eval/accuracy") is not None]
steps = [record for record in records if record.get("critic/explained_variance") is not None]
print(f"accuracy {accuracy[0]:.2f} before, {accuracy[-1]:.2f} after")
print(f"explained variance {steps[-1]['critic/explained_variance']:.2f}, clipped {steps[-1]['clip/high']:.2%}")
