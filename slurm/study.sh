#!/usr/bin/env bash
# The runs of a study (pretrain/studies/, docs/studies.md), one array task each.
#
#   head-schedules study run direction --slurm              # submits this script with the right array
#   sbatch --array=0-62 slurm/study.sh direction                # the same by hand
#   sbatch --array=0-62 --gres=gpu:1 --ntasks-per-node=1 slurm/study.sh my/study.yaml --out runs/mine
#   SLURM=0 bash slurm/study.sh direction-small --parallel 2    # without SLURM: head-schedules study run
#
# Task n runs number n of head-schedules study list STUDY; a run keeps its number (tasks.txt in the
# study's folder).
# It continues when its task is submitted again: first cancel an array that is still queued with the same
# runs.
#SBATCH --job-name=study
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=24:00:00
##SBATCH --partition=
##SBATCH --account=
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.log
set -euo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -f slurm/launch.sh ]; then
    echo "error: --chdir: $PWD is not the repository; submit from there, or give --chdir=REPOSITORY" >&2
    exit 2
fi
. slurm/launch.sh

if [ $# = 0 ]; then
    echo "error: study: none given; give a name, a YAML file or a folder;" \
        "head-schedules study list names some" >&2
    exit 2
fi
activate
if [ "${SLURM:-1}" = 0 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    if [ "${SLURM:-1}" != 0 ]; then
        echo "error: SLURM: this is not a job; submit it: head-schedules study run $1 --slurm," \
            "or run it here: SLURM=0 bash slurm/study.sh $1" >&2
        exit 2
    fi
    exec python -m pretrain.study run "$@"
fi
dry_run=() study=()
for argument in "$@"; do
    if [ "$argument" = --dry_run ]; then dry_run=(--dry_run); else study+=("$argument"); fi
done
tasks=${SLURM_NTASKS:-$((${SLURM_JOB_NUM_NODES:-1} * ${SLURM_NTASKS_PER_NODE:-1}))}
# Three lines: the ds_config, a recipe with everything else, and how many of the tasks can share the run's
# batch.
files=$(run_once python -m pretrain.study task "${study[@]}" "${SLURM_ARRAY_TASK_ID:-only}" --ranks "$tasks")
{ read -r ds_config && read -r recipe && read -r ranks; } <<<"$files"
if [ "$ranks" -lt "$tasks" ]; then
    echo "ranks    $ranks of the job's $tasks tasks: the batch has no more to share"
    unset SLURM_NTASKS_PER_NODE
    export SLURM_NTASKS=$ranks SLURM_NPROCS=$ranks # what srun takes its number of tasks from
fi
failed_for_good() { # REASON: study list prints it, and study run takes a pilot that diverged as tried
    local name=${recipe##*/}
    echo "job $(job_name) $1" >"${recipe%/configs/*}/logs/${name%.yaml}.failed" || true
}
launch pretrain/main.py --ds_config "$ds_config" --config "$recipe" "${dry_run[@]}"
