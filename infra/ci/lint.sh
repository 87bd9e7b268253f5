#!/usr/bin/env bash
# Format (also of Markdown), lint, types (strict on rl-contracts) and the dependency rule. Expects the synced workspace environment.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv run --no-sync ruff format --check .
uv run --no-sync ruff check .
uv run --no-sync rumdl check --no-cache .
uv run --no-sync mypy packages/*/src apps/src
uv run --no-sync lint-imports
