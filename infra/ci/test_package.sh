#!/usr/bin/env bash
# Test one package in an environment that holds that package alone, so that an import which only works in the full
# workspace fails here.
#
#   infra/ci/test_package.sh rl-rewards
#   PYTHON=3.13 infra/ci/test_package.sh rl-launchers --all -k signals
#   RESOLUTION=lowest-direct infra/ci/test_package.sh rl-rewards    # the lowest versions that it declares; or highest
#   UV_TORCH_BACKEND=cpu infra/ci/test_package.sh rl-trainers       # with a build of torch for CPUs
#
# Runs the quick tests. Further arguments go to pytest. The environment is .venv-alone; your own .venv is left as it is.
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
    echo "$0: no package is called '$package'; there are: ${names[*]#packages/} rl-apps" >&2
    exit 2
fi

environment=${ALONE_ENVIRONMENT:-.venv-alone}
export UV_PROJECT_ENVIRONMENT=$environment
unset VIRTUAL_ENV
if [ -n "${RESOLUTION:-}${UV_TORCH_BACKEND:-}" ]; then # `uv sync` knows the versions and builds of the lock alone
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
        # Begin with links to what is installed and compiled already; uv takes away what this package does not ask for.
        rm -rf "$environment"
        cp -al .venv "$environment"
    fi
    uv sync --quiet --locked --package "$package" --reinstall-package "$package" ${PYTHON:+--python "$PYTHON"}
fi

module=${package//-/_}
uv run --no-sync python -c "import $module"
if [ -z "$(find "$folder/tests" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
    echo "$package: can be imported alone; it has no tests yet"
    exit 0
fi
uv run --no-sync python -m pytest "$folder/tests" -q "$@"
