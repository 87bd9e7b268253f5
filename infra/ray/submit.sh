#!/bin/bash
# A run on a Ray cluster that is there, as a job of it: its launcher runs on the head, or wherever Ray puts it.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 infra/ray/submit.sh /shared/runs/one total_steps=200
#
# The first argument is the run directory, which all nodes share, as they do the model, the data and the Python
# environment. The same command goes on with a run that was stopped. Where the cluster asks for a token, `ray job submit`
# finds it as all of Ray does (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).
set -eu
run_dir=$1
shift
exec ray job submit -- gsm8k-grpo launcher=ray allocation=embedded:d1+fsdp:d2 recover.every=20 "run_dir=$run_dir" "$@"
