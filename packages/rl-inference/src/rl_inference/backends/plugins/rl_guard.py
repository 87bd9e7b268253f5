"""The doors of a server that is another program: an ASGI middleware with the run key, pauses and updates of weights.

For files beside this one, which run inside servers; it imports nothing of ours and needs Python 3.10 alone. What a
server can do itself is its `engine`, an object with these coroutines:

    check_health()                          raises where it cannot serve
    pause_generation(mode, clear_cache)     returns once it stands still; `wait`: after the running answers
    resume_generation()
    collective_rpc(method, kwargs)          `rl_stage`, `rl_share`, `rl_staged`, `rl_give_up`, `rl_load`, `rl_loaded` on
                                            each rank
    update_weight_version(version)          names the version in the stamps from now on
    reset_prefix_cache(running, connector)  whether nothing is left that was computed before

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
VERSION = "RL_WEIGHT_VERSION"
"""Version of the weights that the server was started with."""
NAME = "RL_SERVER_NAME"
"""Its name in receipts."""
INSTANCE = secrets.token_hex(8)
"""Names this life of the process."""
AGENT_ROUTES = ("/v1/models", "/tokenize", "/detokenize", "/rl/health", "/rl/info", "/rl/stats")
"""What the key of generation opens besides what generates
(`rl_inference.backends.embedded.protocol.generation_key`)."""
ANSWER_SECONDS = 0.5
"""After which a pause that has not come yet is answered all the same."""
POLL_SECONDS = 0.01
FAREWELL_SECONDS = 0.2
"""In which a server that could not load tells its client why, before it ends."""
LARGEST_BODY = 64 * 2**20

Handler = Callable[[Any, "dict[str, Any]"], Awaitable["dict[str, Any]"]]


class RefusedError(Exception):
    """What was asked cannot be done; nothing has changed."""


class Guard(ABC):
    """ASGI middleware around all of a server's routes.

    Args:
        app: what is guarded.
        key: the run key; empty: everybody may do everything.
    """

    generation_routes: tuple[str, ...]
    """Routes that generate."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        agents = hmac.new(key.encode(), b"generation", "sha256").hexdigest()
        self._keys = [f"Bearer {each}".encode() for each in (key, agents)] if key else []
        self._version = int(os.environ.get(VERSION) or 0)
        self._staged, self._route, self._spoiled = -1, "", False
        self._open = 0
        self._messages = 0
        self._busy, self._busy_since = 0.0, 0.0
        self._running = asyncio.Event()
        self._running.set()
        self._pause: asyncio.Task[None] | None = None
        self._mode = ""
        self._stopped_at = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()
        self._staging = asyncio.Lock()
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/rl/health"): self._health,
            ("GET", "/rl/info"): self._info,
            ("GET", "/rl/stats"): self._stats,
            ("GET", "/rl/receipt"): self._receipt,
            ("POST", "/rl/stage"): self._stage,
            ("POST", "/rl/pause"): self._pause_all,
            ("POST", "/rl/commit"): self._commit,
            ("POST", "/rl/resume"): self._resume,
        }

    @abstractmethod
    def engine(self, scope: Any) -> Any:
        """What serves; the module says what it can do."""

    @abstractmethod
    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on; one that comes during a pause waits."""

    @abstractmethod
    async def _info(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """What is served, and how."""

    @abstractmethod
    async def _figures(self, engine: Any) -> tuple[float, float, float]:
        """Requests that run, requests that wait, and tokens generated since the start."""

    async def _prepare(self, engine: Any) -> None:  # noqa: B027 - most have nothing to do
        """What is to be done before the first of our own routes is asked."""

    async def _elsewhere(self, scope: Any, receive: Any, send: Any) -> None:
        """A route of the server's own that does not generate."""
        await self._app(scope, receive, send)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket" and self._keys:
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._stamped(send)
        path = scope["path"]
        refusal = self._refusal(path, scope["headers"])
        route = self._routes.get((scope["method"], path))
        if refusal is not None:
            await answer(send, refusal[0], {"error": {"message": refusal[1]}})
        elif route is not None:
            await self._control(route, scope, receive, send)
        elif path in self.generation_routes:
            await self._generate(scope, receive, send)
        else:
            await self._elsewhere(scope, receive, send)

    def _refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """Status and reason, unless the request may pass."""
        if not self._keys or path == "/health":
            return None
        given = dict(headers).get(b"authorization", b"")
        control, agent = (hmac.compare_digest(given, key) for key in self._keys)
        if not (control or agent):
            return 401, "the request carries no valid key (Authorization: Bearer)."
        routes = (*self.generation_routes, *AGENT_ROUTES)
        if not control and path not in routes:
            return 403, f"the key of generation opens {', '.join(routes)}, and nothing else."
        return None

    def _stamped(self, send: Any) -> Any:
        """`send`, with headers that say who answers, and which version is served."""

        async def stamped(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(b"x-server-instance", INSTANCE.encode()), (b"x-weight-version", str(self._version).encode())]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        return stamped

    def _come(self) -> None:
        """One more request is open."""
        self._open += 1
        if self._open == 1:
            self._busy_since = time.monotonic()

    def _leave(self) -> None:
        """One less."""
        self._open -= 1
        if not self._open:
            self._busy += time.monotonic() - self._busy_since

    async def _control(self, route: Handler, scope: Any, receive: Any, send: Any) -> None:
        """One of our own routes: its answer, or its error as a sentence."""
        try:
            asked = json.loads(await body_of(receive) or b"{}")
            engine = self.engine(scope)
            await self._prepare(engine)
            status, value = 200, await route(engine, asked)
        except RefusedError as error:
            status, value = 400, {"error": {"message": str(error)}}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            status, value = 400, {"error": {"message": f"not a request of this route: {error!r}"}}
        except Exception as error:  # servers raise anything; the client is told what
            logger.exception("%s failed", scope["path"])
            status, value = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        await answer(send, status, value)

    # ---- looking

    async def _health(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        await engine.check_health()
        return {"version": self._version, "open": self._open, "instance": INSTANCE}

    async def _stats(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        running, waiting, generated = await self._figures(engine)
        busy = self._busy + (time.monotonic() - self._busy_since if self._open else 0.0)
        return {
            "version": self._version,
            "paused": not self._running.is_set(),
            "running": running,
            "waiting": max(waiting, self._open - running),
            "generated_tokens": generated,
            "busy_seconds": busy,
        }

    # ---- weights

    async def _stage(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """Put a version beside the served one, within `timeout` seconds; its receipt."""
        meta, limit = asked["meta"], float(asked["timeout"])
        deadline = time.monotonic() + limit
        async with self._staging:
            self._staged = -1
            what = f"route {meta['route']}, version {meta['version']}"
            late = f"{what}: not there within {limit:g} s. Is the trainer frozen?"
            await engine.collective_rpc("rl_stage", kwargs={"meta": meta})
            states = await self._there(engine, deadline, late)
            await engine.collective_rpc("rl_share", kwargs={"checksums": states[0]["shared"]})
            await self._there(engine, deadline, late)
            self._staged, self._route = int(meta["version"]), str(meta["route"])
            return told(self._staged, states)

    async def _there(self, engine: Any, deadline: float, late: str) -> list[dict[str, Any]]:
        """What each rank says of what it stages, once all are done; `late`: what the error says otherwise."""
        while True:
            states: list[dict[str, Any]] = await engine.collective_rpc("rl_staged")
            if errors := [state["error"] for state in states if state["error"]]:
                raise RefusedError(errors[0])
            if all(state["done"] for state in states):
                return states
            if time.monotonic() > deadline:
                await engine.collective_rpc("rl_give_up")
                raise RefusedError(late)
            await asyncio.sleep(POLL_SECONDS)

    async def _receipt(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Of what was loaded last, as it lay in the host's memory."""
        sums = await engine.collective_rpc("rl_loaded")
        if not sums[0]["checksums"]:
            raise RefusedError("no update was loaded since this server started, so it has no checksums.")
        return told(self._version, sums)

    async def _pause_all(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """Stop between two steps; with `wait` after the answers that run. Says `paused: false` while that lasts."""
        mode, lease = str(asked["mode"]), float(asked["lease"])
        if mode not in ("keep", "recompute", "wait"):
            raise RefusedError(f"mode: expected keep, recompute or wait, found {mode!r}.")
        self._end_lease()
        self._lease = asyncio.get_running_loop().call_later(lease, self._lease_over, engine, lease)
        if self._pause is None or (mode == "wait") != (self._mode == "wait"):
            self._running.clear()
            self._mode = mode
            self._pause = asyncio.create_task(self._stop(engine, "wait" if mode == "wait" else "keep"))
        done, _ = await asyncio.wait({self._pause}, timeout=ANSWER_SECONDS)
        if done:
            self._pause.result()
        return {"paused": bool(done), "generated_tokens": self._messages}

    async def _stop(self, engine: Any, mode: str) -> None:
        await engine.pause_generation(mode=mode, clear_cache=False)
        self._stopped_at = self._stopped_at or time.monotonic()

    async def _commit(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve the staged version. Asking again for the served one does nothing, so that a client may retry."""
        version = int(asked["version"])
        async with self._changing:
            if version == self._version and self._staged != version:
                return {}
            if self._staged != version:
                raise RefusedError(
                    f"commit of version {version}: staged is {self._staged if self._staged >= 0 else None}, served is "
                    f"{self._version}. Stage it first."
                )
            paused = self._pause is not None
            if not paused:
                await self._pause_all(engine, {"mode": "keep", "lease": 3600.0})
            assert self._pause is not None
            await self._pause
            try:
                await engine.collective_rpc("rl_load", kwargs={"version": version})
            except BaseException as error:
                logger.critical("version %d not loaded, and the one before is gone: ending", version, exc_info=True)
                self._spoiled = True
                asyncio.get_running_loop().call_later(FAREWELL_SECONDS, self._end)
                raise RuntimeError(f"route {self._route}, version {version} was not loaded: {error}") from error
            self._staged = -1
            await engine.update_weight_version(str(version))
            # also of answers that go on, which hold blocks: requests that wait inside would be read with them
            if not await engine.reset_prefix_cache(True, True):
                raise RuntimeError(f"version {version}: the prefix cache of the weights before could not be emptied.")
            await self._loaded(engine)
            self._version = version
            if not paused:
                await self._generate_again(engine)
            return {}

    def _end(self) -> NoReturn:
        """End at once: a server that is told to end waits for its requests, which wait for a resume."""
        end_process()

    async def _loaded(self, engine: Any) -> None:  # noqa: B027 - most have nothing else
        """What else is to be forgotten that was computed with the weights before."""

    async def _resume(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Generate again, but not in the middle of a load; says how many seconds it stood still."""
        async with self._changing:
            return await self._generate_again(engine)

    async def _generate_again(self, engine: Any) -> dict[str, Any]:
        if self._spoiled:
            raise RefusedError("the weights were not loaded, and this server ends.")
        self._end_lease()
        stopped, self._stopped_at = self._stopped_at, 0.0
        if self._pause is not None:
            self._pause.cancel()
        self._pause, self._mode = None, ""
        await engine.resume_generation()
        self._running.set()
        return {"paused_seconds": time.monotonic() - stopped if stopped else 0.0}

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None

    def _lease_over(self, engine: Any, lease: float) -> None:
        self._late = asyncio.ensure_future(self._go_on(engine, lease, self._lease))

    async def _go_on(self, engine: Any, lease: float, ended: asyncio.TimerHandle | None) -> None:
        """Resume after a lease, but not in the middle of a load; and not where another was asked for meanwhile."""
        async with self._changing:
            if self._lease is ended:
                logger.warning("paused for %g s, and nobody asked for more: going on", lease)
                await self._generate_again(engine)


def told(version: int, states: list[dict[str, Any]]) -> dict[str, Any]:
    """A receipt."""
    return {"holder": os.environ.get(NAME) or "server", "version": version, "checksums": states[0]["checksums"]}


def end_process() -> NoReturn:
    """End this process and all that it started, without waiting for anything."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


async def body_of(receive: Any) -> bytes:
    """All of a request's body.

    Raises:
        ValueError: it is too large.
        ConnectionError: the client went away.
    """
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away.")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > LARGEST_BODY:
            raise ValueError(f"expected a body of at most {LARGEST_BODY} bytes.")
    return b"".join(parts)


async def answer(send: Any, status: int, value: dict[str, Any]) -> None:
    """Send JSON."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
