#!/usr/bin/env bash
# Everything that needs a GPU, in order of value, each part under nine minutes on one H100 or H200:
#
#   benchmarks/gpu.sh OUT                all parts that OUT does not hold yet
#   benchmarks/gpu.sh OUT --only PART    that part, also if it is done
#   REHEARSE=1 benchmarks/gpu.sh OUT     the same commands on tiny shapes, here: without a GPU, ten minutes
#
# A part writes OUT/PART.log, its results to OUT/PART.json and, when it ends well, OUT/PART.done, so an
# interrupted call can be repeated; OUT/parts.jsonl has the status and the seconds of every try. A part whose
# Python packages are missing names them. No network is needed: the text is the standard library of Python.
# PYTHON chooses that, DATA the folder of corpora, NANOGPT a checkout of nanoGPT. LIMIT=570 ends the call
# after that many seconds, before something else would: no part is begun that has less than a minute, and one
# that is cut off reports it.
set -u -o pipefail
usage=$(sed -n '2,/^set/s/^# \{0,1\}//p' "$0")
out=${1-} only=
case $out in '' | -*) echo "$usage" >&2; exit 2 ;; esac
if [ $# -gt 1 ]; then
    if [ "$2" != --only ] || [ $# -ne 3 ] || [ -z "$3" ]; then
        echo "error: ${*:2}: not valid; give nothing or --only PART after OUT" >&2
        exit 2
    fi
    only=$3
fi
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
data=${DATA:+$(realpath -m "$DATA")}
nanogpt=${NANOGPT:+$(realpath -m "$NANOGPT")}
cd "$(dirname "$0")/.." || exit 2
data=${data:-$PWD/data}
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "error: PYTHON: no program $python; name one" >&2; exit 2; }
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

done=done shapes="124m 354m 757m" stages="1 2 3" rounds=2 more_rounds=3 vocabulary=50257 device=cuda
wide=() head=(--dtype bf16 --tokens 16384 --vocabulary 50304 --width 768)
memory=(--data_parallel 1) rates=()
large=(--model prism-124m --micro_batch 16 --precisions bf16 --data_parallel 1)
if [ -n "${REHEARSE-}" ]; then
    done=rehearsed shapes=rehearsal stages=2 rounds=1 more_rounds=1 vocabulary=512 device=cpu
    head=(--dtype bf16 --tokens 64 --vocabulary 512 --width 48)
    wide=(--width 48 --batch 2 --length 64 --head_dims 8 24)
    rates=(--device cpu --widths 48 --batch 2 --length 64 --head_dims 8 24 --megabytes 1)
    memory=(--data_parallel 1 --stages 2 --precisions fp32 --checkpointing 0 --micro_batch 1)
    large=(--model prism-nano --micro_batch 2 --stages 2 --precisions bf16 --data_parallel 1)
fi
light="torch pydantic psutil numpy xxhash yaml"
trainer="torch deepspeed pydantic hjson einops msgpack packaging psutil tqdm docstring_parser yaml
    numpy xxhash safetensors sentencepiece"

missing() { # PACKAGES…: those that are not installed
    "$python" -c 'import sys; from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if not find_spec(name)])' "$@"
}

names=() listing=1 failed=0
part() { # NAME PACKAGES COMMAND…
    local name=$1 packages=$2 absent began allowed status=0
    shift 2
    if [ -n "$listing" ]; then names+=("$name"); return; fi
    if [ -n "$only" ] && [ "$only" != "$name" ]; then return; fi
    if [ -e "$out/$name.$done" ] && [ -z "$only" ]; then echo "$name: done before"; return; fi
    # shellcheck disable=SC2086 - a list of names
    absent=$(missing $packages)
    if [ -n "$absent" ]; then echo "$name: cannot run: not installed: $absent"; failed=1; return; fi
    allowed=${TIMEOUT:-540}
    if [ -n "${LIMIT-}" ] && [ "$allowed" -gt $((LIMIT - SECONDS - 20)) ]; then
        allowed=$((LIMIT - SECONDS - 20)) # and 20 to end
        if [ "$allowed" -lt 60 ]; then echo "$name: not begun: LIMIT is near"; failed=1; return; fi
    fi
    echo "$name: $*"
    began=$SECONDS
    # As Ctrl-C, so that tests end the processes that they started.
    timeout --signal INT --kill-after 20 "$allowed" "$@" > "$out/$name.log" 2>&1 || status=$?
    echo "{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - began))}" >> "$out/parts.jsonl"
    if [ "$status" = 0 ]; then
        touch "$out/$name.$done"
        echo "$name: $((SECONDS - began)) s, $out/$name.log"
    else
        echo "$name: failed with status $status after $((SECONDS - began)) s; the end of $out/$name.log:"
        tail -n 15 "$out/$name.log"
        failed=1
    fi
}

tests() { # NAME ARGUMENTS OF PYTEST…; a run's end draws its curves
    part "$1" "$trainer pytest matplotlib ${needs-}" env "DS_ACCELERATOR=$device" "$python" -m pytest -q -rs \
        -p no:cacheprovider "${@:2}"
}

speed() { # NAME SHAPE ROUNDS CONTENDERS…
    part "$1" "$trainer" "$python" benchmarks/throughput.py --shape "$2" --rounds "$3" --data_root "$data" \
        --out "$out/$1.json" ${nanogpt:+--nanogpt "$nanogpt"} --contenders "${@:4}"
}

peers=${nanogpt:+nanogpt-compiled}
if [ -z "$(missing transformers)" ]; then peers="llama-compiled $peers"; fi

parts() { # in order of value
    local shape stage first=${shapes%% *}
    part machine "$light" "$python" benchmarks/machine.py --out "$out/machine.json"
    part rates "$light" "$python" benchmarks/rates.py "${rates[@]}" --out "$out/rates.json"
    # Less than half of ten minutes, also if a kernel hangs.
    TIMEOUT=${TIMEOUT:-200} tests tests tests/scenarios/test_cuda_model.py tests/model/test_documents.py::test_on_a_gpu \
        tests/model/test_kernels.py::test_torch_chooses_as_the_table_says
    part corpus "$trainer" "$python" -c "import sys; from pretrain.prepare.builtin import prepare_builtin
print(prepare_builtin(sys.argv[1], int(sys.argv[2])))" "$data" "$vocabulary"
    # shellcheck disable=SC2086 - a list of contenders
    speed "speed-$first" "$first" "$rounds" ours ours-compiled $peers products
    speed "schedules-$first" "$first" "$more_rounds" uniform prism config7
    part wide-heads "$light" "$python" benchmarks/wide_heads.py "${wide[@]}" --out "$out/wide-heads.json"
    part head-loss "$light" "$python" benchmarks/kernels.py lm_head --device "$device" "${head[@]}" \
        --out "$out/head-loss.json"
    tests training tests/scenarios/test_cuda_training.py -k "not continued and not grow"
    for stage in false-2 true-2 false-3; do # compiled or not, ZeRO stage
        needs=scipy tests "growing-$stage" tests/scenarios/test_cuda_training.py -k "grow and $stage"
    done
    part memory "$trainer" "$python" benchmarks/memory.py "${memory[@]}" --out "$out/memory.json"
    part "memory-$first" "$trainer" "$python" benchmarks/memory.py "${large[@]}" \
        --out "$out/memory-$first.json"
    for compiled in false true; do
        part "profile-$first-compile-$compiled" "$trainer" "$python" benchmarks/profile_step.py \
            --shape "$first" --out "$out/profile-$first-compile-$compiled.json" --data_root "$data" \
            --compile "$compiled"
    done
    for shape in ${shapes#"$first"}; do
        # shellcheck disable=SC2086
        speed "speed-$shape" "$shape" "$rounds" ours ours-compiled $peers products
    done
    for stage in $stages; do
        tests "continued-$stage" tests/scenarios/test_cuda_training.py \
            -k "continued and ($stage-fp32 or $stage-bf16)"
    done
    for shape in ${shapes#"$first"}; do
        speed "schedules-$shape" "$shape" "$rounds" uniform prism
    done
}

parts
listing=
if [ -n "$only" ] && [[ " ${names[*]} " != *" $only "* ]]; then
    echo "error: --only: $only is not valid; valid: ${names[*]}" >&2
    exit 2
fi
case $peers in *llama*) ;; *) echo "speed-*: without transformers' Llama: not installed: transformers" ;; esac
parts
exit $failed
