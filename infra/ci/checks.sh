#!/usr/bin/env bash
# What must hold for every file: format, lint, types, and the rule that packages import rl_contracts only.
#
#   infra/ci/checks.sh          # check
#   infra/ci/checks.sh --fix    # repair format and lint first
#
# All four run even if one fails; the exit code is 1 if any did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

if [ "${1:-}" = --fix ]; then
    uv run ruff check --fix --quiet .
    uv run ruff format --quiet .
fi

failed=()
check() {
    echo "== $*"
    uv run "$@" || failed+=("$1")
}
check ruff format --check .
check ruff check .
check mypy packages/*/src apps/src
check lint-imports

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
