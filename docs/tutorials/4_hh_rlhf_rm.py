"""A reward model from preference pairs

`hh-rlhf-rm` trains a reward model, which scores the better of two answers higher (Bradley-Terry). The checkpoint is a
sequence classifier with one label, which `transformers` loads without code of this project.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_apps.cli.driver import main

# 1. The run.
# Without `data.*` the command generates pairs: a word problem with its right answer, and with a wrong one. Your own
# pairs are examples with `chosen` and `rejected`: `data.name=hh-rlhf data.path=DIR`.
run = Path("runs/tutorials/rm")
settings = ["total_steps=40", "data.batch_size=32", "evaluation.examples=128", f"run_dir={run}", *sys.argv[1:]]
code = main("hh-rlhf-rm", settings)
if code or "--dry-run" in settings:
    sys.exit(code)

# 2. The model.
# The directory of a checkpoint contains the model and its tokenizer. This loads the last checkpoint.
checkpoint = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
tokenizer = AutoTokenizer.from_pretrained(checkpoint)

# 3. Three answers.
# The score of a conversation is the single logit of the model. Only score differences between answers to the same
# question are meaningful. After so few steps the model prefers answers with a final `####` line, but cannot yet
# recognize a wrong number.
question = {"role": "user", "content": "Ann has 9 eggs, finds 2, then wins 4. How many eggs does Ann have?"}
worked = "<<9+2=11>>11\n<<11+4=15>>15"
for answer in (f"{worked}\n#### 15", f"{worked}\n#### 7", worked):
    conversation = [question, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=False)
    with torch.inference_mode():
        print(f"{model(input_ids=ids).logits.item():+.2f}  {answer!r}")
