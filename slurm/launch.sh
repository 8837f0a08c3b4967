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
#   FAILURES=3           requeue so many times in a row, at most, without a new checkpoint
#   JOB_FILES=           the folder of the job's own files, which all nodes must see: by default .slurm in the
#                        folder of the job's log
#   SLURM=0              without SLURM: run on this machine, with the deepspeed launcher
# --dry_run among the arguments prints what would run, and runs nothing.
#
# How a job continues: the ranks end with 75 when they were asked to stop (SIGUSR1 ahead of the time limit,
# SIGTERM on preemption), and have saved everything, unless a rank that was gone kept them from agreeing. The
# job is then requeued and continues automatically in the same run folder; it is also requeued after a crash.
# Starts without a new checkpoint are counted, and their number is limited. Bad input (2), a training that
# diverged (3) and Ctrl-C (130) end the job. scancel ends a job for good.

CONTINUE=75
BAD_INPUT=2
DIVERGED=3
INTERRUPTED=130
# The arguments of the script that sources this file.
given=("$@")

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

check_variables() {
    local problem=''
    [[ "${FAILURES:-3}" =~ ^[0-9]+$ ]] || problem="FAILURES: '$FAILURES' is not valid; give a whole number"
    if [ -n "${CONTAINER:-}" ] && [ "${SLURM:-1}" != 0 ]; then
        [[ "$CONTAINER" != *.sif || -f "$CONTAINER" ]] || problem="CONTAINER: no file '$CONTAINER'; give an image"
    elif [ -n "${VENV:-}" ] && [ ! -f "$VENV/bin/activate" ]; then
        problem="VENV: '$VENV' has no bin/activate; give the folder of an environment"
    fi
    [ -z "$problem" ] || { echo "error: $problem" >&2; exit "$BAD_INPUT"; }
}

activate() {
    check_variables
    if { [ -z "${CONTAINER:-}" ] || [ "${SLURM:-1}" = 0 ]; } && [ -f "${VENV:-.venv}/bin/activate" ]; then
        # shellcheck disable=SC1091
        . "${VENV:-.venv}/bin/activate"
    fi
}

# Run a command again while SLURM's controller does not answer: a restart of it must not end a job of days.
retry() {
    local try errors status
    errors=$(mktemp) || errors=/dev/null
    for try in 1 2 3 4 5; do
        status=0
        "$@" 2>"$errors" || status=$?
        cat "$errors" >&2
        [ "$status" != 0 ] && [ "$try" != 5 ] && [ "${cancelled:-0}" = 0 ] || break
        grep -qiE 'contact|connect|timed? ?out|zero bytes' "$errors" || break
        sleep "${RETRY_SECONDS:-15}"
    done
    [ "$errors" = /dev/null ] || rm -f "$errors"
    return "$status"
}

# The address that the other nodes reach the first one by. Not always its name: NodeAddr may differ. The
# loopback address on a single node.
first_address() {
    [ "${SLURM_JOB_NUM_NODES:-2}" -gt 1 ] || { echo 127.0.0.1; return; }
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    retry scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | head -n 1
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
    container+=(--container-mounts="$PWD:$PWD${files:+,$files:$files}${MOUNTS:+,$MOUNTS}")
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
        *.sif) command+=(apptainer exec --nv ${files:+--bind "$files"} "$CONTAINER") ;;
        *)
            pyxis_options
            command+=("${container[@]}")
            ;;
    esac
    command+=(bash slurm/task.sh "$@")
}

record() { # a field of the job's record
    sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$job_record" | head -n 1
}

job_script() { # its path, from where the job was submitted; there may be spaces in it
    local path
    path=$(sed -n 's/.* Command=\(.*\) WorkDir=.*/\1/p' <<<"$job_record")
    path=${path%" ${given[*]}"} # which the record has too
    echo "${path#"${SLURM_SUBMIT_DIR:-$PWD}"/}"
}

# Set files to the folder of the job's own files, and make it. It is next to the log, since that must be on a
# file system that all nodes share; the repository may be read-only.
make_job_files() {
    local log
    log=$(readlink "/proc/$$/fd/1")
    [ -f "$log" ] || log=$PWD/log
    files=${JOB_FILES:-${log%/*}/.slurm}
    if ! { mkdir -p "$files" && [ -w "$files" ]; } 2>/dev/null; then
        echo "error: JOB_FILES: the job's own files cannot be written to $files; give a folder that all" \
            "nodes can write to: JOB_FILES=FOLDER sbatch …" >&2
        exit "$BAD_INPUT"
    fi
    files=$(cd "$files" && pwd)
}

# SLURM would ask the ranks to stop as soon as they have started: it warns up to a minute early. Of --signal on
# sbatch's command line a job learns nothing, of the variable it does.
check_time_limit() {
    local signal=${SBATCH_SIGNAL:-$(directive signal)} limit seconds=0
    limit=$(record TimeLimit)
    [[ "$signal" == *@* && "$limit" =~ ^(([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)$ ]] || return 0
    limit=("0${BASH_REMATCH[2]}" "${BASH_REMATCH[@]:3}")
    seconds=$((10#${limit[0]} * 86400 + 10#${limit[1]} * 3600 + 10#${limit[2]} * 60 + 10#${limit[3]}))
    if [ "$seconds" -le $((${signal##*@} + 60)) ]; then
        echo "error: --time: the time limit of $seconds s leaves no time ahead of the warning, up to" \
            "$((${signal##*@} + 60)) s before it (--signal=$signal); give more time, or a shorter warning:" \
            "SBATCH_SIGNAL=USR1@60 sbatch …" >&2
        exit "$BAD_INPUT"
    fi
}

# The line that submits this job, for the ranks to print with more steps: what SLURM knows of the job, where
# that is not what the script asks for. Empty for a script that does not pass its arguments on.
submit_line() { # ARGUMENT …: of launch
    local name option value tasks=$((${SLURM_JOB_NUM_NODES:-1} * ${SLURM_NTASKS_PER_NODE:-0}))
    [[ "$*" == *"${given[*]}" ]] || return 0
    printf 'env '
    for name in DATA VENV CONTAINER MOUNTS INTERFACE FAILURES JOB_FILES SBATCH_SIGNAL; do
        [ -z "${!name:-}" ] || printf '%s=%q ' "$name" "${!name}"
    done
    printf 'sbatch '
    while read -r option value; do
        [ -z "$value" ] || [ "$value" = "$(directive "$option")" ] || printf -- '--%s=%q ' "$option" "$value"
    done <<END
nodes ${SLURM_JOB_NUM_NODES:-}
ntasks-per-node ${SLURM_NTASKS_PER_NODE:-}
ntasks ${SLURM_NTASKS:+$([ "$SLURM_NTASKS" = "$tasks" ] || echo "$SLURM_NTASKS")}
cpus-per-task ${SLURM_CPUS_PER_TASK:-}
gres $(record TresPerNode | sed 's/^gres.//' | grep . || echo none)
time $(record TimeLimit)
partition $(record Partition)
account $(record Account | sed 's/(null)//')
END
    [ "${SLURM_SUBMIT_DIR:-$PWD}" = "$PWD" ] || printf -- '--chdir=%q ' "$PWD"
    printf '%q ' "$(job_script)" "${given[@]}"
}

# Starts since the last new checkpoint, or a crash after it: rank 0 removes the file when it has saved a new
# step.
failures() {
    cat "$FAILURES_FILE" 2>/dev/null || echo 0
}

# Called with what happened when a job has failed and is not requeued; study.sh has another.
failed_for_good() { :; }

limit_failures() { # HOW: end the job, which has ended like that, if it has failed too often
    [ "$(failures)" -gt "${FAILURES:-3}" ] || return 0
    echo "error: FAILURES: job $(job_name) $1: failure $(failures) since the last new checkpoint, where" \
        "FAILURES allows ${FAILURES:-3} requeues. The same sbatch line continues the run; FAILURES=N allows" \
        "more"
    rm -f "$FAILURES_FILE"
    failed_for_good "$1"
    exit "$status"
}

end_if_cancelled() {
    [ "$cancelled" = 1 ] || return 0
    echo "job $(job_name): ended by SLURM (scancel, or a node that failed); where SLURM does not requeue" \
        "it, the same sbatch line continues the run"
    exit "$status"
}

launch() {
    local dry_run=0 argument files=''
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

    local job_record
    # Without it, the time limit is not checked and the ranks do not print how to continue.
    job_record=" $(retry scontrol show job -o "$SLURM_JOB_ID" || true)"
    check_time_limit
    # The rendezvous: a port of the job's own, so that two jobs on a node do not meet, and below those that
    # Linux gives to outgoing connections (32768 and up). Another at each start, since one may be taken.
    MASTER_ADDR=$(first_address)
    MASTER_PORT=$((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))
    export MASTER_ADDR MASTER_PORT
    [ "$dry_run" = 1 ] || make_job_files
    srun_command "${arguments[@]}"
    if [ "$dry_run" = 1 ]; then
        echo "MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT"
        show "${command[@]}"
        return 0
    fi

    # FIRST_FAILURE: the status of the task that failed first. What srun returns is the largest, and the tasks
    # that it killed have one.
    local job="$files/$(job_name)"
    export FIRST_FAILURE="$job.first" FAILURES_FILE="$job.failures"
    export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$job.nccl_rank_}"
    SUBMIT_LINE=$([ "$job_record" = " " ] || submit_line "${arguments[@]}")
    export SUBMIT_LINE
    rm -rf "$FIRST_FAILURE"
    # A job that starts for the first time has not failed: the count is that of an older job with its number.
    [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || rm -f "$FAILURES_FILE"
    local cancelled=0 status=1 how="lost its node"
    limit_failures "$how"
    echo $(($(failures) + 1)) >"$FAILURES_FILE"
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
        rm -f "$FAILURES_FILE"
        return 0
    fi
    end_if_cancelled
    case "$status" in
        "$BAD_INPUT" | "$DIVERGED" | "$INTERRUPTED")
            rm -f "$FAILURES_FILE"
            [ "$status" = "$INTERRUPTED" ] || failed_for_good "failed with exit status $status"
            exit "$status"
            ;;
        "$CONTINUE") how="stopped" ;;
        *)
            how="failed with exit status $status"
            [ -f "$FAILURES_FILE" ] || echo 1 >"$FAILURES_FILE"
            ;;
    esac
    limit_failures "$how"
    if [ -f "$FAILURES_FILE" ]; then
        echo "job $(job_name): $how; requeued, failure $(failures) of at most ${FAILURES:-3}" \
            "since the last new checkpoint"
    else
        echo "job $(job_name): $how; requeued, to continue automatically"
    fi
    # SLURM also requeues a cancelled job, if it is asked to.
    end_if_cancelled
    if retry scontrol requeue "$(job_name)"; then
        sleep 30 # SLURM ends this shell
    else
        end_if_cancelled
        echo "job $(job_name): SLURM does not requeue it (see above, or --no-requeue); the same sbatch line continues the run"
    fi
    exit "$status"
}

# The value of an #SBATCH line of the script that sourced this file, for --dry_run outside of a job.
directive() {
    sed -n "s/^#SBATCH --$1=\([^ ]*\).*/\1/p" "${BASH_SOURCE[-1]}" | head -n 1
}
