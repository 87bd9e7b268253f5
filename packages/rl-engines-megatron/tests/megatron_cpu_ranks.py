"""Gather different numbers of rows from each rank, and check the gradients. Runs on each of two ranks."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from rl_engines_megatron.cpu import without_cuda

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, lengths = dist.get_rank(), [3, 1]
    own = torch.full((lengths[rank], 2), 1.0 + rank, requires_grad=True)
    with without_cuda(torch.device("cpu")):
        gathered = gather_from_sequence_parallel_region(own, group=dist.group.WORLD, output_split_sizes=lengths)
        gathered.backward(torch.arange(8.0).view(4, 2))
    assert gathered[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0]
    assert own.grad is not None
    assert own.grad.tolist() == (2 * torch.arange(8.0).view(4, 2)).split(lengths)[rank].tolist()
    dist.destroy_process_group()
