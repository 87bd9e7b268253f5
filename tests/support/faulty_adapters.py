"""Plugins of vLLM or SGLang, with a fault that a test switches on through the file FAULT_FILE.

Under `adapter not applied`, the server stages, acknowledges and serves the base weights. vLLM takes its worker
extension from this file, and SGLang runs it as its program.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["FAULT_PLUGINS"])

import rl_adapters

merged = rl_adapters.merged


def faulty_merged(base, a, b, scale):
    """Return the merged weights, or the base weights while the fault is active."""
    fault = Path(os.environ["FAULT_FILE"]).read_text().strip()
    return base.float() if fault == "adapter not applied" else merged(base, a, b, scale)


rl_adapters.merged = faulty_merged

if __name__ == "__main__":
    import sglang_server

    sglang_server.main()
elif __name__ == "faulty_adapters":
    from vllm_extension import WeightStage  # noqa: F401 - named in the command
