"""Program of an embedded server that runs statements before it starts, for tests that inject faults or short limits."""

from __future__ import annotations

import sys

MAIN = "import sys; from rl_inference.embedded_server.__main__ import main; sys.exit(main(sys.argv[1:]))"


def server_command(statements: str) -> tuple[str, ...]:
    """Return the command of a server that first runs Python statements, one per line."""
    return sys.executable, "-c", f"{statements}\n{MAIN}"


def server_with_constants(**constants: float) -> tuple[str, ...]:
    """Return the command of a server with other values of the constants of `embedded_server.app`."""
    lines = [f"app.{name} = {value!r}" for name, value in constants.items()]
    return server_command("\n".join(["from rl_inference.embedded_server import app", *lines]))
