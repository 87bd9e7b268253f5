"""What gloo cannot do and megatron-core asks for."""

from pathlib import Path

import pytest

from rl_contracts.testing.processes import run_ranks


@pytest.mark.slow
def test_ranks_with_other_numbers_of_rows_gather_them_and_get_their_gradients():
    run_ranks(Path(__file__).parent / "megatron_cpu_ranks.py", [], 2, 120)
