"""Public names of the packages with their signatures, against the list that is kept in `public_api.txt`.

    uv run python infra/ci/public_api.py            # prints what differs, as a diff; exit code 1 if anything does
    uv run python infra/ci/public_api.py --write    # updates the list

A name is public if the `__all__` of its module has it. The sources are read and not imported.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("public_api.txt")


def public_lines() -> list[str]:
    """One line for each public name and for each public member of a public class, in order."""
    sources = sorted([*ROOT.glob("packages/*/src/*/"), *ROOT.glob("apps/src/*/")])
    loader = griffe.GriffeLoader(search_paths=[source.parent for source in sources])
    packages = [loader.load(source.name, try_relative_path=False) for source in sources]
    loader.resolve_aliases()
    exports = sorted((e for package in packages for e in _exports(package)), key=lambda e: (e[0].count("."), e[0]))
    shortest: dict[str, str] = {}
    lines: list[str] = []
    for path, found in exports:
        known = shortest.setdefault(found.canonical_path, path)
        lines += _lines(path, found) if known == path else [f"{path} is {known}"]
    return sorted(lines)


def _exports(module: griffe.Object | griffe.Alias) -> Iterator[tuple[str, griffe.Object]]:
    """Path and definition of each name in the `__all__` of a module and of those inside it."""
    for name in module.exports or ():
        member = module.members[str(name)]
        yield f"{module.path}.{name}", member.final_target if isinstance(member, griffe.Alias) else member
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _exports(inner)


def _lines(path: str, found: griffe.Object | griffe.Alias) -> Iterator[str]:
    if isinstance(found, griffe.Class):
        yield f"{path}({', '.join(map(str, found.bases))})"
        for name, member in found.members.items():
            stated = name == "__init__" and "dataclass" not in found.labels  # whose fields say it
            if stated or not name.startswith(("_", "test_")):
                yield from _lines(f"{path}.{name}", member)
    elif isinstance(found, griffe.Function):
        yield f"{path}{found.signature(return_type=True).removeprefix(found.name)}"
    elif isinstance(found, griffe.TypeAlias):
        yield f"{path} = {found.value}"
    elif isinstance(found, griffe.Attribute):
        annotation = f": {found.annotation}" if found.annotation else ""
        set_in_init = "instance-attribute" in found.labels and "class-attribute" not in found.labels
        value = f" = {found.value}" if found.value and not set_in_init else ""
        yield " ".join(f"{path}{annotation}{value}".split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the list")
    write = parser.parse_args().write
    found = "".join(f"{line}\n" for line in public_lines())
    kept = KEPT.read_text() if KEPT.exists() else ""
    changes = difflib.unified_diff(kept.splitlines(), found.splitlines(), "kept", "found", lineterm="", n=0)
    changed = [line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    print("\n".join(changed) or "no public name changed")
    if write:
        KEPT.write_text(found)
    elif changed:
        print("If this is meant: uv run python infra/ci/public_api.py --write", file=sys.stderr)
    return int(bool(changed) and not write)


if __name__ == "__main__":
    raise SystemExit(main())
