"""The sources do not read pickles, directly or through another call, except in checkpoints of megatron-core.

Its ranks exchange pickles through the object collectives of torch.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for pattern in ("packages/*/src/**/*.py", "apps/src/**/*.py", "infra/**/*.py")
    for path in ROOT.glob(pattern)
    if not {"testing", "conformance"} & {part.removesuffix(".py") for part in path.parts}
)
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "xmlrpc"}
CALLS = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
    "rpc_sync",
    "rpc_async",
    "Pipe",
    "Manager",
    "ProcessPoolExecutor",
}
"""Names in torch.distributed and multiprocessing that pickle the objects they transport."""
CHECKPOINTS = ("torch.distributed.checkpoint", "megatron.core.dist_checkpointing")
"""Checkpoint modules whose ranks exchange write plans as pickles and store a pickled index in the checkpoint."""
EXCEPTIONS = {
    "packages/rl-engines-megatron/src/rl_engines_megatron/weights/checkpoint.py": {
        "megatron.core.dist_checkpointing",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
    },
}
"""Allowed imports from these modules, per file."""
_DOTTED = tuple(f"{name}." for name in CHECKPOINTS)


def _unsafe_uses(text: str) -> list[str]:
    """Return `line: name` for each import or call in a source that may unpickle data."""
    uses = []
    tree = ast.parse(text)
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            uses += [(node.lineno, module) for module in modules if module.partition(".")[0] in MODULES]
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported = [source + alias.name for alias in node.names]
            uses += [(node.lineno, name) for name in imported if f"{name}.".startswith(_DOTTED)]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        name = aliases.get(name, name)
        last, options = name.rpartition(".")[2], {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unsafe = last in CALLS or options.get("allow_pickle") == "True" or last == "read_pickle"
        unsafe |= name.startswith(_DOTTED)  # calls by full name; other calls are reported at their import
        unsafe |= name == "torch.load" and options.get("weights_only") != "True"
        unsafe |= last == "recv" and not node.args  # a multiprocessing connection; a socket needs a size
        unsafe |= last in ("Queue", "SimpleQueue", "JoinableQueue") and name.startswith("multiprocessing")
        uses += [(node.lineno, name)] if unsafe else []
    return [f"{line}: {name}" for line, name in uses]


def test_scan_reports_injected_unpickling_calls_and_no_safe_calls():
    unsafe = [
        "import pickle",
        "import pickle as module",
        "from cloudpickle import loads",
        "torch.load(path)",
        "from torch import load\nload(path)",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(outputs, value)",
        "from torch.distributed import broadcast_object_list as broadcast\nbroadcast(values)",
        "numpy.load(path, allow_pickle=True)",
        "connection.recv()",
        "multiprocessing.Queue()",
        "from multiprocessing import Pipe\nPipe()",
        "import torch.distributed.checkpoint as saved",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "import torch\ntorch.distributed.checkpoint.save(state)",
        "from megatron.core import dist_checkpointing\ndist_checkpointing.save(state, path)",
    ]
    safe = ["torch.load(path, weights_only=True)", "peer.recv(4096)", "queue.SimpleQueue()", "json.load(file)"]

    assert [text for text in unsafe if len(_unsafe_uses(text)) != 1] == []
    assert [text for text in safe if _unsafe_uses(text)] == []


@pytest.mark.slow
def test_sources_unpickle_only_in_megatron_core_checkpoints():
    assert len(SOURCES) > 200
    uses = {str(path.relative_to(ROOT)): lines for path in SOURCES if (lines := _unsafe_uses(path.read_text()))}
    names = {file: {line.partition(": ")[2] for line in lines} for file, lines in uses.items()}
    assert names == EXCEPTIONS, uses
