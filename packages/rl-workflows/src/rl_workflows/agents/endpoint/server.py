"""HTTP server of the endpoint: finds the session of a key, limits requests, and returns errors as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from rl_contracts.chat.rendering import ChatRenderer, replace_invalid_text, tokenizer_of
from rl_contracts.config import GenerationConfig
from rl_contracts.endpoint import RolloutEndpoint
from rl_contracts.errors import AgentError, ConfigError, InferenceError, RLError
from rl_contracts.images import MAX_BYTES
from rl_contracts.inference import InferenceEngine
from rl_contracts.runtime.aio import LoopThread
from rl_contracts.runtime.http_connections import Connections
from rl_contracts.runtime.http_requests import decode
from rl_contracts.runtime.logging import get_logger
from rl_contracts.runtime.machine import bypass_proxies, reachable_host, url_of
from rl_workflows.agents.endpoint.anthropic import Messages
from rl_workflows.agents.endpoint.anthropic import error as anthropic_error
from rl_workflows.agents.endpoint.chat import ChatCompletion, Completion
from rl_workflows.agents.endpoint.chat_stream import ChatStream, chat_stream
from rl_workflows.agents.endpoint.config import EndpointConfig
from rl_workflows.agents.endpoint.request_parsing import ApiRequest, Rewards
from rl_workflows.agents.endpoint.responses import Responses
from rl_workflows.agents.endpoint.session import CallError, Model, OnMessage, Prepared, Session
from rl_workflows.agents.message_parsing import MessageParser

__all__ = ["HttpRolloutEndpoint"]

logger = get_logger("inference.endpoint")

BODY_SECONDS = 30.0
"""Seconds in which the body of a request must arrive."""
IDLE_SECONDS = 5.0
"""Seconds between the comments that keep a stream open while its completion is generated."""
MAX_BODY_BYTES = 1 << 23
"""Maximum size of a request body in bytes, more than a prompt of a million tokens."""
MAX_IMAGE_BYTES = 2 * MAX_BYTES
"""Maximum size of the images of a request in base64, in addition to `MAX_BODY_BYTES`: enough for the largest one."""
MAX_METRICS = 64
"""Maximum number of metric names per episode."""
MAX_SESSIONS = 1 << 16
"""Maximum number of open sessions, more than the episodes of a process, so that only sessions left open reach it."""
PREPARING_THREADS = 2
"""Number of threads that render and tokenize prompts. A session uses at most one, so it cannot block all of them."""
ROUTES: dict[str, type[ApiRequest]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/v1/messages": Messages,
}
"""Request class of each path. Anthropic's clients append `/v1` to the base URL, which already ends with `/v1` for
OpenAI's clients, so they also request `/v1/v1/messages`."""
COUNT_PATHS = ("/v1/messages/count_tokens", "/v1/v1/messages/count_tokens")
"""Paths that return the number of tokens of a prompt."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpRolloutEndpoint(RolloutEndpoint):
    """HTTP endpoint that runs in a separate thread, from its construction until `destroy`.

    Args:
        tokenizer: tokenizer of the model with a chat template, or the processor of a vision-language model.
        config: settings of the endpoint; the defaults if None.
        template_options: further variables of the chat template.
        invalid_text: handling of requests whose text is not UTF-8: `reject` or `replace`.

    Raises:
        ConfigError: the server cannot listen on the address, the tokenizer has no chat template, or it has no
            `response_template` although `tool_calls` is `transformers`.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: EndpointConfig | None = None,
        template_options: Mapping[str, Any] | None = None,
        invalid_text: str = "reject",
    ) -> None:
        self.config, self._invalid_text = config or EndpointConfig(), invalid_text
        renderer = ChatRenderer(tokenizer, template_options)
        tokenizer = tokenizer_of(tokenizer)
        reader = MessageParser(tokenizer, self.config.tool_calls, renderer.stop_ids)
        self._model = Model(tokenizer, renderer, reader, self.config)
        self._sessions: dict[str, tuple[Session, asyncio.TimerHandle]] = {}
        self._open_call: Callable[[str], Session] | None = None
        self._model_name = "policy"
        self._watch_task: asyncio.Task[None] | None = None
        self._destroyed = False
        body_bytes = MAX_BODY_BYTES + (MAX_IMAGE_BYTES if renderer.reads_images else 0)
        app = web.Application(middlewares=[self._convert_errors], client_max_size=body_bytes)
        app.add_routes([web.post(path, self._handle_call) for path in ROUTES])
        app.add_routes([web.post(path, self._handle_count) for path in COUNT_PATHS])
        app.add_routes([web.post("/v1/rewards", self._handle_reward)])
        app.add_routes([web.get("/v1/models", self._handle_models), web.get("/health", self._handle_health)])
        self._connections = Connections(app)
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, "rollout-endpoint-prompts")
        self._thread = LoopThread("rollout-endpoint")
        try:
            self.url = self._thread.run(self._start())
        except OSError as error:
            self._thread.close()
            address = f"{self.config.host}:{self.config.port}"
            raise ConfigError(
                f"rollout.endpoint.host, rollout.endpoint.port: cannot listen on {address}: {error.strerror or error}. "
                "Choose another port, or 0 for any free port."
            ) from error

    async def _start(self) -> str:
        runner = self._connections.runner
        await runner.setup()
        try:
            await web.TCPSite(runner, self.config.host, self.config.port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._watch_task = asyncio.create_task(self._connections.close_silent_connections())
        url = self.config.url.rstrip("/") or url_of(reachable_host(self.config.host), runner.addresses[0][1])
        # for agents whose clients run in this process
        os.environ |= bypass_proxies(os.environ, urlsplit(url).hostname or "")
        return url

    async def open(
        self, engine: InferenceEngine, generation: GenerationConfig, max_length: int | None = None
    ) -> Session:
        loop = asyncio.get_running_loop()
        return await asyncio.wrap_future(self._thread.submit(self._open(engine, generation, max_length, loop)))

    def serve(
        self,
        engine: InferenceEngine,
        generation: GenerationConfig,
        max_length: int | None = None,
        name: str = "policy",
        api_key: str = "",
    ) -> None:
        """Answer calls outside of episodes, each in a session of its own, with the sampling parameters of the call.

        Call this on the event loop on which `engine` is used. Sessions of episodes are not available afterwards.

        Args:
            engine: engine that generates the completions.
            generation: sampling settings for parameters that a call omits, and the maximum of `max_tokens`.
            max_length: maximum number of tokens of a prompt and its completion; None for the engine's limit.
            name: id of the model in `/v1/models`. Calls may name any model.
            api_key: key that every call must carry; empty to accept calls without a key.
        """
        loop = asyncio.get_running_loop()

        def open_call(key: str) -> Session:
            if api_key and not hmac.compare_digest(key.encode(errors="replace"), api_key.encode()):
                raise CallError(
                    "expected the API key of this server in the header `Authorization: Bearer KEY`.",
                    401,
                    "invalid_api_key",
                )
            return Session(
                self._model, engine, generation, max_length, loop, self.url, key, self._close, applies_sampling=True
            )

        self._open_call, self._model_name = open_call, name

    async def _open(
        self,
        engine: InferenceEngine,
        generation: GenerationConfig,
        max_length: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> Session:
        if len(self._sessions) >= MAX_SESSIONS:
            raise AgentError(
                f"the endpoint has {MAX_SESSIONS} open sessions, the maximum; close each session after its episode."
            )
        key = f"rl-{secrets.token_urlsafe(24)}"
        session = Session(self._model, engine, generation, max_length, loop, self.url, key, self._close)
        timer = asyncio.get_running_loop().call_later(self.config.session_seconds, self._expire, session)
        self._sessions[key] = session, timer
        return session

    def _expire(self, session: Session) -> None:
        logger.warning(
            "closed a session that was open for endpoint.session_seconds=%g seconds", self.config.session_seconds
        )
        session.expired = True
        self._end(session)

    def _end(self, session: Session) -> None:
        _, timer = self._sessions.pop(session.key, (None, None))
        if timer is not None:
            timer.cancel()
        session.end()

    async def _close(self, session: Session) -> None:
        async def end() -> None:
            self._end(session)

        if not self._destroyed:
            await asyncio.wrap_future(self._thread.submit(end()))

    async def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        await asyncio.wrap_future(self._thread.submit(self._stop()))
        await asyncio.to_thread(self._thread.close)

    async def _stop(self) -> None:
        for session, _ in list(self._sessions.values()):
            self._end(session)
        if self._watch_task is not None:
            self._watch_task.cancel()
        await self._connections.runner.cleanup()
        await asyncio.to_thread(self._preparing.shutdown, cancel_futures=True)

    @web.middleware
    async def _convert_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert exceptions to error responses in the format of the route's API."""
        code = None
        try:
            return await handler(request)
        except CallError as error:
            status, text, code = error.status, str(error), error.code
        except RLError as error:  # from the engine, after its retries
            status, text = 500, str(error)
        except web.HTTPException as error:
            status, text = error.status, f"{request.method} {request.path}: {error.text or error.reason}"
            if error.status == 404 and not request.path.startswith("/v1/"):
                text += f". The base URL is {self.url}/v1."
        except ConnectionError:  # the agent disconnected
            raise
        except Exception as error:  # boundary to HTTP: log the traceback, return the message
            logger.exception("%s %s", request.method, request.path)
            status, text = 500, f"{type(error).__name__}: {error}"
        return _error_response(request, status, text, code)

    def _session(self, request: web.Request) -> Session:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
        if self._open_call is not None:
            return self._open_call(key)
        if not key:
            raise CallError(
                "expected a session key in the header `Authorization: Bearer KEY` or `x-api-key: KEY`, found none.",
                401,
                "invalid_api_key",
            )
        if key not in self._sessions:
            raise CallError("no open session has this key.", 401, "invalid_api_key")
        return self._sessions[key][0]

    async def _parse_body[T: msgspec.Struct](self, request: web.Request, kind: type[T]) -> T:
        if "Content-Encoding" in request.headers:
            raise CallError("expected a body without Content-Encoding.", 415)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise CallError(f"expected the whole body within {BODY_SECONDS:g} s.", 408) from None
        except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError) as error:
            raise CallError(f"the body cannot be read: {error}.") from error
        try:
            return decode(body if self._invalid_text == "reject" else _with_valid_text(body), kind)
        except InferenceError as error:
            raise CallError(str(error)) from error

    async def _handle_call(self, request: web.Request) -> web.StreamResponse:
        """Handle a call of any API in `ROUTES`."""
        session = self._session(request)
        with _admit_and_count(session):
            body = await self._parse_body(request, ROUTES[request.path])
            text = chat_stream(body) if session.applies_sampling else None
            task = asyncio.ensure_future(self._build_reply(session, body, text.update if text else None))
            try:
                if body.stream:
                    return await self._stream(request, body, task, text)
                return web.json_response(await task)
            finally:
                task.cancel()

    async def _prepare(self, session: Session, body: ApiRequest) -> Prepared:
        """Render and tokenize the prompt of a call in a thread, so that calls of other sessions are not delayed."""
        loop = asyncio.get_running_loop()
        await session.preparing.acquire()
        job = self._preparing.submit(lambda: session.prepare(replace(body.call(), sampling=body.sampling)))
        # the thread stays in use until the job is done, even if the agent disconnects
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(session.preparing.release))
        return await asyncio.wrap_future(job)

    async def _build_reply(
        self, session: Session, body: ApiRequest, on_message: OnMessage | None = None
    ) -> dict[str, Any]:
        prepared = await self._prepare(session, body)
        completions = await session.generate(prepared, on_message)
        reply = body.build_reply(prepared.prompt, completions, self._model.tokenizer)
        session.remember_reply(reply["id"], prepared.call, completions)
        return reply

    async def _stream(
        self, request: web.Request, body: ApiRequest, task: asyncio.Task[dict[str, Any]], text: ChatStream | None
    ) -> web.StreamResponse:
        """Send the text as server-sent events while it is generated if `text` collects it, and the reply at its end.

        An error within the first `IDLE_SECONDS` becomes an HTTP status. A later one becomes an `error` event, because
        the headers have been sent.
        """
        await _wait(task, text)
        if task.done():
            task.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        while not task.done():
            new_text = "".join(map(_event, text.take() if text else ()))
            await response.write(new_text.encode() or b": the completion is not finished yet\n\n")
            await _wait(task, text)
        try:
            reply = await task
        except RLError as error:
            status = error.status if isinstance(error, CallError) else 500
            await response.write(f"event: error\ndata: {_error_body(request, status, str(error))}\n\n".encode())
            return response
        events = text.rest(reply) if text else body.events(reply)
        await response.write("".join(map(_event, events)).encode())
        await response.write_eof()
        return response

    async def _handle_count(self, request: web.Request) -> web.Response:
        """Return the number of tokens of a prompt."""
        session = self._session(request)
        prepared = await self._prepare(session, await self._parse_body(request, Messages))
        return web.json_response({"input_tokens": len(prepared.prompt.ids)})

    async def _handle_reward(self, request: web.Request) -> web.Response:
        """Record a reward of a completion or of the episode, and metrics of the episode."""
        session = self._session(request)
        body = await self._parse_body(request, Rewards)
        if session.closed:  # while the body arrived
            raise CallError("the session was closed before the reward arrived.", 401, "invalid_api_key")
        if body.reward is None and not body.metrics:
            raise CallError("expected `reward` or `metrics`, found neither.")
        metrics = session.metrics | body.metrics
        if len(metrics) > MAX_METRICS:
            raise CallError(f"metrics: expected at most {MAX_METRICS} names per episode, found {len(metrics)}.")
        if body.call_id is None:
            session.outcome = session.outcome if body.reward is None else body.reward
        elif body.reward is not None:
            session.add_reward(body.call_id, body.index, body.reward)
        session.metrics = metrics
        return web.json_response({"object": "reward", "call_id": body.call_id, "reward": body.reward})

    async def _handle_models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _handle_health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ready", "sessions": len(self._sessions)})


@contextmanager
def _admit_and_count(session: Session) -> Iterator[None]:
    """Admit a call before its body takes memory. Count it as open, and also as rejected if a `CallError` ends it."""
    session.open_calls += 1
    try:
        session.admit()
        yield
    except CallError:
        session.rejected_calls += 1
        raise
    finally:
        session.open_calls -= 1


async def _wait(task: asyncio.Task[Any], text: ChatStream | None) -> None:
    """Wait until the task is done or `text` has events, at most `IDLE_SECONDS`."""
    if text is None:
        await asyncio.wait({task}, timeout=IDLE_SECONDS)
        return
    changed = asyncio.ensure_future(text.changed.wait())
    try:
        await asyncio.wait({task, changed}, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        changed.cancel()


def _with_valid_text(body: bytes) -> bytes:
    """Replace text that is not UTF-8 in a JSON body by U+FFFD. A body that is not JSON is returned unchanged."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(replace_invalid_text(json.loads(body.decode(errors="replace")))).encode()
    return body


def _event(event: tuple[str, Any]) -> str:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{f'event: {name}{chr(10)}' if name else ''}data: {text}\n\n"


def _error_body(request: web.Request, status: int, text: str, code: str | None = None) -> str:
    if request.path.startswith(("/v1/messages", "/v1/v1/")):
        return anthropic_error(status, text)
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return json.dumps({"error": {"message": text, "type": kind, "param": None, "code": code}})


def _error_response(request: web.Request, status: int, text: str, code: str | None) -> web.Response:
    # clients of OpenAI and Anthropic retry automatically, but a retry would fail in the same way
    headers = {"x-should-retry": "false"}
    return web.Response(
        status=status, text=_error_body(request, status, text, code), content_type="application/json", headers=headers
    )
