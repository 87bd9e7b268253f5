"""Supervised learning: worked answers of your own

`gsm8k-sft` learns from conversations: here two hundred sums with their worked answers, which a tiny model made on the
spot learns to continue. With `model.path` it is any model of Hugging Face instead, and everything else stays as it
is.
"""

import json
import random
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl

# 1. The data.
# A directory with `train.jsonl` and `test.jsonl`, in each row a `question` and an `answer` in GSM8K's form: the
# working, then the result behind `####`. What nobody has seen is in the second file.
data = Path("runs/tutorials/sums")
data.mkdir(parents=True, exist_ok=True)
sums = [(a, b) for a in range(1, 16) for b in range(1, 16)]
random.Random(0).shuffle(sums)
for split, pairs in (("train", sums[:200]), ("test", sums[200:])):
    rows = [{"question": f"What is {a} + {b} ?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
    (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

# 2. The settings.
# What is not said here has a default, which `gsm8k-sft --help all` shows. Words behind this program's name come last,
# and so win: `total_steps=5`, or `--dry-run`, which checks all of it and starts nothing.
run = Path("runs/tutorials/sft")
settings = [
    "data.name=gsm8k",
    f"data.path={data}",
    "data.batch_size=50",
    "total_steps=40",
    "evaluation.rows=25",
    f"run_dir={run}",
    *sys.argv[1:],
]

# 3. The run.
# `main` is what the command `gsm8k-sft` calls: it starts the trainers, and comes back when they have ended.
code = main("gsm8k-sft", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 4. What was learned.
# `metrics.jsonl` has a line for each step, and `loss/eval` is the loss on the rows of `test.jsonl`. `report.html`
# beside it shows all of it.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [record["loss/eval"] for record in records if record.get("loss/eval") is not None]
print(f"loss on unseen sums: {losses[0]:.2f} before, {losses[-1]:.2f} after")

# 5. The model.
# A run's checkpoints are directories of Hugging Face's form. `rl generate runs/tutorials/sft` talks to the last one. It
# has learned how such an answer is written; to add, a model of this size needs more steps than these.
rl(["generate", str(run), "--prompt", "What is 7 + 5 ?", "--temperature", "0", "--max-new-tokens", "24"])
