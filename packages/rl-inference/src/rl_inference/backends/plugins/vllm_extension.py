"""What runs inside vLLM's own processes.

A server is started with this file's directory on `PYTHONPATH`, `--middleware vllm_extension.Guard` (in the process that
speaks HTTP) and `--worker-extension-cls vllm_extension.WeightStage` (in each worker). It imports the files `rl_*.py`
beside it, nothing else of ours, and needs Python 3.10 and what vLLM brings along, because the server may live in an
environment of its own. Written against vLLM 0.32 and 0.33.

What vLLM lacks, and what this adds:

- The run key (`RL_RUN_KEY`) on every route but `/health`. vLLM's own `--api-key` leaves those that replace weights
  open.
- Weights are staged *beside* the served ones, in the host's memory, while vLLM goes on generating, and checked against
  the checkpoint before anything is touched; a reload that fails half-way would leave vLLM without weights.
- After a load the output head is packed again (a CPU keeps a packed copy, which a reload of tied weights misses), and
  what is computed with is compared with what was staged.
- No prefix read with old weights is used with new ones: a load empties the cache, also of answers that go on, requests
  carry the version as their cache salt, and wait at the door while the server stands still.
- `/health` answers 200 once the first tokens were made, which takes much longer than the others.
- Every answer says which life of the process gave it, and which version is served.

Routes, all JSON: `GET /rl/health`, `/rl/info`, `/rl/stats`, `/rl/receipt`; `POST /rl/stage`, `/rl/pause`, `/rl/commit`,
`/rl/resume`, `/rl/sleep`, `/rl/wake`.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_inference.backends.plugins import rl_guard, rl_staging, rl_stored
else:
    import rl_guard
    import rl_staging
    import rl_stored

COLUMNS = 32
"""Of a packed matrix that are compared after a load."""
FIGURES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total")

if multiprocessing.parent_process() is not None:  # a worker must not outlive the process that speaks HTTP
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Guard(rl_guard.Guard):
    """ASGI middleware around all of vLLM's routes."""

    generation_routes = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")

    def __init__(self, app: Any) -> None:
        super().__init__(app, os.environ.get(rl_guard.KEY, ""))
        self._named = False
        self._warm: asyncio.Task[None] | None = None
        self._routes[("POST", "/rl/sleep")] = self._sleep
        self._routes[("POST", "/rl/wake")] = self._wake

    def engine(self, scope: Any) -> Any:
        return scope["app"].state.engine_client

    async def _elsewhere(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health" and not await self._is_warm(self.engine(scope)):
            await rl_guard.answer(send, 503, {"error": {"message": "the server is warming up."}})
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, with the version as the salt of its prefix; one that comes during a pause waits."""
        try:
            body = await rl_guard.body_of(receive)
        except ConnectionError:
            return
        self._come()
        try:
            await self._prepare(self.engine(scope))
            await self._running.wait()
            if (salted := _salted(body, self._version)) is None:
                await rl_guard.answer(send, 400, {"error": {"message": "expected a JSON object in UTF-8."}})
                return
            await self._app(scope, _replayed(salted, receive), self._counted(send))
        finally:
            self._leave()

    def _counted(self, send: Any) -> Any:
        async def counted(message: dict[str, Any]) -> None:
            self._messages += 1
            await send(message)

        return counted

    async def _is_warm(self, engine: Any) -> bool:
        """Whether the first tokens were made, which takes much longer than the others: nobody is to wait for them."""
        if self._warm is None:
            self._warm = asyncio.create_task(_warm_up(engine))
        await asyncio.wait({self._warm}, timeout=rl_guard.ANSWER_SECONDS)
        if self._warm.done():
            self._warm.result()
        return self._warm.done()

    async def _prepare(self, engine: Any) -> None:
        """Give the weights that were loaded at the start their version, before the first token."""
        if not self._named:
            await engine.update_weight_version(str(self._version))
            self._named = True

    async def _info(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        from vllm import __version__

        model = engine.vllm_config.model_config
        return {
            "server": f"vllm {__version__}",
            "model_path": model.model,
            "version": self._version,
            "weights_dir": os.environ.get(rl_staging.WEIGHTS_DIR, ""),
            "context_length": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization or "",
            "logprobs_mode": str(model.logprobs_mode),
            "world_size": engine.vllm_config.parallel_config.world_size,
        }

    async def _figures(self, engine: Any) -> tuple[float, float, float]:
        from prometheus_client import REGISTRY

        found = dict.fromkeys(FIGURES, 0.0)
        for metric in REGISTRY.restricted_registry(FIGURES).collect():
            for sample in metric.samples:
                if sample.name in found:
                    found[sample.name] += sample.value
        running, waiting, generated = found.values()
        return running, waiting, generated

    async def _loaded(self, engine: Any) -> None:
        if engine.vllm_config.model_config.is_multimodal_model:
            await engine.reset_encoder_cache()

    async def _stage(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """As the base says. Once all ranks have opened what lies in the area, or it has failed, it needs no name."""
        if not rl_staging.needs_area(asked["meta"]):
            return await super()._stage(engine, asked)
        area = rl_stored.make_area("vllm")
        try:
            return await super()._stage(engine, {**asked, "meta": {**asked["meta"], "area": area}})
        finally:
            shutil.rmtree(area, ignore_errors=True)

    async def _sleep(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Free the device's memory; answers wait, and weights are to be loaded anew. No lease ends it."""
        self._end_lease()
        self._running.clear()
        await engine.sleep(level=1, mode="keep")
        return {}

    async def _wake(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        await engine.wake_up(None)
        return await self._resume(engine, {})


async def _warm_up(engine: Any) -> None:
    """Generate a few tokens, and score some."""
    from vllm import SamplingParams

    for number, scored in enumerate((None, 0)):
        sampling = SamplingParams(max_tokens=2, temperature=1.0, seed=0, logprobs=0, prompt_logprobs=scored)
        async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, sampling, f"rl-warm-up-{number}"):
            pass


def _salted(body: bytes, version: int) -> bytes | None:
    """A request's JSON with the version as the salt of its prefix: it comes last, so that it counts, whatever salt the
    request names itself. None: it is no object."""
    body = body.strip()
    if not body:
        return body
    if body[:1] != b"{" or body[-1:] != b"}":
        return None
    inside = body[1:-1].strip()
    return b'{%s%s"cache_salt":"%d"}' % (inside, b"," if inside else b"", version)


def _replayed(body: bytes, receive: Any) -> Any:
    """`receive` of a request whose body was read; afterwards it waits for the client to go away."""
    rest = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Any:
        return rest.pop() if rest else await receive()

    return replayed


# ---- in the workers


class WeightStage:
    """Methods that vLLM's worker gets; `collective_rpc` calls them on all ranks. Rank 0 fetches a version into the
    host's memory, in a thread, so that the worker goes on computing; the others open it, and all load from there."""

    def rl_stage(self, meta: dict[str, Any]) -> None:
        """Begin to fetch a version; `rl_staged` says how far it is."""
        state = self._rl_state()
        state.attempt = attempt = rl_staging.Attempt(meta, state)
        attempt.done = self._rl_rank() != 0
        attempt.checkpoint = Path(self.vllm_config.model_config.model)  # type: ignore[attr-defined]
        if self._rl_rank() == 0:
            attempt.device = str(self.device)  # type: ignore[attr-defined]
            threading.Thread(target=attempt.run, name="rl-stage", daemon=True).start()

    def rl_share(self, checksums: dict[str, str]) -> None:
        """Begin to open, on the other ranks, what rank 0 has fetched."""
        attempt = self._rl_state().attempt
        if self._rl_rank() != 0:
            attempt.done = False
            threading.Thread(target=attempt.share, args=(checksums,), name="rl-share", daemon=True).start()

    def rl_staged(self) -> dict[str, Any]:
        """Whether it is there; its checksums, or why it is not."""
        return self._rl_state().attempt.told()

    def rl_give_up(self) -> None:
        """Leave what is being staged to itself."""
        self._rl_state().forget()

    def rl_load(self, version: int) -> None:
        """Load the staged version into the served model."""
        state = self._rl_state()
        attempt = state.attempt
        if attempt.version != version:
            raise RuntimeError(f"expected version {version} to be staged, found {attempt.version}.")
        tensors = attempt.tensors
        self.reload_weights(weights_iterator=iter(list(tensors.items())))  # type: ignore[attr-defined]
        model = self.get_model()  # type: ignore[attr-defined]
        repack(model)
        compare(model, tensors)
        state.loaded = attempt.sums
        if attempt.place is not None:
            attempt.tensors = {}

    def rl_loaded(self) -> dict[str, Any]:
        """Checksums of what was loaded last; empty: nothing yet."""
        return {"checksums": self._rl_state().loaded}

    def _rl_state(self) -> rl_staging.State:
        state: rl_staging.State = self.__dict__.setdefault("rl_weight_state", rl_staging.State())
        return state

    def _rl_rank(self) -> int:
        return int(self.rank)  # type: ignore[attr-defined]


def repack(model: Any) -> None:
    """Pack embeddings and heads again. A head that is tied has no weights of its own to load, so that a reload leaves
    the copy as it was that a CPU multiplies with."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings_padded"):
            module.quant_method.process_weights_after_loading(module)


def compare(model: Any, staged: dict[str, Any]) -> None:
    """See that the model computes with what was staged, wherever its tensors can be told apart: not where it is split
    over ranks, quantised, or has other names than its checkpoint.

    Raises:
        RuntimeError: names the first parameter that is another.
    """
    import torch

    tied = "lm_head.weight" not in staged
    for name, live, columns in served(model) if _whole(model) else ():
        sent = staged.get("model.embed_tokens.weight" if tied and name == "lm_head.weight" else name)
        if sent is None:
            continue
        sent = (sent if columns is None else sent[:, columns]).to(live.device, live.dtype)
        if sent.shape == live.shape and not torch.equal(sent, live):
            raise RuntimeError(f"parameter {name!r}: served is something else than was staged; the load missed it.")


def _whole(model: Any) -> bool:
    """Whether it is neither split nor quantised, which shows in each of its layers."""
    layers = [module for module in model.modules() if hasattr(module, "quant_method") and hasattr(module, "weight")]
    plain = all(type(layer.quant_method).__name__.startswith("Unquantized") for layer in layers)
    return plain and all(getattr(layer, "tp_size", 1) == 1 for layer in layers)


def served(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a vLLM model computes with, under the names of its checkpoint: name, tensor, and its columns (None: all).

    A matrix that was packed for a CPU gives back the columns that are asked for when it is multiplied with unit
    vectors; some are enough to see whether it is the one that was staged.
    """
    packed_together = getattr(model, "packed_modules_mapping", {})
    for prefix, module in model.named_modules():
        parent, _, leaf = prefix.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            columns = None
            if kind == "weight" and hasattr(module, "cpu_linear"):
                tensor, columns = unpacked(module)
            if hasattr(module, "org_vocab_size"):
                tensor = tensor[: module.org_vocab_size]
            names, sizes = packed_together.get(leaf, [leaf]), list(getattr(module, "output_sizes", []))
            if len(names) == 1:
                yield f"{prefix}.{kind}", tensor, columns
            elif len(sizes) == len(names) and sum(sizes) == len(tensor):
                for name, piece in zip(names, tensor.split(sizes), strict=True):
                    yield f"{parent}.{name}.{kind}", piece, columns


def unpacked(module: Any) -> tuple[Any, Any]:
    """Some columns of a packed matrix [rows, columns], and which."""
    import torch

    width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    columns = torch.randperm(width)[:COLUMNS]
    units = torch.zeros(len(columns), width, dtype=module.weight.dtype)
    units[torch.arange(len(columns)), columns] = 1
    return module.cpu_linear(units, module.weight, None).t(), columns
