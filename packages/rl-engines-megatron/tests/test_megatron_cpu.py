"""Replacements for functions that megatron-core calls and a CPU or gloo does not support."""

from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher

from rl_contracts.testing.processes import run_ranks
from rl_engines_megatron.cpu import without_cuda


def current_objects():
    """Return all objects that may be patched, with their current values."""
    modules = (torch, torch.cuda, torch.distributed, torch.Tensor, random, token_dispatcher)
    attributes = {(module.__name__, name): value for module in modules for name, value in vars(module).items()}
    return attributes | {"modes": torch._C._len_torch_function_stack(), "stance": torch._dynamo.eval_frame._stance}


def test_without_cuda_patches_only_for_cpu_and_only_inside_block():
    before = current_objects()

    with without_cuda(torch.device("cuda")):
        for_gpu = current_objects()
    with without_cuda(torch.device("cpu")):
        for_cpu = current_objects()
    after = current_objects()

    changed = {key for key in before if for_cpu[key] is not before[key]}
    assert {("torch.cuda", "current_device"), ("torch.distributed", "all_gather"), "modes"} <= changed
    for objects in (for_gpu, after):
        assert objects.keys() == before.keys()
        assert [key for key in before if objects[key] is not before[key]] == []


@pytest.mark.slow
def test_all_gather_of_unequal_rows_returns_rows_and_gradients():
    run_ranks(Path(__file__).parent / "megatron_cpu_ranks.py", [], 2, 120)
