"""Sphinx configuration of the docs site, which `infra/docs/build.sh` builds.

Sphinx reads the same Markdown pages that GitHub shows. `infra/docs/toc.yml` defines the navigation. The site loads
nothing from the network, and its search also works from local files.
"""

import os
import re
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))

PACKAGE = metadata("rl-apps")


def _repository() -> str:
    """Return the URL of the repository from the GitHub workflow or the package's metadata, or "" if neither has it."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    urls = dict(url.split(", ", 1) for url in PACKAGE.get_all("Project-URL") or ())
    return urls.get("Repository", "")


project = "rl"
copyright = "the authors of rl"
release = PACKAGE["Version"]
extensions = ["myst_parser", "sphinx_external_toc", "sphinx.ext.autodoc", "api_reference", "search_terms"]
external_toc_path = "infra/docs/toc.yml"
include_patterns = ["*.md", "docs/**", "packages/*/README.md", "apps/README.md", "infra/README.md"]
exclude_patterns = [".*", "runs", "outputs", "site", "**/tests", "**/src", "**/__pycache__"]
templates_path = ["templates"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
nitpick_ignore_regex = [("py:.*", ".*")]  # most types in signatures belong to other libraries

html_theme = "furo"
html_theme_options: dict[str, Any] = {}
html_title = f"rl {release}"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_extra_path = ["extra"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_math_renderer = "mathml"

if repository := _repository():
    html_theme_options = {
        "source_view_link": f"{repository}/blob/main/{{filename}}",
        "source_edit_link": f"{repository}/edit/main/{{filename}}",
        "footer_icons": [{"name": "Repository", "url": repository, "html": "Repository", "class": ""}],
    }

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

DESCRIPTION = 160
"""Maximum number of characters of a page's description, which search engines show."""


def setup(app: Any) -> None:
    """Register the formula renderer, the relative links of package READMEs, and the page descriptions."""
    app.add_html_math_renderer("mathml", (_formula, None), (_displayed_formula, None))
    app.connect("source-read", _use_relative_links)
    app.connect("html-page-context", _describe)


def _use_relative_links(_: Any, page: str, source: list[str]) -> None:
    """Make links to docs/ relative in package READMEs. Package indexes need the absolute links of the files."""
    if page.startswith(("packages/", "apps/")):
        source[0] = re.sub(r"\]\(https://[^\s)]+/blob/main/(?=docs/)", "](" + "../" * page.count("/"), source[0])


def _describe(app: Any, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Set the description of a page to the beginning of its first paragraph that is a sentence."""
    texts = (" ".join(node.astext().split()) for node in (doctree.findall(nodes.paragraph) if doctree else ()))
    text = next((text for text in texts if len(text) > 40 and not text.endswith(":")), "")
    context["description"] = text if len(text) <= DESCRIPTION else text[: DESCRIPTION - 1].rpartition(" ")[0] + "…"
    if page.startswith("docs/api/rl_"):
        context["page_source_suffix"] = ""  # no link to edit it: its text is in the source code


def _formula(writer: Any, node: Any) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _displayed_formula(writer: Any, node: Any) -> None:
    writer.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode
