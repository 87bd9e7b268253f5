#!/usr/bin/env bash
# Format, lint, types (strict on rl-contracts) and the dependency rule. Expects the synced workspace environment.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv run --no-sync ruff format --check .
uv run --no-sync ruff check .
for source in packages/*/src apps/src; do
  uv run --no-sync mypy "$source"
done
uv run --no-sync lint-imports
