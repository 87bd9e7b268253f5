#!/usr/bin/env bash
# Build the documentation website in DIRECTORY (default: site); open its index.html. Usage: infra/docs/build.sh [DIRECTORY]
# Each warning of Sphinx, for example about a dead link, fails the build.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv run --group docs sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -c infra/docs . "${1:-site}"
