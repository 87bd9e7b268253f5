"""Command `python -m rl_inference.embedded_server --model DIR --port N`: load a model and serve it until a signal."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rl_contracts.config import require
from rl_contracts.errors import RLError
from rl_contracts.models.directory import check_model_directory
from rl_contracts.runtime.http_connections import Connections
from rl_contracts.runtime.logging import configure, get_logger
from rl_contracts.runtime.machine import is_loopback
from rl_contracts.scheduler import RUN_KEY_VARIABLE
from rl_inference.backends.embedded.config import ServerOptions, parse
from rl_inference.client.file_limit import raise_file_limit
from rl_inference.embedded_server.app import ServerApp

if TYPE_CHECKING:
    from rl_inference.embedded_server.loop import DecodeLoop

logger = get_logger("inference.server")


def main(arguments: list[str] | None = None) -> int:
    """Run the server and return its exit code."""
    configure(role="server")
    key = os.environ.get(RUN_KEY_VARIABLE, "")
    try:
        options = parse(arguments)
        require(
            bool(key) or is_loopback(options.host),
            "server.host",
            f"a loopback address (127.0.0.1), or a run key in the environment variable {RUN_KEY_VARIABLE}",
            options.host,
        )
    except RLError as error:
        logger.error("%s", error)
        return 2
    return run(serve(options, key))


def run(server: Coroutine[Any, Any, int]) -> int:
    """Set this process up for a server, run the server and return its exit code."""
    raise_file_limit()
    # The decode thread acquires the interpreter lock a thousand times per pass; the HTTP thread must not delay it.
    sys.setswitchinterval(0.0005)
    # Passes have all sizes. For each size of a matrix product oneDNN caches a primitive and torch its description
    # (0.25 MiB each, 1024 by default).
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(server)
    if threading.active_count() > 1:  # a thread that waits for a silent trainer must not delay the exit
        logging.shutdown()
        os._exit(code)
    return code


async def serve(options: ServerOptions, key: str, on_ready: Callable[[str], object] = lambda _: None) -> int:
    """Listen, load the model, and serve until a signal, a call of `/shutdown` or a crash of the decode thread.

    Args:
        options: settings and address.
        key: run key, or an empty string for none.
        on_ready: called with the address `host:port` once requests can be served.

    Returns:
        The exit code.
    """
    events = asyncio.get_running_loop()
    ended: asyncio.Future[int] = events.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    for signum in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(signum, end, 0)
    http = ServerApp(options, key, lambda: end(0))
    connections = Connections(http.app)
    web_runner = connections.runner
    await web_runner.setup()
    watch = asyncio.create_task(connections.close_silent_connections(), name="connections")
    loop: DecodeLoop | None = None
    try:
        try:
            await web.TCPSite(web_runner, options.host, options.port).start()
        except OSError as error:
            logger.error("%s", _bind_error(options, error))
            return 1
        address = "{}:{}".format(*web_runner.addresses[0][:2])
        loading = _load(options, options.name or address, lambda _: events.call_soon_threadsafe(end, 1))
        watched: set[asyncio.Future[Any]] = {loading, ended}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            loop = loading.result()
            loop.start()
            http.serve(loop)
            logger.info("ready: http://%s serves %s on %s", address, options.spec.model_path, loop.model.device)
            on_ready(address)
        return await ended
    except RLError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    finally:
        watch.cancel()
        if loop is not None:
            await asyncio.to_thread(loop.stop)
        await web_runner.cleanup()


def _load(
    options: ServerOptions, holder: str, on_crash: Callable[[BaseException], object]
) -> asyncio.Future[DecodeLoop]:
    """Load the model in a daemon thread, so that a signal need not wait for it.

    The thread also imports torch and transformers. The port is bound, and `/health` replies, seconds before these
    imports finish.
    """
    events = asyncio.get_running_loop()
    result: asyncio.Future[DecodeLoop] = events.create_future()

    def work() -> None:
        try:
            check_model_directory(str(Path(options.spec.model_path).absolute()))  # before the slow imports
            from rl_inference.embedded_server.startup import load_decode_loop

            loop = load_decode_loop(options, holder, on_crash)
        except BaseException as error:  # noqa: BLE001 - passed to the main thread
            events.call_soon_threadsafe(result.set_exception, error)
        else:
            _freeze_garbage_collector()
            events.call_soon_threadsafe(result.set_result, loop)

    threading.Thread(target=work, name="load", daemon=True).start()
    return result


def _freeze_garbage_collector() -> None:
    """Exclude all current objects from later garbage collections.

    Imports and the model create a million objects. A full collection over them stops all generation for a quarter
    of a second.
    """
    gc.collect()
    gc.freeze()


def _bind_error(options: ServerOptions, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {options.port} of {options.host} is in use; stop the process that uses it or pass another --port."
    return f"cannot listen on {options.host}:{options.port}: {error}"


if __name__ == "__main__":
    sys.exit(main())
