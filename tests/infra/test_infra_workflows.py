"""GitHub files match their schemas, workflows cover all packages and scripts, and `changed_packages.py` works."""

import json
import os
import re
import runpy
from fnmatch import fnmatch

import pytest
import workspace
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

CHANGED = runpy.run_path(str(workspace.ROOT / "infra" / "ci" / "changed_packages.py"))
WORKFLOWS = sorted((workspace.ROOT / ".github" / "workflows").glob("*.yml"))


def _read(name):
    """Read a workflow with strings as keys and values, because YAML parses the key `on` as true."""
    return yaml.load((WORKFLOWS[0].parent / name).read_text(), Loader=yaml.BaseLoader)


def _check_schema(schema, *paths):
    arguments = ["--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    return CliRunner().invoke(check_jsonschema, arguments)


def test_ci_has_lint_and_matrix_and_only_nightly_has_a_schedule():
    assert {"lint", "matrix"} <= set(_read("ci.yml")["jobs"])
    assert [path.name for path in WORKFLOWS if "schedule" in _read(path.name)["on"]] == ["nightly.yml"]


def test_workflow_with_an_invalid_field_fails_the_schema_check(tmp_path):
    text = (WORKFLOWS[0].parent / "docs.yml").read_text()
    assert "runs-on:" in text
    (tmp_path / "docs.yml").write_text(text.replace("runs-on:", "run-on:"))

    assert _check_schema("github-workflows", tmp_path / "docs.yml").exit_code == 1


def test_scripts_of_the_workflows_exist():
    for workflow in WORKFLOWS:
        jobs = _read(workflow.name)["jobs"].values()
        commands = "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
        scripts = re.findall(r"(?m)(?:^|\s)((?:infra|tests)/\S+)", commands)

        assert scripts, workflow.name
        assert [script for script in scripts if not (workspace.ROOT / script).is_file()] == []
        executed = re.findall(r"(?m)^(infra/\S+)", commands)
        assert [script for script in executed if not os.access(workspace.ROOT / script, os.X_OK)] == []


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("dependabot", ".github/dependabot.yml"),
        ("github-actions", ".github/actions/setup/action.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[bf]*.yml"),
        ("github-workflows", ".github/workflows/*.yml"),
    ],
)
def test_community_and_github_files_match_their_schema(schema, pattern):
    files = list(workspace.ROOT.glob(pattern))
    assert files
    done = _check_schema(schema, *files)

    assert done.exit_code == 0, done.output


def test_nightly_matrix_of_another_python_lists_every_package():
    matrix = _read("nightly.yml")["jobs"]["python-3-13"]["strategy"]["matrix"]

    assert sorted(matrix["package"]) == sorted(workspace.packages())


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["packages/rl-rewards/src/x.py", "docs/a.md"], ["rl-rewards"]),
        (["docs/a.md", "README.md", "packages/rl-rewards-extra/x.py"], []),
        (["packages/rl-contracts/src/x.py"], ["rl-apps", "rl-contracts", "rl-rewards"]),
        (["uv.lock"], ["rl-apps", "rl-contracts", "rl-rewards"]),
    ],
)
def test_changed_packages_lists_packages_affected_by_a_path(paths, expected):
    folders = {"rl-apps": "apps", **{name: f"packages/{name}" for name in ("rl-contracts", "rl-rewards")}}

    assert CHANGED["affected"](paths, folders) == expected


def test_changed_packages_unknown_base_lists_all(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["changed_packages.py", "0" * 40])

    CHANGED["main"]()

    assert json.loads(capsys.readouterr().out) == sorted(workspace.packages())


def test_tag_of_every_package_triggers_the_wheels_workflow():
    (pattern,) = _read("wheels.yml")["on"]["push"]["tags"]

    assert [p.tag for p in workspace.packages().values() if not fnmatch(p.tag, pattern)] == []
