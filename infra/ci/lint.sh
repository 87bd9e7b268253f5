#!/usr/bin/env bash
# Check format (Python and Markdown), lint, types (strict in rl-contracts), import rules, folder sizes, public names,
# language, workflows and declared dependencies. Needs the workspace environment of `uv sync`.
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
# Each pyproject.toml lists its exemptions with reasons. Tests may import dependencies of the dev group.
for package in packages/* apps; do
  (cd "$package" && uv run --no-sync deptry src && uv run --no-sync deptry src tests --ignore DEP002,DEP004)
done
