"""Stop strings, found in the text of the last few tokens only."""

from __future__ import annotations

from typing import Any

from rl_inference.server.job import GenerationJob

_MARGIN = 8
"""Tokens decoded beyond the longest stop string: a character can span tokens, and the first one may lose a
leading space."""


def matched_stop(job: GenerationJob, tokenizer: Any) -> str | None:
    """The first of the job's stop strings that its answer now contains, once it has its minimum length.

    A token is at least one byte, so a stop string of b bytes ends within the last b tokens of the answer.
    Tokens that the prompt brought along from an interrupted answer count as part of it."""
    if len(job.output_ids) < job.generation.min_new_tokens:
        return None
    window = max(len(text.encode()) for text in job.generation.stop) + _MARGIN
    tail = job.output_ids[-window:]
    if len(tail) < window and job.resumed:
        earlier = job.prompt[-min(job.resumed, window - len(tail)) :]
        tail = earlier + tail
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return next((stop for stop in job.generation.stop if stop in text), None)
