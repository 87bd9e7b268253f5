"""Peer of `embedded_server.py`: `generate` of transformers, controlled over standard input.

    python embedded_server_generate.py MODEL

Each input line is a JSON object with `threads`, the number of torch threads, and `batches`, a list of
`{"prompts": [[id, ...], ...], "tokens": n}`. Each output line is the total seconds of these batches.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main(path: str) -> None:
    """Process lines until standard input ends."""
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # lengths are imposed: no end token, and no check for one
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        torch.set_num_threads(work["threads"])
        started = time.perf_counter()
        for batch in work["batches"]:
            ids = torch.tensor(batch["prompts"])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=batch["tokens"],
                pad_token_id=0,
            )
            if output.shape != (ids.shape[0], ids.shape[1] + batch["tokens"]):
                raise SystemExit(
                    f"expected {batch['tokens']} tokens after prompts {list(ids.shape)}, found {list(output.shape)}"
                )
        print(json.dumps(time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
