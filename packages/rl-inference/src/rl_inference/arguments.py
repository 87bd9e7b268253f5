"""Further arguments of a server's command line, as somebody gave them."""

from __future__ import annotations

from collections.abc import Iterable


def overriding(arguments: Iterable[str], own: Iterable[str]) -> list[str]:
    """Those of `arguments` that name one of `own`, as command lines are read: with `_` for `-`, with a value after `=`,
    or cut short."""
    own = tuple(own)

    def named(text: str) -> bool:
        name = text.partition("=")[0].replace("_", "-")
        return name in own or (name.startswith("--") and any(each.startswith(name) for each in own))

    return [text for text in arguments if named(text)]
