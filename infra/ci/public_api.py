"""Compare the public names of the packages, with their signatures, with the list in `public_api.txt`.

    uv run python infra/ci/public_api.py            # prints the differences; exit code 1 if there are any
    uv run python infra/ci/public_api.py --write    # updates the list

A name is public if it is in the `__all__` of its module. The script parses the sources and does not import them.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("public_api.txt")


def public_lines() -> list[str]:
    """Return a sorted line for each public name and each public member of a public class."""
    sources = sorted([*ROOT.glob("packages/*/src/*/"), *ROOT.glob("apps/src/*/")])
    loader = griffe.GriffeLoader(search_paths=[source.parent for source in sources])
    packages = [loader.load(source.name, try_relative_path=False) for source in sources]
    loader.resolve_aliases()
    exports = sorted((e for package in packages for e in _exports(package)), key=lambda e: (e[0].count("."), e[0]))
    shortest: dict[str, str] = {}
    lines: list[str] = []
    for path, definition in exports:
        first_path = shortest.setdefault(definition.canonical_path, path)
        lines += _lines(path, definition) if first_path == path else [f"{path} is {first_path}"]
    return sorted(lines)


def _exports(module: griffe.Object | griffe.Alias) -> Iterator[tuple[str, griffe.Object]]:
    """Yield path and definition of each name in the `__all__` of a module and its submodules."""
    for name in module.exports or ():
        member = module.members[str(name)]
        yield f"{module.path}.{name}", member.final_target if isinstance(member, griffe.Alias) else member
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _exports(inner)


def _lines(path: str, definition: griffe.Object | griffe.Alias) -> Iterator[str]:
    if isinstance(definition, griffe.Class):
        yield f"{path}({', '.join(map(str, definition.bases))})"
        for name, member in definition.members.items():
            # the fields of a dataclass define its __init__
            is_constructor = name == "__init__" and "dataclass" not in definition.labels
            if is_constructor or not name.startswith(("_", "test_")):
                yield from _lines(f"{path}.{name}", member)
    elif isinstance(definition, griffe.Function):
        yield f"{path}{definition.signature(return_type=True).removeprefix(definition.name)}"
    elif isinstance(definition, griffe.TypeAlias):
        yield f"{path} = {definition.value}"
    elif isinstance(definition, griffe.Attribute):
        annotation = f": {definition.annotation}" if definition.annotation else ""
        set_in_init = "instance-attribute" in definition.labels and "class-attribute" not in definition.labels
        value = f" = {definition.value}" if definition.value and not set_in_init else ""
        yield " ".join(f"{path}{annotation}{value}".split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the list")
    write = parser.parse_args().write
    current = "".join(f"{line}\n" for line in public_lines())
    listed = LIST.read_text() if LIST.exists() else ""
    changes = difflib.unified_diff(listed.splitlines(), current.splitlines(), "listed", "current", lineterm="", n=0)
    changed = [line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    print("\n".join(changed) or "no public name changed")
    if write:
        LIST.write_text(current)
    elif changed:
        print("If this change is intended: uv run python infra/ci/public_api.py --write", file=sys.stderr)
    return int(bool(changed) and not write)


if __name__ == "__main__":
    raise SystemExit(main())
