"""On each of several ranks: what models of each family say in each layout, and their weights as they come out again.

Arguments: a directory of models, and as JSON a list of layouts, each with its settings.
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
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")  # the others know no soft caps
        reference, spec = ReferenceTrainEngine(model=model), FinetuneSpec(str(path), 1, device="cpu", optimizer=None)
        reference.initialize(spec)
        expected, source = logprobs(reference, batch), load_file(path / "model.safetensors")
        for layout, settings in layouts:
            where = f"{path.name} {layout} {settings}"
            engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(**layout))
            engine.initialize(spec)
            found = logprobs(engine, batch)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=lambda text, w=where: f"{w}: {text}")

            own = {name: tensor.clone() for name, tensor in engine.full_parameters()}
            assert all(same_bits(own[name], source[name]) for name in own), where
            everyone = [name for names in engine.parallel.gather_json(list(own)) for name in names]
            assert sorted(everyone) == sorted(source), where
            engine.destroy()
        print(path.name, "as in transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
