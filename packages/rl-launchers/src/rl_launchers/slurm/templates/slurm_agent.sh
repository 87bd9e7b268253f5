#!/bin/bash
# Runs the agent of a node, and tells the job what reaches this node only.
#   bash slurm_agent.sh RESCUE LOG COMMAND...
# RESCUE=yes: where the first node is lost, with the launcher, start the job again.
# LOG: what is said is added to it.
rescue=$1
exec >> "$2" 2>&1
shift 2
# A preemption that comes in a while is told to the nodes, and not to the script of the job.
trap 'again=yes; scancel --quiet --batch --signal=USR1 "$SLURM_JOB_ID" 2>/dev/null' TERM
"$@" &
agent=$!
again=yes
while [ "$again" ]; do again=; wait "$agent"; code=$?; done
[ "$code" = 3 ] && [ "$rescue" = yes ] || exit "$code"

# The launcher is gone. If that is because its node is lost, Slurm leaves the job to the other nodes (--no-kill), where
# nothing would happen any more.
while :; do
    job=$(scontrol show job -o "$SLURM_JOB_ID" | head -n 1)
    [[ -z $job || $job == *" JobState=RUNNING "* ]] || exit "$code"
    nodes=$(scontrol show hostnames "$(grep -oP ' NodeList=\K\S+' <<< "$job")")
    first=$(grep -oP ' BatchHost=\K\S+' <<< "$job")
    if [ "$nodes" ] && ! grep -qx "$first" <<< "$nodes"; then
        echo "node $first was lost with the launcher; the job is started again"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    fi
    sleep 5
done
