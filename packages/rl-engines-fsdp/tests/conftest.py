import os
import sys
from pathlib import Path

import pytest

from rl_contracts.testing.processes import DEVICE_VARIABLE, preload

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # so that tests and worker processes can import fsdp_toys
preload("rl_engines_fsdp.engine", "torch.distributed.checkpoint", "transformers.models.qwen3.modeling_qwen3")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def device(request):
    """Device of the engines of a test, in its ranks and in this process (`rank_device`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE_VARIABLE, request.param)
        yield request.param
