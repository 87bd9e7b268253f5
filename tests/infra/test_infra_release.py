"""Release scripts detect inconsistent versions, changelogs, tags and metadata, and the built packages work."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

import bump
import check
import metadata
import pytest
import readme
import tag
import workspace
from packaging.requirements import Requirement
from packaging.version import Version

PACKAGES = list(workspace.packages().values())


# ---- the packages of this repository


def test_package_files_agree_and_metadata_is_complete():
    for package in PACKAGES:
        assert workspace.find_problems(package) + metadata.metadata_problems(package) == []


def test_readme_of_a_package_has_install_commands_and_an_example():
    for package in PACKAGES:
        page = (package.folder / "README.md").relative_to(workspace.ROOT).as_posix()
        page_blocks = readme.blocks(page, workspace.ROOT)
        commands = [command for block in page_blocks for command in block.commands()]
        git_url = f"git+{metadata.REPOSITORY}#subdirectory={Path(page).parent.as_posix()}"

        from_index = Requirement(check.install_arguments(page, "\n".join(commands))[0])
        from_git = Requirement(check.install_arguments(page, "\n".join(commands[1:]))[0])

        assert (from_index.name, from_index.url) == (package.name, None)
        assert (from_git.name, from_git.url, from_git.extras) == (package.name, git_url, from_index.extras)
        assert any(block.is_program for block in page_blocks), page


def test_downstream_projects_require_one_package_each():
    required = {project.name: check.required_package(project).name for project in check.DOWNSTREAM.iterdir()}

    assert required == {"rewards": "rl-rewards", "losses": "rl-trainers"}


# ---- metadata with injected faults


@dataclass(frozen=True)
class _Package(workspace.Package):
    """A package with `changed` metadata; its pyproject.toml stays the same."""

    changed: tuple = ()

    @property
    def project(self):
        return {**workspace.Package(self.folder).project, **dict(self.changed)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classifiers", []),
        ("description", "Reward functions"),
        ("keywords", ["rewards"]),
        ("license", "MIT"),
    ],
)
def test_metadata_that_is_incomplete_is_reported(key, value):
    package = _Package(workspace.package_named("rl-rewards").folder, ((key, value),))

    assert len(metadata.metadata_problems(package)) == 1


@pytest.mark.parametrize(
    ("link", "count"),
    [
        ("https://other.example/page", 0),
        (f"{metadata.REPOSITORY}/blob/main/LICENSE", 0),
        (f"{metadata.REPOSITORY}/blob/main/docs/gone.md", 1),
        ("../../docs/families.md", 1),
    ],
)
def test_readme_link_that_an_index_cannot_follow_is_reported(tmp_path, link, count):
    (tmp_path / "LICENSE").touch()
    (tmp_path / "README.md").write_text(f"[a page]({link})\n")

    assert len(metadata.link_problems(tmp_path, tmp_path)) == count


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
    """A repository with the packages `rl-base` and `rl-user`, which requires `rl-base`."""
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


def test_tag_annotation_lists_the_grouped_changes_of_the_version(root):
    _edit(root / "packages" / "rl-user" / "CHANGELOG.md", "- First version.\n", "### Added\n\n- First version.\n")
    _commit(root)

    assert tag.tag("rl-user", root) == "rl-user-v0.1.0"

    assert _git(root, "cat-file", "-t", "rl-user-v0.1.0") == "tag\n"
    assert _git(root, "tag", "--list", "--format=%(contents)") == "rl-user 0.1.0\n\n### Added\n\n- First version.\n\n"


@pytest.mark.parametrize(
    ("path", "before", "after", "message"),
    [
        ("CHANGELOG.md", "## 0.1.0\n", "## 0.0.9\n", "no changes under '## 0.1.0'"),
        ("CHANGELOG.md", "## 0.1.0\n", "## Unreleased\n\n- More.\n\n## 0.1.0\n", "(?s)bump.py\n- More."),
        (
            "pyproject.toml",
            "rl-base[torch]>=0.1,<0.2",
            "rl-base>=0.1",
            "expected rl-base>=0.1,<0.2, found rl-base>=0.1",
        ),
        ("pyproject.toml", "rl-base[torch]>=0.1,<0.2", "rl-base>=0.2,<0.3", "found rl-base<0.3,>=0.2"),
        ("LICENSE", "Free.", "Not free.", "must be a copy of the LICENSE"),
    ],
)
def test_tag_with_contradicting_files_is_rejected(root, path, before, after, message):
    _edit(root / "packages" / "rl-user" / path, before, after)
    _commit(root)

    with pytest.raises(workspace.ReleaseError, match=message):
        tag.tag("rl-user", root)
    assert _git(root, "tag") == ""


def test_tag_with_uncommitted_changes_is_rejected(root):
    (root / "new.txt").write_text("")

    with pytest.raises(workspace.ReleaseError, match=r"\?\? new.txt"):
        tag.tag("rl-user", root)


def test_tag_that_exists_is_rejected_and_kept(root):
    tag.tag("rl-user", root)
    first = _git(root, "rev-parse", "rl-user-v0.1.0")
    (root / "more.txt").write_text("")
    _commit(root)

    with pytest.raises(workspace.ReleaseError, match=r"rl-user-v0.1.0 already exists"):
        tag.tag("rl-user", root)
    assert _git(root, "rev-parse", "rl-user-v0.1.0") == first
    assert tag.tag("rl-base", root) == "rl-base-v0.1.0"


def test_unknown_package_is_rejected_with_the_known_names(capsys):
    assert workspace.exit_code(lambda: tag.main(["rl-nothing"])) == 2
    assert "expected one of rl-contracts, " in capsys.readouterr().err


# ---- versions


@pytest.mark.parametrize(("version", "expected"), [("0.9.3", ">=0.9,<0.10"), ("1.4.2", ">=1.4,<2")])
def test_compatible_range_ends_before_the_next_breaking_version(version, expected):
    assert workspace.compatible_range(Version(version)) == expected


def test_bump_minor_changes_the_version_in_all_files(root):
    base, user = root / "packages" / "rl-base", root / "packages" / "rl-user"
    _edit(base / "CHANGELOG.md", "## 0.1.0\n", "## Unreleased\n\n- `f` is gone.\n\n## 0.1.0\n")

    assert bump.bump("rl-base", "minor", root) == ["rl-user"]

    assert 'version = "0.2.0"' in (base / "pyproject.toml").read_text()
    assert "## Unreleased\n\n## 0.2.0\n\n- `f` is gone.\n\n## 0.1.0\n" in (base / "CHANGELOG.md").read_text()
    assert '["rl-base[torch]>=0.2,<0.3", "numpy>=0.1,<0.2"]' in (user / "pyproject.toml").read_text()
    changes = "## Unreleased\n\n### Changed\n\n- Needs `rl-base` 0.2.\n\n## 0.1.0\n"
    assert changes in (user / "CHANGELOG.md").read_text()
    assert "rl-base>=0.2,<0.3" in (root / "infra" / "release" / "downstream" / "one" / "pyproject.toml").read_text()
    _commit(root)
    assert tag.tag("rl-base", root) == "rl-base-v0.2.0"


def test_bump_patch_leaves_users_unchanged(root):
    base, user = root / "packages" / "rl-base", root / "packages" / "rl-user"
    _edit(base / "CHANGELOG.md", "## 0.1.0\n", "## Unreleased\n\n- One bug.\n\n## 0.1.0\n")

    assert bump.bump("rl-base", "patch", root) == []

    assert "rl-base[torch]>=0.1,<0.2" in (user / "pyproject.toml").read_text()
    assert "Unreleased" not in (user / "CHANGELOG.md").read_text()


NEEDS = "- Needs `rl-base` 0.2."


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("### Added\n\n- More.", f"### Added\n\n- More.\n\n### Changed\n\n{NEEDS}"),
        ("### Changed\n\n- More.", f"### Changed\n\n{NEEDS}\n- More."),
        ("### Fixed\n\n- More.", f"### Changed\n\n{NEEDS}\n\n### Fixed\n\n- More."),
    ],
)
def test_bump_adds_the_new_range_to_the_group_changed(root, before, after):
    for name, change in (("rl-base", "- `f` is gone."), ("rl-user", before)):
        log = root / "packages" / name / "CHANGELOG.md"
        _edit(log, "## 0.1.0\n", f"## Unreleased\n\n{change}\n\n## 0.1.0\n")

    bump.bump("rl-base", "minor", root)

    package = workspace.package_named("rl-user", root)
    assert package.changes("Unreleased") == after
    assert package.changelog.read_text().endswith("\n\n## 0.1.0\n\n- First version.\n")


def test_bump_without_changes_is_rejected(root):
    with pytest.raises(workspace.ReleaseError, match="no changes under '## Unreleased'"):
        bump.bump("rl-base", "patch", root)


# ---- built packages


def test_missing_and_unexpected_files_in_builds_are_reported(root):
    package = workspace.package_named("rl-base", root)
    sdist = [f"rl_base-0.1.0/{name}" for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml")]
    typed, test = "rl_base-0.1.0/src/rl_base/py.typed", "rl_base-0.1.0/tests/test_it.py"
    wheel = ["rl_base/__init__.py", "rl_base/py.typed", "rl_base-0.1.0.dist-info/licenses/LICENSE"]

    assert check.sdist_problems(package, [*sdist, typed]) == []
    assert check.sdist_problems(package, sdist) == ["rl-base: the sdist lacks src/rl_base/py.typed"]
    (problem,) = check.sdist_problems(package, [*sdist, typed, test])
    assert problem.endswith(f"found {test}")
    assert check.wheel_problems(package, wheel) == []
    assert check.wheel_problems(package, wheel[1:]) == ["rl-base: the wheel lacks rl_base/__init__.py"]
    (problem,) = check.wheel_problems(package, [*wheel, "tests/test_it.py"])
    assert problem.endswith("found tests")


def test_with_dependencies_adds_required_packages(root):
    assert [package.name for package in workspace.with_dependencies(["rl-user"], root)] == ["rl-base", "rl-user"]
    assert [package.name for package in workspace.with_dependencies(["rl-base"], root)] == ["rl-base"]


def test_check_of_a_package_covers_its_dependencies_and_users(tmp_path, monkeypatch, capsys):
    for name in ("build", "run_example", "Environment"):
        monkeypatch.setattr(check, name, MagicMock())

    check.main(["rl-rewards", "--out", str(tmp_path)])

    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["rl-contracts", "rl-rewards", "rl-rewards:", "downstream/rewards"]


def test_readme_without_install_command_is_rejected():
    commands = "uv sync\nuv pip install 'rl-base[a,b]' numpy"

    assert check.install_arguments("README.md", commands) == ["rl-base[a,b]", "numpy"]
    with pytest.raises(workspace.ReleaseError, match=r"^README.md: "):
        check.install_arguments("README.md", "uv sync")


def test_environment_ignores_pythonpath(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(workspace.ROOT / "packages" / "rl-rewards" / "src"))
    program = tmp_path / "main.py"
    program.write_text("import rl_rewards\n")

    with pytest.raises(workspace.ReleaseError, match="No module named 'rl_rewards'"):
        check.Environment(tmp_path / "environment", {}).run(program)


def test_run_past_the_deadline_stops_the_command(monkeypatch):
    monkeypatch.setattr(workspace, "DEADLINE", 0.1)

    with pytest.raises(workspace.ReleaseError, match=r"^sleep 60 ..."):
        workspace.run("sleep", "60")


@pytest.mark.slow
def test_build_of_rewards_passes_twine_and_pyroma(tmp_path):
    assert check.build(workspace.package_named("rl-rewards"), tmp_path).exists()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_check_builds_installs_and_uses_all_packages(tmp_path, capsys, record_property):
    start = time.perf_counter()
    check.main(["--out", str(tmp_path)])

    record_property("minutes to build, install and use all packages", round((time.perf_counter() - start) / 60, 1))
    assert len(list(tmp_path.glob("*.whl"))) == len(list(tmp_path.glob("*.tar.gz"))) == len(PACKAGES)
    printed = capsys.readouterr().out
    assert [
        project.name for project in check.DOWNSTREAM.iterdir() if f"downstream/{project.name} (" not in printed
    ] == []
