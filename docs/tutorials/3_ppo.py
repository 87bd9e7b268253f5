"""PPO: a critic beside the policy

`algorithm=ppo` is another composition of the same parts: advantages by GAE, from a second model that learns to say
how an answer will end. Any algorithm is chosen like this, and changed part by part.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main

# 1. The algorithm.
# A preset is data: `gsm8k-grpo --cfg job algorithm=ppo` shows what it sets. Lambda and the critic's learning rate are
# our own choice here, and `actor.minibatches=2` takes two optimizer steps from each batch, so that the clip has
# something to do.
algorithm = [
    "algorithm=ppo",
    "algorithm.advantage.lam=0.95",
    "critic.optimizer.lr=1e-3",
    "actor.minibatches=2",
]

# 2. The run.
# A critic needs no groups: four answers to a prompt are enough to see whether they get better.
run = Path("runs/tutorials/ppo")
size = ["data.batch_size=32", "rollout.group_size=4", "total_steps=40", "evaluation.rows=128"]
settings = [*algorithm, *size, f"run_dir={run}", *sys.argv[1:]]
code = main("gsm8k-grpo", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 3. What was learned.
# `critic/explained_variance` is 1 where its values are the returns, and 0 where they say no more than the mean would.
# In so short a run it stays near 0, for whether an answer will be right is hard to see before its end; the policy gets
# better all the same, as held-out problems show.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
accuracy = [record["eval/accuracy"] for record in records if record.get("eval/accuracy") is not None]
steps = [record for record in records if record.get("critic/explained_variance") is not None]
print(f"accuracy {accuracy[0]:.2f} before, {accuracy[-1]:.2f} after")
print(f"explained variance {steps[-1]['critic/explained_variance']:.2f}, clipped {steps[-1]['clip/high']:.2%}")
