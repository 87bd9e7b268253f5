"""Compare log-probs and weights of each model family with transformers, in each layout. Runs on each of several ranks.

Arguments: a directory of models, and as JSON a list of layouts with their settings.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_contracts.allocation import ParallelStrategy
from rl_contracts.data import FinetuneSpec
from rl_contracts.testing import ReferenceTrainEngine, make_batch
from rl_engines_megatron import MegatronEngine, MegatronEngineConfig
from rl_engines_megatron.weights.layouts import same_bits


def logprobs(engine, batch):
    return engine.forward(batch, lambda outputs, packed: outputs.logprobs)


def main(models: Path, layouts: list) -> None:
    batch = make_batch(5, vocab_size=97)
    for path in sorted(models.iterdir()):
        # other implementations of attention ignore soft caps
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        reference, spec = ReferenceTrainEngine(model=model), FinetuneSpec(str(path), 1, device="cpu", optimizer=None)
        reference.initialize(spec)
        expected, source = logprobs(reference, batch), load_file(path / "model.safetensors")
        for layout, settings in layouts:
            label = f"{path.name} {layout} {settings}"
            engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(**layout))
            engine.initialize(spec)
            actual = logprobs(engine, batch)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0, msg=lambda text, w=label: f"{w}: {text}")

            weights = {name: tensor.clone() for name, tensor in engine.full_parameters()}
            assert all(same_bits(weights[name], source[name]) for name in weights), label
            all_names = [name for names in engine.parallel.gather_json(list(weights)) for name in names]
            assert sorted(all_names) == sorted(source), label
            engine.destroy()
        print(path.name, "as in transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
