"""Supervised learning: your own worked answers

`gsm8k-sft` learns from conversations. Here they are 200 sums with worked answers, and the command creates a tiny model
to train. To train any Hugging Face model instead, set `model.path`; nothing else changes.
"""

import json
import random
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl

# 1. The data.
# The data is a directory with `train.jsonl` and `test.jsonl`. Each line has a `question` and an `answer` in the format
# of GSM8K: the calculation, then the result after `####`. The second file contains the held-out examples.
data = Path("runs/tutorials/sums")
data.mkdir(parents=True, exist_ok=True)
sums = [(a, b) for a in range(1, 16) for b in range(1, 16)]
random.Random(0).shuffle(sums)
for split, pairs in (("train", sums[:200]), ("test", sums[200:])):
    rows = [{"question": f"What is {a} + {b} ?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
    (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

# 2. The settings.
# All other settings have defaults, which `gsm8k-sft --help all` shows. Arguments of this program come last, so they
# override these settings: for example `total_steps=5`, or `--dry-run`, which checks everything and starts nothing.
run = Path("runs/tutorials/sft")
settings = [
    "data.name=gsm8k",
    f"data.path={data}",
    "data.batch_size=50",
    "total_steps=40",
    "evaluation.examples=25",
    f"run_dir={run}",
    *sys.argv[1:],
]

# 3. The run.
# The command `gsm8k-sft` calls `main`. It starts the trainers, and returns when they have ended.
code = main("gsm8k-sft", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 4. The result.
# `metrics.jsonl` has a line for each step. `loss/eval` is the loss on the examples of `test.jsonl`. `report.html` in
# the same directory shows all metrics.
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [record["loss/eval"] for record in records if record.get("loss/eval") is not None]
print(f"loss on unseen sums: {losses[0]:.2f} before, {losses[-1]:.2f} after")

# 5. The model.
# The checkpoints of a run are in Hugging Face format. `rl generate runs/tutorials/sft` loads the last one and generates
# completions. After these few steps the model has learned the format of an answer, but not yet addition.
rl(["generate", str(run), "--prompt", "What is 7 + 5 ?", "--temperature", "0", "--max-new-tokens", "24"])
