"""Check the generated pages, and the site: no warnings, no dead links, no remote files, no errors in a browser."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from docs_pages import PAGES

from rl_apps.cli import main
from rl_apps.programs import hh_rlhf
from rl_apps.run.app import App
from rl_apps.settings.compose import describe
from rl_contracts.registry import load

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "infra" / "docs"
sys.path.insert(0, str(SOURCES))

import api_reference  # noqa: E402 - modules in the folder of the site's configuration
import reference  # noqa: E402
import search_terms  # noqa: E402

# ---- pages generated from the sources


@pytest.mark.parametrize("page", reference.PAGES)
def test_generated_page_matches_its_sources(page: str) -> None:
    assert (ROOT / page).read_text() == reference.PAGES[page](), f"out of date: {reference.COMMAND}"


def test_settings_page_lists_the_settings_of_every_command() -> None:
    named = set(
        re.findall(r"^\| (?:<a id=\S+</a>)?`([\w.]+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    )
    derived = ("ref.engine.", "critic.engine.")  # the page lists them once, as `actor.engine`
    for name in sum(reference.APPS.values(), ()):
        app: App = load("rl.apps", name)
        settings = {key for key, _, _ in describe(app.config([])) if not key.startswith(derived)}
        assert settings - named == {"model.directories"}, name


@dataclass
class ExtraConfig(hh_rlhf.DPOConfig):
    """Settings of DPO with one more field."""

    extra: int = 7
    """Number of <seeds>, or `|`."""


def test_generated_pages_show_a_new_setting_and_a_new_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_metrics(commands: Any) -> None:
        commands.add_parser("metrics", help="list metrics").add_argument("--extra", default=7, help="(%(default)s)")

    app = replace(hh_rlhf.DPO, schema=ExtraConfig)
    monkeypatch.setattr(reference.registry, "load", lambda group, name: app if "dpo" in name else load(group, name))

    row = '| <a id="setting-extra"></a>`extra` | `7` | Number of &lt;seeds>, or `\\|`. | dpo |'
    assert row in reference.settings_page()
    monkeypatch.setattr(main, "_add_models", add_metrics)
    assert "| `--extra EXTRA` | (7) |" in reference.commands_page()


def test_generated_pages_have_unique_addresses_and_short_cells() -> None:
    addresses = re.findall(r'<a id="(.*?)"', (ROOT / "docs/settings.md").read_text())
    assert len(addresses) == len(set(addresses)) > 200
    for page in ("docs/settings.md", "docs/commands.md", "docs/families.md"):
        rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
        cells = [cell.split() for row in rows for cell in re.split(r"(?<!\\)\|", row)]

        assert max(map(len, cells)) <= reference.CELL_WORDS, page


# ---- the site


def test_every_page_is_in_a_section_of_the_site() -> None:
    named = re.findall(r"(?:root|file|glob): (\S+)", (SOURCES / "toc.yml").read_text())
    listed = {path.relative_to(ROOT).as_posix() for name in named for path in ROOT.glob(f"{name}.md")}

    assert set(PAGES) - listed == set(), "add it to infra/docs/toc.yml"


def _build(source: Path, site: Path) -> tuple[int, str]:
    """Run the command of `infra/docs/build.sh`; return its exit code and output."""
    flags = ("--quiet", "--nitpicky", "--fail-on-warning", "--keep-going", "-c", str(source / "infra" / "docs"))
    assert all(flag in (SOURCES / "build.sh").read_text() for flag in flags[:-1])
    command = (sys.executable, "-m", "sphinx", *flags, str(source), str(site))
    env = {**os.environ, "GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "example/rl"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "site"
    code, output = _build(ROOT, directory)
    assert code == 0, output
    return directory


@dataclass
class Page(HTMLParser):
    """Links, fetched files and anchors of a page of the site."""

    path: Path

    def __post_init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors = {""}
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := attributes.get(name))}
        for name in ("href", "src"):
            if value := attributes.get(name):
                (self.links if tag == "a" else self.fetched).append(value)

    def dead(self, pages: dict[Path, "Page"]) -> Iterator[str]:
        """Yield links and files of the page that do not exist, and files that it would fetch from a network."""
        for link in (*self.links, *self.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in self.fetched and parts.scheme != "data":
                    yield link
                continue
            target = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
            page = pages.get(target)
            if not target.is_file() or (page and unquote(parts.fragment) not in page.anchors):
                yield link


def _dead(site: Path) -> dict[str, list[str]]:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead = {str(path.relative_to(site)): list(page.dead(pages)) for path, page in pages.items()}
    return {name: links for name, links in dead.items() if links}


@pytest.mark.slow
def test_site_has_every_page_and_no_dead_or_remote_link(site: Path) -> None:
    assert [page for page in PAGES if not (site / page).with_suffix(".html").exists()] == []
    assert _dead(site) == {}


@pytest.mark.slow
def test_site_build_with_dead_links_fails(tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "infra" / "docs")
    (tmp_path / "infra" / "docs" / "toc.yml").write_text("root: README\n")
    (tmp_path / "README.md").write_text("# A page\n\n[page](gone.md) [heading](#nowhere) ![picture](gone.png)\n")
    (tmp_path / "AGENTS.md").write_text("# A page that is in no section\n")

    code, output = _build(tmp_path, tmp_path / "site")

    assert code == 1
    for warning in ("not found: 'gone.md'", "not found: 'nowhere'", "not readable: gone.png", "AGENTS.md: WARNING"):
        assert warning in output


def test_dead_links_and_remote_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '<a href="two.html#here">1</a><a href="two.html#gone">2</a><a href="3.html">3</a>'
    )
    (tmp_path / "two.html").write_text(
        '<p id="here"><a href="https://e.org">4</a><script src="https://e.org/5.js"></script>'
    )

    assert _dead(tmp_path) == {"one.html": ["two.html#gone", "3.html"], "two.html": ["https://e.org/5.js"]}


@pytest.mark.slow
def test_site_page_has_title_description_version_and_edit_link(site: Path) -> None:
    page = (site / "docs" / "howto" / "scheduler.html").read_text()

    assert "<title>How to add a scheduler - rl " in page
    assert '<meta name="description" content="A scheduler starts, watches and stops processes.' in page
    assert f">rl {version('rl-apps')}<" in page  # beside the navigation
    assert '"https://github.com/example/rl/edit/main/docs/howto/scheduler.md"' in page
    assert Page(site / "docs" / "howto" / "scheduler.html").fetched.count("../../_static/favicon.svg") == 1


# ---- the API reference


@pytest.mark.slow
def test_api_reference_documents_every_public_name(site: Path) -> None:
    packages = sorted(
        {path.name for pattern in ("packages/*/src/rl_*", "apps/src/rl_*") for path in ROOT.glob(pattern)}
    )
    assert len(packages) > 8
    for package in packages:
        names = api_reference.public_names(package)
        pages = {target.partition(".")[0] for target in names.values()} | {package}
        anchors = set().union(*(Page(site / "docs" / "api" / f"{page}.html").anchors for page in pages))
        text = (site / f"docs/api/{package}.html").read_text()

        assert [target for target in names.values() if target not in anchors] == []
        assert [path for path in names if path.rpartition(".")[2] not in text] == []


@pytest.mark.slow
def test_api_reference_has_no_markdown_outside_code(site: Path) -> None:
    for page in (site / "docs" / "api").glob("rl_*.html"):
        article = page.read_text().partition("<article")[2].partition("</article>")[0]
        text = re.sub(r"<(code|pre)\b.*?</\1>", "", article, flags=re.DOTALL)
        assert "`" not in text, page.name
        assert "``" not in article, page.name
        assert "Args:" not in text, page.name
        assert "~typing" not in text, f"{page.name}: a signature that Sphinx cannot parse"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "The `JobSpec` of `Scheduler.poll`.",
            "The :py:obj:`JobSpec <rl_contracts.scheduler.JobSpec>` of "
            ":py:obj:`Scheduler.poll <rl_contracts.scheduler.Scheduler.poll>`.",
        ),
        ("a * b, `c * d`s", "a \\* b, ``c * d``\\ s"),
        ("`one\ntwo` or ` (file)`", "``one\ntwo`` or ``(file)``"),
    ],
)
def test_api_reference_translates_markdown_code(text: str, expected: str) -> None:
    assert api_reference._translate(text) == expected


# ---- search


@pytest.fixture(scope="module")
def search_index(site: Path) -> dict[str, Any]:
    text = (site / "searchindex.js").read_text()
    index: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    return index


def _first_results(index: dict[str, Any], term: str) -> set[str]:
    """Pages, with anchors, that the search lists first for a term."""
    entries = index["indexentries"].get(term.lower(), [])
    return {f"{index['docnames'][page]}#{anchor}".rstrip("#") for page, anchor, is_main in entries if is_main}


@pytest.mark.slow
def test_search_index_has_terms_synonyms_and_their_targets(site: Path, search_index: dict[str, Any]) -> None:
    assert {page.partition("#")[0] for page in _first_results(search_index, "learning rate")} == {
        "docs/getting-started",
        "docs/settings",
    }
    assert "docs/getting-started#stop-and-resume-a-run" in _first_results(search_index, "resume")
    assert _first_results(search_index, "learning_rate") == {"docs/settings#row-actor-optimizer-lr"}
    for page, headings in search_terms.TERMS.items():
        anchors = Page(site / f"{page}.html").anchors
        for heading, words in headings.items():
            assert heading in anchors, f"{page}: no heading {heading}"
            assert all(f"{page}#{heading}".rstrip("#") in _first_results(search_index, word) for word in words)
    missing = [name for name in search_terms.SYNONYMS if not _first_results(search_index, name)]
    assert missing == [], "no row of docs/settings.md begins with the setting of these names"


# ---- in a browser


PROBE = """<script>
const messages = [];
for (const kind of ["error", "warn"]) console[kind] = (...words) => messages.push(words.join(" "));
window.addEventListener("error", (event) => messages.push(event.message || `not loaded: ${event.target.src}`), true);
window.addEventListener("load", () => setTimeout(() => {
  document.body.dataset.probe = JSON.stringify(messages);
}, 500));
</script>"""
"""Script that collects console messages and files that failed to load."""


def _open(page: Path, profile: Path, query: str = "", script: str = "", *flags: str) -> tuple[str, str]:
    """Open a page in a browser; return its DOM and its console messages as JSON."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium or Chrome to open the page")
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text(encoding="utf-8").replace("<head>", f"<head>{PROBE}{script}"), encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    more = (
        *flags,
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"--user-data-dir={profile}",
        f"{probed.as_uri()}{query}",
    )
    done = subprocess.run([browser, *options, *more], capture_output=True, text=True, timeout=180, check=False)
    probed.unlink()
    messages = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert messages, f"{page.name} did not load: {done.stderr[-2000:]}"
    return done.stdout, html.unescape(messages[1])


@pytest.mark.slow
def test_browser_shows_front_page_and_ranks_search_results(site: Path, tmp_path: Path) -> None:
    _, front_messages = _open(site / "README.html", tmp_path)
    shown, search_messages = _open(site / "search.html", tmp_path, "?q=learning+rate")

    assert front_messages == search_messages == "[]"
    results = re.findall(r'<a href="(docs/[\w-]+)\.html[^"]*"', shown.partition('class="search"')[2])
    assert results[:2] == ["docs/getting-started", "docs/settings"]


CLICK = """<script>
window.addEventListener("load", () => {
  navigator.clipboard.writeText = async (text) => console.error(text);
  for (const button of document.querySelectorAll("button.copy")) button.click();
});
</script>"""
"""Clicks each copy button, and records the copied texts with the messages of the console."""


@pytest.mark.slow
def test_browser_copies_code_blocks_and_commands_without_prompts(site: Path, tmp_path: Path) -> None:
    _, copied = _open(site / "docs" / "howto" / "scheduler.html", tmp_path, "", CLICK)

    texts = json.loads(copied)
    assert any(text.startswith("# my_scheduler.py\nfrom dataclasses") for text in texts)
    assert any(text.startswith("uv run pytest test_my_scheduler.py\nuv run gsm8k-grpo") for text in texts)


WIDTHS = (390, 1280, 1366, 1440)
"""Widths of windows in pixels: a phone, and common laptops."""
MEASURE = """<script>
window.addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, content = page.querySelector(".content") ?? page.body;
    const excess = Math.max(page.documentElement.scrollWidth - frame.width, content.scrollWidth - content.clientWidth);
    if (excess > 0) console.error(`${frame.getAttribute("src")} is ${excess} px too wide for ${frame.width} px`);
  }
});
</script>"""


def _too_wide(folder: Path, pages: list[str], profile: Path) -> list[str]:
    """Return a message for each page that scrolls sideways in a window of one of the widths."""
    frames = [f'<iframe src="{page}" width="{width}" height="800"></iframe>' for page in pages for width in WIDTHS]
    (folder / "frames.html").write_text(f"<html><head></head><body>{''.join(frames)}</body></html>")
    _, messages = _open(folder / "frames.html", profile, "", MEASURE, "--allow-file-access-from-files")
    (folder / "frames.html").unlink()
    return [message for message in json.loads(messages) if "too wide" in message]


@pytest.mark.slow
def test_browser_shows_pages_without_horizontal_scrolling(site: Path, tmp_path: Path) -> None:
    pages = [
        "README",
        "docs/getting-started",
        "docs/settings",
        "docs/errors",
        "docs/howto/scheduler",
        "docs/api/rl_trainers",
    ]

    assert _too_wide(site, [f"{page}.html" for page in pages], tmp_path) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_browser_opens_every_page_without_console_messages(site: Path, tmp_path: Path) -> None:
    pages = sorted({*site.rglob("*.html")} - {site / "index.html"})  # index.html redirects to README.html
    assert len(pages) > 50

    assert {page.name: messages for page in pages if (messages := _open(page, tmp_path)[1]) != "[]"} == {}


@pytest.mark.slow
def test_browser_reports_script_errors_missing_files_and_wide_pages(tmp_path: Path) -> None:
    (tmp_path / "wide.html").write_text('<!doctype html><body style="margin: 0"><p style="width: 1300px">text')
    page = tmp_path / "page.html"
    page.write_text('<html><head></head><body><script src="gone.js"></script><script>broken()</script></body></html>')

    _, messages = _open(page, tmp_path / "profile")

    assert "gone.js" in messages
    assert "broken is not defined" in messages
    assert _too_wide(tmp_path, ["wide.html"], tmp_path / "profile") == [
        "wide.html is 910 px too wide for 390 px",
        "wide.html is 20 px too wide for 1280 px",
    ]
