#!/bin/bash
# Runs the agent of a node, and forwards signals that reach only this node to the job.
#   bash slurm_agent.sh RESCUE LOG COMMAND...
# RESCUE=yes: requeue the job if its first node is lost together with the launcher.
# LOG: file to which all output is appended.
rescue=$1
exec >> "$2" 2>&1
shift 2
# Slurm announces a preemption with SIGTERM to the steps on the nodes, but not to the script of the job.
trap 'again=yes; scancel --quiet --batch --signal=USR1 "$SLURM_JOB_ID" 2>/dev/null' TERM
"$@" &
agent=$!
again=yes
while [ "$again" ]; do again=; wait "$agent"; code=$?; done
[ "$code" = 3 ] && [ "$rescue" = yes ] || exit "$code"

# The launcher is gone. If its node is lost, Slurm keeps the job running on the other nodes (--no-kill), without
# progress.
while :; do
    job=$(scontrol show job -o "$SLURM_JOB_ID" | head -n 1)
    [[ -z $job || $job == *" JobState=RUNNING "* ]] || exit "$code"
    nodes=$(scontrol show hostnames "$(grep -oP ' NodeList=\K\S+' <<< "$job")")
    first=$(grep -oP ' BatchHost=\K\S+' <<< "$job")
    if [ "$nodes" ] && ! grep -qx "$first" <<< "$nodes"; then
        echo "node $first was lost with the launcher; requeueing the job"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    fi
    sleep 5
done
