#!/usr/bin/env bash
# Run gsm8k-grpo with its default settings, and check that it learned.
#
#   infra/ci/learning_check.sh                 # seed 1
#   infra/ci/learning_check.sh 3 total_steps=80
#
# The first argument is the seed; further arguments are settings. The run directory is runs/ci-demo/seed-<n>.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

seed=${1:-1}
shift || true
run_dir=runs/ci-demo/seed-$seed
rm -rf "$run_dir"
uv run --locked --no-compile-bytecode --package rl-apps gsm8k-grpo "seed=$seed" "run_dir=$run_dir" "$@"
uv run --no-sync python infra/ci/check_learning.py "$run_dir"
