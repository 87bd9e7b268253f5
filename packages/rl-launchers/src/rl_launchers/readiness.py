"""Whether a worker answers its readiness check, with the standard library alone."""

from __future__ import annotations

import http.client


def probe(host: str, port: int, path: str, timeout: float = 1.0) -> str | None:
    """Ask `http://host:port/path` once, past any proxy.

    Args:
        host: address of the worker.
        port: its port.
        path: of the check.
        timeout: seconds without an answer after which it counts as none.

    Returns:
        None if it answered 200, else what happened instead, in words.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return None if status == http.client.OK else f"it answered {status}"
