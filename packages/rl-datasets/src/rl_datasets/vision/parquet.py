"""Writer of Parquet files with the columns of `clevr_count_70k` and `geometry3k` on the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_contracts.chat.image_messages import images_in, is_image_part
from rl_datasets.vision.messages import MARK


def write_parquet(rows: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Write examples with images as the columns `images` (a list), `problem` (text with `<image>` marks) and `answer`.

    Args:
        rows: examples in RL form, for example of `DrawnScenes`. System messages are not written.
        path: file to write, for example `train.parquet`. Its directory is created.
    """
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    features = Features({"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")})
    dataset = Dataset.from_list([_record(row) for row in rows], features)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    dataset.to_parquet(str(path))


def _record(row: dict[str, Any]) -> dict[str, Any]:
    content = row["messages"][-1]["content"]
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    images = [{"bytes": image.data, "path": None} for image in images_in(row["messages"][-1:])]
    problem = "".join(MARK if is_image_part(part) else part["text"] for part in parts)
    return {"images": images, "problem": problem, "answer": str(row["answer"])}
