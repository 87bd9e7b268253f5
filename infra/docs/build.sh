#!/usr/bin/env bash
# The docs as a site, for a browser: writes site/ (or the directory that is named), of which index.html is the front page.
# Whatever is wrong with a page, a dead link above all, is an error.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv run --group docs sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -c infra/docs . "${1:-site}"
