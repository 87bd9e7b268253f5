"""Run every code block of the documentation, or parse it if `HANDLERS` gives a reason not to run it.

A block whose first line is a comment with a file name is written to that file. Python blocks of a page run in order,
in one namespace. The working directory has the placeholders that pages use: `DIR` (data), `CHECKPOINT` (a model) and
`RUN` (an empty run directory). Blocks marked as text are skipped.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from docs_pages import PAGES
from markdown_it import MarkdownIt
from readme import blocks, write_data, write_files
from workspace import packages

from rl_contracts import registry

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "docs/algorithms.md": "test_docs_algorithms.py",
    "docs/own-app.md": "test_docs_own.py",
    "docs/own-loop.md": "test_docs_own.py",
    **{page: "test_docs_tutorials.py" for page in PAGES if re.match(r"docs/tutorials/\d", page)},
}
"""Pages whose blocks another test runs, and the file of that test."""

WITH_OTHER_SETTINGS = {"docs/settings.md", "docs/coming-from.md"}
"""Pages whose settings other tests check: one is generated, one also names settings of other libraries."""

FILE_TYPES = ("md", "py", "json", "jsonl", "yaml")
"""Suffixes of dotted names that are files, not settings."""


BLOCKS = [block for page in PAGES if page not in ELSEWHERE for block in blocks(page, ROOT)]
COMMANDS = {
    page: [command for block in console_blocks for command in block.commands()]
    for page in PAGES
    if (console_blocks := [block for block in BLOCKS if (block.page, block.language) == (page, "console")])
}
"""Commands of each page that has some."""


# ---- commands


def _app(name: str) -> Callable[[list[str]], None]:
    """Return a function that runs an app with `--dry-run`, or with the options of the command that print and exit."""

    def run(words: list[str]) -> None:
        from rl_apps.cli.driver import main

        only_prints = {"--help", "--dry-run", "--cfg"} & set(words)
        words = [_with_servers(word) for word in words]
        assert main(name, words if only_prints else [*words, "--dry-run"]) == 0

    return run


def _with_servers(word: str) -> str:
    """If the word sets a placeholder for an interpreter, set a script that reports versions of the servers instead."""
    if word != "rollout.server.python=PYTHON":
        return word
    python = Path("python-with-servers").absolute()
    versions = """case "$3" in vllm*) found='"vllm": "0.32.0"';; *) found='"sglang": "0.5.23"';; esac"""
    python.write_text(f"""#!/bin/sh\n{versions}\necho "[\\"3.12.0\\", {{$found}}, \\"\\"]"\n""")
    python.chmod(0o755)
    return f"rollout.server.python={python}"


def _rl(words: list[str]) -> None:
    """Run a command of `rl`.

    `run NAME`, `doctor NAME` and `NAME` dry-run the app NAME. Commands that read a run fail, because `RUN` is empty.
    """
    from rl_apps.cli.main import main

    command, target, *rest = [*words, ""]
    if command == "run" or (command == "doctor" and target):
        _app(target)(rest[:-1])
    elif command in registry.available("rl.apps"):
        _app(command)([target, *rest][:-1])
    elif command == "plan":  # the empty `RUN` has no rates to plan with
        assert main(words) == (2 if "RUN" in words else 0)
    elif command == "serve":  # would serve until a signal: everything before the model is loaded
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RL_API_KEY", "SECRET")
            patch.setattr("rl_inference.embedded_server.__main__.run", lambda server: server.close() or 0)
            assert main(["serve", "CHECKPOINT", *rest[:-1]]) == 0
    elif command == "evaluate":  # only the checks; the empty `RUN` has no model
        words = [_with_servers(word) for word in words if word != "--dry-run"]
        assert main([*words, "--dry-run"]) == (2 if "RUN" in words else 0)
    elif command == "metrics" or (command, target) == ("generate", "CHECKPOINT"):
        assert main(words) == 0
    else:
        problem = "no saved batches" if command == "replay" else "expected the directory of a run"
        assert f"{target}: {problem}" in _error_output(lambda: main(words), 2)


def _tutorial(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words, "--dry-run"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    assert ended.value.code == 0


def _validate(words: list[str]) -> None:
    from rl_datasets.validate import main

    assert main(words) == 0


def _server(words: list[str]) -> None:
    from rl_inference.backends.embedded.config import parse

    assert parse(words).port


def _benchmark(words: list[str]) -> None:
    script, *options = [word.strip("[]") for word in words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *options, "--help"])
        patch.syspath_prepend(ROOT / Path(script).parent)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0


def _pytest(words: list[str]) -> None:
    """Check the mark of `-m`, or collect one file; `test_pytest_files_of_the_pages_pass` runs the files of a page."""
    if "-m" in words:
        assert f"@pytest.mark.{words[words.index('-m') + 1]}:" in _run(sys.executable, "-m", "pytest", "--markers")
    elif not any(word.endswith(".py") for word in words):
        assert "tests collected" in _collect(*words)


@functools.cache
def _collect(*flags: str) -> str:
    return _run(sys.executable, "-m", "pytest", "--collect-only", "-q", *flags, "tests/infra/test_infra_checks.py")


def _script(words: list[str]) -> None:
    assert os.access(ROOT / words[0], os.X_OK)
    _run("bash", "-n", words[0])


def _parsed(words: list[str]) -> None:
    ast.parse((ROOT / words[0]).read_text())


def _commit(words: list[str]) -> None:
    problem = runpy.run_path(str(ROOT / "infra" / "ci" / "commit_message.py"))["problem"]
    assert problem(words[words.index("--message") + 1]) == ""


def _install(words: list[str]) -> None:
    """Check that the folders and packages exist in the workspace and have the named extras."""
    folders = {package.folder.relative_to(ROOT).as_posix(): package for package in packages().values()}
    local_packages = {**packages(), **folders}
    skipped = {"--torch-backend", "cpu", "torch", "transformers", "uv"}
    for word in (word for word in words if word not in skipped):
        name, _, extras = word.partition(" @ git+")[0].removesuffix("]").partition("[")
        assert name in local_packages
        assert not extras or set(extras.split(",")) <= set(local_packages[name].project["optional-dependencies"])


def _uv(words: list[str]) -> None:
    _run("uv", *words, "--help")


def _hooks(words: list[str]) -> None:
    _run(sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")


WHOLE = ""
HANDLERS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "python -m rl_datasets.validate": (_validate, WHOLE),
    "rl": (_rl, "replay needs a run with a saved batch; test_other_models.py creates one"),
    "python -m rl_inference.embedded_server": (_server, "serves until it is stopped: its options are parsed"),
    "python tests/benchmarks/": (
        _benchmark,
        "minutes: its options are parsed; test_benchmarks_run.py runs a small one",
    ),
    "python docs/tutorials/": (
        _tutorial,
        "minutes: --dry-run; the nightly run of test_docs_tutorials.py runs two steps",
    ),
    "pytest": (_pytest, "would run this test again: one file is collected"),
    "python infra/ci/": (_benchmark, "hours: its options are parsed; test_infra_checks.py runs it small"),
    "python infra/release/": (_benchmark, "changes versions or builds packages: its options are parsed"),
    "git commit": (_commit, "changes the repository: its message is checked"),
    "python infra/servers/": (_benchmark, "builds or starts a server: its options are parsed"),
    "python infra/docs/": (_parsed, "writes into docs/: it is parsed; test_docs_site.py compares what it would write"),
    "infra/ci/": (_script, "takes minutes or creates an environment: its syntax is checked, CI runs it"),
    "infra/install_cpu.sh": (
        _script,
        "creates an environment: its syntax is checked; test_infra_install_cpu.py runs it",
    ),
    "infra/docs/": (_script, "its syntax is checked; test_docs_site.py builds the site"),
    ".ci/run": (_script, "would run this test again: its syntax is checked"),
    "uv pip install": (_install, "changes the environment: the package must exist"),
    "pip install": (_install, "changes the environment: the package must exist"),
    "uv sync": (_uv, "changes the environment: its options are parsed"),
    "pre-commit install": (_hooks, "changes the repository: the hooks are validated"),
    **{point.name: (_app(point.name), "minutes: --dry-run") for point in entry_points(group="rl.apps")},
}
"""Handler for each prefix of a command, and why it does not run the command as written (`WHOLE`: it does)."""


def _handler(command: str) -> tuple[Callable[[list[str]], None], list[str]] | None:
    """Return the handler of a command and its arguments, or None."""
    command = re.sub(r"^([A-Z_]+=\S* )*", "", command)
    # the workspace itself has no extras
    command = re.sub(r"^uv run (--no-sync )?(--package rl-apps (--extra \w+ )?)?", "", command)
    for prefix, (run, _) in HANDLERS.items():
        if command == prefix or command.startswith(prefix if prefix.endswith("/") else prefix + " "):
            with_name = run in (_benchmark, _parsed, _script, _tutorial, _uv)
            rest = command.removeprefix("python ").removeprefix("uv ") if with_name else command[len(prefix) :]
            return run, shlex.split(rest)
    return None


def _run(*command: str, timeout: float = 280) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _error_output(call: Callable[[], int], code: int) -> str:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        assert call() == code
    return stderr.getvalue()


# ---- where a page runs


@pytest.fixture(scope="module")
def configs() -> list[Any]:
    """Default settings of every app, and of one app with each kind of server and each scheduler."""
    apps = {point.name: point.load() for point in entry_points(group="rl.apps")}
    servers = [f"allocation={point.name}:d1+fsdp:d1" for point in entry_points(group="rl.inference_engines")]
    schedulers = [f"launcher={point.name}" for point in entry_points(group="rl.schedulers")]
    kinds = (apps["gsm8k-grpo"].config([kind]) for kind in (*servers, *schedulers))
    return [*(app.config([]) for app in apps.values()), *kinds]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the data, model, empty run directory and config that pages use."""
    from rl_apps.programs.gsm8k_grpo import APP
    from rl_apps.settings.compose import to_yaml
    from rl_contracts.testing.models import make_tiny_model

    directory = tmp_path_factory.mktemp("shared")
    write_data(directory / "DIR")
    make_tiny_model(directory / "CHECKPOINT", layers=1, hidden=32)
    (directory / "RUN").mkdir()
    (directory / "config.yaml").write_text(to_yaml(APP.config([])))
    return directory


@pytest.fixture
def sandbox(
    request: pytest.FixtureRequest, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Working directory with the files of a page; Python imports modules from it."""
    for name in ("DIR", "CHECKPOINT", "RUN"):
        (tmp_path / name).symlink_to(shared / name)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "gsm8k").symlink_to(shared / "DIR")
    earlier = tmp_path / "runs" / "gsm8k-grpo" / "TRIAL" / "config.yaml"
    earlier.parent.mkdir(parents=True)
    shutil.copy(shared / "config.yaml", earlier)
    write_files(blocks(request.getfixturevalue("page"), ROOT), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


# ---- tests


def test_blocks_of_the_pages_have_a_supported_language() -> None:
    groups = {
        group
        for file in ROOT.glob("packages/*/pyproject.toml")
        for group in tomllib.loads(file.read_text())["project"].get("entry-points", {})
    }
    for block in BLOCKS:
        place = f"{block.page}:{block.line}"
        match block.language:
            case "python":
                compile(block.text, place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "console":
                unknown = [command for command in block.commands() if _handler(command) is None]
                assert not unknown, f"{place}: these commands have no handler: add them to HANDLERS"
                assert block.commands(), f"{place}: a console block needs a command after `$ `"
            case "toml":
                assert set(tomllib.loads(block.text)["project"]["entry-points"]) <= groups | {"rl.apps"}, place
            case "yaml":
                assert block.file, f"{place}: a YAML block needs a first line `# name.yaml`, which commands can use"
            case other:
                assert other == "text", f"{place}: this language has no handler"


def test_settings_on_the_pages_exist(configs: list[Any]) -> None:
    unknown = []
    for page in sorted({*PAGES} - WITH_OTHER_SETTINGS):
        inline = [child for token in MarkdownIt().parse((ROOT / page).read_text()) for child in token.children or ()]
        named = (re.match(r"(\w+(?:\.\w+)+)(?:=|$)", child.content) for child in inline if child.type == "code_inline")
        for setting in (match.group(1) for match in named if match):
            section, name = setting.split(".", 1)
            is_setting = any(hasattr(config, section) for config in configs) and name not in FILE_TYPES
            if is_setting and not any(_has(config, setting) for config in configs):
                unknown.append((page, setting))

    assert unknown == []


def _has(config: Any, setting: str) -> bool:
    for name in setting.split("."):
        if isinstance(config, dict):
            return True  # options of a custom component
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


def test_pages_run_by_other_tests_are_named_in_them() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / "docs" / test).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.page == page and b.is_program for b in BLOCKS)])
def test_python_blocks_of_a_page_run_in_order(page: str, sandbox: Path) -> None:
    namespace = {"__name__": "__main__"}
    for block in blocks(page, ROOT):
        if not block.is_program:
            continue
        code = compile("\n" * block.line + block.text, str(ROOT / page), "exec")
        try:
            exec(code, namespace)
        except SystemExit as ended:
            assert ended.code in (0, None)  # noqa: PT017 - a program may exit


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_of_a_page_succeed(page: str, sandbox: Path) -> None:
    for command in COMMANDS[page]:
        print(f"$ {command}")  # pytest shows it if the command fails
        handler = _handler(command)
        assert handler is not None
        run, words = handler
        run(words)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pytest_files_of_the_pages_pass(tmp_path: Path) -> None:
    files, folders = [], []
    for page in sorted({b.page for b in BLOCKS}):
        named = [word for b in BLOCKS if b.page == page for c in b.commands() if " pytest " in c for word in c.split()]
        if any(word.endswith(".py") for word in named):
            folders.append(tmp_path / page.replace("/", "_"))
            folders[-1].mkdir()
            write_files(blocks(page, ROOT), folders[-1])
            files += [str(folders[-1] / word) for word in named if word.endswith(".py")]
    settings = (
        "[pytest]",
        f"pythonpath = {' '.join(map(str, folders))}",
        "asyncio_mode = auto",  # the workspace uses the same mode
        "asyncio_default_fixture_loop_scope = function",
    )
    (tmp_path / "pytest.ini").write_text("\n".join(settings))
    flags = ("-q", "-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider", "--import-mode=importlib")
    assert " passed" in _run(sys.executable, "-m", "pytest", *flags, *files, timeout=880)
