"""`rl grpo` and `rl sft`: required settings, presets, and the output of `--help` and `--dry-run`."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rl_apps.cli import command
from rl_apps.cli import main as cli
from rl_apps.cli.driver import main
from rl_apps.cli.help import FLAGS, render_help
from rl_apps.cli.overview import APPS, overview
from rl_apps.programs import grpo, gsm8k_grpo, gsm8k_sft, sft
from rl_apps.settings.compose import describe
from rl_contracts import registry

CUSTOM_REWARD = """
def exact(prompt, completions, prompt_ids, completion_ids, *, solution, **data):
    return float(completions.strip().endswith(solution))
"""


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory with custom prompts and a custom reward."""
    monkeypatch.chdir(tmp_path)
    examples = [{"problem": f"{n} + 1?", "solution": str(n + 1)} for n in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    (tmp_path / "my_reward.py").write_text(CUSTOM_REWARD)
    return tmp_path


def test_command_without_required_settings_names_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (cli.main(["grpo"]), cli.main(["sft", "data.name=word-problems"])) == (2, 2)

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rl grpo: ConfigError: rl grpo needs model.path=... (a Hugging Face")
    assert all(key in lines[0] for key in ("; data.path=...", "; rollout.reward=..."))
    assert lines[1].startswith("rl sft: ConfigError: rl sft needs model.path=... ")
    assert "data.path" not in lines[1]


def test_presets_set_only_the_required_settings_of_their_program() -> None:
    for program, preset in ((grpo.APP, gsm8k_grpo.APP), (sft.APP, gsm8k_sft.APP)):
        preset_values = dict(setting[:2] for setting in describe(preset.config(["model.path=/a/model"])))
        program_values = dict(setting[:2] for setting in describe(program.config(["model.path=/a/model"])))
        changed = {key for key in program_values if program_values[key] != preset_values[key]}
        assert changed <= {"experiment", "data.name", "rollout.reward"}
        program.require_settings(preset.config())


def test_custom_problems_and_reward_need_no_other_code(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["grpo", "model.path=embedded", "data.path=.", "data.columns.messages=problem", "--dry-run"]

    assert cli.main([*command, "evaluation.examples=0", "rollout.reward=my_reward.py:exact"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:7]] == [
        *("Devices", "Dtype", "Data", "Steps", "Model", "Allocation", "Files")
    ]
    assert lines[2] == "Data: 32 examples of chat ., 32 per step"
    assert lines[4] == "Model: embedded, recipe embedded"

    assert cli.main([*command, "rollout.reward=my_reward.py:exact"]) == 2
    assert "name another split (data.train_split, data.test_split)" in capsys.readouterr().err
    assert cli.main([*command[:3], "--dry-run", "evaluation.examples=0", "rollout.reward=my_reward.py:exact"]) == 2
    assert "train.jsonl:1: expected a column 'messages', found only 'problem'" in capsys.readouterr().err


def test_help_has_usage_example_frequent_settings_flags_and_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grpo", "--help", "total_steps=7"]) == 0

    parts = capsys.readouterr().out.split("\n\n")
    assert parts[0].startswith("usage: rl grpo model.path=... data.path=... rollout.reward=... [key=value ...]")
    assert parts[2] == f"Example:\n  rl grpo {grpo.APP.example}"
    assert re.search(r"^  actor\.optimizer\.lr=1e-06 +Peak learning rate\.$", parts[4], re.MULTILINE)
    assert re.search(r"^  total_steps=7 +Training steps\.$", parts[4], re.MULTILINE)
    assert 18 <= len(re.findall(r"^  \S+=", parts[4], re.MULTILINE)) <= 22
    assert parts[5] == FLAGS
    assert re.search(r"^  seed=1 ", parts[7], re.MULTILINE)
    assert re.search(r"^  rollout  ", parts[9], re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "sft", "gsm8k-grpo", "hh-rlhf-dpo"])
def test_example_of_help_passes_a_dry_run(name: str) -> None:
    assert cli.main([name, *registry.load("rl.apps", name).example.split(), "--dry-run"]) == 0


def test_help_of_an_app_that_needs_another_run_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("rl_apps.programs.vision:CLEVR_COUNT_GRPO", ["--help"]) == 0

    example = capsys.readouterr().out.split("\n\n")[2].splitlines()
    assert example[1:2] == ["  clevr-count-sft"]
    assert example[2].startswith("  rl run rl_apps.programs.vision:CLEVR_COUNT_GRPO ")


@pytest.mark.parametrize("topic", ["rollout.server", "rollout.group_size", "all"])
def test_help_of_section_lists_exactly_its_settings(topic: str) -> None:
    config = gsm8k_grpo.APP.config()
    text = render_help(gsm8k_grpo.APP, config, topic)

    keys = [line.partition("=")[0][2:] for line in text.splitlines() if line[:3].strip() and line.startswith("  ")]
    expected = [key for key, _, _ in describe(config) if topic == "all" or f"{key}.".startswith(f"{topic}.")]
    assert {key for key in keys if "." in key or topic == "all"} >= {*expected} - {"model.directories"}
    assert len(expected) >= (1 if topic == "rollout.group_size" else 5)
    if topic != "all":
        assert not [key for key in keys if key and not key.startswith("-") and not key.startswith(topic)]


@pytest.mark.guarantee(
    "The help of a command and the answer to a wrong setting import neither torch nor transformers.", area="boundaries"
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--help", "rollout"],
        ["totl_steps=3"],
        ["total_steps=three"],
        ["data.name=gsm8k", "data.path=nowhere.jsonl"],
        ["rollout.reward=nowhere.py:f"],
        ["actor.minibatches=7"],
        ["algorithm.loss.kind=clipp"],
    ],
    ids=lambda arguments: arguments[-1],
)
def test_help_and_wrong_settings_import_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys; from rl_apps.cli.driver import main; code = main('gsm8k-grpo', sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'aiohttp', 'datasets', 'numpy', 'rich'} & {*sys.modules}; "
        "sys.exit(repr(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
    assert len(done.stderr.splitlines()) == done.returncode // 2


def test_help_omits_settings_that_are_always_rejected() -> None:
    assert "actor.minibatches" in render_help(gsm8k_grpo.APP, gsm8k_grpo.APP.config(), "actor")
    assert "actor.minibatches" not in render_help(sft.APP, sft.APP.config(), "actor")


@pytest.mark.parametrize("arguments", [["run", "gsm8k-grpo", "--help", "all"], ["metrics"]])
def test_closed_pipe_ends_command_without_traceback(arguments):
    command = [sys.executable, "-m", "rl_apps.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # before it writes any output

    assert process.wait(timeout=100) == 141
    assert process.stderr.read() == ""


@pytest.mark.parametrize("name", ["rl", "gsm8k-grpo"])
def test_ctrl_c_during_imports_ends_command_without_traceback(name: str, tmp_path: Path) -> None:
    interrupting = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "argparse.py").write_text(interrupting)  # a module that each command imports
    command_line = [str(Path(sys.executable).with_name(name)), "--help"]
    done = subprocess.run(
        command_line,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore SIGINT
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_command_runs_the_app_of_its_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/anywhere/hh-rlhf-dpo", "--help"])
    assert command.main() == 0
    assert capsys.readouterr().out.startswith("usage: hh-rlhf-dpo ")


def test_rl_help_lists_every_app_and_command_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: dict[str, str] = {}
    monkeypatch.setattr(cli, "overview", lambda apps, helps: commands.update(helps) or overview(apps, helps))

    with pytest.raises(SystemExit):
        cli.main(["--help"])

    sections = [section.partition(":\n")[::2] for section in capsys.readouterr().out.split("\n\n")]
    names = {heading: re.findall(r"^  (\w\S*)  ", lines, re.MULTILINE) for heading, lines in sections}
    apps = names["apps, which start or resume a training run"]
    assert apps[0] == "gsm8k-grpo"
    assert sorted(apps) == sorted([*registry.available("rl.apps"), "run"])
    assert sorted(names["commands for a run"] + names["commands for setup"]) == sorted({*commands} - {"run"})


def test_overview_titles_are_those_of_the_apps() -> None:
    own = [name for name, target in registry.available("rl.apps").items() if target.startswith("rl_apps.")]

    assert {name: registry.load("rl.apps", name).title for name in own} == APPS


def test_overview_lists_third_party_apps_after_those_of_this_package() -> None:
    apps = {"custom": "package.module:APP", "sft": "rl_apps.programs.sft:APP"}

    lines = overview(apps, {"run": "your own app"}).splitlines()

    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert rows[1:] == [["sft", APPS["sft"]], ["custom", "app of package.module"], ["run", "your own app"]]


def test_rl_help_as_a_module_imports_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rl_apps", "--help"], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("usage: rl COMMAND")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "rl_apps.cli.overview" in imported
    assert not imported & {"torch", "transformers", "datasets", "numpy", "rich", "rl_apps.settings.config"}
