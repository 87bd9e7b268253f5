"""Releases: versions, ranges, changelogs and tags agree, and built packages work in a separate environment."""

import subprocess
import time

import bump
import check
import pytest
import readme
import tag
import workspace
from packaging.requirements import Requirement
from packaging.version import Version

PACKAGES = list(workspace.packages().values())


def _parameters(values):
    return {"argvalues": values, "ids": [value.name for value in values]}


# ---- the packages as they are


@pytest.mark.parametrize("package", **_parameters(PACKAGES))
def test_release_files_of_a_package_agree(package):
    assert workspace.faults(package) == []


@pytest.mark.parametrize("package", **_parameters(PACKAGES))
def test_readme_has_install_command_and_example(package):
    page = (package.folder / "README.md").relative_to(workspace.ROOT).as_posix()
    blocks = readme.blocks(page, workspace.ROOT)
    requirements = check.asked_for(page, "\n".join(command for block in blocks for command in block.commands()))

    assert Requirement(requirements[0]).name == package.name
    assert any(block.is_program for block in blocks)


def test_release_scripts_are_listed_in_the_readme():
    listed = (workspace.ROOT / "infra" / "README.md").read_text()

    assert [path.name for path in check.DOWNSTREAM.parent.glob("*.py") if path.name not in listed] == []


def test_downstream_projects_require_one_package_each():
    packages = {project.name: check.uses(project).name for project in check.DOWNSTREAM.iterdir()}

    assert packages == {"rewards": "rl-rewards", "losses": "rl-trainers"}


# ---- a small workspace for fault injection


def _package(root, name, dependencies=""):
    source = root / "packages" / name / "src" / name.replace("-", "_")
    source.mkdir(parents=True)
    (source / "__init__.py").touch()
    folder = root / "packages" / name
    (folder / "LICENSE").write_text("Free.\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n## 0.1.0\n\n- First version.\n")
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "0.1.0"\nrequires-python = ">=3.12"\n'
        f"dependencies = [{dependencies}]\n[tool.uv.sources]\nrl-base = {{ workspace = true }}\n"
    )


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with the packages `rl-base` and `rl-user`, which depends on `rl-base`."""
    (tmp_path / "LICENSE").write_text("Free.\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "all"\nversion = "0"\nrequires-python = ">=3.12"\n'
        '[tool.uv.workspace]\nmembers = ["packages/*"]\n'
    )
    _package(tmp_path, "rl-base")
    _package(tmp_path, "rl-user", '"rl-base[torch]>=0.1,<0.2", "numpy>=0.1,<0.2"')
    downstream = tmp_path / "infra" / "release" / "downstream" / "one"
    downstream.mkdir(parents=True)
    (downstream / "pyproject.toml").write_text('[project]\ndependencies = ["rl-base>=0.1,<0.2"]\n')
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "A")
        monkeypatch.setenv(f"{name}_EMAIL", "a@example.org")
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    return tmp_path


def _git(root, *words):
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def _commit(root):
    _git(root, "add", "--all")
    _git(root, "-c", "core.hooksPath=/dev/null", "commit", "--quiet", "--message", "all")


def _edit(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


# ---- tags


def test_tag_annotation_lists_the_changes_of_the_version(root):
    assert tag.tag("rl-user", root) == "rl-user-v0.1.0"

    assert _git(root, "cat-file", "-t", "rl-user-v0.1.0") == "tag\n"
    assert _git(root, "tag", "--list", "--format=%(contents)") == "rl-user 0.1.0\n\n- First version.\n\n"


@pytest.mark.parametrize(
    ("path", "before", "after", "message"),
    [
        ("CHANGELOG.md", "## 0.1.0\n", "## 0.0.9\n", "expected changes under '## 0.1.0', found none"),
        ("CHANGELOG.md", "## 0.1.0\n", "## Unreleased\n\n- More.\n\n## 0.1.0\n", "(?s)found\n- More.\n.*bump.py"),
        (
            "pyproject.toml",
            "rl-base[torch]>=0.1,<0.2",
            "rl-base>=0.1",
            "expected rl-base>=0.1,<0.2, found rl-base>=0.1",
        ),
        ("pyproject.toml", "rl-base[torch]>=0.1,<0.2", "rl-base<0.2", "expected rl-base>=0.1,<0.2, found rl-base<0.2"),
        ("pyproject.toml", "rl-base[torch]>=0.1,<0.2", "rl-base>=0.2,<0.3", "found rl-base<0.3,>=0.2"),
        ("LICENSE", "Free.", "Not free.", "expected a copy of LICENSE"),
    ],
)
def test_tag_with_inconsistent_files_raises_release_error(root, path, before, after, message):
    _edit(root / "packages" / "rl-user" / path, before, after)
    _commit(root)

    with pytest.raises(workspace.ReleaseError, match=message):
        tag.tag("rl-user", root)
    assert _git(root, "tag") == ""


def test_tag_with_uncommitted_changes_raises_release_error(root):
    (root / "new.txt").write_text("")

    with pytest.raises(workspace.ReleaseError, match=r"found\n\?\? new.txt\ncommit"):
        tag.tag("rl-user", root)


def test_tag_that_exists_raises_release_error_and_is_unchanged(root):
    tag.tag("rl-user", root)
    first = _git(root, "rev-parse", "rl-user-v0.1.0")
    (root / "more.txt").write_text("")
    _commit(root)

    with pytest.raises(workspace.ReleaseError, match=r"rl-user-v0.1.0: expected a version without a tag"):
        tag.tag("rl-user", root)
    assert _git(root, "rev-parse", "rl-user-v0.1.0") == first
    assert tag.tag("rl-base", root) == "rl-base-v0.1.0"


@pytest.mark.parametrize("program", [tag, bump, check])
def test_unknown_package_exits_2_and_lists_the_packages(program, capsys):
    words = ["rl-nothing", "patch"] if program is bump else ["rl-nothing"]

    assert workspace.ended(lambda: program.main(words)) == 2
    assert "expected a package of rl-contracts, " in capsys.readouterr().err


# ---- versions


@pytest.mark.parametrize(
    ("version", "expected"), [("0.1.3", ">=0.1,<0.2"), ("0.9.0", ">=0.9,<0.10"), ("1.4.2", ">=1.4,<2")]
)
def test_compatible_range_excludes_the_next_breaking_version(version, expected):
    assert workspace.compatible(Version(version)) == expected


def test_bump_minor_updates_version_ranges_and_changelogs(root):
    base, user = root / "packages" / "rl-base", root / "packages" / "rl-user"
    _edit(base / "CHANGELOG.md", "## 0.1.0\n", "## Unreleased\n\n- `f` is gone.\n\n## 0.1.0\n")

    assert bump.bump("rl-base", "minor", root) == ["rl-user"]

    assert 'version = "0.2.0"' in (base / "pyproject.toml").read_text()
    assert "## Unreleased\n\n## 0.2.0\n\n- `f` is gone.\n\n## 0.1.0\n" in (base / "CHANGELOG.md").read_text()
    assert '["rl-base[torch]>=0.2,<0.3", "numpy>=0.1,<0.2"]' in (user / "pyproject.toml").read_text()
    assert "## Unreleased\n\n- Needs `rl-base` 0.2.\n\n## 0.1.0\n" in (user / "CHANGELOG.md").read_text()
    assert "rl-base>=0.2,<0.3" in (root / "infra" / "release" / "downstream" / "one" / "pyproject.toml").read_text()
    _commit(root)
    assert tag.tag("rl-base", root) == "rl-base-v0.2.0"


def test_bump_patch_does_not_change_dependent_packages(root):
    base, user = root / "packages" / "rl-base", root / "packages" / "rl-user"
    _edit(base / "CHANGELOG.md", "## 0.1.0\n", "## Unreleased\n\n- Fix a fault.\n\n## 0.1.0\n")

    assert bump.bump("rl-base", "patch", root) == []

    assert "rl-base[torch]>=0.1,<0.2" in (user / "pyproject.toml").read_text()
    assert "Unreleased" not in (user / "CHANGELOG.md").read_text()


def test_bump_adds_the_new_range_above_existing_changes(root):
    for name, change in (("rl-base", "- `f` is gone."), ("rl-user", "- More.")):
        log = root / "packages" / name / "CHANGELOG.md"
        _edit(log, "## 0.1.0\n", f"## Unreleased\n\n{change}\n\n## 0.1.0\n")

    bump.bump("rl-base", "minor", root)

    changes = workspace.package_named("rl-user", root).changes("Unreleased")
    assert changes == "- Needs `rl-base` 0.2.\n- More."


def test_bump_without_changes_raises_release_error(root):
    with pytest.raises(workspace.ReleaseError, match="expected changes under '## Unreleased', found none to release"):
        bump.bump("rl-base", "patch", root)


# ---- built packages


def test_built_files_missing_or_unexpected_are_reported(root):
    package = workspace.package_named("rl-base", root)
    sdist = [f"rl_base-0.1.0/{name}" for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml")]
    wheel = ["rl_base/__init__.py", "rl_base/py.typed", "rl_base-0.1.0.dist-info/licenses/LICENSE", "tests/test_it.py"]

    assert check.sdist_faults(package, sdist) == ["rl-base: expected src/rl_base/py.typed in the sdist, found none"]
    tests = ["rl_base-0.1.0/src/rl_base/py.typed", "rl_base-0.1.0/tests/test_it.py"]
    assert check.sdist_faults(package, sdist + tests) == [
        "rl-base: expected no tests in the sdist, found rl_base-0.1.0/tests/test_it.py"
    ]
    assert check.wheel_faults(package, wheel) == ["rl-base: expected its module alone in the wheel, found tests"]
    assert check.wheel_faults(package, wheel[1:3]) == ["rl-base: expected rl_base/__init__.py in the wheel, found none"]


def test_with_ours_adds_dependencies_of_the_workspace(root):
    assert [package.name for package in workspace.with_ours(["rl-user"], root)] == ["rl-base", "rl-user"]
    assert [package.name for package in workspace.with_ours(["rl-base"], root)] == ["rl-base"]


def test_readme_without_install_command_raises_release_error():
    assert check.asked_for("README.md", "uv pip install 'packages/rl-base[a,b]' numpy") == ["rl-base[a,b]", "numpy"]
    with pytest.raises(workspace.ReleaseError, match=r"README.md: expected how the package is installed"):
        check.asked_for("README.md", "uv sync")


def test_environment_ignores_pythonpath(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(workspace.ROOT / "packages" / "rl-rewards" / "src"))
    program = tmp_path / "main.py"
    program.write_text("import rl_rewards\n")

    with pytest.raises(workspace.ReleaseError, match="No module named 'rl_rewards'"):
        check.Environment(tmp_path / "environment", {}).run(program)


def test_command_over_its_deadline_raises_release_error(monkeypatch):
    monkeypatch.setattr(workspace, "DEADLINE", 0.1)

    with pytest.raises(workspace.ReleaseError, match=r"sleep 60 ...: expected an end within 0 s"):
        workspace.run("sleep", "60")


@pytest.mark.nightly
def test_rl_rewards_is_built_installed_and_used(tmp_path, capsys):
    check.main(["rl-rewards", "--out", str(tmp_path)])

    built = f"rl_rewards-{workspace.package_named('rl-rewards').version}"
    assert {path.name for path in tmp_path.glob("rl_rewards*")} == {f"{built}-py3-none-any.whl", f"{built}.tar.gz"}
    assert "downstream/rewards (" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_packages_are_built_installed_and_used(tmp_path, record_property):
    begin = time.perf_counter()
    check.main(["--out", str(tmp_path)])

    record_property("minutes to build, install and use all packages", round((time.perf_counter() - begin) / 60, 1))
    assert len(list(tmp_path.glob("*.whl"))) == len(PACKAGES)
