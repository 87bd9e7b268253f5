"""SGLang with authentication, pauses and weight updates, inside SGLang's processes.

    python sglang_server.py --model-path ... (the arguments of `python -m sglang.launch_server`)

The server's Python interpreter runs this file by its path. The server may run in a separate environment, so the file
imports only `rl_*.py` of the same directory and SGLang's dependencies. It was written for SGLang 0.5.23.

It adds to SGLang, in the HTTP process:

- Every route except `/health` requires the run key, from the environment variable `RL_RUN_KEY`. SGLang accepts keys
  only on the command line, and writes them to its log and to the response of `/server_info`.
- A staged load: new weights are fetched into host memory and checked against the checkpoint while SGLang generates. A
  commit retracts running requests and lets SGLang load the weights with `load_staged`, its custom weight loader. The
  loader compares the tensors in the model with the staged ones. SGLang then empties the prefix cache, and retracted
  requests continue with a recomputed KV cache.
- A pause can wait for the running completions, and ends when its lease expires.
- Every response has headers with the instance of the server and the served version.

`rl_guard` lists the routes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_guard, rl_staging, rl_stored
else:
    import rl_guard
    import rl_staging
    import rl_stored

logger = logging.getLogger("rl.sglang")

STAGE = "RL_STAGE_DIR"
"""Environment variable with the directory through which the HTTP process passes weights to the scheduler processes."""
FAILED = "failed"
"""File with the error of a failed load; an exception in a scheduler would end SGLang before the report."""
LOADER = "sglang_server.load_staged"
"""Import path of the custom weight loader."""
BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""Environment variable with the cores of each tensor-parallel rank on CPUs. Without it, SGLang requires one NUMA node
per rank."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that SGLang concatenates along the rows, with their components in the checkpoint."""

_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class Guard(rl_guard.Guard):
    """ASGI middleware around all routes of SGLang.

    Args:
        app: SGLang's application.
        key: the run key; empty to permit all requests.
        manager: function that returns SGLang's tokenizer manager; called only after SGLang has started.
    """

    generation_routes = ("/generate", "/v1/completions", "/v1/chat/completions")

    def __init__(self, app: Any, key: str = "", manager: Callable[[], Any] = lambda: None) -> None:
        super().__init__(app, key)
        self._engine = Engine(manager)
        self._tokens = 0
        self._gc_frozen, self._has_generated = False, False

    def engine(self, scope: Any) -> Engine:
        return self._engine

    def _auth_error(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        if path == "/freeze_gc" and not self._gc_frozen:  # SGLang sends itself this request after its start
            self._gc_frozen = True
            return None
        return super()._auth_error(path, headers)

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a request, but reply to `/health` directly after its first success.

        SGLang's `/health` generates a token, which takes a second and fails during a pause.
        """

        async def send_observed(message: dict[str, Any]) -> None:
            self._has_generated |= scope["path"] == "/health" and message.get("status") == 200
            await send(message)

        if scope["path"] == "/health" and self._has_generated:
            await rl_guard.send_json(send, 200, {})
        else:
            await self._app(scope, receive, send_observed)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a generation request as the base class describes, and count its tokens.

        A request ends with the last byte of its response, because SGLang's handler returns seconds later.
        """
        ended, forwarded, tokens = False, False, 0

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._end_request()
                self._engine.count_requests(-forwarded)

        async def send_observed(message: dict[str, Any]) -> None:
            nonlocal tokens
            self._messages += 1
            if counts := _TOKENS.findall(message.get("body", b"")):
                total = int(counts[-1])
                self._tokens, tokens = self._tokens + max(total - tokens, 0), total
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                end()
            await send(message)

        self._begin_request()
        try:
            await self._running.wait()
            forwarded = True
            self._engine.count_requests(1)
            await self._app(scope, receive, send_observed)
        finally:
            end()

    def _exit(self) -> NoReturn:
        shutil.rmtree(os.environ.get(STAGE, ""), ignore_errors=True)
        super()._exit()

    async def _info(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        from sglang.version import __version__

        manager = engine.manager()
        model = manager.model_config
        return {
            "server": f"sglang {__version__}",
            "model_path": str(manager.server_args.model_path),
            "version": self._version,
            "weights_dir": os.environ.get(rl_staging.WEIGHTS_DIR, ""),
            "context_length": int(model.context_len),
            "vocab_size": int(model.vocab_size),
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    async def _metrics(self, engine: Any) -> tuple[float, float, float]:
        loads = await engine.manager().get_loads(include=["core"])
        return sum(load.num_running_reqs for load in loads), 0, self._tokens


class Engine:
    """Engine interface of `rl_guard` for SGLang, on top of its tokenizer manager.

    This process fetches a version into host memory, and the scheduler processes read it when they load it.

    Args:
        manager: function that returns the tokenizer manager; called only after SGLang has started.
    """

    def __init__(self, manager: Callable[[], Any]) -> None:
        self.manager = manager
        self._requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._state = rl_staging.State()

    def count_requests(self, number: int) -> None:
        """Add to the number of requests that SGLang processes."""
        self._requests += number
        self._idle.clear() if self._requests else self._idle.set()

    async def check_health(self) -> None:
        """Do nothing.

        SGLang ends if one of its processes ends or its scheduler hangs (`--watchdog-timeout`).
        """

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        """Retract running requests, so that their KV cache is recomputed; with `wait`, let them finish first."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode == "wait":
            await self._idle.wait()
        await self.manager().pause_generation(PauseGenerationReqInput(mode="retract"))

    async def resume_generation(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager().continue_generation(ContinueGenerationReqInput())

    async def update_weight_version(self, version: str) -> None:
        """Do nothing, because the load sets the version."""

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """Return True, because a successful load empties the cache."""
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Call a method once, on behalf of all ranks, which share the staged tensors."""
        result = getattr(self, method)(**(kwargs or {}))
        return [await result if asyncio.iscoroutine(result) else result]

    def rl_stage(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Start to fetch a version; `rl_staged` returns the status."""
        self._remove_area()
        meta = {**meta, "area": self._area()}
        self._state.attempt = attempt = rl_staging.Attempt(meta, self._state)
        attempt.checkpoint = Path(self.manager().server_args.model_path)
        threading.Thread(target=attempt.run, name="rl-stage", daemon=True).start()
        return {}

    def rl_share(self, checksums: dict[str, str]) -> dict[str, Any]:
        """Do nothing, because the schedulers open the tensors when they load them."""
        return {}

    def rl_staged(self) -> dict[str, Any]:
        """Return the status of the current attempt: done or not, error, checksums."""
        attempt = self._state.attempt
        if attempt.error:
            self._remove_area()
        return attempt.status()

    def rl_give_up(self) -> dict[str, Any]:
        """Abandon the current attempt."""
        self._state.reset()
        self._remove_area()
        return {}

    def rl_loaded(self) -> dict[str, Any]:
        """Return the checksums of the last loaded version; empty before the first load."""
        return {"checksums": self._state.loaded}

    async def rl_load(self, version: int) -> dict[str, Any]:
        """Let SGLang's schedulers load the staged version and empty the prefix cache.

        Raises:
            RuntimeError: a scheduler reports that the load failed.
        """
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        attempt, directory, manager = self._state.attempt, Path(os.environ[STAGE]), self.manager()
        scratch, error_file = directory / "unfinished.json", directory / FAILED
        scratch.write_text(json.dumps({"meta": attempt.meta, "place": attempt.area}))
        scratch.replace(directory / "meta.json")
        no_tensors = MultiprocessingSerializer.serialize([])
        update = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[no_tensors] * manager.server_args.tp_size,
            load_format=LOADER,
            weight_version=str(version),
            flush_cache=True,
        )
        for step in (
            lambda: manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput()),
            lambda: manager.update_weights_from_tensor(update),
            lambda: manager.end_weight_update(io_struct.EndWeightUpdateReqInput()),
        ):
            succeeded, message = await step()
            if error_file.exists():
                raise RuntimeError(error_file.read_text())
            if not succeeded:
                raise RuntimeError(str(message))
        self._state.loaded, attempt.tensors = attempt.sums, {}
        self._remove_area()
        return {}

    def _area(self) -> str:
        return f"{os.environ.get(STAGE)}/area"

    def _remove_area(self) -> None:
        """Remove the staging area when no process will open its files again."""
        shutil.rmtree(self._area(), ignore_errors=True)


# ---- in the schedulers


def load_staged(model: Any, named_tensors: Any) -> None:
    """Load the version that the HTTP process staged. SGLang calls this custom weight loader on each rank.

    Errors are written to the file `FAILED`, also if the model's tensors differ from the staged tensors.
    """
    directory = Path(os.environ[STAGE])
    try:
        request = json.loads((directory / "meta.json").read_text())
        tensors = rl_stored.open_parts(request["meta"], request["place"])
        model.load_weights(iter(list(tensors.items())))
        compare(model, tensors)
    except Exception as error:  # loaders raise any type; the HTTP process reports the error
        logger.exception("the staged weights were not loaded")
        (directory / FAILED).write_text(str(error) or repr(error))


def compare(model: Any, staged: dict[str, Any]) -> None:
    """Compare the model's tensors with the staged ones.

    Parameters that are split over ranks, quantized, packed for a CPU's matrix unit, or named differently from the
    checkpoint are not compared.

    Raises:
        RuntimeError: a tensor differs; the message names the first such parameter.
    """
    import torch

    tied = "lm_head.weight" not in staged
    for name, live in served(model):
        sent = staged.get("model.embed_tokens.weight" if tied and name == "lm_head.weight" else name)
        if sent is None or sent.shape != live.shape or live.itemsize < 2:
            continue
        if not torch.equal(sent.to(live.device, live.dtype), live):
            raise RuntimeError(
                f"parameter {name!r}: the served tensor differs from the staged one; the load did not update it."
            )


def served(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the checkpoint name and the tensor of each parameter that this rank holds completely."""
    for prefix, module in model.named_modules():
        group = getattr(module, "tp_group", None)
        ranks = max(getattr(module, "tp_size", 1), getattr(group, "world_size", 1))
        # a shard may be padded to the shape of the full parameter
        if getattr(module, "use_intel_amx_backend", False) or ranks > 1:
            continue
        parent, _, leaf = prefix.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            if hasattr(module, "org_vocab_size"):
                tensor = tensor[: module.org_vocab_size]
            names, sizes = FUSED.get(leaf, (leaf,)), list(getattr(module, "output_sizes", []))
            if len(names) == 1:
                yield f"{prefix}.{kind}", tensor
            elif len(sizes) == len(names) and sum(sizes) == len(tensor):
                for name, piece in zip(names, tensor.split(sizes)):  # noqa: B905 - equal lengths
                    yield f"{parent}.{name}.{kind}", piece


def cores_by_rank(nodes: list[str], allowed: list[int], ranks: int) -> str:
    """Return the cores of each tensor-parallel rank, in the format of `BIND`: `0,1|2,3`.

    Args:
        nodes: physical cores of each NUMA node that this process may use, in SGLang's format: `0,1`.
        allowed: all logical cores that this process may use; used if there are fewer physical cores than ranks.
        ranks: number of tensor-parallel ranks.

    Returns:
        an equal number of cores per rank, as far as possible; empty if each rank has a separate node.

    Raises:
        SystemExit: there are fewer cores than ranks.
    """
    if ranks <= len(nodes):
        return ""
    physical = [core for node in nodes for core in node.split(",")]
    cores = physical if len(physical) >= ranks else [str(core) for core in allowed]
    if len(cores) < ranks:
        raise SystemExit(
            f"tensor size {ranks} on CPUs: expected at least as many cores, found {len(cores)} that this server may "
            f"use. Lower the tensor size in allocation, give the server more cores, or set {BIND} to the cores of "
            "each rank."
        )
    edges = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(cores[begin:end]) for begin, end in itertools.pairwise(edges))


def main() -> None:
    """Start SGLang as `python -m sglang.launch_server` does, with the guard around its routes."""
    key = os.environ.pop(rl_guard.KEY, "")  # hide it from SGLang's other processes and from its reports
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import get_cpu_ids_by_node, kill_process_tree

    load_plugins()
    http_server.app.add_middleware(Guard, key=key, manager=lambda: http_server.get_global_state().tokenizer_manager)
    arguments = prepare_server_args([*sys.argv[1:], "--custom-weight-loader", LOADER])
    if arguments.device == "cpu" and not os.environ.get(BIND):
        cores = cores_by_rank(get_cpu_ids_by_node(), sorted(os.sched_getaffinity(0)), arguments.tp_size)
        os.environ.update({BIND: cores} if cores else {})
    os.environ[STAGE] = rl_stored.make_area("sglang")
    try:
        run_server(arguments)
    finally:
        shutil.rmtree(os.environ[STAGE], ignore_errors=True)
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
