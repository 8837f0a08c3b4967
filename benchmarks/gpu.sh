#!/usr/bin/env bash
# Everything that needs a GPU, in order of value, each part under nine minutes on one H100 or H200:
#
#   benchmarks/gpu.sh OUT                  all parts that OUT does not hold yet
#   benchmarks/gpu.sh OUT --only speed124m one part; see the list at the end
#   SHAPES=small benchmarks/gpu.sh OUT     a rehearsal of the speeds on a CPU
#
# A part writes OUT/PART.log and, when it ends well, OUT/PART.done, so an interrupted call goes on. PYTHON chooses the
# interpreter, DATA the folder of corpora (the built-in one is prepared at the first speed), NANOGPT a checkout of it.
set -u -o pipefail
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
out=$1; shift
only=
if [ "${1-}" = --only ]; then only=${2-}; fi
python=${PYTHON:-python3}
data=${DATA:-data}
mkdir -p "$out"
failed=0

part() { # NAME COMMAND…
    local name=$1; shift
    if [ -n "$only" ] && [ "$only" != "$name" ]; then return; fi
    if [ -e "$out/$name.done" ] && [ -z "$only" ]; then echo "$name: done before"; return; fi
    known=1
    echo "$name: $*"
    local began=$SECONDS
    if timeout 540 "$@" > "$out/$name.log" 2>&1; then
        touch "$out/$name.done"
        echo "$name: $((SECONDS - began)) s, $out/$name.log"
    else
        echo "$name: failed with status $? after $((SECONDS - began)) s; the end of $out/$name.log:"
        tail -n 15 "$out/$name.log"
        failed=1
    fi
}

speed() { # SHAPE CONTENDERS…
    local shape=$1; shift
    local checkout=()
    if [ -n "${NANOGPT-}" ]; then checkout=(--nanogpt "$NANOGPT"); set -- "$@" nanogpt-compiled; fi
    part "speed$shape" "$python" benchmarks/throughput.py --shape "$shape" --rounds 2 --data_root "$data" \
        "${checkout[@]}" --out "$out/speed$shape.json" --contenders "$@" products
}

known=0
part machine sh -c "nvidia-smi; $python -c 'import torch, deepspeed; print(torch.__version__, deepspeed.__version__)'"
part tests "$python" -m pytest -q -rs -p no:cacheprovider tests/scenarios/test_cuda_model.py \
    tests/scenarios/test_cuda_training.py tests/model/test_documents.py::test_on_a_gpu
for shape in ${SHAPES:-124m 354m 757m}; do
    speed "$shape" ours ours-compiled llama-compiled
done
for shape in ${SHAPES:-124m}; do
    part "schedules$shape" "$python" benchmarks/throughput.py --shape "$shape" --rounds 3 --data_root "$data" \
        --out "$out/schedules$shape.json" --contenders prism uniform
    part "profile$shape" "$python" benchmarks/profile_step.py --shape "$shape" --data_root "$data" --compile auto
done
part memory "$python" benchmarks/memory.py --data_parallel 1
if [ -n "$only" ] && [ "$known" = 0 ]; then
    echo "error: --only: $only is unknown; valid: machine, tests, speed124m, speed354m, speed757m, schedules124m," \
        "profile124m, memory" >&2
    exit 2
fi
exit $failed
