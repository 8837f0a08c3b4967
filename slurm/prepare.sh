#!/usr/bin/env bash
# Tokenize a corpus over an array of tasks; the task that is done last makes the folder.
#
#   sbatch --array=0-15 slurm/prepare.sh --dataset HuggingFaceFW/fineweb --subset sample-10BT \
#       --tokenizer gpt2 --out data/fineweb
#
# Submit it from the repository, on a file system that all nodes share. Arguments are those of
# head-schedules prepare. Tasks that failed or were preempted are simply submitted again, all of them or
# fewer numbers, but without gaps (0-3): what is finished is not done twice. With --dry_run it says what would
# run.
#SBATCH --job-name=prepare
#SBATCH --array=0-15
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=1G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-prepare-%A_%a.log
set -euo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -f slurm/launch.sh ]; then
    echo "error: --chdir: $PWD is not the repository; submit from there, or give --chdir=REPOSITORY" >&2
    exit 2
fi
. slurm/launch.sh
CONTAINER='' activate # it runs outside of the container of the trainings: with .venv, or VENV=/path
tasks=${SLURM_ARRAY_TASK_COUNT:-1}
if [ "$tasks" -gt 1 ] && [ $((SLURM_ARRAY_TASK_MAX - SLURM_ARRAY_TASK_MIN + 1)) != "$tasks" ]; then
    echo "error: --array: $SLURM_ARRAY_TASK_MIN to $SLURM_ARRAY_TASK_MAX with gaps is not valid; give as" \
        "many numbers in a row, such as --array=0-$((tasks - 1)): each task does a share" >&2
    exit 2
fi
share=$((${SLURM_ARRAY_TASK_ID:-0} - ${SLURM_ARRAY_TASK_MIN:-0}))
dry_run=0
arguments=()
for argument in "$@"; do
    if [ "$argument" = --dry_run ]; then dry_run=1; else arguments+=("$argument"); fi
done
command=(python -m pretrain.prepare "${arguments[@]}" --shard "$share/$tasks")
if [ "$dry_run" = 1 ]; then
    show "${command[@]}"
    exit
fi
exec "${command[@]}"
