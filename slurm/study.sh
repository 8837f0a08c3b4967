#!/usr/bin/env bash
# Many runs of one recipe: every model with every seed, one array task each.
#
#   sbatch --array=0-5 slurm/study.sh --models prism-124m,uniform-124m --seeds 1,2,3 --config 124m
#   SLURM=0 bash slurm/study.sh --models … --seeds …            # without SLURM: one after the other
#
# Task n runs model n / seeds with seed n % seeds; other arguments are those of pretrain/main.py. Every run has its own
# folder, and continues when its task is submitted again. python -m pretrain.plots runs/A runs/B … draws them together.
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
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
. slurm/launch.sh

models=() seeds=(1) rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --models | --seeds)
            if [ -z "${2:-}" ]; then
                echo "error: $1: no value given; give names with commas between them" >&2
                exit 2
            fi
            if [ "$1" = --models ]; then IFS=, read -ra models <<<"$2"; else IFS=, read -ra seeds <<<"$2"; fi
            shift
            ;;
        *) rest+=("$1") ;;
    esac
    shift
done
runs=$((${#models[@]} * ${#seeds[@]}))
if [ "$runs" = 0 ]; then
    echo "error: models: none given; give --models NAME,NAME (python -m model.presets lists them) and --seeds N,N" >&2
    exit 2
fi
run_task() {
    launch pretrain/main.py --ds_config ds_configs/zero2.json \
        --model "${models[$1 / ${#seeds[@]}]}" --seed "${seeds[$1 % ${#seeds[@]}]}" "${rest[@]}"
}
if [ "${SLURM:-1}" = 0 ]; then
    for ((task = 0; task < runs; task++)); do (run_task "$task"); done
    exit
fi
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ] && [ "$runs" -gt 1 ]; then
    echo "error: array: this is one job for $runs runs (${#models[@]} models x ${#seeds[@]} seeds); submit it with --array=0-$((runs - 1))" >&2
    exit 2
fi
task=${SLURM_ARRAY_TASK_ID:-0}
if [ "$task" -ge "$runs" ]; then
    echo "error: array: task $task is beyond the $runs runs of ${#models[@]} models and ${#seeds[@]} seeds; valid: --array=0-$((runs - 1))" >&2
    exit 2
fi
run_task "$task"
