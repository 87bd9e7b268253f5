"""An embedded server with faults that tests and demonstrations switch on while it runs: the file FAULT_FILE names the
one that is on.

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
    """Name of the fault that is on; empty: none."""
    return Path(os.environ["FAULT_FILE"]).read_text().strip()


def inject_into_weights() -> None:
    """`weights not sent`: a commit changes the version only. `one behind`: it brings the weights of the commit before.
    `one tensor`: after the receipt one tensor changes."""
    commit = ServedWeights.commit
    due: dict[str, torch.Tensor] = {}  # what the last commit should have brought

    def copies(weights: ServedWeights) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in weights._live.items()}

    def faulty_commit(self: ServedWeights, version: int) -> None:
        before = due.copy() or copies(self)
        commit(self, version)
        due.clear()
        if fault() == "one behind":
            due.update(copies(self))
            for name, value in before.items():
                self._live[name].data.copy_(value)
        elif fault() == "weights not sent":
            self._exchange()
        elif fault() == "one tensor":
            with torch.no_grad():
                self._live["model.norm.weight"].data.mul_(1.5)

    ServedWeights.commit = faulty_commit  # type: ignore[method-assign]


def inject_into_adapters() -> None:
    """`adapter not applied`: what is staged, acknowledged and served is the base."""
    merged = adapters.merged

    def faulty_merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return base.float() if fault() == "adapter not applied" else merged(base, a, b, scale)

    adapters.merged = faulty_merged


def inject_into_model() -> None:
    """`stale copy`: the head multiplies with a copy of its weight made when the model was loaded."""
    load = loading.load_model

    def faulty_load(*arguments: Any) -> SlotModel:
        model = load(*arguments)
        head = model.model.get_output_embeddings()
        copy, forward = head.weight.detach().clone(), head.forward
        head.forward = lambda x: torch.nn.functional.linear(x, copy) if fault() == "stale copy" else forward(x)
        return model

    loading.load_model = faulty_load  # type: ignore[assignment]


def inject_into_sampling() -> None:
    """`temperature`: everything is sampled at 0.7. `truncated`: log-probs are those of the 8 likeliest tokens."""
    sample = SamplingBatch.sample

    def faulty_sample(self: SamplingBatch, logits: torch.Tensor, positions: torch.Tensor) -> Any:
        if fault() == "temperature":
            self.temperature, self.tempered = torch.full_like(self.temperature, 0.7), True
        if fault() == "truncated":
            least = logits.topk(8, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return sample(self, logits, positions)

    SamplingBatch.sample = faulty_sample  # type: ignore[method-assign]


def inject_into_cache() -> None:
    """`stale prefix`: keys and values of known prompts are used on, whatever is committed."""
    clear = SlotTable._clear_prefixes

    def faulty_clear(self: SlotTable) -> None:
        if fault() != "stale prefix":
            clear(self)

    SlotTable._clear_prefixes = faulty_clear  # type: ignore[method-assign]


def inject_into_version_stamps() -> None:
    """`stamped late`: tokens get the version that is served when the answer is read, which is the next one."""
    version_spans = GenerationJob.version_spans

    def faulty_spans(self: GenerationJob, start: int, end: int) -> list[dict[str, int]]:
        late = fault() == "stamped late"
        return [{**span, "version": span["version"] + late} for span in version_spans(self, start, end)]

    GenerationJob.version_spans = faulty_spans  # type: ignore[method-assign]


if __name__ == "__main__":
    for plant in (
        inject_into_weights,
        inject_into_adapters,
        inject_into_model,
        inject_into_sampling,
        inject_into_cache,
        inject_into_version_stamps,
    ):
        plant()
    sys.exit(main(sys.argv[1:]))
