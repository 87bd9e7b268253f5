"""Sphinx extension that adds the words of `search_terms.yml` and the synonyms of settings to the search.

The search of Sphinx lists an index entry before headings and text. A synonym leads to the setting's row on the page of
settings: `learning_rate`, and `learning rate`, to `actor.optimizer.lr`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from rl_apps.settings.synonyms import SYNONYMS

TERMS: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_name("search_terms.yml").read_text())
"""Search terms by page and id of a heading."""
SETTINGS = "docs/settings"


def _add_entries(app: Sphinx, doctree: nodes.document) -> None:
    """Add index entries to a page, in front of its text."""
    page = app.env.docname
    terms = [(word, heading) for heading, words in TERMS.get(page, {}).items() for word in words]
    if page == SETTINGS:
        terms += _synonyms(doctree)
    if terms:
        entries = [("single", word, anchor, "main", None) for word, anchor in terms]
        doctree.insert(0, addnodes.index(entries=entries))


def _synonyms(doctree: nodes.document) -> Iterator[tuple[str, str]]:
    """Give the row of each setting with synonyms an id, and yield each synonym with that id."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, setting in SYNONYMS.items():
        names[setting].append(name)
    for row in doctree.findall(nodes.row):
        literal = next(iter(row[0].findall(nodes.literal)), None)
        if literal is not None and (setting := literal.astext()) in names:
            row["ids"].append(anchor := nodes.make_id(f"row-{setting}"))
            for name in names.pop(setting):
                yield name, anchor
                if "_" in name:
                    yield name.replace("_", " "), anchor


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", _add_entries)
    return {"parallel_read_safe": True}
