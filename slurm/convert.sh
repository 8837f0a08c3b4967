#!/usr/bin/env bash
# A checkpoint to Hugging Face format: one task, no GPU, memory of about one fp32 copy of the weights.
#
#   sbatch slurm/convert.sh runs/NAME --out hf/NAME
#
# Arguments are those of head-schedules convert.
#SBATCH --job-name=convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=01:00:00
##SBATCH --partition=
##SBATCH --account=
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
launch pretrain.convert "$@"
