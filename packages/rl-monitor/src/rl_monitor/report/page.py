"""`report.html`: gathers what is to be shown of runs, and writes it as one page."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rl_contracts.errors import ConfigError
from rl_contracts.runtime.json_lines import to_json
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.run_files import REPORT_FILE
from rl_monitor.report.curves import curves_of, read_records, stages_of
from rl_monitor.report.events import events_of, status_of_launcher, when
from rl_monitor.report.facts import COMMANDS, commands_of, record_command
from rl_monitor.report.samples import Samples, to_page_record
from rl_monitor.run_directory import FINISHED, LOCATION_SETTINGS, flatten

__all__ = ["RunReport", "write_report"]

log = get_logger("apps.report")

BYTES = 4_800_000
"""A page is smaller; answers are cut short until it is."""
TOKENS = 120_000
"""Tokens of all answers together that are shown, as long as the page stays small enough."""
POINTS = 400
"""Points of a curve, over all runs."""
WRITE_SECONDS = 200
"""A page is written again after so many times the seconds that it kept a core busy: half a percent of one at most."""
SOON = 10.0
"""Seconds between two pages at least."""


SCRIPTS = ("curves", "answers", "page")
"""Files of the page's own script, in the order in which they use each other."""


def gather(directory: Path, samples: Samples, points: int = POINTS, tokens: int = TOKENS) -> dict[str, Any]:
    """What the page shows of a run, as JSON.

    Args:
        directory: of the run.
        samples: its answers.
        points: of each curve at most.
        tokens: of all answers together at most.
    """
    records, said, settings = read_records(directory), status_of_launcher(directory), settings_of(directory)
    last = records[-1] if records else {}
    answers = samples.choose()
    each = max(tokens // max(len(answers), 1), 1)
    pieces = Pieces(directory, settings)
    return {
        "name": directory.name,
        "directory": str(directory),
        "state": "finished" if (directory / FINISHED).exists() else said.get("state", "unknown"),
        "seen": when(said.get("time")),
        "restarts": said.get("trainer_restarts", 0),
        "step": last.get("step", 0),
        "total_steps": settings.get("total_steps"),
        "curves": curves_of(records, points),
        "stages": stages_of(records),
        "events": events_of(directory, records),
        "settings": settings,
        "commands": [fact | {"started": when(fact.get("started"))} for fact in commands_of(directory)],
        "answers": [to_page_record(answer, pieces.of, each, each * 4 + 400) for answer in answers] if tokens else [],
    }


def settings_of(directory: Path) -> dict[str, Any]:
    """The settings of a run, `a.b.c` to value; empty where it has none that can be read."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        found = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
        return flatten(found) if isinstance(found, dict) else {}
    return {}


class Pieces:
    """The text of each token, by the tokenizer of a run.

    Args:
        directory: of the run.
        settings: of the run.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        model = settings.get("model.path")
        there = [directory / "tokenizer", Path(str(settings.get(f"model.directories.{model}", model)))]
        self._file = next((f for f in (place / "tokenizer.json" for place in there) if f.is_file()), None)
        self._tokenizer: Any = None

    def of(self, ids: list[int]) -> list[str] | None:
        """A text for each id, together that of all of them: bytes of a character are with the last of its tokens. None
        where the tokenizer is not on this machine, or cannot read them."""
        if self._file is None:
            return None
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream

        try:
            self._tokenizer = self._tokenizer or Tokenizer.from_file(str(self._file))
            stream = DecodeStream([], False)
            return [stream.step(self._tokenizer, i) or "" for i in ids]
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower; ids are shown instead
            log.warning("%s cannot be used, and tokens are shown as ids: %s", self._file, error)
            self._file = None
            return None


def differing(runs: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Settings that are not the same in all runs, but for those that say where something is: name, value of each."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = [
        [name, *(run["settings"].get(name) for run in runs)] for name in names if not name.startswith(LOCATION_SETTINGS)
    ]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def render(runs: Sequence[dict[str, Any]]) -> str:
    """The page of runs."""
    here, data = Path(__file__).parent, {"runs": runs, "differing": differing(runs), "made": when(time.time())}
    parts = {name: (here / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css")}
    parts["script"] = "\n".join((here / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts |= {"title": _escaped(" and ".join(run["name"] for run in runs)), "data": as_json(data)}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], parts["html"])


def as_json(value: object) -> str:
    """JSON that may stand in a `script` element: no `<`, no NaN (null instead), no half of a character."""
    text = to_json(value, separators=(",", ":"), default=str)
    return re.sub(r"[<\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").encode("utf-8", "replace").decode()


def write_report(directories: Sequence[Path], file: Path, samples: Sequence[Samples] | None = None) -> int:
    """Write the page of runs, all of it or nothing.

    Args:
        directories: of the runs.
        file: made or replaced.
        samples: of each run, to go on from what they read before.

    Returns:
        its bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    chosen = samples or [Samples(directory) for directory in directories]
    points, tokens = max(POINTS // len(directories), 50), TOKENS // len(directories)
    while True:
        page = render([gather(d, s, points, tokens) for d, s in zip(directories, chosen, strict=True)]).encode()
        if len(page) <= BYTES or not tokens:
            break
        tokens = tokens // 2 if tokens > 2_000 else 0
    try:
        scratch = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            scratch.write_bytes(page)
            scratch.replace(file)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a place for the page, found: {error.strerror or error}. Choose another with -o."
        ) from error
    return len(page)


class RunReport:
    """Writes the page of a run now and then from `begin` on, in a thread, and at the end of its `with`. A page that
    cannot be written is a warning.

    Args:
        directory: of the run.
        command: the words of the command that runs.
    """

    def __init__(self, directory: Path, command: list[str]) -> None:
        self.directory, self._command = directory, command
        self._samples = Samples(directory)
        self._over, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)

    def begin(self) -> None:
        """From now on there is something to show. The command is recorded first, see `record_command`."""
        self._thread.start()

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._write()

    def _work(self) -> None:
        wait = SOON
        try:
            record_command(self.directory, self._command)
        except OSError as error:
            log.warning("%s is not written: %s", COMMANDS, error)
        while not self._over.wait(wait):
            begin = time.thread_time()
            self._write()
            wait = max(SOON, WRITE_SECONDS * (time.thread_time() - begin))

    def _write(self) -> None:
        try:
            write_report([self.directory], self.directory / REPORT_FILE, [self._samples])
        except Exception as error:  # noqa: BLE001 - a page is no reason to end a run; the log says what is wrong with it
            if not self._warned:
                log.warning("%s is not written: %s: %s", REPORT_FILE, type(error).__name__, error)
            self._warned = True
