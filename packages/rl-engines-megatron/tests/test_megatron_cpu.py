"""What megatron-core asks for and a CPU, or gloo, does not have."""

from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher

from rl_contracts.testing.processes import run_ranks
from rl_engines_megatron.cpu import without_cuda


def in_force():
    """What might be replaced, as it is now."""
    modules = (torch, torch.cuda, torch.distributed, torch.Tensor, random, token_dispatcher)
    objects = {(module.__name__, name): value for module in modules for name, value in vars(module).items()}
    return objects | {"modes": torch._C._len_torch_function_stack(), "stance": torch._dynamo.eval_frame._stance}


def test_for_a_gpu_nothing_is_replaced_and_for_a_cpu_only_within():
    before = in_force()

    with without_cuda(torch.device("cuda")):
        for_gpu = in_force()
    with without_cuda(torch.device("cpu")):
        for_cpu = in_force()
    after = in_force()

    changed = {key for key in before if for_cpu[key] is not before[key]}
    assert {("torch.cuda", "current_device"), ("torch.distributed", "all_gather"), "modes"} <= changed
    for found in (for_gpu, after):
        assert found.keys() == before.keys()
        assert [key for key in before if found[key] is not before[key]] == []


@pytest.mark.slow
def test_ranks_with_other_numbers_of_rows_gather_them_and_get_their_gradients():
    run_ranks(Path(__file__).parent / "megatron_cpu_ranks.py", [], 2, 120)
