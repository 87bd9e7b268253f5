"""Readable log of all trajectories on disk: prompt, images, completion and outcome."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from rl_contracts.chat.image_messages import without_images
from rl_contracts.config import Settings, bounded
from rl_contracts.errors import DataError
from rl_contracts.runtime.json_lines import FOR_A_WHILE, append, to_json
from rl_contracts.runtime.logging import get_logger

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

    from rl_contracts.batch.trajectory import Trajectory
    from rl_contracts.images import Image

log = get_logger("trainers")

LEARNED_KEYS = ("group_ids", "episode_ids", "versions", "loss_mask", "advantages", "prox_logprobs")
"""Batch entries that `learned_records` reads."""

MAX_QUEUED_TOKENS = 50_000_000
"""Tokens that may wait to be written, about 1 GB. If the disk is too slow for that, further records are dropped."""

TOKEN_BYTES = 20
"""Bytes of an image that count as one such token."""

IMAGE_FOLDER = "images"
"""Folder of the images, in the folder of the records."""

RETRY_SECONDS = 1.0
"""Seconds between attempts to write to a full disk."""

CLOSE_SECONDS = 30.0
"""Seconds that `destroy` waits for the writer thread."""


@dataclass
class RolloutLogConfig(Settings):
    """Content of the completion logs of evaluations, under `rollouts/`."""

    setting: ClassVar[str] = "rollouts"
    tokens: bool = True
    """Include the id, log-prob and version of each generated token. These are most of the bytes."""


@dataclass
class RolloutsConfig(RolloutLogConfig):
    """Content and schedule of the completion logs, under `rollouts/`."""

    every: int = bounded(1, "0 (never) or more steps", lambda steps: steps >= 0)
    """Steps between training steps whose completions are written; 0: no training step. Evaluations are always
    written."""


class RolloutWriter:
    """Writer of JSON lines in a separate thread, with one file per step and rank, and of one file per image.

    Args:
        directory: created if it does not exist.
        rank: used in the file names.
        config: content and schedule.
    """

    def __init__(self, directory: str | Path, rank: int = 0, config: RolloutLogConfig | None = None) -> None:
        self.directory, self.rank, self.config = Path(directory), rank, config or RolloutsConfig()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.dropped = 0
        """Number of records dropped because the disk was too slow."""
        self._waiting: SimpleQueue[tuple[Path, Iterable[dict[str, Any]], Collection[Image], int] | None] = SimpleQueue()
        self._written_images: set[str] = set()
        self._waiting_tokens = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rollout-writer", daemon=True)
        self._thread.start()

    def write_training(self, step: int, trajectories: Sequence[Trajectory], rejected: str | None = None) -> None:
        """Append the trajectories of a training step, if `config.every` selects the step; see `write`.

        Nothing is written if the config covers only evaluations.
        """
        if self._is_due(step):
            self.write(f"step_{step}", trajectories, rejected)

    def write_learned(self, step: int, batch: TensorDict) -> None:
        """Append one record per trained sequence to `learned_step_<step>-<rank>.jsonl` (see `learned_records`).

        Nothing is written if `config.every` does not select the step. A sequence may be on another rank than the record
        of its trajectory. The writer thread does the work; this call returns at once.

        Args:
            step: training step that used the batch.
            batch: sequences of this replica with their `advantages`; must not change after this call.

        Raises:
            DataError: see `write`.
        """
        if self._is_due(step):
            columns = {name: batch[name].cpu().numpy() for name in LEARNED_KEYS if name in batch}
            records = learned_records(columns, self.config.tokens)
            self._add(f"learned_step_{step}", records, len(batch), batch["versions"].numel())

    def _is_due(self, step: int) -> bool:
        every = self.config.every if isinstance(self.config, RolloutsConfig) else 0
        return every > 0 and step % every == 0

    def write(self, name: str, trajectories: Sequence[Trajectory], rejected: str | None = None) -> None:
        """Append trajectories to `<name>-<rank>.jsonl`, one JSON object each, and write their new images to `images/`.

        The writer thread does the work; this call returns at once. It is safe on any thread.

        Args:
            name: first part of the file name.
            trajectories: must not change after this call.
            rejected: reason why the trajectories are not trained on, or None.

        Raises:
            DataError: an earlier write failed.
        """
        records = (to_record(trajectory, rejected, self.config.tokens) for trajectory in trajectories)
        images = {image for trajectory in trajectories for image in trajectory.images}
        self._add(name, records, len(trajectories), sum(map(len, trajectories)), images)

    def _add(
        self, name: str, records: Iterable[dict[str, Any]], count: int, tokens: int, images: Collection[Image] = ()
    ) -> None:
        """Queue records for the writer thread, which iterates over them."""
        if self._error is not None:
            remedy = "Free disk space" if isinstance(self._error, OSError) else "Store only JSON values in `info`"
            raise DataError(
                f"rollouts cannot be written to {self.directory}: {self._error!r}. {remedy}, or set rollouts.every=0."
            ) from self._error
        tokens += sum(len(image.data) for image in images) // TOKEN_BYTES
        with self._lock:
            if self._waiting_tokens and self._waiting_tokens + tokens > MAX_QUEUED_TOKENS:
                self.dropped += count
                log.warning("rollouts: the disk is too slow; %d records dropped so far", self.dropped)
                return
            self._waiting_tokens += tokens
        self._waiting.put((self.directory / f"{name}-{self.rank}.jsonl", records, images, tokens))

    def destroy(self) -> None:
        """Write the queued records and stop the thread. Safe to call twice."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("rollouts: not all records were written within %g s; the rest is lost", CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            for path, records, images, tokens in iter(self._waiting.get, None):
                for image in images:  # before the records that name them
                    self._write_image(image)
                lines = "".join(to_json(record) + "\n" for record in records)
                lines = lines.encode(errors="replace").decode()  # texts may hold unpaired surrogates
                self._retry(path, partial(append, path, lines))
                with self._lock:
                    self._waiting_tokens -= tokens
        except Exception as error:  # noqa: BLE001 - the next call of write raises it
            self._error = error

    def _write_image(self, image: Image) -> None:
        """Write an image, unless the folder has it, also from an earlier process of the run."""
        if image.key not in self._written_images:
            file = self.directory / image_file(image)
            self._retry(file, partial(self._write_atomically, file, image.data))
            self._written_images.add(image.key)

    def _write_atomically(self, file: Path, data: bytes) -> None:
        if file.exists() and file.stat().st_size == len(data):
            return
        file.parent.mkdir(exist_ok=True)
        scratch = file.with_name(f".{self.rank}.partial")  # other ranks may write the same image
        scratch.write_bytes(data)
        os.replace(scratch, file)

    def _retry(self, path: Path, write: Callable[[], None]) -> None:
        """Write to a file; retry while the disk is full, so that later records wait."""
        warned = False
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in FOR_A_WHILE:
                    raise
                if not warned:
                    log.warning("rollouts: cannot write %s; retrying: %s", path, error)
            warned = True
            time.sleep(RETRY_SECONDS)


def image_file(image: Image) -> str:
    """Return the file of an image, relative to the folder of the records."""
    return f"{IMAGE_FOLDER}/{image.key}.{image.media_type.removeprefix('image/')}"


def to_record(trajectory: Trajectory, rejected: str | None = None, tokens: bool = True) -> dict[str, Any]:
    """Return a trajectory as a JSON object.

    The object has the trajectory's `info`, ids and outcome, and the reason for its rejection (null: not rejected). With
    `tokens`, it also has the id, log-prob and version of each generated token. If there are images, `images` has the
    file and size of each, and `{"type": "image"}` replaces them in `conversation`.
    """
    import numpy as np

    generated = trajectory.versions >= 0
    versions = trajectory.versions[generated]
    record = {
        **trajectory.info,
        **(_image_fields(trajectory) if trajectory.images else {}),
        "reward": trajectory.reward,
        "rejected": rejected,
        "truncated": trajectory.truncated,
        "prompt_id": trajectory.prompt_id,
        "group_id": trajectory.group_id,
        "episode_id": trajectory.episode_id,
        "temperature": trajectory.temperature,
        "version_first": int(versions.min()) if len(versions) else None,
        "version_last": int(versions.max()) if len(versions) else None,
    }
    if tokens:
        record["token_ids"] = trajectory.input_ids[generated].tolist()
        record["logprobs"] = np.round(trajectory.logprobs[generated].astype(np.float64), 5).tolist()
        record["versions"] = versions.tolist()
    return record


def _image_fields(trajectory: Trajectory) -> dict[str, Any]:
    images = [{"file": image_file(image), "width": image.width, "height": image.height} for image in trajectory.images]
    fields: dict[str, Any] = {"images": images}
    if messages := trajectory.info.get("conversation"):
        fields["conversation"] = [without_images(message) for message in messages]
    return fields


def learned_records(columns: Mapping[str, np.ndarray], tokens: bool = True) -> Iterator[dict[str, Any]]:
    """Yield one record for each sequence of a trained batch, as a JSON object.

    A record has the sequence's ids, the number of its generated `tokens`, and the mean `advantage` of its trained
    tokens. With `tokens`, a record has up to two lists of one value per generated token (null: not trained):
    `advantages` if the advantages differ, and `proximal` if the trainer's log-probs before the step were computed.

    Args:
        columns: batch entries of `LEARNED_KEYS`, [B] or [B, T] each; `prox_logprobs` may be missing.
        tokens: whether to include values per token.
    """
    for i, versions in enumerate(columns["versions"]):
        generated, advantages = versions >= 0, columns["advantages"][i]
        trained = generated & columns["loss_mask"][i]
        trained_advantages = advantages[trained]
        record: dict[str, Any] = {
            "group_id": int(columns["group_ids"][i]),
            "episode_id": int(columns["episode_ids"][i]),
            "tokens": int(generated.sum()),
            "advantage": round(float(trained_advantages.mean()), 6) if len(trained_advantages) else None,
        }
        per_token = (
            {"advantages": advantages}
            if len(trained_advantages) and (trained_advantages != trained_advantages[0]).any()
            else {}
        )
        per_token |= {"proximal": columns["prox_logprobs"][i]} if "prox_logprobs" in columns else {}
        for name, values in per_token.items() if tokens else ():
            pairs = zip(values[generated].tolist(), trained[generated].tolist(), strict=True)
            record[name] = [round(value, 5) if is_trained else None for value, is_trained in pairs]
        yield record
