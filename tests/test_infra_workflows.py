"""The workflows are what GitHub takes, and name scripts, packages and tags that there are."""

import os
import re
from fnmatch import fnmatch

import pytest
import workspace
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

WORKFLOWS = sorted((workspace.ROOT / ".github" / "workflows").glob("*.yml"))


def _read(name):
    """As strings throughout: YAML takes the key `on` for true."""
    return yaml.load((WORKFLOWS[0].parent / name).read_text(), Loader=yaml.BaseLoader)


def _complaints(*paths):
    words = ["--builtin-schema", "vendor.github-workflows", *map(str, paths)]
    return CliRunner().invoke(check_jsonschema, words)


def test_there_is_a_workflow_for_changes_wheels_docs_and_the_night():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "docs.yml", "nightly.yml", "wheels.yml"]
    assert {"lint", "matrix"} <= set(_read("ci.yml")["jobs"])
    assert [path.name for path in WORKFLOWS if "schedule" in _read(path.name)["on"]] == ["nightly.yml"]


def test_workflows_have_the_form_that_github_takes():
    done = _complaints(*WORKFLOWS)

    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("before", "after"),
    [("runs-on:", "run-on:"), ("timeout-minutes: 20", "timeout-minutes: soon"), ("steps:", "step:")],
)
def test_workflow_of_another_form_is_refused(tmp_path, before, after):
    text = (WORKFLOWS[0].parent / "docs.yml").read_text()
    assert before in text
    (tmp_path / "docs.yml").write_text(text.replace(before, after))

    assert _complaints(tmp_path / "docs.yml").exit_code == 1


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_of_a_workflow_are_there(workflow):
    jobs = _read(workflow.name)["jobs"].values()
    commands = "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
    scripts = re.findall(r"(?m)(?:^|\s)((?:infra|tests)/\S+)", commands)

    assert scripts
    assert [script for script in scripts if not (workspace.ROOT / script).is_file()] == []
    run_as_they_are = re.findall(r"(?m)^(infra/\S+)", commands)
    assert [script for script in run_as_they_are if not os.access(workspace.ROOT / script, os.X_OK)] == []


def test_matrix_has_every_package_and_the_same_pythons_as_wheels():
    matrix = _read("ci.yml")["jobs"]["matrix"]["strategy"]["matrix"]

    assert sorted(matrix["package"]) == sorted(workspace.packages())
    assert matrix["python"] == ["3.12", "3.13"]
    assert _read("wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["python"] == matrix["python"]


def test_tag_of_every_package_starts_its_wheels():
    (pattern,) = _read("wheels.yml")["on"]["push"]["tags"]

    assert [p.tag for p in workspace.packages().values() if not fnmatch(p.tag, pattern)] == []
