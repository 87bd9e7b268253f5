"""Check that a package index would show complete metadata and a README without broken links.

`check.py` calls it for each package. REPOSITORY and AUTHOR are placeholders until the project has a public home:
docs/releasing.md says how to replace them.
"""

from __future__ import annotations

import re
from pathlib import Path

from workspace import ROOT, Package

REPOSITORY = "https://example.org/rl"
AUTHOR = {"name": "rl authors", "email": "rl-authors@example.org"}
LICENSE = "Apache-2.0"
PYTHONS = ("3.12", "3.13")


def metadata_problems(package: Package, root: Path = ROOT) -> list[str]:
    """Return the problems of the metadata and the README of a package, one sentence each."""
    project, folder = package.project, package.folder.relative_to(root).as_posix()
    expected = {
        "license": LICENSE,
        "authors": [AUTHOR],
        "urls": {
            "Homepage": REPOSITORY,
            "Documentation": f"{REPOSITORY}/tree/main/docs",
            "Repository": REPOSITORY,
            "Issues": f"{REPOSITORY}/issues",
            "Changelog": f"{REPOSITORY}/blob/main/{folder}/CHANGELOG.md",
        },
    }
    pythons = [f"Programming Language :: Python :: {version}" for version in PYTHONS]
    description = project.get("description", "")
    checks = {
        **{f"{key} = {value}": project.get(key) == value for key, value in expected.items()},
        "a description that is one sentence, with a period": description.endswith(".") and " " in description,
        "at least three keywords": len(project.get("keywords", [])) >= 3,
        f"the classifiers {', '.join(pythons)}": set(pythons) <= {*project.get("classifiers", [])},
    }
    problems = [f"{folder}/pyproject.toml: expected {check}" for check, holds in checks.items() if not holds]
    return problems + [f"{folder}/README.md: {problem}" for problem in link_problems(package.folder, root)]


def link_problems(folder: Path, root: Path = ROOT) -> list[str]:
    """Return the links of a README that an index cannot follow: relative links, and links to missing files."""
    problems = []
    for link in re.findall(r"\]\(([^)\s]+)", (folder / "README.md").read_text()):
        file = link.removeprefix(f"{REPOSITORY}/blob/main/").partition("#")[0]
        if not link.startswith(("https://", "#")):
            problems.append(f"relative link {link}; start it with {REPOSITORY}/blob/main/")
        elif link.startswith(REPOSITORY) and file and not (root / file).is_file():
            problems.append(f"broken link {link}; the repository has no such file")
    return problems
