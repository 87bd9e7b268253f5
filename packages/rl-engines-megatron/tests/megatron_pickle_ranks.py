"""Rank 1 sends the others a pickle where megatron-core expects what a rank has of a checkpoint.

Argument: a directory; a file appears in it if the pickle is read.
"""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl_contracts.errors import EngineError
from rl_engines_megatron.messages import without_pickles


class Attack:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), [None, None]
    with without_pickles():
        if rank == 1:
            content = pickle.dumps(Attack(str(directory / "run")))
            pickled = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()
            distributed_c10d._object_to_tensor = lambda *_: (pickled, torch.tensor([len(content)]))
        try:
            dist.all_gather_object(found, {"rank": rank})
        except EngineError as error:
            (directory / f"refused-{rank}").write_text(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
