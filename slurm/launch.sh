# shellcheck shell=bash
# What the scripts of this folder share: sourced by them, from the repository's root.
#
#   launch SCRIPT [ARGUMENT …]      run a Python file or module, one task per GPU (or CPU rank), to its end
#   run_once COMMAND …              run a short command once, where the tasks run: in the container, if any
#
# Settings, as environment variables (sbatch passes yours on):
#   VENV=.venv           the environment to activate
#   CONTAINER=           run jobs inside this image instead: a .sif file (apptainer), or an image name (pyxis)
#   MOUNTS=              more folders for a pyxis container to see, /data:/data,/scratch:/scratch
#   INTERFACE=           the network interface that reaches the other nodes, such as ib0, if there are several
#   FAILURES=3           requeue after a crash, a dead or a hung rank, so many times at most
#   SLURM=0              without SLURM: run on this machine, with the deepspeed launcher
# --dry_run among the arguments prints what would run, and runs nothing.
#
# How a job goes on: the ranks end with 75 when they were asked to stop (SIGUSR1 ahead of the time limit,
# SIGTERM on preemption), and have saved everything, unless a rank that was gone kept them from agreeing; the
# job is then requeued and continues by itself in the same run folder. Bad input (2) and Ctrl-C (130) end the
# job. Anything else is a failure, and counted. scancel ends a job for good.

CONTINUE=75
BAD_INPUT=2
INTERRUPTED=130

settings() {
    # One thread per core that a task was given; more would make the ranks of a node fight.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-}}"
    [ -n "$OMP_NUM_THREADS" ] || unset OMP_NUM_THREADS
    # Warnings of NCCL name the network interface and the peer that failed; INFO is for looking into a slow
    # start.
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    # NCCL's flight recorder: each rank keeps its last collectives, and writes them when one of them times out
    # (here) or when the run's watchdog ends it (into the run's folder). torchfrtrace reads both.
    export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_NCCL_DUMP_ON_TIMEOUT=1
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        mkdir -p "$PWD/.slurm"
        export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$PWD/.slurm/$(job_name).nccl_rank_}"
    fi
    # A switch that is busy for half a minute must not end a run of days (InfiniBand retries 2^22 x 4 us
    # = 17 s each).
    export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
    # Long runs with several shapes (training, validation, evaluation) fragment the device's memory otherwise.
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    # Both libraries cross nodes, gloo for the ranks' agreement on stopping: they must take the same network.
    if [ -n "${INTERFACE:-}" ]; then
        export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
    fi
    # Python's output line by line, so that the log is up to date.
    export PYTHONUNBUFFERED=1
}

activate() {
    if { [ -z "${CONTAINER:-}" ] || [ "${SLURM:-1}" = 0 ]; } && [ -f "${VENV:-.venv}/bin/activate" ]; then
        # shellcheck disable=SC1091
        . "${VENV:-.venv}/bin/activate"
    fi
}

# The address that the other nodes reach the first one by. Not always its name: NodeAddr may differ.
first_address() {
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | head -n 1
}

job_name() { # what scontrol calls this job
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

show() { # a command, quoted so that it can be pasted
    printf 'would run:'
    printf ' %q' "$@"
    printf '\n'
}

# Set container to the options of srun that make pyxis run a task in the image.
pyxis_options() {
    container=(--container-image="$CONTAINER" --container-workdir="$PWD")
    container+=(--container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}")
}

run_once() {
    local -a container=()
    case "${CONTAINER:-}" in
        '') "$@" ;;
        *.sif) apptainer exec "$CONTAINER" "$@" ;;
        *)
            pyxis_options
            srun --nodes=1 --ntasks=1 --export=ALL "${container[@]}" "$@"
            ;;
    esac
}

# Set command to what a job runs: the script's arguments, one task for each rank.
srun_command() {
    # Neighbours share a node: ranks are counted node by node. Even if sbatch was told to pass no environment
    # on (--export=NONE), the tasks need this shell's: MASTER_ADDR, VENV's path. Rank 0 may end last, with
    # wandb to close: some sites end the others' node after a while (WaitTime), and --wait=0 does not.
    command=(srun --kill-on-bad-exit=1 --wait=0 --cpu-bind=cores --distribution=block:block --export=ALL)
    local -a container=()
    # Since SLURM 22.05 srun does not take it over from the job.
    local cpus=${SLURM_CPUS_PER_TASK:-$(directive cpus-per-task)}
    [ -z "$cpus" ] || command+=(--cpus-per-task="$cpus")
    case "${CONTAINER:-}" in
        '') ;;
        *.sif) command+=(apptainer exec --nv "$CONTAINER") ;;
        *)
            pyxis_options
            command+=("${container[@]}")
            ;;
    esac
    command+=(bash slurm/task.sh "$@")
}

launch() {
    local dry_run=0 argument
    local -a arguments=() command=()
    for argument in "$@"; do
        if [ "$argument" = --dry_run ]; then dry_run=1; else arguments+=("$argument"); fi
    done
    settings
    activate
    if [ "${SLURM:-1}" = 0 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
        local -a local_command=(deepspeed)
        # What runs in one task runs in one process here; the launcher takes a module by name.
        if [ "$(directive ntasks)" = 1 ]; then
            local_command=(python -m)
        elif [ "${1##*.}" != py ]; then
            local_command+=(--module)
        fi
        local_command+=("${arguments[@]}")
        if [ "${SLURM:-1}" != 0 ] && [ "$dry_run" = 0 ]; then
            echo "error: SLURM: this is not a job; submit it: sbatch slurm/NAME.sh …, or run it here:" \
                "SLURM=0 bash slurm/NAME.sh …" >&2
            exit "$BAD_INPUT"
        fi
        if [ "$dry_run" = 1 ]; then
            show "${local_command[@]}"
            srun_command "${arguments[@]}"
            echo "in a job of $(directive nodes) nodes, $(directive "ntasks[a-z-]*") tasks each:"
            show "${command[@]}"
            return 0
        fi
        exec "${local_command[@]}"
    fi

    # The rendezvous: a port of the job's own, so that two jobs on a node do not meet, and below those that
    # Linux gives to outgoing connections (32768 and up).
    MASTER_ADDR=$(first_address)
    MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    export MASTER_ADDR MASTER_PORT
    srun_command "${arguments[@]}"
    if [ "$dry_run" = 1 ]; then
        echo "MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT"
        show "${command[@]}"
        return 0
    fi

    # The status of the task that failed first: what srun returns is the largest, and the tasks that it killed
    # have one.
    FIRST_FAILURE="$PWD/.slurm/$(job_name).first"
    export FIRST_FAILURE
    local failures_file="$PWD/.slurm/$(job_name).failures"
    mkdir -p "$PWD/.slurm"
    rm -rf "$FIRST_FAILURE"
    # A job that starts for the first time has not failed: the count is that of an older job with its number.
    [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || rm -f "$failures_file"
    local cancelled=0 status=0 failures=0
    # scancel (and the end of a grace period) reaches this shell too: the tasks save, and the job is over.
    trap cancelled=1 TERM
    "${command[@]}" &
    local srun=$!
    while :; do
        status=0
        wait "$srun" || status=$?
        kill -0 "$srun" 2>/dev/null || break # a trapped signal ended wait, not srun
    done
    if [ "$status" != 0 ] && [ -f "$FIRST_FAILURE/status" ]; then
        status=$(<"$FIRST_FAILURE/status")
    fi
    rm -rf "$FIRST_FAILURE"
    if [ "$status" = 0 ]; then
        rm -f "$failures_file"
        return 0
    fi
    end_if_cancelled() {
        [ "$cancelled" = 1 ] || return 0
        echo "job $(job_name): cancelled; the same sbatch line continues the run"
        exit "$status"
    }
    end_if_cancelled
    case "$status" in
        "$BAD_INPUT" | "$INTERRUPTED") exit "$status" ;;
        "$CONTINUE") echo "job $(job_name): stopped; requeued, to continue by itself" ;;
        *)
            failures=$(($(cat "$failures_file" 2>/dev/null || echo 0) + 1))
            echo "$failures" >"$failures_file"
            if [ "$failures" -gt "${FAILURES:-3}" ]; then
                echo "error: FAILURES: job $(job_name) failed $failures times, the last with status" \
                    "$status; the limit of ${FAILURES:-3} requeues is reached. The same sbatch line" \
                    "continues the run; FAILURES=N allows more"
                rm -f "$failures_file"
                exit "$status"
            fi
            echo "job $(job_name): failed with exit status $status; requeued," \
                "failure $failures of at most ${FAILURES:-3}"
            ;;
    esac
    # SLURM requeues a cancelled job, too, if it is asked to.
    end_if_cancelled
    scontrol requeue "$(job_name)"
    # SLURM ends this shell; a job that may not be requeued (--no-requeue) ends by itself.
    sleep 30
    exit "$status"
}

# The value of an #SBATCH line of the script that sourced this file, for --dry_run outside of a job.
directive() {
    sed -n "s/^#SBATCH --$1=\([^ ]*\).*/\1/p" "${BASH_SOURCE[-1]}" | head -n 1
}
