import os
import sys
from pathlib import Path

from rl_contracts.testing.processes import preload

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # so that tests and worker processes can import fsdp_toys
preload("rl_engines_fsdp.engine", "torch.distributed.checkpoint", "transformers.models.qwen3.modeling_qwen3")
