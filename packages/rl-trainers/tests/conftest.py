import os
import sys
from pathlib import Path

from rl_contracts.testing.processes import preload

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # makes policy_toys importable from all test files
preload("rl_contracts.testing", "rl_contracts.weights", "torch.distributed")
