"""vLLM extension: authentication, pauses and weight updates, inside vLLM's processes.

A server is started with this file's directory on `PYTHONPATH`, `--middleware vllm_extension.Guard` (for the HTTP
process) and `--worker-extension-cls vllm_extension.WeightStage` (for each worker). The server may run in a separate
environment. The file therefore imports only `rl_*.py` of the same directory and vLLM's dependencies, and requires
Python 3.10. It was written for vLLM 0.32 and 0.33.

It adds to vLLM:

- Every route except `/health` requires the run key (`RL_RUN_KEY`). vLLM's own `--api-key` does not protect the routes
  that replace weights.
- A staged load: new weights are fetched into host memory and checked against the checkpoint while vLLM generates. A
  reload that fails halfway would leave vLLM without weights.
- After a load, the output head is packed again: a CPU keeps a packed copy, which a reload of tied weights does not
  update. The tensors in the model are then compared with the staged ones.
- Prefixes computed with old weights are not reused. A load empties the cache, also for unfinished completions. Requests
  have the version as their cache salt, and wait in the guard while generation is paused.
- Prompts with images keep the client's tokens. By default, vLLM would expand placeholders that are already expanded.
- `/health` returns status 200 only after the first generated tokens, which take much longer than later ones.
- Every response has headers with the instance of the server and the served version.

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
"""Number of columns of a packed matrix that are compared after a load."""
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total")

if multiprocessing.parent_process() is not None:  # a worker must not outlive the HTTP process
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Guard(rl_guard.Guard):
    """ASGI middleware around all routes of vLLM."""

    generation_routes = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")

    def __init__(self, app: Any) -> None:
        super().__init__(app, os.environ.get(rl_guard.KEY, ""))
        self._version_is_set = False
        self._warm_up_task: asyncio.Task[None] | None = None
        self._routes[("POST", "/rl/sleep")] = self._sleep
        self._routes[("POST", "/rl/wake")] = self._wake

    def engine(self, scope: Any) -> Any:
        return scope["app"].state.engine_client

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health" and not await self._is_warm(self.engine(scope)):
            await rl_guard.send_json(send, 503, {"error": {"message": "the server is warming up."}})
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a generation request with the version as cache salt; during a pause, wait for its end first."""
        try:
            body = await rl_guard.body_of(receive)
        except ConnectionError:
            return
        self._begin_request()
        try:
            await self._prepare(self.engine(scope))
            await self._running.wait()
            if (salted := _salted(body, self._version)) is None:
                await rl_guard.send_json(send, 400, {"error": {"message": "expected a JSON object in UTF-8."}})
                return
            await self._app(scope, _replay(salted, receive), self._counted(send))
        finally:
            self._end_request()

    def _counted(self, send: Any) -> Any:
        async def send_counted(message: dict[str, Any]) -> None:
            self._messages += 1
            await send(message)

        return send_counted

    async def _is_warm(self, engine: Any) -> bool:
        """Return whether the first tokens were generated, after at most `REPLY_SECONDS`.

        The first call starts the warm-up.
        """
        if self._warm_up_task is None:
            self._warm_up_task = asyncio.create_task(_warm_up(engine))
        await asyncio.wait({self._warm_up_task}, timeout=rl_guard.REPLY_SECONDS)
        if self._warm_up_task.done():
            self._warm_up_task.result()
        return self._warm_up_task.done()

    async def _prepare(self, engine: Any) -> None:
        """Set the version of the initial weights before the first token is generated, and prepare for images."""
        if not self._version_is_set:
            if engine.vllm_config.model_config.is_multimodal_model:
                keep_placeholders()
            await engine.update_weight_version(str(self._version))
            self._version_is_set = True

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

    async def _metrics(self, engine: Any) -> tuple[float, float, float]:
        from prometheus_client import REGISTRY

        values = dict.fromkeys(METRICS, 0.0)
        for metric in REGISTRY.restricted_registry(METRICS).collect():
            for sample in metric.samples:
                if sample.name in values:
                    values[sample.name] += sample.value
        running, waiting, generated = values.values()
        return running, waiting, generated

    async def _clear_caches(self, engine: Any) -> None:
        if engine.vllm_config.model_config.is_multimodal_model:
            await engine.reset_encoder_cache()

    async def _stage(self, engine: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Stage a version as the base class does, with a staging area if needed.

        The area is removed when all ranks have opened its files, or when staging failed.
        """
        if not rl_staging.needs_area(request["meta"]):
            return await super()._stage(engine, request)
        area = rl_stored.make_area("vllm")
        try:
            return await super()._stage(engine, {**request, "meta": {**request["meta"], "area": area}})
        finally:
            shutil.rmtree(area, ignore_errors=True)

    async def _sleep(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Free the device's memory until `wake`. Requests wait, and no lease ends the sleep."""
        self._cancel_lease()
        self._running.clear()
        await engine.sleep(level=1, mode="keep")
        return {}

    async def _wake(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        await engine.wake_up(None)
        return await self._resume(engine, {})


def keep_placeholders() -> None:
    """Change vLLM so that it keeps a prompt in which the placeholders of all images are already expanded.

    vLLM would replace the first placeholder of each image again. It still replaces the placeholders of other prompts.
    """
    from vllm.multimodal.processing import BaseMultiModalProcessor

    apply = BaseMultiModalProcessor._apply_prompt_updates

    def keep_or_apply(self: Any, token_ids: list[int], updates: Any) -> Any:
        found = self._find_mm_placeholders(token_ids, updates)
        if all(len(found.get(kind, ())) == len(items) for kind, items in updates.items()):
            reject_spare_placeholders(token_ids, found)
            return token_ids, found
        try:
            return apply(self, token_ids, updates)
        except AssertionError as error:  # vLLM would answer with status 500
            raise ValueError(f"images: expected as many placeholders as images: {error}") from error

    BaseMultiModalProcessor._apply_prompt_updates = keep_or_apply


def reject_spare_placeholders(token_ids: list[int], found: dict[str, list[Any]]) -> None:
    """Reject a prompt that has placeholders outside of those found for its images.

    Raises:
        ValueError: vLLM would read the other placeholders as text.
    """
    tokens = [token for placeholders in found.values() for each in placeholders for token in _features(each)]
    present = sum(map(set(tokens).__contains__, token_ids))
    if present != len(tokens):
        raise ValueError(
            f"images: expected {len(tokens)} placeholders for the images of the prompt, found {present}; send one "
            "image for each block of placeholders."
        )


def _features(placeholder: Any) -> list[int]:
    """Return the tokens that vLLM replaces by image features; the others are around and between them."""
    if placeholder.is_embed is None:
        return list(placeholder.tokens)
    return [token for token, embedded in zip(placeholder.tokens, placeholder.is_embed, strict=True) if embedded]


async def _warm_up(engine: Any) -> None:
    """Generate a few tokens, first without and then with prompt log-probs."""
    from vllm import SamplingParams

    for number, prompt_logprobs in enumerate((None, 0)):
        sampling = SamplingParams(max_tokens=2, temperature=1.0, seed=0, logprobs=0, prompt_logprobs=prompt_logprobs)
        async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, sampling, f"rl-warm-up-{number}"):
            pass


def _salted(body: bytes, version: int) -> bytes | None:
    """Return a request's JSON with the version as cache salt, or None if it is not a JSON object.

    The salt comes last, so that it overrides a salt in the request.
    """
    body = body.strip()
    if not body:
        return body
    if body[:1] != b"{" or body[-1:] != b"}":
        return None
    content = body[1:-1].strip()
    return b'{%s%s"cache_salt":"%d"}' % (content, b"," if content else b"", version)


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` that first returns the given body, and then waits for the client to disconnect."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_replayed() -> Any:
        return messages.pop() if messages else await receive()

    return receive_replayed


# ---- in the workers


class WeightStage:
    """Methods added to vLLM's worker class; `collective_rpc` calls them on all ranks.

    Rank 0 fetches a version into host memory, in a thread, while the worker computes. The other ranks open the
    fetched tensors, and all ranks load them.
    """

    def rl_stage(self, meta: dict[str, Any]) -> None:
        """Start to fetch a version; `rl_staged` returns the status."""
        state = self._rl_state()
        state.attempt = attempt = rl_staging.Attempt(meta, state)
        attempt.done = self._rl_rank() != 0
        attempt.checkpoint = Path(self.vllm_config.model_config.model)  # type: ignore[attr-defined]
        if self._rl_rank() == 0:
            attempt.device = str(self.device)  # type: ignore[attr-defined]
            threading.Thread(target=attempt.run, name="rl-stage", daemon=True).start()

    def rl_share(self, checksums: dict[str, str]) -> None:
        """Start to open the tensors that rank 0 fetched, on the other ranks."""
        attempt = self._rl_state().attempt
        if self._rl_rank() != 0:
            attempt.done = False
            threading.Thread(target=attempt.share, args=(checksums,), name="rl-share", daemon=True).start()

    def rl_staged(self) -> dict[str, Any]:
        """Return the status of the current attempt: done or not, error, checksums."""
        return self._rl_state().attempt.status()

    def rl_give_up(self) -> None:
        """Abandon the current attempt."""
        self._rl_state().reset()

    def rl_load(self, version: int) -> None:
        """Load the staged version into the served model."""
        state = self._rl_state()
        attempt = state.attempt
        if attempt.version != version:
            raise RuntimeError(f"expected staged version {version}, found {attempt.version}.")
        tensors = attempt.tensors
        self.reload_weights(weights_iterator=iter(list(tensors.items())))  # type: ignore[attr-defined]
        model = self.get_model()  # type: ignore[attr-defined]
        repack(model)
        compare(model, tensors)
        state.loaded = attempt.sums
        if attempt.area is not None:
            attempt.tensors = {}

    def rl_loaded(self) -> dict[str, Any]:
        """Return the checksums of the last loaded version; empty before the first load."""
        return {"checksums": self._rl_state().loaded}

    def _rl_state(self) -> rl_staging.State:
        state: rl_staging.State = self.__dict__.setdefault("rl_weight_state", rl_staging.State())
        return state

    def _rl_rank(self) -> int:
        return int(self.rank)  # type: ignore[attr-defined]


def repack(model: Any) -> None:
    """Pack embeddings and output heads again, because a reload does not update the packed copy of a tied head.

    On a CPU, vLLM multiplies with that copy.
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings_padded"):
            module.quant_method.process_weights_after_loading(module)


def compare(model: Any, staged: dict[str, Any]) -> None:
    """Compare the model's tensors with the staged ones.

    Parameters that are split over ranks or quantized are not compared, nor those whose names vLLM does not map.

    Raises:
        RuntimeError: a tensor differs; the message names the first such parameter.
    """
    import torch

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        staged = {mapper.map_name(name): tensor for name, tensor in staged.items()}
    embeddings = next((tensor for name, tensor in staged.items() if name.endswith("embed_tokens.weight")), None)
    for name, live, columns in served(model) if _is_whole(model) else ():
        sent = staged.get(name, embeddings if name.endswith("lm_head.weight") else None)
        if sent is None:
            continue
        sent = (sent if columns is None else sent[:, columns]).to(live.device, live.dtype)
        if sent.shape == live.shape and not torch.equal(sent, live):
            raise RuntimeError(
                f"parameter {name!r}: the served tensor differs from the staged one; the load did not update it."
            )


def _is_whole(model: Any) -> bool:
    """Return whether no layer of the model is split over ranks or quantized."""
    layers = [module for module in model.modules() if hasattr(module, "quant_method") and hasattr(module, "weight")]
    unquantized = all(type(layer.quant_method).__name__.startswith("Unquantized") for layer in layers)
    return unquantized and all(getattr(layer, "tp_size", 1) == 1 for layer in layers)


def served(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield checkpoint name, tensor and column indices (None for all columns) of each parameter of a vLLM model.

    For a matrix that is packed for a CPU, the tensor has random columns, computed by multiplication with unit vectors.
    These columns suffice to detect a wrong matrix.
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
    """Return random columns of a packed matrix, [rows, columns], and their indices."""
    import torch

    names = ("input_size_per_partition", "input_size", "embedding_dim")  # split layers, replicated ones, embeddings
    width = next(getattr(module, name) for name in names if hasattr(module, name))
    columns = torch.randperm(width)[:COLUMNS]
    units = torch.zeros(len(columns), width, dtype=module.weight.dtype)
    units[torch.arange(len(columns)), columns] = 1
    return module.cpu_linear(units, module.weight, None).t(), columns
