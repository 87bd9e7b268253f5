"""Answers in SGLang's form."""

from __future__ import annotations

import json
from typing import Any

from rl_inference.server.job import GenerationJob


def answer(job: GenerationJob, tokenizer: Any | None, version: int, start: int, logprobs: bool) -> dict[str, Any]:
    """What is new of a job since token `start`; the whole answer for 0.

    Args:
        tokenizer: makes the text, which only the last part of an answer carries (whole, its stop string cut
        off).
        version: the version served now.
        logprobs: whether log-probs are wanted.
    """
    reason = job.finish_reason
    end = len(job.logprobs)
    if reason is None:
        # The newest token may turn out to be the last one. Were it sent without that word and the server died now,
        # the answer would be continued elsewhere past its end.
        end = max(start, end - 1)
    meta: dict[str, Any] = {
        "id": job.rid,
        "finish_reason": reason,
        "prompt_tokens": len(job.prompt),
        "completion_tokens": end,
        "weight_version": version,
        "weight_versions": job.version_spans(start, end),
    }
    ids = job.output_ids[start:end]
    if logprobs:
        meta["output_token_logprobs"] = [
            [p, token, None] for p, token in zip(job.logprobs[start:end], ids, strict=True)
        ]
    result: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
    if reason is not None:
        result["text"] = _text(job, tokenizer)
    return result


def event(value: Any) -> bytes:
    """A server-sent event; strings go as they are."""
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


def _text(job: GenerationJob, tokenizer: Any | None) -> str:
    if tokenizer is None:
        return ""
    text: str = tokenizer.decode(job.output_ids, skip_special_tokens=True)
    matched = (job.finish_reason or {}).get("matched")
    return text[: text.find(matched)] if isinstance(matched, str) and matched in text else text
