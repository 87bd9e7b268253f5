"""Embedded server with fault injection, for tests and demonstrations.

The environment variable FAULT_FILE names a file that holds the name of the active fault. The file may change while
the server runs.

FAULT_FILE=path python -m rl_inference.embedded_server.fault_injection --model DIR --port N ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from rl_contracts.weights import adapters
from rl_inference.embedded_server.__main__ import main
from rl_inference.embedded_server.job import GenerationJob
from rl_inference.embedded_server.model import loading
from rl_inference.embedded_server.model.slot_model import SlotModel
from rl_inference.embedded_server.sampling import SamplingBatch
from rl_inference.embedded_server.slots import SlotTable
from rl_inference.embedded_server.weights import ServedWeights


def fault() -> str:
    """Return the name of the active fault, or an empty string."""
    return Path(os.environ["FAULT_FILE"]).read_text().strip()


def inject_into_weights() -> None:
    """Inject faults into commits.

    `weights not sent`: a commit changes only the version. `one behind`: a commit serves the weights of the previous
    commit. `one tensor`: one tensor changes after the receipt.
    """
    commit = ServedWeights.commit
    withheld: dict[str, torch.Tensor] = {}  # the weights of the last commit, which it did not apply

    def copies(weights: ServedWeights) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in weights._live.items()}

    def faulty_commit(self: ServedWeights, version: int) -> None:
        previous = withheld.copy() or copies(self)
        commit(self, version)
        withheld.clear()
        if fault() == "one behind":
            withheld.update(copies(self))
            for name, value in previous.items():
                self._live[name].data.copy_(value)
        elif fault() == "weights not sent":
            self._exchange()
        elif fault() == "one tensor":
            with torch.no_grad():
                self._live["model.norm.weight"].data.mul_(1.5)

    ServedWeights.commit = faulty_commit  # type: ignore[method-assign]


def inject_into_adapters() -> None:
    """Inject `adapter not applied`: the server stages, acknowledges and serves the base weights."""
    merged = adapters.merged

    def faulty_merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return base.float() if fault() == "adapter not applied" else merged(base, a, b, scale)

    adapters.merged = faulty_merged


def inject_into_model() -> None:
    """Inject `stale copy`: `lm_head` multiplies with a copy of its weight from the time of loading."""
    load = loading.load_model

    def faulty_load(*arguments: Any) -> SlotModel:
        model = load(*arguments)
        lm_head = model.model.get_output_embeddings()
        stale_weight, forward = lm_head.weight.detach().clone(), lm_head.forward
        lm_head.forward = lambda x: (
            torch.nn.functional.linear(x, stale_weight) if fault() == "stale copy" else forward(x)
        )
        return model

    loading.load_model = faulty_load  # type: ignore[assignment]


def inject_into_sampling() -> None:
    """Inject faults into sampling.

    `temperature`: every token is sampled at temperature 0.7. `truncated`: log-probs are normalized over the 8
    likeliest tokens.
    """
    sample = SamplingBatch.sample

    def faulty_sample(self: SamplingBatch, logits: torch.Tensor, positions: torch.Tensor) -> Any:
        if fault() == "temperature":
            self.temperature, self.tempered = torch.full_like(self.temperature, 0.7), True
        if fault() == "truncated":
            threshold = logits.topk(8, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        return sample(self, logits, positions)

    SamplingBatch.sample = faulty_sample  # type: ignore[method-assign]


def inject_into_cache() -> None:
    """Inject `stale prefix`: cached keys and values of prompts are reused after a commit."""
    clear = SlotTable._clear_prefixes

    def faulty_clear(self: SlotTable) -> None:
        if fault() != "stale prefix":
            clear(self)

    SlotTable._clear_prefixes = faulty_clear  # type: ignore[method-assign]


def inject_into_version_stamps() -> None:
    """Inject `stamped late`: every token is stamped with the version after its own."""
    version_spans = GenerationJob.version_spans

    def faulty_spans(self: GenerationJob, start: int, end: int) -> list[dict[str, int]]:
        offset = fault() == "stamped late"
        return [{**span, "version": span["version"] + offset} for span in version_spans(self, start, end)]

    GenerationJob.version_spans = faulty_spans  # type: ignore[method-assign]


if __name__ == "__main__":
    for inject in (
        inject_into_weights,
        inject_into_adapters,
        inject_into_model,
        inject_into_sampling,
        inject_into_cache,
        inject_into_version_stamps,
    ):
        inject()
    sys.exit(main(sys.argv[1:]))
