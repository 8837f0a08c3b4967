#!/usr/bin/env bash
# One task of a job: gives a Python script the variables that a launcher would, from those of SLURM.
#
#   srun bash slurm/task.sh SCRIPT [ARGUMENT …]        (slurm/launch.sh does)
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
# "4(x2),3" is four tasks on each of two nodes and three on the next; this node's number is at its position.
LOCAL_WORLD_SIZE=$(
    node=0
    IFS=,
    for part in $SLURM_STEP_TASKS_PER_NODE; do
        count=${part%%(*}
        times=1
        case "$part" in *x*) times=${part##*x} && times=${times%)} ;; esac
        node=$((node + times))
        if [ "$SLURM_NODEID" -lt "$node" ]; then
            echo "$count"
            break
        fi
    done
)
export LOCAL_WORLD_SIZE LOCAL_SIZE="$LOCAL_WORLD_SIZE"
# Signals that SLURM sends to a task reach this shell too. It stays, and the script decides.
trap : USR1 TERM INT
if [ "${1##*.}" = py ]; then python "$@" & else python -m "$@" & fi
child=$!
while :; do
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || break # a trapped signal ended wait, not the script
done
# mkdir succeeds for one task only: the first that failed.
if [ "$status" != 0 ] && [ -n "${FIRST_FAILURE:-}" ] && mkdir "$FIRST_FAILURE" 2>/dev/null; then
    echo "$status" >"$FIRST_FAILURE/status"
fi
exit "$status"
