"""Data set of questions or conversations with images, for RL or supervised learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rl_contracts.chat.image_messages import image_part
from rl_contracts.config import require
from rl_contracts.errors import DataError
from rl_contracts.images import Image, read_image
from rl_datasets.chat import ChatOptions, prompt_messages, rl_example, sft_example
from rl_datasets.columns import Record, missing, renamed
from rl_datasets.rows import Rows, read_options, require_form
from rl_datasets.texts import checked
from rl_datasets.tools import read_tools
from rl_datasets.vision.messages import mark_images, with_parts
from rl_datasets.vision.table import open_table

_ELSEWHERE = ("data:", "http://", "https://")
"""Beginnings of image sources that are not paths."""


@dataclass(frozen=True)
class VisionChatOptions(ChatOptions):
    """Options of data sets with images in addition to path, split and form."""

    max_pixels: int | None = None
    """Maximum width * height of an image; null for no limit. Larger images are scaled down, not cropped: a crop could
    remove what the question asks about, such as an object to count or the label of an angle."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.max_pixels
        is_valid = limit is None or (isinstance(limit, int) and limit >= 1)
        require(is_valid, "data.options.max_pixels", "an integer of at least 1, or null for no limit", limit)


class VisionChat(Rows[Record]):
    """Examples of one split, in the order of the file. Images are read on access and never kept in memory.

    A record has the column `problem`, a text, or `messages`, as in `rl_datasets.Chat`, whose content may also be a list
    of parts with the types `text`, `image` and `image_url`. The column `images` is a list of images or one image. In
    order, they belong to the `<image>` marks of the texts and to the image parts without an image. Paths of images are
    relative to the directory of the data file.

    RL form: `{"prompt_id": index, "messages": up to the answer, "answer": ..., ...}`, with all other columns that JSON
    can represent. SFT form: `{"prompt_id": index, "messages": all messages}`. A content with images is a list of
    `{"type": "image_url", "image_url": {"url": data URL}}` and `{"type": "text", "text": ...}`. Other contents are
    texts.
    """

    reads_files = True
    has_images = True
    _name: ClassVar[str] = "vision-chat"
    """Name of the data set, for errors."""
    _default_path: ClassVar[str] = ""
    """Hub id that is read without a path."""
    _default_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of options that differ from those of `VisionChatOptions`, by form."""
    _reward_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that are kept for the reward although their names are usual for parts of a question."""

    def __init__(
        self,
        path: str | Path = "",
        split: str = "train",
        form: str = "rl",
        seed: int = 0,
        columns: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Open the data and check all texts, but no image. `rl_datasets.validate` reads all images.

        Args:
            path: directory, file or hub id; see `rl_datasets.files.read_records`. A directory may have the layout of
                a repository of the hub, with its files in `data`.
            split: `train` or `test`, for example.
            form: `rl` or `sft`.
            seed: ignored, because nothing is generated; every data set accepts it.
            columns: map from expected names (`problem`, `messages`, `images`, `answer`, arguments of the reward) to
                columns of the file.
            **options: fields of `VisionChatOptions`.

        Raises:
            ConfigError: `path` is empty and the data set has no default, or `form` or an option is unknown.
            DataError: the data cannot be read, or a record has no question, no text to learn, or other numbers of
                marks and images. On access: an image cannot be read.
        """
        path = path or self._default_path
        require(
            bool(path), f"data.path of {self._name} data", "a directory, a .jsonl or .parquet file, or a hub id", path
        )
        require_form(self._name, form, ("rl", "sft"))
        self.form = form
        self._columns = dict(columns or {})
        self._options = read_options(VisionChatOptions, self._name, {**self._default_options.get(form, {}), **options})
        table = open_table(path, split, self._options.subset)
        if not len(table):
            raise DataError(f"{path}: expected examples in the split {split!r}, found none; check its file")
        for record in table.outlines():
            self._example(record)
        self._directory = table.directory
        super().__init__(table)

    def _row(self, index: int, item: Record) -> dict[str, Any]:
        example = self._example(item)
        parts = [
            part
            for message in example["messages"]
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image"
        ]
        for number, part in enumerate(parts, 1):
            image = self._image(f"{item[0]} image {number}", part.pop("image"))
            part |= image_part(image)
        return {**example, "prompt_id": index}

    def _example(self, record: Record) -> dict[str, Any]:
        """Return an example whose image parts contain the sources of the images."""
        ((where, row),) = renamed([record], self._columns)
        row = self._edited(where, row)
        column = "messages" if "messages" in row else "problem"
        if column not in row:
            raise missing(where, row, column)
        question, sources = mark_images((where, row), column)
        unread = {name: value for name, value in row.items() if name not in (column, "images", *self._reward_columns)}
        text_record = where, {**unread, "messages": question}
        build = rl_example if self.form == "rl" else sft_example
        example = build(text_record, prompt_messages(text_record, self._options, None)) | read_tools(text_record)
        if self.form == "rl":
            example |= {name: row[name] for name in self._reward_columns if name in row}
        example = checked(where, example, self._options)
        return {**example, "messages": with_parts(where, example["messages"], sources)}

    def _edited(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return a record, with columns as expected, after the changes and checks of this data set."""
        return row

    def _image(self, where: str, source: Any) -> Image:
        if isinstance(source, Mapping) and source.get("bytes") is None:
            source = source.get("path")
        if isinstance(source, str) and not source.startswith(_ELSEWHERE):
            source = (self._directory or Path()) / source.removeprefix("file://")
        try:
            return read_image(source, self._options.max_pixels)
        except DataError as error:
            raise DataError(f"{where}: {str(error).removeprefix('image: ')}") from error


def require_answer(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its answer as text.

    Raises:
        DataError: the column `answer` is missing.
    """
    if row.get("answer") is None:
        raise missing(where, row, "answer")
    return {**row, "answer": str(row["answer"])}
