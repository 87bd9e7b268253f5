"""Public names of a package that are imported at their first use, so that importing the package is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a public name at its first use and knows `__version__`.

    Example:
        `__getattr__ = lazy_getattr(__name__, {"Engine": "engine"})` in `my_package/__init__.py` makes `from my_package
        import Engine` import `my_package.engine`.

    Args:
        package: its `__name__`.
        homes: for each public name the module inside the package that holds it.
    """

    def find(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata  # not at each start of a process

            return metadata.version(package.replace("_", "-"))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
