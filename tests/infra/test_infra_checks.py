"""Scripts of CI and of the commit hooks: they report injected faults."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
CI = ROOT / "infra" / "ci"


def _script(name):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- import cycles


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, [["c", "d"], ["a", "b"]]),
        ({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"b"}}, [["a", "b", "c", "d"]]),
    ],
    ids=["triangle", "two pairs, one imports the other", "two cycles with a shared module"],
)
def test_find_circles_returns_maximal_import_cycles(imports, expected):
    cycles = _script("import_circles").find_circles(imports)

    assert sorted(cycles) == sorted(expected)


def _lint_imports(directory, contract):
    (directory / "cyclic").mkdir(parents=True)
    (directory / "cyclic" / "__init__.py").write_text("")
    (directory / "cyclic" / "first.py").write_text("from cyclic.second import two\n\none = 1\n")
    (directory / "cyclic" / "second.py").write_text(
        "def two():\n    from cyclic.first import one\n\n    return 2 * one\n"
    )
    (directory / "config.toml").write_text(
        '[tool.importlinter]\nroot_packages = ["cyclic"]\n'
        'contract_types = ["no_circles: infra.ci.import_circles.NoCirclesContract"]\n'
        f'[[tool.importlinter.contracts]]\nname = "none"\ntype = "no_circles"\n{contract}'
    )
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(directory)!r}]; {command[2]}"
    return subprocess.run(
        [*command[:2], path, "--config", str(directory / "config.toml"), "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_lint_imports_cycle_fails_with_both_lines_unless_ignored(tmp_path):
    done = _lint_imports(tmp_path / "reported", "")
    ignored = _lint_imports(tmp_path / "ignored", 'ignore_imports = ["cyclic.second -> cyclic.first"]')

    assert done.returncode == 1, done.stdout + done.stderr
    assert "cyclic.first -> cyclic.second (l. 1)" in done.stdout
    assert "cyclic.second -> cyclic.first (l. 2)" in done.stdout
    assert ignored.returncode == 0, ignored.stdout + ignored.stderr


# ---- statements


def test_count_statements_excludes_docstrings_layout_and_test_helpers(tmp_path):
    source = tmp_path / "packages" / "rl-one" / "src" / "rl_one"
    (source / "testing").mkdir(parents=True)
    (source / "__init__.py").write_text('"""Module docstring."""\nx = 1; y = (\n    2\n)\n"""Another string."""')
    (source / "testing" / "fakes.py").write_text("not_counted = 1\n")
    apps = tmp_path / "apps" / "src" / "rl_apps"
    apps.mkdir(parents=True)
    (apps / "main.py").write_text("def f():\n    '''Doc.'''\n    return 1\n")

    command = [sys.executable, str(CI / "count_statements.py"), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1].split()[:3] == ["total", "2", "4"]


@pytest.mark.parametrize(("files", "code"), [(14, 0), (15, 1)])
def test_folder_sizes_above_the_limit_fails(tmp_path, files, code):
    folder = tmp_path / "packages" / "rl-one" / "src" / "rl_one"
    folder.mkdir(parents=True)
    for name in ("__init__", *(f"part{index}" for index in range(files))):
        (folder / f"{name}.py").touch()

    command = [sys.executable, str(CI / "folder_sizes.py"), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert ("rl_one: 15 Python files" in done.stderr) == bool(code)


# ---- commit messages


@pytest.mark.parametrize(
    "message",
    [
        "feat(rl-rewards): partial credit",
        "fix!: reject settings when they are resolved\n\nBecause.\n# a comment of git's\n",
        "Merge branch 'main' into mine",
        'Revert "feat: more"',
        "fixup! feat: more",
    ],
)
def test_commit_message_in_conventional_form_passes(message):
    assert _script("commit_message").problem(message) == ""


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Fixed the build", "found 'Fixed the build'"),
        ("feat(RL Rewards): more", "optional scope"),
        ("feat: more.", "without a period"),
        ("feat:more", "found 'feat:more'"),
        ("feat: " + "x" * 67, "found 73"),
        ("feat: more\nand more", "empty line after the subject, found 'and more'"),
    ],
)
def test_commit_message_in_another_form_is_rejected(message, problem):
    assert problem in _script("commit_message").problem(message)


def test_commit_message_checks_a_file_or_each_commit_of_a_range(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for subject in ("docs: base", "docs: good", "wip"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", subject], check=True)

    (tmp_path / "good").write_text("docs: how to add a reward\n")
    (tmp_path / "bad").write_text("wip\n")

    for arguments, code in (
        (["good"], 0),
        (["bad"], 1),
        (["--range", "HEAD~2..HEAD~1"], 0),
        (["--range", "HEAD~2..HEAD"], 1),
    ):
        command = [sys.executable, str(CI / "commit_message.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert ("found 'wip'" in done.stderr) == bool(code)


# ---- language

BANNED = "an" + "ew"
"""Word that the language lint rejects, in two parts so that it accepts this file."""


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.py", f"# It is tried {BANNED}.\n", f"banned word {BANNED!r}"),
        ("a.py", 'x = 1\n"""What it is."""\n', "docstring begins with 'What'"),
        ("a.py", 'def run():\n    """Offline mode."""\n', None),
        ("a.py", f"def test_{'x' * 66}(): ...\n", "71 characters"),
        ("a.py", f"raise ValueError(f'{'word ' * 40}{{x}}')\n", "message of 41 words"),
        ("a.py", f"log.warning('{'word ' * 41}')\n", "message of 41 words"),
        ("a.py", f"option(help='{'word ' * 40}')\n", None),
        ("a.md", f"| one | {'word ' * 26}|\n", "table cell of 26 words"),
    ],
)
def test_lint_language_names_the_broken_rule(name, text, problem):
    problems = [message for _, message in _script("lint_language").check(name, text)]

    assert [problem in message for message in problems] == ([True] if problem else [])


def test_lint_language_banned_word_in_a_checked_folder_fails(tmp_path):
    page = tmp_path / "packages" / "rl-contracts" / "README.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"It is tried {BANNED}.\n")
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)

    command = [sys.executable, str(CI / "lint_language.py"), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, f"README.md:1: banned word {BANNED!r}" in done.stderr) == (1, True)


def test_readme_of_infra_lists_every_script_and_image_file():
    infra = CI.parent
    listed = (infra / "README.md").read_text()

    files = [
        path for pattern in ("release/*.py", "servers/*.py", "containers/Dockerfile.*") for path in infra.glob(pattern)
    ]
    files = [path for path in (*files, *CI.iterdir()) if path.suffix != ".dockerignore" and path.name != "__pycache__"]
    assert [path.name for path in files if path.name not in listed] == []


# ---- all of CI


@pytest.mark.parametrize("failing", ["ruff check .", "infra/servers/build.py vllm", "pytest -q --all"])
def test_ci_stops_with_the_message_of_the_failed_command(tmp_path, failing):
    """CI must build the environment of the server before the tests; without it, server tests are skipped."""
    calls = tmp_path / "calls"
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$*" >>{calls}\ncase "$*" in *"{failing}"*) echo why >&2; exit 1 ;; esac\n')
    uv.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [str(ROOT / ".ci" / "run")]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (1, "why\n")
    assert failing in calls.read_text()
    assert ("pytest" in calls.read_text()) == (failing == "pytest -q --all")


# ---- declared dependencies


def test_lint_undeclared_dependency_in_a_function_is_reported(tmp_path):
    (options,) = re.findall(r"deptry (src tests .*)\)", (CI / "lint.sh").read_text())
    for name in ("src", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "src" / "own.py").write_text("def late():\n    import numpy\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "own"\nversion = "1"\ndependencies = []\n')

    deptry = [str(Path(sys.executable).parent / "deptry"), *options.split()]
    done = subprocess.run(deptry, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stderr
    assert "'numpy' imported but" in done.stderr


# ---- each package in a separate environment

PACKAGES = [*sorted(path.name for path in (ROOT / "packages").iterdir()), "rl-apps"]


@pytest.mark.guarantee(
    "Each package passes its quick tests without the other packages, except `rl-contracts`.", area="boundaries"
)
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("package", PACKAGES)
def test_package_installed_alone_passes_its_quick_tests(package):
    command, alone = [str(CI / "test_package.sh"), package], {"ALONE_ENVIRONMENT": ".venv-alone-nightly"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **alone})

    assert done.returncode == 0, done.stdout + done.stderr


# ---- the nightly run


def test_nightly_cut_splits_long_files_into_tests(monkeypatch):
    nightly = _script("nightly")
    monkeypatch.setattr(nightly, "SPLIT", {"long.py"})

    parts = nightly.cut(["short.py::test_a", "short.py::test_b[1]", "long.py::test_c[x]", "long.py::test_d"])

    assert parts == ["short.py", "long.py::test_c[x]", "long.py::test_d"]


def test_nightly_split_files_exist():
    assert [name for name in _script("nightly").SPLIT if not (ROOT / name).is_file()] == []


def test_nightly_summarize_counts_tests_reasons_and_metrics():
    report = ElementTree.fromstring(
        """<testsuites><testsuite time="90.04">
        <testcase classname="a" name="test_learns">
        <properties><property name="reward" value="0.9"/></properties></testcase>
        <testcase classname="a" name="test_breaks"><failure message="no"/></testcase>
        <testcase classname="b" name="test_gpu[1]"><skipped message="no GPU"/></testcase>
        <testcase classname="b" name="test_gpu[2]"><skipped message="no GPU"/></testcase></testsuite></testsuites>"""
    )

    assert _script("nightly").summarize(report) == {
        "passed": 1,
        "failed": ["a::test_breaks"],
        "skipped": {"no GPU": 2},
        "seconds": 90.0,
        "metrics": {"test_learns": {"reward": "0.9"}},
    }


@pytest.fixture
def nightly(tmp_path, monkeypatch):
    """The script, in a repository with two nightly test files; the test of the second fails."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers =\n  slow: x\n  nightly: x\n  gpu: x\n")
    (tmp_path / ".gitignore").write_text("runs/\n__pycache__/\n.pytest_cache/\n")
    for name, body in (("one", "pass"), ("two", "assert False")):
        text = f"import pytest\n@pytest.mark.nightly\ndef test_{name}(): {body}\ndef test_quick(): assert False\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    for arguments in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "x"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    script = _script("nightly")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "RESULTS", tmp_path / "runs")
    return script


@pytest.mark.slow
def test_nightly_interrupted_run_resumes_with_the_remaining_parts(nightly, capsys):
    assert nightly.main(["--parts", "--shard", "1/2"]) == 0
    assert nightly.main(["--parts"]) == 1
    capsys.readouterr()
    assert nightly.main([]) == 1

    (file,) = nightly.RESULTS.iterdir()
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["part"], r["passed"], len(r["failed"])) for r in results] == [
        ("test_one.py", 1, 0),
        ("test_two.py", 0, 1),
    ]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results


@pytest.mark.slow
def test_nightly_part_over_its_limit_is_stopped_and_fails(nightly):
    result = nightly.run("test_one.py", limit=0.01)

    assert (result["passed"], len(result["failed"])) == (0, 1)


# ---- flaky tests


def test_flaky_shuffle_keeps_tests_of_a_file_together():
    items = [SimpleNamespace(path=path, name=number) for path in "abcd" for number in range(5)]

    orders = []
    for seed in (1, 2):
        shuffled = list(items)
        _script("flaky").shuffle(shuffled, seed)
        orders.append(shuffled)

    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order, key=items.index) == items
        assert len(list(groupby(order, key=lambda item: item.path))) == 4


def test_flaky_changed_lists_test_files_that_differ_from_a_commit(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
    (tmp_path / "tests").mkdir()
    for name in ("old", "gone", "new"):
        (tmp_path / "tests" / f"test_{name}.py").write_text(name)
        if name == "gone":
            subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
            subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
            subprocess.run([*git, "commit", "-qm", "base"], cwd=tmp_path, check=True)
    (tmp_path / "tests" / "test_gone.py").unlink()
    (tmp_path / "other.py").write_text("no test")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "more"], cwd=tmp_path, check=True)
    script = _script("flaky")
    monkeypatch.setattr(script, "ROOT", tmp_path)

    assert script.changed("HEAD~1") == ["tests/test_new.py"]


@pytest.mark.slow
def test_flaky_test_that_fails_in_one_of_two_runs_is_printed(tmp_path, monkeypatch, capsys):
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    tests = "import os\ndef test_first(): os.mkdir('ran')\ndef test_always(): pass\n"
    (tmp_path / "test_counts.py").write_text(tests)
    script = _script("flaky")
    monkeypatch.setattr(script, "ROOT", tmp_path)

    assert script.main(["test_counts.py", "-n", "2"]) == 1

    printed = capsys.readouterr().out
    assert "test_counts::test_first: 1 of 2 runs failed" in printed
    assert "test_always" not in printed


# ---- test selection


def test_marks_select_tests_regardless_of_the_folder_name(tmp_path):
    checkout = tmp_path / "nightly"
    checkout.mkdir()
    (checkout / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: x\n  nightly: x\n  gpu: x\n")
    marked = "".join(f"@pytest.mark.{mark}\ndef test_{mark}(): pass\n" for mark in ("slow", "nightly"))
    (checkout / "test_slow.py").write_text(f"import pytest\ndef test_quick(): pass\n{marked}")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n0", "-p", "no:cacheprovider", str(checkout)]

    outputs = [
        subprocess.run([*command, *flag], capture_output=True, text=True, timeout=120, cwd=checkout).stdout
        for flag in ((), ("--all",), ("--nightly",))
    ]

    assert [re.findall(r"PASSED .*::test_(\w+)", output) for output in outputs] == [
        ["quick"],
        ["quick", "slow"],
        ["quick", "slow", "nightly"],
    ]
