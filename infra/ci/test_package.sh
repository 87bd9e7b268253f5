#!/usr/bin/env bash
# Test one package in an environment without the other packages of the workspace. An import that works only in the full
# workspace fails here.
#
#   infra/ci/test_package.sh rl-rewards
#   PYTHON=3.13 infra/ci/test_package.sh rl-launchers --all -k signals
#   RESOLUTION=lowest-direct infra/ci/test_package.sh rl-rewards    # the lowest declared versions; or highest
#   UV_TORCH_BACKEND=cpu infra/ci/test_package.sh rl-trainers       # with a build of torch for CPUs
#
# Runs the quick tests. Further arguments go to pytest. The environment is .venv-alone; .venv does not change.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ $# -lt 1 ]; then
    echo "usage: $0 PACKAGE [PYTEST ARGUMENTS]" >&2
    exit 2
fi
package=$1
shift
folder=packages/$package
[ "$package" = rl-apps ] && folder=apps
if [ ! -f "$folder/pyproject.toml" ]; then
    names=(packages/*)
    echo "$0: there is no package '$package'; choose one of: ${names[*]#packages/} rl-apps" >&2
    exit 2
fi

environment=${ALONE_ENVIRONMENT:-.venv-alone}
export UV_PROJECT_ENVIRONMENT=$environment
unset VIRTUAL_ENV
if [ -n "${RESOLUTION:-}${UV_TORCH_BACKEND:-}" ]; then # `uv sync` installs only the versions and builds of the lock
    versions=(--resolution "${RESOLUTION:-}")
    if [ -z "${RESOLUTION:-}" ]; then
        locked=$(mktemp)
        trap 'rm -f "$locked"' EXIT
        uv export --quiet --locked --no-hashes --no-emit-workspace --package "$package" --output-file "$locked"
        versions=(--constraints "$locked")
    fi
    uv venv --quiet --clear ${PYTHON:+--python "$PYTHON"} "$environment"
    uv pip install --quiet --python "$environment" "${versions[@]}" \
        --editable "$folder" --group "$folder/pyproject.toml:dev"
else
    if [ -d .venv ] && [ -z "${PYTHON:-}" ]; then
        # Start with hard links to the installed and compiled files; uv removes those that this package does not need.
        rm -rf "$environment"
        cp -al .venv "$environment"
    fi
    uv sync --quiet --locked --package "$package" --reinstall-package "$package" ${PYTHON:+--python "$PYTHON"}
fi

module=${package//-/_}
uv run --no-sync python -c "import $module"
if [ -z "$(find "$folder/tests" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
    echo "$package: the import works; the package has no tests yet"
    exit 0
fi
uv run --no-sync python -m pytest "$folder/tests" -q "$@"
