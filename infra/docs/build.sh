#!/usr/bin/env bash
# Build the documentation site in site/, or in the directory given as an argument. index.html is its front page.
# Every warning is an error, for example a dead link.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv run --group docs sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -c infra/docs . "${1:-site}"
