"""Nothing in the sources reads a pickle or calls what would, but for megatron-core's checkpoints: its ranks exchange
pickles with each other, through torch's collectives of objects."""

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
"""Of torch.distributed and multiprocessing; each pickles what it carries."""
CHECKPOINTS = ("torch.distributed.checkpoint", "megatron.core.dist_checkpointing")
"""Their ranks exchange pickles of who writes what, and pickle a list of it into the checkpoint."""
EXCEPTIONS = {
    "packages/rl-engines-megatron/src/rl_engines_megatron/weights/checkpoint.py": {
        "megatron.core.dist_checkpointing",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
    },
}
"""What of these is imported where."""
_DOTTED = tuple(f"{name}." for name in CHECKPOINTS)


def _faults(text: str) -> list[str]:
    """What in a source would unpickle: line and word."""
    found = []
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
            found += [(node.lineno, module) for module in modules if module.partition(".")[0] in MODULES]
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported = [source + alias.name for alias in node.names]
            found += [(node.lineno, name) for name in imported if f"{name}.".startswith(_DOTTED)]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        name = aliases.get(name, name)
        last, given = name.rpartition(".")[2], {word.arg: ast.unparse(word.value) for word in node.keywords}
        unsafe = last in CALLS or given.get("allow_pickle") == "True" or last == "read_pickle"
        unsafe |= name.startswith(_DOTTED)  # by its whole name, for others are told of where they are imported
        unsafe |= name == "torch.load" and given.get("weights_only") != "True"
        unsafe |= last == "recv" and not node.args  # a multiprocessing connection; a socket is told how many bytes
        unsafe |= last in ("Queue", "SimpleQueue", "JoinableQueue") and name.startswith("multiprocessing")
        found += [(node.lineno, name)] if unsafe else []
    return [f"{line}: {word}" for line, word in found]


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as innocent",
        "from cloudpickle import loads",
        "torch.load(path)",
        "from torch import load\nload(path)",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list as tell\ntell(things)",
        "numpy.load(path, allow_pickle=True)",
        "connection.recv()",
        "multiprocessing.Queue()",
        "from multiprocessing import Pipe\nPipe()",
        "import torch.distributed.checkpoint as saved",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "import torch\ntorch.distributed.checkpoint.save(state)",
        "from megatron.core import dist_checkpointing\ndist_checkpointing.save(state, path)",
    ],
)
def test_scan_reports_an_injected_unpickling_call(planted):
    assert len(_faults(planted)) == 1


@pytest.mark.parametrize(
    "allowed", ["torch.load(path, weights_only=True)", "peer.recv(4096)", "queue.SimpleQueue()", "json.load(file)"]
)
def test_scan_accepts_calls_without_pickles(allowed):
    assert _faults(allowed) == []


@pytest.mark.slow
def test_sources_unpickle_only_in_megatron_core_checkpoints():
    assert len(SOURCES) > 200
    found = {str(path.relative_to(ROOT)): faults for path in SOURCES if (faults := _faults(path.read_text()))}
    words = {file: {fault.partition(": ")[2] for fault in faults} for file, faults in found.items()}
    assert words == EXCEPTIONS, found
