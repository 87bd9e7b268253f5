#!/usr/bin/env bash
# Test one package in an environment that holds that package alone, so that an import which only works in the full
# workspace fails here.
#
#   infra/ci/test_package.sh rl-rewards
#   PYTHON=3.13 infra/ci/test_package.sh rl-launchers --all -k signals
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
if [ -d .venv ] && [ -z "${PYTHON:-}" ]; then
    # Begin with links to what is installed and compiled already; uv takes away what this package does not ask for.
    rm -rf "$environment"
    cp -al .venv "$environment"
fi
export UV_PROJECT_ENVIRONMENT=$environment
unset VIRTUAL_ENV
uv sync --quiet --locked --package "$package" --reinstall-package "$package" ${PYTHON:+--python "$PYTHON"}

module=${package//-/_}
uv run --no-sync python -c "import $module"
if [ -z "$(find "$folder/tests" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
    echo "$package: can be imported alone; it has no tests yet"
    exit 0
fi
uv run --no-sync python -m pytest "$folder/tests" -q "$@"
