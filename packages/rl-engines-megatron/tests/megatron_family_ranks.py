"""On each of several ranks: what models of each family say, and their weights as they come out again.

Arguments: a directory of models, the layout as JSON, settings as JSON.
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
from rl_engines_megatron.sharding import same_bits


def main(models: Path, layout: dict, settings: dict) -> None:
    batch = make_batch(5, vocab_size=97)
    for path in sorted(models.iterdir()):
        spec = FinetuneSpec(str(path), 1, device="cpu", optimizer=None)
        engine = MegatronEngine(MegatronEngineConfig(**settings), ParallelStrategy(**layout))
        engine.initialize(spec)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")  # the others know no soft caps
        reference = ReferenceTrainEngine(model=model)
        reference.initialize(spec)

        found = engine.forward(batch, lambda outputs, packed: outputs.logprobs)
        expected = reference.forward(batch, lambda outputs, packed: outputs.logprobs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=lambda text, p=path: f"{p.name}: {text}")

        source = load_file(path / "model.safetensors")
        own = {name: tensor.clone() for name, tensor in engine.full_parameters()}
        assert all(same_bits(own[name], source[name]) for name in own), path.name
        everyone = [name for names in engine.parallel.gather_json(list(own)) for name in names]
        assert sorted(everyone) == sorted(source), path.name
        engine.destroy()
        print(path.name, "as in transformers")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
