"""Check the generated pages, and the site: no warnings, no dead links, no remote files, no errors in a browser."""

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
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

import reference  # noqa: E402 - a script in the folder of the site's configuration

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


def test_settings_page_shows_a_new_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    app = replace(hh_rlhf.DPO, schema=ExtraConfig)
    monkeypatch.setattr(reference.registry, "load", lambda group, name: app if "dpo" in name else load(group, name))

    row = '| <a id="setting-extra"></a>`extra` | `7` | Number of &lt;seeds>, or `\\|`. | dpo |'
    assert row in reference.settings_page()


def test_long_setting_is_shortened_in_its_table_and_whole_below_it() -> None:
    meaning = f"First <tag>. {'Word ' * 30}`a|b`."

    table, full_text = reference._setting_tables(
        ("setting", "default", "meaning"), [("a.b", "`1`", meaning)], reference._address
    )

    assert table.endswith('| `a.b` | `1` | First &lt;tag>. <a href="#setting-a-b">more</a> |')
    assert full_text == f'- <a id="setting-a-b"></a>`a.b`: {meaning.replace("<tag", "&lt;tag")}'


def test_addresses_of_settings_are_unique() -> None:
    addresses = re.findall(r'<a id="(.*?)"', (ROOT / "docs/settings.md").read_text())

    assert len(addresses) == len(set(addresses)) > 300


@pytest.mark.parametrize("page", ["docs/settings.md", "docs/commands.md", "docs/families.md"])
def test_cells_of_generated_pages_are_short(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    cells = [cell.split() for row in rows for cell in re.split(r"(?<!\\)\|", row)]

    assert max(map(len, cells)) <= reference.CELL_WORDS


def test_new_option_changes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_figures(commands: Any) -> None:
        commands.add_parser("metrics", help="list metrics").add_argument("--extra", default=7, help="(%(default)s)")

    monkeypatch.setattr(main, "_add_models", add_figures)

    assert "| `--extra EXTRA` | (7) |" in reference.commands_page()


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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
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


PROBE = """<script>
const messages = [];
for (const kind of ["error", "warn"]) console[kind] = (...words) => messages.push(words.join(" "));
window.addEventListener("error", (event) => messages.push(event.message || `not loaded: ${event.target.src}`), true);
window.addEventListener("load", () => setTimeout(() => {
  document.body.dataset.probe = JSON.stringify(messages);
}, 500));
</script>"""
"""Script that collects console messages and files that failed to load."""


def _open(page: Path, profile: Path, query: str = "") -> tuple[str, str]:
    """Open a page in a browser; return its DOM and its console messages as JSON."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium or Chrome to open the page")
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text(encoding="utf-8").replace("<head>", f"<head>{PROBE}"), encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    more = ("--virtual-time-budget=5000", "--dump-dom", f"--user-data-dir={profile}", f"{probed.as_uri()}{query}")
    done = subprocess.run([browser, *options, *more], capture_output=True, text=True, timeout=180, check=False)
    probed.unlink()
    messages = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert messages, f"{page.name} did not load: {done.stderr[-2000:]}"
    return done.stdout, html.unescape(messages[1])


@pytest.mark.slow
def test_browser_shows_front_page_and_search_results(site: Path, tmp_path: Path) -> None:
    _, front_messages = _open(site / "README.html", tmp_path)
    results, search_messages = _open(site / "search.html", tmp_path, "?q=staleness")

    assert front_messages == search_messages == "[]"
    assert 'href="docs/asynchronous.html' in results


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_browser_opens_every_page_without_console_messages(site: Path, tmp_path: Path) -> None:
    pages = sorted({*site.rglob("*.html")} - {site / "index.html"})  # index.html redirects to README.html
    assert len(pages) > 50

    assert {page.name: messages for page in pages if (messages := _open(page, tmp_path)[1]) != "[]"} == {}


@pytest.mark.slow
def test_probe_reports_script_errors_and_missing_files(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<html><head></head><body><script src="gone.js"></script><script>broken()</script></body></html>')

    _, messages = _open(page, tmp_path / "profile")

    assert "gone.js" in messages
    assert "broken is not defined" in messages
