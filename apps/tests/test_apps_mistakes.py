"""Common mistakes on the command line and in files. Each ends the command before a server starts, with exit code 2 and
one sentence that states the problem and the remedy."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_apps.cli import main
from rl_apps.programs import grpo
from rl_apps.run.components import weights_directory
from rl_apps.settings.compose import to_yaml
from rl_contracts.errors import LaunchError
from rl_contracts.testing.models import make_tiny_model

ROWS = [{"messages": f"{n} + 1?", "answer": str(n + 1)} for n in range(32)]
REWARD = "def f(prompt, completions, prompt_ids, completion_ids, *, answer, **data):\n"
FLOW = "from rl_contracts.workflow import RolloutWorkflow\nclass Flow(RolloutWorkflow):\n"
CONSTRUCTOR = "    def __init__(self, tokenizer, generation, reward, max_length): pass\n"
TEMPLATE = "{% for message in messages %}"


def _lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


RECORD = _lines({"step": 1, "sequences": 2, "reward/mean": 0.5, "version": 1})
FILES = {"good.py": REWARD + "    return 1.0\n", "train.jsonl": _lines(*ROWS), "test.jsonl": _lines(*ROWS)}
BEFORE = to_yaml(grpo.APP.config(["seed=1", "total_steps=3"]))
RUN = {"run/config.yaml": BEFORE, "run/metrics.jsonl": RECORD}
GRPO = ("grpo", "model.path=model", "data.path=.", "rollout.reward=good.py:f", "run_dir=run")
SFT = ("sft", "model.path=model", "data.path=.", "run_dir=run")
DPO = ("hh-rlhf-dpo", "data.name=hh-rlhf", "run_dir=run")
COMMANDS = ("rl", "rl grpo", "rl sft", "gsm8k-grpo", "hh-rlhf-dpo", "grop", "good.py:f")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("made") / "model", "llama", layers=1, hidden=32)


@pytest.fixture
def refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a command and returns its error message.

    The command runs in a directory with a model, data and a reward; the given files replace or complete them.
    """

    def fail_on_start(*_: object, **__: object) -> int:
        raise AssertionError("the command started servers and trainers")

    def run(words: tuple[str, ...], files: dict[str, str]) -> str:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        code = main.main(list(words))
        captured = capsys.readouterr()
        assert code == 2, captured
        assert "starting servers" not in captured.out
        assert "Traceback" not in captured.err
        error = captured.err.strip()
        assert error.partition(": ")[0] in COMMANDS, error
        assert error.partition(": ")[2].partition(": ")[0].endswith("Error")
        assert error.count("\n") <= 2  # an error in an allocation also shows the allocation and a caret
        return error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("rl_apps.cli.driver.Launcher.run", fail_on_start)
    shutil.copytree(model, tmp_path / "model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return run


def _set(*settings: str, files: dict[str, str] | None = None, command: tuple[str, ...] = GRPO) -> tuple[object, ...]:
    """Return a command with these settings, the last of which is the mistake, and its files."""
    return (*command, *settings), files or {}


def _reward(body: str, name: str = "theirs.py:f") -> tuple[object, ...]:
    return _set(f"rollout.reward={name}", files={"theirs.py": body})


def _flow(body: str) -> tuple[object, ...]:
    return _set("rollout.workflow=flow.py:Flow", files={"flow.py": body})


def _file(text: str) -> tuple[object, ...]:
    return _set("--config", "theirs.yaml", files={"theirs.yaml": text})


def _tool(*words: str, files: dict[str, str] | None = None) -> tuple[object, ...]:
    return words, RUN if files is None else files


SETTINGS = {
    "typo": (*_set("totl_steps=3"), "Did you mean 'total_steps'?"),
    "typo-in-section": (*_set("rollout.max_stalness=1"), "Did you mean 'rollout.max_staleness'?"),
    "of-another-section": (*_set("publish.path=x"), "Did you mean 'model.path'? publish has route, "),
    "nested-in-its-section": (*_set("rollout.temperature=0"), "Did you mean 'rollout.generation.temperature'?"),
    "foreign-name": (*_set("actor.optimizer.learning_rate=1e-3"), "Did you mean 'actor.optimizer.lr'?"),
    "foreign-name-of-a-value": (*_set("use_vllm=true"), "'use_vllm'. Use allocation=vllm:d1+fsdp:d1."),
    "typo-in-foreign-name": (*_set("actor.optimizer.learning_rat=1e-3"), "Did you mean 'actor.optimizer.lr'?"),
    "not-an-integer": (
        *_set("total_steps=twelve"),
        "expected a whole number, found 'twelve'. `--help total_steps` shows",
    ),
    "not-a-boolean": (*_set("recover.resume=maybe"), "recover.resume: expected true or false, found 'maybe'"),
    "value-for-section": (*_set("rollout=3"), "expected the settings in it, rollout.NAME=VALUE"),
    "value-for-inner-section": (*_set("actor.optimizer=adam"), "actor.optimizer.NAME=VALUE"),
    "preset-of-section-without-presets": (*_set("data=word-problems"), "the settings in it, data.NAME=VALUE"),
    "model-in-place-of-its-section": (("gsm8k-grpo", "model=theirs"), {}, "the settings in it, model.NAME=VALUE"),
    "value-for-optional-section": (*_set("actor.engine.lora=16"), "the settings in it, actor.engine.lora.NAME=VALUE"),
    "nested-foreign-name-in-a-file": (
        *_file("actor_rollout_ref: {rollout: {n: 8}}"),
        "Did you mean 'rollout.group_size'?",
    ),
    "added-in-an-unknown-section": (*_set("+trainer.total_steps=5"), "Did you mean 'total_steps'?"),
    "list-for-text": (*_set("rollout.reward=[gsm8k,length]"), "expected a text, found the list ['gsm8k', 'length']"),
    "value-for-options": (*_set("data.options=foo"), "`--help data.options` shows its type"),
    "addresses-not-a-list": (
        *_set("rollout.server.addresses=http://here:1"),
        "expected a list, rollout.server.addresses=[ONE,...]. `--help rollout.server.addresses` shows",
    ),
    "micro-batch-too-small": (
        *_set("actor.micro_batch.max_tokens=3"),
        "actor.micro_batch.max_tokens: expected at least",
    ),
    "outside-of-runs": (("gsm8k-grpo", "experiment=../x", "--dry-run"), {}, "experiment: expected a name without `..`"),
    "negative-name-in-two-sections": (
        *_set("actor.optimizer.lr=-1"),
        "actor.optimizer.lr: expected 0 or more, found -1",
    ),
    "spaces": (*_set("total_steps", "=", "3"), "Leave out the spaces around =."),
    "unknown-option-of-the-loss": (
        *_set("algorithm.loss.options.slop=1"),
        "dual_clip), found slop. Remove an option of another",
    ),
    "unknown-option-of-the-estimator": (
        *_set("algorithm.advantage.options.slop=1"),
        "algorithm.advantage.options: expected",
    ),
    "no-model": (("gsm8k-grpo", "model.path="), {}, "model.path: expected a Hugging Face directory or hub id"),
}
NAMES = {
    "data-set": (*_set("data.name=gsm9k"), "did you mean 'gsm8k'?"),
    "reward": (*_set("rollout.reward=gsm9k"), "did you mean 'gsm8k'?"),
    "workflow": (*_set("rollout.workflow=rlvrr"), "did you mean 'rlvr'?"),
    "preset": (*_set("algorithm=gropo"), "Did you mean 'grpo'?"),
    "recipe": (*_set("recipe=pretraind"), "Did you mean 'pretrained'?"),
    "tracker": (*_set("trackers=wandbb"), "did you mean 'wandb'?"),
    "launcher": (*_set("launcher=slrum"), "did you mean 'slurm'?"),
    "loss": (*_set("algorithm.loss.kind=clipp"), "did you mean 'clip'?"),
    "route": (*_set("publish.route=nccl"), "expected one of auto, shm, disk, broadcast, ipc, found 'nccl'"),
    "data-set-of-another-form": (*_set("data.name=hh-rlhf", command=SFT), "choose another data set, or a command that"),
}
ALLOCATIONS = {
    "server": (*_set("allocation=embeded:d1+fsdp:d1"), "did you mean 'embedded'?"),
    "comma": (*_set("allocation=embedded:d1,fsdp:d1"), "join components with `+`"),
    "no-size": (*_set("allocation=embedded"), "expected ':', found the end; example: embedded:d1+fsdp:d1"),
    "no-trainer": (*_set("allocation=embedded:d1"), "expected one trainer, found 0"),
    "no-servers": (*_set("allocation=fsdp:d1"), "found 0. One server and one trainer are embedded:d1+fsdp:d1."),
    "servers-not-allowed": (*_set("allocation=embedded:d1+fsdp:d1", command=DPO), "use fsdp:d1 alone"),
    "heads-of-a-model-not-built-yet": (
        *_set("model.path=embedded", "allocation=embedded:d1+megatron:t3"),
        "megatron:t3 with model embedded: megatron: tensor parallel size 3 does not divide num_attention_heads = 4",
    ),
    "experts-of-a-model-not-built-yet": (
        *_set("model.path=embedded-moe", "allocation=embedded:d1+megatron:d3e3"),
        "num_experts=4 is not divisible by e=3",
    ),
    "split-server": (*_set("allocation=embedded:t2+fsdp:d1"), "expected embedded:d1"),
    "split-trainer": (*_set("allocation=embedded:d1+fsdp:p2"), "Use for example fsdp:d2"),
    "vllm-not-installed": (*_set("allocation=vllm:d1+fsdp:d1"), "pip install 'rl-inference[vllm]'"),
    "replicas": (*_set("allocation=embedded:d1+fsdp:d2", "data.batch_size=15"), "use 14 or 16"),
    "minibatches": (
        *_set("data.batch_size=3", "rollout.group_size=3", "actor.minibatches=2"),
        "9 sequences must be divisible by actor.minibatches=2",
    ),
}
CONFLICTS = {
    "staleness-with-deterministic": (
        *_set("deterministic=true", "rollout.max_staleness=2"),
        "set rollout.max_staleness=0 or deterministic=false",
    ),
    "group-of-one": (*_set("rollout.group_size=1"), "expected at least 2: a single completion is its own baseline"),
    "route-between-devices": (*_set("publish.route=ipc"), "expected shm on one host, or broadcast"),
    "longer-than-the-context": (*_set("data.max_length=100000"), "expected at most 2048, the context of"),
    "addresses-of-no-server": (
        *_set("rollout.server.addresses=[localhost:1]"),
        "rollout.server.addresses: expected a list of http://host:port, found ['localhost:1']",
    ),
}
WORDS = {
    "flag": (*_set("--total_steps", "12"), "'--total_steps': expected key=value; use total_steps=12."),
    "flag-of-another-library": (*_set("--learning-rate", "1e-5"), "expected key=value; use actor.optimizer.lr=1e-5."),
    "flag-to-resume": (*_set("--resume", "other"), "expected key=value; use resume_from=other."),
    "flag-with-its-value": (*_set("--num_generations=4"), "expected key=value; use rollout.group_size=4."),
    "flag-without-value": (*_set("--use_vllm", "seed=3"), "expected key=value; use allocation=vllm:d1+fsdp:d1."),
    "flag-of-nothing": (*_set("--zzzzzz"), "expected key=value, such as total_steps=20, --config FILE.yaml"),
    "flag-misspelt": (*_set("--dryrun"), "Did you mean '--dry-run'?"),
    "flag-without-its-value": (*_set("--config"), "--config: expected one argument. `rl grpo --help`"),
    "no-name": (*_set("=3"), "'=3': expected key=value"),
    "space-before-equals-sign": (*_set("total_steps =3"), "\"total_steps='...'\""),
    "bracket": (*_set("data.options=["), "quotes or operators: \"data.options='...'\""),
    "sweep": (*_set("total_steps=1,2"), "found several; if the setting takes a list, write total_steps=[A,B]"),
    "help-of-nothing": (*_set("--help", "rollot"), "Did you mean 'rollout'? Sections: model, data"),
    "file-missing": (*_set("--config", "nowhere.yaml"), "`--cfg job` prints an example"),
    "file-cut-off": (
        *_file("data: [1\n"),
        "theirs.yaml: expected a YAML file with settings, found: while parsing a flow",
    ),
    "file-of-a-list": (*_file("- total_steps\n"), "expected settings as `key: value`, found a list"),
    "file-with-a-typo": (*_file("totl_steps: 3\n"), "Did you mean 'total_steps'?"),
    "file-with-a-missing-reference": (*_file("seed: ${nothing}\n"), "Interpolation key 'nothing' not found"),
    "defaults-not-a-list": (*_file("defaults: 3\n"), "to be a list of files and of `section: preset`, found 3"),
    "defaults-missing-file": (*_file("defaults: [nothing]\n"), "nothing.yaml: expected a YAML file with settings"),
}
CODE = {
    "no-file": (*_reward("", "nowhere.py:f"), "nowhere.py'. Relative paths start in /"),
    "no-name-in-it": (
        *_reward("from pathlib import Path\n" + REWARD + "    return 1\n", "theirs.py:reward"),
        "has no attribute 'reward'. It defines: f.",
    ),
    "name-misspelt": (*_reward("", "good.py:ff"), "Did you mean 'f'?"),
    "import-ends-the-program": (*_reward("import sys\nsys.exit(3)\n"), "must not exit the program"),
    "no-function": (*_reward("f = 3\n"), "rollout.reward: expected a function, not a int"),
    "unknown-column": (
        *_reward(REWARD.replace("answer", "gold") + "    return 1\n"),
        "'gold'; it is called with (prompt, completion",
    ),
    "workflow-without-base-class": (*_flow("class Flow: pass\n"), "derived from one of RolloutWorkflow, AgentWorkflow"),
    "workflow-not-async": (
        *_flow(FLOW + CONSTRUCTOR + "    def arun_episode(self, engine, data): return []\n"),
        "can't be used in 'await' expression (/",
    ),
}
DATA = {
    "no-file": (*_set("data.path=nowhere.jsonl"), "found nothing there; correct the path, which is relative to /"),
    "wrong-mapping": (*_set("data.columns.messages=question"), "set data.columns.messages to"),
    "mapping-of-a-generated-data-set": (
        *_set("data.name=word-problems", "data.columns.question=q"),
        "data.columns: expected none: data.name=word-problems has no renamable columns",
    ),
    "batch-above-the-examples": (
        *_set("data.batch_size=33", command=SFT),
        "data.batch_size: expected at most the number of training examples (32), found 33.",
    ),
}
TOOLS = {
    "command": (("grop",), {}, "grop: there is no such command or app. Did you mean 'grpo'?"),
    "option-before-command": (
        ("--config", "mine.yaml", "grpo"),
        {},
        "--config: there is no such command or app. Options follow the command.",
    ),
    "command-of-another-library": (("train",), {}, "Use an app, such as `rl grpo` or `rl sft`."),
    "no-command": ((), {}, "`rl --help` lists the arguments"),
    "run-of-nothing": (("run", "grop"), {}, "did you mean 'grpo'?"),
    "run-of-no-app": (("run", "good.py:f"), {}, "expected an `rl_apps.run.app.App`, see docs/own-app.md"),
    "flag": (*_tool("status", "run", "--jsn"), "unknown arguments: --jsn. `rl status --help`"),
    "watch-broken-settings": (
        *_tool("watch", "run", files=RUN | {"run/config.yaml": "seed: ["}),
        "config.yaml: expected",
    ),
    "plan-no-model": (("plan", "grpo", "--gpu", "H100"), {}, "expected model.path=... (a Hugging Face directory"),
    "show-none": (*_tool("show", "run", "-n", "0"), "expected a whole number of at least 1, found '0'"),
    "plot-unknown-metric": (*_tool("plot", "run", "--metric", "reward/men"), "found reward/men; similar: reward/mean"),
    "plot-nothing-yet": (*_tool("plot", "run", files=RUN | {"run/metrics.jsonl": ""}), "expected records of steps"),
    "report-of-no-run": (("report", "."), {}, "expected the directory of a run (run_dir), found none of its files"),
    "report-nowhere": (*_tool("report", "run", "-o", "nowhere/x.html"), "Choose another file with -o"),
    "generate-hub-id": (("generate", "me/none"), {}, "Download a model of the hub with `hf download`"),
    "scale-of-a-finished-run": (
        *_tool("scale", "run", "rollout=2", files=RUN | {"run/finished": ""}),
        "expected an active run, found: finished",
    ),
    "watch-no-step": (*_tool("watch", "run", "--step", "7"), "supervised runs have none. `rl plot` and `rl report`"),
    "replay-nothing": (*_tool("replay", "run"), "Run with checkpoint.save_batches=true to keep them"),
    "replay-of-no-batch": (("replay", "good.py"), {}, "expected a run directory, or a file of its batches/"),
    "replay-no-step": (
        *_tool("replay", "run", "--step", "3", files=RUN | {"run/batches/step_1-batch.safetensors": ""}),
        "no batch of step 3; the run saved batches of steps [1]",
    ),
}
MODELS = {
    "no-directory": (*_set("model.path=/nowhere"), "Give a directory written by `save_pretrained`"),
    "template-cut-off": (
        *_set("model.chat_template=theirs.jinja", files={"theirs.jinja": TEMPLATE}),
        "in commands, set `model.chat_template=FILE`",
    ),
    "unknown-model-type": (
        *_set(files={"model/config.json": '{"model_type": "lama"}'}),
        "found 'lama' (did you mean 'llama'?). Upgrade transformers if a newer version has this type",
    ),
    "model-type-with-custom-code": (
        *_set(files={"model/config.json": '{"model_type": "theirs-1", "auto_map": {}}'}),
        "The model's own code (auto_map) is never run",
    ),
    "teacher-nowhere": (
        *_set("algorithm.kl.coef=0.1", "algorithm.kl.place=loss", "ref.path=/nowhere"),
        "ref.path /nowhere: expected config.json",
    ),
}
TABLES = {
    "settings": SETTINGS,
    "names": NAMES,
    "allocations": ALLOCATIONS,
    "conflicts": CONFLICTS,
    "words": WORDS,
    "code": CODE,
    "data": DATA,
    "tools": TOOLS,
    "models": MODELS,
}
MISTAKES = {f"{table}-{name}": mistake for table, mistakes in TABLES.items() for name, mistake in mistakes.items()}


@pytest.mark.parametrize(("words", "files", "fragment"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_reported_in_one_sentence_with_its_remedy(
    refused: Callable[..., str], words: tuple[str, ...], files: dict[str, str], fragment: str
) -> None:
    assert fragment in refused(words, files)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "(...ForCausalLM)."),
        ({"is_encoder_decoder": True}, "(...ForCausalLM)."),
        ({"architectures": ["BertModel"]}, "(...ForCausalLM)."),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "found Qwen3ForSequenceClassification"),
    ],
)
def test_model_that_cannot_continue_a_prompt_is_rejected(
    refused: Callable[..., str], model: Path, change: dict[str, object], fragment: str
) -> None:
    settings = json.loads((model / "config.json").read_text()) | change

    assert fragment in refused(GRPO, {"model/config.json": json.dumps(settings)})


@pytest.mark.parametrize(
    ("missing", "fragment"),
    [
        ("tokenizer*", "expected a tokenizer (tokenizer.json) beside the weights"),
        ("*.safetensors", "expected weights (*.safetensors) beside config.json"),
    ],
)
def test_model_directory_without_a_file_is_rejected(
    refused: Callable[..., str], tmp_path: Path, missing: str, fragment: str
) -> None:
    for file in (tmp_path / "model").glob(missing):
        file.unlink()

    assert fragment in refused(GRPO, {})


def test_resume_from_in_a_rejected_command_removes_nothing(refused: Callable[..., str], tmp_path: Path) -> None:
    steps = "".join(_lines({"step": step}) for step in (1, 2))
    manifests = {f"run/recover/step_{step}/manifest.json": {"step": step, "ranks": 1, "files": {}} for step in (1, 2)}
    before = {"run/config.yaml": to_yaml(grpo.APP.config([*GRPO[1:], "total_steps=3"])), "run/metrics.jsonl": steps}
    wrong = REWARD + "    raise ValueError('injected')\n"

    error = refused(
        (*GRPO, "total_steps=3", "resume_from=1"),
        before | {name: json.dumps(value) for name, value in manifests.items()} | {"good.py": wrong},
    )

    assert "injected" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == steps
    assert (tmp_path / "run" / "recover" / "step_2").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("refused")
def test_run_directory_deleted_during_the_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def delete(*_: object, **__: object) -> int:
        shutil.rmtree(tmp_path / "run")
        raise LaunchError("actor-0 ended with exit code 2")

    monkeypatch.setattr("rl_apps.cli.driver.Launcher.run", delete)

    assert main.main([*GRPO, "evaluation.examples=0"]) == 1
    assert f"{tmp_path / 'run'}: the run directory was deleted during the run" in capsys.readouterr().err


def test_shared_memory_too_small_is_rejected(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("rl_apps.preflight.checks.shutil.disk_usage", lambda _: usage._replace(free=65536))

    error = refused((*GRPO, "publish.route=shm"), {})

    assert "publish.route=shm: expected 0.1 MiB free in /dev/shm for two versions" in error
    assert "found '0.1 MiB'" in error


def test_shared_memory_read_only_is_rejected(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm" and access(path, mode))

    assert "publish.route=shm: expected a writable /dev/shm" in refused((*GRPO, "publish.route=shm"), {})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_shared_memory_of_another_user_is_rejected(refused: Callable[..., str], tmp_path: Path) -> None:
    directory = weights_directory(tmp_path / "run")
    directory.mkdir()
    try:
        os.chown(directory, 65534, 65534)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "rl_apps.cli.driver.shutil.rmtree", lambda *_, **__: None
            )  # as in a directory with the sticky bit
            error = refused((*GRPO, "publish.route=shm"), {})
    finally:
        directory.rmdir()

    assert f"{directory}: expected a private directory (mode 700)" in error


def test_resuming_with_another_kind_of_model_is_rejected(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_apps.run.directory.resumed_step", lambda *_: 1)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    other = json.dumps(settings | {"num_hidden_layers": 9})
    config = to_yaml(grpo.APP.config(["seed=1", "model.path=other", f"model.directories.other={tmp_path}/other"]))

    error = refused(GRPO, RUN | {"other/config.json": other, "run/config.yaml": config})

    assert "model.path: expected the architecture and size of other, the model of the run in" in error
    assert "(or start a new run), found 'model'" in error


def test_resume_from_run_with_another_model_is_rejected(refused: Callable[..., str], tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    files = {
        "other/config.json": json.dumps(settings | {"num_hidden_layers": 9}),
        "source/config.yaml": to_yaml(grpo.APP.config(["model.path=other"])),
        "source/recover/step_3/manifest.json": json.dumps({"step": 3, "ranks": 1, "files": {}}),
    }

    error = refused((*GRPO, "resume_from=source"), files)

    assert "the model of the run in source (or start a new run), found 'model'" in error


def test_slurm_that_does_not_respond_is_reported(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    error = refused((*GRPO, "launcher=slurm"), {})

    assert "sinfo failed: no controller. Run this on a machine where `sinfo` lists" in error
