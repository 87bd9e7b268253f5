#!/usr/bin/env bash
# Install the commands for a machine without a GPU, on Linux: everything in the versions of uv.lock, but torch from
# PyTorch's index of builds for CPUs, which brings no CUDA libraries.
#
#   infra/install_cpu.sh              # then: uv run --no-sync gsm8k-grpo
#   infra/install_cpu.sh ray plot     # with extras of rl-apps
#   infra/install_cpu.sh --workspace  # everything that the tests need
#
# The environment is .venv, or $UV_PROJECT_ENVIRONMENT. `uv sync`, and `uv run` without --no-sync, put the lock's own
# torch back, with CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scope=(--package rl-apps)
wanted=(--editable "apps[$(IFS=,; echo "$*")]")
if [ "${1:-}" = --workspace ]; then
    scope=()
    wanted=(--group dev)
else
    for extra in "$@"; do scope+=(--extra "$extra"); done
fi
environment=${UV_PROJECT_ENVIRONMENT:-.venv}
locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
uv export --quiet --frozen --no-hashes --no-emit-workspace "${scope[@]}" --output-file "$locked"

uv venv --quiet --allow-existing "$environment"
install=(uv pip install --python "$environment" --constraints "$locked")
# torch comes first and alone, so that everything else is from where the lock has it; and then it stays that build
"${install[@]}" --torch-backend cpu torch
uv pip freeze --python "$environment" | grep '^torch==' >>"$locked"
"${install[@]}" "${wanted[@]}"

if found=$(uv pip freeze --python "$environment" | grep -E '^(nvidia|cuda|triton)'); then
    echo "$0: expected an environment without CUDA libraries, found" $found "in $environment; remove it and try again" >&2
    exit 1
fi
