"""Lazy import of the public names of a package, which keeps the import of the package cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a public name at its first use and provides `__version__`.

    Example:
        `__getattr__ = lazy_getattr(__name__, {"Engine": "engine"})` in `my_package/__init__.py` makes `from my_package
        import Engine` import `my_package.engine`.

    Args:
        package: the package's `__name__`.
        homes: module inside the package that defines each public name.
    """

    def resolve(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata  # slow to import, and rarely needed

            return metadata.version(package.replace("_", "-"))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return resolve
