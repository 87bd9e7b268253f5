#!/bin/bash
# Submit a run as a job of an existing Ray cluster. Ray chooses the node of the launcher, usually the head.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 infra/ray/submit.sh /shared/runs/one total_steps=200
#
# The first argument is the run directory. All nodes must share it, the model, the data and the Python environment. The
# same command resumes a stopped run. If the cluster needs a token, set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.
set -eu
run_dir=$1
shift
exec ray job submit -- gsm8k-grpo launcher=ray allocation=embedded:d1+fsdp:d2 recover.every=20 "run_dir=$run_dir" "$@"
