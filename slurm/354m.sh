#!/usr/bin/env bash
# Pretrain at the 354m scale: the recipe's hyperparameters, prism-354m unless another --model is given.
#
#   sbatch slurm/354m.sh                                        # arguments are those of pretrain/main.py
#   sbatch slurm/354m.sh --model uniform-354m --seed 2
#   sbatch --nodes=4 slurm/354m.sh                             # options of sbatch override the lines below
#   sbatch --gres=none --ntasks-per-node=1 slurm/354m.sh        # nodes without GPUs
#   SLURM=0 bash slurm/354m.sh --dry_run                        # what would run
#
# Submit it from the repository, on a file system that all nodes share; prepare the data first:
# docs/cluster.md.
#SBATCH --job-name=354m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=24:00:00
##SBATCH --partition=
##SBATCH --account=
# So long before the time limit the ranks are told to save, and the job is requeued.
#SBATCH --signal=USR1@300
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
launch pretrain/main.py --ds_config ds_configs/zero2.json --config 354m --data "${DATA:-data/fineweb}" "$@"
