"""Documentation pages, as paths relative to the root of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "apps/README.md", "infra/README.md")
    for path in ROOT.glob(pattern)
)
