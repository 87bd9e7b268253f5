"""What runs inside vLLM or SGLang, with a fault that a test switches on: the file FAULT_FILE names the one that is on.

`adapter not applied`: what is staged, acknowledged and served is the base. For vLLM the class of its workers, for
SGLang the program that is started.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["FAULT_INSIDE"])

import rl_adapters

merged = rl_adapters.merged


def faulty_merged(base, a, b, scale):
    """As the base weights are, while the fault is on."""
    fault = Path(os.environ["FAULT_FILE"]).read_text().strip()
    return base.float() if fault == "adapter not applied" else merged(base, a, b, scale)


rl_adapters.merged = faulty_merged

if __name__ == "__main__":
    import sglang_server

    sglang_server.main()
elif __name__ == "faulty_staging":
    from vllm_extension import WeightStage  # noqa: F401 - named in the command
