"""What runs inside SGLang's own processes.

    python sglang_server.py --model-path ... (the arguments of `python -m sglang.launch_server`)

This file is handed over by its path to the Python that has SGLang, which may live in an environment of its own. It
imports the files `rl_*.py` beside it, nothing else of ours, and what SGLang brings along. Written against
SGLang 0.5.23.

What SGLang lacks, and what this adds around its routes, in the process that speaks HTTP:

- The run key (`RL_RUN_KEY`) on every route but `/health`, from the environment. SGLang takes keys from the command line
  alone, and writes them into its log and into the answer of `/server_info`.
- Weights are staged *beside* the served ones, in the host's memory, while SGLang goes on generating, and checked
  against the checkpoint before anything is touched. A commit retracts what runs, lets SGLang load them
  (`load_staged`, its custom weight loader) and compare what it computes with against what was staged, and empties the
  prefix cache; retracted answers go on with keys and values computed anew.
- A pause that waits for the running answers, and one that ends by itself when its client is gone.
- Every answer says which life of the process gave it, and which version is served.

`rl_guard` names the routes.
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
"""Directory in which the process that speaks HTTP leaves for the others what is to be loaded."""
FAILED = "failed"
"""File in which they leave why it was not: an exception would end SGLang before it could say so."""
LOADER = "sglang_server.load_staged"
BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""Variable that gives each part of a model on CPUs its cores; without it SGLang wants a NUMA node for each."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that SGLang keeps one below the other in one."""

_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class Guard(rl_guard.Guard):
    """ASGI middleware around all of SGLang's routes.

    Args:
        app: what is guarded.
        key: the run key; empty: everybody may do everything.
        manager: SGLang's tokenizer manager, once it is there.
    """

    generation_routes = ("/generate", "/v1/completions", "/v1/chat/completions")

    def __init__(self, app: Any, key: str = "", manager: Callable[[], Any] = lambda: None) -> None:
        super().__init__(app, key)
        self._engine = Engine(manager)
        self._tokens = 0
        self._frozen, self._made_a_token = False, False

    def engine(self, scope: Any) -> Engine:
        return self._engine

    def _refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        if path == "/freeze_gc" and not self._frozen:  # SGLang asks itself for it when it has started
            self._frozen = True
            return None
        return super()._refusal(path, headers)

    async def _elsewhere(self, scope: Any, receive: Any, send: Any) -> None:
        """SGLang's `/health` generates a token, which takes a second and fails in a pause: it is asked until it has
        made one."""

        async def watched(message: dict[str, Any]) -> None:
            self._made_a_token |= scope["path"] == "/health" and message.get("status") == 200
            await send(message)

        if scope["path"] == "/health" and self._made_a_token:
            await rl_guard.answer(send, 200, {})
        else:
            await self._app(scope, receive, watched)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """As the base says. A request has left with the last byte of its answer: SGLang holds on to it for seconds
        after that."""
        left, inside, tokens = False, False, 0

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._leave()
                self._engine.enter(-inside)

        async def watched(message: dict[str, Any]) -> None:
            nonlocal tokens
            self._messages += 1
            if found := _TOKENS.findall(message.get("body", b"")):
                total = int(found[-1])
                self._tokens, tokens = self._tokens + max(total - tokens, 0), total
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                leave()
            await send(message)

        self._come()
        try:
            await self._running.wait()
            inside = True
            self._engine.enter(1)
            await self._app(scope, receive, watched)
        finally:
            leave()

    def _end(self) -> NoReturn:
        shutil.rmtree(os.environ.get(STAGE, ""), ignore_errors=True)
        super()._end()

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

    async def _figures(self, engine: Any) -> tuple[float, float, float]:
        loads = await engine.manager().get_loads(include=["core"])
        return sum(load.num_running_reqs for load in loads), 0, self._tokens


class Engine:
    """SGLang as `rl_guard` wants it, over its tokenizer manager. What is staged is fetched in this process; the
    schedulers read it when they load it.

    Args:
        manager: the tokenizer manager, once it is there.
    """

    def __init__(self, manager: Callable[[], Any]) -> None:
        self.manager = manager
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._state = rl_staging.State()

    def enter(self, number: int) -> None:
        """So many more requests are with SGLang."""
        self._inside += number
        self._idle.clear() if self._inside else self._idle.set()

    async def check_health(self) -> None:
        """SGLang ends as a whole where one of its processes does, or its scheduler does not move for
        `--watchdog-timeout`."""

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        """Retract what runs, so that keys and values can be computed anew; with `wait` let it end first."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode == "wait":
            await self._idle.wait()
        await self.manager().pause_generation(PauseGenerationReqInput(mode="retract"))

    async def resume_generation(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager().continue_generation(ContinueGenerationReqInput())

    async def update_weight_version(self, version: str) -> None:
        """The load has set it."""

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """The load has emptied it, or would have failed."""
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Of all ranks, which share what is staged."""
        found = getattr(self, method)(**(kwargs or {}))
        return [await found if asyncio.iscoroutine(found) else found]

    def rl_stage(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Begin to fetch a version; `rl_staged` says how far it is."""
        self._clear()
        meta = {**meta, "area": self._area()}
        self._state.attempt = attempt = rl_staging.Attempt(meta, self._state)
        attempt.checkpoint = Path(self.manager().server_args.model_path)
        threading.Thread(target=attempt.run, name="rl-stage", daemon=True).start()
        return {}

    def rl_share(self, checksums: dict[str, str]) -> dict[str, Any]:
        """The schedulers open it when they load it."""
        return {}

    def rl_staged(self) -> dict[str, Any]:
        """Whether it is there; its checksums, or why it is not."""
        attempt = self._state.attempt
        if attempt.error:
            self._clear()
        return attempt.told()

    def rl_give_up(self) -> dict[str, Any]:
        """Leave what is being staged to itself."""
        self._state.forget()
        self._clear()
        return {}

    def rl_loaded(self) -> dict[str, Any]:
        """Checksums of what was loaded last; empty: nothing yet."""
        return {"checksums": self._state.loaded}

    async def rl_load(self, version: int) -> dict[str, Any]:
        """Let SGLang's schedulers load what is staged, and empty the prefix cache.

        Raises:
            RuntimeError: one says that it did not.
        """
        from sglang.srt.managers import io_struct
        from sglang.srt.utils import MultiprocessingSerializer

        attempt, directory, manager = self._state.attempt, Path(os.environ[STAGE]), self.manager()
        scratch, failed = directory / "unfinished.json", directory / FAILED
        scratch.write_text(json.dumps({"meta": attempt.meta, "place": attempt.place}))
        scratch.replace(directory / "meta.json")
        nothing = MultiprocessingSerializer.serialize([])
        update = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[nothing] * manager.server_args.tp_size,
            load_format=LOADER,
            weight_version=str(version),
            flush_cache=True,
        )
        for step in (
            lambda: manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput()),
            lambda: manager.update_weights_from_tensor(update),
            lambda: manager.end_weight_update(io_struct.EndWeightUpdateReqInput()),
        ):
            done, said = await step()
            if failed.exists():
                raise RuntimeError(failed.read_text())
            if not done:
                raise RuntimeError(str(said))
        self._state.loaded, attempt.tensors = attempt.sums, {}
        self._clear()
        return {}

    def _area(self) -> str:
        return f"{os.environ.get(STAGE)}/area"

    def _clear(self) -> None:
        """Nobody opens any more what lies in the area."""
        shutil.rmtree(self._area(), ignore_errors=True)


# ---- in the schedulers


def load_staged(model: Any, named_tensors: Any) -> None:
    """SGLang's custom weight loader: load what the process that speaks HTTP has staged, on each rank. What goes wrong,
    also that the model computes with something else then, is left in the file `FAILED`."""
    directory = Path(os.environ[STAGE])
    try:
        asked = json.loads((directory / "meta.json").read_text())
        tensors = rl_stored.open_parts(asked["meta"], asked["place"])
        model.load_weights(iter(list(tensors.items())))
        compare(model, tensors)
    except Exception as error:  # whatever the model's loader raises: told by the process that asked for it
        logger.exception("the staged weights were not loaded")
        (directory / FAILED).write_text(str(error) or repr(error))


def compare(model: Any, staged: dict[str, Any]) -> None:
    """See that the model computes with what was staged, wherever its tensors can be told apart: not where they are
    split over ranks, quantised, packed for a CPU's matrix unit, or have other names than the checkpoint.

    Raises:
        RuntimeError: names the first parameter that is another.
    """
    import torch

    tied = "lm_head.weight" not in staged
    for name, live in served(model):
        sent = staged.get("model.embed_tokens.weight" if tied and name == "lm_head.weight" else name)
        if sent is None or sent.shape != live.shape or live.itemsize < 2:
            continue
        if not torch.equal(sent.to(live.device, live.dtype), live):
            raise RuntimeError(f"parameter {name!r}: served is something else than was staged; the load missed it.")


def served(model: Any) -> Iterator[tuple[str, Any]]:
    """What an SGLang model computes with and this rank has whole, under the names of its checkpoint: pairs of name and
    tensor."""
    for prefix, module in model.named_modules():
        group = getattr(module, "tp_group", None)
        parts = max(getattr(module, "tp_size", 1), getattr(group, "world_size", 1))
        if getattr(module, "use_intel_amx_backend", False) or parts > 1:  # a part may be padded to the whole's shape
            continue
        parent, _, leaf = prefix.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            if hasattr(module, "org_vocab_size"):
                tensor = tensor[: module.org_vocab_size]
            names, sizes = FUSED.get(leaf, (leaf,)), list(getattr(module, "output_sizes", []))
            if len(names) == 1:
                yield f"{prefix}.{kind}", tensor
            elif len(sizes) == len(names) and sum(sizes) == len(tensor):
                for name, piece in zip(names, tensor.split(sizes)):  # noqa: B905 - as many
                    yield f"{parent}.{name}.{kind}", piece


def cores_of_parts(nodes: list[str], allowed: list[int], parts: int) -> str:
    """Cores for each part of a model that is split by tensors, as `BIND` takes them: `0,1|2,3`.

    Args:
        nodes: the physical cores of each NUMA node that this process may use, as SGLang writes them: `0,1`.
        allowed: all cores that it may use, those that share a physical one too; taken where there are too few others.
        parts: of the model.

    Returns:
        as equal shares of the cores as can be; empty where each part has a node of its own.

    Raises:
        SystemExit: fewer cores than parts.
    """
    if parts <= len(nodes):
        return ""
    physical = [core for node in nodes for core in node.split(",")]
    cores = physical if len(physical) >= parts else [str(core) for core in allowed]
    if len(cores) < parts:
        raise SystemExit(
            f"tensor size {parts} on CPUs: expected at least as many cores, found {len(cores)} that this server may "
            f"use. Split it into fewer parts (allocation), give it more cores, or say in {BIND} which each part has."
        )
    edges = [len(cores) * part // parts for part in range(parts + 1)]
    return "|".join(",".join(cores[begin:end]) for begin, end in itertools.pairwise(edges))


def main() -> None:
    """Start SGLang as `python -m sglang.launch_server` does, with the guard around its routes."""
    key = os.environ.pop(rl_guard.KEY, "")  # so that neither its other processes nor its reports have it
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import get_cpu_ids_by_node, kill_process_tree

    load_plugins()
    http_server.app.add_middleware(Guard, key=key, manager=lambda: http_server.get_global_state().tokenizer_manager)
    arguments = prepare_server_args([*sys.argv[1:], "--custom-weight-loader", LOADER])
    if arguments.device == "cpu" and not os.environ.get(BIND):
        cores = cores_of_parts(get_cpu_ids_by_node(), sorted(os.sched_getaffinity(0)), arguments.tp_size)
        os.environ.update({BIND: cores} if cores else {})
    os.environ[STAGE] = rl_stored.make_area("sglang")
    try:
        run_server(arguments)
    finally:
        shutil.rmtree(os.environ[STAGE], ignore_errors=True)
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
