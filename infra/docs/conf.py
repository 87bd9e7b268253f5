"""The docs as a site: Sphinx over the pages as they lie in the repository. `infra/docs/build.sh` builds it.

The pages are plain Markdown that GitHub shows as well; `toc.yml` beside this file is the navigation. Nothing is fetched
when the site is looked at, and search works from files.
"""

import re
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

project = "rl"
copyright = "the authors of rl"
extensions = ["myst_parser", "sphinx_external_toc"]
external_toc_path = "infra/docs/toc.yml"
include_patterns = ["*.md", "docs/**", "packages/*/README.md", "apps/README.md", "infra/README.md"]
exclude_patterns = [".*", "runs", "outputs", "site", "**/tests", "**/src", "**/__pycache__"]

html_theme = "furo"
html_title = "rl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4


def setup(app: Any) -> None:
    """Show formulas as MathML, and resolve links to other pages in the READMEs of packages."""
    app.add_html_math_renderer("mathml", (_formula, None), (_displayed_formula, None))
    app.connect("source-read", _use_relative_links)


def _use_relative_links(_: Any, page: str, source: list[str]) -> None:
    """Replace the absolute links that package READMEs need on a package index."""
    if page.startswith(("packages/", "apps/")):
        source[0] = re.sub(r"\]\(https://[^\s)]+/blob/main/(?=docs/)", "](" + "../" * page.count("/"), source[0])


def _formula(writer: Any, node: Any) -> None:
    writer.body.append(convert(node.astext()))
    raise SkipNode


def _displayed_formula(writer: Any, node: Any) -> None:
    writer.body.append(convert(node.astext(), display="block"))
    raise SkipNode
