"""Gather the data of runs and write `report.html`, a single page."""

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
from rl_contracts.runtime.run_files import REPORT_FILE, steps_in
from rl_monitor.report.curves import curves_of, notes_of, read_records, stages_of
from rl_monitor.report.events import events_of, restarts_of, status_of_launcher, when
from rl_monitor.report.facts import COMMANDS, commands_of, record_command
from rl_monitor.report.samples import Samples, to_page_record
from rl_monitor.report.summary import summary_of
from rl_monitor.report.thumbnails import thumbnails_of
from rl_monitor.run_directory import FINISHED, LOCATION_SETTINGS, flatten

__all__ = ["RunReport", "write_report"]

log = get_logger("apps.report")

BYTES = 4_800_000
"""Maximum size of a page. Completions are truncated until the page fits."""
THUMBNAIL_BYTES = 1_500_000
"""Maximum size of all thumbnails of images together, divided among the runs. The newest completions come first."""
TOKENS = 120_000
"""Maximum tokens of all completions together, before truncation to fit `BYTES`."""
POINTS = 400
"""Maximum points per curve, divided among the runs."""
WRITE_SECONDS = 200
"""Seconds to wait per second of CPU time of the last page; 200 limits the load to 0.5% of a core."""
SOON = 10.0
"""Minimum seconds between two pages."""


SCRIPTS = ("curves", "completions", "page")
"""Script files of the page, in order of dependency."""


def gather(
    directory: Path,
    samples: Samples,
    points: int = POINTS,
    tokens: int = TOKENS,
    thumbnail_bytes: int = THUMBNAIL_BYTES,
) -> dict[str, Any]:
    """Return the data of a run for the page, as JSON values.

    Args:
        directory: run directory.
        samples: completions of the run.
        points: maximum points per curve.
        tokens: maximum tokens of all completions together; 0: no completions.
        thumbnail_bytes: maximum size of all thumbnails together.
    """
    records, status, settings = read_records(directory), status_of_launcher(directory), settings_of(directory)
    commands = commands_of(directory)
    last = records[-1] if records else {}
    completions = samples.choose() if tokens else []
    files = (directory / "rollouts" / image["file"] for c in completions for image in c.get("images") or ())
    thumbnails = thumbnails_of(files, thumbnail_bytes)
    limit = max(tokens // max(len(completions), 1), 1)
    pieces = Pieces(directory, settings)
    return {
        "name": directory.name,
        "directory": str(directory),
        "state": "finished" if (directory / FINISHED).exists() else status.get("state", "unknown"),
        "seen": when(status.get("time")),
        "restarts": status.get("trainer_restarts", 0),
        "step": last.get("step", 0),
        "total_steps": settings.get("total_steps"),
        "summary": summary_of(records, settings, commands),
        "checkpoints": steps_in(directory / "checkpoints"),
        "resumed": restarts_of(records, status, commands),
        "curves": curves_of(records, points),
        "stages": stages_of(records),
        "events": events_of(directory, records),
        "settings": settings,
        "commands": [fact | {"started": when(fact.get("started"))} for fact in commands],
        "completions": [to_page_record(c, pieces.of, limit, limit * 4 + 400, thumbnails) for c in completions],
        "images": thumbnails,
    }


def settings_of(directory: Path) -> dict[str, Any]:
    """Return the settings of a run, dotted name to value; empty if `config.yaml` is not readable."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        parsed = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
        return flatten(parsed) if isinstance(parsed, dict) else {}
    return {}


class Pieces:
    """Decoder from token ids to the text of each token, with the tokenizer of a run.

    Args:
        directory: run directory.
        settings: settings of the run.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        model = settings.get("model.path")
        directories = [directory / "tokenizer", Path(str(settings.get(f"model.directories.{model}", model)))]
        self._file = next((f for f in (folder / "tokenizer.json" for folder in directories) if f.is_file()), None)
        self._tokenizer: Any = None

    def of(self, ids: list[int]) -> list[str] | None:
        """Return the text of each token; the texts joined are the decoded text.

        If several tokens encode one character, the last token has the character and the others have empty texts. Return
        None if the tokenizer is not on this machine or cannot decode the ids."""
        if self._file is None:
            return None
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream

        try:
            self._tokenizer = self._tokenizer or Tokenizer.from_file(str(self._file))
            stream = DecodeStream([], False)
            return [stream.step(self._tokenizer, i) or "" for i in ids]
        except Exception as error:  # noqa: BLE001 - tokenizers raises only Exception; the page shows ids instead
            log.warning("cannot use tokenizer %s; the report shows token ids: %s", self._file, error)
            self._file = None
            return None


def differing(runs: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return name and values of each setting that differs between runs, except `LOCATION_SETTINGS`."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = [
        [name, *(run["settings"].get(name) for run in runs)] for name in names if not name.startswith(LOCATION_SETTINGS)
    ]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def render(runs: Sequence[dict[str, Any]]) -> str:
    """Return the HTML page of runs."""
    images = {name: url for run in runs for name, url in run["images"].items()}
    shown_runs = [{name: value for name, value in run.items() if name != "images"} for run in runs]
    notes = notes_of(sorted({name for run in runs for name in run["curves"]}))
    data = {"runs": shown_runs, "images": images, "notes": notes, "differing": differing(runs)}
    data["made"] = when(time.time())
    folder = Path(__file__).parent
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css")}
    parts["script"] = "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts |= {"title": _escaped(" and ".join(run["name"] for run in runs)), "data": as_json(data)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], parts["html"])


def as_json(value: object) -> str:
    """Return JSON that is safe in a `script` element: `<` and lone surrogates are escaped, NaN becomes null."""
    text = to_json(value, separators=(",", ":"), default=str)
    return re.sub(r"[<\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").encode("utf-8", "replace").decode()


def write_report(directories: Sequence[Path], file: Path, samples: Sequence[Samples] | None = None) -> int:
    """Write the page of runs atomically.

    Args:
        directories: run directories.
        file: file to create or replace.
        samples: samples of each run, to reuse completions read earlier.

    Returns:
        size of the page in bytes.

    Raises:
        ConfigError: the file is not writable.
    """
    samples_of_runs = samples or [Samples(directory) for directory in directories]
    points, tokens = max(POINTS // len(directories), 50), TOKENS // len(directories)
    while True:
        page = render(
            [
                gather(d, s, points, tokens, THUMBNAIL_BYTES // len(directories))
                for d, s in zip(directories, samples_of_runs, strict=True)
            ]
        ).encode()
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
        raise ConfigError(f"{file} is not writable: {error.strerror or error}. Choose another file with -o.") from error
    return len(page)


class RunReport:
    """Write the page of a run periodically in a thread after `begin`, and once more on exit of the context.

    An error while writing the page only logs a warning.

    Args:
        directory: run directory.
        command: arguments of the running command.
    """

    def __init__(self, directory: Path, command: list[str]) -> None:
        self.directory, self._command = directory, command
        self._samples = Samples(directory)
        self._stop, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def begin(self) -> None:
        """Start the thread. It records the command first, see `record_command`."""
        self._thread.start()

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._write()

    def _run(self) -> None:
        wait = SOON
        try:
            record_command(self.directory, self._command)
        except OSError as error:
            log.warning("cannot write %s: %s", COMMANDS, error)
        while not self._stop.wait(wait):
            begin = time.thread_time()
            self._write()
            wait = max(SOON, WRITE_SECONDS * (time.thread_time() - begin))

    def _write(self) -> None:
        try:
            write_report([self.directory], self.directory / REPORT_FILE, [self._samples])
        except Exception as error:  # noqa: BLE001 - a failed page must not end the run
            if not self._warned:
                log.warning("cannot write %s: %s: %s", REPORT_FILE, type(error).__name__, error)
            self._warned = True
