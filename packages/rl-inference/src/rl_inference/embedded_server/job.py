"""Generation job of the embedded server: a request, its tokens so far and its reply."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rl_contracts.config import GenerationConfig
from rl_inference.client.stop_strings import completed, longest_stop_length

if TYPE_CHECKING:
    from rl_inference.embedded_server.model.vision import PromptImages


@dataclass(eq=False)
class GenerationJob:
    """A request and its completion so far.

    The decode thread appends. The HTTP thread only reads, up to `len(logprobs)` tokens.
    """

    rid: str
    """Request id chosen by the client."""
    prompt: list[int]
    """Token ids to continue, including the tokens of an interrupted completion."""
    generation: GenerationConfig
    """Sampling settings. `max_new_tokens` and `min_new_tokens` count from the end of `prompt`."""
    seed: int
    """Sampling seed, int64."""
    end_ids: frozenset[int]
    """Token ids that end the completion."""
    blocked_ids: frozenset[int] = frozenset()
    """Token ids that may not be sampled before the minimum length.

    These are `end_ids`, and the end tokens of the model even if they are ignored.
    """
    resumed: int = 0
    """Number of tokens at the end of `prompt` that belong to the interrupted completion.

    Stop strings may begin in them.
    """
    images: PromptImages | None = None
    """Images of the prompt, or None."""
    batch: str = ""
    """Request id of the batch that the job belongs to; equal to `rid` for a single request."""
    ended: Future[None] = field(default_factory=Future)
    """Future that is done when the job has ended."""
    output_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the generated tokens. Appended after the token, so its length is the number of readable tokens."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each generated token."""
    finish_reason: dict[str, Any] | None = None
    """Reason why the job ended; None while it runs."""
    slot: int = -1
    """Index of the decode slot while the job runs."""
    read: int = 0
    """Number of tokens of prompt and completion in the KV cache during prefill."""
    prefix_keys: list[int] = field(default_factory=list)
    """Hashes of the first `keyed_length` tokens, used to find a cached prefix of another sequence."""
    keyed_length: int = 0
    """Number of tokens that `prefix_keys` covers."""
    cache_version: int = -1
    """Version of the weights that computed all of the job's keys and values."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and completion, which is also the position of the next token."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and completion so far."""
        return self.prompt + self.output_ids

    @property
    def identity(self) -> list[int]:
        """Tokens that identify the cached keys and values: as `tokens`, with images in place of their placeholders."""
        return (self.prompt if self.images is None else self.images.identity) + self.output_ids

    @property
    def first_stop_position(self) -> int:
        """First position at which an end token may be sampled."""
        return len(self.prompt) + self.generation.min_new_tokens

    def append(self, token: int, logprob: float | None, version: int) -> None:
        """Add a generated token. Without a log-prob it stays invisible to readers until `logprobs` is set."""
        self.versions.append(version)
        self.output_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)

    def finish(self, reason: dict[str, Any]) -> None:
        """End the job; later calls have no effect."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.ended.set_result(None)

    def version_spans(self, start: int, end: int) -> list[dict[str, int]]:
        """Return the versions of tokens `start` to `end` as `[{version, start, end}]`.

        The indices count from `start`.
        """
        spans, first = [], 0
        for version, run in groupby(self.versions[start:end]):
            stop = first + len(list(run))
            spans.append({"version": version, "start": first, "end": stop})
            first = stop
        return spans

    def to_reply(self, start: int, tokenizer: Any | None, version: int, logprobs: bool) -> dict[str, Any]:
        """Return the reply with the tokens from `start` on; 0 gives the whole completion.

        Args:
            tokenizer: decodes the text, which only the last reply carries (whole, without its stop string).
            version: the version served now.
            logprobs: whether to include log-probs.
        """
        reason = self.finish_reason
        end = len(self.logprobs)
        if reason is None:
            # The newest token may be the last one. If it were sent without a finish reason and the server died now,
            # another server would continue the completion past its end.
            end = max(start, end - 1)
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": end,
            "weight_version": version,
            "weight_versions": self.version_spans(start, end),
        }
        ids = self.output_ids[start:end]
        if logprobs:
            meta["output_token_logprobs"] = [
                [p, token, None] for p, token in zip(self.logprobs[start:end], ids, strict=True)
            ]
        result: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if reason is not None:
            result["text"] = self._text(tokenizer)
        return result

    def _text(self, tokenizer: Any | None) -> str:
        if tokenizer is None:
            return ""
        text: str = tokenizer.decode(self.output_ids, skip_special_tokens=True)
        matched = (self.finish_reason or {}).get("matched")
        return text[: text.rfind(matched)] if isinstance(matched, str) and matched in text else text

    def matched_stop(self, tokenizer: Any) -> str | None:
        """Return the first stop string that the newest token completed, or None before the minimum length.

        Tokens at the end of the prompt that belong to the interrupted completion take part in the match. A string
        that was complete before the minimum length is not cut off.
        """
        if len(self.output_ids) < self.generation.min_new_tokens:
            return None
        window = longest_stop_length(self.generation.stop)
        earlier = self.prompt[len(self.prompt) - min(self.resumed, window) :]
        return completed(self.generation.stop, earlier + self.output_ids[-window:], tokenizer)
