#!/usr/bin/env bash
# Format (also of Markdown), lint, types (strict on rl-contracts), import rules, folder sizes, public names, language, and declared
# dependencies. Expects the synced workspace environment.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv run --no-sync ruff format --check .
uv run --no-sync ruff check .
uv run --no-sync rumdl check --no-cache .
uv run --no-sync mypy --num-workers 2 packages/*/src apps/src infra/ci/typed_program.py
uv run --no-sync basedpyright --level error infra/ci/typed_program.py
uv run --no-sync lint-imports
uv run --no-sync python infra/ci/folder_sizes.py
uv run --no-sync python infra/ci/public_api.py
uv run --no-sync python infra/ci/lint_language.py
uv run --no-sync zizmor --offline --quiet .github
for package in packages/* apps; do # what is exempt, and why, stands in each pyproject.toml; tests import what is for tests
  (cd "$package" && uv run --no-sync deptry src && uv run --no-sync deptry src tests --ignore DEP002,DEP004)
done
