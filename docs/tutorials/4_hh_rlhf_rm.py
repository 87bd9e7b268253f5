"""A reward model from preference pairs

`hh-rlhf-rm` learns to tell the better of two answers (Bradley-Terry). What it saves is a classifier with one label,
which `transformers` loads without anything of ours.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_apps.cli.driver import main

# 1. The run.
# Without `data.*` the pairs are generated: a word problem with its right answer, and with one that has a mistake.
# Pairs of your own are rows with `chosen` and `rejected`: `data.name=hh-rlhf data.path=DIR`.
run = Path("runs/tutorials/rm")
settings = ["total_steps=40", "data.batch_size=32", "evaluation.rows=128", f"run_dir={run}", *sys.argv[1:]]
code = main("hh-rlhf-rm", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 2. The model.
# The last checkpoint, and the tokenizer that lies beside it.
checkpoint = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
tokenizer = AutoTokenizer.from_pretrained(checkpoint)

# 3. Three answers.
# The score of a conversation is the model's one logit; only differences between answers to one question mean something.
# After so few steps it has learned that an answer ends with its last line; whether the number is right it cannot tell
# yet.
question = {"role": "user", "content": "Ann has 9 eggs, finds 2, then wins 4. How many eggs does Ann have?"}
worked = "<<9+2=11>>11\n<<11+4=15>>15"
for answer in (f"{worked}\n#### 15", f"{worked}\n#### 7", worked):
    conversation = [question, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=False)
    with torch.inference_mode():
        print(f"{model(input_ids=ids).logits.item():+.2f}  {answer!r}")
