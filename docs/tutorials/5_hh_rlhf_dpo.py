"""DPO: a policy from preference pairs

`hh-rlhf-dpo` learns from pairs without a reward model. It makes the chosen answer more likely than the rejected one,
relative to a frozen copy of the model. `preference.loss=ipo` selects the loss of IPO.
"""

import json
import sys
from pathlib import Path

from rl_apps.cli.driver import main

# 1. The pairs.
# The pairs repeat three questions with a polite and a rude answer, which is enough to see the effect of the loss. Your
# own examples may also be whole dialogues with the markers `Human:` and `Assistant:`.
data = Path("runs/tutorials/manners")
data.mkdir(parents=True, exist_ok=True)
questions = ("How many eggs has Tom?", "How many nuts are left?", "How many eggs does Ann have?")
pairs = [
    {"prompt": f"{question} ({number})", "chosen": f"Tom has {number} nuts.", "rejected": "Who asks?"}
    for number in range(40)
    for question in questions
]
for split, rows in (("train", pairs[:96]), ("test", pairs[96:])):
    (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

# 2. The run.
# A larger `preference.beta` keeps the policy closer to the frozen copy.
run = Path("runs/tutorials/dpo")
settings = [
    "data.name=hh-rlhf",
    f"data.path={data}",
    "data.batch_size=32",
    "preference.beta=0.1",
    "total_steps=15",
    "evaluation.examples=24",
    f"run_dir={run}",
    *sys.argv[1:],
]
code = main("hh-rlhf-dpo", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 3. The result.
# The evaluation reports the fraction of held-out pairs that the policy ranks correctly, and the mean difference of its
# implied rewards. Before the first step the policy equals the reference, so every pair is a tie: the difference is 0,
# and the fraction is 50 %, because a tie counts half.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
evaluations = [record for record in records if record.get("eval/accuracy") is not None]
for record in (evaluations[0], evaluations[-1]):
    print(f"step {record['step']}: {record['eval/accuracy']:.0%} right, margin {record['eval/margin']:+.3f}")
