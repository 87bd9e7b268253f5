"""Name of the program at an address, for the error about a route that it does not have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

_PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "library": "Ollama", "rl": "`rl serve`"}
"""Programs by the `owned_by` of their models in `/v1/models`."""
_MAX_CHARACTERS = 40
"""Maximum length of a name, which the server chooses."""


async def identify(headers: Mapping[str, str], life_header: str, get: Callable[[str], Awaitable[Any]]) -> str:
    """Return the name of a server, such as `vLLM 0.32.0`.

    Args:
        headers: headers of a response of the server.
        life_header: header that embedded servers send.
        get: function that returns the JSON value at a path, or None if there is none.
    """
    models, about = await get("/v1/models"), await get("/version")
    version = str(about["version"]) if isinstance(about, dict) and "version" in about else ""
    try:
        owner = str(models["data"][0]["owned_by"])
    except (LookupError, TypeError):
        owner = "vllm" if version else ""
    if owner:
        return f"{_PROGRAMS.get(owner, owner)} {version}".strip()[:_MAX_CHARACTERS]
    if life_header in headers:
        return "an embedded server"
    name = headers.get("Server", "")[:_MAX_CHARACTERS]
    return f"another HTTP server ({name})" if name else "another HTTP server"
