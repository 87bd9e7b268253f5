#!/usr/bin/env bash
# Install the commands on a Linux machine without a GPU. All packages have the versions of uv.lock. torch is PyTorch's
# CPU build of that version, which needs no CUDA libraries.
#
#   infra/install_cpu.sh              # then: uv run --no-sync gsm8k-grpo
#   infra/install_cpu.sh ray plot     # with extras of rl-apps
#   infra/install_cpu.sh --workspace  # everything that the tests need
#
# The environment is .venv, or $UV_PROJECT_ENVIRONMENT. `uv sync`, and `uv run` without --no-sync, install the torch of
# the lock file again, with CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scope=(--package rl-apps)
packages=(--editable "apps[$(IFS=,; echo "$*")]")
if [ "${1:-}" = --workspace ]; then
    scope=()
    packages=(--group dev)
else
    for extra in "$@"; do scope+=(--extra "$extra"); done
fi
environment=${UV_PROJECT_ENVIRONMENT:-.venv}
locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
uv export --quiet --frozen --no-hashes --no-emit-workspace "${scope[@]}" --output-file "$locked"

uv venv --quiet --allow-existing "$environment"
install=(uv pip install --python "$environment" --constraints "$locked")
# Install torch separately, so that only torch comes from PyTorch's index; then pin this build for the other packages.
"${install[@]}" --torch-backend cpu torch
uv pip freeze --python "$environment" | grep '^torch==' >>"$locked"
"${install[@]}" "${packages[@]}"

if cuda=$(uv pip freeze --python "$environment" | grep -E '^(nvidia|cuda|triton)'); then
    echo "$0: expected an environment without CUDA libraries, found" $cuda "in $environment; remove it and try again" >&2
    exit 1
fi
