#!/usr/bin/env bash
# Zero-shot scores of a run or an exported folder, its requests shared among the tasks of one node.
#
#   sbatch slurm/evaluate.sh runs/NAME --tasks hellaswag,piqa,winogrande,arc_easy,blimp,wikitext \
#       --data_dir data/zero_shot
#   sbatch slurm/evaluate.sh --follow runs/NAME --tasks hellaswag,piqa --data_dir data/zero_shot
#
# The second line scores each new checkpoint of a run that trains in another job, and ends with the run, or
# when no process has trained it for --follow_timeout seconds.
# Arguments are those of head-schedules evaluate. Compute nodes without internet need --data_dir:
# docs/cluster.md.
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=04:00:00
##SBATCH --partition=
##SBATCH --account=
# Ahead of the time limit --follow stops, and the job is requeued; without it the signal is ignored.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail
[ -n "${SLURM_JOB_ID:-}" ] || cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -f slurm/launch.sh ]; then
    echo "error: --chdir: $PWD is not the repository; submit from there, or give --chdir=REPOSITORY" >&2
    exit 2
fi
. slurm/launch.sh
launch pretrain.evaluation "$@"
