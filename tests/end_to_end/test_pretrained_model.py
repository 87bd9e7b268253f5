"""A few steps with a pretrained model, SmolLM2-135M-Instruct: each kind of training, servers, adapters, resuming.

The data and the reward are those of docs/tutorials/8_pretrained_model.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from real_servers import interpreter_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "8_pretrained_model.py"
SECONDS = 900
"""Time limit of one command on a busy machine."""
MINUTES_20 = 20 * 60
"""Time limit of the tutorial in seconds on two cores."""
CHECKPOINT = Path("checkpoints") / "step_2"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the same questions as prompts, conversations and preference pairs."""
    rows = {split: list(runpy.run_path(str(TUTORIAL))["examples"](split))[::7] for split in ("train", "test")}
    wrong = {"Africa": "Asia", "Asia": "Europe", "Europe": "Africa"}
    forms = {
        "prompts": lambda row: row,
        "conversations": lambda row: {"messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]},
        "pairs": lambda row: {
            "prompt": row["messages"][-1]["content"],
            "chosen": row["answer"],
            "rejected": wrong[row["answer"]],
        },
    }
    directories = {}
    for name, form in forms.items():
        directories[name] = tmp_path_factory.mktemp(name)
        for split in rows:
            lines = [json.dumps(form(row)) + "\n" for row in rows[split]]
            (directories[name] / f"{split}.jsonl").write_text("".join(lines))
    return directories


def grpo_settings(model: Path, data: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {
        "model.path": model,
        "data.name": "chat",
        "data.path": data["prompts"],
        "data.batch_size": 4,
        "rollout.reward": f"{TUTORIAL}:continent_reward_fn",
        "rollout.group_size": 4,
        "rollout.generation.max_new_tokens": 8,
        "actor.optimizer.lr": 2e-5,
        "total_steps": 2,
        "evaluation.examples": 4,
        **more,
    }


def sft_settings(model: Path, data: dict[str, Path], **more: Any) -> dict[str, Any]:
    return {
        "model.path": model,
        "data.name": "chat",
        "data.path": data["conversations"],
        "data.batch_size": 8,
        "actor.optimizer.lr": 5e-5,
        "actor.optimizer.warmup_steps": 0,
        "total_steps": 4,
        "evaluation.examples": 8,
        **more,
    }


def losses_of(command: Command) -> list[float]:
    return [record["loss/train"] for record in command.records() if "loss/train" in record]


def changed_tensors(model: Path, command: Command) -> list[str]:
    """Return the names of the weights that differ between the model and the checkpoint of step 2."""
    base, saved = (load_file(directory / "model.safetensors") for directory in (model, command.run_dir / CHECKPOINT))
    assert base.keys() == saved.keys()
    return [name for name, tensor in base.items() if not tensor.float().equal(saved[name].float())]


def test_smollm2_has_the_tokenizer_and_template_of_the_published_model(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token) == (49152, "<|im_end|>", "<|im_end|>")
    assert tokenizer.tokenize("is  12.5") == ["is", "ĠĠ", "1", "2", ".", "5"]  # not "Ġ", "Ġ", "1"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_smollm2_completes_a_question_with_the_right_answer(smollm2: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.num_parameters() == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    [ids] = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(ids[prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("server", ["embedded", "vllm"])
def test_grpo_on_a_pretrained_model_changes_it(smollm2, data, start_command, server):
    python = {"rollout.server.python": interpreter_of(server)} if server != "embedded" else {}
    settings = grpo_settings(smollm2, data, allocation=f"{server}:d1+fsdp:d1", **python)
    command = start_command("gsm8k-grpo", settings)
    command.finish(SECONDS)

    first, second = command.steps()
    assert (first["version"], second["version"]) == (1, 2)
    assert 0 < first["grad_norm"] + second["grad_norm"] < 100
    assert max(first["gap/mean_abs"], second["gap/mean_abs"]) < 1e-4
    assert len(changed_tensors(smollm2, command)) > 200


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_grpo_with_adapters_changes_only_linear_layers(smollm2, data, start_command):
    lora = {"actor.engine.lora.rank": 8, "actor.optimizer.lr": 2e-4}
    command = start_command("gsm8k-grpo", grpo_settings(smollm2, data, **lora))
    command.finish(SECONDS)

    assert [step["version"] for step in command.steps()] == [1, 2]
    assert max(step["gap/mean_abs"] for step in command.steps()) < 1e-4
    changed = changed_tensors(smollm2, command)
    assert len(changed) == 30 * 7  # the linear layers of each decoder layer
    assert all(name.endswith("_proj.weight") for name in changed)


def test_sft_on_a_pretrained_model_resumes_with_the_same_losses(smollm2, data, start_command):
    whole = start_command("gsm8k-sft", sft_settings(smollm2, data), "whole")
    whole.finish(SECONDS)
    killed = start_command("gsm8k-sft", sft_settings(smollm2, data, **{"recover.every": 1}), "killed")
    killed.wait_for(killed.has_recovery_checkpoint, SECONDS)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(60)
    killed.restart()
    killed.finish(SECONDS)

    losses = losses_of(whole)
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert losses_of(killed) == losses


def test_dpo_on_a_pretrained_model_lowers_the_loss(smollm2, data, start_command):
    pairs = {"data.name": "hh-rlhf", "data.path": data["pairs"], "data.batch_size": 8}
    rate = {"actor.optimizer.lr": 2e-5, "actor.optimizer.warmup_steps": 0}
    settings = {"model.path": smollm2, **pairs, **rate, "total_steps": 4, "evaluation.examples": 8}
    command = start_command("hh-rlhf-dpo", settings)
    command.finish(SECONDS)

    losses = losses_of(command)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy equals the reference
    assert losses[-1] < losses[0] - 0.02


def test_tutorial_raises_held_out_accuracy_by_0_3(smollm2, tmp_path):
    (tmp_path / "runs" / "models").mkdir(parents=True)
    (tmp_path / "runs" / "models" / "smollm2").symlink_to(smollm2)
    program = [sys.executable, TUTORIAL]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=MINUTES_20, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    before, after = map(float, re.findall(r"(\d\.\d\d) (?:before|after)", done.stdout))
    assert after >= before + 0.3
