"""ASGI middleware of vLLM and SGLang servers: authentication by the run key, pauses and weight updates.

The other files of this directory import it inside the servers. It requires Python 3.10 and imports nothing else of
this project. The server itself is represented by its `engine`, an object with these coroutines:

    check_health()                          raises an error if the server cannot serve
    pause_generation(mode, clear_cache)     returns when generation is paused; `wait`: after the running completions
    resume_generation()
    collective_rpc(method, kwargs)          calls `rl_stage`, `rl_share`, `rl_staged`, `rl_give_up`, `rl_load` or
                                            `rl_loaded` on each rank
    update_weight_version(version)          sets the version with which tokens are stamped from now on
    reset_prefix_cache(running, connector)  returns whether the prefix cache is empty afterwards

Routes, all JSON: `GET /rl/health`, `/rl/info`, `/rl/stats`, `/rl/receipt`; `POST /rl/stage`, `/rl/pause`, `/rl/commit`,
`/rl/resume`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

logger = logging.getLogger("rl.guard")

KEY = "RL_RUN_KEY"
"""Environment variable with the run key."""
VERSION = "RL_WEIGHT_VERSION"
"""Environment variable with the version of the weights that the server was started with."""
NAME = "RL_SERVER_NAME"
"""Environment variable with the name of the server in receipts."""
INSTANCE = secrets.token_hex(8)
"""Random id of this process; a restarted server has another one."""
AGENT_ROUTES = ("/v1/models", "/tokenize", "/detokenize", "/rl/health", "/rl/info", "/rl/stats")
"""Routes that the generation key permits in addition to those that generate
(see `rl_inference.backends.embedded.protocol.generation_key`)."""
REPLY_SECONDS = 0.5
"""Seconds after which the server replies to a request to pause even if generation still runs."""
POLL_SECONDS = 0.01
"""Seconds between two polls of the ranks."""
EXIT_DELAY_SECONDS = 0.2
"""Seconds between the report of a failed load and the end of the process, for the error to reach the client."""
MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of a request body."""

Handler = Callable[[Any, "dict[str, Any]"], Awaitable["dict[str, Any]"]]


class RejectedError(Exception):
    """The request cannot be carried out; nothing has changed."""


class Guard(ABC):
    """ASGI middleware around all routes of a server.

    Args:
        app: the server's application.
        key: the run key; empty to permit all requests.
    """

    generation_routes: tuple[str, ...]
    """Routes that generate tokens."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        generation_key = hmac.new(key.encode(), b"generation", "sha256").hexdigest()
        self._keys = [f"Bearer {accepted}".encode() for accepted in (key, generation_key)] if key else []
        self._version = int(os.environ.get(VERSION) or 0)
        self._staged_version, self._route, self._load_failed = -1, "", False
        self._open_requests = 0
        self._messages = 0
        self._busy_seconds, self._busy_since = 0.0, 0.0
        self._running = asyncio.Event()
        self._running.set()
        self._pause_task: asyncio.Task[None] | None = None
        self._pause_mode = ""
        self._paused_at = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._commit_lock = asyncio.Lock()
        self._stage_lock = asyncio.Lock()
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/rl/health"): self._health,
            ("GET", "/rl/info"): self._info,
            ("GET", "/rl/stats"): self._stats,
            ("GET", "/rl/receipt"): self._receipt,
            ("POST", "/rl/stage"): self._stage,
            ("POST", "/rl/pause"): self._pause,
            ("POST", "/rl/commit"): self._commit,
            ("POST", "/rl/resume"): self._resume,
        }

    @abstractmethod
    def engine(self, scope: Any) -> Any:
        """Return the engine that serves a request; see the module's docstring for its methods."""

    @abstractmethod
    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a generation request to the server; during a pause, wait for its end first."""

    @abstractmethod
    async def _info(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Return the model, its settings and the version of the server's weights."""

    @abstractmethod
    async def _metrics(self, engine: Any) -> tuple[float, float, float]:
        """Return the numbers of running and waiting requests, and the tokens generated since the start."""

    async def _prepare(self, engine: Any) -> None:  # noqa: B027 - optional
        """Prepare the engine for its first use; called for every control request."""

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a request for a route outside `generation_routes` to the server."""
        await self._app(scope, receive, send)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket" and self._keys:
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._with_headers(send)
        path = scope["path"]
        auth_error = self._auth_error(path, scope["headers"])
        route = self._routes.get((scope["method"], path))
        if auth_error is not None:
            await send_json(send, auth_error[0], {"error": {"message": auth_error[1]}})
        elif route is not None:
            await self._control(route, scope, receive, send)
        elif path in self.generation_routes:
            await self._generate(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    def _auth_error(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """Return status and message of a rejection, or None if the request is permitted."""
        if not self._keys or path == "/health":
            return None
        header = dict(headers).get(b"authorization", b"")
        has_run_key, has_generation_key = (hmac.compare_digest(header, key) for key in self._keys)
        if not (has_run_key or has_generation_key):
            return 401, "the request carries no valid key (Authorization: Bearer)."
        routes = (*self.generation_routes, *AGENT_ROUTES)
        if not has_run_key and path not in routes:
            return 403, f"the generation key permits only {', '.join(routes)}; use the run key."
        return None

    def _with_headers(self, send: Any) -> Any:
        """Wrap `send` to add headers with the instance of the server and the served version."""

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [(b"x-server-instance", INSTANCE.encode()), (b"x-weight-version", str(self._version).encode())]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return send_with_headers

    def _begin_request(self) -> None:
        """Count a generation request as open."""
        self._open_requests += 1
        if self._open_requests == 1:
            self._busy_since = time.monotonic()

    def _end_request(self) -> None:
        """Count a generation request as finished."""
        self._open_requests -= 1
        if not self._open_requests:
            self._busy_seconds += time.monotonic() - self._busy_since

    async def _control(self, route: Handler, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request to a control route; errors become JSON with a message."""
        try:
            request = json.loads(await body_of(receive) or b"{}")
            engine = self.engine(scope)
            await self._prepare(engine)
            status, value = 200, await route(engine, request)
        except RejectedError as error:
            status, value = 400, {"error": {"message": str(error)}}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            status, value = 400, {"error": {"message": f"invalid request for this route: {error!r}"}}
        except Exception as error:  # servers raise any type; the client gets the message
            logger.exception("%s failed", scope["path"])
            status, value = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        await send_json(send, status, value)

    # ---- health and metrics

    async def _health(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        await engine.check_health()
        return {"version": self._version, "open": self._open_requests, "instance": INSTANCE}

    async def _stats(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        running, waiting, generated = await self._metrics(engine)
        busy = self._busy_seconds + (time.monotonic() - self._busy_since if self._open_requests else 0.0)
        return {
            "version": self._version,
            "paused": not self._running.is_set(),
            "running": running,
            "waiting": max(waiting, self._open_requests - running),
            "generated_tokens": generated,
            "busy_seconds": busy,
        }

    # ---- weights

    async def _stage(self, engine: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Stage a version next to the served one within `timeout` seconds, and return its receipt."""
        meta, limit = request["meta"], float(request["timeout"])
        deadline = time.monotonic() + limit
        async with self._stage_lock:
            self._staged_version = -1
            update = f"route {meta['route']}, version {meta['version']}"
            late = f"{update}: the weights did not arrive within {limit:g} s. Check whether the trainer hangs."
            await engine.collective_rpc("rl_stage", kwargs={"meta": meta})
            states = await self._wait_until_staged(engine, deadline, late)
            await engine.collective_rpc("rl_share", kwargs={"checksums": states[0]["shared"]})
            await self._wait_until_staged(engine, deadline, late)
            self._staged_version, self._route = int(meta["version"]), str(meta["route"])
            return receipt_of(self._staged_version, states)

    async def _wait_until_staged(self, engine: Any, deadline: float, late: str) -> list[dict[str, Any]]:
        """Wait until all ranks have staged the version, and return the status of each rank.

        Raises:
            RejectedError: a rank failed, or the deadline passed; the message is then `late`.
        """
        while True:
            states: list[dict[str, Any]] = await engine.collective_rpc("rl_staged")
            if errors := [state["error"] for state in states if state["error"]]:
                raise RejectedError(errors[0])
            if all(state["done"] for state in states):
                return states
            if time.monotonic() > deadline:
                await engine.collective_rpc("rl_give_up")
                raise RejectedError(late)
            await asyncio.sleep(POLL_SECONDS)

    async def _receipt(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Return the receipt of the last load, with the checksums of the tensors in host memory."""
        states = await engine.collective_rpc("rl_loaded")
        if not states[0]["checksums"]:
            raise RejectedError(
                "this server has no checksums, because it has loaded no weight update since its start; send one first."
            )
        return receipt_of(self._version, states)

    async def _pause(self, engine: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Pause generation after the current step, or with `wait` after the running completions.

        Until then, the result has `paused: false`.
        """
        mode, lease = str(request["mode"]), float(request["lease"])
        if mode not in ("keep", "recompute", "wait"):
            raise RejectedError(f"mode: expected keep, recompute or wait, found {mode!r}.")
        self._cancel_lease()
        self._lease = asyncio.get_running_loop().call_later(lease, self._on_lease_expired, engine, lease)
        if self._pause_task is None or (mode == "wait") != (self._pause_mode == "wait"):
            self._running.clear()
            self._pause_mode = mode
            self._pause_task = asyncio.create_task(self._pause_engine(engine, "wait" if mode == "wait" else "keep"))
        done, _ = await asyncio.wait({self._pause_task}, timeout=REPLY_SECONDS)
        if done:
            self._pause_task.result()
        return {"paused": bool(done), "generated_tokens": self._messages}

    async def _pause_engine(self, engine: Any, mode: str) -> None:
        await engine.pause_generation(mode=mode, clear_cache=False)
        self._paused_at = self._paused_at or time.monotonic()

    async def _commit(self, engine: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Serve the staged version. A repeated commit of the served version does nothing, so a client may retry."""
        version = int(request["version"])
        async with self._commit_lock:
            if version == self._version and self._staged_version != version:
                return {}
            if self._staged_version != version:
                raise RejectedError(
                    f"commit of version {version}: staged is "
                    f"{self._staged_version if self._staged_version >= 0 else None}, served is {self._version}. "
                    "Stage it first."
                )
            was_paused = self._pause_task is not None
            if not was_paused:
                await self._pause(engine, {"mode": "keep", "lease": 3600.0})
            assert self._pause_task is not None
            await self._pause_task
            try:
                await engine.collective_rpc("rl_load", kwargs={"version": version})
            except BaseException as error:
                logger.critical(
                    "version %d was not loaded, and the previous weights are overwritten; ending the server",
                    version,
                    exc_info=True,
                )
                self._load_failed = True
                asyncio.get_running_loop().call_later(EXIT_DELAY_SECONDS, self._exit)
                raise RuntimeError(f"route {self._route}, version {version} was not loaded: {error}") from error
            self._staged_version = -1
            await engine.update_weight_version(str(version))
            # also for unfinished completions, which hold cache blocks that waiting requests could reuse
            if not await engine.reset_prefix_cache(True, True):
                raise RuntimeError(f"version {version}: the prefix cache of the previous weights could not be emptied.")
            await self._clear_caches(engine)
            self._version = version
            if not was_paused:
                await self._resume_generation(engine)
            return {}

    def _exit(self) -> NoReturn:
        """End at once. A regular shutdown would wait for open requests, which wait for a resume."""
        end_process()

    async def _clear_caches(self, engine: Any) -> None:  # noqa: B027 - optional
        """Clear further caches of values that were computed with the previous weights."""

    async def _resume(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Wait for a running commit, resume generation, and return the duration of the pause in seconds."""
        async with self._commit_lock:
            return await self._resume_generation(engine)

    async def _resume_generation(self, engine: Any) -> dict[str, Any]:
        if self._load_failed:
            raise RejectedError("the weights were not loaded, and this server is ending.")
        self._cancel_lease()
        paused_at, self._paused_at = self._paused_at, 0.0
        if self._pause_task is not None:
            self._pause_task.cancel()
        self._pause_task, self._pause_mode = None, ""
        await engine.resume_generation()
        self._running.set()
        return {"paused_seconds": time.monotonic() - paused_at if paused_at else 0.0}

    def _cancel_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None

    def _on_lease_expired(self, engine: Any, lease: float) -> None:
        self._expiry_task = asyncio.ensure_future(self._resume_after_lease(engine, lease, self._lease))

    async def _resume_after_lease(self, engine: Any, lease: float, expired: asyncio.TimerHandle | None) -> None:
        """Resume generation when a lease has expired and no commit runs, unless another pause was requested."""
        async with self._commit_lock:
            if self._lease is expired:
                logger.warning("pause lease expired after %g s; resuming generation", lease)
                await self._resume_generation(engine)


def receipt_of(version: int, states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a receipt as JSON, with the checksums of rank 0."""
    return {"holder": os.environ.get(NAME) or "server", "version": version, "checksums": states[0]["checksums"]}


def end_process() -> NoReturn:
    """Kill all child processes and end this process, without waiting."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


async def body_of(receive: Any) -> bytes:
    """Return the complete body of a request.

    Raises:
        ValueError: the body is larger than `MAX_BODY_BYTES`.
        ConnectionError: the client disconnected.
    """
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client disconnected.")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise ValueError(f"expected a body of at most {MAX_BODY_BYTES} bytes.")
    return b"".join(parts)


async def send_json(send: Any, status: int, value: dict[str, Any]) -> None:
    """Send a response with a JSON body."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
